"""Train programs of many kinds on one device and with the strategy; compare what they leave.

Each program of `program_kinds.py` (written after well-known examples) and `program_libraries.py`
(models of other libraries, left out where a library is missing) is trained on one CPU with
Lightning's own strategy and on two CPU workers with `RoundPipeStrategy`, from the same seed, with
every block a stage of its own that is recomputed. Compared are what every step returned, the logs
after every step, the parameters' updates and the state that stays: buffers, attributes, lists,
the random generators.

    python benchmarks/programs.py [--programs clip vae] [--mode blocks] [--output json]
    python benchmarks/programs.py --mixtures 0 400   # programs put together at random

Verdicts:

    same     updates and all else agree to 1e-4
    said     they do not, or it was refused, and a message of ours says so
    silent   they differ without a message
    broken   it raised something that is not an error of ours
    left out the program does not run on one device either, or its library is missing

A message counts when the single device does not give it and it is not among `NOISE`; people judge
whether it explains the difference, so the table prints it.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import program_libraries  # noqa: F401 - names its programs
import torch
from forked import ForkError, answer_of
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint
from program_kinds import Program
from program_mixtures import mixture
from torch import Tensor

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.errors import RoundPipeError, WatchdogError

PROGRAMS: dict[str, type[Program]] = dict(Program.named)
TOLERANCE = 1e-4
WORKERS = 2
LIMIT_SECONDS = 120.0
NOISE = re.compile(
    r"does not have many workers|GPU available|TPU available|TPU:|💡|max_epochs|\.isinstance\.|"
    r"roundpipe: \d+ workers|fewer workers|Seed set|LightningDeprecation|litlogger|"
    r" states from the checkpoint|`weights_only` was not set|current_model_state|"
    r"for every batch of .* rows|runs on the whole batch|ran as one stage|plan|"
    r"^roundpipe: microbatching='(step|blocks)'"
)
"""Messages that say nothing about results."""

_KINDS_OF_STAGES = ("forward", "fused", "backward")
ORDER = ("same", "said", "silent", "broken", "left out")


@dataclass(kw_only=True)
class Outcome:
    """State after training.

    Attributes:
        found: What can be compared, by name: tensors, numbers, text.
        update: Change of each parameter.
        messages: Warnings and log lines.
        error: What was raised.
        stages: Stages and microbatches of the last plan.
    """

    found: dict[str, Any] = field(default_factory=dict)
    update: dict[str, Tensor] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    error: BaseException | None = None
    stages: str = ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Comparison of one run with the single device's.

    Attributes:
        num_microbatches: The strategy's.
        verdict: One of `ORDER`.
        differences: What differs and by how much, relative.
        update: Norm of the difference of the updates over the norm of the update.
        message: Our message, or the error.
        stages: Stages and microbatches of the last plan.
        seconds: How long it took.
    """

    num_microbatches: int
    verdict: str
    differences: tuple[str, ...] = ()
    update: float = 0.0
    message: str = ""
    stages: str = ""
    seconds: float = 0.0


# --- training -------------------------------------------------------------------------------------


class Recorder(Checkpoint):  # those come last
    """Keeps what steps returned and the logs after each, and a checkpoint of the second."""

    def __init__(self, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        self.found: dict[str, Any] = {}

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        del pl_module, batch
        if self.checkpoint is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.checkpoint)
        step = f"{trainer.current_epoch}.{batch_idx}"
        self.found |= dict(flat(f"step {step} returned", outputs))
        self.found |= dict(flat(f"step {step} logged", dict(trainer.callback_metrics)))


def train(program: type[Program], strategy: RoundPipeStrategy | None, devices: int) -> Outcome:
    """Train a program from its seed; what it raises is in the outcome."""
    outcome = Outcome()
    resumes = program.resumes and strategy is not None
    with heard(outcome.messages), tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "second.ckpt")
        for ends in (False, True) if resumes else (True,):
            recorder = Recorder(None if ends else checkpoint)
            seed_everything(7, verbose=False)
            try:
                module, loader = program.made()
                before = {name: p.detach().clone() for name, p in module.named_parameters()}
                seed_everything(8, verbose=False)
                trainer = Trainer(
                    accelerator="cpu",
                    devices=devices,
                    strategy=strategy or "auto",
                    max_epochs=program.num_epochs,
                    callbacks=[recorder],
                    logger=False,
                    enable_checkpointing=True,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    **program.flags,
                )
                trainer.fit(module, loader, ckpt_path=checkpoint if checkpoint.exists() else None)
                if "test_step" in vars(program):
                    trainer.test(module, loader, verbose=False)
                draw = torch.rand(())  # shows where the generator stands
            except Exception as error:  # noqa: BLE001 - whatever is raised is the finding
                outcome.error = error
                return outcome
    after = dict(module.named_parameters())
    outcome.update = {name: after[name].detach() - old for name, old in before.items()}
    outcome.found = recorder.found | dict(flat("logs", dict(trainer.callback_metrics)))
    outcome.found |= dict(state(module)) | {"generator": draw}
    if strategy is not None and strategy.last_step is not None:
        plan = strategy.last_step.plan
        outcome.stages = f"{plan.num_microbatches} x {plan.partition.num_stages}"
    return outcome


