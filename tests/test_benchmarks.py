import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_session, launch_rate, lightning_suite, logging_overhead
from benchmarks.gpu_session import JOBS, Job
from benchmarks.throughput_systems import Ours, Resident, System, Task, serve
from tests.emulation.test_benchmark import BENCHMARKS, TIMINGS
from tests.kit.programs import run_program
from tests.kit.runs import environment


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that a test names as its parameter."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(request.param)


# --- the jobs on a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["train_throughput"], indirect=True)
def test_every_job_can_be_started_and_ends_in_time(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len({job.name for job in JOBS}) == len(JOBS)
    for job in JOBS:
        assert job.limit_seconds <= 540
        if job.arguments[0] != "-m":
            monkeypatch.setattr(sys, "argv", list(job.arguments))
            given = program._arguments()
            model = BENCHMARKS.parent / "conf" / "model" / f"{given.model}.yaml"
            assert model.is_file()
            assert set(given.capped) <= {"roundpipe", *given.system}


def test_what_was_said_before_the_limit_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = """if True:
        import pathlib, sys, time
        print('{"turn": 0}', file=sys.stderr, flush=True)
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(600)
    """
    said, wait = tmp_path / "said", subprocess.Popen.wait

    def wait_until_said(process: Any, timeout: float | None = None) -> int:
        while timeout == 0 and not said.exists():
            time.sleep(0.01)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait_until_said)
    jobs = (
        Job(name="slow", arguments=("-c", slow, str(said)), limit_seconds=0),
        Job(name="quick", arguments=("-c", "print('{\"found\": 1}')")),
    )
    monkeypatch.setattr(gpu_session, "JOBS", jobs)
    monkeypatch.setattr(sys, "argv", ["gpu_session", "--out", str(tmp_path)])
    for _ in range(2):  # the second time there is nothing left to do
        gpu_session.main()
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["job"] for row in rows] == ["slow", "quick"]
    assert (rows[0]["code"], rows[0]["measured"]) == (124, [{"turn": 0}])
    assert (rows[1]["code"], rows[1]["answer"]) == (0, {"found": 1})
    assert len(capsys.readouterr().out.splitlines()) == 2


# --- memory of trainings -------------------------------------------------------------------------


@pytest.mark.soak
def test_a_training_takes_the_memory_that_was_planned() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "benchmarks/memory_truth.py", "--small", "--case", "lora"),
            *("--output", "json", "trainer.max_steps=1"),
        ],
        cwd=BENCHMARKS.parent,
        env=environment(PYTHONPATH=str(BENCHMARKS.parent)),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout[done.stdout.index("{\n") :])["lora"]
    assert 0.5 < row["measured_bytes"] / row["planned_bytes"] < 1.5


# --- Lightning's own tests -----------------------------------------------------------------------

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


@pytest.mark.soak
def test_lightnings_tests_with_and_without_the_strategy(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "tests_pytorch"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TESTS)
    flags = ["--only", "test_some.py", "--settings", '{"num_microbatches": 1}', "--output", "json"]
    process = run_program(lightning_suite.main, tmp_path, str(tmp_path), *flags)
    found = json.loads(process.stdout)
    assert (found["passed"], found["pointed"], found["passed_pointed"]) == (3, 2, 1)
    assert found["failed"].keys() == {"test_some.py::test_says_which_strategy"}


# --- the callbacks' cost -------------------------------------------------------------------------


def test_how_sure_a_median_of_pairs_is() -> None:
    hundred = [float(number) for number in range(100, 0, -1)]
    assert logging_overhead.median_interval(hundred) == (40.0, 61.0)
    order = logging_overhead.drawn_order(50)
    assert {one ^ other for one, other in zip(order[::2], order[1::2], strict=True)} == {True}
    times = [(2.0, 20.0) if has_callbacks else (1.0, 10.0) for has_callbacks in order]
    assert set(logging_overhead.paired(times, order)) == {((2.0, 20.0), (1.0, 10.0))}


