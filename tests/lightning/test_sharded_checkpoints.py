import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from roundpipe_commands import merge as main
from roundpipe_lightning.checkpoint.io import (
    RoundPipeAsyncCheckpointIO,
    RoundPipeCheckpointIO,
    merge_checkpoint,
)
from roundpipe_lightning.errors import CheckpointError, ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.resumption import plain
from tests.kit.training import Regressor, make_trainer, regression_data, same_bits
from tests.lightning.test_checkpoint import flip_bit, full_disk


def _checkpoint(value: float = 1.0) -> dict[str, Any]:
    tied = torch.full((1000,), value)
    state = {f"layers.{index}": torch.full((1000,), value + index) for index in range(3)}
    return {
        "state_dict": {"embedding": tied, **state, "head": tied, "part": tied[10:20]},
        "optimizer_states": [{"state": {0: {"moment": torch.ones(1000), "step": torch.ones(())}}}],
        "epoch": 3,
    }


def _sharded(**options: Any) -> RoundPipeCheckpointIO:
    return RoundPipeCheckpointIO(**{"form": "sharded", "max_file_bytes": 8000, **options})


@pytest.mark.parametrize("weights_only", [True, False])
def test_what_is_read_is_what_was_saved(tmp_path: Path, weights_only: bool) -> None:
    path = tmp_path / "x.ckpt"
    for value in (1.0, 2.0):
        _sharded().save_checkpoint(_checkpoint(value), path)
        loaded = RoundPipeCheckpointIO().load_checkpoint(path, weights_only=weights_only)
        assert plain(loaded) == plain(_checkpoint(value))
        # An index, the structure, and tensors of at most 8000 bytes that share memory or not.
        assert len(os.listdir(path)) == 5  # noqa: PTH208 - hidden files count
    state = loaded["state_dict"]
    assert state["embedding"].data_ptr() == state["head"].data_ptr()
    assert state["part"].untyped_storage()._cdata == state["head"].untyped_storage()._cdata
    RoundPipeCheckpointIO().remove_checkpoint(path)
    assert not list(tmp_path.iterdir())


def test_either_form_replaces_the_other(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    one, parts = RoundPipeCheckpointIO(), RoundPipeCheckpointIO(form="distributed")
    for io in (one, _sharded(), one, parts, _sharded(), parts, one):
        io.save_checkpoint(_checkpoint(), path)
        assert path.is_dir() == (io.form != "file")
        assert plain(io.load_checkpoint(path)) == plain(_checkpoint())
        assert os.listdir(tmp_path) == ["last.ckpt"]  # noqa: PTH208 - hidden files count


@pytest.mark.parametrize("form", ["sharded", "distributed"])
def test_full_disk_leaves_the_previous_folder(tmp_path: Path, form: str) -> None:
    path, io = tmp_path / "x.ckpt", _sharded(max_file_bytes=1, form=form)
    io.save_checkpoint(_checkpoint(1.0), path)
    before = sorted(path.iterdir())
    large = {**_checkpoint(2.0), "more": torch.ones(10_000)}
    with full_disk(after_bytes=20_000), pytest.raises(CheckpointError, match="untouched"):
        io.save_checkpoint(large, path)
    assert plain(io.load_checkpoint(path)) == plain(_checkpoint(1.0))
    assert sorted(path.iterdir()) == before
    assert os.listdir(tmp_path) == ["x.ckpt"]  # noqa: PTH208 - hidden files count


@pytest.mark.parametrize(("form", "renames"), [("sharded", 5), ("distributed", 3)])
def test_killed_writer_leaves_the_previous_folder(tmp_path: Path, form: str, renames: int) -> None:
    """Killed at each of its renames in turn."""
    path, io = tmp_path / "x.ckpt", _sharded(form=form)
    io.save_checkpoint(_checkpoint(1.0), path)
    num_files = len(list(path.iterdir()))
    for number in range(1, renames + 1):
        pid = os.fork()
        if pid == 0:
            _kill_at_rename(number)
            io.save_checkpoint(_checkpoint(2.0), path)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 9
        assert plain(io.load_checkpoint(path)) == plain(_checkpoint(1.0))
    io.save_checkpoint(_checkpoint(3.0), path)
    assert plain(io.load_checkpoint(path)) == plain(_checkpoint(3.0))
    assert len(list(path.iterdir())) == num_files  # what the killed ones left is gone
    assert os.listdir(tmp_path) == ["x.ckpt"]  # noqa: PTH208 - hidden files count


def _kill_at_rename(number: int) -> None:
    """Let this process be killed before its `number`-th rename."""
    count = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), 9)
            return function(*arguments)

        return call

    Path.rename = counted(Path.rename)  # type: ignore[method-assign]
    Path.replace = counted(Path.replace)  # type: ignore[method-assign]


