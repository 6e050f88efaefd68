"""A handful of kills: `benchmarks/kill_resume.py` does hundreds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "kill_resume.py"


@pytest.mark.parametrize("form", ["file", "sharded"])
def test_killed_trainings_end_as_if_nothing_had_been(form: str) -> None:
    command = [sys.executable, str(SCRIPT), "--kills", "3", "--form", form, "--output", "json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["kills"], result["lost"], result["mismatches"]) == (3, 0, 0), done.stderr
    assert result["runs"] >= 1
