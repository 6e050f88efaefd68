from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from roundpipe_lightning.modules import ModelSource

CONF = Path(__file__).parents[2] / "conf" / "model"

PUBLISHED = {
    "qwen3_0_6b": ("Qwen/Qwen3-0.6B", 596_049_920),
    "qwen3_1_7b": ("Qwen/Qwen3-1.7B", 1_720_574_976),
    "qwen3_4b": ("Qwen/Qwen3-4B", 4_022_468_096),
    "llama3_1_8b": ("meta-llama/Llama-3.1-8B", 8_030_261_248),
    "gpt_oss_20b": ("openai/gpt-oss-20b", 20_914_757_184),
    "qwen3_32b": ("Qwen/Qwen3-32B", 32_762_123_264),
    "qwen3_235b_a22b": ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
    "tiny": (None, 1_609_344),
}
"""Hub name and number of parameters, a tied embedding counted once."""


def load(name: str) -> ModelSource:
    config = OmegaConf.merge({"seed": 0}, {"model": OmegaConf.load(CONF / f"{name}.yaml")})
    source = instantiate(config.model)
    assert isinstance(source, ModelSource)
    return source


def test_every_file_is_counted() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_the_parameters_are_those_published(name: str, published: tuple[str, int]) -> None:
    source = load(name)
    with torch.device("meta"):
        model = source.build()
    assert (source.hub_name, sum(p.numel() for p in model.parameters())) == published


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_field_is_one_of_the_architecture(name: str) -> None:
    source = load(name)
    architecture: dict[str, Any] = dict(source.architecture)
    kind = type(source.load_config())
    published_besides = {"head_dim"}  # Qwen3-MoE reads it without declaring it
    assert set(architecture) <= {*kind().to_dict(), *kind.attribute_map, *published_besides}
