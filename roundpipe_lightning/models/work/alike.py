"""Changes a model without values in one block of each kind, and copies that into the others.

What puts adapters into a model looks at every module by its name, many times: in a model of 94
blocks for seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn

from roundpipe_lightning.engine.capture.compiled import plain_copy
from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.work.meta_run import kinds_of

Parameters: TypeAlias = dict[nn.Parameter, nn.Parameter]


@contextmanager
def one_of_each_kind(model: nn.Module) -> Iterator[None]:
    """Leave out blocks that are like another one, and put copies of that in their places at last.

    Whoever changes the model meanwhile must do the same to blocks that are alike. Nothing is left
    out where blocks share parameters.

    Args:
        model: On the meta device; the copies' tensors have no values either. What a block's
            parameters were they stay: another model may have them, too.
    """
    links = Chain.from_stacks(find_stacks(model, None)).links
    uses = Counter(p for link in links for p in link.block.parameters())
    if max(uses.values(), default=1) > 1:
        yield
        return
    firsts: dict[int, tuple[nn.Module, str, nn.Module]] = {}
    left_out: list[tuple[nn.Module, str, nn.Module, str, Parameters]] = []
    orders: dict[nn.Module, list[str]] = {}
    for link, kind in zip(links, kinds_of(links), strict=True):
        name, _, key = link.name.rpartition(".")
        parent = model.get_submodule(name)
        orders.setdefault(parent, list(parent._modules))  # noqa: SLF001
        holder, first_key, first = firsts.setdefault(kind, (parent, key, link.block))
        if first is not link.block:
            own = dict(zip(first.parameters(), link.block.parameters(), strict=True))
            left_out.append((parent, key, holder, first_key, own))
    for parent, key, *_ in left_out:
        del parent._modules[key]  # noqa: SLF001
    try:
        yield
    finally:
        for parent, key, holder, first_key, own in left_out:
            parent._modules[key] = _copy(holder.get_submodule(first_key), own)  # noqa: SLF001
        for parent, keys in orders.items():
            blocks = parent._modules  # noqa: SLF001
            parent._modules = {key: blocks[key] for key in keys}  # noqa: SLF001


def _copy(module: nn.Module, own: Parameters) -> nn.Module:
    """A module with parts of its own, and of containers; other objects are the same ones."""

    def placed(parameter: nn.Parameter) -> nn.Parameter:
        like = own[parameter] if parameter in own else nn.Parameter(torch.empty_like(parameter))
        like.requires_grad = parameter.requires_grad
        return like

    made = plain_copy(module, parameter=placed, buffer=torch.empty_like)
    for state in map(vars, made.modules()):
        state.update({k: v.copy() for k, v in state.items() if isinstance(v, dict | list | set)})
    return made
