"""One class for every text, with any transformers model that classifies sequences."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy
from typing_extensions import override

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules.base import TransformersModule
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


class SequenceClassificationModule(TransformersModule):
    """Training of `AutoModelForSequenceClassification`: one class for a whole text.

    The loss is the model's own (cross-entropy in nats per text); the accuracy is logged beside it.

    Args:
        source: It may be a causal language model's, whose head is left out.
        classes: Names of the classes, in the order of their numbers.
        pad_token_id: Token that fills texts up: decoder models look for the last token before it.
            None takes that of the Trainer's data module, if it has one, else the model's.
        options: The other arguments of `TransformersModule`.

    Raises:
        ConfigurationError: There are fewer than two classes, or two of one name.
    """

    task = "SEQ_CLS"

    def __init__(
        self,
        source: ModelSource,
        *,
        classes: Sequence[str],
        pad_token_id: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(source, **options)
        if len(classes) < 2 or len(set(classes)) < len(classes):
            raise ConfigurationError(
                f"classes={list(classes)}: name at least two classes, no name twice."
            )
        self.classes = tuple(classes)
        self.pad_token_id = pad_token_id
        self.train_accuracy = MulticlassAccuracy(len(classes), average="micro")
        self.val_accuracy = MulticlassAccuracy(len(classes), average="micro")
        self.test_accuracy = MulticlassAccuracy(len(classes), average="micro")

    @override
    def setup(self, stage: str) -> None:
        """Take the padding of the data, which is made before the model."""
        if self.pad_token_id is None:
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            self.pad_token_id = getattr(data, "pad_token_id", None)

    @override
    def build_model(self, source: ModelSource) -> Any:
        """The model, with the classes and the padding in its configuration."""
        changes: dict[str, Any] = {
            **source.config_changes,
            "id2label": dict(enumerate(self.classes)),
            "label2id": {name: number for number, name in enumerate(self.classes)},
        }
        if self.pad_token_id is not None:
            changes["pad_token_id"] = self.pad_token_id
        return super().build_model(
            replace(source, head=Head.SEQUENCE_CLASSIFICATION, config_changes=changes)
        )

    @override
    def example_batch(self, sequences: int, seq_len: int) -> ClassBatch:
        tokens = torch.zeros((sequences, seq_len), dtype=torch.long)
        labels = torch.zeros(sequences, dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}

    def forward(self, batch: ClassBatch) -> Any:
        """The model's own output for a batch: its `loss` (a scalar) and its `logits`.

        Args:
            batch: Texts and their classes, on one device. `logits` have the shape (texts, classes).
        """
        return self.built_model(**batch)

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

    def _evaluate(self, stage: str, batch: ClassBatch, accuracy: MulticlassAccuracy) -> None:
        output = self(batch)
        accuracy.update(output.logits.argmax(dim=-1), batch["labels"])
        options: dict[str, Any] = {"prog_bar": True, "on_step": False, "on_epoch": True}
        self.log(f"{stage}_loss", output.loss, batch_size=len(batch["labels"]), **options)
        self.log(f"{stage}_accuracy", accuracy, **options)
