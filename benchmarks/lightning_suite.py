"""Run Lightning's own tests with their trainers pointed at the strategy; compare with one device.

    python benchmarks/lightning_suite.py path/to/pytorch-lightning [--only loops tuner]
        [--settings '{"num_microbatches": 1}'] [--devices 2] [--output json]

Takes a checkout of Lightning (the package that pip installs has no tests), with its own source
where it has one, and runs the tests in processes of their own, with every Trainer that leaves the
strategy open (`strategy="auto"`, one CPU device) given a `RoundPipeStrategy` on CPU workers. Those
that fail run once more as they are; what fails on one device, too, is set aside: it needs other
packages, devices or versions. `--only` names files or folders of `tests_pytorch`; without, it
takes those that the strategy can have to do with, which needs a quarter of an hour. Prints

    passed          tests that pass, with the strategy or as they are
    pointed         of these, those with a Trainer that leaves the strategy open
    passed_pointed  of these, those that pass with the strategy
    failed          those that do not, by test, with the first line of what went wrong

This file is also the pytest plugin that points the trainers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

PARTS = (
    *("models/test_hooks.py", "models/test_restore.py", "trainer/optimization/test_optimizers.py"),
    "trainer/logging_/test_train_loop_logging.py",
    "trainer/logging_/test_eval_loop_logging.py",
    *("core/test_metric_result_integration.py", "core/test_lightning_module.py"),
    *("trainer/flags", "accelerators/test_cpu.py", "checkpointing/test_model_checkpoint.py"),
    *("loops", "tuner", "trainer/test_trainer.py", "trainer/test_dataloaders.py", "callbacks"),
)
JOB = "LIGHTNING_SUITE"
"""Environment variable of the plugin: a `Job` as JSON."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one test.

    Attributes:
        name: The test's name, as pytest writes it.
        outcome: `"passed"`, `"failed"` or `"skipped"`.
        is_open: Whether it made a Trainer that leaves the strategy open.
        reason: First line of what went wrong.
    """

    name: str
    outcome: str
    is_open: bool = False
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the plugin does.

    Attributes:
        results: File that gets one outcome per line, as JSON.
        devices: Number of workers; 0 leaves the trainers as they are.
        settings: Those of the strategy.
        names: The tests to run; None is all.
    """

    results: str
    devices: int = 0
    settings: dict[str, Any]
    names: list[str] | None = None


class Pointer:
    """The pytest plugin: points trainers at the strategy and notes what becomes of the tests."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_open = False

    def pytest_configure(self) -> None:
        """Put the strategy into the trainers that leave it open."""
        trainer = importlib.import_module("lightning.pytorch").Trainer
        trainer.__init__ = self._pointing(trainer.__init__)

    def _pointing(self, init: Callable[..., None]) -> Callable[..., None]:
        strategy = importlib.import_module("roundpipe_lightning").RoundPipeStrategy

        @wraps(init)
        def pointed(trainer: Any, *args: Any, **flags: Any) -> None:
            if _is_open(flags):
                self._is_open = True
                if self._job.devices:
                    ours = strategy(**self._job.settings)
                    flags.update(accelerator="cpu", devices=self._job.devices, strategy=ours)
            init(trainer, *args, **flags)

        return pointed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out tests that are not asked for."""
        if self._job.names is not None:
            names = set(self._job.names)
            items[:] = [item for item in items if item.nodeid in names]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[Any]:
        """Look at the trainers of one test."""
        self._is_open = False
        return (yield)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a test, and of its set-up and teardown where they fail."""
        if report.when != "call" and report.passed:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        outcome = Outcome(
            name=report.nodeid,
            outcome=report.outcome,
            is_open=self._is_open,
            reason=str(getattr(crash, "message", "")).partition("\n")[0],
        )
        with Path(self._job.results).open("a") as file:
            print(json.dumps(asdict(outcome)), file=file)


def _is_open(flags: dict[str, Any]) -> bool:
    """Whether a Trainer leaves it to Lightning where it runs, or asks for one CPU device."""
    return (
        flags.get("strategy", "auto") == "auto"
        and flags.get("accelerator", "auto") in ("auto", "cpu")
        and flags.get("devices", "auto") in ("auto", 1, "1")
        and flags.get("num_nodes", 1) == 1
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin where the script asks for it."""
    if JOB in os.environ:
        config.pluginmanager.register(Pointer(Job(**json.loads(os.environ[JOB]))))


