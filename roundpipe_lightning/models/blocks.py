"""Finds the blocks of any module: its lists of repeated children, or those named.

Classes and sizes are compared, never names, so nothing here knows an architecture.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.errors import ConfigurationError

__all__ = ["find_stacks"]

_GROWTH = 2.0  # ratio of block sizes from which on a model counts as one with stages of its own


def find_stacks(module: nn.Module, names: Sequence[str] | None) -> tuple[BlockStack, ...]:
    """Return all stacks of blocks of a module, in the order in which they are registered.

    Without names these are the largest repeated list, and every other list of repeated children
    that have children themselves, so that an encoder and a decoder, or a tower and a language
    model, are both found, and a `nn.Sequential` of two linear layers is not. The largest is, of
    every `nn.ModuleList` and `nn.Sequential` with at least two children of one type, the one whose
    children of their commonest type have the most bytes of parameters. A list inside of another's
    children is part of the other's bytes, so the outer one is taken; lists inside of a stack's
    blocks are part of the blocks. Where every block has a list of blocks of its own and these
    differ in size (the stages of a vision model), the inner lists are the stacks. A list that two
    names lead to counts once.

    Args:
        module: The user's module; on the meta device too.
        names: None, or the dotted names of lists (`["encoder.block", "decoder.block"]`), in the
            order in which they are called, or those of the blocks of one stack.

    Returns:
        The stacks; none if no names are given and nothing repeats.

    Raises:
        ConfigurationError: If a name leads nowhere, or not to a list or to blocks that can be
            called one after the other (it says which name is near), or if a block is in two lists.
    """
    if names is None:
        main = _largest_list(module)
        return () if main is None else tuple(_all_lists(module, main)) or (main,)
    names = [names] if isinstance(names, str) else list(names)
    if not names:
        raise ConfigurationError(
            "blocks=[] names no block. Name a list of blocks, such as blocks=['model.layers'], "
            "or leave blocks=None to have it found."
        )
    children = [_child(module, name) for name in names]
    kinds = nn.ModuleList if len(names) > 1 else (nn.ModuleList, nn.Sequential)
    if not all(isinstance(child, kinds) for child in children):
        _check_blocks(names, children)
        blocks, names = tuple(children), tuple(names)
        return (BlockStack(name=_common_name(names), blocks=blocks, names=names),)
    stacks = [_list_as_stack(*pair) for pair in zip(names, children, strict=True)]
    counts = Counter(block for stack in stacks for block in stack.blocks)
    twice = next((s for s in stacks if any(counts[b] > 1 for b in s.blocks)), None)
    if twice is not None:
        raise ConfigurationError(
            f"blocks={names!r}: a block of {twice.name!r} is in another of these lists, too. Name "
            "lists that have no block in common."
        )
    return tuple(stacks)


def _largest_list(module: nn.Module) -> BlockStack | None:
    largest = max(_lists(module), key=lambda pair: _repeated_bytes(pair[1]), default=None)
    if largest is None or not _repeated_bytes(largest[1]):
        return None
    return _list_as_stack(*largest)  # of equals the first, which is the outer one


def _all_lists(module: nn.Module, main: BlockStack) -> Iterator[BlockStack]:
    taken: set[nn.Module] = set()
    for name, child in _lists(module):
        if child in taken or not _repeated_bytes(child):
            continue
        blocks = list(child)
        around_main = any(inner in main.blocks for block in blocks for inner in block.modules())
        is_main = name == main.name
        composite = any(True for block in blocks for _ in block.children())
        if _has_stages(blocks) or (around_main and not is_main) or not (composite or is_main):
            continue
        if taken.isdisjoint(blocks):
            taken.update(inner for block in blocks for inner in block.modules())
            yield _list_as_stack(name, child)


def _has_stages(blocks: Sequence[nn.Module]) -> bool:
    """Say whether every block has a list of blocks of its own, and their sizes differ."""
    sizes = []
    for block in blocks:
        lists = [child for _, child in _lists(block) if child is not block or len(child)]
        inner = max(lists, key=_repeated_bytes, default=None)
        if inner is None or not _repeated_bytes(inner):
            return False
        sizes.append(_repeated_bytes(inner) / len(inner))
    return max(sizes) >= _GROWTH * min(sizes)


def _lists(module: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    for name, child in module.named_modules():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield name, child


def _repeated_bytes(blocks: Iterable[nn.Module | None]) -> int:
    """Bytes of the parameters in children of the commonest type; 0 where it occurs but once."""
    children = [child for child in blocks if child is not None]
    counts = Counter(type(child) for child in children)
    largest = max(counts.values(), default=0)
    if largest < 2 or len(set(children)) < len(children):  # a block that runs twice is no stage's
        return 0
    commonest = [kind for kind, count in counts.items() if count == largest]
    return max(
        sum(p.nbytes for p in {p for c in children if type(c) is kind for p in c.parameters()})
        for kind in commonest
    )


def _list_as_stack(name: str, blocks: nn.Module) -> BlockStack:
    prefix = f"{name}." if name else ""
    # named_children() would leave out a block that is there twice instead of having it refused
    table: dict[str, nn.Module | None] = dict(blocks._modules)  # noqa: SLF001
    children = {prefix + key: child for key, child in table.items() if child is not None}
    if not children:
        raise ConfigurationError(
            f"blocks=[{name!r}]: the list is empty. Name a list with blocks in it, "
            "or leave blocks=None to have it found."
        )
    return BlockStack(name=name, blocks=tuple(children.values()), names=tuple(children))


def _child(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        existing = [n for n, _ in module.named_modules(remove_duplicate=False) if n]
        raise ConfigurationError(_unknown(module, name, existing)) from None


def _unknown(module: nn.Module, name: str, existing: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, existing, n=3, cutoff=0.5)
    lists = [n for n, child in _lists(module) if n and _repeated_bytes(child)][:5]
    hints = [f"The nearest names are {', '.join(map(repr, near))}."] if near else []
    if lists:
        hints.append(f"Its lists of blocks are {', '.join(map(repr, lists))}.")
    return " ".join(
        [
            f"blocks={name!r}: {type(module).__name__} has no submodule of that name.",
            *hints,
            "Name one of those, or leave blocks=None to have the blocks found.",
        ]
    )


def _check_blocks(names: Sequence[str], blocks: Sequence[nn.Module]) -> None:
    for name, block in zip(names, blocks, strict=True):
        if isinstance(block, nn.ModuleList | nn.ModuleDict):
            raise ConfigurationError(
                f"blocks={list(names)!r}: {name!r} is a {type(block).__name__}, which cannot be "
                "called, among several names. Name one list alone, or single blocks only."
            )
        for other_name, other in zip(names, blocks, strict=True):
            if other is not block and any(other is inner for inner in block.modules()):
                raise ConfigurationError(
                    f"blocks={list(names)!r}: {other_name!r} is inside of {name!r}. "
                    "Name blocks that run one after the other; leave out one of the two."
                )


def _common_name(names: Sequence[str]) -> str:
    """The parent that all blocks share, else the first and the last block."""
    parents = {name.rpartition(".")[0] for name in names}
    if len(parents) == 1 and (parent := parents.pop()):
        return parent
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
