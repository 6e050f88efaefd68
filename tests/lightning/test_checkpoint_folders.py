import os
import pickle
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from roundpipe_commands import merge as main
from roundpipe_lightning.checkpoint.folder import Part
from roundpipe_lightning.checkpoint.io import (
    Form,
    RoundPipeAsyncCheckpointIO,
    RoundPipeCheckpointIO,
    merge_checkpoint,
)
from roundpipe_lightning.engine.update.hosts_update import OwnedPart
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
        "structure": torch.full((300,), value),
        "state_dict.head": {"0": torch.full((300,), 2 * value), 0: torch.full((300,), 3 * value)},
        "optimizer_states": [{"state": {0: {"moment": torch.ones(1000), "step": torch.ones(())}}}],
        "averages": [nn.Parameter(torch.full((300,), value))],
        "epoch": 3,
    }


def _folder(max_file_bytes: int = 8000) -> RoundPipeCheckpointIO:
    return RoundPipeCheckpointIO(form="distributed", max_file_bytes=max_file_bytes)


@pytest.mark.parametrize("weights_only", [True, False])
def test_what_is_read_is_what_was_saved(tmp_path: Path, weights_only: bool) -> None:
    path = tmp_path / "x.ckpt"
    for value in (1.0, 2.0):
        _folder().save_checkpoint(_checkpoint(value), path)
        loaded = RoundPipeCheckpointIO().load_checkpoint(path, weights_only=weights_only)
        assert plain(loaded) == plain(_checkpoint(value))
        # An index, and tensors of at most 8000 bytes; what lies in the same memory stays together.
        assert len(os.listdir(path)) == 5  # noqa: PTH208 - hidden files count
    state = loaded["state_dict"]
    assert state["embedding"].data_ptr() == state["head"].data_ptr()
    assert all(value.data_ptr() % 64 == 0 for value in state.values())
    assert isinstance(loaded["averages"][0], nn.Parameter)
    RoundPipeCheckpointIO().remove_checkpoint(path)
    assert not list(tmp_path.iterdir())


