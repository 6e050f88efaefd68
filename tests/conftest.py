import contextlib
import functools
import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported; processes of tests inherit it

import numpy as np
import pytest
import torch
from hypothesis import settings
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning_utilities.core.rank_zero import rank_zero_only
from tqdm import tqdm

from roundpipe_commands import name_machines
from roundpipe_lightning.planning.search.fit import fit_training
from tests.kit import engine as kit
from tests.kit.training import QUIET

LEAK_GRACE_SECONDS = 60.0
"""Seconds that a thread may take to end, or a file to close, after the test that owned it."""

# The same examples on every machine, and no deadline per example: a busy machine is no failure.
settings.register_profile("repository", deadline=None, derandomize=True)
settings.load_profile("repository")

# A shell starts what it runs in the background with Ctrl-C ignored; tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ModuleNotFoundError):  # Hydra, which tests/gpu does not need
    name_machines(Path(__file__).parents[1] / "conf")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--emulated", action="store_true", help="emulated devices for CPU workers")


def pytest_configure(config: pytest.Config) -> None:
    kit.ALL_ARE_EMULATED = config.getoption("--emulated")


@pytest.hookimpl(tryfirst=True)  # before `-m "not soak"` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unknown: dict[tuple[Path, str], set[str]] = {}
    for item in items:
        for mark in item.iter_markers():
            if isinstance(item, pytest.Function) and mark.name in ("suite", "long"):
                case = item.callspec.id
                unknown.setdefault((item.path, item.originalname), set(mark.args)).discard(case)
                if (case in mark.args) is (mark.name == "long"):
                    item.add_marker(pytest.mark.soak)
        if item.path.parent.name in ("lightning", "gpu"):
            item.add_marker(pytest.mark.filterwarnings(*QUIET), append=False)
    is_whole = not any("[" in arg for arg in config.args)  # else some cases were asked for
    if is_whole and (wrong := [f"{name}: {ids}" for (_, name), ids in unknown.items() if ids]):
        raise pytest.UsageError(f"a mark names cases that there are not: {wrong}")


def pytest_collection_finish() -> None:
    """Keep what imports have made, some million objects, out of later collections; have fewer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


tqdm.monitor_interval = 0  # else the first progress bar starts a thread that never ends


def _threads() -> set[threading.Thread]:
    """Return Python's own threads.

    A dummy thread is one that Python did not start (PyTorch's autograd threads, for example) and
    that only passed through Python code: it belongs to its library.
    """
    return {
        thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)
    }


def _files() -> Counter[Path]:
    """Count this process's open regular files by path."""
    found: Counter[Path] = Counter()
    for opened in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # this listing itself, and what threads close meanwhile
            path = opened.readlink()
            found[path] += path.is_file()
    return +found


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a thread running or a file open."""
    threads_before, files_before = _threads(), _files()
    yield
    deadline = time.monotonic() + LEAK_GRACE_SECONDS
    collected = False
    while True:
        threads, files = _threads() - threads_before, _files() - files_before
        if not threads and not files:
            return
        if not collected:  # costly with torch loaded, so only where something is left
            gc.collect()
            collected = True
        elif time.monotonic() > deadline:
            names = sorted(thread.name for thread in threads)
            pytest.fail(f"left behind: threads {names}, open files {sorted(map(str, files))}")
        else:
            time.sleep(0.01)


_fit_training = functools.cache(fit_training)


@pytest.fixture(autouse=True)
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up the plan of a job that came before: the search depends on the job alone."""
    for name in ("strategy.planning.planner", "cli.job"):
        if module := sys.modules.get(f"roundpipe_lightning.{name}"):
            monkeypatch.setattr(module, "fit_training", _fit_training)


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Start every test from one random state and PyTorch's default settings; put both back."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()  # noqa: NPY002  the global state is what is kept
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    dtype, variables = torch.get_default_dtype(), dict(os.environ)
    with torch.random.fork_rng(devices=_initialised_devices()):
        torch.manual_seed(0)
        torch.set_num_threads(1)  # many small workers on few cores: more threads only wait
        yield
    # a launch of several hosts sets the ranks
    rank_zero_only.rank = fabric_rank_zero_only.rank = 0  # type: ignore[attr-defined]
    for name in os.environ.keys() - variables.keys():  # and the port
        del os.environ[name]
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    np.random.set_state(numpy_state)  # noqa: NPY002
    random.setstate(python_state)


def _initialised_devices() -> list[int]:
    """Return the CUDA devices whose random state must be kept: none before CUDA is in use."""
    if torch.cuda.is_initialized():
        return list(range(torch.cuda.device_count()))
    return []
