import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from roundpipe_lightning.emulation.server import EmulatedDevice, EmulatedServer
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.engine.device.base import CopyQueue, CpuDevice
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.device.host_memory import PinnedPool
from roundpipe_lightning.engine.transfer.gradient_downloads import HostSums
from roundpipe_lightning.engine.transfer.gradient_reduce import (
    GradientAccumulator,
    GradientReducer,
    SharedGradients,
    fold,
)
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.architectures import decoder_stack, tiny_causal_lm, token_batches
from tests.kit.engine import (
    Block,
    Regressor,
    auto_plan,
    differences,
    emulated_workers,
    engine_for,
    engine_of,
    engine_step,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
)


def _gradients(num: int) -> list[Tensor]:
    """Return numbers whose sum depends on the order of additions."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, generator=generator) * 10.0**i for i in range(num)]


def _in_order(tensors: list[Tensor]) -> Tensor:
    return reduce(torch.add, [tensor.clone() for tensor in tensors])


@given(st.data())
def test_microbatches_that_come_together(data: st.DataObject) -> None:
    """Any split of the microbatches, arriving in any order: summed by each group's first."""
    num = data.draw(st.integers(1, 7))
    labels = data.draw(st.lists(st.integers(0, 2), min_size=num, max_size=num))
    groups = [[m for m in range(num) if labels[m] == label] for label in sorted(set(labels))]
    parameter, gradients = nn.Parameter(torch.zeros(16)), _gradients(num)
    accumulator = GradientAccumulator(num)
    for group in data.draw(st.permutations(groups)):
        accumulator.add(group, {parameter: _in_order([gradients[m] for m in group])})
    by_first = sorted(groups, key=min)
    wanted = _in_order([_in_order([gradients[m] for m in group]) for group in by_first])
    assert torch.equal(accumulator.sums[parameter], wanted)


@given(st.data())
def test_of_a_tied_embedding_only_rows_wait(data: st.DataObject) -> None:
    """The sums are those of `(h0 + e0) + (h1 + e1)`, whoever comes first."""
    num, num_rows = data.draw(st.integers(1, 5)), 16
    embedding, rows = nn.Parameter(torch.zeros(num_rows, 2)), st.integers(0, num_rows - 1)
    early = [torch.randn(num_rows, 2) for _ in range(num)]
    late = [torch.zeros(num_rows, 2) for _ in range(num)]
    left = [torch.tensor(data.draw(st.lists(rows, max_size=4)), dtype=torch.int64) for _ in late]
    for gradient, used in zip(late, left, strict=True):
        gradient[used] = torch.randn(len(used), 2)
    wanted = _in_order([h + e for h, e in zip(early, late, strict=True)])
    reducer = GradientReducer(num_microbatches=num, num_stages=0)
    waiting = [weakref.ref(h) for h in early]
    for number in data.draw(st.permutations(range(num))):
        reducer.reserve_shared(number)({embedding: early[number]}, left={embedding: left[number]})
    early.clear()
    assert sum(h() is not None for h in waiting) == 1, "the sum"
    for number in data.draw(st.permutations(range(num))):
        if len(left[number]) or data.draw(st.booleans()):
            reducer.reserve_shared(number)({embedding: late[number]} if len(left[number]) else {})
        reducer.close_microbatch(number)
    assert reducer.await_all(0)
    assert torch.equal(reducer.sums()[embedding], wanted)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_whole_gradients_of_the_head_do_not_wait_for_the_embedding(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, batches = tiny_causal_lm("qwen3", tied=tied), token_batches(3)
    stack = decoder_stack(module)
    plan = auto_plan(stack, num_workers=2, num_microbatches=3)
    head, rows = module.model.get_output_embeddings().weight, []
    add = SharedGradients.add

    def noted(self: Any, microbatch: int, number: int, gradients: Any, left: Any) -> bool:
        if number == 0:
            rows.append(left[head].unique())
            assert head in gradients
        return add(self, microbatch, number, gradients, left)

    monkeypatch.setattr(SharedGradients, "add", noted)
    engine_step(module, stack, plan, batches)
    used = [batch["input_ids"].unique() if tied else torch.empty(0) for batch in batches]
    assert sorted(map(len, rows)) == sorted(map(len, used))


@pytest.mark.suite("tied")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_with_the_same_rounds_the_number_of_workers_changes_no_bit(tied: bool) -> None:
    module, batches = tiny_causal_lm("qwen3", tied=tied), token_batches(4)
    stack, found = decoder_stack(module), []
    for num_workers in (1, 2, 4):
        plan = plan_of(stack, num_workers=num_workers, num_microbatches=4, round_size=2)
        devices = emulated_workers(num_workers)
        found.append(engine_step(module, stack, plan, batches, devices=devices).gradients)
    for gradients in found[1:]:
        assert all(torch.equal(gradients[p], gradient) for p, gradient in found[0].items())


def test_sparse_gradients() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    sparse = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]).to_sparse(1)
    for pair in ((sparse, sparse), (sparse, torch.ones(3, 2)), (torch.ones(3, 2), sparse)):
        sums: dict[nn.Parameter, Tensor] = {}
        for gradient in pair:
            fold(sums, {parameter: gradient.clone()})
        total = sums[parameter]
        dense = total.to_dense() if total.is_sparse else total
        one, other = (g.to_dense() if g.is_sparse else g for g in pair)
        assert torch.equal(dense, one + other)


