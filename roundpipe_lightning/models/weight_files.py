"""Weights in files and on the hub: found, opened without reading, read one by one or mapped.

```
model.safetensors.index.json ─► model-00001-of-00002.safetensors ─► name: slice, read when asked
                                model-00002-of-00002.safetensors ─► name: slice
```

Frozen weights may stay in their files. A state dict leaves such mapped weights out, so a checkpoint
holds what was trained and not the base model: that is in its files already. A state dict that has
them may be loaded if it agrees.
"""

from __future__ import annotations

import json
import logging
import pickle
import socket
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from huggingface_hub import HfApi, constants, is_offline_mode
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import Tensor, nn

from roundpipe_lightning.engine.store.flat_buffers import MappedParameter, is_mapped
from roundpipe_lightning.errors import CheckpointError, ConfigurationError, ModelSourceError
from roundpipe_lightning.files import checksum, find_damage, name_of
from roundpipe_lightning.models.gguf import is_gguf

MARKER = "roundpipe_export.json"
"""A file that says that the folder is an export, so that the next one may replace it. It has the
checksums of the weights."""

_ANSWERS_SECONDS = 10.0
_LOG = logging.getLogger(__name__)

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


def reach_options(name: str) -> dict[str, bool]:
    """Options of transformers for what has this name, by whether the hub answers.

    Where it does not, only its cache is looked into: transformers would ask for each file six
    times, which takes minutes even where all of them are in the cache.
    """
    if Path(name).exists() or is_gguf(name) or is_offline_mode() or getproxies():
        return {}
    url = urlsplit(constants.ENDPOINT)
    port = url.port or {"http": 80}.get(url.scheme, 443)
    try:
        socket.create_connection((url.hostname, port), timeout=_ANSWERS_SECONDS).close()
    except OSError as error:
        reason = str(error)  # who keeps records would keep the error's frames, with models in them
        _LOG.info("The hub does not answer (%s): what its cache has of %s is taken.", reason, name)
        return {"local_files_only": True}
    return {}


