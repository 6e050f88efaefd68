"""One class for every text, with any transformers model that classifies sequences."""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from transformers import PreTrainedModel
from typing_extensions import override

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules.parts import (
    AdapterMaker,
    OptimizerFactory,
    build_model,
    optimize,
    require_built,
)
from roundpipe_lightning.modules.schedule import WarmupCosine
from roundpipe_lightning.modules.source import Head, ModelSource


class ClassBatch(TypedDict):
    """One batch of texts; all tensors are int64.

    Attributes:
        input_ids: Token ids, shape (texts, tokens).
        attention_mask: 1 for tokens, 0 for padding, shape (texts, tokens).
        labels: Numbers of the classes, shape (texts,).
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


class SequenceClassificationModule(LightningModule):
    """Training of `AutoModelForSequenceClassification`: one class for a whole text.

    The loss is the model's own (cross-entropy in nats per text); the accuracy is logged beside it.

    Args:
        source: The architecture and where its weights come from; it may be a causal language
            model's, whose head is left out.
        classes: Names of the classes, in the order of their numbers.
        optimizer: Makes the optimizer from the parameters that are trained.
        scheduler: Learning rate over the run; None keeps the optimizer's.
        adapters: Puts adapters into the model; None trains every parameter.
        pad_token_id: Token that fills texts up: decoder models look for the last token before it.
            None takes that of the Trainer's data module, if it has one, else the model's.

    Raises:
        ConfigurationError: There are fewer than two classes, or two of one name.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        classes: Sequence[str],
        optimizer: OptimizerFactory,
        scheduler: WarmupCosine | None = None,
        adapters: AdapterMaker | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        super().__init__()
        if len(classes) < 2 or len(set(classes)) < len(classes):
            raise ConfigurationError(
                f"classes={list(classes)}: name at least two classes, no name twice."
            )
        self.source = source
        self.classes = tuple(classes)
        self.optimizer_factory = optimizer
        self.scheduler = scheduler
        self.adapters = adapters
        self.pad_token_id = pad_token_id
        self.model: PreTrainedModel | None = None
        self.train_accuracy = MulticlassAccuracy(len(classes), average="micro")
        self.val_accuracy = MulticlassAccuracy(len(classes), average="micro")
        self.test_accuracy = MulticlassAccuracy(len(classes), average="micro")

    @override
    def setup(self, stage: str) -> None:
        """Take the padding of the data, which is made before the model."""
        if self.pad_token_id is None:
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            self.pad_token_id = getattr(data, "pad_token_id", None)

    def configure_model(self) -> None:
        """Build the model once; called again for every validate, test and predict."""
        if self.model is None:
            changes: dict[str, Any] = {
                **self.source.config_changes,
                "id2label": dict(enumerate(self.classes)),
                "label2id": {name: number for number, name in enumerate(self.classes)},
            }
            if self.pad_token_id is not None:
                changes["pad_token_id"] = self.pad_token_id
            source = dataclasses.replace(
                self.source, head=Head.SEQUENCE_CLASSIFICATION, config_changes=changes
            )
            self.model = build_model(source, adapters=self.adapters, task="SEQ_CLS")

    def forward(self, batch: ClassBatch) -> Any:
        """The model's own output for a batch: its `loss` (a scalar) and its `logits`.

        Args:
            batch: Texts and their classes, on one device. `logits` have the shape (texts, classes).
        """
        return require_built(self.model)(**batch)

    def training_step(self, batch: ClassBatch) -> Tensor:
        """Loss of one batch in nats per text, logged as `train_loss` beside `train_accuracy`."""
        output = self(batch)
        self.train_accuracy(output.logits.argmax(dim=-1), batch["labels"])
        self.log("train_loss", output.loss, prog_bar=True, on_step=True, on_epoch=False)
        self.log("train_accuracy", self.train_accuracy, on_step=True, on_epoch=False)
        loss: Tensor = output.loss
        return loss

    def validation_step(self, batch: ClassBatch) -> None:
        """Log `val_loss` and `val_accuracy`, averaged over the epoch."""
        self._evaluate("val", batch, self.val_accuracy)

    def test_step(self, batch: ClassBatch) -> None:
        """Log `test_loss` and `test_accuracy`, averaged over the epoch."""
        self._evaluate("test", batch, self.test_accuracy)

    def predict_step(self, batch: ClassBatch) -> Tensor:
        """Probabilities of the classes, float, shape (texts, classes)."""
        return torch.softmax(self(batch).logits.float(), dim=-1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over the parameters that are trained, and its scheduler, per step."""
        return optimize(self, optimizer=self.optimizer_factory, scheduler=self.scheduler)

    def _evaluate(self, stage: str, batch: ClassBatch, accuracy: MulticlassAccuracy) -> None:
        output = self(batch)
        accuracy.update(output.logits.argmax(dim=-1), batch["labels"])
        options: dict[str, Any] = {"prog_bar": True, "on_step": False, "on_epoch": True}
        self.log(f"{stage}_loss", output.loss, batch_size=len(batch["labels"]), **options)
        self.log(f"{stage}_accuracy", accuracy, **options)
