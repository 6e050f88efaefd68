"""The weights of a Lightning checkpoint put into a module without being read: views of the file."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.models.frozen_base import check_base, left_out
from roundpipe_lightning.models.mapped import mapped_parameters


def load_checkpoint_state(module: nn.Module, path: Path) -> None:
    """Give a module the weights of a checkpoint; it may be on the meta device.

    Args:
        module: As the checkpoint's was, in the names and shapes of its parameters.
        path: A checkpoint of Lightning.

    Raises:
        CheckpointError: The file cannot be read, or is of another model: every tensor that is
            missing, extra or of another shape is listed.
    """
    checkpoint = _read(path)
    check_base(module, checkpoint)
    state, mapped = _tensors_of(checkpoint), mapped_parameters(module)
    absent = {*mapped, *left_out(checkpoint)}
    wanted = {**module.state_dict(), **mapped}
    lines = [
        f"  missing: {name}, {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name not in state and name not in absent
    ]
    lines += [
        f"  extra: {name}, {tuple(tensor.shape)}"
        for name, tensor in state.items()
        if name not in wanted
    ]
    lines += [
        f"  another shape: {name}, {tuple(state[name].shape)} instead of {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if lines:
        raise CheckpointError(
            f"{path} is the checkpoint of another model: {len(lines)} tensors do not fit.\n"
            + "\n".join(lines)
            + "\nName the model and the adapters it was trained with (model=..., peft=...)."
        )
    module.load_state_dict(state, assign=True, strict=False)
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.tie_weights()


def leaves_base_out(path: Path) -> bool:
    """Whether a checkpoint leaves the frozen base model out."""
    return bool(left_out(_read(path)))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        checkpoint: Any = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
        checkpoint["state_dict"].items()
    except (pickle.UnpicklingError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is no checkpoint of Lightning, or holds other objects than tensors and "
            f"settings, which are not unpickled because that would run code: {error}"
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise CheckpointError(
            f"The checkpoint {path} cannot be read: {error}. The file is truncated or damaged."
        ) from error
    found: Mapping[str, Any] = checkpoint
    return found


def _tensors_of(checkpoint: Mapping[str, Any]) -> dict[str, Tensor]:
    state: Mapping[str, Any] = checkpoint["state_dict"]
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}
