import contextlib
import csv
import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_lightning import PipelineMonitor, PlanReport
from roundpipe_lightning.cli.callbacks import GracefulInterrupt, MetricsFile, RunStatistics
from roundpipe_lightning.cli.train import monitored_rows, summary_rows
from roundpipe_lightning.modules import CausalLanguageModule
from tests.kit.runs import SUMMARY_KEYS, run_here
from tests.kit.training import Regressor, make_trainer, regression_data


@pytest.mark.parametrize(
    ("number", "hook", "status"),
    [
        (signal.SIGINT, "training_step", 130),
        (signal.SIGTERM, "training_step", 143),
        (signal.SIGTERM, "on_validation_start", 143),
        (signal.SIGUSR1, "training_step", 138),  # SLURM's warning
    ],
)
def test_a_run_that_is_asked_to_stop_saves_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, hook: str, status: int
) -> None:
    for name, value in (("NTASKS", "1"), ("JOB_NAME", "mine"), ("JOB_ID", "7")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    before = signal.getsignal(number)
    original: Any = getattr(CausalLanguageModule, hook)

    signals = [number]

    @functools.wraps(original)
    def asked(self: CausalLanguageModule, *arguments: Any) -> Any:
        if self.global_step == 2 and signal.getsignal(number) != before:
            with contextlib.suppress(IndexError):  # another microbatch has raised it
                signal.raise_signal(signals.pop())
        return original(self, *arguments)

    monkeypatch.setattr(CausalLanguageModule, hook, asked)
    done = run_here(
        tmp_path,
        "hydra.run.dir=run",
        "hydra.job.chdir=false",
        "trainer.val_check_interval=2",
        "trainer.max_steps=9",
        status=status,
    )
    assert signal.getsignal(number) == before
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    num_steps = torch.load(last)["global_step"]
    assert num_steps == (3 if hook == "training_step" else 2)
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        losses = [row for row in csv.DictReader(file) if row["train_loss"]]
    assert len(losses) == num_steps, "no row is lost"
    assert f"trainer.max_steps=9 ckpt_path={last}" in done.stderr
    assert " hydra.run.dir=run hydra.job.chdir=false " in done.stderr
    assert "auto-requeueing" not in done.stderr
    assert (tmp_path / "run" / "plan.json").is_file()


def test_figures_of_a_module_that_logs_nothing_and_has_no_tokens(tmp_path: Path) -> None:
    statistics = RunStatistics()
    trainer = make_trainer(
        tmp_path, strategy="roundpipe", max_steps=3, callbacks=[statistics, GracefulInterrupt()]
    )
    trainer.fit(Silent(), regression_data(), regression_data(8))
    assert statistics.num_steps == 3
    assert statistics.loss_first is not None
    assert statistics.loss_last is not None
    assert 0 < statistics.loss_last < statistics.loss_first
    assert statistics.tokens_per_second is None


class Silent(Regressor):
    def log(self, *_: Any, **__: Any) -> None:
        """Log nothing."""


def test_a_second_ctrl_c_interrupts_within_the_step() -> None:
    with GracefulInterrupt() as interrupt:
        interrupt.on_train_batch_start()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


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


WHOLE: dict[str, Any] = {
    "tokens_per_second": 12345.6,
    "loss_first": 5.5512,
    "loss_last": 2.0049,
    "val_loss": 2.1,
    "test_loss": 2.2,
    "metrics": {"test_accuracy": 0.51239},
    "bubble_predicted": 0.1,
    "bubble_measured": 0.156,
    "peak_device_bytes": 3 * 2**20,
    "peak_host_bytes": 5 * 2**29,
    "num_workers": 4,
    "num_microbatches": 8,
    "num_steps": 1,
}


def test_the_table_reads_well() -> None:
    assert summary_rows(WHOLE, unit=" nats per token") == [
        ("Training", "1 step of 8 microbatches on 4 workers"),
        ("Training loss", "from 5.55 to 2.00 nats per token"),
        ("Validation loss", "2.10 nats per token"),
        ("Test loss", "2.20 nats per token"),
        ("test_accuracy", "0.5124"),
        ("Speed", "12,346 tokens a second"),
        ("Workers waited", "16% of the time (10% expected)"),
        ("Most memory on a device", "3.0 MiB"),
        ("Most memory of the process", "2.50 GiB"),
    ]
    empty = {**dict.fromkeys(SUMMARY_KEYS), "peak_host_bytes": 5 * 2**29, "num_workers": 4}
    empty |= {"metrics": {}, "num_steps": 0, "num_microbatches": 1}
    assert summary_rows(empty, unit="") == [  # without what the run did not have
        ("Training", "0 steps of 1 microbatch on 4 workers"),
        ("Most memory of the process", "2.50 GiB"),
    ]


IDLE = {
    "idle_share": 0.4,
    "idle_fill_share": 0.05,
    "idle_drain_share": 0.004,
    "idle_upload_share": 0.0,
    "idle_boundary_share": 0.1,
    "idle_optimizer_share": 0.0,
    "idle_data_share": 0.236,
    "idle_other_share": 0.01,
}


@pytest.mark.parametrize(
    ("figures", "rows"),
    [
        (
            {"tflop_per_second": 12.345, "share_of_peak": 0.1234, **IDLE},
            [
                ("Arithmetic", "12.3 TFLOP/s, 12.3% of the devices' peak"),
                ("Idle altogether", "40% of the time: data 24%, boundary 10%, fill 5%, other 1%"),
            ],
        ),
        ({"tflop_per_second": 0.5}, [("Arithmetic", "0.5 TFLOP/s")]),
        ({}, []),
    ],
)
def test_rows_of_a_monitor(
    figures: dict[str, float],
    rows: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PipelineMonitor, "figures", property(lambda _: figures))
    assert monitored_rows([PlanReport(), PipelineMonitor()]) == rows
    assert monitored_rows([PlanReport()]) == []
