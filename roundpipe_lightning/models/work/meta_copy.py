"""Copies a module onto the meta device, for a run of its code that leaves the original as it is.

```
original   LightningModule ── model ── layers ── [Layer 0, Layer 1]     weights, user's objects
copy       LightningModule ── model ── layers ── [Layer 0, Layer 1]     shapes, the same settings
```

Every module of the copy has tables and plain settings of its own, so what the code writes into
itself stays in the copy. Anything else that a module holds (a tokenizer, a counter, a list of
losses) is copied when the code first asks for it, and only if that can be done: objects that hold
open files, locks, streams of random numbers or a great amount of data are refused, and so are
functions that carry something they could change.
"""

from __future__ import annotations

import dis
import enum
import logging
import os
import random
import re
import sys
import sysconfig
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.view import class_like, is_compiled_wrapper, uncompiled
from roundpipe_lightning.engine.store.flat_buffers import MappedParameter
from roundpipe_lightning.errors import ConfigurationError

_TABLES = ("_parameters", "_buffers", "_modules")
_SHARED = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum),
    *(os.PathLike, re.Pattern, types.ModuleType, types.BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
"""Types that nobody changes, so that the copy can share them with the original."""

_CONTAINERS = (list, set, deque, dict)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_PLAIN = (type(None), bool, int, float, str)
_MANY = 1000  # entries: what holds more is data
_FEW = 9  # entries of a list are attributes of their own
_COUNTERS = frozenset({"current_epoch", "global_step"})  # of a LightningModule or a Trainer
_MOST_OBJECTS = 50_000
_MOST_BYTES = 2**26
_ENTRANCES = ("training_step", "forward")
_INSTALLED = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[2]),
    # used from their source, they may be anywhere
    *(str(Path(str(one.origin)).parent) for one in map(find_spec, ("lightning", "torch")) if one),
)
"""Folders whose code is not the user's."""
_LIBRARIES = frozenset({"torch", "lightning", "lightning_fabric", "lightning_utilities"})


