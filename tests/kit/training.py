from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from roundpipe_lightning import RoundPipeStrategy
from tests.kit.engine import WIDTH as WIDTH  # noqa: PLC0414 - the same one here
from tests.kit.engine import Block as Block  # noqa: PLC0414

VOCABULARY = 20

# What the hooks of small tests cost the overlap; tests/lightning and tests/gpu let it pass.
QUIET = ["ignore:.* [Ss]ee docs/updates.md"]


class Regressor(LightningModule):
    """Vectors to numbers, a mean over samples.

    Args:
        optimizer: `"sgd"` or `"adamw"`.
        dropout: Of every block.
        on_step: Called in training_step with the view, the batch and its index.
    """

    def __init__(
        self,
        optimizer: str = "sgd",
        *,
        num_blocks: int = 4,
        dropout: float = 0.0,
        on_step: Callable[[Any, Any, int], Any] | None = None,
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.layers = nn.ModuleList(Block(dropout) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 1)
        self.on_step = on_step

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        prediction: Tensor = self.head(x)
        return prediction

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = functional.mse_loss(self(x), y)
        if self.on_step is not None:
            self.on_step(self, batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", functional.mse_loss(self(x), y))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("test_loss", functional.mse_loss(self(x), y))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ByHand(Regressor):
    """Steps its optimizer itself, with the loss of the class beside it."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        if self.training:
            optimizer.zero_grad()  # type: ignore[union-attr]
            self.manual_backward(loss)
            optimizer.step()  # type: ignore[union-attr]
        return loss


class LanguageModel(LightningModule):
    """Tokens to tokens, a mean over the targets of padded sequences."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        self.optimizer = optimizer
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"])[:, :-1].reshape(-1, VOCABULARY)
        loss = functional.cross_entropy(logits, batch["labels"][:, 1:].reshape(-1))
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["labels"]))
        return loss

    def configure_optimizers(self) -> Any:
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[self.optimizer]
        return kind(self.parameters(), lr={"sgd": 0.1, "adamw": 0.01}[self.optimizer])


class PaddedSequences(Dataset[dict[str, Tensor]]):
    """Sequences of random lengths, padded to the longest."""

    def __init__(self, num_samples: int, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, VOCABULARY, (num_samples, length), generator=generator)
        self.labels = self.tokens.clone()
        for row in range(num_samples):
            used = int(torch.randint(2, length + 1, (), generator=generator))
            self.tokens[row, used:], self.labels[row, used:] = 0, -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def regression_data(
    num_samples: int = 32, *, batch_size: int = 8, shuffle: bool = False
) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(num_samples, WIDTH, generator=generator)
    y = x[:, :1] * 0.5 + torch.randn(num_samples, 1, generator=generator) * 0.1
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


def make_trainer(folder: Path | None = None, **flags: Any) -> Trainer:
    """A silent Trainer on CPU workers that writes nothing by itself.

    Args:
        folder: Its `default_root_dir`; else where it runs, in tests/lightning the test's own.
        **flags: Of the Trainer.
    """
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        "log_every_n_steps": 1,
        "max_epochs": 3,
    }
    return Trainer(**{**defaults, **flags})


def train_with(
    strategies: Sequence[Any],
    make: Callable[[], LightningModule],
    data: Any = None,
    validation: Any = None,
    **flags: Any,
) -> list[tuple[Any, Trainer]]:
    """Train the same module with each strategy; those of Lightning have one device, others two.

    Flags that are functions are called for each training, and give a callback of its own, say.
    """
    runs: list[tuple[Any, Trainer]] = []
    for strategy in strategies:
        torch.manual_seed(3)
        module, ours = make(), isinstance(strategy, RoundPipeStrategy) or strategy == "roundpipe"
        given = {name: flag() if callable(flag) else flag for name, flag in flags.items()}
        trainer = make_trainer(strategy=strategy, **{"devices": 1 + ours, **given})
        trainer.fit(module, regression_data() if data is None else data, validation)
        runs.append((module, trainer))
    return runs


def train_alike(
    make: Callable[[], LightningModule],
    *strategies: Any,
    first: Any = "auto",
    tolerance: float = 1e-5,
    **options: Any,
) -> list[Any]:
    """Train as `train_with`; the modules' parameters must be those of the first strategy."""
    one, *others = [module for module, _ in train_with([first, *strategies], make, **options)]
    for other in others:
        assert parameter_error(other, one) <= tolerance
    return [one, *others]


def parameter_error(module: nn.Module, reference: nn.Module) -> float:
    return max(_errors(module, reference))


def _errors(module: nn.Module, reference: nn.Module) -> Iterator[float]:
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    for parameter, expected in pairs:
        difference = (parameter - expected).detach().norm()
        yield float(difference / expected.detach().norm().clamp_min(1e-12))


def same_bits(module: nn.Module, reference: nn.Module) -> bool:
    pairs = zip(module.parameters(), reference.parameters(), strict=True)
    return all(torch.equal(parameter, expected) for parameter, expected in pairs)
