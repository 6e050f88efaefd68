"""Kill a training at random moments, resume it, and compare it with one that was never stopped.

    python -m tests.soak.kill_resume --kills 300 --output json

A training with background checkpoints runs in a process forked from this one, which has imported
everything, so that a life begins at once. After a random time it gets SIGKILL. Then the checkpoint
is read (one that had been reported complete, or a later one, must be there), and the next life goes
on from `ckpt_path="last"`, until one comes to the end; its parameters, optimizer state, schedulers,
metrics and random states must be those of the run that was not stopped, to the bit. Then the next
run begins, until there were so many kills.

Checkpoints are written after every batch, in the middle of accumulation windows too, after
validations and at the ends of epochs. Prints, as JSON or text:

    kills       processes killed
    lost        kills after which a checkpoint that had been reported complete could not be loaded
    mismatches  finished runs that differ from the one that was never stopped
    runs        finished runs
    resumed     lives that began from a checkpoint
    seconds     all of it
"""

import argparse
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from roundpipe_lightning import RoundPipeAsyncCheckpointIO, RoundPipeStrategy
from tests.kit.resumption import Restless, plain
from tests.kit.training import make_trainer, regression_data

NUM_SAMPLES = 56
LAST = "last.ckpt"


class ReportingIO(RoundPipeAsyncCheckpointIO):
    """Notes in a file how many batches a checkpoint holds, when it is complete."""

    report: Path

    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **options: Any) -> None:
        super().save_checkpoint(checkpoint, *arguments, **options)
        count = _num_batches(checkpoint)

        def note() -> None:
            temporary = self.report.with_suffix(".tmp")
            temporary.write_text(str(count))
            temporary.replace(self.report)

        self._queue.submit(note)


class SaveEverywhere(Callback):
    """Saves where ModelCheckpoint does not: inside windows, after validations, at epochs' ends."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        checkpoint = trainer.checkpoint_callback
        assert isinstance(checkpoint, ModelCheckpoint)
        if not trainer.sanity_checking:
            trainer.save_checkpoint(Path(str(checkpoint.dirpath)) / LAST, weights_only=False)


@dataclass(kw_only=True)
class Result:
    kills: int = 0
    lost: int = 0
    mismatches: int = 0
    runs: int = 0
    resumed: int = 0
    seconds: float = 0.0


def train(folder: Path, *, form: Any, num_epochs: int) -> None:
    """One life: train from the last checkpoint, or from the beginning, to the end."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    resumes = (folder / LAST).exists()
    # what a resumed run draws comes from its checkpoint
    seed_everything(os.getpid() if resumes else 0, verbose=False)
    io = ReportingIO(form=form, max_copy_bytes=1_500, max_file_bytes=1_500)  # parts of a state
    io.report = folder / "reported"
    trainer = make_trainer(
        folder,
        devices=2,
        strategy=RoundPipeStrategy(num_microbatches=2, checkpoint_io=io),
        max_epochs=num_epochs,
        accumulate_grad_batches=2,
        val_check_interval=3,
        gradient_clip_val=1.0,
        enable_checkpointing=True,
        callbacks=[
            SaveEverywhere(),
            ModelCheckpoint(
                folder,
                save_top_k=0,
                save_last=True,
                every_n_train_steps=1,
                enable_version_counter=False,
            ),
        ],
    )
    module = Restless()
    trainer.fit(
        module, regression_data(NUM_SAMPLES, shuffle=True), regression_data(8), ckpt_path="last"
    )
    _save_end(module, trainer, folder / "end.pt")


def _save_end(module: LightningModule, trainer: Trainer, path: Path) -> None:
    schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    end = {
        "parameters": module.state_dict(),
        "optimizer": trainer.optimizers[0].state_dict(),
        "schedulers": schedulers,
        "metrics": dict(trainer.callback_metrics),
        "steps": trainer.global_step,
        "random": [torch.get_rng_state(), random.getstate(), np.random.random()],  # noqa: NPY002
    }
    torch.save(end, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def _num_batches(checkpoint: Mapping[str, Any]) -> int:
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    return int(progress["total"]["ready"])


def _differing(found: Any, expected: Any, place: str = "") -> list[str]:
    if isinstance(found, Mapping) and isinstance(expected, Mapping):
        keys = sorted({*found, *expected}, key=str)
        pairs = [(key, found.get(key), expected.get(key)) for key in keys]
    elif isinstance(found, (list, tuple)) and len(found) == len(expected):
        pairs = list(zip(range(len(found)), found, expected, strict=True))
    else:
        return [] if found == expected else [f"{place} ({found} instead of {expected})"[:200]]
    return [line for key, a, b in pairs for line in _differing(a, b, f"{place}/{key}")]


def live(life: Callable[[], None], *, seconds: float | None) -> bool:
    """Run `life` in a forked process; return whether it came to its end.

    Args:
        life: What to run.
        seconds: When it is killed; None: never.

    Raises:
        RuntimeError: It failed by itself.
    """
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            life()
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            os._exit(status)
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is None or time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            if status:
                raise RuntimeError(f"a training ended with status {status}; see above")
            return True
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return status == 0


def is_lost(folder: Path) -> bool:
    """Whether a checkpoint that was reported complete, or a later one, cannot be loaded."""
    report = folder / "reported"
    if not report.exists():
        return False
    try:
        checkpoint = RoundPipeAsyncCheckpointIO().load_checkpoint(folder / LAST)
    except OSError as error:
        sys.stderr.write(f"lost: {error}\n")
        return True
    found, reported = _num_batches(checkpoint), int(report.read_text())
    if found < reported:
        sys.stderr.write(f"lost: {found} batches in the checkpoint, {reported} reported\n")
    return found < reported


def measure(
    *, kills: int, form: str, seed: int, num_epochs: int, folder: Path, most_seconds: float
) -> Result:
    """Kill so many trainings, and compare those that come to their end."""
    draw, result, began = random.Random(seed), Result(), time.monotonic()

    def life(place: Path) -> Callable[[], None]:
        return lambda: train(place, form=form, num_epochs=num_epochs)

    whole = folder / "whole"
    whole.mkdir()
    live(life(whole), seconds=None)
    expected, longest = plain(torch.load(whole / "end.pt")), time.monotonic() - began
    deadline = began + most_seconds
    while result.kills < kills and time.monotonic() < deadline:
        place = folder / f"run {result.runs}"
        place.mkdir()
        ended = False
        while not ended:
            goes_on = result.kills < kills and time.monotonic() < deadline
            killed_after = draw.uniform(0, longest) if goes_on else None
            result.resumed += (place / LAST).exists()
            ended = live(life(place), seconds=killed_after)
            if not ended:
                result.kills += 1
                result.lost += is_lost(place)
        result.runs += 1
        if wrong := _differing(plain(torch.load(place / "end.pt")), expected):
            result.mismatches += 1
            sys.stderr.write(f"mismatch: {', '.join(wrong)}\n")
        shutil.rmtree(place)
    result.seconds = round(time.monotonic() - began, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=5, help="processes to kill")
    parser.add_argument("--form", choices=("file", "distributed"), default="file")
    parser.add_argument("--epochs", type=int, default=3, help="of one training")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--most-seconds", type=float, default=float("inf"), help="then no more kills"
    )
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(
            kills=options.kills,
            form=options.form,
            seed=options.seed,
            num_epochs=options.epochs,
            folder=Path(folder),
            most_seconds=options.most_seconds,
        )
    if options.output == "json":
        print(json.dumps(asdict(result)))
    else:
        print("\n".join(f"{name:12}{value}" for name, value in asdict(result).items()))


if __name__ == "__main__":
    main()
