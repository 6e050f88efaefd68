"""Views: shallow copies of a module tree in which parameters, buffers and children can differ.

Step M3 of docs/design.md.

A microbatch runs the user's own code on a view of the user's module. The view has its own
`_parameters`, `_buffers` and `_modules` tables; everything else is the original's, read and written
live:

```
original  LightningModule ── model ── layers ── [Layer 0, Layer 1]      parameters on the host
              ▲ attributes    ▲         ▲
view 0    LightningModule ── model ── layers ── [proxy 0, proxy 1]      leaves on the worker
view 1    LightningModule ── model ── layers ── [proxy 0, proxy 1]      leaves on another worker
```

A view's class is a subclass of the original's made on the fly, whose `__class__` is the original's,
so that `isinstance`, `super()` and `type(self).__name__` mean what they always meant. Code that
gives a module another class for a while (`torch.nn.utils.parametrize`, which peft uses for the
parameters of experts) gives it to the view alone.
"""

from __future__ import annotations

import copy
import operator
import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from torch import nn

_TABLES = ("_parameters", "_buffers", "_modules")
_MODULE_INTERNALS = frozenset(nn.Module().__dict__)

DELETED: Any = object()
"""Marker that a view passes in place of a value when an attribute is deleted."""

_AS_THE_ORIGINAL: Any = object()

_BOOKS = (
    *("_view_of", "_write", "_classes", "_maker", "_gone", "_class_swapped"),
    *("_called", "_present_device", "_compiled_call_impl"),
)
"""What a view keeps for the engine."""

HOOKS = tuple(name for name in nn.Module().__dict__ if re.fullmatch(r"_(forward|backward).*", name))
"""A module's tables of hooks around its call."""


def write_through(module: nn.Module, name: str, value: Any) -> None:
    if value is DELETED:
        with suppress(AttributeError):  # made and deleted meanwhile
            delattr(module, name)
    elif name in HOOKS:  # the handles of hooks refer to the table
        table = module.__dict__[name]
        hooks = dict(value)
        table.clear()
        table.update(hooks)
    else:
        setattr(module, name, value)


def is_compiled(module: nn.Module) -> bool:
    return is_compiled_wrapper(module) or getattr(module, "_compiled_call_impl", None) is not None


