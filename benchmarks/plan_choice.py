"""Looks for a hinted team or round size whose predicted step is shorter than the planner's own.

The grid: models of conf/model, machines of conf/hardware, every parameter or LoRA trained. The
planner chooses from 1, 2, 4 and 8 sequences a microbatch, and so it does with every hint: each team
size that divides the devices, with each round size of a power of two. Hints are planned with even
stages first, the three best ones like the plan itself. `chosen` is the step of the plan, `hinted`
the shortest of those with hints, `gain` what the hint would save, `plan s` processor time.

    python benchmarks/plan_choice.py [--models NAME ...] [--machines NAME ...] [--batch N]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.published_throughput import measure
from roundpipe_lightning.errors import FitError, PlanError
from roundpipe_lightning.planning.model.hardware import load_hardware
from roundpipe_lightning.planning.model.work import MicrobatchShape, ParameterStorage, WorkProfile
from roundpipe_lightning.planning.search.fit import FitAnswer, TrainingJob, fit_training
from roundpipe_lightning.planning.search.partition import QUICK, Effort
from roundpipe_lightning.planning.search.request import PartitionHints

MODELS = (
    "qwen3_0_6b",
    "qwen3_1_7b",
    "llama3_1_8b",
    "gpt_oss_20b",
    "qwen3_32b",
    "qwen3_235b_a22b",
)
MACHINES = ("rtx4090x1", "rtx3090x2", "rtx4090x4", "rtx4090x8", "a100x8", "h100x4")
SEQ_LEN = 2048
MOST_SEQUENCES = 8


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        name: Model, machine and what is trained.
        chosen: The planner's answer.
        planning_seconds: How long it took.
        hint: The hint with the shortest step; empty: none is shorter.
        hinted_seconds: That step.
    """

    name: str
    chosen: FitAnswer
    planning_seconds: float
    hint: str
    hinted_seconds: float

    @property
    def gain(self) -> float:
        """Share of the step that the hint would save."""
        return 1 - self.hinted_seconds / step_seconds(self.chosen)

    def __str__(self) -> str:
        layout = self.chosen.layout
        plan = f"T{layout.team_size} R{layout.round_size} M{layout.num_microbatches}"
        return (
            f"{self.name:34} {plan:12} {step_seconds(self.chosen):9.2f} {self.hinted_seconds:9.2f} "
            f"{self.hint:9} {self.gain:7.1%} {self.planning_seconds:6.1f}"
        )


def step_seconds(answer: FitAnswer) -> float:
    """The predicted step; infinite where nothing fits."""
    return answer.prediction.step_seconds if answer.fits and answer.prediction else math.inf


def jobs_of(work: WorkProfile, *, machine: str, batch: int) -> list[TrainingJob]:
    """The job with every number of microbatches to choose from."""
    hardware = load_hardware(machine)
    sizes = (2**power for power in range(MOST_SEQUENCES.bit_length()))
    counts = dict.fromkeys(-(-batch // size) for size in sizes)
    return [
        TrainingJob(
            work=work,
            hardware=hardware,
            dtype="bfloat16",
            storage=ParameterStorage(),
            shape=MicrobatchShape(sequences=-(-batch // count), seq_len=SEQ_LEN),
            num_microbatches=count,
            batch_sequences=batch,
        )
        for count in counts
        if count >= min(hardware.num_devices, batch)
    ]


def hints_of(jobs: list[TrainingJob]) -> Iterator[PartitionHints]:
    """Every team size with every round size."""
    workers, most = jobs[0].hardware.num_devices, jobs[0].num_microbatches
    for team in (size for size in range(1, workers + 1) if workers % size == 0):
        for size in (2**power for power in range(most.bit_length())):
            if team <= size <= most:
                yield PartitionHints(team_size=team, round_size=size)


def hinted(jobs: list[TrainingJob], hints: PartitionHints, effort: Effort) -> float:
    """The predicted step with hints; infinite where none fits."""
    fewest = hints.round_size or 1
    some = [replace(j, hints=hints, effort=effort) for j in jobs if j.num_microbatches >= fewest]
    try:
        return step_seconds(fit_training(*some))
    except (FitError, PlanError):
        return math.inf


def look(name: str, jobs: list[TrainingJob]) -> Row | None:
    """Plan a training without and with hints; None where it does not fit."""
    start = time.process_time()
    chosen = fit_training(*jobs)
    seconds = time.process_time() - start
    if not chosen.fits:
        return None
    even = replace(QUICK, num_even=12)
    ranked = sorted(hints_of(jobs), key=lambda hints: hinted(jobs, hints, even))
    steps = {hints: hinted(jobs, hints, Effort()) for hints in ranked[:3]}
    hints, best = min(steps, key=steps.__getitem__), step_seconds(chosen)
    if steps[hints] >= best:
        return Row(name, chosen, seconds, "", best)
    return Row(name, chosen, seconds, f"T{hints.team_size} R{hints.round_size}", steps[hints])


def main() -> None:
    """Print the grid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME")
    parser.add_argument("--machines", nargs="+", default=MACHINES, metavar="NAME")
    parser.add_argument("--trained", nargs="+", default=("full", "lora"), metavar="WHAT")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a batch (default 64)")
    options = parser.parse_args()
    print(f"{'training':34} {'plan':12} {'chosen s':>9} {'hinted s':>9} {'hint':9} gain plan s")
    for model in options.models:
        for trained in options.trained:
            work = measure(model, rank=32 if trained == "lora" else 0)
            for machine in options.machines:
                jobs = jobs_of(work, machine=machine, batch=options.batch)
                row = look(f"{model} {machine} {trained}", jobs)
                print(row or f"{model} {machine} {trained}: does not fit", flush=True)


if __name__ == "__main__":
    main()
