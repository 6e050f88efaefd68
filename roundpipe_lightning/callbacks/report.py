"""A page about a run: plan against measurement, idle time, memory, loss. One file, no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from roundpipe_lightning.callbacks.listening import CollectsLosses, Listening
from roundpipe_lightning.callbacks.monitor import PipelineMonitor, peak_host_bytes
from roundpipe_lightning.callbacks.timeline import PipelineTimeline
from roundpipe_lightning.files import write_text
from roundpipe_lightning.planning.cost.device_memory import MemoryNeed
from roundpipe_lightning.planning.report.description import PlanDescription, size_text
from roundpipe_lightning.planning.report.render import write_picture
from roundpipe_lightning.planning.report.step_record import IdleCause
from roundpipe_lightning.strategy.planning.inputs import PlanEvent

_WIDTH, _HEIGHT = 720, 240
_MOST_POINTS = 1000
_STYLE = """
body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#212529}
table{border-collapse:collapse}td,th{padding:.2rem 1rem .2rem 0;text-align:left}
td.b{width:16rem}td.b div{background:#74c0fc;height:.9rem}svg{max-width:100%;height:auto}
pre{background:#f1f3f5;padding:.8rem;white-space:pre-wrap}
"""


class RunReport(CollectsLosses, Listening):
    """Writes `report.html`, `loss.svg` and `loss.png` when a training ends, also early.

    What a `PipelineMonitor` and a `PipelineTimeline` among the Trainer's callbacks have measured is
    in the report, beside the plan and its predictions. Another strategy than roundpipe's has
    neither plan nor prediction.

    Args:
        dirpath: Where to; None is the logger's folder, or the Trainer's default folder.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self._dirpath = None if dirpath is None else Path(dirpath)
        self._losses = []
        self._plan: PlanDescription | None = None
        self._assumed_rates = False

    def _take(self, event: PlanEvent) -> None:
        if event.replaced is not None or self._plan is None:  # not of batches of another shape
            self._plan, self._assumed_rates = event.description, event.assumed_rates

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self._write(trainer)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not self._losses or not trainer.is_global_zero:
            return
        folder = self._dirpath or Path(trainer.log_dir or trainer.default_root_dir)
        write_picture(folder / "loss.svg", loss_svg(self._losses))
        write_text(folder / "report.html", "".join(self._page(trainer)))

    def _page(self, trainer: Trainer) -> Iterator[str]:
        callbacks: list[Any] = getattr(trainer, "callbacks", [])
        monitors = [each for each in callbacks if isinstance(each, PipelineMonitor)]
        figures = monitors[0].figures if monitors else {}
        yield '<!doctype html><html lang="en"><meta charset="utf-8">'
        yield f"<title>Training report</title><style>{_STYLE}</style><h1>Training report</h1>"
        yield f"<p>{trainer.global_step} optimizer steps, "
        yield f"loss {self._losses[0][1]:.4g} to {self._losses[-1][1]:.4g}.</p>"
        yield f"<h2>Loss</h2>{loss_svg(self._losses)}"
        yield from self._comparison(figures, trainer)
        idle = {cause.value: figures.get(f"idle_{cause.value}_share", 0.0) for cause in IdleCause}
        if "idle_share" in figures:
            yield f"<h2>Idle time by cause</h2><p>{figures['idle_share']:.1%} of the workers' time."
            yield _bars({name: (share, f"{share:.1%}") for name, share in idle.items()})
        yield from self._memory(trainer)
        for each in callbacks:
            if isinstance(each, PipelineTimeline) and (drawn := each.picture()):
                yield f"<h2>A step, predicted and measured</h2>{drawn}"
        if self._plan is not None:
            yield f"<h2>Plan</h2><pre>{escape(chr(10).join(self._plan.plan_lines()))}</pre>"
        yield "</html>\n"

    def _comparison(self, figures: Mapping[str, float], trainer: Trainer) -> Iterator[str]:
        rows: list[tuple[str, float | None, float | None]] = []
        plan, seconds = self._plan, figures.get("batch_seconds")
        if plan is not None:
            predicted = plan.prediction.step_seconds
            tokens = figures.get("tokens_per_second")
            batches = trainer.accumulate_grad_batches
            predicted *= batches / plan.job.num_batches
            step = None if seconds is None else seconds * batches
            planned = None if tokens is None or step is None else tokens * step / predicted
            rows.append(("seconds per step", predicted, step))
            rows.append(("tokens per second", planned, tokens))
            idle = max(0.0, plan.prediction.bubble_fraction)
            rows.append(("idle share of the workers", idle, figures.get("idle_share")))
        if rows:
            yield "<h2>Plan against measurement</h2><table><tr><th><th>planned<th>measured</tr>"
            for name, *values in rows:
                cells = ("-" if value is None else _number(value) for value in values)
                yield f"<tr><td>{name}<td>{'<td>'.join(cells)}</tr>"
            rates = "at rates that are assumed" if self._assumed_rates else "before the first step"
            yield f"</table><p>Planned {rates}.</p>"

    def _memory(self, trainer: Trainer) -> Iterator[str]:
        if self._plan is None:
            return
        peaks = {
            self._plan.memory.device: getattr(trainer.strategy, "peak_device_bytes", None),
            self._plan.memory.host: peak_host_bytes(),
        }
        yield "<h2>Memory by kind, as planned</h2>"
        for need, peak in peaks.items():
            measured = "" if peak is None else f"; measured at most {size_text(peak)}"
            total = f"{size_text(need.total_bytes)} of {size_text(need.available_bytes)}"
            yield f"<h3>{escape(need.place)}: {total}{measured}</h3>{_kinds(need)}"


def _number(value: float) -> str:
    """Four digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _kinds(need: MemoryNeed) -> str:
    available = max(need.available_bytes, 1)
    return _bars({kind.value: (size / available, size_text(size)) for kind, size in need.num_bytes})


def _bars(parts: Mapping[str, tuple[float, str]]) -> str:
    """A table of shares, from 0 to 1, each with a bar and a text."""
    rows = (
        f'<tr><td>{escape(name)}<td class="b"><div style="width:{min(max(share, 0), 1):.1%}"></div>'
        f"<td>{text}</tr>"
        for name, (share, text) in parts.items()
    )
    return f"<table>{''.join(rows)}</table>"


def loss_svg(losses: Sequence[tuple[int, float]]) -> str:
    """Draw losses by their steps; of many, each is the mean of neighbours."""
    size = -(-len(losses) // _MOST_POINTS)
    groups = [losses[start : start + size] for start in range(0, len(losses), size)]
    points = [(group[-1][0], sum(loss for _, loss in group) / len(group)) for group in groups]
    finite = [loss for _, loss in points if abs(loss) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    first, last = points[0][0], points[-1][0]
    path = " ".join(
        f"{60 + (_WIDTH - 80) * (step - first) / max(last - first, 1):.1f},"
        f"{20 + (_HEIGHT - 60) * (high - loss) / max(high - low, 1e-12):.1f}"
        for step, loss in points
        if abs(loss) < float("inf")
    )
    bottom = _HEIGHT - 40
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
        f'<path d="M60 20V{bottom}H{_WIDTH - 20}" fill="none" stroke="#868e96"/>'
        f'<text x="52" y="24" text-anchor="end">{high:.4g}</text>'
        f'<text x="52" y="{bottom}" text-anchor="end">{low:.4g}</text>'
        f'<text x="60" y="{bottom + 18}">step {first}</text>'
        f'<text x="{_WIDTH - 20}" y="{bottom + 18}" text-anchor="end">step {last}</text>'
        f'<polyline points="{path}" fill="none" stroke="#1c7ed6" stroke-width="1.5"/></svg>\n'
    )
