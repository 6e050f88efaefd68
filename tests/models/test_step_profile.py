import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.losses.lazy_logits import LossFusion
from roundpipe_lightning.models.work.meter import Count, Meter, aten, without_values
from roundpipe_lightning.models.work.work_profile import (
    module_fingerprint,
    parameter_work,
    step_profile,
)
from roundpipe_lightning.planning.model.work import BlockWork, WorkProfile

WIDTH = 8
SAMPLES = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.linear(x))


class Counting(nn.Module):
    """A module whose step writes all that a step may write."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH, bias=False)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.leave = nn.Linear(WIDTH, 1, bias=False)
        self.steps = 0
        self.losses: list[Tensor] = []
        self.kinds: Counter[str] = Counter()
        self.settings = {"nested": [1, 2]}
        self.tracker = Tracker()
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any) -> Tensor:
        loss = functional.mse_loss(self(batch["x"]), batch["y"])
        self.steps += 1
        self.losses.append(loss)
        self.kinds["train"] += 1
        self.settings["nested"].append(3)
        self.tracker.seen.append(self.tracker.limit)
        self.last = loss
        self.log("loss", loss)
        return loss

    def log(self, name: str, value: Any) -> None:
        raise AssertionError("the original's log was called")


class Tracker:
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.limit = 4


def batch() -> dict[str, Tensor]:
    return {"x": torch.ones(SAMPLES, 4), "y": torch.ones(SAMPLES, 1)}


def measure(module: nn.Module, **settings: Any) -> WorkProfile:
    return step_profile(
        module,
        find_stacks(module, None)[0],
        microbatch=batch(),
        call=lambda root, microbatch: root.training_step(microbatch),
        settings={"log": lambda name, value: None},
        **settings,
    )


def test_work_is_that_of_the_microbatch() -> None:
    work = measure(Counting())
    assert work.head.forward.matrix_operations.fixed == 2 * SAMPLES * 4 * WIDTH
    assert [block.forward.matrix_operations.fixed for block in work.blocks] == [
        2 * SAMPLES * WIDTH * WIDTH
    ] * 3
    assert work.blocks[0].backward.matrix_operations.fixed == 4 * SAMPLES * WIDTH * WIDTH
    assert work.blocks[0].boundary_bytes.fixed == SAMPLES * WIDTH * 4
    assert work.tail.forward.matrix_operations.fixed == 2 * SAMPLES * WIDTH
    assert work.blocks[0].parameter_bytes == work.blocks[0].trainable_bytes == 4 * WIDTH * WIDTH
    assert work.num_parameters == sum(p.numel() for p in Counting().parameters())


class Collecting(Counting):
    """Its loss has what a hook collects from inside of the blocks, as of routers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any) -> Tensor:
        seen: list[Tensor] = []
        layers: Any = self.layers
        hooks = [b.linear.register_forward_hook(lambda *a: seen.append(a[-1])) for b in layers]
        loss = super().training_step(batch)
        for hook in hooks:
            hook.remove()
        return loss + torch.stack([x.mean() for x in seen]).sum()


class Twice(Counting):
    """Calls the blocks twice, with other numbers of rows."""

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch["x"], batch["y"]
        loss = functional.mse_loss(self(x), y)
        loss = loss + functional.mse_loss(self(torch.cat([x, x])), torch.cat([y, y]))
        return loss + functional.mse_loss(self(x), y)


@pytest.mark.parametrize(
    ("kind", "rows", "tail_rows"),
    [(Collecting, SAMPLES, SAMPLES), (Twice, 2 * SAMPLES, 4 * SAMPLES)],
)
def test_a_loss_of_side_outputs_and_calls_of_other_lengths(
    kind: type[Counting], rows: int, tail_rows: int
) -> None:
    work = measure(kind())
    operations = 2 * rows * WIDTH * WIDTH
    assert [block.forward.matrix_operations.fixed for block in work.blocks] == [operations] * 3
    assert work.blocks[0].backward.matrix_operations.fixed == 2 * operations
    assert work.tail.backward.matrix_operations.fixed == 4 * tail_rows * WIDTH


