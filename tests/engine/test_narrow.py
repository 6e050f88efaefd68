import copy
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.capture.torch_functions import RoundedLeaves
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.steps import StepResult
from roundpipe_lightning.engine.store.block_layout import Layouts
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.gradient_reduce import GradientReducer
from roundpipe_lightning.optim import HostAdamW
from tests.kit.engine import (
    WIDTH,
    Block,
    LockingDevice,
    Regressor,
    layers_of,
    mean_step,
    plan_of,
    regression_batches,
)

NUM_MICROBATCHES = 4
AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)


def opened(module: Any, upload_dtype: torch.dtype | None, **options: Any) -> Engine:
    stack = layers_of(module)
    plan = plan_of(
        stack, num_workers=2, num_microbatches=NUM_MICROBATCHES, **{"round_size": 2, **options}
    )
    devices = [EmulatedDevice(index) for index in range(2)]
    return Engine(module, stack=stack, devices=devices, plan=plan, upload_dtype=upload_dtype)


def step(engine: Engine, *, context: Callable[[], Any] = AUTOCAST) -> StepResult:
    return mean_step(engine, regression_batches(NUM_MICROBATCHES), context=context)


def uploaded(result: StepResult) -> int:
    return sum(worker.uploaded_bytes for worker in result.traffic)


def downloaded(result: StepResult) -> int:
    return sum(worker.downloaded_bytes for worker in result.traffic)


def by_name(module: nn.Module, result: StepResult) -> dict[str, Tensor]:
    return {name: result.gradients[p] for name, p in module.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def matrix_bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters() if p.dim() == 2)


def test_half_the_bytes_and_the_same_bits_where_autocast_casts_anyway() -> None:
    module: Any = Regressor(2)
    results = []
    for dtype in (None, torch.bfloat16):
        twin = copy.deepcopy(module)
        with opened(twin, dtype) as engine:
            step(engine)
            result = step(engine)
        results.append((result, by_name(twin, result)))
    (wide, expected), (narrow, gradients) = results
    assert same(gradients, expected)
    assert all(gradient.dtype is torch.float32 for gradient in gradients.values())
    assert all(map(torch.equal, wide.losses, narrow.losses))  # type: ignore[arg-type]
    blocks, linear = (
        matrix_bytes(one) for one in (module.layers, nn.ModuleList([module.head, module.tail]))
    )
    # Blocks travel forward and backward, in two rounds; the layers outside them to both workers.
    assert uploaded(wide) - uploaded(narrow) == (4 * blocks + 2 * linear) // 2
    assert downloaded(narrow) == downloaded(wide)


class Scaled(Block):
    """Uses matrices, and views of them, in operations that autocast leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.rand(3, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, add_bias_kv=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        first, *others = self.scales.chunk(3)
        with torch.autocast("cpu", enabled=False):
            x = functional.linear(x.float(), self.inner.weight[:WIDTH].t()) * first
        return super().forward(x @ self.outer.weight[:, :WIDTH].t()) + others[0][0].exp()


class Past(Regressor):
    """Uses weights past autocast, inside the blocks and outside."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, make_block=Scaled)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        head = self.head(x) + functional.linear(x, self.head.weight.square())
        hidden = self.run_blocks(head)
        with torch.autocast("cpu", enabled=False):
            found = self.tail(hidden.float()).squeeze(-1)
        return functional.mse_loss(found, y) + self.tail.weight.norm()


def test_weights_are_whole_where_autocast_would_not_round_them() -> None:
    module: Any = Past(2)
    results = []
    for dtype in (None, torch.bfloat16):
        twin = copy.deepcopy(module)
        with opened(twin, dtype) as engine:
            result = step(engine)
        results.append((result.losses, by_name(twin, result)))
    (losses, gradients), (expected_losses, expected) = results
    assert all(map(torch.equal, losses, expected_losses))  # type: ignore[arg-type]
    assert same(gradients, expected)


def test_whole_values_are_those_of_the_last_write() -> None:
    weight = nn.Parameter(torch.rand(2, 2))
    leaf = nn.Parameter(weight.detach().bfloat16())
    rounded = RoundedLeaves(lambda parameter, leaf: parameter.detach().clone())
    rounded.add({weight: leaf})
    for _ in range(2):
        _, (whole,), _ = rounded.replaced(torch.exp, (leaf,), {}, device_type="cpu")
        assert torch.equal(whole, weight)
        weight.data.mul_(2.0)
        rounded.renew(leaf)


