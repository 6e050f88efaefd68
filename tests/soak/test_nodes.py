"""Several hosts as users launch them, and hosts that are lost at random moments."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import nodes
from tests.kit.hosts import free_port
from tests.kit.runs import REPOSITORY, SMALL

pytestmark = pytest.mark.soak

_OWN = ("data.batch_size", "data.text.validation", "trainer.max")
SETTINGS = [
    *(each for each in SMALL if not each.startswith(_OWN)),
    "data.text.validation_bytes=2000",
]


def test_hosts_see_what_one_sees() -> None:
    assert nodes.equal()["wrong"] == []


def test_the_example_runs_two_hosts(tmp_path: Path) -> None:
    variables = {"PORT": str(free_port()), "FOLDER": str(tmp_path / "run")}
    subprocess.run(
        [REPOSITORY / "examples" / "two_hosts.sh", *SETTINGS, "trainer.max_steps=4"],
        check=True,
        env={**os.environ, **variables},
    )
    first, second = (
        json.loads((tmp_path / "run" / part / "summary.json").read_text()) for part in ("", "host1")
    )
    assert (first["num_steps"], first["loss_last"]) == (4, second["loss_last"])


def test_a_restart_goes_on_with_the_hosts_that_are_left(tmp_path: Path) -> None:
    port, folder, steps = free_port(), tmp_path / "run", 80
    torchrun = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
    command = [
        *(sys.executable, *torchrun, "--max-restarts=1", "--rdzv-backend=c10d"),
        *("--rdzv-conf=last_call_timeout=20", f"--rdzv-endpoint=127.0.0.1:{port}", "train.py"),
        *("trainer.num_nodes=auto", "global_batch_size=16", f"hydra.run.dir={folder}"),
        "checkpoint=distributed",
        *("callbacks.last_checkpoint.every_n_steps=5", f"trainer.max_steps={steps}", *SETTINGS),
    ]
    agents = []
    for number in (0, 1):
        with (tmp_path / f"host{number}.txt").open("w") as output:
            agents.append(
                subprocess.Popen(
                    command, cwd=REPOSITORY, stdout=output, stderr=output, start_new_session=True
                )
            )
        time.sleep(4)  # the first one has the rendezvous
    saved = folder / "checkpoints" / "last.ckpt"
    while not saved.exists():
        assert agents[1].poll() is None
        time.sleep(0.1)
    assert any(saved.glob("host1-*"))
    agent = agents[1].pid
    workers = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    for process in (agent, *map(int, workers)):  # a worker is in a session of its own
        os.kill(process, signal.SIGKILL)
    assert agents[0].wait(400) == 0
    agents[1].wait()
    said = (tmp_path / "host0.txt").read_text()
    assert "Host 0 lost host 1" in said
    assert f"Restarted: going on from {saved}" in said
    assert json.loads((folder / "summary.json").read_text())["num_steps"] < steps
    merge = "import sys, roundpipe_commands; sys.exit(roundpipe_commands.merge())"
    one = tmp_path / "one.ckpt"
    subprocess.run([sys.executable, "-c", merge, saved, one], check=True, cwd=REPOSITORY)
    assert torch.load(one)["global_step"] == steps
