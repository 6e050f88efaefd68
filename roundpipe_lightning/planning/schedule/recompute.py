"""What the backward pass of a block starts from."""

from __future__ import annotations

from enum import Enum


class RecomputePolicy(Enum):
    """What BACKWARD stages do before their backward."""

    FULL = "full"
    """They run their blocks again, from the stored boundary."""

    SELECTIVE = "selective"
    """They run their blocks again, but for attention, whose outputs are kept: less to recompute,
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
"""What a SELECTIVE recompute does not run again: PyTorch's fused attention, and that of the
flash-attn package. Their outputs are small, and their time grows with the square of the sequence.
An operation that drops out draws random numbers and is run again. Attention that is written out in
products and a softmax is, too."""


def operations_kept(policy: RecomputePolicy) -> tuple[str, ...]:
    """Return the names of the operations whose outputs a policy keeps for the recompute."""
    return ATTENTION_OPERATIONS if policy is RecomputePolicy.SELECTIVE else ()