class MetaCopy:
    """A module's copy without weights.

    Args:
        module: The original; it is not changed.
        compute_dtype: What floating-point parameters are in the copy. None: what they are.
        settings: Attributes of the copy's root that differ from the original's.
        replaced: Pairs of an object of the original and what the copy has in its place.
        alike: Modules by those that are alike, whose copies have the same parts.

    Attributes:
        reason_not_copied: Why something the copy's code asks for was not copied; None so far.
        read: Attributes that the copy's code has read off modules, by the original and the name.
        reads_tables: Whether it has read the `__dict__` of one.

    Raises:
        ConfigurationError: The module's code changes what is no part of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        settings: Mapping[str, Any] | None = None,
        replaced: Iterable[tuple[object, object]] = (),
        alike: Mapping[nn.Module, nn.Module] | None = None,
    ) -> None:
        self._alike = alike or {}
        self.reason_not_copied: str | None = None
        self.read: set[tuple[nn.Module, str]] = set()
        self.reads_tables = False
        self._dtype = compute_dtype
        self._made: dict[int, tuple[object, Any]] = {id(a): (a, b) for a, b in replaced}
        self._modules: dict[nn.Module, nn.Module] = {}
        self._buffers: list[tuple[nn.Module, str, Tensor, int]] = []
        self._num_objects = 0
        helpers = helpers_of(module)
        for kind in {type(child) for child in module.modules()}:
            for function in _code_of(kind, helpers=helpers):
                # its methods may not write to variables outside of the module
                is_looked_at = kind is type(module) or is_of_user(function)
                if is_looked_at and (not _is_pure(function) or _changes_globals(function)):
                    raise self._refuse(
                        f"{function.__qualname__} may change a variable outside of the module"
                    )
        self.module = self.module_copy(module)
        self.module.__dict__.update(settings or {})

    def module_copy(self, module: nn.Module) -> nn.Module:
        known = self._made.get(id(module))
        if known is None:
            copy: Any = object.__new__(class_like(type(module), (_Copied, type(module))))
            self._made[id(module)] = known = (module, copy)
            self._modules[copy] = module
            self._fill(copy, module)
        result: nn.Module = known[1]
        return result

    def original(self, copy: nn.Module) -> nn.Module:
        return self._modules.get(copy, copy)

    @property
    def wrote_buffers(self) -> bool:
        """Whether the copy's code has written into a buffer, or assigned one."""
        return any(
            module._buffers.get(name) is not buffer or buffer._version != version  # noqa: SLF001
            for module, name, buffer, version in self._buffers
        )

    def copy(self, value: Any) -> Any:
        """Return the copy's object for an original; ConfigurationError if it cannot be copied."""
        if isinstance(value, _SHARED):
            return value
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, nn.Module):
            return self.module_copy(value)
        self._num_objects += 1
        if self._num_objects > _MOST_OBJECTS:
            raise self._refuse(f"more than {_MOST_OBJECTS} objects belong to the module")
        result = self._copied(value)
        self._made[id(value)] = (value, result)
        return result

    def _fill(self, copy: Any, module: nn.Module) -> None:
        state = module.__dict__
        own: dict[str, Any] = {}
        withheld: dict[str, Any] = {}
        copy.__dict__.update(_copier=self, _withheld=withheld)
        copy.__dict__.update({table: {} for table in _TABLES})  # asked for while they are filled
        for name, value in state.items():
            if name in _TABLES or name == "_compiled_call_impl":
                continue
            if name == "forward" and is_compiled_wrapper(module):
                own[name] = uncompiled(copy)
                continue
            if name in _MODULE_SETTINGS and isinstance(value, dict):
                own[name] = type(value)()  # hooks, bound to copies
                own[name].update((key, self.copy(hook)) for key, hook in value.items())
            elif isinstance(value, _SHARED):
                own[name] = value
            elif hasattr(type(module), name):  # else the copy would find its class's
                own[name] = self.copy(value)
            else:
                withheld[name] = value
        own["_compiled_call_impl"] = None
        like = self._alike.get(module, module)
        for table in _TABLES:
            if like is not module:
                own[table] = self.module_copy(like).__dict__[table]
                continue
            entries = state[table].items()
            own[table] = {n: None if v is None else self.copy(v) for n, v in entries}
        copy.__dict__.update(own)
        for name, buffer in own["_buffers"].items():
            if buffer is not None:
                self._buffers.append((copy, name, buffer, buffer._version))

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copy(value.__self__))
        if isinstance(value, types.FunctionType):
            if not _is_pure(value):
                raise self._refuse(f"the function {value.__qualname__} carries variables")
            if any(map(_changes_globals, _code_of(object, value))):
                raise self._refuse(f"{value.__qualname__} may change a variable of its file")
            return value
        if isinstance(value, partial):
            return partial(
                self.copy(value.func), *self.copy(value.args), **self.copy(value.keywords)
            )
        if type(value) in (tuple, frozenset):
            return type(value)(self.copy(item) for item in value)
        if type(value) is set:
            items: set[Any] = set()
            self._made[id(value)] = (value, items)  # what it holds may refer to it
            items.update(self.copy(item) for item in value)
            return items
        return self._rebuilt(value)

    def _tensor(self, value: Tensor) -> Tensor:
        kind = getattr(type(value), "watched_as", type(value))  # by `ParameterWatch`
        if kind not in (Tensor, nn.Parameter, MappedParameter):
            raise self._refuse(f"a tensor is a {kind.__name__}")
        dtype = value.dtype
        if isinstance(value, nn.Parameter):
            if self._dtype is not None and dtype.is_floating_point:
                dtype = self._dtype
            like = torch.empty_like(value, dtype=dtype, device="meta", requires_grad=False)
            if isinstance(value, MappedParameter) and value.is_mapped:
                return MappedParameter(like, file=value.file)
            return nn.Parameter(like, requires_grad=value.requires_grad)
        return torch.empty_like(value, device="meta").requires_grad_(value.requires_grad)

    def _rebuilt(self, value: Any) -> Any:
        """Copy an object from the parts that it would be pickled from."""
        if isinstance(value, torch.Generator):
            raise self._refuse("a stream of random numbers cannot be copied")
        if getattr(value, "nbytes", 0) > _MOST_BYTES:
            raise self._refuse(f"a {type(value).__name__} has {value.nbytes} bytes")
        try:
            parts = value.__reduce_ex__(4)
        except TypeError as error:
            raise self._refuse(f"a {type(value).__name__} cannot be copied ({error})") from error
        if isinstance(parts, str):
            return value
        make, args, state, items, pairs = (*parts, None, None, None)[:5]
        result = make(*map(self.copy, args))
        self._made[id(value)] = (value, result)
        if state is not None:
            _set_state(result, self.copy(state))
        for item in items or ():
            result.append(self.copy(item))
        for key, item in pairs or ():
            result[self.copy(key)] = self.copy(item)
        return result

    def _refuse(self, reason: str) -> ConfigurationError:
        self.reason_not_copied = reason
        return ConfigurationError(f"A run without weights would not leave all as it is: {reason}.")


