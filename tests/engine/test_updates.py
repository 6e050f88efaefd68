import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.engine.device.events import UpdateAborted
from roundpipe_lightning.engine.exchange import heartbeat
from roundpipe_lightning.engine.exchange.hosts import Watch
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.update import hosts_update
from roundpipe_lightning.engine.update.hosts_update import JointStep, NormClip
from roundpipe_lightning.engine.update.partial_step import CapturedStep
from roundpipe_lightning.engine.update.updater import Updater, UpdateUnit, update_units
from tests.kit.moments import PATIENCE_SECONDS


class Model(nn.Module):
    """An embedding, blocks that share a scale, and a head."""

    embedding: Any
    layers: Any
    head: Any

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        for layer in list(self.layers)[1:]:
            layer.scale = self.layers[0].bias  # shared by all of them
        self.head = nn.Linear(3, 2)


class Steered:
    """Runs the updates of units on request."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.allowed = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def __call__(self, unit: UpdateUnit, step: CapturedStep) -> None:
        self.begun.release()
        assert self.allowed.acquire(timeout=PATIENCE_SECONDS)
        step.run(unit.parameters)
        self.ran.append(unit.name)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def store(model: Model) -> Iterator[HostStore]:
    store = HostStore(model, list(model.layers))
    yield store
    store.close()


def units_of(model: Model, store: HostStore) -> list[UpdateUnit]:
    blocks = {f"layers.{index}": layer for index, layer in enumerate(model.layers)}
    return update_units(model, blocks, shared=store.shared)


def sgd_with_gradients(model: nn.Module, *, lr: float = 1.0) -> torch.optim.SGD:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(model.parameters(), lr=lr)


def await_waiter(store: HostStore, parameter: nn.Parameter) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(event._callbacks for event in store.updates_of([parameter])):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def in_thread(call: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except UpdateAborted as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, results


def test_a_unit_per_block_and_per_parameter_with_other_uses(model: Model, store: HostStore) -> None:
    units = {unit.name: len(unit.parameters) for unit in units_of(model, store)}
    assert units == {
        "embedding.weight": 1,
        "embedding.bias": 1,
        "layers.0": 1,
        "layers.0.bias": 1,
        "layers.1": 2,
        "layers.2": 2,
        "head.weight": 1,
        "head.bias": 1,
    }


def test_nobody_reads_a_block_before_its_update(model: Model, store: HostStore) -> None:
    steered, before = Steered(), [p.detach().clone() for p in model.parameters()]
    with Updater(store, units_of(model, store), run_unit=steered) as updater:
        updater.submit(sgd_with_gradients(model))
        layer, device = model.layers[1], CpuDevice()
        thread, results = in_thread(lambda: store.upload_block(layer, device))
        names = [unit.name for unit in units_of(model, store)]
        before_it = names.index("layers.1")
        steered.allowed.release(before_it)
        assert all(steered.begun.acquire(timeout=PATIENCE_SECONDS) for _ in range(before_it + 1))
        assert thread.is_alive()
        steered.allowed.release()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
        assert steered.ran == names[: before_it + 1]
        weight = results[0][layer.weight]
        assert not updater.is_joined
        steered.allowed.release(9)
        updater.join()
        assert torch.equal(weight, layer.weight)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old - 1)


def test_gradients_that_are_released_are_the_updates_own(model: Model, store: HostStore) -> None:
    """The update does not read what the user's code does to `.grad` meanwhile, e.g. zeroing it."""
    steered, before = Steered(), model.head.weight.detach().clone()
    with Updater(store, units_of(model, store), run_unit=steered) as updater:
        optimizer = sgd_with_gradients(model)
        updater.submit(optimizer, release_gradients=True)
        assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.zero_grad(set_to_none=False)
        newer = torch.zeros_like(model.head.bias)
        model.head.bias.grad = newer
        steered.allowed.release(9)
        updater.join()
    assert torch.equal(model.head.weight, before - 1)
    assert model.head.bias.grad is newer


def test_an_error_is_raised_once_and_lets_everybody_go(model: Model, store: HostStore) -> None:
    shall_wait = [True]

    def fail(unit: UpdateUnit, step: CapturedStep) -> None:
        if unit.name == "layers.1":
            if shall_wait.pop():
                await_waiter(store, model.layers[1].weight)
            raise OSError("the disk is full")
        step.run(unit.parameters)

    with Updater(store, units_of(model, store), run_unit=fail) as updater:
        updater.submit(sgd_with_gradients(model))
        thread, results = in_thread(lambda: store.await_updated(*model.layers[1].parameters()))
        thread.join(PATIENCE_SECONDS)
        assert isinstance(results[0], UpdateAborted)
        with pytest.raises(OSError, match="the disk is full") as caught:
            updater.join()
        assert vars(caught.value)["__notes__"] == ["This happened while SGD updated 'layers.1'."]
        updater.join()
        store.await_updated(*model.layers[2].parameters())
        shall_wait.append(False)
        updater.submit(sgd_with_gradients(model))
        with pytest.raises(OSError, match="the disk is full"):
            updater.join()


