"""Where in Lightning's loops a checkpoint was written, and how they go on from there.

```
batch ──► on_train_batch_end ──► [validation ... on_validation_end] ──► next batch
  INSIDE_BATCH    BATCH_END            VALIDATION  VALIDATION_END
                                                   last batch ──► on_train_epoch_end ──► next epoch
                                                                       EPOCH_END
```

Left to itself, Lightning takes what follows a checkpoint for done: a validation that was due, a
scheduler that waits for its metric, the hooks at the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from lightning.pytorch import Trainer

from roundpipe_lightning.strategy import compat


class Place(str, Enum):
    """What the training was doing when its checkpoint was written."""

    INSIDE_BATCH = "inside_batch"
    """A batch was fetched and is not trained on to the end: it will be trained on again."""
    BATCH_END = "batch_end"
    """In `on_train_batch_end`."""
    VALIDATION = "validation"
    """In a validation, which will be run again from its beginning."""
    VALIDATION_END = "validation_end"
    """In `on_validation_end`: all of the validation's metrics are known."""
    EPOCH_END = "epoch_end"
    """In `on_train_epoch_end`."""
    BETWEEN = "between"
    """Anywhere else: before the first batch, or after the last."""


def place_of(trainer: Trainer) -> Place:
    """Return where in the loops `trainer` is."""
    hook = compat.current_hook(trainer)
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if trainer.validating:
        return Place.VALIDATION_END if hook == "on_validation_end" else Place.VALIDATION
    if hook == "on_train_batch_end" and progress.completed < progress.processed:
        return Place.BATCH_END
    if hook == "on_train_epoch_end":
        return Place.EPOCH_END
    return Place.INSIDE_BATCH if progress.ready != progress.processed else Place.BETWEEN


def is_epoch_over(trainer: Trainer) -> bool:
    """Whether the epoch has no more batches; before the first batch it has."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.ready) and compat.has_last_batch(trainer)


def is_inside_window(trainer: Trainer) -> bool:
    """Whether gradients are being accumulated that the next optimizer step needs."""
    return compat.is_accumulating(trainer)


def settle_progress(trainer: Trainer, place: Place) -> None:
    """Bring the loops' counters, as loaded, to a state that Lightning's restart leaves alone."""
    loop = trainer.fit_loop.epoch_loop
    total: Any = loop.batch_progress.total
    current: Any = loop.batch_progress.current
    if place is Place.BATCH_END:
        loop.batch_progress.increment_completed()
    elif place is Place.INSIDE_BATCH:
        undone = current.ready - current.completed
        total.ready -= undone
        for counters in (total, current):
            counters.started = counters.processed = counters.ready = counters.completed
        loop.batch_progress.is_last_batch = False
    elif place is Place.VALIDATION:
        _forget_validation(loop.val_loop.batch_progress)
    elif place is Place.EPOCH_END:
        trainer.fit_loop.restarting = False
        compat.end_restart(trainer.fit_loop, loop, loop.val_loop)


def _forget_validation(progress: Any) -> None:
    """Take the batches of an interrupted validation out of the sums: it is run again."""
    for counter in ("ready", "started", "processed", "completed"):
        num = getattr(progress.total, counter) - getattr(progress.current, counter)
        setattr(progress.total, counter, num)
    progress.reset_on_run()


def go_on(trainer: Trainer, place: Place) -> bool:
    """Finish what followed the checkpoint, or let Lightning's loop do it first.

    Called when the loops stand before their first iteration, with the metrics restored.

    Returns:
        Whether a validation is due first, or what follows one.
    """
    if place is Place.EPOCH_END:
        _finish_epoch(trainer)
        return False
    loop = trainer.fit_loop.epoch_loop
    compat.skip_no_validation(trainer)
    if place is Place.BETWEEN and not _is_inside_epoch(trainer):
        return False
    steps, due = not is_inside_window(trainer), compat.is_validation_due(trainer)
    compat.restart_after_batch(trainer)
    validates = place is Place.VALIDATION or (place is Place.BATCH_END and due)
    if validates:
        compat.restart_in_validation(trainer)
    elif place is Place.BATCH_END:
        loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        compat.count_stepped_batches(trainer, int(steps))
        if is_epoch_over(trainer):
            _exhaust(compat.data_fetcher(trainer))
    elif place in (Place.INSIDE_BATCH, Place.BETWEEN) and due:
        # The loop asks before its next batch whether a validation was due, and would go on behind
        # it: the answer is no, once.
        compat.skip_due_validation(trainer)
    return validates or place is Place.VALIDATION_END


def _is_inside_epoch(trainer: Trainer) -> bool:
    """Whether a batch of an epoch has been done, and there are more: a signal may end it there."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    epochs: Any = trainer.fit_loop.epoch_progress.current
    inside = epochs.started > epochs.processed and 0 < batches.completed == batches.ready
    return bool(inside and not is_epoch_over(trainer))


def _finish_epoch(trainer: Trainer) -> None:
    """Do what Lightning does after `on_train_epoch_end`."""
    loop = trainer.fit_loop.epoch_loop
    with _before_completion(trainer):
        compat.end_epoch_metrics(trainer)
        if compat.has_last_batch(trainer):
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        compat.count_stepped_batches(trainer, -1)
        compat.log_epoch_metrics(trainer)
        compat.count_stepped_batches(trainer, 1)


@contextmanager
def _before_completion(trainer: Trainer) -> Iterator[None]:
    """Let `trainer.current_epoch` be the epoch that ends."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    completed, progress.completed = progress.completed, progress.processed - 1
    yield
    progress.completed = completed


def _exhaust(fetcher: Any) -> None:
    """Let the next batch be the end of the epoch."""
    fetcher.iterator = iter(())
    fetcher.done = True
    if hasattr(fetcher, "batches"):
        fetcher.batches = []
