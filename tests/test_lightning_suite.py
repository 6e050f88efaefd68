"""`benchmarks/lightning_suite.py` points the trainers of other people's tests at the strategy."""

from __future__ import annotations

from pathlib import Path

from benchmarks.lightning_suite import Outcome, compare, run

TESTS = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel


def test_trains(tmp_path):
    trainer = Trainer(default_root_dir=tmp_path, fast_dev_run=True)
    trainer.fit(BoringModel())
    assert trainer.global_step == 1


def test_says_which_strategy():
    assert type(Trainer(accelerator="cpu", devices=1).strategy).__name__ == "SingleDeviceStrategy"


def test_has_a_strategy_of_its_own():
    assert type(Trainer(accelerator="cpu", strategy="ddp").strategy).__name__ == "DDPStrategy"


def test_needs_what_is_not_here():
    raise OSError
"""


def test_points_the_trainers_that_leave_the_strategy_open(tmp_path: Path) -> None:
    folder = tmp_path / "tests_pytorch"
    folder.mkdir()
    (folder / "test_some.py").write_text(TESTS)
    outcomes = run(tmp_path, [], num_devices=2, seconds=120)
    told = {o.name.rpartition("::")[2]: (o.outcome, o.pointed) for o in outcomes}
    assert told == {
        "test_trains": ("passed", True),
        "test_says_which_strategy": ("failed", True),
        "test_has_a_strategy_of_its_own": ("passed", False),
        "test_needs_what_is_not_here": ("failed", False),
    }


def test_counts_what_passes_on_one_device() -> None:
    alone = [
        Outcome(name="both", outcome="passed"),
        Outcome(name="not ours", outcome="passed"),
        Outcome(name="elsewhere", outcome="passed"),
        Outcome(name="neither", outcome="failed"),
    ]
    pointed = [
        Outcome(name="both", outcome="passed", pointed=True),
        Outcome(name="not ours", outcome="failed", pointed=True, reason="why"),
        Outcome(name="elsewhere", outcome="passed"),
        Outcome(name="neither", outcome="failed", pointed=True),
    ]
    counts = compare(alone, pointed, num_devices=2)
    assert (counts.collected, counts.passed) == (4, 3)
    assert (counts.pointed, counts.passed_pointed) == (2, 1)
    assert counts.failed == {"not ours": "why"}
