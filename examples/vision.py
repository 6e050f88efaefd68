"""A vision transformer written here, in plain PyTorch, on images that are drawn here.

`python examples/vision.py` tells squares from crosses, discs and stripes. No line of the model
knows of pipelines: its `nn.Sequential` of equal blocks is found.
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as PyTorch's own documentation has it
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import roundpipe_lightning  # noqa: F401  registers the strategy "roundpipe"

SIZE, PATCH, WIDTH, HEADS, DEPTH, CLASSES = 24, 4, 64, 4, 6, 4


class Block(nn.Module):
    """Attention over the patches, then a small network for each."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.network = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, patches: Tensor) -> Tensor:
        """Patches, shape (images, patches, features), to patches of the same shape."""
        normed = self.before_attention(patches)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        patches = patches + attended
        return patches + self.network(patches)


class VisionTransformer(lightning.LightningModule):
    """Patches of an image as tokens, a stack of blocks, the mean of the patches as its features."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.losses: list[float] = []

    def forward(self, images: Tensor) -> Tensor:
        """Images, shape (images, 1, height, width), to one number for each class."""
        patches = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        scores: Tensor = self.head(self.blocks(patches).mean(dim=1))
        return scores

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def on_train_batch_end(self, *_: object) -> None:
        """Keep the loss of the whole batch."""
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def validation_step(self, batch: list[Tensor]) -> None:
        """Count the right answers."""
        images, labels = batch
        self.accuracy.update(self(images).argmax(dim=-1), labels)
        self.log("val_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over everything."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def draw(num_images: int, *, seed: int) -> TensorDataset:
    """Squares, crosses, discs and stripes of random sizes at random places, in noise."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (num_images,), generator=generator)
    centres = torch.randint(8, SIZE - 8, (num_images, 2), generator=generator)
    sizes = torch.randint(4, 8, (num_images,), generator=generator)
    images = 0.3 * torch.randn(num_images, 1, SIZE, SIZE, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    for image, label, (row, column), size in zip(images, labels, centres, sizes, strict=True):
        down, across = (rows - row).abs(), (columns - column).abs()
        square = (down <= size) & (across <= size)
        shapes = (
            square,
            square & ((down <= 1) | (across <= 1)),
            down**2 + across**2 <= size**2,
            square & (rows % 3 == 0),
        )
        image[0][shapes[int(label)]] += 1
    return TensorDataset(images, labels)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train and validate; returns the losses of all steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2, help="workers")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args(arguments)

    lightning.seed_everything(0, verbose=False)
    module = VisionTransformer()
    trainer = lightning.Trainer(
        strategy="roundpipe",
        accelerator=options.accelerator,
        devices=options.devices,
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        module,
        DataLoader(draw(1024, seed=1), batch_size=32, shuffle=True, drop_last=True),
        DataLoader(draw(256, seed=2), batch_size=32),
    )
    [metrics] = trainer.validate(
        module, DataLoader(draw(256, seed=2), batch_size=32), verbose=False
    )
    print(f"loss: {module.losses[0]:.2f} -> {module.losses[-1]:.2f}")
    print(f"right for {metrics['val_accuracy']:.0%} of the validation images")
    return module.losses


if __name__ == "__main__":
    main()
