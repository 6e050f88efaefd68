"""Weights for any module that was built on the meta device: read one by one, or drawn anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError
from roundpipe_lightning.models.weight_files import opened

_MOST_NAMED = 3


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
    saved = _holders(module.state_dict(keep_vars=True))
    with opened(files) as tensors:
        # Of the names of a tied tensor one will do.
        known = {name for _, names in saved for name in names if not {*names}.isdisjoint(tensors)}
        lines = shape_differences(module.state_dict(), tensors, may_lack=known)
        if lines:
            raise ModelSourceError(
                f"{len(lines)} tensors of {path} do not fit {type(module).__name__}:\n"
                + "\n".join(lines)
            )
        for old, names in saved:
            found = next(name for name in names if name in tensors)
            wanted = (dtype or old.dtype) if old.is_floating_point() else old.dtype
            _assign(module, names, tensors[found][...].to(wanted), like=old)
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if left:
        raise ConfigurationError(
            f"Buffer {left[0]} has no values: it is not saved with the weights, and the module was "
            "built on the meta device. Make it in __init__ under torch.device('cpu')."
        )


def draw_weights(module: nn.Module, *, seed: int) -> None:
    """Draw the weights of a module that is on the meta device, module by module.

    Args:
        module: A model of transformers, or one all of whose parts with parameters can
            `reset_parameters`.
        seed: Of the values. The global generator of the CPU is left as it was.

    Raises:
        ConfigurationError: A part has parameters and no way to draw them.
    """
    from transformers import PreTrainedModel

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


def draw_buffers(module: nn.Module) -> None:
    """Compute the buffers of transformers' models that no checkpoint has (rotary frequencies)."""
    from transformers import PreTrainedModel

    unsaved = [tensor for tensor in module.buffers() if tensor.is_meta]
    kept = {id(tensor) for tensor in (*module.parameters(), *module.buffers())} - set(
        map(id, unsaved)
    )
    _materialize(module)
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) in kept:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined] # noqa: SLF001 - its mark
    for model in module.modules() if unsaved else ():
        if isinstance(model, PreTrainedModel):
            model.init_weights()
            return


def shape_differences(
    wanted: Mapping[str, Tensor], found: Mapping[str, Any], *, may_lack: Collection[str] = ()
) -> list[str]:
    """Name every tensor that is missing, extra or of another shape, in a line each."""
    lines = [
        f"  missing: {name}, {shape_text(tensor)}"
        for name, tensor in wanted.items()
        if name not in found and name not in may_lack
    ]
    lines += [f"  extra: {k}, {shape_text(t)}" for k, t in found.items() if k not in wanted]
    lines += [
        f"  another shape: {name}, {shape_text(found[name])} instead of {shape_text(tensor)}"
        for name, tensor in wanted.items()
        if name in found and shape_text(found[name]) != shape_text(tensor)
    ]
    return lines


def first_lines(lines: Sequence[str]) -> str:
    """Return the first few of them as one line, and how many more there are."""
    more = f" and {len(lines) - _MOST_NAMED} more" if len(lines) > _MOST_NAMED else ""
    return f"{'; '.join(line.strip() for line in lines[:_MOST_NAMED])}{more}"


def shape_text(tensor: Any) -> str:
    return "shape unknown" if tensor is None else str(tuple(tensor.shape))


def _materialize(module: nn.Module) -> None:
    """Give every tensor memory; tied ones the same."""
    tensors = dict(module.named_parameters(remove_duplicate=False))
    for old, names in _holders({**tensors, **dict(module.named_buffers(remove_duplicate=False))}):
        if old.is_meta:
            _assign(module, names, torch.empty_like(old, device="cpu"), like=old)


def _holders(tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, list[str]]]:
    """Every tensor once, with all of its names."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in tensors.items():
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _assign(module: nn.Module, names: list[str], values: Tensor, *, like: Tensor) -> None:
    """Put one tensor, a parameter if the old one was, in all places that had the old one."""
    is_parameter = isinstance(like, nn.Parameter)
    new = nn.Parameter(values, like.requires_grad) if is_parameter else values
    for name in names:
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, new)
