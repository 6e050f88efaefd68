"""Checks that events order every two accesses to memory of which one writes.

Work runs on *lines*: the queues of every device, and the host, whose threads order their own doings
by locks and gates. A line's clock says how much of every other line has ended before its next
piece of work begins (a vector clock):

```
compute of 0   c1 c2 ● c3            ●: mark_event; its stamp is the clock {compute of 0: 2}
upload of 0          └──▶ u1         copy(after=[●]): u1 comes after c1 and c2, not after c3
host                        ○ h1     event.wait(): h1 comes after u1 and all that u1 came after
```

A piece of work also comes after what the host knew to have ended when it launched it. Memory is a
storage and a range of bytes in it; for each the checker keeps the accesses that the next one could
collide with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from roundpipe_lightning.emulation.placement import Operand, operands_of
from roundpipe_lightning.emulation.tagged_tensor import TaggedTensor, raw_of, tag_of

HOST = "the host"  # the line of all host threads

Stamp: TypeAlias = Mapping[str, int]
"""Vector clock: for every line the number of its pieces of work that had ended."""

_FORGET_EVERY = 512  # new memories, after which those that were freed are forgotten


class ProtocolError(RuntimeError):
    """Two accesses to the same memory, one of them a write, that no event puts in an order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """One use of the bytes from `start` to `stop`, by the piece of work `tick` of a line."""

    line: str
    tick: int
    start: int
    stop: int
    writes: bool
    what: str

    def __str__(self) -> str:
        return f"{self.what} ({self.line}, {'writes' if self.writes else 'reads'})"


@dataclass(eq=False, slots=True)
class _Memory:
    """A storage and the accesses to it that a later one could collide with."""

    reference: StorageWeakRef
    name: str
    line: str | None = None  # of the device that computes in it
    accesses: list[Access] = field(default_factory=list)


class ProtocolChecker:
    """Watches the accesses of one engine's devices. Its methods may be called by any thread."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._clocks: dict[str, dict[str, int]] = {HOST: {}}
        self._memories: dict[int, _Memory] = {}
        self._num_new = 0
        self.num_accesses = 0

    def begin(self, line: str, after: Sequence[Stamp] = ()) -> None:
        """Begin a line's next piece of work, now launched by the host, after what it waits for."""
        with self._mutex:
            clock = self._clock(line)
            if line != HOST:
                _merge(clock, self._clocks[HOST])
            for stamp in after:
                _merge(clock, stamp)
            clock[line] = clock.get(line, 0) + 1

    def wait(self, line: str, stamp: Stamp) -> None:
        with self._mutex:
            _merge(self._clock(line), stamp)

    def stamp(self, line: str) -> Stamp:
        with self._mutex:
            return dict(self._clock(line))

    def _clock(self, line: str) -> dict[str, int]:
        return self._clocks.setdefault(line, {})

    def name(self, tensor: Tensor, name: str) -> None:
        with self._mutex:
            self._memory(tensor).name = name

    def computes_in(self, tensor: Tensor, line: str) -> None:
        """Declare a tensor to be in the memory of the device whose compute queue is this line."""
        if tensor.layout is torch.strided:  # others consist of such
            with self._mutex:
                self._memory(tensor).line = line

    def line_of(self, tensor: Tensor) -> str:
        """Return the compute queue of the device that a tensor is on, else the host."""
        if tensor.layout is not torch.strided:
            return HOST
        with self._mutex:
            memory = self._memories.get(_key(tensor))
            known = memory is not None and not memory.reference.expired()
            return HOST if memory is None or not known or memory.line is None else memory.line

    def access(self, tensor: Tensor, *, line: str, writes: bool, what: str) -> None:
        """Note that a line's work uses memory; ProtocolError: in no order with an earlier one."""
        start, stop = _span(tensor)
        if start == stop:
            return
        with self._mutex:
            self.num_accesses += 1
            clock, memory = self._clock(line), self._memory(tensor)
            tick = clock.get(line, 0)
            new = Access(line=line, tick=tick, start=start, stop=stop, writes=writes, what=what)
            for old in memory.accesses:
                collide = (old.writes or writes) and old.start < stop and start < old.stop
                if collide and clock.get(old.line, 0) < old.tick:
                    raise ProtocolError(_message(memory.name, old, new))
            # What comes after the new access comes after those that it replaces, too.
            memory.accesses = [
                old
                for old in memory.accesses
                if old.start < start
                or stop < old.stop
                or not (writes or (line == old.line and not old.writes))
            ]
            memory.accesses.append(new)

    def _memory(self, tensor: Tensor) -> _Memory:
        key = _key(tensor)
        memory = self._memories.get(key)
        if memory is None or memory.reference.expired():
            storage = tensor.untyped_storage()
            name = f"memory of {storage.nbytes()} bytes"
            memory = self._memories[key] = _Memory(StorageWeakRef(storage), name)
            self._num_new += 1
            if self._num_new % _FORGET_EVERY == 0:
                for freed in [k for k, m in self._memories.items() if m.reference.expired()]:
                    del self._memories[freed]
        return memory


