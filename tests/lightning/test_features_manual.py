from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError
from transformers import T5Config, T5ForConditionalGeneration

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.comparison import Outcome, assert_close, compare, on_each
from tests.kit.training import (
    VOCABULARY,
    WIDTH,
    Block,
    PaddedSequences,
    make_trainer,
    regression_data,
)


class NormBlock(nn.Module):
    """A block that draws random numbers, writes into its buffers and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = spectral_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.3)
        self.num_calls = 0

    def forward(self, x: Tensor, *, shared: dict[str, Tensor]) -> Tensor:
        self.num_calls += 1
        shared[f"seen {len(shared)}"] = x  # a recompute must not do it again
        out: Tensor = x + self.dropout(functional.silu(self.norm(self.linear(x))))
        return out


class Net(nn.Module):
    """A chain of blocks with a learned scale, a number."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NormBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, outputs)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[str, Tensor] = {}
        for layer in self.layers:
            x = layer(x, shared=shared)
        assert len(shared) == len(self.layers)
        out: Tensor = self.head(x) * self.scale
        return out


class Manual(LightningModule):
    """Base of every module here: manual optimization, a metric, logs."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.mse = MeanSquaredError()
        self.hooks: list[str] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.hooks.append("zero_grad")

    def on_after_backward(self) -> None:
        self.hooks.append("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.hooks.append("step")


class Adversarial(Manual):
    """Two networks, two optimizers and schedulers, a gradient penalty, clipped weights, an average.

    The penalty is the backward pass of a backward pass, through the blocks of the critic.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic, self.average = Net(WIDTH), Net(1), Net(WIDTH)
        self.average.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        real, target = batch
        assert real.device == self.device
        assert next(self.parameters()).device.type == "cpu"
        optimizers: Any = self.optimizers()
        first, second = optimizers
        noise = torch.randn(len(real), WIDTH).to(self.device)

        self.toggle_optimizer(second)
        assert not any(parameter.requires_grad for parameter in self.generator.parameters())
        fake = self.generator(noise).detach()
        mixed = torch.lerp(real, fake, 0.3).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        loss = self.critic(fake).mean() - self.critic(real).mean() + 0.5 * penalty
        self.log("critic", loss, on_step=True, on_epoch=True, prog_bar=True)
        second.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(second, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        second.step()
        for parameter in self.critic.parameters():
            parameter.data.clamp_(-0.3, 0.3)
        self.untoggle_optimizer(second)

        self.toggle_optimizer(first)
        made = self.generator(noise)
        loss = functional.mse_loss(made.mean(1, keepdim=True), target) - self.critic(made).mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="value")
        first.step()
        self.untoggle_optimizer(first)
        pairs = zip(self.average.parameters(), self.generator.parameters(), strict=True)
        for kept, parameter in pairs:
            kept.data.mul_(0.9).add_(parameter.data, alpha=0.1)
        self.mse(made.mean(1, keepdim=True).detach(), target)
        self.log("mse", self.mse, on_step=True, on_epoch=True)
        schedulers: Any = self.lr_schedulers()
        for scheduler in schedulers:
            scheduler.step()
        with torch.no_grad():
            return {"loss": loss, "average": self.average(noise), "name": "kept"}

    def configure_optimizers(self) -> Any:
        optimizers: list[Any] = [
            torch.optim.AdamW(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.05, momentum=0.9),
        ]
        schedule = torch.optim.lr_scheduler.ExponentialLR
        return optimizers, [schedule(optimizer, 0.9) for optimizer in optimizers]


