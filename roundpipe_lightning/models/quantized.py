"""Frozen weights in 8 or 4 bits: small in the host store and on the way, whole where they are used.

A quantised weight is two plain tensors of whole numbers, which travel to a worker like any other
frozen parameter. The layer's own code asks for `weight` and gets it dequantised:

```
before   Linear(weight: bfloat16)
after    Linear(weight_codes: uint8, weight_scales: int32)   weight ─► dequantised when asked for
```

The experts of a mixture, which transformers holds as two parameters of three dimensions in one
module, are quantised like the weight of a linear layer. A forward pass dequantises each once, and
the backward pass once more: the graph keeps the codes, not the weights.

The arithmetic is that of bitsandbytes, on the CPU and on CUDA: NF4 in blocks of 64 for 4 bits, a
linear map of 256 values in blocks of 64 for 8 bits, a float32 scale per block. The scales are kept
as the bits of whole numbers, so that no cast to another precision touches them.

`torch.nn.utils.parametrize` would do the same to `weight`, with the same peak memory (916 MiB above
a layer of 8192 x 8192 for its 4 bits). But it names the tensors `parametrizations.weight.original0`
and `original1`, in every checkpoint, and adds two modules to each layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_parameter_registration_hook

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.planning.model.work import SCALE_BLOCK

_BLOCK = SCALE_BLOCK


@dataclass(frozen=True, kw_only=True)
class _Encoding:
    """Encoding of a quantised weight: its bits, and its shape and dtype when whole."""

    bits: int
    shape: torch.Size
    dtype: torch.dtype

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        if weight.is_meta:
            return self._without_values()
        if weight.dim() == 3 and weight[0].numel() % _BLOCK == 0:
            # bitsandbytes needs seven times what it is given, so it is given one expert at a time.
            codes, scales = zip(*map(self.quantize, weight), strict=True)
            shape = self.shape if self.bits == 8 else (-1, 1)
            return torch.cat(codes).view(shape), torch.cat(scales)
        functional = _functional()
        weight = weight.detach().contiguous()
        if self.bits == 4:
            codes, state = functional.quantize_4bit(weight, blocksize=_BLOCK, quant_type="nf4")
        else:
            codes, state = functional.quantize_blockwise(
                weight, code=self._map("cpu"), blocksize=_BLOCK
            )
        return codes, state.absmax.float().view(torch.int32)

    def _without_values(self) -> tuple[Tensor, Tensor]:
        count = self.shape.numel()
        shape = self.shape if self.bits == 8 else (-(-count // 2), 1)
        codes = torch.empty(shape, dtype=torch.uint8, device="meta")
        return codes, torch.empty(-(-count // _BLOCK), dtype=torch.int32, device="meta")

    def dequantize(self, codes: Tensor, scales: Tensor) -> Tensor:
        _functional()  # registers the operations
        absmax = scales.view(torch.float32)
        operations = torch.ops.bitsandbytes
        weight: Tensor
        if self.bits == 4:
            # As one row: the CPU kernel of bitsandbytes 0.50 gives other values where a row is not
            # made of whole blocks.
            flat = (1, self.shape.numel())
            weight = operations.dequantize_4bit(codes, absmax, _BLOCK, "nf4", flat, self.dtype)
        else:
            weight = operations.dequantize_blockwise(
                codes, absmax, self._map(codes.device), _BLOCK, self.dtype
            )
        return weight.view(self.shape)

    def _map(self, device: Any) -> Tensor:
        """The 256 values of a byte: -1 to 1 in equal steps, zero among them."""
        steps = torch.arange(-127, 128, dtype=torch.float32, device=device) / 127
        return torch.cat([steps, steps[-1:]])


class _Quantized(nn.Module):
    """Base of the class that a layer with quantised weights gets, beside the class that it had."""

    encodings: dict[str, _Encoding]  # the encodings of its weights, by name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on weights that are whole until it ends."""
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        whole = _Whole(self)
        # of this run: a view's is not written into the module
        dict.update(self.__dict__, _whole=whole)
        try:
            with saved_tensors_hooks(whole.pack, whole.unpack):
                return super().forward(*args, **kwargs)
        finally:
            dict.pop(self.__dict__, "_whole")
            whole.weights.clear()


