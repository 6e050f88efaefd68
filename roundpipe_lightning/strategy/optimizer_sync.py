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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from roundpipe_lightning.engine.device.threads import add_note
from roundpipe_lightning.engine.update.separable import has_hooks, reason_not_separable
from roundpipe_lightning.errors import ConfigurationError, GradientError
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy import compat, sync_hooks
from roundpipe_lightning.strategy.runtime import PipelineRuntime

_FINITE_PIECE = 1 << 20  # elements


class OptimizerSync:
    """The optimizer steps of one training, and who waits for them.

    Args:
        module: The user's module, attached to its trainer.
        optimizers: Its optimizers.
        runtime: Runs the batches, and has the updater.
        precision: The precision plugin; until `close` it puts clipping off while a batch is in
            flight.
        check_gradients: Whether a step is refused whose gradients are not finite.
        is_writing: Returns whether parameters are being written into a file until the batch ends.
    """

    def __init__(
        self,
        module: LightningModule,
        *,
        optimizers: Sequence[Optimizer],
        runtime: PipelineRuntime,
        precision: RoundPipePrecision,
        check_gradients: bool,
        is_writing: Callable[[], bool],
    ) -> None:
        self._module = module
        self._trainer = module.trainer
        self._runtime = runtime
        self._precision = precision
        self._stale = runtime.is_stale
        self._overlaps = runtime.overlaps_updates
        self._is_writing = is_writing
        self._trained = TrainedParameters(module, optimizers)
        # A loss scaler skips such a step itself.
        self._checks_gradients = check_gradients and precision.scaler is None
        # As far as precision and options go; with `stale`, whether the next batch may begin before.
        self._begins_early = (
            self._overlaps
            and precision.scaler is None
            and type(precision) is RoundPipePrecision
            and not check_gradients
        )
        self._whole = {o: reason_not_separable(o) for o in optimizers if self._overlaps}
        self._loader: Any = None
        self._reading_data: list[Any] = []
        self._first_callback = SyncBeforeHooks(self)
        precision.takes_clipping = self._take_clipping
        if self._overlaps:
            self._callbacks.insert(0, self._first_callback)
            self._say_what_waits()

    @property
    def _callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return callbacks

    def _say_what_waits(self) -> None:
        """Say what takes from the overlap, and how to have it back."""
        for optimizer, reason in self._whole.items():
            if reason is not None:
                rank_zero_info(
                    f"{type(optimizer).__name__} is stepped as a whole and waited for: {reason}."
                )
        waited = [
            *sync_hooks.module_hooks_that_sync(self._trainer),
            *sync_hooks.hooks_that_sync(self._trainer, sync_hooks.WAITING_HOOKS),
        ]
        if waited:
            names = ", ".join(f"{hook} of {type(owner).__name__}" for owner, hook in waited)
            rank_zero_info(
                f"The optimizer's step is waited for before {names}, which may look at parameters. "
                "Classes whose hooks do not can say so with the attribute "
                "`requires_optimizer_sync = False`; see docs/updates.md."
            )

    # Steps ---------------------------------------------------------------------------------------

    def step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        *,
        make: Callable[[Callable[[], Any]], Any],
        has_arguments: bool,
    ) -> Any:
        """Make an optimizer's step, or submit it.

        Args:
            optimizer: The optimizer.
            closure: Runs the batch forward and backward.
            make: Lightning's own way to make the step, given a closure.
            has_arguments: Whether more than a closure is given to `optimizer.step`.
        """
        separable = (
            self._precision.steps_plainly(optimizer)
            and not has_arguments
            and self._is_separable(optimizer)
        )

        def closure_then() -> Any:
            result = closure()
            self._trained.check()
            if self._checks_gradients:
                check_gradients(optimizer, module=self._module, blocks=self._runtime.blocks)
            updater = self._runtime.updater
            if updater is not None and self._stale and self._runtime.in_flight is None:
                updater.keep([optimizer])
                if not separable:
                    updater.join()
            return result

        if not separable:
            result = make(closure_then)
            if self._runtime.updater is not None:
                self._runtime.updater.stepped_whole()
            return result
        with self._begun(optimizer), self._submitting(optimizer):
            result = make(closure_then)
        if (
            self._callbacks[:1] != [self._first_callback]
            or any(sync_hooks.module_hooks_that_sync(self._trainer))
            or self._data_syncs()
        ):
            self.join()
        return result

    def _data_syncs(self) -> bool:
        """Return whether the next batch may be made of parameters."""
        loader = compat.combined_loader(self._trainer)
        if loader is not self._loader:
            self._loader, self._reading_data = loader, [*sync_hooks.data_that_syncs(self._trainer)]
            for owner in self._reading_data:
                rank_zero_info(
                    "The optimizer's step is waited for before the next batch is fetched: "
                    f"{type(owner).__name__} knows the module and may look at parameters. If it "
                    "does not, say so with its class's attribute `requires_optimizer_sync = "
                    "False`; see docs/updates.md."
                )
        return bool(self._reading_data)

    def _is_separable(self, optimizer: Optimizer) -> bool:
        if not self._overlaps or has_hooks(optimizer):
            return False
        if optimizer not in self._whole:
            self._whole[optimizer] = reason_not_separable(optimizer)
        return self._whole[optimizer] is None

    @contextmanager
    def _begun(self, optimizer: Optimizer) -> Iterator[None]:
        """Step blocks while the backward pass still runs, if no code can see the difference."""
        updater = self._runtime.updater
        if updater is None or not self._may_begin():
            yield
            return
        if self._stale:
            self._runtime.defers_update = updater.can_defer(optimizer)
            try:
                yield
            finally:
                self._runtime.defers_update = False
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
        if not self._begins_early or compat.skips_backward(trainer):
            return False
        if not self._stale and (
            trainer.accumulate_grad_batches != 1 or trainer.gradient_clip_val or self._is_writing()
        ):
            return False
        return not sync_hooks.sees_every_gradient(trainer)

    def _take_clipping(self, clip: Callable[[], None]) -> bool:
        """Put clipping off until gradients are there; return whether they are still to come."""
        batch = self._runtime.in_flight
        if batch is not None:
            batch.clips.append(clip)
        return batch is not None

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
            updater, batch = self._runtime.updater, self._runtime.in_flight
            if updater is None:  # there was no batch
                whole()
                return result
            attributes["_opt_called"] = True  # what a scheduler's wrapper of `step` notes
            releases = not sync_hooks.may_read_gradients(self._trainer)
            if batch is not None:
                batch.defer_update(updater, optimizer, release_gradients=releases)
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

    # Waiting -------------------------------------------------------------------------------------

    def join(self) -> None:
        """Wait for the step that was submitted last.

        Raises:
            Exception: What the optimizer has raised, once; or the batch that it waited for.
        """
        self._runtime.synchronize()
        if self._runtime.updater is not None:
            self._runtime.updater.join()

    def close(self) -> None:
        self._precision.takes_clipping = None
        with contextlib.suppress(ValueError):
            self._callbacks.remove(self._first_callback)


