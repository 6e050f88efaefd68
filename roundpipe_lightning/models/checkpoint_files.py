"""The files of published weights: found, opened without reading a tensor, refused where broken.

```
model.safetensors.index.json ─► model-00001-of-00002.safetensors ─► name: slice, read when asked
                                model-00002-of-00002.safetensors ─► name: slice
```
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


class Slice:
    """A tensor in a file, read when it is asked for.

    Args:
        handle: The open safetensors file.
        name: Of the tensor.
        file: The file.
        mapped: The file by the address of every tensor that was given out as a view of it, or None
            if tensors are read into memory.
    """

    def __init__(
        self, handle: Any, name: str, *, file: Path, mapped: dict[int, Path] | None
    ) -> None:
        self._slice = handle.get_slice(name)
        self._name = name
        self._file = file
        self._mapped = mapped

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor; nothing is read for it."""
        return tuple(self._slice.get_shape())

    def get_shape(self) -> list[int]:
        """As safetensors calls it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """As safetensors calls it: `"BF16"`, say."""
        return str(self._slice.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        try:
            tensor: Tensor = self._slice[index]
        except (SafetensorError, OSError) as error:
            raise ModelSourceError(
                f"Tensor {self._name!r} of {self._file} cannot be read: {error}. Copy or download "
                "the file anew."
            ) from error
        if self._mapped is not None:
            self._mapped[tensor.data_ptr()] = self._file
        return tensor


class _PickledTensor:
    """A tensor of a `torch.save` file; copied when it is asked for, so that the file can go."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.shape = tuple(tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index].clone()


def find_checkpoint_files(name: str, *, hub_options: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files that hold a model's weights, in the order of their names.

    Args:
        name: A local folder, or a name on the Hugging Face hub.
        hub_options: `revision`, `token` and so on, as transformers takes them.

    Raises:
        ModelSourceError: There are none, or the index names files that are not there.
        OSError: The hub cannot be reached; as transformers raises it.
    """

    def found(file: str) -> Path | None:
        path = cached_file(name, file, **hub_options, _raise_exceptions_for_missing_entries=False)
        return None if path is None else Path(path)

    for index, single in zip(_INDICES, _SINGLE_FILES, strict=True):
        whole = found(single)
        if whole is not None:
            return (whole,)
        index_path = found(index)
        if index_path is not None:
            shards = _shards_of(index_path)
            paths = {shard: found(shard) for shard in shards}
            missing = [shard for shard, path in paths.items() if path is None]
            if missing:
                raise ModelSourceError(
                    f"{index_path} names {len(missing)} of {len(paths)} files that are not there: "
                    f"{', '.join(missing)}. Copy or download them into {name}."
                )
            return tuple(path for path in paths.values() if path is not None)
    raise ModelSourceError(
        f"{name!r} holds no weights: none of {', '.join((*_SINGLE_FILES, *_INDICES))}. Set "
        "model.hub_name to a folder that has them, or use model.weights=random."
    )


def _shards_of(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelSourceError(
            f"The index {index} cannot be read ({type(error).__name__}: {error}). Copy or download "
            "it anew."
        ) from error


@contextmanager
def opened(
    files: Sequence[Path], *, mapped: dict[int, Path] | None = None
) -> Iterator[dict[str, Any]]:
    """Every tensor of some files by its name, to be read with `[...]`.

    Args:
        files: safetensors files, or files of `torch.save` that hold nothing but tensors.
        mapped: None reads each tensor into memory of its own. A dictionary makes the tensors views
            of the files instead, and receives their addresses.

    Yields:
        Objects with a `shape`; no values have been read.

    Raises:
        ModelSourceError: A file is damaged, cut short, or holds more than tensors.
        ConfigurationError: Views were asked for of a file that has another format.
    """
    tensors: dict[str, Any] = {}
    with ExitStack() as handles:
        for file in files:
            if file.suffix == ".safetensors":
                handle = handles.enter_context(_open(file, views=mapped is not None))
                for name in handle.keys():  # noqa: SIM118 - not a dictionary
                    tensors[name] = Slice(handle, name, file=file, mapped=mapped)
            elif mapped is not None:
                raise ConfigurationError(
                    f"model.frozen_weights=mmap maps safetensors files, and {file} is none. Save "
                    "the model as safetensors (save_pretrained does), or use "
                    "model.frozen_weights=memory."
                )
            else:
                tensors.update(
                    {name: _PickledTensor(tensor) for name, tensor in _unpickled(file).items()}
                )
        yield tensors


def _open(file: Path, *, views: bool) -> Any:
    # Reading with `pread` puts a tensor into memory of its own; a mapping of the file would stay
    # resident until the last tensor of it is gone.
    try:
        return safe_open(file, framework="pt", device="cpu", backend="mmap" if views else "pread")
    except (SafetensorError, OSError) as error:
        raise ModelSourceError(
            f"The weights in {file} cannot be read: {error}. The file is damaged or cut short; "
            "copy or download it anew."
        ) from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(
            file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file)
        )
    except pickle.UnpicklingError as error:
        raise ModelSourceError(
            f"{file} is a pickle that holds other objects than tensors. Reading it would run code "
            "of whoever wrote it, so it is refused. Use a safetensors version of the model, or "
            "convert the file where you trust it."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ModelSourceError(
            f"The weights in {file} cannot be read: {error}. The file is damaged or cut short; "
            "copy or download it anew."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ModelSourceError(
            f"{file} is not a dictionary of tensors by name, as a model's weights are."
        )
    return state
