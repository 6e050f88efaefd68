"""Sequence classification: whether a review is good or bad.

`python examples/classification.py` trains a small encoder (BERT) on `data/reviews.csv`, byte by
byte.
"""

import argparse
from pathlib import Path

import lightning
import torch
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertForSequenceClassification

import roundpipe_lightning  # noqa: F401  registers the strategy "roundpipe"
from roundpipe_lightning.data import ClassificationDataModule
from roundpipe_lightning.modules import TokenizerSource

DATA = Path(__file__).resolve().parent / "data"
CLASSES = ("bad", "good")


class Reviews(lightning.LightningModule):
    """Ordinary Lightning code; `from_pretrained` would take the place of the configuration."""

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=264,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_labels=len(CLASSES),
        )
        self.model = BertForSequenceClassification(config)
        self.accuracy = MulticlassAccuracy(len(CLASSES), average="micro")
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's own loss."""
        loss: torch.Tensor = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        """Keep the loss of the whole batch."""
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        """Count what is classified rightly."""
        self.accuracy.update(self.model(**batch).logits.argmax(dim=-1), batch["labels"])
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over everything."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train and validate; returns the losses of all steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", nargs="+", default=[str(DATA / "reviews.csv")])
    parser.add_argument("--devices", type=int, default=2, help="workers")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(arguments)

    lightning.seed_everything(0, verbose=False)
    module = Reviews()
    data = ClassificationDataModule(
        files=options.files,
        tokenizer=TokenizerSource(),
        classes=CLASSES,
        seq_len=64,
        batch_size=16,
    )
    trainer = lightning.Trainer(
        strategy="roundpipe",
        accelerator=options.accelerator,
        devices=options.devices,
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=data)
    metrics = trainer.validate(module, datamodule=data, verbose=False)[0]
    print(f"loss: {module.losses[0]:.2f} -> {module.losses[-1]:.2f}")
    print(f"right in {metrics['val_accuracy']:.0%} of the validation texts")
    return module.losses


if __name__ == "__main__":
    main()
