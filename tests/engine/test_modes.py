"""Function modes: the user's code runs under them, the engine's own does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from roundpipe_lightning.engine.capture.torch_functions import ModeStack
from tests.kit.engine import (
    Regressor,
    emulated_workers,
    engine_for,
    plain_step,
    regression_batches,
    training_step,
)


class Counts(TorchFunctionMode):
    """Counts functions by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.seen[getattr(func, "__name__", "")] += 1
        return func(*args, **(kwargs or {}))


def negative(x: Tensor) -> None:
    torch.neg(x)


def test_modes_are_away_and_come_back_in_their_order() -> None:
    stack, x = ModeStack(), torch.ones(1)
    with Counts() as lower, Counts() as upper:
        with stack.without():
            negative(x)
            assert lower.seen["neg"] == upper.seen["neg"] == 0
            with stack.again():
                negative(x)
                with stack.without():
                    negative(x)
                negative(x)
            negative(x)
        negative(x)
        assert lower.seen["neg"] == upper.seen["neg"] == 3
        assert torch.overrides._get_current_function_mode() is upper


def test_what_is_put_away_twice_comes_back_below_the_later_mode() -> None:
    stack, x = ModeStack(), torch.ones(1)
    with Counts() as lower, stack.without(), Counts() as upper, stack.without():
        negative(x)
        with stack.again():
            negative(x)
            assert torch.overrides._get_current_function_mode() is upper
        negative(x)
        assert lower.seen["neg"] == upper.seen["neg"] == 1


def test_modes_come_back_after_an_error() -> None:
    stack = ModeStack()
    with Counts() as mode:
        with pytest.raises(KeyError), stack.without(), stack.again():
            raise KeyError
        negative(torch.ones(1))
    assert mode.seen["neg"] == 1


def test_a_mode_sees_the_functions_of_the_blocks_and_few_of_the_engine() -> None:
    module, batches = Regressor(4), regression_batches(2)
    with Counts() as plain:
        plain_step(module, batches)
    modes: list[Counts] = []

    def context() -> Counts:
        modes.append(Counts())
        return modes[-1]

    with engine_for(
        module, num_workers=2, num_microbatches=2, devices=emulated_workers(2)
    ) as engine:
        engine.step(batches, training_step, loss_scales=[0.5, 0.5], thread_context=context)
    seen = sum((mode.seen for mode in modes), Counter[str]())
    assert seen["linear"] == plain.seen["linear"] + 4 * 2 * 2, "the blocks once more: recomputed"
    assert seen["mse_loss"] == 2
    others = seen.total() - sum(seen[name] for name in plain.seen)
    assert others < 40, f"{others} questions of the engine's own: {seen - plain.seen}"
