"""Answers what `roundpipe-plan` is asked: the longest sequence, the bottleneck, what makes it fit.

Changes that make a job fit are each verified by planning them. `train.py` asks, too, before it
takes any memory. Of several hosts there is the same plan on more and more of them, or hosts that
are not alike.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, takewhile
from typing import Any

from omegaconf import DictConfig, OmegaConf

from roundpipe_lightning.cli.job import Job
from roundpipe_lightning.engine.device.host_memory import check_host_memory, free_host_bytes
from roundpipe_lightning.errors import ConfigurationError, FitError, RoundPipeError
from roundpipe_lightning.planning.cost.device_memory import size_text
from roundpipe_lightning.planning.cost.memory import longest_that_fits
from roundpipe_lightning.planning.cost.predict import split_samples
from roundpipe_lightning.planning.model.hardware import HardwareSpec, MatrixRates, config_folder
from roundpipe_lightning.planning.search.fit import (
    FitAnswer,
    TrainingJob,
    fit_training,
    fits_memory,
    memory_shortage,
)
from roundpipe_lightning.planning.search.partition import QUICK
from roundpipe_lightning.planning.search.remedies import (
    Price,
    Remedy,
    may_fit_elsewhere,
    other_machines,
    upload_cost,
    verified,
)
from roundpipe_lightning.planning.search.request import PartitionHints

_LONGEST = 2**22  # tokens of a sequence at which the search for the longest one stops
_MULTIPLE = 128  # the longest sequence is a multiple of this
_MEMORY_SHARE = "trainer.strategy.memory_share"
_SHARE_STEPS = 100  # shares of memory are multiples of one by this
_GIB = 2**30
_SMALL_RATE = 1e-4  # below, an update is often less than half a step of bfloat16


def longest_seq_len(job: Job, *, too_long: int = _LONGEST + _MULTIPLE) -> int:
    """Return the longest sequence below one that is too long which fits; 0 where none does.

    The microbatches are those of the job, or of one sequence where their number is open.
    """
    if not fits_memory(job.first_job):  # nothing that is measured makes that better
        return 0
    count = job.microbatch_counts()[0]

    def shortage(units: int) -> float:
        return memory_shortage(job.training(count, seq_len=units * _MULTIPLE))

    return _MULTIPLE * longest_that_fits(shortage, too_long=-(-too_long // _MULTIPLE))


_RESOURCES = {
    "matrix products and attention": ("matrix_rates",),
    "device memory bandwidth": ("memory_bytes_per_second",),
    "links between host and devices": (
        "upload_bytes_per_second",
        "download_bytes_per_second",
        "root_upload_bytes_per_second",
        "root_download_bytes_per_second",
    ),
    "host memory bandwidth": ("host_bytes_per_second",),
    "disk bandwidth": ("disk_bytes_per_second",),
    "network": ("network_bytes_per_second",),
}
"""Figures of a machine that become twice as large where a resource is twice as fast."""


def gains(found: FitAnswer) -> dict[str, float]:
    """Return by what share the step gets shorter when one resource is twice as fast.

    The plan stays the same. The first entry is the bottleneck.
    """
    if found.prediction is None:
        return {}
    by_name = {}
    for name, figures in _RESOURCES.items():
        if name == "network" and found.job.hardware.num_nodes == 1:
            continue
        job = dataclasses.replace(found.job, hardware=_twice_as_fast(found.job.hardware, figures))
        seconds = job.predict(found.layout).step_seconds
        by_name[name] = max(0.0, 1 - seconds / found.prediction.step_seconds)
    return dict(sorted(by_name.items(), key=lambda pair: -pair[1]))


def _twice_as_fast(hardware: HardwareSpec, figures: Sequence[str]) -> HardwareSpec:
    def twice(value: float | MatrixRates) -> float | MatrixRates:
        if not isinstance(value, MatrixRates):
            return 2 * value
        rates = {name: rate for name, rate in vars(value).items() if rate is not None}
        return MatrixRates(**{name: 2 * rate for name, rate in rates.items()})

    doubled = {name: twice(getattr(hardware, name)) for name in figures}
    return dataclasses.replace(hardware, **doubled)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings that differ, what they cost beside time in words, and the job with them."""

    overrides: tuple[str, ...]
    cost: str
    make: Callable[[], Job]


