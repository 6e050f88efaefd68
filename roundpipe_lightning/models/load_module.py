"""Weights for a module that was built on the meta device: read tensor by tensor, or drawn anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError
from roundpipe_lightning.models.checkpoint_files import opened
from roundpipe_lightning.models.checkpoint_match import check_module_match


def load_module(module: nn.Module, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Read the weights of any module from safetensors files, whose names are its own.

    For use in `configure_model`, on a module that was built under `torch.device("meta")`:

    ```python
    with torch.device("meta"):
        self.model = MyModel()
    load_module(self.model, "path/to/folder")
    ```

    Args:
        module: On the meta device or on the host.
        path: A safetensors file, or a folder all of whose safetensors files are read.
        dtype: Of floating point tensors; None keeps the module's.

    Raises:
        ModelSourceError: There is no file, one is damaged, or tensors are missing, extra or of
            another shape: all are listed, and nothing has been read then.
        ConfigurationError: A buffer is on the meta device and in no file.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ModelSourceError(f"The folder {path} has no safetensors file.")
    tied = _holders(module)
    with opened(files) as tensors:
        check_module_match(module, tensors, name=str(path))
        for holders in tied.values():
            name = next(name for name in holders if name in tensors)
            old = _get(module, name)
            wanted = (dtype or old.dtype) if old.is_floating_point() else old.dtype
            values = tensors[name][...].to(wanted)
            new = nn.Parameter(values, old.requires_grad) if _is_parameter(old) else values
            for holder in holders:
                _set(module, holder, new)
    _check_no_meta(module)


def draw_weights(module: nn.Module, *, seed: int) -> None:
    """Draw the weights of a module that is on the meta device, module by module.

    Args:
        module: A model of transformers, or one all of whose parts with parameters can
            `reset_parameters`.
        seed: Of the values. The global generator of the CPU is left as it was.

    Raises:
        ConfigurationError: A part has parameters and no way to draw them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if isinstance(module, PreTrainedModel):
            _materialize(module)
            module.init_weights()
            return
        for name, part in module.named_modules():
            owns = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if owns and not callable(getattr(part, "reset_parameters", None)):
                raise ConfigurationError(
                    f"{name or type(module).__name__} has parameters or buffers of its own and no "
                    "reset_parameters() that draws them. Add the method, or build it on the host."
                )
        _materialize(module)
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                reset: Any = part.reset_parameters
                reset()


def _materialize(module: nn.Module) -> None:
    """Give every tensor memory; tied ones the same."""
    tied = {
        tuple(names): _get(module, names[0])
        for names in _holders(module, all_buffers=True).values()
    }
    for names, old in tied.items():
        if not old.is_meta:
            continue
        values = torch.empty_like(old, device="cpu")
        new = nn.Parameter(values, old.requires_grad) if _is_parameter(old) else values
        for name in names:
            _set(module, name, new)


def _holders(module: nn.Module, *, all_buffers: bool = False) -> dict[int, list[str]]:
    """The names of every parameter and buffer that is saved, by identity."""
    found: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(module, all_buffers=all_buffers):
        found.setdefault(id(tensor), []).append(name)
    return found


def _named_tensors(module: nn.Module, *, all_buffers: bool) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    saved = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if all_buffers or name in saved:
            yield name, buffer


def _get(module: nn.Module, name: str) -> Tensor:
    owner, _, key = name.rpartition(".")
    tensor: Tensor = getattr(module.get_submodule(owner), key)
    return tensor


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, key = name.rpartition(".")
    setattr(module.get_submodule(owner), key, tensor)


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _check_no_meta(module: nn.Module) -> None:
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if left:
        raise ConfigurationError(
            f"Buffer {left[0]} has no values: it is not saved with the weights, and the module was "
            "built on the meta device. Make it in __init__ under torch.device('cpu')."
        )
