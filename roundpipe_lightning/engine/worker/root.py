"""The root: where user code computes, between blocks and of what they give.

```
host      embedding, norm, head ── upload ──▶ their values on the root, in the same parameters
          gradients ◀── download ── .grad     when the step has ended
```

On an accelerator the root has a compute queue of its own on the first worker's device: else one
`.item()` in user code would wait for all that this worker has queued.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.driver.snapshot import Snapshot
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.gradient_reduce import add_to_grad
from roundpipe_lightning.engine.transfer.parts import HOST, Place
from roundpipe_lightning.engine.transfer.worker_transfers import WaitedFor, WorkerTransfers
from roundpipe_lightning.engine.worker.leaves import BufferCopies, HostLeaves, leaf_like
from roundpipe_lightning.engine.worker.replica import Replica


class Root(ABC):
    """Where user code computes. Thread: the driver's."""

    place: Place

    @abstractmethod
    def entered(self) -> ExitStack:
        """Let user code of this thread compute here until the context ends."""

    def bring(self, block: nn.Module) -> None:
        """Let a block be run here by user code, until the context of `entered` ends."""

    @abstractmethod
    def replica_of(self, snapshot: Snapshot) -> Replica:
        """Return a replica of a block that runs here once, to be tried."""


class HostRoot(Root):
    """User code computes where the model lives."""

    place = HOST

    def __init__(self) -> None:
        self._leaves = HostLeaves()

    def entered(self) -> ExitStack:
        return ExitStack()

    def replica_of(self, snapshot: Snapshot) -> Replica:
        return self._leaves.new_replica(snapshot, Tensor.clone)


class DeviceRoot(Root):
    """User code computes on a device.

    Args:
        device: With a compute queue of its own, if it can have one.
        modules: Those outside the blocks.
    """

    def __init__(
        self,
        device: Device,
        *,
        transfers: WorkerTransfers,
        store: HostStore,
        modules: Iterable[nn.Module],
    ) -> None:
        self._modules = tuple(modules)
        self._buffers = BufferCopies(device)
        self.place = Place(device, transfers)
        self._device, self._transfers, self._store = device, transfers, store
        self._tried: tuple[Snapshot, dict[nn.Parameter, Tensor]] | None = None

    def entered(self) -> ExitStack:
        self._contexts = contexts = ExitStack()
        try:
            contexts.enter_context(self._device.activate())
            contexts.enter_context(self._device.thread_context())
            contexts.callback(setattr, self, "_tried", None)
            for parameter in self._store.outside_blocks:
                contexts.enter_context(self._placed(parameter))
            contexts.enter_context(self._placed_buffers(self._modules))
        except BaseException:
            contexts.close()
            raise
        return contexts

    def bring(self, block: nn.Module) -> None:
        for parameter in block.parameters():
            if parameter not in self._store.at_home:
                self._contexts.enter_context(self._placed(parameter))
        away = [m for m in block.modules() if not self._has_buffers_of(m)]
        self._contexts.enter_context(self._placed_buffers(away))

    def _has_buffers_of(self, module: nn.Module) -> bool:
        here = self._device.torch_device
        return all(b is None or b.device == here for b in vars(module)["_buffers"].values())

    @contextmanager
    def _placed(self, parameter: nn.Parameter) -> Iterator[None]:
        """Let a parameter have its values here until the context ends.

        Its identity, attributes and hooks stay. What user code writes into it, and its gradients,
        come home.
        """
        values = self._transfers.weights.outside_values(
            parameter, wait=lambda event: self._transfers.await_event(event, WaitedFor.WEIGHTS)
        )
        before, parameter.grad = parameter.grad, None
        home = self._device.put(parameter, values)
        self._store.at_home[parameter] = home
        self.place.versions[parameter] = parameter._version
        try:
            yield
        finally:
            gradient: Any = parameter.grad
            parameter.grad = None
            was_written = self.place.was_written(parameter)
            written = self._device.download(parameter) if was_written else None
            del self.place.versions[parameter]
            del self._store.at_home[parameter]
            self._device.put_back(parameter, home)
            parameter.grad = before
            if written is not None:
                with torch.no_grad():
                    parameter.copy_(written)
            if gradient is not None:
                add_to_grad({parameter: self._device.download(gradient)}, share=1)

    @contextmanager
    def _placed_buffers(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Let buffers of modules be here until the context ends."""
        tables = [vars(module)["_buffers"] for module in modules]
        before = [dict(table) for table in tables]
        placed = {}
        for table in tables:
            for name, buffer in table.items():
                if buffer is not None:
                    table[name] = here = self._buffers.of(buffer)
                    placed[here] = buffer, here._version
        try:
            yield
        finally:
            for table, known in zip(tables, before, strict=True):
                for name, present in table.items():
                    if present in placed:
                        table[name], version = placed[present]
                        if present._version != version:
                            self._buffers.take_home(table[name], present)
                    elif present is not known.get(name):  # user code has assigned it
                        table[name] = self._device.download(present)

    def replica_of(self, snapshot: Snapshot) -> Replica:
        if self._tried is None or self._tried[0] is not snapshot:
            uploaded = self._store.upload_block(snapshot.block, self._device)
            self._tried = snapshot, uploaded
        values = self._tried[1]
        return Replica(
            snapshot,
            parameter=lambda p: leaf_like(p, values[p], requires_grad=snapshot.parameters[p]),
            buffer=lambda buffer: self._device.upload(buffer.detach()),
        )
