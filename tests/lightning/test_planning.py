import logging
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from torchmetrics.aggregation import MeanMetric

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.errors import ConfigurationError, PlanError
from roundpipe_lightning.planning.cost.device_memory import MemoryKind
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.fit import improved_plan
from roundpipe_lightning.planning.search.request import PartitionHints
from roundpipe_lightning.strategy import runtime
from roundpipe_lightning.strategy.planning import planner as planning
from roundpipe_lightning.strategy.resume.randomness import random_state
from tests.kit.training import (
    WIDTH,
    LanguageModel,
    PaddedSequences,
    Regressor,
    make_trainer,
    regression_data,
    same_bits,
    train_alike,
)

SAY = "lightning.pytorch.utilities.rank_zero"


FLAGS = ("callbacks", "precision", "detect_anomaly", "accumulate_grad_batches")


def fit(
    folder: Path, module: Any = None, data: Any = None, *, steps: int = 3, **settings: Any
) -> RoundPipeStrategy:
    flags = {key: settings.pop(key) for key in FLAGS if key in settings}
    strategy = RoundPipeStrategy(**settings)
    trainer = make_trainer(
        folder, strategy=strategy, devices=2, max_steps=steps, max_epochs=-1, **flags
    )
    trainer.fit(Regressor() if module is None else module, data or regression_data())
    return strategy


class Counting(Regressor):
    """A module whose step does all that a step may do beside computing a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.seen: list[int] = []
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = functional.mse_loss(self(x), y)
        self.steps += 1
        self.seen.append(batch_idx)
        self.mean(loss)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=self.current_epoch > 1)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss


# --- what the plan follows from -------------------------------------------------------------------


def test_the_step_is_tried_without_values_and_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=SAY)
    module = Counting()
    strategy = fit(tmp_path, module, num_microbatches=4, microbatching="blocks")
    assert module.steps == len(module.seen) == 3
    assert sum("planned 4 microbatches" in line for line in caplog.messages) == 1
    assert not any("cannot be run without values" in line for line in caplog.messages)
    profile = strategy.profile
    assert profile is not None
    assert profile.blocks[0].boundary_bytes == 2 * WIDTH * 4  # two samples of a microbatch
    whole = fit(tmp_path, Counting(), num_microbatches=1).profile
    assert whole is not None
    assert profile.tail.working_bytes == whole.tail.working_bytes > 0  # not a part


def test_the_step_is_tried_where_anomalies_are_looked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Numbers that are not there must not be taken for numbers that are wrong."""
    caplog.set_level(logging.INFO, logger=SAY)
    fit(tmp_path, Counting(), num_microbatches=4, microbatching="blocks", detect_anomaly=True)
    assert any("planned 4 microbatches" in line for line in caplog.messages)
    assert not any("cannot be run without values" in line for line in caplog.messages)


