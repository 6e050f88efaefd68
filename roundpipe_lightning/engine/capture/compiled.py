"""Compiled blocks: `torch.compile` once per kind of block, not once per block, worker or stage.

What is compiled is a plain copy of a block whose parameters are inputs of the code. docs/engine.md
says which blocks are not compiled, and why.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode_temporarily

from roundpipe_lightning.engine.capture.randomness import RandomStream

Backend: TypeAlias = str | Callable[..., Any]
"""A backend of `torch.compile`: its name, or a function of a graph and its inputs."""

INDUCTOR = "inductor"


class BlockCompiler:
    """Compiles the blocks of one engine with a backend of `torch.compile`.

    Only PyTorch's own, `inductor`, is made to draw random numbers as plain PyTorch does.
    """

    def __init__(self, backend: Backend = INDUCTOR) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._kinds: dict[Any, Callable[..., Any]] = {}
        self.left_as_they_are: dict[str, str] = {}
        self._drawing: set[str] = set()
        self._known = False

    def exclude(self, name: str, reason: str) -> None:
        with self._lock:
            self.left_as_they_are.setdefault(name, reason)

    def add_drawing(self, name: str) -> None:
        with self._lock:
            self._drawing.add(name)

    def end_step(self) -> None:
        self._known = True

    def compiles(self, name: str) -> bool:
        return self._known and name not in self.left_as_they_are

    def state_dict(self) -> dict[str, Any]:
        return {
            "known": self._known,
            "left": dict(self.left_as_they_are),
            "drawing": sorted(self._drawing),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._known = bool(state["known"])
        self.left_as_they_are = dict(state["left"])
        self._drawing = set(state["drawing"])

    def stand_in(
        self,
        view: nn.Module,
        *,
        block: nn.Module,
        name: str,
        placed: Any,
        stream: RandomStream | None,
    ) -> nn.Module:
        """Return a block's callable: its compiled code, or the view where it is not compiled.

        It is `placed` on a worker by `ResidentBlocks`.
        """
        if not self.compiles(name):
            return view
        copy = plain_copy(block, parameter=placed.leaf_of, buffer=placed.buffer_of)
        draws = stream if name in self._drawing else None
        return _Compiled(copy, run=self._code_for(block, copy), stream=draws)

    def _code_for(self, block: nn.Module, placed: nn.Module) -> Callable[..., Any]:
        # PyTorch gives code up that it has compiled for more than a few devices.
        tensors = (*placed.parameters(), *placed.buffers())
        kind = frozenset(tensor.device for tensor in tensors), kind_of(block)
        with self._lock:
            if kind not in self._kinds:
                # PyTorch keeps compiled code by Python's code objects: every kind has one.
                code = _call.__code__.replace(co_name=f"block_of_kind_{len(self._kinds)}")
                function = types.FunctionType(code, _call.__globals__, code.co_name)
                options: Any = {"fallback_random": True} if self._backend == INDUCTOR else None
                compiled: Any = torch.compile(function, backend=self._backend, options=options)
                self._kinds[kind] = compiled
            return self._kinds[kind]


class _Compiled(nn.Module):
    """A block's plain copy, run by compiled code, out of sight of the modes around it."""

    def __init__(
        self, block: nn.Module, *, run: Callable[..., Any], stream: RandomStream | None
    ) -> None:
        super().__init__()
        self.block = block
        self._run = run
        self._stream = stream

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def call() -> Any:
            with _pop_mode_temporarily():  # the engine's own
                return self._run(self.block, args, kwargs)

        return call() if self._stream is None else self._stream.draw_all(call)


def _call(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return block(*args, **kwargs)


def kind_of(block: nn.Module) -> Any:
    """Return the key that blocks with common compiled code share: classes and tensors.

    Attributes are no part of it: what the code reads of them is checked when it is run.
    """
    return tuple(
        (
            name,
            type(module),
            module.training,
            *(
                (name, p if p is None else (p.shape, p.dtype, p.requires_grad))
                for name, p in module.__dict__["_parameters"].items()
            ),
        )
        for name, module in block.named_modules()
    )


def plain_copy(
    module: nn.Module,
    *,
    parameter: Callable[[nn.Parameter], nn.Parameter | None],
    buffer: Callable[[Tensor], Tensor],
) -> nn.Module:
    made: dict[nn.Module, nn.Module] = {}

    def copy(original: nn.Module) -> nn.Module:
        if original in made:
            return made[original]
        new: nn.Module = object.__new__(type(original))
        made[original] = new
        state = dict(original.__dict__)
        for table, place in (("_parameters", parameter), ("_buffers", buffer), ("_modules", copy)):
            state[table] = {k: None if v is None else place(v) for k, v in state[table].items()}
        for name, value in state.items():
            if isinstance(value, types.MethodType) and value.__self__ is original:
                state[name] = types.MethodType(value.__func__, new)
        object.__setattr__(new, "__dict__", state)
        return new

    return copy(module)
