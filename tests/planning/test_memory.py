from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.cost.device_memory import Footprint, MemoryKind
from roundpipe_lightning.planning.cost.memory import MemoryModel, longest_that_fits
from roundpipe_lightning.planning.model.hardware import RESERVED_BYTES, Efficiency, load_hardware
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.model.work import (
    Amount,
    BlockWork,
    MicrobatchShape,
    Operations,
    ParameterStorage,
    Peak,
    WeightStorage,
    Work,
    WorkProfile,
    microbatch_operations,
    time_model,
    work_seconds,
)
from roundpipe_lightning.planning.schedule.plan import PipelineLayout
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from roundpipe_lightning.planning.search.cases import resident_blocks
from tests.kit.profiles import machine

SHAPE = MicrobatchShape(sequences=1, seq_len=100)
PARTITION = Partition(forward=(2, 2), backward=(0, 2, 1, 1))
LAYOUT = PipelineLayout(partition=PARTITION, num_microbatches=4, round_size=4)
LONG = replace(LAYOUT, partition=Partition(forward=(8, 7), backward=(1,) * 16))
ROUNDS = replace(LONG, num_microbatches=8)


def part(name: str, *, size: int = 10_000, trained: bool = True) -> BlockWork:
    return BlockWork(
        name=name,
        num_parameters=size // 2,
        num_trainable=size // 2 if trained else 0,
        parameter_bytes=size,
        trainable_bytes=size if trained else 0,
        boundary_bytes=Amount(per_token=2),
        kept_bytes=Amount(per_token=50),
        forward_peak_bytes=Peak(amounts=(Amount(per_token=20),)),
        peak_bytes=Peak(amounts=(Amount(per_token=80),)),
    )


def work(**changes: object) -> WorkProfile:
    blocks = tuple(part(f"layers.{index}") for index in range(4))
    profile = WorkProfile(blocks=blocks, head=part("head", size=4000), tail=part("tail", size=6000))
    return replace(profile, **changes)  # type: ignore[arg-type]


def memory(*, trained: bool = True, **changes: object) -> MemoryModel:
    machine = replace(
        load_hardware("rtx4090x2"), device_bytes=100_000, reserved_bytes=1000, host_bytes=10**6
    )
    profile = work()
    if not trained:
        segments = [part(p.name, size=p.parameter_bytes, trained=False) for p in profile.segments]
        profile = WorkProfile(head=segments[0], blocks=tuple(segments[1:-1]), tail=segments[-1])
    whole = MemoryModel(work=profile, hardware=machine, shape=SHAPE)
    return replace(whole, **changes)  # type: ignore[arg-type]


def test_a_device_is_counted_at_the_stage_that_needs_the_most() -> None:
    need = memory().report(LAYOUT).device
    # stages F0 F1 X0 B1 B2 B3 alternate on two workers: B1 (two blocks) is followed by B3, which
    # has the trained head, and follows F1, which has no gradients
    assert str(need.stage) == "B1[2:4]"
    assert need.of(MemoryKind.WEIGHTS) == 2 * 10_000 + 10_000 + 4_000
    assert need.of(MemoryKind.GRADIENTS) == 2 * 10_000
    assert need.of(MemoryKind.BOUNDARIES) == (4 + 2) * 200
    assert need.of(MemoryKind.ACTIVATIONS) == 2 * 5_000 + 3_000
    assert need.of(MemoryKind.RESERVED) == 1000
    assert need.total_bytes == sum(size for _, size in need.num_bytes)


def test_stages_of_a_plain_step_are_counted_with_the_tail() -> None:
    plain = Partition(forward=(2, 2), backward=(1, 2, 1), plain=True)
    layout = PipelineLayout(partition=plain, num_microbatches=4, round_size=4)
    model = memory()
    sizes = model.footprint.stage_bytes(layout)
    # F0 and B0 and B2 on one worker, F1 and B1 on the other
    weights = [24_000 + 16_000, 26_000 + 20_000, 16_000 + 14_000, 20_000, 14_000]
    assert sizes[MemoryKind.WEIGHTS].tolist() == weights
    assert sizes[MemoryKind.GRADIENTS].tolist() == [0, 0, 16_000, 20_000, 14_000 + 16_000]
    activations = [2_000, 2_000, 10_000 + 3_000, 10_000 + 3_000, 10_000 + 3_000]
    assert sizes[MemoryKind.ACTIVATIONS].tolist() == activations
    assert sizes[MemoryKind.BOUNDARIES].tolist() == [1200, 1200, 1000, 1200, 1200]
    assert model.report(layout).host.of(MemoryKind.BOUNDARIES) == 4 * 3 * 200


