"""Contexts: worker threads compute in the modes in which user code called."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from roundpipe_lightning.engine.driver.context import CallContext

FACTOR: contextvars.ContextVar[Any] = contextvars.ContextVar("factor", default=1.0)


def modes() -> tuple[Any, ...]:
    x = torch.ones(2, 2, requires_grad=True)
    out = x @ x
    return out.requires_grad, out.is_inference(), out.dtype, torch.is_autocast_cache_enabled()


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


CONTEXTS: list[Callable[[], AbstractContextManager[Any]]] = [
    nullcontext,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    lambda: torch.autocast("cpu", dtype=torch.float16, cache_enabled=False),
]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("around", CONTEXTS)
def test_modes_reach_another_thread(context: Any, around: Any) -> None:
    with context():
        call = CallContext.current("cuda")
        expected = modes()

    def run() -> Any:
        with around():
            before = modes()
            with call.entered():
                found = modes()
            assert modes() == before
            return found

    assert in_thread(run) == expected


def test_the_worker_says_whether_there_is_a_graph() -> None:
    call = CallContext.current("cpu")
    with call.entered(grad=False):
        assert not modes()[0]
    with torch.no_grad():
        call = CallContext.current("cpu")
        assert not call.grad_enabled
    with call.entered(grad=True):
        assert modes()[0]


def test_context_variables_reach_several_threads_at_a_time() -> None:
    token = FACTOR.set(3.0)
    call = CallContext.current("cpu")
    FACTOR.reset(token)
    barrier = threading.Barrier(2)
    found = []

    def read() -> None:
        barrier.wait(10)
        found.append(FACTOR.get())
        FACTOR.set(5.0)

    threads = [threading.Thread(target=call.run, args=(read,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3.0, 3.0]
    assert FACTOR.get() == 1.0


def test_an_equal_context_is_the_same_object() -> None:
    call = CallContext.current("cuda")
    assert CallContext.current("cuda", call) is call
    assert CallContext.current("cpu", call) is not call
    for context in CONTEXTS[1:]:
        with context():
            assert CallContext.current("cuda", call) is not call
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = CallContext.current("cpu")
        assert CallContext.current("cpu", call) is call


def test_values_of_context_variables_are_not_compared() -> None:
    first = FACTOR.set(np.zeros(2))
    call = CallContext.current("cpu")
    assert CallContext.current("cpu", call) is call
    second = FACTOR.set(np.zeros(2))  # equal; `==` gives an array
    assert CallContext.current("cpu", call) is not call
    FACTOR.reset(second)
    FACTOR.reset(first)
