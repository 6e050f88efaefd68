"""Hooks of user code on blocks, on modules inside them and around them, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from roundpipe_lightning.errors import ConfigurationError
from tests.engine.driver.kit import Comparison, LanguageModel, batch_of


def double_gradient_of_block(module: Any) -> None:
    module.layers[1].register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 2,))


def double_gradient_inside_block(module: Any) -> None:
    module.layers[1].up.register_full_backward_hook(lambda _, inputs, __: (inputs[0] * 2,))


def clamp_gradient_of_embedding(module: Any) -> None:
    module.embed.register_forward_hook(
        lambda _, __, output: output.register_hook(lambda g: g.clamp(-1e-3, 1e-3)) and None
    )


def triple_gradient_of_output(module: Any) -> None:
    module.layers[1].register_forward_hook(
        lambda _, __, output: output.register_hook(lambda g: g * 3) and None
    )


def halve_output_of_block(module: Any) -> None:
    module.layers[1].register_forward_hook(lambda _, __, output: output * 0.5)


def double_input_of_block(module: Any) -> None:
    module.layers[1].register_forward_pre_hook(lambda _, args: (args[0] * 2,))


def keep_mean_inside_block(module: Any) -> None:
    module.kept = []
    for layer in module.layers:
        layer.up.register_forward_hook(
            lambda _, __, output: module.kept.append(output.detach().mean().item())
        )


@pytest.mark.parametrize(
    "add_hooks",
    [
        double_gradient_of_block,
        double_gradient_inside_block,
        clamp_gradient_of_embedding,
        triple_gradient_of_output,
        halve_output_of_block,
        double_input_of_block,
        keep_mean_inside_block,
    ],
)
def test_hooks(add_hooks: Callable[[Any], None]) -> None:
    with Comparison(LanguageModel) as comparison:
        pair: list[Any] = [comparison.plain, comparison.module]
        for module in pair:
            add_hooks(module)
        comparison.run(language_loss)
        kept = [getattr(module, "kept", []) for module in pair]
        assert kept[1] == pytest.approx(kept[0], rel=1e-5, abs=1e-6)


def language_loss(module: Any, step: int) -> Tensor:
    loss: Tensor = module(*batch_of(step))
    return loss


def test_a_hook_that_changes_an_output_inside_a_block_is_refused() -> None:
    with Comparison(LanguageModel) as comparison:
        layer: Any = comparison.module.layers[1]  # type: ignore[index]
        layer.up.register_forward_hook(lambda _, __, output: output * 0.5)
        with pytest.raises(ConfigurationError, match=r"layers\.1\.up \(Linear\) returns another"):
            comparison.step(language_loss)
