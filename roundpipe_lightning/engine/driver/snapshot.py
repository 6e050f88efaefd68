"""Snapshots: what a call of a block depends on beside its arguments, when it is posted.

User code goes on while workers run the call. It may change modes, attributes, `requires_grad`,
tables of parameters, child modules and hooks for its next call of the same block:

```
user code    block.eval()   block(x) ── posted ──▶ snapshot 1   eval    ┐ workers run both
             block.train()  block(x) ── posted ──▶ snapshot 2   train   ┘ later, on replicas
```

Attributes are kept, not copied: the values of parameters and buffers, and lists that user code
writes into, are those of the user's module.
"""

from __future__ import annotations

import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from roundpipe_lightning.engine.driver.lazy import LeftTensor, is_lazy

TABLES = ("_parameters", "_buffers", "_modules")
HOOK_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)
MOST_SNAPSHOTS = 4
"""Snapshots that are kept of a block: `eval()` and `train()` in turn, adapters on and off."""
DELETED: Any = object()
"""Stands for the value of a name that was deleted."""

BASE_ATTRIBUTES = frozenset(vars(nn.Module())) - {"training"}
_STATE_DICT_ATTRIBUTES = BASE_ATTRIBUTES.difference(TABLES, HOOK_TABLES)


class ForwardProxy:
    """Base class of what the driver puts into `vars(block)["forward"]`; snapshots look past it.

    A block needs the same proxy in every step: another object is a change of the block.

    Attributes:
        instance_forward: What was in its place: a function bound to the block (Liger, accelerate
            and unsloth bind some); None: the block runs the `forward` of its class.
    """

    instance_forward: Callable[..., Any] | None = None


class Contents:
    """Contents of some dicts at one moment, compared by identity: `==` of a tensor is a tensor.

    Args:
        dicts: Attributes and tables of modules.
        constants: Names of entries that are taken to stay.
    """

    def __init__(self, dicts: Sequence[dict[str, Any]], constants: frozenset[str]) -> None:
        self._dicts = dicts
        self._sizes = list(map(len, dicts))
        places = [(d, name) for d in dicts for name in d if name not in constants]
        self._places = [d for d, _ in places], [name for _, name in places]
        self._values = [_LAZY if is_lazy(d[name]) else d[name] for d, name in places]
        self._has_lazy = any(value is _LAZY for value in self._values)

    def are_unchanged(self) -> bool:
        try:
            values: Iterable[Any] = map(operator.getitem, *self._places)
            if self._has_lazy:
                values = [_LAZY if is_lazy(value) else value for value in values]
            return list(map(len, self._dicts)) == self._sizes and all(
                map(operator.is_, values, self._values)
            )
        except KeyError:  # one was deleted, and another added
            return False


@dataclass(frozen=True, slots=True, eq=False)
class ModuleState:
    """A module of a block as it was: nobody writes into these dicts.

    Attributes:
        module: The user's own.
        path: Its name in the block; "": it is the block.
        kind: Its class, or that of its replicas.
        attributes: Its `__dict__`, tables and hooks included.
        references: Names of attributes that refer to modules, parameters or buffers of the block.
    """

    module: nn.Module
    path: str
    kind: type[nn.Module]
    attributes: Mapping[str, Any]
    references: tuple[str, ...]


class Snapshot:
    """A block as it was when it was called. Immutable: worker threads read it.

    Attributes:
        name: The block's name.
        states: Its modules, each once, the block first.
        parameters: Its parameters, each once, with their `requires_grad`.
        buffers: Its buffers, each once.
        has_script_modules: Whether TorchScript modules are among its modules: they cannot be
            replicated.
    """

    def __init__(self, block: nn.Module, name: str) -> None:
        self.block = block
        self.name = name
        paths: dict[int, tuple[nn.Module, str]] = {}
        _paths_of(block, "", paths)
        modules = [module for module, _ in paths.values()]
        self.has_script_modules = any(isinstance(m, torch.jit.ScriptModule) for m in modules)
        if self.has_script_modules:
            modules = []
        self._modules = modules
        self._kinds = list(map(type, modules))
        self._dicts = list(map(vars, modules))
        self._contents = Contents(
            [*self._dicts, *(d[table] for d in self._dicts for table in (*TABLES, *HOOK_TABLES))],
            _STATE_DICT_ATTRIBUTES,
        )
        parameters = chain.from_iterable(d["_parameters"].values() for d in self._dicts)
        self.parameters = {p: p.requires_grad for p in parameters if p is not None}
        buffers = chain.from_iterable(d["_buffers"].values() for d in self._dicts)
        self.buffers = tuple(dict.fromkeys(b for b in buffers if b is not None))
        self._members = {id(x): _MEMBER for x in (*modules, *self.parameters, *self.buffers)}
        self.states = tuple(_state_of(m, paths[id(m)][1], self._members) for m in modules)
        self._paths = {id(module): path for module, path in paths.values()}
        self._modules_at = {path: module for module, path in paths.values()}

    def is_current(self) -> bool:
        """Return whether the block is as it was. Costs about 1 us per module."""
        return (
            list(map(type, self._modules)) == self._kinds
            and all(map(operator.is_, map(vars, self._modules), self._dicts))
            and self._contents.are_unchanged()
            and [p.requires_grad for p in self.parameters] == list(self.parameters.values())
        )

    def path_of(self, module: nn.Module) -> str:
        return self._paths[id(module)]

    def module_at(self, path: str) -> nn.Module:
        return self._modules_at[path]

    def state_of(self, module: nn.Module) -> ModuleState:
        return next(state for state in self.states if state.module is module)

    def is_own_hook(self, hook: Any) -> bool:
        """Return whether a hook is a method of a module of the block: it runs on replicas."""
        return isinstance(hook, types.MethodType) and id(hook.__self__) in self._members


