"""Trainings that are killed at random moments: a handful in the suite, sixty as soak."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("form", "kills"),
    [("file", 2), ("distributed", 1), pytest.param("file", 60, marks=pytest.mark.soak)],
)
def test_killed_trainings_end_as_if_nothing_had_been(form: str, kills: int) -> None:
    arguments = ["--kills", str(kills), "--form", form, "--output", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.kill_resume", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["kills"], result["lost"], result["mismatches"]) == (kills, 0, 0), done.stderr
    assert result["runs"] >= 1
