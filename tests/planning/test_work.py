from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.hardware import Efficiency, load_hardware
from roundpipe_lightning.planning.model.work import (
    Amount,
    BlockWork,
    MicrobatchShape,
    Operations,
    Peak,
    Work,
    WorkProfile,
    microbatch_operations,
    time_model,
    work_seconds,
)
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy

_coefficients = st.integers(0, 10**6)


def shape(sequences: int, seq_len: int) -> MicrobatchShape:
    return MicrobatchShape(sequences=sequences, seq_len=seq_len)


@given(fixed=_coefficients, per_token=_coefficients, per_square=_coefficients)
def test_three_values_give_the_coefficients(fixed: int, per_token: int, per_square: int) -> None:
    amount = Amount(fixed=fixed, per_token=per_token, per_square=per_square)
    values = [amount.of(shape(*size)) for size in ((1, 64), (1, 128), (2, 64))]
    fitted = Amount.fit(*values, seq_len=64)
    for size in ((3, 32), (1, 1000)):
        assert fitted.of(shape(*size)) == pytest.approx(amount.of(shape(*size)), rel=1e-6)


def test_amounts_add_up() -> None:
    both = Amount(fixed=1, per_token=2) + Amount(per_token=3, per_square=4)
    assert both == Amount(fixed=1, per_token=5, per_square=4)
    work = Work(matrix_operations=both) + Work(matrix_operations=both, memory_bytes=both)
    assert work.matrix_operations.of(shape(1, 2)) == 2 * (1 + 10 + 16)
    assert work.memory_bytes == both


def test_a_peak_is_the_largest_amount() -> None:
    peak = Peak(amounts=(Amount(fixed=100), Amount(per_token=3)))
    assert (peak.of(shape(1, 10)), peak.of(shape(1, 100))) == (100, 300)
    assert Peak().of(shape(1, 1)) == 0
    assert Peak(amounts=(Amount(fixed=-100, per_token=1),)).of(shape(1, 10)) == 0


def test_a_microbatch_has_tokens() -> None:
    assert shape(3, 5).tokens == 15
    with pytest.raises(PlanError, match="sequences=0"):
        shape(0, 5)


def test_kinds_of_work_take_their_share_of_a_rate() -> None:
    efficiency = Efficiency(matrix=0.5, attention=0.125, memory=0.25)
    machine = replace(load_hardware("rtx4090x1"), efficiency=efficiency)
    rate, bandwidth = machine.matrix_rates.of("bfloat16"), machine.memory_bytes_per_second
    second = {
        "matrix_operations": rate * 0.5,
        "attention_operations": rate * 0.125,
        "memory_bytes": bandwidth * 0.25,
        "matrix_bytes": bandwidth * 0.25,
    }
    for kind, amount in second.items():
        work = Work(**{kind: Amount(fixed=amount)})
        seconds = work_seconds(work, hardware=machine, shape=shape(1, 1), dtype="bfloat16")
        assert seconds == pytest.approx(1), kind
    both = Work(**{kind: Amount(fixed=amount) for kind, amount in second.items()})
    seconds = work_seconds(both, hardware=machine, shape=shape(1, 1), dtype="bfloat16")
    assert seconds == pytest.approx(4)


def test_attention_sums_in_float32_whatever_matrix_products_do() -> None:
    machine = load_hardware("rtx4090x1")
    operations = Amount(per_square=4.0)
    attention, matrix = (
        [
            work_seconds(work, hardware=machine, shape=shape(1, 1000), dtype=dtype)
            for dtype in ("float16", "float16_accumulate_float16")
        ]
        for work in (Work(attention_operations=operations), Work(matrix_operations=operations))
    )
    assert attention[0] == attention[1]
    assert matrix[0] == pytest.approx(2 * matrix[1], rel=0.01)


def test_a_model_is_timed_block_by_block() -> None:
    machine = load_hardware("rtx4090x1")
    block = BlockWork(
        name="b",
        forward=Work(memory_bytes=Amount(per_token=10)),
        backward=Work(memory_bytes=Amount(per_token=30)),
        num_parameters=5,
        num_trainable=3,
        parameter_bytes=10,
        trainable_bytes=6,
        boundary_bytes=Amount(per_token=2),
        peak_bytes=Peak(amounts=(Amount(per_token=7),)),
    )
    tail = replace(block, name="t", num_parameters=4, num_trainable=4)
    head = replace(tail, name="h")
    work = WorkProfile(
        blocks=(block, block), head=head, tail=tail, tied_parameters=2, fingerprint="f"
    )
    assert (work.num_parameters, work.num_trainable) == (16, 12)
    profile = time_model(work, hardware=machine, shape=shape(2, 4), dtype="bfloat16")
    assert profile.fingerprint == "f"
    assert profile.num_blocks == 2
    timed = profile.blocks[0]
    assert timed.backward_seconds == pytest.approx(3 * timed.forward_seconds)
    assert (timed.boundary_bytes, timed.working_bytes) == (16, 56)
    assert (timed.parameter_bytes, timed.trainable_bytes) == (10, 6)


def test_a_prompt_before_a_frozen_tied_embedding_is_trained_alone() -> None:
    tail = BlockWork(name="t", num_parameters=9)
    head = replace(tail, name="h", num_parameters=11, num_trainable=2)
    work = WorkProfile(blocks=(), head=head, tail=tail, tied_parameters=9, fingerprint="f")
    assert (work.num_parameters, work.num_trainable) == (11, 2)


def test_a_block_that_runs_no_backward_is_not_recomputed() -> None:
    machine = load_hardware("rtx4090x1")
    work = Work(memory_bytes=Amount(per_token=1e6), attention_operations=Amount(per_token=1e6))
    below = BlockWork(name="b", forward=work, attention_bytes=Amount(per_token=1))
    above = replace(below, backward=work)
    trained = replace(below, num_trainable=1)
    assert [part.has_backward for part in (below, above, trained)] == [False, True, True]
    profile = time_model(
        WorkProfile(blocks=(below, above)), hardware=machine, shape=shape(1, 8), dtype="bfloat16"
    )
    first, second = profile.blocks
    for policy in RecomputePolicy:
        assert first.seconds_to_recompute(policy) == 0
    assert second.recompute_seconds == first.forward_seconds > 0
    assert 0 < second.seconds_to_recompute(RecomputePolicy.SELECTIVE) < second.forward_seconds


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
