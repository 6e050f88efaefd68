from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer

from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.training import make_trainer, parameter_error, regression_data


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """State left after a Trainer was used.

    Attributes:
        module: The module.
        trainer: The Trainer; its strategy is None of ours in the first outcome.
        result: What was returned.
        metrics: `trainer.callback_metrics`.
    """

    module: Any
    trainer: Trainer
    result: Any
    metrics: dict[str, Any]


def fit(trainer: Trainer, module: Any) -> None:
    trainer.fit(module, regression_data(16))


def on_each(
    make: Callable[[], Any],
    do: Callable[[Trainer, Any], Any] = fit,
    *,
    kinds: Sequence[Callable[..., Any]] = (RoundPipeStrategy,),
    devices: int = 2,
    num_microbatches: Any = None,
    **flags: Any,
) -> list[Outcome]:
    """Do the same on one device, then under each kind of strategy.

    Args:
        make: Makes the module, with the same random numbers each time.
        do: What is done.
        kinds: Make strategies.
        devices: Number of workers.
        num_microbatches: For every kind; None: its default.
        **flags: The Trainer's; a function makes one anew for each Trainer.
    """
    options = {} if num_microbatches is None else {"num_microbatches": num_microbatches}
    outcomes = []
    for kind in (None, *kinds):
        torch.manual_seed(3)
        module = make()
        made = {name: value() if callable(value) else value for name, value in flags.items()}
        trainer = make_trainer(
            strategy="auto" if kind is None else kind(**options),
            devices=1 if kind is None else devices,
            **{"max_epochs": 1, **made},
        )
        result = do(trainer, module)
        metrics = {name: torch.as_tensor(v).clone() for name, v in trainer.callback_metrics.items()}
        outcome = Outcome(module=module, trainer=trainer, result=result, metrics=metrics)
        outcomes.append(outcome)
    return outcomes


def compare(
    make: Callable[[], Any],
    do: Callable[[Trainer, Any], Any] = fit,
    *,
    tolerance: float = 1e-5,
    **options: Any,
) -> list[Outcome]:
    """Do the same with each, as `on_each`; parameters, metrics, steps and `module.seen` agree."""
    expected, *others = outcomes = on_each(make, do, **options)
    for outcome in others:
        assert outcome.trainer.global_step == expected.trainer.global_step
        assert parameter_error(outcome.module, expected.module) <= tolerance
        assert_close(outcome.metrics, expected.metrics, tolerance=10 * tolerance)
        assert getattr(outcome.module, "seen", None) == getattr(expected.module, "seen", None)
    return outcomes


def assert_close(found: Any, expected: Any, *, tolerance: float) -> None:
    """Compare nested mappings, in their order, and sequences of numbers, tensors and names."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_close(found[key], value, tolerance=tolerance)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other, tolerance=tolerance)
    elif isinstance(expected, (torch.Tensor, float)):
        wanted = torch.as_tensor(expected)
        torch.testing.assert_close(torch.as_tensor(found), wanted, rtol=tolerance, atol=tolerance)
    else:
        assert found == expected
