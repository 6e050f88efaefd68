from dataclasses import replace
from typing import Any

import pytest
from lightning.pytorch import Callback

from roundpipe_lightning import PlanReport
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.planning.model.hardware import load_hardware
from roundpipe_lightning.strategy.planning import planner as planning
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import Regressor, make_trainer, regression_data
from tests.lightning.test_planning import _AnotherPlanEveryStep

pytestmark = pytest.mark.usefixtures("steps_of_microbatches")


def _fit(
    report: PlanReport,
    *,
    module: Regressor | None = None,
    samples: int = 32,
    **flags: Any,
) -> RoundPipeStrategy:
    strategy = flags.pop("strategy", None) or RoundPipeStrategy()
    trainer = make_trainer(strategy=strategy, devices=2, callbacks=[report], **flags)
    trainer.fit(module or Regressor(), regression_data(samples))
    return strategy


def test_the_plan_is_told_before_the_first_step() -> None:
    events: list[str] = []
    report = PlanReport(write=events.append)
    module = Regressor(on_step=lambda *_: events.append("step"))
    _fit(report, module=module, max_epochs=1)
    start = events.index(report.texts[0])
    assert start <= 1, "but for the dry run"
    assert events[start + 1 :] == ["step"] * 16


def test_the_first_plan_is_told_whole() -> None:
    report = PlanReport()
    strategy = _fit(report, max_epochs=1)
    (text,) = report.texts
    assert strategy.plan is not None
    lines = text.splitlines()
    assert lines[0].startswith("The plan of this training, on cpu: 2 x CPU, ")
    assert lines[1] == "Model: 1,193 parameters in 4 blocks, 100.000% of them trained, 32-true"
    assert "Batch: 4 microbatches on 2 workers" in lines
    stages = strategy.plan.partition
    assert f"{stages.num_forward} forward, 1 fused, {stages.num_backward} backward" in text
    assert f"Teams of {strategy.plan.team_size}, " in text
    assert f"of {strategy.plan.round_size} microbatches" in text
    assert "  device at stage " in text
    assert "  host: " in text
    assert "(at assumed rates; measured times will replace them)" in text
    assert "workers wait " in text


def test_memory_is_told_by_kind_against_what_there_is() -> None:
    report = PlanReport()
    machine = replace(load_hardware("rtx4090x4"), num_devices=2)
    _fit(report, strategy=EmulatedStrategy(hardware=machine), max_epochs=1)
    text = report.texts[0]
    assert "The plan of this training, on rtx4090x4: 2 x GeForce RTX 4090, 23.99 GiB each" in text
    assert "    reserved             1.09 GiB" in text
    assert " of 23.99 GiB" in text
    assert " of 512.00 GiB" in text
    assert "Slots for weights: " in text
    assert "Moved per step: " in text
    assert "assumed" not in text


def test_a_plan_that_changes_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "improved_plan", _AnotherPlanEveryStep())
    monkeypatch.setattr(planning.StepPlanner, "_is_due", lambda self, planned: True)
    report = PlanReport()
    strategy = _fit(report, max_epochs=2)
    assert len(report.texts) == 8
    before, after = report.texts[5].splitlines()[1:3]
    assert before.removeprefix("  from ") == report.texts[4].splitlines()[2].removeprefix("  to   ")
    assert strategy.last_step is not None
    assert report.texts[-1].splitlines()[2] == f"  to   {strategy.last_step.plan.partition}"
    assert report.texts[-1].startswith("The plan changes after 7 measured steps\n")
    assert after != before


def test_other_shapes_are_told_once() -> None:
    report = PlanReport()
    strategy = RoundPipeStrategy(replan=False)  # whether that pays depends on the machine's load
    _fit(report, strategy=strategy, samples=27, max_epochs=3)
    assert len(report.texts) == 2
    assert report.texts[1].startswith("The plan for batches of another shape, in 3 microbatches\n")


def test_unknown_values_are_not_reported() -> None:
    report = PlanReport()
    _fit(report, strategy=RoundPipeStrategy(dry_run=False), max_epochs=1)
    (text,) = report.texts
    assert "Predicted step: unknown" in text
    assert "Note: Activations are not counted in the memory above" in text
    assert "workers wait" not in text


def test_memory_that_is_tight_and_idle_workers_are_noted() -> None:
    needs: list[int] = []
    machine = replace(load_hardware("cpu"), num_devices=2)
    for device_bytes in (machine.device_bytes, 0):
        report = PlanReport()
        size = device_bytes or needs[0] + 10
        strategy = RoundPipeStrategy(
            hardware=replace(machine, device_bytes=size), num_microbatches=1
        )
        strategy.plan_listeners.append(
            lambda event: needs.append(event.description.memory.device.total_bytes)
        )
        _fit(report, strategy=strategy, max_epochs=1)
    (text,) = report.texts
    assert "Note: Device memory is tight: the plan needs 100% of what there is." in text
    assert "Note: Workers wait " in text


def test_it_logs_where_nobody_takes_the_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lightning_utilities.core.rank_zero")
    _fit(PlanReport(), max_epochs=1)
    assert "The plan of this training, on cpu" in caplog.text


def test_fits_failures_and_evaluations() -> None:
    class Fail(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ValueError("enough")

    report, strategy = PlanReport(), RoundPipeStrategy()
    trainer = make_trainer(strategy=strategy, devices=2, callbacks=[report, Fail()], max_epochs=1)
    with pytest.raises(ValueError, match="enough"):
        trainer.fit(Regressor(), regression_data())
    assert len(report.texts) == 1
    trainer.callbacks.pop(1)  # type: ignore[attr-defined]
    trainer.validate(Regressor(), regression_data(), verbose=False)
    assert strategy.plan_listeners == []
    assert len(report.texts) == 1
    trainer.fit(Regressor(), regression_data())
    assert len(report.texts) == 1, "that of the second fit, once"
    assert strategy.plan_listeners == []


def test_other_strategies_are_refused() -> None:
    trainer = make_trainer(callbacks=[PlanReport()])
    with pytest.raises(
        ConfigurationError,
        match=r"PlanReport needs Trainer\(strategy='roundpipe'\), found SingleDeviceStrategy\.",
    ):
        trainer.fit(Regressor(), regression_data())
