import copy
import functools
import multiprocessing
import os
import platform
import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.emulation.tagged_tensor import tag_of, untag
from roundpipe_lightning.engine.device import host_memory
from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.device.host_memory import (
    PAGE_BYTES,
    PinnedPool,
    own_pages,
    return_freed_memory,
)
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.planning.model.hardware import WORKSPACE_BYTES
from tests.kit.engine import (
    WIDTH,
    LockingDevice,
    Regressor,
    engine_for,
    mean_step,
    regression_batches,
)


def _storages(parameters: Any) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in parameters}


def assert_uploads_all(store: HostStore, blocks: list[nn.Module], device: Device) -> None:
    for block in blocks:
        values = store.upload_block(block, device)
        assert set(values) == set(block.parameters())
        for parameter, value in values.items():
            host = value if tag_of(value) is None else untag(value)
            assert torch.equal(host, parameter)
            assert value.shape == parameter.shape
            assert value.stride() == parameter.stride()
            assert not value.requires_grad


def test_one_buffer_per_block_and_the_rest() -> None:
    module = Regressor(3)
    wanted = copy.deepcopy(module.state_dict())
    identities = list(module.parameters())
    store = HostStore(module, list(module.layers))
    for block in module.layers:
        assert len(_storages(block.parameters())) == 1
    outside = [*module.head.parameters(), *module.tail.parameters()]
    assert len(_storages(outside)) == 1
    assert len(_storages(module.parameters())) == 4
    assert all(a is b for a, b in zip(module.parameters(), identities, strict=True))
    assert all(type(p) is nn.Parameter for p in module.parameters())
    for name, value in module.state_dict().items():
        assert torch.equal(value, wanted[name])
    assert_uploads_all(store, list(module.layers), CpuDevice())
    assert_uploads_all(store, list(module.layers), EmulatedDevice(1))


def test_every_parameter_begins_at_a_cache_line() -> None:
    module = Regressor(2)
    HostStore(module, list(module.layers))
    for parameter in module.parameters():
        offset = parameter.storage_offset() * parameter.element_size()
        assert offset % 64 == 0


def _blocks(module: Regressor) -> list[Any]:
    return list(module.layers)


def test_buffers_of_their_own_for_dtypes_and_frozen_parameters() -> None:
    module = Regressor(2)
    _blocks(module)[0].inner.requires_grad_(False)
    _blocks(module)[0].norm.to(torch.bfloat16)
    store = HostStore(module, list(module.layers))
    device = LockingDevice()
    assert len(_storages(_blocks(module)[0].parameters())) == 3
    values = store.upload_block(_blocks(module)[0], device)
    assert device.num_uploads == 3
    for parameter, value in values.items():
        assert value.dtype == parameter.dtype
        assert torch.equal(untag(value), parameter)


def test_a_kind_of_which_all_parameters_are_empty() -> None:
    module = Regressor(2)
    _blocks(module)[1].gap = nn.Parameter(torch.zeros(0), requires_grad=False)
    store = HostStore(module, list(module.layers))
    assert_uploads_all(store, list(module.layers), EmulatedDevice(0))


def test_tied_and_shared_parameters_stay_one() -> None:
    module = Regressor(3)
    first, last = _blocks(module)[0], _blocks(module)[2]
    last.inner.weight = first.inner.weight
    _blocks(module)[1].norm.weight = module.head.bias
    store = HostStore(module, list(module.layers))
    assert last.inner.weight is first.inner.weight
    assert store.shared == {first.inner.weight, module.head.bias}
    assert_uploads_all(store, list(module.layers), EmulatedDevice(0))