def _merge(clock: dict[str, int], stamp: Stamp) -> None:
    for line, tick in stamp.items():
        if clock.get(line, 0) < tick:
            clock[line] = tick


def _key(tensor: Tensor) -> int:
    # Storages may share memory, as a parameter's and its flat buffer's do.
    return tensor.untyped_storage().data_ptr()


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a tensor lies in, gaps included."""
    is_plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    if not is_plain or tensor.layout is not torch.strided or tensor.numel() == 0:
        return 0, 0  # nothing that can be checked
    last = sum(int(n - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    size, offset = tensor.element_size(), int(tensor.storage_offset())
    return offset * size, (offset + last + 1) * size


def _message(name: str, old: Access, new: Access) -> str:
    start, stop = max(old.start, new.start), min(old.stop, new.stop)
    return (
        f"Bytes {start} to {stop} of {name}: {new} may run before {old} has ended. No event that "
        f"{old.line} sets after it is waited for by {new.line}."
    )


def _has_values(kind: Any) -> bool:
    """Whether tensors of a class are memory, and not stand-ins that compute something else."""
    own = kind.__torch_dispatch__
    return own is Tensor.__torch_dispatch__ or issubclass(kind, TaggedTensor)


class WatchedOperations(TorchDispatchMode):
    """Tells the checker of every operation of a thread.

    Args:
        lines: Compute queues by the name of their device.
        is_unnamed: Returns whether the calling thread has made no device its current one.
    """

    def __init__(
        self, checker: ProtocolChecker, lines: dict[str, str], *, is_unnamed: Callable[[], bool]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_unnamed = is_unnamed
        self._checker = checker
        self._lines = lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func.is_view or not all(map(_has_values, types)):
            return func(*args, **kwargs)
        operands = list(operands_of(func, args, kwargs, place_of=tag_of))
        line = self._line(operands)
        self._checker.begin(line)
        what = f"{func} in {threading.current_thread().name}"
        for operand in operands:
            self._checker.access(
                raw_of(operand.tensor), line=line, writes=operand.written, what=what
            )
        result = func(*args, **kwargs)
        read = {id(operand.tensor) for operand in operands}
        for made in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(made, Tensor) and id(made) not in read:
                if (place := tag_of(made)) is not None:
                    self._checker.computes_in(raw_of(made), self._lines[place])
                self._checker.access(raw_of(made), line=line, writes=True, what=what)
        return result

    def _line(self, operands: Sequence[Operand]) -> str:
        """Return the place of an operation: the device of its tensors, else the host.

        The host waits for values behind a tag that go to it, or to another device.
        """
        for operand in operands:
            if operand.place is not None:
                line = self._lines[operand.place]
                if self._is_unnamed() and line != next(iter(self._lines.values())):
                    raise ProtocolError(
                        f"An operation on {operand.place} is launched in "
                        f"{threading.current_thread().name}, which has named no device: its "
                        "current one is the first. Use `Device.activate`."
                    )
                return line
        for operand in operands:
            line = self._checker.line_of(operand.tensor)
            if line != HOST:
                self._checker.wait(HOST, self._checker.stamp(line))
        return HOST
