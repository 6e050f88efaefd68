"""Runs a function in a forked process of its own, with a time limit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch


class ForkError(Exception):
    """A process did not answer; the message says why."""


def answer_of(function: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Return what a function returns in a forked process with one thread for operations.

    Raises:
        ForkError: It took longer, or its process ended.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, *args), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(seconds):
            return receiver.recv()
    except EOFError as error:
        raise ForkError("the process ended without an answer") from error
    finally:
        process.kill()
        process.join()
    raise ForkError(f"not done after {seconds:g} s")


def _send(sender: Connection, function: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    sender.send(function(*args))
