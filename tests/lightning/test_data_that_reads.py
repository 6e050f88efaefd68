from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from tests.kit.training import WIDTH, Regressor, make_trainer, same_bits
from tests.lightning.test_updates import Overlapping

NUM_BATCHES = 3
Played = tuple[Tensor, Tensor]


def _row(number: int) -> Tensor:
    return torch.linspace(-1, 1, WIDTH) * (number + 1) / 4


def _played(module: Regressor, number: int) -> Played:
    return _row(number), module.head.weight.detach().sum().tanh().reshape(1)


class _Rollouts(IterableDataset[Any]):
    """Asks a function for what it gives, as data sets of policies do."""

    def __init__(self, play: Callable[[int], Played]) -> None:
        self.play = play

    def __iter__(self) -> Iterator[Any]:
        return (self.play(number) for number in range(NUM_BATCHES * 2))


class _Agent:
    def __init__(self, policy: Regressor) -> None:
        self.policy = policy


class _Games(Dataset[Any]):
    """Has an agent that has the module."""

    def __init__(self, agent: _Agent) -> None:
        self.agent = agent

    def __len__(self) -> int:
        return NUM_BATCHES * 2

    def __getitem__(self, index: int) -> Played:
        return _played(self.agent.policy, index)


class _Hard(Sampler[int]):
    """Chooses by a parameter."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __iter__(self) -> Iterator[int]:
        return (int(self.weight.detach().sum() * 1e4) % 5 for _ in range(NUM_BATCHES * 2))

    def __len__(self) -> int:
        return NUM_BATCHES * 2


def _sampled(module: Regressor) -> Any:
    data: Any = [(_row(i), torch.ones(1)) for i in range(5)]
    return DataLoader(data, batch_size=2, sampler=_Hard(module.head.weight))


def _of(data: Any) -> Any:
    return DataLoader(data, batch_size=2)


LOADERS: dict[str, Callable[[Regressor], Any]] = {
    "a bound function": lambda module: _of(_Rollouts(partial(_played, module))),
    "a closure": lambda module: _of(_Rollouts(lambda number: _played(module, number))),
    "an agent": lambda module: _of(_Games(_Agent(module))),
    "a sampler": _sampled,
}


def _fit(folder: Path, strategy: Any, make: Callable[[Regressor], Any]) -> Regressor:
    torch.manual_seed(3)
    module = Regressor()
    trainer = make_trainer(folder, strategy=strategy, max_epochs=2, limit_val_batches=0)
    trainer.fit(module, make(module))
    assert trainer.global_step == NUM_BATCHES * 2
    return module


@pytest.mark.parametrize("name", LOADERS)
def test_it_is_made_after_the_step(tmp_path: Path, slow_updates: None, name: str) -> None:
    expected = _fit(tmp_path, "auto", LOADERS[name])
    module = _fit(tmp_path, Overlapping(num_microbatches=1, dry_run=False), LOADERS[name])
    assert same_bits(module, expected)
    assert all(parameter.isfinite().all() for parameter in module.parameters())
