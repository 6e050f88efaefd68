from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.memory import is_oom_error
from torch.utils.data import DataLoader

from roundpipe_lightning.errors import DeviceMemoryError, RoundPipeError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import Regressor, make_trainer, regression_data

pytestmark = pytest.mark.usefixtures("steps_of_microbatches")


class _Hungry(Regressor):
    """Runs out of memory for more than four samples at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader[Any]:
        return regression_data(64, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return regression_data(8)  # the scaler asks for one where there is a validation_step


@pytest.mark.suite("EmulatedStrategy-1-4")
@pytest.mark.parametrize(
    ("kind", "num_microbatches", "expected"),
    [(RoundPipeStrategy, 2, 8), (EmulatedStrategy, 1, 4)],  # microbatches of four
)
def test_batch_size_scaler_finds_the_largest_batch(
    tmp_path: Path, kind: Any, num_microbatches: int, expected: int
) -> None:
    module = _Hungry()
    strategy = kind(num_microbatches=num_microbatches, dry_run=False)
    trainer = make_trainer(strategy=strategy, max_epochs=1)
    found = Tuner(trainer).scale_batch_size(module, steps_per_trial=1, max_trials=5, init_val=2)
    assert found == expected
    assert not list(tmp_path.glob(".scale_batch_size*"))
    module.batch_size = 4 * num_microbatches
    trainer.fit(module)
    assert trainer.global_step == 16 // num_microbatches


def test_error_is_lightnings_kind_and_ours() -> None:
    module = _Hungry()
    module.batch_size = 32
    trainer = make_trainer(strategy="roundpipe", max_epochs=1)
    with pytest.raises(DeviceMemoryError, match="stage 0") as caught:
        trainer.fit(module)
    assert is_oom_error(caught.value)
    assert isinstance(caught.value, RoundPipeError)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    module.batch_size = 8
    again = make_trainer(strategy="roundpipe", max_steps=2)
    again.fit(module)
    assert again.global_step == 2