def test_the_thread_ends_although_nobody_joined_for_the_error(
    model: Model, store: HostStore
) -> None:
    def fail(unit: UpdateUnit, step: CapturedStep) -> None:
        raise OSError("the disk is full")

    with Updater(store, units_of(model, store), run_unit=fail) as updater:
        updater.submit(sgd_with_gradients(model))
    assert "roundpipe-updates" not in {thread.name for thread in threading.enumerate()}
    assert not store.updates


@pytest.mark.parametrize("emulated", [False, True])
def test_stale_values_are_those_of_before_the_update(
    model: Model, store: HostStore, emulated: bool
) -> None:
    device = EmulatedDevice(0) if emulated else CpuDevice()
    steered, layer = Steered(), model.layers[1]

    def current_values() -> list[Tensor]:
        values = store.upload_block(layer, device)
        seen = [values[layer.weight], device.upload(store.value(model.head.weight))]
        return [device.download(value).clone() for value in seen]

    def masters() -> list[Tensor]:
        return [layer.weight.detach().clone(), model.head.weight.detach().clone()]

    with Updater(store, units_of(model, store), stale=True, run_unit=steered) as updater:
        history = [masters()]
        assert all(map(torch.equal, current_values(), history[0]))
        for number in range(3):
            optimizer = sgd_with_gradients(model)
            updater.keep([optimizer])
            updater.submit(optimizer)
            assert all(map(torch.equal, current_values(), history[number]))  # while the update runs
            steered.allowed.release(8)
            with updater.latest():
                assert all(map(torch.equal, current_values(), masters()))
            assert all(map(torch.equal, current_values(), history[number]))  # and after it
            history.append(masters())
            assert torch.equal(history[-1][0], history[-2][0] - 1)
        updater.forget()
        assert all(map(torch.equal, current_values(), masters()))


def test_a_step_that_was_left_out_makes_nothing_staler(model: Model, store: HostStore) -> None:
    with Updater(store, units_of(model, store), stale=True) as updater:
        optimizer = sgd_with_gradients(model)
        updater.keep([optimizer])
        updater.submit(optimizer)
        updater.join()
        assert not torch.equal(store.value(model.head.weight), model.head.weight)
        updater.keep([optimizer])  # gradients overflowed: no update
        assert torch.equal(store.value(model.head.weight), model.head.weight)


def test_what_is_not_trained_has_no_second_copy(model: Model) -> None:
    model.embedding.requires_grad_(False)
    for layer in model.layers:
        layer.weight.requires_grad_(False)
    store = HostStore(model, list(model.layers))
    with Updater(store, units_of(model, store), stale=True) as updater:
        updater.keep([torch.optim.SGD([*model.head.parameters(), model.layers[0].bias], lr=1.0)])
        updater.join()
        assert model.embedding.weight not in store.previous
        assert model.layers[1].weight not in store.previous
        assert {model.head.weight, model.head.bias, model.layers[0].bias} <= set(store.previous)
    store.close()


def test_parameters_that_come_later_are_kept_too(model: Model, store: HostStore) -> None:
    with Updater(store, units_of(model, store), stale=True) as updater:
        optimizer = torch.optim.SGD(model.head.parameters(), lr=1.0)
        updater.keep([optimizer])
        updater.join()
        optimizer.add_param_group({"params": list(model.layers[1].parameters())})
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        updater.keep([optimizer])
        before = model.layers[1].weight.detach().clone()
        updater.submit(optimizer)
        updater.join()
        assert torch.equal(store.value(model.layers[1].weight), before)
        assert torch.equal(model.layers[1].weight, before - 1)


def test_parameters_that_are_not_the_modules_are_stepped(model: Model, store: HostStore) -> None:
    foreign = nn.Parameter(torch.ones(2))
    foreign.grad = torch.ones(2)
    with Updater(store, units_of(model, store)) as updater:
        optimizer = sgd_with_gradients(model)
        optimizer.add_param_group({"params": [foreign]})
        updater.submit(optimizer)
        updater.join()
    assert torch.equal(foreign, torch.zeros(2))


