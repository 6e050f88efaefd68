import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset

from roundpipe_lightning import PipelineMonitor
from roundpipe_lightning.callbacks import monitor as monitor_module
from roundpipe_lightning.callbacks.monitor import MeasuredBatch, figures_of
from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.batches import BatchCounts
from roundpipe_lightning.planning.model.hardware import load_hardware
from roundpipe_lightning.planning.model.work import Operations
from roundpipe_lightning.planning.report.step_record import EngineCounters, IdleCause, StepRecord
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Action, Schedule, Timeline, TimelineEntry
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.resumption import MemoryLogger
from tests.kit.training import (
    Block,
    ByHand,
    LanguageModel,
    PaddedSequences,
    Regressor,
    make_trainer,
    regression_data,
)

Rows = list[dict[str, float]]


class _Seen(Callback):
    def __init__(self) -> None:
        self.rows: Rows = []
        self.shown: Rows = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        values = {key: float(value) for key, value in trainer.logged_metrics.items()}
        self.rows.append({k[10:]: v for k, v in values.items() if k.startswith("roundpipe/")})
        self.shown.append({key: float(v) for key, v in trainer.progress_bar_metrics.items()})


def _fit(
    module: LightningModule,
    data: Any,
    *,
    monitor: PipelineMonitor | None = None,
    validation: Any = None,
    **flags: Any,
) -> tuple[_Seen, Trainer]:
    seen, callback = _Seen(), monitor or PipelineMonitor(every_n_steps=1)
    settings = {"strategy": "roundpipe", "devices": 2, "callbacks": [callback, seen], **flags}
    trainer = make_trainer(**settings)
    trainer.fit(module, data, validation)
    seen.on_train_batch_start(trainer)
    return seen, trainer


@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
def test_figures_of_a_training(kind: type[RoundPipeStrategy]) -> None:
    data = PaddedSequences(24)
    loader = DataLoader(data, batch_size=8)
    seen, trainer = _fit(
        LanguageModel(),
        loader,
        strategy=kind(num_microbatches=4, microbatching="step", replan=False),
    )
    rows = [row for row in seen.rows if row]
    assert len(rows) == 9 + 1 - 2, "from the second batch on, seen one batch later"
    for number, row in enumerate(rows[:-1], start=1):
        batch = slice(number % 3 * 8, number % 3 * 8 + 8)
        seconds = row["batch_seconds"]
        assert row["samples_per_second"] * seconds == pytest.approx(8, rel=1e-3)
        assert row["tokens_per_second"] * seconds == pytest.approx(8 * 12, rel=1e-3)
        targets = int((data.labels[batch][:, 1:] != -100).sum())
        assert row["targets_per_second"] * seconds == pytest.approx(targets, rel=1e-3)
        parts = [row[f"idle_{cause.value}_share"] for cause in IdleCause]
        assert sum(parts) == pytest.approx(row["idle_share"], abs=1e-4)
        assert min(parts) >= -1e-4
        assert 0 < row["step_idle_share"] < row["idle_share"] < 1
        assert row["num_microbatches"] == 4
        assert row["num_plans"] == 1
        assert row["peak_host_gib"] > 0.05
        assert 0 < row["peak_device_gib"] < 0.05
    assert isinstance(trainer.strategy, RoundPipeStrategy)
    plan = trainer.strategy.plan
    assert plan is not None
    assert rows[-1]["num_stages"] == plan.partition.num_stages
    assert (rows[-1]["round_size"], rows[-1]["team_size"]) == (plan.round_size, plan.team_size)


def test_operations_are_those_of_the_layers() -> None:
    strategy = RoundPipeStrategy(
        microbatching="step", replan=False, hints={"forward": [2], "backward": [2, 2]}
    )
    seen, _ = _fit(Regressor(), regression_data(), strategy=strategy)
    row = seen.rows[-1]
    block = 2 * 8 * (8 * 16 + 16 * 8)  # a multiply-add is two, of eight samples
    head = 2 * 8 * 8
    model = 3 * (4 * block + head)
    done = row["tflop_per_second"] * row["batch_seconds"] * 1e12
    assert done == pytest.approx(model, rel=0.01)
    computed = row["computed_tflop_per_second"] * row["batch_seconds"] * 1e12
    assert computed == pytest.approx(model + 2 * block, rel=0.01)
    assert "share_of_peak" not in row, "rates of CPU workers are assumed"


