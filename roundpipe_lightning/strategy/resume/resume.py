"""State that a checkpoint needs beyond Lightning's own, so that a resumed run is the same run.

| part | saved | restored |
|---|---|---|
| random generators | as they stand between two batches | before the first batch |
| position in the data | batches trained on, and how the order was drawn | at the first batch |
| a partly filled accumulation window | its gradients | before the first batch |
| what was logged | unfinished means, the latest values, metrics' states | before the first batch |
| the place in the loop | which hook was running | what followed it is done first |
| the end | whether the training was asked to stop, its limits | what was due at the end is done |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from roundpipe_lightning.checkpoint.compatibility import ANEW, InexactResumeWarning, reading
from roundpipe_lightning.engine.store.block_layout import gradient_dtype
from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.resume.data_position import PositionedLoader, position_of
from roundpipe_lightning.strategy.resume.logged import (
    LogSnapshot,
    log_state,
    metrics_of,
    set_latest,
    set_log_state,
)
from roundpipe_lightning.strategy.resume.loops import (
    LoopPosition,
    defer_limits,
    finish_training,
    go_on,
    is_epoch_over,
    position_in_loops,
    restore_progress,
    restore_stop,
    stop_state,
)
from roundpipe_lightning.strategy.resume.randomness import (
    HostRandomness,
    random_state,
    set_random_state,
)

_LOADERS_SINCE = 3
"""First format whose places in the data are in our part, and not among loaders' states."""

