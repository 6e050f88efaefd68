"""A view of a running training in the terminal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from roundpipe_lightning.callbacks.monitor import (
    CollectsLosses,
    Listening,
    figures_among,
    peak_host_bytes,
)
from roundpipe_lightning.planning.cost.device_memory import size_text
from roundpipe_lightning.planning.report.step_record import WorkerState
from roundpipe_lightning.strategy.planning.inputs import PlanEvent

_LEVELS = "▁▂▃▄▅▆▇█"
_WIDTH = 60  # losses of the curve
_FIGURES_SECONDS = 1.0
_FIGURES = {
    "tokens_per_second": "{:,.0f} tokens/s",
    "tflop_per_second": "{:.3g} TFLOP/s",
    "idle_share": "{:.0%} idle",
}


class LiveView(CollectsLosses, Listening, ProgressBar):
    """Shows workers, queues, memory, speed and loss while a training runs, in place of a bar.

    A thread of its own draws it, from what is there: no step waits for it. What is printed and
    logged meanwhile appears above it. Where the output is no terminal, nothing is shown.

    Args:
        refresh_per_second: How often it is drawn.
        console: Where to; None: standard output.

    Attributes:
        is_shown: Whether it is on the screen.
    """

    def __init__(self, *, refresh_per_second: float = 4.0, console: Console | None = None) -> None:
        super().__init__()
        self._refresh_per_second = refresh_per_second
        self._console = console
        self._live: Live | None = None
        self._enabled = True
        self._losses = deque(maxlen=_WIDTH)
        self._memory: dict[str, int] = {}
        self._speed: Mapping[str, float] = {}
        self._speed_seconds = self._began = 0.0
        self._first_step = 0
        self._states: list[WorkerState] = []

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    @property
    def is_shown(self) -> bool:
        return self._live is not None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()
        super().teardown(trainer, pl_module, stage)

    def _take(self, event: PlanEvent) -> None:
        memory = event.description.memory
        self._memory = {
            "device": memory.device.available_bytes,
            "host": memory.host.available_bytes,
        }

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        super().on_train_start(trainer)
        console = self._console or Console()
        self._began, self._first_step = time.monotonic(), trainer.global_step
        if self._enabled and console.is_terminal:
            self._live = Live(
                get_renderable=self._draw,
                console=console,
                refresh_per_second=self._refresh_per_second,
            )
            self._live.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs)
        now = time.monotonic()
        if now - self._speed_seconds > _FIGURES_SECONDS:
            callbacks: list[Any] = getattr(trainer, "callbacks", [])
            self._speed, self._speed_seconds = figures_among(callbacks), now

    def on_train_end(self, *_: Any) -> None:
        self._stop()

    def on_exception(self, *_: Any) -> None:
        self._stop()

    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def text(self, width: int = 110) -> str:
        """Return what is shown at this moment, without colours."""
        console = Console(width=width, color_system=None, force_terminal=False)
        with console.capture() as captured:
            console.print(self._draw())
        return captured.get()

    # --- drawing, in a thread of its own ----------------------------------------------------------

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = [Text(", ".join(self._headline())), self._lanes()]
        if self._losses:
            losses = [loss for _, loss in self._losses]
            parts.append(Text(f"loss {losses[-1]:.4g}  {curve(losses)}"))
        return Panel(Group(*parts), title="roundpipe", title_align="left")

    def _headline(self) -> Iterator[str]:
        trainer = self.trainer
        step, last = trainer.global_step, trainer.max_steps
        yield f"step {step:,}" + (f" of {last:,}" if last > 0 else "")
        done = step - self._first_step
        if last > 0 and done > 0:
            left = (time.monotonic() - self._began) / done * (last - step)
            yield f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02} left"
        speed = self._speed
        yield from (text.format(speed[key]) for key, text in _FIGURES.items() if key in speed)

    def _lanes(self) -> Table:
        table = Table.grid(padding=(0, 2), expand=True)
        states = [] if self._roundpipe is None else self._roundpipe.worker_states
        self._states = states or [replace(one, doing="between steps") for one in self._states]
        room = self._memory.get("device")
        for worker, state in enumerate(self._states):
            queues = f"{state.num_uploads}↑ {state.num_downloads}↓"
            bar = Bar(total=max(state.num_actions, 1), completed=state.num_ended, width=16)
            table.add_row(f"worker {worker}", bar, state.doing, queues, *_usage(state.bytes, room))
        host = peak_host_bytes()
        if host is not None:
            table.add_row("host", "", "", "", *_usage(host, self._memory.get("host")))
        return table


def _usage(used: int, room: int | None) -> tuple[RenderableType, str]:
    if not room:
        return "", size_text(used)
    text = f"{size_text(used)} of {size_text(room)}"
    return Bar(total=room, completed=min(used, room), width=12), text


def curve(values: list[float]) -> str:
    """A line of characters as high as the values."""
    finite = [value for value in values if abs(value) < float("inf")]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _LEVELS[round((value - low) * scale)] if abs(value) < float("inf") else "?"
        for value in values
    )