class SyncBeforeHooks(Callback):
    """The first of the callbacks: waits for the step where another hook may look at parameters."""

    requires_optimizer_sync = False

    def __init__(self, sync: OptimizerSync) -> None:
        self._sync = sync

    def __reduce__(self) -> Any:
        """Copy as a callback that does nothing: there is one training to wait for."""
        return Callback, ()

    def _join_before(self, trainer: Trainer, hook: str) -> None:
        if any(sync_hooks.hooks_that_sync(trainer, [hook])):
            self._sync.join()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._join_before(trainer, "on_train_batch_end")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._join_before(trainer, "on_train_batch_start")

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self._join_before(trainer, "on_train_epoch_start")

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """Wait before those who read, and before loaders are made, whose data may follow."""
        if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            self._sync.join()
        self._join_before(trainer, "on_train_epoch_end")

    def on_validation_start(self, *_: Any) -> None:
        """Wait: an evaluation sees finished parameters."""
        self._sync.join()

    def on_train_end(self, *_: Any) -> None:
        self._sync.join()

    def on_exception(self, *_: Any) -> None:
        """Wait; what the optimizer has raised besides is not the cause."""
        with contextlib.suppress(Exception):
            self._sync.join()


# What a step is checked for ----------------------------------------------------------------------


class TrainedParameters:
    """Parameters trained when a training began, to be compared with those trained now.

    Args:
        module: The user's module.
        optimizers: Its optimizers.
    """

    def __init__(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        self._module = module
        self._optimizers = optimizers
        self._seen = {p for p in module.parameters() if p.requires_grad}

    def check(self) -> None:
        """Refuse parameters that came or were frozen since, unless an optimizer has them.

        Raises:
            ConfigurationError: Naming the first.
        """
        trained = {p for p in self._module.parameters() if p.requires_grad}
        if trained <= self._seen and len(trained) == len(self._seen):
            return
        members: set[Tensor] = {
            p for optimizer in self._optimizers for g in optimizer.param_groups for p in g["params"]
        }
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and parameter not in self._seen | members:
                raise ConfigurationError(
                    f"Parameter {name!r} is trained, but no optimizer has it: it was added or "
                    "unfrozen after the optimizer was made. Make it in `configure_model` or "
                    "`__init__`, or hand it over with optimizer.add_param_group(...)."
                )
        for name, parameter in self._module.named_parameters():
            if not parameter.requires_grad and parameter in self._seen & members:
                raise ConfigurationError(
                    f"Parameter {name!r} was frozen (requires_grad=False) after the optimizer was "
                    "made: it would stand still, while its gradient's place and its optimizer "
                    "state stay in memory. Freeze it before `configure_optimizers`, or give it a "
                    "learning rate of 0 in a parameter group of its own."
                )
        self._seen = trained


def check_gradients(
    optimizer: Optimizer, *, module: LightningModule, blocks: Iterable[str]
) -> None:
    """Refuse a step with gradients that are not finite.

    Args:
        optimizer: Whose step.
        module: Names the parameters.
        blocks: Names of the blocks.

    Raises:
        GradientError: Naming the parameter nearest to the loss, and its block.
    """
    members = {p for group in optimizer.param_groups for p in group["params"]}
    wrong = [
        (name, parameter.grad)
        for name, parameter in module.named_parameters()
        if parameter in members and parameter.grad is not None and not all_finite(parameter.grad)
    ]
    if not wrong:
        return
    name, gradient = wrong[-1]  # the module has them in the order of the forward pass, mostly
    owner = next((block for block in blocks if name.startswith(f"{block}.")), None)
    where = f"{name!r}, which is in no block," if owner is None else f"{name!r} (block {owner!r})"
    others = f" So have {len(wrong) - 1} parameters before it." if len(wrong) > 1 else ""
    trainer = module.trainer
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    num_wrong = values.numel() - int(torch.isfinite(values).sum())
    raise GradientError(
        f"The gradient of {where} has {num_wrong} values of {gradient.numel()} that are "
        f"not finite (NaN or infinite), in batch {trainer.fit_loop.batch_idx} of epoch "
        f"{trainer.current_epoch}.{others} The optimizer has not stepped: the parameters are those "
        "of before this batch. Look at its data and at the loss; a lower learning rate, a warm-up "
        "or precision='bf16-mixed' in place of a 16-bit one often help."
    )


def all_finite(tensor: Tensor) -> bool:
    """Return whether a floating point tensor has neither NaN nor infinities, in one pass.

    A sum is finite only if all its terms are. So each piece is summed, which is as fast as reading
    it; only a piece whose sum is not finite, because of a term or because finite terms add up to
    too much, is looked at number by number.

    Args:
        tensor: On any device, of any strides, without a graph being made; may be sparse (COO).
    """
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    flat = values.reshape(-1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    return all(
        bool(torch.isfinite(part.sum(dtype=wide))) or bool(torch.isfinite(part).all())
        for part in flat.split(_FINITE_PIECE)
    )