def _set_state(result: Any, state: Any) -> None:
    if hasattr(result, "__setstate__"):
        result.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    result.__dict__.update(attributes or {})
    for name, value in (slots or {}).items():
        object.__setattr__(result, name, value)


_PLAIN_MODULE = nn.Module()
_MODULE_SETTINGS = frozenset(_PLAIN_MODULE.__dict__) - frozenset(_TABLES)


class _Copied:
    """Base class of every module of a copy, beside the original's class."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do not run the user class's own hook for classes: no user class is being defined."""

    def __getattribute__(self, name: str) -> Any:
        value, own = super().__getattribute__(name), super().__getattribute__("__dict__")
        if name == "__dict__":
            if _is_users_path(sys._getframe(1).f_code.co_filename):  # noqa: SLF001
                own["_copier"].reads_tables = True
        elif name == "training" or (
            (type(value) in _PLAIN or name in own) and not hasattr(_PLAIN_MODULE, name)
        ):
            original = own["_copier"].original(self)
            if type(value) in _PLAIN or name in vars(original):
                own["_copier"].read.add((original, name))
        elif type(value) in _CONTAINERS and name not in own and not name.startswith("__"):
            value = own[name] = own["_copier"].copy(value)  # of the class
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":  # peft gives it another one while adapters of a parameter are added
            object.__dict__["__class__"].__set__(self, class_like(value, (_Copied, value)))
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        # Called only where the instance and its class have no such attribute.
        copier, withheld = self.__dict__["_copier"], self.__dict__["_withheld"]
        if name in withheld:
            self.__dict__[name] = copier.copy(withheld[name])
            return getattr(self, name)
        copier.read.add((copier.original(self), name))  # it may be there later
        return super().__getattr__(name)  # type: ignore[misc]  # a module's


def _method(kind: type, name: str) -> types.FunctionType | None:
    """The function behind a name in a class; None where there is none, or it is a library's."""
    for base in kind.__mro__:
        if name in vars(base):
            value = vars(base)[name]
            value = getattr(value, "fget", value)
            function = getattr(value, "__func__", value)
            own = base.__module__.partition(".")[0] not in _LIBRARIES
            return function if own and isinstance(function, types.FunctionType) else None
    return None


