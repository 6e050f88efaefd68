"""Frozen weights in 8 or 4 bits: small in the host store and on the way, whole where they are used.

A quantised weight is two plain tensors of whole numbers, which travel to a worker like any other
frozen parameter. The layer's own code asks for `weight` and gets it dequantised:

```
before   Linear(weight: bfloat16)
after    Linear(weight_codes: uint8, weight_scales: int32)   weight ─► dequantised when asked for
```

The arithmetic is that of bitsandbytes, on the CPU and on CUDA: NF4 in blocks of 64 for 4 bits, a
linear map of 256 values in blocks of 64 for 8 bits, a float32 scale per block. The scales are kept
as the bits of whole numbers, so that no cast to another precision touches them.

`torch.nn.utils.parametrize` would do the same to `weight`, with the same peak memory (916 MiB above
a layer of 8192 x 8192 for its 4 bits). But it names the tensors `parametrizations.weight.original0`
and `original1`, in every checkpoint, and adds two modules to each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.errors import ConfigurationError

BITS = (16, 8, 4)
"""Values of `model.frozen_bits`; 16 stands for the dtype of the weights as they are."""

_BLOCK = 64  # weights that share a scale


@dataclass(frozen=True, kw_only=True)
class _Encoding:
    """Encoding of a quantised weight: its bits, and its shape and dtype when whole."""

    bits: int
    shape: torch.Size
    dtype: torch.dtype

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a weight."""
        if weight.is_meta:
            return self._without_values()
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
        """The weight, on the device of its codes."""
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
    """Base of the class that a layer with a quantised weight gets, beside the class that it had."""

    encoding: _Encoding
    weight_codes: Tensor
    weight_scales: Tensor


def check_bits(bits: int) -> None:
    """Refuse other numbers of bits.

    Raises:
        ConfigurationError: Naming those there are.
    """
    if bits not in BITS:
        raise ConfigurationError(f"model.frozen_bits={bits} is not one of 16, 8, 4.")


def quantize_frozen(model: nn.Module, bits: int) -> None:
    """Freeze a model and quantise its linear layers, in place. Adapters are added afterwards.

    Args:
        model: On the host.
        bits: 8 or 4.

    Raises:
        ConfigurationError: The model has no linear layer to quantise, or bitsandbytes is missing.
    """
    model.requires_grad_(False)
    if not quantize_linear(model, bits):
        raise ConfigurationError(
            f"model.frozen_bits={bits}: {type(model).__name__} has no linear layer that could be "
            "quantised. Use model.frozen_bits=16."
        )


def quantize_linear(model: nn.Module, bits: int) -> int:
    """Quantise the frozen weights of linear layers one after the other, in place.

    The output layer keeps its weight, and so does everything that is trained or shared, is not a
    linear layer, or is not made of whole blocks of 64.

    Args:
        model: On the host, or on the meta device.
        bits: 8 or 4.

    Returns:
        How many layers were quantised.
    """
    check_bits(bits)
    _functional()
    output = getattr(model, "get_output_embeddings", lambda: None)()
    output = getattr(output, "base_layer", output)
    classes: dict[type, type] = {}
    shared = _shared(model)
    count = 0
    for layer in list(model.modules()):
        if not isinstance(layer, nn.Linear) or layer is output or is_quantized(layer):
            continue
        weight = layer.weight
        if weight not in shared and not weight.requires_grad and weight.numel() % _BLOCK == 0:
            _quantize(layer, bits=bits, classes=classes)
            count += 1
    return count


def is_quantized(layer: nn.Module) -> bool:
    return isinstance(layer, _Quantized)


def tensors_of(layer: nn.Module) -> dict[str, tuple[Tensor, Callable[[], Tensor], Tensor]]:
    """Return the tensors of a quantised layer as they would be without quantisation.

    Returns:
        By name: the tensor without values, how to get them, and the tensor that holds them.
    """
    assert isinstance(layer, _Quantized)
    like = torch.empty(layer.encoding.shape, dtype=layer.encoding.dtype, device="meta")
    found: dict[str, tuple[Tensor, Callable[[], Tensor], Tensor]] = {
        "weight": (like, lambda: _weight(layer), layer.weight_codes)
    }
    bias = layer.bias
    if isinstance(bias, Tensor):
        found["bias"] = (torch.empty_like(bias, device="meta"), lambda: bias, bias)
    return found


def dequantized(layer: nn.Module) -> nn.Module:
    """A copy of a layer whose weight is an ordinary parameter; the codes are shared until then."""
    assert isinstance(layer, _Quantized)
    plain: Any = object.__new__(type(layer).__mro__[2])
    plain.__dict__.update(layer.__dict__)
    for table in ("_parameters", "_buffers", "_modules"):
        plain.__dict__[table] = dict(layer.__dict__[table])
    del plain.weight_codes, plain.weight_scales
    plain.weight = nn.Parameter(_weight(layer).detach(), requires_grad=False)
    result: nn.Module = plain
    return result


def _quantize(layer: nn.Linear, *, bits: int, classes: dict[type, type]) -> None:
    weight = layer.weight
    encoding = _Encoding(bits=bits, shape=weight.shape, dtype=weight.dtype)
    codes, scales = encoding.quantize(weight)
    del layer.weight
    base = type(layer)
    if base not in classes:
        classes[base] = type(base.__name__, (_Quantized, base), {"weight": property(_weight)})
    layer.__class__ = classes[base]
    layer.encoding = encoding  # type: ignore[assignment]
    layer.weight_codes = nn.Parameter(codes, requires_grad=False)
    layer.weight_scales = nn.Parameter(scales, requires_grad=False)


def _weight(layer: Any) -> Tensor:
    encoding: _Encoding = layer.encoding
    return encoding.dequantize(layer.weight_codes, layer.weight_scales)


def _shared(model: nn.Module) -> set[Tensor]:
    """Parameters that several modules have."""
    seen: set[Tensor] = set()
    shared: set[Tensor] = set()
    for module in model.modules():
        for parameter in module._parameters.values():  # noqa: SLF001
            if parameter is not None:
                (shared if parameter in seen else seen).add(parameter)
    return shared


def _functional() -> Any:
    """The functions of bitsandbytes, imported when they are first needed.

    Raises:
        ConfigurationError: It is not installed.
    """
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ConfigurationError(
            "model.frozen_bits below 16 needs bitsandbytes, which cannot be imported "
            f"({error}). Install it: pip install 'roundpipe-lightning[quant]'."
        ) from error
    return functional
