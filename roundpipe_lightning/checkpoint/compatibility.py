"""Whether a checkpoint fits: who wrote it, of which model and optimizer it is, and on which base.

A run with adapters trains a thousandth of its parameters; the rest can be built again from where it
came from. A checkpoint that leaves this frozen base out keeps the names, the shapes and a few
values of every frozen parameter, so that it is not put onto another base in silence.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import lightning
import torch
from packaging.version import InvalidVersion, Version
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.errors import CheckpointError, RoundPipeError
from roundpipe_lightning.models.load import first_lines, shape_differences
from roundpipe_lightning.models.weight_files import mapped_parameters

FROZEN_KEY = "roundpipe_frozen"  # entry of a checkpoint that says what it leaves out

_NUM_SAMPLES = 8
_RELATIVE, _ABSOLUTE = 1e-2, 1e-6  # a base in 16 bits is the same base
ANEW = "begin anew with the weights alone: module.load_state_dict(torch.load(path)['state_dict'])."
_AS_IT_WAS = f"Build the optimizer as it was, or {ANEW}"


class InexactResumeWarning(UserWarning):
    """A resumed run may differ from one that was never stopped."""


def check_versions(checkpoint: Mapping[str, Any], *, path: Any, form: int) -> None:
    """Refuse a checkpoint of a newer Lightning, or of another version of this package.

    `form` is the version of our own part.
    """
    if not isinstance(dict(checkpoint).get("state_dict"), Mapping):
        raise CheckpointError(
            f"{path} is no checkpoint of Lightning: it has no state_dict. A file of weights alone "
            "is loaded with module.load_state_dict(torch.load(path))."
        )
    ours = checkpoint.get("roundpipe")
    with reading("entry 'roundpipe'"):
        version = form if ours is None else ours.get("format_version", 0)
        if version != form:
            is_newer = version > form
            raise CheckpointError(
                f"The checkpoint {path} was written by {'a newer' if is_newer else 'an earlier'} "
                f"roundpipe_lightning: its part has format_version={version}, and this version "
                f"reads {form}. "
                + ("Update roundpipe_lightning." if is_newer else f"Use that version, or {ANEW}")
            )
    written = checkpoint.get("pytorch-lightning_version")
    here = Version(lightning.__version__)
    with suppress(InvalidVersion):
        if written is not None and Version(str(written)).release[:2] > here.release[:2]:
            raise CheckpointError(
                f"The checkpoint {path} was written by Lightning {written}, and this is {here}, "
                f"whose loops may not understand it. Install lightning>={written}, or resume with "
                "the version that wrote it."
            )


@contextmanager
def reading(part: str) -> Iterator[None]:
    """Raise a CheckpointError that names the part for whatever a damaged or foreign one raises."""
    try:
        yield
    except RoundPipeError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"The checkpoint's {part} does not fit here ({type(error).__name__}: {error}). It is "
            f"damaged, or of another training: resume from another one (ckpt_path=...), or {ANEW}"
        ) from error


def check_optimizer_states(
    optimizers: Sequence[Optimizer], states: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse (CheckpointError) the states of other optimizers; none at all are as if just made."""
    if optimizers and not states:
        warnings.warn(
            "The checkpoint has no states of optimizers: they begin anew, and the resumed run is "
            "not the one that was stopped. If that was not meant, name a checkpoint that has them.",
            category=InexactResumeWarning,
            stacklevel=2,
        )
        return
    if len(optimizers) != len(states):
        raise CheckpointError(
            f"The checkpoint has the states of {len(states)} optimizers, and configure_optimizers "
            f"returned {len(optimizers)}. Return as many as it was trained with."
        )
    for optimizer, state in zip(optimizers, states, strict=True):
        here = [len(group["params"]) for group in optimizer.param_groups]
        with reading("optimizer_states"):
            there = [len(group["params"]) for group in state["param_groups"]]
        if here != there:
            ours, theirs = (" + ".join(map(str, counts)) or "none" for counts in (here, there))
            raise CheckpointError(
                f"{type(optimizer).__name__} has parameter groups of {ours} parameters, "
                f"and the checkpoint's optimizer {theirs}. {_AS_IT_WAS}"
            )


