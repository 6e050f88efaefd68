import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)

from roundpipe_lightning.checkpoint.compatibility import InexactResumeWarning
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy.resume.data_position import SlowResumeWarning
from roundpipe_lightning.strategy.resume.randomness import random_state, set_random_state
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.resumption import (
    Moment,
    Restless,
    SaveEverywhere,
    assert_same_end,
    resumed_everywhere,
    train,
)
from tests.kit.training import Regressor, make_trainer, regression_data

BATCH_END = ["on_train_batch_end"]


class Augmented(Dataset[Any]):
    """Samples with noise from every generator of the process that loads them."""

    def __init__(self, num_samples: int) -> None:
        self.data: Any = regression_data(num_samples).dataset

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.data[index]
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())  # noqa: NPY002
        return x + noise, y


class Fetched(Augmented):
    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        assert indices, "an empty batch was asked for"
        return [self[index] for index in indices]


class Batches(Augmented):
    def __len__(self) -> int:
        return super().__len__() // 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        samples = [super(Batches, self).__getitem__(index * 8 + row) for row in range(8)]
        x, y = zip(*samples, strict=True)
        return torch.stack(x), torch.stack(y)


class Shuffled(Sampler[int]):
    """Draws with Python's generator, its own or the process's."""

    def __init__(self, length: int, generator: Any) -> None:
        self.length, self.generator = length, generator

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        self.generator.shuffle(order)
        return iter(order)


class Counting(Shuffled):
    """Another order in every epoch, which its state knows and the Trainer does not."""

    def __init__(self, length: int) -> None:
        super().__init__(length, None)
        self.num_begun = 0

    def __iter__(self) -> Iterator[int]:
        self.generator = random.Random(self.num_begun)
        self.num_begun += 1
        return super().__iter__()

    def state_dict(self) -> dict[str, int]:
        return {"num_begun": self.num_begun}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_begun = state["num_begun"]


def _scaling() -> RoundPipePrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return RoundPipePrecision("16-mixed", scaler=scaler)


HOOKS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "every hook": (
        [
            *BATCH_END,
            *("on_validation_end", "on_validation_batch_end"),
            *("on_train_epoch_end", "on_before_zero_grad"),
        ],
        {
            "picked": [0, 1, 3, 4, 5, 8, 10, 11, 12, 13],
            "validation_data": regression_data(8),
            "val_check_interval": 2,
        },
    ),
    "every epoch's end": (["on_train_epoch_end"], {"validation_data": regression_data(8)}),
    "windows, one ends early": (BATCH_END, {"accumulate_grad_batches": 2}),
    "a limit of steps": (
        [*BATCH_END, "on_train_epoch_end"],
        {"picked": [1, 2, 3, 4], "max_epochs": -1, "max_steps": 7},
    ),
    "masters in 64 bits": (BATCH_END, {"picked": [1, 4], "precision": "64-true"}),
    "a loss scale and its growth": (
        BATCH_END,
        {
            "picked": [6],
            "plugins": lambda: [_scaling()],
            "train_data": lambda: regression_data(40),
        },
    ),
    "accumulation that a callback changes": (
        BATCH_END,
        {
            "picked": [5],
            "more_callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 2})],
            "train_data": lambda: regression_data(32),
        },
    ),
}


@pytest.mark.long("every epoch's end", "a limit of steps")
@pytest.mark.parametrize("name", HOOKS)
def test_in_hooks(tmp_path: Path, name: str) -> None:
    hooks, given = HOOKS[name]
    options = {"max_epochs": 2, "train_data": lambda: regression_data(24, shuffle=True), **given}
    count = resumed_everywhere(tmp_path, hooks, **options)
    assert count == len(given.get("picked", ())) or count >= 2


def _combined() -> CombinedLoader:
    loaders = [DataLoader(Augmented(count), batch_size=8, shuffle=True) for count in (40, 24)]
    return CombinedLoader(loaders, "max_size_cycle")


class _Both(Restless):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch[0], batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        joined = [torch.cat(parts) for parts in zip(*batch, strict=True)]
        return super().training_step(joined, batch_idx)


