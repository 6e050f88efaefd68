import importlib
import json
import os
import pkgutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import roundpipe_lightning

PUBLIC_NAMES = [
    "AnswerQuestions",
    "ExportPretrained",
    "HardwareSpec",
    "LiveView",
    "ModelProfile",
    "PipelineMonitor",
    "PipelineTimeline",
    "Plan",
    "PlanReport",
    "PlanningRequest",
    "RoundPipeAsyncCheckpointIO",
    "RoundPipeCheckpointIO",
    "RoundPipePrecision",
    "RoundPipeStrategy",
    "RunReport",
    "errors",
    "finetune",
    "linear_cross_entropy",
    "optim",
    "plan_training",
    "replace_pytorch_lightning",
    "simulate",
]

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(roundpipe_lightning.__path__, "roundpipe_lightning.")
)

# The dependencies come first: what *they* do when imported is theirs. Hydra, which the package must
# not import, comes after it, and peft, which takes seconds, after commands that do without it.
IMPORT_AND_COMPARE = """
import contextlib, importlib, io, json, logging, os, random, sys, threading, warnings
import lightning.pytorch, numpy, rich.progress, torch, torchmetrics, transformers
import transformers.modeling_utils

def settings():
    return {
        "threads": [thread.name for thread in threading.enumerate()],
        "cuda initialised": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "module path": list(sys.path),
        "warnings filters": [str(entry) for entry in warnings.filters],
        "root handlers": [str(handler) for handler in logging.getLogger().handlers],
        "root level": logging.getLogger().level,
        "lightning handlers": [str(h) for h in logging.getLogger("lightning").handlers],
        "exception hooks": [str(sys.excepthook), str(threading.excepthook)],
        "python random state": hash(random.getstate()),
        "numpy random state": hash(numpy.random.get_state()[1].tobytes()),
        "torch random state": hash(tuple(torch.get_rng_state().tolist())),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "intra-op threads": torch.get_num_threads(),
        "inter-op threads": torch.get_num_interop_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "cudnn benchmark": torch.backends.cudnn.benchmark,
    }

changed = {}

def import_all(*names):
    before = settings()
    for name in names:
        importlib.import_module(name)
    after = settings()
    changed.update({key: [before[key], after[key]] for key in before if before[key] != after[key]})
    return after

def imported(*names):
    return [name for name in names if name in sys.modules]

import_all("roundpipe_lightning")
early = imported("hydra", "omegaconf", "numba")
import hydra, omegaconf
import_all("roundpipe_lightning.cli.train", "roundpipe_lightning.cli.plan.command")
import roundpipe_commands
modules, home = sys.argv[1:], os.environ["HOME"]
with open(f"{home}/a.jsonl", "w") as file:
    file.write('{"text": "learned"}\\n' * 2)
with contextlib.redirect_stdout(io.StringIO()) as shown:
    for command, given in (("plan", "hardware=rtx4090x2"), ("data", f"data={home}/a.jsonl")):
        sys.argv = [command, given, f"paths.log_dir={home}"]
        getattr(roundpipe_commands, command)()
assert "It fits." in shown.getvalue() and "learned" in shown.getvalue()
early += imported("peft", "bitsandbytes", "datasets", "numba")
import peft
after = import_all(*modules)
print(json.dumps({"changed": changed, "after": after, "early": early}))
"""


def _run(code: str, *arguments: str, folder: Path, home: Path) -> str:
    """Run code in a fresh interpreter, in an empty folder, and return what it printed."""
    environment = {k: v for k, v in os.environ.items() if k != "XDG_CACHE_HOME"}
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**environment, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_importing_starts_nothing_and_changes_no_setting(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    folder.mkdir()
    report = json.loads(_run(IMPORT_AND_COMPARE, *MODULES, folder=folder, home=home))
    assert report["changed"] == {}
    assert report["after"]["threads"] == ["MainThread"]
    assert report["after"]["cuda initialised"] is False
    assert report["early"] == []
    assert list(folder.iterdir()) == []
    assert not (home / ".cache" / "roundpipe_lightning").exists()


def test_public_names_are_pinned() -> None:
    assert sorted(roundpipe_lightning.__all__) == PUBLIC_NAMES


def test_public_names_exist_and_all_modules_are_documented() -> None:
    named = {name: getattr(roundpipe_lightning, name) for name in PUBLIC_NAMES}
    named |= {name: importlib.import_module(name) for name in ("roundpipe_lightning", *MODULES)}
    assert [name for name, item in named.items() if not item.__doc__] == []


@pytest.mark.soak
def test_leak_check_fails_tests_that_leave_threads_and_files(tmp_path: Path) -> None:
    """The check all other tests rely on can fail."""
    tests = """
        import threading
        import conftest

        conftest.LEAK_GRACE_SECONDS = 0.2
        stop = threading.Event()
        files = []

        def test_leaves_a_thread():
            threading.Thread(target=stop.wait, args=(30,), name="stray").start()

        def test_leaves_a_file(tmp_path):
            files.append(open(tmp_path / "left-open", "w"))

        def test_cleans_up(tmp_path):
            thread = threading.Thread(target=stop.set)
            thread.start()
            thread.join()
            (tmp_path / "closed").write_text("")
    """
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (tmp_path / "test_leaks.py").write_text(textwrap.dedent(tests))
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert "3 passed, 2 errors" in process.stdout, process.stdout
    assert "threads ['stray']" in process.stdout
    assert "left-open" in process.stdout


def test_the_image_is_built_from_what_is_there() -> None:
    """What the Dockerfile copies exists, is sent to the builder, and is all that a wheel is of."""
    root = Path(__file__).parents[1]
    lines = (root / "Dockerfile").read_text(encoding="utf-8").splitlines()
    ignored = (root / ".dockerignore").read_text(encoding="utf-8").split()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    assert copied.isdisjoint(ignored)
    assert all((root / name).exists() for name in copied)
    wheel = {"pyproject.toml", "README.md", "LICENSE", "roundpipe_commands.py", "conf"}
    assert copied == {*wheel, "roundpipe_lightning", "constraints.txt"}
