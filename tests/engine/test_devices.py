import functools
import itertools
import json
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.emulation.tagged_tensor import tag_of, untag
from roundpipe_lightning.engine.device import accelerator as module_of_accelerator
from roundpipe_lightning.engine.device import host_memory as host
from roundpipe_lightning.engine.device import probe
from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice, Runtime, begin_read
from roundpipe_lightning.engine.device.base import CopyQueue
from roundpipe_lightning.engine.device.events import DoneEvent, Event, HostEvent, StepAborted
from roundpipe_lightning.engine.device.host_memory import own_pages
from roundpipe_lightning.engine.device.probe import cache_folder, probe_hardware
from roundpipe_lightning.engine.device.threads import Failure, ThreadTeam
from roundpipe_lightning.errors import FitError, HardwareError
from roundpipe_lightning.planning.model.hardware import MatrixRates, load_hardware
from roundpipe_lightning.strategy.planning import inputs
from tests.kit.moments import PATIENCE_SECONDS


def _waiting(event: HostEvent, method: str) -> tuple[threading.Thread, list[object]]:
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(getattr(event, method)())
        except BaseException as error:  # noqa: BLE001 - it is what the test looks at
            found.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, found


def test_waiters_are_released_and_called_back_once() -> None:
    event, calls = HostEvent("a copy"), []
    event.when_done(lambda: calls.append("before"))
    thread, found = _waiting(event, "wait")
    assert not event.is_done
    event.set()
    event.set()
    event.abort()  # too late
    thread.join(60)
    event.when_done(lambda: calls.append("after"))
    assert found == [None]
    assert calls == ["before", "after"]
    event.wait()
    assert event.issued() is event
    assert str(event) == "<HostEvent 'a copy', done>"


@pytest.mark.parametrize("method", ["wait", "issued"])
def test_an_abort_releases_every_waiter(method: str) -> None:
    event, calls = HostEvent(), []
    event.when_done(lambda: calls.append(event.is_done))
    threads = [_waiting(event, method) for _ in range(3)]
    event.abort()
    for thread, _ in threads:
        thread.join(60)
    assert [found for _, found in threads] == [[StepAborted]] * 3
    assert calls == [True]


def test_a_copy_waits_for_events_and_bytes_arrive() -> None:
    device = EmulatedDevice(2)
    slot = device.allocate(16)
    assert (tag_of(slot), slot.dtype, slot.shape) == (device.name, torch.uint8, (16,))
    values = torch.arange(16, dtype=torch.uint8)
    after: list[Event] = [DoneEvent()]
    done = device.copy(slot[8:], values[:8], queue=CopyQueue.UPLOAD, after=after)
    device.await_event(done)
    landed = torch.empty(8, dtype=torch.uint8)
    done = device.copy(landed, slot[8:], queue=CopyQueue.DOWNLOAD, after=[device.mark_event("x")])
    done.wait()
    assert torch.equal(landed, values[:8])
    assert torch.equal(untag(slot[8:]), values[:8])


def _team(num_threads: int, prepare: Callable[[], None] = lambda: None) -> ThreadTeam:
    return ThreadTeam(num_threads, name="tested", prepare=prepare)


