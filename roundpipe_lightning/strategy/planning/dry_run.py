"""Dry runs of a step: what it computes, and what its loss is of those of microbatches.

The user's `training_step` may log, ask its Trainer, count, and draw random numbers. A dry run runs
it on a copy without values, whose `log` says nothing, whose metrics keep nothing and whose
Trainer can be read only, as far as plain values go; generators, classes and objects of the code's
files are put back. What cannot be run so is estimated from the parameters instead.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from copy import copy
from functools import partial
from operator import itemgetter
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric, MetricCollection

from roundpipe_lightning.engine.capture.files import watched_writes
from roundpipe_lightning.engine.capture.torch_functions import set_variables, variables_now
from roundpipe_lightning.engine.capture.trees import tensors_in
from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.engine.chain.row_check import state_of
from roundpipe_lightning.engine.microbatch import loss_of
from roundpipe_lightning.errors import ConfigurationError, RoundPipeError
from roundpipe_lightning.models.losses.lazy_logits import LossFusion, LossMode
from roundpipe_lightning.models.work.meta_copy import MetaCopy, objects_of_code, variables_of_code
from roundpipe_lightning.models.work.step_proof import LossKind, Unproven, prove_step
from roundpipe_lightning.models.work.work_profile import alone, step_profile
from roundpipe_lightning.planning.model.work import WorkProfile
from roundpipe_lightning.strategy.resume.randomness import random_state, set_random_state

_PLAIN = (bool, int, float, str, type(None))
_CONTAINERS = (list, deque, dict, set)


class DryRunError(ConfigurationError):
    """A step cannot be run without values; the message says why."""


def dry_run(
    module: LightningModule,
    stack: BlockStack | None,
    *,
    microbatch: Any,
    arguments: Sequence[Any],
    compute_dtype: torch.dtype | None,
    loss: LossMode,
) -> WorkProfile:
    """Run `training_step` once without values and return what it does; DryRunError: it cannot be.

    Args:
        compute_dtype: What autocast computes in; None: what the parameters are.
    """

    def run(dtype: torch.dtype | None) -> WorkProfile:
        return step_profile(
            module,
            stack,
            microbatch=microbatch,
            call=lambda root, batch: root.training_step(batch, *arguments),
            compute_dtype=dtype,
            fusion=None if loss == "eager" else LossFusion(loss),
            settings=_settings(module),
            replaced=list(_replaced(module)),
        )

    try:
        with _traceless(module), watched_writes(_refuse_to_write):
            if compute_dtype is not None:
                # Code that makes tensors of its own meets a cast model with the wrong dtype.
                with contextlib.suppress(Exception):
                    return run(compute_dtype)
            return run(None)
    except Exception as error:
        raise DryRunError(_reason(error)) from error


@contextlib.contextmanager
def _traceless(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Put back random generators, whose states are given, and what classes and files hold.

    The environment, too.
    """
    kinds = {kind for child in module.modules() for kind in type(child).__mro__}
    before, environment, variables = random_state(), dict(os.environ), variables_now()
    held = [(holder, dict(vars(holder))) for holder in (*kinds, *objects_of_code(module))]
    known = [(v, copy(v)) for _, values in held for v in values.values() if type(v) in _CONTAINERS]
    try:
        yield before
    finally:
        set_random_state(before)
        set_variables(variables)
        if dict(os.environ) != environment:
            os.environ.clear()
            os.environ.update(environment)
        for holder, values in held:
            for name, value in dict(vars(holder)).items():
                if name not in values:
                    delattr(holder, name)
                elif value is not values[name]:
                    setattr(holder, name, values[name])
        for value, items in known:
            if _entries(value) != _entries(items):
                value.clear()
                (value.extend if hasattr(value, "extend") else value.update)(items)


def _refuse_to_write(name: str) -> bool:
    if name != "print":
        raise ConfigurationError(f"It writes a file or makes a folder ({name}).")
    return False


def _unproven(name: str) -> NoReturn:
    raise Unproven(f"it prints, writes a file or makes a folder ({name})")


def _entries(held: Any) -> list[int]:
    return [*map(id, (*held, *held.values()) if isinstance(held, dict) else held)]


def _reason(error: Exception) -> str:
    """Say in few words why a step could not be run: what its own code met, if it met something."""
    source = error.__cause__ if isinstance(error, RoundPipeError) and error.__cause__ else error
    text = str(source).rstrip(".")
    return text if isinstance(source, RoundPipeError) else f"{type(source).__name__}: {text}"


