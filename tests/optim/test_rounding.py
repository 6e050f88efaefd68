import json
import math
import threading
from contextlib import closing
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks import host_optimizer
from roundpipe_lightning.engine.capture.randomness import mix
from roundpipe_lightning.optim import kernel
from roundpipe_lightning.optim.kernel import KernelThreads
from roundpipe_lightning.optim.rounding import (
    BLOCK,
    FIRST_MOMENT,
    SECOND_MOMENT,
    Noise,
    PowerCode,
    keep_wide_state,
    noise,
    num_blocks,
    round_stochastically,
    step_in_float32,
)

HOST = torch.device("cpu")


def _rounded(source: Tensor, seed: int = 1, offset: int = 0) -> Tensor:
    out = torch.empty_like(source, dtype=torch.bfloat16)
    return round_stochastically(source, out=out, seed=seed, offset=offset)


@pytest.mark.parametrize("value", [1.0, -1.0, 3e-5, -7e20, 1e-40])
@pytest.mark.parametrize("part", [0.001, 0.25, 0.9])
def test_mean_is_the_exact_value(value: float, part: float) -> None:
    below = torch.tensor(value).to(torch.bfloat16)
    above = (below.view(torch.int16) + 1).view(torch.bfloat16)
    exact = float(below) + part * (float(above) - float(below))
    source = torch.full((200_000,), exact)
    exact = float(source[0])
    rounded = _rounded(source)
    assert set(rounded.unique().tolist()) == {float(below), float(above)}
    share = (rounded == above).double().mean().item()
    expected = (exact - float(below)) / (float(above) - float(below))
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / len(source))


def test_numbers_that_need_no_rounding_stay() -> None:
    source = torch.randn(5000).to(torch.bfloat16).float()
    source[:6] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 2.0**-133, 3.38e38]).bfloat16()
    rounded = _rounded(source)
    assert torch.equal(rounded.view(torch.int16), source.bfloat16().view(torch.int16))


def test_what_is_no_number_stays_none() -> None:
    payloads = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7FC00000], dtype=torch.int32)
    source = torch.cat([payloads.view(torch.float32), torch.tensor([math.inf, 1.5])])
    rounded = _rounded(source)
    assert rounded[:4].isnan().all()
    assert rounded[4:].tolist() == [math.inf, 1.5]


def test_noise_belongs_to_the_seed_and_the_element() -> None:
    source = torch.randn(150_001)
    whole = _rounded(source, seed=mix(1, 2))
    parts = [
        _rounded(source[:70_000], seed=mix(1, 2)),
        _rounded(source[70_000:], seed=mix(1, 2), offset=70_000),
    ]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(_rounded(source, seed=mix(1, 3)), whole)
    shaped = torch.empty(301, 498, dtype=torch.bfloat16).t()  # not contiguous
    round_stochastically(source[: 301 * 498].view(498, 301), out=shaped, seed=mix(1, 2))
    assert torch.equal(shaped.reshape(-1), whole[: 301 * 498])


def test_noise_is_uniform_and_independent() -> None:
    count = 1 << 18
    drawn = [noise(count, seed=mix(5, step), offset=0, device=HOST).double() for step in range(3)]
    drawn.append(drawn[0].roll(1))
    for values in drawn:
        assert abs(values.mean().item() - 32767.5) < 5 * 65536 / math.sqrt(12 * count)
        counts = torch.histc(values, bins=256, min=0, max=65536)
        chi_squared = ((counts - count / 256) ** 2 / (count / 256)).sum().item()
        assert 255 - 5 * math.sqrt(510) < chi_squared < 255 + 5 * math.sqrt(510)
    correlations = torch.corrcoef(torch.stack(drawn)).triu(1)
    assert correlations.abs().max().item() < 5 / math.sqrt(count)
    far = noise(4, seed=7, offset=(1 << 40) + 3, device=HOST)
    assert not torch.equal(far, noise(4, seed=7, offset=3, device=HOST))


