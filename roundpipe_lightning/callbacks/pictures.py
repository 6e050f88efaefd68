"""What a run looked like: the plan in words, a step as a picture, a page about all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from roundpipe_lightning.callbacks.monitor import (
    CollectsLosses,
    Listening,
    figures_among,
    peak_host_bytes,
)
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.files import write_text
from roundpipe_lightning.planning.cost.costs import ActionCost, RecomputeStart, StageCosts
from roundpipe_lightning.planning.cost.device_memory import size_text
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.report.description import (
    PlanDescription,
    count_text,
    machine_line,
    memory_lines,
    model_line,
)
from roundpipe_lightning.planning.report.render import render_svg, render_trace, write_picture
from roundpipe_lightning.planning.report.step_record import IdleCause, StepRecord, idle_seconds
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Timeline
from roundpipe_lightning.planning.schedule.stages import Stage
from roundpipe_lightning.strategy.planning.inputs import PlanEvent

_DEFAULT_STEPS = range(3, 8)


class PipelineTimeline(Listening):
    """Records when every action of chosen steps ran, and what the plan makes of the same durations.

    The prediction is the plan's schedule, simulated with the median of the measured durations of
    every stage: what differs from the measurement is waiting that the plan does not know of.

    At the end of training (also of one that was interrupted) it writes into `dirpath`

    - `timeline.json`: the prediction and every recorded step, for ui.perfetto.dev;
    - `timeline.svg`, `timeline.png`: the prediction above the recorded step of median duration, a
      row per worker, with the idle share of both and its parts.

    Args:
        dirpath: Where to; None is the logger's folder, or the Trainer's default folder.
        steps: Which training batches to record, counted from 0 where `fit` begins; None records
            five after three for warming up, and the last one. Batches that are smaller than the
            largest one run on other plans and are left out.

    Raises:
        ConfigurationError: A step is negative.
    """

    _hears_of = "step_listeners"
    _needs_roundpipe = True

    def __init__(
        self, dirpath: str | Path | None = None, *, steps: Sequence[int] | None = None
    ) -> None:
        if steps is not None and any(step < 0 for step in steps):
            raise ConfigurationError(
                f"PipelineTimeline(steps={list(steps)}): batches are counted from 0, so give "
                "numbers of 0 or more."
            )
        self._dirpath = None if dirpath is None else Path(dirpath)
        self._keeps_last = steps is None
        self._steps = frozenset(_DEFAULT_STEPS if steps is None else steps)
        self._forget()

    def _forget(self) -> None:
        self._num_batches = 0
        self._plan: Plan | None = None
        self._recorded: dict[int, Timeline] = {}
        self._last: tuple[int, Timeline] | None = None

    @property
    def measured(self) -> dict[int, Timeline]:
        """The recorded steps, by their number; of one plan."""
        recorded = dict(self._recorded)
        if self._keeps_last and self._last is not None:
            recorded[self._last[0]] = self._last[1]
        return recorded

    @property
    def predicted(self) -> Timeline | None:
        """The plan's schedule with the measured durations; None before a step was recorded."""
        timelines = list(self.measured.values())
        if self._plan is None or not timelines:
            return None
        stages = self._plan.partition.stages()
        costs = StageCosts(
            stages=tuple(_measured_cost(stage, timelines) for stage in stages),
            recompute_start=RecomputeStart.WITH_GRADIENT,
        )
        return simulate(self._plan.schedule, layout=self._plan, costs=costs)

    @property
    def predicted_bubble_fraction(self) -> float | None:
        """Share of the workers' time in which the prediction has them idle, from 0 to 1."""
        predicted = self.predicted
        return None if predicted is None else predicted.bubble_fraction

    @property
    def measured_bubble_fraction(self) -> float | None:
        shares = [timeline.bubble_fraction for timeline in self.measured.values()]
        return median(shares) if shares else None

    def on_train_start(self, *_: Any) -> None:
        """Forget steps from before the training: those of a search for the learning rate."""
        self._forget()

    def _take(self, record: StepRecord) -> None:
        assert self._roundpipe is not None, "the strategy calls this"
        number, self._num_batches = self._num_batches, self._num_batches + 1
        if record.plan != self._roundpipe.plan:
            return
        if self._plan != record.plan:
            self._plan = record.plan
            self._recorded.clear()
        self._last = (number, record.timeline)
        if number in self._steps:
            self._recorded[number] = record.timeline

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        """Write the files, with the last step, which may still be in flight."""
        assert self._roundpipe is not None, "others are refused"
        self._roundpipe.join_updates()
        self._write(trainer)

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        measured, predicted = self.measured, self.predicted
        picture = self.picture()
        if predicted is None or picture is None:
            return
        folder = self._dirpath or Path(trainer.log_dir or trainer.default_root_dir)
        titles = {f"measured, batch {number}": measured[number] for number in sorted(measured)}
        write_text(folder / "timeline.json", render_trace({"predicted": predicted, **titles}))
        write_picture(folder / "timeline.svg", picture)

    def picture(self) -> str | None:
        """The prediction above the typical recorded step, as SVG; None before a step."""
        measured, predicted = self.measured, self.predicted
        if predicted is None:
            return None
        by_duration = sorted(measured, key=lambda number: measured[number].makespan_seconds)
        number = by_duration[len(by_duration) // 2]
        typical = measured[number]
        drawn = {"predicted": predicted.beside(typical), f"measured, batch {number}": typical}
        assert self._plan is not None
        notes = {}
        for name, timeline in drawn.items():
            parts = idle_seconds(timeline, layout=self._plan)
            available = timeline.num_workers * timeline.makespan_seconds
            shares = {cause.value: seconds / available for cause, seconds in parts.items()}
            texts = (f"{cause} {share:.1%}" for cause, share in shares.items() if share > 5e-4)
            notes[name] = ", ".join(texts)
        return render_svg(drawn, notes=notes)


def _measured_cost(stage: Stage, timelines: Sequence[Timeline]) -> ActionCost:
    """Median duration of a stage's actions, waiting not counted."""
    durations = [
        entry.busy_seconds
        for timeline in timelines
        for entry in timeline.entries
        if (entry.action.kind, entry.action.stage) == (stage.kind, stage.index)
    ]
    return ActionCost(compute_seconds=max(0.0, median(durations)))


_WIDTH, _HEIGHT = 720, 240
_MOST_POINTS = 1000
_STYLE = """
body{font:15px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#212529}
table{border-collapse:collapse}td,th{padding:.2rem 1rem .2rem 0;text-align:left}
td.b{width:16rem}td.b~td{white-space:nowrap}td.b div{background:#74c0fc;height:.9rem}
svg{max-width:100%;height:auto}pre{background:#f1f3f5;padding:.8rem;white-space:pre-wrap}
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
        figures = figures_among(callbacks)
        yield '<!doctype html><html lang="en"><meta charset="utf-8">'
        yield f"<title>Training report</title><style>{_STYLE}</style><h1>Training report</h1>"
        yield f"<p>{trainer.global_step} optimizer steps, "
        yield f"loss {self._losses[0][1]:.4g} to {self._losses[-1][1]:.4g}.</p>"
        if summary := str(getattr(getattr(trainer, "datamodule", None), "summary", "")):
            yield f"<p>{escape(summary)}</p>"
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
            room = max(need.available_bytes, 1)
            kinds = {kind.value: (size / room, size_text(size)) for kind, size in need.num_bytes}
            yield f"<h3>{escape(need.place)}: {total}{measured}</h3>{_bars(kinds)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


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
        f'<rect x="60" y="20" width="1" height="{bottom - 20}" fill="#868e96"/>'
        f'<rect x="60" y="{bottom}" width="{_WIDTH - 80}" height="1" fill="#868e96"/>'
        f'<text x="52" y="24" text-anchor="end">{high:.4g}</text>'
        f'<text x="52" y="{bottom}" text-anchor="end">{low:.4g}</text>'
        f'<text x="60" y="{bottom + 18}">step {first}</text>'
        f'<text x="{_WIDTH - 20}" y="{bottom + 18}" text-anchor="end">step {last}</text>'
        f'<polyline points="{path}" fill="none" stroke="#1c7ed6" stroke-width="1.5"/></svg>\n'
    )


class PlanReport(Listening):
    """Prints what is planned before the first step runs, and again when the plan changes.

    Stages, teams, rounds and microbatches; what device and host need of their memory, by kind,
    against what there is; the predicted step and idle share; and what may need attention. Batches
    of another shape have plans of their own: of those a few lines are printed.

    Args:
        write: Takes the text; None logs it as Lightning logs its own, on rank zero.

    Attributes:
        texts: What has been written in this fit, the first first.
    """

    _needs_roundpipe = True

    def __init__(self, *, write: Callable[[str], object] | None = None) -> None:
        self._write = write or rank_zero_info
        self._precision = ""
        self.texts: list[str] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            self.texts = []
            self._precision = str(trainer.precision)

    def _take(self, event: PlanEvent) -> None:
        described, plan = event.description, event.description.plan
        batch = count_text(plan.num_microbatches, "microbatch")
        notes: list[str] = []
        if event.replaced is not None:
            count = count_text(event.planned.measured.num_steps, "measured step")
            lines = [
                f"The plan changes after {count}",
                f"  from {event.replaced.partition}",
                f"  to   {plan.partition}",
            ]
        elif self.texts:
            title = f"The plan for batches of another shape, in {batch}"
            lines = [title, *described.plan_lines()[:4]]
        else:
            lines = [
                f"The plan of this training, on {machine_line(described.job.hardware)}",
                model_line(described.job.work, precision=self._precision),
                f"Batch: {batch} on {count_text(plan.num_workers, 'worker')}",
                *described.plan_lines(),
                "Memory",
                *memory_lines(described.memory),
            ]
            uncounted = (
                "Activations are not counted in the memory above: training_step cannot be run "
                "without values (dry_run)."
            )
            notes = described.warnings() if event.planned.knows_activations else [uncounted]
        lines += [*_step_lines(event), *(f"Note: {text}" for text in notes)]
        self.texts.append("\n".join(lines))
        self._write(self.texts[-1])


def _step_lines(event: PlanEvent) -> list[str]:
    measured, described = event.planned.measured, event.description
    if not (event.planned.knows_activations or measured.is_ready):
        unknown = "Predicted step: unknown, because training_step cannot be run without values."
        return [f"{unknown} Measured times will improve the plan."]
    source = ""
    if measured.is_ready:
        source = f" (from {count_text(measured.num_steps, 'measured step')})"
    elif event.assumed_rates:
        source = " (at assumed rates; measured times will replace them)"
    prediction = described.prediction
    line = (
        f"Predicted step: {prediction.step_seconds:.4g} s{source}, of which the optimizer "
        f"{prediction.optimizer_seconds:.3g} s; workers wait "
        f"{max(0.0, prediction.bubble_fraction):.1%}"
    )
    on_host = described.job.hardware.shares_host_memory
    return [line] if on_host else [line, described.moved_line()]
