import copy
import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from roundpipe_lightning.emulation.tagged_tensor import tag_of
from roundpipe_lightning.engine.capture.torch_functions import ModeStack
from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.engine.engine import Engine, UnusedStackWarning
from roundpipe_lightning.engine.worker.user_code import UserCode
from roundpipe_lightning.errors import CaptureError, ConfigurationError
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    WIDTH,
    Block,
    LockingDevice,
    Regressor,
    Workers,
    check_parity,
    cpu_workers,
    differences,
    emulated_workers,
    engine_for,
    engine_step,
    layers_of,
    mean_step,
    on_any_workers,
    plain_step,
    plan_of,
    regression_batches,
    stack_of,
)


class ListedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.listed = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.linear(x, self.listed[0])


class SlyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scales = nn.ParameterList(torch.randn(WIDTH) for _ in range(2))
        self.listed = [self.norm.weight, self.norm.bias, *self.scales]

    def forward(self, x: Tensor) -> Tensor:
        weight, bias, *scales = self.listed
        x = x + functional.layer_norm(x, (WIDTH,), weight=weight, bias=bias)
        return x * torch.stack(scales).mean(0)


class BorrowingBlock(nn.Module):
    def __init__(self, owner: list[nn.Parameter]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.owner = owner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x) * self.owner[0]  # type: ignore[no-any-return]


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x)  # type: ignore[no-any-return]


class Skipping(Regressor):
    """A step that uses the blocks' parameters, but never the stack."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = functional.mse_loss(self.tail(self.head(x)).squeeze(-1), y)
        first: Any = self.layers[0]
        return loss + first.inner.weight.square().mean()


@on_any_workers
@pytest.mark.parametrize("make_block", [ListedBlock, SlyBlock])
def test_a_block_may_reach_its_parameters_past_the_view(
    workers: Workers, make_block: Callable[[], nn.Module]
) -> None:
    module = Regressor(make_block=make_block)
    check_parity(module, devices=workers(2))
    assert all(p.grad is None for p in module.parameters())


@on_any_workers
def test_a_parameter_of_somebody_else_is_refused_by_name(workers: Workers) -> None:
    owner: list[nn.Parameter] = []
    module = Regressor(make_block=lambda: BorrowingBlock(owner))
    owner.append(module.tail.bias)
    with pytest.raises(CaptureError, match=r"'tail\.bias'.*not registered in it"):
        check_parity(module, devices=workers(2))


@on_any_workers
def test_microbatches_that_write_into_buffers_are_refused(workers: Workers) -> None:
    module = Regressor(make_block=NormedBlock)
    with pytest.raises(ConfigurationError, match=r"into buffers.*Set microbatching='blocks'"):
        check_parity(module, devices=workers(2))


def test_a_stack_that_is_not_run_is_mentioned_once() -> None:
    module = Skipping()
    batches = regression_batches(3)
    plain = plain_step(module, batches)
    with engine_for(module) as engine:
        with pytest.warns(UnusedStackWarning, match=r"'layers' as one chain.*blocks="):
            result = mean_step(engine, batches)
        mean_step(engine, batches)  # a second warning would be an error
    assert not differences(module, result, plain)


class Counts(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.seen[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


def negative(x: Tensor) -> None:
    torch.neg(x)


def test_modes_are_away_and_come_back_in_their_order() -> None:
    stack, x = ModeStack(), torch.ones(1)
    with Counts() as lower, Counts() as upper:
        with stack.without():
            negative(x)
            assert lower.seen["neg"] == upper.seen["neg"] == 0
            with stack.again():
                negative(x)
                with stack.without():
                    negative(x)
                negative(x)
            negative(x)
        negative(x)
        assert lower.seen["neg"] == upper.seen["neg"] == 3
        assert torch.overrides._get_current_function_mode() is upper


def test_a_mode_sees_the_functions_of_the_blocks_and_few_of_the_engine() -> None:
    module, batches = Regressor(4), regression_batches(2)
    with Counts() as plain:
        plain_step(module, batches)
    modes: list[Counts] = []

    def context() -> Counts:
        modes.append(Counts())
        return modes[-1]

    with engine_for(module, num_microbatches=2, devices=emulated_workers(2)) as engine:
        mean_step(engine, batches, context=context)
    seen = sum((mode.seen for mode in modes), Counter[str]())
    assert seen["linear"] == plain.seen["linear"] + 4 * 2 * 2, "the blocks once more: recomputed"
    assert seen["mse_loss"] == 2
    others = seen.total() - sum(seen[name] for name in plain.seen)
    assert others < 40, f"{others} questions of the engine's own: {seen - plain.seen}"


class Linears:
    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.places: list[set[str | None]] = []

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is not functional.linear:
            return NotImplemented
        self.shapes.append(tuple(args[1].shape))
        self.places.append({tag_of(x) for x in args[:2] if isinstance(x, nn.Parameter | Tensor)})
        if args[1].shape[0] > 1:
            return NotImplemented
        return functional.linear(args[0] * 0, args[1] * 0)


@on_any_workers
def test_asked_in_training_outside_the_blocks_only(workers: Workers) -> None:
    module = Regressor(num_blocks=3)
    outside = Linears()
    with engine_for(module, num_microbatches=2, devices=workers(2)) as engine:
        result = mean_step(engine, regression_batches(2), outside=outside)
    assert sorted(outside.shapes) == [(1, 8), (1, 8), (8, 8), (8, 8)]
    assert all(len(places) == 1 for places in outside.places)
    batches = regression_batches(2)
    for loss, (_, target) in zip(result.losses, batches, strict=True):
        assert loss is not None
        torch.testing.assert_close(loss, target.square().mean())


def test_asked_in_evaluation() -> None:
    module = Regressor(num_blocks=3)
    outside = Linears()
    with torch.no_grad(), engine_for(module, num_microbatches=1) as engine:
        prediction = engine.evaluate(
            lambda view, batch: view(batch[0]), regression_batches(1)[0], outside=outside
        )
    assert outside.shapes == [(8, 8), (1, 8)]
    assert not prediction.any()


@pytest.mark.parametrize("marks", [False, True])
def test_operations_in_a_block_cost_few_calls(*, marks: bool) -> None:
    """All workers share one interpreter lock. A FORWARD stage marks what the operations give."""
    calls = Counter[str]()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals["__name__"].startswith("roundpipe_lightning."):
            calls[frame.f_code.co_name] += 1

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            before = sys.getprofile()
            sys.setprofile(note if torch.is_grad_enabled() is not marks else None)
            for _ in range(10):
                x = self.linear(x).relu() * 0.5 + 1.0
            sys.setprofile(before)
            return x

    module = Regressor(2, make_block=Counted)
    stack = layers_of(module)
    partition = (
        Partition(forward=(1,), backward=(1, 1)) if marks else Partition(forward=(), backward=(2,))
    )
    plan = plan_of(stack, num_workers=1, num_microbatches=1, partition=partition)
    engine_step(module, stack, plan, regression_batches(1), devices=[CpuDevice()])
    assert calls["__torch_function__"] == (40 if marks else 80)
    # Beside the view's attributes, and what a function costs when it is met first.
    per_operation = {"__torch_function__", "check_tensor", "observe", "_mark"} if marks else set()
    assert calls.total() <= 180 + 40 * len(per_operation), calls


def test_user_code_has_few_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python finds those of an object with 30 or more in a slower way."""
    numbers: list[int] = []
    close = UserCode.close

    def note(user: UserCode) -> None:
        numbers.append(len(vars(user)))
        close(user)

    monkeypatch.setattr(UserCode, "close", note)
    with engine_for(Regressor(2), num_microbatches=1) as engine:
        mean_step(engine, regression_batches(1))
    assert 0 < max(numbers) < 30


