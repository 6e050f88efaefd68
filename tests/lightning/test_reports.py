from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from rich.console import Console
from torch import Tensor

from roundpipe_lightning import (
    LiveView,
    PipelineMonitor,
    PipelineTimeline,
    RoundPipeStrategy,
    RunReport,
)
from roundpipe_lightning.callbacks.live import curve
from roundpipe_lightning.callbacks.pictures import loss_svg
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.planning.report.render import write_picture
from tests.kit.training import Block, Regressor, make_trainer, regression_data


class _Looking(Block):
    """Draws the view while a worker runs it."""

    view: LiveView
    seen: list[str]

    def forward(self, x: Tensor) -> Tensor:
        if self.view.is_shown:
            self.seen.append(self.view.text())
        return super().forward(x)


def _fit(*, is_terminal: bool) -> tuple[str, list[str]]:
    file = StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=110)
    view, seen = LiveView(console=console), list[str]()
    module: Any = Regressor()
    for layer in module.layers:
        layer.__class__ = _Looking
    _Looking.view, _Looking.seen = view, seen
    trainer = make_trainer(
        strategy=RoundPipeStrategy(microbatching="step"),
        devices=2,
        max_steps=3,
        callbacks=[view, PipelineMonitor()],
        enable_progress_bar=True,
    )
    trainer.fit(module, regression_data(24))
    assert not view.is_shown
    return file.getvalue(), seen


@pytest.mark.filterwarnings("ignore:The step, or another thread, writes (seen|view)")
def test_lanes_speed_and_loss() -> None:
    shown, seen = _fit(is_terminal=True)
    assert any("runs F0.0" in text for text in seen)
    running = [text for text in seen if " runs " in text]  # others are of the run without values
    assert all("worker 0" in text and "worker 1" in text for text in running)
    last = shown.rpartition("roundpipe")[2]
    assert "step 3 of 3" in last
    assert "worker 1" in last
    assert "between steps" in last
    assert "loss " in last
    assert "host" in last


@pytest.mark.filterwarnings("ignore:The step, or another thread, writes (seen|view)")
def test_nothing_where_there_is_no_terminal() -> None:
    assert _fit(is_terminal=False) == ("", [])


def test_the_curve_of_losses() -> None:
    assert curve([1.0, 2.0, float("nan"), 8.0]) == "▁▂?█"
    assert curve([3.0, 3.0]) == "▁▁"
    assert curve([float("nan")]) == "?"


BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def report(folder: Path, strategy: Any) -> str:
    callbacks: list[Any] = [PipelineMonitor(), RunReport(folder / "out")]
    if isinstance(strategy, RoundPipeStrategy):
        callbacks.append(PipelineTimeline(folder / "out"))
    make_trainer(folder, strategy=strategy, callbacks=callbacks).fit(
        Regressor(), regression_data(24)
    )
    return (folder / "out" / "report.html").read_text(encoding="utf-8")


def test_plan_measurement_idle_time_memory_and_loss(tmp_path: Path) -> None:
    page = report(tmp_path, RoundPipeStrategy(replan=False))
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert titles == [
        "Loss",
        "Plan against measurement",
        "Idle time by cause",
        "Memory by kind, as planned",
        "A step, predicted and measured",
        "Plan",
    ]
    (row,) = re.findall(r"<td>seconds per step<td>(\S+)<td>(\S+)</tr>", page)
    assert all(float(value) > 0 for value in row)
    idle = re.search(r"<p>([\d.]+)% of the workers' time", page)
    parts = re.findall(
        r"<tr><td>\w+<td class=\"b\"><div style=\"width:[\d.]+%\"></div><td>(-?[\d.]+)%", page
    )
    assert idle is not None
    assert sum(map(float, parts)) == pytest.approx(float(idle[1]), abs=0.5)
    assert "measured at most" in page
    links = re.findall(r"https?://[^\"]*", page)
    assert set(links) == {"http://www.w3.org/2000/svg"}, "a page without a network"
    ET.parse(tmp_path / "out" / "loss.svg")


