"""Outcomes: what a block has done beside returning, and how it reaches the user's own modules.

A replica runs once per microbatch. It records what its modules with forward hooks took and gave,
and what attributes it assigned. The driver runs the hooks and assigns the attributes, once, with
lazy tensors of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from roundpipe_lightning.engine.driver.snapshot import DELETED, Snapshot
from roundpipe_lightning.errors import ConfigurationError


class HookCall(NamedTuple):
    """A call of a module that has forward hooks."""

    module: nn.Module  # the user's own
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class Assignment(NamedTuple):
    """An attribute that a block has assigned, or a buffer in its table."""

    module: nn.Module  # the user's own
    name: str
    value: Any  # DELETED: it was deleted
    is_buffer: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of a block gave.

    Attributes:
        result: What its `forward` returned.
        hook_calls: Calls of modules with forward hooks, in their order.
        attributes: Attributes that it assigned or deleted.
        written_buffers: Buffers of modules that wrote into one of theirs, in place.
    """

    result: Any
    hook_calls: Sequence[HookCall] = ()
    attributes: Sequence[Assignment] = ()
    written_buffers: Sequence[Assignment] = ()


def apply_outcome(
    snapshot: Snapshot, hook_calls: Sequence[HookCall], attributes: Sequence[Assignment]
) -> None:
    """Assign what a block has assigned, and run the user's forward hooks inside it.

    A ConfigurationError, if a hook changes an output: the block has gone on with the other one.
    """
    for module, name, value, is_buffer in sorted(attributes, key=lambda a: a.value is not DELETED):
        if value is DELETED:
            if name in vars(module) or name in vars(module)["_buffers"]:
                delattr(module, name)
        elif is_buffer and name not in vars(module)["_buffers"]:
            persistent = name not in vars(module)["_non_persistent_buffers_set"]
            module.register_buffer(name, value, persistent=persistent)
        else:
            setattr(module, name, value)
    for call in hook_calls:  # a hook may read what its module has assigned
        _run_hooks(snapshot, call)


def _run_hooks(snapshot: Snapshot, call: HookCall) -> None:
    state = snapshot.state_of(call.module)
    for key, hook in state.attributes["_forward_hooks"].items():
        if snapshot.is_own_hook(hook):
            continue  # it ran on the replicas
        if key in state.attributes["_forward_hooks_with_kwargs"]:
            output = hook(call.module, call.args, call.kwargs, call.output)
        else:
            output = hook(call.module, call.args, call.output)
        if output is not None and output is not call.output:
            raise ConfigurationError(
                f"The forward hook {getattr(hook, '__qualname__', hook)!r} of "
                f"{snapshot.name}.{state.path} ({state.kind.__name__}) returns another output. "
                "Hooks of modules inside a block run after the block, once for the whole batch, so "
                "they cannot change what it computes. Return None from the hook, register it on "
                f"{snapshot.name}, or change the output in the module's forward."
            )
