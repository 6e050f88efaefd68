import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roundpipe_lightning.engine.transfer.pinned_pool import PinnedPool
from tests.kit.engine import LockingDevice

PAGE = 4096


@pytest.fixture
def device() -> LockingDevice:
    return LockingDevice()


@pytest.fixture
def pool(device: LockingDevice) -> Iterator[PinnedPool]:
    pool = PinnedPool(device)
    yield pool
    assert sum(device.locked.values()) == pool.num_bytes
    pool.close()
    assert not device.locked
    assert pool.num_bytes == 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9 * PAGE), st.integers(0, 9)), max_size=60))
def test_nobody_has_what_another_one_has(wishes: list[tuple[int, int]]) -> None:
    """Whatever is asked for, each byte is one's own until all views of it are gone."""
    device = LockingDevice()
    pool, held = PinnedPool(device), dict[int, tuple[Tensor, int]]()
    for number, (num_bytes, place) in enumerate(wishes):
        held.pop(place, None)
        whole = pool.take(num_bytes)
        assert whole.nbytes == num_bytes
        held[place] = (whole[num_bytes // 2 :].fill_(number % 251), number % 251)
        for view, value in held.values():
            assert (view == value).all()
    assert sum(device.locked.values()) == pool.num_bytes
    pool.close()


def test_memory_is_used_again_when_nobody_has_it(pool: PinnedPool, device: LockingDevice) -> None:
    first, second = pool.take(PAGE), pool.take(3 * PAGE)
    kept = first[:10].view(torch.int16)
    places = {tensor.data_ptr() for tensor in (first, second)}
    assert places == device.locked.keys()
    del first, second
    assert pool.take(2 * PAGE).data_ptr() in places, "what is at most twice as long"
    assert pool.take(PAGE).data_ptr() not in places, "somebody has a view, and the other is longer"
    del kept
    assert len({pool.take(PAGE).data_ptr() for _ in range(9)} - places) <= 1
    assert pool.num_bytes == 5 * PAGE


def test_tensors_of_many_lengths_need_no_more_than_the_longest(pool: PinnedPool) -> None:
    for length in range(20, 40):
        both = [pool.take(length * PAGE) for _ in range(2)]
        del both
    assert pool.num_bytes == 2 * 39 * PAGE


def test_what_is_not_used_for_long_goes_when_other_memory_is_made(pool: PinnedPool) -> None:
    pool.take(100 * PAGE)
    used = pool.take(PAGE)
    for _ in range(17):
        pool.end_step()
    del used
    assert pool.num_bytes == 101 * PAGE, "it may be an evaluation, which needs no gradients"
    pool.take(10 * PAGE)
    assert pool.num_bytes == 11 * PAGE


def test_threads_have_memory_of_their_own(pool: PinnedPool) -> None:
    failures = []

    def fill(value: int) -> None:
        for turn in range(200):
            mine = pool.take(64 + turn).fill_(value)
            if not (mine == value).all():
                failures.append(value)

    threads = [threading.Thread(target=fill, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.num_bytes <= 8 * PAGE  # a thread has the one before until it has the next
