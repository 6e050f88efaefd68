"""`roundpipe-merge FOLDER FILE`: a sharded checkpoint as one file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from roundpipe_commands import EXIT_BAD_INPUT
from roundpipe_lightning.checkpoint.io import merge_checkpoint
from roundpipe_lightning.errors import CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: Those of the command line; None: the process's.
    """
    parser = argparse.ArgumentParser(
        prog="roundpipe-merge",
        description="Write a sharded checkpoint as one file, which any Lightning "
        "strategy reads. A folder of Hugging Face is what roundpipe-export writes.",
        epilog="Example: roundpipe-merge logs/train/runs/NAME/checkpoints/last.ckpt one.ckpt",
    )
    parser.add_argument("folder", help="the checkpoint, a folder with index.json")
    parser.add_argument("file", help="the file to write; what is there is replaced as a whole")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also read objects other than tensors, numbers and text: reading them may run code",
    )
    options = parser.parse_args(arguments)
    try:
        merge_checkpoint(options.folder, options.file, weights_only=not options.trust)
    except CheckpointError as error:
        sys.stderr.write(f"Error: {error}\n")
        return EXIT_BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
