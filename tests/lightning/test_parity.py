import copy
import importlib
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import backend_registration
from torch.utils.data import DataLoader

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.errors import CaptureError, ConfigurationError
from roundpipe_lightning.strategy.strategy import NoBlocksWarning
from roundpipe_lightning.testing import EmulatedStrategy, assert_trains_as_one_device
from tests.emulation.test_benchmark import BENCHMARKS
from tests.kit.training import (
    WIDTH,
    Block,
    LanguageModel,
    PaddedSequences,
    Regressor,
    make_trainer,
    parameter_error,
    regression_data,
    same_bits,
    train_alike,
    train_with,
)

TOLERANCE = {"sgd": 1e-5, "adamw": 1e-3}


def fit(strategy: Any, module: LightningModule, data: Any, **flags: Any) -> Trainer:
    trainer = make_trainer(strategy=strategy, **flags)
    trainer.fit(module, data)
    return trainer


@pytest.mark.suite("sgd-4-8", "adamw-2-auto", "sgd-1-1")
@pytest.mark.parametrize(
    ("optimizer", "devices", "num_microbatches"),
    [("sgd", 1, 1), ("adamw", 1, 3), ("sgd", 2, "auto"), ("adamw", 2, "auto"), ("sgd", 4, 8)],
)
def test_20_steps_on_padded_batches(optimizer: str, devices: int, num_microbatches: Any) -> None:
    data = DataLoader(PaddedSequences(32), batch_size=8)
    ours = RoundPipeStrategy(num_microbatches=num_microbatches)
    ((expected, one),) = train_with(["auto"], lambda: LanguageModel(optimizer), data, max_epochs=5)
    ((module, many),) = train_with(
        [ours], lambda: LanguageModel(optimizer), data, max_epochs=5, devices=devices
    )
    assert one.global_step == many.global_step == 20
    assert parameter_error(module, expected) < TOLERANCE[optimizer]
    for key, value in one.callback_metrics.items():
        torch.testing.assert_close(many.callback_metrics[key], value, rtol=1e-5, atol=1e-6)


def test_number_of_workers_changes_no_bit() -> None:
    modules = []
    for devices, per_device in ((1, 1), (2, 1), (2, 2), (4, 1)):
        torch.manual_seed(3)
        module = Regressor("adamw", dropout=0.3)
        strategy = RoundPipeStrategy(num_microbatches=4, workers_per_device=per_device)
        fit(strategy, module, regression_data(shuffle=True), devices=devices)
        modules.append(module)
        assert strategy.num_workers == devices * per_device
    assert all(same_bits(module, modules[0]) for module in modules)


def test_a_scheduler_that_follows_a_metric() -> None:
    class Scheduled(Regressor):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=0)
            return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]

    runs = train_with(["auto", RoundPipeStrategy()], Scheduled, validation=regression_data(8))
    rates = [trainer.optimizers[0].param_groups[0]["lr"] for _, trainer in runs]
    assert rates[1] == rates[0] < 0.05
    assert parameter_error(runs[1][0], runs[0][0]) < 1e-5


class _Normalised(Regressor):
    """Has layers with running statistics, inside and outside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.BatchNorm1d(8)
        for layer in self.layers:
            assert isinstance(layer, Block)
            layer.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.before(x))


def test_running_statistics_of_one_microbatch_and_the_pass_of_weight_averaging() -> None:
    runs = train_with(
        ["auto", *(kind(num_microbatches=1) for kind in (RoundPipeStrategy, EmulatedStrategy))],
        _Normalised,
        callbacks=lambda: [StochasticWeightAveraging(0.02, swa_epoch_start=1)],
    )
    for module, _ in runs[1:]:
        torch.testing.assert_close(module.state_dict(), runs[0][0].state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"num_microbatches": 4, "microbatching": "step"}])
def test_last_batch_smaller_than_the_number_of_microbatches(options: dict[str, Any]) -> None:
    ours = RoundPipeStrategy(**options)
    train_alike(Regressor, ours, data=regression_data(9))
    assert ours.num_microbatches == 4
    assert ours.last_step is not None
    assert ours.last_step.plan.num_microbatches == 1


def test_first_batch_smaller_than_wanted_limits_the_number_of_microbatches() -> None:
    strategy = RoundPipeStrategy()
    fit(strategy, Regressor(), regression_data(8, batch_size=2), devices=2, max_epochs=1)
    assert strategy.num_microbatches == 2
    assert strategy.plan is not None
    assert strategy.plan.num_workers == 2


def test_model_without_blocks_trains_as_one_stage() -> None:
    class OneLayer(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    with pytest.warns(NoBlocksWarning, match="blocks='model.layers'"):
        train_alike(OneLayer, RoundPipeStrategy())


# Programs -----------------------------------------------------------------------------------------


PROGRAMS = """
    clip summed_loss vae byol stateful_rnn detection encoder_decoder metrics graphs running_scales
    kept_balance mixtral past_arguments target_network written_outputs
