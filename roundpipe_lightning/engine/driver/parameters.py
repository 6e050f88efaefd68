"""Parameters that calls compute with: user code's writes wait for the calls posted before.

```
user code   t = teacher(x) ── posted ──▶ call 0 .. 3        p.data.lerp_(q, 0.1)
workers                                  run with the old p          ▲ waits until these have run
```

From its first call in a step to the step's end a parameter is of a subclass of its own class. The
methods that write in place wait, and so do `data` and `detach()`, whose results share its memory.
Everything else is the class's own, at its own speed. A write on another way, such as
`torch._foreach_mul_`, shows in the parameter's version, and is refused by the call that it met.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_IN_PLACE = [
    name
    for name in dir(Tensor)
    if (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")
    or (name.startswith("__i") and name.endswith("__") and callable(getattr(torch.Tensor, name)))
]
_WAITING = frozenset(_IN_PLACE).difference(
    ("__init__", "__init_subclass__", "__index__", "__int__", "__invert__")
) | {"__setitem__", "detach"}


class WatchedParameter:
    """Base of the classes that parameters have while calls may read them.

    Attributes:
        original_class: The class that the parameter has at other times.
    """

    original_class: type[nn.Parameter]


class ParameterWatch:
    """Lets the writes of user code wait. Thread: the Trainer's; others pass by.

    Args:
        await_calls: Waits until every posted call has run.

    Attributes:
        generation: Grows whenever parameters may have got other memory.
    """

    def __init__(self, await_calls: Callable[[], None]) -> None:
        self._await_calls = await_calls
        self.generation = 0
        self._thread = threading.get_ident()
        self._classes: dict[type, type] = {}
        self._watched: list[tuple[nn.Parameter, type]] = []

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        self._thread = threading.get_ident()
        for parameter in parameters:
            kind = type(parameter)
            watched = self._classes.get(kind)
            if watched is None:
                if issubclass(kind, WatchedParameter) or not issubclass(kind, nn.Parameter):
                    continue  # an emulated device has a class of its own for what is there
                watched = self._classes[kind] = self._class_for(kind)
            parameter.__class__ = watched
            self._watched.append((parameter, kind))

    def release(self) -> None:
        """Give all parameters their own classes again."""
        for parameter, kind in self._watched:
            if isinstance(parameter, WatchedParameter):
                parameter.__class__ = kind
        self._watched.clear()
        self.generation += 1  # user code may do as it likes until the next step

    def _class_for(self, kind: type) -> type:
        def wait() -> None:
            if threading.get_ident() == self._thread:
                self._await_calls()

        def waiting(method: Callable[..., Any]) -> Callable[..., Any]:
            def write(parameter: Tensor, *args: Any, **kwargs: Any) -> Any:
                wait()
                return method(parameter, *args, **kwargs)

            return write

        def data(parameter: Tensor) -> Tensor:
            wait()
            return values.__get__(parameter)  # type: ignore[no-any-return]

        def set_data(parameter: Tensor, new: Tensor) -> None:
            wait()
            self.generation += 1
            values.__set__(parameter, new)

        def copy(parameter: Any, memo: dict[int, Any]) -> Any:
            result = kind.__deepcopy__(parameter, memo)  # type: ignore[attr-defined]
            result.__class__ = kind
            return result

        values: Any = kind.data  # type: ignore[attr-defined]
        methods: dict[str, Any] = {
            name: waiting(getattr(kind, name)) for name in _WAITING if hasattr(kind, name)
        }
        attributes = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__torch_function__": vars(nn.Parameter)["__torch_function__"],
            "original_class": kind,
            "data": property(data, set_data),
            "__deepcopy__": copy,
        }
        if kind.__torch_function__ is not nn.Parameter.__torch_function__:  # type: ignore[attr-defined]
            del attributes["__torch_function__"]
        return type(kind)(kind.__name__, (WatchedParameter, kind), methods | attributes)


def class_of(parameter: nn.Parameter) -> type[nn.Parameter]:
    """Return the class that a parameter has while no step runs."""
    kind = type(parameter)
    return kind.original_class if issubclass(kind, WatchedParameter) else kind
