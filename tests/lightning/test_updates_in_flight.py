import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn

from roundpipe_lightning.emulation.race_checker import HOST, ProtocolChecker
from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.engine.store.flat_buffers import NarrowCopies
from roundpipe_lightning.engine.update.partial_step import CapturedStep
from roundpipe_lightning.engine.update.updater import Updater, UpdateUnit
from roundpipe_lightning.optim import HostAdamW
from roundpipe_lightning.strategy import runtime
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.moments import PATIENCE_SECONDS, ObservedBlock
from tests.kit.training import (
    WIDTH,
    Regressor,
    make_trainer,
    parameter_error,
    regression_data,
    same_bits,
)
from tests.lightning.test_batches_in_flight import NUM_MICROBATCHES, NUM_WORKERS, PARTITION

pytestmark = pytest.mark.usefixtures("steps_of_microbatches")

LOOKS = LambdaCallback(on_after_backward=lambda *_: None)
"""Looks at gradients: every batch is waited for."""


class Scheduled(Regressor):
    """A layer before the blocks, two groups that do not follow them, and a changing rate."""

    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW

    def __init__(self, *, on_backward: Callable[[], None] = lambda: None, **options: Any) -> None:
        super().__init__("adamw", **options)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers[0] = first = ObservedBlock()
        first.on_backward = on_backward

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embed(x))

    def configure_optimizers(self) -> Any:
        members = list(self.parameters())
        groups: list[Any] = [{"params": members[::2]}, {"params": members[1::2], "lr": 0.02}]
        optimizer = type(self).kind(groups, lr=0.01)
        rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