def test_nothing_is_changed() -> None:
    module = Counting()
    parameters = {name: p.detach().clone() for name, p in module.named_parameters()}
    attributes = {name: id(value) for name, value in vars(module).items()}
    random = torch.get_rng_state()
    measure(module)
    assert module.steps == 0
    assert module.losses == []
    assert not module.kinds
    assert module.settings == {"nested": [1, 2]}
    assert module.tracker.seen == []
    assert module.last is None
    assert {name: id(value) for name, value in vars(module).items()} == attributes
    assert all(torch.equal(p, parameters[name]) for name, p in module.named_parameters())
    assert all(p.grad is None for p in module.parameters())
    assert not any(child._forward_hooks for child in module.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_mixed_precision_is_measured_in_its_dtype() -> None:
    full = measure(Counting()).blocks[0]
    mixed = measure(Counting(), compute_dtype=torch.bfloat16).blocks[0]
    assert mixed.kept_bytes.fixed == full.kept_bytes.fixed / 2
    assert mixed.boundary_bytes == full.boundary_bytes  # autocast leaves the sum wide
    assert mixed.parameter_bytes == full.parameter_bytes


def test_code_that_needs_values_or_reaches_outside_is_not_run() -> None:
    seen: list[int] = []

    class Needy(Counting):
        def training_step(self, batch: Any) -> Tensor:
            scale: float = batch["x"].sum().item()
            return super().training_step(batch) * scale

    class Closure(Counting):
        def training_step(self, batch: Any) -> Tensor:
            seen.append(1)
            return super().training_step(batch)

    class Hook(Counting):
        on_step: Any

        def training_step(self, batch: Any) -> Tensor:
            self.on_step()
            return super().training_step(batch)

    class Helped(Counting):
        def training_step(self, batch: Any) -> Tensor:
            self.note()
            return super().training_step(batch)

        def note(self) -> None:
            seen.append(1)

    num_seen = 0

    def count() -> None:
        nonlocal num_seen
        num_seen += 1

    hook, counts = Hook(), Hook()
    hook.on_step = lambda: seen.append(2)
    counts.on_step = count
    for module, message in (
        (Needy(), "without values"),
        (Closure(), r"Closure.training_step may change a variable"),
        (Helped(), r"Helped.note may change a variable"),
        (hook, "carries variables"),
        (counts, "carries variables"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            measure(module)
    assert (seen, num_seen) == ([], 0)


@pytest.mark.parametrize("value", [threading.Lock(), iter([1]), torch.Generator()])
def test_what_cannot_be_copied_is_refused_only_if_it_is_used(value: Any) -> None:
    module = Counting()
    module.tracker = value
    with pytest.raises(ConfigurationError, match=r"not leave all as it is|without values"):
        measure(module)

    seen: list[int] = []

    class Unused(Counting):
        def on_train_start(self) -> None:  # a step does not use it, so it may do anything
            seen.append(2)

        def training_step(self, batch: Any) -> Tensor:
            return functional.mse_loss(self(batch["x"]), batch["y"])

    other = Unused()
    other.tracker = value
    assert measure(other).blocks
    assert seen == []


def test_refusals_that_user_code_swallows_still_count() -> None:
    class Trying(Counting):
        def training_step(self, batch: Any) -> Tensor:
            with contextlib.suppress(ValueError):
                self.tracker.limit += 1
            return functional.mse_loss(self(batch["x"]), batch["y"])

    module = Trying()
    module.tracker = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(ConfigurationError, match="could not be copied"):
        measure(module)


def test_methods_that_were_put_on_an_object_run_on_the_copy() -> None:
    module = Counting()
    original = type(module.layers[0]).forward

    def doubled(self: Any, x: Tensor) -> Tensor:
        return 2 * (x + torch.relu(self.linear(x)))

    for layer in module.layers:
        layer.forward = doubled.__get__(layer)
    plain = measure(Counting()).blocks[0].forward.memory_bytes.fixed
    assert measure(module).blocks[0].forward.memory_bytes.fixed > plain
    assert type(module.layers[0]).forward is original


def test_shared_parameters_stay_shared() -> None:
    class Tied(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.enter = nn.Linear(WIDTH, WIDTH, bias=False)
            self.leave = nn.Linear(WIDTH, WIDTH, bias=False)
            self.leave.weight = self.enter.weight

        def training_step(self, batch: Any) -> Tensor:
            return self(batch["x"].repeat(1, 2)).square().mean()  # type: ignore[no-any-return]

    assert measure(Tied()).tied_parameters == WIDTH * WIDTH


class Speaking(nn.Module):
    """A vocabulary large enough for its logits to be most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4000, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.leave = nn.Linear(WIDTH, 4000, bias=False)

    def training_step(self, batch: Any) -> Tensor:
        x = self.embed(batch["tokens"])
        for layer in self.layers:
            x = layer(x)
        logits = self.leave(x).float()
        return functional.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())


def test_losses_without_logits_need_no_memory_for_them() -> None:
    module, num_tokens = Speaking(), 2**16
    tokens = torch.zeros(16, num_tokens // 16, dtype=torch.long)
    tails = [
        step_profile(
            module,
            find_stacks(module, None)[0],
            microbatch={"tokens": tokens},
            call=lambda root, microbatch: root.training_step(microbatch),
            fusion=fusion,
        ).tail
        for fusion in (None, LossFusion("auto"))
    ]
    logits = num_tokens * 4000 * 4
    product = 2 * num_tokens * 4000 * WIDTH
    own, fused = (tail.peak_bytes.amounts[0].fixed for tail in tails)
    assert own > 2 * logits
    assert fused < logits / 2
    sums = [t.forward.matrix_operations.fixed + t.backward.matrix_operations.fixed for t in tails]
    assert sums[0] == 3 * product
    assert 3 * product <= sums[1] <= 4 * product  # the logits may be made twice


ROWS, COLUMNS = 256, 128
NUMBERS = ROWS * COLUMNS


def count(work: Callable[[Tensor], object]) -> Count:
    matrix = torch.empty((ROWS, COLUMNS), dtype=torch.bfloat16, device="meta")
    meter = Meter()
    with meter:
        work(matrix)
    return meter.count


def every_other(matrix: Tensor) -> Tensor:
    return matrix[:, ::2].neg()


def every_hundredth(matrix: Tensor) -> Tensor:
    return matrix.flatten()[::100].neg()


@pytest.mark.parametrize(
    ("work", "moved"),
    [
        (torch.neg, 2 * (NUMBERS + NUMBERS)),
        (lambda matrix: matrix.t().neg(), 2 * (NUMBERS + NUMBERS)),
        (lambda matrix: matrix[:1].expand(ROWS, -1).neg(), 2 * (COLUMNS + NUMBERS)),
        (lambda matrix: matrix.view(-1), 0),
        (torch.empty_like, 0),
        (every_other, 2 * (NUMBERS + NUMBERS // 2)),
        (every_hundredth, (32 + 2) * -(-NUMBERS // 100)),
    ],
)
def test_bytes_are_those_that_memory_moves(work: Callable[[Tensor], object], moved: int) -> None:
    counted = count(work)
    assert counted.memory_bytes == moved
    assert counted.matrix_operations == counted.matrix_bytes == 0


def test_the_gradient_of_a_part_is_written_into_zeros() -> None:
    sizes = (ROWS, COLUMNS)

    def of_slice(matrix: Tensor) -> object:
        return torch.ops.aten.slice_backward(matrix[:, ::2].contiguous(), sizes, 1, 0, COLUMNS, 2)

    def of_row(matrix: Tensor) -> object:
        return torch.ops.aten.select_backward(matrix[0], sizes, 0, 3)

    copied = 2 * (NUMBERS + NUMBERS // 2)  # contiguous
    assert count(of_slice).memory_bytes == copied + 2 * (NUMBERS // 2 + NUMBERS + NUMBERS)
    assert count(of_row).memory_bytes == 2 * (COLUMNS + NUMBERS + COLUMNS)


class Model(nn.Module):
    def __init__(self, *, num_layers: int = 3, tied: bool = False, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.register_buffer("positions", torch.zeros(6, dtype=torch.long))
        if tied:
            self.head.weight = self.embedding.weight


def work_of(module: nn.Module) -> WorkProfile:
    return parameter_work(module, find_stacks(module, None)[0])


def operations(part: BlockWork) -> tuple[float, float]:
    return part.forward.matrix_operations.fixed, part.backward.matrix_operations.fixed


def test_blocks_and_segments() -> None:
    work = work_of(Model())
    assert work.block_names == ("layers.0", "layers.1", "layers.2")
    block = work.blocks[1]
    assert block.parameter_bytes == block.trainable_bytes == 4 * 4 * 4
    assert operations(block) == (2 * 16, 4 * 16)
    assert work.head.parameter_bytes == 10 * 4 * 4 + 6 * 8
    assert work.head.trainable_bytes == 10 * 4 * 4
    assert operations(work.head) == (0, 0)
    assert work.tail.parameter_bytes == (10 * 4 + 8) * 4
    assert operations(work.tail) == (2 * 48, 4 * 48)
    assert work.num_parameters == sum(t.numel() for t in Model().parameters())
    with torch.device("meta"):
        assert work_of(Model()) == work


def test_tied_parameters_are_placed_twice_and_multiplied_once() -> None:
    tied, untied = work_of(Model(tied=True)), work_of(Model())
    assert (tied.head, tied.tail) == (untied.head, untied.tail)
    assert tied.fingerprint != untied.fingerprint


def test_frozen_parameters_have_no_gradient() -> None:
    module = Model()
    module.layers[0].requires_grad_(False)
    frozen, trained, _ = work_of(module).blocks
    assert frozen.num_trainable == frozen.trainable_bytes == 0
    forward, backward = operations(frozen)
    assert backward == forward == operations(trained)[0]


def test_without_a_stack_all_is_tail() -> None:
    work = parameter_work(nn.Linear(3, 2), None)
    assert (work.blocks, work.head.parameter_bytes) == ((), 0)
    assert work.tail.parameter_bytes == (3 * 2 + 2) * 4
    assert operations(work.tail)[1] > 0


def test_only_the_experts_that_see_a_token_count() -> None:
    block = nn.Module()
    block.experts = nn.Parameter(torch.zeros(8, 4, 4))
    module = nn.Module()
    module.layers = nn.ModuleList([block])
    stack = find_stacks(module, ["layers"])[0]
    dense = parameter_work(module, stack).blocks[0]
    module.config = SimpleNamespace(num_experts=8, num_experts_per_tok=2)  # type: ignore[assignment]
    sparse = parameter_work(module, stack).blocks[0]
    assert operations(sparse)[0] == operations(dense)[0] / 4
    assert sparse.parameter_bytes == dense.parameter_bytes


def test_the_fingerprint_is_of_the_structure() -> None:
    def print_of(module: nn.Module) -> str:
        return module_fingerprint(module, find_stacks(module, None)[0])

    same = print_of(Model())
    assert print_of(Model().to(torch.bfloat16).requires_grad_(False)) == print_of(Model()) == same
    others = [Model(width=5), Model(num_layers=4), nn.ModuleDict({"model": Model()})]
    assert same not in {print_of(other) for other in others}
    assert module_fingerprint(Model(), None) != same


def _again(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Call it twice without values, and return the second result, which equals PyTorch's own."""
    results = [without_values(func, args, kwargs) for _ in range(2)]
    for one, other, own in zip(*map(tree_leaves, (*results, func(*args, **kwargs))), strict=True):
        if isinstance(own, Tensor):
            assert one.stride() == other.stride() == own.stride()
            assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        assert getattr(other, "dtype", other) == getattr(own, "dtype", own)
        assert getattr(other, "shape", None) == getattr(own, "shape", None)
    return results[1]


def test_what_is_known_by_its_shapes_is_not_worked_out_again() -> None:
    """Numbers of another type are other arguments; views share memory, and values count."""
    x = torch.empty(3, WIDTH, device="meta", dtype=torch.int64)
    for number in (1, 1.0, True, 2.0):
        _again(aten.add.Tensor, x, number)
    _again(aten.add.Tensor, x.t(), 1)
    for dtype in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(dtype)
        assert _again(aten.div.Tensor, x, 2).dtype is dtype
    y = torch.empty(3, WIDTH, device="meta")
    _again(aten.native_layer_norm.default, y, [WIDTH], None, None, 1e-5)
    _again(aten._to_copy.default, y, dtype=torch.float64)
    for view in (aten.t.default, aten.detach.default, aten.relu_.default):
        assert _again(view, y).untyped_storage()._cdata == y.untyped_storage()._cdata
    flat = _again(aten._unsafe_view.default, y, [WIDTH * 3])
    assert flat.untyped_storage()._cdata == y.untyped_storage()._cdata
    before = y._version
    _again(aten._foreach_add_.Scalar, [y], 1)
    assert y._version == before + 3, "it is known to be written"
    assert without_values(aten.sum.default, (torch.ones(2),), {}) == 2.0
    assert without_values(aten.sum.default, (torch.ones(3),), {}) == 3.0
