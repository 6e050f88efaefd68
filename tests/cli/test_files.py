import csv
from pathlib import Path

from roundpipe_lightning.cli.metrics_file import MetricsFile


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_share_the_line_of_their_step_also_after_a_resume(tmp_path: Path) -> None:
    metrics = MetricsFile(str(tmp_path), flush_every_n_steps=1)
    metrics.log_hyperparams({"lr": 1})
    metrics.save()
    assert list(tmp_path.iterdir()) == []
    metrics.log_metrics({"lr": 0.5}, step=0)
    metrics.log_metrics({"train_loss": 3.0}, step=0)
    metrics.log_metrics({"train_loss": 2.0}, step=1)
    metrics.log_metrics({"val_loss": 9.0}, step=2)  # a column that comes later
    metrics.finalize("success")
    resumed = MetricsFile(str(tmp_path))
    resumed.log_metrics({"val_loss": 9.5}, step=2)  # the step is done again
    resumed.log_metrics({"train_loss": 1.0}, step=3)
    resumed.save()
    evaluated = MetricsFile(str(tmp_path))
    evaluated.log_hyperparams({"train": False})
    evaluated.log_metrics({"val_loss": 9.0}, step=0)  # an evaluation's only step
    evaluated.save()
    rows = read(tmp_path / "metrics.csv")
    assert rows.pop()["val_loss"] == "9.0"
    assert rows == [
        {"step": "0", "lr": "0.5", "train_loss": "3.0", "val_loss": ""},
        {"step": "1", "lr": "", "train_loss": "2.0", "val_loss": ""},
        {"step": "2", "lr": "", "train_loss": "", "val_loss": "9.5"},
        {"step": "3", "lr": "", "train_loss": "1.0", "val_loss": ""},
    ]
