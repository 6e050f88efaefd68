"""Makes the picture of a timeline in the documentation: a training on an emulated server.

Four emulated devices train a chain of blocks whose computations take given times. The last blocks
take longer, as an LM head does. `PipelineTimeline` draws the picture into the folder.

    python benchmarks/timeline_picture.py docs/pictures
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from logging_overhead import TimedBlock
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from roundpipe_lightning import PipelineTimeline
from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.planning.model.hardware import load_hardware
from roundpipe_lightning.testing import EmulatedStrategy

_NUM_DEVICES, _NUM_BLOCKS, _WIDTH = 4, 10, 64
_FORWARD_SECONDS, _BACKWARD_SECONDS = 0.012, 0.024
_TAIL = 1.5  # the tail segment, in blocks


class Chain(LightningModule):
    """Blocks, and a loss that takes longer than a block."""

    def __init__(self, server: EmulatedServer) -> None:
        super().__init__()
        self.server = server
        self.layers = nn.ModuleList(
            TimedBlock(_WIDTH, server=server, seconds=_FORWARD_SECONDS) for _ in range(_NUM_BLOCKS)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return a loss."""
        del batch_idx
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        x = self.server.work(
            x,
            forward_seconds=_TAIL * _FORWARD_SECONDS,
            backward_seconds=_TAIL * _BACKWARD_SECONDS,
        )
        loss: Tensor = x.square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def train(folder: Path, *, num_steps: int) -> PipelineTimeline:
    """Train on an emulated server and write the timeline's files."""
    block_bytes = 4 * _WIDTH * (_WIDTH + 1)
    timing = EmulatedTiming(
        upload_bytes_per_second=block_bytes / (_FORWARD_SECONDS / 2),
        download_bytes_per_second=block_bytes / (_FORWARD_SECONDS / 2),
    )
    machine = dataclasses.replace(load_hardware("rtx4090x4"), name="emulated")
    timeline = PipelineTimeline(folder)
    with EmulatedServer(_NUM_DEVICES, timing=timing, tags=False) as server:
        strategy = EmulatedStrategy(
            devices=server.devices, num_microbatches=2 * _NUM_DEVICES, hardware=machine
        )
        trainer = Trainer(
            accelerator="cpu",
            devices=_NUM_DEVICES,
            strategy=strategy,
            callbacks=[timeline],
            max_steps=num_steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = TensorDataset(torch.randn(4 * _NUM_DEVICES * num_steps, _WIDTH))
        trainer.fit(Chain(server), DataLoader(data, batch_size=4 * _NUM_DEVICES))
    return timeline


def main() -> None:
    """Train and keep the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to write timeline.svg")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps (default 16)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        timeline = train(Path(scratch), num_steps=options.steps)
        options.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(scratch) / "timeline.svg", options.folder / "timeline.svg")
    shares: dict[str, Any] = {
        "predicted": timeline.predicted_bubble_fraction,
        "measured": timeline.measured_bubble_fraction,
    }
    print({name: round(share, 4) for name, share in shares.items()})


if __name__ == "__main__":
    main()
