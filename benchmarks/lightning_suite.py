"""Run Lightning's own tests with their trainers pointed at the strategy; compare with one device.

    python benchmarks/lightning_suite.py path/to/pytorch-lightning/tests --only models loops

Takes a checkout of Lightning's tests of the installed version (the package that pip installs has
none) and runs them twice, in processes of their own: as they are, and with every Trainer whose test
leaves the strategy open (`strategy="auto"`, one CPU device) given a `RoundPipeStrategy` with one
microbatch. Tests that fail on one device are set aside: they need other packages, devices or
versions. Prints, as JSON:

    collected       tests found
    passed          of them on one device
    pointed         of these, those that made a Trainer with the strategy
    passed_pointed  of these, those that pass with it
    failed          names of those that do not, with the first line of what went wrong

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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

DEVICES = "LIGHTNING_SUITE_DEVICES"
"""Environment variable of the plugin: number of workers; 0 leaves the trainers as they are."""
RESULTS = "LIGHTNING_SUITE_RESULTS"
"""Environment variable of the plugin: the file that gets one JSON object per test and line."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one test.

    Attributes:
        name: The test's name, as pytest writes it.
        outcome: `"passed"`, `"failed"` or `"skipped"`.
        pointed: Whether it made a Trainer with the strategy.
        reason: First line of what went wrong.
    """

    name: str
    outcome: str
    pointed: bool = False
    reason: str = ""


class Pointer:
    """The pytest plugin: points trainers at the strategy and notes what becomes of the tests.

    Args:
        num_devices: Workers; 0 leaves the trainers as they are.
        results: File for the outcomes.
    """

    def __init__(self, num_devices: int, results: Path) -> None:
        self._num_devices = num_devices
        self._results = results
        self._num_pointed = 0

    def pytest_configure(self) -> None:
        """Put the strategy into the trainers that leave it open."""
        trainer = importlib.import_module("lightning.pytorch").Trainer
        if self._num_devices:
            trainer.__init__ = self._pointing(trainer.__init__)

    def _pointing(self, init: Callable[..., None]) -> Callable[..., None]:
        strategy = importlib.import_module("roundpipe_lightning").RoundPipeStrategy

        @wraps(init)
        def pointed(trainer: Any, *args: Any, **flags: Any) -> None:
            if _is_open(flags):
                self._num_pointed += 1
                flags.update(
                    accelerator="cpu",
                    devices=self._num_devices,
                    strategy=strategy(num_microbatches=1),
                )
            init(trainer, *args, **flags)

        return pointed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[Any]:
        """Count the trainers of one test."""
        self._num_pointed = 0
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
            pointed=self._num_pointed > 0,
            reason=str(getattr(crash, "message", "")).partition("\n")[0],
        )
        with self._results.open("a") as file:
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
    if RESULTS in os.environ:
        pointer = Pointer(int(os.environ[DEVICES]), Path(os.environ[RESULTS]))
        config.pluginmanager.register(pointer)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Summary that the script prints; see the top of this file."""

    versions: dict[str, str]
    devices: int
    collected: int
    passed: int
    pointed: int
    passed_pointed: int
    failed: dict[str, str] = field(default_factory=dict)


def run(tests: Path, selection: list[str], *, num_devices: int, seconds: int) -> list[Outcome]:
    """Run the tests in a process of its own.

    Args:
        tests: The folder that `tests_pytorch` is in.
        selection: What of it, relative to `tests_pytorch`; nothing is all.
        num_devices: Workers; 0 leaves the trainers as they are.
        seconds: Limit of one test.

    Returns:
        One outcome per test.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        results.touch()
        here = str(Path(__file__).resolve().parent)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([here, str(tests), os.environ.get("PYTHONPATH", "")]),
            DEVICES: str(num_devices),
            RESULTS: str(results),
        }
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "lightning_suite"),
                *("-p", "no:cacheprovider", "-p", "no:xdist", "--timeout", str(seconds)),
                *("--rootdir", str(tests), "-c", os.devnull, "--import-mode", "importlib"),
                *[str(tests / "tests_pytorch" / part) for part in selection or ["."]],
            ],
            cwd=folder,
            env=environment,
            stdout=sys.stderr,
            check=False,
        )
        outcomes: dict[str, Outcome] = {}
        for line in results.read_text().splitlines():
            outcome = Outcome(**json.loads(line))
            known = outcomes.get(outcome.name)
            if known is None or known.outcome == "passed":  # a teardown may fail, too
                outcomes[outcome.name] = outcome
        return list(outcomes.values())


def compare(alone: list[Outcome], pointed: list[Outcome], *, num_devices: int) -> Counts:
    """Count what passes on one device and what of it with the strategy.

    Args:
        alone: Of the run that left the trainers as they are.
        pointed: Of the other one.
        num_devices: Its workers.
    """
    passed = {outcome.name for outcome in alone if outcome.outcome == "passed"}
    judged = [outcome for outcome in pointed if outcome.pointed and outcome.name in passed]
    failed = {o.name: o.reason for o in judged if o.outcome != "passed"}
    versions = {
        name: str(importlib.import_module(name).__version__) for name in ("lightning", "torch")
    }
    return Counts(
        versions=versions,
        devices=num_devices,
        collected=len(alone),
        passed=len(passed),
        pointed=len(judged),
        passed_pointed=len(judged) - len(failed),
        failed=failed,
    )


def main() -> None:
    """Run, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tests", type=Path, help="the folder that tests_pytorch is in")
    parser.add_argument("--only", nargs="*", default=[], help="files or folders of tests_pytorch")
    parser.add_argument("--devices", type=int, default=1, help="workers")
    parser.add_argument("--seconds", type=int, default=60, help="limit of one test")
    flags = parser.parse_args()
    tests = flags.tests.resolve()
    alone, pointed = (
        run(tests, flags.only, num_devices=devices, seconds=flags.seconds)
        for devices in (0, flags.devices)
    )
    counts = compare(alone, pointed, num_devices=flags.devices)
    print(json.dumps(asdict(counts), indent=2))


if __name__ == "__main__":
    main()
