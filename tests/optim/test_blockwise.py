import json
import threading
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import host_optimizer
from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.engine.transfer.gradient_downloads import HostSums
from roundpipe_lightning.engine.transfer.pinned_pool import PinnedPool
from roundpipe_lightning.optim import kernel
from roundpipe_lightning.optim.blockwise import (
    BLOCK,
    FIRST_MOMENT,
    SECOND_MOMENT,
    Noise,
    PowerCode,
    num_blocks,
)
from roundpipe_lightning.optim.kernel import KernelThreads


def encoded(code: PowerCode, numbers: Tensor, random: Noise | None = None) -> tuple[Tensor, Tensor]:
    codes = torch.empty(numbers.numel(), dtype=code.dtype)
    scales = torch.empty(num_blocks(numbers.numel()))
    code.encode(numbers.clone(), codes=codes, scales=scales, random=random)
    return codes, scales


def decoded(code: PowerCode, codes: Tensor, scales: Tensor) -> Tensor:
    return code.decode(codes, scales, out=torch.empty(codes.numel()))


def sample(code: PowerCode, count: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(count, generator=generator)
    return numbers if code.signed else numbers.square()


CODES = pytest.mark.parametrize("code", [FIRST_MOMENT, SECOND_MOMENT], ids=["first", "second"])


@CODES
@pytest.mark.parametrize("random", [None, Noise(seed=3, offset=0)], ids=["nearest", "random"])
def test_error_is_what_is_documented(code: PowerCode, random: Noise | None) -> None:
    numbers = sample(code, 10 * BLOCK + 17)
    codes, scales = encoded(code, numbers, random)
    error = (decoded(code, codes, scales) - numbers).abs()
    limit = 2 / 127 if code.signed else 4 / 255
    for block in range(num_blocks(numbers.numel())):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        largest = numbers[part].abs().max()
        assert scales[block] == largest
        assert error[part].max() <= limit * largest * (1.001 if random else 0.501)


@CODES
@given(seed=st.integers(0, 1 << 20), exponent=st.integers(-30, 30))
def test_what_was_decoded_is_encoded_without_loss(
    code: PowerCode, seed: int, exponent: int
) -> None:
    first = encoded(code, sample(code, 3 * BLOCK + 5, seed=seed) * 2.0**exponent)
    again = encoded(code, decoded(code, *first))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


@CODES
def test_rounding_at_random_keeps_the_mean(code: PowerCode) -> None:
    numbers = sample(code, BLOCK)
    mean = torch.zeros(BLOCK, dtype=torch.float64)
    num_draws = 1000
    for draw in range(num_draws):
        mean += decoded(code, *encoded(code, numbers, Noise(seed=draw, offset=0)))
    error = (mean / num_draws - numbers).abs()
    gap = (2 / 127 if code.signed else 4 / 255) * numbers.abs().max()
    assert error.max() < 5 * 0.5 * gap / num_draws**0.5  # a rounding's deviation is <= half a gap
    nearest = decoded(code, *encoded(code, numbers))
    assert error.mean() < 0.2 * (nearest - numbers).abs().mean()


def test_noise_belongs_to_the_element() -> None:
    numbers = sample(SECOND_MOMENT, 4 * BLOCK)
    whole, _ = encoded(SECOND_MOMENT, numbers, Noise(seed=9, offset=0))
    end, _ = encoded(SECOND_MOMENT, numbers[2 * BLOCK :], Noise(seed=9, offset=2 * BLOCK))
    assert torch.equal(whole[2 * BLOCK :], end)


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    numbers = torch.full((BLOCK,), 1e-30)
    numbers[0], numbers[1] = 1.0, 0.0
    for seed in range(20):
        codes, _ = encoded(SECOND_MOMENT, numbers, Noise(seed=seed, offset=0))
        assert codes[0] == 255
        assert codes[1] == 0
        assert bool((codes[2:] == 1).all())


@CODES
def test_zeros_stay_zeros(code: PowerCode) -> None:
    codes, scales = encoded(code, torch.zeros(BLOCK + 1), Noise(seed=1, offset=0))
    assert not decoded(code, codes, scales).any()


@CODES
def test_what_is_not_a_number_is_not_hidden(code: PowerCode) -> None:
    numbers = sample(code, 2 * BLOCK)
    numbers[3] = float("nan")
    back = decoded(code, *encoded(code, numbers, Noise(seed=1, offset=0)))
    assert bool(back[:BLOCK].isnan().all())
    assert bool(back[BLOCK:].isfinite().all())


def test_gives_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--num-parameters 20000 --rounds 2 --formats bf16 8bit --threads 2 --output json"
    words += " --torch-operations"
    host_optimizer.main(words.split())
    found = json.loads(capsys.readouterr().out)
    assert found["num_parameters"] == 20000
    assert found["bytes_per_parameter"] == 28
    assert found["bandwidth_share"] > 0
    assert found["speedup_over_torch_fused"] > 0
    assert found["kernel"] == "native"
    names = {"host", "host_bf16", "host_8bit", "host_torch", "host_8bit_torch", "torch_fused"}
    assert names <= found["seconds"].keys()


def test_shapes_are_those_of_layers() -> None:
    shapes = host_optimizer.shapes_of(40_000_000)
    assert shapes == [(4096, 4096), (4096,)] * 3
    assert host_optimizer.shapes_of(1000) == [(1000,)]


def test_intra_op_threads_of_others_stay() -> None:
    torch.set_num_threads(6)
    inside: list[int] = []
    after: list[int] = []
    with (
        closing(KernelThreads[int](num_threads=2)) as team,
        closing(HostSums(PinnedPool(CpuDevice(0)), on_failure=lambda error, what: None)) as sums,
    ):
        team.process(lambda piece: inside.append(torch.get_num_threads()), [0, 1, 2])
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
    assert KernelThreads[int](num_threads=None).num_threads == expected
