"""The code in the documentation runs, on small models; what does not has its reason here."""

import io
import re
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from hydra import compose, initialize_config_dir
from lightning.pytorch import Callback, LightningModule, Trainer
from pyarrow import Table, parquet
from safetensors.torch import save_file

import roundpipe_commands
from benchmarks.first_hour import write_files
from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.planning.model.hardware import config_folder
from tests.kit import engine as kit
from tests.kit.programs import run_program
from tests.kit.training import Regressor, regression_data

REPOSITORY = Path(__file__).resolve().parent.parent
TEXTS = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
    for pattern in ("README.md", "examples/*.md", "docs/**/*.md")
    for path in sorted(REPOSITORY.glob(pattern))
}

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("default::UserWarning"),  # of Lightning about short trainings
]

NOT_RUN = {
    "pip install": ".ci/run installs so",
    "pytest": ".ci/run does it",
    "torchrun ": "several hosts: tests/soak/test_nodes.py",
    "MASTER_ADDR=": "several hosts: tests/soak/test_nodes.py",
    "num_nodes=2)": "several hosts: tests/lightning/test_hosts.py",
    "srun ": "needs SLURM",
    "scontrol ": "needs SLURM",
    "$SLURM_JOB_ID": "needs SLURM",
    "last=$run": "needs SLURM",
    "tatsu-lab/alpaca": "needs the hub: tests/data/test_records.py has a stand-in",
    "push_to_hub=": "needs the hub: tests/cli/test_export.py has a stand-in",
    "qwen3_235b_a22b model.weights": "needs 470 GB of weights",
    "LightningCLI()": "tests/lightning/test_ways_in.py",
    "python main.py": "tests/lightning/test_ways_in.py, without a process",
    "from darts": "needs another package",
    "race_hunt": "tests/soak/test_race_hunt.py",
    "gpu_session": "needs a GPU",
}
"""Why a line of bash, or a block of Python, with this in it is not run."""

COMMANDS = ("train", "plan", "data", "export", "chat", "merge")
TINY = (
    "model=tiny model.architecture.num_hidden_layers=2 model.architecture.hidden_size=32 "
    "model.architecture.intermediate_size=64"
).split()
SMALL = (
    "data.batch_size=8 data.seq_len=256 trainer.max_steps=2 trainer.val_check_interval=null "
    "scheduler.num_warmup_steps=0 trainer.limit_val_batches=1"
).split()
SMALLER = {
    'accelerator="gpu"': 'accelerator="cpu"',
    "devices=4": "devices=2, max_steps=2",
    "Qwen/Qwen3-0.6B": "folder",
    "Qwen/Qwen3-1.7B": "folder",
    "path/to/folder": "folder",
    "folder/with/safetensors": "weights",
    "seq_len=2048": "seq_len=128, batch_size=2",
}
AFTER = {
    "README.md": "",
    "docs/emulation.md": "test_my_module()",
    "docs/losses.md": "loss.backward()",
    "docs/monitoring.md": "trainer.fit(module, loader)",
    "docs/optimizers.md": "configure_optimizers(module).step()",
    "docs/peft.md": "tuned = Tuned()\ntuned.configure_model()\ntraining_step(tuned, batch, 0)",
    "docs/updates.md": "Trainer(strategy='roundpipe', callbacks=[Clock()]).fit(module, loader)",
    "docs/weights.md": "self.model = None\nconfigure_model(self)\nassert self.model is not None",
}
"""What uses the functions and classes that a page defines."""


def is_run(code: str) -> bool:
    return not any(part in code for part in NOT_RUN)


def blocks(page: str, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, TEXTS[page], flags=re.MULTILINE | re.DOTALL)


def pages(language: str) -> list[str]:
    return [page for page in TEXTS if any(map(is_run, blocks(page, language)))]


def lines(page: str) -> list[str]:
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    return [line for line in text.splitlines() if shlex.split(line, comments=True)]