def _loader(num_samples: int = 40, **options: Any) -> Any:
    return DataLoader(Augmented(num_samples), **{"batch_size": 8, **options})


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": _loader,
    "own generator": lambda: _loader(shuffle=True, generator=_generator()),
    "drawn with replacement": lambda: _loader(
        sampler=RandomSampler(range(40), replacement=True, num_samples=40)
    ),
    "sampler's own numbers": lambda: _loader(sampler=Shuffled(40, random.Random(3))),
    "sampler's state": lambda: _loader(sampler=Counting(40)),
    "process's numbers": lambda: _loader(sampler=Shuffled(40, random)),
    "batch sampler": lambda: _loader(
        batch_size=1, batch_sampler=BatchSampler(RandomSampler(range(40)), 8, drop_last=True)
    ),
    "batches as samples": lambda: DataLoader(Batches(40), batch_size=None, shuffle=True),
    "several": _combined,
}


@pytest.mark.suite("in order", "own generator", "process's numbers", "sampler's state", "several")
@pytest.mark.parametrize("name", LOADERS)
def test_in_the_middle_of_an_epoch_without_loading_again(tmp_path: Path, name: str) -> None:
    resumed_everywhere(
        tmp_path,
        BATCH_END,
        picked=[3, 4, 6],
        train_data=LOADERS[name],
        make=_Both if name == "several" else Restless,
        max_epochs=2,
    )


PROCESSES: dict[str, Callable[[], Any]] = {
    "for an epoch": lambda: _loader(shuffle=True, num_workers=2),
    "for all epochs": lambda: _loader(shuffle=True, num_workers=2, persistent_workers=True),
    "process's numbers": lambda: _loader(
        sampler=Shuffled(40, random), num_workers=2, persistent_workers=True
    ),
    "fetched by the batch": lambda: DataLoader(
        Fetched(40), batch_size=8, shuffle=True, num_workers=2
    ),
}


@pytest.mark.suite("for all epochs", "fetched by the batch")
@pytest.mark.parametrize("name", PROCESSES)
def test_with_processes_that_draw_random_numbers(tmp_path: Path, name: str) -> None:
    resumed_everywhere(
        tmp_path,
        [*BATCH_END, "on_train_epoch_end"],
        picked=[2, 5],
        train_data=PROCESSES[name],
        max_epochs=2,
    )


def test_a_second_resume_is_exact_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_data": PROCESSES["fetched by the batch"], "max_epochs": 1}
    expected = train(tmp_path, seed=1, **options)
    path = None
    for name, index in (("first", 1), ("second", 2)):
        saver = SaveEverywhere(tmp_path / name, BATCH_END)
        train(tmp_path, seed=5, path=path, callbacks=[saver], **options) if path else train(
            tmp_path, seed=1, callbacks=[saver], **options
        )
        path = saver.moments[index].path
    run = train(tmp_path, seed=99, path=path, **options)
    for key, value in expected.module.state_dict().items():
        assert torch.equal(run.module.state_dict()[key], value)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        data = Augmented(32)
        return (data[index] for index in range(number, len(data), count))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stream_without_a_state_is_read_again(tmp_path: Path, num_workers: int) -> None:
    with pytest.warns(SlowResumeWarning, match=r"the 2 batches of this epoch .* loaded again"):
        resumed_everywhere(
            tmp_path,
            BATCH_END,
            picked=[1],
            train_data=lambda: DataLoader(Stream(), batch_size=8, num_workers=num_workers),
            max_epochs=1,
        )


def test_stream_whose_next_epoch_begins(tmp_path: Path) -> None:
    """Its first batch is fetched ahead, to learn whether it is the last."""
    hooks = ["on_train_epoch_end"]
    data = lambda: DataLoader(Stream(), batch_size=8)  # noqa: E731
    resumed_everywhere(tmp_path, hooks, picked=[0], train_data=data, max_epochs=2)


