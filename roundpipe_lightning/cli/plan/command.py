"""`roundpipe-plan`: what a training needs and how fast it will be, before it runs.

No device is touched and no weights are read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from roundpipe_commands import EXIT_DOES_NOT_FIT
from roundpipe_lightning.cli.job import Job
from roundpipe_lightning.cli.objects import run_explained
from roundpipe_lightning.cli.plan.answer import (
    cheapest_changes,
    gains,
    longest_seq_len,
    read_nodes,
    scaled,
    uneven,
)
from roundpipe_lightning.cli.plan.output import PlanOutput
from roundpipe_lightning.errors import ConfigurationError, RoundPipeError
from roundpipe_lightning.files import write_text
from roundpipe_lightning.planning.report.render import render_svg, render_trace
from roundpipe_lightning.planning.search.fit import FitAnswer
from roundpipe_lightning.planning.search.planner import plan_of_one_batch


def run(config: DictConfig) -> int:
    """Print the answer to a configuration, or the error, and return the exit status."""
    report = run_explained(plan, config)
    if isinstance(report, int):
        return report
    if config.output == "json":
        sys.stdout.write(json.dumps(report.to_dict()) + "\n")
    else:
        sys.stdout.write(report.to_text())
    return 0 if report.answer.fits else EXIT_DOES_NOT_FIT


def plan(config: DictConfig) -> PlanOutput:
    """Answer a configuration, and write the plan and its pictures into the run's folder.

    Raises:
        RoundPipeError: The configuration cannot work.
    """
    if config.output not in ("text", "json"):
        raise ConfigurationError(f"output={config.output} is not one of text, json.")
    counts, machines = read_nodes(config)
    job, *more = [Job(_with_nodes(config, count)) for count in counts or [1]]
    if job.strategy is None:
        raise ConfigurationError(
            f"trainer.strategy={config.trainer.strategy} has no plan: choose trainer=roundpipe."
        )
    longest = None
    if config.longest:
        longest = longest_seq_len(job)
        changes = {"data.seq_len": longest or job.seq_len}
        job, *more = [each.with_changes(changes) for each in (job, *more)]
    hosts = uneven(job, machines) if machines else []
    if hosts:
        slowest = max(hosts, key=lambda host: host.answer.lateness)
        job, found = slowest.job, slowest.answer
        answers = [found]
    else:
        jobs = [job, *more]
        answers = scaled(job.answer(), jobs)
        job, found = next(
            (pair for pair in zip(jobs, answers, strict=True) if pair[1].fits), (job, answers[0])
        )
    folder = Path(config.paths.output_dir)
    report = PlanOutput(
        job=job,
        answer=found,
        gains=gains(found),
        changes=[] if found.fits else cheapest_changes(job),
        longest_seq_len=longest,
        scaling=answers,
        hosts=hosts,
        joined=_joined(job),
        files={name: str(path) for name, path in _write(found, folder).items()},
    )
    write_text(folder / "report.json", json.dumps(report.to_dict(), indent=1) + "\n")
    return report


def _with_nodes(config: DictConfig, count: int) -> DictConfig:
    if not OmegaConf.is_list(config.nodes):
        return config
    config = config.copy()
    config.nodes = config.trainer.num_nodes = count
    return config


def _joined(job: Job) -> FitAnswer | None:
    """The answer with microbatches of blocks alone, where that is left open."""
    if job.options.microbatching != "auto":
        return None
    try:
        return job.with_changes({"trainer.strategy.microbatching": "blocks"}).answer()
    except RoundPipeError:  # a hint speaks against it
        return None


def _write(found: FitAnswer, folder: Path) -> dict[str, Path]:
    """Write the plan of one batch, which `partition=saved` reads, and the step's pictures."""
    if found.planned is None:
        return {}
    step_seconds = found.planned.prediction.step_seconds
    label = f"the pipeline's part of a predicted step of {step_seconds:.4g} s"
    pictured = {label: found.planned.timeline}
    texts = {
        "timeline.svg": render_svg(pictured),
        "timeline.json": render_trace(pictured),
        "plan.json": plan_of_one_batch(found.planned.plan).to_json(),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    return {name: folder / name for name in texts}
