import gc
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.device.host_memory import PAGE_BYTES
from roundpipe_lightning.engine.worker.out_of_memory import (
    Shortage,
    is_out_of_memory,
    memory_explained,
)
from roundpipe_lightning.errors import DeviceMemoryError
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Schedule
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy, StageKind
from tests.engine.test_errors import PLACES, Failing, _run
from tests.kit.engine import (
    WIDTH,
    Regressor,
    Workers,
    cpu_workers,
    differences,
    emulated_workers,
    engine_for,
    engine_of,
    layers_of,
    mean_step,
    plain_step,
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
            self.notes += [weakref.ref(hidden), weakref.ref(x)]  # a worker keeps leaves
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
            mean_step(engine, batches, joined=joined, backward=backward)
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


# Where it is not enough ---------------------------------------------------------------------------


NUM_MICROBATCHES = 4
CUDA_SAYS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 23.64 GiB of "
    "which 1.10 GiB is free. Including non-PyTorch memory, this process has ..."
)
CPU_SAYS = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 8 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("where", "workers"),
    [
        *((where, emulated_workers) for where in PLACES),
        ("step", cpu_workers),
        ("tail", cpu_workers),
    ],
)
def test_in_any_part_of_a_step(where: str, workers: Workers) -> None:
    module = Failing()
    batches = regression_batches(NUM_MICROBATCHES)
    plain = plain_step(module, batches, call=_run)
    with engine_for(module, num_microbatches=NUM_MICROBATCHES, devices=workers(2)) as engine:
        on_host = workers is cpu_workers
        planned = RuntimeError(CPU_SAYS) if on_host else torch.OutOfMemoryError(CUDA_SAYS)
        module.traps[where].error = planned
        with pytest.raises(DeviceMemoryError) as caught:
            mean_step(engine, batches, call=_run)
        assert caught.value.__cause__ is planned
        (text,) = caught.value.args
        for words in (*PLACES[where], "microbatch 2", "worker ", "num_microbatches=8) in place"):
            assert words in text
        assert "The allocator says: " in text
        del caught, planned
        assert not differences(module, mean_step(engine, batches, call=_run), plain)


def test_in_an_evaluation() -> None:
    module = Failing()
    (batch,) = regression_batches(1)
    with engine_for(module, num_workers=2, num_microbatches=1) as engine, torch.no_grad():
        module.traps["tail"].error = torch.OutOfMemoryError(CUDA_SAYS)
        with pytest.raises(DeviceMemoryError, match="FUSED stage 0 of an evaluation, worker"):
            engine.evaluate(lambda view, b: view.run(b, 2), batch)
        got = engine.evaluate(lambda view, b: view.run(b, 2), batch)
        assert torch.equal(got, module.run(batch, 2))


class SmallDevice(EmulatedDevice):
    """A device into which only so many bytes can be uploaded at a time."""

    def __init__(self, index: int, *, num_bytes: int) -> None:
        super().__init__(index)
        self.num_bytes = num_bytes
        self.in_use = 0

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        here = super().empty(shape, dtype)
        if self.in_use + here.nbytes > self.num_bytes:
            raise torch.OutOfMemoryError(f"Tried to allocate {here.nbytes} bytes.")
        self.in_use += here.nbytes
        weakref.finalize(here.untyped_storage(), self._free, here.nbytes)
        return here

    def _free(self, num_bytes: int) -> None:
        self.in_use -= num_bytes


def test_devices_of_every_size() -> None:
    """From one that cannot hold a stage's weights to one that can hold the step."""
    module = Regressor()
    batches = regression_batches(2)
    plain = plain_step(module, batches)
    devices = [SmallDevice(index, num_bytes=0) for index in range(2)]
    errors, steps = [], []
    with engine_for(module, num_microbatches=2, devices=devices) as engine:
        for num_bytes in range(500, 20_000, 500):
            for device in devices:
                device.num_bytes = num_bytes
            try:
                steps.append(mean_step(engine, batches))
                break
            except DeviceMemoryError as error:
                errors.append(error)
    assert not differences(module, steps[0], plain)
    places = set()
    for raised in errors:
        assert isinstance(raised.__cause__, torch.OutOfMemoryError)
        assert "PartitionHints(weight_slots=1)" in str(raised)
        found = re.search(r"in (.*) worker \d \(emulated:\d\)\. The allocator", str(raised))
        assert found is not None
        places.add(found[1][:10])
    assert len(places) >= 2  # the memory for weights, and what a stage needs beside


# What is said ------------------------------------------------------------------------------------


