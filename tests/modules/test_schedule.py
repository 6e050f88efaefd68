"""The learning rate over a run."""

import pytest
import torch

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules import WarmupCosine


def test_warms_up_then_falls_to_the_final_share() -> None:
    schedule = WarmupCosine(warmup_steps=4, final_share=0.1)
    factors = [schedule.factor(step, total_steps=24) for step in range(26)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[14] == pytest.approx(0.55)  # half way down
    assert factors[24] == factors[25] == pytest.approx(0.1)
    assert factors[4:] == sorted(factors[4:], reverse=True)


def test_attaches_to_an_optimizer_for_the_length_of_the_run() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = WarmupCosine(final_share=0.0).attach(optimizer, run_steps=2)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([2.0, 1.0, 0.0])


def test_its_own_length_wins_over_that_of_the_run() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    WarmupCosine(total_steps=1, final_share=0.5).attach(optimizer, run_steps=100)
    assert WarmupCosine(total_steps=1, final_share=0.5).factor(1, total_steps=1) == 0.5


def test_a_run_without_an_end_needs_a_length() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ConfigurationError, match=r"Set scheduler\.total_steps"):
        WarmupCosine().attach(optimizer, run_steps=float("inf"))
    WarmupCosine(total_steps=5).attach(optimizer, run_steps=float("inf"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"warmup_steps": -1}, "scheduler.warmup_steps=-1"),
        ({"total_steps": 0}, "scheduler.total_steps=0"),
        ({"final_share": 1.5}, "scheduler.final_share=1.5"),
    ],
)
def test_refuses_figures_out_of_range(options: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        WarmupCosine(**options)  # type: ignore[arg-type]