def cheapest_changes(
    job: Job, *, is_measured: bool = True, count: int = 4
) -> list[tuple[Remedy[Change], FitAnswer]]:
    """Return changes that make a job fit, the cheapest first; pairs where one is not enough.

    Where no single change keeps all that is trained and the machine, a pair that does comes first.
    `is_measured`: activations count, too, which takes some seconds.
    """
    may_fit = cache(partial(_may_fit, job, before=job))
    singles = list(_changes(job, is_measured=is_measured, may_fit=may_fit))
    found = verified(singles, count=count)
    missing = count - len(found)
    if missing or not any(remedy.price < Price.TRAINABLE for remedy, _ in found):
        most = Price.MACHINE if missing else Price.DISK
        offered = partial(_changes, is_measured=is_measured, may_fit=may_fit)
        pairs = _pairs(job, singles, alone=found, offered=offered, most=most)
        found += verified(pairs, count=missing or 1)
    return sorted(found, key=lambda pair: pair[0].price)[:count]


def change_text(
    remedy: Remedy[Change], answer: FitAnswer, *, before: FitAnswer | None = None
) -> str:
    """A change and what it costs, in a line; `before`: the job without it, if speeds are known."""
    change = remedy.change
    costs = [change.cost]
    if before is not None:
        costs.append(f"{answer.tokens_per_second:,.0f} tokens/s")
        if before.tokens_per_second:
            share = answer.tokens_per_second / before.tokens_per_second
            costs[-1] += ", as fast" if f"{share:.2g}" == "1" else f", {share:.2g} times as fast"
    return f"{' '.join(change.overrides)} ({'; '.join(costs)})"


def _pairs(
    job: Job,
    singles: Sequence[Remedy[Change]],
    *,
    alone: Sequence[tuple[Remedy[Change], FitAnswer]],
    offered: Callable[[Job], Iterator[Remedy[Change]]],
    most: Price,
) -> list[Remedy[Change]]:
    """Put two changes of a price up to `most` together, neither of which is enough alone."""
    known = {remedy.change.overrides for remedy, _ in alone}
    adapted = [
        remedy.change
        for remedy in singles
        if remedy.price is Price.TRAINABLE <= most and remedy.change.overrides not in known
    ]
    hopeless = {each.overrides for each in adapted if not _may_fit(each.make(), before=job)}
    found: dict[frozenset[str], Remedy[Change]] = {}
    for first in singles:
        if first.change.overrides in known or first.price >= min(most, Price.HOST_MEMORY):
            continue
        with suppress(RoundPipeError):
            seconds = offered(first.change.make())
            for second in takewhile(lambda remedy: remedy.price <= most, seconds):
                change = second.change
                overrides = first.change.overrides + change.overrides
                names = {override.partition("=")[0] for override in overrides}
                if (
                    second.price >= first.price
                    and change.overrides not in known
                    and not (second.price > first.price and change.overrides in hopeless)
                    and len(names) == len(overrides)
                ):
                    where = re.sub("^the same results( but for rounding)?, ", "", change.cost)
                    cost = f"{first.change.cost}; {where}"
                    both = dataclasses.replace(change, overrides=overrides, cost=cost)
                    remedy = dataclasses.replace(second, change=both)
                    found.setdefault(frozenset(overrides), remedy)
    return sorted(found.values(), key=lambda remedy: remedy.price)