class Closures(Manual):
    """Optimizers that evaluate the loss themselves, one of them several times a step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.net = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        losses: list[Tensor] = []

        def closure() -> Tensor:
            losses.append(functional.mse_loss(self.net(batch[0]), batch[1]))
            optimizer.zero_grad()
            self.manual_backward(losses[-1])
            return losses[-1]

        optimizer.step(closure=closure)
        self.log("first", losses[0])
        self.log("evaluations", float(len(losses)), reduce_fx="sum", on_epoch=True)

    def configure_optimizers(self) -> Any:
        if self.kind == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=4)
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Sharing(Manual):
    """Both optimizers train the layers, in turn and each with its own states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Block(), Block())
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer, head in zip(optimizers, self.heads, strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(functional.mse_loss(head(self.layers(batch[0])), batch[1]))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        layers, (one, other) = [*self.layers.parameters()], self.heads
        return (
            torch.optim.SGD([*layers, *one.parameters()], lr=0.05),
            torch.optim.AdamW([*layers, *other.parameters()], lr=0.01),
        )


class Accumulating(Manual):
    """Steps every second batch, with the gradients of both; a LSTM keeps its weights in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.layers = nn.ModuleList(Block(dropout=0.2) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)
        self.table = nn.Parameter(torch.zeros(4, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = self.lstm(batch[0].unsqueeze(1))
        x = x[:, 0] + self.table[torch.arange(len(x), device=self.device) % 4]
        for layer in self.layers:
            x = layer(x)
        loss = functional.mse_loss(self.head(x), batch[1])
        self.manual_backward(loss / 2)
        optimizer: Any = self.optimizers()
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


MODULES: dict[str, Any] = {
    "adversarial": Adversarial,
    "lbfgs": lambda: Closures("lbfgs"),
    "adamw with a closure": lambda: Closures("adamw"),
    "accumulation": Accumulating,
    "parameters in two optimizers": Sharing,
}


def _run(kinds: Any, make: Any, *, tolerance: float = 0.0, **flags: Any) -> list[Outcome]:
    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module, regression_data(24))

    expected, *others = found = on_each(make, fit, kinds=kinds, max_epochs=2, **flags)
    for outcome in others:
        assert_close(outcome.metrics, expected.metrics, tolerance=tolerance)
        wanted = dict(expected.module.state_dict())
        assert_close(dict(outcome.module.state_dict()), wanted, tolerance=tolerance)
        assert outcome.module.hooks == expected.module.hooks
    return found


@pytest.mark.parametrize(
    ("name", "precision", "tolerance"),
    [
        # A weight that spectral_norm uses twice per call is called often: sums in another order.
        ("adversarial", "32-true", 1e-5),
        ("lbfgs", "32-true", 0.0),
        ("adamw with a closure", "bf16-mixed", 0.0),
        ("accumulation", "32-true", 0.0),
        ("parameters in two optimizers", "32-true", 0.0),
        ("accumulation", "bf16-mixed", 0.0),
    ],
)
@pytest.mark.filterwarnings("ignore:No stack of blocks was found")
@pytest.mark.filterwarnings("ignore:The memory of LBFGS's state is not in the plan")
def test_the_same_as_on_one_device(name: str, precision: Any, tolerance: float) -> None:
    kinds = (RoundPipeStrategy, lambda: EmulatedStrategy(num_microbatches=1))
    make, flags = MODULES[name], {"tolerance": tolerance, "precision": precision}
    expected, *others = _run(kinds, make, **flags)
    for outcome in others:
        strategy: Any = outcome.trainer.strategy
        assert strategy.num_microbatches == 1
        for layer, other in zip(outcome.module.modules(), expected.module.modules(), strict=True):
            assert getattr(layer, "num_calls", 0) == getattr(other, "num_calls", 0)


def test_blocks_are_on_the_device_only_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's weights are brought once for its forward pass and once for its recompute."""
    moved: list[nn.Parameter] = []
    move = EmulatedDevice.bring

    def note(self: Any, tensor: Tensor, source: Device) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            moved.append(tensor)
        return move(self, tensor, source)

    monkeypatch.setattr(EmulatedDevice, "bring", note)
    _, outcome = _run([EmulatedStrategy], Accumulating)
    module = outcome.module
    for layer in module.layers:
        for parameter in layer.parameters():
            assert sum(parameter is other for other in moved) == 2 * 6
    assert sum(module.head.weight is other for other in moved) == 6


@pytest.mark.parametrize("num_microbatches", [2, 8])
def test_several_microbatches_are_refused(num_microbatches: int) -> None:
    strategy = RoundPipeStrategy(num_microbatches=num_microbatches, microbatching="step")
    with pytest.raises(
        ConfigurationError,
        match=rf"automatic_optimization=False and num_microbatches={num_microbatches}.*"
        r"RoundPipeStrategy\(num_microbatches=1\)",
    ):
        make_trainer(strategy=strategy).fit(Accumulating(), regression_data())


def test_validation_between_manual_steps_sees_what_they_have_trained() -> None:
    class Validated(Accumulating):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.head(batch[0]).square().mean())

    def fit(trainer: Any, module: Any) -> Any:
        trainer.fit(module, regression_data(24), regression_data(8))
        return trainer.callback_metrics["val"]

    kinds = (RoundPipeStrategy, EmulatedStrategy)
    found = on_each(Validated, fit, kinds=kinds, devices=1, max_epochs=2)
    assert found[0].result == found[1].result == found[2].result


