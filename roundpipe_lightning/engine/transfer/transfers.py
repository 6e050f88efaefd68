"""The transfers of all workers, from the beginning of a step to its end.

```
begin ── uploads of first visits ── microbatches run ── finish: what is under way lands ── end
                                        │ a copy fails, or user code does
                                        └▶ abort: waiters are released ── what is under way lands
```
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.store.block_layout import Layouts
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.outside_parameters import OutsideUses
from roundpipe_lightning.engine.transfer.pinned_pool import PinnedPool, PinnedPools
from roundpipe_lightning.engine.transfer.worker_transfers import (
    WorkerRuns,
    WorkerTraffic,
    WorkerTransfers,
)
from roundpipe_lightning.errors import WatchdogError

_POLL_SECONDS = 0.2  # the Trainer's thread answers to Ctrl-C so often


class Transfers:
    """Everything that moves between the host and the workers.

    Args:
        store: The parameters.
        devices: One per worker.
        names: All blocks, each with what it is called.

    Attributes:
        transfers: One per worker; None for those that compute in host memory.
    """

    def __init__(
        self, store: HostStore, *, devices: Sequence[Device], names: Mapping[nn.Module, str]
    ) -> None:
        self._blocks = tuple(names)
        self._store = store
        self._layouts = Layouts(store)
        moving = [device for device in devices if not device.shares_host_memory]
        self._pools = PinnedPools(moving[0]) if moving else None
        self._uses = OutsideUses()
        self._error: tuple[BaseException, str] | None = None
        self._serving = store.serving  # that of the last step
        self._last: Sequence[WorkerRuns] = ()
        self._tell_step: Callable[[], None] = _nobody
        self.transfers: tuple[WorkerTransfers | None, ...] = tuple(
            None
            if device.shares_host_memory
            else WorkerTransfers(
                device,
                worker=f"worker {index} ({device.name})",
                layouts=self._layouts,
                store=store,
                uses=self._uses,
                names=names,
                on_failure=self._failed,
            )
            for index, device in enumerate(devices)
        )
        self._moving = tuple(one for one in self.transfers if one is not None)

    def begin(
        self,
        steps: Sequence[WorkerRuns],
        *,
        is_planned: bool = True,
        on_failure: Callable[[], None] = lambda: None,
        making_room: Callable[[int], AbstractContextManager[None]] = lambda worker: nullcontext(),
    ) -> None:
        """Begin a step's transfers.

        Args:
            steps: What each worker runs.
            is_planned: Whether in that order.
            on_failure: Called, in any thread, when a copy has failed.
            making_room: Entered while memory for weights is made on a worker, by its index.
        """
        self._error, self._tell_step = None, on_failure
        self._serving, self._last = self._store.serving, steps
        if not self._moving:
            return
        with torch.inference_mode(mode=False):  # what is made here outlives an evaluation
            self._store.renew_copies()
            self._layouts.renew(self._blocks)
            if is_planned:
                self._uses.begin_step()
            for index, (step, transfers) in enumerate(zip(steps, self.transfers, strict=True)):
                if transfers is not None:
                    with making_room(index):
                        transfers.begin_step(step, is_planned=is_planned)
            # No worker's later visit goes before another's first one.
            for transfers in self._moving:
                transfers.begin_ahead()

    def can_follow(self, steps: Sequence[WorkerRuns]) -> bool:
        """Say whether a step can begin while one runs: memory and layouts stay as they are.

        Args:
            steps: What each worker runs.
        """
        pairs, copies = zip(steps, self.transfers, strict=True), self._store.copies
        changes = self._serving is not self._store.serving
        have_turns = all(step.visits for step in (*self._last, *steps))  # else none ends there
        if changes and not (have_turns and all(one.weights.can_change for one in self._moving)):
            return False
        return not self._moving or (
            (copies is None or copies.are_cast)
            and self._layouts.are_renewed(self._blocks)
            and all(one is None or one.can_follow(step) for step, one in pairs)
        )

    def begin_overlapped(self, steps: Sequence[WorkerRuns]) -> None:
        """Begin the transfers of a step that can follow the one that runs."""
        self._serving, self._last = self._store.serving, steps
        self._uses.follow_step()
        for step, transfers in zip(steps, self.transfers, strict=True):
            if transfers is not None:
                transfers.follow_step(step)

    # ------------------------------------------------------------------------------------- pools

    def pools_can_follow(self, numbers: Sequence[int]) -> bool:
        """Say whether there are pools for a step and for the one that is under way.

        Args:
            numbers: Of the pools, by microbatch.
        """
        return self._pools is None or self._pools.can_follow(numbers)

    def pools(self, numbers: Sequence[int]) -> tuple[PinnedPool, ...] | None:
        """Return the pools of a step that begins, by microbatch; None if no worker needs any."""
        return None if self._pools is None else self._pools.begin_step(numbers)

    def reserve_second_set(self) -> None:
        """Have pools for two steps as soon as none is under way."""
        if self._pools is not None:
            self._pools.want_two()

    def end_first(self) -> None:
        """Hear that the step that has begun first has ended, and another goes on."""
        if self._pools is not None:
            self._pools.end_first()
        for transfers in self._moving:
            transfers.outside.end_first()

    @property
    def has_failed(self) -> bool:
        """Whether a copy has failed."""
        return self._error is not None

    def _failed(self, error: BaseException, place: str) -> None:
        if self._error is None:
            self._error = (error, place)
        self.abort()
        self._tell_step()

    def take_error(self) -> tuple[BaseException, str] | None:
        """Return what has made a copy fail, and where, once."""
        error, self._error = self._error, None
        return error

    def finish(
        self, *, timeout_seconds: float, landed: Callable[[float], bool] | None = None
    ) -> None:
        """Wait for all that is under way. A copy that failed is not told of here.

        Args:
            timeout_seconds: How long at most.
            landed: Waits so many seconds for a part of it, and says whether that was enough: that
                part alone is then waited for.

        Raises:
            WatchdogError: If it takes longer than this.
        """
        deadline = time.monotonic() + timeout_seconds
        waits = [partial(_drained, one) for one in self._moving] if landed is None else [landed]
        for is_over in waits:
            while not is_over(_POLL_SECONDS):
                if time.monotonic() > deadline:
                    left = ", ".join(q.name for t in self._moving for q in t.busy_queues())
                    raise WatchdogError(
                        f"Copies have not ended within {timeout_seconds:g} s (timeout_seconds) "
                        f"after the last action: {left}. Raise "
                        "RoundPipeStrategy(timeout_seconds=...) if they may take so long."
                    )

    def abort(self) -> None:
        """Give up all copies that have not begun, and release who waits for them."""
        for transfers in self._moving:
            transfers.abort()

    def end(self, *, failed: bool = False, grace_seconds: float = 0.0) -> None:
        """Forget the step.

        Args:
            failed: Whether it was given up.
            grace_seconds: How long to wait then for copies that are under way.
        """
        self._tell_step = _nobody
        for transfers in self._moving:
            if failed:
                transfers.abort()
                transfers.drain(timeout_seconds=grace_seconds)
            transfers.end_step(failed=failed)
        if self._pools is not None:
            self._pools.end(failed=failed)

    def traffic(self, step: object) -> tuple[WorkerTraffic, ...]:
        """Return what each worker has moved for a step, when that is over on the devices."""
        return tuple(
            WorkerTraffic() if one is None else one.traffic(step) for one in self.transfers
        )

    @property
    def host_bytes(self) -> int:
        """Page-locked bytes beside those of the parameters."""
        pools = 0 if self._pools is None else self._pools.num_bytes
        return pools + sum(transfers.host_bytes for transfers in self._moving)

    def close(self) -> None:
        """End the threads and give all memory back."""
        for transfers in self._moving:
            transfers.close()
        if self._pools is not None:
            self._pools.close()


def _drained(transfers: WorkerTransfers, seconds: float) -> bool:
    return transfers.drain(timeout_seconds=seconds)


def _nobody() -> None:
    """Tell nobody."""
