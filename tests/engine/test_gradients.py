import threading
import weakref
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.engine.transfer.gradient_reduce import (
    GradientAccumulator,
    GradientReducer,
    SharedGradients,
    fold,
)
from tests.kit.architectures import decoder_stack, tiny_causal_lm, token_batches
from tests.kit.engine import (
    Regressor,
    auto_plan,
    emulated_workers,
    engine_step,
    layers_of,
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
            reducer.add_shared(number, {embedding: late[number]} if len(left[number]) else {})
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
    indices, values = torch.tensor([[1]]), torch.ones(1, 2)
    sparse = torch.sparse_coo_tensor(indices, values, (3, 2), check_invariants=True)
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


def test_what_has_been_handed_out_is_let_go() -> None:
    """Who keeps a step keeps no gradients, of which each step would have its own."""
    own, shared = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    reducer = GradientReducer(num_microbatches=1, num_stages=1, shared=[shared])
    reducer.add_stage(0, [0], {own: torch.ones(2)})
    reducer.add_shared(0, {shared: torch.ones(2)})
    reducer.close_microbatch(0)
    kept = [weakref.ref(gradient) for gradient in reducer.sums().values()]
    assert len(kept) == 2
    assert not [gradient for gradient in kept if gradient() is not None]


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