# ------------------------------------------------------------------ steps of any optimizer

MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def _closure(parameters: list[nn.Parameter], step: int) -> Any:
    def closure() -> float:
        for number, parameter in enumerate(parameters):
            assert parameter.dtype is torch.bfloat16 or number == 1
            generator = torch.Generator().manual_seed(10 * step + number)
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = noise.to(torch.bfloat16).to(parameter.dtype)
        return 1.5

    return closure


@pytest.mark.parametrize("name", MAKERS)
def test_step_is_the_float32_step_rounded(name: str) -> None:
    start = [torch.randn(6, 5), torch.randn(4), torch.randn(5, 6).t()]
    parameters = [nn.Parameter(t.to(torch.bfloat16)) for t in start]
    parameters[1] = nn.Parameter(parameters[1].detach().float())  # float32: left alone
    wide = [nn.Parameter(p.detach().float()) for p in parameters]
    memory = [p.data_ptr() for p in parameters]
    ours, reference = MAKERS[name](parameters), MAKERS[name](wide)
    for step in range(3):
        for parameter, expected in zip(parameters, wide, strict=True):
            expected.data.copy_(parameter.detach())
        _closure(parameters, step)()
        for parameter, expected in zip(parameters, wide, strict=True):
            assert parameter.grad is not None
            expected.grad = parameter.grad.float()
        reference.step()
        result = step_in_float32(ours, closure=_closure(parameters, step), seed_of=lambda n: n + 7)
        assert result == 1.5
        for number, (parameter, expected) in enumerate(zip(parameters, wide, strict=True)):
            exact: Tensor = expected.detach()
            if number != 1:
                rounded = torch.empty_like(parameter.detach())
                exact = round_stochastically(exact, out=rounded, seed=number + 7)
            assert torch.equal(parameter.detach(), exact)
            assert parameter.grad is not None
            assert parameter.grad.dtype is parameter.dtype
    assert [p.data_ptr() for p in parameters] == memory
    states = [t for s in ours.state.values() for t in s.values() if isinstance(t, Tensor)]
    assert {state.dtype for state in states} == {torch.float32}


def test_error_in_a_step_leaves_the_parameters_as_they_were() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert closure is not None
            closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(1.0)
            raise ZeroDivisionError("broken")

    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    own = parameter.data_ptr()
    with pytest.raises(ZeroDivisionError, match="broken"):
        step_in_float32(
            Broken([parameter], lr=1.0), closure=_closure([parameter], 0), seed_of=lambda n: n
        )
    assert parameter.dtype is torch.bfloat16
    assert parameter.data_ptr() == own
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    assert parameter.grad is not None
    assert parameter.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_loaded_state_is_float32(saved: torch.dtype) -> None:
    def trained(dtype: torch.dtype) -> Optimizer:
        parameter = nn.Parameter(torch.ones(5, dtype=dtype))
        parameter.grad = torch.full_like(parameter, 1 / 3)
        optimizer = torch.optim.AdamW([parameter])
        optimizer.step()
        return optimizer

    state_dict = trained(saved).state_dict()
    parameter = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    keep_wide_state(optimizer)
    optimizer.load_state_dict(state_dict)
    for key, value in state_dict["state"][0].items():
        loaded = optimizer.state[parameter][key]
        assert loaded.dtype is torch.float32
        assert torch.equal(loaded, value.float())
        assert loaded is not value
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    optimizer.load_state_dict(state_dict)
    assert optimizer.state[parameter]["exp_avg"].dtype is torch.float32


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


def test_intra_op_threads_of_others_stay() -> None:
    torch.set_num_threads(6)
    inside: list[int] = []
    after: list[int] = []
    with closing(KernelThreads(num_threads=2)) as team:
        team.process(lambda piece: inside.append(torch.get_num_threads()), [0, 1, 2])
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
    assert KernelThreads(num_threads=None).num_threads == expected
