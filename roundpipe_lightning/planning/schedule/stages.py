"""Stages: the contiguous ranges of blocks that a step is cut into.

A `Partition` cuts the same chain of blocks twice, once for the forward and once for the backward
pass (asymmetric partition, RoundPipe, arXiv 2604.27085, section 4). A *plain* step runs all
microbatches of a batch forward, the tail segment included, and then all of them backward:

```
blocks      0   1   2   3   4   5   6   7   tail
forward   [ F0        ][ F1        ][ F2         ]     forward=(3, 3, 2)
backward  [ B2   ][ B1        ][ B0              ]     backward=(3, 3, 2)
```

A *fused* step turns each microbatch round in the fused stage, where the two passes meet:

```
forward   [ F0        ][ F1        ][ X0         ]     forward=(3, 3)
backward  [ B2        ][ B1        ][ X0         ]     backward=(2, 3, 3)
```

A chain may come from several calls of stacks with user code between them. Stages lie within one
call, so the chain has a *cut* where one call ends and the next begins: cut i stands between block
i-1 and block i.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise

from roundpipe_lightning.errors import PlanError


class StageKind(Enum):
    """Kind of a stage. The value is the letter used in the text forms."""

    FORWARD = "F"
    """Runs its blocks without keeping a graph; keeps the boundaries that BACKWARD stages start
    from."""

    FUSED = "X"
    """Runs the last blocks and the tail segment, forward and backward at once."""

    BACKWARD = "B"
    """Recomputes its blocks with a graph, then runs their backward."""

    __hash__ = object.__hash__  # members are singletons; that of Enum hashes their name each time


class RecomputePolicy(Enum):
    """Recompute of BACKWARD stages before their backward."""

    FULL = "full"
    """BACKWARD stages run their blocks again, from the stored boundary."""

    SELECTIVE = "selective"
    """BACKWARD stages rerun blocks without attention, whose outputs are kept: less to recompute,
    more to hold and to move."""

    NONE = "none"
    """There are no BACKWARD stages: the fused stage has all blocks, and what it runs is never run
    again."""


ATTENTION_OPERATIONS = (
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
)
"""Operations that a SELECTIVE recompute does not repeat: PyTorch's fused attention, and that of the
flash-attn package. Their outputs are small, and their time grows with the square of the sequence.
An operation that drops out draws random numbers and is run again. Attention that is written out in
products and a softmax is, too."""


def operations_kept(policy: RecomputePolicy) -> tuple[str, ...]:
    return ATTENTION_OPERATIONS if policy is RecomputePolicy.SELECTIVE else ()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A contiguous range of blocks run as a unit.

    Attributes:
        index: Position in `Partition.forward` for FORWARD, in `Partition.backward` otherwise (so
            beside a FUSED stage, which is always 0, BACKWARD stages count from 1).
        blocks: Indices of the blocks, ascending; empty for a stage of the tail segment alone.
        has_tail: Whether the tail segment runs with it: forward in the last FORWARD stage, backward
            in the first BACKWARD stage, both ways in the FUSED stage.
        keeps_graph: Whether it is the last FORWARD stage, which keeps the graphs of its
            microbatches, or the first BACKWARD stage, which goes back on them.
        has_head_forward: Whether the head segment runs forward with it: it is the first stage.
        has_head_backward: Whether the head segment runs backward with it: it is the last stage.
    """

    kind: StageKind
    index: int
    blocks: range
    has_tail: bool = False
    keeps_graph: bool = False
    has_head_forward: bool = False
    has_head_backward: bool = False

    def __str__(self) -> str:  # e.g. `F2[4:6]`
        return f"{self.kind.value}{self.index}[{self.blocks.start}:{self.blocks.stop}]"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Number of blocks of every stage.

    For eight blocks, `Partition(forward=(3, 3, 2), backward=(2, 3, 3), plain=True)` runs F0 =
    blocks 0-2, F1 = 3-5, F2 = 6-7 and the tail segment, B0 = 6-7 and the tail segment, B1 = 3-5,
    B2 = 0-2, in this order. `Partition(forward=(3, 3), backward=(2, 3, 3))` runs F0, F1, X0 = 6-7
    and the tail segment, B1, B2.

    Attributes:
        forward: Blocks per FORWARD stage, the model's first blocks first. The last one of a plain
            partition may have 0: the tail segment alone.
        backward: Blocks per stage from the tail on, the model's last blocks first; `backward[0]`
            may be 0: the tail segment alone. It is the FUSED stage of a partition that is not
            plain.
        plain: Whether all microbatches of a batch go forward before the first one goes backward.
        keeps_graphs: Whether the last FORWARD stage of a plain partition keeps its graphs for the
            first BACKWARD stage, which has the same blocks and runs on the same workers, and
            recomputes nothing.
        joined: Neighbouring microbatches that are pieces of one batch, whose tail segment runs
            once, in the FUSED stage of the first of them; 0: it runs for each. Not in the text.

    Raises:
        PlanError: If a stage without the tail segment is empty, or if the two cuts disagree about
            the number of blocks.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    plain: bool = False
    keeps_graphs: bool = False
    joined: int = field(default=0, compare=False)  # from `PipelineConfig.joined`

    def __post_init__(self) -> None:
        for name, counts, tail in (
            ("forward", self.forward, len(self.forward) - 1 if self.plain else None),
            ("backward", self.backward, 0),
        ):
            if tail is not None and not counts:
                raise PlanError(
                    f"{name}=() has no stage with the tail segment: give at least (0,), the tail "
                    "segment alone."
                )
            if any(count < (place != tail) for place, count in enumerate(counts)):
                raise PlanError(
                    f"{name} stages {counts}: every stage needs at least one block, the tail "
                    "segment's stage 0 or more."
                )
        fused = 0 if self.plain else self.backward[0]
        if sum(self.forward) + fused != sum(self.backward):
            raise PlanError(
                f"forward={self.forward} runs {sum(self.forward)} blocks"
                f"{'' if self.plain else f' and the fused stage {fused}'}, but "
                f"backward={self.backward} covers {sum(self.backward)}: sum(forward) must be "
                f"{sum(self.backward) - fused}."
            )
        if self.keeps_graphs and not (self.plain and self.forward[-1] == self.backward[0]):
            raise PlanError(
                f"'{self}' keeps graphs from the last FORWARD to the first BACKWARD stage, but "
                "these have other blocks: give them as many."
            )

    @classmethod
    def whole(cls, num_blocks: int, *, plain: bool = False) -> Partition:
        """Return the partition without a recompute: a stage has all blocks."""
        return cls(
            forward=(num_blocks,) * plain, backward=(num_blocks,), plain=plain, keeps_graphs=plain
        )

    @property
    def num_blocks(self) -> int:
        return sum(self.backward)

    @property
    def num_forward(self) -> int:
        return len(self.forward)

    @property
    def num_backward(self) -> int:
        return len(self.backward) - (not self.plain)

    @property
    def num_stages(self) -> int:
        return len(self.forward) + len(self.backward)

    @property
    def recomputes(self) -> bool:
        """Whether any block runs forward twice."""
        return self.num_backward > self.keeps_graphs

    def stages(self) -> tuple[Stage, ...]:
        """All stages in the order in which a microbatch passes them: F0.., (X0 or B0), B1.. ."""
        return self._stages

    def stage(self, kind: StageKind, index: int) -> Stage:
        """Return one stage; PlanError if this partition has no such stage."""
        position = index if kind is StageKind.FORWARD else self.num_forward + index
        if 0 <= position < self.num_stages:
            stage = self._stages[position]
            if stage.kind is kind and stage.index == index:
                return stage
        raise PlanError(f"There is no stage {kind.value}{index} in {self}.")

    def producer(self, block: int) -> Stage:
        """Return the stage that computes the input of `block` in the forward pass.

        The input of block 0 is made by the head segment, which runs with the first stage.
        """
        return self._producers[block]

    def num_readers(self, stage: Stage) -> int:
        """Return the number of BACKWARD stages that begin at a boundary which a stage has made."""
        return self._readers[stage]

    @cached_property
    def _producers(self) -> tuple[Stage, ...]:
        makers = self._stages[: self.num_forward + (not self.plain)]
        before = [stage for stage in makers for _ in stage.blocks] or [makers[-1]]
        return (before[0], *before[: self.num_blocks])

    @cached_property
    def _readers(self) -> Counter[Stage]:
        return Counter(
            self.producer(stage.blocks.start)
            for stage in self._stages
            if stage.kind is StageKind.BACKWARD and not stage.keeps_graph
        )

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        places: list[tuple[StageKind, int, range]] = []
        start, stop = 0, self.num_blocks
        for index, count in enumerate(self.forward):
            places.append((StageKind.FORWARD, index, range(start, start + count)))
            start += count
        for index, count in enumerate(self.backward):
            is_backward = index > 0 or self.plain
            kind = StageKind.BACKWARD if is_backward else StageKind.FUSED
            places.append((kind, index, range(stop - count, stop)))
            stop -= count
        middle = self.num_forward  # the place of the first stage that runs backward
        with_tail = (middle - 1, middle) if self.plain else (middle,)
        return tuple(
            Stage(
                kind=kind,
                index=index,
                blocks=blocks,
                has_tail=number in with_tail,
                keeps_graph=self.keeps_graphs and number in with_tail,
                has_head_forward=number == 0,
                has_head_backward=number == len(places) - 1,
            )
            for number, (kind, index, blocks) in enumerate(places)
        )

    def __str__(self) -> str:
        """E.g. `forward 3 3 | backward 2 3 3`, or `plain forward 3 3 2 | backward =2 3 3`.

        A sign of equality stands where graphs are kept.
        """
        forward = " ".join(map(str, self.forward)) or "-"
        backward = "=" * self.keeps_graphs + " ".join(map(str, self.backward))
        return f"{'plain ' * self.plain}forward {forward} | backward {backward}"

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Read the text form back; PlanError if the text is not a partition."""
        words = text.split()
        plain = words[:1] == ["plain"]
        words = words[plain:]
        if words[:1] != ["forward"] or "|" not in words or words.count("backward") != 1:
            raise PlanError(f"{text!r} is not a partition; write 'forward 3 3 | backward 2 3 3'.")
        bar = words.index("|")
        forward, backward = words[1:bar], words[bar + 2 :]
        keeps_graphs = "".join(backward).startswith("=")
        try:
            return cls(
                forward=tuple(int(word) for word in forward if word != "-"),
                backward=tuple(int(word) for word in " ".join(backward).removeprefix("=").split()),
                plain=plain,
                keeps_graphs=keeps_graphs,
            )
        except ValueError as error:
            raise PlanError(f"{text!r} is not a partition: {error}") from error


def check_cuts(cuts: Sequence[int], *, num_blocks: int) -> None:
    """Refuse cuts that do not ascend or do not lie between two blocks; PlanError: they do not."""
    if any(first >= second for first, second in pairwise((0, *cuts, max(num_blocks, 1)))):
        raise PlanError(
            f"cuts={tuple(cuts)} of {num_blocks} blocks: give ascending numbers from 1 to "
            f"{num_blocks - 1}; cut i stands between block i-1 and block i."
        )


def call_lengths(num_blocks: int, cuts: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks between neighbouring cuts, those of the first call first.

    Only the first `num_blocks` count; cuts behind them do not matter.
    """
    if not num_blocks:
        return ()
    stops = (0, *cuts_before(num_blocks, cuts), num_blocks)
    return tuple(second - first for first, second in pairwise(stops))


def cuts_before(num_blocks: int, cuts: Sequence[int]) -> tuple[int, ...]:
    return tuple(cut for cut in cuts if cut < num_blocks)


def reversed_cuts(num_blocks: int, cuts: Sequence[int]) -> tuple[int, ...]:
    return tuple(num_blocks - cut for cut in reversed(cuts_before(num_blocks, cuts)))


def check_partition(
    partition: Partition, *, cuts: Sequence[int], block_names: Sequence[str], what: str
) -> None:
    """Raise a PlanError if a stage spans a cut; `what` has it, for the message."""
    for stage in partition.stages():
        blocks = stage.blocks
        cut = next((cut for cut in cuts if blocks.start < cut < blocks.stop), None)
        if cut is not None:
            raise PlanError(
                f"{what}: stage {stage} of '{partition}' has both {block_names[cut - 1]!r} and "
                f"{block_names[cut]!r}, but other code runs between them, and no stage spans that. "
                f"Cut there (the model's cuts are {tuple(cuts)}), or let the planner choose."
            )
