"""Contexts: what operations of the driver's thread depend on where user code calls a block."""

from __future__ import annotations

import contextvars
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class CallContext:
    """Modes and context variables of a thread where it calls a block. Worker threads enter it.

    Attributes:
        modes: Whether operations make a graph, and inference tensors; whether autocast keeps casts.
        autocast: The device types for which autocast is on, with its dtype.
        variables: The context variables: workers run in copies.
    """

    device_types: tuple[str, ...]
    modes: tuple[bool, bool, bool]
    autocast: tuple[tuple[str, torch.dtype], ...]
    variables: contextvars.Context

    @classmethod
    def current(cls, device_type: str, last: CallContext | None = None) -> CallContext:
        """Return the context of this thread: the last one if it is the same.

        Args:
            device_type: Type of the workers' devices. Autocast of the CPU is kept, too.
            last: The context of the call before.
        """
        types = ("cpu",) if device_type == "cpu" else ("cpu", device_type)
        modes = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_cache_enabled(),
        )
        autocast = tuple(
            [(t, torch.get_autocast_dtype(t)) for t in types if torch.is_autocast_enabled(t)]
        )
        variables = contextvars.copy_context()
        if (
            last is not None
            and (last.device_types, last.modes, last.autocast) == (types, modes, autocast)
            and _are_same(last.variables, variables)
        ):
            return last
        return cls(types, modes, autocast, variables)

    @property
    def grad_enabled(self) -> bool:
        return self.modes[0]

    @contextmanager
    def entered(self, *, grad: bool | None = None) -> Iterator[None]:
        """Give this thread the modes until the context ends; context variables: see `run`.

        Args:
            grad: Whether operations make a graph; None: as where user code called the block.
        """
        grad_enabled, inference, caches = self.modes
        with ExitStack() as stack:
            if inference != torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(inference))
            grad = grad_enabled if grad is None else grad
            if grad != torch.is_grad_enabled():
                stack.enter_context(torch.set_grad_enabled(grad))
            dtypes = dict(self.autocast)
            for kind in self.device_types:
                if kind in dtypes or torch.is_autocast_enabled(kind):
                    stack.enter_context(
                        torch.autocast(
                            kind,
                            dtype=dtypes.get(kind),
                            enabled=kind in dtypes,
                            cache_enabled=caches,
                        )
                    )
            yield

    def run(self, function: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run a function with the context variables: in a copy, as several workers do at a time."""
        return self.variables.copy().run(function, *args, **kwargs)


def _are_same(variables: contextvars.Context, others: contextvars.Context) -> bool:
    """Compare by identity: `==` may ask arrays, which have no truth value."""
    return (
        len(variables) == len(others)
        and all(map(operator.is_, variables, others))
        and all(map(operator.is_, variables.values(), others.values()))
    )
