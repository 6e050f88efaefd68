import inspect
import os
import re
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch.callbacks
import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn

from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.comparison import assert_close, compare, fit
from tests.kit.training import WIDTH, Regressor, make_trainer, regression_data, same_bits

# Names and what belongs to whom ------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["roundpipe", RoundPipeStrategy(num_microbatches=2)])
def test_module_and_trainer_know_each_other(tmp_path: Path, strategy: Any) -> None:
    module = Regressor()
    trainer = make_trainer(tmp_path, strategy=strategy, max_epochs=1)
    trainer.fit(module, regression_data(16))
    assert trainer.model is trainer.strategy.model is module
    assert trainer.lightning_module is trainer.strategy.lightning_module is module
    assert trainer.optimizers == trainer.strategy.optimizers
    assert module.trainer is trainer
    assert not trainer.is_global_zero or trainer.global_rank == trainer.local_rank == 0
    assert trainer.strategy.checkpoint_io is trainer.strategy.checkpoint_io
    assert module.device == torch.device("cpu")


def test_layers_are_made_in_configure_model(tmp_path: Path) -> None:
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

    assert [outcome.result for outcome in compare(tmp_path, Late, run)] == [1, 1]


# Ends --------------------------------------------------------------------------------------------


def test_training_ends_when_it_is_told_to(tmp_path: Path) -> None:
    class Stop(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.should_stop |= trainer.global_step == 5

    options: dict[str, Any] = {"callbacks": lambda: [Stop()], "max_epochs": 5, "min_steps": 2}
    assert compare(tmp_path, Regressor, tolerance=1e-4, **options)[1].trainer.global_step == 5


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
    trainer = make_trainer(tmp_path, strategy=strategy, plugins=[plugin], max_epochs=1)
    trainer.fit(Signalled(), regression_data())
    assert signal.getsignal(signal.SIGUSR1) == before
    saved = torch.load(tmp_path / "hpc_ckpt_1.ckpt")
    assert saved["global_step"] in (1, 2)

    again = make_trainer(
        tmp_path,
        strategy=RoundPipeStrategy(num_microbatches=2),
        plugins=[SLURMEnvironment(auto_requeue=False)],
        max_epochs=1,
    )
    again.fit(Regressor(), regression_data())
    assert again.global_step == 4


# Checkpoints -------------------------------------------------------------------------------------


def test_weights_alone_and_missing_ones(tmp_path: Path) -> None:
    module = Regressor()
    trainer = make_trainer(tmp_path, strategy="roundpipe", max_epochs=1)
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
        trainer = make_trainer(tmp_path, strategy=strategy)
        with pytest.raises((RuntimeError, CheckpointError), match=r"(?s)[Mm]issing.*more\.weight"):
            trainer.validate(strict, regression_data(8), ckpt_path=tmp_path / "weights.ckpt")
    lenient = More()
    lenient.strict_loading = False
    trainer = make_trainer(tmp_path, strategy="roundpipe")
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
def test_modes_of_evaluation(tmp_path: Path, inference_mode: bool) -> None:
    def run(trainer: Trainer, module: Any) -> Any:
        trainer.validate(module, regression_data(8), verbose=False)
        trainer.fit(module, regression_data(16), regression_data(8))
        trainer.predict(module, regression_data(8))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, regression_data(16), regression_data(8))

    one, _ = compare(tmp_path, _Modes, run, inference_mode=inference_mode)
    assert one.module.seen[0] == ("val", inference_mode, False, False)


def test_a_profiler_counts_a_step_once(tmp_path: Path) -> None:
    def counts(trainer: Trainer, module: Any) -> int:
        fit(trainer, module)
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        name = f"[Strategy]{type(trainer.strategy).__name__}.training_step"
        return len(profiler.recorded_durations[name])

    found = compare(tmp_path, Regressor, counts, profiler=SimpleProfiler)
    assert [outcome.result for outcome in found] == [2, 2]


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomalies_are_found_where_they_arise(tmp_path: Path) -> None:
    class Bad(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (self(batch[0]) * 0).sqrt().sum() * 0  # its gradient is no number

    for strategy in ("auto", "roundpipe"):
        trainer = make_trainer(tmp_path, strategy=strategy, detect_anomaly=True, max_epochs=1)
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


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule")
@pytest.mark.filterwarnings("ignore:Block 'layers.0' runs on the whole batch")  # profilers hook
def test_flags_that_change_nothing(tmp_path: Path, name: str) -> None:
    compare(tmp_path, Regressor, **FLAGS[name])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("wrapped", [False, True])
def test_compiled_parts_are_trained(
    tmp_path: Path, wrapped: bool, caplog: pytest.LogCaptureFixture
) -> None:
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
    compare(tmp_path, Compiled)
    assert "'layers.0' and others went through torch.compile" in caplog.text
    assert "without values" not in caplog.text  # the step was measured


# Parameters while a step is in flight ------------------------------------------------------------


class _Reader(Callback):
    """Reads parameters, gradients and optimizer states wherever it may."""

    def __init__(self) -> None:
        self.read: list[Any] = []

    def _read(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        optimizer = trainer.optimizers[0]
        moments = [state["momentum_buffer"] for state in optimizer.state.values() if state]
        values = [*module.parameters(), *module.state_dict().values(), *moments]
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.read.append(
            (
                module._current_fx_name,
                *(float(sum(v.detach().double().sum() for v in x)) for x in (values, gradients)),
            )
        )

    on_before_zero_grad = on_before_backward = on_before_optimizer_step = _read  # type: ignore[assignment]
    on_train_batch_start = on_train_batch_end = on_validation_start = _read  # type: ignore[assignment]


def test_callbacks_read_the_values_of_the_moment(tmp_path: Path) -> None:
    def read(trainer: Trainer, module: Any) -> Any:
        reader = next(c for c in trainer.callbacks if isinstance(c, _Reader))  # type: ignore[attr-defined]
        trainer.fit(module, regression_data(24), regression_data(8))
        return reader.read

    kinds = (RoundPipeStrategy, EmulatedStrategy)
    one, *others = compare(tmp_path, Regressor, read, kinds=kinds, callbacks=lambda: [_Reader()])
    for other in others:
        assert_close(other.result, one.result, tolerance=1e-4)


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
