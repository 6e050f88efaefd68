"""docs/configuration.md lists what conf/ has."""

import re

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from roundpipe_lightning.planning.model.hardware import config_folder
from tests.conf.test_models import PUBLISHED

CONF = config_folder()
DOCS = CONF.parent / "docs"
TEXT = (DOCS / "configuration.md").read_text(encoding="utf-8")
PARTS = {
    "last_checkpoint",
    "best_checkpoint",
    "pretrained_export",
    "timeline",
    "progress_bar",
    "lr_monitor",
}
"""Files of conf/callbacks that the choices are made of."""


GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in ("hydra", "paths")])
def test_every_choice_is_listed(group: str) -> None:
    row = re.search(rf"^\| `{group}` \| (.*?) \|", TEXT, flags=re.MULTILINE)
    assert row is not None
    listed = set(re.findall(r"`(\w+)`", row[1]))
    choices = {path.stem for path in (CONF / group).glob("*.yaml")}
    if group == "hardware":
        assert listed <= choices
    else:
        assert listed == choices - (PARTS if group == "callbacks" else set())


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_every_model_is_listed(name: str, published: tuple[str | None, int]) -> None:
    hub_name, num_parameters = published
    assert f"| `{name}` | {hub_name + ' ' if hub_name else ''}| {num_parameters:,} |" in TEXT


@pytest.mark.parametrize(("name", "least"), [("configuration", 8), ("finetuning", 6)])
def test_every_command_composes(name: str, least: int) -> None:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python train.py *([^#\n]*)", text, flags=re.MULTILINE)
    assert len(commands) >= least
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for command in commands:
            words = [word for word in command.split() if "=" in word]
            sweeps = [word for word in words if "," in word and "[" not in word]
            compose("train", overrides=[word for word in words if word not in sweeps])


def test_fine_tuning_names_settings_that_exist() -> None:
    text = (DOCS / "finetuning.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`data\.([\w.]+)", text))
    known = set()
    for path in (CONF / "data").glob("*.yaml"):
        keys = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert isinstance(keys, dict)
        known |= set(keys) | {f"tokenizer.{key}" for key in keys.get("tokenizer", {})}
    assert named
    assert named <= known
