import ast
import inspect
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import roundpipe_lightning
from benchmarks import what_fits
from roundpipe_commands import in_settings, name_machines
from roundpipe_lightning import errors, finetune
from roundpipe_lightning.cli.job import Job, MetaModel
from roundpipe_lightning.planning.model.hardware import config_folder
from tests.conf.test_models import PUBLISHED
from tests.kit.programs import run_program
from tests.kit.runs import composed

REPOSITORY = Path(__file__).resolve().parent.parent
CONF = config_folder()
OURS = ("lightning", "roundpipe_lightning")


def _text(document: str) -> str:
    return (REPOSITORY / "docs" / f"{document}.md").read_text(encoding="utf-8")


def _blocks(document: str, language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, _text(document), flags=re.MULTILINE | re.DOTALL)


def _run(code: str, folder: Path) -> str:
    process = run_program(lambda: exec(code, {"__name__": "__main__"}), folder)
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_the_design_s_grid_is_the_planner_s(tmp_path: Path) -> None:
    (example,) = _blocks("design", "python")
    printed = _run(example, tmp_path).strip()
    assert printed in [block.strip() for block in _blocks("design", "text")]


PAGES = sorted(path.stem for path in (REPOSITORY / "docs").glob("*.md"))


@pytest.mark.parametrize("document", PAGES)
def test_examples_are_python_and_import_what_exists(document: str) -> None:
    for block in _blocks(document, "python"):
        for node in ast.parse(block).body:
            named = [getattr(node, "module", None) or ""]
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            if isinstance(node, (ast.Import, ast.ImportFrom)) and named[0].startswith(OURS):
                exec(compile(ast.Module([node], []), document, "exec"), {})


def _right_hand(document: str) -> list[str]:
    """The code in the last column of a page's tables "you wrote, you write"."""
    rows = re.findall(r"^\|.*\| ([^|]+) \|$", _text(document), flags=re.MULTILINE)
    return [code for cell in rows for code in re.findall(r"`([^`]+)`", cell)]


@pytest.mark.soak
def test_every_command_composes() -> None:
    """Every override that is shown exists; flags and sweeps are left out."""
    pattern = re.compile(r"^python train.py *([^#\n]*)", flags=re.MULTILINE)
    commands = {command for page in PAGES for command in pattern.findall(_text(page))}
    written = [code for code in _right_hand("coming_from") if re.match(r"[\w.]+=[^\"(]+$", code)]
    lists = re.findall(r"overrides=(\[.*?\])", _text("ways_in"))
    written += [" ".join(["peft=lora", *ast.literal_eval(each)]) for each in lists]
    assert len(commands) >= 25
    assert len(written) >= 25
    name_machines(CONF)
    for command in [*commands, *(f"{each} data=a.jsonl" for each in written)]:
        words = [word for word in shlex.split(command) if "=" in word]
        sweeps = [word for word in words if "," in word and "[" not in word]
        if "experiment=" in command and command.endswith(" data=a.jsonl"):
            words.pop()
        composed("train", *in_settings([word for word in words if word not in sweeps], CONF))


def test_what_is_written_instead_is_python() -> None:
    parameters = inspect.signature(finetune).parameters
    table = _text("ways_in").partition("For a user of Hugging Face")[2].partition("##")[0]
    named = re.findall(r"[` ]([a-z_]+)=[^|]*\|$", table, flags=re.MULTILINE)
    assert "method" in named
    assert set(named) <= set(parameters)
    names = {name: getattr(roundpipe_lightning, name) for name in roundpipe_lightning.__all__}
    calls = [code for code in _right_hand("coming_from") if re.match(r"RoundPipe\w+\(", code)]
    assert len(calls) >= 3
    for code in calls:
        eval(code, names)


def test_what_fits_where_is_what_the_planner_predicts() -> None:
    """Some rows of docs/fits.md, which `what_fits.py --write` makes, and figures of the README."""
    models: dict[str, MetaModel] = {}

    def written(title: str, model: str, method: str) -> list[str]:
        line = what_fits.row(model, method, what_fits.MACHINES[title], models)
        assert line in _text("fits").partition(f"### {title}\n")[2].partition("###")[0]
        return line.strip(" |").split(" | ")

    written("One RTX 4090, 128 GiB of host memory", "qwen3_4b", "full")
    written("One RTX 4090, 128 GiB of host memory", "llama3_1_8b", "full")
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    for model, name in (("qwen3_32b", "Qwen3-32B"), ("qwen3_235b_a22b", "Qwen3-235B-A22B")):
        figures = written("Four RTX 4090, 512 GiB of host memory", model, "LoRA")
        rate = round(int(figures[2].replace(",", "")), -1)
        assert re.search(f"LoRA of {name} on .*: {rate:,} tokens/s, {figures[5]}", readme)


