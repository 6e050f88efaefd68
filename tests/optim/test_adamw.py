import copy
import errno
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from roundpipe_lightning.engine.update.partial_step import CapturedStep, reason_not_separable
from roundpipe_lightning.errors import CheckpointError, ConfigurationError, OffloadError
from roundpipe_lightning.optim import HostAdamW, disk
from roundpipe_lightning.optim.disk import Range, StateFile
from roundpipe_lightning.optim.kernel import StepKernel
from roundpipe_lightning.optim.state import StatePlace

SHAPES = ((120, 251), (13,), (5, 7), (), (0,), (2, 3, 4, 5), (4096,))
FORMATS = ("fp32", "bf16", "8bit")


def parameters(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    made[0].data = made[0].data.t().contiguous().t()  # in another order in memory
    return made


def train(
    optimizer: torch.optim.Optimizer,
    *,
    num_steps: int = 4,
    seed: int = 1,
    dtype: torch.dtype | None = None,
    step: Callable[[], Any] | None = None,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = torch.randn(parameter.shape, generator=generator)
                # torch's fused kernel takes all tensors to be in one order, whatever their strides
                gradient = torch.empty_like(parameter, dtype=dtype).copy_(gradient)
                parameter.grad_dtype = gradient.dtype
                parameter.grad = gradient
        (step or optimizer.step)()


def same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{}, {"maximize": True, "betas": (0.5, 0.9), "lr": 0.1}, {"betas": (0.3, 0.5), "eps": 0.0}],
)
@pytest.mark.parametrize("choice", ["torch", "native"])
def test_is_torch_fused_to_the_bit(
    dtype: torch.dtype, options: dict[str, Any], choice: str
) -> None:
    mine, theirs = parameters(dtype), parameters(dtype)
    with closing(HostAdamW(mine, kernel=choice, **options)) as optimizer:
        train(optimizer)
        reference = torch.optim.AdamW(theirs, fused=True, **options)
        train(reference)
        assert same(mine, theirs)
        for one, other in zip(mine, theirs, strict=True):
            if one.numel():
                for name in ("step", "exp_avg", "exp_avg_sq"):
                    assert torch.equal(optimizer.state[one][name], reference.state[other][name])


def test_differs_from_the_loop_in_the_last_bits_only() -> None:
    mine, theirs = parameters(), parameters()
    with closing(HostAdamW(mine)) as optimizer:
        train(optimizer)
    train(torch.optim.AdamW(theirs, foreach=False))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choice", ["torch", "native"])
def test_bits_do_not_depend_on_threads_or_pieces(
    moments: str, dtype: torch.dtype, choice: str
) -> None:
    results = []
    for num_threads, size in ((1, 131072), (3, 1024), (2, 8192)):
        mine = parameters(dtype)
        with closing(HostAdamW(mine, moments=moments, num_threads=num_threads)) as optimizer:
            optimizer._kernel = StepKernel(
                moments=optimizer._moments,
                stochastic_rounding=True,
                num_threads=num_threads,
                choice=choice,
                piece_elements=size,
            )
            with closing(optimizer._kernel):
                train(optimizer)
        results.append(mine)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


@pytest.mark.parametrize(("moments", "error"), [("bf16", 5e-3), ("8bit", 2e-2)])
def test_small_moments_stay_near(moments: str, error: float) -> None:
    mine, theirs = parameters(), parameters()
    with closing(HostAdamW(mine, moments=moments, lr=1e-2)) as optimizer:
        train(optimizer, num_steps=20)
    train(torch.optim.AdamW(theirs, fused=True, lr=1e-2), num_steps=20)
    moved = (theirs[0] - parameters()[0]).norm()
    assert 0 < (mine[0] - theirs[0]).norm().item() / moved.item() < error


def test_parameters_of_bfloat16_are_rounded_without_bias() -> None:
    # A thousandth of an update is less than half a step of bfloat16: the nearest swallows all.
    results = {}
    for stochastic in (False, True):
        mine = nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
        options: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.0}
        with closing(HostAdamW([mine], stochastic_rounding=stochastic, **options)) as optimizer:
            for _ in range(20):
                mine.grad = torch.ones_like(mine)
                optimizer.step()
        results[stochastic] = 1 - mine.float().mean().item()
    assert results[False] == 0
    assert results[True] == pytest.approx(20 * 1e-4, rel=0.1)


def test_gradients_and_copies_of_bfloat16() -> None:
    mine, theirs = parameters(), parameters()
    copies = {p: torch.empty_like(p, dtype=torch.bfloat16) for p in mine}
    with closing(HostAdamW(mine)) as optimizer:
        optimizer.write_copies(copies)
        train(optimizer, dtype=torch.bfloat16)
    reference = torch.optim.AdamW(theirs, fused=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for p in theirs:
            gradient = torch.randn(p.shape, generator=generator).bfloat16()
            p.grad = torch.empty_like(p).copy_(gradient)
        reference.step()
    assert same(mine, theirs)
    assert same(list(copies.values()), [p.bfloat16() for p in theirs])


def test_a_copy_that_does_not_fit_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(4, 3))
    optimizer = HostAdamW([parameter])
    with pytest.raises(ConfigurationError, match=r"shape \(4, 3\).*copy has|\(3, 4\)"):
        optimizer.write_copies({parameter: torch.zeros(3, 4)})


