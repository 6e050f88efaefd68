import copy
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.chain.saved_outputs import ChangedRecomputeWarning
from roundpipe_lightning.engine.store.block_layout import fingerprint
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    WIDTH,
    Block,
    Regressor,
    Workers,
    check_parity,
    differences,
    engine_for,
    mean_step,
    on_any_workers,
    plain_step,
    regression_batches,
)

AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)


class LeavesAutocast(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            hidden: Tensor = self.outer(torch.tanh(self.inner(x.float())))
            return x + hidden


@pytest.mark.parametrize("make_block", [Block, LeavesAutocast])
def test_the_backward_pass_leaves_autocast(make_block: Callable[[], nn.Module]) -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        x, y = batch
        with AUTOCAST():
            hidden = view.run_blocks(view.head(x))
            with torch.autocast("cpu", enabled=False):
                return functional.mse_loss(view.tail(hidden.float()).squeeze(-1), y)

    module = Regressor(make_block=make_block)
    check_parity(module, call=call, num_microbatches=1, context=AUTOCAST)


class Scaling(Block):
    """Reads a buffer that it has written before, in one of several ways.

    Args:
        how: In which way.
    """

    scale: Tensor
    late: Tensor | None
    calls = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("late", None)

    def forward(self, x: Tensor) -> Tensor:
        size = x.detach().abs().mean((0,))
        if self.how == "in place":
            self.scale.mul_(0.5).add_(size, alpha=0.5)
        elif self.how == "assigned":
            self.scale = 0.5 * self.scale + 0.5 * size
        elif self.how == "read first":
            x = x / self.scale.clone()
            with torch.no_grad():
                self.scale.lerp_(size, 0.5)
        elif self.how == "out":
            torch.add(self.scale, size, out=self.scale)
        elif self.how == "late":
            x = x if self.late is None else x / self.late.clone()
            if self.late is None:
                self.late = size
            else:
                self.late.add_(size)
        elif self.how == "attribute":
            self.calls += 1
            x = x / self.calls
        return super().forward(x / self.scale.clone())


class Indexed(Block):
    """Makes a buffer when it is first asked for."""

    order: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "order"):
            order = torch.arange(WIDTH, device=x.device).flip(0)
            self.register_buffer("order", order, persistent=False)
        return super().forward(x[:, self.order])


@on_any_workers
def test_a_buffer_that_appears_in_the_first_forward_is_no_write(workers: Workers) -> None:
    module: Any = Regressor(make_block=Indexed)
    batches = regression_batches(4)
    plain = plain_step(copy.deepcopy(module), batches)
    plan: Any = {"num_microbatches": 4, "round_size": 2, "team_size": 2}
    with engine_for(module, devices=workers(2), **plan) as engine:
        for _ in range(2):
            assert not differences(module, mean_step(engine, batches), plain)
    assert module.layers[0].order.tolist() == [*range(WIDTH)][::-1]


def _spectral(old: bool) -> nn.Module:
    block: Any = Block()
    norm = nn.utils.spectral_norm if old else nn.utils.parametrizations.spectral_norm
    block.inner = norm(block.inner)
    block.outer = norm(block.outer)
    made: nn.Module = block
    return made


WRITERS: dict[str, Callable[[], nn.Module]] = {
    how: partial(Scaling, how)
    for how in ("in place", "assigned", "read first", "out", "late", "attribute")
} | {"spectral_norm": partial(_spectral, True), "parametrized": partial(_spectral, False)}


@on_any_workers
@pytest.mark.parametrize(
    ("name", "num_microbatches"), [*((name, 1) for name in WRITERS), ("attribute", 3)]
)
def test_a_block_is_recomputed_with_the_buffers_that_its_forward_saw(
    name: str, num_microbatches: int, workers: Workers
) -> None:
    module = Regressor(make_block=WRITERS[name])
    twin = copy.deepcopy(module)
    check_parity(module, num_microbatches=num_microbatches, devices=workers(2), twin=twin)


class Drawing(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


@on_any_workers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_recompute_that_gives_other_values_is_warned_of(
    dtype: torch.dtype, workers: Workers
) -> None:
    module = Regressor(make_block=Drawing).to(dtype)
    batches = [(x.to(dtype), y.to(dtype)) for x, y in regression_batches(2)]
    with (
        engine_for(module, devices=workers(2), num_microbatches=2) as engine,
        pytest.warns(ChangedRecomputeWarning, match=r"Block 'layers\.\d' gave other values"),
    ):
        mean_step(engine, batches)


def test_forward_hooks_of_blocks_run_once_per_call_unless_they_change_the_output() -> None:
    module: Any = Regressor()
    calls: list[str] = []
    hooks: dict[str, Callable[[Any, Any, Tensor], Any]] = {
        "looks": lambda module, args, output: calls.append("looks"),
        "returns": lambda module, args, output: output * 1.5,
        "writes": lambda module, args, output: output.mul_(0.5) is None or None,
    }
    for block, hook in zip(module.layers, hooks.values(), strict=False):
        block.register_forward_hook(hook)
    check_parity(module, num_microbatches=1)
    assert len(calls) == 2  # the plain loop's and the engine's


@pytest.mark.parametrize("watch", ["retain_grad", "register_hook"])
def test_a_gradient_of_a_block_s_output_is_found_at_a_copy_of_it(watch: str) -> None:
    found: list[Tensor] = []

    def call(view: Any, batch: Any, index: int, *, copies: bool = True) -> Any:
        x, y = batch
        hidden = view.layers[0](view.head(x))
        hidden = hidden.clone() if copies else hidden
        if watch == "retain_grad":
            hidden.retain_grad()
            found.append(hidden)
        else:
            hidden.register_hook(found.append)
        for layer in view.layers[1:]:
            hidden = layer(hidden)
        return functional.mse_loss(view.tail(hidden).squeeze(-1), y)

    module = Regressor()
    check_parity(module, num_microbatches=1, call=call)
    expected, got = (t.grad if watch == "retain_grad" else t for t in found)
    assert got is not None
    assert expected is not None
    assert torch.equal(got.cpu(), expected)
    with pytest.raises(CaptureError, match=rf"`{watch}` on an output of block 'layers\.0'.*clone"):
        check_parity(module, num_microbatches=1, call=partial(call, copies=False))


def test_double_backward_works_where_blocks_are_not_recomputed() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        x, y = batch
        x = x.clone().requires_grad_()
        output = view(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return functional.mse_loss(output, y) + slope.square().mean()

    module = Regressor()
    whole = Partition(forward=(), backward=(4,))
    for num_microbatches in (1, 3):
        check_parity(module, call=call, partition=whole, num_microbatches=num_microbatches)
    with pytest.raises(CaptureError, match=r"recomputed: .*recompute='none'"):
        check_parity(module, call=call)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (40, 30)])
def test_the_same_values_have_the_same_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.rand(shape).mul(100).to(dtype)
    assert fingerprint(values) == fingerprint(values.clone())
    assert fingerprint(values) == fingerprint(torch.cat([values.reshape(-1)] * 2)[values.numel() :])


def test_every_write_is_seen() -> None:
    values = torch.randn(101)
    known = {fingerprint(values)}
    for index in range(101):
        changed = values.clone()
        changed.data[index] += 1
        known.add(fingerprint(changed))
    known.add(fingerprint(values.flip(0)))
    known.add(fingerprint(torch.cat([values[16:32], values[:16], values[32:]])))
    assert len(known) == 1 + 101 + 2


def test_strides_do_not_matter() -> None:
    values = torch.randn(6, 5)
    assert fingerprint(values.T.contiguous().T) == fingerprint(values)
