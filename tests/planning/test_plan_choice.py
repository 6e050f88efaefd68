from dataclasses import replace

import pytest

from benchmarks.plan_choice import hinted, hints_of, jobs_of, step_seconds
from benchmarks.published_throughput import measure
from roundpipe_lightning.planning.search.fit import fit_training
from roundpipe_lightning.planning.search.partition import QUICK


@pytest.mark.parametrize(("machine", "batch"), [("rtx4090x8", 8), ("rtx3090x2", 4)])
def test_no_team_or_round_predicts_a_step_more_than_1_percent_shorter(
    machine: str, batch: int
) -> None:
    jobs = jobs_of(measure("qwen3_1_7b"), machine=machine, batch=batch)
    chosen = fit_training(*jobs)
    assert chosen.prediction is not None
    even = replace(QUICK, num_even=4)
    best = min(hinted(jobs, hints, even) for hints in hints_of(jobs))
    assert best > 0.99 * step_seconds(chosen)
