import json
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.kit.programs import run_program

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STEPS = {"chat_lora": 8, "classification": 75, "dpo": 5, "vision": 16}


@pytest.mark.soak
@pytest.mark.parametrize(("name", "steps"), STEPS.items())
def test_the_example_learns(name: str, steps: int, tmp_path: Path) -> None:
    def example() -> None:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    process = run_program(example, tmp_path, "--accelerator=cpu", f"--steps={steps}")
    assert process.returncode == 0, process.stderr
    losses = re.search(r"^loss: (\S+) -> (\S+)$", process.stdout, flags=re.MULTILINE)
    assert losses is not None, process.stdout
    assert float(losses[2]) < float(losses[1]) - 0.02
    if name == "chat_lora":
        adapter = tmp_path / "chat_lora" / "adapter"
        settings: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text())
        assert settings["peft_type"] == "LORA"
        assert "with the adapter in chat_lora/adapter" in process.stdout


@pytest.mark.soak
@pytest.mark.parametrize("notebook", [*EXAMPLES.glob("*.ipynb")], ids=lambda path: path.stem)
def test_the_notebook_runs_from_top_to_bottom(notebook: Path, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLES / "data", tmp_path / "data")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}

    def cells_in_order() -> None:
        for source in sources:
            exec(source, names)

    process = run_program(cells_in_order, tmp_path)
    assert process.returncode == 0, process.stderr
    assert not any(cell.get("outputs") for cell in cells)
    figures = names["result"].figures
    assert figures["loss_last"] < figures["loss_first"] - 1


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(STEPS)


def test_the_data_is_what_its_script_writes() -> None:
    made = runpy.run_path(str(EXAMPLES / "data" / "make.py"))
    chats = (EXAMPLES / "data" / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in chats] == made["conversations"]()
    pairs = (EXAMPLES / "data" / "preferences.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in pairs] == made["preferences"]()
    dates = (EXAMPLES / "data" / "dates.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in dates] == made["dates_and_facts"]()
    held_out = (EXAMPLES / "data" / "dates_held_out.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in held_out] == made["dates"]()[:40]
    recipe = (EXAMPLES.parent / "conf/recipe/smollm2_135m/lora.yaml").read_text(encoding="utf-8")
    asked = re.findall(r"^ +- (\w.*[.?])$", recipe, flags=re.MULTILINE)
    assert len(asked) == 3
    assert not any(question in line for question in asked for line in [*dates, *held_out])
    assert not {line.partition("assistant")[2] for line in held_out} & {
        line.partition("assistant")[2] for line in dates
    }
    rows = (EXAMPLES / "data" / "reviews.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 1 + len(made["reviews"]())