class Watched:
    """Counts deferred steps, and declares what the updater does to the checker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_deferred = 0
        self.run: Callable[[UpdateUnit, CapturedStep], None] = lambda unit, step: step.run(
            unit.parameters
        )
        self.checker = ProtocolChecker()
        defer = Updater.defer

        def counted(updater: Updater, optimizer: torch.optim.Optimizer) -> None:
            self.num_deferred += 1
            defer(updater, optimizer)

        cast, copy = NarrowCopies.cast, Updater._copy

        def casts(copies: NarrowCopies, values: Mapping[nn.Parameter, Tensor]) -> None:
            self._written([copies._places[p] for p in values if p in copies._places], "a cast")
            cast(copies, values)

        def copies(updater: Updater, units: Sequence[UpdateUnit], *then: Any) -> None:
            kept = updater.store.previous
            self._written([kept[p] for unit in units for p in unit.parameters if p in kept], "keep")
            copy(updater, units, *then)

        monkeypatch.setattr(NarrowCopies, "cast", casts)
        monkeypatch.setattr(Updater, "_copy", copies)
        monkeypatch.setattr(Updater, "defer", counted)
        monkeypatch.setattr(runtime, "Updater", partial(Updater, run_unit=self.run_unit))

    def run_unit(self, unit: UpdateUnit, step: CapturedStep) -> None:
        self._written(unit.parameters, "an update")
        self.run(unit, step)

    def _written(self, tensors: Iterable[Tensor], what: str) -> None:
        for tensor in tensors:
            self.checker.access(tensor.detach(), line=HOST, writes=True, what=what)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def fit(
    *callbacks: Callback,
    watched: Watched,
    module: LightningModule | None = None,
    num_batches: int = 6,
    resume: Path | None = None,
    validates: bool = False,
    upload_dtype: Any = None,
    dropout: float = 0.0,
    **flags: Any,
) -> tuple[Any, Trainer]:
    torch.manual_seed(0)
    module = Scheduled(dropout=dropout) if module is None else module
    with EmulatedServer(NUM_WORKERS, checker=watched.checker, poison=True) as server:
        strategy = EmulatedStrategy(
            devices=server.devices,
            num_microbatches=NUM_MICROBATCHES,
            hints=PARTITION,
            update="async",
            timeout_seconds=PATIENCE_SECONDS,
            dry_run=False,
            upload_dtype=upload_dtype,
        )
        trainer = make_trainer(
            strategy=strategy,
            devices=NUM_WORKERS,
            callbacks=list(callbacks),
            **{"max_epochs": 1, **flags},
        )
        data = regression_data(num_samples=4 * num_batches, batch_size=4)
        trainer.fit(module, data, data if validates else None, ckpt_path=resume)
    return module, trainer


BY_NORM: Any = {"gradient_clip_val": 0.05}
BY_VALUE: Any = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
NARROW: Any = {"precision": "bf16-mixed", "upload_dtype": "bf16"}
WAYS: dict[str, Any] = {
    "plainly": {},
    "clipped by norm": BY_NORM,
    "clipped by value": BY_VALUE,
    "dropping out": {"dropout": 0.3},
    "uploads of 16 bits": NARROW,
    "uploads of 16 bits, clipped": {**NARROW, **BY_NORM},
}


@pytest.mark.suite("plainly", "uploads of 16 bits, clipped")
@pytest.mark.parametrize("name", ["plainly", "dropping out", "uploads of 16 bits, clipped"])
def test_the_next_step_begins_before_the_backward_pass_ends(watched: Watched, name: str) -> None:
    flags = WAYS[name]
    begun, is_second = threading.Event(), threading.Event()
    order: list[str] = []

    def on_step(view: Any, batch: Any, index: int) -> None:
        if index == 1:
            is_second.set()
        elif index == 2:
            order.append("forward of the third step")
            begun.set()

    def on_backward() -> None:
        if is_second.is_set():
            assert begun.wait(PATIENCE_SECONDS / 2), "the third step has not begun"
            order.append("backward of the second step, or later")

    torch.manual_seed(0)
    module = Scheduled(on_backward=on_backward, on_step=on_step, dropout=flags.get("dropout", 0.0))
    found, trainer = fit(watched=watched, module=module, **flags)
    assert order[0] == "forward of the third step"
    assert watched.num_deferred == 5  # the first step of an engine is waited for
    wanted, plain = fit(LOOKS, watched=watched, **flags)
    assert watched.num_deferred == 5
    assert same_bits(found, wanted)
    assert trainer.logged_metrics == plain.logged_metrics


def clip(module: nn.Module, flags: dict[str, Any]) -> None:
    """Do what the Trainer does with these flags."""
    limit = flags.get("gradient_clip_val")
    if limit is None:
        return
    clips = nn.utils.clip_grad_value_ if len(flags) > 1 else nn.utils.clip_grad_norm_
    before = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    clips(module.parameters(), limit)
    after = [p.grad for p in module.parameters() if p.grad is not None]
    assert not all(map(torch.equal, before, after)), "it makes a difference"


def plainly_stale(
    num_steps: int, *, window: int = 1, flags: dict[str, Any] | None = None
) -> Scheduled:
    """Train in a plain loop, with gradients at the parameters of one update ago."""
    torch.manual_seed(0)
    module, older = Scheduled(), Scheduled()
    older.load_state_dict(module.state_dict())
    (optimizer,), (schedule,) = module.configure_optimizers()
    batches = list(regression_data(num_samples=4 * num_steps * window, batch_size=4))
    for step in range(num_steps):
        sums = [torch.zeros_like(p) for p in older.parameters()]
        for x, y in batches[step * window : (step + 1) * window]:
            loss = torch.nn.functional.mse_loss(older(x), y) / window
            found = torch.autograd.grad(loss, list(older.parameters()))
            sums = [a + b for a, b in zip(sums, found, strict=True)]
        older.load_state_dict(module.state_dict())
        for parameter, gradient in zip(module.parameters(), sums, strict=True):
            parameter.grad = gradient
        clip(module, flags or {})
        optimizer.step()
        schedule["scheduler"].step()
    return module


@pytest.mark.suite("2-plainly", "1-dropping out", "1-uploads of 16 bits, clipped")
@pytest.mark.parametrize(
    ("window", "name"),
    [*((1, name) for name in WAYS), (2, "plainly")],
)
def test_steps_are_exactly_one_update_stale(watched: Watched, window: int, name: str) -> None:
    flags = WAYS[name]
    given: Any = {"num_batches": 4 * window, "accumulate_grad_batches": window, **flags}
    found, _ = fit(watched=watched, **given)
    assert watched.num_deferred == 3
    given.pop("upload_dtype", None)  # autocast rounds, too, where it computes
    wanted, _ = fit(LOOKS, watched=watched, **given)
    assert watched.num_deferred == 3
    assert same_bits(found, wanted)
    if not {"precision", "dropout"} & flags.keys():
        assert parameter_error(found, plainly_stale(4, window=window, flags=flags)) < 1e-4
    assert watched.checker.num_accesses > 0


def test_with_validation_in_between_and_a_shorter_window(watched: Watched) -> None:
    flags: Any = {
        "num_batches": 7,
        "accumulate_grad_batches": 2,
        "validates": True,
        "val_check_interval": 3,
        "limit_val_batches": 1,
    }
    found, trainer = fit(watched=watched, **flags)
    assert watched.num_deferred == 3
    wanted, plain = fit(LOOKS, watched=watched, **flags)
    assert same_bits(found, wanted)
    assert trainer.callback_metrics == plain.callback_metrics


def test_one_step_in_so_many_is_waited_for(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "_MOST_OVERLAPPED", 2)
    fit(watched=watched, num_batches=8)
    assert watched.num_deferred == 8 - 3  # of batches 0, 3 and 6 nothing is deferred


def test_a_tied_embedding(watched: Watched) -> None:
    modules = []
    for callbacks in ((), (LOOKS,)):
        torch.manual_seed(0)
        module: Any = Scheduled()
        module.layers[2].inner.weight = module.layers[1].inner.weight
        module.layers[3].outer.bias = module.embed.bias
        modules.append(fit(*callbacks, watched=watched, module=module, num_batches=4)[0])
    assert watched.num_deferred == 3
    assert same_bits(*modules)


@pytest.mark.parametrize("step", [2, 5])
def test_an_error_of_a_backward_pass_in_flight_is_raised(watched: Watched, step: int) -> None:
    num_backwards = count()  # one worker makes all backward passes of this block

    def on_backward() -> None:
        if next(num_backwards) == step * NUM_MICROBATCHES:
            raise ValueError("the backward pass has failed")

    torch.manual_seed(0)
    module = Scheduled(on_backward=on_backward)
    with pytest.raises(ValueError, match="the backward pass has failed") as caught:
        fit(watched=watched, module=module)
    assert "layers.0" in str(vars(caught.value)["__notes__"])
    assert not [t for t in threading.enumerate() if t.name == "roundpipe-updates"]


def test_an_error_of_an_update_is_raised_once(watched: Watched) -> None:
    made = count()

    def run(unit: UpdateUnit, step: CapturedStep) -> None:
        if unit.name == "layers.1" and next(made) == 1:
            raise OSError("the disk is full")
        step.run(unit.parameters)

    watched.run = run
    with pytest.raises(OSError, match="the disk is full") as caught:
        fit(watched=watched)
    assert vars(caught.value)["__notes__"] == ["This happened while AdamW updated 'layers.1'."]


class Halves(Callback):
    """Writes to a parameter, in a way that PyTorch does not see."""

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        weight = module.get_parameter("layers.1.inner.weight")
        weight.data = weight.data.mul_(0.5)


def test_what_a_hook_has_written_is_uploaded(watched: Watched) -> None:
    flags: Any = {
        **NARROW,
        "num_batches": 7,
        "validates": True,
        "val_check_interval": 3,
        "limit_val_batches": 1,
    }
    found, _ = fit(Halves(), watched=watched, **flags)
    assert watched.num_deferred == 4  # after it has looked one is waited for
    flags["upload_dtype"] = None
    wanted, _ = fit(Halves(), LOOKS, watched=watched, **flags)
    assert watched.num_deferred == 4
    assert same_bits(found, wanted)


class HostScheduled(Scheduled):
    """With an optimizer that writes the copies in the pass that makes its step."""

    kind = HostAdamW


@pytest.mark.suite("clipped")
@pytest.mark.parametrize("flags", [NARROW, {**NARROW, **BY_NORM}], ids=["plainly", "clipped"])
def test_an_optimizer_that_writes_what_is_uploaded(watched: Watched, flags: dict[str, Any]) -> None:
    modules = []
    for callbacks in ((), (LOOKS,)):
        torch.manual_seed(0)
        modules.append(fit(*callbacks, watched=watched, module=HostScheduled(), **flags)[0])
        assert watched.num_deferred == 5
        flags = {**flags, "upload_dtype": None}
    assert same_bits(*modules)


@pytest.mark.suite("clipped, 16 bits")
@pytest.mark.parametrize("flags", [{}, {**NARROW, **BY_NORM}], ids=["plainly", "clipped, 16 bits"])
def test_a_checkpoint_and_a_resume_change_no_bit(
    tmp_path: Path, watched: Watched, flags: dict[str, Any]
) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=3, save_top_k=-1)
    whole, _ = fit(saving, watched=watched, enable_checkpointing=True, **flags)
    plain, _ = fit(LOOKS, watched=watched, **flags)
    assert watched.num_deferred == 4  # the one after a checkpoint is waited for
    assert same_bits(whole, plain)
    (written,) = (tmp_path / "saved").glob("*step=3.ckpt")
    torch.manual_seed(1)
    again = ModelCheckpoint(tmp_path / "again", every_n_train_steps=3, save_top_k=-1)
    resumed, _ = fit(
        again,
        watched=watched,
        module=Scheduled(),
        resume=written,
        enable_checkpointing=True,
        **flags,
    )
    assert watched.num_deferred > 4
    assert same_bits(resumed, whole)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_where_every_batch_is_waited_for(watched: Watched) -> None:
    fit(watched=watched, num_batches=3, detect_anomaly=True)
    assert not watched.num_deferred
    trainer = make_trainer(
        strategy=RoundPipeStrategy(num_microbatches=2, update="async", dry_run=False),
        devices=2,
        max_steps=3,
    )
    trainer.fit(Scheduled(), regression_data())
    assert not watched.num_deferred


class _Zeroes(Scheduled):
    """Keeps the memory of its gradients, and sets it to zero for every window."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("requires_sync", [True, False])
def test_gradients_that_are_zeroed_in_place(watched: Watched, requires_sync: bool) -> None:
    def run(unit: UpdateUnit, step: CapturedStep) -> None:
        time.sleep(0.01)
        step.run(unit.parameters)

    watched.run = run
    torch.manual_seed(0)
    kind = type("Zeroes", (_Zeroes,), {**vars(_Zeroes), "requires_optimizer_sync": requires_sync})
    flags: Any = {"num_batches": 8, "accumulate_grad_batches": 2}
    found, _ = fit(watched=watched, module=kind(), **flags)
    assert bool(watched.num_deferred) is not requires_sync
    assert parameter_error(found, plainly_stale(4, window=2)) < 1e-4
