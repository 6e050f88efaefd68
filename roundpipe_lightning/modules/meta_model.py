"""A module without values: what a training does, before anything is drawn or read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.microbatch import loss_of
from roundpipe_lightning.models.losses.lazy_logits import LossFusion
from roundpipe_lightning.models.work.work_profile import causal_lm_call, work_profile
from roundpipe_lightning.modules.causal_lm import CausalLanguageModule
from roundpipe_lightning.planning.model.work import WorkProfile
from roundpipe_lightning.strategy.planning.dry_run import SilentMetric


@dataclass(kw_only=True, eq=False)
class MetaModel:
    """A module on the meta device, and what it does, measured when it is first asked for.

    Attributes:
        compute_dtype: What autocast computes in; None: what the parameters are.
        is_fused: Whether losses are computed without whole logits.
    """

    module: LightningModule
    stacks: Sequence[BlockStack]
    compute_dtype: torch.dtype | None
    is_fused: bool

    @cached_property
    def work(self) -> WorkProfile:
        """Work of a microbatch as a function of its shape.

        Raises:
            ConfigurationError: The model's code cannot be run without values.
        """
        metrics = [part for part in self.module.modules() if isinstance(part, Metric)]
        reads_once = self.is_fused and isinstance(self.module, CausalLanguageModule)
        return work_profile(
            self.module,
            Chain.from_stacks(self.stacks),
            call=_read_once if reads_once else self._call,
            compute_dtype=self.compute_dtype,
            fusion=LossFusion("fused") if self.is_fused and not reads_once else None,
            settings={"log": lambda *_, **__: None, "_device": torch.device("meta")},
            replaced=[(metric, SilentMetric()) for metric in metrics],
        )

    def _call(self, root: Any, sequences: int, seq_len: int) -> Tensor:
        with torch.device("meta"):
            loss = loss_of(root.training_step(root.example_batch(sequences, seq_len)))
        assert loss is not None, "our modules return one"
        return loss


def _read_once(root: Any, sequences: int, seq_len: int) -> Tensor:
    return causal_lm_call(root.model, sequences, seq_len)