def _changes(
    job: Job, *, is_measured: bool, may_fit: Callable[[], bool]
) -> Iterator[Remedy[Change]]:
    """Yield what can be changed, the cheapest first; `may_fit` as `_may_fit`."""

    def seen(job: Job) -> TrainingJob:
        return job.training(job.microbatch_counts()[0]) if is_measured else job.first_job

    def hopeful(price: Price, make: Callable[[], Job]) -> TrainingJob:
        is_coarser = price < Price.TRAINABLE and not may_fit()
        if is_coarser or (is_measured and not fits_memory(make().first_job)):
            raise FitError("Its parameters alone do not fit.")  # the rest takes seconds to measure
        return seen(make())

    def remedy(price: Price, overrides: str, changes: Mapping[str, Any], cost: str) -> Any:
        make = cache(partial(job.with_changes, changes))
        change = Change(overrides=tuple(overrides.split()), cost=cost, make=make)
        return Remedy(change=change, price=price, job=partial(hopeful, price, make))

    rows: Iterator[_Row] = chain(
        _free_changes(job) if is_measured else (),
        _other_uploads(job),
        _less_of_the_state(job, seen),
        _coarser_numbers(job),
        _shorter_sequences(job) if is_measured else (),
        _slower_storage(job),
        _fewer_trained(job),
        _more_hosts(job, seen),
        _larger_machines(job, seen),
    )
    yield from (remedy(*row) for row in rows)


def _may_fit(job: Job, *, before: Job) -> bool:
    """Whether a job may fit with coarser numbers and slower storage, as `before` offers them.

    It does not where the parameters do not fit with all of them at once and no optimizer's state.
    """
    is_movable = before.is_adapted and before.source.is_pretrained  # its weights can be mapped
    if before.num_nodes > 1 or (is_movable and not before.source.keeps_weights_in_files):
        return True
    changes: dict[str, Any] = {}
    for _, _, values, _ in _coarser_numbers(before):
        changes |= values
    try:
        coarsest = job.with_changes(changes).first_job
    except RoundPipeError:  # not all of them at once
        return True
    stateless = replace(coarsest.storage, optimizer_bytes=0.0, disk_bytes=0.0)
    return fits_memory(replace(coarsest, hints=PartitionHints(), storage=stateless))


_Row = tuple[Price, str, Mapping[str, Any], str]
"""Price, overrides, values by key, and what it costs beside time."""