def test_kept_graphs_are_counted_for_every_microbatch_of_a_worker() -> None:
    kept = Partition(forward=(3, 1), backward=(1, 3), plain=True, keeps_graphs=True)
    layout = PipelineLayout(partition=kept, num_microbatches=4, round_size=4)
    model = memory()
    sizes = model.footprint.stage_bytes(layout)
    assert sizes[MemoryKind.ACTIVATIONS].tolist() == [2_000, 43_000, 43_000, 23_000]
    # of B0's 16,000 bytes 5,000 come as the block's part of the first graph goes
    assert sizes[MemoryKind.GRADIENTS].tolist() == [0, 0, 11_000, 34_000]
    # F1 and B0, in a row on one worker, have the same weights; F0 and B1 are on the other
    assert sizes[MemoryKind.WEIGHTS].tolist() == [34_000 + 34_000, 16_000, 16_000, 34_000]
    team = replace(layout, team_size=2)
    sizes = model.footprint.stage_bytes(team)
    assert sizes[MemoryKind.ACTIVATIONS].tolist() == [2_000, 23_000, 23_000, 23_000]
    assert sizes[MemoryKind.WEIGHTS].tolist() == [50_000, 50_000, 50_000, 34_000]
    assert model.report(layout).host.of(MemoryKind.BOUNDARIES) == 4 * 1 * 200


def test_the_next_round_is_uploaded_only_where_there_is_one() -> None:
    last = Partition(forward=(1, 1, 1, 1), backward=(0, 1, 1, 1, 1))
    one = PipelineLayout(partition=last, num_microbatches=4, round_size=4)
    two = replace(one, num_microbatches=8)
    more = memory().report(two).device.total_bytes
    assert more > memory().report(one).device.total_bytes


def test_a_host_is_counted_by_kind() -> None:
    need = memory().report(LAYOUT).host
    parameters = (4 * 10_000 + 10_000) // 2
    assert need.of(MemoryKind.WEIGHTS) == 2 * parameters
    assert need.of(MemoryKind.MASTERS) == need.of(MemoryKind.GRADIENTS) == 4 * parameters
    assert need.of(MemoryKind.OPTIMIZER) == 8 * parameters
    assert need.of(MemoryKind.BOUNDARIES) == 4 * 3 * 200  # three BACKWARD stages
    sizes = [size for _, size in need.num_bytes]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("layout", "num_hosts", "changes", "per_parameter", "num_sums"),
    [
        (LONG, 4, {}, 2 + 12 / 4, 2),
        (LONG, 4, {"clips": True}, 2 + 16 / 4, 0),
        (ROUNDS, 4, {}, 2 + 12 / 4 + 4, 2),
        (LONG, 4, {"accumulates": True}, 2 + 12 / 4 + 4, 2),
        (LONG, 4, {"storage": ParameterStorage(master_bytes=0)}, 2 + 8 / 4, 2),  # no copies
        (ROUNDS, 1, {}, 2 + 16, 0),
        (LONG, 1, {"accumulates": True}, 2 + 16, 0),
        (LONG, 2, {"memory_share": 0.25}, 2 + 12 / 4, 2),
    ],
)
def test_hosts_divide_what_they_have_of_blocks(
    layout: PipelineLayout,
    num_hosts: int,
    changes: dict[str, Any],
    per_parameter: float,
    num_sums: int,
) -> None:
    """Head and tail are uploaded themselves, and their gradients leave at the end.

    Beside what is in proportion to the parameters are gradients on their way, of seven stages.
    """
    profile = work()
    many = replace(profile, blocks=profile.blocks * 4)
    options = dict(changes)
    share = options.pop("memory_share", None)
    machine = replace(memory().hardware, num_nodes=num_hosts, host_bytes=10**7, memory_share=share)
    model = memory(work=many, hardware=machine, **options)
    num_hosts = 4 if share else num_hosts  # it has as much as one of four
    kinds = (MemoryKind.WEIGHTS, MemoryKind.MASTERS, MemoryKind.GRADIENTS, MemoryKind.OPTIMIZER)
    need = model.report(layout).host
    master_bytes, num_gradients = model.storage.master_bytes, 1 + model.accumulates
    masters = master_bytes / min(num_hosts, 2)
    others = 5_000 * (2 + masters + 4 * num_gradients + 8 / num_hosts)
    others += (layout.num_rounds - 1) * 5_000 * 4
    stages = 7 * 5_000 * 4 + num_sums * 5_000 * 4 / num_hosts
    expected = 16 * 5_000 * per_parameter + stages + others
    assert sum(need.of(kind) for kind in kinds) == expected