# Writes into parameters ---------------------------------------------------------------------------


def _in_place(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.5)


def _through_data(parameter: Tensor) -> None:
    parameter.data.mul_(0.5)


def _by_other_data(parameter: Tensor) -> None:
    parameter.data = parameter.data * 0.5


@torch.no_grad()
def _several(parameter: Tensor) -> None:
    torch._foreach_mul_([parameter], 0.5)


def _anew(parameter: Tensor) -> None:
    nn.init.constant_(parameter, 0.5)


def _without_change(parameter: Tensor) -> None:
    """Clamp far away, as the blocks of Gemma 3n do."""
    parameter.data.clamp_(-99, 99)
    with torch.no_grad():
        parameter.clamp_(-99, 99)


WRITES: list[Callable[[Any], None]] = [_in_place, _through_data, _by_other_data, _several, _anew]
REFUSED = "A step writes into the parameter {!r}, in a block, for every microbatch or beside"


class _Writing(Block):
    """A block that may write into a parameter before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.write: Callable[[Any], None] = lambda parameter: None

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.outer.weight)
        return super().forward(x)


class _Averaging(Regressor):
    """Has a slow copy of its head, of parameters that are not trained."""

    def __init__(self) -> None:
        super().__init__(3, make_block=_Writing)
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.write: Callable[[Any], None] = lambda parameter: None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.write(self.teacher.weight)
        return super().training_step(batch, batch_idx) + self.teacher(batch[0]).mean()


@pytest.mark.parametrize("devices", [emulated_workers, cpu_workers])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("plans_blocks", [True, False])
def test_a_write_into_a_block_is_refused(
    write: Callable[[Any], None], devices: Any, plans_blocks: bool
) -> None:
    module, batches = _Averaging(), regression_batches(3)
    before = copy.deepcopy(module.state_dict())
    wanted = plain_step(module, batches)
    written: Any = module.layers[1]
    written.write = write

    def call(view: Any, batch: Any, index: int) -> Any:
        if not plans_blocks:  # a call that the plan does not have
            view.layers[1](view.head(batch[0]))
        return view.training_step(batch, 0)

    with engine_for(module, devices=devices(2)) as engine:
        name = re.escape(REFUSED.format("layers.1.outer.weight"))
        with pytest.raises(ConfigurationError, match=name):
            mean_step(engine, batches, call=call)
        written.write = _without_change
        module.load_state_dict(before)
        assert not differences(module, mean_step(engine, batches), wanted)


def _new_parameter(block: Any) -> None:
    block.outer.weight = nn.Parameter(block.outer.weight.detach() * 0.5)


def _another_name(block: Any) -> None:
    block.scale = nn.Parameter(torch.ones(()))


def _new_module(block: Any) -> None:
    block.outer = nn.Linear(2 * WIDTH, WIDTH)


@pytest.mark.parametrize("devices", [emulated_workers, cpu_workers])
@pytest.mark.parametrize("change", [_new_parameter, _another_name, _new_module])
def test_a_block_that_makes_a_parameter_is_refused(
    change: Callable[[Any], None], devices: Any
) -> None:
    class Making(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.same = self.outer
            self.outer.weight = self.outer.weight
            change(self)
            return super().forward(x)

    module = Regressor(2, make_block=Making)
    with (
        engine_for(module, devices=devices(2)) as engine,
        pytest.raises(ConfigurationError, match="to a new parameter, or to a module with some"),
    ):
        mean_step(engine, regression_batches(3))


@pytest.mark.parametrize("devices", [emulated_workers, cpu_workers])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_by_every_microbatch_is_refused(write: Callable[[Any], None], devices: Any) -> None:
    module, batches = _Averaging(), regression_batches(3)
    before = copy.deepcopy(module.state_dict())
    wanted = plain_step(module, batches)
    with engine_for(module, devices=devices(2)) as engine:
        module.write = write
        with pytest.raises(ConfigurationError, match=re.escape(REFUSED.format("teacher.weight"))):
            mean_step(engine, batches)
        module.write = lambda parameter: None
        module.load_state_dict(before)
        assert not differences(module, mean_step(engine, batches), wanted)


@pytest.mark.parametrize("devices", [emulated_workers, cpu_workers])
def test_what_is_put_back_is_no_write(devices: Any) -> None:
    def swapped_for_a_moment(parameter: Tensor) -> None:
        before = parameter.data
        parameter.data = torch.zeros_like(before)
        parameter.data = before

    module = _Averaging()
    module.write = swapped_for_a_moment
    check_parity(module, devices=devices(2))


class _MomentumTeacher(Regressor):
    """Its teacher, blocks too, is a moving average of the student, moved between two uses."""

    def __init__(self, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__(3)
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.listed = list(self.teacher.parameters())
        self.move = write

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found, wanted = self.run_blocks(self.head(batch[0])), batch[0]
        for _ in range(2):
            for layer in self.teacher:
                wanted = layer(wanted)
            for mine, slow in zip(self.layers.parameters(), self.teacher.parameters(), strict=True):
                self.move(slow, mine)
        self.listed[0].data.add_(0.25)
        self.head.weight.data.clamp_(-0.1, 0.1)
        return (found - wanted).square().mean()


class _StillTeacher(_MomentumTeacher):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found, wanted = self.run_blocks(self.head(batch[0])), batch[0]
        for layer in [*self.teacher, *self.teacher]:
            wanted = layer(wanted)
        return (found - wanted).square().mean()


def _lerp(slow: Tensor, mine: Tensor) -> None:
    with torch.no_grad():
        slow.lerp_(mine, 0.5)


def _data(slow: Tensor, mine: Tensor) -> None:
    slow.data.mul_(0.5).add_(mine.data, alpha=0.5)


def _assigned(slow: Tensor, mine: Tensor) -> None:
    slow.data = slow.data * 0.5 + mine.data * 0.5


@torch.no_grad()
def _foreach(slow: Tensor, mine: Tensor) -> None:
    torch._foreach_lerp_([slow], [mine], 0.5)


@pytest.mark.suite(
    "_lerp-emulated_workers", "_foreach-cpu_workers", "_assigned-cpu_workers", "_data-cpu_workers"
)
@pytest.mark.parametrize("devices", [emulated_workers, cpu_workers])
@pytest.mark.parametrize("write", [_lerp, _data, _assigned, _foreach])
def test_a_momentum_teacher_moves_once_in_a_step_that_runs_once(write: Any, devices: Any) -> None:
    module = _MomentumTeacher(write)
    twin = copy.deepcopy(module)
    stacks = [layers_of(module), stack_of(tuple(module.teacher), name="teacher")]
    chain = Chain.recorded(Chain.from_stacks([stacks[0], stacks[1], stacks[1]]).links)
    (batch,) = regression_batches(1, samples_each=6)
    plan = plan_of(chain, num_workers=2, num_microbatches=3)
    with Engine(module, stack=stacks, devices=devices(2), plan=plan, chain=chain) as engine:
        for _ in range(2):
            twin.zero_grad()
            loss = twin.training_step(batch, 0)
            loss.backward()
            result = mean_step(engine, [batch], joined=True)
            torch.testing.assert_close(result.losses[0], loss.detach())
            torch.testing.assert_close(
                dict(module.named_parameters()), dict(twin.named_parameters())
            )
            for name, parameter in twin.layers.named_parameters():
                got = result.gradients[module.layers.get_parameter(name)]
                torch.testing.assert_close(got, parameter.grad)


class _Noting(LockingDevice):
    """Counts uploads from page-locked memory: such a copy may come to read it later."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.num_from_locked = 0

    def upload(self, tensor: Tensor, wait: Any = None) -> Tensor:
        place = tensor.data_ptr()
        self.num_from_locked += any(a <= place < a + size for a, size in self.locked.items())
        return super().upload(tensor, wait)