def _damaged(folder: Path) -> dict[str, str]:
    """Damage copies of a folder; return the message for each."""
    index = json.loads((folder / "index.json").read_text())
    file = index["files"]["tensors-00001"]["file"]
    structure = index["files"].pop("structure")
    beside = folder.parent
    for name in ("absolute", "above", "link"):  # what each of them leads to is sound
        shutil.copytree(folder, beside / name)
    for name in ("truncated", "missing", "newer", "no index", "bad index", "no text", "flipped"):
        shutil.copytree(folder, beside / name)
    (beside / "no structure").mkdir()
    (beside / "no structure" / "index.json").write_text(json.dumps(index))
    index["files"]["structure"] = structure
    for name, path in (("absolute", str(folder / file)), ("above", f"../{folder.name}/{file}")):
        entry = {**index["files"]["tensors-00001"], "file": path}
        wrong = {**index, "files": {**index["files"], "tensors-00001": entry}}
        (beside / name / "index.json").write_text(json.dumps(wrong))
    (beside / "link" / file).unlink()
    (beside / "link" / file).symlink_to(folder / file)
    (beside / "no text" / "index.json").write_bytes(b"\xff\xfe{}")
    flip_bit(beside / "flipped" / file)
    (beside / "truncated" / file).write_bytes((folder / file).read_bytes()[:100])
    (beside / "missing" / file).unlink()
    (beside / "newer" / "index.json").write_text(json.dumps({**index, "format_version": 9}))
    (beside / "no index" / "index.json").unlink()
    (beside / "bad index" / "index.json").write_text("{")
    return {
        "truncated": rf"its file {file} has 100 of \d+ bytes\. It is truncated",
        "missing": rf"its file {file} is missing",
        "newer": r"format_version=9, but this version .* reads 1\. Update roundpipe_lightning",
        "no index": r"is a folder without index\.json.*FSDP or DeepSpeed",
        "bad index": r"its index\.json is damaged",
        "no text": r"its index\.json is damaged",
        "no structure": r"its index\.json names no structure",
        "absolute": r"its index\.json leads to .*, which is outside of it",
        "above": r"its index\.json leads to .*, which is outside of it",
        "link": r"its index\.json leads to .*, which is outside of it",
        "flipped": rf"of its file {file}, its entry archive/data/\d differs from its checksum",
    }


def test_damaged_folders(tmp_path: Path) -> None:
    _sharded().save_checkpoint(_checkpoint(), tmp_path / "x.ckpt")
    for name, message in _damaged(tmp_path / "x.ckpt").items():
        with pytest.raises(CheckpointError, match=message) as error:
            RoundPipeCheckpointIO().load_checkpoint(tmp_path / name)
        assert name in str(error.value)


def test_damaged_parts(tmp_path: Path) -> None:
    path, io = tmp_path / "x.ckpt", _sharded(form="distributed")
    for message in (
        "differs from its checksum",
        "is too short",
        "is missing",
        "cannot be read: its parts do not fit",
    ):
        io.save_checkpoint(_checkpoint(), path)
        (file,) = path.glob("host0-*")
        if "short" in message:
            file.write_bytes(file.read_bytes()[:-1])
        elif "missing" in message:
            file.unlink()
        elif "checksum" in message:
            flip_bit(file)
        else:
            (path / ".metadata").write_bytes(b"")
        with pytest.raises(CheckpointError, match=message):
            io.load_checkpoint(path)


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match="form='parts': set 'file', 'sharded' or"):
        RoundPipeCheckpointIO(form="parts")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="written while training waits"):
        RoundPipeAsyncCheckpointIO(form="distributed")
    with pytest.raises(ConfigurationError, match="max_file_bytes=0"):
        RoundPipeCheckpointIO(max_file_bytes=0)


@pytest.mark.parametrize("form", ["sharded", "distributed"])
def test_one_file_of_a_folder(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _sharded(form=form).save_checkpoint(_checkpoint(), tmp_path / "x.ckpt")
    merge_checkpoint(tmp_path / "x.ckpt", tmp_path / "one.ckpt")
    assert plain(torch.load(tmp_path / "one.ckpt", weights_only=True)) == plain(_checkpoint())
    assert main([str(tmp_path / "x.ckpt"), str(tmp_path / "two.ckpt")]) == 0
    assert plain(torch.load(tmp_path / "two.ckpt")) == plain(_checkpoint())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    wrong = {
        "": "without index.json",
        "nowhere": "does not exist",
        "one.ckpt": "is one file already: .* roundpipe-export",
        "model": "is a folder of Hugging Face, not a checkpoint",
    }
    for name, message in wrong.items():
        assert main([str(tmp_path / name), str(tmp_path / "three.ckpt")]) == 2
        assert re.search(message, capsys.readouterr().err)


class _RunsCode:
    """Makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("form", ["sharded", "distributed"])
def test_merging_runs_no_code_of_the_checkpoint(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    content = {**_checkpoint(), "hyper": _RunsCode(made)}
    _sharded(form=form).save_checkpoint(content, tmp_path / "x.ckpt")
    arguments = [str(tmp_path / "x.ckpt"), str(tmp_path / "one.ckpt")]
    assert main(arguments) == 2
    assert "could run code" in capsys.readouterr().err
    assert not made.exists()
    assert main([*arguments, "--trust"]) == 0
    made.rmdir()
    if form == "distributed":
        (tmp_path / "x.ckpt" / ".metadata").write_bytes(pickle.dumps(_RunsCode(made)))
        assert main([*arguments, "--trust"]) == 2
        assert not made.exists()


# With the Trainer --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RoundPipeCheckpointIO, RoundPipeAsyncCheckpointIO])
def test_training_goes_on_from_a_folder(tmp_path: Path, kind: Any) -> None:
    def fit(num_epochs: int, **options: Any) -> Regressor:
        torch.manual_seed(3)
        module = Regressor("adamw", dropout=0.2)
        io = kind(form="sharded", max_file_bytes=2000)
        trainer = make_trainer(
            tmp_path,
            strategy=RoundPipeStrategy(num_microbatches=2, checkpoint_io=io),
            callbacks=[ModelCheckpoint(tmp_path / "saved", monitor="loss", save_last=True)],
            enable_checkpointing=True,
            max_epochs=num_epochs,
        )
        trainer.fit(module, regression_data(24, shuffle=True), **options)
        return module

    expected = fit(3)
    left = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert len(left) == 2, "the folders that are not the best are removed"
    shutil.rmtree(tmp_path / "saved")
    fit(2)
    assert same_bits(fit(3, ckpt_path="last"), expected)
