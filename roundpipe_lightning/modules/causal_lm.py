"""Next-token training of any transformers causal language model: bytes, text or chat."""

from collections.abc import Mapping
from typing import Any, TypedDict, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import NotRequired

from roundpipe_lightning.modules.packing import (
    as_one_row,
    check_documents_apart,
    runs_flash_attention,
)
from roundpipe_lightning.modules.parts import (
    AdapterMaker,
    OptimizerFactory,
    build_model,
    optimize,
    require_built,
)
from roundpipe_lightning.modules.schedule import WarmupCosine
from roundpipe_lightning.modules.source import ModelSource


class TokenBatch(TypedDict):
    """One batch of sequences; all tensors are int64, of shape (sequences, tokens).

    Attributes:
        input_ids: Token ids.
        labels: The same ids; positions that are not to be predicted hold -100.
        attention_mask: 1 for tokens, 0 for padding. Left out where nothing is padded, and where
            several documents share a row.
        position_ids: Each token's place in its own document, where several documents share a row:
            transformers then keeps their attention apart.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: NotRequired[Tensor]
    position_ids: NotRequired[Tensor]


class CausalLanguageModule(LightningModule):
    """Next-token training of a transformers causal language model.

    It is ordinary Lightning code and knows nothing of pipelines: the loss is the model's own
    (mean negative log-likelihood in nats per predicted token), whatever the architecture. What is
    predicted is the data's choice: every token of a text, the assistant's tokens of a chat.

    Args:
        source: The architecture and where its weights come from. The model is built in
            `configure_model`, that is in the place and dtype the Trainer's strategy asks for.
        optimizer: Makes the optimizer from the parameters that are trained.
        scheduler: Learning rate over the run; None keeps the optimizer's.
        adapters: Puts adapters into the model; None trains every parameter.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        optimizer: OptimizerFactory,
        scheduler: WarmupCosine | None = None,
        adapters: AdapterMaker | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.optimizer_factory = optimizer
        self.scheduler = scheduler
        self.adapters = adapters
        self.model: PreTrainedModel | None = None

    def configure_model(self) -> None:
        """Build the model once; called again for every validate, test and predict."""
        if self.model is None:
            self.model = build_model(self.source, adapters=self.adapters, task="CAUSAL_LM")

    def on_fit_start(self) -> None:
        """Try whether the model keeps packed documents apart, if the data packs any.

        Not where several processes share the model: a call of a part of it may hang them.
        """
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if getattr(data, "packs_documents", False) and self.trainer.world_size == 1:
            check_documents_apart(self.model)

    def forward(self, batch: TokenBatch) -> Any:
        """The model's own output for a batch: its `loss` (a scalar) and its `logits`.

        Args:
            batch: Token ids, labels and what else the data gives, on one device.
        """
        model = require_built(self.model)
        if "position_ids" in batch and runs_flash_attention(model):
            return model(**as_one_row(cast(Mapping[str, Tensor], batch)), use_cache=False)
        return model(**batch, use_cache=False)

    def training_step(self, batch: TokenBatch) -> Tensor:
        """Loss of one batch in nats per token, logged as `train_loss`."""
        loss: Tensor = self(batch).loss
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: TokenBatch) -> None:
        """Log the loss of one validation batch as `val_loss`, averaged over the epoch."""
        self._log_loss("val_loss", batch, prog_bar=True)

    def test_step(self, batch: TokenBatch) -> None:
        """Log the loss of one test batch as `test_loss`, averaged over the epoch."""
        self._log_loss("test_loss", batch)

    def predict_step(self, batch: TokenBatch) -> dict[str, Tensor]:
        """The loss of a batch and the likeliest next token at every position.

        Returns:
            `loss`: scalar, nats per token. `next_tokens`: int64, the shape of `input_ids`.
        """
        output = self(batch)
        next_tokens = torch.argmax(output.logits, dim=-1)
        length = batch["input_ids"].shape[1]  # prompt tuning has positions before these
        return {"loss": output.loss, "next_tokens": next_tokens[:, -length:]}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over the parameters that are trained, and its scheduler, per step."""
        return optimize(self, optimizer=self.optimizer_factory, scheduler=self.scheduler)

    def _log_loss(self, name: str, batch: TokenBatch, **options: Any) -> None:
        """Log a loss whose mean over the epoch is that over all predicted tokens."""
        loss = self(batch).loss
        num_targets = int((batch["labels"][:, 1:] != -100).sum())
        if num_targets:
            self.log(name, loss, batch_size=num_targets, on_step=False, on_epoch=True, **options)
