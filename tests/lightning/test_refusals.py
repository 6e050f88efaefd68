from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

import roundpipe_lightning
from roundpipe_lightning.errors import BatchError, CaptureError, ConfigurationError, PlanError
from roundpipe_lightning.strategy.checks import register
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import Regressor, make_trainer, regression_data, same_bits


class _Steps(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pytest.fail("training has begun")


# Registration ------------------------------------------------------------------------------------


def test_name_is_registered_once() -> None:
    assert roundpipe_lightning.RoundPipeStrategy is RoundPipeStrategy
    before = dict(StrategyRegistry["roundpipe"])
    register(RoundPipeStrategy, name="roundpipe")
    assert StrategyRegistry["roundpipe"] == before
    trainer = make_trainer(strategy="roundpipe", devices=3)
    assert isinstance(trainer.strategy, RoundPipeStrategy)
    assert trainer.strategy.num_workers == 3
    assert trainer.strategy.num_microbatches == 6
    assert trainer.world_size == 1
    assert trainer.strategy.launcher is None
    assert not trainer._accelerator_connector.is_distributed


# Flags of the Trainer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "error", "message"),
    [
        (
            {"num_nodes": 2},
            ConfigurationError,
            r"MASTER_ADDR is not set. Start one process on each",
        ),
        ({"sync_batchnorm": True}, ConfigurationError, r"Set Trainer\(sync_batchnorm=False\)"),
        ({"devices": 0}, MisconfigurationException, r"Trainer\(devices=0\)"),
        ({"precision": "7-true"}, ValueError, r"Precision '7-true' is invalid.*32-true"),
    ],
)
def test_flags_of_the_trainer(flags: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make_trainer(strategy="roundpipe", **flags)


def test_several_processes() -> None:
    class Launched(LightningEnvironment):
        def world_size(self) -> int:
            return 4

    with pytest.raises(ConfigurationError, match=r"4 processes were launched.*Trainer\(devices=N"):
        make_trainer(strategy="roundpipe", plugins=[Launched()])


# The strategy's own settings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_microbatches": 0}, "num_microbatches=0: give a whole number of 1 or more"),
        ({"num_microbatches": 2.5}, r"num_microbatches=2\.5"),
        ({"workers_per_device": 0}, "workers_per_device=0"),
        ({"timeout_seconds": 0}, "timeout_seconds=0: .* more than 0"),
        ({"plan": 3}, "plan=3: give a Plan, the path"),
        ({"plan": "/does/not/exist.json"}, r"plan='/does/not/exist\.json' does not exist"),
        ({"update": "later"}, "update='later': set 'exact' or 'async'"),
        ({"recompute": "some"}, "recompute='some': set 'auto', 'full', 'selective' or 'none'"),
        (
            {"recompute": "none", "hints": {"forward": [4]}},
            "partition.recompute=none has all blocks",
        ),
        ({"hardware": "8xrtx4090"}, "hardware='8xrtx4090' is not known. The nearest are .*rtx4090"),
        ({"hardware": 3}, "hardware=3: give a HardwareSpec, the name of a machine"),
        ({"loss": "own"}, "loss='own': set 'auto', 'fused' or 'eager'"),
    ],
)
def test_settings_of_the_strategy(settings: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RoundPipeStrategy(**settings)


def test_settings_are_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        RoundPipeStrategy(4)  # type: ignore[call-arg]


def test_blocks_that_do_not_exist() -> None:
    trainer = make_trainer(strategy=RoundPipeStrategy(blocks="model.layers"))
    with pytest.raises(ConfigurationError, match=r"model\.layers"):
        trainer.fit(_Steps(), regression_data())


# Modules -----------------------------------------------------------------------------------------


class _Several(_Steps):
    def configure_optimizers(self) -> Any:
        parts = (self.layers.parameters(), self.head.parameters())
        return [torch.optim.SGD(part, lr=0.1) for part in parts]


class _Searching(_Steps):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class _Captured(_Steps):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), capturable=True)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (_Several, {}, r"several optimizers.*automatic_optimization=False"),
        (_Searching, {"update": "async"}, r"LBFGS evaluates the loss within its step.*Leave these"),
        (_Captured, {}, r"AdamW\(capturable=True\) .* Leave capturable"),
    ],
)
def test_optimizers(kind: type[_Steps], settings: Any, message: str) -> None:
    strategy = RoundPipeStrategy(**settings)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(strategy=strategy).fit(kind(), regression_data())


def test_steps_that_fetch_their_own_batches() -> None:
    class Fetching(Regressor):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            pytest.fail("training has begun")

    strategy = RoundPipeStrategy(microbatching="step")
    with (
        pytest.raises(ConfigurationError, match=r"write training_step\(batch, batch_idx\)"),
        pytest.warns(UserWarning, match="dataloader_iter"),
    ):
        make_trainer(strategy=strategy).fit(Fetching(), regression_data())


# Plans -------------------------------------------------------------------------------------------


def _saved_plan(folder: Path, **flags: Any) -> Path:
    trainer = make_trainer(folder, strategy="roundpipe", max_steps=1, **flags)
    trainer.fit(Regressor(), regression_data())
    assert isinstance(trainer.strategy, RoundPipeStrategy)
    assert trainer.strategy.plan is not None
    path = folder / "plan.json"
    trainer.strategy.plan.save(path)
    return path


