"""Steps of the driver against plain PyTorch on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.engine.driver.kit import Comparison, LanguageModel, batch_of


def language_loss(module: Any, step: int) -> Tensor:
    loss: Tensor = module(*batch_of(step))
    return loss


@pytest.mark.parametrize(
    "plan", [None, "forward 2 2 | backward 0 2 2", "forward 1 3 | backward 0 1 1 2"]
)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_gradients_are_those_of_the_whole_batch(plan: str | None, workers: int) -> None:
    with Comparison(LanguageModel, plan=plan, num_workers=workers) as comparison:
        comparison.run(language_loss)


def test_a_tied_head_gets_both_gradients() -> None:
    with Comparison(lambda: LanguageModel(tied=True)) as comparison:
        comparison.run(language_loss)