class _Estimating(Restless):
    """Has the loaders made before the checkpoint is read."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def test_a_loader_made_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    loader = LOADERS["own generator"]
    resumed_everywhere(
        tmp_path, BATCH_END, picked=[2], train_data=loader, make=_Estimating, max_epochs=2
    )


def test_saved_in_the_sanity_check(tmp_path: Path) -> None:
    class Save(SaveEverywhere):
        def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.sanity_checking:
                trainer.save_checkpoint(tmp_path / "sanity.ckpt")

    options: dict[str, Any] = {
        "train_data": lambda: regression_data(24, shuffle=True),
        "validation_data": regression_data(8),
        "max_epochs": 1,
    }
    expected = train(tmp_path, seed=1, callbacks=[Save(tmp_path, [])], **options)
    run = train(tmp_path, seed=9, path=tmp_path / "sanity.ckpt", **options)
    assert_same_end(run, expected, Moment(tmp_path, 0, "on_validation_end"))


class _Failing(Restless):
    fails_at: int | None = None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == self.fails_at:
            raise RuntimeError("stopped")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.fails_at is not None and self.trainer.global_step == -self.fails_at:
            raise RuntimeError("stopped")


def _failing(step: int | None) -> Callable[[], LightningModule]:
    def make() -> LightningModule:
        module = _Failing()
        module.fails_at = step
        return module

    return make


def _save_on_exception(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, save_on_exception=True, every_n_train_steps=100)


def test_saved_on_an_exception(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_data": lambda: _loader(shuffle=True), "max_epochs": 1}
    options["enable_checkpointing"] = True
    expected = train(tmp_path / "whole", seed=1, make=_failing(None), **options)
    checkpoint = _save_on_exception(tmp_path / "part")
    with pytest.raises(RuntimeError, match="stopped"):
        train(tmp_path, seed=1, make=_failing(-3), callbacks=[checkpoint], **options)
    (path,) = (tmp_path / "part").glob("*.ckpt")
    run = train(tmp_path / "rest", seed=9, path=path, make=_failing(None), **options)
    assert_same_end(run, expected, Moment(path, 3, "exception"))


def test_moment_that_cannot_be_exact_is_said(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_data": _loader, "max_epochs": 1, "enable_checkpointing": True}
    checkpoint = _save_on_exception(tmp_path / "part")
    with pytest.raises(RuntimeError, match="stopped"):
        train(tmp_path, seed=1, make=_failing(2), callbacks=[checkpoint], **options)
    (path,) = (tmp_path / "part").glob("*.ckpt")
    with pytest.warns(InexactResumeWarning, match="written inside a batch"):
        train(tmp_path / "rest", seed=9, path=path, make=_failing(None), **options)


def test_users_loader_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Set by `seed_everything(workers=True)`: then Lightning itself gives loaders a function.
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    loader = _loader(shuffle=True, num_workers=2)
    before = dict(vars(loader))
    seen: list[Any] = []
    train(
        tmp_path,
        seed=1,
        train_data=lambda: loader,
        make=lambda: Regressor(on_step=lambda view, *_: seen.append(view.trainer.train_dataloader)),
        max_epochs=1,
        strategy=RoundPipeStrategy(num_microbatches=1),
    )
    assert all(one is loader for one in seen)
    assert vars(loader) == before


def test_generators_of_devices_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    state = random_state()
    drawn = torch.rand(3, generator=generators[0])
    monkeypatch.setattr(torch.cuda, "default_generators", generators[:1])  # another machine
    set_random_state(state)
    assert torch.equal(torch.rand(3, generator=generators[0]), drawn)


def test_random_state_is_restored_for_training_only(tmp_path: Path) -> None:
    saver = SaveEverywhere(tmp_path, ["on_train_end"])
    train(tmp_path, seed=1, train_data=_loader, callbacks=[saver], max_epochs=1)
    path = saver.moments[0].path
    make_trainer(strategy="roundpipe").validate(
        Restless(), regression_data(8), ckpt_path=path, verbose=False
    )
    saved = torch.load(path, weights_only=True)["roundpipe"]["random_state"]["torch"]
    assert not torch.equal(torch.get_rng_state(), saved)


def test_random_state_round_trips(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second number behind
    np.random.standard_normal()  # noqa: NPY002 - likewise
    torch.save(random_state(), tmp_path / "state.pt")

    def draw() -> list[float]:
        return [
            random.gauss(0, 1),
            random.random(),
            float(np.random.standard_normal()),  # noqa: NPY002
            float(np.random.rand()),  # noqa: NPY002
            float(torch.rand(())),
        ]

    expected = draw()
    draw()
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert draw() == expected


def test_steps_leave_the_hosts_generator_to_the_data() -> None:
    """Dropout in the model changes nothing about the order in which the data is shuffled."""
    orders = []
    for dropout in (0.0, 0.5):
        seen: list[Tensor] = []
        torch.manual_seed(7)
        module = Regressor(dropout=dropout, on_step=lambda m, b, i: seen.append(b[0].clone()))  # noqa: B023
        torch.manual_seed(8)
        trainer = make_trainer(strategy=RoundPipeStrategy(num_microbatches=1), max_epochs=3)
        trainer.fit(module, regression_data(shuffle=True))
        orders.append(torch.cat(seen))
    assert torch.equal(orders[0], orders[1])