def find_weight_files(name: str, *, hub_options: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files that hold a model's weights, in the order of their names.

    Args:
        name: A local folder, or a name on the Hugging Face hub.
        hub_options: `revision`, `token` and so on, as transformers takes them.

    Raises:
        ModelSourceError: There are none, or the index names files that are not there.
        OSError: The hub cannot be reached; as transformers raises it.
    """
    from transformers.utils.hub import cached_file

    def found(file: str) -> Path | None:
        path = cached_file(name, file, **hub_options, _raise_exceptions_for_missing_entries=False)
        return None if path is None else Path(path)

    for index, single in zip(_INDICES, _SINGLE_FILES, strict=True):
        whole = found(single)
        if whole is not None:
            return (whole,)
        index_path = found(index)
        if index_path is not None:
            paths = {shard: found(shard) for shard in _shards_of(index_path)}
            missing = [shard for shard, path in paths.items() if path is None]
            if missing:
                raise ModelSourceError(
                    f"{index_path} names {len(missing)} of {len(paths)} files that are not there: "
                    f"{', '.join(missing)}. Copy or download them into {name}."
                )
            return tuple(path for path in paths.values() if path is not None)
    raise _no_weights(name)


def check_has_weights(name: str, *, hub_options: Mapping[str, Any]) -> None:
    """Look for weights without reading them; raises as `find_weight_files` does."""
    from transformers.utils.hub import cached_file, has_file

    if Path(name).is_dir():
        find_weight_files(name, hub_options=hub_options)
    else:
        known = {
            key: hub_options[key]
            for key in ("revision", "token", "cache_dir", "local_files_only")
            if key in hub_options
        }
        files = (*_SINGLE_FILES, *_INDICES)
        if not any(has_file(name, file, **known) for file in files):
            cached_file(name, "config.json", **known)  # raises where the hub is out of reach
            raise _no_weights(name)


def _no_weights(name: str) -> ModelSourceError:
    return ModelSourceError(
        f"{name!r} holds no weights: none of {', '.join((*_SINGLE_FILES, *_INDICES))}. Set "
        "model.hub_name to a folder that has them, or use model.weights=random."
    )


def _shards_of(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = sorted(set(weight_map.values()))
        outside = [
            shard for shard in shards if Path(shard).is_absolute() or ".." in Path(shard).parts
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelSourceError(
            f"The index {index} cannot be read ({type(error).__name__}: {error}). Copy or download "
            "it anew."
        ) from error
    if outside:
        raise ModelSourceError(
            f"The index {index} leads out of its folder, to {outside[0]}. Do not use it unless you "
            "know who wrote it."
        )
    return shards


def check_exported(file: Path) -> None:
    """Raise a ModelSourceError if a file differs from the checksum its export wrote beside it."""
    marker = file.with_name(MARKER)
    try:
        expected = json.loads(marker.read_text(encoding="utf-8"))["crc32"][file.name]
    except (FileNotFoundError, ValueError, LookupError, TypeError):
        return  # no export, or one of an earlier version
    if checksum(file) != expected:
        raise ModelSourceError(
            f"{file} differs from its checksum in {MARKER}: it is damaged. Copy or export it anew; "
            f"if you have changed it yourself, remove {MARKER}."
        )


class _TensorSlice:
    """A tensor in a safetensors file, read when it is asked for; `opened` says what `mapped` is."""

    def __init__(
        self, handle: Any, name: str, *, file: Path, mapped: dict[int, Path] | None
    ) -> None:
        self._slice = handle.get_slice(name)
        self._name = name
        self._file = file
        self._mapped = mapped

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._slice.get_shape())

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return str(self._slice.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        from safetensors import SafetensorError

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

    def get_dtype(self) -> str:
        return str(self._tensor.dtype)

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index].clone()


@contextmanager
def opened(
    files: Sequence[Path], *, mapped: dict[int, Path] | None = None
) -> Iterator[dict[str, Any]]:
    """Every tensor of some files by its name, to be read with `[...]`.

    Args:
        files: safetensors files, or files of `torch.save` that hold nothing but tensors.
        mapped: None reads each tensor into memory of its own. A dictionary makes the tensors views
            of the files instead, and receives the file of every tensor by the tensor's address.

    Yields:
        Objects with a `shape`; no values have been read.

    Raises:
        ModelSourceError: A file is damaged, cut short, or holds more than tensors.
        ConfigurationError: Views were asked for of a file that has another format.
    """
    tensors: dict[str, Any] = {}
    with ExitStack() as handles:
        for file in files:
            check_exported(file)
            if file.suffix == ".safetensors":
                handle = handles.enter_context(_open(file, views=mapped is not None))
                for name in handle.keys():  # noqa: SIM118 - not a dictionary
                    tensors[name] = _TensorSlice(handle, name, file=file, mapped=mapped)
            elif mapped is not None:
                raise ConfigurationError(
                    f"model.frozen_weights=mmap maps safetensors files, and {file} is none. Save "
                    "the model as safetensors (save_pretrained does), or use "
                    "model.frozen_weights=memory."
                )
            else:
                tensors.update({n: _PickledTensor(t) for n, t in _unpickled(file).items()})
        yield tensors


def _open(file: Path, *, views: bool) -> Any:
    from safetensors import SafetensorError, safe_open

    # Reading with `pread` puts a tensor into memory of its own; a mapping of the file would stay
    # resident until the last tensor of it is gone.
    try:
        return safe_open(file, framework="pt", device="cpu", backend="mmap" if views else "pread")
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error


def _unpickled(file: Path) -> dict[str, Tensor]:
    try:
        with file.open("rb") as opened:
            damage = find_damage(opened)
            if damage is not None:
                raise _damaged(file, damage)
            state = torch.load(
                name_of(opened),
                map_location="cpu",
                weights_only=True,
                mmap=zipfile.is_zipfile(opened),
            )
    except pickle.UnpicklingError as error:
        raise ModelSourceError(
            f"{file} is a pickle that holds other objects than tensors. Reading it would run code "
            "of whoever wrote it, so it is refused. Use a safetensors version of the model, or "
            "convert the file where you trust it."
        ) from error
    except (RuntimeError, EOFError, OSError) as error:
        raise _damaged(file, error) from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise ModelSourceError(
            f"{file} is not a dictionary of tensors by name, as a model's weights are."
        )
    return state


def _damaged(file: Path, error: Exception | str) -> ModelSourceError:
    return ModelSourceError(
        f"The weights in {file} cannot be read: {error}. The file is damaged or cut short; copy or "
        "download it anew."
    )


class UnmappedWeightsWarning(UserWarning):
    """Weights that were to stay on disk are in memory, because their file holds them otherwise."""


def check_can_map() -> None:
    """Raise a ConfigurationError on Windows: a private mapping takes memory as a copy would."""
    if sys.platform == "win32":
        raise ConfigurationError(
            "model.frozen_weights=mmap: Windows reserves memory for the whole of a private "
            "mapping, so nothing would be gained. Use model.frozen_weights=memory."
        )


def map_frozen(model: nn.Module, find_file: Callable[[str, nn.Parameter], Path | None]) -> None:
    """Freeze a model and make the parameters that are views of files mapped ones.

    Args:
        find_file: Returns the file that a parameter is a view of, or on the meta device will be.

    Warns:
        UnmappedWeightsWarning: Some parameters had to be put together from several tensors, or
            converted, and are in memory.
    """
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    in_memory: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False)
        file = find_file(name, parameter)
        if file is not None:
            replaced[parameter] = MappedParameter(parameter.data, file=file)
        elif not parameter.is_meta:
            in_memory[name] = parameter
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, replaced.get(parameter, parameter))
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
    """Drop mapped weights from what is loaded, after a look at whether they are the same."""
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


_ERRORS: Any = (*HfHubHTTPError.__bases__, HFValidationError, LocalTokenNotFoundError)
"""`OSError` and errors of the hub's HTTP client, which is another one in each of its versions."""


def unreadable(what: str, name: str, error: Exception, *, otherwise: str) -> ModelSourceError:
    """Say in a line why something on the hub, or in a local folder, is not read, and what to do.

    `otherwise` is what to do where it is not the name, the revision or the access that is wrong.
    """
    causes: list[BaseException | None] = [error]
    while causes[-1] is not None:
        causes.append(causes[-1].__cause__ or causes[-1].__context__)
    lines = [line for line in str(error).splitlines() if line.strip()]
    cause = lines[0] if lines else type(error).__name__
    if any(isinstance(each, GatedRepoError) for each in causes):  # is a RepositoryNotFoundError
        return ModelSourceError(
            f"{what} is gated or private ({cause}). Ask for access on its page on the hub, then "
            "log in (`hf auth login`) or set HF_TOKEN. A local folder with its files does as well."
        )
    if any(isinstance(each, RevisionNotFoundError) for each in causes):
        return ModelSourceError(
            f"{what} has no such revision on the hub ({cause}). Set model.revision to a branch, "
            "tag or commit that its page shows, or to null for the newest."
        )
    if any(isinstance(each, RepositoryNotFoundError | HFValidationError) for each in causes):
        return ModelSourceError(
            f"{what} is neither on the hub nor a folder here ({cause}). Look at the spelling "
            "(owner/name); if it is private, log in (`hf auth login`) or set HF_TOKEN."
        )
    place = "this place" if Path(name).exists() else "the Hugging Face hub"
    return ModelSourceError(f"{what} cannot be loaded from {place} ({cause}). {otherwise}")


def make_repository(name: str) -> None:
    """Make a private repository, if there is none of that name: what is refused is refused early.

    ModelSourceError: the hub cannot be reached, or does not let this user write there.
    """
    with _explained(name):
        HfApi().create_repo(name, private=True, exist_ok=True)


def push_folder(folder: Path, name: str) -> str:
    """Upload a folder to a repository, and return its address; raises as `make_repository`."""
    with _explained(name):
        done = HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload a trained model"
        )
    return str(done.repo_url)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except _ERRORS as error:
        cause = next(filter(None, str(error).splitlines()), type(error).__name__)
        raise ModelSourceError(
            f"push_to_hub={name!r}: {cause.rstrip('.')}. Name it user/model, and log in with a "
            "token that may write (`hf auth login`, or HF_TOKEN)."
        ) from error
