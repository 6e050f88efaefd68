import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

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
