"""Position in Lightning's loops where a checkpoint was written, and how they go on from there.

```
batch ──► on_train_batch_end ──► [validation ... on_validation_end] ──► next batch
  INSIDE_BATCH    BATCH_END            VALIDATION  VALIDATION_END
                                                   last batch ──► on_train_epoch_end ──► next epoch
                                                                       EPOCH_END
```

Left to itself, Lightning takes what follows a checkpoint for done: a validation that was due, a
scheduler that waits for its metric, the hooks at the end of the epoch. If the checkpoint was
written after the last optimizer step, Lightning finds a limit reached before anything else and
ends. So limits are deferred until the loops are restored. The loops' own methods then do what was
due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer

from roundpipe_lightning.strategy import compat


class LoopPosition(str, Enum):
    """Position in the loops at which a checkpoint was written."""

    INSIDE_BATCH = "inside_batch"
    """A batch was fetched and is not trained on to the end: it will be trained on again."""
    BATCH_END = "batch_end"  # in `on_train_batch_end`
    VALIDATION = "validation"  # in a validation, which will be run again from its beginning
    VALIDATION_END = "validation_end"
    """In `on_validation_end`: all of the validation's metrics are known."""
    EPOCH_END = "epoch_end"  # in `on_train_epoch_end`
    BETWEEN = "between"  # anywhere else: before the first batch, or after the last


def position_in_loops(trainer: Trainer) -> LoopPosition:
    hook = compat.current_hook(trainer)
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if trainer.validating:
        return (
            LoopPosition.VALIDATION_END if hook == "on_validation_end" else LoopPosition.VALIDATION
        )
    if hook == "on_train_batch_end" and progress.completed < progress.processed:
        return LoopPosition.BATCH_END
    if hook == "on_train_epoch_end":
        return LoopPosition.EPOCH_END
    return (
        LoopPosition.INSIDE_BATCH if progress.ready != progress.processed else LoopPosition.BETWEEN
    )


def is_epoch_over(trainer: Trainer) -> bool:
    """Whether the epoch has no more batches; before the first batch it has."""
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.ready) and compat.has_last_batch(trainer)


def restore_progress(trainer: Trainer, position: LoopPosition) -> None:
    """Bring the loops' counters, as loaded, to a state that Lightning's restart leaves alone."""
    loop = trainer.fit_loop.epoch_loop
    total: Any = loop.batch_progress.total
    current: Any = loop.batch_progress.current
    if position is LoopPosition.BATCH_END:
        loop.batch_progress.increment_completed()
    elif position is LoopPosition.INSIDE_BATCH:
        undone = current.ready - current.completed
        total.ready -= undone
        for counters in (total, current):
            counters.started = counters.processed = counters.ready = counters.completed
        loop.batch_progress.is_last_batch = False
    elif position is LoopPosition.VALIDATION:
        # Its batches are taken out of the sums: it is run again.
        progress: Any = loop.val_loop.batch_progress
        for counter in ("ready", "started", "processed", "completed"):
            num = getattr(progress.total, counter) - getattr(progress.current, counter)
            setattr(progress.total, counter, num)
        progress.reset_on_run()
    elif position is LoopPosition.EPOCH_END:
        trainer.fit_loop.restarting = False
        compat.end_restart(trainer.fit_loop, loop, loop.val_loop)


def go_on(trainer: Trainer, position: LoopPosition) -> bool:
    """Finish what followed the checkpoint, or let Lightning's loop do it first.

    Called when the loops stand before their first iteration, with the metrics restored. Return
    whether a validation is due first, or what follows one.
    """
    if position is LoopPosition.EPOCH_END:
        _finish_epoch(trainer)
        return False
    loop = trainer.fit_loop.epoch_loop
    compat.skip_no_validation(trainer)
    batches: Any = loop.batch_progress.current
    epochs: Any = trainer.fit_loop.epoch_progress.current
    # A batch of an epoch has been done, and there are more: a signal may have ended it there.
    is_inside = epochs.started > epochs.processed and 0 < batches.completed == batches.ready
    if position is LoopPosition.BETWEEN and (not is_inside or is_epoch_over(trainer)):
        return False
    steps, due = not compat.is_accumulating(trainer), compat.is_validation_due(trainer)
    compat.restart_after_batch(trainer)
    validates = position is LoopPosition.VALIDATION or (position is LoopPosition.BATCH_END and due)
    if validates:
        compat.restart_in_validation(trainer)
    elif position is LoopPosition.BATCH_END:
        loop.update_lr_schedulers("step", update_plateau_schedulers=True)
        compat.count_stepped_batches(trainer, int(steps))
        if is_epoch_over(trainer):  # let the next batch be the end of the epoch
            fetcher = compat.data_fetcher(trainer)
            fetcher.iterator, fetcher.done = iter(()), True
            if hasattr(fetcher, "batches"):
                fetcher.batches = []
    elif position in (LoopPosition.INSIDE_BATCH, LoopPosition.BETWEEN) and due:
        # The loop asks before its next batch whether a validation was due, and would go on behind
        # it: the answer is no, once.
        compat.skip_due_validation(trainer)
    return validates or position is LoopPosition.VALIDATION_END