def prove(
    module: LightningModule,
    stacks: Sequence[BlockStack],
    *,
    batch: Any,
    arguments: Sequence[Any],
    num_microbatches: int,
    known: dict[nn.Module, Any],
    divided: Set[int] | None,
) -> tuple[LossKind, list[tuple[str, Callable[[], Any]]]]:
    """Return what a batch's loss is of those of its microbatches; see `prove_step`, which raises.

    Also what the step reads outside the blocks, each with its name.
    """
    blocks = [block for stack in stacks for block in stack.blocks]
    made: Any = None
    forwards: list[Callable[..., Any]] = []

    def run(given: Any, around: Callable[..., Any]) -> tuple[Tensor | None, list[Any]]:
        logged: list[Any] = []
        num_rows = len(tensors_in(given)[0])

        def log(name: Any, value: Any = None, *_: Any, **how: Any) -> None:
            if how.get("reduce_fx", "mean") not in ("mean", torch.mean):
                raise Unproven("it logs what is no mean over batches")
            if how.get("batch_size") not in (None, num_rows):
                raise Unproven("it logs with a batch_size other than the batch's rows")
            values = name.values() if isinstance(name, Mapping) else [value]
            logged.extend(0 if isinstance(value, _Later) else value for value in values)

        for block, forward in zip(blocks, forwards, strict=True):
            made.module_copy(block).__dict__["forward"] = around(forward, block)
        made.module.__dict__.update(log=log, log_dict=log)
        later = [_Later() if type(argument) is int else argument for argument in arguments]
        output = made.module.training_step(given, *later)
        if isinstance(output, Mapping) and set(output) != {"loss"}:
            raise Unproven("it returns more than the loss")
        loss = loss_of(output)
        if made.wrote_buffers:
            raise Unproven("it writes into buffers")
        return loss, logged

    try:
        with alone(), _traceless(module) as before, watched_writes(_unproven):
            replaced = list(_replaced(module, proves=True))
            made = MetaCopy(module, settings=_settings(module, proves=True), replaced=replaced)
            forwards += [made.module_copy(block).forward for block in blocks]
            num_rows = len(next(iter(tensors_in(batch)), ()))
            sizes = {
                num_rows,
                max(1, num_rows // num_microbatches),
                -(-num_rows // num_microbatches),
            }
            kind = prove_step(
                batch=batch, run=run, sizes=sorted(sizes), known=known, divided=divided
            )
            states = [tree_leaves(state) for state in (before, random_state())]
        if any(not _same(a, b) for a, b in zip(*states, strict=True)):
            raise Unproven("it draws random numbers")
        if made.reads_tables:
            raise Unproven("it reads the __dict__ of a module")
        inside = {child for block in blocks for child in block.modules()}
        paths = {child: path + "." * bool(path) for path, child in module.named_modules()}
        own = vars(LightningModule()).keys() - {"training"}
        of_modules = (
            (paths[m] + name, partial(getattr, m, name, ()))
            for m, name in made.read
            if m in paths and m not in inside and name not in own
        )
        read: list[tuple[str, Callable[[], Any]]] = sorted(of_modules, key=itemgetter(0))
        read += [(name, partial(table.get, name)) for table, name in variables_of_code(module)]
        read += [("an attribute or a hook of a block", partial(state_of, b)) for b in blocks]
        read.append(("a hook or a module", partial(state_of, module, attributes=False)))
        return kind, read
    except Unproven:
        raise
    except Exception as error:
        raise Unproven(f"it cannot be run without values ({_reason(error)})") from error


def _same(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def _settings(module: LightningModule, *, proves: bool = False) -> Mapping[str, Any]:
    """Return the copy's replacements for attributes that reach out of the module."""
    return {
        "_trainer": _ReadOnlyTrainer(module.trainer, proves=proves),
        "_device": torch.device("meta"),
        **dict.fromkeys(("log", "log_dict", "print"), lambda *_, **__: None),
    }


def _replaced(module: LightningModule, *, proves: bool = False) -> Iterator[tuple[object, object]]:
    yield module.trainer, _ReadOnlyTrainer(module.trainer, proves=proves)
    for child in module.modules():
        if isinstance(child, MetricCollection) and not proves:
            yield child, MetricCollection([])
        elif isinstance(child, Metric | MetricCollection):
            yield child, SilentMetric(ends_proof=proves)


class _Later:
    """Stands for a number that changes while a training runs: to use it ends a proof."""

    def _refuse(self, *_: object) -> NoReturn:
        raise Unproven(
            "it decides by batch_idx or by the Trainer's epoch or step, or computes with it, and "
            "goes another way later perhaps"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __hash__ = _refuse
    __mod__ = __floordiv__ = __index__ = __int__ = __float__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse


class _ReadOnlyTrainer:
    """Gives the plain values of a Trainer; if it `proves`, those that stay from batch to batch."""

    def __init__(self, trainer: Trainer, *, proves: bool = False) -> None:
        object.__setattr__(self, "_trainer", trainer)
        object.__setattr__(self, "_proves", proves)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        changes = ("current_epoch", "global_step", "is_last_batch", *vars(self._trainer))
        if self._proves and name in changes and isinstance(value, _PLAIN):
            return _Later()
        if isinstance(value, _PLAIN):
            return value
        raise ConfigurationError(f"The step uses the Trainer's {name}.")

    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigurationError(f"The step sets the Trainer's {name}.")


class SilentMetric(nn.Module):
    """Takes whatever a metric takes, keeps nothing and gives a number, or ends a proof.

    A metric of microbatches keeps something else.
    """

    def __init__(self, *, ends_proof: bool = False) -> None:
        super().__init__()
        self._ends_proof = ends_proof

    def forward(self, *_: Any, **__: Any) -> Tensor:
        if self._ends_proof:
            raise Unproven("it uses a metric")
        return torch.zeros((), device="meta")

    compute = update = reset = forward
