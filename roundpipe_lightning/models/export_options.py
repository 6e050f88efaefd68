"""How a model is exported; checked where it is made, long before the export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from roundpipe_lightning.errors import ConfigurationError

DTYPES = {
    "auto": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Values of `dtype`; `auto` keeps that of every parameter."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a model is exported.

    Attributes:
        dtype: `"auto"`, `"fp32"`, `"bf16"` or `"fp16"`, of the tensors in the files.
        merge: Whether adapters are merged into their base, which is then exported whole.
        overwrite: Whether a folder that holds anything but an earlier export may be replaced.
        max_shard_bytes: Largest size of a safetensors file; a larger tensor has one of its own.
        original_layout: Whether parameters that transformers has fused are taken apart as published
            checkpoints have them. Without, `model.frozen_weights=mmap` can map every parameter.
        tokenizer: A tokenizer with `save_pretrained`, a folder or a hub name whose tokenizer is
            added; None takes that of the folder the model was loaded from, if it has one.

    Raises:
        ConfigurationError: The dtype is unknown, or the size is not positive.
    """

    dtype: str = "auto"
    merge: bool = False
    overwrite: bool = False
    max_shard_bytes: int = 5_000_000_000
    original_layout: bool = True
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}.")
        if self.max_shard_bytes < 1:
            raise ConfigurationError(
                f"max_shard_bytes={self.max_shard_bytes} must be a number of bytes, 1 or more."
            )
