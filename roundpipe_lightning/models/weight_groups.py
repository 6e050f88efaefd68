"""A model's weights one after the other, as they are to be written, without a copy of the whole.

```
module tree ─► weights, one by one ─► groups (a block each) ─► in the checkpoint's layout ─► shards
               name, shape, how to get the values               transformers' own conversion
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
from roundpipe_lightning.models.quantized import dequantize_layer, encodings_of

_BLOCK = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """One tensor of a model."""

    name: str  # as in the state dict of the model without adapters
    like: Tensor  # shape and dtype, on the meta device
    make: Callable[[], Tensor]  # gives the values; they may be the model's own memory
    adapters: frozenset[int] = frozenset()  # where the tensors are that it is merged from


@dataclass(frozen=True)
class WeightGroup:
    """Tensors that a checkpoint's layout may have in other parts than the model."""

    weights: Sequence[_Weight]
    model: PreTrainedModel | None  # knows the layout; None: the model's own

    def like(self) -> dict[str, Tensor]:
        return self._in_layout({weight.name: weight.like for weight in self.weights})

    def tensors(self) -> dict[str, Tensor]:
        return self._in_layout({weight.name: weight.make().detach() for weight in self.weights})

    def _in_layout(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.model is None:
            return tensors
        converted: dict[str, Tensor] = revert_weight_conversion(self.model, tensors)
        return converted


def weight_groups(model: PreTrainedModel, *, original_layout: bool) -> list[WeightGroup]:
    """Every tensor that is saved of a model, adapters merged into it; tied ones once.

    Tensors that are written together are a group: those of a block, and the rest.

    Args:
        original_layout: Whether fused parameters are taken apart as in published checkpoints.

    Raises:
        ConfigurationError: Adapters change one of two weights that the model ties, or each in its
            own way.
    """
    weights = _weights_of(model)
    if not original_layout:
        return [WeightGroup((weight,), None) for weight in weights]
    by_block: dict[str, list[_Weight]] = {}
    for weight in weights:
        match = _BLOCK.match(weight.name)
        by_block.setdefault("" if match is None else match[1], []).append(weight)
    groups = [WeightGroup(members, model) for members in by_block.values()]
    apart = {name: t.shape for group in groups for name, t in group.like().items()}
    together = WeightGroup(weights, model)
    whole = {name: tensor.shape for name, tensor in together.like().items()}
    return groups if apart == whole else [together]


def _weights_of(model: PreTrainedModel) -> list[_Weight]:
    ignored = set(model._keys_to_ignore_on_save or ())  # noqa: SLF001
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    owners: dict[Tensor, str] = {}
    found: dict[str, _Weight] = {}
    for weight, tensor in _walk(model, prefix=""):
        if weight.name in ignored:
            continue
        other = owners.setdefault(tensor, weight.name)
        if other != weight.name and (weight.name in tied or other in tied):
            if weight.adapters != found[other].adapters:
                changed = [w.name for w in (weight, found[other]) if w.adapters]
                how = f"only {changed[0]}" if len(changed) == 1 else "each in another way"
                raise ConfigurationError(
                    f"{weight.name} and {other} are one weight, and the adapters change {how}: a "
                    "merged model cannot hold both. Export the adapter instead (merge=false), or "
                    "train it with ensure_weight_tying=true."
                )
            if other not in tied:
                continue
            del found[other]
            owners[tensor] = weight.name
        found[weight.name] = weight
    return list(found.values())


def _walk(module: nn.Module, *, prefix: str) -> Iterator[tuple[_Weight, Tensor]]:
    """Yield weights with the tensor that tied ones share; a layer with adapters as if merged."""
    if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
        yield from _merged_weights(module, prefix=prefix)
        return
    packed = set()
    for name, encoding in encodings_of(module).items():
        like = torch.empty(encoding.shape, dtype=encoding.dtype, device="meta")
        codes = getattr(module, f"{name}_codes")
        packed |= {codes, getattr(module, f"{name}_scales")}
        yield _Weight(name=prefix + name, like=like, make=partial(getattr, module, name)), codes
    hidden = module._non_persistent_buffers_set  # noqa: SLF001
    buffers = {k: b for k, b in module._buffers.items() if k not in hidden}  # noqa: SLF001
    for name, tensor in {**module._parameters, **buffers}.items():  # noqa: SLF001
        if tensor is not None and tensor not in packed:
            like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            yield (
                _Weight(name=prefix + name, like=like, make=partial(getattr, module, name)),
                tensor,
            )
    for name, child in module.named_children():
        yield from _walk(child, prefix=f"{prefix}{name}.")


def _merged_weights(layer: nn.Module, *, prefix: str) -> Iterator[tuple[_Weight, Tensor]]:
    made: list[dict[str, Tensor]] = []
    base: Any = layer  # the layer below all wrappers of peft
    while isinstance(base, AuxiliaryTrainingWrapper | BaseTunerLayer):
        if isinstance(base, BaseTunerLayer):
            base = base.get_base_layer()
        else:
            base = base.original_module

    # tied adapters share their memory, as peft's ensure_weight_tying makes them
    adapters = frozenset(tensor.data_ptr() for tensor in layer.parameters())

    def make(name: str) -> Tensor:
        if not made:
            made.append(_merged(layer).state_dict())
        tensor = made[0].pop(name)
        if not made[0]:
            made.clear()
        return tensor

    for weight, tensor in _walk(base, prefix=""):
        merged = _Weight(
            name=prefix + weight.name,
            like=weight.like,
            make=partial(make, weight.name),
            adapters=adapters,
        )
        yield merged, tensor


def _merged(layer: nn.Module) -> nn.Module:
    """A copy of a layer with its active adapters merged into it, as peft does it."""
    copied: Any = copy.deepcopy(layer)
    for part in copied.modules():
        if encodings_of(part):
            dequantize_layer(part)
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
