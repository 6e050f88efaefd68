import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import backend_registration

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.emulation.tagged_tensor import tag_of
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.testing import EmulatedStrategy, assert_trains_as_one_device
from tests.kit.training import Regressor, make_trainer, parameter_error, regression_data
from tests.lightning.test_logging import _Logging, _Outputs


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_logs_metrics_outputs_and_parameters(tmp_path: Path, precision: Any) -> None:
    runs = []
    for strategy, devices in (("auto", 1), (EmulatedStrategy(num_microbatches=4), 3)):
        torch.manual_seed(3)
        seen = _Outputs()
        module = _Logging()
        trainer = make_trainer(
            tmp_path,
            strategy=strategy,
            devices=devices,
            callbacks=[seen],
            max_epochs=2,
            precision=precision,
        )
        trainer.fit(module, regression_data(16), regression_data(9))
        trainer.test(module, regression_data(9), verbose=False)
        predictions = trainer.predict(module, regression_data(9))
        assert predictions is not None
        assert all(tag_of(torch.as_tensor(part)) is None for part in predictions)
        runs.append((module, seen))
    (expected, one), (module, many) = runs
    tolerance = 1e-5 if precision == "32-true" else 5e-2
    assert parameter_error(module.layers, expected.layers) < tolerance * 10
    for expected_metrics, metrics in zip(one.metrics, many.metrics, strict=True):
        assert list(metrics) == list(expected_metrics)
        for key, value in expected_metrics.items():
            assert tag_of(metrics[key]) is None
            torch.testing.assert_close(metrics[key], value, rtol=tolerance, atol=tolerance)
    for output in many.outputs:
        assert tag_of(output["prediction"]) is None
    for parameter in module.parameters():
        assert parameter.grad is None or tag_of(parameter.grad) is None


def test_a_user_s_comparison_with_one_device() -> None:
    assert_trains_as_one_device(Regressor, partial(regression_data, 16), devices=3)

    class LooksAtTheBatchSize(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * len(batch[0])

    with pytest.raises(AssertionError, match=r"item .*head\.bias"):
        assert_trains_as_one_device(
            LooksAtTheBatchSize,
            partial(regression_data, 8),
            strategy=EmulatedStrategy(microbatching="step"),
            max_epochs=1,
        )


class MomentumTeacher(Regressor):
    """A moving average of the blocks, moved at the beginning and the end of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    @torch.no_grad()
    def move(self) -> None:
        for slow, mine in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            slow.mul_(0.9).add_(mine, alpha=0.1)
        next(self.layers.parameters()).data.clamp_(-0.5, 0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.move()
        wanted = batch[0]
        for layer in self.teacher:
            wanted = layer(wanted)
        self.move()
        return (
            super().training_step(batch, batch_idx) + (self.head(batch[0]) - wanted).square().mean()
        )


def test_a_write_beside_the_optimizer_is_refused(tmp_path: Path) -> None:
    strategy = EmulatedStrategy(num_microbatches=4, update="async")
    trainer = make_trainer(tmp_path, strategy=strategy, devices=2, max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"'layers\.0\..*update='exact'"):
        trainer.fit(MomentumTeacher(), regression_data())


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_a_momentum_teacher(options: dict[str, Any]) -> None:
    assert_trains_as_one_device(
        MomentumTeacher,
        partial(regression_data, 16),
        strategy=EmulatedStrategy(num_microbatches=4, upload_dtype=None),
        **options,
    )


def test_devices_are_as_many_as_workers(tmp_path: Path) -> None:
    strategy = EmulatedStrategy(devices=[EmulatedDevice(0)])
    trainer = make_trainer(tmp_path, strategy=strategy, devices=2)
    with pytest.raises(ConfigurationError, match=r"1 devices .* 2 workers: give .*devices=1"):
        trainer.fit(Regressor(), regression_data())


_SCRIPT = """
import json, sys
from pathlib import Path
from tests.kit import toy_accelerator
toy_accelerator.install()
import torch
from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from tests.kit import engine
from tests.kit.accelerators import for_trainer
from tests.kit.training import Regressor, make_trainer, parameter_error, regression_data

device = torch.device("toy", 0)
engine.check_parity(engine.Regressor(4), devices=[AcceleratorDevice(device) for _ in range(2)])
modules = []
for kind in ("cpu", for_trainer()):
    torch.manual_seed(0)
    modules.append(Regressor("adamw", dropout=0.2))
    trainer = make_trainer(
        Path(sys.argv[1]), accelerator=kind, strategy=RoundPipeStrategy(num_microbatches=2)
    )
    trainer.fit(modules[-1], regression_data())
runtime = AcceleratorDevice(device).runtime
names = ("has_streams", "records_streams", "synchronizes", "has_timed_events", "counts_memory")
print(json.dumps({
    **{name: getattr(runtime, name) for name in names},
    "generators": len(runtime.generators()),
    "peak_bytes": AcceleratorDevice(device).peak_bytes(),
    "error": parameter_error(*modules),
}))
"""


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="needs backends in Python: PyTorch 2.13",
)
def test_what_an_accelerator_lacks_is_asked_for_and_done_without(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "has_streams": False,
        "records_streams": False,
        "synchronizes": False,
        "has_timed_events": False,
        "counts_memory": False,
        "generators": 0,
        "peak_bytes": None,
        "error": 0.0,
    }
    assert "toy does not say how much memory it has: name the machine" in done.stderr
