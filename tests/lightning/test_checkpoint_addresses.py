"""Checkpoints at addresses are read as local ones are."""

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.asyn import get_loop  # type: ignore[import-untyped]

from roundpipe_lightning import RoundPipeCheckpointIO
from roundpipe_lightning.errors import CheckpointError


@pytest.fixture(scope="module", autouse=True)
def _loop() -> None:
    get_loop()  # fsspec's thread, which stays until the process ends


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Where a server has the files of `tmp_path`."""
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("weights_only", [None, True])
def test_a_pickle_from_an_address_runs_no_code(
    address: str,
    tmp_path: Path,
    weights_only: bool | None,
) -> None:
    marker = tmp_path / "ran"
    torch.save({"state_dict": {}, "x": Bomb(marker)}, tmp_path / "last.ckpt")
    for place in (address, f"file://{tmp_path}", f"local://{tmp_path}"):
        with pytest.raises(CheckpointError, match=r"last\.ckpt holds objects whose reading could"):
            RoundPipeCheckpointIO().load_checkpoint(f"{place}/last.ckpt", weights_only=weights_only)
    assert not marker.exists()


def test_files_of_one_name_are_told_apart(address: str, tmp_path: Path) -> None:
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        torch.save({"state_dict": {"run": torch.tensor(ord(run))}}, tmp_path / run / "last.ckpt")
    for run in ("a", "b", "a"):
        content = RoundPipeCheckpointIO().load_checkpoint(f"{address}/{run}/last.ckpt")
        assert content["state_dict"]["run"] == ord(run)


def test_what_cannot_be_fetched_is_named(address: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=rf"not found: {address}/none\.ckpt"):
        RoundPipeCheckpointIO().load_checkpoint(f"{address}/none.ckpt")
    (tmp_path / "short.ckpt").write_bytes(b"PK\x03\x04")
    with pytest.raises(CheckpointError, match=rf"The checkpoint {address}/short\.ckpt cannot be"):
        RoundPipeCheckpointIO().load_checkpoint(f"{address}/short.ckpt")
    with pytest.raises(CheckpointError, match=r"http://127\.0\.0\.1:1/x\.ckpt cannot be fetched"):
        RoundPipeCheckpointIO().load_checkpoint("http://127.0.0.1:1/x.ckpt")
