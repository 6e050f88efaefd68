import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.chain.saved_outputs import ChangedRecomputeWarning, KeptOutputs
from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.engine.store.block_layout import fingerprint
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.planning.schedule.stages import (
    ATTENTION_OPERATIONS,
    Partition,
    RecomputePolicy,
)
from tests.engine.test_boundaries import Place, places
from tests.kit.architectures import decoder_stack, tiny_causal_lm, token_batches
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
from tests.kit.moments import with_gradient

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


@pytest.mark.filterwarnings(
    "ignore::roundpipe_lightning.engine.capture.randomness.UnrepeatableDrawWarning"
)
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


class HooksWhatItGets(Block):
    """Changes the gradient of its input, which it hands back or computes with."""

    hands_back = True

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: 0.5 * gradient)
        return x if self.hands_back else super().forward(x)


@pytest.mark.parametrize("hands_back", [True, False])
@pytest.mark.parametrize("text", ["forward 3 | backward 1 1 1 1", "forward 1 | backward 3 1"])
def test_a_hook_on_what_a_block_is_given_is_warned_of(hands_back: bool, text: str) -> None:
    module: Any = Regressor()
    module.layers[1] = HooksWhatItGets()
    module.layers[1].hands_back = hands_back
    with pytest.warns(UserWarning, match=r"Block 'layers\.1' registers a hook on a tensor that it"):
        check_parity(module, num_microbatches=1, partition=Partition.parse(text))


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


def _in_place(loss: Tensor, term: Tensor) -> Tensor:
    loss += term
    return loss


def _by_a_custom_function(loss: Tensor, term: Tensor) -> Tensor:
    return with_gradient(loss, lambda gradient: 2 * gradient) + term


@on_any_workers
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("add", [_in_place, _by_a_custom_function])
def test_what_is_added_up_between_blocks_goes_backward_once(
    add: Callable[[Tensor, Tensor], Tensor], num_microbatches: int, workers: Workers
) -> None:
    found: list[Tensor] = []

    def call(view: Any, batch: Any, index: int) -> Any:
        x, y = batch
        hidden = view.head(x)
        loss = hidden.new_zeros(())
        for layer in view.layers:
            hidden = layer(hidden) * 0.9
            hidden.register_hook(found.append)
            loss = add(loss, hidden.square().mean())
        return loss + functional.mse_loss(view.tail(hidden).squeeze(-1), y)

    module = Regressor()
    check_parity(module, num_microbatches=num_microbatches, call=call, devices=workers(2))
    half = len(found) // 2
    assert half == num_microbatches * len(module.layers)
    for expected, got in zip(found[:half], found[half:], strict=True):
        assert num_microbatches > 1 or torch.equal(expected, got.cpu())


def _add(x: Tensor) -> None:
    x += 0.5


def _set(x: Tensor) -> None:
    x[:, 0] = 0


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "+=": _add,
    "[]": _set,
    "a view": lambda x: x.view(-1).mul_(0.5),
    "a part": lambda x: x[:, 1:].mul_(0.5),
    "masked": lambda x: x.masked_fill_(x > 0.5, 0.0),
    "twice": lambda x: x.transpose(0, 1).mul_(0.5) is x.add_(1),
}


@on_any_workers
@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("text", ["forward 1 1 1 | backward 1 1 1 1", "forward | backward 4"])
def test_what_is_written_into_a_block_s_output_is_seen_by_all(
    name: str, text: str, num_microbatches: int, workers: Workers
) -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        x, y = batch
        hidden = view.head(x)
        loss = 0.0
        for number, layer in enumerate(view.layers):
            hidden = layer(hidden)
            if number:  # the first one is handed on as it is
                WRITES[name](hidden)
            loss = loss + hidden.square().mean()
        return loss + functional.mse_loss(view.tail(hidden).squeeze(-1), y)

    check_parity(
        Regressor(),
        num_microbatches=num_microbatches,
        partition=Partition.parse(text),
        devices=workers(2),
        call=call,
    )


def _part_of_an_output(hidden: Tensor, sums: Tensor, layer: Any) -> None:
    part = hidden[:, 1:]
    layer(hidden * 0.9)
    part.mul_(2)


def _output_of_which_there_is_a_part(hidden: Tensor, sums: Tensor, layer: Any) -> list[Tensor]:
    parts = [hidden[:, 1:]]
    other = layer(hidden * 0.9) * 2
    hidden += other
    return parts


def _part_of_an_earlier_tensor(hidden: Tensor, sums: Tensor, layer: Any) -> None:
    hidden = hidden * 2
    sums[:, 0].add_(hidden[:, 0])


def _tensor_of_which_there_is_a_part(hidden: Tensor, sums: Tensor, layer: Any) -> list[Tensor]:
    hidden = hidden * 0.9
    parts = [sums[:, 1:]]
    sums += hidden
    return parts