@contextmanager
def heard(messages: list[str]) -> Iterator[None]:
    """Keep warnings and what is logged, instead of printing them."""

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    listener = Listener(logging.INFO)
    loggers = [logging.getLogger(n) for n in ("", "lightning", "lightning.pytorch", *_OURS)]
    handlers = [(logger, logger.handlers[:], logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers, logger.propagate = [], bool(logger.name != "root")
    loggers[0].handlers = [listener]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        finally:
            messages.extend(str(warning.message) for warning in caught)
            for logger, own, propagate in handlers:
                logger.handlers, logger.propagate = own, propagate


_OURS = ("roundpipe_lightning", "lightning_utilities")


# --- comparing ------------------------------------------------------------------------------------


def flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """All tensors, numbers and texts in a nest of containers, with their places."""
    if isinstance(value, Tensor):
        yield name, value.detach().cpu().clone()
    elif isinstance(value, (bool, int, float, str, type(None))):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(f"{name}[{key}]", item)
    elif isinstance(value, (list, tuple, deque)):
        yield f"{name} length", len(value)
        for index, item in enumerate(value):
            yield from flat(f"{name}[{index}]", item)
    elif isinstance(value, AbstractSet):
        yield name, str(sorted(value, key=str))


_MODULES_OWN = frozenset(vars(LightningModule())) - {"training"}


def state(module: LightningModule) -> Iterator[tuple[str, Any]]:
    """Buffers and what modules have as plain attributes."""
    for name, buffer in module.named_buffers():
        yield f"buffer {name}", buffer.detach().clone()
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _MODULES_OWN:
                yield from flat(f"attribute {path}.{name}".replace(" .", " "), value)
    for name, parameter in module.named_parameters():
        yield f"requires_grad {name}", parameter.requires_grad


def distance(found: Any, wanted: Any) -> float:
    """Relative difference of two values; infinite where they are not of one kind."""
    if isinstance(wanted, Tensor) and isinstance(found, Tensor):
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return math.inf
        if not wanted.dtype.is_floating_point and not wanted.dtype.is_complex:
            return 0.0 if bool((found == wanted).all()) else math.inf
        found, wanted = found.double(), wanted.double()
        if bool((found.isfinite() != wanted.isfinite()).any()):
            return math.inf
        found, wanted = found.nan_to_num(), wanted.nan_to_num()
        return float((found - wanted).norm() / wanted.norm().clamp_min(1e-3))
    if isinstance(wanted, float) and isinstance(found, float):
        return distance(torch.tensor(found), torch.tensor(wanted))
    return 0.0 if type(found) is type(wanted) and found == wanted else math.inf


def update_distance(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The worst of the whole update's relative difference and of single parameters'.

    A parameter's is relative to its own update, or to a hundredth of all where that is more: what
    rounding makes of a gradient that is zero says nothing.
    """
    if found.keys() != wanted.keys():
        return math.inf
    total = math.sqrt(sum(float(w.double().square().sum()) for w in wanted.values()))
    errors = {n: float((found[n].double() - w.double()).norm()) for n, w in wanted.items()}
    whole = math.sqrt(sum(error**2 for error in errors.values())) / total
    single = (errors[n] / max(float(w.norm()), total / 100) for n, w in wanted.items())
    worst = max(whole, *single)
    return math.inf if math.isnan(worst) else worst


def compared(found: Outcome, wanted: Outcome, *, num_microbatches: int, seconds: float) -> Run:
    """Judge one run."""
    given = {re.sub(r"\d+", "#", message) for message in wanted.messages}
    news = [m for m in dict.fromkeys(found.messages) if not NOISE.search(m)]
    message = " | ".join(m for m in news if re.sub(r"\d+", "#", m) not in given)
    differences: list[str] = []
    update = 0.0
    if found.error is not None:
        ours = isinstance(found.error, RoundPipeError) and not isinstance(
            found.error, WatchdogError
        )
        verdict = "said" if ours else "broken"
        notes = " ".join(getattr(found.error, "__notes__", ()))
        message = f"{type(found.error).__name__}: {found.error} {notes}"
    else:
        update = update_distance(found.update, wanted.update)
        if update > TOLERANCE:
            differences.append(f"update {update:.1e}")
        for name in dict.fromkeys((*wanted.found, *found.found)):
            missing = name not in found.found or name not in wanted.found
            off = math.inf if missing else distance(found.found[name], wanted.found[name])
            if off > TOLERANCE:
                differences.append(f"{name} {off:.1e}")
        verdict = "same" if not differences else "said" if message else "silent"
    return Run(
        num_microbatches=num_microbatches,
        verdict=verdict,
        differences=tuple(differences),
        update=update,
        message=" ".join(message.split()),
        stages=found.stages,
        seconds=round(seconds, 2),
    )


# --- all programs ---------------------------------------------------------------------------------


def judge(name: str, options: Mapping[str, Any], counts: Sequence[int]) -> list[Run]:
    """Train a program on one device and with the strategy, for each number of microbatches."""
    program = PROGRAMS[name] if name in PROGRAMS else mixture(int(name))
    wanted = train(program, None, 1)
    moved = sum(float(u.abs().sum()) for u in wanted.update.values())
    if wanted.error is not None or not 0 < moved < math.inf:
        reason = f"{type(wanted.error).__name__}: {wanted.error}" if wanted.error else "no update"
        return [Run(num_microbatches=0, verdict="left out", message=" ".join(reason.split()))]
    runs = []
    # With recompute="none" one stage has all blocks, by definition.
    limits = None if options["recompute"] == "none" else dict.fromkeys(_KINDS_OF_STAGES, 1)
    for count in counts:
        begun = time.perf_counter()
        strategy = RoundPipeStrategy(
            num_microbatches=count,
            hints=limits and {"limits": limits},
            timeout_seconds=30.0,
            **{**options, **program.options},
        )
        found = train(program, strategy, WORKERS)
        if program.resumes:  # these are in no checkpoint
            gone = ("attribute ", "requires_grad ")
            found.found = {k: v for k, v in found.found.items() if not k.startswith(gone)}
            wanted.found = {k: v for k, v in wanted.found.items() if k in found.found}
        seconds = time.perf_counter() - begun
        runs.append(compared(found, wanted, num_microbatches=count, seconds=seconds))
    return runs


def worst(runs: Sequence[Run]) -> str:
    """Verdict on a program: the worst of its runs'."""
    return max((run.verdict for run in runs), key=ORDER.index)


def row(name: str, runs: Sequence[Run]) -> str:
    """A line of the table, and one for each run that is not the same."""
    stages = max((run.stages for run in runs), default="")
    update = max(run.update for run in runs)
    about = PROGRAMS[name].about() if name in PROGRAMS else mixture(int(name)).about()
    lines = [f"{name:26} {worst(runs):9} {stages:8} {update:8.1e}  {about}"]
    for run in runs:
        if run.verdict != "same":
            more = f" and {len(run.differences) - 3} more" if len(run.differences) > 3 else ""
            lines.append(
                f"    {run.num_microbatches} microbatches: {run.verdict}: "
                f"{'; '.join(run.differences[:3])}{more} {run.message[:200]}"
            )
    return "\n".join(lines)


def main() -> None:
    """Judge the programs and print the table or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--mixtures", nargs=2, type=int, metavar=("FIRST", "COUNT"))
    parser.add_argument("--mode", default="default", choices=("default", "blocks", "step", "auto"))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 1])
    parser.add_argument("--recompute", default="full", choices=("auto", "full", "none"))
    parser.add_argument("--output", choices=("table", "json"), default="table")
    given = parser.parse_args()
    options: dict[str, Any] = {"recompute": given.recompute}
    if given.mode != "default":
        options["microbatching"] = given.mode
    found: dict[str, list[Run]] = {}
    first, count = given.mixtures or (0, 0)
    for name in map(str, range(first, first + count)) if given.mixtures else given.programs:
        try:
            runs = answer_of(judge, name, options, given.microbatches, seconds=LIMIT_SECONDS)
        except ForkError as error:
            runs = [Run(num_microbatches=0, verdict="broken", message=str(error))]
        found[name] = runs
        if given.output == "table":
            print(row(name, found[name]), flush=True)
    totals = Counter(worst(runs) for runs in found.values())
    if given.output == "table":
        print(", ".join(f"{verdict}: {totals[verdict]}" for verdict in ORDER))
    else:
        programs = {
            name: {"verdict": worst(runs), "runs": [asdict(run) for run in runs]}
            for name, runs in found.items()
        }
        totals_of = {verdict: totals[verdict] for verdict in ORDER}
        print(json.dumps({"mode": given.mode, "totals": totals_of, "programs": programs}))
    sys.exit(bool(totals["silent"] + totals["broken"]))


if __name__ == "__main__":
    main()