def test_gradients_that_are_being_taken_count_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever submits the step meanwhile would give, and announce, them once more."""
    looked: list[bool] = []

    class Looking(Future[Any]):
        def set_result(self, result: Any) -> None:
            looked.extend([joint.is_given(0)] if is_taking else [])
            super().set_result(result)

    is_taking = False
    monkeypatch.setattr(hosts_update, "Future", Looking)
    parameter = nn.Parameter(torch.ones(2))
    step = CapturedStep(torch.optim.SGD([parameter], lr=1.0), gradients={})
    joint = JointStep(step, {"weight": [parameter]}, begins_early=True, waits=False)
    joint.give(0, {parameter: torch.ones(2)})
    is_taking = True
    assert torch.equal(joint.take(0).gradients[parameter], torch.ones(2))
    assert looked
    assert all(looked)
    assert joint.is_given(0)


def test_gradients_wait_for_room_unless_others_are_missing() -> None:
    """What is missing comes behind them: of the unit to be sent, or of the batch before."""
    waits: list[bool] = []

    def give_up() -> bool:
        waits[-1] = True
        return True

    def asks() -> bool:
        waits.append(False)
        joint.await_room(give_up)
        return waits[-1]

    def give(number: int) -> None:
        joint.give(number, {parameters[number]: torch.ones(2)}, is_weighed=False)

    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    step = CapturedStep(torch.optim.SGD(parameters, lr=1.0), gradients={})
    members = {str(number): [p] for number, p in enumerate(parameters)}
    joint = JointStep(step, members, begins_early=True, waits=False)
    give(1)
    give(2)
    assert not asks(), "the batch before may come behind"
    joint.weigh(None)
    assert asks()
    thread, taken = in_thread(lambda: joint.take(0))
    while joint._awaited is None:
        time.sleep(0.001)
    assert not asks(), "the first one comes behind"
    give(0)
    assert asks(), "whoever takes it may not have noticed yet"
    joint.weigh(0.5)
    thread.join()
    assert [given.share for given in taken] == [0.5]
    assert asks()
    joint.take(1)
    assert not asks(), "one waits"


def test_batches_that_are_added_up_have_shares_of_their_own() -> None:
    """Also where one has begun while the one before goes on."""
    weight = nn.Parameter(torch.zeros(2))
    model = nn.ParameterList([weight])
    store = HostStore(model, [])
    with Updater(store, []) as updater:
        takes = []
        for share in (0.25, 0.5):
            updater.add_up(adds=True)
            takes.append(store.take_gradients)
            if share == 0.25:
                updater.weigh(share)
        for take in reversed(takes):
            assert take is not None
            assert take({weight: torch.ones(2)}, ()) == {weight}
        updater.weigh(0.5)
    store.close()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2,), 0.75))


@pytest.mark.parametrize("value", [0.0, 0.1, 3.0, float("inf"), float("nan")])
def test_the_norm_clips_as_torch_does(value: float) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([value, 1.0, 2.0])
    mine = weight.grad.clone()
    clip = NormClip(1.0)
    clip.set_norm(float(nn.utils.clip_grad_norm_([weight], 1.0)))
    torch.testing.assert_close(clip(mine), weight.grad, equal_nan=True)


def test_parameters_that_the_module_has_not_come_in_the_optimizers_order() -> None:
    """Sets have another order on every host."""
    model = nn.Linear(2, 2)
    others = [nn.Parameter(torch.ones(size)) for size in range(1, 40)]
    store = HostStore(model, [])
    with Updater(store, []) as updater:
        unit = updater._in_order(reversed(others))[-1]
    store.close()
    assert [p.numel() for p in unit.parameters] == list(range(39, 0, -1))


def test_a_host_that_cannot_be_reached_at_once_is_asked_again() -> None:
    unreachable = OSError(113, "No route to host")
    answers = [unreachable, unreachable, mock.sentinel.connection, unreachable]
    with mock.patch.object(socket, "create_connection", side_effect=answers) as asked:
        assert heartbeat.connect(("host", 1), 60.0) is mock.sentinel.connection
        with pytest.raises(OSError, match="No route"):
            heartbeat.connect(("host", 1), 0.0)
    assert asked.call_count == len(answers)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.0\r\n", b"5\n", b'{"why": "it ended", "peer": 1}\n']
)
def test_a_stranger_who_comes_ends_nothing(said: bytes) -> None:
    watch = Watch(0, main=("127.0.0.1", 1))
    watch.begin([watch.address, ("127.0.0.1", 1, "")])
    with socket.create_connection(watch.address[:2]) as host, host.makefile() as heard:
        host.sendall(json.dumps({"rank": 1, "secret": watch.address[2]}).encode() + b"\n")
        with socket.create_connection(watch.address[:2]) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""  # it has been heard
        watch.close("is done")
        assert "is done" in heard.readlines()[-1]
