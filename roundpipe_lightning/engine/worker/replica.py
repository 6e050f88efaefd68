"""Replicas: shallow copies of a block, on which workers run its calls.

```
user's block    modules ── snapshot ──▶ replica    modules of the same classes
                parameters                         the worker's leaves
                buffers                            the worker's
                other attributes                   the same objects
```

As `torch.nn.DataParallel` makes them; what a replica does beside returning is recorded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.driver.outcome import Assignment, HookCall, Outcome
from roundpipe_lightning.engine.driver.snapshot import (
    BASE_ATTRIBUTES,
    DELETED,
    HOOK_TABLES,
    TABLES,
    Contents,
    ModuleState,
    Snapshot,
    rebind,
)
from roundpipe_lightning.errors import ConfigurationError

_RECORDER = -1
"""Key of the recorder in a table of hooks. PyTorch's own keys count from 0 on."""


class Replica:
    """A copy of a block as a snapshot has it. One thread at a time uses it.

    Args:
        snapshot: The block.
        parameter: Returns the leaf that stands for a parameter of the user's.
        buffer: Returns the tensor that stands for a buffer of the user's.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        parameter: Callable[[nn.Parameter], nn.Parameter],
        buffer: Callable[[Tensor], Tensor],
    ) -> None:
        self.snapshot = snapshot
        substitutes: dict[int, Any] = {id(p): parameter(p) for p in snapshot.parameters}
        substitutes.update((id(b), buffer(b)) for b in snapshot.buffers)
        modules = [object.__new__(state.kind) for state in snapshot.states]
        for state, module in zip(snapshot.states, modules, strict=True):
            substitutes[id(state.module)] = module
        self._recorder = _HookRecorder()
        for state, module in zip(snapshot.states, modules, strict=True):
            # past the module's own `__setattr__`
            object.__setattr__(module, "__dict__", self._attributes_for(state, substitutes))
        self.module = modules[0]
        self._modules = modules
        self._originals = {  # of the user's, by what stands for them here
            id(substitutes[id(x)]): x
            for x in (*(s.module for s in snapshot.states), *snapshot.parameters, *snapshot.buffers)
        }
        self._dicts = [
            entries
            for module in modules
            for entries in (vars(module), *(vars(module)[table] for table in TABLES))
        ]
        self._clean = [dict(entries) for entries in self._dicts]
        self._contents = Contents(self._dicts, BASE_ATTRIBUTES)
        self._may_have_changed = False
        self._buffers = [
            x
            for x in (substitutes[id(buffer)] for buffer in snapshot.buffers)
            if not x.is_inference()  # nobody counts its writes
        ]

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
        """Run the block's `forward`. Afterwards the replica is as the snapshot has it again."""
        if self._may_have_changed:
            self._reset()
        self._may_have_changed = True
        versions = [tensor._version for tensor in self._buffers]
        hook_calls: list[HookCall] = []
        self._recorder.calls = hook_calls
        try:
            # `forward`, not the module: global hooks of modules run in the driver's call of it
            result = self.module.forward(*args, **kwargs)
        finally:
            self._recorder.calls = None
        attributes: Sequence[Assignment] = ()
        if not self._contents.are_unchanged():
            attributes = list(self._changes())
            self._reset()
        # A checkpoint in the block runs a part of it, which assigns, once more in backward.
        self._may_have_changed = torch.is_grad_enabled()
        written = {id(x) for x, v in zip(self._buffers, versions, strict=True) if x._version != v}
        return Outcome(result, hook_calls, attributes, self._writes(written) if written else ())

    def _attributes_for(self, state: ModuleState, substitutes: Mapping[int, Any]) -> dict[str, Any]:
        attributes = dict(state.attributes)
        for table in TABLES:
            entries = attributes[table]
            attributes[table] = {name: substitutes.get(id(x), x) for name, x in entries.items()}
        for table in HOOK_TABLES:
            hooks = attributes[table] if state.path else {}
            # Handles of hooks hold weak references to the table, which a dict does not allow.
            attributes[table] = OrderedDict()
            for key, hook in hooks.items():
                attributes[table][key] = rebind(hook, substitutes)
        if attributes["_forward_hooks"]:
            hooks = state.attributes["_forward_hooks"].items()
            for key in [key for key, hook in hooks if not self.snapshot.is_own_hook(hook)]:
                del attributes["_forward_hooks"][key]
                attributes["_forward_hooks_always_called"].pop(key, None)
            attributes["_forward_hooks"][_RECORDER] = self._recorder.hook_of(state.module)
            attributes["_forward_hooks_with_kwargs"][_RECORDER] = True
        for name in state.references:
            attributes[name] = rebind(attributes[name], substitutes)
        return attributes

    def _changes(self) -> Iterator[Assignment]:
        """Yield what differs from the snapshot, in terms of the user's own objects."""
        for number, (entries, clean) in enumerate(zip(self._dicts, self._clean, strict=True)):
            state = self.snapshot.states[number // (1 + len(TABLES))]
            is_buffer = entries is vars(self._modules[number // (1 + len(TABLES))])["_buffers"]
            for name in [*entries, *(name for name in clean if name not in entries)]:
                value = entries.get(name, DELETED)
                if value is clean.get(name, DELETED) or name in _computed_weights(state):
                    continue
                value = rebind(value, self._originals)
                self._check_entry(state, name, value)
                yield Assignment(state.module, name, value, is_buffer)

    def _check_entry(self, state: ModuleState, name: str, value: Any) -> None:
        """Refuse a parameter of the block's own making: no optimizer and no other run has it."""
        if isinstance(value, nn.Parameter):
            parameters = [value]
        else:
            parameters = list(value.parameters()) if isinstance(value, nn.Module) else []
        if not all(parameter in self.snapshot.parameters for parameter in parameters):
            raise ConfigurationError(
                f"The block {self.snapshot.name} sets {state.kind.__name__}.{name} to a new "
                "parameter, or to a module with some, while it runs: no optimizer would have it, "
                "nor the block's next run. Make it a buffer, or set it in configure_model or, "
                "later, when no step runs."
            )

    def _reset(self) -> None:
        if self._contents.are_unchanged():
            return
        for entries, clean in zip(self._dicts, self._clean, strict=True):
            entries.clear()
            entries.update(clean)

    def _writes(self, written: set[int]) -> list[Assignment]:
        """Return the buffers of modules that have written into one of theirs.

        All of them, because batch normalisation writes its running statistics behind the back of
        the version counter; only its count of batches shows the write.
        """
        return [
            Assignment(state.module, name, tensor, is_buffer=True)
            for state, module in zip(self.snapshot.states, self._modules, strict=True)
            if not written.isdisjoint(map(id, vars(module)["_buffers"].values()))
            for name, tensor in vars(module)["_buffers"].items()
            if tensor is not None
        ]


class _HookRecorder:
    """Stands for the user's forward hooks while a replica runs, and does nothing at other times."""

    def __init__(self) -> None:
        self.calls: list[HookCall] | None = None  # None: a recompute of a checkpoint in a block

    def hook_of(self, module: nn.Module) -> Callable[..., None]:
        def record(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.calls is not None:
                self.calls.append(HookCall(module, args, kwargs, output))

        return record


def _computed_weights(state: ModuleState) -> list[str | None]:
    """Return attributes that pre-hooks compute from parameters before each run of a module.

    Those of the old `weight_norm` and `spectral_norm` and of pruning. Every run makes them anew.
    """
    hooks = state.attributes["_forward_pre_hooks"].values()
    return [getattr(hook, "_tensor_name", getattr(hook, "name", None)) for hook in hooks]