def check_optimizer_options(optimizers: Iterable[Optimizer]) -> None:
    """Raise a CheckpointError naming options that groups lack: another optimizer's were loaded."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            # torch itself adds `differentiable` to the defaults of any optimizer that it loads.
            missing = optimizer.defaults.keys() - group.keys() - {"differentiable"}
            if missing:
                raise CheckpointError(
                    f"The checkpoint is of another optimizer than {type(optimizer).__name__}: it "
                    f"has no {', '.join(sorted(missing))}. {_AS_IT_WAS}"
                )


def split_frozen(module: nn.Module, state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Part a state dict of a module into what is kept and the names of what is frozen."""
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    kept = {name: value for name, value in state.items() if name not in frozen}
    return kept, [name for name in state if name in frozen]


def describe_frozen(module: nn.Module, names: Iterable[str]) -> dict[str, Any]:
    """Return `names`, `shapes` and `samples` (float32, (names, 8)) of frozen parameters."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    named = {name: parameters[name] for name in names}
    samples = [_sample(parameter) for parameter in named.values()]
    return {
        "names": list(named),
        "shapes": [list(parameter.shape) for parameter in named.values()],
        "samples": torch.stack(samples) if samples else torch.zeros(0, _NUM_SAMPLES),
    }


def left_out(checkpoint: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(checkpoint.get(FROZEN_KEY, {}).get("names", ()))


def check_base(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Raise a CheckpointError if a frozen parameter is missing, or has another shape or values."""
    described = checkpoint.get(FROZEN_KEY)
    if not described:
        return
    parameters = dict(module.named_parameters(remove_duplicate=False))
    wrong, changed = [], []
    with reading(f"entry '{FROZEN_KEY}'"):
        entries = [*zip(*(described[key] for key in ("names", "shapes", "samples")), strict=True)]
    for name, shape, sample in entries:
        parameter = parameters.get(name)
        if parameter is None:
            wrong.append(f"{name} does not exist here")
        elif list(parameter.shape) != shape:
            wrong.append(f"{name} is {tuple(parameter.shape)} here, {tuple(shape)} there")
        elif not parameter.is_meta and _differs(_sample(parameter), sample):
            changed.append(f"{name} has other values")
    wrong += changed
    if wrong:
        raise CheckpointError(
            "The checkpoint leaves the frozen base model out (exclude_frozen_parameters=True), and "
            f"the base that was built here is another one: {first_lines(wrong)}. "
            "Build the module from the weights, or with the seed, that it was trained with."
        )


def load_state(
    module: nn.Module, checkpoint: Mapping[str, Any], *, strict: bool, assign: bool = False
) -> None:
    """Load a checkpoint's weights; what it leaves out must be in the module already.

    Args:
        strict: Whether every tensor must be there and have its place.
        assign: Whether the checkpoint's tensors take the place of the module's.

    Raises:
        CheckpointError: The base is another one, or a tensor does not fit.
    """
    check_base(module, checkpoint)
    absent, state, load_error = left_out(checkpoint), checkpoint["state_dict"], None
    mapped = mapped_parameters(module)
    try:
        module.load_state_dict(state, strict=strict and not (absent or mapped), assign=assign)
    except RuntimeError as error:
        load_error = error
    if load_error is None and not (strict and (absent or mapped)):
        return
    lines = shape_differences(
        _tensors({**module.state_dict(), **mapped}), _tensors(state), may_lack={*mapped, *absent}
    )
    if lines:
        raise CheckpointError(
            f"The checkpoint is of another model than {type(module).__name__} is here: "
            f"{len(lines)} tensors do not fit: {first_lines(lines)}. Build the "
            "model (model=...), or the adapters (peft=...), as it was trained, name another "
            "checkpoint (ckpt_path=...), or load a part of it with strict_loading=False."
        ) from load_error
    if load_error is not None:
        raise load_error


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _sample(parameter: Tensor) -> Tensor:
    """A few values, evenly spread, as float32; not a number where there are none."""
    if not parameter.numel() or parameter.is_complex() or parameter.is_meta:
        return torch.full((_NUM_SAMPLES,), torch.nan)
    positions = torch.linspace(0, parameter.numel() - 1, _NUM_SAMPLES, dtype=torch.float64).long()
    values = parameter.detach().reshape(1) if parameter.dim() == 0 else parameter.detach()
    return values[torch.unravel_index(positions, values.shape)].float().cpu()


def _differs(here: Tensor, there: Tensor) -> bool:
    comparable = ~(here.isnan() | there.isnan())
    return not torch.allclose(
        here[comparable], there[comparable], rtol=_RELATIVE, atol=_ABSOLUTE, equal_nan=True
    )
