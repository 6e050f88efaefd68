"""Operations of a microbatch, counted by hand."""

from __future__ import annotations

from roundpipe_lightning.planning.model.work import (
    Amount,
    BlockWork,
    MicrobatchShape,
    Operations,
    Work,
    WorkProfile,
    microbatch_operations,
)
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy

SHAPE = MicrobatchShape(sequences=2, seq_len=3)


def block(name: str, *, trained: bool = True) -> BlockWork:
    forward = Work(
        matrix_operations=Amount(per_token=10), attention_operations=Amount(per_square=1)
    )
    backward = Work(
        matrix_operations=Amount(per_token=20), attention_operations=Amount(per_square=2.5)
    )
    return BlockWork(
        name=name,
        forward=forward,
        backward=backward if trained else Work(),
        num_trainable=int(trained),
    )


WORK = WorkProfile(
    blocks=tuple(block(str(index), trained=index > 0) for index in range(4)),
    head=BlockWork(name="head", forward=Work(matrix_operations=Amount(fixed=7))),
    tail=BlockWork(name="tail", backward=Work(matrix_operations=Amount(fixed=5))),
)
FORWARD, BACKWARD = 10 * 6 + 18, 20 * 6 + 2.5 * 18
MODEL = 4 * FORWARD + 3 * BACKWARD + 7 + 5


def test_backward_stages_run_trained_blocks_again() -> None:
    partition = Partition(forward=(2, 1), backward=(1, 2, 1))  # the fused stage has the last block
    found = microbatch_operations(WORK, shape=SHAPE, partition=partition)
    assert found == Operations(model=MODEL, recompute=2 * FORWARD)  # blocks 1 and 2; 0 is frozen
    assert found.all == MODEL + 2 * FORWARD
    assert found * 3 == Operations(model=3 * MODEL, recompute=6 * FORWARD)


def test_selective_recompute_keeps_attention() -> None:
    partition = Partition(forward=(2, 1), backward=(1, 2, 1))
    found = microbatch_operations(
        WORK, shape=SHAPE, partition=partition, recompute=RecomputePolicy.SELECTIVE
    )
    assert found == Operations(model=MODEL, recompute=2 * 10 * 6)


def test_one_fused_stage_recomputes_nothing() -> None:
    partition = Partition(forward=(), backward=(4,))
    found = microbatch_operations(
        WORK, shape=SHAPE, partition=partition, recompute=RecomputePolicy.NONE
    )
    assert found == Operations(model=MODEL, recompute=0.0)
