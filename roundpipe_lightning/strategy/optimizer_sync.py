"""The optimizer's step, for Lightning: submitted where it would be made, waited for where it shows.

```
optimizer_step(closure)
  ├─ closure: training_step, zero_grad, backward ─ hooks, clipping, loss scale: Lightning's own
  ├─ optimizer.step  ▶  captured and submitted
  ▼
schedulers, progress bar, logging, next batch        the updater's thread
  ▼                                                  steps block after block
training_step: every block waits for its own update ◀──┘
```

All that Lightning does around a step stays as it is: for the time of `optimizer_step`, the
optimizer's `step` is one that submits. Where nothing of Lightning's or of the user's looks at all
gradients (clipping, hooks, a loss scaler), the step is begun before the closure, and blocks are
stepped as soon as their gradients are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from roundpipe_lightning.engine.device.threads import add_note
from roundpipe_lightning.engine.update.separable import has_hooks, reason_not_separable
from roundpipe_lightning.engine.update.updater import Updater
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy import sync_hooks as readers
from roundpipe_lightning.strategy.data_readers import data_that_reads
from roundpipe_lightning.strategy.step import WaitingStep


def check_owners(module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
    """Refuse a parameter that two optimizers step.

    Raises:
        ConfigurationError: Naming it and them.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    owner: dict[Any, int] = {}
    for index, optimizer in enumerate(optimizers):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            first = owner.setdefault(parameter, index)
            if first != index:
                kinds = [type(optimizers[i]).__name__ for i in (first, index)]
                name = names.get(parameter, "(not the module's)")
                raise ConfigurationError(
                    f"Parameter {name!r} is in two "
                    f"optimizers: number {first} ({kinds[0]}) and number {index} ({kinds[1]}) of "
                    "configure_optimizers. Each would undo what the other has estimated. Give "
                    "every parameter to one optimizer."
                )


