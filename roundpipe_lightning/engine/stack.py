"""What the engine pipelines: a chain of blocks of the user's module."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from roundpipe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class BlockStack:
    """A chain of blocks that user code calls one after the other.

    Attributes:
        name: Dotted name of the list that holds them, e.g. `model.layers`.
        blocks: The blocks in the order of their calls, each once.
        names: Their dotted names.
    """

    name: str
    blocks: tuple[nn.Module, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse empty stacks and blocks that occur twice."""
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
