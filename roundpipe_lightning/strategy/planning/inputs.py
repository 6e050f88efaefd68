"""Inputs of plans: the machine, what is stored and sent; plans with the work they are made for."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from roundpipe_lightning.engine.capture.trees import tensors_in
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.device.accelerator import all_reach, runtime_of
from roundpipe_lightning.engine.device.host_memory import UNKNOWN_BYTES, host_bytes
from roundpipe_lightning.engine.device.probe import available_bytes, probe_hardware
from roundpipe_lightning.engine.store.block_layout import gradient_dtype
from roundpipe_lightning.engine.store.flat_buffers import narrow_parameters
from roundpipe_lightning.engine.update.partial_step import begin_training, trial
from roundpipe_lightning.errors import ConfigurationError, HardwareError, PlanError
from roundpipe_lightning.optim import HostAdamW
from roundpipe_lightning.optim.rounding import rounds_itself
from roundpipe_lightning.planning.model.hardware import HardwareSpec, load_hardware
from roundpipe_lightning.planning.model.profile import MeasuredProfile
from roundpipe_lightning.planning.model.work import (
    BlockWork,
    Operations,
    ParameterStorage,
    WeightStorage,
    WorkProfile,
    microbatch_operations,
)
from roundpipe_lightning.planning.report.description import PlanDescription
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.search.fit import TrainingJob

# The machine


def find_machine(
    source: HardwareSpec | str | os.PathLike[str],
    *,
    num_workers: int,
    workers_per_device: int,
    computes_on_host: bool,
    accelerators: Sequence[torch.device] = (),
) -> HardwareSpec:
    """Return the machine, every worker a device.

    Args:
        source: What the user gave for it. `"auto"` is this machine: its accelerators, measured once
            in less than ten seconds; or its processor, with rates that are assumed, because CPU
            workers are alike whatever their speed, and the memory that there is.
        accelerators: The devices; empty: the first ones of the machine.
    """
    num_devices = num_workers // workers_per_device
    if source == "auto":
        if computes_on_host:
            return cpu_workers(num_workers)
        spec = _probed(num_devices, accelerators)
    else:
        spec = source if isinstance(source, HardwareSpec) else load_hardware(source)
    if spec.num_devices != num_devices:
        raise ConfigurationError(
            f"hardware={spec.name} has {spec.num_devices} devices, but the Trainer's "
            f"devices are {num_devices}. Change one of them, or set hardware='auto'."
        )
    if workers_per_device == 1:
        return spec
    return replace(
        spec,
        num_devices=num_workers,
        device_bytes=spec.device_bytes // workers_per_device,
        unequal=tuple(
            replace(one, device_bytes=one.device_bytes // workers_per_device)
            for one in spec.unequal
            for _ in range(workers_per_device)
        ),
        devices_reach_each_other=spec.devices_reach_each_other or num_devices == 1,
    )


def cpu_workers(num_workers: int) -> HardwareSpec:
    """Return this machine as equal CPU workers: assumed rates, and the memory that there is."""
    size = host_bytes() or UNKNOWN_BYTES
    return replace(
        load_hardware("cpu"),
        num_devices=num_workers,
        devices_per_root=num_workers,
        device_bytes=size,
        host_bytes=size,
    )


def _probed(num_devices: int, accelerators: Sequence[torch.device]) -> HardwareSpec:
    """Measure the accelerators, or take what was measured before; memory is what there is now."""
    kind, devices = torch.accelerator.current_accelerator(), accelerators
    if kind is None:
        devices = ()
    elif not accelerators:  # the machine's first ones
        devices = [torch.device(kind.type, index) for index in range(num_devices)]
    try:
        spec = probe_hardware(num_workers=num_devices, devices=devices)
    except (RuntimeError, HardwareError) as error:
        spec = load_hardware("rtx4090x1")
        rank_zero_info(
            f"roundpipe: the accelerators could not be measured ({error}); plans assume the rates "
            f"of an {spec.device_name}. Name the machine with RoundPipeStrategy(hardware=...)."
        )
        spec = replace(spec, name="auto", num_devices=num_devices, devices_per_root=num_devices)
    sizes = [max(1, available_bytes(d)) for d in devices if runtime_of(d).counts_memory]
    own = zip(spec.unequal, sizes, strict=True) if spec.unequal and sizes else ()
    return replace(
        spec,
        # What a plan may take of the accelerator with the least memory.
        device_bytes=min(sizes, default=spec.device_bytes),
        unequal=tuple(replace(one, device_bytes=size) for one, size in own),
        devices_reach_each_other=all_reach(devices),
        host_bytes=host_bytes() or UNKNOWN_BYTES,  # another container may have another limit
    )


def rate_name(machine: HardwareSpec, dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    try:
        machine.matrix_rates.of(name)
    except HardwareError:
        return "float32"
    return name


# What is stored and sent


def storage_of(
    optimizers: Sequence[Optimizer],
    *,
    steps_in_float32: bool = False,
    keeps_previous: bool = False,
    masters: Set[nn.Parameter] = frozenset(),
    mapped: bool = False,
) -> ParameterStorage:
    """Return the storage of each parameter beside its uploaded weights.

    Args:
        optimizers: Those of a training, or none.
        steps_in_float32: Whether bfloat16 parameters and gradients are float32 during the step, and
            the optimizer's state always.
        keeps_previous: Whether steps compute with a copy from before the last update; it counts
            as state.
        masters: Parameters that are uploaded from copies in 16 bits.
        mapped: Whether frozen weights stay in their files.
    """
    trained = {parameter for optimizer in optimizers for parameter in _trained_by(optimizer)}
    num = sum(parameter.numel() for parameter in trained)
    gradients = sum(p.numel() * gradient_dtype(p).itemsize for p in trained)
    widened = [o for o in optimizers if steps_in_float32 and not rounds_itself(o)]
    state = sum(
        _state_bytes(optimizer, in_float32=optimizer in widened) for optimizer in optimizers
    )
    narrow = (p for o in widened for p in _trained_by(o) if p.dtype is torch.bfloat16)
    state += sum(8 * p.numel() for p in narrow)
    if keeps_previous:
        state += sum(p.numel() * (2 if p in masters else p.itemsize) for p in trained)
    hosted = (o for o in optimizers if isinstance(o, HostAdamW))
    on_disk = sum(o.state_place.disk_bytes * sum(map(Tensor.numel, _trained_by(o))) for o in hosted)
    return ParameterStorage(
        weights=WeightStorage.MEMORY_MAPPED if mapped else WeightStorage.PAGE_LOCKED,
        master_bytes=sum(p.nbytes for p in masters) / num if num else 0.0,
        gradient_bytes=gradients / num if num else 0.0,
        optimizer_bytes=state / num if num else 0.0,
        disk_bytes=on_disk / num if num else 0.0,
    )


def _trained_by(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    members = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return (parameter for parameter in members if parameter.requires_grad)


def _state_bytes(optimizer: Optimizer, *, in_float32: bool) -> float:
    """Bytes of an optimizer's state: one small matrix per group is stepped by one of its kind.

    Nothing is known, and a warning says so, of one that cannot be made from its own settings.
    """
    # What a user has added to a `step` of PyTorch's is for the steps of the training alone: it may
    # count or print.
    own = (c for c in type(optimizer).__mro__ if issubclass(c, Optimizer) and c is not Optimizer)
    torchs = (c for c in own if c.__module__.startswith("torch.optim."))
    kind = next(torchs, type(optimizer))
    if isinstance(optimizer, HostAdamW):
        numel = sum(parameter.numel() for parameter in _trained_by(optimizer))
        return numel * optimizer.state_place.memory_bytes
    total = 0.0
    for group in optimizer.param_groups:
        trained = [parameter for parameter in group["params"] if parameter.requires_grad]
        if not trained:
            continue
        dtype = trained[0].dtype
        if in_float32 and dtype is torch.bfloat16:
            dtype = torch.float32
        accepted = inspect.signature(kind).parameters
        settings = {k: v for k, v in group.items() if k in accepted and k != "params"}
        sample = nn.Parameter(torch.zeros(256, 256, dtype=dtype))
        sample.grad = torch.zeros_like(sample)
        try:
            with trial(), torch.enable_grad():
                stepped = kind([sample], **settings)
                begin_training(stepped)
                stepped.step()
        except Exception as error:  # noqa: BLE001 - whatever its code does not like about the trial
            rank_zero_warn(
                f"The memory of {kind.__name__}'s state is not in the plan: a step on a small "
                f"matrix failed ({type(error).__name__}: {error})."
            )
            return 0.0
        values = pytree.tree_leaves(list(stepped.state.values()))
        size = sum(v.nbytes for v in values if torch.is_tensor(v) and v.numel() > 1)
        total += size / sample.numel() * sum(parameter.numel() for parameter in trained)
    return total


class TransferSizes:
    """The sizes in which weights and gradients are sent, for the planner.

    Attributes:
        narrow: The parameters that are uploaded from copies in another dtype.
    """

    def __init__(
        self, module: nn.Module, stacks: Iterable[BlockStack], dtype: torch.dtype | None
    ) -> None:
        blocks = dict.fromkeys(block for stack in stacks for block in stack.blocks)
        self.narrow = frozenset(narrow_parameters(module, blocks) if dtype is not None else ())
        inside = {p for block in blocks for p in block.parameters()}
        self._outside = tuple(p for p in self.narrow if p not in inside)
        self._dtype = dtype

    def resized(self, work: WorkProfile, chain: Chain) -> WorkProfile:
        """Return a model with parts of these sizes, a block per call of the chain.

        Gradients that are sent in fewer bytes than the parameters have count as these: a device
        sums them up in the parameters' own dtype before.
        """
        if len(work.blocks) != len(chain.links):  # of another chain, which is looked at again
            return work
        pairs = zip(work.blocks, chain.links, strict=True)
        blocks = tuple(self._moved(part, link.block) for part, link in pairs)
        # Linear layers outside the blocks stand behind them, if there is room.
        left, ends = self._saved(self._outside), list[BlockWork]()
        for part in (work.tail, work.head):
            saved = min(left, part.trainable_bytes // 2)
            ends.append(replace(part, parameter_bytes=part.parameter_bytes - saved))
            left -= saved
        uses = Counter(p for link in chain.links for p in link.block.parameters())
        saved = sum((n - 1) * self._saved([p]) for p, n in uses.items() if not p.requires_grad)
        size = work.repeated.parameter_bytes - saved
        repeated = replace(work.repeated, parameter_bytes=size)
        return replace(work, blocks=blocks, repeated=repeated, tail=ends[0], head=ends[1])

    def _saved(self, parameters: Iterable[nn.Parameter]) -> int:
        narrow = self._dtype.itemsize if self._dtype is not None else 0
        return sum(p.numel() * (p.itemsize - narrow) for p in parameters if p in self.narrow)

    def _moved(self, part: BlockWork, block: nn.Module) -> BlockWork:
        parameters = list(block.parameters())
        trained = [p for p in parameters if p.requires_grad] if part.trainable_bytes else []
        wider = sum(p.numel() * max(0, gradient_dtype(p).itemsize - p.itemsize) for p in trained)
        return replace(
            part,
            parameter_bytes=part.parameter_bytes - self._saved(parameters),
            trainable_bytes=part.trainable_bytes + wider,
        )


def first_chain(stacks: Sequence[BlockStack], given_plan: Plan | None) -> Chain:
    if given_plan is not None:
        with contextlib.suppress(PlanError):  # the plan is checked against the chain
            return Chain.named(given_plan.block_names, stacks)
    return Chain.from_stacks(stacks)


def num_values(tree: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(tree))


def widest_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype that most of the parameters have."""
    counts: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


