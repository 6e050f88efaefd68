from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.errors import FitError
from roundpipe_lightning.planning.model.hardware import HardwareSpec, load_hardware
from roundpipe_lightning.strategy import runtime
from roundpipe_lightning.strategy.planning.planned import PlanEvent
from tests.kit.training import QUIET, LanguageModel, Regressor, make_trainer, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]

ROOM = 60_000


def machine(room: int = ROOM) -> HardwareSpec:
    return replace(load_hardware("rtx4090x2"), device_bytes=1 + room, reserved_bytes=1)


class Lengths:
    """Tokens of given lengths, and what was planned and run for them."""

    def __init__(self, *lengths: int) -> None:
        rows = [torch.ones(4, length, dtype=torch.long) for length in lengths]
        data: Any = [{"input_ids": row, "labels": row} for row in rows]
        self.loader: Any = DataLoader(data, batch_size=None)
        self.num_planned: list[int] = []

    def train(self, folder: Path, **settings: Any) -> RoundPipeStrategy:
        events: list[PlanEvent] = []
        watch = LambdaCallback(on_train_batch_end=lambda *_: self.num_planned.append(len(events)))
        settings = {"hardware": machine(), "num_microbatches": 2, **settings}
        strategy = RoundPipeStrategy(microbatching="step", **settings)
        strategy.plan_listeners.append(events.append)
        trainer = make_trainer(
            folder, strategy=strategy, devices=2, max_epochs=1, callbacks=[watch]
        )
        trainer.fit(LanguageModel(), self.loader)
        return strategy


def longest_in(error: BaseException) -> int:
    found = re.search(
        r"Sequences of ([\d,]+) are too long: those of up to ([\d,]+) fit", str(error)
    )
    assert found is not None, str(error)
    return int(found[2].replace(",", ""))


def refused(folder: Path, lengths: Sequence[int], **settings: Any) -> FitError:
    with pytest.raises(FitError) as error:
        Lengths(*lengths).train(folder, **settings)
    return error.value


def test_the_first_batch_is_refused_with_the_longest_length_that_runs(tmp_path: Path) -> None:
    with mock.patch.object(runtime, "Engine") as engine:
        longest = longest_in(refused(tmp_path, [512]))
        engine.assert_not_called()
    assert 16 < longest < 512
    fitting = Lengths(longest)
    fitting.train(tmp_path)
    assert fitting.num_planned == [1]
    assert longest_in(refused(tmp_path, [longest + 1])) == longest


def test_a_later_batch_is_refused_before_anything_moves(tmp_path: Path) -> None:
    ran: list[int] = []
    run = Engine.begin_step

    def counted(self: Engine, *arguments: Any, **settings: Any) -> Any:
        ran.append(1)
        return run(self, *arguments, **settings)

    batches = Lengths(56, 52, 40, 56, 512, 32)
    with mock.patch.object(Engine, "begin_step", counted), pytest.raises(FitError) as error:
        batches.train(tmp_path)
    assert batches.num_planned == [1, 1, 1, 1]  # shorter ones need no new plan
    assert len(ran) == 4
    assert "The step has not begun" in str(error.value)
    assert 56 < longest_in(error.value) < 512


def test_a_plan_of_the_users_own_has_a_longest_length_too(tmp_path: Path) -> None:
    plan = Lengths(56).train(tmp_path).plan
    error = refused(tmp_path, [512], plan=plan)
    assert "The given plan does not fit" in str(error)
    longest = longest_in(error)
    Lengths(longest).train(tmp_path, plan=plan)
    assert longest_in(refused(tmp_path, [longest + 1], plan=plan)) == longest


def test_nothing_is_said_where_no_length_is_known_to_help(tmp_path: Path) -> None:
    strategy = RoundPipeStrategy(hardware=machine(8_000), num_microbatches=2)
    trainer = make_trainer(tmp_path, strategy=strategy, devices=2, max_epochs=1)
    with pytest.raises(FitError, match="The training step does not fit") as error:
        trainer.fit(Regressor(), regression_data(1024, batch_size=1024))
    assert "Sequences" not in str(error.value)
