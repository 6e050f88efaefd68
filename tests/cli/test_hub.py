"""Models and data sets of the hub by name, against a stand-in of its HTTP interface."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

import roundpipe_commands as commands
from roundpipe_lightning import Plan
from roundpipe_lightning.models.export import ExportOptions, export_pretrained
from roundpipe_lightning.modules import ModelSource, TokenizerSource, byte_level_tokenizer
from tests.kit.architectures import TINY
from tests.kit.hub import Hub, hub, no_hub
from tests.kit.programs import run_program

SMALL = (
    "hardware=cpu",
    "data.seq_len=64",
    "data.batch_size=4",
    "partition.num_microbatches=4",
    "hydra.run.dir=run",
)
ROWS = "\n".join(json.dumps({"prompt": f"{i}?", "completion": f"{i}."}) for i in range(12)).encode()
CODE = b"""
from transformers import Qwen3Config, Qwen3ForCausalLM


class Config(Qwen3Config):
    model_type = "mine"


class Model(Qwen3ForCausalLM):
    config_class = Config
"""


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    def weights(**architecture: Any) -> dict[str, bytes]:
        folder = tmp_path_factory.mktemp("model")
        source = ModelSource(architecture={**TINY, "vocab_size": 264, **architecture})
        source.build().save_pretrained(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def changed(file: bytes, **fields: Any) -> bytes:
        return json.dumps({**json.loads(file), **fields}).encode()

    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level_tokenizer().save_pretrained(folder)
    tokenizer = {path.name: path.read_bytes() for path in folder.iterdir()}
    plain = weights()
    classes = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = changed(plain["config.json"], model_type="mine", auto_map=classes)
    own = changed(
        tokenizer["tokenizer_config.json"],
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["code.Own", None]},
    )
    return {
        "me/tiny": plain,  # no tokenizer
        "me/tiny@v2": {**weights(num_hidden_layers=3), **tokenizer},
        "me/code": {**plain, "config.json": config, "code.py": CODE, **tokenizer}
        | {"tokenizer_config.json": own},
        "datasets/me/rows": {"train.jsonl": ROWS},
        "datasets/me/gated": {"train.jsonl": ROWS},
    }


def run(program: Callable[[], object], folder: Path, *overrides: str) -> Any:
    return run_program(program, folder, *SMALL, *overrides)


def fill(server: Hub, repositories: dict[str, dict[str, bytes]]) -> None:
    server.repositories = dict(repositories)
    server.gated = {"me/tiny", "datasets/me/gated"}


def test_a_revision_of_a_gated_model_trains_on_a_gated_data_set(
    repositories: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    """Its configuration, tokenizer and weights are not those of `main`."""
    own = ("trainer.max_steps=1", "callbacks=minimal", "trainer.enable_progress_bar=false")
    with hub(tmp_path / "cache") as server:
        fill(server, repositories)
        source = ("model=me/tiny", "model.revision=v2", "data=me/gated")
        done = run(commands.train, tmp_path, *source, *own)
    assert done.returncode == 0, done.stderr
    assert len(Plan.load(tmp_path / "run" / "plan.json").block_names) == 3


def test_code_of_a_model_runs_if_it_is_trusted(
    repositories: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    with hub(tmp_path / "cache") as server:
        fill(server, repositories)
        done = run(commands.plan, tmp_path, "model=me/code", "model.trust_remote_code=true")
    assert done.returncode == 0, done.stderr
    assert "It fits." in done.stdout


@pytest.mark.parametrize(
    ("program", "overrides", "message"),
    [
        (commands.plan, "model=me/none", "'me/none' is neither on the hub nor a folder here"),
        (commands.plan, "model=me/tiny", "gated .* log in \\(`hf auth login`\\) or set HF_TOKEN"),
        (commands.data, "model=me/tiny data=me/rows", "The tokenizer 'me/tiny' is gated .* log in"),
        (commands.plan, "model=me/code model.revision=v9", "no such revision .* null for the newe"),
        (commands.plan, "model=me/code", "code of its own \\(code.Config, code.Model\\)"),
        (commands.data, "model=me/code data=me/rows", "tokenizer 'me/code' wants to run code of"),
        (commands.data, "data=me/none", "'me/none' is no file here, .* Look at the spelling"),
        (commands.data, "data=me/gated", "gated dataset on the Hub.* log in"),
        (commands.data, "data=me/rows:test", 'Unknown split "test". Should be one of'),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_the_way_out(
    program: Callable[[], object],
    overrides: str,
    message: str,
    repositories: dict[str, dict[str, bytes]],
    tmp_path: Path,
) -> None:
    with hub(tmp_path / "cache", token="hf_other") as server:
        fill(server, repositories)
        refused(program, overrides, message, tmp_path)


@pytest.mark.parametrize(
    ("program", "overrides", "message"),
    [
        (
            commands.train,
            "model=me/tiny",
            "'me/tiny' cannot be loaded .* local folder .*HF_HOME .*=1.* model.weights=random",
        ),
        (
            commands.train,
            "recipe=qwen3_0_6b/lora data=a.jsonl",
            "'Qwen/Qwen3-0.6B' cannot be loaded .* HF_HUB_OFFLINE=1",
        ),
        (commands.data, "data=me/rows", "without a network, copy its files here and name them"),
    ],
)
def test_without_a_network_there_is_one_line_with_the_way_out(
    program: Callable[[], object], overrides: str, message: str, tmp_path: Path
) -> None:
    with no_hub(tmp_path / "cache"):
        refused(program, overrides, message, tmp_path)


def test_without_a_network_the_cache_is_taken_at_once(
    repositories: dict[str, dict[str, bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(huggingface_hub.utils.logging.get_logger(), "propagate", True)
    tokenizer = TokenizerSource(name="me/tiny", revision="v2")
    model = ModelSource(architecture={}, hub_name="me/tiny", revision="v2")
    with hub(tmp_path / "cache") as server:
        fill(server, repositories)
        tokenizer.load()
        model.build()
    with no_hub(tmp_path / "cache"):
        options = ExportOptions(tokenizer=tokenizer.load())
        folder = export_pretrained(model.build(), tmp_path / "export", options=options)
    assert (folder / "tokenizer.json").is_file()
    assert "its cache has of me/tiny is taken" in caplog.text
    assert "Retrying" not in caplog.text


def refused(program: Callable[[], object], overrides: str, message: str, folder: Path) -> None:
    done = run(program, folder, *overrides.split())
    assert done.returncode == 2, done.stderr
    shutil.rmtree(folder / "cache", ignore_errors=True)
    assert list(folder.iterdir()) == []
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert re.match(f"Error: .*{message}", line), line
