from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from roundpipe_lightning import optim
from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.transfer.copy_queue import TransferQueue
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.work.work_profile import parameter_work
from roundpipe_lightning.planning.cost.device_memory import MemoryKind
from roundpipe_lightning.planning.cost.memory import MemoryModel
from roundpipe_lightning.planning.model.hardware import load_hardware
from roundpipe_lightning.planning.model.work import MicrobatchShape, size_model
from roundpipe_lightning.strategy.planning.inputs import TransferSizes, storage_of
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.strategy.updates.optimizer_sync import all_finite
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.plans import default_plan
from tests.kit.training import (
    VOCABULARY,
    WIDTH,
    LanguageModel,
    PaddedSequences,
    Regressor,
    make_trainer,
    regression_data,
    same_bits,
    train_alike,
)


class _Chosen(Regressor):
    def __init__(self, make: Any) -> None:
        super().__init__(num_blocks=2)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), lr=0.01)


class _Watched(_Chosen):
    def __init__(self, make: Any) -> None:
        super().__init__(make)
        self.gradients: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        named = {n: p.grad.clone() for n, p in self.named_parameters() if p.grad is not None}
        self.gradients.append(named)


class _Clips(Callback):
    """Writes to weights in a way that PyTorch does not count."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for layer in pl_module.layers:
            layer.inner.weight.data.clamp_(-0.2, 0.2)


def train(strategy: Any, make: Any, kind: Any = _Chosen, **flags: Any) -> tuple[Any, Any]:
    seed_everything(3, verbose=False)
    module = kind(make)
    trainer = make_trainer(strategy=strategy, **{"max_epochs": 1, **flags})
    trainer.fit(module, regression_data(16, batch_size=4), regression_data(9))
    return module, trainer


@pytest.fixture
def uploaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes, by the upload queue that was closed."""
    found: list[int] = []
    close = TransferQueue.close

    def count(queue: TransferQueue) -> None:
        close(queue)
        found.extend([queue.num_bytes] * ("upload" in queue.name))

    monkeypatch.setattr(TransferQueue, "close", count)
    return found


@pytest.mark.long("AdamW-exact-callbacks0", "HostAdamW-exact-callbacks2")
@pytest.mark.parametrize(
    ("make", "update", "callbacks"),
    [
        (torch.optim.AdamW, "exact", []),
        (torch.optim.AdamW, "async", []),
        (optim.HostAdamW, "exact", []),
        (optim.HostAdamW, "exact", [_Clips()]),
        (optim.HostAdamW, "async", []),
    ],
)
def test_uploads_of_half_the_bytes_train_the_same(
    make: Any, update: str, callbacks: Any, uploaded: list[int]
) -> None:
    modules = []
    for options in ({"upload_dtype": None}, {}):
        strategy = EmulatedStrategy(num_microbatches=2, dry_run=False, update=update, **options)
        module, _ = train(strategy, make, precision="bf16-mixed", callbacks=callbacks, devices=2)
        modules.append(module)
    assert same_bits(modules[1], modules[0])
    assert sum(uploaded[2:]) < 0.75 * sum(uploaded[:2])


@pytest.mark.parametrize("loss", ["eager", "fused"])
def test_an_lm_head_goes_up_in_half_the_bytes(loss: Any, uploaded: list[int]) -> None:
    def make() -> LanguageModel:
        module = LanguageModel("adamw")
        module.layers.requires_grad_(False)  # these go up as they are
        module.head.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 3)
        return module

    first, second = (
        EmulatedStrategy(num_microbatches=2, dry_run=False, loss=loss, upload_dtype=dtype)
        for dtype in (None, "bf16")
    )
    flags: Any = {"precision": "bf16-mixed", "max_epochs": 1, "devices": 1}
    data = DataLoader(PaddedSequences(8), batch_size=4)
    one, _ = train_alike(make, second, first=first, data=data, tolerance=0.0, **flags)
    wide, narrow = uploaded
    head = one.head.weight.nbytes
    assert wide - narrow == 2 * head // 2  # in each of two steps


def test_a_step_that_writes_into_an_lm_head_is_refused_where_it_is_rounded() -> None:
    class Writes(_Chosen):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.no_grad():
                self.head.weight.clamp_(-0.1, 0.1)
            return super().training_step(batch, batch_idx)

    strategy = EmulatedStrategy(
        num_microbatches=2, dry_run=False, microbatching="blocks", upload_dtype="bf16"
    )
    with pytest.raises(
        ConfigurationError, match=r"writes into .* 'head.weight'.*upload_dtype=null"
    ):
        train(strategy, torch.optim.SGD, Writes, precision="bf16-mixed")