@pytest.mark.parametrize(
    ("write", "is_refused"),
    [
        (_part_of_an_output, True),
        (_output_of_which_there_is_a_part, True),
        (_part_of_an_earlier_tensor, True),
        (_tensor_of_which_there_is_a_part, True),
        (lambda hidden, sums, layer: (hidden[:, 1:].sum(), sums.mul_(hidden)), False),
        (lambda hidden, sums, layer: torch._foreach_mul_([sums, hidden], 0.5), False),
    ],
)
def test_what_is_known_by_two_names_is_not_written_into(
    write: Callable[..., Any], is_refused: bool
) -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        sums = view.head(batch[0]) * 1.0
        hidden = view.layers[0](sums * 2)
        for layer in view.layers[1:-1]:
            hidden = layer(hidden)
        kept = write(hidden, sums, view.layers[-1])
        return (hidden + sums).square().mean() + 0 * len(kept or ())

    match = r"writes into a tensor that the step has known since .*x\.clone\(\)"
    with pytest.raises(CaptureError, match=match) if is_refused else nullcontext():
        check_parity(Regressor(), call=call)


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


# What is kept instead -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("emulated", [False, True])
def test_gradients_are_the_same(name: str, emulated: bool) -> None:
    module = tiny_causal_lm(name, tied=True)
    check_parity(
        module,
        token_batches(3),
        stack=decoder_stack(module),
        devices=[(EmulatedDevice if emulated else CpuDevice)(i) for i in range(2)],
        tolerance=1e-6 if emulated else 0.0,  # of the embedding's two uses a device sums its round
        recompute=RecomputePolicy.SELECTIVE,
    )


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.runs += func._schema.name in ATTENTION_OPERATIONS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("policy", "times"), [("full", 2), ("selective", 1)])
def test_attention_runs_once_per_block_and_microbatch(policy: str, times: int) -> None:
    module = tiny_causal_lm("qwen3", tied=False)
    stack, counter = decoder_stack(module), Counter()
    held: Any = {"recompute": RecomputePolicy(policy)}
    with engine_for(module, stack, num_workers=1, **held) as engine:
        mean_step(engine, token_batches(3), context=lambda: counter)
    assert counter.runs == times * len(stack.blocks) * 3


__all__ = ["places"]  # a fixture

PROCESSOR = Place(CpuDevice(), None)
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


class Attention(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 24)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return torch.tanh(y.transpose(1, 2).flatten(2))


def sample() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def test_the_bytes_of_what_is_kept_are_counted_and_given_back() -> None:
    kept = KeptOutputs(ATTENTION_OPERATIONS)
    with torch.no_grad(), kept.recorded(PROCESSOR):
        block = Attention()
        block(sample())
    assert kept.num_bytes == 4 * (2 * 2 * 5 * 4 + 2 * 2 * 5)  # outputs, log-sum-exps
    with kept.replayed(PROCESSOR):
        block(sample())
    assert kept.num_bytes == 0


@pytest.mark.parametrize("in_place", [False, True])
def test_an_output_that_the_block_writes_into_is_computed_again(in_place: bool) -> None:
    def block(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return y.mul_(2) if in_place else y * 2

    kept = KeptOutputs(("aten::tanh",))
    with torch.no_grad(), kept.recorded(PROCESSOR):
        first = block(sample())
    assert (kept.num_bytes == 0) == in_place
    with kept.replayed(PROCESSOR):
        assert torch.equal(block(sample()), first)


def test_attention_that_drops_out_is_run_again_with_the_same_numbers() -> None:
    block = Attention(dropout=0.5)
    kept = KeptOutputs(ATTENTION_OPERATIONS)
    torch.manual_seed(3)
    with torch.no_grad(), kept.recorded(PROCESSOR):
        first = block(sample())
    assert kept.num_bytes == 0
    torch.manual_seed(3)
    with kept.replayed(PROCESSOR):
        assert torch.equal(block(sample()), first)


def test_another_way_through_the_block_is_run() -> None:
    block, kept = Attention(), KeptOutputs(("aten::relu", ATTENTION))
    with torch.no_grad(), kept.recorded(PROCESSOR):
        torch.relu(sample())
        wanted = block(sample())
    with Counter() as counter, kept.replayed(PROCESSOR):
        assert torch.equal(block(sample()), wanted)
    assert counter.runs == 1


def test_what_stays_is_not_moved(places: list[Place]) -> None:
    kept, place = KeptOutputs(("aten::tanh",)), places[0]
    with torch.no_grad(), kept.recorded(place, stays=True):
        first = torch.tanh(place.device.upload(sample()))
    with kept.replayed(place):
        again = torch.tanh(place.device.upload(sample()))
    assert torch.equal(place.device.download(again), place.device.download(first))
    assert place.transfers is not None
    assert place.transfers.downloads.num_bytes == place.transfers.uploads.num_bytes == 0


def test_what_an_operation_leaves_on_the_host_stays_there(places: list[Place]) -> None:
    kept = KeptOutputs(("aten::tanh",))
    with torch.no_grad(), kept.recorded(places[0]):
        first = torch.tanh(torch.tensor(0.5))
    with kept.replayed(places[1]):
        assert torch.tanh(torch.tensor(0.5)) is first