def test_workers_on_the_host_have_the_gradients_of_what_they_run() -> None:
    size = 10**6
    cpu = replace(load_hardware("cpu"), num_devices=2, devices_per_root=2)
    machine = replace(cpu, host_bytes=size, device_bytes=size)
    layout = replace(LAYOUT, num_microbatches=1, round_size=1)
    for shape, busy in ((LAYOUT, 2), (layout, 1)):
        report = memory(hardware=machine).report(shape)
        # Each block keeps 5,000 bytes, which go as its gradients come, and needs 3,000 beside.
        assert report.device.of(MemoryKind.ACTIVATIONS) == 2 * 5_000 + 3_000
        assert report.device.of(MemoryKind.GRADIENTS) == 2 * 10_000 - 2 * 5_000
        assert report.host.available_bytes == size - busy * report.device.total_bytes


def test_frozen_weights_need_no_gradients_masters_or_state() -> None:
    full, frozen = memory(), memory(trained=False)
    device, host = (getattr(frozen.report(LAYOUT), place) for place in ("device", "host"))
    assert device.of(MemoryKind.GRADIENTS) == 0
    assert {kind for kind, _ in host.num_bytes} == {MemoryKind.WEIGHTS, MemoryKind.BOUNDARIES}
    assert device.total_bytes < full.report(LAYOUT).device.total_bytes
    half = frozen.work.each(
        lambda part: replace(
            part,
            num_quantizable=part.num_parameters // 2,
            quantizable_bytes=part.parameter_bytes // 2,
        )
    )
    nibbles = replace(frozen, work=half, storage=ParameterStorage(frozen_bits=4))
    small = nibbles.report(LAYOUT).host.of(MemoryKind.WEIGHTS)
    with_scales = (4.5 / 16 + 1) / 2
    assert small == pytest.approx(host.of(MemoryKind.WEIGHTS) * with_scales, abs=1)


def test_mapped_weights_need_buffers_instead_of_memory() -> None:
    storage = ParameterStorage(weights=WeightStorage.MEMORY_MAPPED)
    frozen = memory(trained=False)
    work = frozen.work.each(lambda part: replace(part, mapped_bytes=part.parameter_bytes))
    mapped = replace(frozen, work=work, storage=storage)
    need = mapped.report(LAYOUT).host
    assert need.of(MemoryKind.WEIGHTS) == 0
    assert need.of(MemoryKind.STAGING) == 2 * 2 * 24_000


def test_what_is_missing_is_named() -> None:
    report = memory().report(LAYOUT)
    assert report.fits
    assert report.reason == ""
    small = memory(hardware=replace(memory().hardware, device_bytes=50_000, host_bytes=1000))
    report = small.report(LAYOUT)
    assert not report.fits
    assert report.device.missing_bytes == report.device.total_bytes - 50_000
    assert "GiB of device memory are missing" in report.reason
    assert "B1[2:4]: weights" in report.reason
    assert "GiB of host memory are missing" in report.reason