def test_a_team_that_gets_too_few_threads_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def scarce(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        _team(2)
    started[0].join(60)
    assert not started[0].is_alive()


def _wait(event: threading.Event) -> None:
    event.wait(60)


def _unexpected(failure: Failure) -> None:
    pytest.fail(f"{failure.error!r}")


@pytest.mark.parametrize("error", [ValueError("planned"), SystemExit(1), KeyboardInterrupt()])
def test_errors_are_handed_over_and_the_thread_lives_on(error: BaseException) -> None:
    failures: list[Failure] = []

    def fail() -> None:
        raise error

    with closing(_team(2)) as team:
        assert team.start([lambda: None, fail], on_failure=failures.append).wait(60)
        assert [(failure.index, failure.error) for failure in failures] == [(1, error)]
        assert team.start([lambda: None] * 2, on_failure=_unexpected).wait(60)


class _Held:
    """A gate that holds the thread that has opened it."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()
        self.goes_on = threading.Event()

    def acquire(self, timeout: float = -1) -> bool:
        return self._gate.acquire(timeout=timeout)

    def release(self) -> None:
        self._gate.release()
        if threading.current_thread() is not threading.main_thread():
            _wait(self.goes_on)


def test_a_run_that_is_over_holds_no_task() -> None:
    class Result:
        """An object that a task keeps alive."""

    started, begin = threading.Event(), threading.Event()

    def task(result: Result) -> None:
        started.set()
        _wait(begin)

    def unexpected(result: Result, failure: Failure) -> None:
        _unexpected(failure)

    with closing(_team(1)) as team:
        result = Result()
        note = weakref.ref(result)
        run = team.start([partial(task, result)], on_failure=partial(unexpected, result))
        del result
        _wait(started)
        held: Any = _Held()
        run._gate = held
        begin.set()
        assert run.wait(60)
        assert note() is None, "its thread has come no further than to tell of the end"
        held.goes_on.set()


def test_leaving_joins_the_threads_even_after_an_error() -> None:
    before = set(threading.enumerate())

    def use_a_team() -> None:
        with closing(_team(3)) as team:
            team.start([lambda: sleep(0.1)] * 3, on_failure=_unexpected)
            raise ValueError("planned")

    with pytest.raises(ValueError, match="planned"):
        use_a_team()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("groups", "folder", "files"),
    [
        ("0::/\n", "", ("memory.max", "memory.current", "inactive_file")),
        ("0::/a/b\n", "a", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/job\n1:cpu:/\n",
            "memory/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
        (  # a container that sees its host's name of its group
            "4:memory:/docker/f00\n",
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_control_groups_limit_the_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    folder: str,
    files: tuple[str, str, str],
) -> None:
    (tmp_path / "own").write_text(groups)
    monkeypatch.setattr(host, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host, "_CONTROL_GROUPS", tmp_path / "groups")
    total = host.host_bytes()
    assert total is not None
    group = tmp_path / "groups" / folder
    group.mkdir(parents=True)
    limit, used, dropped = files
    (group / limit).write_text("max\n")
    assert host.host_bytes() == total
    (group / limit).write_text("3000\n")
    (group / used).write_text("1500\n")
    (group / "memory.stat").write_text(f"cache 900\n{dropped} 500\n")
    assert host.host_bytes() == 3000
    assert host.free_host_bytes() == 2000
    with pytest.raises(FitError, match=r"The model needs .* Take a smaller one"):
        host.check_host_memory(2001, what="The model", way_out="Take a smaller one.")
    host.check_host_memory(2000, what="The model", way_out="")


def test_a_system_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no `sysconf`; the machine is measured there all the same."""
    monkeypatch.delattr(os, "sysconf")
    assert host.host_bytes() is None
    measured = probe_hardware(num_workers=1, folder=tmp_path)
    assert measured.host_bytes == host.UNKNOWN_BYTES


@pytest.fixture
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)


@pytest.mark.usefixtures("_no_accelerator")
def test_a_cpu_is_measured_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = probe_hardware(num_workers=2, folder=tmp_path)
    assert (spec.name, spec.num_devices, spec.shares_host_memory) == ("auto", 2, True)
    assert spec.matrix_rates.of("float32") > 1e6
    assert spec.host_bytes_per_second > 1e6
    assert spec.device_bytes == pytest.approx(spec.host_bytes / 2, abs=1)
    (path,) = tmp_path.iterdir()
    assert torch.__version__ in path.name
    monkeypatch.delattr(probe._Machine, "measured")
    assert probe_hardware(num_workers=2, folder=tmp_path) == spec


@pytest.mark.usefixtures("_no_accelerator")
def test_a_damaged_memory_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = load_hardware("cpu")
    monkeypatch.setattr(probe._Machine, "measured", lambda self: known)
    assert probe_hardware(folder=tmp_path) == known
    (path,) = tmp_path.iterdir()
    for text in ("{", "[]", json.dumps({"name": "x"})):
        path.write_text(text)
        assert probe_hardware(folder=tmp_path) == known
        assert json.loads(path.read_text())["name"] == "cpu"
    monkeypatch.setattr(probe._Machine, "measured", lambda self: load_hardware("rtx3090x1"))
    assert probe_hardware(folder=tmp_path) == known
    assert probe_hardware(folder=tmp_path, fresh=True).name == "rtx3090x1"


@pytest.mark.usefixtures("_no_accelerator")
def test_a_folder_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = load_hardware("cpu")
    monkeypatch.setattr(probe._Machine, "measured", lambda self: known)
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert probe_hardware(folder=blocked) == known