def test_plan_from_a_file_is_run(tmp_path: Path) -> None:
    path = _saved_plan(tmp_path, devices=2)
    strategy = RoundPipeStrategy(plan=path)
    make_trainer(strategy=strategy, devices=2).fit(Regressor(), regression_data())
    assert strategy.plan is not None
    assert strategy.plan.to_json() == path.read_text()
    assert strategy.num_microbatches == 4


def test_plan_for_other_workers_models_or_microbatches(tmp_path: Path) -> None:
    path = _saved_plan(tmp_path, devices=2)
    with pytest.raises(PlanError, match="for 2 workers, but the Trainer"):
        make_trainer(strategy=RoundPipeStrategy(plan=path), devices=3).fit(
            _Steps(), regression_data()
        )
    with pytest.raises(PlanError, match="plan is for 4 blocks, the model has 3"):
        make_trainer(strategy=RoundPipeStrategy(plan=path), devices=2).fit(
            _Steps(num_blocks=3), regression_data()
        )
    with pytest.raises(ConfigurationError, match="num_microbatches=3, but the plan is for 4"):
        RoundPipeStrategy(plan=path, num_microbatches=3)


# Batches -----------------------------------------------------------------------------------------


def test_batch_that_cannot_be_split() -> None:
    def collate(samples: Any) -> Any:
        x, y = (torch.stack(part) for part in zip(*samples, strict=True))
        return x, y[:-1]

    data = regression_data()
    data.collate_fn = collate
    strategy = RoundPipeStrategy(microbatching="step")
    with pytest.raises(BatchError, match="first dimensions of"):
        make_trainer(strategy=strategy).fit(_Steps(), data)


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


def _freeze_of_a_block(module: Any) -> None:
    module.layers[1].inner.requires_grad_(False)


def _exchange(module: Any) -> None:
    _thaw_a_member(module)
    _freeze(module)


def _trained(
    change: Callable[[Any], None], strategy: Any, make_optimizer: Callable[..., Any]
) -> LightningModule:
    class Partly(_Partly):
        def configure_optimizers(self) -> Any:
            return make_optimizer([p for n, p in self.named_parameters() if "other" not in n])

    class Changes(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, *args: Any) -> None:
            if args[1] == 2:
                change(module)

    seed_everything(1)
    module = Partly()
    trainer = make_trainer(strategy=strategy, max_epochs=2, callbacks=[Changes()])
    trainer.fit(module, regression_data())
    return module


@pytest.mark.parametrize(
    "make_optimizer", [partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.AdamW]
)
@pytest.mark.parametrize("strategy", [RoundPipeStrategy, EmulatedStrategy])
@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (_add, "'scale' needs a gradient, but no optimizer has it"),
        (_thaw_another, r"'other.weight' needs a gradient"),
        (_thaw_a_member, ""),
        (_freeze, ""),
        (_freeze_of_a_block, ""),
        (_exchange, ""),
    ],
)
def test_parameters_freeze_and_thaw_in_the_middle(
    change: Callable[[Any], None], warning: str, strategy: Any, make_optimizer: Any
) -> None:
    expected = _trained(change, "auto", make_optimizer)
    with pytest.warns(UserWarning, match=warning) if warning else nullcontext():
        module = _trained(change, strategy(num_microbatches=1), make_optimizer)
    assert same_bits(module, expected)


def test_a_module_may_say_by_itself_what_its_parameters_are() -> None:
    class OfHead(Regressor):
        def parameters(self, recurse: bool = True) -> Any:
            return self.head.parameters(recurse)

    trainer = make_trainer(strategy="roundpipe", max_epochs=1)
    trainer.fit(OfHead("sgd"), regression_data())
    assert trainer.global_step == 4


class _RunsBackward(Regressor):
    """Runs backward in its step, of its loss or of the head's part alone."""

    def __init__(self, run: Callable[[Any], None], *, of_head: bool) -> None:
        super().__init__("sgd")
        self.run, self.of_head = run, of_head

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.run(self.head(batch[0]).mean() if self.of_head else loss)
        return loss if self.of_head else None


@pytest.mark.parametrize("run", [torch.Tensor.backward, torch.autograd.backward])
@pytest.mark.parametrize("of_head", [False, True])
def test_a_step_that_runs_backward_itself(run: Any, of_head: bool) -> None:
    trainer = make_trainer(strategy="roundpipe", max_epochs=1)
    with pytest.raises(CaptureError, match=r"backward\(\).*automatic_optimization = False"):
        trainer.fit(_RunsBackward(run, of_head=of_head), regression_data())


@pytest.mark.parametrize("name", ["head.weight", "layers.1.outer.bias"])
def test_a_step_that_reads_gradients_of_the_batch_before(name: str) -> None:
    def read(module: Any, *_: Any) -> None:
        assert module.get_parameter(name).grad is None

    trainer = make_trainer(strategy="roundpipe", max_steps=2)
    with pytest.warns(UserWarning, match=r"reads a parameter's \.grad.*on_after_backward"):
        trainer.fit(Regressor(on_step=read), regression_data())


def test_a_step_that_clears_gradients_of_the_batch_before() -> None:
    def clear(module: Any, *_: Any) -> None:
        module.zero_grad()

    trainer = make_trainer(strategy="roundpipe", max_steps=2, accumulate_grad_batches=2)
    with pytest.warns(UserWarning, match=r"reads a parameter's \.grad"):
        trainer.fit(Regressor(on_step=clear), regression_data())