def test_one_slot_holds_no_weights_of_the_next_stage() -> None:
    footprint = memory().footprint
    two, one = (
        footprint.stage_bytes(replace(LAYOUT, weight_slots=slots))[MemoryKind.WEIGHTS]
        for slots in (2, 1)
    )
    # F0 F1 X0 B1 B2 B3, the head with F0 and B3, the tail with X0; every other one comes next
    assert one.tolist() == [24_000, 20_000, 6_000, 20_000, 10_000, 14_000]
    assert (two - one).tolist() == [6_000, 20_000, 10_000, 14_000, 0, 0]


def test_without_recompute_the_fused_stage_keeps_everything() -> None:
    whole = Partition(forward=(), backward=(4,))
    for num_microbatches in (4, 8):  # a stage that follows itself has its weights already
        layout = PipelineLayout(
            partition=whole, num_microbatches=num_microbatches, round_size=4, team_size=2
        )
        need = memory().report(layout).device
        assert need.of(MemoryKind.WEIGHTS) == 4 * 10_000 + 4_000 + 6_000
        assert need.of(MemoryKind.GRADIENTS) == 4 * 10_000 + 4_000 + 6_000
        assert need.of(MemoryKind.ACTIVATIONS) == 6 * 5_000 + 3_000


def test_kept_attention_is_on_its_way_and_on_the_host() -> None:
    attention = Amount(per_token=7)
    blocks = tuple(replace(block, attention_bytes=attention) for block in work().blocks)
    model = memory(work=work(blocks=blocks))
    full = model.report(LAYOUT)
    kept = replace(LAYOUT, recompute=RecomputePolicy.SELECTIVE)
    selective = model.report(kept)
    assert str(selective.device.stage) == "B1[2:4]"
    more = [r.of(MemoryKind.BOUNDARIES) for r in (selective.device, full.device)]
    assert more[0] - more[1] == 2 * 700
    host = [r.of(MemoryKind.BOUNDARIES) for r in (selective.host, full.host)]
    assert host[0] - host[1] == 4 * 4 * 700  # four microbatches, four blocks


def test_cpu_workers_use_the_host_s_memory() -> None:
    cpu = replace(load_hardware("cpu"), num_devices=2, host_bytes=10**6)
    report = memory(hardware=cpu).report(LAYOUT)
    assert report.device.of(MemoryKind.WEIGHTS) == 0
    assert report.host.of(MemoryKind.WEIGHTS) == 0
    assert report.host.available_bytes == 10**6 - 2 * report.device.total_bytes


@settings(max_examples=30, deadline=None)
@given(
    sequences=st.integers(1, 4),
    seq_len=st.integers(1, 500),
    round_size=st.integers(1, 4),
    team_size=st.sampled_from([1, 2]),
)
def test_more_microbatches_or_tokens_never_need_less(
    sequences: int, seq_len: int, round_size: int, team_size: int
) -> None:
    layout = replace(LAYOUT, round_size=round_size, team_size=team_size)
    shape = MicrobatchShape(sequences=sequences, seq_len=seq_len)
    larger = MicrobatchShape(sequences=sequences, seq_len=seq_len + 1)
    report, more = (memory(shape=s).report(layout) for s in (shape, larger))
    assert more.device.total_bytes >= report.device.total_bytes
    assert more.host.total_bytes >= report.host.total_bytes
    wider = memory(shape=shape).report(replace(layout, round_size=4))
    if round_size < 4 and layout.num_microbatches > 4:
        assert wider.device.total_bytes >= report.device.total_bytes


