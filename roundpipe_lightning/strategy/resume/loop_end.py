"""The end of a training that was stopped between its last optimizer step and its end.

```
last step ─► on_train_batch_end ─► [validation] ─► on_train_epoch_end ─► schedulers, metrics
                     ╰────────────── a checkpoint in here ────────╯           on_train_end
```

Lightning looks at its limits before anything else, finds one reached, and ends: a validation, a
scheduler that waits for its metric and the hooks at the end of the epoch are lost. So limits are
put off until the loops stand, and what was due is then done by their own methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer

from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.resume.loop_place import Place

_BEFORE_THE_END = (Place.BATCH_END, Place.VALIDATION, Place.VALIDATION_END, Place.EPOCH_END)


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
    """Ask the training to stop again, if it had been asked and its limits are still the same.

    Returns:
        Whether it has been asked.
    """
    asked = bool(state.get("should_stop")) and {**stop_state(trainer), "should_stop": True} == state
    if asked:
        trainer.should_stop = True
    return asked


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where a training ends, put off while its loops are restored.

    Attributes:
        trainer: Whose they are.
        max_epochs: The loop's own.
        max_steps: The loop's own.
        min_steps: The loop's own.
        are_reached: Whether `max_epochs` or `max_steps` is reached.
    """

    trainer: Trainer
    max_epochs: int | None
    max_steps: int
    min_steps: int | None
    are_reached: bool

    @classmethod
    def put_off(cls, trainer: Trainer, place: Place, *, is_asked: bool) -> Limits | None:
        """Put the limits off where Lightning would end at once; return them, or None.

        Args:
            trainer: The trainer, with its loops restored.
            place: Where the checkpoint was written.
            is_asked: Whether the training had been asked to stop.
        """
        fit_loop, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        progress: Any = fit_loop.epoch_progress.current
        max_epochs, next_step = fit_loop.max_epochs, loop.global_step + 1
        no_steps = 0 < loop.max_steps < next_step
        no_epochs = max_epochs is not None and 0 < max_epochs <= progress.processed
        if place not in _BEFORE_THE_END or not (no_steps or no_epochs or is_asked):
            return None
        held = cls(
            trainer=trainer,
            max_epochs=max_epochs,
            max_steps=loop.max_steps,
            min_steps=loop.min_steps,
            are_reached=no_steps or no_epochs,
        )
        if no_steps:
            loop.max_steps = next_step
        if no_epochs:
            fit_loop.max_epochs = progress.processed + 1
        if is_asked:
            loop.min_steps = max(loop.min_steps or 0, next_step)
        return held

    def put_back(self) -> bool:
        """Let the limits hold again; return whether the training ends with what is still due."""
        fit_loop, loop = self.trainer.fit_loop, self.trainer.fit_loop.epoch_loop
        fit_loop.max_epochs = self.max_epochs
        loop.max_steps, loop.min_steps = self.max_steps, self.min_steps
        asked = self.trainer.should_stop and compat.can_stop_early(self.trainer)
        return self.are_reached or asked


def finish_training(trainer: Trainer, *, validates: bool) -> None:
    """Do what is left of the last epoch, in Lightning's order.

    Args:
        trainer: Its loops stand where the checkpoint was written.
        validates: Whether a validation is due, or what follows one.
    """
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
