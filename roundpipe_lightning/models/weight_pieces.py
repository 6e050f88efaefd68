"""A model's weights one after the other, as they are to be written, without a copy of the whole.

```
module tree ─► Piece, Piece, ... ─► groups (a block each) ─► in the checkpoint's layout ─► shards
               name, shape, how to get the values             transformers' own conversion
```

Adapters are merged layer by layer, on a copy of that layer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.quantized import dequantized, is_quantized, tensors_of

_BLOCK = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One tensor of a model.

    Attributes:
        name: As in the state dict of the model without adapters.
        like: Shape and dtype, on the meta device.
        make: Gives the values; they may be the model's own memory.
        merged: Whether the values are those with adapters, not the model's own.
    """

    name: str
    like: Tensor
    make: Callable[[], Tensor]
    merged: bool = False


def pieces_of(model: PreTrainedModel) -> list[Piece]:
    """Every tensor that is saved of a model, adapters merged into it; tied ones once.

    Args:
        model: A model of transformers, adapters of peft inside it or not.

    Raises:
        ConfigurationError: Adapters change one of two weights that the model ties.
    """
    ignored = set(model._keys_to_ignore_on_save or ())  # noqa: SLF001
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    owners: dict[Tensor, str] = {}
    found: dict[str, Piece] = {}
    for piece, tensor in _walk(model, prefix=""):
        if piece.name in ignored:
            continue
        other = owners.setdefault(tensor, piece.name)
        if other != piece.name and (piece.name in tied or other in tied):
            _check_tied(piece, found[other])
            if other not in tied:
                continue
            del found[other]
            owners[tensor] = piece.name
        found[piece.name] = piece
    return list(found.values())


def _check_tied(first: Piece, second: Piece) -> None:
    if first.merged != second.merged:
        raise ConfigurationError(
            f"{first.name} and {second.name} are one weight, and the adapters change only "
            f"{first.name if first.merged else second.name}: a merged model cannot hold both. "
            "Export the adapter instead (merge=false), or train it with ensure_weight_tying=true."
        )


def groups_of(
    pieces: Sequence[Piece], *, model: PreTrainedModel, original_layout: bool
) -> list[Group]:
    """Pieces that are written together: those of a block, and the rest.

    Args:
        pieces: Of the model.
        model: Knows how its checkpoints are laid out.
        original_layout: Whether fused parameters are taken apart as published checkpoints have
            them.
    """
    if not original_layout:
        return [Group((piece,), model=None) for piece in pieces]
    by_block: dict[str, list[Piece]] = {}
    for piece in pieces:
        match = _BLOCK.match(piece.name)
        by_block.setdefault("" if match is None else match[1], []).append(piece)
    groups = [Group(tuple(members), model=model) for members in by_block.values()]
    apart = {name: t.shape for group in groups for name, t in group.like().items()}
    together = Group(tuple(pieces), model=model)
    whole = {name: tensor.shape for name, tensor in together.like().items()}
    return groups if apart == whole else [together]


class Group:
    """Tensors that a checkpoint's layout may have in other parts than the model.

    Args:
        pieces: The model's tensors.
        model: Knows the layout; None: the model's own.
    """

    def __init__(self, pieces: tuple[Piece, ...], *, model: PreTrainedModel | None) -> None:
        self._pieces = pieces
        self._model = model

    def like(self) -> dict[str, Tensor]:
        """Names, shapes and dtypes in the checkpoint, without values."""
        return self._in_layout({piece.name: piece.like for piece in self._pieces})

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint's tensors, detached, on the host."""
        return self._in_layout({piece.name: piece.make().detach() for piece in self._pieces})

    def _in_layout(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self._model is None:
            return tensors
        converted: dict[str, Tensor] = revert_weight_conversion(self._model, tensors)
        return converted


def _walk(module: nn.Module, *, prefix: str) -> Iterator[tuple[Piece, Tensor]]:
    """Yield pieces with the tensor that tells tied ones; a layer with adapters as if merged."""
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        yield from _merged_pieces(module, prefix=prefix)
        return
    if is_quantized(module):
        yield from _quantized_pieces(module, prefix=prefix)
        return
    persistent = module._non_persistent_buffers_set  # noqa: SLF001
    buffers = {k: b for k, b in module._buffers.items() if k not in persistent}  # noqa: SLF001
    for name, tensor in {**module._parameters, **buffers}.items():  # noqa: SLF001
        if tensor is not None:
            yield _plain_piece(prefix + name, tensor), tensor
    for name, child in module.named_children():
        yield from _walk(child, prefix=f"{prefix}{name}.")


def _plain_piece(name: str, tensor: Tensor) -> Piece:
    return Piece(name=name, like=_without_values(tensor), make=lambda: tensor)


def _quantized_pieces(layer: nn.Module, *, prefix: str) -> Iterator[tuple[Piece, Tensor]]:
    for name, parameter in tensors_of(layer).items():
        like, make, token = parameter
        yield Piece(name=prefix + name, like=like, make=make), token


def _merged_pieces(layer: nn.Module, *, prefix: str) -> Iterator[tuple[Piece, Tensor]]:
    made: list[dict[str, Tensor]] = []
    base = _base_of(layer)

    def make(name: str) -> Tensor:
        if not made:
            made.append(_merged(layer).state_dict())
        tensor = made[0].pop(name)
        if not made[0]:
            made.clear()
        return tensor

    for part, tensor in _walk(base, prefix=""):
        piece = Piece(
            name=prefix + part.name, like=part.like, make=partial(make, part.name), merged=True
        )
        yield piece, tensor


def _base_of(layer: nn.Module) -> nn.Module:
    """The layer below all wrappers of peft."""
    below: Any = layer
    while True:
        if isinstance(below, AuxiliaryTrainingWrapper):
            below = below.original_module
        elif isinstance(below, BaseTunerLayer):
            below = below.get_base_layer()
        else:
            return cast(nn.Module, below)


def _merged(layer: nn.Module) -> nn.Module:
    """A copy of a layer with its active adapters merged into it, as peft does it."""
    copied: Any = copy.deepcopy(layer)
    for holder in list(copied.modules()):
        for name, part in list(holder.named_children()):
            if is_quantized(part):
                setattr(holder, name, dequantized(part))
    with torch.no_grad():
        while True:
            if hasattr(copied, "unload_and_optionally_merge_module"):
                copied = copied.unload_and_optionally_merge_module(
                    merge=True, safe_merge=False, adapter_names=None
                )
            elif isinstance(copied, BaseTunerLayer):
                copied.merge(safe_merge=False, adapter_names=None)
                copied = copied.get_base_layer()
            else:
                return cast(nn.Module, copied)


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
