"""Parameters that come, go and thaw after the optimizer was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.optimizer_sync import TrainedParameters
from tests.kit.training import QUIET, Regressor, make_trainer, regression_data

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]


def made() -> tuple[Regressor, torch.optim.Optimizer, TrainedParameters]:
    module = Regressor(num_blocks=1)
    module.head.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, optimizer, TrainedParameters(module, [optimizer])


def test_what_stays_is_fine() -> None:
    _, _, trained = made()
    trained.check()
    trained.check()


def test_added_and_never_handed_over() -> None:
    module, optimizer, trained = made()
    module.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigurationError, match="'scale' is trained, but no optimizer has it"):
        trained.check()
    optimizer.add_param_group({"params": [module.scale]})
    trained.check()


def test_thawed_in_an_optimizer_is_fine_and_elsewhere_is_not() -> None:
    module, _, trained = made()
    module.head.bias.requires_grad_(True)  # the optimizer has it
    trained.check()
    other = nn.Linear(2, 2).requires_grad_(False)
    module.other = other
    trained.check()
    other.weight.requires_grad_(True)
    with pytest.raises(ConfigurationError, match=r"'other.weight' is trained"):
        trained.check()


def test_frozen_while_the_optimizer_has_it() -> None:
    module, _, trained = made()
    module.head.weight.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"'head.weight' was frozen"):
        trained.check()


def test_one_comes_while_another_goes() -> None:
    module, _, trained = made()
    module.head.bias.requires_grad_(True)
    module.head.weight.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"'head.weight' was frozen"):
        trained.check()


class _Freeze(Callback):
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 2:
            pl_module.head.bias.requires_grad_(False)


def test_a_training_says_so(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, strategy="roundpipe", max_epochs=1, callbacks=[_Freeze()])
    with pytest.raises(ConfigurationError, match=r"'head.bias' was frozen \(requires_grad=False\)"):
        trainer.fit(Regressor(), regression_data())
    assert trainer.global_step == 2
