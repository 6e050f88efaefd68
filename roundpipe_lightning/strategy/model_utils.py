"""What plans follow from, beside the step itself: calls of blocks, sizes and dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.trees import map_tensors
from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.work import BlockWork, WorkProfile
from roundpipe_lightning.planning.schedule.plan import Plan


def first_chain(stacks: Sequence[BlockStack], given_plan: Plan | None) -> Chain:
    """Return the calls of the user's own plan, else a call of each stack."""
    if given_plan is not None:
        with contextlib.suppress(PlanError):  # the plan is checked against the chain
            return Chain.named(given_plan.block_names, stacks)
    return Chain.from_stacks(stacks)


def accelerators(devices: Sequence[Device]) -> tuple[torch.device, ...]:
    """Return the accelerators that workers compute on, each once."""
    return tuple(dict.fromkeys(d.torch_device for d in devices if isinstance(d, AcceleratorDevice)))


def without_training(work: WorkProfile) -> WorkProfile:
    """Return a model of which nothing is trained: what an evaluation needs memory for."""

    def frozen(part: BlockWork) -> BlockWork:
        return replace(part, num_trainable=0, trainable_bytes=0)

    return replace(
        work,
        blocks=tuple(frozen(block) for block in work.blocks),
        head=frozen(work.head),
        tail=frozen(work.tail),
    )


def num_values(tree: Any) -> int:
    """Return how many values the tensors in nested containers have."""
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    map_tensors(note, tree)
    return sum(sizes)


def widest_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype that most of the parameters have."""
    counts: dict[torch.dtype, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
