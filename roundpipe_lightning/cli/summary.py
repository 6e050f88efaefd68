"""The figures of a run: `summary.json` for programs, a table to read."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table
from torch import nn

from roundpipe_lightning.callbacks.monitor import PipelineMonitor, peak_host_bytes
from roundpipe_lightning.callbacks.timeline import PipelineTimeline
from roundpipe_lightning.cli.build import Run
from roundpipe_lightning.files import write_text
from roundpipe_lightning.models.quantized import is_quantized, tensors_of
from roundpipe_lightning.modules import Adapters
from roundpipe_lightning.planning.report.description import count_text, size_text
from roundpipe_lightning.planning.report.step_record import IdleCause
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The figures of a run. A figure that the run did not have is None.

    Attributes:
        tokens_per_second: Tokens trained on per second of training step.
        loss_first: Loss of the first training step, nats per token.
        loss_last: Loss of the last training step, nats per token.
        val_loss: Loss on the validation data after the last step; of text nats per token.
        test_loss: Loss on the test data after the last step; of text nats per token.
        metrics: What else validation and test have measured, by name.
        bubble_predicted: Share of the workers' time that the plan expects to be idle, 0 to 1.
        bubble_measured: Share of the workers' time that was idle, 0 to 1.
        peak_device_bytes: Most memory in use on one device.
        peak_host_bytes: Most memory that the process had resident.
        num_workers: Workers.
        num_microbatches: Microbatches of a batch.
        num_steps: Optimizer steps of this run.
    """

    tokens_per_second: float | None
    loss_first: float | None
    loss_last: float | None
    val_loss: float | None
    test_loss: float | None
    metrics: dict[str, float]
    bubble_predicted: float | None
    bubble_measured: float | None
    peak_device_bytes: int | None
    peak_host_bytes: int | None
    num_workers: int
    num_microbatches: int
    num_steps: int

    def save(self, path: Path) -> None:
        """Write the figures as one JSON object."""
        write_text(path, json.dumps(asdict(self), indent=2) + "\n")

    def print(
        self,
        folder: Path,
        *,
        rows: Sequence[tuple[str, str]] = (),
        last_rows: Sequence[tuple[str, str]] = (),
        console: Console | None = None,
    ) -> None:
        """Print the figures in words.

        Args:
            folder: Folder of the run, named below the table.
            rows: Further rows, for the top of the table.
            last_rows: Further rows, for its end.
            console: Where to print; None: standard output.
        """
        table = Table(title="This run", show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column()
        for name, text in [*rows, *self.lines(), *last_rows]:
            table.add_row(name, text)
        console = Console() if console is None else console
        console.print(table)
        console.print(f"Everything is in {folder}", soft_wrap=True, highlight=False)

    def lines(self) -> list[tuple[str, str]]:
        """The rows of the table: what it is, and how it came out."""
        steps, workers = count_text(self.num_steps, "step"), count_text(self.num_workers, "worker")
        size = f"{steps} of {count_text(self.num_microbatches, 'microbatch')}"
        rows = [("Training", f"{size} on {workers}")]
        unit = "" if self.tokens_per_second is None else " nats per token"
        if self.loss_first is not None and self.loss_last is not None:
            rows.append(
                ("Training loss", f"from {self.loss_first:.2f} to {self.loss_last:.2f}{unit}")
            )
        if self.val_loss is not None:
            rows.append(("Validation loss", f"{self.val_loss:.2f}{unit}"))
        if self.test_loss is not None:
            rows.append(("Test loss", f"{self.test_loss:.2f}{unit}"))
        rows += [(name, f"{value:.4g}") for name, value in self.metrics.items()]
        if self.tokens_per_second is not None:
            rows.append(("Speed", f"{self.tokens_per_second:,.0f} tokens a second"))
        if self.bubble_measured is not None and self.bubble_predicted is not None:
            idle = f"{self.bubble_measured:.0%} of the time ({self.bubble_predicted:.0%} expected)"
            rows.append(("Workers waited", idle))
        if self.peak_device_bytes is not None:
            rows.append(("Most memory on a device", size_text(self.peak_device_bytes)))
        if self.peak_host_bytes is not None:
            rows.append(("Most memory of the process", size_text(self.peak_host_bytes)))
        return rows


def summarize(run: Run, metrics: Mapping[str, float]) -> RunSummary:
    """The figures of a run that has ended, whatever its strategy, and what it has measured.

    The idle shares are those of a `PipelineTimeline` among the callbacks.
    """
    statistics, strategy = run.statistics, run.trainer.strategy
    figures: dict[str, Any] = dict.fromkeys(("bubble_predicted", "bubble_measured"))
    if isinstance(strategy, RoundPipeStrategy):
        timelines = [each for each in run.callbacks if isinstance(each, PipelineTimeline)]
        for timeline in timelines[:1]:
            figures["bubble_predicted"] = timeline.predicted_bubble_fraction
            figures["bubble_measured"] = timeline.measured_bubble_fraction
        figures["peak_device_bytes"] = strategy.peak_device_bytes
        figures["num_workers"] = strategy.num_workers
        figures["num_microbatches"] = strategy.num_microbatches
    else:
        device = strategy.root_device
        is_cuda = device.type == "cuda"
        figures["peak_device_bytes"] = torch.cuda.max_memory_allocated(device) if is_cuda else None
        figures["num_workers"], figures["num_microbatches"] = run.trainer.num_devices, 1
    return RunSummary(
        tokens_per_second=statistics.tokens_per_second,
        loss_first=statistics.loss_first,
        loss_last=statistics.loss_last,
        val_loss=metrics.get("val_loss"),
        test_loss=metrics.get("test_loss"),
        metrics={
            name: value
            for name, value in metrics.items()
            if name.startswith(("val_", "test_")) and not name.endswith("_loss")
        },
        peak_host_bytes=peak_host_bytes(),
        num_steps=statistics.num_steps,
        **figures,
    )


def monitored_rows(callbacks: Iterable[Callback]) -> list[tuple[str, str]]:
    """Rows of the summary's table that a `PipelineMonitor` has measured over the whole run."""
    monitors = [callback for callback in callbacks if isinstance(callback, PipelineMonitor)]
    figures = monitors[0].figures if monitors else {}
    rows = []
    if "tflop_per_second" in figures:
        peak = figures.get("share_of_peak")
        of_peak = "" if peak is None else f", {peak:.1%} of the devices' peak"
        rows.append(("Arithmetic", f"{figures['tflop_per_second']:.3g} TFLOP/s{of_peak}"))
    if "idle_share" in figures:
        parts = {cause.value: figures[f"idle_{cause.value}_share"] for cause in IdleCause}
        longest = sorted(parts.items(), key=lambda part: -part[1])
        named = ", ".join(f"{name} {share:.0%}" for name, share in longest if share >= 0.005)
        idle = f"{figures['idle_share']:.0%} of the time: {named}"
        rows.append(("Idle altogether", idle))
    return rows


def trained_row(module: nn.Module) -> list[tuple[str, str]]:
    """The row of the table that says how much is trained beside a frozen model; else none."""
    adapters = getattr(module, "adapters", None)
    if not isinstance(adapters, Adapters):
        return []
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    total = _num_parameters(module)
    share = f"{trained / total:.2%}" if total else "nothing to train"
    return [("Trained (peft)", f"{adapters.method}: {trained:,} of {total:,} parameters ({share})")]


def _num_parameters(module: nn.Module) -> int:
    """All parameters; a quantised weight counts as what it stands for."""
    packed = [layer for layer in module.modules() if is_quantized(layer)]
    held = {parameter for layer in packed for parameter in layer.parameters(recurse=False)}
    whole = sum(like.numel() for layer in packed for like, _, _ in tensors_of(layer).values())
    return whole + sum(p.numel() for p in module.parameters() if p not in held)
