"""The report of a run: what is in it, and that a browser shows it without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from roundpipe_lightning import PipelineMonitor, PipelineTimeline, RoundPipeStrategy, RunReport
from roundpipe_lightning.callbacks.report import loss_svg
from roundpipe_lightning.planning.report.picture import write_picture
from tests.kit.training import QUIET, Regressor, make_trainer, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
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
