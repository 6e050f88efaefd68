"""Direct preference optimization: polite answers are to be preferred to rude ones.

`python examples/dpo.py` makes a small base model and trains an adapter on `data/preferences.jsonl`.
The reference is the same model without the adapter, so it costs no memory.
"""

import argparse
from functools import partial
from pathlib import Path

import lightning
import torch
from peft import LoraConfig

import roundpipe_lightning  # noqa: F401  registers the strategy "roundpipe"
from roundpipe_lightning.data import PreferenceDataModule
from roundpipe_lightning.modules import (
    Adapters,
    DirectPreferenceModule,
    ModelSource,
    TokenizerSource,
)

DATA = Path(__file__).resolve().parent / "data"
ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


class Losses(lightning.Callback):
    """Keeps the loss of every batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        """Keep the loss of the whole batch."""
        self.values.append(float(trainer.callback_metrics["train_loss"]))


def main(arguments: list[str] | None = None) -> list[float]:
    """Train and validate; returns the losses of all steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="folder or hub name; default: random weights over bytes")
    parser.add_argument("--files", nargs="+", default=[str(DATA / "preferences.jsonl")])
    parser.add_argument("--devices", type=int, default=2, help="workers")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)

    lightning.seed_everything(0, verbose=False)
    weights = "pretrained" if options.base else "random"
    source = ModelSource(architecture=ARCHITECTURE, hub_name=options.base, weights=weights)
    module = DirectPreferenceModule(
        source,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        adapters=Adapters(config=LoraConfig(r=8, target_modules="all-linear")),
        beta=0.1,
    )
    data = PreferenceDataModule(
        files=options.files,
        tokenizer=TokenizerSource(name=options.base),
        seq_len=128,
        batch_size=8,
    )
    losses = Losses()
    trainer = lightning.Trainer(
        strategy="roundpipe",
        accelerator=options.accelerator,
        devices=options.devices,
        max_steps=options.steps,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=data)
    metrics = trainer.validate(module, datamodule=data, verbose=False)[0]
    print(f"loss: {losses.values[0]:.2f} -> {losses.values[-1]:.2f}")
    print(f"preferred in {metrics['val_accuracy']:.0%} of the validation pairs")
    return losses.values


if __name__ == "__main__":
    main()
