import inspect
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks
import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from roundpipe_lightning.errors import BatchError, CheckpointError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.comparison import assert_close, compare, fit
from tests.kit.training import WIDTH, Regressor, make_trainer, regression_data, same_bits

# Names and what belongs to whom ------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["roundpipe", RoundPipeStrategy(num_microbatches=2)])
def test_module_and_trainer_know_each_other(strategy: Any) -> None:
    module = Regressor()
    trainer = make_trainer(strategy=strategy, max_epochs=1)
    trainer.fit(module, regression_data(16))
    assert trainer.model is trainer.strategy.model is module
    assert trainer.lightning_module is trainer.strategy.lightning_module is module
    assert trainer.optimizers == trainer.strategy.optimizers
    assert module.trainer is trainer
    assert not trainer.is_global_zero or trainer.global_rank == trainer.local_rank == 0
    assert trainer.strategy.checkpoint_io is trainer.strategy.checkpoint_io
    assert module.device == torch.device("cpu")


def test_layers_are_made_in_configure_model() -> None:
    class Late(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.made = nn.ModuleList(), 0

        def configure_model(self) -> None:
            if not len(self.layers):
                self.made += 1
                self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def run(trainer: Trainer, module: Any) -> int:
        trainer.fit(module, regression_data(16))
        trainer.validate(module, regression_data(8), verbose=False)
        return int(module.made)

    assert [outcome.result for outcome in compare(Late, run)] == [1, 1]


# Ends --------------------------------------------------------------------------------------------


def test_training_ends_when_it_is_told_to() -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.should_stop |= trainer.global_step == 5

    options: dict[str, Any] = {"callbacks": lambda: [Stop()], "max_epochs": 5, "min_steps": 2}
    assert compare(Regressor, tolerance=1e-4, **options)[1].trainer.global_step == 5


def test_slurm_signals_save_and_requeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives within a step; the checkpoint is that of a batch's end, and is resumed."""
    numbers = dict.fromkeys(("NODEID", "LOCALID", "PROCID"), "0")
    for name, value in {**numbers, "NTASKS": "1", "JOB_NAME": "train", "JOB_ID": "7"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr("subprocess.call", lambda *_, **__: 0)

    def signalled(module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and not module.sent:
            module.sent = True
            os.kill(os.getpid(), signal.SIGUSR1)

    class Signalled(Regressor):
        def __init__(self) -> None:
            super().__init__(on_step=signalled)
            self.sent = False

    strategy = RoundPipeStrategy(num_microbatches=2, dry_run=False)
    plugin = SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1)
    before = signal.getsignal(signal.SIGUSR1)
    trainer = make_trainer(strategy=strategy, plugins=[plugin], max_epochs=1)
    trainer.fit(Signalled(), regression_data())
    assert signal.getsignal(signal.SIGUSR1) == before
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt")
    assert saved["global_step"] in (1, 2)

    again = make_trainer(
        strategy=RoundPipeStrategy(num_microbatches=2),
        plugins=[SLURMEnvironment(auto_requeue=False)],
        max_epochs=1,
    )
    again.fit(Regressor(), regression_data())
    assert again.global_step == 4


# Checkpoints -------------------------------------------------------------------------------------


def test_weights_alone_and_missing_ones(tmp_path: Path) -> None:
    module = Regressor()
    trainer = make_trainer(strategy="roundpipe", max_epochs=1)
    trainer.fit(module, regression_data(16))
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "weights.ckpt")
    assert not {"optimizer_states", "roundpipe"} & set(saved)
    assert saved["state_dict"].keys() == module.state_dict().keys()

    class More(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Linear(2, 2)

    strict = More()
    for strategy in ("auto", "roundpipe"):
        trainer = make_trainer(strategy=strategy)
        with pytest.raises((RuntimeError, CheckpointError), match=r"(?s)[Mm]issing.*more\.weight"):
            trainer.validate(strict, regression_data(8), ckpt_path=tmp_path / "weights.ckpt")
    lenient = More()
    lenient.strict_loading = False
    trainer = make_trainer(strategy="roundpipe")
    trainer.validate(lenient, regression_data(8), ckpt_path=tmp_path / "weights.ckpt")
    assert torch.equal(lenient.head.weight, module.head.weight)
    loaded = Regressor.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert same_bits(loaded, module)


# Flags -------------------------------------------------------------------------------------------


class _Modes(Regressor):
    """Notes under which modes its evaluation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, bool, bool, bool]] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inference, gradient = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.seen.append(("val", inference, gradient, self.training))
        super().validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.enable_grad():
            inference, gradient = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.seen.append(("predict", inference, gradient, self.training))
        return super().predict_step(batch, batch_idx)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_modes_of_evaluation(inference_mode: bool) -> None:
    def run(trainer: Trainer, module: Any) -> Any:
        trainer.validate(module, regression_data(8), verbose=False)
        trainer.fit(module, regression_data(16), regression_data(8))
        trainer.predict(module, regression_data(8))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, regression_data(16), regression_data(8))

    one, _ = compare(_Modes, run, inference_mode=inference_mode)
    assert one.module.seen[0] == ("val", inference_mode, False, False)


def test_a_profiler_counts_a_step_once() -> None:
    def counts(trainer: Trainer, module: Any) -> int:
        fit(trainer, module)
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        name = f"[Strategy]{type(trainer.strategy).__name__}.training_step"
        return len(profiler.recorded_durations[name])

    found = compare(Regressor, counts, profiler=SimpleProfiler)
    assert [outcome.result for outcome in found] == [2, 2]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomalies_are_found_where_they_arise() -> None:
    class Bad(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self(batch[0]) * 0).sqrt().sum() * 0  # its gradient is no number

    for strategy in ("auto", "roundpipe"):
        trainer = make_trainer(strategy=strategy, detect_anomaly=True, max_epochs=1)
        with pytest.raises(RuntimeError, match=r"returned nan values in its 0th output"):
            trainer.fit(Bad(), regression_data(16))
        assert not torch.is_anomaly_enabled()


BARE = (
    *("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    "log_every_n_steps",
)

FLAGS: dict[str, dict[str, Any]] = {
    "barebones": {"barebones": True, **dict.fromkeys(BARE)},
    "deterministic": {"deterministic": True},
    "deterministic with warnings": {"deterministic": "warn"},
    "benchmark": {"benchmark": True},
    "hyper-parameters": {"enable_autolog_hparams": False, "model_registry": "name"},
    "summary and bar": {"enable_progress_bar": True, "enable_model_summary": True},
    **{f"{name} profiler": {"profiler": name} for name in ("simple", "advanced", "pytorch")},
}


@pytest.mark.suite("barebones", "deterministic", "summary and bar", "advanced profiler")
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
@pytest.mark.filterwarnings("ignore:Block 'layers.0' runs on the whole batch")  # profilers hook
def test_flags_that_change_nothing(name: str) -> None:
    compare(Regressor, **FLAGS[name])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled_parts_are_trained(wrapped: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A compiled wrapper keeps the module, which must not be mistaken for its view."""

    class Compiled(Regressor):
        def __init__(self) -> None:
            super().__init__()
            for index, layer in enumerate(self.layers):
                if wrapped:
                    compiled: Any = torch.compile(layer, backend="eager")
                    self.layers[index] = compiled
                else:
                    layer.compile(backend="eager")

    caplog.set_level("INFO", logger="lightning_utilities.core.rank_zero")
    compare(Compiled)
    assert "'layers.0' and others went through torch.compile" in caplog.text
    assert "without values" not in caplog.text  # the step was measured


# Parameters while a step is in flight ------------------------------------------------------------


PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"


def rows(heading: str) -> dict[str, str]:
    """The first table below a heading: what its first column names, and the second."""
    section = PAGE.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    pairs = [re.fullmatch(r"\| `(\w+)` \| (.+) \|", line) for line in lines]
    assert all(pairs), lines
    names = [pair[1] for pair in pairs if pair]
    assert len(set(names)) == len(names)
    return {pair[1]: pair[2] for pair in pairs if pair}


def test_every_flag_of_the_trainer() -> None:
    flags = list(inspect.signature(Trainer).parameters)
    assert list(rows("Trainer flags")) == flags


def test_every_callback() -> None:
    assert list(rows("Callbacks")) == list(lightning.pytorch.callbacks.__all__)


# Data ---------------------------------------------------------------------------------------------


class Combined(Regressor):
    """Learns from every loader that gave a batch, and notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        parts = batch.values() if isinstance(batch, dict) else batch
        self.seen.append((batch_idx, [None if part is None else len(part[0]) for part in parts]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch.values() if isinstance(batch, dict) else batch
        losses = [functional.mse_loss(self(x), y) for x, y in (p for p in parts if p is not None)]
        loss = torch.stack(losses).sum()
        size = sum(len(part[0]) for part in parts if part is not None)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=size)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(("val", batch_idx, dataloader_idx))
        x, y = batch if not isinstance(batch, dict) else batch["a"] or batch["b"]
        self.log("val_loss", functional.mse_loss(self(x), y), batch_size=len(x))
        only = f"only_{dataloader_idx}"
        self.log(only, functional.l1_loss(self(x), y), batch_size=len(x), add_dataloader_idx=False)


@pytest.mark.suite("max_size_cycle-6-auto", "min_size-8-2", "max_size-8-1", "max_size-6-2")
@pytest.mark.parametrize(
    ("mode", "other", "num_microbatches"),
    [
        *((mode, 8, num) for mode in ("min_size", "max_size_cycle", "max_size") for num in (1, 2)),
        *((mode, 6, num) for mode in ("max_size_cycle", "max_size") for num in (2, "auto")),
    ],
)
def test_combined_loaders(mode: Any, other: int, num_microbatches: Any) -> None:
    """Of the same batch size, or of another one."""

    def fit(trainer: Trainer, module: Any) -> None:
        loaders = {"a": regression_data(24), "b": regression_data(2 * other, batch_size=other)}
        validation = {"a": regression_data(8), "b": regression_data(8, batch_size=2)}
        trainer.fit(module, CombinedLoader(loaders, mode), CombinedLoader(validation, mode))

    compare(Combined, fit, num_microbatches=num_microbatches, max_epochs=2)


def test_parts_that_cannot_be_divided_alike() -> None:
    loaders = [regression_data(8), regression_data(5, batch_size=5)]
    strategy = RoundPipeStrategy(num_microbatches=2, microbatching="step")
    trainer = make_trainer(strategy=strategy, devices=2)
    with pytest.raises(BatchError, match=r"first dimensions of \[5, 8\].*microbatching='blocks'"):
        trainer.fit(Combined(), CombinedLoader(loaders, "min_size"))


def test_loaders_one_after_the_other() -> None:
    """Lightning has this mode for evaluation only."""

    def run(trainer: Trainer, module: Any) -> Any:
        loaders = {"a": regression_data(12), "b": regression_data(4)}
        with pytest.raises(ValueError, match=r"does not support .*sequential"):
            trainer.fit(module, CombinedLoader(loaders, "sequential"))
        trainer.fit(module, [regression_data(8)], CombinedLoader(loaders, "sequential"))

    compare(Combined, run, num_microbatches=2)


def test_several_validation_loaders_and_predictions_in_order() -> None:
    class Predicting(Combined):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step([batch], batch_idx)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            pass

        def predict_step(  # type: ignore[override]
            self, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> dict[str, Any]:
            return {"y": self(batch[0]), "place": (dataloader_idx, batch_idx)}

    def run(trainer: Trainer, module: Any) -> Any:
        trainer.fit(module, regression_data(), [regression_data(8), regression_data(13)])
        return trainer.predict(module, [regression_data(9), regression_data(17, batch_size=3)])

    kinds = (RoundPipeStrategy, EmulatedStrategy)
    one, *others = compare(Predicting, run, kinds=kinds, num_microbatches=2)
    assert [[p["place"] for p in part] for part in one.result] == [
        [(0, 0), (0, 1)],
        [(1, index) for index in range(6)],
    ]
    for other in others:
        assert_close(other.result, one.result, tolerance=1e-4)
        assert all(p["y"].device.type == "cpu" for part in other.result for p in part)


class Fetching(Regressor):
    """Takes two batches a step; the loader ends within one."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        (x, y), _, _ = next(dataloader_iter)
        first = functional.mse_loss(self(x), y)
        (x, y), _, _ = next(dataloader_iter)
        loss = functional.mse_loss(self(x), y) + first
        with pytest.raises(MisconfigurationException, match="batch_size"):
            self.log("loss", loss)
        self.log("loss", loss, batch_size=len(x))
        return loss


@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
def test_steps_that_fetch_their_own_batches() -> None:
    def fit(trainer: Trainer, module: Any) -> None:
        trainer.fit(module, regression_data(20))  # five batches

    compare(Fetching, fit, num_microbatches=2, max_epochs=2)


class _Stream(IterableDataset[Any]):
    """Samples without a known number."""

    def __iter__(self) -> Iterator[Any]:
        data: Any = regression_data(27).dataset
        return (data[index] for index in range(len(data)))


def test_data_without_a_length() -> None:
    def fit(trainer: Trainer, module: Any) -> None:
        trainer.fit(module, DataLoader(_Stream(), batch_size=8), regression_data(8))

    compare(Regressor, fit, val_check_interval=2, max_steps=7, max_epochs=-1)


class _Module(LightningDataModule):
    """Grows by a batch whenever its training loader is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.stages: list[str] = []

    def setup(self, stage: str) -> None:
        self.stages.append(stage)

    def train_dataloader(self) -> Any:
        self.made += 1
        return regression_data(8 * self.made)

    def val_dataloader(self) -> Any:
        return regression_data(8)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [part * 1.5 for part in batch]


def test_loaders_that_are_made_anew() -> None:
    def run(trainer: Trainer, module: Any) -> Any:
        data = _Module()
        trainer.fit(module, datamodule=data)
        trainer.validate(module, datamodule=data, verbose=False)
        return data.made, data.stages, data.trainer is trainer

    options: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 3}
    for outcome in compare(Regressor, run, num_microbatches=2, **options):
        assert outcome.result == (3, ["fit", "validate"], True)


class _Position(Callback):
    """Saves in the middle of an epoch, and notes which samples are trained on."""

    def __init__(self, path: Path, *, save_after: int | None) -> None:
        self.path = path
        self.save_after = save_after
        self.samples: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self.samples += batch[0][:, 0].tolist()
        if trainer.global_step == self.save_after:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stateful_loader_goes_on_where_it_was(tmp_path: Path, num_workers: int) -> None:
    """torchdata's loader: a resumed run trains on the samples that were left, each once."""

    def loader() -> Any:
        data: Any = regression_data(32).dataset
        return StatefulDataLoader(data, batch_size=8, shuffle=True, num_workers=num_workers)

    runs: list[list[float]] = []
    for make in (lambda: "auto", lambda: RoundPipeStrategy(num_microbatches=2)):
        torch.manual_seed(3)
        path = tmp_path / f"{len(runs)}.ckpt"
        whole = _Position(path, save_after=2)
        trainer = make_trainer(strategy=make(), callbacks=[whole], max_epochs=1)
        trainer.fit(Regressor(), loader())
        torch.manual_seed(4)
        rest = _Position(path, save_after=None)
        trainer = make_trainer(strategy=make(), callbacks=[rest], max_epochs=1)
        trainer.fit(Regressor(), loader(), ckpt_path=path)
        assert rest.samples == whole.samples[16:]
        runs.append(whole.samples)
    assert runs[1] == runs[0]
    assert len(set(runs[0])) == 32


LIMITS: dict[str, dict[str, Any]] = {
    "batches": {"limit_train_batches": 3, "limit_val_batches": 1, "num_sanity_val_steps": 0},
    "shares": {"limit_train_batches": 0.5, "limit_val_batches": 0.5, "num_sanity_val_steps": -1},
    "no validation": {"limit_val_batches": 0, "use_distributed_sampler": False},
    "validation at shares of an epoch": {
        "val_check_interval": 0.5, "min_epochs": 2, "max_epochs": 3,
    },
    "validation every third batch": {
        "val_check_interval": 3, "check_val_every_n_epoch": None, "min_steps": 6, "max_epochs": 3,
    },
    "validation every second epoch": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "the same batches again": {"overfit_batches": 2},
    "a share of the batches again": {"overfit_batches": 0.5},
    "a development run": {"fast_dev_run": 3},
    "steps": {"max_steps": 5, "max_epochs": -1},
    "no epoch": {"max_epochs": 0},
    "windows that end early": {"accumulate_grad_batches": 3, "limit_train_batches": 4},
    "tests and predictions": {"limit_test_batches": 2, "limit_predict_batches": 3},
}  # fmt: skip


@pytest.mark.suite(
    "validation at shares of an epoch",
    "validation every third batch",
    "windows that end early",
    "steps",
    "a share of the batches again",
    "no epoch",
    "a development run",
)
@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_limits(name: str) -> None:
    class Counting(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.seen.append(("train", batch_idx, float(batch[0].sum())))

        def on_validation_batch_start(
            self, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            self.seen.append(("val", batch_idx))

    def run(trainer: Trainer, module: Any) -> int:
        trainer.fit(module, regression_data(shuffle=True), regression_data(12))
        if name != "tests and predictions":
            return 3
        trainer.test(module, regression_data(), verbose=False)
        return len(trainer.predict(module, regression_data()) or ())

    options = {"max_epochs": 2, **LIMITS[name]}
    for outcome in compare(Counting, run, num_microbatches=2, **options):
        assert outcome.result == 3
