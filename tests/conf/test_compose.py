import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

CONF = Path(__file__).parents[2] / "conf"
FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
GROUPS = [path for path in FILES if len(path.parts) == 2]
NEEDED = {
    "data/chat": ["data.files=[chat.jsonl]"],
    "data/classification": ["data.files=[texts.csv]", "data.classes=[no,yes]"],
    "data/kto": ["data.files=[judged.jsonl]"],
    "data/preference": ["data.files=[pairs.jsonl]"],
    "data/vision": ["data.files=[seen.jsonl]"],
    "data/text": ["data.files=[texts]"],
    "hardware/mixed": ["hardware.devices={rtx4090: 1, rtx3090: 2}"],
    "model/hub": ["model.hub_name=Qwen/Qwen3-8B"],
    "module/classification": ["++data.classes=[no,yes]"],
    "partition/saved": ["partition.plan=plan.json"],
}
"""Settings that an entry leaves to the user."""


@pytest.fixture(autouse=True)
def hydra() -> Iterator[None]:
    """Hydra keeps itself in a global: clear it."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield
    GlobalHydra.instance().clear()


def compose_resolved(folder: Path, *overrides: str) -> dict[str, Any]:
    config = compose("train", overrides=list(overrides), return_hydra_config=True)
    OmegaConf.set_readonly(config.hydra, False)
    config.hydra.runtime.output_dir = str(folder)
    config.hydra.job.num = 0
    HydraConfig.instance().set_config(config)
    hydra_dir = str(config.hydra.run.dir)
    with open_dict(config):
        del config.hydra
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {"run_dir": hydra_dir, **{str(key): value for key, value in container.items()}}


def together() -> list[list[str]]:
    """Every entry of every group but experiments: one of each group in each composition."""
    entries: dict[str, list[str]] = defaultdict(list)
    for file in GROUPS:
        entries[file.parts[0]].append(f"{file.parts[0]}={file.stem}")
    del entries["experiment"]
    return [list(filter(None, each)) for each in zip_longest(*entries.values())]


@pytest.mark.parametrize("entries", together(), ids=" ".join)
def test_every_entry_of_every_group_composes(entries: list[str], tmp_path: Path) -> None:
    needed = [value for entry in entries for value in NEEDED.get(entry.replace("=", "/"), [])]
    assert "???" not in str(compose_resolved(tmp_path, *entries, *needed))


def test_the_default_configuration_has_every_group(tmp_path: Path) -> None:
    resolved = compose_resolved(tmp_path)
    groups = {file.parts[0] for file in GROUPS} - {"experiment", "debug", "hydra", "recipe"}
    assert groups <= set(resolved)


@pytest.mark.parametrize("experiment", sorted((CONF / "experiment").glob("*.yaml")), ids=str)
def test_experiments_work_with_debugging(experiment: Path, tmp_path: Path) -> None:
    resolved = compose_resolved(tmp_path, f"experiment={experiment.stem}", "debug=default")
    assert resolved["trainer"]["max_steps"] == 4
    assert resolved["tags"] == [experiment.stem]


def test_a_run_has_its_folder_under_logs(tmp_path: Path) -> None:
    resolved = compose_resolved(tmp_path, "task_name=mine")
    pattern = r"logs/mine/runs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d"
    assert re.fullmatch(pattern, resolved["run_dir"])


def test_the_seed_reaches_weights_and_data(tmp_path: Path) -> None:
    resolved = compose_resolved(tmp_path, "seed=7")
    assert resolved["model"]["seed"] == resolved["data"]["seed"] == 7


KEY = re.compile(r"^(\s*)(- )?(?P<key>override /\w+|\w+):")
ENTRY = re.compile(r"^\s*- (?!_self_$)\w+( #|$)")
DEFAULT = re.compile(r"^\s*(- )?(override /\w+|\w+): (?P<value>.+?) # .*; default (?P<default>.+)$")
TYPE = re.compile(r"# .*(str|int|float|bool|dict|list|file|path)")


def test_every_key_says_its_type_and_its_default() -> None:
    for file in FILES:
        lines = (CONF / file).read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("#"), f"the first line of {file} does not say what the file is"
        kind = "base" if "base" in file.parts else file.parts[0]
        for number, line in enumerate(lines, start=1):
            place = f"{file}:{number}: {line}"
            match = DEFAULT.match(line)
            if match and match["default"] not in ("as given", "none, must be given"):
                assert match["default"] == match["value"], place
            if kind == "recipe":
                continue  # a few lines over a base that says everything
            is_size = kind == "model" and line.startswith("  ")
            if not is_size and (KEY.match(line) or ENTRY.match(line)):
                assert TYPE.search(line), f"no type in {place}"
                assert re.search(r"(; default |; fixed$)", line), f"no default in {place}"
            assert len(line) <= 100, f"too long: {place}"
