import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.strategy.step import loss_with_gradients
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.comparison import assert_close, compare, on_each
from tests.kit.training import (
    Regressor,
    make_trainer,
    regression_data,
    train_alike,
    train_with,
)


class _Gradients(Regressor):
    """Notes gradients wherever a user may look at them, and changes some."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Tensor]] = []
        self.head.weight.register_hook(lambda gradient: gradient * 2)
        self.head.bias.register_post_accumulate_grad_hook(self._accumulated)

    def _note(self, where: str) -> None:
        gradient = self.head.weight.grad
        self.seen.append((where, torch.zeros(1) if gradient is None else gradient.clone()))

    def _accumulated(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.seen.append(("accumulated", parameter.grad.clone()))

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self._note("before zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(("before backward", loss.detach().clone().reshape(1)))

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 0.5).backward()

    def on_after_backward(self) -> None:
        self._note("after backward")

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self._note("before step")
        gradient = self.head.weight.grad
        assert gradient is not None
        gradient.mul_(0.9)

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self._note("before clipping")
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self._note("after clipping")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_in_hooks(accumulate: int) -> None:
    strategy = RoundPipeStrategy(num_microbatches=4)
    flags: Any = {"accumulate_grad_batches": accumulate, "max_epochs": 2}
    with pytest.warns(UserWarning, match=r"got 0\.5 times the loss of training_step"):
        one, many = train_alike(_Gradients, strategy, **flags)
    assert [where for where, _ in many.seen] == [where for where, _ in one.seen]
    for (where, expected), (_, value) in zip(one.seen, many.seen, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-6, msg=where)


class _LooksIn(Regressor):
    """Notes gradients in one hook that is called between two batches of a window."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.seen: list[Tensor | None] = []
        setattr(self, hook, self._note)

    def _note(self, *_: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        self.seen += [None if g is None else g.clone() for g in gradients]


@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
@pytest.mark.parametrize(
    "hook", ["on_train_batch_end", "on_train_batch_start", "on_validation_start"]
)
def test_gradients_between_the_batches_of_a_window(
    hook: str, kind: type[RoundPipeStrategy]
) -> None:
    (one, _), (many, _) = train_with(
        ["auto", kind(num_microbatches=2, microbatching="step")],
        lambda: _LooksIn(hook),
        validation=regression_data(8),
        accumulate_grad_batches=4,
        val_check_interval=2,
        max_epochs=2,
    )
    assert any(gradient is not None for gradient in one.seen)
    torch.testing.assert_close(many.seen, one.seen)


class _Holds(Regressor):
    """Counts its gradients before and in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_before: list[int] = []
        self.num_within: list[int] = []
        self.parts = {"whole": self.parameters}  # not those of a microbatch's view

    def _num_held(self) -> int:
        return sum(parameter.grad is not None for parameter in self.parts["whole"]())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.num_before.append(self._num_held())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_within.append(self._num_held())
        return super().training_step(batch, batch_idx)


class _Keeps(_Holds):
    """Lets some gradients stay for the next step."""

    def optimizer_zero_grad(self, *_: Any) -> None:
        self.head.zero_grad()


@pytest.mark.filterwarnings("ignore:The step, or another thread, writes num_within")
@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
@pytest.mark.parametrize("make", [_Holds, _Keeps])
def test_gradients_of_two_steps_are_held_only_where_they_are_wanted(
    kind: type[RoundPipeStrategy], make: type[_Holds]
) -> None:
    strategy = kind(num_microbatches=2, microbatching="step", dry_run=False)
    one, many = train_alike(make, strategy, max_steps=3)
    assert many.num_before == one.num_before
    assert any(many.num_before)
    assert any(many.num_within) is (make is _Keeps)


def test_parameters_without_a_gradient_keep_none() -> None:
    class Partial(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Linear(3, 3)
            self.head.bias.requires_grad_(False)

        def on_after_backward(self) -> None:
            assert self.unused.weight.grad is None
            assert self.head.bias.grad is None
            assert self.head.weight.grad is not None

    trainer = make_trainer(strategy="roundpipe", devices=2, max_epochs=1)
    trainer.fit(Partial(), regression_data())
    assert trainer.global_step == 4


# The graph of one node ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:backward.. got 3 times the loss")
@pytest.mark.parametrize("factor", [1, 3])
def test_held_gradients_are_handed_out_once_and_not_copied(factor: int) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    gradient = torch.ones(3)
    address = gradient.data_ptr()
    loss = loss_with_gradients(
        torch.tensor(2.0), gradients={parameter: gradient}, backward_scale=0.25
    )
    del gradient
    (factor * loss / 4).backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, factor * torch.ones(3))
    assert parameter.grad.data_ptr() == address
    again = loss_with_gradients(
        torch.tensor(2.0), gradients={parameter: torch.ones(3)}, backward_scale=1.0
    )
    again.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second time.*Call backward\(\) once"):
        again.backward()


# Called once per microbatch, so not as often as on one device; or no hooks.
PER_MICROBATCH = {"training_step", "forward"}
NO_HOOKS = {
    *("all_gather", "clip_gradients", "print", "freeze", "unfreeze", "manual_backward"),
    *("optimizers", "lr_schedulers", "toggle_optimizer", "untoggle_optimizer", "log", "log_dict"),
    *("toggled_optimizer", "save_hyperparameters", "from_datasets", "load_from_checkpoint"),
    *("to_onnx", "to_torchscript", "to_tensorrt", "configure_sharded_model"),
}


def hooks_of(kind: type, base: type = object) -> list[str]:
    inherited = set(dir(torch.nn.Module)) | set(dir(base)) - {"forward"}
    return [
        name
        for name in dir(kind)
        if callable(getattr(kind, name))
        and not name.startswith("_")
        and name not in inherited | NO_HOOKS | PER_MICROBATCH
    ]


def recording(kind: type, calls: list[str], names: list[str]) -> Any:
    """Return a subclass whose hooks note their names, then do what they always did."""

    def noted(name: str) -> Callable[..., Any]:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{kind.__name__}.{name}")
            return getattr(super(made, self), name)(*args, **kwargs)

        return hook

    made = type(kind.__name__, (kind,), {name: noted(name) for name in names})
    return made


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return regression_data(16)

    def val_dataloader(self) -> Any:
        return [regression_data(8), regression_data(4)]

    def test_dataloader(self) -> Any:
        return regression_data(8)

    def predict_dataloader(self) -> Any:
        return regression_data(12)


class Model(Regressor):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Plain(Callback):
    """A callback that does nothing."""


def _calls(folder: Path, strategy: Any, **flags: Any) -> list[str]:
    calls: list[str] = []
    torch.manual_seed(3)
    module = recording(Model, calls, hooks_of(LightningModule))()
    data = recording(Data, calls, hooks_of(LightningDataModule, LightningModule.__mro__[-2]))()
    callback = recording(Plain, calls, hooks_of(Callback))()
    devices = 1 if strategy == "auto" else 2
    trainer = make_trainer(
        folder,
        strategy=strategy,
        devices=devices,
        callbacks=[callback],
        **{"max_epochs": 2, "num_sanity_val_steps": 1, **flags},
    )
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(folder / "saved.ckpt")
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.test(module, datamodule=data, verbose=False, ckpt_path=folder / "saved.ckpt")
    trainer.predict(module, datamodule=data)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, datamodule=data, ckpt_path=folder / "saved.ckpt")
    return calls


FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "validation in the middle": {"val_check_interval": 1, "reload_dataloaders_every_n_epochs": 1},
    "a development run": {"fast_dev_run": True},
}


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.filterwarnings("ignore:You have overridden")
def test_all_hooks_in_order(tmp_path: Path, name: str) -> None:
    expected = _calls(tmp_path, "auto", **FLAGS[name])
    strategies = [RoundPipeStrategy(num_microbatches=2)]
    if name == "plain":
        strategies.append(EmulatedStrategy(num_microbatches=2))
    for strategy in strategies:
        assert _calls(tmp_path, strategy, **FLAGS[name]) == expected
    called = {call.partition(".")[2] for call in expected}
    assert {"setup", "teardown", "configure_model", "on_predict_batch_end"} <= called
    assert expected.count("Model.configure_model") == 5
    assert expected.count("Model.configure_optimizers") == 2


def test_training_step_is_called_once_per_microbatch() -> None:
    numbers: list[int] = []
    module = Regressor(on_step=lambda module, batch, batch_idx: numbers.append(batch_idx))
    strategy = RoundPipeStrategy(num_microbatches=4, microbatching="step", dry_run=False)
    make_trainer(strategy=strategy, max_epochs=1).fit(module, regression_data(16))
    assert sorted(numbers) == [0, 0, 0, 0, 1, 1, 1, 1]


# Lightning's callbacks ----------------------------------------------------------------------------


class Tunable(Regressor):
    """Has a learning rate and a batch size to be found, and a backbone to be thawed."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.05, 4

    @property
    def backbone(self) -> nn.Module:
        return self.layers

    def train_dataloader(self) -> Any:
        return regression_data(16, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return regression_data(8)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.lr, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Thaw(BaseFinetuning):
    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.layers)

    def finetune_function(
        self, pl_module: LightningModule, epoch: int, optimizer: Optimizer
    ) -> None:
        layers: Any = pl_module.layers
        if epoch:
            self.unfreeze_and_add_param_group(layers[-epoch], optimizer)


class Everything(Callback):
    """Logs from hooks of its own, and keeps learning rates and metrics of every batch."""

    log: Any  # Lightning lends both to callbacks
    log_dict: Any

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        norm = torch.stack([p.detach().norm() for p in pl_module.parameters()]).norm()
        self.log("norm", norm, on_step=True, on_epoch=True)
        self.log("largest_norm", norm, reduce_fx=torch.max, on_step=False, on_epoch=True)
        rates = {f"lr_{i}": g["lr"] for i, g in enumerate(trainer.optimizers[0].param_groups)}
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        self.seen.append({**rates, **metrics, "windows": float(trainer.accumulate_grad_batches)})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.log("epoch_norm", pl_module.head.weight.norm())

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.log_dict({"a": 1.5, "b": float(trainer.global_step)})


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "BackboneFinetuning": lambda: BackboneFinetuning(1, initial_denom_lr=2.0),
    "BaseFinetuning": Thaw,
    "BatchSizeFinder": lambda: BatchSizeFinder(max_trials=1, steps_per_trial=1),
    "EarlyStopping": lambda: EarlyStopping("val_loss", min_delta=0.05, patience=1),
    "GradientAccumulationScheduler": lambda: GradientAccumulationScheduler({0: 3, 1: 2, 2: 1}),
    "LearningRateFinder": lambda: LearningRateFinder(num_training_steps=6, max_lr=0.2),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1),
    "EMAWeightAveraging": lambda: EMAWeightAveraging(decay=0.8),
    "WeightAveraging": WeightAveraging,
}
WATCHING: dict[str, Callable[[], Callback]] = {
    "DeviceStatsMonitor": DeviceStatsMonitor,
    "LambdaCallback": lambda: LambdaCallback(on_train_epoch_start=lambda *_: None),
    "LearningRateMonitor": LearningRateMonitor,
    "RichModelSummary": RichModelSummary,
    "RichProgressBar": RichProgressBar,
    "SpikeDetection": lambda: SpikeDetection(window=3, warmup=3, finite_only=True),
    "ThroughputMonitor": lambda: ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0])),
    "Timer": lambda: Timer(timedelta(hours=1)),
}
ON_DEVICES = ("BaseFinetuning", "LearningRateFinder")
OTHERS = {
    *("Callback", "Checkpoint", "ProgressBar"),  # base classes
    *("ModelSummary", "TQDMProgressBar"),  # of which a Trainer has one, as of those with colours
    *("BasePredictionWriter", "ModelCheckpoint", "ModelPruning", "OnExceptionCheckpoint"),
}