def _free_changes(job: Job) -> Iterator[_Row]:
    same = "the same results but for rounding"
    hints = job.options.partition_hints.keys_given()
    if job.options.given_plan is not None:
        changes = {"partition.plan": "auto", "partition.num_microbatches": "auto"}
        yield Price.NOTHING, "partition=auto", changes, same
    elif hints:
        values = {f"partition.{key}": "auto" if key == "recompute" else None for key in hints}
        overrides = " ".join(f"{key}={value or 'null'}" for key, value in values.items())
        yield Price.NOTHING, overrides, values, same
    count, size = job.num_microbatches, job.batch_size
    while count is not None and count < size:
        count = min(2 * count, size)
        key = "partition.num_microbatches"
        yield Price.NOTHING, f"{key}={count}", {key: count}, same
    if size % 2 == 0 and job.num_microbatches is None:
        batches = {"trainer.accumulate_grad_batches": 2 * job.num_batches}
        overrides = f"{_batch(job, size // 2, job.num_nodes)} {_overrides(batches)}"
        yield Price.NOTHING, overrides, {"data.batch_size": size // 2, **batches}, same
    if job.source.is_pretrained and job.is_adapted and not job.source.keeps_weights_in_files:
        mapped = {"model.frozen_weights": "mmap"}
        cost = "the same results; weights come from the disk"
        yield Price.NOTHING, _overrides(mapped), mapped, cost


def _other_uploads(job: Job) -> Iterator[_Row]:
    """Rounded copies take memory of the host, and half as much of a device as the weights."""
    if job.precision.autocast_dtype is None or job.computes_on_host:
        return
    has_none = job.options.upload_dtype is None
    keys = {"trainer.strategy.upload_dtype": "auto" if has_none else None}
    yield Price.NOTHING, _overrides(keys), keys, upload_cost(rounded=has_none)


def _coarser_numbers(job: Job) -> Iterator[_Row]:
    optimizer = job.config.optimizer
    rate = float(optimizer.get("lr", 0.0))
    adamw = _host_adamw(job)
    if adamw is not None:
        for moments, name in (("bf16", "adamw_bf16_moments"), ("8bit", "adamw_8bit")):
            if _MOMENT_BYTES[moments] < _MOMENT_BYTES[adamw["moments"]]:
                form = "bfloat16" if moments == "bf16" else "8 bits"
                yield (
                    Price.PRECISION,
                    f"optimizer={name}",
                    {"optimizer": {**adamw, "moments": moments}},
                    f"AdamW's moments are rounded to {form}",
                )
        if job.options.gradient_dtype is None and job.precision.master_dtype.itemsize > 2:
            key = "trainer.strategy.gradient_dtype"
            cost = "gradients are summed up in bfloat16"
            changes = {key: "bf16", "optimizer": adamw}
            yield Price.PRECISION, f"{key}=bf16", changes, cost
    for bits in (8, 4) if job.is_adapted else ():
        if bits < job.source.frozen_bits:
            key = "peft.frozen_bits"
            cost = f"frozen linear layers are rounded to {bits} bits"
            yield Price.PRECISION, f"{key}={bits}", {key: bits}, cost
    if job.precision.master_dtype.itemsize > 2:
        keys: dict[str, Any] = {"trainer.precision": "bf16-true"}
        if adamw is None:
            keys["trainer.strategy.stochastic_rounding"] = True
        cost = "weights are kept in bfloat16 and rounded at random"
        if rate < _SMALL_RATE:
            cost += (
                f"; WARNING: with optimizer.lr={rate:g} most updates are smaller than bfloat16 can "
                "hold, so they become noise: take another change if you can"
            )
        changes = {**keys, "trainer.strategy.upload_dtype": "auto"}
        yield Price.PRECISION, _overrides(keys), changes, cost


def _shorter_sequences(job: Job) -> Iterator[_Row]:
    longest = longest_seq_len(job, too_long=job.seq_len)
    if longest:
        keys = {"data.seq_len": longest}
        yield Price.CONTEXT, _overrides(keys), keys, "shorter sequences"


def _slower_storage(job: Job) -> Iterator[_Row]:
    adamw = _host_adamw(job)
    if adamw is None or adamw["offload"] is not None:
        return
    training = job.first_job
    size = 2 * _MOMENT_BYTES[adamw["moments"]] * training.work.num_trainable
    rate = training.hardware.disk_bytes_per_second
    cost = (
        f"moments are on the disk: {size / _GIB:,.1f} GiB a step, {size / rate:,.1f} s at "
        f"{rate / 1e9:g} GB/s"
    )
    on_disk = {**adamw, "offload": "disk", "offload_dir": job.config.paths.output_dir}
    yield Price.DISK, "optimizer=adamw_disk", {"optimizer": on_disk}, cost


def _fewer_trained(job: Job) -> Iterator[_Row]:
    if job.is_adapted:
        return
    cost = "adapters are trained, the model itself is not"
    settings: dict[str, Any] = {}
    for name, more in (("lora", ""), ("qlora", " and is rounded to 4 bits")):
        content: Any = OmegaConf.to_container(OmegaConf.load(config_folder() / f"peft/{name}.yaml"))
        settings = {k: v for k, v in {**settings, **content}.items() if k != "defaults"}
        yield Price.TRAINABLE, f"peft={name}", {"peft": settings}, cost + more


def _less_of_the_state(job: Job, seen: Callable[[Job], TrainingJob]) -> Iterator[_Row]:
    """The largest part of what hosts divide that has room on this one."""
    if job.num_nodes == 1 or job.options.memory_share != "auto":
        return
    share = int(_SHARE_STEPS * most_share(fit_training(replace(seen(job), effort=QUICK))))
    if 0 < share < _SHARE_STEPS / job.num_nodes:
        keys = {_MEMORY_SHARE: share / _SHARE_STEPS}
        cost = f"the same results, if others have room for {1 - share / _SHARE_STEPS:g} together"
        yield Price.NOTHING, _overrides(keys), keys, cost


def _more_hosts(job: Job, seen: Callable[[Job], TrainingJob]) -> Iterator[_Row]:
    """The fewest hosts that fit: each keeps a part of what is stored of every parameter."""
    first, share = job.first_job, job.options.memory_share
    for times in (2, 4):
        num, (size, rest) = times * job.num_nodes, divmod(job.batch_size, times)
        keys = {"trainer.num_nodes": num, "data.batch_size": size}
        machine = replace(
            first.hardware, num_nodes=num, memory_share=None if share == "auto" else share
        )
        if rest or (job.num_microbatches or 1) > size:
            continue
        if not fits_memory(replace(first, hardware=machine)):
            continue
        if fits_memory(seen(job.with_changes(keys))):
            cost = f"the same results but for rounding, on {num} such hosts"
            yield Price.HOST_MEMORY, f"nodes={num} {_batch(job, size, num)}", keys, cost
            return


def _larger_machines(job: Job, seen: Callable[[Job], TrainingJob]) -> Iterator[_Row]:
    if not may_fit_elsewhere(job.first_job):
        return
    for price, spec in other_machines(seen(job)):
        if price is Price.HOST_MEMORY:
            keys = {"hardware.host_memory": f"{-(-spec.host_bytes // _GIB)}GiB"}
            yield price, _overrides(keys), keys, "the same results, on a host with more memory"
        else:
            changes = {"hardware_file": spec.name, "trainer.accelerator": "auto"}
            yield price, f"hardware={spec.name}", changes, "the same results, on other devices"


_HOST_ADAMW = "roundpipe_lightning.optim.HostAdamW"
_MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2.03}


