"""Several documents in one row: whether a model keeps their attention apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from roundpipe_lightning.errors import ConfigurationError

_PROBE_TOKENS = 4
"""Tokens of each of the two documents that a model is tried with."""


def runs_flash_attention(model: Any) -> bool:
    """Whether a transformers model calls a flash attention kernel."""
    return "flash" in str(getattr(model.config, "_attn_implementation", ""))


def as_one_row(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of packed documents as a single row.

    Flash attention tells documents apart by their positions in a single row only; with several
    rows it would let them see each other. Since every document starts with a label of -100, the
    loss is the same.

    Args:
        batch: Tensors of shape (rows, tokens), `position_ids` among them.
    """
    return {name: values.reshape(1, -1) for name, values in batch.items()}


@torch.no_grad()
def check_documents_apart(model: Any) -> None:
    """Refuse a model in which a packed document sees the one before it.

    Two rows differ in their first document only. If the model's logits for the second document
    differ, something leaks: a state that runs through the row, positions that are not used. One
    forward pass of a few tokens, where the model is. Flash attention, which may not run there, is
    left out: its rows are told apart by transformers itself.

    Args:
        model: A causal language model.

    Raises:
        ConfigurationError: The documents are not kept apart.
    """
    if runs_flash_attention(model):
        return
    first = torch.arange(2 * _PROBE_TOKENS).reshape(2, _PROBE_TOKENS)
    second = torch.arange(_PROBE_TOKENS).expand(2, _PROBE_TOKENS)
    ids = torch.cat([first + 1, second + 1], dim=1).to(next(model.parameters()).device)
    positions = torch.arange(_PROBE_TOKENS, device=ids.device).repeat(2).expand(2, -1)
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    finally:
        model.train(was_training)
    own = logits[:, _PROBE_TOKENS:].float()
    leaked = (own[0] - own[1]).abs().max().item()
    noise = 100 * torch.finfo(logits.dtype).eps * own.abs().max().item()
    if not leaked <= noise:
        raise ConfigurationError(
            f"This model ({type(model).__name__}) does not keep the documents of a packed row "
            f"apart: the logits of one change by {leaked:.2g} with the document before it. Use "
            "data.packing=false, or another attention implementation (model.attention=sdpa)."
        )
