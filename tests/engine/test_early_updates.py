import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.gradient_reduce import GradientReducer
from roundpipe_lightning.engine.update.partial_step import CapturedStep
from roundpipe_lightning.engine.update.updater import Updater, UpdateUnit, update_units
from tests.kit.engine import (
    Regressor,
    engine_of,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
    units_of,
)
from tests.kit.moments import call_in_backward

NUM_MICROBATCHES = 2

RunUnit = Callable[[UpdateUnit, CapturedStep], None]


def run_unit(unit: UpdateUnit, step: CapturedStep) -> None:
    step.run(unit.parameters)


@contextmanager
def opened(
    module: Any, *, kind: type[Any] = EmulatedDevice, run: RunUnit = run_unit
) -> Iterator[tuple[Engine, Updater]]:
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=NUM_MICROBATCHES)
    devices: list[Device] = [kind(index) for index in range(2)]
    with (
        engine_of(module, stack, plan, devices=devices) as engine,
        Updater(engine.store, units_of(engine, module), run_unit=run) as updater,
    ):
        yield engine, updater


def step(engine: Engine) -> dict[nn.Parameter, Tensor]:
    batches = regression_batches(NUM_MICROBATCHES)
    return mean_step(engine, batches, call=lambda v, b, i: v.training_step(b, i)).gradients


def finish(updater: Updater, optimizer: Any, gradients: dict[nn.Parameter, Tensor]) -> None:
    for parameter, gradient in gradients.items():
        assert parameter.grad is None
        parameter.grad = gradient
    updater.submit(optimizer, release_gradients=True)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def plainly_trained(module: Any, num_steps: int) -> dict[str, Tensor]:
    optimizer = optimizer_of(module)
    for _ in range(num_steps):
        gradients = plain_step(module, regression_batches(NUM_MICROBATCHES)).gradients
        for name, parameter in module.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
    return dict(module.named_parameters())


def equal(module: nn.Module, expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(expected[name], p) for name, p in module.named_parameters())


class Waiting(Regressor):
    """A module whose backward pass ends when some block has been stepped, and not before."""

    def __init__(self) -> None:
        super().__init__(3)
        self.updated = [threading.Event()]

    def run_blocks(self, hidden: Tensor) -> Tensor:
        (event,) = self.updated

        def wait() -> None:
            assert event.wait(timeout=60), "no block was stepped"

        return super().run_blocks(call_in_backward(hidden, wait))


@pytest.mark.parametrize("kind", [EmulatedDevice, CpuDevice])
def test_blocks_are_stepped_before_the_backward_pass_ends(kind: Any) -> None:
    module = Waiting()
    ran: list[str] = []

    def run(unit: UpdateUnit, step: CapturedStep) -> None:
        step.run(unit.parameters)
        ran.append(unit.name)
        module.updated[0].set()

    with opened(module, kind=kind, run=run) as (engine, updater):
        optimizer = optimizer_of(module)
        for number in range(3):
            module.updated[0].clear()
            updater.begin(optimizer)
            gradients = step(engine)
            updater.join()  # of the step before, and nothing else
            names = {name for name, p in module.named_parameters() if p in gradients}
            assert names == {"head.weight", "head.bias", "tail.weight", "tail.bias"}
            finish(updater, optimizer, gradients)
            updater.join()
            assert sorted(ran[-7:-4]) == ["layers.0", "layers.1", "layers.2"], number
    for event in module.updated:
        event.set()
    assert equal(module, plainly_trained(Regressor(3), 3))