class _Holder:
    """A worker that holds some of everything."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def held_memory(self, *, boundaries: int) -> dict[str, int]:
        return {
            "weights, of this stage and the next": 4 << 30,
            "gradients of the stage": 3 << 30,
            "parameters used outside the blocks": 2 << 30,
            "boundaries of the microbatch": 1 << 30,
        }


def _shortage(device: Device | None = None, *, num_workers: int = 1, **given: Any) -> Shortage:
    plan = Plan(
        model="any",
        partition=Partition(forward=(2,), backward=(2, 2)),
        num_workers=1,
        num_microbatches=2,
        round_size=2,
        schedule=Schedule.from_text("worker 0: F0.0 F0.1 X0.0 X0.1 B1.0 B1.1\n"),
        block_names=("a", "b", "c", "d"),
    )
    described: dict[str, Any] = {
        "place": "FUSED stage 0 (blocks c to d, the tail segment), microbatch 1, worker 0 (cuda:0)",
        "plan": plan,
        "stage": plan.partition.stage(StageKind.FUSED, 0),
    }
    worker: Any = _Holder(device or CpuDevice())
    return Shortage(worker, workers=[worker] * num_workers, **{**described, **given})


def test_accelerators_memory_adds_up_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"get_memory_info": (1 << 30, 24 << 30), "memory_allocated": 16 << 30}
    figures["memory_reserved"] = 20 << 30
    for name, value in figures.items():
        monkeypatch.setattr(torch.accelerator, name, lambda device, value=value: value)
    text = _shortage(AcceleratorDevice(torch.device("cuda", 0))).explain(
        torch.OutOfMemoryError(CUDA_SAYS)
    )
    lines = text.splitlines()
    assert lines[0] == (
        "Out of device memory (CUDA out of memory) in FUSED stage 0 (blocks c to d, the tail "
        "segment), microbatch 1, worker 0 (cuda:0). The allocator says: CUDA out of memory. Tried "
        "to allocate 2.00 GiB."
    )
    assert lines[1:10] == [
        "cuda:0 has 24.00 GiB:",
        "      4.00 GiB weights, of this stage and the next",
        "      3.00 GiB gradients of the stage",
        "      2.00 GiB parameters used outside the blocks",
        "      1.00 GiB boundaries of the microbatch",
        "      6.00 GiB activations and other tensors",
        "      4.00 GiB kept by the allocator, unused",
        "      3.00 GiB other processes and the driver",
        "      1.00 GiB free",
    ]
    for words in (
        "RoundPipeStrategy(num_microbatches=4) in place of 2",
        "hints={'limits': {'fused': 1}}",
        "hints=PartitionHints(weight_slots=1)",
        "loss='fused'",
        "expandable_segments:True",
        "end the other processes",
        "hardware=...) with a smaller device_bytes than 25769803776",
    ):
        assert words in text
    assert "recompute='full'" not in text  # it is already
    assert "workers_per_device" not in text


def test_settings_follow_from_what_was_run() -> None:
    plan = Plan(
        model="any",
        partition=Partition(forward=(), backward=(1,)),
        num_workers=1,
        num_microbatches=1,
        round_size=1,
        schedule=Schedule.from_text("worker 0: X0.0\n"),
        block_names=("a",),
        recompute=RecomputePolicy.NONE,
        weight_slots=1,
        resident=((0,),),
    )
    text = _shortage(
        EmulatedDevice(0),
        plan=plan,
        stage=plan.partition.stage(StageKind.FUSED, 0),
        num_workers=3,
    ).explain(MemoryError())
    assert text.startswith("Out of host memory (DefaultCPUAllocator: can't allocate memory) in ")
    assert "The allocator says nothing more." in text
    assert "recompute='full') in place of 'none'" in text
    assert "PartitionHints(resident=0)" in text
    assert "workers_per_device=1) in place of 3" in text
    assert "limits" not in text
    assert "weight_slots" not in text
    assert "device_bytes" not in text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(CUDA_SAYS), True),
        (RuntimeError(CPU_SAYS), True),
        (RuntimeError("HIP out of memory. Tried to allocate 1.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (MemoryError(), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (DeviceMemoryError("Out of device memory (CUDA out of memory)"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_other_errors_pass() -> None:
    def never() -> Shortage:
        pytest.fail("nothing is to be explained")

    error = RuntimeError("shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as caught, memory_explained(never):
        raise error
    assert caught.value is error
    inner = DeviceMemoryError("explained")
    with pytest.raises(DeviceMemoryError) as again, memory_explained(never):
        raise inner
    assert again.value is inner