def test_random_numbers_are_as_without_a_dry_run(tmp_path: Path) -> None:
    class Noisy(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            noise = random.random() + float(np.random.rand())  # noqa: NPY002
            loss: Tensor = functional.mse_loss(self(x + torch.randn(x.shape) * noise), y)
            return loss

    def final(*, dry_run: bool) -> Noisy:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        module = Noisy(dropout=0.2)
        fit(tmp_path, module, num_microbatches=1, dry_run=dry_run)
        return module

    first, state = final(dry_run=True), random_state()
    second = final(dry_run=False)
    assert same_bits(first, second)
    assert torch.equal(state["torch"], random_state()["torch"])
    assert state["numpy"] == random_state()["numpy"]


@pytest.mark.usefixtures("steps_of_microbatches")
def test_a_step_that_needs_values_is_planned_from_its_parameters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Needy(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            scale: float = x.abs().max().item()
            return functional.mse_loss(self(x / scale), y)

    caplog.set_level(logging.INFO, logger=SAY)
    strategy = fit(tmp_path, Needy(), regression_data(30), num_microbatches="auto", steps=8)
    said = [line for line in caplog.messages if "step cannot be run without values" in line]
    assert len(said) == 1  # though two shapes were planned
    assert "(RuntimeError: Tensor.item() cannot be called on meta tensors)" in said[0]
    assert strategy.plan is not None
    assert strategy.profile is not None
    assert strategy.profile.blocks[0].boundary_bytes == 0


@pytest.mark.parametrize("write", ["trainer.should_stop = True", "logger.log_metrics({})"])
def test_a_step_that_uses_its_trainer_is_not_tried(tmp_path: Path, write: str) -> None:
    ran: list[str] = []

    class Using(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            exec(f"self.{write}" if self.global_step >= 99 else "pass")
            x, y = batch
            return functional.mse_loss(self(x), y) + 0 * len(str(self.trainer.loggers))

    with mock.patch.object(planning, "rank_zero_info", side_effect=ran.append):
        fit(tmp_path, Using(), num_microbatches=2)
    assert any("The step uses the Trainer's loggers" in line for line in ran)


@pytest.mark.usefixtures("steps_of_microbatches")
def test_a_shape_is_planned_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger=SAY)
    data = torch.utils.data.DataLoader(PaddedSequences(14), batch_size=4)
    strategy = fit(tmp_path, LanguageModel(), data, steps=12)
    lines = [line for line in caplog.messages if "planned" in line]
    assert len(lines) == 2  # the last batch of an epoch has two sequences
    assert strategy.plan is not None
    assert strategy.plan.num_microbatches == 4


@pytest.mark.usefixtures("steps_of_microbatches")
def test_a_longer_batch_is_planned_anew_and_a_shorter_one_is_not() -> None:
    module, data = LanguageModel(), []
    for length in (8, 7, 16, 15, 4):
        tokens = torch.ones(4, length, dtype=torch.long)
        data.append({"input_ids": tokens, "labels": tokens})
    events: list[Any] = []
    planned: list[int] = []

    class Watch(Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.plan_listeners.append(events.append)

        def on_train_batch_end(self, *_: Any) -> None:
            planned.append(len(events))

    loader: Any = torch.utils.data.DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    fit(Path(), module, loader, steps=5, callbacks=[Watch()])
    assert planned == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("hardware", ["auto", "rtx4090x2"])
@pytest.mark.parametrize("sizes", [(32, 8), (8, 16)], ids=["of a microbatch's size", "larger"])
def test_plans_of_one_mode_are_not_another_s(sizes: tuple[int, int], hardware: Any) -> None:
    """All pieces of a batch go forward in one round, whatever rounds microbatches have had."""

    class Late(Regressor):
        late = False

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.late = batch_idx == 3

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss.log1p() if self.late else loss

    batches: Any = [
        next(iter(regression_data(n, batch_size=n))) for n in (*3 * sizes[:1], sizes[1])
    ]
    data = DataLoader(batches, batch_size=None)
    strategy = RoundPipeStrategy(
        num_microbatches=4, hints={"round_size": 2}, hardware=hardware, timeout_seconds=20
    )
    train_alike(Late, strategy, data=data, max_epochs=1)
    assert strategy.last_step is not None
    assert strategy.last_step.plan.joined


def test_gradients_are_counted_twice_where_batches_are_accumulated(tmp_path: Path) -> None:
    counted: list[int] = []

    class Watch(Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.plan_listeners.append(
                lambda event: counted.append(event.description.memory.host.of(MemoryKind.GRADIENTS))
            )

    for window in (1, 2):
        fit(tmp_path, steps=1, callbacks=[Watch()], accumulate_grad_batches=window)
    assert counted[1] == 2 * counted[0] > 0


def test_hints_are_kept_where_buffers_are_only_read(tmp_path: Path) -> None:
    class Reading(Regressor):
        scale: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    plan = fit(tmp_path, Reading(), hints=PartitionHints(team_size=2)).plan
    assert plan is not None
    assert plan.team_size == 2


def test_mixed_precision_is_planned_in_its_dtype(tmp_path: Path) -> None:
    full = fit(tmp_path, num_microbatches=2).profile
    mixed = fit(tmp_path, num_microbatches=2, precision="bf16-mixed").profile
    assert full is not None
    assert mixed is not None
    assert mixed.blocks[0].activation_bytes < full.blocks[0].activation_bytes


# --- hints ----------------------------------------------------------------------------------------


def test_hints_are_kept(tmp_path: Path) -> None:
    hints = {"backward": [1, 2, 1], "limits": {"forward": 2}, "team_size": 1, "round_size": 2}
    plan = fit(tmp_path, hints=hints).plan
    assert plan is not None
    assert plan.partition.backward == (1, 2, 1)
    assert max(plan.partition.forward) <= 2
    assert (plan.team_size, plan.round_size) == (1, 2)


def test_hints_for_a_full_batch_bend_for_a_smaller_one(tmp_path: Path) -> None:
    strategy = fit(
        tmp_path, data=regression_data(9), hints=PartitionHints(team_size=2, round_size=4), steps=2
    )
    assert strategy.last_step is not None
    assert strategy.last_step.plan.num_microbatches == strategy.last_step.plan.round_size == 1
    assert strategy.plan is not None
    assert (strategy.plan.team_size, strategy.plan.round_size) == (2, 4)


def test_impossible_hints_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    with mock.patch.object(runtime, "Engine") as engine:
        with pytest.raises(PlanError, match="team_size=3 does not divide the 2 devices"):
            fit(tmp_path, hints=PartitionHints(team_size=3))
        engine.assert_not_called()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hints": 3}, "hints=3: give PartitionHints, or a mapping"),
        ({"hints": {"teams": 2}}, r"hints has teams, which is no hint: there are forward, "),
        ({"hints": {"limits": {"tail": 2}}}, r"hints\['limits'\] has tail"),
        ({"hints": {"team_size": 0}}, "partition.team_size=0 must be 1 or more"),
        ({"hints": {"forward": [1.5]}}, r"partition.forward=\[1.5\]: give whole numbers"),
        ({"hints": {"team_size": "2"}}, r"partition.team_size='2': give a whole number"),
        ({"hints": {"limits": {"backward": 0}}}, r"partition.limits.backward=0 must be 1"),
        ({"hints": {"team_size": 2}, "plan": "a.json"}, "drop one of the two"),
    ],
)
def test_hints_that_are_none_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RoundPipeStrategy(**settings)


# --- measured times -------------------------------------------------------------------------------


def other_plan(plan: Plan, partition: Partition) -> Plan:
    return Plan(
        model=plan.model,
        partition=partition,
        num_workers=plan.num_workers,
        num_microbatches=plan.num_microbatches,
        team_size=plan.team_size,
        round_size=plan.round_size,
        block_names=plan.block_names,
    )


class _AnotherPlanEveryStep:
    """Stands in for the search: the next of some partitions, every time."""

    PARTITIONS = (
        Partition(forward=(2, 1), backward=(1, 2, 1)),
        Partition(forward=(), backward=(4,)),
        Partition(forward=(1, 1, 2), backward=(0, 1, 1, 2)),
    )

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, plan: Plan, **_: Any) -> Any:
        partition = self.PARTITIONS[self.calls % len(self.PARTITIONS)]
        self.calls += 1
        other = other_plan(plan, partition)
        return SimpleNamespace(seconds=2.0), SimpleNamespace(plan=other, seconds=1.0)


@pytest.mark.usefixtures("steps_of_microbatches")
def test_other_stages_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = []
    for changes in (False, True):
        search = _AnotherPlanEveryStep()
        if changes:
            monkeypatch.setattr(planning, "improved_plan", search)
            monkeypatch.setattr(planning.StepPlanner, "_is_due", lambda self, planned: True)
        torch.manual_seed(4)
        module = Regressor("adamw", dropout=0.2)
        seen: list[Any] = []

        class Watch(Callback):
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                seen.append(trainer.strategy.last_step.plan.partition)  # noqa: B023

        strategy = fit(tmp_path, module, steps=20, callbacks=[Watch()], replan=changes)
        assert len(set(seen)) == (4 if changes else 1)
        assert search.calls == (20 if changes else 0)
        assert strategy.plan is not None
        if changes:
            assert strategy.plan.partition == search.PARTITIONS[19 % 3]
        modules.append(module)
    assert same_bits(*modules)


@pytest.mark.usefixtures("steps_of_microbatches")
def test_a_bad_start_is_improved_by_measuring(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All work is in the tail, which estimates from other blocks do not know."""
    caplog.set_level(logging.INFO, logger=SAY)
    looked: list[int] = []

    def watched(plan: Plan, **given: Any) -> Any:
        looked.append(given["remaining_steps"])
        assert given["profile"].blocks[0].forward_seconds > 0
        assert given["profile"].tail.backward_seconds > 0
        return improved_plan(plan, **given)

    monkeypatch.setattr(planning, "improved_plan", watched)
    fit(tmp_path, steps=24)
    assert looked == [24 - 4, 24 - 9, 24 - 19]  # after 5, 10 and 20 steps


def test_a_given_plan_is_never_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = fit(tmp_path).plan
    assert plan is not None
    monkeypatch.setattr(planning, "improved_plan", mock.Mock(side_effect=AssertionError))
    given = other_plan(plan, Partition(forward=(3,), backward=(1, 3)))
    strategy = fit(tmp_path, plan=given, steps=8)
    assert strategy.plan is given
    assert strategy.last_step is not None
    assert strategy.last_step.plan is given


@pytest.mark.usefixtures("steps_of_microbatches")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_averages_are_part_of_a_checkpoint(tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    flags: dict[str, Any] = {"devices": 2, "max_epochs": -1, "enable_checkpointing": True}
    trainer = make_trainer(strategy=RoundPipeStrategy(), max_steps=6, callbacks=[save], **flags)
    trainer.fit(Regressor(), regression_data())
    path = tmp_path / "step=6.ckpt"
    state = torch.load(path, weights_only=True)["roundpipe"]["planning"]
    assert [average["num_steps"] for average in state["averages"]] == [6]
    assert state["rounds"][0][0] == 4

    strategy = RoundPipeStrategy()
    trainer = make_trainer(strategy=strategy, max_steps=8, **flags)
    trainer.fit(Regressor(), regression_data(), ckpt_path=path)
    (found,) = strategy._seen.planner._planned  # type: ignore[union-attr]
    assert found.measured.num_steps == 6 + 2
