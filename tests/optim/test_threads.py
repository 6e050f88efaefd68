import threading
from contextlib import closing

import pytest
import torch

from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.engine.transfer.gradient_downloads import HostSums
from roundpipe_lightning.engine.transfer.pinned_pool import PinnedPool
from roundpipe_lightning.optim import kernel
from roundpipe_lightning.optim.kernel import KernelThreads


def test_intra_op_threads_of_others_stay() -> None:
    torch.set_num_threads(6)
    inside: list[int] = []
    after: list[int] = []
    with (
        closing(KernelThreads[int](num_threads=2, num_scratch=8)) as team,
        closing(HostSums(PinnedPool(CpuDevice(0)), on_failure=lambda error, what: None)) as sums,
    ):
        team.process(lambda piece, scratch: inside.append(torch.get_num_threads()), [0, 1, 2])
        sums.add_later(lambda: None)
    later = threading.Thread(target=lambda: after.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert set(inside) == {1}
    assert after == [6]
    assert torch.get_num_threads() == 6


@pytest.mark.parametrize(("intra_op", "expected"), [(16, 14), (4, 4)])
def test_one_core_in_eight_is_left_to_others(
    intra_op: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "usable_processors", lambda: set(range(16)))
    torch.set_num_threads(intra_op)
    assert KernelThreads[int](num_threads=None, num_scratch=8).num_threads == expected
