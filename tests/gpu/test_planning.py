from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.engine.device.probe import available_bytes
from roundpipe_lightning.errors import FitError
from roundpipe_lightning.planning.model.hardware import RESERVED_BYTES
from roundpipe_lightning.strategy.planning import inputs as plan_inputs
from roundpipe_lightning.strategy.planning import planner as planning
from tests.kit.training import (
    LanguageModel,
    PaddedSequences,
    Regressor,
    make_trainer,
    parameter_error,
    regression_data,
)
from tests.lightning.test_planning import _AnotherPlanEveryStep

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a GPU; none is visible to torch"
    ),
]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def fit(folder: Path, module: Any, data: Any, **settings: Any) -> RoundPipeStrategy:
    strategy = RoundPipeStrategy(workers_per_device=2, **settings)
    trainer = make_trainer(
        folder, strategy=strategy, accelerator="gpu", devices=1, max_steps=12, max_epochs=-1
    )
    trainer.fit(module, data)
    return strategy


def test_auto_is_planned_from_measured_figures(tmp_path: Path) -> None:
    strategy = fit(tmp_path, LanguageModel(), DataLoader(PaddedSequences(8), batch_size=4))
    runtime = strategy._seen
    assert runtime is not None
    machine = runtime.planner.machine
    total = torch.cuda.get_device_properties(0).total_memory
    assert machine.num_devices == 2
    assert 0.3 * total < machine.device_bytes < 0.5 * total
    assert not machine.shares_host_memory
    assert machine.upload_bytes_per_second > 1e8
    assert list((tmp_path / "cache").rglob("*.json"))  # not measured again next time
    assert strategy.plan is not None
    assert strategy.plan.num_workers == 2
    assert strategy.profile is not None
    assert strategy.profile.blocks[0].boundary_bytes > 0


def test_too_little_device_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path, Regressor(), regression_data())
    monkeypatch.setattr(plan_inputs, "available_bytes", lambda _: 2 * RESERVED_BYTES + 100)
    with pytest.raises(FitError, match="GiB of device memory are missing"):
        fit(tmp_path, Regressor(), regression_data())


def test_other_stages_change_nothing_but_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = []
    for changes in (False, True):
        if changes:
            monkeypatch.setattr(planning, "improved_plan", _AnotherPlanEveryStep())
            monkeypatch.setattr(planning.StepPlanner, "_is_due", lambda self, planned: True)
        torch.manual_seed(4)
        modules.append(Regressor())
        fit(tmp_path, modules[-1], regression_data(), replan=changes)
    assert parameter_error(*modules) < 1e-5


def test_a_machine_that_cannot_be_measured_has_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("busy")

    monkeypatch.setattr(plan_inputs, "probe_hardware", fail)
    found = plan_inputs.find_machine(
        "auto", num_workers=1, workers_per_device=1, computes_on_host=False
    )
    assert 0 < found.device_bytes < torch.cuda.get_device_properties(0).total_memory


def test_a_cap_on_this_process_is_what_is_planned_with() -> None:
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25)
    try:
        assert 0 < available_bytes(torch.device("cuda", 0)) <= 0.25 * total
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