def test_none_is_missing() -> None:
    names = set(lightning.pytorch.callbacks.__all__)
    assert {*CALLBACKS, *WATCHING, *OTHERS} == names


@pytest.mark.long("BackboneFinetuning", "WeightAveraging")
@pytest.mark.parametrize("name", [*CALLBACKS, "all that watch", "plain"])
@pytest.mark.filterwarnings("ignore:When using the `ThroughputMonitor`")
def test_parameters_metrics_and_learning_rates(tmp_path: Path, name: str) -> None:
    watches = name == "all that watch"
    kinds = list(WATCHING.values()) if watches else [CALLBACKS[name]] if name in CALLBACKS else []

    def run(trainer: Trainer, module: Tunable) -> Any:
        trainer.fit(module)
        (noted,) = (c for c in trainer.callbacks if isinstance(c, Everything))  # type: ignore[attr-defined]
        return [float(module.lr), float(module.batch_size)], noted.seen

    one, *others = compare(
        Tunable,
        run,
        kinds=[RoundPipeStrategy, *([EmulatedStrategy] if name in ON_DEVICES else [])],
        tolerance=1e-4,
        max_epochs=3,
        callbacks=lambda: [*(make() for make in kinds), Everything()],
        logger=lambda: CSVLogger(tmp_path),
        enable_progress_bar=watches or name == "plain",
        enable_model_summary=watches or name == "plain",
    )
    for other in others:
        assert_close(other.result, one.result, tolerance=1e-3)


