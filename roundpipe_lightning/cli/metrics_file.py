"""The metrics of a run as one CSV file in the run's folder."""

import csv
import io
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from typing_extensions import override

from roundpipe_lightning.files import write_text


class MetricsFile(Logger):
    """Writes `metrics.csv`: one line per step, one column per metric.

    Lightning's `CSVLogger` puts its file into numbered subfolders and deletes an older one. This
    one writes straight into the run's folder and goes on after the lines that are there.

    Args:
        folder: Folder of the run.
        flush_every_n_steps: Steps between two writes; the rest is written at the end.
    """

    def __init__(self, folder: str, *, flush_every_n_steps: int = 20) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.flush_every_n_steps = flush_every_n_steps
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] = []

    @property
    @override
    def name(self) -> str:
        """Name of the logger."""
        return "csv"

    @property
    @override
    def version(self) -> str:
        """Runs are told apart by their folders, so there is no version."""
        return ""

    @property
    @override
    def save_dir(self) -> str:
        """Folder of the run."""
        return str(self.path.parent)

    @override
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: `config.yaml` in the same folder has every setting."""

    @override
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add metrics to the line of their step.

        Args:
            metrics: Names and values.
            step: Optimizer step; None: that of the line before.
        """
        last = self._rows[-1]["step"] if self._rows else None
        row_step = last if step is None else step
        if not self._rows or row_step != last:
            if self._rows and len(self._rows) >= self.flush_every_n_steps:
                self.save()
            self._rows.append({"step": row_step})
        self._rows[-1].update(metrics)

    @override
    def save(self) -> None:
        """Write the lines collected so far."""
        if not self._rows:
            return
        if not self._columns:
            self._columns = self._read_columns()
        new = [name for row in self._rows for name in row]
        columns = list(dict.fromkeys([*self._columns, *new]))
        if columns == self._columns:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, fieldnames=columns).writerows(self._rows)
        else:
            rows = [*self._read_rows(), *self._rows]
            write_text(self.path, _to_csv(columns, rows))
        self._columns = columns
        self._rows = []

    @override
    def finalize(self, status: str) -> None:
        """Write what is left, however the run ended."""
        self.save()

    def _read_columns(self) -> list[str]:
        """Columns of a file that an earlier part of the run left; none without one."""
        if not self.path.is_file():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file).fieldnames or [])

    def _read_rows(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))


def _to_csv(columns: list[str], rows: list[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