@pytest.mark.suite("where0", "where1")
@pytest.mark.parametrize("where", [[], ["--emulated", "--block-seconds=0.0001"], ["--control"]])
def test_both_ways_are_measured(tmp_path: Path, where: list[str]) -> None:
    sizes = ["--pairs=3", "--width=16", "--tokens=8", "--blocks=4", "--samples=1"]
    process = run_program(logging_overhead.main, tmp_path, *sizes, "--output=json", *where)
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["pairs"] == 3
    for prefix in ("", "cpu_"):
        low, middle, high = (result[f"{prefix}ratio_{end}"] for end in ("low", "median", "high"))
        assert low <= middle <= high
    if result["control"]:
        assert result["callback_seconds_share"] == 0
    else:
        spent = result["callback_seconds_per_batch"]
        assert set(spent) == {"PlanReport", "PipelineMonitor", "PipelineTimeline"}
        assert spent["PipelineMonitor"] > 0


def test_launches_are_counted_at_several_workers() -> None:
    for num_workers in (1, 2):
        found = launch_rate.rates(num_workers, pairs=1, repeats=2)
        assert found.keys() == {"processor", "clock"}
        assert min(found.values()) > 0
    assert launch_rate.toy_step("auto", steps=2, warm_up=1) > 0


# --- throughput ----------------------------------------------------------------------------------

TASK = Task(
    model="qwen3_1_7b",
    num_blocks=2,
    width=32,
    precision="32-true",
    seq_len=16,
    num_microbatches=2,
    device="cpu",
)


def test_ours_and_plain_pytorch_have_the_same_losses() -> None:
    def losses(system: System) -> list[float]:
        try:
            return [system.run(1)["loss"] for _ in range(3)]
        finally:
            system.close()

    plain = losses(Resident(TASK, checkpointed=True))
    assert losses(Ours(TASK)) == pytest.approx(plain, rel=1e-5)
    assert plain[0] != plain[1]


def test_a_task_keeps_width_and_cuts_depth() -> None:
    whole, cut = Task(model="qwen3_32b"), Task(model="qwen3_32b", num_blocks=2)
    assert cut.config()["num_hidden_layers"] == 2
    assert cut.config()["hidden_size"] == whole.config()["hidden_size"] == 5120
    assert cut.tokens == 8 * 2048


def test_a_library_that_is_not_installed_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = [1, None]
    sent: list[dict[str, Any]] = []
    pipe = SimpleNamespace(recv=lambda: asked.pop(0), send=sent.append)
    monkeypatch.setitem(sys.modules, "roundpipe", None)
    serve(pipe, "roundpipe", TASK)
    assert "not installed" in sent[0]["error"]


# --- updates -------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["overlapped_updates"], indirect=True)
def test_every_way_on_the_emulated_server(
    program: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timings.yaml"
    path.write_text(TIMINGS, encoding="utf-8")
    arguments = ["--timings", str(path), "--steps", "1", "--time-scale", "0.5"]
    program.main([*arguments, "--output", "json"])
    out, err = capsys.readouterr()
    row = json.loads(out)["models"]["tiny"]
    assert row["optimizer_ms"] == pytest.approx(0.5 * 16)  # of 4 blocks' forward on two workers
    assert list(row["step_ms"]) == list(program.WAYS)
    # All that two workers compute, without recomputes.
    assert all(step >= 2 * 48 / 2 for step in row["step_ms"].values())
    assert row["overhead"]["after"] == pytest.approx(
        row["step_ms"]["after"] / row["step_ms"]["none"] - 1
    )
    assert "early: step 1 took" in err
    text = program.format_text({"models": {"tiny": row}})
    assert "tiny, optimizer 8 ms; median, least, against 'none'" in text


@pytest.mark.parametrize("program", ["overlapped_updates"], indirect=True)
def test_updates_on_this_processor(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    program.main(["--processor", "--blocks", "2", "--width", "8", "--tokens", "4", "--steps", "1"])
    out, _ = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["after", "exact", "early"]
    with pytest.raises(SystemExit, match="--models gpt: the file has qwen3"):
        program.main(["--models", "gpt"])


@pytest.mark.parametrize("program", ["stale_updates"], indirect=True)
def test_curves_of_staleness(
    program: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    drawn = tmp_path / "new" / "curves.svg"
    sizes = ["--steps", "4", "--batch", "2", "--length", "9", "--width", "8", "--blocks", "2"]
    program.main([*sizes, "--window", "2", "--output", "json", "--svg", str(drawn)])
    out, _ = capsys.readouterr()
    losses = json.loads(out.splitlines()[-1])["losses"]
    assert [len(curve) for curve in losses.values()] == [2, 2]
    assert losses["exact"] != losses["async"]
    assert drawn.read_text(encoding="utf-8").count("<polyline") == 2