@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("offload", [None, "disk"])
def test_may_be_stepped_in_parts(moments: str, offload: str | None, tmp_path: Path) -> None:
    options: dict[str, Any] = {"moments": moments, "offload": offload, "offload_dir": tmp_path}
    whole, parts = parameters(), parameters()
    with closing(HostAdamW(whole, **options)) as one, closing(HostAdamW(parts, **options)) as other:
        assert reason_not_separable(other) is None
        train(one)

        def in_parts() -> None:
            step = CapturedStep(other)
            for parameter in reversed(parts):
                step.run([parameter])

        train(other, step=in_parts)
        assert same(whole, parts)


def test_groups_schedulers_and_missing_gradients() -> None:
    def made(kind: Callable[..., torch.optim.Optimizer]) -> Iterator[nn.Parameter]:
        mine = parameters()
        optimizer = kind([{"params": mine[:2], "lr": 0.1}, {"params": mine[2:3]}])
        optimizer.add_param_group({"params": mine[3:], "weight_decay": 0.5})
        scheduler = LambdaLR(optimizer, lambda step: 1 / (step + 1))
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            for index, parameter in enumerate(mine):
                gradient = torch.randn(parameter.shape, generator=generator)
                gradient = torch.empty_like(parameter).copy_(gradient)
                parameter.grad = gradient if (index + number) % 3 else None
            optimizer.step()
            scheduler.step()
        if isinstance(optimizer, HostAdamW):
            optimizer.close()
        yield from mine

    theirs = made(lambda groups: torch.optim.AdamW(groups, fused=True))
    assert same(list(made(HostAdamW)), list(theirs))


def test_a_gradient_in_another_order_is_understood() -> None:
    mine, theirs = (nn.Parameter(torch.ones(50, 30).t()) for _ in range(2))
    gradient = torch.randn(30, 50)
    for parameter in (mine, theirs):
        parameter.grad = gradient.clone()
    with closing(HostAdamW([mine], eps=1.0)) as optimizer:
        optimizer.step()
    torch.optim.AdamW([theirs], eps=1.0, foreach=False).step()
    torch.testing.assert_close(mine, theirs)


def test_a_parameter_with_gaps_is_stepped() -> None:
    memory = torch.zeros(6, 8)
    parameter, twin = nn.Parameter(memory[:, ::2]), nn.Parameter(torch.zeros(6, 4))
    assert not parameter.is_contiguous()
    gradient = torch.randn(6, 4)
    for one, kind in ((parameter, HostAdamW), (twin, torch.optim.AdamW)):
        one.grad = gradient
        optimizer: torch.optim.Optimizer = kind([one])
        optimizer.step()
    torch.testing.assert_close(parameter, twin)
    assert bool((memory[:, 1::2] == 0).all())


# ------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize("offload", [None, "disk"])
def test_goes_to_torch_and_back(offload: str | None, tmp_path: Path) -> None:
    mine, theirs, back = parameters(), parameters(), parameters()
    options: dict[str, Any] = {"offload": offload, "offload_dir": tmp_path}
    with closing(HostAdamW(mine, **options)) as first, closing(HostAdamW(back, **options)) as last:
        reference = torch.optim.AdamW(theirs, fused=True)
        train(first)
        reference.load_state_dict(copy.deepcopy(first.state_dict()))
        assert reference.state_dict()["param_groups"] == first.state_dict()["param_groups"]
        for parameter, saved in zip(theirs, mine, strict=True):
            parameter.data.copy_(saved.data)
        train(first, seed=2)
        train(reference, seed=2)
        assert same(mine, theirs)
        last.load_state_dict(reference.state_dict())
        for parameter, saved in zip(back, theirs, strict=True):
            parameter.data.copy_(saved.data)
        train(reference, seed=3)
        train(last, seed=3)
        assert same(theirs, back)


