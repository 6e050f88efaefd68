"""Whether data that is made in the Trainer's process may look at parameters.

Rollouts of a policy, replay buffers that ask the model, samplers that look for hard samples: on one
device they see the parameters after the last step, because nothing else runs while a batch is
fetched. Such a data set has to know the module, so that is what is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor, nn

from roundpipe_lightning.strategy import compat

_STEPS = 3
"""Over how many objects a data set may know the module: its agent, the agent's policy."""

_MOST_ITEMS = 16
"""How many items of a container are looked at: samples need not be."""


def data_that_reads(trainer: Trainer) -> Iterator[Any]:
    """Give the data sets and samplers of the training that may look at parameters.

    Args:
        trainer: A trainer that fits a module.
    """
    combined = compat.combined_loader(trainer)
    for loader in () if combined is None else combined.flattened:
        if getattr(loader, "num_workers", 0):
            continue  # processes of their own, with a copy of the module
        names = ("dataset", "sampler", "batch_sampler")
        owners = [getattr(loader, name) for name in names if hasattr(loader, name)] or [loader]
        for index, owner in enumerate(owners):
            others = owners[:index]  # samplers have the data set, to know its length
            if _knows(owner, trainer.lightning_module, steps=_STEPS, but_not=others):
                yield owner


def _knows(value: Any, module: nn.Module, *, steps: int, but_not: Sequence[Any]) -> bool:
    """Say whether an object is a part of the module or has one, over some steps."""
    if isinstance(value, nn.Module):
        return any(value is part for part in module.modules())
    if isinstance(value, Tensor):
        return any(value is parameter for parameter in module.parameters())
    if steps < 0 or isinstance(value, type | ModuleType | Trainer):
        return False
    if any(value is other for other in but_not):
        return False
    if not getattr(type(value), "reads_parameters", True):
        return False
    parts = _parts(value)
    return any(_knows(part, module, steps=steps - 1, but_not=but_not) for part in parts)


def _parts(value: Any) -> Iterator[Any]:
    """Give what an object has."""
    if isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, FunctionType):
        yield from map(_content, value.__closure__ or ())
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, GeneratorType):
        yield from () if value.gi_frame is None else value.gi_frame.f_locals.values()
    elif isinstance(value, dict):
        yield from islice(value.values(), _MOST_ITEMS)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from islice(value, _MOST_ITEMS)
    else:
        yield from list(getattr(value, "__dict__", {}).values())


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is in it yet
        return None