def _finish_epoch(trainer: Trainer) -> None:
    """Do what Lightning does after `on_train_epoch_end`."""
    progress: Any = trainer.fit_loop.epoch_progress.current
    completed, progress.completed = progress.completed, progress.processed - 1  # `current_epoch`
    compat.end_epoch_metrics(trainer)
    if compat.has_last_batch(trainer):
        trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    compat.count_stepped_batches(trainer, -1)
    compat.log_epoch_metrics(trainer)
    compat.count_stepped_batches(trainer, 1)
    progress.completed = completed


_BEFORE_THE_END = (
    LoopPosition.BATCH_END,
    LoopPosition.VALIDATION,
    LoopPosition.VALIDATION_END,
    LoopPosition.EPOCH_END,
)


def stop_state(trainer: Trainer) -> dict[str, Any]:
    """Return whether the training has been asked to stop, and under which limits."""
    fit_loop = trainer.fit_loop
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return {
        "should_stop": trainer.should_stop,
        "max_epochs": fit_loop.max_epochs,
        "min_epochs": fit_loop.min_epochs,
        "max_steps": fit_loop.max_steps,
        "min_steps": fit_loop.min_steps,
        "durations": [compat.timer_seconds(one) for one in callbacks if isinstance(one, Timer)],
        "early": [one.state_key for one in callbacks if isinstance(one, EarlyStopping)],
    }


def restore_stop(trainer: Trainer, state: Mapping[str, Any]) -> bool:
    """Ask the training to stop again, if it had been asked under these limits; return whether."""
    asked = bool(state.get("should_stop")) and {**stop_state(trainer), "should_stop": True} == state
    if asked:
        trainer.should_stop = True
    return asked


def defer_limits(
    trainer: Trainer, position: LoopPosition, *, is_asked: bool
) -> Callable[[], bool] | None:
    """Defer the end of a training, also of one asked to stop, while its loops are restored.

    Returns:
        Lets the limits hold again, and returns whether the training ends with what is still due.
        None where Lightning would not end at once.
    """
    fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    progress: Any = fit_loop.epoch_progress.current
    held = max_epochs, max_steps, min_steps = fit_loop.max_epochs, loop.max_steps, loop.min_steps
    next_step = loop.global_step + 1
    no_steps = 0 < max_steps < next_step
    no_epochs = max_epochs is not None and 0 < max_epochs <= progress.processed
    if position not in _BEFORE_THE_END or not (no_steps or no_epochs or is_asked):
        return None
    if no_steps:
        loop.max_steps = next_step
    if no_epochs:
        fit_loop.max_epochs = progress.processed + 1
    if is_asked:
        loop.min_steps = max(min_steps or 0, next_step)

    def put_back() -> bool:
        fit_loop.max_epochs, loop.max_steps, loop.min_steps = held
        return no_steps or no_epochs or (trainer.should_stop and compat.can_stop_early(trainer))

    return put_back


def finish_training(trainer: Trainer, *, validates: bool) -> None:
    """Do what is left of the last epoch, in Lightning's order, perhaps with a validation."""
    fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    fetcher = compat.data_fetcher(trainer)
    assert fetcher is not None
    fit_loop.on_advance_start()
    profiler: Any = trainer.profiler  # type: ignore[attr-defined]
    with profiler.profile("run_training_epoch"):
        loop.reset()
        loop.on_run_start(fetcher)
        if validates:
            loop.advance(fetcher)  # fetches nothing: it restarts at the validation
            loop.on_advance_end(fetcher)
        loop.on_iteration_done()
    fit_loop.on_advance_end()
    fit_loop.on_iteration_done()