class _Whole:
    """The weights of a layer while it runs."""

    def __init__(self, layer: _Quantized) -> None:
        self.weights: dict[str, Tensor] = {}
        self._packed = {name: _packed(layer, name) for name in layer.encodings}

    def weight(self, name: str) -> Tensor:
        if name not in self.weights:
            encoding, codes, scales = self._packed[name]
            self.weights[name] = encoding.dequantize(codes, scales)
        return self.weights[name]

    def pack(self, tensor: Tensor) -> Any:
        """Return what the graph keeps of a tensor: of a weight, or a part of it, its place."""
        storage = tensor.untyped_storage()._cdata  # noqa: SLF001 - the address is 0 on meta
        for name, weight in self.weights.items():
            if weight.untyped_storage()._cdata == storage:  # noqa: SLF001
                return name, tensor.shape, tensor.stride(), tensor.storage_offset()
        return tensor

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        name, shape, stride, offset = kept
        encoding, codes, scales = self._packed[name]
        return encoding.dequantize(codes, scales).as_strided(shape, stride, offset)


@contextmanager
def quantized_on_arrival(
    skeleton: nn.Module, bits: int
) -> Iterator[dict[nn.Parameter, tuple[Tensor, Tensor]]]:
    """Quantise weights as they are given to the modules of a model that is being loaded.

    So experts that are put together from many tensors are not all whole at once. Yields the codes
    and scales by the empty parameter in their place, for `quantize_frozen`.

    Args:
        skeleton: The same model, frozen, on the meta device.
    """

    def kind(layer: nn.Module, name: str, weight: Tensor) -> tuple[Any, ...]:
        return type(layer), name, weight.shape

    found = set(quantizable_weights(skeleton))
    kinds = {kind(layer, name, getattr(layer, name)) for layer, name in found}
    for layer in skeleton.modules():  # an output layer may be like another one
        for name, weight in layer.named_parameters(recurse=False):
            if (layer, name) not in found:
                kinds.discard(kind(layer, name, weight))
    made: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}

    def replace(layer: nn.Module, name: str, weight: nn.Parameter | None) -> nn.Parameter | None:
        if weight is None or weight.is_meta or kind(layer, name, weight) not in kinds:
            return None
        empty = nn.Parameter(torch.empty_like(weight, device="meta"))
        empty._is_hf_initialized = True  # type: ignore[attr-defined]  # noqa: SLF001
        encoding = _Encoding(bits=bits, shape=weight.shape, dtype=weight.dtype)
        made[empty] = encoding.quantize(weight)
        return empty

    hook = register_module_parameter_registration_hook(cast("Callable[..., None]", replace))
    try:
        yield made
    finally:
        hook.remove()


def quantize_frozen(
    model: nn.Module,
    bits: int,
    made: Mapping[nn.Parameter, tuple[Tensor, Tensor]] = MappingProxyType({}),
) -> None:
    """Freeze a model and quantise its layers to 8 or 4 bits, one by one, in place.

    It is on the host or the meta device; adapters are added afterwards. ConfigurationError: it has
    no layer to quantise, or bitsandbytes is missing.

    Args:
        made: The codes and scales of `quantized_on_arrival`.
    """
    model.requires_grad_(False)
    _functional()
    classes: dict[tuple[type, tuple[str, ...]], type] = {}
    found = list(quantizable_weights(model))
    if not found:
        raise ConfigurationError(
            f"model.frozen_bits={bits}: {type(model).__name__} has no linear layer or experts that "
            "could be quantised. Use model.frozen_bits=16."
        )
    for layer in dict.fromkeys(layer for layer, _ in found):
        names = tuple(name for other, name in found if other is layer)
        _quantize(layer, names, bits=bits, made=made, classes=classes)


