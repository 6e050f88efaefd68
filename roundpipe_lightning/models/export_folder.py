"""A folder that is replaced as a whole: what was there before stays until the new one is complete.

```
model/                    the previous export
.model.1f3a.tmp/          1. written beside it, flushed
.model.1f3a.previous/     2. the previous one steps aside
model/                    3. the new one takes its place; the previous one is removed
```

An error before step 2 leaves the previous export where it is; one in step 3 puts it back. Between
the two renames a crash leaves it whole under its name of step 2.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from roundpipe_lightning.errors import CheckpointError

MARKER = "roundpipe_export.json"
"""A file that says that the folder is an export, so that the next one may replace it."""


def check_replaceable(folder: Path, *, overwrite: bool) -> None:
    """Refuse to replace what is no export.

    Raises:
        CheckpointError: The folder holds something else, and `overwrite` is not set.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(f"output_dir={folder} is a file or a link, not a folder of its own.")
    if not folder.is_dir() or overwrite or (folder / MARKER).is_file():
        return
    held = sorted(path.name for path in folder.iterdir())
    if held:
        raise CheckpointError(
            f"output_dir={folder} holds {len(held)} files that are no earlier export "
            f"({', '.join(held[:3])}, ...). Choose another folder, or set overwrite=true to "
            "replace the whole of it."
        )


@contextmanager
def replaced_folder(folder: Path, *, about: Mapping[str, Any], overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder; put it in `folder`'s place, or remove it after an error.

    Args:
        folder: Where to.
        about: What the marker says.
        overwrite: Whether anything that is there may be replaced.

    Raises:
        CheckpointError: The folder holds something else, or cannot be written (a full disk, say).
    """
    folder = Path(os.path.abspath(folder.expanduser()))  # noqa: PTH100 - links stay as they are
    check_replaceable(folder, overwrite=overwrite)
    token = secrets.token_hex(4)
    temporary = folder.with_name(f".{folder.name}.{token}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        (temporary / MARKER).write_text(json.dumps(dict(about), indent=1) + "\n", encoding="utf-8")
        _sync(temporary)
        _swap(temporary, folder, previous=folder.with_name(f".{folder.name}.{token}.previous"))
    except (OSError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"The export to {folder} failed: {error}. What was there before is untouched. Free "
            "some space or choose another output_dir."
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(temporary: Path, folder: Path, *, previous: Path) -> None:
    if folder.exists():
        folder.rename(previous)
    try:
        temporary.rename(folder)
    except OSError:
        if previous.exists():
            previous.rename(folder)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Make what was written survive a power cut."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("r+b") as file:  # Windows flushes only what may be written
                os.fsync(file.fileno())