def test_threads_add_at_once() -> None:
    num, parameter = 32, nn.Parameter(torch.zeros(16))
    gradients = [torch.randn(16) for _ in range(num)]
    accumulator, barrier = GradientAccumulator(num), threading.Barrier(num)

    def add(microbatch: int) -> None:
        barrier.wait()
        accumulator.add([microbatch], {parameter: gradients[microbatch].clone()})

    threads = [threading.Thread(target=add, args=(m,)) for m in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(accumulator.sums[parameter], _in_order(gradients))


def test_sums_on_the_host_have_a_number_of_threads_of_their_own() -> None:
    total = torch.get_num_threads()
    torch.set_num_threads(6)
    sums = HostSums(PinnedPool(CpuDevice()), on_failure=lambda error, place: None)
    found: list[int] = []
    try:
        sums.add_later(lambda: found.append(torch.get_num_threads()))
        sums.drain()
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
    finally:
        sums.close()
        torch.set_num_threads(total)
    assert found == [4, 6]


def test_what_has_been_handed_out_is_let_go() -> None:
    """Who keeps a step keeps no gradients, of which each step would have its own."""
    own, shared = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    reducer = GradientReducer(num_microbatches=1, num_stages=1, shared=[shared])
    reducer.add_stage(0, [0], {own: torch.ones(2)})
    reducer.reserve_shared(0)({shared: torch.ones(2)})
    reducer.close_microbatch(0)
    kept = [weakref.ref(gradient) for gradient in reducer.sums().values()]
    assert len(kept) == 2
    assert not [gradient for gradient in kept if gradient() is not None]


@pytest.mark.suite("2-2", "4-4")
@pytest.mark.parametrize(("round_size", "team_size"), [(4, 2), (2, 2), (4, 4)])
def test_copies_of_a_team(round_size: int, team_size: int) -> None:
    module = Regressor()
    batches = regression_batches(4)
    stack = layers_of(module)
    plan = plan_of(
        stack, num_workers=4, num_microbatches=4, round_size=round_size, team_size=team_size
    )
    results = []
    for seed in range(3):
        timing = EmulatedTiming(max_delay_seconds=0.003, seed=seed)
        with EmulatedServer(4, timing=timing) as server:
            step = engine_step(module, stack, plan, batches, devices=server.devices)
        results.append(step.gradients)
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        assert all(torch.equal(other[p], gradient) for p, gradient in results[0].items())


class Counting(EmulatedDevice):
    """Counts the bytes that are uploaded and downloaded."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.uploaded_bytes = 0
        self.gradient_bytes = 0

    def copy(
        self, dst: Tensor, src: Tensor, *, queue: CopyQueue, after: Sequence[Event] = ()
    ) -> Event:
        if queue is CopyQueue.UPLOAD:
            self.uploaded_bytes += src.nbytes
        elif src.dtype is torch.uint8:  # not a boundary
            self.gradient_bytes += src.nbytes
        return super().copy(dst, src, queue=queue, after=after)


class Noting(Block):
    """Notes every run of it.

    Args:
        runs: Where: by number of the block.
    """

    def __init__(self, runs: Counter[int], index: int) -> None:
        super().__init__()
        self.runs = runs
        self.index = index
        self.adapter = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        self.runs[self.index] += 1
        adapted: Tensor = self.adapter(x)
        return super().forward(x) + adapted


def model(*, trained: Sequence[str]) -> tuple[Regressor, Counter[int]]:
    """Four blocks; trained is what has one of the given parts in its name."""
    runs: Counter[int] = Counter()
    numbers = iter(range(4))
    module = Regressor(4, make_block=lambda: Noting(runs, next(numbers)))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return module, runs


def step(module: Regressor, **changes: Any) -> tuple[Any, list[Counting]]:
    devices = [Counting(0), Counting(1)]
    with engine_for(module, devices=devices, **changes) as engine:
        result = mean_step(engine, regression_batches(3))
    return result, devices


def test_gradients_of_trained_parameters_alone_are_downloaded_once() -> None:
    module, _ = model(trained=["adapter"])
    result, devices = step(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    assert set(result.gradients) == set(trained)
    assert sum(device.gradient_bytes for device in devices) == sum(p.nbytes for p in trained)


@pytest.mark.parametrize(
    ("trained", "runs"),
    [
        (["layers.2.adapter", "layers.3.adapter"], [1, 1, 2, 2]),
        (["layers.3.adapter"], [1, 1, 1, 2]),
        (["layers.1.adapter"], [1, 2, 2, 2]),
        (["tail"], [1, 1, 1, 1]),
        (["head"], [2, 2, 2, 2]),
        (["adapter"], [2, 2, 2, 2]),
    ],
)
def test_blocks_below_what_is_trained_run_forward_only(trained: list[str], runs: list[int]) -> None:
    module, seen = model(trained=trained)
    plain = plain_step(module, regression_batches(3))
    seen.clear()
    result, _ = step(module)
    assert [seen[index] for index in range(4)] == [3 * count for count in runs]
    assert [link.backward for link in result.chain.links] == [count > 1 for count in runs]
    assert not differences(module, result, plain)


def _uploaded_bytes_once_known(module: Regressor) -> int:
    stack, devices = layers_of(module), [Counting(0), Counting(1)]
    plan = plan_of(stack, num_workers=2, num_microbatches=3)
    with engine_of(module, stack, plan, devices=devices) as engine:
        engine.plan_for(mean_step(engine, regression_batches(3)).chain, plan)
        before = sum(device.uploaded_bytes for device in devices)
        mean_step(engine, regression_batches(3))
    return sum(device.uploaded_bytes for device in devices) - before


def test_blocks_that_run_forward_only_are_uploaded_once() -> None:
    module, _ = model(trained=["layers.2.adapter", "layers.3.adapter"])
    both, _ = model(trained=["adapter"])
    fewer, more = (_uploaded_bytes_once_known(m) for m in (module, both))
    block = sum(p.nbytes for p in module.layers[0].parameters())
    assert more - fewer >= 2 * block


def test_a_stage_of_frozen_and_trained_blocks() -> None:
    """A stage is the unit that is run again."""
    module, seen = model(trained=["layers.1.adapter"])
    plain = plain_step(module, regression_batches(3))
    seen.clear()
    result, _ = step(module, partition=Partition(forward=(2, 2), backward=(0, 2, 2)))
    assert not differences(module, result, plain)
    assert seen[1] == seen[2] == seen[3] == 6
