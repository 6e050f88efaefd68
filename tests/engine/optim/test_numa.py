"""Processors and nodes, and the threads that keep to them."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch

from roundpipe_lightning.optim import kernel
from roundpipe_lightning.optim import threads as numa
from roundpipe_lightning.optim.scratch import Scratch
from roundpipe_lightning.optim.threads import (
    KernelThreads,
    Topology,
    node_of,
    parse_processors,
    pin_this_thread,
    read_topology,
)

TWO_NODES = Topology(nodes=(0, 2), processors=((0, 1, 2, 3), (4, 5, 6, 7)))


def described(folder: Path, nodes: dict[int, str]) -> Path:
    for node, processors in nodes.items():
        (folder / f"node{node}").mkdir()
        (folder / f"node{node}" / "cpulist").write_text(processors + "\n", encoding="ascii")
    return folder


def test_lists_of_processors() -> None:
    assert parse_processors("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_processors("\n") == set()


def test_nodes_are_read_and_only_what_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described(tmp_path, {0: "0-3", 2: "4-7", 10: "8-9", 11: ""})
    monkeypatch.setattr(numa, "usable_processors", lambda: {1, 2, 6, 8})
    assert read_topology(tmp_path) == Topology(nodes=(0, 2, 10), processors=((1, 2), (6,), (8,)))


def test_a_system_without_nodes_is_one(tmp_path: Path) -> None:
    topology = read_topology(tmp_path)
    assert topology.nodes == (0,)
    assert set(topology.processors[0]) == numa.usable_processors()


def test_the_first_processors_are_left_to_others() -> None:
    assert TWO_NODES.without(1).processors == ((1, 2, 3), (4, 5, 6, 7))
    assert TWO_NODES.without(5) == Topology(nodes=(2,), processors=((5, 6, 7),))
    assert TWO_NODES.without(99).num_processors == 1


def test_this_memory_is_on_a_node_of_this_machine() -> None:
    memory = torch.ones(1 << 16)
    assert node_of(memory.data_ptr()) in (None, *read_topology().nodes)


def test_a_thread_is_pinned_and_the_caller_is_not() -> None:
    before = numa.usable_processors()
    seen: list[set[int]] = []

    def pinned() -> None:
        pin_this_thread([min(before)])
        seen.append(numa.usable_processors())

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert numa.usable_processors() == before
    if hasattr(os, "sched_setaffinity"):
        assert seen == [{min(before)}]


def test_processors_that_are_gone_are_no_error() -> None:
    before = numa.usable_processors()
    pin_this_thread([4095])
    assert numa.usable_processors() == before


# ----------------------------------------------------------------------------------------- threads


def test_threads_take_their_node_first_and_then_the_others() -> None:
    machine = Topology(nodes=(0, 1), processors=((0,), (0,)))
    taken: list[tuple[str, int]] = []
    first = threading.Barrier(2, timeout=60)

    def work(piece: int, scratch: Scratch) -> None:
        if piece % 10 == 0:
            first.wait()  # both threads hold the first piece of their own queue
        taken.append((threading.current_thread().name[-1], piece))

    threads: KernelThreads[int] = KernelThreads(
        num_threads=2, num_scratch=8, topology=machine, reserved=0
    )
    with closing(threads):
        threads.run(work, [[0, 1, 2], [10, 11]])
    assert sorted(piece for _, piece in taken) == [0, 1, 2, 10, 11]
    owners = {piece: name for name, piece in taken}
    assert owners[0] != owners[10]


def test_an_error_stops_the_pieces_nobody_has_begun() -> None:
    done: list[int] = []

    def work(piece: int, scratch: Scratch) -> None:
        if piece == 1:
            raise ValueError("broken piece")
        done.append(piece)

    threads: KernelThreads[int] = KernelThreads(num_threads=1, num_scratch=8)
    with closing(threads):
        with pytest.raises(ValueError, match="broken piece"):
            threads.run(work, [[0, 1, 2]])
        assert done == [0]
        threads.run(work, [[3]])
        assert done == [0, 3]


def test_intra_op_threads_of_others_stay() -> None:
    torch.set_num_threads(3)
    inside: list[int] = []
    after: list[int] = []
    threads: KernelThreads[int] = KernelThreads(num_threads=2, num_scratch=8)
    with closing(threads):
        threads.run(lambda piece, scratch: inside.append(torch.get_num_threads()), [[0, 1, 2]])
    later = threading.Thread(target=lambda: after.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert set(inside) == {1}
    assert after == [3]
    assert torch.get_num_threads() == 3


def test_one_core_in_eight_is_left_to_others() -> None:
    machine = Topology(nodes=(0,), processors=(tuple(range(16)),))
    torch.set_num_threads(16)
    assert KernelThreads(num_threads=None, num_scratch=8, topology=machine).num_threads == 14
    torch.set_num_threads(4)
    assert KernelThreads(num_threads=None, num_scratch=8, topology=machine).num_threads == 4


def test_tasks_go_to_the_node_of_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundpipe_lightning.optim.pieces import Settings, Stepped, tasks

    settings = Settings(lr=1, beta1=0, beta2=0, eps=1, weight_decay=0, maximize=False)
    values = torch.zeros(4096)
    entry = Stepped(
        values=values,
        gradient=values,
        state={},
        step=torch.zeros(()),
        copy=None,
        seed=0,
        settings=settings,
    )
    middle = values.data_ptr() + 2 * 4096
    monkeypatch.setattr(kernel, "node_of", lambda address: 2 if address >= middle else 0)
    queues = kernel._by_node(tasks([entry], size=1024), (0, 2))
    assert [[piece.start for task in queue for piece in task] for queue in queues] == [
        [0, 1024],
        [2048, 3072],
    ]
