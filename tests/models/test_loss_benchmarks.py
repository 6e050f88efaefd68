import argparse
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.loss_memory import chunked_loss_bytes, plain_loss_bytes
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.models.losses.linear_cross_entropy import chunk_tokens

ROOT = Path(__file__).parents[2]


def _benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def test_memory_of_both_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _benchmark("linear_cross_entropy", monkeypatch)
    settings = argparse.Namespace(
        vocabulary=3000, hidden=16, tokens=200, parts=[2, 1], dtype="float32", device="cpu"
    )
    result = module.report(settings)
    assert result["tokens"] == [100, 200]
    for plain, chunked in zip(result["plain"], result["chunked"], strict=True):
        assert chunked["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert plain["peak_bytes"] == pytest.approx(4 * 4 * 3000 * plain["tokens"], rel=0.02)
    assert result["lines"]["plain"]["token_bytes"] == pytest.approx(4 * 4 * 3000, rel=0.02)
    planned = result["planned_bytes"]
    assert result["plain"][-1]["peak_bytes"] == pytest.approx(planned["plain"], rel=0.02)
    assert result["chunked"][-1]["peak_bytes"] == pytest.approx(planned["chunked"], rel=0.05)
    module.print_report(result)
    line = module.fit(
        [
            module.Measurement(tokens=n, peak_bytes=50 + 3 * n, seconds=0.0, loss=0.0)
            for n in (10, 20, 40)
        ]
    )
    assert (line.at(0), line.at(1000)) == (pytest.approx(50), pytest.approx(3050))


def test_architectures_are_fused_with_and_without_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = _benchmark("fused_losses", monkeypatch)

    def refuse(*_: Any) -> None:
        raise CaptureError("not this one")

    state = torch.get_rng_state()
    try:
        reports = [module.examine("gpt2")]
        monkeypatch.setattr(module, "engine_step", refuse)
        reports.append(module.examine("gpt2"))
    finally:
        torch.set_rng_state(state)
    assert [report.how for report in reports] == ["engine", "plain: CaptureError"]
    assert [report.made for report in reports] == [{}, {}]
    result = module.summary(reports)
    assert (result["total"], result["fused"], result["equal"]) == (2, 2, 2)
    assert 0 < result["largest_gradient_error"] < 1e-5


def test_differences_are_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _benchmark("fused_losses", monkeypatch)
    fusion = module.LossFusion("fused")
    own = module.Step(losses=[2.0], gradients={"a": torch.ones(3), "b": torch.ones(1)})
    other = module.Step(losses=[2.0], gradients={"a": torch.ones(3), "b": torch.full((1,), 1.01)})
    missing = module.Step(losses=[2.0], gradients={"a": torch.ones(3)})
    assert module.compared("x", "engine", own, own, fusion).is_equal
    assert not module.compared("x", "engine", own, other, fusion).is_equal
    assert not module.compared("x", "engine", own, missing, fusion).is_equal


VOCABULARY = 151_936


@given(
    num_tokens=st.integers(1, 40_000),
    vocabulary=st.integers(1, 300_000),
    bytes_per_logit=st.sampled_from([4, 6, 8, 10]),
    chunk_bytes=st.integers(1, 2**28),
)
def test_chunks_keep_to_the_budget_and_cover_everything(
    num_tokens: int, vocabulary: int, bytes_per_logit: int, chunk_bytes: int
) -> None:
    tokens = chunk_tokens(
        num_tokens=num_tokens,
        vocabulary=vocabulary,
        bytes_per_logit=bytes_per_logit,
        chunk_bytes=chunk_bytes,
    )
    assert 1 <= tokens <= num_tokens
    assert tokens * vocabulary * bytes_per_logit <= max(chunk_bytes, vocabulary * bytes_per_logit)


def test_32_thousand_tokens_take_a_twentieth_of_the_plain_loss() -> None:
    for hidden_size in (1024, 2048, 4096):
        for compute_bytes in (2, 4):
            sizes: dict[str, Any] = {
                "num_tokens": 32_768,
                "hidden_size": hidden_size,
                "vocabulary": VOCABULARY,
                "compute_bytes": compute_bytes,
            }
            assert chunked_loss_bytes(**sizes) <= 0.05 * plain_loss_bytes(**sizes)
            frozen = chunked_loss_bytes(**sizes, trains_weight=False)
            assert chunked_loss_bytes(**sizes) - frozen == 4 * hidden_size * VOCABULARY