def test_either_form_replaces_the_other(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    one = RoundPipeCheckpointIO()
    for io in (one, _folder(), _folder(), one):
        io.save_checkpoint(_checkpoint(), path)
        assert path.is_dir() == (io.form != "file")
        assert plain(io.load_checkpoint(path)) == plain(_checkpoint())
        assert os.listdir(tmp_path) == ["last.ckpt"]  # noqa: PTH208 - hidden files count


def test_full_disk_leaves_the_previous_folder(tmp_path: Path) -> None:
    path, io = tmp_path / "x.ckpt", _folder(max_file_bytes=1)
    io.save_checkpoint(_checkpoint(1.0), path)
    before = sorted(path.iterdir())
    large = {**_checkpoint(2.0), "more": torch.ones(10_000)}
    with full_disk(after_bytes=20_000), pytest.raises(CheckpointError, match="untouched"):
        io.save_checkpoint(large, path)
    assert plain(io.load_checkpoint(path)) == plain(_checkpoint(1.0))
    assert sorted(path.iterdir()) == before
    assert os.listdir(tmp_path) == ["x.ckpt"]  # noqa: PTH208 - hidden files count


def test_killed_writer_leaves_the_previous_folder(tmp_path: Path) -> None:
    """Killed at each of its renames in turn."""
    path, io = tmp_path / "x.ckpt", _folder()
    io.save_checkpoint(_checkpoint(1.0), path)
    num_files = len(list(path.iterdir()))
    for number in range(1, num_files + 1):
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


def _damage(folder: Path, kind: str) -> None:
    """Damage the second file of a folder, or its metadata."""
    file, metadata = next(folder.glob("host0-*-1.distcp")), folder / ".metadata"
    if kind == "flipped":
        flip_bit(file)
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif kind == "missing":
        file.unlink()
    elif kind == "link":  # what it leads to is sound
        file.rename(folder.parent / file.name)
        file.symlink_to(folder.parent / file.name)
    elif kind == "bad index":
        metadata.write_bytes(b"\xff\xfe{}")
    elif kind == "no index":
        metadata.unlink()
    else:
        index = FileSystemReader(folder).read_metadata()
        for key, place in [*index.storage_data.items()]:
            if kind == "no structure" and key.fqn == "structure":
                del index.storage_data[key]
            elif kind == "absolute" and place.relative_path == file.name:
                place.relative_path = str(folder.parent / file.name)
            elif kind == "above" and place.relative_path == file.name:
                place.relative_path = f"../{folder.name}/../{file.name}"
        metadata.write_bytes(pickle.dumps(index))


@pytest.mark.parametrize(
    ("kind", "message"),
    {
        "flipped": r"its file host0-\w+-1.distcp differs from its digest\. It is truncated",
        "truncated": r"its file host0-\w+-1.distcp has [\d,]+ bytes instead of [\d,]+\. It",
        "missing": r"its file host0-\w+-1.distcp is missing",
        "link": r"its \.metadata leads to .*, which is outside of it",
        "absolute": r"\.metadata names the file '/",
        "above": r"\.metadata names the file '\.\./",
        "bad index": r"\.metadata does not end as it was written",
        "no index": r"is a folder without \.metadata.*FSDP or DeepSpeed",
        "no structure": r"that another program wrote",
    }.items(),
)
def test_damaged_folders(tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / "x.ckpt"
    _folder().save_checkpoint(_checkpoint(), path)
    _damage(path, kind)
    with pytest.raises(CheckpointError, match=message) as error:
        RoundPipeCheckpointIO().load_checkpoint(path)
    assert "x.ckpt" in str(error.value)


def _alter(index: Any, kind: str) -> None:
    """Alter what an index says of one tensor, or of one place."""
    name = next(name for name in index.state_dict_metadata if name.endswith("divided"))
    entry = index.state_dict_metadata[name]
    chunks, first = entry.chunks, entry.chunks[0]
    place = index.storage_data[MetadataIndex(name, first.offsets)]
    other = next(key for key in index.storage_data if key.fqn.endswith("embedding"))
    longer = torch.Size([first.sizes[0] + 1, *first.sizes[1:]])
    if kind == "dropped":
        chunks.pop()
    elif kind == "doubled":
        chunks.append(first)
    elif kind == "moved":
        moved = ChunkStorageMetadata(torch.Size([1, 0]), first.sizes)
        index.storage_data[MetadataIndex(name, moved.offsets)] = place
        chunks[0] = moved
    elif kind == "cut":
        entry.size = torch.Size([entry.size[0] - 1, entry.size[1]])
    elif kind == "longer":
        chunks[0] = ChunkStorageMetadata(first.offsets, longer)
    elif kind == "larger":
        entry.size = torch.Size([entry.size[0] + 1, entry.size[1]])
    elif kind == "another dtype":
        entry.properties.dtype = torch.int32
    elif kind == "half":
        entry.properties.dtype = torch.float16
    elif kind == "another place":
        index.storage_data[MetadataIndex(name, first.offsets)] = index.storage_data[other]
    elif kind == "before the file":
        place.offset = -64
    else:
        place.length = 1 << 62


@pytest.mark.parametrize(
    "kind",
    [
        *("dropped", "doubled", "moved", "cut", "longer", "larger", "another dtype", "half"),
        *("another place", "before the file", "behind the file"),
    ],
)
def test_an_index_that_was_altered_is_refused_without_its_digest(tmp_path: Path, kind: str) -> None:
    """As whoever alters it may write the digests anew."""
    path, divided = tmp_path / "x.ckpt", torch.randn(40, 60)
    content = {"state_dict": {"divided": divided, "embedding": torch.randn(1000)}}
    middle = divided.numel() // 2 + 7
    owned = [
        OwnedPart(whole=divided, start=start, values=divided.view(-1)[start:stop])
        for start, stop in ((0, middle), (middle, divided.numel()))
    ]
    parts = [
        Part(content, owned=[part], rank=rank, max_file_bytes=9000)
        for rank, part in enumerate(owned)
    ]
    path.mkdir()
    files = [file for part in parts for file in part.write(path, version="0", take=nullcontext)]
    metadata = path / ".metadata"
    metadata.write_bytes(parts[0].metadata(files))
    assert torch.equal(_folder().load_checkpoint(path)["state_dict"]["divided"], divided)
    index = FileSystemReader(path).read_metadata()
    metadata.write_bytes(pickle.dumps(index))
    with pytest.warns(UserWarning, match="has no digests"):
        assert torch.equal(_folder().load_checkpoint(path)["state_dict"]["divided"], divided)
    _alter(index, kind)
    metadata.write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"x\.ckpt cannot be read"):
        _folder().load_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"x\.ckpt cannot be read"):
        merge_checkpoint(path, tmp_path / "one.ckpt")