def test_accelerators_are_measured_alone_and_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures' way into the machine; the measurements themselves need a device."""
    rates = load_hardware("rtx4090x1").matrix_rates
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (0, 24 * 2**30))
    monkeypatch.setattr(probe, "_name", lambda device: "Fast 1")
    monkeypatch.setattr(probe, "runtime_of", lambda device: SimpleNamespace(counts_memory=True))
    monkeypatch.setattr(probe, "_matrix_rates", lambda device, share: rates)
    monkeypatch.setattr(probe, "_copy_rate", lambda device: 1e12 if device.type == "cuda" else 1e11)
    both = {(1, True): 25e9, (1, False): 24e9, (4, True): 60e9, (4, False): 50e9}
    monkeypatch.setattr(
        probe, "_transfer_rate", lambda devices, *, upload: both[len(devices), upload]
    )
    given_back: list[str] = []
    for name in ("empty_cache", "empty_host_cache"):
        monkeypatch.setattr(
            torch.accelerator, name, functools.partial(given_back.append, name), raising=False
        )
    reached: set[tuple[int, int]] = {(0, 1)}
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda a, b: (a.index, b.index) in reached
    )
    spec = probe_hardware(folder=tmp_path)
    assert not spec.devices_reach_each_other
    reached.update(itertools.permutations(range(4), 2))
    assert probe_hardware(folder=tmp_path) == replace(spec, devices_reach_each_other=True)
    with monkeypatch.context() as context:
        context.setenv("ROUNDPIPE_NO_PEER_COPIES", "1")
        assert not probe_hardware(folder=tmp_path).devices_reach_each_other
    assert given_back == ["empty_cache", "empty_host_cache"]
    assert (spec.device_name, spec.num_devices) == ("Fast 1", 4)
    assert spec.device_bytes == 24 * 2**30
    assert spec.upload_seconds(25e9) == pytest.approx(1)
    assert spec.upload_seconds(15e9, num_devices=4) == pytest.approx(1)
    assert spec.download_seconds(12.5e9, num_devices=4) == pytest.approx(1)
    assert next(tmp_path.iterdir()).name.startswith("Fast-1_x4")
    given = [torch.device("cuda", 1), torch.device("cuda", 3)]
    both[2, True] = both[2, False] = 30e9
    pair = probe_hardware(num_workers=2, devices=given, folder=tmp_path)  # of these two
    assert pair.root_upload_bytes_per_second == 30e9
    both[2, True] = 40e9
    first = probe_hardware(num_workers=2, folder=tmp_path)  # which are others
    assert first.root_upload_bytes_per_second == 40e9
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(HardwareError, match="5 devices were asked for; this machine has 4"):
        probe_hardware(num_workers=5, folder=tmp_path)


def test_each_kind_of_unequal_accelerators_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("Fast", "Slow", "Slow")
    memory = {"Fast": 24 * 2**30, "Slow": 16 * 2**30}
    devices = [torch.device("cuda", index) for index in (1, 2, 5)]
    kinds = dict(zip(devices, names, strict=True))
    speeds = {"Fast": 2.0, "Slow": 1.0}
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: devices[0])
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    monkeypatch.setattr(probe, "_give_back", lambda: None)
    monkeypatch.setattr(probe, "runtime_of", lambda device: SimpleNamespace(counts_memory=True))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    monkeypatch.setattr(probe, "_name", lambda device: kinds[device])
    monkeypatch.setattr(
        torch.accelerator, "get_memory_info", lambda device: (0, memory[kinds[device]])
    )
    monkeypatch.setattr(inputs, "runtime_of", lambda device: SimpleNamespace(counts_memory=True))
    measured: list[torch.device] = []

    def rates(device: torch.device, share: float) -> MatrixRates:
        measured.append(device)
        return MatrixRates(float32=speeds[kinds[device]] * 1e12)

    monkeypatch.setattr(probe, "_matrix_rates", rates)
    monkeypatch.setattr(probe, "_copy_rate", lambda device: 1e11)
    monkeypatch.setattr(probe, "_transfer_rate", lambda devices, *, upload: 1e10 * len(devices))
    monkeypatch.setattr(inputs, "probe_hardware", partial(probe_hardware, folder=tmp_path))
    free = dict(zip(devices, (20, 15, 9), strict=True))
    monkeypatch.setattr(inputs, "available_bytes", lambda device: free[device] * 2**30)
    for _ in range(2):  # measured, then read
        spec = inputs.find_machine(
            "auto",
            num_workers=3,
            workers_per_device=1,
            computes_on_host=False,
            accelerators=devices,
        )
        assert measured == devices[:2]
        assert spec.device_name == "Fast and Slow and Slow"
        assert [one.matrix_rates.float32 / 1e12 for one in spec.workers] == [2, 1, 1]
        assert [one.device_bytes / 2**30 for one in spec.workers] == [20, 15, 9]
        assert spec.device_bytes == 9 * 2**30


