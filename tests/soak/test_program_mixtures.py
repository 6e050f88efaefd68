import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("first", "count"), [(0, 6), pytest.param(100, 120, marks=pytest.mark.soak)]
)
def test_programs_that_are_put_together_at_random(first: int, count: int) -> None:
    """Compare them with one device: none trains on other numbers in silence, none breaks."""
    command = [sys.executable, "benchmarks/programs.py", "--mixtures", str(first), str(count)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "silent: 0, broken: 0" in found.stdout
