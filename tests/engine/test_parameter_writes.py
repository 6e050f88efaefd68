import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.errors import ConfigurationError
from tests.kit.engine import (
    WIDTH,
    Block,
    LockingDevice,
    Regressor,
    check_parity,
    cpu_workers,
    differences,
    emulated_workers,
    engine_for,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
    stack_of,
    training_step,
)


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


WRITES: list[Callable[[Any], None]] = [_in_place, _through_data, _by_other_data, _several]
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


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("plans_blocks", [True, False])
def test_a_write_into_a_block_is_refused(write: Callable[[Any], None], plans_blocks: bool) -> None:
    module, batches = _Averaging(), regression_batches(3)
    wanted = plain_step(module, batches)
    written: Any = module.layers[1]
    written.write = write

    def call(view: Any, batch: Any, index: int) -> Any:
        if not plans_blocks:  # a call that the plan does not have
            view.layers[1](view.head(batch[0]))
        return view.training_step(batch, 0)

    with engine_for(module, devices=emulated_workers(2)) as engine:
        name = re.escape(REFUSED.format("layers.1.outer.weight"))
        with pytest.raises(ConfigurationError, match=name):
            mean_step(engine, batches, call=call)
        written.write = lambda parameter: None
        assert not differences(module, mean_step(engine, batches), wanted)


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


@pytest.mark.parametrize("place", ["block", "outside"])
def test_a_parameter_with_other_memory_is_refused_on_the_host_too(place: str) -> None:
    module: Any = _Averaging()
    (module.layers[1] if place == "block" else module).write = _by_other_data
    with (
        engine_for(module) as engine,
        pytest.raises(ConfigurationError, match="writes into the parameter"),
    ):
        mean_step(engine, regression_batches(3))


class _MomentumTeacher(Regressor):
    """Its teacher, blocks too, is a moving average of the student, moved between two uses."""

    def __init__(self, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__(3)
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)
        self.listed = list(self.teacher.parameters())
        self.move = write

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found, wanted = self.head(batch[0]), batch[0]
        for layer in self.layers:
            found = layer(found)
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
        found, wanted = self.head(batch[0]), batch[0]
        for layer in self.layers:
            found = layer(found)
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
            result = engine.begin_step(
                [batch], training_step, loss_scales=[1.0], joined=True
            ).result()
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
            engine.begin_step([batch], training_step, loss_scales=[1.0], joined=True).result()
            counts.append(device.num_uploads)
    assert counts[1] > counts[2] == counts[3] == 2, "the batch"
    assert not device.num_from_locked