def test_the_file_of_another_save_is_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "x.ckpt", tmp_path / "y.ckpt"
    for value, folder in ((1.0, path), (2.0, other)):
        _folder().save_checkpoint(_checkpoint(value), folder)
    files = (next(folder.glob("host0-*-1.distcp")) for folder in (path, other))
    here, there = files
    here.write_bytes(there.read_bytes())
    with pytest.raises(CheckpointError, match="differs from its digest"):
        RoundPipeCheckpointIO().load_checkpoint(path)


@pytest.mark.parametrize("form", ["file", "distributed"])
def test_no_flipped_bit_goes_unseen(tmp_path: Path, form: Form) -> None:
    path = tmp_path / "x.ckpt"
    RoundPipeCheckpointIO(form=form).save_checkpoint(_checkpoint(), path)
    files = [path] if form == "file" else sorted(path.iterdir())
    for file in files:
        content = file.read_bytes()
        for place in range(0, len(content) * 8, len(content) * 8 // 150):
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            file.unlink()  # what is mapped stays as it is
            file.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=r"x\.ckpt cannot be read: "):
                RoundPipeCheckpointIO().load_checkpoint(path)
        file.unlink()
        file.write_bytes(content)
    assert RoundPipeCheckpointIO().load_checkpoint(path)["epoch"] == 3


@pytest.mark.parametrize("form", ["file", "distributed"])
def test_a_folder_of_other_files_stays(
    tmp_path: Path, form: Form, capsys: pytest.CaptureFixture[str]
) -> None:
    _folder().save_checkpoint(_checkpoint(), tmp_path / "runs" / "x.ckpt")
    with pytest.raises(CheckpointError, match="a folder with other files is there"):
        RoundPipeCheckpointIO(form=form).save_checkpoint(_checkpoint(), tmp_path / "runs")
    assert main([str(tmp_path / "runs" / "x.ckpt"), str(tmp_path)]) == 2
    assert "a folder with other files is there" in capsys.readouterr().err
    assert _folder().load_checkpoint(tmp_path / "runs" / "x.ckpt")


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match="form='sharded': set 'file' or 'distributed'"):
        RoundPipeCheckpointIO(form="sharded")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="max_file_bytes=0"):
        RoundPipeCheckpointIO(max_file_bytes=0)


def test_one_file_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _folder().save_checkpoint(_checkpoint(), tmp_path / "x.ckpt")
    merge_checkpoint(tmp_path / "x.ckpt", tmp_path / "one.ckpt")
    assert plain(torch.load(tmp_path / "one.ckpt", weights_only=True)) == plain(_checkpoint())
    assert main([str(tmp_path / "x.ckpt"), str(tmp_path / "two.ckpt")]) == 0
    assert plain(torch.load(tmp_path / "two.ckpt")) == plain(_checkpoint())
    _folder().save_checkpoint(_checkpoint(), tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert main([str(tmp_path / "run"), str(tmp_path / "of_run.ckpt")]) == 0
    assert plain(torch.load(tmp_path / "of_run.ckpt")) == plain(_checkpoint())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    wrong = {
        "": r"without \.metadata",
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


def test_merging_runs_no_code_of_the_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "made"
    content = {**_checkpoint(), "hyper": _RunsCode(made)}
    _folder().save_checkpoint(content, tmp_path / "x.ckpt")
    arguments = [str(tmp_path / "x.ckpt"), str(tmp_path / "one.ckpt")]
    assert main(arguments) == 2
    assert "could run code" in capsys.readouterr().err
    assert not made.exists()
    assert main([*arguments, "--trust"]) == 0
    made.rmdir()
    (tmp_path / "x.ckpt" / ".metadata").write_bytes(pickle.dumps(_RunsCode(made)))
    assert main([*arguments, "--trust"]) == 2
    assert not made.exists()


# With the Trainer --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RoundPipeCheckpointIO, RoundPipeAsyncCheckpointIO])
def test_training_goes_on_from_a_folder(tmp_path: Path, kind: Any) -> None:
    def fit(num_epochs: int, **options: Any) -> Regressor:
        torch.manual_seed(3)
        module = Regressor("adamw", dropout=0.2)
        io = kind(form="distributed", max_file_bytes=2000)
        trainer = make_trainer(
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