def _code_of(
    kind: type, *functions: types.FunctionType, helpers: Iterable[type] = ()
) -> Iterator[types.FunctionType]:
    """Return functions, the methods of a module that begin a step, and those that they name.

    They may be methods of `helpers`, or of the user's classes that the code names, too.
    """
    names, kinds = set(_ENTRANCES), [kind]
    pending: list[types.FunctionType | None] = [*functions, *(_method(kind, n) for n in names)]
    seen: set[types.FunctionType | None] = {None}

    def follow(other: type) -> None:
        if other not in kinds:
            kinds.append(other)
            called = {n for base in other.__mro__[:-1] for n in vars(base) if n.startswith("__")}
            pending.extend(_method(other, name) for name in names | called)

    for helper in helpers:
        follow(helper)
    while pending:
        function = pending.pop()
        if function not in seen:
            seen.add(function)
            assert function is not None
            yield function
            new = _names_of(function) - names
            names |= new
            pending += [_method(known, name) for known in kinds for name in new]
            named = [v for _, v in _named_in(function)]
            pending += [v for v in named if isinstance(v, types.FunctionType) and is_of_user(v)]
            for helper in _helpers_in(named):
                follow(helper)


def _helpers_in(values: Iterable[Any]) -> Iterator[type]:
    """Return the user's classes among values, and those of objects; modules' are no helpers."""
    kinds = (v if isinstance(v, type) else type(v) for v in _within(values))
    return (kind for kind in kinds if is_of_user(sys.modules.get(kind.__module__)))


def _within(values: Iterable[Any]) -> Iterator[Any]:
    """Return values, and what containers and the user's objects among them hold; no modules."""
    pending, seen = [*values], set[int]()
    while pending:
        value = pending.pop()
        kind = value if isinstance(value, type) else type(value)
        if issubclass(kind, nn.Module) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if is_of_user(sys.modules.get(kind.__module__)):
            pending += [] if value is kind else getattr(value, "__dict__", {}).values()
        elif isinstance(value, (*_CONTAINERS, tuple)) and len(value) < _MANY:
            pending += value.values() if isinstance(value, dict) else value


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Return a function's code, and that of functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def _names_of(function: types.FunctionType) -> set[str]:
    return {name for code in _codes_in(function.__code__) for name in code.co_names}


