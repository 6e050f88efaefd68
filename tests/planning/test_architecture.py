"""Parameter counts against the published ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.architecture import Architecture

CONFIGS = Path(__file__).parents[2] / "conf" / "model"

PARAMETERS = {
    "gpt_oss_20b": 20_914_757_184,
    "llama3_1_8b": 8_030_261_248,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_32b": 32_762_123_264,
    "qwen3_235b_a22b": 235_093_634_560,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["architecture"]
    assert Architecture.from_config(config).num_parameters == PARAMETERS[name]


def test_an_incomplete_configuration_is_refused() -> None:
    with pytest.raises(PlanError, match="lacks 'hidden_size'"):
        Architecture.from_config({"num_attention_heads": 2})