def is_compiled_wrapper(module: nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # a slow import; who compiles has it
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def uncompiled(wrapper: Any) -> Callable[..., Any]:
    """Return a `forward` for a stand-in of such a module: it runs what the stand-in wraps."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapper._orig_mod(*args, **kwargs)  # noqa: SLF001 - it has no other name

    return forward


V = TypeVar("V")


class LazyTable(dict[str, V], Generic[V]):
    """A table of a view whose entries are made when the user's code first asks for them.

    Args:
        entries: The original's table; None entries stay None.
        place: Called with an original entry, returns what stands for it *now*; it is asked every
            time, because the worker that runs a view changes between segments.
    """

    __slots__ = ("_entries", "_own", "_place", "known")

    def __init__(self, entries: Mapping[str, Any], place: Callable[[Any], V]) -> None:
        super().__init__(entries)
        self._entries = entries
        self._place = place
        self.known = tuple(entries)  # the names that the original had when the view was made
        #: Entries that the user's code has put in, used as they are: whether to write them back.
        self._own: dict[str, bool] = {}

    def __getitem__(self, key: str) -> V:
        value = super().__getitem__(key)
        return value if value is None or key in self._own else self._place(value)

    def __setitem__(self, key: str, value: Any) -> None:
        entry = self._entries.get(key)
        if entry is not None and key not in self and self._place(entry) is value:
            self._own.pop(key, None)  # taken out and put back, as parametrizing does
            super().__setitem__(key, entry)
            return
        self._own[key] = True
        super().__setitem__(key, value)

    def __iter__(self) -> Iterator[str]:
        # Overridden so that `dict(table)` goes through __getitem__ and not past it.
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - `get` is what is defined

    def items(self) -> Iterator[tuple[str, V]]:  # type: ignore[override]  # lazy, unlike a dict's
        return ((key, self[key]) for key in self)

    def values(self) -> Iterator[V]:  # type: ignore[override]  # lazy, unlike a dict's
        return (self[key] for key in self)

    def adopt(self, key: str) -> None:
        super().__setitem__(key, self._entries[key])

    def assigned(self) -> dict[str, Any]:
        return {k: dict.__getitem__(self, k) for k, is_fresh in self._own.items() if is_fresh}

    @property
    def is_changed(self) -> bool:
        return len(self) < len(self.known) or (bool(self._own) and any(self._own.values()))

    def note_written_back(self) -> None:
        self._own = dict.fromkeys(self._own, False)

    def reset(self) -> None:
        for key in self._own:
            self.pop(key)
            if key in self._entries:
                super().__setitem__(key, self._entries[key])
        self._own.clear()


class Attributes(dict[str, Any]):
    """A view's `__dict__` as its user's code reads it: with the attributes of the original.

    Python looks past these methods when it looks for an attribute.
    """

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._shared()

    def __missing__(self, name: str) -> Any:
        return self._shared()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)  # read back here, whatever other microbatches write
        self["_gone"].discard(name)
        if not (self["_class_swapped"] or _is_entry(self["_view_of"], name)):
            written = value.__dict__["_view_of"] if _is_view(value) else value
            self["_write"](self["_view_of"], name, written)

    def __delitem__(self, name: str) -> None:
        self[name]  # raises as a dict does
        super().pop(name, None)
        self["_gone"].add(name)
        self["_write"](self["_view_of"], name, DELETED)

    def __iter__(self) -> Iterator[str]:
        own = (name for name in dict.keys(self) if name not in _BOOKS)
        return iter(dict.fromkeys((*own, *self._shared())))

    def _shared(self) -> Mapping[str, Any]:
        gone, shared = dict.__getitem__(self, "_gone"), vars(self["_view_of"])
        return {n: v for n, v in shared.items() if n not in gone} if gone else shared

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 - `get` is what is defined

    def pop(self, name: str, *default: Any) -> Any:
        if default and name not in self:
            return default[0]
        value = self[name]
        del self[name]
        return value

    popitem = MutableMapping.popitem
    clear = MutableMapping.clear
    update = MutableMapping.update
    setdefault = MutableMapping.setdefault

    def __ior__(self, others: Any) -> Any:
        self.update(others)
        return self

    def __or__(self, others: Any) -> Any:
        return {**self.copy(), **others}

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __len__(self) -> int:
        return super().__len__() and sum(1 for _ in self)  # a closed one is empty

    def keys(self) -> Any:
        return list(self)

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]


class View:
    """Base class of every view, beside the module's own class; see the file's docstring."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do not run the user class's own hook for classes: no user class is being defined."""

    def __getattr__(self, name: str) -> Any:
        # Called only where the instance and its class have no such attribute.
        own = self.__dict__
        for table in _TABLES:
            if name in own[table]:
                return own[table][name]
        original = own["_view_of"]
        kind = type(original)
        if name in own["_gone"]:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        if name in original.__dict__["_buffers"]:  # it has appeared since
            own["_buffers"].adopt(name)
            return own["_buffers"][name]
        value = original.__dict__.get(name, own)
        if value is not own and not isinstance(value, types.MethodType):
            return value
        if value is own and kind.__getattr__ is not nn.Module.__getattr__:
            return kind.__getattr__(self, name)  # a wrapper: ask what the view wraps
        maker: ViewMaker = own["_maker"]
        return maker.rebound(_rebound(getattr(original, name), original, self), original)

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name == "__class__":
            own["_classes"].swap_class(self, value)
            return
        for table in _TABLES:
            if name in own[table]:
                own["_maker"].check_entry(name, value)
                own[table][name] = value
                return
        descriptor = getattr(type(self), name, None)
        if hasattr(descriptor, "__set__"):
            object.__setattr__(self, name, value)
            return
        own[name] = value

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if not self.__dict__["_maker"].is_fixed:
            super().zero_grad(*args, **kwargs)  # type: ignore[misc]  # a module's
            return
        warnings.warn(  # what leaves have are other microbatches' of this batch
            "A block calls zero_grad(), which does nothing in a step: gradients of the batches "
            "before are not there, and stay. Call it when no step runs.",
            stacklevel=2,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__dict__["_view_of"].__reduce_ex__(protocol)  # saved as the original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a module with what the view has now, where its code runs."""
        views = [view.__dict__ for view in self.modules() if _is_view(view)]
        for own in views:
            for table in (own["_parameters"], own["_buffers"]):
                for name, value in table.items():
                    original: Any = dict.get(table, name)
                    if value is not None and id(original) not in memo:
                        memo[id(original)] = copy.deepcopy(value.detach(), memo)
                        if isinstance(original, nn.Parameter):
                            made = nn.Parameter(memo[id(original)], value.requires_grad)
                            memo[id(original)] = made
        copied = copy.deepcopy(self.__dict__["_view_of"], memo)
        for own in views:
            new = memo[id(own["_view_of"])].__dict__
            for name, value in dict.items(own):
                is_book = name in _BOOKS or name in _TABLES or name in HOOKS
                if not is_book and not isinstance(value, (types.MethodType, partial)):
                    new[name] = copy.deepcopy(value, memo)
        return copied

    def __repr__(self) -> str:
        # Modules describe themselves from their `__dict__`, which only the original has in full.
        return repr(self.__dict__["_view_of"])

    def __delattr__(self, name: str) -> None:
        own = self.__dict__
        has_own = dict.__contains__(own, name)
        if any(name in own[table] for table in _TABLES):
            for table in _TABLES:
                own[table].pop(name, None)
        elif own["_class_swapped"] or (has_own and _is_entry(own["_view_of"], name)):
            dict.pop(own, name, None)
        else:
            if not has_own:
                getattr(self, name)  # raises as a module does
            dict.pop(own, name, None)
            own["_write"](own["_view_of"], name, DELETED)
        own["_gone"].add(name)


def _registering(name: str) -> Callable[..., Any]:
    """Return a method of views that registers a hook on the view alone.

    Otherwise every microbatch would register one for all, as transformers does in its first call.
    """

    def register(self: Any, *args: Any, **kwargs: Any) -> Any:
        own, original = self.__dict__, self.__dict__["_view_of"]
        tables = {name: original.__dict__[name] for name in HOOKS}
        dict.update(own, {name: copy.copy(t) for name, t in tables.items() if own[name] is t})
        handle = getattr(super(View, self), name)(*args, **kwargs)
        handle.extra_dict_ref += tuple(map(weakref.ref, tables.values()))  # removed there, too
        for table in (name for name in tables if own[name] != tables[name]):
            own["_write"](original, table, own[table])
        return handle

    return register


for _name in ("forward", "forward_pre", "backward", "full_backward", "full_backward_pre"):
    setattr(View, f"register_{_name}_hook", _registering(f"register_{_name}_hook"))


def _is_view(value: Any) -> bool:
    return issubclass(type(value), View)


def _is_entry(module: nn.Module, name: str) -> bool:
    return any(name in module.__dict__[table] for table in _TABLES)


def _rebound(value: Any, original: object, view: object) -> Any:
    """Return a method of the original (a patched `forward`, say) bound to the view.

    Also where a `functools.partial` calls it, or is given it or the original as an argument.
    """
    if isinstance(value, types.MethodType) and value.__self__ is original:
        return types.MethodType(value.__func__, view)
    if type(value) is partial:
        func = _rebound(value.func, original, view)
        args = [_in_its_place(given, original, view) for given in value.args]
        kwargs = {k: _in_its_place(given, original, view) for k, given in value.keywords.items()}
        same = func is value.func and all(map(operator.is_, args, value.args))
        if not same or any(kwargs[key] is not given for key, given in value.keywords.items()):
            return partial(func, *args, **kwargs)
    return value


def _in_its_place(value: Any, original: object, view: object) -> Any:
    return view if value is original else _rebound(value, original, view)


def is_rebound(value: object, module: nn.Module) -> bool:
    return _rebound(value, module, object()) is not value


def put(view: Any, name: str, value: Any) -> Any:
    """Let a view have an attribute, `DELETED` for none, without telling the original.

    Returns:
        What it had: to be put back.
    """
    own = view.__dict__
    before = DELETED if name in own["_gone"] else dict.get(own, name, _AS_THE_ORIGINAL)
    own["_gone"].discard(name)
    dict.pop(own, name, None)
    if value is DELETED:
        own["_gone"].add(name)
    elif value is not _AS_THE_ORIGINAL:
        dict.update(own, {name: value})
    return before


class ViewClasses:
    """Makes the classes of views, each once.

    Args:
        apart: Modules that have no view: they stand for themselves.
    """

    def __init__(self, apart: Iterable[nn.Module] = ()) -> None:
        # By identity: the hash of a metric changes with its state.
        self.apart = {id(module): module for module in apart}
        self._made: dict[tuple[type, ...], type] = {}
        self._own_names: dict[type, frozenset[str]] = {}
        self._swap_lock = threading.RLock()
        self._held = threading.local()  # `depth`: how often this thread holds the lock

    def class_for(self, base: type, *extra: type) -> type:
        key = (*extra, base)
        if key not in self._made:
            self._made[key] = made = _view_class(base, extra)
            self._own_names[made] = frozenset(vars(made))
        return self._made[key]

    def hand_on(self) -> None:
        """Set on users' classes what was set on views': by `type(self).count += 1`, say."""
        for (*_, base), made in list(self._made.items()):
            if len(vars(made)) == len(self._own_names[made]):
                continue
            present = dict(vars(made))
            for name in present.keys() - self._own_names[made]:
                if not name.startswith("__"):
                    setattr(base, name, present[name])
                    with suppress(AttributeError):  # another thread's view of it has ended, too
                        delattr(made, name)

    def swap_class(self, view: Any, kind: type) -> None:
        """Let a view pass for an object of a subclass, until it gets its own class back.

        One thread at a time, because torch counts and caches parametrizations per process.
        """
        own = view.__dict__
        begins, ends = not own["_class_swapped"], kind is type(own["_view_of"])
        if begins:
            self._swap_lock.acquire()
            self._held.depth = self._depth + 1
        extra = tuple(c for c in type(view).__bases__ if issubclass(c, View) and c is not View)
        made = self.class_for(kind, *extra) if ends else _view_class(kind, extra)
        object.__dict__["__class__"].__set__(view, made)
        dict.update(own, _class_swapped=not ends)
        if ends:
            self._held.depth = self._depth - 1
            self._swap_lock.release()

    @property
    def _depth(self) -> int:
        return int(getattr(self._held, "depth", 0))

    def end_swaps(self) -> None:
        """Let go of what this thread's views have not given back: nobody uses them any more."""
        while self._depth:
            self._held.depth = self._depth - 1
            self._swap_lock.release()

    def released(self) -> AbstractContextManager[None]:
        """Let views of other threads take other classes meanwhile: this thread waits for its turn.

        The other threads may have to take theirs before it comes.
        """
        return self._released() if self._depth else nullcontext()

    @contextmanager
    def _released(self) -> Iterator[None]:
        depth = self._depth
        for _ in range(depth):
            self._swap_lock.release()
        try:
            yield
        finally:
            for _ in range(depth):
                self._swap_lock.acquire()


def _view_class(base: type, extra: tuple[type, ...]) -> type:
    in_disguise = any(issubclass(c, View) for c in extra)
    return class_like(base, (*extra, base) if in_disguise else (View, base))


def class_like(base: type, bases: tuple[type, ...]) -> type:
    """Make a class that passes for `base`: it has its name, and its objects say it is theirs."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace["__module__"] = base.__module__
        namespace["__qualname__"] = base.__qualname__
        namespace["__class__"] = property(lambda self: base)
        if hasattr(base, "__del__"):  # it would close what the original uses
            namespace["__del__"] = lambda self: None

    return types.new_class(base.__name__, bases, {}, fill)


@dataclass(kw_only=True, eq=False)
class ViewMaker:
    """Makes the views of one tree, each when it is first asked for."""

    parameter: Callable[[nn.Parameter], Any]
    buffer: Callable[[Any], Any]
    classes: ViewClasses
    # called when an attribute was written on a view: with the original, the name and the value, or
    # DELETED
    write: Callable[[nn.Module, str, Any], None] = write_through
    # may refuse what is put in the place of a parameter, a buffer or a module
    check_entry: Callable[[str, Any], None] = lambda name, value: None
    is_fixed: bool = False  # whether what stands for a parameter stays the same

    def __post_init__(self) -> None:
        self._stand_ins: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._to_stand_in: dict[int, Callable[[], nn.Module]] = {}
        self.made: dict[nn.Module, nn.Module] = {}

    @property
    def views(self) -> dict[nn.Module, nn.Module]:
        """Views by their originals, stand-ins among them."""
        return self.made | dict(self._stand_ins.values())

    def add_stand_ins(self, stand_ins: Mapping[nn.Module, nn.Module]) -> None:
        self._stand_ins.update({id(module): (module, other) for module, other in stand_ins.items()})

    def add_later(
        self, modules: Iterable[nn.Module], make: Callable[[nn.Module], nn.Module]
    ) -> None:
        self._to_stand_in.update({id(module): partial(make, module) for module in modules})

    def view_of(self, module: nn.Module, *extra: type) -> nn.Module:
        """Return the view of a module; the same one every time, so shared modules stay shared.

        It has the `extra` classes before the original's.
        """
        key = id(module)
        if key in self._to_stand_in:
            self._stand_ins[key] = (module, self._to_stand_in.pop(key)())
        if key in self._stand_ins:
            return self._stand_ins[key][1]
        if key in self.classes.apart:
            return module
        if module not in self.made:
            view: Any = object.__new__(self.classes.class_for(type(module), *extra))
            self.made[module] = view
            self.fill(view, module)
        return self.made[module]

    def is_changed(self, module: nn.Module) -> bool:
        """Return whether the view of a module, or of one below, has entries of the user's code."""
        view: Any = self._stand_ins.get(id(module), (module, self.made.get(module)))[1]
        if not _is_view(view):
            return False
        own, made, others = view.__dict__, self.made, self._stand_ins
        children = module.__dict__["_modules"]
        if (
            own["_parameters"].is_changed
            or own["_buffers"].is_changed
            or own["_modules"].is_changed
        ):
            return True
        below = [m for m in children.values() if m in made or id(m) in others] if children else ()
        return any(map(self.is_changed, below))

    def rebound(self, value: Any, holder: nn.Module) -> Any:
        """Return a method of a module below `holder`, which keeps it, bound to that one's view."""
        if not isinstance(value, types.MethodType):
            return value
        owner = value.__self__
        if not isinstance(owner, nn.Module) or _is_view(owner):
            return value
        if owner not in self.made and all(owner is not module for module in holder.modules()):
            return value
        return types.MethodType(value.__func__, self.view_of(owner))

    def close(self) -> None:
        """Forget all views: they refer to their maker, and would live until the next collection."""
        others = [stand_in for _, stand_in in self._stand_ins.values()]
        for view in (*self.made.values(), *others):
            if isinstance(view, View):
                dict.clear(view.__dict__)
        self.made.clear()
        self._stand_ins.clear()
        self._to_stand_in.clear()
        self.classes.hand_on()
        del self.parameter, self.buffer, self.write, self.check_entry

    def fill(self, view: Any, module: nn.Module) -> None:
        """Give an empty object what makes it a view: tables and shared attributes."""
        base, state = type(module), module.__dict__
        own = state.copy()  # another microbatch may write meanwhile
        for name in own.keys() - _MODULE_INTERNALS:
            value = own.pop(name)
            if hasattr(base, name):
                own[name] = _rebound(value, module, view)
        own |= {
            "_view_of": module,
            "_write": self.write,
            "_classes": self.classes,
            "_maker": self,
            "_gone": set(),
            "_class_swapped": False,
            "_compiled_call_impl": None,  # of Module.compile(): it would run the original
        }
        if is_compiled_wrapper(module):  # so would what torch.compile(module) returns
            own["forward"] = uncompiled(view)
        own["_buffers"] = LazyTable(state["_buffers"], self.buffer)
        if self.is_fixed:
            own["_parameters"] = _placed(state["_parameters"], self.parameter)
            own["_modules"] = _placed(state["_modules"], self.view_of)
        else:
            own["_parameters"] = LazyTable(state["_parameters"], self.parameter)
            own["_modules"] = LazyTable(state["_modules"], self.view_of)
        object.__setattr__(view, "__dict__", Attributes(own))


def _placed(entries: Mapping[str, Any], place: Callable[[Any], Any]) -> dict[str, Any]:
    if not entries:
        return {}
    found = list(entries.items())  # another microbatch may write meanwhile
    return {name: None if entry is None else place(entry) for name, entry in found}
