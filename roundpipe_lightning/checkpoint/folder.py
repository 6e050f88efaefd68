"""A checkpoint as a folder of files of a limited size, for models that are very large.

```
last.ckpt/
  index.json               which files belong to it, and their sizes; replaced last
  structure-1f3a.pt        the checkpoint, with a reference where a large tensor was
  tensors-1f3a-00001.pt    {"state_dict/layers.0.weight": tensor, ...}
  tensors-1f3a-00002.pt
```

Every file is one of torch's own. A folder is replaced by writing new files beside the old ones and
then the index, so that it is the one checkpoint or the other at any moment.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_with_path

from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.files import find_damage, new_folder, replace_folder

INDEX = "index.json"
METADATA = ".metadata"
"""Its name where every host writes its part: `distributed.py`."""
_FORMAT_VERSION = 1
REFERENCE = "roundpipe_tensor"
_HOW_TO_EXPORT = "roundpipe-export makes such a folder of a checkpoint of either form."
LEAST_BYTES = 1024  # smaller tensors stay in the structure


def split_checkpoint(checkpoint: Mapping[str, Any], *, max_file_bytes: int) -> dict[str, Any]:
    """Divide a checkpoint among files.

    Tensors that share memory go into the same file and share it again when they are read.

    Args:
        max_file_bytes: Size of a file; one that has a larger tensor has no other.

    Returns:
        What `torch.save` takes, by the name of its file: the structure first, then the tensors in
        the order of the checkpoint.
    """
    files: list[dict[str, Tensor]] = []
    place_of: dict[int, int] = {}  # by storage
    last_bytes = 0

    def reference(path: tuple[Any, ...], value: Any) -> Any:
        nonlocal last_bytes
        if type(value) not in (Tensor, nn.Parameter) or value.layout is not torch.strided:
            return value
        storage = value.untyped_storage()
        if storage.nbytes() < LEAST_BYTES:
            return value
        key = storage._cdata  # noqa: SLF001 - torch's own key for a storage
        if key not in place_of:
            if not files or last_bytes + storage.nbytes() > max_file_bytes:
                files.append({})
                last_bytes = 0
            last_bytes += storage.nbytes()
            place_of[key] = len(files) - 1
        name = "/".join(map(str, keys_of(path)))
        files[place_of[key]][name] = value
        return {REFERENCE: [place_of[key], name]}

    structure = tree_map_with_path(reference, dict(checkpoint))
    numbered = {f"tensors-{number:05d}": content for number, content in enumerate(files)}
    return {"structure": structure, **numbered}


def keys_of(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the keys and numbers of a path in nested dictionaries and lists."""
    return tuple(getattr(part, "key", getattr(part, "idx", part)) for part in path)


def write_folder(
    path: Path, names: list[str], *, version: str, write: Callable[[str, Path], None]
) -> None:
    """Write the files of a folder, then make them the checkpoint.

    Args:
        path: The folder; or a file, which it replaces.
        version: Tells these files from those of the checkpoint before.
        write: Writes a part into a file.
    """
    with new_folder(path) as temporary:
        files: dict[str, dict[str, Any]] = {}
        for name in names:
            file = temporary / f"{name}-{version}.pt"
            write(name, file)
            files[name] = {"file": file.name, "num_bytes": file.stat().st_size}
        index = json.dumps({"format_version": _FORMAT_VERSION, "files": files}, indent=1)
        with (temporary / INDEX).open("x") as opened:
            opened.write(index)
            opened.flush()
            os.fsync(opened.fileno())
        replace_folder(temporary, path, index=INDEX, suffix=".pt")


def is_checkpoint_folder(path: Path) -> bool:
    """Return whether a folder is a checkpoint, of either form."""
    return (path / INDEX).is_file() or (path / METADATA).is_file()