def run_line(line: str, folder: Path) -> None:
    """Run a command as it is written, but with a tiny model."""
    name, *words = shlex.split(line, comments=True)
    if name == "python" and words[0] == "train.py":
        name, words = "roundpipe-train", words[1:]
    if name.startswith("data="):  # a value of the setting
        name, words = "roundpipe-data", [name]
    if name in {"roundpipe-train", "roundpipe-plan", "roundpipe-data", "roundpipe-export"}:
        words = [word for word in words if not re.match(r"model(\.\w+)?=", word)]
        if name != "roundpipe-export" or not any(word == "ckpt_path=last" for word in words):
            words += TINY[:1] if name == "roundpipe-plan" else TINY  # fixed cuts are of 8 blocks
        if any(word.startswith("recipe=") for word in words):
            words.append("model.weights=random")
        if name == "roundpipe-plan":
            words.append("model.architecture.max_position_embeddings=40960")
        if name in {"roundpipe-train", "roundpipe-data"} and "--help" not in words:
            words += SMALL
    command = name.removeprefix("roundpipe-")
    assert command in COMMANDS, f"Say how to run this, or in NOT_RUN why not: {line}"
    program = getattr(roundpipe_commands, command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO("1+1?\n"))
        done = run_program(lambda: sys.exit(program()), folder, *words)
    assert done.returncode in ((0, 3) if name == "roundpipe-plan" else (0,)), (
        f"{line}\n{done.stdout}\n{done.stderr}"
    )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a reader of the pages has: files, a trained run, exported folders."""
    folder = tmp_path_factory.mktemp("reader")
    files = folder / "files"
    for made in (files, folder / "my" / "texts", folder / "more"):
        made.mkdir(parents=True)
    write_files(files)
    for name in ("docs", "examples"):
        (folder / name).symlink_to(REPOSITORY / name)
    for source, targets in {
        "chats.jsonl": "my.jsonl chats.jsonl chat.jsonl my/chats.jsonl my/others.jsonl",
        "alpaca.json": "code.json my/alpaca.json",
        "texts.jsonl": "my/texts/texts.jsonl",
    }.items():
        for target in targets.split():
            copies = 8 if source.endswith(".jsonl") else 1
            (folder / target).write_text((files / source).read_text() * copies)
    texts = Table.from_pylist([{"text": f"Text number {number}."} for number in range(40)])
    parquet.write_table(texts, folder / "more" / "texts.parquet")
    rows = [f"It is {word}.,{word}" for word in ("bad", "fair", "good")] * 15
    (folder / "my" / "reviews.csv").write_text("\n".join(["text,label", *rows]))
    run_line("roundpipe-train peft=lora data=my.jsonl hydra.run.dir=lora", folder)
    shutil.copy(folder / "lora" / "checkpoints" / "last.ckpt", folder)
    run_line("roundpipe-export ckpt_path=lora output_dir=adapter", folder)
    run_line("roundpipe-export ckpt_path=lora merge=true output_dir=folder", folder)
    shutil.copytree(folder / "folder", folder / "exported")
    run = "logs/train/runs/2030-01-31_12-00-00"
    run_line(f"roundpipe-train hydra.run.dir={run}", folder)
    run_line("roundpipe-train checkpoint=distributed data=my.jsonl hydra.run.dir=parts", folder)
    (folder / "parts" / "checkpoints").rename(folder / "checkpoints")
    (folder / "weights").mkdir()
    save_file(kit.Regressor().state_dict(), folder / "weights" / "model.safetensors")
    return folder


def given() -> dict[str, Any]:
    """What the pages' code takes for granted: names that a reader's script has."""
    module = Regressor()
    stack = kit.layers_of(module)
    tokens = torch.randint(0, 100, (2, 8))
    config = transformers.Qwen3Config(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    small: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_steps": 2, "logger": False}
    return {
        "__name__": "__main__", "torch": torch, "Callback": Callback, "Engine": Engine,
        "LightningModule": LightningModule, "Trainer": partial(Trainer, **small),
        "RoundPipeStrategy": RoundPipeStrategy, "AutoModelForCausalLM":
        transformers.AutoModelForCausalLM, "LoraConfig": peft.LoraConfig,
        "get_peft_model": peft.get_peft_model, "MyModule": Regressor, "MyModel": kit.Regressor,
        "module": module, "model": module, "self": SimpleNamespace(model=None), "stack": stack,
        "plan": kit.auto_plan(stack, num_workers=8, num_microbatches=8),
        "loader": regression_data(24), "train_dataloader": regression_data(24),
        "data": regression_data(24), "my_data": lambda: regression_data(24), "input_ids": tokens,
        "labels": tokens, "batch": {"input_ids": tokens},
        "language_model": transformers.Qwen3ForCausalLM(config),
    }  # fmt: skip


@pytest.mark.parametrize("page", pages("python"))
def test_python(page: str, reader: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(reader, tmp_path / "reader", symlinks=True)
    shutil.rmtree(folder / "checkpoints")
    code = "\n".join([*filter(is_run, blocks(page, "python")), AFTER.get(page, "")])
    for large, small in SMALLER.items():
        code = code.replace(large, small)
    names = given()
    if page == "docs/losses.md":
        names["model"] = names["language_model"]
    done = run_program(lambda: exec(code, names), folder)
    assert done.returncode == 0, done.stderr
    if page == "docs/quickstart.md":
        loss = re.search(r"loss after 64 steps: (\S+)", done.stdout)
        assert loss is not None, done.stdout
        assert float(loss[1]) < 2.0  # the logarithm of 64 characters is 4.16
        assert "num_workers: 2\nnum_microbatches: 4" in done.stdout


@pytest.mark.parametrize("page", [page for page in TEXTS if any(map(is_run, lines(page)))])
def test_bash(page: str, reader: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(reader, tmp_path / "reader", symlinks=True)
    for line in filter(is_run, lines(page)):
        run_line(line, folder)


def test_yaml(reader: Path, tmp_path: Path) -> None:
    """An experiment, a machine, and a file for LightningCLI."""
    code = {page: blocks(page, "yaml") for page in TEXTS}
    (experiment,), (machine,), (command_line,) = (
        code.pop(f"docs/{page}.md") for page in ("configuration", "planning", "ways_in")
    )
    assert not any(code.values())
    conf = shutil.copytree(config_folder(), tmp_path / "conf")
    (conf / "experiment" / "mine.yaml").write_text(experiment)
    with initialize_config_dir(str(conf), version_base="1.3"):
        assert compose("train", overrides=["experiment=mine"]).data.seq_len == 2048
    (tmp_path / "mine.yaml").write_text(machine)
    run_line("roundpipe-plan hardware_file=mine.yaml", tmp_path)
    strategy = yaml.safe_load(command_line)["trainer"]["strategy"]
    assert strategy["class_path"] == "roundpipe_lightning.RoundPipeStrategy"
    RoundPipeStrategy(**strategy["init_args"])


def test_every_reason_is_of_a_block() -> None:
    text = "".join(
        code for page in TEXTS for kind in ("bash", "python") for code in blocks(page, kind)
    )
    assert not [part for part in NOT_RUN if part not in text]
