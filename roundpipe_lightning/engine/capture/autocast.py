"""The state of autocast, and of context variables, which belong to a thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """The state of autocast for a type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Autocast:
        """Return the state of this thread; off on the meta device, which autocast lacks."""
        if device_type == "meta":
            return cls(device_type=device_type, enabled=False, dtype=torch.float32)
        return cls(
            device_type=device_type,
            enabled=torch.is_autocast_enabled(device_type),
            dtype=torch.get_autocast_dtype(device_type),
        )

    def restored(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False
        )


def autocast_now() -> list[Autocast]:
    accelerator = torch.accelerator.current_accelerator()
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [Autocast.now(kind) for kind in types]


def autocast_as(states: Iterable[Autocast]) -> AbstractContextManager[Any]:
    others = [state for state in states if state != Autocast.now(state.device_type)]
    if not others:
        return nullcontext()
    contexts = ExitStack()
    for state in others:
        contexts.enter_context(state.restored())
    return contexts


@contextmanager
def variables_as(context: Context | None) -> Iterator[None]:
    missing = object()
    tokens = [
        (variable, variable.set(value))
        for variable, value in (context or {}).items()
        if variable.get(missing) is not value
    ]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            variable.reset(token)


def without_autocast() -> AbstractContextManager[Any]:
    """Compute without autocast until the end of the context.

    A backward pass does: under autocast it would round the gradients of operations that the user's
    code has run outside it.
    """
    if not torch._C._is_any_autocast_enabled():  # noqa: SLF001 - the public way asks for each device
        return nullcontext()
    return autocast_as([replace(state, enabled=False) for state in autocast_now()])
