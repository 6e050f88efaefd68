"""How published weights are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How weights are read.

    Attributes:
        dtype: Of the parameters; None keeps that of the configuration (`"auto"`).
        attention: Transformers' attention implementation; None lets it choose.
        unmatched: Regular expressions of tensors that may be missing from the checkpoint (they are
            drawn anew) or that it may have besides (they are left out).
        new_head: Whether what stands on top of the base model may be missing or another one.
        mapped: Whether parameters stay in the files, frozen, where the files hold them as they are.
        frozen_bits: 8 or 4 quantise the linear layers while the weights are read, and freeze the
            model; 16 leaves them as they are.
        trust_remote_code: Whether code that comes with the model may run.
        others: Further keyword arguments of `from_pretrained`.
    """

    dtype: torch.dtype | None = None
    attention: str | None = None
    unmatched: Sequence[str] = ()
    new_head: bool = False
    mapped: bool = False
    frozen_bits: int = 16
    trust_remote_code: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quantizes(self) -> bool:
        """Whether weights are quantised."""
        return self.frozen_bits < 16

    @property
    def hub(self) -> dict[str, Any]:
        """Those that say where the files are."""
        return {key: value for key, value in self.others.items() if key in _HUB_OPTIONS}

    @property
    def building(self) -> dict[str, Any]:
        """Those that say how the model is built."""
        options = {key: value for key, value in self.others.items() if key not in _HUB_OPTIONS}
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        return {"dtype": self.dtype or "auto", **options}
