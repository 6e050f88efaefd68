"""How much memory the host has, on systems that say so and on others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roundpipe_lightning.engine.device import host_memory as host
from roundpipe_lightning.engine.device.probe import probe_hardware


def test_a_container_has_what_it_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "_CONTAINER_LIMIT", limit)
    total = host.host_bytes()
    assert total is not None
    limit.write_text("max\n")
    assert host.host_bytes() == total
    limit.write_text(f"{total // 2}\n")
    assert host.host_bytes() == total // 2


def test_a_system_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no `sysconf`; the machine is measured there all the same."""
    monkeypatch.delattr(os, "sysconf")
    assert host.host_bytes() is None
    measured = probe_hardware(num_workers=1, folder=tmp_path)
    assert measured.host_bytes == host.UNKNOWN_BYTES
