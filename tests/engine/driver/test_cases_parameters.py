"""Steps that write parameters, hook them, share them or switch them, against plain PyTorch."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.driver.parameters import ParameterWatch
from tests.engine.driver.kit import Comparison, LanguageModel, Layer, batch_of


class SlowLayer(Layer):
    """Still runs when user code goes on."""

    def forward(self, hidden: Tensor) -> Tensor:
        time.sleep(0.002)
        return super().forward(hidden)


def slow_model() -> LanguageModel:
    return LanguageModel(layer=SlowLayer)


def scale_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.9)


def scale_in_place(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter *= 0.9  # type: ignore[misc]


def set_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data * 0.9


def scale_alias(module: nn.Module) -> None:
    torch._foreach_mul_([parameter.detach() for parameter in module.parameters()], 0.9)


def initialise(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.03)


def step_optimizer(module: nn.Module, **options: Any) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(module.parameters(), 0.1, **options)
    optimizer.step()
    optimizer.zero_grad()


WRITES: list[Callable[[nn.Module], None]] = [
    scale_data,
    scale_in_place,
    set_data,
    scale_alias,
    initialise,
    step_optimizer,
    lambda module: step_optimizer(module, foreach=True),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_waits_for_the_calls_posted_before(write: Callable[[nn.Module], None]) -> None:
    def loss_of(module: Any, step: int) -> Tensor:
        ids, _ = batch_of(step)
        with torch.no_grad():
            target = module.hidden(ids.flip(1))
        write(module)
        return functional.mse_loss(module.hidden(ids), target)

    with Comparison(slow_model) as comparison:
        comparison.run(loss_of, steps=2, tolerance=1e-4)


def test_clamped_critic() -> None:
    """A WGAN: a step of the optimizer and a clamp between two passes."""

    def loss_of(module: Any, step: int) -> Tensor:
        ids, labels = batch_of(step)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        module.hidden(ids).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in module.parameters():
            parameter.data.clamp_(-0.05, 0.05)
        loss: Tensor = module(ids, labels)
        return loss

    with Comparison(LanguageModel) as comparison:
        comparison.run(loss_of, tolerance=1e-4)


def test_a_write_before_the_backward_pass_is_refused() -> None:
    def loss_of(module: Any, step: int) -> Tensor:
        loss: Tensor = module(*batch_of(step))
        with torch.no_grad():
            module.layers[1].up.weight.mul_(2)
        return loss

    with (
        Comparison(LanguageModel) as comparison,
        pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*'layers\.1'"),
    ):
        comparison.step(loss_of)


def test_a_write_that_does_not_wait_is_refused() -> None:
    def loss_of(module: Any, step: int) -> Tensor:
        with torch.no_grad():
            hidden: Tensor = module.hidden(batch_of(step)[0])
            torch._foreach_mul_(list(module.parameters()), 0.9)
        return hidden.sum()

    with (
        Comparison(slow_model) as comparison,
        pytest.raises(RuntimeError, match="modified by an inplace operation"),
    ):
        comparison.step(loss_of)


class ScaledParameter(nn.Parameter):
    """Has a class and attributes of its own, as those of mup and geoopt."""


def test_parameters_have_their_own_class_after_the_step() -> None:
    def make() -> nn.Module:
        module: Any = LanguageModel()
        for layer in module.layers:
            layer.up.weight = ScaledParameter(layer.up.weight.detach())
        made: nn.Module = module
        return made

    with Comparison(make) as comparison:
        comparison.run(lambda module, step: module(*batch_of(step)))
        kinds = {type(parameter) for parameter in comparison.module.parameters()}
        assert kinds == {nn.Parameter, ScaledParameter}


def test_a_watched_parameter_is_one_of_its_class() -> None:
    waits: list[None] = []
    watch = ParameterWatch(lambda: waits.append(None))
    parameter = nn.Parameter(torch.ones(3))
    watch.watch([parameter])
    assert isinstance(parameter, nn.Parameter)
    assert type(copy.deepcopy(parameter)) is nn.Parameter
    assert type(pickle.loads(pickle.dumps(parameter))) is nn.Parameter
    waits.clear()
    (parameter * 2).sum().backward()
    assert not waits  # reads do not wait
    watch.release()
    assert type(parameter) is nn.Parameter


def test_hooks_on_a_parameter_of_a_block() -> None:
    def double_and_shift(module: Any) -> None:
        weight = module.layers[0].up.weight
        weight.register_hook(lambda gradient: gradient * 2)
        weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad + 1))

    with Comparison(LanguageModel) as comparison:
        double_and_shift(comparison.plain)
        double_and_shift(comparison.module)
        comparison.run(lambda module, step: module(*batch_of(step)))


class TiedUps(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        layers: Any = self.layers
        for layer in layers[1:]:
            layer.up.weight = layers[0].up.weight


class OneLayerTwice(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = self.layers[0]


class OneLayer(LanguageModel):
    """ALBERT: one block, called five times."""

    def __init__(self) -> None:
        super().__init__(num_layers=1)

    def hidden(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embed(ids)
        for _ in range(5):
            hidden = self.layers[0](hidden)
        return hidden


class HalvedEmbedding(LanguageModel):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        assert labels is not None
        logits = functional.linear(self.norm(self.hidden(ids)), self.embed.weight * 0.5)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class NormalisedHead(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.head)


class PenalisedParameters(LanguageModel):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(ids, labels) + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())


class FrozenDuringPass(LanguageModel):
    """`requires_grad` is off when a block is called, and on again at the backward pass."""

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        self.layers[1].requires_grad_(False)
        hidden = self.hidden(ids)
        self.layers[1].requires_grad_(True)
        assert labels is not None
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "make",
    [
        TiedUps,
        OneLayerTwice,
        OneLayer,
        HalvedEmbedding,
        NormalisedHead,
        PenalisedParameters,
        FrozenDuringPass,
    ],
)
def test_parameters_that_are_shared_computed_or_switched(make: Callable[[], nn.Module]) -> None:
    with Comparison(make) as comparison:
        comparison.run(lambda module, step: module(*batch_of(step)))
