import json
import re
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger

from roundpipe_lightning import PipelineTimeline
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.training import QUIET, Regressor, make_trainer, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


def _record(folder: Path, callback: PipelineTimeline, **flags: Any) -> RoundPipeStrategy:
    strategy = RoundPipeStrategy(replan=False)  # whether that pays depends on the machine's load
    trainer = make_trainer(folder, strategy=strategy, devices=2, callbacks=[callback], **flags)
    trainer.fit(Regressor(), regression_data(27))
    return strategy


def test_files_and_shares(tmp_path: Path) -> None:
    callback = PipelineTimeline(tmp_path / "out")
    strategy = _record(tmp_path, callback)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "timeline.json",
        "timeline.svg",
        *(["timeline.png"] if find_spec("PIL") else []),
    }
    # The last batch of each epoch of four has three samples, so runs on another plan.
    assert list(callback.measured) == [4, 5, 6, 10]
    assert callback.predicted is not None
    assert callback.predicted_bubble_fraction is not None
    assert callback.measured_bubble_fraction is not None
    assert 0 <= callback.predicted_bubble_fraction < 1
    assert 0 <= callback.measured_bubble_fraction < 1
    assert strategy.plan is not None
    planned = {action for row in strategy.plan.schedule.workers for action in row}
    for timeline in (callback.predicted, *callback.measured.values()):
        assert {entry.action for entry in timeline.entries} == planned
    trace = json.loads((tmp_path / "out" / "timeline.json").read_text())
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["predicted", *(f"measured, batch {number}" for number in (4, 5, 6, 10))]
    drawing = (tmp_path / "out" / "timeline.svg").read_text()
    assert drawing.index("predicted:") < drawing.index("measured, batch")
    assert drawing.count(">worker 0<") == drawing.count(">worker 1<") == 2
    notes = [e.text for e in ET.fromstring(drawing).iter() if e.attrib.get("class") == "n"]
    assert 1 <= len(notes) <= 2, "the parts of the idle share, where there are any"
    assert all(note and re.match(r"(\w+ \d+\.\d%(, )?)+$", note) for note in notes)


def test_prediction_has_the_measured_durations(tmp_path: Path) -> None:
    callback = PipelineTimeline(tmp_path, steps=[5])
    _record(tmp_path, callback)
    assert list(callback.measured) == [5]
    assert callback.predicted is not None
    measured = callback.measured[5]
    stages = defaultdict(list)
    for entry in measured.entries:
        stages[entry.action.kind, entry.action.stage].append(entry.busy_seconds)
    for entry in callback.predicted.entries:
        durations = stages[entry.action.kind, entry.action.stage]
        assert entry.end_seconds - entry.start_seconds == pytest.approx(median(durations))


def test_folder_of_the_logger_is_the_default(tmp_path: Path) -> None:
    _record(tmp_path, PipelineTimeline(), logger=CSVLogger(tmp_path, version=0))
    assert (tmp_path / "lightning_logs/version_0/timeline.svg").exists()


def test_training_that_ended_early_has_a_timeline(tmp_path: Path) -> None:
    def fail(module: Any, batch: Any, batch_idx: int) -> None:
        if module.current_epoch == 2:
            raise ValueError("enough")

    trainer = make_trainer(
        tmp_path, strategy="roundpipe", devices=2, callbacks=[PipelineTimeline(tmp_path)]
    )
    with pytest.raises(ValueError, match="enough"):
        trainer.fit(Regressor(on_step=fail), regression_data())
    assert (tmp_path / "timeline.json").exists()


def test_steps_of_a_search_for_the_learning_rate_are_not_counted(tmp_path: Path) -> None:
    class Adjustable(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.lr = 0.1

    class Finder(LearningRateFinder):
        def on_fit_start(self, *args: Any) -> None:
            super().on_fit_start(*args)
            assert args[0].strategy.last_step is not None, "it has searched"

    timeline = PipelineTimeline(tmp_path / "out")
    finder = Finder(num_training_steps=3, update_attr=False)
    trainer = make_trainer(
        tmp_path, strategy="roundpipe", devices=2, callbacks=[timeline, finder], max_epochs=1
    )
    trainer.fit(Adjustable(), regression_data(8, batch_size=4))
    assert list(timeline.measured) == [trainer.global_step - 1]


def test_no_training_no_files(tmp_path: Path) -> None:
    callback = PipelineTimeline(tmp_path)
    trainer = make_trainer(tmp_path, strategy="roundpipe", callbacks=[callback])
    trainer.validate(Regressor(), regression_data(8), verbose=False)
    assert list(tmp_path.iterdir()) == []
    assert callback.predicted_bubble_fraction is None
    assert callback.measured_bubble_fraction is None


def test_other_strategies_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, callbacks=[PipelineTimeline(tmp_path)])
    with pytest.raises(ConfigurationError, match="needs Trainer\\(strategy='roundpipe'\\)"):
        trainer.fit(Regressor(), regression_data())


def test_negative_steps_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="counted from 0"):
        PipelineTimeline(steps=[1, -1])
