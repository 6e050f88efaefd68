"""The LightningModule that `train.py` trains: any transformers causal language model."""

from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules.schedule import WarmupCosine
from roundpipe_lightning.modules.source import ModelSource

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Makes the optimizer from the parameters, e.g. `functools.partial(torch.optim.AdamW, lr=1e-3)`."""


class TokenBatch(TypedDict):
    """One batch of packed windows.

    Attributes:
        input_ids: Token ids, int64, shape (windows, tokens of a window).
        labels: The same ids; positions that are not to be predicted hold -100.
    """

    input_ids: Tensor
    labels: Tensor


class CausalLanguageModule(LightningModule):
    """Next-token training of a transformers causal language model.

    It is ordinary Lightning code and knows nothing of pipelines: the loss is the model's own
    (mean negative log-likelihood in nats per predicted token), whatever the architecture.

    Args:
        source: The architecture and where its weights come from. The model is built in
            `configure_model`, that is in the place and dtype the Trainer's strategy asks for.
        optimizer: Makes the optimizer from the parameters that are trained.
        scheduler: Learning rate over the run; None keeps the optimizer's.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        optimizer: OptimizerFactory,
        scheduler: WarmupCosine | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.optimizer_factory = optimizer
        self.scheduler = scheduler
        self.model: PreTrainedModel | None = None

    def configure_model(self) -> None:
        """Build the model once; called again for every validate, test and predict."""
        if self.model is None:
            self.model = self.source.build()

    def forward(self, batch: TokenBatch) -> Any:
        """The model's own output for a batch: its `loss` (a scalar) and its `logits`.

        Args:
            batch: Token ids and labels, on one device.
        """
        if self.model is None:
            raise ConfigurationError(
                "The model is not built yet. A Trainer builds it; without one, call "
                "configure_model() first."
            )
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"], use_cache=False)

    def training_step(self, batch: TokenBatch) -> Tensor:
        """Loss of one batch in nats per token, logged as `train_loss`."""
        loss: Tensor = self(batch).loss
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: TokenBatch) -> None:
        """Log the loss of one validation batch as `val_loss`, averaged over the epoch."""
        self.log("val_loss", self(batch).loss, prog_bar=True, on_step=False, on_epoch=True)

    def test_step(self, batch: TokenBatch) -> None:
        """Log the loss of one test batch as `test_loss`, averaged over the epoch."""
        self.log("test_loss", self(batch).loss, on_step=False, on_epoch=True)

    def predict_step(self, batch: TokenBatch) -> dict[str, Tensor]:
        """The loss of a batch and the likeliest next token at every position.

        Returns:
            `loss`: scalar, nats per token. `next_tokens`: int64, the shape of `input_ids`.
        """
        output = self(batch)
        return {"loss": output.loss, "next_tokens": torch.argmax(output.logits, dim=-1)}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over the parameters that are trained, and its scheduler, per step."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not trained:
            raise ConfigurationError(
                "No parameter of the model is trained: every one has requires_grad=False. "
                "Unfreeze some, or validate and test instead (train=false)."
            )
        optimizer = self.optimizer_factory(trained)
        if self.scheduler is None:
            return optimizer
        run_steps = self.trainer.estimated_stepping_batches
        schedule = self.scheduler.attach(optimizer, run_steps=run_steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
