"""Recipes: every one composes and is planned, and each architecture trains two steps."""

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from roundpipe_commands import name_machines
from roundpipe_lightning.cli.job import Job
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.planning.model.hardware import config_folder
from roundpipe_lightning.planning.search.partition import Effort
from tests.kit.runs import composed, summary

FOLDER = config_folder() / "recipe"
DEMO = "smollm2_135m/lora"
FILES = sorted(
    path for path in FOLDER.glob("*/*.yaml") if path.parent.name not in ("base", "smollm2_135m")
)
RECIPES = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FILES]
MACHINES = ("rtx4090x4", "a100x8", "h100x1")
EXAMPLES = Path(__file__).parents[2] / "examples" / "data"

TINY = (
    "model.weights=random",
    "model.hub_name=null",
    "model.architecture_of=null",
    "model.architecture.vocab_size=264",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    "model.architecture.num_hidden_layers=4",
    "model.architecture.num_attention_heads=2",
    "model.architecture.num_key_value_heads=1",
    "++model.architecture.head_dim=16",
    "++model.architecture.layer_types=null",
    "++model.architecture.pad_token_id=0",
    "++model.architecture.bos_token_id=1",
    "++model.architecture.eos_token_id=2",
    "hardware=cpu",
    "data.seq_len=256",
    "data.batch_size=2",
    "data.validation_share=0.5",
    "trainer.max_steps=2",
    "trainer.enable_progress_bar=false",
    "callbacks=minimal",
)
EXPERTS = {
    "qwen3_30b_a3b": ("num_experts=4", "num_experts_per_tok=2", "moe_intermediate_size=16"),
    "gpt_oss_20b": ("num_local_experts=4", "num_experts_per_tok=2"),
}


def compose_recipe(folder: Path, recipe: str, *overrides: str, name: str = "train") -> DictConfig:
    name_machines(config_folder())
    kind = "preferences" if recipe.endswith(("dpo", "kto")) else "chat"
    given = [f"recipe={recipe}", f"data.files=[{EXAMPLES / kind}.jsonl]", *overrides]
    return composed(name, f"paths.output_dir={folder}", *given)


@pytest.mark.suite(
    "qwen3_0_6b/full",
    "qwen3_0_6b/lora",
    "qwen3_0_6b/qlora",
    "qwen3_0_6b/dpo",
    "qwen3_0_6b/kto",
    "gemma3_4b/vision",
    "gpt_oss_20b/lora",
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_complete(recipe: str, tmp_path: Path) -> None:
    config = compose_recipe(tmp_path, recipe, "hardware=rtx4090x4")
    settings: Any = OmegaConf.to_container(config.copy(), resolve=False)
    model, method = recipe.split("/")
    assert "???" not in str(settings)
    assert settings["model"]["weights"] == "pretrained"
    assert 1e-6 <= settings["optimizer"]["lr"] <= 3e-4
    assert 16_384 <= settings["data"]["seq_len"] * settings["data"]["batch_size"] <= 32_768
    assert 1 <= settings["trainer"]["max_epochs"] <= 4
    assert (settings["trainer"]["max_steps"], settings["trainer"]["precision"]) == (-1, "auto")
    assert (settings["peft"].get("_target_") is None) == (method == "full")
    assert settings["peft"].get("frozen_bits", 16) == (4 if method in ("qlora", "vision") else 16)
    text = (FOLDER / f"{recipe}.yaml").read_text(encoding="utf-8")
    assert re.search(r"^# Figures: https://\S+$", text, re.MULTILINE)
    assert (config_folder() / "model" / f"{model}.yaml").is_file()


def test_the_demo_needs_no_package_to_be_planned(tmp_path: Path) -> None:
    job = Job(compose_recipe(tmp_path, DEMO, "hardware=cpu", "hardware.devices=2", name="plan"))
    assert job.answer().fits


def test_the_demo_trains_and_has_answers(tmp_path: Path) -> None:
    train(compose_recipe(tmp_path, DEMO, *TINY, "+callbacks.answers.max_new_tokens=3"))
    asked = summary(tmp_path)["answers"]
    assert [each["question"] for each in asked][-1] == "What is the capital of France?"
    assert all(each.keys() == {"question", "before", "after"} for each in asked)


def planned(folder: Path, recipe: str, *machines: str, changes: tuple[str, ...] = ()) -> None:
    models: Any = {}
    for machine in machines:
        overrides = (f"hardware={machine}", "partition.num_microbatches=8", *changes)
        job = Job(compose_recipe(folder, recipe, *overrides, name="plan"), models=models)
        answer = job.answer()
        assert answer.job.num_microbatches == 8
        assert answer.fits == (recipe not in TOO_SMALL.get(machine, ())), machine


@pytest.mark.soak
def test_a_recipe_is_planned_without_whole_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 8 judged answers and their reference would take 46 GiB of a device."""
    defaults: Any = Effort.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "num_generations", 2)
    few = ("model.architecture.num_hidden_layers=2",)
    planned(tmp_path, "qwen3_0_6b/kto", "rtx4090x4", changes=few)


TOO_SMALL = {
    "rtx4090x4": (
        *("gpt_oss_120b/full", "llama3_1_70b/full", "llama3_3_70b/full", "qwen3_30b_a3b/full"),
        *("qwen3_32b/full", "qwen3_235b_a22b/full"),
    ),
    "a100x8": ("qwen3_235b_a22b/full",),
    "h100x1": (
        *("gpt_oss_20b/full", "gpt_oss_120b/full", "llama3_1_70b/full", "llama3_3_70b/full"),
        *("mistral_small_24b/full", "qwen3_30b_a3b/full", "qwen3_32b/full", "qwen3_235b_a22b/full"),
        *("gemma3_27b/full", "qwen3_235b_a22b/lora"),
    ),
}
"""Recipes that a machine has no host memory for."""


@pytest.mark.soak
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_are_planned_on_three_machines(recipe: str, tmp_path: Path) -> None:
    planned(tmp_path, recipe, *MACHINES)


@pytest.mark.parametrize(
    "recipe",
    [
        "qwen3_0_6b/lora",
        *(
            pytest.param(recipe, marks=pytest.mark.soak)
            for recipe in (
                "qwen3_0_6b/full",
                "qwen3_0_6b/qlora",
                "qwen3_0_6b/dpo",
                "qwen3_0_6b/kto",
                "qwen3_30b_a3b/lora",
                "llama3_2_1b/full",
                "mistral_7b/lora",
                "gemma3_270m/full",
                "phi4/qlora",
                "gpt_oss_20b/lora",
            )
        ),
    ],
)
def test_a_tiny_model_of_the_architecture_trains(recipe: str, tmp_path: Path) -> None:
    own = [f"model.architecture.{one}" for one in EXPERTS.get(recipe.split("/")[0], ())]
    train(compose_recipe(tmp_path, recipe, *TINY, *own))
    assert summary(tmp_path)["num_steps"] == 2