""".split()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    programs: Any = importlib.import_module("programs")
    options = {"recompute": "full", "microbatching": "blocks"}
    (run,) = programs.judge(name, options, counts=[4])
    assert (run.verdict, run.differences, run.message) == ("same", (), "")


def test_a_program_that_differs_is_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    programs: Any = importlib.import_module("programs")
    (run,) = programs.judge("clip", {"recompute": "full", "microbatching": "step"}, counts=[4])
    assert run.verdict == "silent"
    assert any(text.startswith("update ") for text in run.differences)
    assert not all(text.startswith("update ") for text in run.differences)


class Repeated(Regressor):
    """The same batch again and again, with dropout, and the gradients of each step."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3, dropout=0.3)
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.gradients.append(torch.cat([grad.flatten() for grad in grads]).clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_gradients_with_dropout_have_the_same_mean_and_spread() -> None:
    num_steps = 50
    batches: Any = [next(iter(regression_data(8)))] * num_steps
    means, spreads = [], []
    split = [
        RoundPipeStrategy(num_microbatches=4, recompute="full", microbatching=mode)
        for mode in ("step", "blocks")
    ]
    for strategy in ("auto", *split):
        torch.manual_seed(3)
        module = Repeated()
        trainer = make_trainer(strategy=strategy, max_epochs=1)
        trainer.fit(module, DataLoader(batches, batch_size=None))
        gradients = torch.stack(module.gradients).double()
        means.append(gradients.mean(0))
        spreads.append(gradients.var(0))
    for mean, spread in zip(means[1:], spreads[1:], strict=True):
        # Squares of what is normal with deviation 1, if the means are the same.
        distances = (mean - means[0]).square() / ((spread + spreads[0]) / num_steps)
        assert 0.4 < distances.mean() < 2.5
        assert 0.7 < spread.sum() / spreads[0].sum() < 1.4  # every row has dropped its own


class _Drops(Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, self.training)


@pytest.mark.parametrize("mode", ["blocks", "step"])
def test_every_block_drops_its_own(mode: Any) -> None:
    class Dropping(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(_Drops() for _ in range(3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = torch.ones_like(batch[0])
            for layer in self.layers:
                x = layer(x)
            self.log("kept", (x != 0).float().mean(), on_step=False, on_epoch=True)
            return functional.mse_loss(self.head(x), batch[1])

    strategy = RoundPipeStrategy(num_microbatches=2, microbatching=mode)
    trainer = fit(strategy, Dropping(), regression_data(64), max_epochs=1)
    assert 0.05 < trainer.callback_metrics["kept"] < 0.2  # an eighth of 512


# On emulated devices ------------------------------------------------------------------------------


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


def test_a_write_beside_the_optimizer_is_refused() -> None:
    strategy = EmulatedStrategy(num_microbatches=4, update="async")
    trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1)
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


class LateWriter(Regressor):
    """Gives a parameter other values after its use: those that its backward pass takes, or not."""

    def __init__(self, name: str, *, other_memory: bool) -> None:
        super().__init__()
        self.name, self.other_memory = name, other_memory

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        parameter = self.get_parameter(self.name)
        if self.other_memory:
            parameter.data = parameter.data * 0.5
        else:
            parameter.data.mul_(0.5)
        return loss


@pytest.mark.parametrize("other_memory", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_microbatches": 1, "microbatching": "step"}])
@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
def test_a_write_after_the_use_of_a_parameter_is_refused(
    kind: Any, options: dict[str, Any], *, other_memory: bool
) -> None:
    """On one device the backward pass has these values, or those before; a recompute has not."""
    module = LateWriter("layers.0.outer.weight", other_memory=other_memory)
    with pytest.raises(ConfigurationError, match=r"weight' after it has called block 'layers\.0'"):
        fit(kind(**options), module, regression_data(), devices=2)


@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
def test_other_memory_for_a_parameter_that_a_graph_has_is_refused(kind: Any) -> None:
    """On one device the graph keeps the values before."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(kind(), LateWriter("head.weight", other_memory=True), regression_data(), devices=2)


def test_devices_are_as_many_as_workers() -> None:
    strategy = EmulatedStrategy(devices=[EmulatedDevice(0)])
    trainer = make_trainer(strategy=strategy, devices=2)
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
    "fraction": runtime.fraction(),
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
        "fraction": 1.0,
        "peak_bytes": None,
        "error": 0.0,
    }
    assert "toy does not say how much memory it has: name the machine" in done.stderr


class Averaging(Block):
    """Writes into a buffer of its own, not of a module inside it."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.3)
        return super().forward(x)


class Averages(Regressor):
    """Reads its blocks' buffers before and after it calls them, and writes into one."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.automatic_optimization = when != "manually"
        self.when = when
        self.layers = nn.ModuleList(Averaging() for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, y = batch
        layers: Any = self.layers
        loss = layers[1].mean.sum()
        if self.when == "before":
            layers[0].mean.add_(0.1)
        elif self.when == "anew":
            layers[0].mean = layers[0].mean + 0.1
        for layer in layers:
            hidden = layer(hidden)
            loss = loss + (hidden * layers[1].mean.clone()).mean()
        layers[0].mean.add_(0.1)
        loss = loss + functional.mse_loss(self.head(hidden), y)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


@pytest.mark.filterwarnings("ignore:Block 'layers.0' runs on the whole batch")
@pytest.mark.parametrize("when", ["afterwards", "manually"])
def test_buffers_of_blocks_are_read_and_written_around_calls(when: str) -> None:
    assert_trains_as_one_device(lambda: Averages(when), lambda: regression_data(16))


@pytest.mark.parametrize(
    ("kind", "when"), [(EmulatedStrategy, "before"), (RoundPipeStrategy, "anew")]
)
def test_writes_into_buffers_that_a_block_s_device_does_not_see_are_refused(
    kind: Any, when: str
) -> None:
    message = r"Block 'layers\.0' is called with other|writes into a buffer of block 'layers\.0'"
    for _ in range(4):  # pieces of the batch that miss what the step drops have not failed first
        with pytest.raises(CaptureError, match=message):
            fit(kind(), Averages(when), regression_data(16))