_FIRST_LOOK = 5
"""Steps after which measured times are looked at; then after twice as many, and so on."""


@dataclass(kw_only=True)
class Planned:
    """A plan and what it was made for, for batches of one shape."""

    plan: Plan  # the plan in use for batches like this one
    job: TrainingJob
    # how long its blocks take, as far as that has been measured
    measured: MeasuredProfile = field(init=False)
    # whether the job's work is that of the step, not of its parameters alone
    knows_activations: bool
    size: int = 0  # values in the largest microbatch's tensors; 0: before the first batch
    planning_seconds: float = 0.0
    next_look: int = _FIRST_LOOK  # steps after which a better plan is looked for
    announced: Plan | None = None  # the plan in use that listeners know

    def __post_init__(self) -> None:
        self.measured = MeasuredProfile(self.job.profile)
        self._operations: tuple[Plan, Operations] | None = None

    def operations_of(self, plan: Plan) -> Operations:
        """Count the operations of a microbatch with one of these plans, once per plan."""
        if self._operations is None or self._operations[0] is not plan:
            job = self.job
            counted = microbatch_operations(
                job.work, shape=job.shape, partition=plan.partition, recompute=plan.recompute
            )
            self._operations = (plan, counted)
        return self._operations[1]


@dataclass(frozen=True, kw_only=True)
class PlanEvent:
    """A plan that is about to be run for the first time."""

    # the plan, and whether its prediction follows from the step's code and from measured times
    planned: Planned
    replaced: Plan | None  # the plan that was run before for such batches; None for the first one
    assumed_rates: bool  # whether the machine's rates are assumed, not measured or given

    @cached_property
    def description(self) -> PlanDescription:
        planned, measured = self.planned, self.planned.measured
        profile = measured.profile() if measured.is_ready else None
        prediction = planned.job.predict(planned.plan.layout, profile=profile)
        return PlanDescription(job=planned.job, plan=planned.plan, prediction=prediction)


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Work of a step, as far as it is known."""

    work: WorkProfile
    knows_activations: bool  # whether its bytes are among that
    # whether it is that of a piece: all go forward before the loss is computed
    is_joined: bool = False

    def pieces(self, count: int) -> StepWork:
        return replace(self, work=self.work.pieces(count), is_joined=True)
