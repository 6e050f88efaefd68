"""Measures one step of staleness by the loss: one training with update="exact" and "async".

    python benchmarks/stale_updates.py [--steps 400] [--svg docs/pictures/stale_updates.svg]

A small decoder learns to predict the bytes of Python's own standard library, through
`Trainer(strategy="roundpipe")` on CPU workers, with AdamW, a linear warm-up and clipping by norm,
from the same seed on the same batches. The losses are those of the batches, averaged over windows
of steps; the table has them, `--svg` draws them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

WAYS = ("exact", "async")
_COLORS = {"exact": "#1f77b4", "async": "#d62728"}
_VOCABULARY = 256


class Windows(Dataset[Tensor]):
    """Random windows of the standard library's sources.

    Args:
        num_windows: How many.
        length: Bytes of each.
    """

    def __init__(self, num_windows: int, length: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self._text = b"".join(file.read_bytes() for file in files)
        generator = torch.Generator().manual_seed(1)
        last = len(self._text) - length
        self._starts = torch.randint(last, (num_windows,), generator=generator).tolist()
        self._length = length

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Tensor:
        start = self._starts[index]
        return torch.tensor(list(self._text[start : start + self._length]))


class Decoder(LightningModule):
    """A small transformer that predicts the next byte.

    Args:
        width: Of the residual stream.
        num_blocks: How many blocks.
        learning_rate: After the warm-up.
    """

    def __init__(self, *, width: int, num_blocks: int, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.positions = nn.Embedding(1024, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean loss of the bytes but the first."""
        del batch_idx
        length = batch.shape[1] - 1
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=batch.device)
        x = self.embedding(batch[:, :-1]) + self.positions.weight[:length]
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return functional.cross_entropy(logits, batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        """Use AdamW with a linear warm-up over 20 steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


class Losses(Callback):
    """Keeps every batch's loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Keep the loss."""
        del trainer, pl_module
        self.values.append(float(outputs["loss"]))


def train(way: str, options: argparse.Namespace) -> list[float]:
    """Return the losses of all steps of a training."""
    seed_everything(options.seed, verbose=False)
    losses = Losses()
    data = DataLoader(Windows(options.steps * options.batch, options.length), options.batch)
    module = Decoder(
        width=options.width, num_blocks=options.blocks, learning_rate=options.learning_rate
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            strategy=RoundPipeStrategy(update=way, num_microbatches=2, dry_run=False),
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            gradient_clip_val=1.0,
            callbacks=[losses],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, data)
    return losses.values


def windows_of(losses: Sequence[float], num_steps: int) -> list[float]:
    """Average losses over windows of so many steps."""
    return [
        statistics.mean(losses[start : start + num_steps])
        for start in range(0, len(losses) - num_steps + 1, num_steps)
    ]


def svg_of(curves: dict[str, list[float]], *, window: int) -> str:
    """Draw the curves: steps to the right, the loss upwards."""
    width, height, left, bottom = 640, 320, 50, 40
    values = [value for curve in curves.values() for value in curve]
    low, high = min(values), max(values)
    count = max(map(len, curves.values()))

    def place(index: int, value: float) -> str:
        x = left + (width - left - 20) * index / max(1, count - 1)
        y = 20 + (height - 20 - bottom) * (high - value) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
        "<style>text { font: 12px sans-serif }</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for value in (low, (low + high) / 2, high):
        x, y = place(0, value).split(",")
        parts.append(f'<line x1="{x}" y1="{y}" x2="{width - 20}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="8" y="{float(y) + 4:.1f}">{value:.2f}</text>')
    for row, (way, curve) in enumerate(curves.items()):
        points = " ".join(place(index, value) for index, value in enumerate(curve))
        color = _COLORS[way]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}"/>')
        parts.append(f'<text x="{width - 120}" y="{40 + 18 * row}" fill="{color}">{way}</text>')
    parts.append(
        f'<text x="{left}" y="{height - 12}">loss, mean of {window} steps; '
        f"{count * window} steps</text></svg>"
    )
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--length", type=int, default=65, help="bytes of a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=20, help="steps of an average")
    parser.add_argument("--svg", type=Path, help="draw the curves into this file")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    losses = {way: train(way, options) for way in WAYS}
    curves = {way: windows_of(values, options.window) for way, values in losses.items()}
    if options.svg:
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        options.svg.write_text(svg_of(curves, window=options.window))
    if options.output == "json":
        print(json.dumps({"window": options.window, "losses": curves}))
        return
    print(f"{'steps':>12}" + "".join(f"{way:>10}" for way in WAYS))
    for index, row in enumerate(zip(*curves.values(), strict=True)):
        last = (index + 1) * options.window
        cells = "".join(f"{value:10.4f}" for value in row)
        print(f"{last - options.window + 1:5} to {last:3}{cells}")


if __name__ == "__main__":
    main()
