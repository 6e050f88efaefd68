"""Selective recompute: what a block's forward pass keeps so that its recompute need not run again.

```
FORWARD    q k v ── attention ──▶ out, log-sum-exp ── kept, to the host ──┐
BACKWARD   q k v ──────────────── the same tensors ◀── back ──────────────┘   the graph is the same
```

They travel like boundaries (`transfer/boundary.py`): home while the next block computes, back from
the beginning of the block's recompute on, and not at all where they can stay on the device.

The operations are named by the plan's policy (`schedule/recompute.py`). PyTorch's own selective
checkpointing keeps them within one autograd graph; here forward and recompute are two stages, on
two workers perhaps, so the same idea, dispatch modes around the block, is kept per call.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_lightning.engine.transfer.boundary import BoundaryTensor, TransferEndpoint
from roundpipe_lightning.engine.transfer.pinned_pool import PinnedPool

_NEEDED_FOR_BACKWARD = "compute_log_sumexp"
"""An argument of attention operations that is False where PyTorch keeps no graph."""


class KeptOutputs:
    """What some operations of one call of a block have given, from its forward to its recompute.

    Args:
        names: Names of the operations, such as `aten::_scaled_dot_product_flash_attention`.
        pool: Memory on the host, of the microbatch; None where no worker needs any.
    """

    def __init__(self, names: Collection[str], *, pool: PinnedPool | None = None) -> None:
        self._names = frozenset(names)
        self._pool = pool
        self._entries: list[_Entry] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept."""
        return sum(entry.num_bytes for entry in self._entries)

    @contextmanager
    def recorded(self, worker: TransferEndpoint, *, stays: bool = False) -> Iterator[None]:
        """Keep what the operations give until the context ends, and send it on its way then.

        Args:
            worker: Where the block runs.
            stays: Whether it may stay there: the recompute is there, too, and there is room.
        """
        self._entries.clear()
        with _Recorder(self._names, self._entries):
            yield
        for entry in self._entries:
            entry.send_off(worker, pool=self._pool, stays=stays)

    @contextmanager
    def replayed(self, worker: TransferEndpoint) -> Iterator[None]:
        """Give what was kept instead of running the operations, until the context ends.

        Args:
            worker: Where the block runs.
        """
        for entry in self._entries:
            entry.send_to(worker)
        with _Replayer(self._names, self._entries, worker):
            yield
        self._entries.clear()


class _Entry:
    """What one run of an operation has given: tensors and numbers.

    Args:
        operation: The operation.
        outputs: What it has given.
    """

    def __init__(self, operation: Any, outputs: Sequence[Any]) -> None:
        self.operation = operation
        self._outputs = list(outputs)
        self._versions = [t._version for t in self.tensors]

    @property
    def tensors(self) -> list[Tensor]:
        return [output for output in self._outputs if isinstance(output, Tensor)]

    @property
    def boundaries(self) -> list[BoundaryTensor]:
        return [output for output in self._outputs if isinstance(output, BoundaryTensor)]

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors) + sum(p.num_bytes for p in self.boundaries)

    def send_off(self, worker: TransferEndpoint, *, pool: PinnedPool | None, stays: bool) -> None:
        """Let the tensors travel; forget them if the block has written into one since.

        What an operation returns on the host (seeds, offsets) stays there.
        """
        if [t._version for t in self.tensors] != self._versions:
            self._outputs.clear()
        here = worker.device.torch_device
        self._outputs = [
            BoundaryTensor(output, worker, pool=pool, keeps=stays)
            if isinstance(output, Tensor) and output.device == here
            else output
            for output in self._outputs
        ]

    def send_to(self, worker: TransferEndpoint) -> None:
        """Begin to bring the tensors to where they will be asked for."""
        for boundary in self.boundaries:
            boundary.send_to(worker)

    def on(self, worker: TransferEndpoint) -> list[Any]:
        """Return the outputs on a worker; nothing if they were forgotten."""
        return [
            output.on(worker) if isinstance(output, BoundaryTensor) else output
            for output in self._outputs
        ]


class _Recorder(TorchDispatchMode):
    """Runs the named operations as a graph would need them, and notes what they give."""

    def __init__(self, names: frozenset[str], entries: list[_Entry]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._entries = entries

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_kept(func, self._names, args, kwargs):
            return func(*args, **kwargs)
        outputs = func(*_for_a_graph(func, args), **kwargs)
        several = isinstance(outputs, tuple)
        self._entries.append(_Entry(func, outputs if several else (outputs,)))
        return outputs


class _Replayer(TorchDispatchMode):
    """Gives what was noted, in the same order; what differs is run."""

    def __init__(
        self, names: frozenset[str], entries: Sequence[_Entry], worker: TransferEndpoint
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._left = iter(entries)
        self._worker = worker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_kept(func, self._names, args, kwargs):
            return func(*args, **kwargs)
        entry = next(self._left, None)
        if entry is None or entry.operation is not func:
            self._left = iter(())  # another way through the block: from here on all is run
            return func(*args, **kwargs)
        outputs = entry.on(self._worker)
        if not outputs:
            return func(*args, **kwargs)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _is_kept(func: Any, names: frozenset[str], args: Any, kwargs: Any) -> bool:
    """Whether an operation is one of the names, and draws no random numbers.

    One that does would have to draw them again, so that what comes after it draws the same.
    """
    schema = func._schema  # noqa: SLF001
    if schema.name not in names:
        return False
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
    return not given.get("dropout_p", 0.0)


def _for_a_graph(func: Any, args: Sequence[Any]) -> list[Any]:
    """Return an operation's arguments as they are where a graph is kept."""
    arguments = func._schema.arguments  # noqa: SLF001
    return [
        True if argument.name == _NEEDED_FOR_BACKWARD else value
        for argument, value in itertools.zip_longest(arguments[: len(args)], args)
    ]