@pytest.mark.parametrize("moments", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resumes_to_the_bit(moments: str, dtype: torch.dtype, tmp_path: Path) -> None:
    on, off = parameters(dtype), parameters(dtype)
    with closing(HostAdamW(on, moments=moments)) as first:
        train(first)
        torch.save(first.state_dict(), tmp_path / "state.pt")
        for parameter, saved in zip(off, on, strict=True):
            parameter.data.copy_(saved.data)
        with closing(HostAdamW(off, moments=moments, seed=7)) as second:
            second.load_state_dict(torch.load(tmp_path / "state.pt"))
            train(first, seed=2)
            train(second, seed=2)
    assert same(on, off)


def test_a_loaded_state_is_a_copy() -> None:
    mine, other = parameters(), parameters()
    with closing(HostAdamW(mine)) as first, closing(HostAdamW(other)) as second:
        train(first)
        saved = first.state_dict()
        second.load_state_dict(saved)
        before = copy.deepcopy(saved["state"][0]["exp_avg"])
        train(second, seed=5)
        assert torch.equal(saved["state"][0]["exp_avg"], before)


def test_a_state_that_does_not_fit_is_refused() -> None:
    mine = parameters()
    with closing(HostAdamW(mine)) as optimizer:
        train(optimizer, num_steps=1)
        saved = optimizer.state_dict()
        broken = copy.deepcopy(saved)
        broken["state"][1]["exp_avg"] = torch.zeros(12)
        with pytest.raises(CheckpointError, match=r"\(13,\).*exp_avg has shape \(12,\)"):
            optimizer.load_state_dict(broken)
        broken = copy.deepcopy(saved)
        del broken["state"][1]["exp_avg_sq"]
        with pytest.raises(CheckpointError, match="exp_avg_sq is missing"):
            optimizer.load_state_dict(broken)
    amsgrad = torch.optim.AdamW(mine, amsgrad=True)
    with pytest.raises(ConfigurationError, match="amsgrad=True"):
        HostAdamW(mine).load_state_dict(amsgrad.state_dict())
    adam = torch.optim.Adam(mine)
    with pytest.raises(ConfigurationError, match="that of Adam"):
        HostAdamW(mine).load_state_dict(adam.state_dict())


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"moments": "fp8"}, "moments='fp8': choose one of fp32, bf16, 8bit"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"kernel": "fast"}, "kernel='fast': choose one of auto, torch, native"),
        ({"offload": "tape"}, "offload='tape'"),
        ({"offload": "disk"}, "offload='disk' needs offload_dir"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        HostAdamW([nn.Parameter(torch.zeros(3))], **options)


def test_parameters_that_cannot_be_stepped() -> None:
    good = nn.Parameter(torch.zeros(3))
    bad = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ConfigurationError, match=r"'phase' is of torch.complex64"):
        HostAdamW([("phase", bad)])
    optimizer = HostAdamW([good])
    with pytest.raises(ConfigurationError, match=r"0 of group 1 is of torch.complex64"):
        optimizer.add_param_group({"params": [bad]})
    assert len(optimizer.param_groups) == 1
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigurationError, match="'table' is sparse"):
        HostAdamW([("table", embedding.weight)]).step()


def test_frozen_parameters_have_no_state(tmp_path: Path) -> None:
    frozen = nn.Parameter(torch.zeros(1 << 20), requires_grad=False)
    trained = nn.Parameter(torch.ones(5))
    trained.grad = torch.ones(5)
    optimizer = HostAdamW([frozen, trained], offload="disk", offload_dir=tmp_path)
    with closing(optimizer):
        optimizer.step()
        assert not optimizer.state[frozen]
        assert optimizer._kernel.files is not None
        assert sum(file.num_bytes for file in optimizer._kernel.files._files) < 1000


@pytest.mark.parametrize(("moments", "expected"), [("fp32", 8), ("bf16", 4), ("8bit", 2 + 8 / 256)])
def test_bytes_per_parameter(moments: str, expected: float, tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.zeros(1 << 16))
    parameter.grad = torch.ones_like(parameter)
    with closing(HostAdamW([parameter], moments=moments)) as optimizer:
        assert optimizer.state_place == StatePlace(memory_bytes=expected, disk_bytes=0)
        optimizer.step()
        tensors = [t for t in optimizer.state[parameter].values() if isinstance(t, Tensor)]
        assert sum(t.nbytes for t in tensors if t.dim()) == expected * parameter.numel()
    disk = HostAdamW([parameter], moments=moments, offload="disk", offload_dir=tmp_path)
    assert disk.state_place == StatePlace(memory_bytes=0, disk_bytes=expected)
    without_values = nn.Parameter(torch.zeros(1 << 16, device="meta"))
    planned = HostAdamW([without_values], moments=moments, offload="disk", offload_dir="nowhere")
    assert planned.state_place == disk.state_place


# State on a disk ----------------------------------------------------------------------------------


WINDOW = 2 << 20  # the state of one piece


def equal_parameters(count: int, size: int) -> list[nn.Parameter]:
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
    made = equal_parameters(4, 1 << 19)  # 16 MiB of state
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
    made = equal_parameters(3, 1 << 17)
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
        HostAdamW(equal_parameters(1, 1 << 20), offload="disk", offload_dir=tmp_path)
    message = str(caught.value)
    assert "0.01 GiB" in message
    assert str(tmp_path) in message
    assert "No space left" in message
    assert "GiB are free there" in message
    assert "moments='8bit'" in message


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="No such file or directory"):
        HostAdamW(equal_parameters(1, 100), offload="disk", offload_dir=tmp_path / "nowhere")


def test_a_group_that_finds_no_room_leaves_the_optimizer_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = equal_parameters(2, 1000)
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
    made, twins = equal_parameters(2, 1 << 18), equal_parameters(2, 1 << 18)
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
    with closing(on_disk(equal_parameters(1, 1000), tmp_path)) as optimizer:
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
