"""Several processes that write and read one checkpoint."""

import os
import secrets
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from roundpipe_lightning import RoundPipeCheckpointIO
from roundpipe_lightning.files import _HOST, _MARK, _PROCESS, remove_remains

WRITER = """
import sys, torch
from roundpipe_lightning import RoundPipeCheckpointIO
path, form, number = sys.argv[1:]
for step in range(int(number)):
    state = {f"{part}.weight": torch.full((40, 40), float(step)) for part in "abc"}
    content = {"state_dict": state, "global_step": step}
    RoundPipeCheckpointIO(form=form).save_checkpoint(content, path)
"""


def writer(path: Path, form: str, number: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", WRITER, str(path), form, str(number)]
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True)


def check_whole(path: Path) -> None:
    content = RoundPipeCheckpointIO().load_checkpoint(path)
    values = {float(value) for part in content["state_dict"].values() for value in part.flatten()}
    assert values == {float(content["global_step"])}


@pytest.mark.parametrize("form", ["file", "distributed"])
def test_two_processes_save_to_one_path(form: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with ExitStack() as stack:
        writers = [stack.enter_context(writer(path, form, 60)) for _ in range(2)]
        for process in writers:
            assert process.stderr is not None
            assert process.wait(300) == 0, process.stderr.read()
    check_whole(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("form", ["file", "distributed"])
def test_what_is_read_beside_a_writer_is_of_one_save(form: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    with writer(path, form, 60) as process:
        while not path.exists() and process.poll() is None:
            time.sleep(0.01)
        number = 0
        while process.poll() is None:
            check_whole(path)
            number += 1
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    assert number > 20


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    """That of living ones stays, and what has another name."""
    path = tmp_path / "last.ckpt"
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        gone = child.pid

    def name(host: str, process: int, of_process: str) -> str:
        return f".last.ckpt.{host}-{process}-{of_process}-{secrets.token_hex(4)}{_MARK}"

    remains = [
        name(_HOST, gone, "0" * 8),
        name(_HOST, os.getpid(), "0" * 8),
        name("0" * 8, 1, _PROCESS),
    ]
    stays = [name(_HOST, os.getpid(), _PROCESS), name(_HOST, os.getppid(), "0" * 8)]
    stays += [name("0" * 8, gone, _PROCESS), ".last.ckpt.tmp", ".last.ckpt.mine.tmp"]
    for entry in (*remains, *stays):
        (tmp_path / entry).mkdir() if entry == remains[0] else (tmp_path / entry).touch()
    os.utime(tmp_path / remains[2], (0, 0))
    remove_remains(path)
    assert {entry.name for entry in tmp_path.iterdir()} == set(stays)