def run(
    checkout: Path,
    parts: Sequence[str] = PARTS,
    *,
    devices: int = 0,
    settings: dict[str, Any] | None = None,
    names: list[str] | None = None,
    seconds: int = 60,
) -> list[Outcome]:
    """Run tests, each part in a process of its own.

    Args:
        checkout: The folder of Lightning's repository.
        parts: Files and folders of `tests_pytorch`.
        devices: Workers; 0 leaves the trainers as they are.
        settings: Those of the strategy.
        names: The tests to run; None is all.
        seconds: Limit of one test.

    Returns:
        One outcome per test.
    """
    tests, outcomes = checkout / "tests", dict[str, Outcome]()
    paths = [Path(__file__).resolve().parent, checkout / "src", tests]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        job = Job(results=str(results), devices=devices, settings=settings or {}, names=names)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]),
            JOB: json.dumps(asdict(job)),
        }
        for part in parts:
            results.touch()
            process = subprocess.run(
                [
                    *(
                        sys.executable,
                        "-m",
                        "pytest",
                        "-q",
                        "-W",
                        "ignore",
                        "-p",
                        "lightning_suite",
                    ),
                    *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:rerunfailures"),
                    *("--timeout", str(seconds), "--tb", "line", "--import-mode", "importlib"),
                    *("--rootdir", str(tests), "-c", os.devnull),
                    str(tests / "tests_pytorch" / part),
                ],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            print(process.stdout, file=sys.stderr)
            for line in results.read_text().splitlines():
                outcome = Outcome(**json.loads(line))
                known = outcomes.get(outcome.name)
                if known is None or known.outcome == "passed":  # a teardown may fail, too
                    outcomes[outcome.name] = outcome
            results.unlink()
            if process.returncode not in (0, 1, 5):  # 5: no test was asked for
                reason = f"its process ended with {process.returncode}"
                outcomes[part] = Outcome(name=part, outcome="failed", is_open=True, reason=reason)
    return list(outcomes.values())


def groups(failed: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    """Return, by test without its parameters, how often it failed and the first reason."""
    found: dict[str, dict[str, Any]] = {}
    for outcome in failed:
        name = outcome.name.partition("[")[0].removeprefix("tests_pytorch/")
        group = found.setdefault(name, {"count": 0, "reason": outcome.reason})
        group["count"] += 1
    return found


def main() -> None:
    """Run, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="the folder of Lightning's repository")
    parser.add_argument("--only", nargs="*", default=PARTS, help="files, folders of tests_pytorch")
    parser.add_argument("--settings", type=json.loads, default={}, help="of the strategy, as JSON")
    parser.add_argument("--devices", type=int, default=2, help="workers")
    parser.add_argument("--seconds", type=int, default=60, help="limit of one test")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    checkout = given.checkout.resolve()
    pointed = run(
        checkout,
        given.only,
        devices=given.devices,
        settings=given.settings,
        seconds=given.seconds,
    )
    passed = {outcome.name for outcome in pointed if outcome.outcome == "passed"}
    others = [outcome.name for outcome in pointed if outcome.outcome == "failed"]
    alone = run(checkout, given.only, names=others, seconds=given.seconds) if others else []
    passed_alone = {outcome.name for outcome in alone if outcome.outcome == "passed"}
    mine = passed_alone | set(given.only)  # a part whose process ended
    failed = [outcome for outcome in pointed if outcome.is_open and outcome.name in mine]
    num_open = sum(outcome.is_open for outcome in pointed if outcome.name in passed) + len(failed)
    summary = {
        "passed": len(passed | passed_alone),
        "pointed": num_open,
        "passed_pointed": num_open - len(failed),
        "failed": groups(failed),
    }
    if given.output == "json":
        print(json.dumps(summary, indent=2))
        return
    print("{passed} pass, {pointed} of them leave the strategy open.".format(**summary))
    print("{passed_pointed} of these pass with the strategy. The others:".format(**summary))
    for name, group in groups(failed).items():
        print(f"{group['count']:4d}  {name}: {group['reason'][:160]}")


if __name__ == "__main__":
    main()
