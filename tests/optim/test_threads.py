"""The threads that step pieces: errors, torch's own threads, and the processors they keep to."""

from __future__ import annotations

import os
import threading
from contextlib import closing

import pytest
import torch

from roundpipe_lightning.optim import threads
from roundpipe_lightning.optim.pieces import Scratch
from roundpipe_lightning.optim.threads import KernelThreads, pin_this_thread, usable_processors


def test_a_thread_is_pinned_and_the_caller_is_not() -> None:
    before = usable_processors()
    seen: list[set[int]] = []

    def pinned() -> None:
        pin_this_thread([min(before)])
        seen.append(usable_processors())

    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert usable_processors() == before
    if hasattr(os, "sched_setaffinity"):
        assert seen == [{min(before)}]


def test_processors_that_are_gone_are_no_error() -> None:
    before = usable_processors()
    pin_this_thread([4095])
    assert usable_processors() == before


def test_an_error_stops_the_pieces_nobody_has_begun() -> None:
    done: list[int] = []

    def work(piece: int, scratch: Scratch) -> None:
        if piece == 1:
            raise ValueError("broken piece")
        done.append(piece)

    with closing(KernelThreads[int](num_threads=1, num_scratch=8)) as team:
        with pytest.raises(ValueError, match="broken piece"):
            team.process(work, [0, 1, 2])
        assert done == [0]
        team.process(work, [3])
        assert done == [0, 3]


def test_intra_op_threads_of_others_stay() -> None:
    torch.set_num_threads(3)
    inside: list[int] = []
    after: list[int] = []
    with closing(KernelThreads[int](num_threads=2, num_scratch=8)) as team:
        team.process(lambda piece, scratch: inside.append(torch.get_num_threads()), [0, 1, 2])
    later = threading.Thread(target=lambda: after.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert set(inside) == {1}
    assert after == [3]
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("intra_op", "expected"), [(16, 14), (4, 4)])
def test_one_core_in_eight_is_left_to_others(
    intra_op: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_processors", lambda: set(range(16)))
    torch.set_num_threads(intra_op)
    assert KernelThreads[int](num_threads=None, num_scratch=8).num_threads == expected