class Uploads(DummyLogger):
    """Reads every checkpoint that it is given, as loggers do that upload them."""

    def __init__(self) -> None:
        super().__init__()
        self.uploaded: list[str] = []
        self.sizes: list[int] = []

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        for path in checkpoint_callback.best_k_models or {checkpoint_callback.last_model_path: 0}:
            self.sizes.append(len(torch.load(path)["state_dict"]))
            self.uploaded.append(Path(path).name)


def test_loggers_find_the_checkpoints_that_were_chosen(tmp_path: Path) -> None:
    def run(trainer: Trainer, module: Tunable) -> Any:
        trainer.fit(module)
        chooser: Any = trainer.checkpoint_callback
        logger: Any = trainer.logger
        kept = sorted(path.name for path in Path(chooser.dirpath).iterdir())
        return logger.uploaded, logger.sizes, kept, Path(chooser.best_model_path).name

    folders = (str(number) for number in range(2))
    one, other = compare(
        Tunable,
        run,
        callbacks=lambda: [
            ModelCheckpoint(
                tmp_path / next(folders), monitor="val_loss", save_top_k=2, filename="{epoch}"
            )
        ],
        enable_checkpointing=True,
        logger=Uploads,
        max_epochs=4,
    )
    assert other.result == one.result
    assert len(one.result[0]) >= 4
    assert len(one.result[2]) == 2


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *rest: Any) -> None:
        indices, _, number, _ = rest
        self.written.append([number, list(indices), prediction])

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append([indices, list(predictions)])