def _host_adamw(job: Job) -> dict[str, Any] | None:
    """The optimizer's settings as those of `HostAdamW`; None where it is no AdamW."""
    given = dict(job.config.optimizer)
    if given["_target_"] == "torch.optim.AdamW":
        taken = ("lr", "betas", "eps", "weight_decay", "_partial_")
        given = {key: given[key] for key in taken if key in given}
    elif given["_target_"] != _HOST_ADAMW:
        return None
    return {"moments": "fp32", "offload": None, **given, "_target_": _HOST_ADAMW}


def _batch(job: Job, size: int, num_nodes: int) -> str:
    """The override that gives each host a batch of a size."""
    if job.config.global_batch_size is None:
        return f"data.batch_size={size}"
    return f"global_batch_size={size * num_nodes}"


def _overrides(keys: Mapping[str, Any]) -> str:
    words = {"True": "true", "None": "null"}
    return " ".join(f"{key}={words.get(str(v), v)}" for key, v in keys.items())


def check_memory(job: Job) -> None:
    """Refuse a training that this machine has no memory for, before any is taken; FitError.

    Weights, gradients, optimizer state and copies count; what activations need is checked with the
    first batch.
    """
    free = free_host_bytes()
    if job.strategy is None:
        size = job.num_bytes
        if job.computes_on_host:
            what = "The model with its optimizer"
            check_host_memory(size, what=what, way_out="Train a smaller one.")
        return
    first = job.first_job
    if fits_memory(first if free is None else _limited(first, free)):
        return
    if free is not None and free < first.hardware.host_bytes:
        job = job.with_changes({"hardware.host_memory": free})
        first = job.first_job
    reason = fit_training(first).memory.reason
    texts = [
        f"({number}) {change_text(remedy, answer)}"
        for number, (remedy, answer) in enumerate(cheapest_changes(job, is_measured=False), start=1)
    ]
    ways = f"What makes room for it: {'; '.join(texts)}." if texts else "No single change helps."
    raise FitError(
        f"This training does not fit {job.machine.name}: {reason} {ways} Nothing was read or "
        "drawn; roundpipe-plan, with the same settings, says more."
    )


