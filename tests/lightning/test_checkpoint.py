import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision

from roundpipe_lightning.checkpoint.io import RoundPipeAsyncCheckpointIO, RoundPipeCheckpointIO
from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.precision import RoundPipePrecision
from tests.kit.training import QUIET, Regressor, make_trainer, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


@contextmanager
def full_disk(after_bytes: int) -> Iterator[None]:
    """Let every write into a file fail once the file has grown to so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)


def large() -> dict[str, Any]:
    return {"state_dict": {"a": torch.ones(50_000), "b": torch.zeros(50_000)}}


def test_saves_and_loads(tmp_path: Path) -> None:
    io = RoundPipeCheckpointIO()
    path = tmp_path / "new folder" / "x.ckpt"
    io.save_checkpoint(large(), path)
    loaded = io.load_checkpoint(path, weights_only=True)
    assert torch.equal(loaded["state_dict"]["a"], torch.ones(50_000))
    assert os.listdir(path.parent) == ["x.ckpt"]  # noqa: PTH208 - hidden files count
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    io.remove_checkpoint(path)
    assert not path.exists()


def test_full_disk_leaves_the_previous_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    io = RoundPipeCheckpointIO()
    path = tmp_path / "last.ckpt"
    io.save_checkpoint({"state_dict": {"a": torch.ones(3)}}, path)
    before = path.read_bytes()
    with full_disk(after_bytes=100_000), pytest.raises(CheckpointError) as error:
        io.save_checkpoint(large(), path)
    assert str(path) in str(error.value)
    assert "untouched" in str(error.value)
    assert "Free some space" in str(error.value)
    assert isinstance(error.value.__cause__, OSError)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.ckpt"]  # noqa: PTH208 - hidden files count


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        RoundPipeCheckpointIO().save_checkpoint(large(), tmp_path / "file" / "x.ckpt")


def test_object_that_cannot_be_saved_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, TypeError), match=r"pickle|local object"):
        RoundPipeCheckpointIO().save_checkpoint({"x": lambda: None}, tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - hidden files count


@pytest.mark.parametrize("kept", [0, 1, 100, 200_000, 401_000])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    io = RoundPipeCheckpointIO()
    path = tmp_path / "x.ckpt"
    io.save_checkpoint(large(), path)
    path.write_bytes(path.read_bytes()[:kept])
    for weights_only in (True, False):
        with pytest.raises(CheckpointError, match="truncated or damaged") as error:
            io.load_checkpoint(path, weights_only=weights_only)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("checks", [True, False])
def test_a_flipped_bit_is_found_where_there_are_checksums(tmp_path: Path, checks: bool) -> None:
    path = tmp_path / "x.ckpt"
    torch.serialization.set_crc32_options(checks)
    try:
        torch.save(large(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    flip_bit(path)
    if not checks:
        RoundPipeCheckpointIO().load_checkpoint(path)
        return
    with pytest.raises(CheckpointError, match=r"its entry .*data/\d differs from its checksum"):
        RoundPipeCheckpointIO().load_checkpoint(path)


def _without(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(checkpoint: Any) -> None:
        for key in keys[:-1]:
            checkpoint = checkpoint[key]
        del checkpoint[keys[-1]]

    return spoil


def _of_an_earlier_version(checkpoint: dict[str, Any]) -> None:
    checkpoint["roundpipe"]["format_version"] = 2
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = [{}]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("state_dict"), "it has no state_dict"),
        (_without("optimizer_states", 0, "param_groups"), "optimizer_states does not fit"),
        (_without("roundpipe", "random_state"), "'roundpipe' does not fit.*KeyError"),
        (_without("roundpipe", "logged"), "'roundpipe' does not fit.*KeyError"),
        (_without("roundpipe", "gradients"), "'roundpipe' does not fit.*KeyError"),
        (lambda c: c.update(roundpipe=3), "'roundpipe' does not fit.*AttributeError"),
        (_of_an_earlier_version, "was written by an earlier version of roundpipe_lightning"),
        (lambda c: c["roundpipe"].update(data=[{}]), "'roundpipe' does not fit.*KeyError"),
    ],
)
def test_what_does_not_fit_is_one_error(tmp_path: Path, spoil: Any, message: str) -> None:
    trainer = make_trainer(tmp_path, strategy="roundpipe", max_steps=2)
    trainer.fit(Regressor("adamw"), regression_data(16))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt")
    spoil(checkpoint)
    torch.save(checkpoint, tmp_path / "x.ckpt")
    trainer = make_trainer(tmp_path, strategy="roundpipe", max_steps=4)
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(Regressor("adamw"), regression_data(16), ckpt_path=tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ("sgd", "adamw", r"optimizer_states does not fit here .*of another training"),
        ("adamw", "sgd", r"another optimizer than SGD: it has no dampening, momentum"),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, before: str, now: str, message: str
) -> None:
    trainer = make_trainer(tmp_path, strategy="roundpipe", max_steps=2)
    trainer.fit(Regressor(before), regression_data(16))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer = make_trainer(tmp_path, strategy="roundpipe", max_steps=4)
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(Regressor(now), regression_data(16), ckpt_path=tmp_path / "x.ckpt")


def test_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_text("hello, this is no checkpoint")
    with pytest.raises(CheckpointError, match="not in torch's format"):
        RoundPipeCheckpointIO().load_checkpoint(path)


def test_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        RoundPipeCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")


@pytest.mark.parametrize("kind", [RoundPipeCheckpointIO, RoundPipeAsyncCheckpointIO])
def test_remote_path_goes_lightnings_way(kind: Any) -> None:
    io = kind()
    path = "memory://roundpipe/x.ckpt"
    io.save_checkpoint({"a": torch.ones(2)}, path)
    with pytest.warns(UserWarning, match=r"memory://roundpipe/x\.ckpt is one file"):
        kind(form="sharded").save_checkpoint({"a": torch.ones(2)}, path)
    assert torch.equal(io.load_checkpoint(path)["a"], torch.ones(2))
    io.remove_checkpoint(path)


# With the Trainer --------------------------------------------------------------------------------


def _fit(folder: Path, strategy: Any, **flags: Any) -> tuple[Regressor, Trainer]:
    torch.manual_seed(3)
    module = Regressor("adamw")
    callback = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    trainer = make_trainer(
        folder,
        strategy=strategy,
        callbacks=[callback],
        enable_checkpointing=True,
        **{"max_epochs": 2, **flags},
    )
    trainer.fit(module, regression_data(), regression_data(8))
    return module, trainer


def test_full_disk_while_training(tmp_path: Path) -> None:
    class FillDisk(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            if trainer.current_epoch == 1:
                self.disk = full_disk(after_bytes=2_000)
                self.disk.__enter__()

        def on_exception(self, *_: Any) -> None:
            self.disk.__exit__(None, None, None)

    path = tmp_path / "last.ckpt"
    trainer = make_trainer(
        tmp_path,
        strategy="roundpipe",
        devices=2,
        callbacks=[FillDisk(), ModelCheckpoint(tmp_path, filename="last")],
        enable_checkpointing=True,
    )
    with pytest.raises(CheckpointError, match=r"last.*\.ckpt"):
        trainer.fit(Regressor(), regression_data())
    assert torch.load(path)["epoch"] == 0
    assert os.listdir(tmp_path) == ["last.ckpt"]  # noqa: PTH208 - hidden files count


def test_loss_scale_moves_between_strategies(tmp_path: Path) -> None:
    def plugin(ours: bool, scale: float) -> Any:
        scaler = torch.amp.GradScaler(device="cpu", init_scale=scale)
        if ours:
            return RoundPipePrecision("16-mixed", scaler=scaler)
        return MixedPrecision("16-mixed", "cpu", scaler)

    for ours in (True, False):
        trainer = make_trainer(
            tmp_path,
            strategy="roundpipe" if ours else "auto",
            plugins=[plugin(ours, 128.0)],
            max_epochs=1,
        )
        trainer.fit(Regressor(), regression_data())
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        other = make_trainer(
            tmp_path,
            strategy="auto" if ours else "roundpipe",
            plugins=[plugin(not ours, 2.0)],
            max_epochs=1,
        )
        other.fit(Regressor(), regression_data(), ckpt_path=tmp_path / "x.ckpt")
        restored = other.precision_plugin
        assert isinstance(restored, (RoundPipePrecision, MixedPrecision))
        assert restored.scaler is not None
        assert restored.scaler.get_scale() == 128.0


def test_asynchronous_checkpoints_are_written_by_ours(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, strategy="roundpipe", plugins=[AsyncCheckpointIO()])
    wrapper = trainer.strategy.checkpoint_io
    assert isinstance(wrapper, AsyncCheckpointIO)
    assert isinstance(wrapper.checkpoint_io, RoundPipeCheckpointIO)


def test_damaged_checkpoint_stops_before_training(tmp_path: Path) -> None:
    _fit(tmp_path, "roundpipe")
    path = tmp_path / "last.ckpt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"last\.ckpt cannot be read"):
        make_trainer(tmp_path, strategy="roundpipe").fit(
            Regressor("adamw"), regression_data(), ckpt_path=path
        )