def test_overlapping_parameters_keep_their_memory() -> None:
    module = Regressor(2)
    memory = torch.randn(3 * WIDTH)
    _blocks(module)[0].norm.weight = nn.Parameter(memory[:WIDTH])
    _blocks(module)[0].norm.bias = nn.Parameter(memory[WIDTH // 2 : WIDTH // 2 + WIDTH])
    _blocks(module)[1].norm.bias = nn.Parameter(memory[2 * WIDTH :])
    store = HostStore(module, list(module.layers))
    with torch.no_grad():
        memory[:WIDTH] = torch.arange(WIDTH, dtype=torch.float)
    assert torch.equal(_blocks(module)[0].norm.weight, torch.arange(WIDTH, dtype=torch.float))
    assert torch.equal(_blocks(module)[0].norm.bias[: WIDTH // 2], torch.arange(4.0, 8.0))
    assert_uploads_all(store, list(module.layers), EmulatedDevice(0))


def test_parameters_of_every_form() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.transposed = nn.Parameter(torch.randn(3, 5).t())
            self.channels = nn.Parameter(
                torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
            )
            self.whole = nn.Parameter(torch.arange(6), requires_grad=False)
            self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    first, second = Odd(), Odd()
    first.strided = nn.Parameter(torch.randn(4, 6)[:, ::2])
    second.expanded = nn.Parameter(torch.ones(1).expand(4), requires_grad=False)
    module = nn.ModuleList([first, second])
    wanted = {name: value.clone() for name, value in module.state_dict().items()}
    store = HostStore(module, list(module))
    for name, value in module.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert first.transposed.stride() == (1, 5)
    assert first.channels.is_contiguous(memory_format=torch.channels_last)
    assert_uploads_all(store, list(module), EmulatedDevice(0))


def test_data_that_was_swapped_is_what_is_uploaded() -> None:
    """Weight averaging puts other values into `.data` for a while."""
    module = Regressor(2)
    store = HostStore(module, list(module.layers))
    parameter = next(iter(_blocks(module)[1].parameters()))
    own = parameter.data
    parameter.data = torch.full_like(own, 7.0)
    assert_uploads_all(store, list(module.layers), EmulatedDevice(0))
    parameter.data = own
    with torch.no_grad():
        parameter.fill_(3.0)
    assert_uploads_all(store, list(module.layers), EmulatedDevice(0))


def test_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        module = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(ConfigurationError, match=r"'0\.weight'.*configure_model"):
        HostStore(module, list(module))


def test_pages_are_locked_and_given_back() -> None:
    module = Regressor(2)
    store = HostStore(module, list(module.layers))
    device = LockingDevice()
    store.pin(device)
    assert set(device.locked) == _storages(module.parameters())
    store.close()
    store.close()
    assert not device.locked


def test_a_second_store_on_the_same_module() -> None:
    module = Regressor(2)
    wanted = copy.deepcopy(module.state_dict())
    HostStore(module, list(module.layers))
    store = HostStore(module, list(module.layers)[::-1])
    assert all(torch.equal(v, wanted[n]) for n, v in module.state_dict().items())
    assert_uploads_all(store, list(module.layers)[::-1], EmulatedDevice(0))


def test_no_stack_and_no_parameters() -> None:
    HostStore(nn.Identity(), [])
    block = nn.ReLU()
    store = HostStore(nn.Sequential(nn.ReLU()), [block])
    assert store.upload_block(block, EmulatedDevice(0)) == {}


def _pages(buffer: torch.Tensor) -> set[int]:
    first = buffer.data_ptr() // PAGE_BYTES
    last = (buffer.data_ptr() + buffer.nbytes - 1) // PAGE_BYTES
    return set(range(first, last + 1))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_small_buffers_share_no_page(dtype: torch.dtype) -> None:
    buffers = [own_pages(1 + 7 * index, dtype) for index in range(50)]
    assert all(buffer.data_ptr() % PAGE_BYTES == 0 for buffer in buffers)
    assert len(set.union(*map(_pages, buffers))) == len(buffers)
    assert all(not buffer.any() and buffer.dtype is dtype for buffer in buffers)
    assert own_pages(0, dtype).shape == (0,)


def test_a_view_keeps_the_pages_and_the_storage_has_no_byte_more() -> None:
    view = own_pages(1000, torch.float32)[10:20]
    view.fill_(3.0)
    assert view.untyped_storage().nbytes() == 4000
    assert view.tolist() == [3.0] * 10


def _mapping(buffer: torch.Tensor) -> str:
    """Return what the system says of the part of memory that a buffer lies in."""
    said = Path("/proc/self/smaps").read_text(encoding="ascii")
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", said, flags=re.MULTILINE)[1:]:
        first, last = (int(word, 16) for word in part.split()[0].split("-"))
        if first <= buffer.data_ptr() < last:
            return part
    raise AssertionError("it is not mapped")


def _mapped(buffer: torch.Tensor) -> tuple[str, int]:
    """Return how a buffer is mapped, and the KiB of it that this process has for itself."""
    part = _mapping(buffer)
    return part.split()[1], sum(map(int, re.findall(r"^Private_\w+: +(\d+)", part, re.MULTILINE)))


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
@pytest.mark.parametrize("refuses", [False, True])
def test_huge_pages_are_asked_for_and_done_without(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    """Whether a file in memory gets some the system's settings say."""
    if refuses:
        monkeypatch.setattr(host_memory._C, "madvise", lambda *_: -1)
    buffer = own_pages(2**22).fill_(3)
    [flags] = re.findall(r"^VmFlags:(.*)", _mapping(buffer), re.MULTILINE)
    has_some = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert ("hg" in flags.split()) == (has_some and not refuses)
    assert buffer.sum().item() == 3 * 2**22


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
def test_a_forked_process_copies_nothing_and_writes_for_itself() -> None:
    module = Regressor(2)
    store = HostStore(module, list(module.layers))
    buffer = own_pages(2**24).fill_(3)
    weight = next(module.layers.parameters())
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def read_and_write() -> None:
        before = _mapped(buffer)
        seen = buffer.sum().item(), weight.sum().item()
        read = _mapped(buffer)
        buffer[: 4 * PAGE_BYTES] = 1
        weight.data.zero_()
        answers.put((before, read, _mapped(buffer), seen, own_pages(10).any().item()))

    wanted = (3 * 2**24, weight.sum().item())
    for _ in range(2):  # the second does not see what the first one wrote
        process = context.Process(target=read_and_write)
        process.start()
        before, read, written, seen, fresh = answers.get()
        process.join(60)
        assert process.exitcode == 0
        assert (before, read, written) == (*[("rw-p", 0)] * 2, ("rw-p", 4 * PAGE_BYTES // 1024))
        assert seen == pytest.approx(wanted)
        assert not fresh
    assert _mapped(buffer) == ("rw-s", 2**14)
    assert _mapped(weight)[0] == "rw-s", "of private ones the system copies what is page-locked"
    assert weight.any()
    store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_forked_beside_cpu_workers_keeps_the_parameters_of_that_moment() -> None:
    module, context = Regressor(2), multiprocessing.get_context("fork")
    weights = module.head.weight, next(module.layers.parameters())
    changed, answers = context.Event(), context.SimpleQueue()

    def read() -> None:
        changed.wait(20)
        answers.put([weight.sum().item() for weight in weights])

    with engine_for(module, num_workers=2):
        before = [weight.sum().item() for weight in weights]
        process = context.Process(target=read)
        process.start()
        for weight in weights:
            weight.data.add_(1.0)
        changed.set()
        assert answers.get() == before
        process.join(60)


class Runtime:
    """Registers memory as CUDA's driver does: a page can be registered once."""

    def __init__(self) -> None:
        self.registered: dict[int, set[int]] = {}

    def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1, "for all devices"
        first, last = pointer // PAGE_BYTES, (pointer + num_bytes - 1) // PAGE_BYTES
        pages = set(range(first, last + 1))
        if any(pages & others for others in self.registered.values()):
            return 712
        self.registered[pointer] = pages
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        del self.registered[pointer]
        return 0


def test_everything_that_is_locked_can_be_and_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.accelerator, "device_index", nullcontext)
    device = AcceleratorDevice(torch.device("cuda", 0))
    module = Regressor(6)
    store, pool = HostStore(module, list(module.layers)), PinnedPool(device)
    store.pin(device)
    kept = pool.take(5000)
    assert len(runtime.registered) == 6 + 1 + 1  # a flat buffer per block, the rest, what travels
    size = sum(parameter.nbytes for parameter in module.parameters())
    assert size <= device.page_locked_bytes - pool.num_bytes <= 1.03 * size + 7 * 64 * 8
    before = {name: value.clone() for name, value in module.state_dict().items()}
    store.close()
    pool.close()
    assert kept.fill_(1).all()
    assert not runtime.registered
    assert device.page_locked_bytes == 0
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize(
    ("config", "num_microbatches", "expected"),
    [
        (None, 2, 32 * 2**20),
        (None, 16, WORKSPACE_BYTES // 18),
        (":4096:8", 16, 32 * 2**20),
        ("PyTorch 2.11", 16, 32 * 2**20),
    ],
)
def test_workspaces_of_all_threads_fit_the_reserve(
    monkeypatch: pytest.MonkeyPatch, config: str | None, num_microbatches: int, expected: int
) -> None:
    sizes = dict.fromkeys(("cublas_workspace_size", "cublaslt_workspace_size"), 32 * 2**20)

    def workspace_size(name: str, size: int | None = None) -> int:
        sizes[name] = sizes[name] if size is None else size
        if name == "cublaslt_workspace_size":  # PyTorch warns where it lies in a smaller one
            assert sizes[name] <= sizes["cublas_workspace_size"]
        return sizes[name]

    class Device(EmulatedDevice):
        def expect_threads(self, num_threads: int) -> None:
            AcceleratorDevice(torch.device("cuda", 0)).expect_threads(num_threads)

    monkeypatch.setattr(torch.accelerator, "device_index", nullcontext)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for name in sizes:
        size = functools.partial(workspace_size, name)
        monkeypatch.setattr(torch.backends.cuda, name, size, raising=False)
        if config == "PyTorch 2.11":
            monkeypatch.delattr(torch.backends.cuda, name)
    if config is not None and config.startswith(":"):
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    devices = [Device(index) for index in range(2)]
    with engine_for(Regressor(2), devices=devices, num_microbatches=num_microbatches) as engine:
        mean_step(engine, regression_batches(num_microbatches))
    assert {*sizes.values()} == {expected}


def test_memory_that_cannot_be_locked_is_said_once_per_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Refusing(Runtime):
        def cudaHostRegister(self, pointer: int, num_bytes: int, flags: int) -> int:  # noqa: N802
            del pointer, num_bytes, flags
            return 2

    forgotten: list[AcceleratorDevice] = []

    def forget(device: AcceleratorDevice) -> None:
        forgotten.append(device)

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    monkeypatch.setattr(torch.accelerator, "device_index", nullcontext)
    monkeypatch.setattr(AcceleratorDevice, "_forget_error", forget)
    device = AcceleratorDevice(torch.device("cuda", 0))
    buffer = own_pages(100)
    with pytest.warns(UserWarning, match="Page-locking 0.00 GiB of host memory failed"):
        device.pin(buffer)
    device.pin(buffer)  # and says it once
    device.unpin(buffer)
    assert forgotten == [device, device]  # or the next launch would raise it
    assert device.page_locked_bytes == 0


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc's heap")
def test_what_a_step_on_cpu_workers_has_freed_goes_back_to_the_system() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES

    with engine_for(Regressor(), num_microbatches=2) as engine:  # opening gives it back, too
        pieces = [bytearray(100_000) for _ in range(4000)]
        full = resident_bytes()
        pieces = pieces[::100]  # these keep the heap from shrinking by itself
        return_freed_memory(least=2**40)
        assert full - resident_bytes() < 100_000_000
        mean_step(engine, regression_batches(2))
    assert full - resident_bytes() > 300_000_000


PAGE = 4096


@pytest.fixture
def device() -> LockingDevice:
    return LockingDevice()


@pytest.fixture
def pool(device: LockingDevice) -> Iterator[PinnedPool]:
    pool = PinnedPool(device)
    yield pool
    assert sum(device.locked.values()) == pool.num_bytes
    pool.close()
    assert not device.locked
    assert pool.num_bytes == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9 * PAGE), st.integers(0, 9)), max_size=60))
def test_nobody_has_what_another_one_has(wishes: list[tuple[int, int]]) -> None:
    """Whatever is asked for, each byte is one's own until all views of it are gone."""
    device = LockingDevice()
    pool, held = PinnedPool(device), dict[int, tuple[Tensor, int]]()
    for number, (num_bytes, place) in enumerate(wishes):
        held.pop(place, None)
        whole = pool.take(num_bytes)
        assert whole.nbytes == num_bytes
        held[place] = (whole[num_bytes // 2 :].fill_(number % 251), number % 251)
        for view, value in held.values():
            assert (view == value).all()
    assert sum(device.locked.values()) == pool.num_bytes
    pool.close()


def test_memory_is_used_again_when_nobody_has_it(pool: PinnedPool, device: LockingDevice) -> None:
    first, second = pool.take(PAGE), pool.take(3 * PAGE)
    kept = first[:10].view(torch.int16)
    places = {tensor.data_ptr() for tensor in (first, second)}
    assert places == device.locked.keys()
    del first, second
    assert pool.take(2 * PAGE).data_ptr() in places, "what is at most twice as long"
    assert pool.take(PAGE).data_ptr() not in places, "somebody has a view, and the other is longer"
    del kept
    assert len({pool.take(PAGE).data_ptr() for _ in range(9)} - places) <= 1
    assert pool.num_bytes == 5 * PAGE


def test_tensors_of_many_lengths_need_no_more_than_the_longest(pool: PinnedPool) -> None:
    for length in range(20, 40):
        both = [pool.take(length * PAGE) for _ in range(2)]
        del both
    assert pool.num_bytes == 2 * 39 * PAGE


def test_what_is_not_used_for_long_goes_when_other_memory_is_made(pool: PinnedPool) -> None:
    pool.take(100 * PAGE)
    used = pool.take(PAGE)
    for _ in range(17):
        pool.end_step()
    del used
    assert pool.num_bytes == 101 * PAGE, "it may be an evaluation, which needs no gradients"
    pool.take(10 * PAGE)
    assert pool.num_bytes == 11 * PAGE


def test_threads_have_memory_of_their_own(pool: PinnedPool) -> None:
    failures = []

    def fill(value: int) -> None:
        for turn in range(200):
            mine = pool.take(64 + turn).fill_(value)
            if not (mine == value).all():
                failures.append(value)

    threads = [threading.Thread(target=fill, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.num_bytes <= 8 * PAGE  # a thread has the one before until it has the next
