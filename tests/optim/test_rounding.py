"""Stochastic rounding: right on average, the same from the same seed, and nothing else changed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from roundpipe_lightning.engine.capture.randomness import mix
from roundpipe_lightning.optim.rounding import noise, round_stochastically

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


def test_small_updates_add_up_where_rounding_to_nearest_loses_them() -> None:
    weights, nearest = torch.ones(4096, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16)
    for step in range(200):
        round_stochastically(weights.float() - 1e-4, out=weights, seed=mix(3, step))
        nearest = (nearest.float() - 1e-4).to(torch.bfloat16)
    assert nearest.item() == 1.0
    assert weights.double().mean().item() == pytest.approx(0.98, abs=5e-4)


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