def check_flags(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that step on an accelerator only.

    Raises:
        ConfigurationError: Naming the first.
    """
    for optimizer in optimizers:
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise ConfigurationError(
                f"{type(optimizer).__name__}(capturable=True) steps on an accelerator only, and "
                "with strategy='roundpipe' parameters are stepped in host memory. Leave "
                "capturable out; fused=True is the fast form there."
            )


class _DeferredStep:
    """A step whose gradients come after Lightning has gone on; see `WaitingStep`.

    Gradients of earlier batches of its window are taken along: Lightning may drop `.grad`.

    Args:
        updater: Makes it.
        optimizer: Whose step. Its options are captured now.
        clips: Clip the gradients of its parameters.
        release_gradients: As for `Updater.submit`.
    """

    def __init__(
        self,
        updater: Updater,
        optimizer: Optimizer,
        *,
        clips: Sequence[Callable[[], None]],
        release_gradients: bool,
    ) -> None:
        self._updater = updater
        self._optimizer = optimizer
        self._clips = clips
        self._release_gradients = release_gradients
        members = (p for group in optimizer.param_groups for p in group["params"])
        self._sums = {p: p.grad for p in members if p.grad is not None}
        for parameter in self._sums:
            parameter.grad = None
        updater.defer(optimizer)

    def expect(self) -> None:
        """Put the gradients of earlier batches where those of the last one are added."""
        for parameter, gradient in self._sums.items():
            parameter.grad = gradient
        self._sums = {}

    def submit(self, *, has_next: bool) -> None:
        """Have the step made, of gradients that are clipped before."""
        for clip in self._clips:
            clip()
        self._updater.keep([self._optimizer], is_read=has_next)
        self._updater.submit(self._optimizer, release_gradients=self._release_gradients)


class Batches(Protocol):
    """What runs the batches: a `Session`."""

    defers_update: bool
    """Whether the step after the present batch may wait for the end of its backward pass."""

    @property
    def updater(self) -> Updater | None:
        """Steps the optimizer; None before the first batch, and where nothing is overlapped."""

    @property
    def is_in_flight(self) -> bool:
        """Whether the gradients of the last batch are still to come."""

    def before_gradients(self, step: WaitingStep) -> None:
        """Have a step made when they are there."""

    def synchronize(self) -> None:
        """Wait for them."""


class Updates:
    """The steps of one training.

    Args:
        module: The user's module, attached to its trainer.
        optimizers: Its optimizers.
        batches: What runs the batches.
        stale: Whether a step computes with the values from before the last update.
        overlaps: Whether there will be an updater.
        check: Called with the optimizer when the gradients of a step are there.
        begins_early: Whether blocks may be stepped as soon as their gradients are there, as far as
            precision and options go; with `stale`, whether the next batch may begin before.
        are_written: Says whether parameters are being written into a file until the batch ends.
    """

    def __init__(
        self,
        module: LightningModule,
        *,
        optimizers: Sequence[Optimizer],
        batches: Batches,
        stale: bool,
        overlaps: bool,
        check: Callable[[Optimizer], None],
        begins_early: bool = False,
        are_written: Callable[[], bool] = lambda: False,
    ) -> None:
        self._trainer = module.trainer
        self._module = module
        self._batches = batches
        self._stale = stale
        self._overlaps = overlaps
        self._check = check
        self._clips: list[Callable[[], None]] = []  # of the batch in flight
        self._begins_early = begins_early and overlaps
        self._are_written = are_written
        self._whole = {
            optimizer: reason_not_separable(optimizer) for optimizer in optimizers if overlaps
        }
        self._loader: Any = None
        self._reading_data: list[Any] = []
        self._front = JoinBeforeReaders(self)
        if overlaps:
            self._callbacks.insert(0, self._front)
            self._tell()

    @property
    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    def _tell(self) -> None:
        """Say what takes from the overlap, and how to have it back."""
        for optimizer, reason in self._whole.items():
            if reason is not None:
                rank_zero_info(
                    f"{type(optimizer).__name__} is stepped as a whole and waited for: {reason}."
                )
        waited = [*readers.readers_at_once(self._trainer)]
        waited += readers.readers(self._trainer, readers.WAITING_HOOKS)
        if waited:
            names = ", ".join(f"{hook} of {type(owner).__name__}" for owner, hook in waited)
            rank_zero_info(
                f"The optimizer's step is waited for before {names}, which may look at parameters. "
                "Classes whose hooks do not can say so with the attribute `reads_parameters = "
                "False`; see docs/updates.md."
            )

    # Steps ---------------------------------------------------------------------------------------

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        *,
        make: Callable[[Callable[[], Any]], Any],
        divisible: bool,
    ) -> Any:
        """Make an optimizer's step, or submit it.

        Args:
            optimizer: The optimizer.
            closure: Runs the batch forward and backward.
            make: Lightning's own way to make the step, given a closure.
            divisible: Whether all that happens in it is `optimizer.step()`.
        """
        divisible = divisible and self._is_divisible(optimizer)

        def closure_then() -> Any:
            result = closure()
            self._check(optimizer)
            updater = self._updater()
            if updater is not None and self._stale and not self._batches.is_in_flight:
                updater.keep([optimizer])
                if not divisible:
                    updater.join()
            return result

        if not divisible:
            result = make(closure_then)
            updater = self._updater()
            if updater is not None:
                updater.stepped_whole()
            return result
        with self._begun(optimizer), self._submitting(optimizer):
            result = make(closure_then)
        if (
            self._callbacks[:1] != [self._front]
            or any(readers.readers_at_once(self._trainer))
            or self._data_reads()
        ):
            self.join()
        return result

    def _data_reads(self) -> bool:
        """Say whether the next batch may be made of parameters."""
        loader = compat.combined_loader(self._trainer)
        if loader is not self._loader:
            self._loader, self._reading_data = loader, [*data_that_reads(self._trainer)]
            for owner in self._reading_data:
                rank_zero_info(
                    "The optimizer's step is waited for before the next batch is fetched: "
                    f"{type(owner).__name__} knows the module and may look at parameters. If it "
                    "does not, say so with its class's attribute `reads_parameters = False`; see "
                    "docs/updates.md."
                )
        return bool(self._reading_data)

    def _is_divisible(self, optimizer: Optimizer) -> bool:
        if not self._overlaps or has_hooks(optimizer):
            return False
        if optimizer not in self._whole:
            self._whole[optimizer] = reason_not_separable(optimizer)
        return self._whole[optimizer] is None

    @contextmanager
    def _begun(self, optimizer: Optimizer) -> Iterator[None]:
        """Have blocks stepped while the backward pass still runs, if nobody could tell."""
        updater = self._updater()
        if updater is None or not self._may_begin():
            yield
            return
        if self._stale:
            self._batches.defers_update = updater.can_defer(optimizer)
            try:
                yield
            finally:
                self._batches.defers_update = False
            return
        updater.begin(optimizer)
        try:
            yield
        except BaseException as error:
            num_updated = updater.abandon()
            if num_updated:
                add_note(
                    error,
                    f"{num_updated} parameters had been updated already when the step failed: the "
                    "module has half a step. Resume from a checkpoint.",
                )
            raise

    def _may_begin(self) -> bool:
        trainer: Any = self._trainer
        return (
            self._begins_early
            and (self._stale or trainer.accumulate_grad_batches == 1)
            and (self._stale or not trainer.gradient_clip_val)
            and (self._stale or not self._are_written())
            and not compat.skips_backward(trainer)
            and not readers.sees_every_gradient(trainer)
        )

    def take_clipping(self, clip: Callable[[], None]) -> bool:
        """Put clipping off until gradients are there, if they are still to come.

        Args:
            clip: Clips them.

        Returns:
            Whether it is put off.
        """
        is_late = self._batches.is_in_flight
        if is_late:
            self._clips.append(clip)
        return is_late

    @contextmanager
    def _submitting(self, optimizer: Optimizer) -> Iterator[None]:
        """Let `optimizer.step` submit until the end of the context."""
        attributes: dict[str, Any] = vars(optimizer)
        before = attributes.get("step")
        whole = optimizer.step

        def submit(closure: Callable[[], Any] | None = None) -> Any:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            updater = self._updater()
            if updater is None:  # there was no batch
                whole()
                return result
            attributes["_opt_called"] = True  # what a scheduler's wrapper of `step` notes
            releases = not readers.may_read_gradients(self._trainer)
            clips, self._clips = self._clips, []
            if self._batches.is_in_flight:
                step = _DeferredStep(updater, optimizer, clips=clips, release_gradients=releases)
                self._batches.before_gradients(step)
            else:
                updater.submit(optimizer, release_gradients=releases)
            return result

        attributes["step"] = submit
        try:
            yield
        finally:
            del attributes["step"]
            if before is not None:
                attributes["step"] = before

    @property
    def updater(self) -> Updater | None:
        """What makes the steps; None before the first batch, and where nothing is overlapped."""
        return self._batches.updater

    def _updater(self) -> Updater | None:
        return self._batches.updater

    # Waiting -------------------------------------------------------------------------------------

    def join(self) -> None:
        """Wait for the step that was submitted last.

        Raises:
            Exception: What the optimizer has raised, once; or the batch that it waited for.
        """
        self._batches.synchronize()
        updater = self._updater()
        if updater is not None:
            updater.join()

    def close(self) -> None:
        """Let the Trainer have its callbacks as they were."""
        with contextlib.suppress(ValueError):
            self._callbacks.remove(self._front)


class JoinBeforeReaders(Callback):
    """The first of the callbacks: waits for the step where another hook may look at parameters.

    Args:
        updates: Whom to ask.
    """

    reads_parameters = False

    def __init__(self, updates: Updates) -> None:
        self._updates = updates

    def _join_before(self, trainer: Trainer, hook: str) -> None:
        if any(readers.readers(trainer, [hook])):
            self._updates.join()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Wait before those who read."""
        self._join_before(trainer, "on_train_batch_end")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Wait before those who read."""
        self._join_before(trainer, "on_train_batch_start")

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        """Wait before those who read."""
        self._join_before(trainer, "on_train_epoch_start")

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Wait before those who read, and before loaders are made, whose data may follow."""
        if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            self._updates.join()
        self._join_before(trainer, "on_train_epoch_end")

    def on_validation_start(self, *_: Any) -> None:
        """Wait: an evaluation sees finished parameters."""
        self._updates.join()

    def on_train_end(self, *_: Any) -> None:
        """Wait."""
        self._updates.join()

    def on_exception(self, *_: Any) -> None:
        """Wait; what the optimizer has raised besides is not the cause."""
        with contextlib.suppress(Exception):
            self._updates.join()
