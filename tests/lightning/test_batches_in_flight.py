import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import roundpipe_lightning.cli.callbacks
from roundpipe_lightning import PipelineMonitor, PipelineTimeline, PlanReport
from roundpipe_lightning.planning.report.step_record import IdleCause, StepRecord
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.strategy.updates import parameter_watch
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.moments import PATIENCE_SECONDS, ObservedBlock
from tests.kit.training import WIDTH, Regressor, make_trainer, regression_data, same_bits
from tests.lightning.test_updates import Overlapping

NUM_WORKERS, NUM_MICROBATCHES = 3, 2
PARTITION = {"forward": [3], "backward": [1, 3], "round_size": 2, "team_size": 1}
"""The last stage is on another worker than the others."""


def fit(
    *callbacks: Callback,
    on_backward: Callable[[], None] = lambda: None,
    on_step: Callable[[Any, Any, int], Any] | None = None,
    dropout: float = 0.0,
    **flags: Any,
) -> tuple[Regressor, Trainer]:
    torch.manual_seed(0)
    module = Regressor("adamw", on_step=on_step, dropout=dropout)
    first = ObservedBlock()
    first.load_state_dict(module.layers[0].state_dict())
    first.on_backward = on_backward
    module.layers[0] = first
    options: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 3} | flags
    trainer = make_trainer(
        strategy=EmulatedStrategy(
            num_microbatches=NUM_MICROBATCHES,
            microbatching="step",
            hints=PARTITION,
            timeout_seconds=PATIENCE_SECONDS,
        ),
        devices=NUM_WORKERS,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(module, regression_data(num_samples=24, batch_size=4))
    return module, trainer


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_of_a_window_that_was_not_filled_are_there_in_the_end(dropout: float) -> None:
    looking = LambdaCallback(on_after_backward=lambda *_: None)
    found, _ = fit(dropout=dropout, limit_train_batches=5, max_epochs=2)
    wanted, _ = fit(looking, dropout=dropout, limit_train_batches=5, max_epochs=2)
    assert same_bits(found, wanted)


def test_who_asks_for_the_last_step_gets_it() -> None:
    seen: list[bool] = []

    class Reader(Callback):
        requires_optimizer_sync = False

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            strategy = trainer.strategy
            assert isinstance(strategy, RoundPipeStrategy)
            seen.append(strategy.last_step is not None)
            gradients = [p.grad for p in trainer.lightning_module.parameters()]
            assert all(g is not None for g in gradients) or trainer.global_step

    fit(Reader())
    assert seen == [True] * 6


@pytest.mark.parametrize(
    "module", [roundpipe_lightning.callbacks, roundpipe_lightning.cli.callbacks]
)
def test_no_callback_of_ours_is_to_find_gradients(module: Any) -> None:
    kinds = [k for k in vars(module).values() if isinstance(k, type) and issubclass(k, Callback)]
    assert kinds
    for kind in kinds:
        hooks = [name for name in dir(Callback) if name.startswith("on_")]
        owner = kind.__new__(kind)
        assert not [hook for hook in hooks if parameter_watch.needs_gradients(owner, hook)]


def test_batches_in_flight_stay_in_flight(tmp_path: Path) -> None:
    begun = threading.Event()
    steps: list[int] = []

    def on_step(view: Any, batch: Any, index: int) -> None:
        steps.append(index)
        if index == 2:
            begun.set()

    def on_backward() -> None:
        if len(steps) > NUM_MICROBATCHES:  # in the backward pass of the second batch
            assert begun.wait(PATIENCE_SECONDS / 2), "the third batch has not begun"

    monitor, timeline = PipelineMonitor(every_n_steps=1), PipelineTimeline(tmp_path / "drawn")
    report = PlanReport(write=lambda text: None)
    module, trainer = fit(monitor, timeline, report, on_backward=on_backward, on_step=on_step)
    gradients: list[int] = []
    plain, one = fit(LambdaCallback(on_after_backward=lambda *_: gradients.append(1)))
    assert len(gradients) == 6
    assert same_bits(module, plain)
    assert {name: trainer.logged_metrics[name] for name in one.logged_metrics} == one.logged_metrics
    assert trainer.global_step == one.global_step == 2
    assert list(timeline.measured) == [3, 4, 5], "the last one, too"
    figures = monitor.figures
    assert figures["samples_per_second"] * figures["batch_seconds"] == pytest.approx(4)
    parts = [figures[f"idle_{cause.value}_share"] for cause in IdleCause]
    assert sum(parts) == pytest.approx(figures["idle_share"])
    assert 0 < figures["step_idle_share"] < 1
    logged = trainer.logged_metrics
    assert {"roundpipe/idle_share", "roundpipe/tokens_per_second"} & set(logged)


def test_steps_are_told_of_in_their_order() -> None:
    class Watching(Callback):
        records: list[tuple[int, StepRecord]]

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            self.records = []
            self.strategy = trainer.strategy
            count = trainer.fit_loop.epoch_loop.batch_progress.current

            def note(record: StepRecord) -> None:
                self.records.append((count.ready, record))

            trainer.strategy.step_listeners.append(note)

    watching = Watching()
    fit(watching)
    # Of the first batch of an engine and of the last one of a window the end is waited for.
    assert [batch for batch, _ in watching.records] == [1, 3, 3, 5, 6, 6]
    follows = [record.clock_seconds is not None for _, record in watching.records]
    assert follows == [False, False, True, False, True, True]
    assert watching.strategy.last_step is not None
    assert watching.strategy.last_step.timeline is watching.records[-1][1].timeline
    assert not watching.strategy.is_in_flight


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


def _fit(strategy: Any, make: Callable[[Regressor], Any]) -> Regressor:
    torch.manual_seed(3)
    module = Regressor()
    trainer = make_trainer(strategy=strategy, max_epochs=2, limit_val_batches=0)
    trainer.fit(module, make(module))
    assert trainer.global_step == NUM_BATCHES * 2
    return module


@pytest.mark.parametrize("name", LOADERS)
def test_it_is_made_after_the_step(slow_updates: None, name: str) -> None:
    expected = _fit("auto", LOADERS[name])
    module = _fit(Overlapping(num_microbatches=1, dry_run=False), LOADERS[name])
    assert same_bits(module, expected)
    assert all(parameter.isfinite().all() for parameter in module.parameters())
