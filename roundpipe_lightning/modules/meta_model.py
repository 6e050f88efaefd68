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

from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.engine.microbatch import loss_of
from roundpipe_lightning.models.work.work_profile import causal_lm_call, work_profile
from roundpipe_lightning.modules.causal_lm import CausalLanguageModule
from roundpipe_lightning.planning.model.work import WorkProfile
from roundpipe_lightning.strategy.planning.dry_run import SilentMetric


def _num_bytes(stack: BlockStack) -> int:
    return sum(p.nbytes for block in stack.blocks for p in block.parameters())


@dataclass(kw_only=True, eq=False)
class MetaModel:
    """A module on the meta device, and what it does, measured when it is first asked for.

    Attributes:
        compute_dtype: What autocast computes in; None: what the parameters are.
        is_fused: Whether logits are read once.
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
        return work_profile(
            self.module,
            max(self.stacks, key=_num_bytes, default=None),  # of several, such as an image tower
            call=self._call,
            compute_dtype=self.compute_dtype,
            settings={"log": lambda *_, **__: None, "_device": torch.device("meta")},
            replaced=[(metric, SilentMetric()) for metric in metrics],
        )

    def _call(self, root: Any, sequences: int, seq_len: int) -> Tensor:
        if self.is_fused and isinstance(self.module, CausalLanguageModule):
            return causal_lm_call(root.model, sequences, seq_len)
        with torch.device("meta"):
            loss = loss_of(root.training_step(root.example_batch(sequences, seq_len)))
        assert loss is not None, "our modules return one"
        return loss
