from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from roundpipe_lightning.errors import ConfigurationError
from tests.kit.training import Regressor, make_trainer, regression_data


class _Partly(Regressor):
    """The bias of the head is frozen, and in the optimizer; `other` is frozen, and is not."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.other = nn.Linear(2, 2).requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        members = [p for name, p in self.named_parameters() if "other" not in name]
        return torch.optim.SGD(members, lr=0.1)


def _add(module: Any) -> None:
    module.scale = nn.Parameter(torch.ones(1))


def _thaw_another(module: Any) -> None:
    module.other.weight.requires_grad_(True)


def _thaw_a_member(module: Any) -> None:
    module.head.bias.requires_grad_(True)


def _freeze(module: Any) -> None:
    module.head.weight.requires_grad_(False)


def _exchange(module: Any) -> None:
    _thaw_a_member(module)
    _freeze(module)


def _fit(folder: Path, change: Callable[[Any], None]) -> Trainer:
    class Changes(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, *args: Any) -> None:
            if args[1] == 2:
                change(module)

    trainer = make_trainer(folder, strategy="roundpipe", max_epochs=1, callbacks=[Changes()])
    trainer.fit(_Partly(), regression_data())
    return trainer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_add, "'scale' is trained, but no optimizer has it"),
        (_thaw_another, r"'other.weight' is trained"),
        (_freeze, r"'head.weight' was frozen \(requires_grad=False\)"),
        (_exchange, r"'head.weight' was frozen"),
    ],
)
def test_what_would_be_trained_wrongly_is_refused(
    tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _fit(tmp_path, change)


def test_what_the_optimizer_has_may_thaw(tmp_path: Path) -> None:
    assert _fit(tmp_path, _thaw_a_member).global_step == 4