def test_functions_that_autocast_rounds_for_take_rounded_weights_at_once() -> None:
    weight = nn.Parameter(torch.rand(2, 2))
    rounded = RoundedLeaves(lambda parameter, leaf: parameter)
    rounded.add({weight: nn.Parameter(weight.detach().bfloat16())})

    def suits(func: Any) -> bool:
        return rounded.suit(func, device_type="cpu")

    assert not suits(functional.linear)
    with AUTOCAST():
        assert suits(functional.linear)
        assert not suits(torch.exp)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not suits(functional.linear)


def test_evaluations_see_unseen_writes_once_copies_are_marked_old() -> None:
    module: Any = Regressor()
    with opened(module, torch.bfloat16) as engine:
        x = torch.ones(2, WIDTH)
        with AUTOCAST():
            before = engine.evaluate(lambda view, batch: view(batch), x)
        module.layers[0].outer.weight.data.zero_()
        assert engine.store.copies is not None
        engine.store.copies.forget()
        with AUTOCAST():
            assert not torch.equal(engine.evaluate(lambda view, batch: view(batch), x), before)


def test_parameters_with_several_uses_embeddings_and_frozen_ones_travel_as_they_are() -> None:
    module: Any = Regressor()
    module.embedding = nn.Embedding(1, WIDTH)
    module.embedding.weight = module.tail.weight
    module.other = nn.Embedding(2, WIDTH)
    module.layers[1].inner.weight = module.layers[0].inner.weight
    module.layers[2].requires_grad_(False)
    module.layers[3].outer.weight.data = module.layers[3].outer.weight.data.double()
    with opened(module, torch.bfloat16) as engine:
        copies = engine.store.copies
        assert copies is not None
        alone = [
            module.layers[0].outer,
            module.layers[1].outer,
            module.layers[3].inner,
            module.head,
        ]
        size = sum(layer.weight.numel() for layer in alone)
        assert sum(place.nbytes for place in copies._places.values()) == 2 * size


@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_uploaded_is_page_locked_and_nothing_else(keeps: bool) -> None:
    device, module = LockingDevice(), Regressor()
    store = HostStore(module, list(module.layers), upload_dtype=torch.bfloat16)
    store.pin(device)
    if keeps:
        store.keep_previous(list(module.parameters()))
    masters = {p.untyped_storage().data_ptr() for p in module.parameters() if p.dim() == 2}
    blocks = list(module.layers)
    sent = {f.uploaded.data_ptr() for block in blocks for f in store.buffers_of(block)}
    assert sent <= device.locked.keys()
    assert masters.isdisjoint(device.locked)
    store.close()
    assert not device.locked


def test_what_is_kept_has_the_dtype_that_is_uploaded() -> None:
    module: Any = Regressor()
    store = HostStore(module, list(module.layers), upload_dtype=torch.bfloat16)
    block, weight = module.layers[0], module.layers[0].inner.weight
    store.keep_previous(list(block.parameters()))
    assert store.previous[weight].dtype is torch.bfloat16
    assert store.previous[block.inner.bias].dtype is torch.float32
    assert torch.equal(store.previous[weight], weight.bfloat16())
    store.uses_previous = True
    weight.data = weight.data + 1.0  # in other memory: it is uploaded by itself, in its own dtype
    layout = Layouts(store).of(block)
    found = layout.pieces[-1].version(previous=True).view(torch.float32).view_as(weight)
    assert torch.equal(found, store.previous[weight].float())
    assert layout.form.places[0].dtype is torch.float32
    store.close()


def low_precision(module: Any, dtype: torch.dtype, sums: torch.dtype | None) -> Any:
    module = copy.deepcopy(module).to(dtype)
    for parameter in module.parameters():
        parameter.grad_dtype = sums or dtype
    return module


