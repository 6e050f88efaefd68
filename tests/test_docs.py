"""What the documents show is what happens: their examples run, and print what they are said to."""

import re
from pathlib import Path

import hydra
import pytest

from roundpipe_lightning.planning.model.hardware import config_folder
from tests.kit.programs import run_program

REPOSITORY = Path(__file__).resolve().parent.parent


def _blocks(document: str, language: str) -> list[str]:
    text = (REPOSITORY / "docs" / document).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def _run(code: str, folder: Path) -> str:
    process = run_program(lambda: exec(code, {"__name__": "__main__"}), folder)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.filterwarnings("ignore:.* does not have many workers")
def test_quick_start_runs_from_top_to_bottom_and_learns(tmp_path: Path) -> None:
    output = _run("\n".join(_blocks("quickstart.md", "python")), tmp_path)
    loss = re.search(r"loss after 64 steps: (\S+)", output)
    assert loss is not None, output
    assert float(loss[1]) < 2.0  # the logarithm of 64 characters is 4.16
    assert "num_workers: 2\nnum_microbatches: 4" in output


def test_the_design_s_grid_is_the_planner_s(tmp_path: Path) -> None:
    (example,) = _blocks("design.md", "python")
    printed = _run(example, tmp_path).strip()
    assert printed in [block.strip() for block in _blocks("design.md", "text")]


def test_the_quick_start_s_commands_compose() -> None:
    """Every override that the document shows exists; flags and what needs a run are left out."""
    lines = "".join(_blocks("quickstart.md", "bash")).splitlines()
    commands = [line.partition("#")[0] for line in lines if line.startswith("python train.py")]
    assert len(commands) >= 5
    with hydra.initialize_config_dir(str(config_folder()), version_base="1.3"):
        for command in commands:
            overrides = [word for word in command.split()[2:] if "=" in word and "," not in word]
            hydra.compose("train", overrides=overrides)