def test_an_error_in_a_manual_step_leaves_a_module_that_trains_again() -> None:
    class Failing(Accumulating):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if self.fails and batch_idx == 1:
                raise KeyError("mine")
            return super().training_step(batch, batch_idx)

    module = Failing()
    with pytest.raises(KeyError, match="mine"):
        make_trainer(strategy=EmulatedStrategy()).fit(module, regression_data())
    module.fails = False
    trainer = make_trainer(strategy=EmulatedStrategy(), max_epochs=1)
    trainer.fit(module, regression_data())
    assert trainer.global_step == 2


class Ways(Accumulating):
    """Reaches parameters in every way that user code has, in one step."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.head.weight]
        self.target = nn.Linear(WIDTH, 1)
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        prediction = functional.linear(x, self.kept[0], self.head.bias)
        with torch.no_grad():
            target = batch[1] + 0.1 * self.target(x)
        loss = functional.mse_loss(prediction, target)
        loss = loss + 1e-3 * sum(p.square().sum() for p in self.parameters())
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        again = list(self.layers.parameters())
        gradients = torch.autograd.grad(loss.square(), again)
        for parameter, gradient in zip(again, gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad += gradient
        nn.utils.clip_grad_norm_(self.parameters(), 0.3)
        optimizer.step()
        averaged = {
            name: 0.5 * value + 0.5 * self.head.state_dict()[name]
            for name, value in self.target.state_dict().items()
        }
        self.target.load_state_dict(averaged)
        self.count += 1
        return loss


def test_parameters_are_the_hosts_own_wherever_they_are_reached() -> None:
    _, outcome = _run([EmulatedStrategy], Ways)
    assert outcome.module.count == 6


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + checkpoint(super().forward, x, use_reentrant=False)
        return out


class Checkpointing(Accumulating):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Checkpointed(dropout=0.2) for _ in range(3))


def test_checkpointing_inside_blocks() -> None:
    _run([EmulatedStrategy], Checkpointing)


class Translation(Manual):
    """An encoder and a decoder with a cache, dropout and tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "d_model": WIDTH,
            "d_kv": 4,
            "d_ff": 16,
            "decoder_start_token_id": 0,
        }
        self.model = T5ForConditionalGeneration(T5Config(**sizes, num_layers=2, num_heads=2))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_model_of_transformers_with_a_cache() -> None:
    def fit(trainer: Any, module: Any) -> None:
        trainer.fit(module.train(), DataLoader(PaddedSequences(8), batch_size=4))

    compare(Translation, fit, kinds=[EmulatedStrategy], devices=1, tolerance=0.0)
