import errno
import mmap
import os
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from roundpipe_lightning.engine.update.partial_step import CapturedStep
from roundpipe_lightning.errors import OffloadError
from roundpipe_lightning.optim import HostAdamW, disk
from roundpipe_lightning.optim.disk import Range, StateFile

WINDOW = 2 << 20  # the state of one piece


def parameters(count: int, size: int) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(size)) for _ in range(count)]
    for parameter in made:
        parameter.grad = torch.ones(size)
    return made


def on_disk(made: list[nn.Parameter], folder: Path) -> HostAdamW:
    optimizer = HostAdamW(made, offload="disk", offload_dir=folder)
    assert optimizer._kernel.files is not None
    optimizer._kernel.files._window_bytes = WINDOW
    return optimizer


def resident_bytes(file: StateFile) -> int:
    """Bytes of the mapping that the process holds in memory, as Linux says."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and ":" not in first:
            start, _, _ = first.partition("-")
            inside = int(start, 16) == file.address
        elif inside and first == "Rss:":
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is resident")
def test_resident_bytes_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parameters(4, 1 << 19)  # 16 MiB of state
    optimizer = on_disk(made, tmp_path)
    files = optimizer._kernel.files
    assert files is not None
    seen: list[int] = []
    original = StateFile.write_behind

    def watched(self: StateFile, part: Range) -> None:
        seen.append(resident_bytes(self))
        original(self, part)

    monkeypatch.setattr(StateFile, "write_behind", watched)
    with closing(optimizer):
        for _ in range(2):
            for parameter in made:
                parameter.grad = torch.ones_like(parameter)
            CapturedStep(optimizer).run(made[:3])
            CapturedStep(optimizer).run(made[3:])
        optimizer.close()
        seen.append(resident_bytes(files._files[0]))
    assert len(seen) == 2 * 2 * 8 + 1  # two moments of each window
    assert 0 < max(seen) <= 3 * WINDOW < 16 << 20, seen
    assert seen[-1] <= WINDOW // 4, seen


def test_the_next_window_is_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = parameters(3, 1 << 17)
    optimizer = on_disk(made, tmp_path)
    read: list[Range] = []
    monkeypatch.setattr(StateFile, "read_ahead", lambda self, part: read.append(part))
    with closing(optimizer):
        for parameter in made:
            step = CapturedStep(optimizer)
            step.run([parameter])
        optimizer.close()
        assert not read  # nobody knows yet what comes next
        for parameter in made:
            step = CapturedStep(optimizer)
            step.run([parameter])
        optimizer.close()
    starts = [part.start for part in read]
    size = 2 * 4 * (1 << 17)
    assert starts[:2] == [size, 2 * size]


def test_no_room_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OffloadError) as caught:
        HostAdamW(parameters(1, 1 << 20), offload="disk", offload_dir=tmp_path)
    message = str(caught.value)
    assert "0.01 GiB" in message
    assert str(tmp_path) in message
    assert "No space left" in message
    assert "GiB are free there" in message
    assert "moments='8bit'" in message


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="No such file or directory"):
        HostAdamW(parameters(1, 100), offload="disk", offload_dir=tmp_path / "nowhere")


def test_a_group_that_finds_no_room_leaves_the_optimizer_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = parameters(2, 1000)
    optimizer = HostAdamW([first], offload="disk", offload_dir=tmp_path)

    def full(number: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "_reserve", full)
    with pytest.raises(OffloadError):
        optimizer.add_param_group({"params": [second]})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]
    with closing(optimizer):
        optimizer.step()
    assert bool(first.detach().any())
    assert not second.detach().any()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_or_fills_up_loses_nothing(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, twins = parameters(2, 1 << 18), parameters(2, 1 << 18)
    optimizer = on_disk(made, tmp_path)

    def failing(file: int, start: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched, closing(optimizer):
        patched.setattr(disk, "_sync", failing)
        with pytest.raises(OffloadError, match=os.strerror(number)):
            optimizer.step()
        optimizer.close()
    with closing(HostAdamW(twins)) as reference:
        reference.step()
        for one, other in zip(made, twins, strict=True):
            assert torch.equal(one, other)
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(optimizer.state[one][name], reference.state[other][name])


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with closing(on_disk(parameters(1, 1000), tmp_path)) as optimizer:
        optimizer.step()
        assert not list(tmp_path.iterdir())
        assert optimizer._kernel.files is not None
        # A file without a name is the process's: the system frees it, however the process ends.
        assert os.fstat(optimizer._kernel.files._files[0]._number).st_nlink == 0


def test_without_fallocate_the_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    file = StateFile(tmp_path, 3 * mmap.PAGESIZE + 5)
    assert os.fstat(file._number).st_size == 3 * mmap.PAGESIZE + 5
