"""Stands in for attention while a model is counted on the meta device.

On the meta device PyTorch would spell attention out, with a matrix of scores for every head. What
runs on an accelerator is a fused kernel. So attention is given the fused kernel's own operation
there, which keeps no scores; `Meter` counts it by its shapes. No result is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["FusedAttention", "fused_attention", "transformers_attention"]


def fused_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, window: int | None = None
) -> Tensor:
    """Return an empty result, through the fused kernel's operation.

    Args:
        query: Shape (sequences, heads, tokens, features).
        key: Shape (sequences, heads or a divisor of them, tokens, features).
        value: Shape like `key`, perhaps with other features.
        is_causal: Whether tokens see only those before them.
        window: Tokens that each one sees; None: no limit.

    Returns:
        Shape (sequences, heads, tokens, features of the value).
    """
    features = value.shape[-1]
    if features != query.shape[-1]:
        value = F.pad(value, (0, query.shape[-1] - features))
    tokens_first = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    result = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        *tokens_first,
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        is_causal,
        False,
        window_size_left=None if window is None else window - 1,
        window_size_right=0 if is_causal else None,
    )[0]
    return cast(Tensor, result.transpose(1, 2)[..., :features])


class FusedAttention(TorchFunctionMode):
    """Turns `scaled_dot_product_attention` into `fused_attention`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace one function, call all others."""
        if func is F.scaled_dot_product_attention:
            return _scaled_dot_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,  # noqa: ARG001
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,  # noqa: FBT001, FBT002
    **_: Any,
) -> Tensor:
    if query.dim() != 4:
        shaped = [tensor.reshape(-1, 1, *tensor.shape[-2:]) for tensor in (query, key, value)]
        result = fused_attention(shaped[0], shaped[1], shaped[2], is_causal=is_causal)
        return result.reshape(*query.shape[:-1], value.shape[-1])
    return fused_attention(query, key, value, is_causal=is_causal)


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return what transformers expects of an attention function, through `fused_attention`."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and query.shape[2] > 1
    result = fused_attention(query, key, value, is_causal=causal, window=sliding_window)
    return result.transpose(1, 2).contiguous(), None
