"""Gradients are added in the order of the microbatches, whoever comes first."""

from __future__ import annotations

import threading
from functools import reduce

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from roundpipe_lightning.engine.transfer.gradient_reduce import (
    GradientAccumulator,
    GradientReducer,
    fold,
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


def test_parameters_that_some_microbatches_do_not_use() -> None:
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    accumulator = GradientAccumulator(3)
    accumulator.add([2], {two: torch.tensor([4.0])})
    accumulator.add([0], {})
    assert not accumulator.sums
    accumulator.add([1], {one: torch.tensor([1.0]), two: torch.tensor([2.0])})
    assert accumulator.sums == {one: torch.tensor([1.0]), two: torch.tensor([6.0])}


def test_the_reducer_keeps_stages_apart_and_sums_shared_parameters_per_microbatch() -> None:
    mine, shared = nn.Parameter(torch.zeros(16)), nn.Parameter(torch.zeros(16))
    a, b, c, d = _gradients(4)
    reducer = GradientReducer(num_microbatches=2, num_stages=2)
    reducer.add_shared(1, {shared: c.clone()})
    reducer.add_stage(1, [1], {mine: b.clone()})
    reducer.add_shared(1, {shared: d.clone()})
    reducer.close_microbatch(1)
    reducer.add_shared(0, {shared: a.clone()})
    reducer.add_stage(1, [0], {mine: a.clone()})
    reducer.add_shared(0, {shared: b.clone()})
    for microbatch in (0, 1):
        reducer.add_stage(0, [microbatch], {})
    reducer.close_microbatch(0)
    sums = reducer.sums()
    assert torch.equal(sums[mine], a + b)
    assert torch.equal(sums[shared], (a + b) + (c + d))


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