def quantizable_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield layers and the names of their weights that are quantised.

    They are those of linear layers and of fused experts. The output layer keeps its weight, and so
    does everything that is trained or shared, or is not made of whole blocks of 64.
    """
    getters = (getattr(part, "get_output_embeddings", None) for part in model.modules())
    output = next((get() for get in getters if get is not None), None)
    output = getattr(output, "base_layer", output)
    counts = Counter(p for layer in model.modules() for p in layer._parameters.values())  # noqa: SLF001
    for layer in model.modules():
        if layer is output or encodings_of(layer):
            continue
        for name, weight in layer._parameters.items():  # noqa: SLF001
            if (
                weight is not None
                and _is_matrix(layer, name, weight)
                and counts[weight] == 1
                and not weight.requires_grad
                and weight.numel() % _BLOCK == 0
            ):
                yield layer, name


def _is_matrix(layer: nn.Module, name: str, weight: Tensor) -> bool:
    if isinstance(layer, nn.Linear):
        return name == "weight"
    return weight.dim() == 3 and weight.shape[0] == getattr(layer, "num_experts", None)


def encodings_of(layer: nn.Module) -> Mapping[str, _Encoding]:
    """Return the encodings of a layer's quantised weights by name.

    The layer holds `NAME_codes` and `NAME_scales` in place of a weight; asked for `NAME`, it
    dequantises it.
    """
    return layer.encodings if isinstance(layer, _Quantized) else {}


def represented_values(module: nn.Module) -> dict[Tensor, int]:
    """Values that tensors of quantised weights stand for: codes for all, scales for none."""
    found: dict[Tensor, int] = {}
    for layer in module.modules():
        for name in encodings_of(layer):
            encoding, codes, scales = _packed(layer, name)
            found |= {codes: encoding.shape.numel(), scales: 0}
    return found


def dequantize_layer(layer: nn.Module) -> None:
    weights = {name: getattr(layer, name).detach() for name in encodings_of(layer)}
    layer.__class__ = type(layer).__mro__[2]
    del layer.encodings
    for name, weight in weights.items():
        delattr(layer, f"{name}_codes")
        delattr(layer, f"{name}_scales")
        layer.register_parameter(name, nn.Parameter(weight, requires_grad=False))


def _quantize(
    layer: nn.Module,
    names: tuple[str, ...],
    *,
    bits: int,
    made: Mapping[nn.Parameter, tuple[Tensor, Tensor]],
    classes: dict[tuple[type, tuple[str, ...]], type],
) -> None:
    base, encodings = type(layer), {}
    for name in names:
        weight: nn.Parameter = getattr(layer, name)
        encodings[name] = _Encoding(bits=bits, shape=weight.shape, dtype=weight.dtype)
        codes, scales = made.get(weight) or encodings[name].quantize(weight)
        delattr(layer, name)
        layer.register_parameter(f"{name}_codes", nn.Parameter(codes, requires_grad=False))
        layer.register_parameter(f"{name}_scales", nn.Parameter(scales, requires_grad=False))
        del weight
    if (base, names) not in classes:
        weights = {name: property(partial(_weight, name=name)) for name in names}
        classes[base, names] = type(base.__name__, (_Quantized, base), weights)
    layer.__class__ = classes[base, names]
    layer.encodings = encodings  # type: ignore[assignment]


def _packed(layer: Any, name: str) -> tuple[_Encoding, Tensor, Tensor]:
    return layer.encodings[name], getattr(layer, f"{name}_codes"), getattr(layer, f"{name}_scales")


def _weight(layer: Any, name: str) -> Tensor:
    whole: _Whole | None = layer.__dict__.get("_whole")
    if whole is not None:
        return whole.weight(name)
    encoding, codes, scales = _packed(layer, name)
    return encoding.dequantize(codes, scales)


def _functional() -> Any:
    """The functions of bitsandbytes, imported when they are first needed."""
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ConfigurationError(
            "model.frozen_bits below 16 needs bitsandbytes, which cannot be imported "
            f"({error}). Install it: pip install 'roundpipe-lightning[quant]'."
        ) from error
    return functional
