"""`roundpipe-plan`: what a training needs and how fast it will be, before it runs.

No device is touched and no weights are read. The answer is one object for programs, a page of text.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from roundpipe_commands import EXIT_DOES_NOT_FIT
from roundpipe_lightning.cli.build import share_batch
from roundpipe_lightning.cli.job import Job
from roundpipe_lightning.cli.objects import check_switch, run_explained, whole
from roundpipe_lightning.cli.plan.answer import (
    Change,
    HostPlan,
    change_text,
    cheapest_changes,
    gains,
    hidden_text,
    longest_seq_len,
    read_nodes,
    scaled,
    scaling_lines,
    uneven,
)
from roundpipe_lightning.errors import ConfigurationError, RoundPipeError
from roundpipe_lightning.files import write_text
from roundpipe_lightning.modules import VisionLanguageModule
from roundpipe_lightning.planning.cost.device_memory import MemoryNeed, size_text
from roundpipe_lightning.planning.report.description import (
    PlanDescription,
    machine_line,
    memory_lines,
    model_line,
)
from roundpipe_lightning.planning.report.render import render_svg, render_trace
from roundpipe_lightning.planning.search.fit import FitAnswer
from roundpipe_lightning.planning.search.planner import plan_of_one_batch
from roundpipe_lightning.planning.search.remedies import Remedy

_NOT_FOR_TRAINING = (
    *("output=", "longest=", "partition=", "partition.", "task_name=", "hydra"),
    *("nodes=", "trainer.num_nodes="),
)
"""Overrides that are `roundpipe-plan`'s own, or that its plan already has."""

_MUCH_IDLE_SHARE = 0.4
_BYTES_WITH_STATE = 16  # master, gradient and AdamW's moments of a parameter
_SHARE_OF_DEVICE = 0.7  # the rest is for activations and gathered layers


_EAGER = (
    "Attention: eager, which keeps every score, as transformers chooses for this model. "
    "model.attention=flex_attention (or another kernel that is installed) takes less of both."
)

_BLIND = (
    "trainer.strategy.dry_run=false: this plan is of a step that was run without values. Training "
    "takes it where it is given, as below; else its plan follows from the parameters alone."
)


