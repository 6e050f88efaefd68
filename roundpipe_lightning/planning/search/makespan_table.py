"""Makespans of many round-robin partitions at once: the inner loop of the search.

`simulate` is the reference; this computes its makespan for a whole table of partitions, stage after
stage, as array operations. For one stage let a[m] be the arrival of microbatch m's input, r and c
the seconds of its recompute and the rest (r = 0 but for an early recompute), and f the time at
which its worker is free. Its actions end at

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

import numpy as np
import numpy.typing as npt

from roundpipe_lightning.planning.cost.costs import RecomputeStart
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_CHUNK = 512
"""Partitions evaluated together: as many as keep the arrays in the cache."""


@dataclass(frozen=True, kw_only=True)
class PartitionTable:
    """Partitions as rows of block counts.

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

    def partition(self, row: int) -> Partition:
        fused, *backward = self.backward[row].tolist()
        return Partition(
            forward=tuple(count for count in self.forward[row].tolist() if count),
            backward=(fused, *(count for count in backward if count)),
        )

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, pad: int = 0
    ) -> PartitionTable:
        """Tabulate pairs of forward and backward counts (`Partition.forward`, `.backward`).

        Args:
            pairs: The counts.
            pad: Empty columns to add on both sides.
        """
        width_forward = pad + max(1, *(len(forward) for forward, _ in pairs))
        width_backward = pad + max(len(backward) for _, backward in pairs)
        forward = np.zeros((len(pairs), width_forward), dtype=np.int64)
        backward = np.zeros((len(pairs), width_backward), dtype=np.int64)
        for row, (first, second) in enumerate(pairs):
            forward[row, width_forward - len(first) :] = first
            backward[row, : len(second)] = second
        return cls(forward=forward, backward=backward)


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
        present = np.concatenate([table.forward, table.backward], axis=1).T > 0
        present[table.forward.shape[1]] = True
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
        first = present.argmax(axis=0)
        result: Floats = free.max(axis=0) - upload[first, rows]
        return result

    def _upload_durations(self, table: PartitionTable) -> Floats:
        """Return the seconds to upload each stage's weights, of shape (stages, partitions)."""
        profile = self.profile
        weights = _prefix_sums([block.parameter_bytes for block in profile.blocks])
        stop = table.forward.cumsum(axis=1)
        forward = weights[stop] - weights[stop - table.forward]
        forward += np.where((stop == table.forward) & (stop > 0), profile.head.parameter_bytes, 0)
        low = profile.num_blocks - table.backward.cumsum(axis=1)
        backward = weights[low + table.backward] - weights[low]
        backward[:, 0] += profile.tail.parameter_bytes
        forward *= self.forward_upload_seconds
        backward *= self.backward_upload_seconds
        return np.ascontiguousarray(np.concatenate([forward, backward], axis=1).T)

    def _durations(self, table: PartitionTable) -> tuple[Floats, Floats]:
        """Return recompute and remaining seconds, each of shape (stages, partitions)."""
        profile = self.profile
        blocks = profile.blocks
        forward = _prefix_sums([block.forward_seconds for block in blocks])
        backward = _prefix_sums([block.backward_seconds for block in blocks])
        stop = table.forward.cumsum(axis=1)
        start = stop - table.forward
        first = forward[stop] - forward[start]
        first += np.where((start == 0) & (stop > 0), profile.head.forward_seconds, 0.0)
        low = profile.num_blocks - table.backward.cumsum(axis=1)
        high = low + table.backward
        again = _prefix_sums([block.seconds_to_recompute(self.recompute) for block in blocks])
        recompute = again[high] - again[low]
        compute = backward[high] - backward[low]
        last = (low == 0) & (high > 0)
        last[:, 0] = low[:, 0] == 0
        compute += np.where(last, profile.head.backward_seconds, 0.0)
        compute[:, 0] += forward[high[:, 0]] - forward[low[:, 0]]
        compute[:, 0] += profile.tail.forward_seconds + profile.tail.backward_seconds
        compute[:, 0] += np.where(stop[:, -1] == 0, profile.head.forward_seconds, 0.0)
        recompute[:, 0] = 0.0
        if self.recompute_start is RecomputeStart.WITH_GRADIENT:
            compute += recompute
            recompute = np.zeros_like(recompute)
        none = np.zeros_like(first)
        return (
            np.ascontiguousarray(np.concatenate([none, recompute], axis=1).T),
            np.ascontiguousarray(np.concatenate([first, compute], axis=1).T),
        )


def _prefix_sums(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
