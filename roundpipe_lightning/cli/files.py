"""Small files of a run, written whole or not at all."""

import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or the new, never a part.

    Args:
        path: The file; its folder is made.
        text: The whole content, written as UTF-8 with its line ends as they are.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(text.encode())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
