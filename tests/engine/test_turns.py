import itertools
import random
import re
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.engine.worker.turns import TurnGraph, Turns
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Action, ActionKey, Schedule, dependencies
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import Regressor, layers_of, plan_of


def _cuts(draw: st.DrawFn, total: int) -> tuple[int, ...]:
    counts: list[int] = []
    while sum(counts) < total:
        counts.append(draw(st.integers(1, total - sum(counts))))
    return tuple(counts)


@st.composite
def random_plans(draw: st.DrawFn) -> Plan:
    """Return a plan with a random schedule: any order that respects the dependencies."""
    num_blocks, num_microbatches = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    num_workers = draw(st.integers(1, 4))
    fused = draw(st.integers(0, num_blocks))
    rest = num_blocks - fused
    partition = Partition(forward=_cuts(draw, rest), backward=(fused, *_cuts(draw, rest)))
    randomness = random.Random(draw(st.integers(0, 10**6)))
    waiting = [
        ActionKey(stage.kind, stage.index, microbatch)
        for stage in partition.stages()
        for microbatch in range(num_microbatches)
    ]
    done: set[ActionKey] = set()
    rows: list[list[Action]] = [[] for _ in range(num_workers)]
    while waiting:
        ready = [k for k in waiting if all(d.key in done for d in dependencies(k, partition))]
        key = randomness.choice(ready)
        waiting.remove(key)
        done.add(key)
        worker = randomness.randrange(num_workers)
        rows[worker].append(
            Action(kind=key.kind, stage=key.stage, microbatch=key.microbatch, worker=worker)
        )
    return Plan(
        model="random",
        partition=partition,
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        round_size=num_microbatches,
        schedule=Schedule(workers=tuple(map(tuple, rows))),
        block_names=tuple(f"layers.{i}" for i in range(num_blocks)),
    )


class _Log:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.events: list[tuple[str, Action]] = []

    def note(self, what: str, action: Action) -> None:
        with self._lock:
            self.events.append((what, action))


def _walk_all(plan: Plan, turns: Turns, graph: TurnGraph, log: _Log) -> list[threading.Thread]:
    def walk(microbatch: int) -> None:
        for action in graph.paths[microbatch]:
            try:
                turns.begin(action)
            except StepAborted:
                return
            log.note("begin", action)
            log.note("end", action)
            turns.end(action)

    threads = [
        threading.Thread(target=walk, args=(m,), daemon=True) for m in range(plan.num_microbatches)
    ]
    for thread in threads:
        thread.start()
    return threads


@settings(max_examples=60)
@given(random_plans())
def test_random_schedules_run_to_their_end_in_order(plan: Plan) -> None:
    graph = TurnGraph.from_plan(plan)
    turns, log = Turns(graph), _Log()
    for thread in _walk_all(plan, turns, graph, log):
        thread.join(60)
        assert not thread.is_alive(), f"deadlock\n{turns.progress().to_text()}\n{plan}"
    begins = [action for what, action in log.events if what == "begin"]
    assert sorted(map(str, begins)) == sorted(map(str, plan.schedule))
    moment = {(what, action.key): i for i, (what, action) in enumerate(log.events)}
    for worker, actions in enumerate(plan.schedule.workers):
        assert [a for a in begins if a.worker == worker] == list(actions)
        for before, after in itertools.pairwise(actions):
            assert moment["end", before.key] < moment["begin", after.key]
    for action in plan.schedule:
        for dependency in dependencies(action.key, plan.partition):
            assert moment["end", dependency.key] < moment["begin", action.key]
    assert turns.num_events == 2 * len(begins)


@settings(max_examples=30)
@given(random_plans(), st.integers(0, 20))
def test_an_abort_at_any_moment_releases_everyone(plan: Plan, moment: int) -> None:
    graph = TurnGraph.from_plan(plan)
    turns = Turns(graph)

    class Stopping(_Log):
        def note(self, what: str, action: Action) -> None:
            super().note(what, action)
            if len(self.events) == moment + 1:
                turns.abort()

    if not moment:
        turns.abort()
    for thread in _walk_all(plan, turns, graph, Stopping()):
        thread.join(60)
        assert not thread.is_alive()
    turns.abort()


def _plan() -> Plan:
    return plan_of(layers_of(Regressor(2)), num_workers=2, num_microbatches=2)


def test_a_waiter_waits_until_the_worker_is_free() -> None:
    plan = _plan()
    graph = TurnGraph.from_plan(plan)
    turns = Turns(graph)
    first, second = graph.paths[0][0], graph.paths[1][0]
    turns.begin(first)
    entered = threading.Event()

    def wait() -> None:
        turns.begin(second)
        entered.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not entered.wait(0.1)
    assert ">F0.0<" in turns.progress().to_text()
    assert re.search(r"worker 0: 0 of 6 done, runs F0\.0 for \d+\.\d s", turns.progress().to_text())
    assert "worker 1: 0 of 4 done, waits to begin F1.0 for F0.0 (worker 0, running)" in (
        turns.progress().to_text()
    )
    turns.end(first)
    assert entered.wait(60)
    thread.join()
    assert "worker 0: 1 of 6 done, runs F0.1" in turns.progress().to_text()
    assert "worker 1: 0 of 4 done, may begin F1.0" in turns.progress().to_text()
