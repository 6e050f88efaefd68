import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.emulation.tagged_tensor import tag_of
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.host_memory import PAGE_BYTES
from tests.kit.engine import (
    WIDTH,
    Regressor,
    cpu_workers,
    engine_for,
    engine_of,
    layers_of,
    mean_step,
    plan_of,
    regression_batches,
)

SERVERS: dict[str, Callable[[int], list[Device]]] = {
    "processor": cpu_workers,
    "emulated": lambda num: [EmulatedDevice(i) for i in range(num)],  # no checker: it remembers
}
servers = pytest.mark.parametrize("server", SERVERS)


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # what was there before is not looked through: millions of objects
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _tensors() -> dict[int, Tensor]:
    """Return all tensors that the collector knows of.

    Tensors without a Python attribute are not tracked in every version; parameters, results and
    whatever a frame or a closure holds are reached through their holders.
    """
    found: dict[int, Tensor] = {}
    for thing in gc.get_objects():
        candidates = [thing]
        if type(thing) in (dict, list, tuple):
            candidates = list(thing.values()) if type(thing) is dict else list(thing)
        for candidate in candidates:
            if issubclass(type(candidate), Tensor):
                found[id(candidate)] = candidate
    return found


def _memory(tensor: Tensor | None) -> int:
    assert tensor is not None
    return tensor.untyped_storage().data_ptr()


class Watched(Regressor):
    """Notes, weakly, the tensors of a step: in the head, the blocks and the tail."""

    class Block(nn.Module):
        def __init__(self, notes: list[weakref.ref[Any]]) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("scale", torch.ones(()))
            self.scale: Tensor
            self.notes = notes

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            hidden = torch.tanh(self.linear(x)) * mask * self.scale
            self.notes += [weakref.ref(hidden), weakref.ref(x)]
            if tag_of(self.linear.weight) is None:  # on a device slots keep the leaves
                self.notes.append(weakref.ref(self.linear.weight))
            return x + hidden

    def __init__(self) -> None:
        self.notes: list[weakref.ref[Any]] = []
        super().__init__(make_block=lambda: self.Block(self.notes))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        mask = torch.ones(WIDTH, device=x.device)
        hidden = self.head(x)
        self.notes += [weakref.ref(hidden), weakref.ref(mask), weakref.ref(self.head.weight)]
        for layer in self.layers:
            hidden = layer(hidden, mask)
        loss = functional.mse_loss(self.tail(hidden).squeeze(-1), y)
        self.notes += [weakref.ref(hidden), weakref.ref(loss), weakref.ref(self.tail.weight)]
        self.notes += [weakref.ref(self), weakref.ref(self.layers), weakref.ref(self.layers[0])]
        return {"loss": loss, "hidden": hidden.mean(0)}


@servers
def test_a_step_leaves_nothing(server: str) -> None:
    module = Watched()
    batches = regression_batches(3)
    with engine_for(module, num_microbatches=3, devices=SERVERS[server](2)) as engine:
        mean_step(engine, batches)  # whatever is made once
        module.notes.clear()
        with _no_collection():
            before = _tensors()
            result = mean_step(engine, batches)
            assert len(module.notes) > 50
            alive = [note() for note in module.notes if note() is not None]
            assert not alive
            kept = {_memory(t) for t in (*result.gradients.values(), *result.losses)}
            kept |= {_memory(t) for output in result.outputs for t in output.values()}
            kept |= {_memory(block.pages) for block in engine._transfers._pool._blocks}
            fresh = [t for key, t in _tensors().items() if key not in before]
            assert not [t for t in fresh if _memory(t) not in kept]
            gradient = weakref.ref(next(iter(result.gradients.values())))
            del result, fresh
            assert gradient() is None


@servers
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_memory_does_not_grow(server: str, joined: bool, backward: bool) -> None:
    module = Watched()
    batches = regression_batches(3)
    if joined:
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        batches = [(x, y)]
    counts = []
    with (
        engine_for(module, num_workers=3, num_microbatches=3, devices=SERVERS[server](3)) as engine,
        _no_collection(),
    ):
        for _ in range(4):
            engine.begin_step(
                batches,
                lambda view, batch, index: view.training_step(batch, 0),
                loss_scales=[1.0] * len(batches),
                joined=joined,
                backward=backward,
            ).result()
            module.notes.clear()
            pages = engine.staging_bytes // PAGE_BYTES  # a block each: as many as were in flight
            counts.append((len(_tensors()) - pages, len(gc.get_objects())))
    tensors, objects = zip(*counts[1:], strict=True)
    assert len(set(tensors)) == 1
    if server == "processor":  # PyTorch's dispatch in Python leaves closures to the collector
        assert objects[-1] - objects[0] < 50


@servers
def test_an_evaluation_leaves_nothing(server: str) -> None:
    module = Watched()
    (batch,) = regression_batches(1)
    with (
        engine_for(module, num_microbatches=1, devices=SERVERS[server](2)) as engine,
        torch.no_grad(),
    ):
        for _ in range(2):
            module.notes.clear()
            with _no_collection():
                result = engine.evaluate(lambda view, b: view.training_step(b, 0), batch)
                assert not [note() for note in module.notes if note() is not None]
        assert not result["loss"].requires_grad


class _PlannedError(Exception):
    """Raised by the test in user code."""


@servers
def test_a_failed_step_leaves_nothing_once_its_error_is_gone(server: str) -> None:
    module = Watched()
    batches = regression_batches(3)

    def call(view: Any, batch: Any, index: int) -> Any:
        loss = view.training_step(batch, 0)["loss"]
        if index == 2:
            raise _PlannedError
        return loss

    with engine_for(module, num_microbatches=3, devices=SERVERS[server](2)) as engine:
        mean_step(engine, batches)
        module.notes.clear()
        with _no_collection():
            try:
                mean_step(engine, batches, call=call)
            except _PlannedError:
                pass
            else:
                pytest.fail("no error")
            assert not [note() for note in module.notes if note() is not None]


def test_closing_the_engine_leaves_ordinary_parameters() -> None:
    module = Watched()
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=2)
    parameters = list(module.parameters())
    with _no_collection():
        engine = engine_of(module, stack, plan)
        note = weakref.ref(engine)
        with engine:
            mean_step(engine, regression_batches(2))
        del engine
        assert note() is None
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    module.training_step(regression_batches(1)[0], 0)["loss"].backward()
    assert all(parameter.grad is not None for parameter in parameters)