class Penalized(Regressor):
    """The loss looks at a weight of a block, in some microbatches."""

    layers: Any

    def __init__(self) -> None:
        super().__init__(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = functional.mse_loss(self(x), y)
        if batch_idx == 0:
            loss = loss + 0.1 * self.layers[1].inner.weight.square().sum()
        return loss


def test_weights_that_the_loss_uses_wait_for_all_their_gradients() -> None:
    module = Penalized()
    with opened(module) as (engine, updater):
        optimizer = optimizer_of(module)
        for _ in range(2):
            updater.begin(optimizer)
            gradients = step(engine)
            weight = module.layers[1].inner.weight
            assert weight in gradients
            assert module.layers[1].outer.weight not in gradients
            finish(updater, optimizer, gradients)
            updater.join()
    twin = Penalized()
    optimizer = optimizer_of(twin)
    for _ in range(2):
        optimizer.zero_grad()
        for index, batch in enumerate(regression_batches(NUM_MICROBATCHES)):
            (twin.training_step(batch, index) / NUM_MICROBATCHES).backward()
        optimizer.step()
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(dict(module.named_parameters())[name], parameter)


def test_what_the_optimizer_does_not_have_is_left_alone() -> None:
    module: Any = Regressor(2)
    before = module.layers[0].inner.weight.detach().clone()
    with opened(module) as (engine, updater):
        optimizer = torch.optim.SGD(module.layers[1].parameters(), lr=0.1)
        updater.begin(optimizer)
        gradients = step(engine)
        assert module.layers[0].inner.weight in gradients
        assert module.layers[1].inner.weight not in gradients
        finish(updater, optimizer, gradients)
        updater.join()
    assert torch.equal(module.layers[0].inner.weight, before)


def test_an_error_of_an_early_update_is_raised_once() -> None:
    module = Regressor(2)

    def run(unit: UpdateUnit, step: CapturedStep) -> None:
        raise RuntimeError(unit.name)

    with opened(module, run=run) as (engine, updater):
        optimizer = optimizer_of(module)
        updater.begin(optimizer)
        step(engine)
        num_updated = updater.abandon(RuntimeError())
        assert num_updated == sum(1 for _ in module.layers.parameters())
        with pytest.raises(RuntimeError, match=r"layers\.[01]") as caught:
            updater.join()  # of the block whose gradients were added up first; nothing follows
        (note,) = vars(caught.value)["__notes__"]
        assert f"AdamW updated '{caught.value}'" in note
        updater.join()


def test_gradients_of_a_step_that_failed_are_not_of_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, add_stage = Regressor(3), GradientReducer.add_stage
    expected = plainly_trained(copy.deepcopy(module), 1)
    landed, begun_again = threading.Event(), threading.Event()

    def late(self: GradientReducer, *given: Any) -> None:
        if given[-1] and not landed.is_set():
            landed.set()
            begun_again.wait(0.3)  # it does not come: a step ends after the sums of its gradients
        add_stage(self, *given)

    def fail(_: Tensor) -> None:
        assert landed.wait(20)
        raise ValueError("a fault")

    def call(view: Any, batch: Any, _: int) -> Tensor:
        hidden = view.head(batch[0])
        hidden.register_hook(fail)
        return functional.mse_loss(view.tail(view.run_blocks(hidden)).squeeze(-1), batch[1])

    monkeypatch.setattr(GradientReducer, "add_stage", late)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with opened(module) as (engine, updater):
        updater.begin(optimizer)
        batches = regression_batches(NUM_MICROBATCHES)
        with pytest.raises(ValueError, match="a fault"):
            mean_step(engine, batches, call=call, loss_scales=[9.0, 9.0])
        updater.abandon(RuntimeError())
        optimizer = optimizer_of(module)
        updater.begin(optimizer)
        begun_again.set()
        finish(updater, optimizer, step(engine))
    assert equal(module, expected)


def test_nobody_reads_a_block_before_all_its_parts_are_updated() -> None:
    module: Any = Regressor(1)
    layer = module.layers[0]
    allowed, ran = threading.Semaphore(0), threading.Semaphore(0)

    def run(unit: UpdateUnit, step: CapturedStep) -> None:
        assert allowed.acquire(timeout=60)
        step.run(unit.parameters)
        ran.release()

    store = HostStore(module, [layer])
    units = update_units(module, {"layers.0": layer}, shared=store.shared)
    with Updater(store, units, run_unit=run) as updater:
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        updater.begin(optimizer)
        assert store.take_gradients is not None
        store.take_gradients({layer.inner.weight: torch.ones_like(layer.inner.weight)}, ())
        layer.outer.weight.grad = torch.ones_like(layer.outer.weight)
        updater.submit(optimizer)
        [event] = store.updates_of(layer.parameters())
        allowed.release()  # the part with `inner.weight`
        assert ran.acquire(timeout=60)
        were_done = [event.is_done]
        allowed.release()
        updater.join()
        were_done.append(event.is_done)
    assert were_done == [False, True]
    store.close()
