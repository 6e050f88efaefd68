"""The benchmarks' parameter counts against the published ones."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from roundpipe_lightning.errors import PlanError

ROOT = Path(__file__).parents[2]

PARAMETERS = {
    "gpt_oss_20b": 20_914_757_184,
    "llama3_1_8b": 8_030_261_248,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_32b": 32_762_123_264,
    "qwen3_235b_a22b": 235_093_634_560,
}


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("decoder_sizes")


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(sizes: ModuleType, name: str) -> None:
    path = ROOT / "conf" / "model" / f"{name}.yaml"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))["architecture"]
    assert sizes.Architecture.from_config(config).num_parameters == PARAMETERS[name]


def test_an_incomplete_configuration_is_refused(sizes: ModuleType) -> None:
    with pytest.raises(PlanError, match="lacks 'hidden_size'"):
        sizes.Architecture.from_config({"num_attention_heads": 2})
