"""`microbatching="auto"`: what is written elsewhere than into modules keeps the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.strategy import microbatching
from tests.kit.training import (
    QUIET,
    Regressor,
    make_trainer,
    parameter_error,
    regression_data,
    train_with,
)

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


class Counts(Regressor):
    """Counts its steps somewhere."""

    num_calls: ClassVar[list[int]] = []

    def __init__(self, count: Callable[[Counts], Any]) -> None:
        super().__init__()
        self.count = count
        self._outputs: dict[str, list[int]] = {"train": []}
        self.state = SimpleNamespace(calls=0)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count(self)
        return super().training_step(batch, batch_idx)


def add(module: Counts) -> None:
    module.state.calls += 1


@pytest.mark.parametrize(
    ("count", "mode"),
    [
        (lambda module: None, "step"),
        (lambda module: module._outputs["train"].append(0), "blocks"),
        (lambda module: module.num_calls.append(0), "blocks"),
        (add, "blocks"),
    ],
    ids=["nothing", "a list in a dict", "a list of the class", "an object"],
)
def test_chosen_mode(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    count: Callable[[Counts], Any],
    mode: str,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(microbatching, "rank_zero_info", said.append)
    strategy = RoundPipeStrategy(num_microbatches=2)
    trainer = make_trainer(tmp_path, strategy=strategy, devices=2, max_steps=2)
    trainer.fit(Counts(count), regression_data())
    assert [text.split("'")[1] for text in said] == [mode], said


def test_stages_that_fuse_the_loss_take_the_whole_batch_and_say_so(tmp_path: Path) -> None:
    data = regression_data()
    kinds = ["auto", RoundPipeStrategy(recompute="none")]
    (one, _), (module, _) = train_with(tmp_path, kinds, Regressor, data, max_epochs=1)
    assert parameter_error(module, one) < 1e-5  # "step" from the second batch on
    strategy = RoundPipeStrategy(recompute="none", microbatching="blocks")
    with pytest.warns(UserWarning, match="whole batch is one microbatch: recompute='none'"):
        make_trainer(tmp_path, strategy=strategy, max_epochs=1).fit(Regressor(), data)
    assert strategy.plan is not None
    assert strategy.plan.num_microbatches == 1
