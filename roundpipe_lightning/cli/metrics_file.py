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

    Lightning's `CSVLogger` deletes the file of a run that goes on in its folder, and writes the
    metrics of a step into several lines. This one goes on after the lines of earlier steps.

    Args:
        folder: Folder of the run.
        flush_every_n_steps: Steps between two writes; the rest is written at the end.
    """

    name = "csv"
    version = ""  # every run has a folder of its own

    def __init__(self, folder: str, *, flush_every_n_steps: int = 20) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.flush_every_n_steps = flush_every_n_steps
        self._trains = True
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] = []

    @property
    @override
    def save_dir(self) -> str:
        return str(self.path.parent)

    @override
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        """Look whether the run trains: `config.yaml` in the same folder has every setting."""
        values = vars(params) if isinstance(params, Namespace) else params
        self._trains = values.get("train", self._trains)

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
        """Write the lines collected so far; where there is a new column, the whole file anew."""
        rows = list(self._rows)
        new = dict.fromkeys(name for row in rows for name in row)
        if not set(new) <= set(self._columns):
            if self.path.is_file():
                with self.path.open(newline="", encoding="utf-8") as file:
                    reader = csv.DictReader(file)
                    earlier = list(reader)
                    # a run that was killed may have done steps after its checkpoint
                    if self._trains and not self._columns:
                        earlier = [row for row in earlier if int(row["step"]) < rows[0]["step"]]
                    rows = [*earlier, *rows]
                    new = dict.fromkeys([*(reader.fieldnames or ()), *new])
            self._columns = list(new)
            text = io.StringIO(newline="")
            writer = csv.DictWriter(text, self._columns)
            writer.writeheader()
            writer.writerows(rows)
            write_text(self.path, text.getvalue())
        elif rows:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerows(rows)
        self._rows = []

    @override
    def finalize(self, status: str) -> None:
        self.save()
