"""Brings what blocks and segments take to where they compute, and gradients the way back.

What is taken in one turn is likely to be taken in the next: it is sent ahead, to the worker of that
turn, when the turn ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from roundpipe_lightning.engine.chain.segments import Source
from roundpipe_lightning.engine.chain.values import Value
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.transfer.boundary import BoundaryTensor
from roundpipe_lightning.engine.transfer.pinned_pool import PinnedPool
from roundpipe_lightning.engine.worker.user_code import UserCode
from roundpipe_lightning.engine.worker.worker import Worker


class Turn(Protocol):
    """Where a microbatch is on its way through the workers."""

    @property
    def pool(self) -> PinnedPool | None:
        """The microbatch's memory on the host; None where no worker needs any."""

    @property
    def worker(self) -> Worker:
        """The worker whose turn it is."""

    @property
    def next_worker(self) -> Worker | None:
        """The worker of the next turn; None if there is none."""

    @property
    def stays_here(self) -> bool:
        """Whether all turns that are left reach this worker, and it has room for what they take."""

    def left(self, worker: Worker) -> Event | None:
        """Return the end of its last turn on another worker."""


class Sources:
    """The tensors of one microbatch that go from turn to turn.

    Args:
        user: Knows where tensors are.
        turn: Whose turn it is, and whose it was.

    Attributes:
        gradients: Of what has been taken, as far as they were found.
    """

    def __init__(self, user: UserCode, turn: Turn) -> None:
        self._user = user
        self._turn = turn
        self._boundaries: dict[Tensor, BoundaryTensor] = {}
        self._taken: dict[BoundaryTensor, None] = {}  # in the present turn
        self.gradients: dict[Source, BoundaryTensor] = {}

    def here(self, source: Source, *, repeats: bool = False) -> Tensor:
        """Return a source on the present worker, without a graph.

        Args:
            source: The source.
            repeats: Whether a later turn takes it, too: its values are then kept on the host.
        """
        worker = self._turn.worker
        if isinstance(source, Value):
            if source.here is not None:
                return source.here.detach()
            assert source.host is not None, "kept when its turn ended"
            return source.host.on(worker)
        if source not in self._boundaries:
            if not repeats and worker.device.holds(source):
                return source.detach()
            # User code keeps it, too: it need not leave before somebody else asks for it.
            maker = self._user.worker_of(source)
            made = None if maker is worker or maker is None else self._turn.left(maker)
            self._boundaries[source] = BoundaryTensor(
                source, maker, pool=self._turn.pool, keeps=True, made=made
            )
        boundary = self._boundaries[source]
        if repeats:
            self._taken[boundary] = None
        return boundary.on(worker)

    def pack(self, tensor: Tensor, *, for_next: bool = False) -> BoundaryTensor:
        """Return a tensor that the present turn has made as something that can travel.

        Args:
            tensor: The tensor.
            for_next: Whether the next turn takes it, and no other after that.
        """
        maker, follower = self._user.worker_of(tensor), self._turn.next_worker
        keeps = self._turn.stays_here
        if for_next and maker is not None and follower is not None:
            keeps = keeps or follower.device.reaches(maker.device)
        return BoundaryTensor(tensor, maker, pool=self._turn.pool, keeps=keeps)

    def send_ahead(self, boundaries: Iterable[BoundaryTensor]) -> None:
        """End the turn: send what the next one is likely to take to its worker."""
        worker = self._turn.next_worker
        if worker is not None:
            for boundary in (*boundaries, *self._taken):
                boundary.send_to(worker)
        self._taken.clear()

    def leaf(
        self, leaves: dict[Source, Tensor], source: Source, *, repeats: bool = False
    ) -> Tensor:
        """Return what stands for a source among leaves, made when it is first asked for."""
        if source not in leaves:
            wanted = source.needs_gradient if isinstance(source, Value) else source.requires_grad
            leaves[source] = self.here(source, repeats=repeats).requires_grad_(wanted)
        return leaves[source]

    def fetch_gradients(self, leaves: dict[Source, Tensor]) -> None:
        """Take the gradients of leaves and forget the leaves."""
        for source, leaf in leaves.items():
            if leaf.grad is not None:
                self.gradients[source] = self.pack(leaf.grad, for_next=True)
        leaves.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._boundaries.clear()
        self._taken.clear()
        self.gradients.clear()