def test_nothing_is_copied_on_cpu_workers() -> None:
    modules = [
        train(
            RoundPipeStrategy(num_microbatches=2, dry_run=False, upload_dtype=dtype),
            torch.optim.AdamW,
            precision="bf16-mixed",
        )[0]
        for dtype in (None, "bf16")
    ]
    assert same_bits(modules[1], modules[0])


@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
def test_gradients_of_bf16_parameters_are_summed_over_batches_in_float32(kind: Any) -> None:
    def gradients(sums: str | None, batches: int) -> tuple[Any, list[dict[str, Tensor]]]:
        strategy = kind(num_microbatches=2, dry_run=False, gradient_dtype=sums)
        module, _ = train(
            strategy,
            lambda p, lr: optim.HostAdamW(p, lr=0.0),
            _Watched,
            precision="bf16-true",
            accumulate_grad_batches=batches,
        )
        return module, module.gradients

    _module, (summed,) = gradients("fp32", 4)
    # What each batch gives by itself, a quarter of it, as Lightning scales the loss.
    expected = {name: torch.zeros_like(g) for name, g in summed.items()}
    for each in gradients("fp32", 1)[1]:
        expected = {name: total + each[name] / 4 for name, total in expected.items()}
    narrow = gradients(None, 4)[1][0]
    for name, gradient in summed.items():
        assert torch.equal(gradient, expected[name])
        assert gradient.dtype is torch.float32
        assert narrow[name].dtype is torch.bfloat16
    assert any((narrow[name].float() != gradient).any() for name, gradient in summed.items())


@pytest.mark.parametrize("sums", ["fp32", "bf16"])
def test_sums_are_the_same_on_every_device(sums: str) -> None:
    modules = []
    for kind in (RoundPipeStrategy, EmulatedStrategy):
        strategy = kind(num_microbatches=2, dry_run=False, gradient_dtype=sums)
        precision = "bf16-true" if sums == "fp32" else "bf16-mixed"
        flags: Any = {"precision": precision, "accumulate_grad_batches": 2}
        module, _ = train(strategy, optim.HostAdamW, _Watched, **flags)
        wanted = torch.float32 if sums == "fp32" else torch.bfloat16
        assert {g.dtype for seen in module.gradients for g in seen.values()} == {wanted}
        modules.append(module)
    if sums == "fp32":  # else a device rounds the sum of its microbatches, the host each of them
        assert same_bits(modules[1], modules[0])