class _Accelerator:
    """A runtime with streams that notes what a thread does to them on another device than 3."""

    has_streams, synchronizes, has_timed_events, records_streams = True, False, False, True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.misplaced: list[str] = []
        self.waited: list[object] = []
        self._current = threading.local()
        streams = {"device_index": self.on, "set_stream": lambda stream: None}
        for name, stand_in in {**streams, "current_stream": self.current_stream}.items():
            monkeypatch.setattr(torch.accelerator, name, stand_in)

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        before, self._current.index = getattr(self._current, "index", 0), index
        yield
        self._current.index = before

    def check(self, what: str) -> bool:
        if getattr(self._current, "index", 0) != 3:
            self.misplaced.append(what)
        return True

    def current_stream(self, _: object) -> Any:
        return self._stream("compute")

    def new_stream(self, _: torch.device) -> Any:
        self.check("new stream")
        return self._stream("copies")

    def _stream(self, name: str) -> Any:
        def wait(event: object = None) -> None:
            self.check(f"wait of {name}")
            self.waited.append(event or name)

        return SimpleNamespace(device_index=3, wait_event=wait, synchronize=wait)

    def new_event(self, *_: Any, **__: Any) -> Any:
        self.check("new event")
        event = SimpleNamespace(query=lambda: self.check("query"), elapsed_time=lambda _: 0.0)
        default = self._stream("an event")
        event.record = lambda stream=default: vars(event).update(
            synchronize=stream.synchronize, recorded_on=stream
        )
        return event

    def lock_pages(self, _: Tensor) -> int:
        self.check("page lock")
        return 0

    def unlock_pages(self, _: int) -> None:
        self.check("page lock")


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[AcceleratorDevice]:
    device = AcceleratorDevice(torch.device("xpu", 3))
    vars(device)["runtime"] = _Accelerator(monkeypatch)
    yield device
    device.close()


