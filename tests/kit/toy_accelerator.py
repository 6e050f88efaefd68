"""An accelerator written in Python: a PrivateUse1 backend that has nothing but its operations.

It has no allocator, so no figures of memory and no `record_stream`; its events cannot be waited for
and tell no time, it has no generators, and the host cannot wait for it. Its memory is the host's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class ToyTensor(torch.Tensor):
    """A tensor of the device `toy:0`."""

    raw: torch.Tensor
    library: ClassVar[torch.library.Library]

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> ToyTensor:
        made: ToyTensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), dtype=raw.dtype, device=torch.device("toy", 0)
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return run(func, *args, **(kwargs or {}))


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the values; a result is on the host where it is asked to be there."""
    known = {}

    def raw(value: Any) -> Any:
        if isinstance(value, ToyTensor):
            known[id(value.raw)] = value
            return value.raw
        is_here = isinstance(value, torch.device) and value.type == "toy"
        return torch.device("cpu") if is_here else value

    to_host = torch.device(kwargs.get("device") or "toy").type == "cpu"
    arguments = tree_map(raw, (args, kwargs))
    found = func(*arguments[0], **arguments[1])

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or to_host:
            return value
        return known[id(value)] if id(value) in known else ToyTensor(value)

    if func is torch.ops.aten.copy_.default:
        return args[0]
    return tree_map(placed, found)


def install() -> None:
    """Make it the accelerator of this process, for good."""
    _setup_privateuseone_for_python_backend("toy")
    ToyTensor.library = torch.library.Library("_", "IMPL", "PrivateUse1")
    ToyTensor.library.fallback(run)
