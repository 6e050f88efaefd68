"""Small files, the metrics file, and where the configuration is."""

import csv
import os
from pathlib import Path

import pytest

from roundpipe_lightning.cli.metrics_file import MetricsFile
from roundpipe_lightning.files import write_text


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_file_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in path.parent.iterdir()] == ["file.txt"]


def test_metrics_of_a_step_share_a_line(tmp_path: Path) -> None:
    metrics = MetricsFile(str(tmp_path))
    metrics.log_metrics({"lr": 0.5}, step=0)
    metrics.log_metrics({"train_loss": 3.0}, step=0)
    metrics.log_metrics({"train_loss": 2.0}, step=1)
    metrics.finalize("success")
    assert read(tmp_path / "metrics.csv") == [
        {"step": "0", "lr": "0.5", "train_loss": "3.0"},
        {"step": "1", "lr": "", "train_loss": "2.0"},
    ]


def test_a_new_metric_gets_a_column_later(tmp_path: Path) -> None:
    metrics = MetricsFile(str(tmp_path), flush_every_n_steps=1)
    for step in range(3):
        metrics.log_metrics({"train_loss": float(step)}, step=step)
    metrics.log_metrics({"val_loss": 9.0}, step=3)
    metrics.save()
    rows = read(tmp_path / "metrics.csv")
    assert [row["train_loss"] for row in rows] == ["0.0", "1.0", "2.0", ""]
    assert rows[-1]["val_loss"] == "9.0"


def test_goes_on_after_the_lines_that_are_there(tmp_path: Path) -> None:
    first = MetricsFile(str(tmp_path))
    first.log_metrics({"train_loss": 3.0}, step=0)
    first.save()
    second = MetricsFile(str(tmp_path))
    second.log_metrics({"train_loss": 2.0}, step=1)
    second.save()
    assert [row["step"] for row in read(tmp_path / "metrics.csv")] == ["0", "1"]


def test_writes_nothing_without_metrics(tmp_path: Path) -> None:
    metrics = MetricsFile(str(tmp_path))
    metrics.log_hyperparams({"lr": 1})
    metrics.finalize("success")
    assert list(tmp_path.iterdir()) == []
    assert (metrics.name, metrics.version, metrics.save_dir) == ("csv", "", str(tmp_path))
