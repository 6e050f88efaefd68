from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers.logger import Logger

import roundpipe_lightning.checkpoint.io as checkpoint_module
from roundpipe_lightning.checkpoint.io import RoundPipeAsyncCheckpointIO, RoundPipeCheckpointIO
from roundpipe_lightning.checkpoint.snapshot import Snapshots
from roundpipe_lightning.engine.update.updater import Updater
from roundpipe_lightning.errors import CheckpointError, ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.resumption import MemoryLogger, plain
from tests.kit.training import Regressor, make_trainer, regression_data
from tests.lightning.test_checkpoint import full_disk


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let no file be written before the event is set."""
    may_write, write = threading.Event(), checkpoint_module._write

    def later(*arguments: Any, **options: Any) -> None:
        assert may_write.wait(timeout=60)
        write(*arguments, **options)

    monkeypatch.setattr(checkpoint_module, "_write", later)
    yield may_write
    may_write.set()


def _weights(count: int = 8) -> dict[str, Any]:
    return {"state_dict": {f"{index}": torch.full((1000,), float(index)) for index in range(count)}}


def _memory(checkpoint: dict[str, Any]) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in checkpoint["state_dict"].values()]


def _change(checkpoint: dict[str, Any]) -> None:
    for tensor in checkpoint["state_dict"].values():
        tensor.fill_(-1)


def _is_unchanged(path: Path) -> bool:
    state = torch.load(path)["state_dict"]
    return all(bool((tensor == float(name)).all()) for name, tensor in state.items())


@pytest.mark.parametrize("max_copy_bytes", [0, 3 * 4000, 1 << 30])
def test_what_is_written_is_what_was_there(tmp_path: Path, max_copy_bytes: int) -> None:
    io = RoundPipeAsyncCheckpointIO(max_copy_bytes=max_copy_bytes)
    checkpoint = _weights()
    io.save_checkpoint(checkpoint, tmp_path / "a.ckpt", steady=_memory(checkpoint))
    io.save_checkpoint(checkpoint, tmp_path / "b.ckpt", steady=_memory(checkpoint))
    io.release()
    _change(checkpoint)
    io.teardown()
    assert _is_unchanged(tmp_path / "a.ckpt")
    assert _is_unchanged(tmp_path / "b.ckpt")
    assert io.snapshots.peak_copied_bytes <= max_copy_bytes


def test_only_what_is_not_written_yet_is_copied(tmp_path: Path, held: threading.Event) -> None:
    io = RoundPipeAsyncCheckpointIO()
    checkpoint = _weights()
    io.save_checkpoint(checkpoint, tmp_path / "a.ckpt", steady=_memory(checkpoint))
    io.save_checkpoint(checkpoint, tmp_path / "b.ckpt", steady=_memory(checkpoint))
    assert io.snapshots.peak_copied_bytes == 0
    io.release(unchanged=_memory(checkpoint)[:2])
    assert io.snapshots.peak_copied_bytes == 6 * 4000  # once, for both files
    held.set()
    io.wait()
    io.save_checkpoint(checkpoint, tmp_path / "c.ckpt", steady=_memory(checkpoint))
    io.wait()
    io.release()
    assert io.snapshots.peak_copied_bytes == 6 * 4000


def test_a_copy_that_nobody_needs_any_more_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = Snapshots(max_copy_bytes=1000)
    tensor, clone = torch.ones(5), torch.UntypedStorage.clone
    snapshot = snapshots.protect([tensor.untyped_storage()])

    def given_up(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        snapshot.abandon()  # the writer's thread has failed
        return clone(storage)  # type: ignore[no-untyped-call, no-any-return]

    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "clone", given_up)
        snapshots.release()
    assert snapshots._copied_bytes == snapshots.peak_copied_bytes == 0


def test_what_may_change_at_any_time_is_copied_at_once(
    tmp_path: Path, held: threading.Event
) -> None:
    io = RoundPipeAsyncCheckpointIO()
    checkpoint = {**_weights(), "settings": [1, 2]}
    io.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    _change(checkpoint)
    checkpoint["settings"].append(3)
    held.set()
    io.wait()
    assert _is_unchanged(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt")["settings"] == [1, 2]


def test_saves_and_removals_keep_their_order(tmp_path: Path, held: threading.Event) -> None:
    io = RoundPipeAsyncCheckpointIO()
    for name in ("a", "b", "a", "c"):
        io.save_checkpoint(_weights(), tmp_path / name)
        io.remove_checkpoint(tmp_path / name)
    io.save_checkpoint(_weights(), tmp_path / "d")
    assert not list(tmp_path.iterdir())
    held.set()
    assert list(io.load_checkpoint(tmp_path / "d")) == ["state_dict"]
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_the_first_error_is_raised_by_the_next_call_and_once(tmp_path: Path) -> None:
    io = RoundPipeAsyncCheckpointIO()
    large = {"state_dict": {"a": torch.ones(50_000)}}
    (tmp_path / "file").touch()
    with full_disk(after_bytes=50_000):
        io.save_checkpoint(large, tmp_path / "a.ckpt")
        io.remove_checkpoint(tmp_path / "file")  # what was asked for later is still done
        with pytest.raises(CheckpointError, match=r"a\.ckpt could not be written: File too large"):
            io.wait()
    assert not (tmp_path / "file").exists()
    io.save_checkpoint(large, tmp_path / "c.ckpt")
    io.teardown()
    assert os.listdir(tmp_path) == ["c.ckpt"]  # noqa: PTH208 - hidden files count


def test_without_a_thread_nothing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for a checkpoint that nobody writes would not end."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    io = RoundPipeAsyncCheckpointIO()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            io.save_checkpoint({"a": torch.ones(3)}, tmp_path / "a.ckpt")
    io.wait()
    io.save_checkpoint({"a": torch.ones(3)}, tmp_path / "b.ckpt")
    io.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["b.ckpt"]


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ConfigurationError, match="max_copy_bytes=-1: set 0 or more"):
        RoundPipeAsyncCheckpointIO(max_copy_bytes=-1)


# With the Trainer --------------------------------------------------------------------------------


def _fit(io: Any, *callbacks: Any, **flags: Any) -> LightningModule:
    torch.manual_seed(3)
    module = Regressor("adamw")
    trainer = make_trainer(
        strategy=RoundPipeStrategy(num_microbatches=2, checkpoint_io=io),
        callbacks=list(callbacks),
        enable_checkpointing=True,
        **{"max_epochs": 2, **flags},
    )
    trainer.fit(module, regression_data(24))
    return module


def _every_step(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.parametrize("max_copy_bytes", [0, 2000, 1 << 30])
def test_training_goes_on_while_every_step_is_saved(tmp_path: Path, max_copy_bytes: int) -> None:
    io = RoundPipeAsyncCheckpointIO(max_copy_bytes=max_copy_bytes)
    _fit(RoundPipeCheckpointIO(), _every_step(tmp_path / "sync"))
    _fit(io, _every_step(tmp_path / "async"))
    for path in sorted((tmp_path / "sync").iterdir()):
        expected, found = (
            torch.load(path.parent.parent / kind / path.name) for kind in ("sync", "async")
        )
        for key in ("state_dict", "optimizer_states", "loops", "lr_schedulers"):
            assert plain(found[key]) == plain(expected[key]), path.name
    assert len(list((tmp_path / "async").iterdir())) == 6


def test_weights_are_not_copied_before_they_change(tmp_path: Path, held: threading.Event) -> None:
    io = RoundPipeAsyncCheckpointIO()
    copied: list[int] = []

    class Watch(Callback):
        def on_before_zero_grad(self, *_: Any) -> None:
            copied.append(io.snapshots.peak_copied_bytes)

        def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
            copied.append(io.snapshots.peak_copied_bytes)
            if trainer.global_step == 1:
                held.set()

    module = _fit(io, _every_step(tmp_path / "c"), Watch(), max_steps=2)
    weights = sum(value.numel() * value.element_size() for value in module.parameters())
    assert copied[:3] == [0, 0, 0]
    assert weights < copied[3] < 3.5 * weights  # and two moments of AdamW


@pytest.mark.parametrize("update", ["exact", "async"])
def test_blocks_are_not_stepped_early_while_they_are_written(
    tmp_path: Path, held: threading.Event, monkeypatch: pytest.MonkeyPatch, update: str
) -> None:
    begun: list[int] = []
    begin = Updater.begin

    def counted(updater: Updater, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        begun.append(module.trainer.global_step)
        begin(updater, optimizer, **options)

    monkeypatch.setattr(Updater, "begin", counted)
    saved: dict[str, Any] = {}

    class Save(ModelCheckpoint):
        requires_optimizer_sync = False

        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "held.ckpt")
                saved.update(plain(module.state_dict()))

        def on_train_end(self, *_: Any) -> None:
            held.set()

    torch.manual_seed(3)
    module = Regressor("adamw")
    io = RoundPipeAsyncCheckpointIO()
    trainer = make_trainer(
        strategy=EmulatedStrategy(
            num_microbatches=2, checkpoint_io=io, dry_run=False, update=update
        ),
        devices=2,
        callbacks=[Save()],
        enable_checkpointing=True,
        max_steps=5,
    )
    trainer.fit(module, regression_data(40))
    assert plain(torch.load(tmp_path / "held.ckpt")["state_dict"]) == saved
    assert begun == ([1, 3, 4] if update == "exact" else [])


def test_weights_that_a_callback_swaps_are_copied_at_once(
    tmp_path: Path, held: threading.Event
) -> None:
    io = RoundPipeAsyncCheckpointIO()
    held.set()
    _fit(io, WeightAveraging(), _every_step(tmp_path / "c"), max_steps=2)
    assert io.snapshots.peak_copied_bytes == 0


def test_saved_after_the_training_is_there_at_once(tmp_path: Path) -> None:
    class Save(Callback):
        def on_fit_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "end.ckpt")
            assert (tmp_path / "end.ckpt").is_file()

    module = _fit(RoundPipeAsyncCheckpointIO(), Save(), max_steps=1)
    module.trainer.save_checkpoint(tmp_path / "later.ckpt")
    assert (tmp_path / "later.ckpt").is_file()


def test_as_a_plugin() -> None:
    io = RoundPipeAsyncCheckpointIO()
    trainer = make_trainer(strategy="roundpipe", plugins=[io])
    assert trainer.strategy.checkpoint_io is io


def test_error_reaches_the_trainer(tmp_path: Path) -> None:
    class FillDisk(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                cast("RoundPipeAsyncCheckpointIO", trainer.strategy.checkpoint_io).wait()
                self.disk = full_disk(after_bytes=2_000)
                self.disk.__enter__()

        def on_exception(self, *_: Any) -> None:
            self.disk.__exit__(None, None, None)

    callbacks = [FillDisk(), _every_step(tmp_path)]
    with pytest.raises(CheckpointError, match=r"step=\d\.ckpt could not be written"):
        _fit(RoundPipeAsyncCheckpointIO(), *callbacks)
    left = os.listdir(tmp_path)  # noqa: PTH208 - hidden files count
    assert sorted(left) == ["step=1.ckpt", "step=2.ckpt"]


def test_error_of_the_training_is_not_hidden(tmp_path: Path) -> None:
    class Fail(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            io = trainer.strategy.checkpoint_io
            assert isinstance(io, RoundPipeAsyncCheckpointIO)
            io.save_checkpoint({"a": torch.ones(3)}, tmp_path / "file" / "x.ckpt")
            raise ValueError("the cause")

    (tmp_path / "file").touch()

    def fit() -> None:
        with pytest.raises(ValueError, match="the cause"):
            _fit(RoundPipeAsyncCheckpointIO(), Fail())

    with pytest.warns(UserWarning, match="A checkpoint was lost besides"):
        fit()


def test_logger_that_uploads_finds_the_file(tmp_path: Path) -> None:
    found: list[bool] = []

    class Uploading(MemoryLogger):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            found.append(Path(checkpoint_callback._last_checkpoint_saved).is_file())

    logger: Logger = Uploading()
    _fit(RoundPipeAsyncCheckpointIO(), _every_step(tmp_path / "c"), logger=logger)
    assert found == [True] * 6


def test_memory_while_a_file_is_written(tmp_path: Path) -> None:
    """No second copy: the peak of the process grows by little more than a buffer."""
    big = {"state_dict": {"a": torch.ones(12_000_000), "b": torch.ones(12_000_000)}}
    for io in (
        RoundPipeCheckpointIO(),
        RoundPipeCheckpointIO(form="distributed", max_file_bytes=1),
    ):
        io.save_checkpoint({"a": torch.ones(1000)}, tmp_path / "warm-up")
        Path("/proc/self/clear_refs").write_text("5")
        before = _memory_bytes("VmRSS")
        io.save_checkpoint(big, tmp_path / f"{io.form}.ckpt")
        assert _memory_bytes("VmHWM") - before < 20_000_000


def _memory_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def test_process_that_ends_finishes_its_files(tmp_path: Path) -> None:
    def life() -> None:
        io = RoundPipeAsyncCheckpointIO()
        io.save_checkpoint({"a": torch.ones(1000)}, tmp_path / "a.ckpt")
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter does first

    assert _status_of(life) == 0
    assert torch.equal(torch.load(tmp_path / "a.ckpt")["a"], torch.ones(1000))


def _status_of(life: Callable[[], None]) -> int:
    """Run something in a process of its own, and return how that ended."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            life()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def _killed(*_: Any) -> Any:
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize("moment", ["while it writes", "before the flush", "before the rename"])
def test_killed_writer_leaves_the_previous_checkpoint(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    RoundPipeCheckpointIO().save_checkpoint({"a": torch.ones(3)}, path)
    before = path.read_bytes()

    def life() -> None:
        if moment == "while it writes":
            num_taken = count()
            take = lambda storage: _killed() if next(num_taken) else nullcontext(storage)  # noqa: E731
            monkeypatch.setattr(checkpoint_module, "nullcontext", take)
        elif moment == "before the flush":
            monkeypatch.setattr(os, "fsync", _killed)
        else:
            monkeypatch.setattr(Path, "replace", _killed)
        big = {"a": torch.ones(1_000_000), "b": torch.zeros(1_000_000)}
        RoundPipeCheckpointIO().save_checkpoint(big, path)

    assert _status_of(life) == 9
    assert path.read_bytes() == before
    [left] = tmp_path.glob(".last.ckpt.*.tmp")
    assert (left.stat().st_size < 8_000_000) is (moment == "while it writes")
    RoundPipeCheckpointIO().save_checkpoint({"a": torch.ones(3)}, path)
    assert os.listdir(tmp_path) == ["last.ckpt"]  # noqa: PTH208 - what the killed one left is gone
