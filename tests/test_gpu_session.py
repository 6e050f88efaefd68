"""The session that measures on a GPU is ready to be started, and loses nothing to its limits."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_session
from benchmarks.gpu_session import JOBS, Job

ROOT = Path(__file__).parents[1]


def test_every_job_can_be_started_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    train_throughput = importlib.import_module("train_throughput")
    assert len({job.name for job in JOBS}) == len(JOBS)
    for job in JOBS:
        assert job.limit_seconds <= 540
        if job.arguments[0] != "-m":
            monkeypatch.setattr(sys, "argv", list(job.arguments))
            given = train_throughput._arguments()
            assert (ROOT / "conf" / "model" / f"{given.model}.yaml").is_file()
            assert set(given.capped) <= {"roundpipe", *given.system}


LIMIT_SECONDS = 1.5


class Talkative(subprocess.Popen[bytes]):
    """A process whose limit has come when it has said something, and no sooner."""

    def __init__(self, args: Any, **options: Any) -> None:
        self.said = options["stderr"]
        super().__init__(args, **options)

    def wait(self, timeout: float | None = None) -> int:
        if timeout != LIMIT_SECONDS:
            return super().wait(timeout)
        while not os.fstat(self.said.fileno()).st_size:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return super().wait(0.01)
        raise subprocess.TimeoutExpired(self.args, timeout)


def test_what_was_said_before_the_limit_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = "import sys, time; print('{\"turn\": 0}', file=sys.stderr, flush=True); time.sleep(600)"
    jobs = (
        Job(name="slow", arguments=("-c", slow), limit_seconds=LIMIT_SECONDS),
        Job(name="quick", arguments=("-c", "print('{\"found\": 1}')")),
    )
    monkeypatch.setattr(gpu_session, "JOBS", jobs)
    monkeypatch.setattr(subprocess, "Popen", Talkative)
    monkeypatch.setattr(sys, "argv", ["gpu_session", "--out", str(tmp_path)])
    for _ in range(2):  # the second time there is nothing left to do
        gpu_session.main()
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["job"] for row in rows] == ["slow", "quick"]
    assert rows[0]["code"] == 124
    assert rows[0]["measured"] == [{"turn": 0}]
    assert (rows[1]["code"], rows[1]["answer"]) == (0, {"found": 1})
    assert "##### quick" in (tmp_path / "log.txt").read_text()
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert replace(jobs[1], name="other").command.startswith("python -c")
