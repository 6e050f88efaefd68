"""`roundpipe-plan` as a user runs it, in an empty folder; once in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from roundpipe_commands import plan
from tests.kit.programs import run_program
from tests.kit.runs import environment, files


def test_an_answer_is_one_object_on_standard_output(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", "import roundpipe_commands; roundpipe_commands.plan()"),
            *("hardware=rtx4090x2", "output=json", "peft=lora"),
        ],
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(Path(__file__).parents[2])),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # bitsandbytes, which peft imports, says on some processors that it lacks a kernel.
    assert [line for line in done.stderr.splitlines() if "kernels-community" not in line] == []
    answer = json.loads(done.stdout)
    assert answer["machine"]["name"] == "rtx4090x2"
    [folder] = (tmp_path / "logs" / "plan" / "runs").iterdir()
    assert files(folder) >= {"plan.json", "report.json", "timeline.json", "timeline.svg"}


def test_what_does_not_fit_ends_with_3(tmp_path: Path) -> None:
    done = run_program(
        plan,
        tmp_path,
        "hardware=rtx4090x1",
        "hardware.device.device_bytes=400000000",
        "model.architecture.num_hidden_layers=2",
        "hydra.run.dir=run",
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "cannot hold even one block" in done.stdout
    assert done.stderr == ""


def test_unknown_machines_end_with_1(tmp_path: Path) -> None:
    done = run_program(plan, tmp_path, "hardware=rtx4090x9")
    assert done.returncode == 1
    assert "rtx4090x8" in done.stderr
    assert "Traceback" not in done.stderr
