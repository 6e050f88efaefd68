"""Steps with several forward and backward passes, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.driver.kit import Comparison, LanguageModel, Layer, batch_of


def two_backward_passes(module: Any, step: int) -> Tensor:
    hidden = module.hidden(batch_of(step)[0])
    hidden.pow(2).mean().backward(retain_graph=True)
    loss: Tensor = module.head(hidden).mean()
    return loss


def gradients_within_the_step(module: Any, step: int) -> Tensor:
    hidden = embedded = module.embed(batch_of(step)[0])
    for layer in module.layers:
        hidden = layer(hidden)
    loss: Tensor = hidden.pow(2).mean()
    weight = module.layers[2].up.weight
    (of_embedded,) = torch.autograd.grad(loss, embedded, retain_graph=True)
    (of_weight,) = torch.autograd.grad(loss, weight, retain_graph=True)
    loss.backward(inputs=[module.layers[1].down.bias], retain_graph=True)
    total: Tensor = loss + (embedded * of_embedded.detach()).sum() + of_weight.sum()
    return total


def adversarial(module: Any, step: int) -> Tensor:
    ids, labels = batch_of(step)
    embedded = module.embed(ids)

    def loss_from(hidden: Tensor) -> Tensor:
        for layer in module.layers:
            hidden = layer(hidden)
        logits = module.head(module.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    loss = loss_from(embedded)
    (gradient,) = torch.autograd.grad(loss, embedded, retain_graph=True)
    return loss_from(embedded + 0.1 * gradient.sign()) + loss


def passes_of_other_sizes(module: Any, step: int) -> Tensor:
    larger, _ = batch_of(77, rows=12)
    smaller, _ = batch_of(78, rows=3)
    of_larger: Tensor = module.hidden(larger).pow(2).mean()
    of_smaller: Tensor = module.hidden(smaller).pow(2).mean()
    loss: Tensor = module(*batch_of(step))
    return loss + of_larger + of_smaller


def two_passes(module: Any, step: int) -> Tensor:
    ids, labels = batch_of(step)
    loss: Tensor = module(ids, labels) + module(ids.flip(0), labels.flip(0))
    return loss


def looks_before_the_loss(module: Any, step: int) -> Tensor:
    ids, labels = batch_of(step)
    assert module.hidden(ids).sum().item() != 0
    loss: Tensor = module(ids, labels)
    assert loss.item() > 0
    return loss.exp() / 3


def skipped_and_reordered(module: Any, step: int) -> Tensor:
    ids, _ = batch_of(step)
    hidden = module.embed(ids)
    for index in ((2, 0), (3, 2, 1, 0), (1,), (0, 1, 2, 3))[step]:
        hidden = module.layers[index](hidden)
    loss: Tensor = module.head(module.norm(hidden)).pow(2).mean()
    return loss


@pytest.mark.parametrize("plan", [None, "forward 2 2 | backward 0 2 2"])
@pytest.mark.parametrize(
    "loss_of",
    [
        two_backward_passes,
        gradients_within_the_step,
        adversarial,
        passes_of_other_sizes,
        two_passes,
        looks_before_the_loss,
        skipped_and_reordered,
    ],
)
def test_passes(loss_of: Callable[[Any, int], Tensor], plan: str | None) -> None:
    with Comparison(LanguageModel, plan=plan) as comparison:
        comparison.run(loss_of, steps=4)


def gradient_penalty(module: Any, step: int) -> Tensor:
    hidden = embedded = module.embed(batch_of(step)[0]).detach().requires_grad_()
    for layer in module.layers:
        hidden = layer(hidden)
    score: Tensor = module.norm(hidden).mean((1, 2)).sum()
    (gradient,) = torch.autograd.grad(score, embedded, create_graph=True)
    penalty: Tensor = (gradient.norm(dim=-1) - 1).pow(2).mean()
    return penalty + 0.01 * score


def gradients_of_all_parameters(module: Any, step: int) -> Tensor:
    loss: Tensor = module(*batch_of(step))
    gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    return loss + 0.1 * sum(gradient.pow(2).sum() for gradient in gradients)


def backward_with_graph(module: Any, step: int) -> Tensor:
    loss: Tensor = module(*batch_of(step))
    loss.backward(create_graph=True)
    total: Tensor = sum(p.grad.pow(2).sum() for p in module.parameters())
    return total


class NoisyLayer(Layer):
    """Its noise is its own: a second run must draw the same."""

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = super().forward(hidden)
        return hidden + 0.0 * torch.rand_like(hidden)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("make", [LanguageModel, lambda: LanguageModel(layer=NoisyLayer)])
@pytest.mark.parametrize(
    "loss_of", [gradient_penalty, gradients_of_all_parameters, backward_with_graph]
)
def test_backward_passes_that_are_differentiated(
    loss_of: Callable[[Any, int], Tensor], make: Callable[[], nn.Module]
) -> None:
    with Comparison(make) as comparison:
        comparison.run(loss_of, tolerance=1e-4)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_second_backward_pass_without_a_retained_graph(is_shared: bool) -> None:
    def loss_of(module: Any, step: int) -> Tensor:
        hidden: Tensor = module.hidden(batch_of(step)[0])
        loss = hidden.sum()
        loss.backward()
        return loss if is_shared else hidden.mean()

    with Comparison(LanguageModel) as comparison:
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            comparison.step(loss_of)
        comparison.module.zero_grad()
        comparison.run(lambda module, step: module(*batch_of(step)), steps=1)


def test_gradients_of_outputs() -> None:
    seen: dict[int, Tensor] = {}

    def loss_of(module: Any, step: int) -> Tensor:
        hidden = module.layers[1](module.layers[0](module.embed(batch_of(step)[0])))
        hidden.retain_grad()
        seen[id(module)] = hidden
        loss: Tensor = (module.layers[2](hidden) + hidden).pow(2).mean()
        gradient: Tensor = torch.autograd.grad(loss, hidden, retain_graph=True)[0]
        total: Tensor = loss + gradient.abs().sum()
        return total

    with Comparison(LanguageModel) as comparison:
        comparison.run(loss_of, steps=1)
        gradients = [seen[id(m)].grad for m in (comparison.plain, comparison.module)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "look",
    [
        torch.autograd.grad,
        lambda _, hidden: hidden.retain_grad(),
        lambda _, hidden: hidden.register_hook(print),
    ],
)
def test_a_late_look_at_the_gradient_of_an_output_is_refused(
    look: Callable[[Tensor, Tensor], Any],
) -> None:
    def late_look(module: Any, step: int) -> Tensor:
        hidden = module.layers[0](module.embed(batch_of(step)[0]))
        loss: Tensor = module.layers[1](hidden).sum()
        look(loss, hidden)
        return loss

    with (
        Comparison(LanguageModel) as comparison,
        pytest.raises(RuntimeError, match=r"'layers\.0' is asked for after"),
    ):
        comparison.step(late_look)