class Cast(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = (tensor.to(self.tail.weight.dtype) for tensor in batch)
        return functional.mse_loss(self(x), y)


@pytest.mark.parametrize("round_size", [2, 4])
def test_gradients_of_bf16_parameters_are_summed_in_float32(round_size: int) -> None:
    module = low_precision(Cast(2), torch.bfloat16, torch.float32)
    each: list[dict[str, Tensor]] = []
    for batch in regression_batches(NUM_MICROBATCHES):
        twin = low_precision(module, torch.bfloat16, None)
        (twin.training_step(batch, 0) / NUM_MICROBATCHES).backward()
        each.append({n: p.grad for n, p in twin.named_parameters() if p.grad is not None})
    expected = {name: _sum([one[name].float() for one in each], round_size) for name in each[0]}
    with opened(module, None, round_size=round_size) as engine:
        result = step(engine, context=nullcontext)
    assert same(by_name(module, result), expected)


def _sum(gradients: Sequence[Tensor], round_size: int) -> Tensor:
    rounds = [
        sum(gradients[start + 1 : start + round_size], gradients[start])
        for start in range(0, len(gradients), round_size)
    ]
    return sum(rounds[1:], rounds[0])


def test_gradients_in_bf16_travel_in_half_the_bytes() -> None:
    results = []
    for sums in (torch.float32, torch.bfloat16):
        module = low_precision(Regressor(2), torch.float32, sums)
        with opened(module, None) as engine:
            result = step(engine)
        results.append((by_name(module, result), downloaded(result)))
    (wide, wide_bytes), (narrow, narrow_bytes) = results
    assert narrow_bytes < 0.75 * wide_bytes  # those outside the blocks travel as they are
    for name, gradient in narrow.items():
        assert gradient.dtype is torch.bfloat16
        difference = gradient.float() - wide[name]
        assert difference.norm() < 2**-7 * wide[name].norm()
        assert difference.any() or "layers" not in name


@pytest.mark.parametrize("mean", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_of_sums_are_those_documented(dtype: torch.dtype, mean: int) -> None:
    generator = torch.Generator().manual_seed(1)
    parameter = nn.Parameter(torch.zeros(4096))
    parameter.grad_dtype = dtype
    gradients = torch.randn(16, 4096, generator=generator) + mean
    reducer = GradientReducer(num_microbatches=16, num_stages=1)
    for index, gradient in enumerate(gradients):
        reducer.add_stage(0, [index], {parameter: gradient.clone()})
    total = reducer.sums()[parameter]
    assert total.dtype is dtype
    error = total.double() - gradients.double().sum(0)
    roundoff = 16 * torch.finfo(dtype).eps / 2
    assert (error.abs() <= roundoff / (1 - roundoff) * gradients.double().abs().sum(0)).all()
    column = 1 + 2 * (dtype is torch.float32) + mean
    page = Path(__file__).parents[2] / "docs" / "benchmarks" / "measurements.md"
    text = page.read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| 16 |"))
    documented = float(row.strip("| ").split(" | ")[column])
    relative = float(error.norm() / gradients.double().sum(0).norm())
    assert relative == pytest.approx(documented, rel=0.1)


def test_copies_that_the_optimizer_has_written_are_not_cast_again() -> None:
    module: Any = Regressor(1)
    store = HostStore(module, list(module.layers), upload_dtype=torch.bfloat16)
    assert store.copies is not None
    optimizer = HostAdamW(module.parameters(), lr=0.1)
    store.copies.written_by([optimizer])
    store.renew_copies()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    sent = [flat.uploaded for flat in store.buffers_of(module.layers[0])]
    (copy,) = [flat for flat in sent if flat.itemsize == 2]
    written = copy.clone()
    weights = [module.layers[0].inner.weight, module.layers[0].outer.weight]
    assert torch.equal(written, torch.cat([w.detach().flatten() for w in weights]).bfloat16())
    copy.zero_()
    store.updated(module.layers[0].parameters(), by=optimizer)
    store.renew_copies()
    assert not copy.any()  # nothing was cast
    with torch.no_grad():
        weights[0].mul_(1.0)
    store.renew_copies()
    assert copy.any()
    store.close()
    optimizer.close()


def test_a_step_writes_into_a_parameter_when_uploads_have_read_it() -> None:
    module: Any = Regressor(1)
    store, weight = HostStore(module, list(module.layers)), module.layers[0].inner.weight
    before, (_, end_upload) = weight.detach().clone(), store.versions.begin_reading()
    writer = threading.Thread(target=store.rewrite, args=(weight, torch.zeros_like(weight)))
    writer.start()
    writer.join(0.1)
    waits = torch.equal(weight, before)
    end_upload()
    writer.join(60)
    store.close()
    assert waits
    assert not weight.any()


def test_a_write_of_the_step_is_cast_before_anybody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = Regressor(1)
    store = HostStore(module, list(module.layers), upload_dtype=torch.bfloat16)
    assert store.copies is not None
    store.renew_copies()
    (copy,) = [b.uploaded for b in store.buffers_of(module.layers[0]) if b.uploaded.itemsize == 2]
    seen: list[Tensor] = []

    def read() -> None:
        _, end = store.versions.begin_reading()
        seen.append(copy[:8].clone())
        end()

    reader, cast = threading.Thread(target=read), store.copies.cast

    def late(values: Any) -> None:
        reader.start()
        reader.join(0.05)
        cast(values)

    monkeypatch.setattr(store.copies, "cast", late)
    weight = module.layers[0].inner.weight
    store.rewrite(weight, torch.full_like(weight, 7.0))
    reader.join()
    assert torch.equal(seen[0], torch.full((8,), 7.0, dtype=torch.bfloat16))
    store.close()
