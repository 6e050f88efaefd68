"""Frozen weights that stay in their safetensors files, and what that means for a state dict.

A state dict leaves mapped weights out, so a checkpoint holds what was trained and not the base
model: that is in its files already. A state dict that has them may be loaded if it agrees.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.store.mapped_parameter import MappedParameter, is_mapped
from roundpipe_lightning.errors import CheckpointError, ConfigurationError


class UnmappedWeightsWarning(UserWarning):
    """Weights that were to stay on disk are in memory, because their file holds them otherwise."""


def check_can_map() -> None:
    """Refuse systems on which a private mapping takes memory as a copy would.

    Raises:
        ConfigurationError: On Windows.
    """
    if sys.platform == "win32":
        raise ConfigurationError(
            "model.frozen_weights=mmap: Windows reserves memory for the whole of a private "
            "mapping, so nothing would be gained. Use model.frozen_weights=memory."
        )


def map_frozen(model: nn.Module, files: Mapping[int, Path], *, for_good: bool = True) -> None:
    """Freeze a model and make the parameters that are views of files mapped ones.

    Args:
        model: Just loaded.
        files: The file by the address of every tensor that is a view of one.
        for_good: Whether they are to stay in their files.

    Warns:
        UnmappedWeightsWarning: Some parameters had to be put together from several tensors, or
            converted, and are in memory.
    """
    replaced: dict[nn.Parameter, MappedParameter] = {}
    in_memory: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        file = files.get(parameter.data_ptr())
        if file is None:
            in_memory[name] = parameter
        else:
            replaced[parameter] = MappedParameter(parameter.data, file=file)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter in replaced:
                setattr(module, name, replaced[parameter])
    if not for_good:
        return
    model.register_state_dict_post_hook(_leave_out)
    model.register_load_state_dict_pre_hook(_check_agreement)
    model.register_load_state_dict_post_hook(_excuse_missing)
    if in_memory:
        num_bytes = sum(parameter.nbytes for parameter in in_memory.values())
        warnings.warn(
            f"model.frozen_weights=mmap: {len(in_memory)} parameters ({num_bytes / 2**30:.2f} GiB) "
            f"are in memory, {next(iter(in_memory))} first: their file holds them in another dtype "
            "or in parts. roundpipe-export original_layout=false writes a folder that can be "
            "mapped whole; model.dtype must be that of the files.",
            category=UnmappedWeightsWarning,
            stacklevel=4,
        )


def bring_into_memory(model: nn.Module) -> None:
    """Make mapped parameters ordinary ones, frozen as they were."""
    brought: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if is_mapped(parameter):
                if parameter not in brought:
                    values = parameter.data.clone()
                    brought[parameter] = nn.Parameter(values, requires_grad=False)
                setattr(module, name, brought[parameter])


def mapped_parameters(module: nn.Module) -> dict[str, MappedParameter]:
    """The parameters of a module that stay in files, by all of their names."""
    named = module.named_parameters(remove_duplicate=False)
    return {
        name: parameter
        for name, parameter in named
        if isinstance(parameter, MappedParameter) and is_mapped(parameter)
    }


def _leave_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in mapped_parameters(module):
        state.pop(prefix + name, None)


def _check_agreement(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Drop mapped weights from what is loaded, after a look at whether they are the same.

    Raises:
        CheckpointError: They are not.
    """
    different = []
    for name, parameter in mapped_parameters(module).items():
        given: Tensor | None = state.pop(prefix + name, None)
        if given is not None and not torch.equal(given.to(parameter.dtype), parameter):
            different.append(name)
    if different:
        raise CheckpointError(
            f"The checkpoint has other values for {len(different)} frozen parameters than the "
            f"files they are mapped from (model.frozen_weights=mmap), {different[0]} first. Use "
            "model.frozen_weights=memory, or the checkpoint of a run on these files."
        )


def _excuse_missing(module: nn.Module, incompatible: Any) -> None:
    names = set(mapped_parameters(module))

    def is_ours(key: str) -> bool:
        parts = key.split(".")
        return any(".".join(parts[start:]) in names for start in range(len(parts)))

    missing = incompatible.missing_keys
    missing[:] = [key for key in missing if not is_ours(key)]
