"""Plans for several hosts: the same plan on more and more of them, or hosts that are not alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig, OmegaConf

from roundpipe_lightning.cli.job import Job
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.planning.cost.network import split_samples
from roundpipe_lightning.planning.report.description import size_text
from roundpipe_lightning.planning.search.fit import FitAnswer


def read_nodes(config: DictConfig) -> tuple[list[int], list[str]]:
    """Return the numbers of hosts to plan for, ascending, or the machines that hosts are.

    Raises:
        ConfigurationError: It is neither.
    """
    nodes = config.nodes
    given = list(nodes) if OmegaConf.is_list(nodes) else [nodes]
    if given and all(type(each) is int and each > 0 for each in given):
        return sorted(set(given)), []
    if given and all(isinstance(each, str) for each in given):
        return [], given
    raise ConfigurationError(
        f"nodes={nodes}: give numbers of hosts, such as nodes=1,2,4, or their machines, such as "
        "nodes=rtx4090x8,rtx4090x3."
    )


def scaled(first: FitAnswer, jobs: Sequence[Job]) -> list[FitAnswer]:
    """Return the answers for growing numbers of hosts.

    What fits one number fits a larger one, so the plan stays the same from then on.

    Args:
        first: That for the first job.
        jobs: One for each number.
    """
    answers = [first]
    for job in jobs[1:]:
        before = answers[-1]
        answers.append(before.on_hosts(job.num_nodes) if before.fits else job.answer())
    return answers


def scaling_lines(answers: Sequence[FitAnswer]) -> list[str]:
    """A table of `scaled` answers."""
    rows = [("hosts", "host memory", "step", "tokens/s", "of as many", "network", "hidden from")]
    alone = next((a.on_hosts(1).tokens_per_second for a in answers if a.fits), 0.0)
    for answer in answers:
        num, exchange = answer.job.hardware.num_nodes, answer.job.exchange
        memory = size_text(answer.memory.host.total_bytes)
        if answer.prediction is None or not answer.fits:
            rows.append((str(num), memory, "does not fit", "", "", "", ""))
            continue
        speed = answer.tokens_per_second
        rows.append(
            (
                str(num),
                memory,
                f"{answer.prediction.step_seconds:.4g} s",
                f"{speed:,.0f}",
                f"{speed / (num * alone):.0%}",
                f"{exchange.seconds:.3g} s" if num > 1 else "",
                hidden_text(answer) if num > 1 else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.rjust, row, widths)) for row in rows)
    return [f"  {line.rstrip()}" for line in lines]


def hidden_text(answer: FitAnswer) -> str:
    """The tokens of a step and host that hide the network."""
    return "never" if answer.hidden_tokens is None else f"{answer.hidden_tokens:,.0f}"


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """One of several hosts that are not alike.

    Attributes:
        job: Its training, with its share of the batch.
        answer: Its plan.
        speed: Its tokens per second where it waits for no other.
    """

    job: Job
    answer: FitAnswer
    speed: float


def uneven(job: Job, machines: Sequence[str]) -> list[HostPlan]:
    """Plan hosts that are not alike: each one's share of the batch follows its tokens per second.

    Args:
        job: The training; its batch is that of one of as many equal hosts.
        machines: What each host is.
    """

    def planned(machine: str, batch_size: int) -> HostPlan:
        changes = {
            "hardware_file": machine,
            "trainer.accelerator": "auto",
            "trainer.devices": "auto",
            "trainer.num_nodes": len(machines),
            "data.batch_size": batch_size,
        }
        its = job.with_changes(changes)
        answer = its.answer()
        speed = 0.0
        if answer.prediction is not None:
            alone = answer.prediction.step_seconds - answer.prediction.network_seconds
            speed = answer.job.step_tokens / alone
        return HostPlan(job=its, answer=answer, speed=speed)

    size = job.batch_size
    hosts = [planned(machine, size) for machine in machines]
    sizes = split_samples(size * len(machines), [host.speed or 1.0 for host in hosts])
    return [
        host if own == size else replace(planned(machine, own), speed=host.speed)
        for host, machine, own in zip(hosts, machines, sizes, strict=True)
    ]
