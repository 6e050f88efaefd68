"""A model with adapters, as a user's module has it."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn


class Adapted(nn.Module):
    """The user's module: adapters, none of them zero, on a causal language model."""

    def __init__(self, base: Any, config: LoraConfig) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = get_peft_model(base, config)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        base: Any = self.model.get_base_model()
        return tuple(base.model.layers)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, labels=batch["input_ids"], use_cache=False).loss
        return loss
