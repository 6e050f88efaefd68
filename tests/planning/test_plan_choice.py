"""No hint makes a better plan than the planner's own: a slice of benchmarks/plan_choice.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan_choice import hinted, hints_of, jobs_of, step_seconds
from benchmarks.published_throughput import measure
from roundpipe_lightning.planning.cost.partition_table import Evaluator, PartitionTable
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.stages import Partition
from roundpipe_lightning.planning.search.evolve import QUICK
from roundpipe_lightning.planning.search.fit import fit_training


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


def test_the_head_is_uploaded_where_the_fused_stage_is_the_first() -> None:
    block = BlockProfile(name="block", forward_seconds=1.0, parameter_bytes=10)
    head = BlockProfile(name="head", parameter_bytes=70, trainable_bytes=70)
    profile = ModelProfile(blocks=(block,) * 4, head=head, fingerprint="")
    evaluator = Evaluator(
        profile=profile,
        num_workers=1,
        rounds=(1,),
        hop_seconds=0.0,
        forward_upload_seconds=1.0,
        backward_upload_seconds=1.0,
        weight_slots=1,
    )
    whole = Partition(forward=(), backward=(4,))
    cut = Partition(forward=(2,), backward=(2, 2))
    table = PartitionTable.of([whole, cut])
    # The first stage's upload is not in a makespan; the others are 20, and 20 and the head.
    assert evaluator.makespans(table).tolist() == [4.0, 20 + 90 + 2 + 2 + 2]
    assert table.part_sums(profile, "parameter_bytes").sum(axis=1).tolist() == [110, 200]