def test_a_window_goes_on_with_sums_of_their_dtype(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.fit_loop.epoch_loop.batch_idx == 0:  # in the middle of a window
                assert module.head.weight.grad.dtype is torch.float32
                trainer.save_checkpoint(tmp_path / "inside.ckpt")

    def fit(**resumes: Any) -> Any:
        seed_everything(3, verbose=False)
        module = _Chosen(optim.HostAdamW)
        trainer = make_trainer(
            strategy=RoundPipeStrategy(num_microbatches=2, dry_run=False, gradient_dtype="fp32"),
            precision="bf16-true",
            accumulate_grad_batches=2,
            max_epochs=1,
            callbacks=[] if resumes else [Saves()],
        )
        trainer.fit(module, regression_data(16, batch_size=4), **resumes)
        return module

    whole = fit()
    assert same_bits(fit(ckpt_path=tmp_path / "inside.ckpt"), whole)


def test_parameters_are_put_back() -> None:
    module, _ = train(
        RoundPipeStrategy(num_microbatches=1, dry_run=False, gradient_dtype="fp32"),
        torch.optim.SGD,
        _Watched,
        precision="bf16-true",
        max_steps=1,
    )
    module.zero_grad()
    module.layers[0](torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    assert module.gradients[0]["layers.0.inner.weight"].dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "flags", "make", "message"),
    [
        (
            {"upload_dtype": "int8"},
            {},
            None,
            r"upload_dtype='int8': set 'auto', 'bf16', 'fp16' or None",
        ),
        ({"gradient_dtype": "fp8"}, {}, None, r"gradient_dtype='fp8': set 'fp32', 'bf16' or None"),
        (
            {"upload_dtype": "bf16"},
            {"precision": "32-true"},
            torch.optim.SGD,
            r"upload_dtype='bf16' with precision='32-true'.*Set Trainer\(precision='bf16-mixed'\)",
        ),
        (
            {"gradient_dtype": "fp32"},
            {"precision": "bf16-true"},
            torch.optim.AdamW,
            r"gradient_dtype='fp32': AdamW cannot step with gradients of another dtype.*HostAdamW",
        ),
        (
            {"gradient_dtype": "bf16"},
            {},
            lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
            r"gradient_dtype='bf16': SGD cannot step .*\(its step is another then\)",
        ),
    ],
)
def test_refusals(options: Any, flags: Any, make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        train(RoundPipeStrategy(num_microbatches=1, **options), make, **flags)


def test_any_optimizer_that_is_stepped_in_float32_takes_float32_gradients() -> None:
    strategy = RoundPipeStrategy(
        num_microbatches=1, dry_run=False, gradient_dtype="fp32", stochastic_rounding=True
    )
    module, _ = train(strategy, torch.optim.AdamW, _Watched, precision="bf16-true", max_steps=1)
    assert module.gradients[0]["head.weight"].dtype is torch.float32


def test_the_planner_counts_masters_and_copies() -> None:
    module = _Chosen(torch.optim.AdamW)
    optimizer = torch.optim.AdamW(module.parameters())
    stacks = find_stacks(module, None)
    chain = Chain.from_stacks(stacks)
    work = parameter_work(module, chain)
    hardware = load_hardware("rtx4090x8")
    needs = []
    for dtype in (None, torch.bfloat16):
        sizes = TransferSizes(module, stacks, dtype)
        sized = sizes.resized(work, chain)
        storage = storage_of([optimizer], masters=sizes.narrow)
        shape = MicrobatchShape(sequences=1, seq_len=1)
        model = MemoryModel(work=sized, hardware=hardware, shape=shape, storage=storage)
        plan = default_plan(size_model(sized, shape=shape), num_workers=8, num_microbatches=8)
        needs.append(model.report(plan.layout))
    wide, narrow = needs
    num = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    host = [need.host.of(MemoryKind.WEIGHTS) + need.host.of(MemoryKind.MASTERS) for need in needs]
    assert host[1] - host[0] == 2 * num
    assert narrow.device.of(MemoryKind.WEIGHTS) < wide.device.of(MemoryKind.WEIGHTS)


def test_the_planner_counts_gradients_in_their_dtype() -> None:
    module = _Chosen(None).bfloat16()
    for parameter in module.parameters():
        parameter.grad_dtype = torch.float32
    storage = storage_of([torch.optim.SGD(module.parameters(), lr=0.1)])
    assert storage.gradient_bytes == 4.0
    stacks = find_stacks(module, None)
    chain = Chain.from_stacks(stacks)
    work = parameter_work(module, chain)
    moved = TransferSizes(module, stacks, None).resized(work, chain)
    assert moved.blocks[0].trainable_bytes == 2 * work.blocks[0].trainable_bytes


class _Unseen(torch.optim.Optimizer):
    """Steps in a way that PyTorch does not count, as compiled kernels do, and as a whole."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        self.num_steps += 1  # something that the blocks share
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])
        return loss


def test_steps_that_nobody_sees_reach_the_copies() -> None:
    modules = []
    for dtype in (None, "bf16"):
        strategy = EmulatedStrategy(num_microbatches=2, dry_run=False, upload_dtype=dtype)
        module, _ = train(strategy, _Unseen, precision="bf16-mixed")
        modules.append(module)
    assert same_bits(modules[1], modules[0])


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_finds_one_anywhere(dtype: torch.dtype, value: float) -> None:
    tensor = torch.ones(30, 100, dtype=dtype)
    assert all_finite(tensor)
    tensor[-1, -1] = value
    assert not all_finite(tensor)
    assert not all_finite(tensor.t())


def test_takes_no_memory() -> None:
    tensor = torch.ones(10_000, dtype=torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as profiled:
        assert all_finite(tensor)
    assert max(event.cpu_memory_usage for event in profiled.events()) < 1000


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor([INF, -INF]), False),
        (torch.full((1000,), torch.finfo(torch.float32).max), True),  # the sum overflows
        (torch.empty(0), True),
        (torch.tensor(1.0), True),
        (torch.eye(3).to_sparse(), True),
        (torch.tensor([[0.0, NAN]]).to_sparse(), False),
    ],
)
def test_all_kinds_of_tensors(tensor: Tensor, expected: bool) -> None:
    assert all_finite(tensor) is expected
