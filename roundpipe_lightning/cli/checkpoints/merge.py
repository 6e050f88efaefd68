"""`roundpipe-merge FOLDER FILE`: the checkpoint in a folder as one file."""

from __future__ import annotations

import argparse
import sys

from roundpipe_commands import EXIT_BAD_INPUT
from roundpipe_lightning.checkpoint.io import merge_checkpoint
from roundpipe_lightning.errors import CheckpointError


def merge(options: argparse.Namespace) -> int:
    """Merge as the command line says; return the exit status."""
    try:
        merge_checkpoint(options.folder, options.file, weights_only=not options.trust)
    except CheckpointError as error:
        sys.stderr.write(f"Error: {error}\n")
        return EXIT_BAD_INPUT
    return 0