@pytest.mark.soak
def test_the_tutorial_has_the_planner_s_figures() -> None:
    name_machines(CONF)
    for words, tokens in (
        ("recipe=qwen3_32b/lora hardware=rtx4090x4 hardware.host_memory=256GiB", "about {:,}"),
        ("recipe=qwen3_32b/full hardware=rtx4090x8 hardware.host_memory=1TiB", "says {:,}"),
    ):
        answer = Job(composed("plan", *words.split())).answer()
        speed = round(answer.tokens_per_second / 10) * 10
        assert f"{tokens.format(speed)} tokens" in _text("qwen3_32b")
        size = answer.memory.host.total_bytes / 2**30
        assert f"{size:.0f} GiB of host memory" in _text("qwen3_32b")


# --- what conf/ has ------------------------------------------------------------------------------

PARTS = {
    "last_checkpoint",
    "best_checkpoint",
    "finite_check",
    "pretrained_export",
    "timeline",
    "progress_bar",
    "live_view",
    "run_report",
    "lr_monitor",
}
"""Files of conf/callbacks that the choices are made of."""


GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())
UNLISTED = ("hydra", "paths", "model", "recipe")
"""Groups that have no row with their files; models have a table of their own."""


@pytest.mark.parametrize("group", [name for name in GROUPS if name not in UNLISTED])
def test_every_choice_is_listed(group: str) -> None:
    row = re.search(rf"^\| `{group}` \| (.*?) \|", _text("configuration"), flags=re.MULTILINE)
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
    row = f"| `{name}` | {hub_name + ' ' if hub_name else ''}| {num_parameters:,} |"
    assert row in _text("configuration")


def test_fine_tuning_names_settings_that_exist() -> None:
    text = _text("finetuning")
    named = set(re.findall(r"`data\.([\w.]+)", text))
    known = set()
    for path in (CONF / "data").rglob("*.yaml"):
        keys = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        assert isinstance(keys, dict)
        known |= set(keys) | {f"tokenizer.{key}" for key in keys.get("tokenizer", {})}
    assert named
    assert named <= known


# --- messages ------------------------------------------------------------------------------------

VALUE = "…"
"""Stands for whatever is put into a message."""
ROW = re.compile(r"^\| `(?P<opening>[^`]+)` \| (?P<kinds>[^|]+) \| (?P<cure>.+) \|$")


def _texts() -> Iterator[str]:
    """Every text in the source, with `VALUE` where something is put in."""
    for path in sorted((REPOSITORY / "roundpipe_lightning").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
                yield _skeleton(node, constants)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                constants[node.targets[0].id] = _skeleton(node.value, {})


def _skeleton(node: ast.expr, constants: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\{[^{}]*\}|%s", VALUE, node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_skeleton(part, constants) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _skeleton(node.left, constants) + _skeleton(node.right, constants)
    return constants.get(node.id, VALUE) if isinstance(node, ast.Name) else VALUE


def test_every_row_is_a_message() -> None:
    _, _, ours = _text("troubleshooting").partition("## Messages of this package")
    rows = [ROW.match(line) for line in ours.splitlines() if line.startswith("| `")]
    assert None not in rows, "Rows have the form | `message` | class | what to do |"
    said = [text.strip().replace("`", "'") for text in _texts() if len(text) > 8]
    stale = []
    for row in filter(None, rows):
        parts = (re.escape(part) for part in row["opening"].split(VALUE))
        pattern = re.compile(r"\S*".join(parts))
        known = all(kind.endswith("Warning") or hasattr(errors, kind) for kind in [row["kinds"]])
        if not known or not any(pattern.match(text) for text in said):
            stale.append(row["opening"])
    assert not stale, f"No message begins so any more; remove or mend these rows: {stale}"
