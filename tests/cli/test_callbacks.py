import contextlib
import csv
import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_lightning.cli.callbacks import GracefulInterrupt, RunStatistics
from roundpipe_lightning.modules import CausalLanguageModule
from tests.kit.runs import run_here
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