def test_share_of_the_peak_of_a_machine_that_is_given() -> None:
    machine = replace(load_hardware("cpu"), name="mine", num_devices=2)
    strategy = RoundPipeStrategy(hardware=machine)
    seen, _ = _fit(Regressor(), regression_data(), strategy=strategy)
    row = seen.rows[-1]
    rate = 2 * machine.matrix_rates.float32
    assert row["share_of_peak"] == pytest.approx(row["tflop_per_second"] * 1e12 / rate, rel=1e-4)


class _Slow(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(32):
            time.sleep(0.01)
            yield torch.ones(8), torch.ones(1)


def test_waiting_for_data_and_for_the_optimizer() -> None:
    class SlowUpdate(Regressor):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            time.sleep(0.05)

    monitor = PipelineMonitor()
    _fit(SlowUpdate(), DataLoader(_Slow(), batch_size=8), monitor=monitor, max_epochs=3)
    figures = monitor.figures
    data = figures["idle_data_share"] * figures["batch_seconds"]
    assert data >= 10 / 11 * 0.08, "two of twelve are there when the first batch begins"
    assert figures["idle_optimizer_share"] * figures["batch_seconds"] >= 0.05
    assert figures["idle_data_share"] + figures["idle_optimizer_share"] < figures["idle_share"]


def test_validation_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowValidation(Regressor):
        seconds = 0.0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            SlowValidation.seconds += 1000.0  # by the monitor's clock

    clock = SimpleNamespace(
        perf_counter=lambda: time.perf_counter() + SlowValidation.seconds,
        thread_time=time.thread_time,
    )
    monkeypatch.setattr(monitor_module, "time", clock)
    monitor = PipelineMonitor()
    _fit(
        SlowValidation(),
        regression_data(),
        validation=regression_data(8),
        monitor=monitor,
        max_epochs=3,
        val_check_interval=2,
    )
    assert SlowValidation.seconds > 6000
    assert monitor.figures["batch_seconds"] < 1000


def test_interval_and_accumulation() -> None:
    seen, _ = _fit(
        Regressor(),
        regression_data(32, batch_size=4),
        monitor=PipelineMonitor(every_n_steps=3),
        accumulate_grad_batches=2,
        max_epochs=4,
    )
    speeds = [row.get("batch_seconds") for row in seen.rows]
    changed = [n for n in range(1, len(speeds)) if speeds[n] != speeds[n - 1]]
    # After step 1 (two batches, the first left out), then every three steps of two batches.
    assert changed == [2, 8, 14, 20, 26, 32]


def test_loggers_and_progress_bar_have_them(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0)
    monitor = PipelineMonitor(every_n_steps=1, count_tokens=lambda batch: batch[0].numel())
    seen, _ = _fit(Regressor(), regression_data(), monitor=monitor, logger=logger, max_epochs=2)
    header = (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()[0]
    assert "roundpipe/tokens_per_second" in header.split(",")
    assert "tok/s" not in header
    assert {"tok/s", "TFLOP/s", "idle"} <= set(seen.shown[-1])
    assert seen.shown[-1]["tok/s"] == seen.rows[-1]["tokens_per_second"]
    seen, _ = _fit(Regressor(), regression_data(), monitor=PipelineMonitor(progress_bar=False))
    assert set(seen.shown[-1]) <= {"loss", "loss_step", "loss_epoch"}
    assert seen.rows[-1]


@pytest.mark.parametrize(("log_every", "steps"), [(1, [2, 5, 8]), (2, [2, 6, 8])])
def test_loggers_have_each_measurement_once(log_every: int, steps: list[int]) -> None:
    logger = MemoryLogger()
    seen, _ = _fit(
        Regressor(),
        regression_data(16, batch_size=4),
        monitor=PipelineMonitor(every_n_steps=3),
        logger=logger,
        log_every_n_steps=log_every,
        accumulate_grad_batches=1,
        max_epochs=2,
    )
    rows = [(step, row) for step, row in logger.rows if "roundpipe/batch_seconds" in row]
    assert [(step or 0) + 1 for step, _ in rows] == steps
    speeds = [row["roundpipe/batch_seconds"] for _, row in rows]
    assert len(set(speeds)) == 3
    # Who looks at metrics finds the last ones at any time.
    assert seen.rows[-1]["batch_seconds"] == pytest.approx(speeds[-1])
    assert all(row for row in seen.rows[2:])


def test_with_another_strategy_it_does_what_it_can() -> None:
    seen, _ = _fit(Regressor(), regression_data(), strategy="auto", devices=1)
    assert set(seen.rows[-1]) == {
        "samples_per_second",
        "batch_seconds",
        "data_share",
        "peak_host_gib",
    }


def test_manual_optimization_has_speed_alone() -> None:
    strategy = RoundPipeStrategy(num_microbatches=1)
    seen, _ = _fit(ByHand(), regression_data(), strategy=strategy, max_epochs=2)
    assert {"samples_per_second", "batch_seconds", "data_share"} <= set(seen.rows[-1])
    assert not [name for name in seen.rows[-1] if "idle" in name or "tflop" in name]


def test_it_rests_where_logging_would_cost_more_than_the_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    long_logging = count(step=1000)  # seconds, at each look at the processor's time
    clock = SimpleNamespace(perf_counter=time.perf_counter, thread_time=partial(next, long_logging))
    monkeypatch.setattr(monitor_module, "time", clock)
    monkeypatch.setattr(monitor_module, "_LONGEST_REST_SECONDS", 1e6)
    monitor = PipelineMonitor()
    seen, _ = _fit(Regressor(), regression_data(), monitor=monitor, max_epochs=8)
    assert len({row["batch_seconds"] for row in seen.rows if row}) == 1
    every = PipelineMonitor(every_n_steps=1)
    seen, _ = _fit(Regressor(), regression_data(), monitor=every, max_epochs=2)
    assert len({row["batch_seconds"] for row in seen.rows if row}) == 7


def test_fast_dev_run_evaluation_and_failures() -> None:
    monitor = PipelineMonitor(every_n_steps=1)
    seen, trainer = _fit(Regressor(), regression_data(), monitor=monitor, fast_dev_run=True)
    assert monitor.figures == {}
    trainer.validate(Regressor(), regression_data(8), verbose=False)
    trainer.test(Regressor(), regression_data(8), verbose=False)
    assert monitor.figures == {}

    def fail(module: Any, batch: Any, batch_idx: int) -> None:
        if module.global_step == 3:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        _fit(Regressor(on_step=fail), regression_data(), monitor=monitor)
    assert monitor.figures["samples_per_second"] > 0
    seen, _ = _fit(Regressor(), regression_data(), monitor=monitor, max_epochs=1)
    assert len([row for row in seen.rows if row]) == 4 + 1 - 2


@pytest.mark.parametrize("steps", [0, -2])
def test_bad_intervals_are_refused(steps: int) -> None:
    with pytest.raises(ConfigurationError, match=f"every_n_steps={steps}.* must be 1 or more"):
        PipelineMonitor(every_n_steps=steps)


def test_what_moves_and_what_is_waited_for() -> None:
    """Six blocks go up in a step, two per stage, over a link that takes 100 ms for each."""
    block_bytes = sum(parameter.nbytes for parameter in Regressor().layers[0].parameters())
    timing = EmulatedTiming(upload_bytes_per_second=block_bytes / 0.1)
    monitor = PipelineMonitor(every_n_steps=1)
    with EmulatedServer(2, timing=timing) as server:
        hints = {"forward": [2], "backward": [2, 2], "team_size": 1, "round_size": 4}
        strategy = EmulatedStrategy(
            devices=server.devices, num_microbatches=4, replan=False, hints=hints
        )
        seen, _ = _fit(
            Regressor(), regression_data(), monitor=monitor, strategy=strategy, max_epochs=1
        )
        assert strategy.last_step is not None
        counters = strategy.last_step.counters
    weights, boundaries = 6 * block_bytes, 3 * 4 * 2 * 8 * 4
    assert weights <= counters.uploaded_bytes <= 1.25 * weights + boundaries
    gradients = 4 * block_bytes
    assert gradients <= counters.downloaded_bytes <= 1.25 * gradients + boundaries
    row = seen.rows[-1]
    for direction, moved in (("up", counters.uploaded_bytes), ("down", counters.downloaded_bytes)):
        rate = row[f"{direction}load_gb_per_second"] * 1e9
        assert rate * row["batch_seconds"] == pytest.approx(moved, rel=1e-3)
    waited = monitor.figures["idle_upload_share"] * 2 * monitor.figures["batch_seconds"]
    assert waited >= 0.02, "a worker waits for its first stage at least"
    parts = [monitor.figures[f"idle_{cause.value}_share"] for cause in IdleCause]
    assert sum(parts) == pytest.approx(monitor.figures["idle_share"])


def test_a_batch_in_flight_lasts_until_its_last_gradient() -> None:
    """The Trainer goes on long before that; workers cannot be busier than always."""

    class Timed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return server.work(super().forward(x), forward_seconds=0.004, backward_seconds=0.02)

    module, logger = Regressor("adamw"), MemoryLogger()
    with EmulatedServer(2, timing=EmulatedTiming()) as server:
        module.layers = torch.nn.ModuleList(Timed() for _ in range(4))
        strategy = EmulatedStrategy(
            devices=server.devices, num_microbatches=4, microbatching="step", update="async"
        )
        trainer = make_trainer(
            strategy=strategy,
            devices=2,
            callbacks=[PipelineMonitor(every_n_steps=1)],
            logger=logger,
            max_epochs=1,
        )
        trainer.fit(module, regression_data())
    shares = [
        row["roundpipe/idle_share"] for _, row in logger.rows if "roundpipe/idle_share" in row
    ]
    assert 0 <= shares[0] < 1, shares


# worker 0 |F0.0|F0.1|.....|  |B1.0|  |B1.1|     a step of 12 s, in a batch of 20 s
# worker 1 |....|X0.0......|X0.1|...........|
TIMES = {
    "F0.0@0": (10.0, 11.0),
    "F0.1@0": (11.0, 12.0),
    "B1.0@0": (15.5, 18.0),
    "B1.1@0": (20.0, 22.0),
    "X0.0@1": (11.5, 15.0),
    "X0.1@1": (15.0, 17.0),
}
TIMELINE = Timeline(
    num_workers=2,
    entries=tuple(
        TimelineEntry(action=Action.parse(text), start_seconds=start, end_seconds=end)
        for text, (start, end) in TIMES.items()
    ),
)
PLAN = Plan(
    model="",
    partition=Partition(forward=(1,), backward=(1, 1)),
    num_workers=2,
    num_microbatches=2,
    round_size=2,
    schedule=Schedule.from_text("worker 0: F0.0 F0.1 B1.0 B1.1\nworker 1: X0.0 X0.1"),
    block_names=("a", "b"),
)
RECORD = StepRecord(
    plan=PLAN,
    timeline=TIMELINE,
    counters=EngineCounters(
        uploaded_bytes=30_000_000_000,
        downloaded_bytes=8_000_000_000,
        upload_wait_seconds=1.5,
        boundary_wait_seconds=0.25,
    ),
    operations=Operations(model=8e12, recompute=2e12),
    operations_per_token=None,
    peak_operations_per_second=4e12,
)
BATCH = MeasuredBatch(
    wall_seconds=20.0,
    data_seconds=3.0,
    optimizer_seconds=2.0,
    counts=BatchCounts(samples=4, tokens=100, targets=60),
    record=RECORD,
)


def test_one_batch() -> None:
    busy = 1 + 1 + 2.5 + 2 + 3.5 + 2 - 1.5 - 0.25
    assert figures_of(Counter(BATCH.sums())) == pytest.approx(
        {
            "samples_per_second": 4 / 20,
            "tokens_per_second": 100 / 20,
            "targets_per_second": 60 / 20,
            "batch_seconds": 20,
            "idle_share": 1 - busy / 40,
            "idle_fill_share": 1.5 / 40,
            "idle_drain_share": 5 / 40,
            "idle_boundary_share": (3 + 0.25) / 40,
            "idle_upload_share": 1.5 / 40,
            "idle_data_share": 2 * 3 / 40,
            "idle_optimizer_share": 2 * 2 / 40,
            "idle_other_share": (0.5 + 2 + 2 * (20 - 12 - 3 - 2)) / 40,
            "step_idle_share": 1 - busy / 24,
            "upload_gb_per_second": 1.5,
            "download_gb_per_second": 0.4,
            "tflop_per_second": 8 / 20,
            "computed_tflop_per_second": 10 / 20,
            "share_of_peak": 0.1,
            "computed_share_of_peak": 0.125,
        }
    )


def test_batches_are_added_before_they_are_divided() -> None:
    sums = Counter(BATCH.sums())
    other = replace(
        BATCH,
        wall_seconds=60.0,
        data_seconds=43.0,
        counts=BatchCounts(samples=2, tokens=None, targets=None),
    )
    sums.update(other.sums())
    figures = figures_of(sums)
    assert figures["samples_per_second"] == pytest.approx(6 / 80)
    assert figures["tokens_per_second"] == pytest.approx(100 / 80)
    assert figures["batch_seconds"] == 40
    assert figures["idle_data_share"] == pytest.approx(2 * 46 / 160)
    assert figures["share_of_peak"] == pytest.approx(16 / (4 * 80))
    parts = sum(figures[f"idle_{cause.value}_share"] for cause in IdleCause)
    assert parts == pytest.approx(figures["idle_share"])


# worker 0 |B1.1|..|F0.0|    from 20 s on: this step begins at 21 s, the one above ends at 22 s
# worker 1 |....|X0.0|
LATER = replace(
    RECORD,
    timeline=Timeline(
        num_workers=2,
        entries=tuple(
            TimelineEntry(action=Action.parse(text), start_seconds=start, end_seconds=end)
            for text, (start, end) in {"X0.0@1": (0.0, 2.0), "F0.0@0": (2.0, 3.0)}.items()
        ),
    ),
    counters=EngineCounters(),
    clock_seconds=21.0,
)


def test_steps_that_overlap_are_not_counted_twice() -> None:
    sums = Counter(
        replace(BATCH, wall_seconds=11.0, data_seconds=0.0, optimizer_seconds=0.0).sums()
    )
    sums.update(
        replace(BATCH, wall_seconds=2.0, optimizer_seconds=0.0, record=LATER, before=RECORD).sums()
    )
    figures = figures_of(sums)
    workers = 2 * (11 + 2)
    busy = 12 - 1.75 + 3
    assert figures["idle_share"] == pytest.approx(1 - busy / workers)
    assert figures["step_idle_share"] == pytest.approx(1 - busy / (2 * (24 - 10)))
    # Worker 1 drains from 17 to 21 s, then works until 23 s; worker 0 fills from 22 to 23 s.
    assert figures["idle_drain_share"] == pytest.approx((4 + 1) / workers)
    assert figures["idle_fill_share"] == pytest.approx((1.5 + 1) / workers)
    assert figures["idle_data_share"] == 0, "the pipeline was never empty"
    parts = sum(figures[f"idle_{cause.value}_share"] for cause in IdleCause)
    assert parts == pytest.approx(figures["idle_share"])


def test_data_is_waited_for_when_the_step_before_has_ended() -> None:
    late = replace(LATER, clock_seconds=22.5)
    batch = replace(BATCH, wall_seconds=5.0, optimizer_seconds=0.0, record=late, before=RECORD)
    figures = figures_of(Counter(batch.sums()))
    assert figures["idle_data_share"] == pytest.approx(0.5 / 5)
    assert figures["step_idle_share"] == pytest.approx(1 - 3 / (2 * 3))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (BatchCounts(samples=4, tokens=100, targets=None), 100 * 5e9),
        (BatchCounts(samples=4, tokens=None, targets=None), 4 * 5e9),
        (BatchCounts(samples=None, tokens=None, targets=None), None),
    ],
)
def test_estimates_from_parameters_are_per_token(
    counts: BatchCounts, expected: float | None
) -> None:
    per_token = Operations(model=5e9, recompute=1e9)
    record = replace(RECORD, operations=None, operations_per_token=per_token)
    sums = replace(BATCH, counts=counts, record=record).sums()
    found = figures_of(Counter(sums)).get("tflop_per_second")
    assert found == (None if expected is None else pytest.approx(expected / 20 / 1e12))