def test_predictions_are_written_whole_and_in_order() -> None:
    def run(trainer: Trainer, module: Any) -> Any:
        trainer.predict(module, regression_data(19), return_predictions=False)
        (writer,) = (c for c in trainer.callbacks if isinstance(c, Writer))  # type: ignore[attr-defined]
        return writer.written

    kinds = (RoundPipeStrategy, EmulatedStrategy)
    one, *others = compare(Regressor, run, kinds=kinds, devices=3, callbacks=lambda: [Writer()])
    for other in others:
        assert_close(other.result, one.result, tolerance=0.0)
    rows = [list(range(8)), list(range(8, 16)), list(range(16, 19))]
    assert [part[1] for part in one.result[:-1]] == rows


@pytest.mark.filterwarnings("ignore:Block 'layers.1' runs on the whole batch")
@pytest.mark.parametrize("where", ["head", "layers.1.inner"])
def test_pruning(where: str) -> None:
    """Pruning puts a mask before a parameter, which is another one then."""

    def run(trainer: Trainer, module: Any) -> float:
        pruned = [(module.get_submodule(where), "weight")]
        pruning = ModelPruning("l1_unstructured", parameters_to_prune=pruned, amount=0.5)
        trainer.callbacks.append(pruning)  # type: ignore[attr-defined]
        trainer.fit(module, regression_data())
        return float((module.get_submodule(where).weight == 0).float().mean())

    assert compare(Regressor, run, max_epochs=2)[1].result > 0.4


def test_spikes_are_found(tmp_path: Path) -> None:
    class Spiking(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if batch_idx == 2 else loss

    def run(trainer: Trainer, module: Any) -> int:
        with pytest.raises(TrainingSpikeException):
            trainer.fit(module, regression_data())
        return trainer.global_step

    logging.getLogger("lightning").setLevel("ERROR")
    found = on_each(
        Spiking,
        run,
        callbacks=lambda: [SpikeDetection(window=2, warmup=1, exclude_batches_path=tmp_path / "x")],
    )
    assert [outcome.result for outcome in found] == [3, 3]