def test_every_thread_works_on_the_device_of_its_worker(
    accelerator: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that names none would make a context on device 0."""
    runtime: Any = accelerator.runtime
    called_back = threading.Event()
    for name, of_torch in (("synchronize", torch.accelerator), ("Event", torch)):
        monkeypatch.setattr(of_torch, name, runtime.new_event)

    def work() -> None:
        made = accelerator.mark_event("made")
        copied = accelerator.copy(
            torch.zeros(2), torch.ones(2), queue=CopyQueue.DOWNLOAD, after=[made]
        )
        accelerator.await_event(copied)
        copied.wait()
        assert copied.is_done
        assert runtime.waited == [made.raw, copied.raw, "copies"]  # type: ignore[attr-defined]
        copied.when_done(called_back.set)
        assert called_back.wait(PATIENCE_SECONDS)
        buffer = own_pages(8)
        accelerator.pin(buffer)
        accelerator.unpin(buffer)
        asked = Runtime(torch.device("xpu", 3))
        asked.new_stream, asked.new_event = runtime.new_stream, runtime.new_event
        assert asked.has_streams
        assert asked.synchronizes
        assert asked.has_timed_events
        probe._wait([torch.device("xpu", 3)])

    with closing(ThreadTeam(1, name="team", prepare=lambda: None)) as team:
        failures: list[Failure] = []
        assert team.start([work], on_failure=failures.append).wait(PATIENCE_SECONDS)
    assert not failures
    assert not runtime.misplaced


@pytest.mark.parametrize("synchronizes", [True, False])
def test_a_step_begins_when_all_streams_are_idle(
    accelerator: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch, synchronizes: bool
) -> None:
    """Also on an accelerator that has no wait for all."""
    runtime: Any = accelerator.runtime
    runtime.synchronizes = synchronizes
    monkeypatch.setattr(torch.accelerator, "synchronize", runtime.waited.append)
    accelerator.copy(torch.zeros(2), torch.ones(2), queue=CopyQueue.UPLOAD)
    accelerator.start_clock()
    everything = [accelerator.torch_device] if synchronizes else ["compute", "copies"]
    assert runtime.waited == everything
    assert not runtime.misplaced


def test_the_time_of_a_mark_is_asked_when_it_has_come(accelerator: AcceleratorDevice) -> None:
    runtime: Any = accelerator.runtime
    runtime.has_timed_events = True
    accelerator.await_mark(runtime._stream("a mark"))
    assert runtime.waited == ["a mark"]
    assert not runtime.misplaced


@pytest.mark.parametrize("records_streams", [True, False])
def test_memory_is_filled_and_used_again_in_the_order_of_compute(
    accelerator: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch, records_streams: bool
) -> None:
    """The allocator hears that compute uses it, or else uploads wait for what may use it still."""
    runtime: Any = accelerator.runtime
    runtime.records_streams = records_streams
    used_by: list[object] = []
    made = SimpleNamespace(record_stream=used_by.append)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: made)
    given: object = accelerator.empty(torch.Size([2]), torch.float32)
    assert given is made
    if records_streams:
        assert used_by == [accelerator._compute]
        assert not runtime.waited
    else:
        (marked,) = runtime.waited
        assert marked.recorded_on is accelerator._compute
    assert not runtime.misplaced


def test_a_copy_from_another_device_is_made_beside_its_compute(
    accelerator: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch copies in order with what is current on the source's device: no compute."""
    entered: list[object] = []
    monkeypatch.setattr(torch.accelerator, "set_stream", entered.append)
    of_source = SimpleNamespace(device_index=1)
    source: Any = SimpleNamespace(device=torch.device("xpu", 1))
    accelerator._streams[source.device] = of_source

    def copy(*_: Any, **__: Any) -> None:
        assert of_source in entered

    target: Any = SimpleNamespace(device=accelerator.torch_device, copy_=copy)
    accelerator.copy(target, source, queue=CopyQueue.UPLOAD)


def test_who_begins_a_read_waits_when_it_asks_for_the_values(
    accelerator: AcceleratorDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime: Any = accelerator.runtime
    monkeypatch.setattr(module_of_accelerator, "runtime_of", lambda _: runtime)
    copies: list[object] = []

    def to(*given: object, **options: object) -> Tensor:
        copies.append((given, options))
        return torch.arange(2)

    there: Any = SimpleNamespace(device=accelerator.torch_device, to=to)
    with accelerator.activate():
        read = begin_read(there)
        assert read is not None
        assert copies == [(("cpu",), {"non_blocking": True})]
        assert not runtime.waited
        assert read() == [0, 1]
    assert runtime.waited == ["compute"]
    assert not runtime.misplaced
    runtime.has_streams = False
    assert begin_read(there) is None
    assert begin_read(torch.zeros(1)) is None


def test_a_long_upload_holds_up_no_news_of_compute(accelerator: AcceleratorDevice) -> None:
    uploaded = threading.Event()
    stream = SimpleNamespace(device_index=3, synchronize=uploaded.wait)
    accelerator._streams[CopyQueue.UPLOAD] = stream
    order: queue.SimpleQueue[str] = queue.SimpleQueue()
    accelerator._recorded(CopyQueue.UPLOAD, "a copy").when_done(partial(order.put, "upload"))
    accelerator.mark_event("a boundary is made").when_done(partial(order.put, "compute"))
    assert order.get(timeout=PATIENCE_SECONDS) == "compute"
    uploaded.set()
    assert order.get(timeout=PATIENCE_SECONDS) == "upload"


def test_work_is_timed_until_the_device_has_done_it(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.accelerator, "device_index", nullcontext)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: done.append("waited"))
    monkeypatch.setattr(probe, "_SHORTEST_SECONDS", 0.0)
    probe._seconds(lambda: done.append("launched"), [torch.device("xpu", 3)])
    assert done == ["launched", "waited"] * 2


def test_transfers_are_timed() -> None:
    cpu = torch.device("cpu")
    assert probe._transfer_rate([cpu], upload=True) > 1e6
    assert probe._transfer_rate([cpu, cpu], upload=False) > 1e6


def test_the_cache_folder_is_the_user_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "roundpipe_lightning" / "hardware"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "roundpipe_lightning" / "hardware"
