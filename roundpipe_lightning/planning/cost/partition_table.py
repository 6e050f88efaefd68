"""Many partitions at once, as rows of arrays: which stage has which blocks and segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.planning.schedule.stages import Partition

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PartitionTable:
    """Partitions as rows of block counts, and their stages as columns.

    Columns stand in the order in which a microbatch passes the stages. A partition with fewer of
    them has empty ones in front of its FORWARD and behind its BACKWARD stages.

    Attributes:
        forward: Shape (partitions, most FORWARD stages); shorter ones have zeros in front.
        backward: Shape (partitions, 1 + most BACKWARD stages), column 0 the fused stage; shorter
            ones have zeros behind.
    """

    forward: Counts
    backward: Counts

    def __len__(self) -> int:
        return len(self.forward)

    def __getitem__(self, rows: Counts | slice) -> PartitionTable:
        return PartitionTable(forward=self.forward[rows], backward=self.backward[rows])

    @classmethod
    def of(cls, partitions: Sequence[Partition]) -> PartitionTable:
        most_forward = max(partition.num_forward for partition in partitions)
        most_backward = max(len(partition.backward) for partition in partitions)
        forward = np.zeros((len(partitions), most_forward), dtype=np.int64)
        backward = np.zeros((len(partitions), most_backward), dtype=np.int64)
        for row, partition in enumerate(partitions):
            forward[row, most_forward - partition.num_forward :] = partition.forward
            backward[row, : len(partition.backward)] = partition.backward
        return cls(forward=forward, backward=backward)

    # --- the rule of `Stage.has_head_forward`, `has_head_backward` and `has_tail`, as columns -----

    @cached_property
    def first(self) -> Counts:
        """Column of each partition's first stage, which has the head's forward."""
        found: Counts = self.fused - np.count_nonzero(self.forward, axis=1)
        return found

    @cached_property
    def last(self) -> Counts:
        """Column of each partition's last stage, which has the head's backward."""
        found: Counts = self.fused + np.count_nonzero(self.backward[:, 1:], axis=1)
        return found

    @property
    def fused(self) -> int:
        """Column of the FUSED stage, which has the tail."""
        return int(self.forward.shape[1])

    # --- blocks -----------------------------------------------------------------------------------

    @cached_property
    def start(self) -> Counts:
        """First block of every stage, of shape (partitions, stages)."""
        ahead = self.forward.cumsum(axis=1) - self.forward
        behind = self.backward.sum(axis=1, keepdims=True) - self.backward.cumsum(axis=1)
        return np.concatenate([ahead, behind], axis=1)

    @cached_property
    def stop(self) -> Counts:
        """Block behind every stage's last one."""
        stop: Counts = self.start + np.concatenate([self.forward, self.backward], axis=1)
        return stop

    @cached_property
    def is_stage(self) -> npt.NDArray[np.bool_]:
        """Where a partition has a stage; the fused one may have no blocks."""
        here = self.stop > self.start
        here[:, self.fused] = True
        return here

    def block_sums(self, sums: Floats) -> Floats:
        """Add up a figure over every stage's blocks, from its `prefix_sums`."""
        found: Floats = sums[self.stop] - sums[self.start]
        return found

    def neighbours(self, distance: int, *, goes_on: bool) -> Counts:
        """Return the column of the stage so many places on; -1 where none is.

        The last stages of a round are followed by the first ones of the next, if there is one. A
        stage that follows itself is one visit that goes on, so nothing follows.
        """
        columns = np.arange(self.start.shape[1])[None, :]
        first, count = self.first[:, None], (self.last - self.first + 1)[:, None]
        place = columns - first + distance
        if goes_on:
            place = place % count
            is_other = distance % count != 0
        else:
            is_other = np.broadcast_to((place >= 0) & (place < count), place.shape)
        found: Counts = np.where(is_other, place + first, -1)
        return found


def prefix_sums(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
