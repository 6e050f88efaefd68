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
stepped as soon as their gradients are there. Whoever looks at a parameter before its step is made
waits for that (`parameter_watch.py`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from roundpipe_lightning.engine.capture.trees import parameters_in
from roundpipe_lightning.engine.device.threads import add_note
from roundpipe_lightning.engine.update.hosts_update import NormClip
from roundpipe_lightning.engine.update.partial_step import has_hooks, reason_not_separable
from roundpipe_lightning.engine.update.updater import Updater
from roundpipe_lightning.errors import ConfigurationError, GradientError
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.runtime import PipelineRuntime
from roundpipe_lightning.strategy.updates import parameter_watch
from roundpipe_lightning.strategy.updates.parameter_watch import (
    Access,
    ParameterWatch,
    describe_code,
)


class OptimizerSync:
    """The optimizer steps of one training, and who waits for them.

    Until `close` the precision puts clipping off while a batch is in flight.

    Args:
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
        self._has_hosts = runtime.hosts is not None
        self._place = os.getpid(), threading.get_ident()
        self._whole = {o: reason_not_separable(o) for o in optimizers if self._overlaps}
        self._warned: set[CodeType | str] = set()
        self._num_steps = 0
        self._is_submitting = False
        self._clip: Callable[[Tensor], Any] | None = None  # of the step that is about to be made
        self._state_is_read = self._gradients_are_read = False
        self._stepped_early: Collection[Tensor] = ()  # in the last step
        precision.takes_clipping = self._take_clipping
        if self._overlaps:
            self._watch = runtime.watch = ParameterWatch(
                optimizers, on_access=self._before_access, heeds_others=runtime.divides_parameters
            )
            self._watch.watch()
            self._say_what_waits()

    def _say_what_waits(self) -> None:
        """Say what takes from the overlap, and how to have it back."""
        for optimizer, reason in self._whole.items():
            if reason is not None:
                rank_zero_warn(
                    f"{type(optimizer).__name__} is stepped as a whole and waited for: {reason}. "
                    "See docs/updates.md."
                )
        hooks = list(parameter_watch.gradient_hooks(self._trainer)) if self._begins_early else []
        if hooks:
            rank_zero_warn(
                "The optimizer steps after the whole backward pass, and no batch is in flight, "
                f"because of {', '.join(hooks)}: gradients may be looked at there. Classes whose "
                "hooks do not can say so with the attribute `requires_optimizer_sync = False`; see "
                "docs/updates.md."
            )

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
            make: Lightning's own way to make the step, given a closure.
            has_arguments: Whether more than a closure is given to `optimizer.step`.
        """
        separable = (
            self._precision.steps_plainly(optimizer)
            and not has_arguments
            and self._is_separable(optimizer)
        )
        self._stepped_early = ()

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

        if not separable and self._has_hosts:
            reason = self._whole.get(optimizer) or "its step has hooks, arguments or a precision"
            raise ConfigurationError(
                f"{type(optimizer).__name__} is stepped as a whole, which does not work on several "
                f"hosts yet: {reason}. Use AdamW, SGD or the like, or set num_nodes=1."
            )
        if not separable:
            result = make(closure_then)
            if self._runtime.updater is not None:
                self._runtime.updater.stepped_whole()
            self._note_spent(optimizer)
            return result
        with self._begun(optimizer), self._submitting(optimizer):
            result = make(closure_then)
        self._num_steps += 1
        return result

    def _note_spent(self, optimizer: Optimizer) -> None:
        """Let the next batch's gradients take the place of those that were stepped with."""
        if not parameter_watch.reads_before_zeroing(self._trainer):
            members = (p for group in optimizer.param_groups for p in group["params"])
            self._runtime.spent = list(members)

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
        is_open = updater is not None or self._has_hosts  # or will be when gradients come
        begins = is_open and self._may_begin()
        if begins and self._stale:
            self._runtime.defers_update = updater is not None and updater.can_defer(optimizer)
        elif begins:
            # A view that this update itself has is not taken for one that somebody keeps.
            is_counted = self._has_hosts and self._watch.may_be_kept
            waits = bool(self._trainer.gradient_clip_val) or self._is_writing() or is_counted
            adds_up = not compat.begins_window(self._trainer)
            self._runtime.begin_update(
                partial(Updater.begin, optimizer=optimizer, waits=waits, adds_up=adds_up)
            )
        elif updater is not None and self._may_measure():
            updater.measure_norms()
        try:
            yield
        except BaseException as error:
            updater = self._runtime.updater
            if updater is None or (begins and self._stale):
                raise
            num_updated = updater.abandon(error)
            if num_updated:
                add_note(
                    error,
                    f"{num_updated} parameters had been updated already when the step failed: the "
                    "module has half a step. Resume from a checkpoint.",
                )
            raise
        finally:
            self._runtime.defers_update = False

    def _may_begin(self) -> bool:
        trainer: Any = self._trainer
        if not self._begins_early or compat.skips_backward(trainer) or self._always_joins:
            return False
        if self._stale:
            return not self._watch.may_be_kept and not self._has_gradient_hooks
        if self._has_gradient_hooks:
            return False
        if self._has_hosts:  # gradients leave; who looks at them is refused
            return True
        if trainer.accumulate_grad_batches != 1:
            return False
        # In the first step it shows who looks at gradients.
        return not (
            trainer.gradient_clip_val
            or self._is_writing()
            or not self._num_steps
            or self._gradients_are_read
        )

    def _may_measure(self) -> bool:
        """Return whether the norm of a gradient that comes is one that clipping asks for."""
        trainer: Any = self._trainer
        return bool(
            trainer.gradient_clip_val
            and trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE
            and trainer.accumulate_grad_batches == 1
            and self._begins_early
            and not self._has_hosts
            and not compat.skips_backward(trainer)
            and not self._has_gradient_hooks
        )

    @property
    def _has_gradient_hooks(self) -> bool:
        return any(parameter_watch.gradient_hooks(self._trainer))

    @property
    def _always_joins(self) -> bool:
        seen = self._watch.sees_all and not self._state_is_read
        return not seen or parameter_watch.always_wait(self._trainer)

    def _take_clipping(
        self,
        clip: Callable[[], None],
        optimizer: Optimizer,
        limit: float,
        algorithm: GradClipAlgorithmType,
    ) -> bool:
        """Put clipping off until gradients are there, or each is stepped; return whether it is."""
        batch, updater = self._runtime.in_flight, self._runtime.updater
        if batch is not None:
            batch.clips.append(clip)
            return True
        if updater is None or not self._is_submitting or self._has_gradient_hooks:
            return False
        if self._has_hosts:
            by_value = algorithm == GradClipAlgorithmType.VALUE
            self._clip = _values_clip(limit) if by_value else NormClip(limit)
            return True
        updater.join()
        self._clip = _late_clipping(optimizer, limit, algorithm, norm_of=updater.norm_of)
        return self._clip is not None

    @contextmanager
    def _submitting(self, optimizer: Optimizer) -> Iterator[None]:
        """Let `optimizer.step` submit until the end of the context."""
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
            vars(optimizer)["_opt_called"] = True  # what a scheduler's wrapper of `step` notes
            self._watch.watch()
            if batch is not None:
                batch.defer_update(updater, optimizer)
                return result
            is_kept = self._watch.views_are_kept()
            clip, self._clip = self._clip, None
            self._stepped_early = updater.submit(optimizer, clip=clip)
            self._note_spent(optimizer)
            if is_kept:
                self._warn(
                    "Somebody keeps a view of a parameter (`parameter.data`, or `state_dict()` "
                    "without a clone): every optimizer step is waited for as long as it is kept."
                )
            if is_kept or self._always_joins:
                self.join()
                self._runtime.make_whole()
            return result

        self._is_submitting, self._clip = True, None
        try:
            with patch.object(optimizer, "step", submit):
                yield
        finally:
            self._is_submitting = False

    def _before_access(self, what: Access, frame: FrameType, parameter: Tensor | None) -> None:
        """Wait for the step that others may see half made."""
        if what is Access.ADDRESS and not self._has_hosts:
            return
        looks = what in (Access.VALUES, Access.ADDRESS)
        if self._has_hosts and self._place != (os.getpid(), threading.get_ident()):
            # It cannot be had in a forked process, or while the Trainer goes on.
            is_here = os.getpid() == self._place[0]
            where = "a thread that is not the Trainer's" if is_here else "a process of a loader"
            if looks and self._runtime.divides_parameters:
                raise ConfigurationError(
                    f"{describe_code(frame)} looks at parameters in {where}, where each of several "
                    "hosts has only a part of them. Look at them in a hook, set the loader's "
                    "num_workers=0, or set upload_dtype=None; see docs/nodes.md."
                )
            return
        # Before the first step every host has the whole state, if a checkpoint has given it any.
        is_divided = what is Access.GRADIENT or (what is Access.STATE and self._num_steps > 0)
        if self._has_hosts and is_divided:
            raise ConfigurationError(
                f"{describe_code(frame)} looks at {what.value}, of which each of several hosts has "
                "only a part: that does not work yet. Leave it out, or set num_nodes=1; see "
                "docs/nodes.md."
            )
        if looks and self._runtime.is_dividing:
            raise ConfigurationError(
                f"{describe_code(frame)} looks at parameters while the step is made, when each of "
                "several hosts has only a part of them. Look at them in on_train_batch_end."
            )
        if what is Access.GRADIENT:
            if parameter in self._stepped_early:
                raise GradientError(
                    f"{describe_code(frame)} looks at the gradient of a parameter whose block was "
                    "stepped during the backward pass: it is gone. Set `requires_optimizer_sync = "
                    "True` in the class (the callback's or the module's); see docs/updates.md."
                )
            self._gradients_are_read = True
        elif what is Access.STATE:
            self._state_is_read = True
        if self._runtime.is_update_pending:
            if what not in (Access.ZEROING, Access.ADDRESS) and frame.f_code not in self._warned:
                self._warned.add(frame.f_code)
                self._warn(
                    f"{describe_code(frame)} looks at {what.value} between two steps: the "
                    "optimizer's step is waited for there, and what is left of it overlaps with "
                    "nothing."
                )
            self._runtime.finish_update()
        if looks:
            self._runtime.make_whole()

    def _warn(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            rank_zero_warn(f"{message} See docs/updates.md.")

    def join(self) -> None:
        """Wait for the step submitted last; raises once what it, or its batch, failed with."""
        self._runtime.synchronize()
        if self._runtime.updater is not None:
            self._runtime.updater.join()

    def close(self) -> None:
        self._precision.takes_clipping = None
        if self._overlaps:
            self._watch.close()


class TrainedParameters:
    """Parameters trained when a training began, to be compared with those trained now."""

    def __init__(self, module: LightningModule, optimizers: Sequence[Optimizer]) -> None:
        self._module = module
        self._optimizers = optimizers
        self._seen = self._trained()

    def _trained(self) -> dict[int, Tensor]:
        """Return them by their identity: hashes of tensors are slow."""
        # Not of `parameters()`, which users write anew: what an optimizer is given.
        return {id(p): p for p in parameters_in(self._module) if p.requires_grad}

    def check(self) -> None:
        """Warn of parameters that came or were thawed since, unless an optimizer has them."""
        trained = self._trained()
        if trained.keys() == self._seen.keys():
            return
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        members = {id(parameter) for group in groups for parameter in group["params"]}
        for name, parameter in self._module.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._seen.keys() | members:
                rank_zero_warn(
                    f"Parameter {name!r} needs a gradient, but no optimizer has it: it was added "
                    "or unfrozen after the optimizer was made, and stays as it is. To train it, "
                    "make it in `configure_model` or `__init__`, or call add_param_group(...)."
                )
                break
        self._seen = trained


def check_gradients(
    optimizer: Optimizer, *, module: LightningModule, blocks: Iterable[str]
) -> None:
    """Refuse gradients that are not finite, and name the parameter nearest to the loss."""
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
    """Return whether a floating point tensor, perhaps sparse, has neither NaN nor infinities.

    A sum is finite only if all its terms are, and takes no memory (in another dtype it would). Only
    where it is not, because of a term or because finite terms add up to too much, numbers are
    looked at.
    """
    values = tensor.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


_SMALL = 1e-6  # what torch adds to the norm


def _late_clipping(
    optimizer: Optimizer,
    limit: float,
    algorithm: GradClipAlgorithmType,
    *,
    norm_of: Callable[[Tensor], Tensor],
) -> Callable[[Tensor], Any] | None:
    """Return what clips a gradient in place; None where torch's own function must do it.

    The largest norm needs all gradients, but each one's is measured when it has come, while the
    backward pass still runs. The bits are those of `torch.nn.utils.clip_grad_norm_` and
    `clip_grad_value_`.
    """
    members = [p for group in optimizer.param_groups for p in group["params"]]
    members = [p for p in members if p.grad is not None]
    kinds = {(p.grad.dtype, p.grad.device.type, p.grad.layout) for p in members}
    if len(kinds) != 1 or kinds.pop()[1:] != ("cpu", torch.strided):
        return None  # torch goes by kinds
    if GradClipAlgorithmType(algorithm) is GradClipAlgorithmType.VALUE:
        return _values_clip(limit)
    total = torch.linalg.vector_norm(torch.stack([norm_of(p) for p in members]))
    factor = torch.clamp(limit / (total + _SMALL), max=1.0)
    return lambda gradient: gradient.mul_(factor)


def _values_clip(limit: float) -> Callable[[Tensor], Any]:
    return lambda gradient: gradient.clamp_(min=-limit, max=limit)
