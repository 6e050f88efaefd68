"""Low-rank adapters: the model's own weights stay as they are, small matrices are trained."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from roundpipe_lightning.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class LoraAdapters:
    """LoRA (arXiv 2106.09685) on some of a model's linear layers.

    Attributes:
        rank: Columns of the first and rows of the second small matrix.
        alpha: The adapters' output is scaled by `alpha / rank`.
        dropout: Share of the adapters' inputs that is dropped, 0 to 1.
        target_modules: Last parts of the names of the layers that get adapters.

    Raises:
        ConfigurationError: A figure is out of its range.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigurationError(f"peft.rank={self.rank} must be 1 or more.")
        if not 0 <= self.dropout < 1:
            raise ConfigurationError(f"peft.dropout={self.dropout} must lie between 0 and 1.")
        if not self.target_modules:
            raise ConfigurationError("peft.target_modules is empty: name the layers to adapt.")

    def apply(self, model: PreTrainedModel) -> PeftModel:
        """Put adapters into a model, in place, and freeze all else.

        Raises:
            ConfigurationError: The model has no layer of one of the names.
        """
        _check_names(model, self.target_modules)
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type,unused-ignore]
            lora_dropout=self.dropout,
            target_modules=list(self.target_modules),
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            # peft 0.21 reads a property that transformers 5.23 has renamed
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
            return cast(PeftModel, get_peft_model(model, config))


def _check_names(model: nn.Module, names: Sequence[str]) -> None:
    linear = {
        name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)
    }
    for name in names:
        if name not in linear:
            near = difflib.get_close_matches(name, linear, n=3, cutoff=0.5)
            hint = f"The nearest are {', '.join(near)}." if near else ""
            raise ConfigurationError(
                f"peft.target_modules: the model has no linear layer {name!r}. {hint} There are "
                f"{', '.join(sorted(linear))}."
            )
