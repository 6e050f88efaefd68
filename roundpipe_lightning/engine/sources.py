"""Brings what blocks and segments take to where they compute, and gradients the way back."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from roundpipe_lightning.engine.segments import Source
from roundpipe_lightning.engine.user_code import UserCode
from roundpipe_lightning.engine.values import Value
from roundpipe_lightning.engine.worker import Worker


class Sources:
    """The tensors of one microbatch that go from turn to turn, through the host.

    Args:
        user: Knows where tensors are.
        worker: Returns the worker whose turn it is.

    Attributes:
        gradients: On the host, of what has been taken, as far as they were found.
    """

    def __init__(self, user: UserCode, worker: Callable[[], Worker]) -> None:
        self._user = user
        self._worker = worker
        self._host: dict[Tensor, Tensor] = {}
        self.gradients: dict[Source, Tensor] = {}

    def here(self, source: Source, *, repeats: bool = False) -> Tensor:
        """Return a source on the present worker, without a graph.

        Args:
            source: The source.
            repeats: Whether a later turn takes it, too: its values are then kept on the host.
        """
        device = self._worker().device
        if isinstance(source, Value):
            if source.here is not None:
                return source.here.detach()
            assert source.host is not None, "kept when its turn ended"
            return device.upload(source.host)
        if not repeats and source not in self._host and device.holds(source):
            return source.detach()
        if source not in self._host:
            self._host[source] = self._user.owner_of(source).download(source)
        return device.upload(self._host[source])

    def leaf(
        self, leaves: dict[Source, Tensor], source: Source, *, repeats: bool = False
    ) -> Tensor:
        """Return what stands for a source among leaves, made when it is first asked for."""
        if source not in leaves:
            wanted = source.needs_gradient if isinstance(source, Value) else source.requires_grad
            leaves[source] = self.here(source, repeats=repeats).requires_grad_(wanted)
        return leaves[source]

    def fetch_gradients(self, leaves: dict[Source, Tensor]) -> None:
        """Bring the gradients of leaves to the host and forget the leaves."""
        for source, leaf in leaves.items():
            if leaf.grad is not None:
                self.gradients[source] = self._user.owner_of(leaf.grad).download(leaf.grad)
        leaves.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._host.clear()
        self.gradients.clear()
