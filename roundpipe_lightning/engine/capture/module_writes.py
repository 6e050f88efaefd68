"""What one microbatch's user code writes into the attributes of modules.

Adapters switched off for a reference pass, `eval()` for a while, a counter: such writes are the
microbatch's own until the step ends. Other microbatches run at the same time and must not see
them; the microbatch's blocks must, on whichever worker they run, and in their recompute as they
were in the forward pass. Where the code runs once, a module outside the blocks has them at once.

```
user code      off ── pass 1 ── on ── pass 2 ──▶ loss
its blocks          [off] 0 1 2      [on] 0 1 2        recompute [on] 2 1 0, [off] 2 1 0
the module     as before the step ─────────────────────────────────────────▶ told, in order
```
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.placeholder import writes_first
from roundpipe_lightning.engine.capture.torch_functions import version_of
from roundpipe_lightning.engine.capture.view import DELETED, HOOKS, write_through
from roundpipe_lightning.errors import ConfigurationError, StepModeError

ModuleWrites: TypeAlias = list[tuple[nn.Module, dict[str, Any]]]
"""Originals with the attributes that were written, `DELETED` for one that was deleted."""


class Writes:
    """The attributes that user code has written, by the original module.

    Attributes:
        were_any: Whether the user's code or a block has written attributes or buffers.
    """

    def __init__(self, *, are_refused: bool = False) -> None:
        self._are_refused = are_refused
        # By identity: the hash of a metric changes with its state. The original is kept alive.
        self._written: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
        self.were_any = False

    def note(self, module: nn.Module, name: str, value: Any) -> None:
        self.mark()
        self._written.setdefault(id(module), (module, {}))[1][name] = value

    def renew(self, module: nn.Module, name: str, value: Any) -> None:
        """Hear that a block has written, and the original knows: it is the latest value."""
        self.mark()
        if id(module) in self._written and name in self._written[id(module)][1]:
            self.note(module, name, value)

    def mark(self) -> None:
        """Hear that something was written; StepModeError where that is refused."""
        self.were_any = True
        if self._are_refused:
            raise StepModeError("the step writes attributes of modules")

    def within(self, block: nn.Module) -> ModuleWrites:
        if not self._written:
            return []
        found = (self._written.get(id(module)) for module in block.modules())
        return [(entry[0], dict(entry[1])) for entry in found if entry is not None]

    def tell(self) -> str:
        """Write them into the originals; return the name of one that has changed, if any has."""
        written, self._written = self._written, {}
        changed = ""
        for module, attributes in written.values():
            for name, value in attributes.items():
                known = vars(module)  # asking the module could call code of its class
                before = known[name] if name in known else getattr(type(module), name, DELETED)
                is_new_flag = before is DELETED and isinstance(value, bool)
                if not (name in HOOKS or before is value or is_new_flag):
                    changed = f"{type(module).__name__}.{name}"
                write_through(module, name, value)
        return changed


_GET_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: Functions whose names end like those of functions that write. Parametrizing sets to itself.
_WITHOUT_VALUES = frozenset("detach_ requires_grad_ set_ share_memory_".split())


class ParameterWrites:
    """What code does to parameters, until it is looked at.

    Args:
        is_watched: Whether writes in place are looked for, too, and not only other memory.
        compares: Whether one that changes nothing (a clamp far away, as Gemma 3n's) is none.
        leaf: Returns what stands for a parameter. Called before that is written into, or its memory
            is handed out.
    """

    def __init__(
        self,
        *,
        is_watched: bool,
        compares: bool = False,
        leaf: Callable[[nn.Parameter], nn.Parameter] = lambda p: p,
    ) -> None:
        self.is_watched = is_watched
        self._compares = compares
        self._leaf = leaf
        self._written: dict[nn.Parameter, Tensor | None] = {}  # with values before, where known
        self._given: list[tuple[nn.Parameter, Tensor, int]] = []  # with their versions
        self._replaced: list[tuple[nn.Parameter, Tensor]] = []  # with their memory before

    def note(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Look at a function before it is called; return what it gives, if it was called here."""
        if self.is_watched and _writes(getattr(func, "__name__", "")):
            first = next(iter((*args, *kwargs.values())), ())  # those of `nn.init` come by name
            for x in first if isinstance(first, (list, tuple)) else (first,):
                leaf = self._leaf(x) if isinstance(x, nn.Parameter) else self._owner_of(x)
                if leaf is not None and leaf not in self._written:
                    self._written[leaf] = leaf.detach().clone() if self._compares else None
            return None
        if type(func) is not types.MethodWrapperType or not isinstance(args[0], nn.Parameter):
            return None
        if func == _SET_DATA:
            self._leaf(args[0])
            if all(known is not args[0] for known, _ in self._replaced):
                self._replaced.append((args[0], args[0].data))
        elif func == _GET_DATA and self.is_watched:
            leaf = self._leaf(args[0])
            values: Tensor = func(leaf)
            self._given.append((leaf, values, version_of(values)))
            return values
        return None

    def _owner_of(self, values: Any) -> nn.Parameter | None:
        return next((leaf for leaf, given, _ in self._given if given is values), None)

    @property
    def may_be_any(self) -> bool:
        return bool(self._written or self._given or self._replaced)

    def take_written(self, *, keeps: bool = False) -> Sequence[nn.Parameter]:
        """Return what was written to or had other memory in the end, each once.

        Other memory is taken back; its values are kept if it `keeps` them.
        """
        if not self.may_be_any:
            return ()
        noted, self._written = self._written, {}
        for number, (parameter, values, version) in enumerate(self._given):
            if not values.is_inference() and values._version != version:
                noted.setdefault(parameter, None)
                self._given[number] = (parameter, values, values._version)
        written = [p for p, old in noted.items() if old is None or not torch.equal(p, old)]
        for parameter, before in self._replaced:
            if parameter.data_ptr() != before.data_ptr():
                values, parameter.data = parameter.data, before  # where a later block finds it
                if keeps:
                    parameter.copy_(values)  # a graph that has it raises: it computed with others
                written.append(parameter)
        self._replaced = []
        return list(dict.fromkeys(written))


def _writes(name: str) -> bool:
    return name not in _WITHOUT_VALUES and writes_first(name)


def refuse_write(name: str) -> NoReturn:
    """Refuse a write into a parameter with a ConfigurationError."""
    raise ConfigurationError(
        f"A step writes into the parameter {name!r}, in a block, for every microbatch or beside "
        "the optimizer: into a copy of it, or several times. Write outside the blocks with "
        "RoundPipeStrategy(microbatching='blocks', update='exact'), which runs the step once; or "
        "when no step runs, in a callback or on_train_batch_end (moving averages: "
        "lightning.pytorch.callbacks.WeightAveraging); or make what a step changes a buffer. A "
        "block that writes in its first call alone (S4, ActNorm) may be called in on_fit_start."
    )