def test_what_is_written_is_uploaded_again_in_its_step_alone_and_not_from_what_may_change() -> None:
    module = _MomentumTeacher(_lerp)
    stacks = [layers_of(module), stack_of(tuple(module.teacher), name="teacher")]
    chain = Chain.recorded(Chain.from_stacks([stacks[0], stacks[1], stacks[1]]).links)
    (batch,) = regression_batches(1, samples_each=6)
    plan = plan_of(chain, num_workers=1, num_microbatches=3)
    device, counts = _Noting(0), []
    with Engine(module, stack=stacks, devices=[device], plan=plan, chain=chain) as engine:
        for writes in (True, True, False, False):
            if not writes:
                module.__class__ = _StillTeacher
            device.num_uploads = 0
            mean_step(engine, [batch], joined=True)
            counts.append(device.num_uploads)
    assert counts[1] > counts[2] == counts[3] == 2, "the batch"
    assert not device.num_from_locked


# What blocks do beside computing -----------------------------------------------------------------


class _Clearing(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.zero_grad()
        return super().forward(x)


class _Remembering(Block):
    """Adds what it was given in the step before, which another device may have made."""

    before: Any = None

    def forward(self, x: Tensor) -> Tensor:
        before, self.before = self.before, x.detach().mean(0)
        return super().forward(x if before is None else x + before)


@pytest.mark.filterwarnings("ignore:A block calls zero_grad")
@pytest.mark.parametrize("devices", [emulated_workers, cpu_workers])
@pytest.mark.parametrize(("block", "num_microbatches"), [(_Clearing, 3), (_Remembering, 1)])
def test_blocks_do_as_on_one_device(block: Any, num_microbatches: int, devices: Any) -> None:
    module = Regressor(3, make_block=block)
    twin = Regressor(3) if block is _Clearing else Regressor(3, make_block=block)
    batches = regression_batches(num_microbatches)
    with engine_for(module, devices=devices(3), num_microbatches=num_microbatches) as engine:
        for _ in range(3):
            wanted = plain_step(twin, batches)
            assert not differences(module, mean_step(engine, batches), wanted)


class _Reading(Block):
    def forward(self, x: Tensor) -> Tensor:
        assert self.inner.weight.grad is None
        return super().forward(x)


@on_any_workers
@pytest.mark.parametrize(
    ("block", "warning"),
    [
        (_Clearing, r"A block calls zero_grad\(\), which does nothing"),
        (_Reading, r"a block, reads a parameter's \.grad, which is None in steps"),
    ],
)
def test_gradients_of_the_batch_before_are_not_there(
    block: Any, warning: str, workers: Workers
) -> None:
    with (
        engine_for(Regressor(2, make_block=block), devices=workers(2)) as engine,
        pytest.warns(UserWarning, match=warning),
    ):
        mean_step(engine, regression_batches(3))


def test_a_block_that_gives_its_parameters_gradients_is_refused() -> None:
    class Descending(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                start = x.detach().requires_grad_()
                self.norm(start).square().sum().backward()
            assert start.grad is not None
            return super().forward(x - start.grad)

    with (
        engine_for(module := Regressor(2, make_block=Descending)) as engine,
        pytest.raises(CaptureError, match=r"calls backward\(\), which gives gradients"),
    ):
        mean_step(engine, regression_batches(3))
    assert all(parameter.grad is None for parameter in module.parameters())
