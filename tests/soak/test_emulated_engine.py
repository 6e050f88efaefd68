"""The engine's tests on emulated devices, whose checker watches them, in place of CPU workers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "engine"
NUM_PARTS = 6


@pytest.mark.soak
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_the_engine_on_emulated_devices(part: int) -> None:
    files = sorted(FOLDER.glob("test_*.py"))[part::NUM_PARTS]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--emulated", "-q", "-p", "no:cacheprovider", *files],
        cwd=FOLDER.parents[1],
        # the threads of autograd share the processors in another way than workers' own: sums differ
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:]