def _named_in(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Return the names in a function's code, and what its file, or one that it names, has so."""
    return ((name, file[name]) for file, name in _tables_of(function))


def _tables_of(function: types.FunctionType) -> Iterator[tuple[Mapping[str, Any], str]]:
    names, own = _names_of(function), function.__globals__
    others = [v for v in map(own.get, names) if isinstance(v, types.ModuleType)]
    files = [own, *(vars(file) for file in others if is_of_user(file))]
    return ((file, name) for file in files for name in names if name in file)


def is_of_user(value: Any) -> bool:
    """Whether it is a function or a file of no package that is installed."""
    path = getattr(getattr(value, "__code__", None), "co_filename", None)
    if isinstance(value, types.ModuleType):
        path = getattr(value, "__file__", None)
    return isinstance(path, str) and _is_users_path(path)


def _is_users_path(path: str) -> bool:
    return not (path.startswith(_INSTALLED) or "-packages" in path)


def _user_code_of(module: nn.Module) -> Iterator[tuple[nn.Module, types.FunctionType]]:
    """Return the functions of a step that are the user's, each with a module that has it."""
    helpers = helpers_of(module)
    for kind, child in {type(child): child for child in module.modules()}.items():
        held = [v for v in vars(child).values() if isinstance(v, types.FunctionType)]
        yield from ((child, f) for f in _code_of(kind, *held, helpers=helpers) if is_of_user(f))


def helpers_of(module: nn.Module) -> Sequence[type]:
    """Return the user's classes of which a module and its parts hold objects."""
    own = vars(_PLAIN_MODULE).keys()
    held = (v for child in module.modules() for name, v in vars(child).items() if name not in own)
    return list(dict.fromkeys(_helpers_in(held)))


def objects_of_code(module: nn.Module) -> list[Any]:
    """Return objects, functions and classes in the user's files that a step's code names.

    The user's objects that these have among their attributes, too.
    """
    named = [v for _, f in _user_code_of(module) for _, v in _named_in(f)]
    kinds = {kind for child in module.modules() for kind in type(child).__mro__}
    pending, found = [*helpers_of(module), *kinds, *named], dict[int, Any]()
    while pending:
        value = pending.pop()
        is_foreign = isinstance(value, type) and not is_of_user(sys.modules.get(value.__module__))
        is_left_out = isinstance(value, types.ModuleType | Tensor | logging.Logger) or is_foreign
        if id(value) not in found and hasattr(value, "__dict__") and not is_left_out:
            found[id(value)] = value
            pending += [
                v
                for v in vars(value).values()
                if is_of_user(sys.modules.get(type(v).__module__)) and not isinstance(v, nn.Module)
            ]
    return list(found.values())


def thread_locals_of(module: nn.Module) -> list[threading.local]:
    """Return what has values for each thread among what the code names, encloses or holds."""
    held = [table.get(name) for table, name in variables_of_code(module)]
    for holder in (*module.modules(), *objects_of_code(module)):
        held += vars(holder).values()
    for _, function in _user_code_of(module):
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it is empty
                held.append(cell.cell_contents)
    return [value for value in _within(held) if isinstance(value, threading.local)]


def variables_of_code(module: nn.Module) -> list[tuple[Mapping[str, Any], str]]:
    """Return what the user's code names in its files, its classes and modules, and their tables.

    A name that only a class has is looked for in the module, too, which may hide it.
    """
    found: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
    for child, function in _user_code_of(module):
        own, names = vars(child), _names_of(function)
        tables = [own, child._modules, *map(vars, type(child).__mro__[:-1])]  # noqa: SLF001
        pairs = [(t, name) for t in tables for name in names if name in t or t is own]
        found.update(((id(t), name), (t, name)) for t, name in (*pairs, *_tables_of(function)))
    return list(found.values())


def reads_outside(block: nn.Module) -> list[Callable[[], Any]]:
    """Return functions, each of which reads a value that a block may read from other objects.

    These are variables of its files and classes, and attributes of objects that it refers to.
    """
    names = {name for _, function in _user_code_of(block) for name in _names_of(function)}
    own, common = [vars(child) for child in block.modules()], vars(_PLAIN_MODULE)
    tables = [(t, n) for t, n in variables_of_code(block) if all(t is not known for known in own)]
    held = [v for table in own for name, v in table.items() if names and name not in common]
    held += [x for v in held if type(v) in (list, tuple) for x in v[:_FEW]]
    objects = {id(v): v for v in held if hasattr(v, "__dict__") and not _is_code(v)}
    pairs = [(v, n) for v in objects.values() for n in names if n in vars(v) or n in _COUNTERS]
    return [
        *(partial(table.get, name) for table, name in tables if not _is_code(table.get(name))),
        *(partial(getattr, value, name, None) for value, name in pairs),
    ]


def _is_code(value: Any) -> bool:
    return isinstance(value, type | types.ModuleType | types.FunctionType | types.MethodType)


def _is_pure(function: types.FunctionType) -> bool:
    """Whether a function carries nothing that it, or what it calls, could change."""
    code = function.__code__
    steps = dis.get_instructions(code) if code.co_freevars else ()
    if any(s.opname == "STORE_DEREF" and s.argval in code.co_freevars for s in steps):
        return False
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            return False
        if isinstance(content, types.FunctionType):
            if content is not function and not _is_pure(content):
                return False
        elif not isinstance(content, _SHARED):
            return False
    return True


def _changes_globals(function: types.FunctionType) -> bool:
    """Whether a function assigns a variable of its file, or uses one that it could change there.

    What its parameters are by default is kept, too.
    """
    codes = [*_codes_in(function.__code__)]
    stores = (s.opname == "STORE_GLOBAL" for code in codes for s in dis.get_instructions(code))
    if any("globals" in code.co_names for code in codes) or any(stores):
        return True
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    kinds = (*_CONTAINERS, *_GENERATORS, Iterator)
    return any(isinstance(v, kinds) for v in (*defaults, *(v for _, v in _named_in(function))))
