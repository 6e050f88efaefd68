import re
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.engine.device.base import CpuDevice, Device
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
    Regressor,
    Workers,
    cpu_workers,
    differences,
    emulated_workers,
    engine_for,
    mean_step,
    plain_step,
    regression_batches,
)

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