@dataclass(frozen=True, kw_only=True)
class PlanOutput:
    """Everything that `roundpipe-plan` says.

    Attributes:
        job: What was asked.
        answer: The plan, or what is missing.
        gains: By what share twice as much of a resource shortens the step; the bottleneck first.
        changes: What makes it fit, where it does not.
        longest_seq_len: The longest sequence that fits, where it was asked for.
        joined: The answer with `microbatching=blocks`, where that is left open.
        scaling: The answers for every number of hosts that was asked for.
        hosts: Each host, where they are not alike.
        files: What was written, by name.
    """

    job: Job
    answer: FitAnswer
    gains: dict[str, float] = field(default_factory=dict)
    changes: list[tuple[Remedy[Change], FitAnswer]] = field(default_factory=list)
    longest_seq_len: int | None = None
    joined: FitAnswer | None = None
    scaling: Sequence[FitAnswer] = ()
    hosts: Sequence[HostPlan] = ()
    files: dict[str, str] = field(default_factory=dict)

    @cached_property
    def _described(self) -> PlanDescription | None:
        answer = self.answer
        if answer.planned is None or answer.prediction is None:
            return None
        return PlanDescription(
            job=answer.job, plan=answer.planned.plan, prediction=answer.prediction
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values; bytes, seconds and shares from 0 to 1."""
        answer, asked = self.answer, self.job
        work, job = answer.job.work, answer.job
        memory = answer.memory
        return {
            "fits": answer.fits,
            "model": {
                "num_blocks": len(work.blocks),
                **_named(work, "num_parameters", "num_trainable", "fingerprint"),
            },
            "machine": _named(asked.machine, "name", "num_devices", "device_bytes", "host_bytes"),
            "job": {
                "seq_len": job.shape.seq_len,
                "batch_size": asked.batch_size,
                "num_batches": asked.num_batches,
                "num_microbatches": job.num_microbatches,
                "sequences_per_microbatch": job.shape.sequences,
                "precision": str(asked.precision.precision),
            },
            "plan": self._plan(),
            "memory": {"device": _need(memory.device), "host": _need(memory.host)},
            "optimizer_disk_bytes": round(answer.optimizer_disk_bytes),
            "moved": self._described.moved if self._described else None,
            "predicted": self._predicted(),
            "predicted_with_blocks": self.joined and _seconds(self.joined),
            "bottleneck": {"resource": next(iter(self.gains), None), "gains": self.gains},
            "nodes": [_on_network(each) for each in self.scaling],
            "hosts": [_host(each) for each in self.hosts],
            "missing": self.missing or None,
            "changes": [_change(*each) for each in self.changes],
            "longest_seq_len": self.longest_seq_len,
            "not_counted": self.not_counted,
            "files": self.files,
        }

    def _plan(self) -> dict[str, Any] | None:
        layout = self.answer.layout
        if self.answer.planned is None:
            return None
        return {
            "forward_partition": list(layout.partition.forward),
            "backward_partition": list(layout.partition.backward),
            "num_stages": layout.partition.num_stages,
            **_named(layout, "team_size", "round_size", "num_rounds", "weight_slots"),
            "num_batches": self.answer.job.num_batches,
            "recompute": self.answer.planned.plan.recompute.value,
            "resident": [list(blocks) for blocks in layout.resident],
            "resident_bytes": self._described.resident_bytes if self._described else [],
        }

    def _predicted(self) -> dict[str, float] | None:
        prediction, planned = self.answer.prediction, self.answer.planned
        if prediction is None or planned is None:
            return None
        return {
            **_named(prediction, "step_seconds", "pipeline_seconds", "optimizer_seconds"),
            **_named(self.answer, "one_by_one_seconds"),
            "tokens_per_second": self.tokens_per_second,
            "idle_share": max(0.0, prediction.bubble_fraction),
            "pipeline_idle_share": max(0.0, planned.timeline.bubble_fraction),
        }

    @property
    def missing(self) -> str:
        """The missing memory, as text; empty where the plan fits."""
        memory = self.answer.memory
        lacks = " ".join(
            f"{size_text(need.missing_bytes)} of {need.place} memory are missing."
            for need in (memory.device, memory.host)
            if need.missing_bytes
        )
        return f"{self.answer.reason_no_plan} {lacks}".strip()

    def to_text(self) -> str:
        asked, job = self.job, self.answer.job
        batches = f" x {job.num_batches} batches" if job.num_batches > 1 else ""
        lines = [
            machine_line(asked.machine),
            model_line(job.work, precision=str(asked.precision.precision)),
            (
                f"Step: {asked.batch_size} sequences of {job.shape.seq_len:,} tokens{batches}, "
                f"in {job.num_microbatches} microbatches of {job.shape.sequences}"
            ),
            *([f"Not counted: {self.not_counted}"] if self.not_counted else []),
            *([_EAGER] if self._is_eager else []),
            *([] if asked.options.dry_run else [_BLIND]),
        ]
        if self._described is not None:
            lines += ["", *self._described.plan_lines()]
        lines += ["", "Memory", *memory_lines(self.answer.memory)]
        if self.answer.optimizer_disk_bytes:
            size = size_text(self.answer.optimizer_disk_bytes)
            lines.append(f"  disk: {size} of optimizer state, read and written in each step")
        lines += self._step_lines()
        lines += self._node_lines()
        if self.longest_seq_len is not None:
            lines += ["", *self._longest_lines()]
        if self.answer.fits:
            lines += ["", "It fits."]
        else:
            lines += ["", f"It does not fit. {self.missing}", *self._change_lines()]
        if self.files:
            lines += ["", *(f"{name}: {path}" for name, path in self.files.items())]
        if self.answer.fits and "plan.json" in self.files:
            lines += ["", f"Train it: {self.train_line()}"]
        return "\n".join(lines) + "\n"

    def train_line(self) -> str:
        """The command that trains with this plan."""
        asked = HydraConfig.get().overrides.task if HydraConfig.initialized() else ()
        given = [each for each in asked if not each.lstrip("+~").startswith(_NOT_FOR_TRAINING)]
        if self.longest_seq_len:
            given = [each for each in given if not each.startswith("data.seq_len=")]
            given.append(f"data.seq_len={self.longest_seq_len}")
        installed = Path(sys.argv[0]).stem == "roundpipe-plan"
        program = "roundpipe-train" if installed else "python train.py"
        if self.hosts:
            own = ("hardware", "global_batch_size=")
            given = [each for each in given if not each.startswith(own)]
        num_nodes = self.job.num_nodes
        if num_nodes > 1:
            script = "--no-python roundpipe-train" if installed else "train.py"
            program = (
                f"torchrun --nnodes={num_nodes} --nproc-per-node=1 --rdzv-backend=c10d "
                f"--rdzv-endpoint=HOST0:PORT {script} nodes={num_nodes}"
            )
        plan = f"partition.plan={self.files['plan.json']}"
        saved = [] if self.hosts else ["partition=saved", plan]
        return shlex.join([*program.split(), *given, *saved])

    @property
    def _is_eager(self) -> bool:
        """Whether transformers has no fused attention for the model, and none was asked for."""
        model = getattr(self.job.model.module, "model", None)
        chosen = getattr(getattr(model, "config", None), "_attn_implementation", None)
        return chosen == "eager" and self.job.source.attention is None

    @property
    def not_counted(self) -> str | None:
        """What the figures leave out, in words; None: nothing."""
        if not isinstance(self.job.model.module, VisionLanguageModule):
            return None
        return (
            "images. Time and memory are those of the text alone; a step with images takes more "
            "of both."
        )

    def _step_lines(self) -> list[str]:
        described, predicted = self._described, self._predicted()
        if described is None or predicted is None:
            return []
        prediction = described.prediction
        lines = [
            "",
            described.moved_line(),
            (
                f"Predicted step: {prediction.step_seconds:.4g} s, of which the optimizer "
                f"{prediction.optimizer_seconds:.3g} s; "
                f"{self.tokens_per_second:,.0f} tokens/s"
            ),
            (
                f"Devices wait {predicted['idle_share']:.1%} of the step, "
                f"{predicted['pipeline_idle_share']:.1%} of the pipeline's part"
            ),
        ]
        if self.joined is not None:
            lines.append(f"  with trainer.strategy.microbatching=blocks: {_speed(self.joined)}")
        if self.answer.job.num_batches > 1:
            lines.append(
                f"  with {self.answer.job.num_batches} batches in one stream; one after the other, "
                f"each as plan.json has it, {self.answer.one_by_one_seconds:.4g} s"
            )
        if self.gains:
            shares = ", ".join(f"{name} {gain:.0%}" for name, gain in self.gains.items())
            lines.append(f"Bottleneck: {next(iter(self.gains))}")
            lines.append(f"  shorter steps if twice as fast: {shares}")
        return [*lines, *self._tool_lines()]

    def _tool_lines(self) -> list[str]:
        """Say so where the devices could do without the host's memory."""
        machine, work = self.job.machine, self.answer.job.work
        prediction = self.answer.prediction
        if prediction is None or machine.shares_host_memory:
            return []
        frozen = work.num_parameters - work.num_trainable
        each: float = _BYTES_WITH_STATE * work.num_trainable + 2 * frozen
        if machine.devices_reach_each_other:
            each /= machine.num_devices
        alone = prediction.step_seconds - prediction.network_seconds
        idle = 1 - prediction.compute_seconds / alone  # FSDP would wait for the network much longer
        if idle < _MUCH_IDLE_SHARE:
            return []
        if each > _SHARE_OF_DEVICE * machine.device_bytes:
            settings = "data.seq_len, data.batch_size, trainer.accumulate_grad_batches"
            return [f"  fewer waits with more tokens a step: {settings}"]
        other = "trainer=single_device"
        if machine.num_devices > 1:  # published: sharding over PCIe is slower than RoundPipe
            name = "fsdp" if machine.devices_reach_each_other else "ddp"
            other = f"{name.upper()} (Trainer(strategy='{name}'))"
        size = size_text(round(each))
        return [
            (
                f"The wrong tool: devices wait {idle:.0%} of the step, and parameters, gradients "
                f"and optimizer state fit their own memory, {size} each. {other} keeps them there "
                "and will be faster."
            )
        ]

    def _node_lines(self) -> list[str]:
        """The network, and the numbers of hosts or the hosts that were asked for."""
        answer, machine = self.answer, self.job.machine
        lines = []
        if machine.num_nodes > 1 and answer.prediction is not None:
            exchange = answer.job.exchange
            size, waits = size_text(exchange.num_bytes), answer.prediction.network_seconds
            lines += [
                "",
                (
                    f"{machine.num_nodes} hosts, network of "
                    f"{machine.network_bytes_per_second * 8e-9:g} Gb/s: each sends and receives "
                    f"{size} a step, {exchange.seconds:.3g} s; the step waits {waits:.3g} s for it"
                ),
                f"  hidden from so many tokens per step and host on: {hidden_text(answer)}",
            ]
        if len(self.scaling) > 1:
            lines += ["", "Hosts", *scaling_lines(self.scaling)]
        if self.hosts:
            lines += ["", "Hosts that are not alike", *map(_host_line, self.hosts)]
            lines.append(
                f"  together {self.tokens_per_second:,.0f} tokens/s; set what each has of "
                "trainer.strategy there"
            )
        return lines

    @property
    def tokens_per_second(self) -> float:
        """Tokens of a step of all hosts by its seconds; 0 without a plan."""
        prediction = self.answer.prediction
        if prediction is None or not self.hosts:
            return self.answer.tokens_per_second
        tokens = sum(host.answer.job.step_tokens for host in self.hosts)
        return tokens / prediction.step_seconds

    def _longest_lines(self) -> list[str]:
        longest = self.longest_seq_len
        if not longest:
            return ["No sequence fits, however short."]
        lines = [f"Longest sequence that fits: {longest:,} tokens"]
        limit = self.job.longest_position
        if limit is not None and longest + 128 > limit:
            lines.append(f"  the model knows no more positions ({limit:,})")
        return lines

    def _change_lines(self) -> list[str]:
        if not self.changes:
            return ["No change that was tried makes it fit."]
        texts = (f"  {change_text(*change, before=self.answer)}" for change in self.changes)
        return ["What makes it fit, the cheapest first:", *texts]


def _on_network(answer: FitAnswer) -> dict[str, Any]:
    prediction, exchange = answer.prediction, answer.job.exchange
    return {
        **_named(answer.job.hardware, "num_nodes", "network_bytes_per_second"),
        **_named(answer, "fits", "tokens_per_second", "hidden_tokens"),
        "host_bytes": answer.memory.host.total_bytes,
        "sent_bytes": exchange.num_bytes,
        "network_seconds": exchange.seconds,
        "waiting_seconds": prediction and prediction.network_seconds,
        "step_seconds": prediction and prediction.step_seconds,
    }


def _host(host: HostPlan) -> dict[str, Any]:
    return {
        "machine": host.job.machine.name,
        "batch_size": host.job.batch_size,
        "alone_tokens_per_second": host.speed,
        "step_seconds": _seconds(host.answer),
        "fits": host.answer.fits,
        "memory_share": host.answer.job.hardware.memory_share,
        "device_bytes": host.answer.memory.device.total_bytes,
        "host_bytes": host.answer.memory.host.total_bytes,
    }


def _host_line(host: HostPlan) -> str:
    memory, seconds = host.answer.memory, _seconds(host.answer)
    step = "does not fit" if seconds is None else f"{seconds:.4g} s"
    part = host.answer.job.hardware.memory_share
    memory_share = "" if part is None else f" trainer.strategy.memory_share={part:g}"
    return (
        f"  {host.job.machine.name}: {host.job.batch_size} sequences, {step}, "
        f"{size_text(memory.device.total_bytes)} of a device, "
        f"{size_text(memory.host.total_bytes)} of the host; trainer.strategy.host_share="
        f"{host.speed:.0f}{memory_share}"
    )


def _speed(answer: FitAnswer) -> str:
    if answer.prediction is None or not answer.fits:
        return "does not fit"
    return f"{answer.prediction.step_seconds:.4g} s, {answer.tokens_per_second:,.0f} tokens/s"


def _need(need: MemoryNeed) -> dict[str, Any]:
    return {
        "stage": need.stage and str(need.stage),
        "by_kind": {kind.value: size for kind, size in need.num_bytes},
        **_named(need, "total_bytes", "available_bytes", "missing_bytes"),
    }


def _named(source: object, *names: str) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _seconds(answer: FitAnswer) -> float | None:
    return answer.prediction.step_seconds if answer.prediction and answer.fits else None


def _change(remedy: Remedy[Change], answer: FitAnswer) -> dict[str, Any]:
    assert answer.prediction is not None
    return {
        "overrides": list(remedy.change.overrides),
        "price": remedy.price.name.lower(),
        "cost": remedy.change.cost,
        "step_seconds": answer.prediction.step_seconds,
        "tokens_per_second": answer.tokens_per_second,
        "device_bytes": answer.memory.device.total_bytes,
        "host_bytes": answer.memory.host.total_bytes,
    }


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
    """Answer a configuration, and write the plan and its pictures into the run's folder."""
    if config.output not in ("text", "json"):
        raise ConfigurationError(f"output={config.output} is not one of text, json.")
    for name in ("train", "longest"):
        check_switch(name, config[name])
    whole("seed", config.seed, least=0)
    counts, machines = read_nodes(config)
    job, *more = [Job(_for_hosts(config, count, machines)) for count in counts or [1]]
    if job.strategy is None:
        raise ConfigurationError(
            f"trainer.strategy={config.trainer.strategy} has no plan: choose trainer=roundpipe."
        )
    longest = None
    if config.longest:
        limit = job.longest_position
        longest = (
            longest_seq_len(job) if limit is None else longest_seq_len(job, too_long=limit + 1)
        )
        changes = {"data.seq_len": longest or job.seq_len}
        job, *more = [each.with_changes(changes) for each in (job, *more)]
    hosts = uneven(job, machines) if machines else []
    if hosts:
        slowest = max(hosts, key=lambda host: _seconds(host.answer) or math.inf)
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


def _for_hosts(config: DictConfig, count: int, machines: Sequence[str]) -> DictConfig:
    config = config.copy()
    if OmegaConf.is_list(config.nodes):
        config.nodes = config.trainer.num_nodes = count
    num = config.trainer.get("num_nodes", 1)
    share_batch(config, len(machines) or (1 if num == "auto" else whole("nodes", num)))
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
