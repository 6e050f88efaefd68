"""The machine is measured once, in seconds, and remembered."""

from __future__ import annotations

import functools
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from roundpipe_lightning.engine.device import probe
from roundpipe_lightning.engine.device.probe import cache_folder, find_hardware, probe_hardware
from roundpipe_lightning.errors import HardwareError
from roundpipe_lightning.planning.model.hardware import load_hardware


@pytest.fixture
def _no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


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
    properties = SimpleNamespace(name="Fast 1", total_memory=24 * 2**30)
    rates = load_hardware("rtx4090x1").matrix_rates
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(probe, "_properties", lambda device: properties)
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
    assert given_back == ["empty_cache", "empty_host_cache"]
    assert (spec.device_name, spec.num_devices) == ("Fast 1", 4)
    assert spec.device_bytes == 24 * 2**30
    assert spec.upload_seconds(25e9) == pytest.approx(1)
    assert spec.upload_seconds(15e9, num_devices=4) == pytest.approx(1)
    assert spec.download_seconds(12.5e9, num_devices=4) == pytest.approx(1)
    assert next(tmp_path.iterdir()).name.startswith("Fast-1_x4")
    with pytest.raises(HardwareError, match="5 devices were asked for; this machine has 4"):
        probe_hardware(num_workers=5, folder=tmp_path)


def test_transfers_are_timed() -> None:
    cpu = torch.device("cpu")
    assert probe._transfer_rate([cpu], upload=True) > 1e6
    assert probe._transfer_rate([cpu, cpu], upload=False) > 1e6


def test_whatever_a_user_gives_is_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_hardware("h100x8")
    assert find_hardware(spec) is spec
    assert find_hardware("h100x8") == spec
    monkeypatch.setattr(probe, "probe_hardware", lambda **_: spec)
    assert find_hardware("auto") is spec
    with pytest.raises(HardwareError, match="nearest"):
        find_hardware("h100x9")


def test_the_cache_folder_is_the_user_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "roundpipe_lightning" / "hardware"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "roundpipe_lightning" / "hardware"
