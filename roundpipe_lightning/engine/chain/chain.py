"""The chain: the calls of blocks that a step makes, in the order in which user code makes them.

```
user code   embed   encoder.0 encoder.1   embed targets   decoder.0 decoder.1   loss
chain               [0        1         ] middle segment  [2        3         ]
                     a pass                   cut here      a pass
```

A block that is called twice stands twice in the chain. The first step runs a guess; every step
says which calls it made, and the next one can be planned for these.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from roundpipe_lightning.errors import ConfigurationError, PlanError


@dataclass(frozen=True, kw_only=True)
class BlockStack:
    """A chain of blocks that user code calls one after the other."""

    name: str  # dotted name of the list that holds them, e.g. `model.layers`
    blocks: tuple[nn.Module, ...]  # the blocks in the order of their calls, each once
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.blocks) != len(self.names) or not self.blocks:
            raise ConfigurationError(
                f"A stack needs as many names as blocks and at least one: {self.name!r} has "
                f"{len(self.blocks)} blocks and {len(self.names)} names."
            )
        if len(set(self.blocks)) != len(self.blocks):
            raise ConfigurationError(
                f"A block occurs twice in {self.name!r}. Name a list of distinct blocks with "
                "blocks=."
            )


@dataclass(frozen=True, kw_only=True)
class Link:
    """One call of a block in a step."""

    block: nn.Module
    name: str  # its dotted name; with `#2` for its second call in the step, and so on
    # whether user code runs between the call before and this one. No stage holds both.
    cut: bool = False
    gradient: bool = True  # whether it is called with gradients enabled
    backward: bool = True  # whether anything in it or below it gets a gradient


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The calls of a step."""

    links: tuple[Link, ...] = ()  # the calls in order
    # blocks that it does not call: where a step does, they run one at a time
    others: tuple[nn.Module, ...] = ()

    @classmethod
    def from_stacks(cls, stacks: Iterable[BlockStack]) -> Chain:
        """Return the chain of a step that calls stacks one after the other, each once."""
        links: list[Link] = []
        for stack in stacks:
            for index, (block, name) in enumerate(zip(stack.blocks, stack.names, strict=True)):
                links.append(Link(block=block, name=name, cut=not index and bool(links)))
        return cls(links=tuple(links))

    @classmethod
    def recorded(cls, links: Iterable[Link], *, blocks: Iterable[nn.Module] = ()) -> Chain:
        """Return the chain of calls that were seen, with the blocks' own names."""
        counts: Counter[nn.Module] = Counter()
        numbered: list[Link] = []
        for link in links:
            counts[link.block] += 1
            count = counts[link.block]
            name = link.name if count == 1 else f"{link.name}#{count}"
            # The first call may have been planned behind others, which were not made.
            cut = link.cut and bool(numbered)
            is_same = (name, cut) == (link.name, link.cut)
            numbered.append(link if is_same else replace(link, name=name, cut=cut))
        others = tuple(block for block in blocks if block not in counts)
        return cls(links=tuple(numbered), others=others)

    @classmethod
    def named(cls, names: Sequence[str], stacks: Sequence[BlockStack]) -> Chain:
        """Return the chain with these names, which a plan carries; each must have a block."""
        known = {n: b for s in stacks for n, b in zip(s.names, s.blocks, strict=True)}
        following = following_blocks(stacks)
        links: list[Link] = []
        for name in names:
            block = known.get(name.partition("#")[0])
            if block is None:
                raise PlanError(
                    f"The plan has a block {name!r}, which is none of the module's blocks "
                    f"({', '.join(stack.name for stack in stacks) or 'it has none'}). Make a new "
                    "plan (plan='auto')."
                )
            cut = bool(links) and following.get(links[-1].block) is not block
            links.append(Link(block=block, name=name, cut=cut))
        called = {link.block for link in links}
        others = tuple(b for stack in stacks for b in stack.blocks if b not in called)
        return cls(links=tuple(links), others=others)

    def same_calls(self, other: Chain) -> bool:
        mine, theirs = (
            [(link.name, link.cut, link.gradient) for link in chain.links]
            for chain in (self, other)
        )
        return mine == theirs

    def __len__(self) -> int:
        return len(self.links)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(link.name for link in self.links)

    @property
    def cuts(self) -> tuple[int, ...]:
        return tuple(i for i, link in enumerate(self.links) if link.cut)

    def ends_pass(self, position: int) -> bool:
        return position + 1 == len(self.links) or self.links[position + 1].cut

    def find(self, block: nn.Module, *, gradient: bool | None, start: int) -> int | None:
        """Return the first position, from `start` on, of a block; None if there is none.

        `gradient` says whether it is called with gradients enabled; None: either.
        """
        positions = self._positions.get((block, gradient), ())
        index = bisect_left(positions, start)
        return positions[index] if index < len(positions) else None

    @cached_property
    def repeated(self) -> frozenset[nn.Parameter]:
        counts = Counter(link.block for link in self.links)
        return frozenset(p for b, count in counts.items() if count > 1 for p in b.parameters())

    @cached_property
    def _positions(self) -> Mapping[tuple[nn.Module, bool | None], Sequence[int]]:
        found: dict[tuple[nn.Module, bool | None], list[int]] = {}
        for position, link in enumerate(self.links):
            for gradient in (link.gradient, None):
                found.setdefault((link.block, gradient), []).append(position)
        return found


def following_blocks(stacks: Iterable[BlockStack]) -> dict[nn.Module, nn.Module]:
    return {a: b for s in stacks for a, b in zip(s.blocks, s.blocks[1:], strict=False)}