def test_another_strategy_has_a_report_without_a_plan(tmp_path: Path) -> None:
    page = report(tmp_path, "auto")
    assert re.findall("<h2>(.*?)</h2>", page) == ["Loss"]


@pytest.mark.parametrize(
    ("losses", "points"),
    [
        ([(1, 2.0)], 1),
        ([(step, 1.0 / step) for step in range(1, 4001)], 1000),
        ([(1, 2.0), (2, float("nan")), (3, 1.0)], 2),
    ],
)
def test_losses_of_any_number(losses: list[tuple[int, float]], points: int) -> None:
    lines = [e for e in ET.fromstring(loss_svg(losses)).iter() if e.tag.endswith("polyline")]
    drawn = lines[0].attrib["points"].split()
    assert len(drawn) == points
    assert all(20 <= float(point.split(",")[1]) <= 200 for point in drawn)


@pytest.mark.parametrize("losses", [[(1, 2.0)], [(1, float("nan"))], [(1, 3.0), (2, 1.0)]])
def test_the_png_has_the_drawing(losses: list[tuple[int, float]], tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    write_picture(tmp_path / "loss.svg", loss_svg(losses))
    with image.open(tmp_path / "loss.png") as drawn:
        assert drawn.size == (1440, 480)
        colours = {colour for _, colour in drawn.getcolors(4096)}
        assert (255, 255, 255) in colours
        assert ((28, 126, 214) in colours) == (len(losses) == 2)  # the line


def test_without_pillow_there_is_the_svg_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    write_picture(tmp_path / "loss.svg", loss_svg([(1, 2.0)]))
    assert [path.name for path in tmp_path.iterdir()] == ["loss.svg"]
    assert "pip install pillow" in caplog.text


@pytest.mark.soak
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    report(tmp_path, RoundPipeStrategy(replan=False))
    assert BROWSER is not None
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += [f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom"]
    page = (tmp_path / "out" / "report.html").as_uri()
    done = subprocess.run(
        [BROWSER, *flags, page], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.count("<svg") == 2
    assert done.stdout.count("<tr>") > 10


def _record(callback: PipelineTimeline, **flags: Any) -> RoundPipeStrategy:
    strategy = RoundPipeStrategy(replan=False)  # whether that pays depends on the machine's load
    trainer = make_trainer(strategy=strategy, devices=2, callbacks=[callback], **flags)
    trainer.fit(Regressor(), regression_data(27))
    return strategy


def test_files_and_shares(tmp_path: Path) -> None:
    callback = PipelineTimeline(tmp_path / "out")
    strategy = _record(callback)
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
    _record(callback)
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
    _record(PipelineTimeline(), logger=CSVLogger(tmp_path, version=0))
    assert (tmp_path / "lightning_logs/version_0/timeline.svg").exists()


def test_training_that_ended_early_has_a_timeline(tmp_path: Path) -> None:
    def fail(module: Any, batch: Any, batch_idx: int) -> None:
        if module.current_epoch == 2:
            raise ValueError("enough")

    trainer = make_trainer(strategy="roundpipe", devices=2, callbacks=[PipelineTimeline(tmp_path)])
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
        strategy="roundpipe", devices=2, callbacks=[timeline, finder], max_epochs=1
    )
    trainer.fit(Adjustable(), regression_data(8, batch_size=4))
    assert list(timeline.measured) == [trainer.global_step - 1]


def test_no_training_no_files(tmp_path: Path) -> None:
    callback = PipelineTimeline(tmp_path)
    trainer = make_trainer(strategy="roundpipe", callbacks=[callback])
    trainer.validate(Regressor(), regression_data(8), verbose=False)
    assert list(tmp_path.iterdir()) == []
    assert callback.predicted_bubble_fraction is None
    assert callback.measured_bubble_fraction is None


def test_other_strategies_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(callbacks=[PipelineTimeline(tmp_path)])
    with pytest.raises(ConfigurationError, match="needs Trainer\\(strategy='roundpipe'\\)"):
        trainer.fit(Regressor(), regression_data())


def test_negative_steps_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="counted from 0"):
        PipelineTimeline(steps=[1, -1])
