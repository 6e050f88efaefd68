"""Memory for boundaries in flight: its size follows from the plan, not from who is faster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from roundpipe_lightning.emulation.race_checker import ProtocolChecker
from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.engine.device.events import DoneEvent, HostEvent
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.transfer.pinned_pool import PinnedPool, PinnedPools
from roundpipe_lightning.engine.worker.turns import TurnGraph, Turns
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Action, ActionKey
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.engine.test_turns import random_plans
from tests.kit.engine import (
    TIMEOUT_SECONDS,
    LockingDevice,
    Regressor,
    engine_of,
    layers_of,
    mean_step,
    plan_of,
    regression_batches,
    training_step,
)


def place_of(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's bytes begin and end."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


# ---------------------------------------------------------------------------------------- one pool


def test_blocks_that_are_allocated_at_once_lie_apart() -> None:
    pool = PinnedPool(torch.empty(16384, dtype=torch.uint8))
    blocks = [pool.allocate(size) for size in (1000, 300, 5000, 0, 1)]
    places = sorted(place_of(block.tensor) for block in blocks)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(places))
    assert pool.num_bytes == 1024 + 512 + 5120 + 256 + 256  # each to 256 bytes


def test_who_writes_next_waits_for_the_copies_that_used_the_place() -> None:
    pool = PinnedPool(torch.empty(2048, dtype=torch.uint8))
    first = pool.allocate(1000)
    landed, arrived = HostEvent("landed"), HostEvent("arrived")
    for event in (landed, arrived, DoneEvent()):
        first.used_until(event)
    landed.set()
    pool.release(first)
    again = pool.allocate(900)  # of the same size, to 256 bytes
    assert place_of(again.tensor)[0] == place_of(first.tensor)[0]
    assert again.after == (arrived,)  # what has happened need not be waited for
    pool.release(again)  # whose copies were never submitted
    assert pool.allocate(1000).after == (arrived,)


def test_the_next_microbatch_has_the_whole_pool() -> None:
    pool = PinnedPool(torch.empty(2048, dtype=torch.uint8))
    first, event = pool.allocate(1024), HostEvent("arrived")
    first.used_until(event)
    pool.reset()
    second = pool.allocate(600)  # while somebody still refers to the first one
    assert place_of(second.tensor)[0] == place_of(first.tensor)[0]
    assert second.after == (event,)
    pool.release(first)  # has no meaning for the pool any more
    third = pool.allocate(1024)
    assert place_of(third.tensor)[0] == place_of(first.tensor)[0] + 768
    assert pool.num_bytes == 768 + 1024


# --------------------------------------------------------------------------------------- the pools


def test_pools_are_made_between_steps_as_long_as_was_needed() -> None:
    device = LockingDevice()
    pools = PinnedPools(device)
    for sizes in ((1000, 300), (300, 1000), (100, 900), (1000, 300)):
        some = pools.begin_step([0, 1, 0])
        assert some[0] is some[2]
        blocks = [pool.allocate(size) for pool, size in zip(some, sizes, strict=False)]
        pools.end()
        assert [*device.locked.values()] == [pools.num_bytes]
        del blocks
    assert pools.num_bytes == 2 * 1024
    first, second = pools.begin_step([0, 1])
    [locked] = device.locked
    assert place_of(first.allocate(1024).tensor)[0] == locked
    assert place_of(second.allocate(1024).tensor)[0] == locked + 1024
    ordinary = first.allocate(2000)
    assert not locked <= place_of(ordinary.tensor)[0] < locked + pools.num_bytes
    assert first.is_short
    pools.close()
    assert not device.locked


def test_steps_in_flight_have_pools_apart() -> None:
    device = LockingDevice()
    pools = PinnedPools(device)
    pools.begin_step([0])[0].allocate(500)
    assert pools.can_overlap([0])  # for once in ordinary memory
    pools.begin_step([0])
    pools.end_first()
    assert not pools.can_overlap([0])
    pools.end()
    assert pools.num_bytes == 2 * 512
    for _ in range(3):
        [one] = pools.begin_step([0])
        assert pools.can_overlap([0])
        assert not pools.can_overlap([0, 1])  # it needs another pool
        [other] = pools.begin_step([0])
        (start, stop), (begin, end) = (place_of(pool.allocate(512).tensor) for pool in (one, other))
        assert stop <= begin or end <= start
        one.reset()
        pools.end_first()
        [third] = pools.begin_step([0])
        assert place_of(third.allocate(512).tensor) == (start, stop)
        pools.end()
    assert pools.num_bytes == 2 * 512
    pools.close()


def test_who_comes_back_late_from_a_failed_step_gets_ordinary_memory() -> None:
    pools = PinnedPools(LockingDevice())
    pools.begin_step([0])[0].allocate(500)
    pools.end()
    [late] = pools.begin_step([0])
    pools.end(failed=True)
    [pool] = pools.begin_step([0])
    place, ordinary = place_of(pool.allocate(512).tensor), place_of(late.allocate(512).tensor)
    assert ordinary[1] <= place[0] or place[1] <= ordinary[0]
    pools.end()
    assert pools.num_bytes == 512
    pools.close()


# ------------------------------------------------------------------------------- who shares a pool


@settings(deadline=None)
@given(random_plans())
def test_microbatches_of_one_pool_are_never_in_flight_together(plan: Plan) -> None:
    graph = TurnGraph.from_plan(plan)
    before = {key: set[ActionKey]() for key in graph.actions}
    for key in _in_order(plan, graph, first=lambda ready: ready[0]):
        for follower in graph.opens[key]:
            before[follower] |= before[key] | {key}
    for one, path in enumerate(graph.paths):
        for other in range(one):
            if graph.pools[one] == graph.pools[other]:
                there = graph.paths[other]
                assert there[-1].key in before[path[0].key] or path[-1].key in before[there[0].key]
    assert sorted({*graph.pools}) == [*range(max(graph.pools) + 1)]


def test_rounds_take_over_the_pools_of_rounds_that_have_ended() -> None:
    plan = plan_of(
        layers_of(Regressor(3)),
        num_workers=2,
        num_microbatches=12,
        round_size=2,
        partition=Partition(forward=(2,), backward=(1, 2)),
    )
    pools = TurnGraph.from_plan(plan).pools
    assert pools[:2] == (0, 1)
    assert max(pools) < 6


# -------------------------------------------------------------------------------- the whole engine


def _in_order(
    plan: Plan, graph: TurnGraph, *, first: Callable[[list[ActionKey]], ActionKey]
) -> Iterator[ActionKey]:
    """All actions in an order that the plan allows; of those that can be next, `first` chooses."""
    left = dict(graph.num_waits)
    ready = [key for key, number in left.items() if not number]
    while ready:
        key = first(ready)
        ready.remove(key)
        yield key
        for follower in graph.opens[key]:
            left[follower] -= 1
            if not left[follower]:
                ready.append(follower)


def furthest(ready: Sequence[ActionKey]) -> ActionKey:
    """Choose the first microbatch: it is at its end before others begin, where that is possible."""
    return min(ready, key=lambda key: key.microbatch)


def nearest(ready: Sequence[ActionKey]) -> ActionKey:
    """Choose what has come least far: all are in flight at once, where that is possible."""
    return min(ready, key=lambda key: ("FXB".index(key.kind.value), key.stage, key.microbatch))


class _Order:
    """Lets actions run one by one in a given order, whatever could run at the same time."""

    def __init__(self, keys: Iterable[ActionKey]) -> None:
        keys = list(keys)
        self._gates = {key: threading.Event() for key in keys}
        self._following = dict(pairwise(keys))
        self._gates[keys[0]].set()

    def begin(self, action: Action) -> None:
        assert self._gates[action.key].wait(TIMEOUT_SECONDS)

    def end(self, action: Action) -> None:
        if action.key in self._following:
            self._gates[self._following[action.key]].set()


@contextmanager
def in_order(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, first: Callable[[list[ActionKey]], ActionKey]
) -> Iterator[None]:
    """Run the actions of every step in one order."""
    begin, end = Turns.begin, Turns.end
    orders: dict[Turns, _Order] = {}
    mutex = threading.Lock()

    def order_of(turns: Turns) -> _Order:
        with mutex:
            if turns not in orders:
                orders[turns] = _Order(_in_order(plan, TurnGraph.from_plan(plan), first=first))
            return orders[turns]

    def begin_in_order(turns: Turns, action: Action) -> None:
        order_of(turns).begin(action)
        begin(turns, action)

    def end_in_order(turns: Turns, action: Action) -> None:
        end(turns, action)
        order_of(turns).end(action)

    with monkeypatch.context() as patched:
        patched.setattr(Turns, "begin", begin_in_order)
        patched.setattr(Turns, "end", end_in_order)
        yield


def two_round_plan(module: Regressor) -> Plan:
    """Return a plan of two rounds whose microbatches may run ahead of each other."""
    plan = plan_of(
        layers_of(module),
        num_workers=3,
        num_microbatches=6,
        round_size=3,
        partition=Partition(forward=(1, 2), backward=(1, 1, 1, 1)),
    )
    return replace(plan, weight_slots=2)


@pytest.mark.parametrize("batches_in_flight", [1, 2])
def test_locked_memory_is_the_same_in_every_order(
    monkeypatch: pytest.MonkeyPatch, batches_in_flight: int
) -> None:
    sizes = set()
    for orders in ((furthest, nearest), (nearest, furthest)):
        module = Regressor(4)
        plan = two_round_plan(module)
        with EmulatedServer(3, checker=ProtocolChecker(), poison=True) as server:
            devices = [*server.devices]
            with engine_of(module, layers_of(module), plan, devices=devices) as engine:
                for first in orders:
                    with in_order(monkeypatch, plan, first):
                        for _ in range(2):
                            run(engine, batches_in_flight=batches_in_flight)
                    homes = engine._open.transfers._homes  # as many as are in use at once
                    assert homes is not None
                    sizes.add(engine.staging_bytes - homes.num_bytes)
    assert len(sizes) == 1


def run(engine: Engine, *, batches_in_flight: int) -> None:
    """Run a step, or two of which one begins while the other is in flight."""
    batches = regression_batches(6)
    if batches_in_flight == 1:
        mean_step(engine, batches)
        return
    steps = []
    for _ in range(batches_in_flight):
        steps.append(engine.begin_step(batches, training_step, loss_scales=[1.0] * 6))
        steps[-1].outputs()
    steps[-1].result()