@pytest.mark.parametrize("team_size", [1, 2])
def test_teams_share_the_round_s_inputs(team_size: int) -> None:
    layout = replace(LAYOUT, team_size=team_size)
    need = memory().report(layout).device
    assert need.of(MemoryKind.BOUNDARIES) == (4 // team_size + 2) * 200


@given(st.integers(0, 5000), st.integers(1, 5000), st.sampled_from([0.2, 1.0, 2.0, 5.0]))
def test_it_is_the_longest(most: int, beyond: int, power: float) -> None:
    def shortage(length: int) -> float:
        return float((length + 1) ** power - (most + 1.5) ** power)

    assert longest_that_fits(shortage, too_long=most + beyond) == most


ONES = Partition(forward=(1,) * 4, backward=(0,) + (1,) * 4)
RESIDENT = PipelineLayout(partition=ONES, num_microbatches=2, round_size=2)


def footprint(
    *sizes: int, trained: float = 0.0, room: int = 10**6, num_devices: int = 1
) -> Footprint:
    blocks = tuple(
        BlockProfile(name=f"b{index}", parameter_bytes=size, trainable_bytes=round(size * trained))
        for index, size in enumerate(sizes)
    )
    hardware = machine(num_devices, device_bytes=RESERVED_BYTES + room)
    return Footprint(ModelProfile(blocks=blocks, fingerprint=""), hardware=hardware)


def test_workers_keep_blocks_of_their_own_stages() -> None:
    # stages F0 F1 F2 F3 X0 B1 B2 B3 B4 on three workers
    found = resident_blocks(footprint(10, 10, 10, 10, num_devices=3), RESIDENT)
    assert found == ((0, 2, 3), (1,), (0, 2, 3))
    team = replace(RESIDENT, team_size=2)
    found = resident_blocks(footprint(10, 10, 10, 10, num_devices=2), team)
    assert found == ((0, 1, 2, 3), (0, 1, 2, 3))


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 50), min_size=4, max_size=4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([1, 2]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(100, 500),
)
def test_what_stays_fits(
    sizes: list[int], workers: int, round_size: int, slots: int, trained: float, room: int
) -> None:
    model = footprint(*sizes, trained=trained, room=room, num_devices=workers)
    layout = replace(RESIDENT, round_size=round_size, weight_slots=slots)
    if not model.fits(layout):
        return
    held = replace(layout, resident=resident_blocks(model, layout))
    assert model.fits(held)
    assert min(size for _, size in model.need(held).num_bytes) > 0


# Work ---------------------------------------------------------------------------------------------


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


def test_pieces_read_the_weights_as_often_as_there_are_pieces() -> None:
    machine, whole = load_hardware("rtx4090x1"), shape(8, 64)
    reads = Work(matrix_bytes=Amount(fixed=1e9, per_token=1e3), memory_bytes=Amount(per_square=1))
    part = BlockWork(
        name="b",
        forward=reads,
        backward=reads,
        boundary_bytes=Amount(per_token=2),
        kept_bytes=Amount(fixed=5, per_token=2),
        peak_bytes=Peak(amounts=(Amount(fixed=7, per_token=4),)),
    )
    work = WorkProfile(blocks=(part,))
    one = time_model(work, hardware=machine, shape=whole, dtype="bfloat16").blocks[0]
    piece = time_model(work.pieces(4), hardware=machine, shape=whole, dtype="bfloat16").blocks[0]
    small = time_model(work, hardware=machine, shape=shape(2, 64), dtype="bfloat16").blocks[0]
    assert 4 * piece.forward_seconds > one.forward_seconds
    assert piece.forward_seconds == pytest.approx(small.forward_seconds)
    assert piece.activation_bytes == 5 + 2 * 128
    assert piece.activation_bytes + piece.working_bytes == 7 + 4 * 128
    once = WorkProfile(blocks=(replace(part, boundary_bytes=Amount(fixed=8)),))
    assert once.pieces(4).blocks[0].boundary_bytes == Amount(fixed=2)  # of one batch all is fixed


TWO_ROWS = MicrobatchShape(sequences=2, seq_len=3)


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
    found = microbatch_operations(WORK, shape=TWO_ROWS, partition=partition)
    assert found == Operations(model=MODEL, recompute=2 * FORWARD)  # blocks 1 and 2; 0 is frozen
    assert found.all == MODEL + 2 * FORWARD
    assert found * 3 == Operations(model=3 * MODEL, recompute=6 * FORWARD)


def test_selective_recompute_keeps_attention() -> None:
    partition = Partition(forward=(2, 1), backward=(1, 2, 1))
    found = microbatch_operations(
        WORK, shape=TWO_ROWS, partition=partition, recompute=RecomputePolicy.SELECTIVE
    )
    assert found == Operations(model=MODEL, recompute=2 * 10 * 6)