_LAZY: Any = object()
"""Stands for any lazy tensor: what a block has left in an attribute."""


def take_snapshot(block: nn.Module, last: Snapshot | None, *, name: str = "") -> Snapshot:
    """Return a snapshot of a block: the last one if nothing has changed since."""
    if last is not None and last.block is block and last.is_current():
        return last
    return Snapshot(block, name or type(block).__name__)


_MEMBER: Any = nn.Identity()
"""Stands for substitutes where there are none yet: callable, and open to weak references."""


def _paths_of(module: nn.Module, path: str, paths: dict[int, tuple[nn.Module, str]]) -> None:
    """Add a module and those below it, by `id`: the hash of a metric changes with its state."""
    if id(module) not in paths:
        paths[id(module)] = (module, path)
        # a ScriptModule's children are made when asked for
        children = {} if isinstance(module, torch.jit.ScriptModule) else vars(module)["_modules"]
        for name, child in children.items():
            if child is not None:
                _paths_of(child, f"{path}.{name}" if path else name, paths)


def _state_of(module: nn.Module, path: str, members: Mapping[int, Any]) -> ModuleState:
    attributes: dict[str, Any] = {
        name: LeftTensor.of(value) if is_lazy(value) else value
        for name, value in vars(module).items()
    }
    for table in (*TABLES, *HOOK_TABLES):
        attributes[table] = dict(attributes[table])
    forward = attributes.get("forward")
    if isinstance(forward, ForwardProxy):
        attributes.pop("forward")
        if forward.instance_forward is not None:
            attributes["forward"] = forward.instance_forward
    # Replicas run eagerly: compiled calls are bound to the user's module and its parameters.
    attributes.pop("_compiled_call_impl", None)  # module.compile()
    if "_orig_mod" in attributes["_modules"]:  # torch.compile(module)
        attributes["forward"] = attributes["_modules"]["_orig_mod"]
    references = tuple(
        attribute
        for attribute, value in attributes.items()
        if attribute not in BASE_ATTRIBUTES and rebind(value, members) is not value
    )
    kind = type(module)
    parametrizations = attributes["_modules"].get("parametrizations")
    if isinstance(parametrizations, nn.ModuleDict):
        kind = _without_cache(kind, parametrizations)
    return ModuleState(module, path, kind, attributes, references)


def _without_cache(kind: type[nn.Module], parametrizations: Iterable[str]) -> type[nn.Module]:
    """Return a subclass that computes parametrized weights each time.

    `parametrize.cached()` keeps them for all threads, by the `id` of the user's module. A replica
    would compute with the weight of another one, which is in another graph or in none.
    """

    def weight_of(name: str) -> property:
        known = getattr(kind, name)
        return property(lambda module: module.parametrizations[name](), known.fset)

    return type(kind.__name__, (kind,), {name: weight_of(name) for name in parametrizations})


def rebind(value: Any, substitutes: Mapping[int, Any]) -> Any:
    """Return what stands for a value of a module in a replica of it; the value itself if it may.

    Bound methods, partials, weak references, and lists, tuples and dicts, one level deep, that
    refer to objects of the block refer to their substitutes. A closure cannot be rebound.

    Args:
        value: An attribute or a hook.
        substitutes: What stands for objects of the block, by the objects' `id`.
    """
    bound = _rebind_reference(value, substitutes)
    kind = type(value)
    if kind is dict:
        entries: Any = {k: _rebind_reference(v, substitutes) for k, v in value.items()}
        same = all(map(operator.is_, entries.values(), value.values()))
        return value if same else entries
    if kind is list or kind is tuple:
        entries = kind(_rebind_reference(v, substitutes) for v in value)
        return value if all(map(operator.is_, entries, value)) else entries
    return bound


def _rebind_reference(value: Any, substitutes: Mapping[int, Any]) -> Any:
    if id(value) in substitutes:
        return substitutes[id(value)]
    if type(value) is types.MethodType:
        owner = substitutes.get(id(value.__self__))
        return value if owner is None else types.MethodType(value.__func__, owner)
    if type(value) is weakref.ref:
        referent = substitutes.get(id(value()))
        return value if referent is None else weakref.ref(referent)
    if isinstance(value, functools.partial):
        parts = (value.func, value.args, value.keywords, vars(value))
        rebound = [rebind(part, substitutes) for part in parts]
        if all(map(operator.is_, rebound, parts)):
            return value
        new = functools.partial(rebound[0], *rebound[1], **rebound[2])
        vars(new).update(rebound[3])  # `__wrapped__`
        return new
    return value