def read_folder(
    path: Path, *, map_location: Any = None, weights_only: bool | None = None
) -> dict[str, Any]:
    """Read a checkpoint; its tensors stay in their files until they are used.

    Raises:
        CheckpointError: It is no sharded checkpoint, a file is missing, damaged or lies outside
            the folder, a newer version wrote it, or it holds objects that `weights_only` forbids.
    """
    if not path.is_dir():
        found = "is one file already" if path.exists() else "does not exist"
        raise CheckpointError(
            f"The checkpoint {path} {found}: name the folder of a sharded one. {_HOW_TO_EXPORT}"
        )
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{path} is a folder of Hugging Face, not a checkpoint: use it with from_pretrained or "
            f"model.hub_name={path} model.weights=pretrained. {_HOW_TO_EXPORT}"
        )
    if not is_checkpoint_folder(path):
        raise CheckpointError(
            f"The checkpoint {path} is a folder without index.json: it is not a sharded checkpoint "
            "of this package. One that FSDP or DeepSpeed wrote in parts has to be made one file "
            "with their own tools first."
        )
    files = _read_index(path)
    for file in files.values():
        damage = find_damage(file)
        if damage is not None:
            raise unreadable(path, f"of its file {file.name}, {damage}")
    structure = load_file(
        files.pop("structure"), map_location=map_location, weights_only=weights_only
    )
    try:
        contents = [
            torch.load(files[name], mmap=True, map_location="cpu", weights_only=True)
            for name in sorted(files)
        ]

        def tensor(value: Any) -> Any:
            if not is_reference(value):
                return value
            place, name = value[REFERENCE]
            return contents[place][name]

        joined: dict[str, Any] = tree_map(tensor, structure, is_leaf=is_reference)
    except (UnpicklingError, RuntimeError, LookupError, TypeError, ValueError) as error:
        raise unreadable(path, f"its files do not fit ({type(error).__name__}: {error})") from error
    return joined


def _read_index(path: Path) -> dict[str, Path]:
    """Return the files of a checkpoint by the names of its parts, all there and of their sizes."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        version = int(index["format_version"])
        entries = {
            str(name): (path / entry["file"], int(entry["num_bytes"]))
            for name, entry in (index["files"].items() if version <= _FORMAT_VERSION else ())
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(path, f"its {INDEX} is damaged") from error
    if version > _FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has format_version={version}, but this version of "
            f"roundpipe_lightning reads {_FORMAT_VERSION}. Update roundpipe_lightning."
        )
    if "structure" not in entries:
        raise unreadable(path, f"its {INDEX} names no structure")
    for file, num_bytes in entries.values():
        if file.resolve().parent != path.resolve():
            raise unreadable(path, f"its {INDEX} leads to {file}, which is outside of it")
        size = file.stat().st_size if file.is_file() else None
        if size != num_bytes:
            found = "is missing" if size is None else f"has {size} of {num_bytes} bytes"
            raise unreadable(path, f"its file {file.name} {found}")
    return {name: file for name, (file, _) in entries.items()}


def load_file(
    file: Path,
    *,
    map_location: Any = None,
    weights_only: bool | None = None,
    mmap: bool = False,
    content: BytesIO | None = None,
) -> Any:
    """As `torch.load`; CheckpointError if it is none, or holds what `weights_only` forbids.

    Args:
        content: Is read in the place of the file.
    """
    is_zip = zipfile.is_zipfile(content or file)
    mmap = mmap and is_zip  # torch's old format is none
    if content is not None:
        content.seek(0)
    try:
        return torch.load(
            content or file, map_location=map_location, weights_only=weights_only, mmap=mmap
        )
    except OSError:
        raise
    except Exception as error:
        if not is_zip:
            raise unreadable(file, "it is not in torch's format") from error
        if isinstance(error, UnpicklingError):
            raise CheckpointError(
                f"The checkpoint {file} holds objects whose reading could run code: {error} If you "
                "trust who wrote it, read it with weights_only=False (an argument of Trainer.fit), "
                "or merge it with roundpipe-merge --trust."
            ) from error
        raise unreadable(file, f"{type(error).__name__}: {error}") from error


def unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} cannot be read: {reason}. It is truncated or damaged: copy it "
        "again, or resume from another one (ckpt_path=...)."
    )


def is_reference(value: Any) -> bool:
    return type(value) is dict and REFERENCE in value