def _limited(training: TrainingJob, host_bytes: int) -> TrainingJob:
    """The same job on a host with no more than so much memory."""
    machine = training.hardware
    size = max(1, min(machine.host_bytes, host_bytes))
    device = min(machine.device_bytes, size) if machine.shares_host_memory else machine.device_bytes
    limited = dataclasses.replace(machine, host_bytes=size, device_bytes=device)
    return dataclasses.replace(training, hardware=limited)


def read_nodes(config: DictConfig) -> tuple[list[int], list[str]]:
    """Return the numbers of hosts to plan for, ascending, or the machines that hosts are."""
    nodes: Any = 1 if config.nodes == "auto" else config.nodes
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
    """Return the answers for growing numbers of hosts, of which each job is for one.

    What fits one number fits a larger one, so the plan stays the same from then on.
    """
    answers = [first]
    for job in jobs[1:]:
        before, is_same = answers[-1], job.batch_size == jobs[0].batch_size
        new = before.on_hosts(job.num_nodes) if before.fits and is_same else job.answer()
        answers.append(new)
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
    """One of several hosts that are not alike; `speed`: tokens per second without the others."""

    job: Job
    answer: FitAnswer
    speed: float

    def with_changes(self, **changes: Any) -> HostPlan:
        job = self.job.with_changes(changes)
        return replace(self, job=job, answer=job.answer())


def uneven(job: Job, machines: Sequence[str]) -> list[HostPlan]:
    """Plan hosts that are not alike: each one's share of the batch follows its tokens per second.

    What they divide of masters, sums and optimizer's state is as much on each, or where a host has
    no room for that, goes by the room of each. The job's batch is that of one of equal hosts.
    """

    def planned(machine: str) -> HostPlan:
        changes = {
            "hardware_file": machine,
            "global_batch_size": None,
            "trainer.accelerator": "auto",
            "trainer.devices": "auto",
            "trainer.num_nodes": len(machines),
        }
        its = job.with_changes(changes)
        answer = its.answer()
        speed = 0.0
        if answer.prediction is not None:
            alone = answer.prediction.step_seconds - answer.prediction.network_seconds
            speed = answer.job.step_tokens / alone
        return HostPlan(job=its, answer=answer, speed=speed)

    size = job.batch_size
    hosts = [planned(machine) for machine in machines]
    sizes = split_samples(size * len(machines), [host.speed or 1.0 for host in hosts])
    hosts = [
        host if own == size else host.with_changes(**{"data.batch_size": own})
        for host, own in zip(hosts, sizes, strict=True)
    ]
    is_missing = any(host.answer.memory.host.missing_bytes for host in hosts)
    if is_missing and job.options.memory_share == "auto":
        most = [most_share(host.answer) for host in hosts]
        if sum(most) >= 1:
            shares = split_samples(_SHARE_STEPS, most)
            return [
                host.with_changes(**{_MEMORY_SHARE: share / _SHARE_STEPS})
                for host, share in zip(hosts, shares, strict=True)
            ]
    return hosts


def most_share(answer: FitAnswer) -> float:
    """Return how much of what hosts divide has room on one, beside the rest of its plan."""

    def lack(share: float) -> int:
        hardware = replace(answer.job.hardware, memory_share=share)
        return replace(answer.job, hardware=hardware).report(answer.layout).host.lack_bytes

    half, whole = lack(0.5), lack(1.0)  # it grows as a line
    if whole <= 0:
        return 1.0
    return max(0.0, 0.5 - 0.5 * half / (whole - half)) if whole > half else 0.0
