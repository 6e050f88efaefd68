import io
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess

import pytest


def run_program(
    program: Callable[[], object], folder: Path, *arguments: str
) -> CompletedProcess[str]:
    """Run a program's main function in `folder`, with arguments of the command line.

    Args:
        program: Returns, or raises SystemExit.
        folder: The working directory.
        arguments: What stands behind the program's name.
    """
    output, errors = io.StringIO(), io.StringIO()
    returncode = 0
    with (
        pytest.MonkeyPatch.context() as patch,
        _own_logging(),
        redirect_stdout(output),
        redirect_stderr(errors),
    ):
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["program", *arguments])
        try:
            program()
        except SystemExit as ended:
            returncode = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return CompletedProcess(arguments, returncode, output.getvalue(), errors.getvalue())


@contextmanager
def _own_logging() -> Iterator[None]:
    """Put back what a program may have set up of logging, and close what it opened."""
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, logging.root.manager.loggerDict)]
    handlers, levels = root.handlers[:], [logger.level for logger in loggers]
    try:
        yield
    finally:
        for handler in root.handlers:
            if handler not in handlers:
                handler.close()
        root.handlers[:] = handlers
        for logger, level in zip(loggers, levels, strict=True):
            if logger.level != level:  # each change empties what all loggers have cached
                logger.setLevel(level)