_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class ResumePoint:
    """Collects and restores the state of a training beyond what Lightning saves.

    One belongs to a strategy; every training begins with `begin`.
    """

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None
        self._stateful: list[Any] = []
        self._has_gradients = False
        self._logged_before: LogSnapshot | None = None
        self._metrics: dict[str, Any] = {}
        self._before_validation: HostRandomness | None = None
        self._at_validation: HostRandomness | None = None
        self._quiet: Any = None
        self._put_back: Callable[[], bool] | None = None
        self._latest: tuple[Trainer, Mapping[str, Any]] | None = None

    def begin(self) -> None:
        self._loaded, self._stateful, self._logged_before = None, [], None
        self._has_gradients, self._latest = False, None

    def end(self) -> None:
        self._put_limits_back()
        if self._latest is not None:  # no batch was left; a sanity check forgets what is logged
            set_latest(*self._latest)
            self._latest = None
        if self._quiet is not None and self._quiet in warnings.filters:
            warnings.filters.remove(self._quiet)  # type: ignore[attr-defined]  # a list in CPython
        self._quiet = None

    # Called by the strategy ----------------------------------------------------------------------

    def train_loader(self, loader: Any) -> Any:
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            return loader
        return PositionedLoader(loader, waits=self._loaded is not None)

    def batch_begins(self, trainer: Trainer) -> None:
        self._has_gradients = False
        self._logged_before = LogSnapshot(trainer, self._metrics)

    def gradients_were_added(self) -> None:
        self._has_gradients = True

    def sanity_check_begins(self) -> None:
        """The check before the training is about to be set up; it leaves no trace."""
        self._before_validation = HostRandomness.now()

    def validation_begins(self) -> None:
        """A validation inside a training begins; its loaders have been asked for iterators."""
        if self._at_validation is not None:  # one that is run again
            self._at_validation.restore()
            self._at_validation = None
        self._before_validation = HostRandomness.now()

    # In a checkpoint -----------------------------------------------------------------------------

    def state(self, trainer: Trainer) -> dict[str, Any]:
        place = position_in_loops(trainer)
        combined = compat.combined_loader(trainer)
        inside_batch = place is LoopPosition.INSIDE_BATCH
        num_undone = len(getattr(compat.data_fetcher(trainer), "batches", ())) + inside_batch
        loaders = [] if combined is None else combined.flattened
        positions = [position_of(loader) for loader in loaders]
        is_over = is_epoch_over(trainer) and not inside_batch
        state = random_state()
        host = self._host_before(positions, place, is_check=trainer.sanity_checking)
        if host is not None:
            state.update(host.packed())
        return {
            "place": place.value,
            "random_state": state,
            "data": [
                None if position is None else position.state(num_ahead=num_undone, is_over=is_over)
                for position in positions
            ],
            "consumed": compat.consumed_loaders(combined),
            "epoch": trainer.fit_loop.epoch_progress.current.processed,  # type: ignore[attr-defined]
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradients": self._gradients(trainer, place),
            "is_exact": not (inside_batch and self._has_gradients),
            "logged": (
                self._logged_before.state()
                if inside_batch and self._logged_before is not None
                else log_state(trainer, metrics_of(trainer.lightning_module))
            ),
            "stop": stop_state(trainer),
        }

    def _host_before(
        self, positions: list[Any], place: LoopPosition, *, is_check: bool
    ) -> HostRandomness | None:
        """Return the host's generators before the part that is repeated; None if none is."""
        if is_check or place is LoopPosition.VALIDATION:
            return self._before_validation
        if place is not LoopPosition.INSIDE_BATCH:
            return None
        found = (position.before_fetch(1) for position in positions if position is not None)
        return next((randomness for randomness in found if randomness is not None), None)

    def _gradients(self, trainer: Trainer, place: LoopPosition) -> dict[str, Tensor]:
        module = trainer.lightning_module
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        inside = compat.is_accumulating(trainer)
        if place is LoopPosition.INSIDE_BATCH:  # those of the batches before it
            inside = progress.processed % trainer.accumulate_grad_batches != 0
        if module.automatic_optimization and (not inside or not progress.ready):
            return {}
        named = module.named_parameters()
        return {name: value.grad for name, value in named if value.grad is not None}

    def load(self, trainer: Trainer, state: Mapping[str, Any], loops: Mapping[str, Any]) -> None:
        """Restore what can be before the data is set up.

        Args:
            state: What `state` returned, or what an earlier version did.

        Raises:
            CheckpointError: Lightning would have to load what an earlier version left to it.
        """
        set_random_state(state["random_state"])
        if "place" not in state:
            return
        self._loaded, self._latest = state, (trainer, state["logged"])
        fit_loop = loops.get("fit_loop", {}).get("state_dict", {})
        self._stateful = list(fit_loop.get("combined_loader", ()))
        if self._stateful and state.get("format_version", 0) < _LOADERS_SINCE:
            raise CheckpointError(
                "The checkpoint was written by an earlier version of roundpipe_lightning, which "
                f"kept the place in the data elsewhere: resume with that version, or {ANEW}"
            )
        restore_progress(trainer, LoopPosition(state["place"]))
        is_asked = restore_stop(trainer, state.get("stop", {}))
        self._put_back = defer_limits(trainer, LoopPosition(state["place"]), is_asked=is_asked)
        if not state["is_exact"]:
            warnings.warn(
                "The checkpoint was written inside a batch, after its gradients had been added: "
                "the resumed run trains on that batch again and may differ from one that was not "
                "stopped. Save in on_train_batch_end, on_validation_end or on_train_epoch_end.",
                category=InexactResumeWarning,
                stacklevel=2,
            )

    def training_begins(self, trainer: Trainer) -> None:
        """Restore the rest, when the data is set up and before the first batch."""
        state, self._loaded, self._latest = self._loaded, None, None
        self._metrics = metrics_of(trainer.lightning_module)
        combined = compat.combined_loader(trainer)
        assert combined is not None
        ends, is_over, validates = self._put_limits_back(), True, False
        if state is not None:
            place = LoopPosition(state["place"])
            is_over = place is LoopPosition.EPOCH_END
            with reading("entry 'roundpipe'"):
                _set_gradients(trainer, state["gradients"])
                self._place_data(trainer, state)
                if place in (
                    LoopPosition.BATCH_END,
                    LoopPosition.VALIDATION,
                    LoopPosition.VALIDATION_END,
                ):
                    trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
                set_log_state(trainer, state["logged"])
            validates = go_on(trainer, place)
            set_random_state(state["random_state"])
            if place is LoopPosition.VALIDATION:
                self._at_validation = HostRandomness.now()
        # The user sees the loaders that were given.
        own = [loader.loader if position_of(loader) else loader for loader in combined.flattened]
        compat.set_loaders(combined, own)
        if ends and not is_over:
            finish_training(trainer, validates=validates)

    def _put_limits_back(self) -> bool:
        put_back, self._put_back = self._put_back, None
        return put_back is not None and put_back()

    def _place_data(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        combined = compat.combined_loader(trainer)
        assert combined is not None
        positions = [position_of(loader) for loader in combined.flattened]
        found = [position for position in positions if position is not None]
        for member in found:
            member.siblings = found
        begun = any(member.is_open for member in found)
        for position, place in zip(positions, state["data"], strict=False):
            if position is not None and place is not None:
                position.resume(place, epoch=state["epoch"])
        # Lightning loads the states of loaders inside an epoch only, and not of early ones.
        pending = compat.unloaded_states(trainer)
        begins = found and not any("constructed" in place for place in state["data"] if place)
        if begun and begins and compat.iterate_when_epoch_begins(trainer):
            combined.reset()  # what was fetched ahead comes after draws of on_train_epoch_start
        elif begun or pending:  # set up before the checkpoint was loaded, or read ahead
            combined.reset()
            compat.load_loader_states(combined, self._stateful)
            pending.clear()
            iter(compat.data_fetcher(trainer))
        if len(compat.consumed_loaders(combined)) == len(state["consumed"]) > 0:
            compat.set_consumed_loaders(combined, state["consumed"])
        if all(position is not None for position in positions):
            self._silence_lightning()

    def _silence_lightning(self) -> None:
        before = list(warnings.filters)
        warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
        self._quiet = next((entry for entry in warnings.filters if entry not in before), None)


def _set_gradients(trainer: Trainer, gradients: Mapping[str, Tensor]) -> None:
    named = dict(trainer.lightning_module.named_parameters())
    for name, gradient in gradients.items():
        if name in named:
            parameter = named[name]
            parameter.grad = gradient.to(parameter.device, gradient_dtype(parameter))
