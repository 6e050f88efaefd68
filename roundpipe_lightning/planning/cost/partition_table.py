"""Many partitions at once, as rows of arrays: their stages, and their makespans.

`PartitionTable` says which stage has which blocks and segments. `Evaluator` is the inner loop of
the search. `simulate` is its reference: it computes the same makespan for a whole table, stage
after stage, as array operations. For one stage let a[m] be the arrival of microbatch m's input, r
and c the seconds of its recompute and the rest (r = 0 but for an early recompute), and f the time
at which its worker is free. Its actions end at

    end[0] = max(a[0], f + r) + c
    end[m] = max(a[m], end[m-1] + r) + c
           = max over j <= m of (a'[j] - j (r + c)) + m (r + c) + c,   a'[0] = max(a[0], f + r),

which is one running maximum instead of a loop over the microbatches. One thing is left out: that a
recompute waits for its stored boundary too, which matters only where a worker is idle long before
its gradient comes. So the makespan is exact or, rarely, too short, and the search confirms its best
partitions with `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.planning.cost.costs import RecomputeStart
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy

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
        """Mask of the stages that a partition has; the fused one may have no blocks."""
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
        stage that follows itself is one stage run that goes on, so nothing follows.
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


_CHUNK = 512
"""Partitions evaluated together: as many as keep the arrays in the cache."""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Computes makespans for one model on one number of workers.

    A plan with teams of T is T pipelines that do not meet, each with 1/T of the workers and of the
    microbatches: evaluate one of them.

    Attributes:
        profile: The model.
        num_workers: Workers.
        rounds: Microbatches of each round.
        hop_seconds: Time from one worker to the next.
        recompute_start: When a recompute may begin.
        forward_upload_seconds: Time to upload one byte of weights for a FORWARD stage; 0: no time.
        backward_upload_seconds: The same for FUSED and BACKWARD stages, whose uploads may share the
            host's memory with gradients on their way back.
        weight_slots: Stages whose weights a worker holds at once.
        recompute: What BACKWARD stages start from.
    """

    profile: ModelProfile
    num_workers: int
    rounds: tuple[int, ...]
    hop_seconds: float
    recompute_start: RecomputeStart = RecomputeStart.EARLY
    forward_upload_seconds: float = 0.0
    backward_upload_seconds: float = 0.0
    weight_slots: int = 2
    recompute: RecomputePolicy = RecomputePolicy.FULL

    def makespans(self, table: PartitionTable) -> Floats:
        chunks = [
            self._makespans(table[slice(first, first + _CHUNK)])
            for first in range(0, len(table), _CHUNK)
        ]
        return np.concatenate(chunks) if chunks else np.zeros(0)

    def _makespans(self, table: PartitionTable) -> Floats:
        recompute, compute = self._durations(table)
        upload = self._upload_durations(table)
        present = table.is_stage.T
        period = recompute + compute
        rows = np.arange(len(table))
        # Worker `num_workers` is a dummy that is always free: absent stages run there, in no time.
        free = np.zeros((self.num_workers + 1, len(table)))
        free[-1] = -np.inf
        free_before = free.copy()
        uploaded = free.copy()
        turns = np.zeros(len(table), dtype=np.int64)
        hop = self.hop_seconds if self.num_workers > 1 else 0.0
        for round_size in self.rounds:
            places = np.arange(round_size, dtype=np.float64)[:, None]
            ends = np.zeros((round_size, len(table)))
            started = np.zeros(len(table), dtype=bool)
            for stage in range(len(compute)):
                here = present[stage]
                worker = np.where(here, turns % self.num_workers, self.num_workers)
                turns += here
                ends += np.where(here & started, hop, 0.0)
                started |= here
                free_now = free[worker, rows]
                slot_free = free_before[worker, rows] if self.weight_slots > 1 else free_now
                weights = np.maximum(uploaded[worker, rows], slot_free)
                weights += upload[stage]
                start = np.maximum(free_now, weights)
                np.maximum(ends[0], start + recompute[stage], out=ends[0])
                offsets = places * period[stage]
                ends -= offsets
                np.maximum.accumulate(ends, axis=0, out=ends)
                offsets += compute[stage]
                ends += offsets
                uploaded[worker, rows] = weights
                free_before[worker, rows] = free_now
                free[worker, rows] = np.where(here, ends[-1], -np.inf)
        result: Floats = free.max(axis=0) - upload[table.first, rows]
        return result

    def _upload_durations(self, table: PartitionTable) -> Floats:
        """Return the seconds to upload each stage's weights, of shape (stages, partitions)."""
        profile, rows = self.profile, np.arange(len(table))
        sizes = table.block_sums(prefix_sums([block.parameter_bytes for block in profile.blocks]))
        sizes[rows, table.first] += np.where(
            table.first < table.fused, profile.head.parameter_bytes, 0
        )
        sizes[:, table.fused] += profile.tail.parameter_bytes
        sizes[:, : table.fused] *= self.forward_upload_seconds
        sizes[:, table.fused :] *= self.backward_upload_seconds
        return np.ascontiguousarray(sizes.T)

    def _durations(self, table: PartitionTable) -> tuple[Floats, Floats]:
        """Return recompute and remaining seconds, each of shape (stages, partitions)."""
        blocks, head, tail = self.profile.blocks, self.profile.head, self.profile.tail
        fused, rows = table.fused, np.arange(len(table))
        forward = table.block_sums(prefix_sums([block.forward_seconds for block in blocks]))
        compute = table.block_sums(prefix_sums([block.backward_seconds for block in blocks]))
        compute[rows, table.last] += head.backward_seconds
        compute[:, fused] += forward[:, fused]
        compute[:, fused] += tail.forward_seconds + tail.backward_seconds
        compute[:, :fused] = forward[:, :fused]
        compute[rows, table.first] += head.forward_seconds
        again = [block.seconds_to_recompute(self.recompute) for block in blocks]
        recompute = table.block_sums(prefix_sums(again))
        recompute[:, : fused + 1] = 0.0
        if self.recompute_start is RecomputeStart.WITH_GRADIENT:
            compute += recompute
            recompute = np.zeros_like(recompute)
        return np.ascontiguousarray(recompute.T), np.ascontiguousarray(compute.T)
