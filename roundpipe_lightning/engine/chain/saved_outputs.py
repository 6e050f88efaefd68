"""Selective recompute: what a block's forward pass keeps so that its recompute need not run again.

PyTorch's own selective checkpointing keeps them within one autograd graph; here forward and
recompute are two stages, on two workers perhaps, so the same idea, dispatch modes around the block,
is kept per call. docs/engine.md says what is kept, and how it travels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.transfer.boundary import BoundaryTensor, TransferEndpoint

_NUM_SAMPLED = 64  # at least so many elements of each tensor are compared, or all there are

_NEEDED_FOR_BACKWARD = "compute_log_sumexp"
"""An argument of attention operations that is False where PyTorch keeps no graph."""


class KeptOutputs:
    """Outputs of some operations of one call of a block, kept from its forward to its recompute.

    The operations have names such as `aten::_scaled_dot_product_flash_attention`.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._entries: list[_Entry] = []

    @property
    def num_bytes(self) -> int:
        outputs = (output for entry in self._entries for output in entry.outputs)
        return sum(
            output.nbytes if isinstance(output, Tensor) else output.num_bytes
            for output in outputs
            if isinstance(output, Tensor | BoundaryTensor)
        )

    @contextmanager
    def recorded(self, worker: TransferEndpoint, *, stays: bool = False) -> Iterator[None]:
        """Keep what the operations give until the context ends, and send it on its way then.

        It `stays` on the worker where the recompute is there, too, and there is room.
        """
        self._entries.clear()

        def record(func: Any, args: Any, kwargs: Any) -> Any:
            names = (argument.name for argument in func._schema.arguments)  # noqa: SLF001
            as_for_a_graph = [
                True if name == _NEEDED_FOR_BACKWARD else value
                for name, value in zip(names, args, strict=False)
            ]
            result = func(*as_for_a_graph, **kwargs)
            outputs = list(result) if isinstance(result, tuple) else [result]
            self._entries.append(_Entry(func, outputs, _versions(outputs)))
            return result

        with _Operations(self._names, record):
            yield
        here = worker.device.torch_device
        for entry in self._entries:
            if _versions(entry.outputs) != entry.versions:
                entry.outputs = []  # the block has written into one since
            entry.outputs = [  # what an operation returns on the host (seeds, offsets) stays there
                BoundaryTensor(output, worker, keeps=stays)
                if isinstance(output, Tensor) and output.device == here
                else output
                for output in entry.outputs
            ]

    @contextmanager
    def replayed(self, worker: TransferEndpoint) -> Iterator[None]:
        """Give what was kept, in the same order, instead of running the operations.

        Until the context ends; what differs is run.
        """
        outputs = (output for entry in self._entries for output in entry.outputs)
        boundaries = [output for output in outputs if isinstance(output, BoundaryTensor)]
        for boundary in boundaries:
            boundary.send_to(worker)
        left = iter(self._entries)

        def replay(func: Any, args: Any, kwargs: Any) -> Any:
            nonlocal left
            entry = next(left, None)
            if entry is None or entry.operation is not func:
                left = iter(())  # another way through the block: from here on all is run
            elif entry.outputs:
                outputs = [
                    o.on(worker) if isinstance(o, BoundaryTensor) else o for o in entry.outputs
                ]
                return outputs[0] if len(outputs) == 1 else tuple(outputs)
            return func(*args, **kwargs)

        with _Operations(self._names, replay):
            yield
        for boundary in boundaries:
            boundary.release()
        self._entries.clear()


class ChangedRecomputeWarning(UserWarning):
    """A block gave other values in its recompute than in its forward pass."""


class Sample:
    """Some elements of what one call of a block gave, on the host."""

    def __init__(self, tensors: Iterable[Tensor], device: Device) -> None:
        self._elements = [
            device.download(tensor.reshape(-1)[:: max(1, tensor.numel() // _NUM_SAMPLED)].clone())
            for tensor in map(Tensor.detach, tensors)
            if tensor.layout is torch.strided and tensor.numel()
        ]

    def is_close(self, other: Sample, *, dtypes: Iterable[torch.dtype]) -> bool:
        """Return whether rounding explains how this differs from the sample of another run.

        Args:
            dtypes: What the block may have computed in, beside the types of what it gave.
        """
        return all(
            torch.equal(mine, theirs) or _is_rounded(mine, theirs, (mine.dtype, *dtypes))
            for mine, theirs in zip(self._elements, other._elements, strict=True)
        )


def _is_rounded(mine: Tensor, theirs: Tensor, dtypes: Iterable[torch.dtype]) -> bool:
    floating = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    rounding = max((torch.finfo(dtype).eps for dtype in floating), default=0.0) ** 0.5
    limit = rounding * float(theirs.abs().nan_to_num().max())
    return torch.allclose(mine, theirs, rtol=0, atol=limit, equal_nan=True)


@dataclass
class _Entry:
    """Outputs of one run of an operation."""

    operation: Any
    # tensors, or boundaries when they are on their way, and numbers; none if forgotten
    outputs: list[Any]
    versions: list[int]  # how often each tensor had been written into


def _versions(outputs: Sequence[Any]) -> list[int]:
    return [output._version for output in outputs if isinstance(output, Tensor)]


class _Operations(TorchDispatchMode):
    """Has operations of which outputs are kept run by a function; others run as they are.

    Also one that draws random numbers: what comes after it draws the same then.
    """

    def __init__(self, names: frozenset[str], run: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._run = names, run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema  # noqa: SLF001
        if schema.name in self._names:
            given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
            if not given.get("dropout_p", 0.0):
                return self._run(func, args, kwargs)
        return func(*args, **kwargs)
