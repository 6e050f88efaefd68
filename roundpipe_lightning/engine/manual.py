"""Steps that step their optimizers themselves: one batch, one device, one thread.

User code that calls `backward` and `optimizer.step` itself, several times in a step perhaps, cannot
be divided among workers. It runs as it is, in the calling thread, on a view in which

- parameters *are* the masters, on the host: optimizers, clipping, `p.data.clamp_(...)` and moving
  averages of weights find what they expect;
- an operation that meets a master and a tensor on the device gets a copy of the master there, made
  differentiably, so that autograd itself brings the gradient to the master's `.grad`;
- a block's parameters are on the device only while the block runs, and again while its recompute
  and backward run: `torch.utils.checkpoint` keeps a block's inputs and nothing else.

```
forward     upload 0, run 0, drop    upload 1, run 1, drop    loss
backward    upload 1, run 1 again, gradients home, drop    upload 0, run 0 again, ...
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from roundpipe_lightning.engine.capture.arguments import Copies, Reference
from roundpipe_lightning.engine.capture.placeholder import RUN_HERE, make_proxy, writes_first
from roundpipe_lightning.engine.capture.torch_functions import KEEP_PLACE, QUESTIONS, name_of
from roundpipe_lightning.engine.capture.trees import map_tensors, tensors_in
from roundpipe_lightning.engine.capture.view import ViewClasses, ViewMaker, write_through
from roundpipe_lightning.engine.chain.block_outcome import Given
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.worker.loaded_blocks import PlacedBuffers
from roundpipe_lightning.engine.worker.user_code import RootView

Write: TypeAlias = Callable[[nn.Module, str, Any], None]
"""Told of an attribute that was written on a view: the original, the name and the value."""


class ManualStep:
    """One call of user code that steps its optimizers itself.

    Args:
        module: The user's module.
        blocks: What is on the device only while it runs.
        device: Where the code computes.
    """

    def __init__(self, module: nn.Module, *, blocks: Sequence[nn.Module], device: Device) -> None:
        self._module = module
        self._blocks = blocks
        self._device = device
        self._meeting = _MeetingPlace(module, device)
        self._buffers = PlacedBuffers(device, keep_writes=True)
        self._classes = ViewClasses()
        self._maker = self._new_maker(self._buffers.place, write=write_through)
        self._proxies: dict[nn.Module, Any] = {}

    def _new_maker(self, buffer: Callable[[Tensor], Tensor], *, write: Write) -> ViewMaker:
        return ViewMaker(
            parameter=self._meeting.placed, buffer=buffer, classes=self._classes, write=write
        )

    def run(
        self,
        call: Callable[[Any, Any], Any],
        batch: Any,
        *,
        overrides: Mapping[str, Any],
        stand_ins: Mapping[nn.Module, nn.Module],
    ) -> Any:
        """Run the user's code on the full batch; arguments as of `Engine.evaluate`.

        Returns:
            What `call` returned, on the host.
        """
        device = self._device
        try:
            with device.activate(), device.thread_context():
                view = self._open_view(overrides, stand_ins)
                here = map_tensors(device.upload, batch)
                with self._meeting:
                    output = call(view, here)
                self._buffers.write_back(self._maker.made, owner_of=self._owner_of)
                return map_tensors(self._to_host, output)
        finally:
            device.synchronize()
            self._maker.close()

    def _open_view(
        self, overrides: Mapping[str, Any], stand_ins: Mapping[nn.Module, nn.Module]
    ) -> nn.Module:
        self._maker.add_stand_ins(stand_ins)
        self._proxies = {
            block: make_proxy(
                block, maker=self._maker, classes=self._classes, called=self._block_called
            )
            for block in self._blocks
        }
        self._maker.add_stand_ins(self._proxies)
        has_device = isinstance(getattr(type(self._module), "device", None), property)
        view = self._maker.view_of(self._module, *((RootView,) if has_device else ()))
        view.__dict__.update(overrides, _present_device=lambda: self._device.torch_device)
        return view

    def _owner_of(self, tensor: Tensor) -> Device:
        return self._device if self._meeting.is_here(tensor) else CpuDevice()

    def _to_host(self, tensor: Tensor) -> Tensor:
        return self._owner_of(tensor).download(tensor)

    def _block_called(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a proxy: run the block, so that nothing but its inputs is kept."""
        if self._meeting.runs_a_block:
            return RUN_HERE
        if not torch.is_grad_enabled():
            with self._meeting.in_block():
                return self._proxies[block](*args, **kwargs)
        run = _BlockRun(
            block,
            proxy=self._proxies[block],
            given=(args, kwargs),
            meeting=self._meeting,
            buffers=self._buffers,
            new_maker=partial(self._new_maker, write=_forget),
            device=self._device,
        )
        return checkpoint(run, *run.take_tensors(), use_reentrant=False)


def _forget(module: nn.Module, name: str, value: Any) -> None:
    """Keep what a recompute writes from the original: the forward pass has written it."""


class _Numbered(Reference):
    """Stands for a tensor among a block's arguments."""

    def __init__(self, number: int) -> None:
        self.number = number


class _BlockRun:
    """One call of a block; called once for its forward pass, then for every recompute.

    The forward pass gets what the user's code gave. A recompute gets copies of the containers and
    objects among it, as they were at the time of the call, and the buffers of that time.

    Args:
        block: The block.
        proxy: Runs it forward.
        given: Positional and keyword arguments.
        meeting: Says what stands for parameters.
        buffers: The step's buffers.
        new_maker: Makes views of a recompute, from what stands for its buffers.
        device: Where it computes.
    """

    def __init__(
        self,
        block: nn.Module,
        *,
        proxy: Any,
        given: Given,
        meeting: _MeetingPlace,
        buffers: PlacedBuffers,
        new_maker: Callable[[Callable[[Tensor], Tensor]], ViewMaker],
        device: Device,
    ) -> None:
        self._block = block
        self._tensors: list[Tensor] = []
        self._given: Given = Copies(self._number).copied(given)
        self._forward: tuple[Any, Given] | None = (proxy, given)
        self._meeting = meeting
        self._buffers = buffers
        self._earlier: dict[Tensor, Tensor] = {}
        self._new_maker = new_maker
        self._device = device

    def _number(self, tensor: Any, in_object: bool) -> _Numbered:  # noqa: ARG002, FBT001 - a `Swap`
        self._tensors.append(tensor)
        return _Numbered(len(self._tensors) - 1)

    def take_tensors(self) -> list[Tensor]:
        """Return the tensors among the arguments, to be kept by whoever recomputes."""
        tensors, self._tensors = self._tensors, []
        return tensors

    def __call__(self, *tensors: Tensor) -> Any:
        """Run the block.

        Args:
            *tensors: Those of `take_tensors`.
        """
        if self._forward is not None:
            (proxy, (args, kwargs)), self._forward = self._forward, None
            with self._buffers_kept(), self._meeting.in_block():
                return proxy(*args, **kwargs)
        args, kwargs = Copies(lambda numbered, in_object: tensors[numbered.number]).copied(
            self._given
        )
        clones = {buffer: earlier.clone() for buffer, earlier in self._earlier.items()}
        maker = self._new_maker(lambda b: clones[b] if b in clones else self._buffers.place(b))
        try:
            # Neither mode is on in the thread, or the function, that runs a backward pass.
            with self._device.thread_context(), self._meeting, self._meeting.in_block():
                return maker.view_of(self._block)(*args, **kwargs)
        finally:
            maker.close()

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Keep the values of buffers that are written until the end of the context.

        All of a module's, because batch normalisation writes its statistics behind the back of the
        version counter; only its count of batches tells.
        """
        placed = {buffer: self._buffers.place(buffer) for buffer in self._block.buffers()}
        before = {buffer: (here._version, here.clone()) for buffer, here in placed.items()}
        yield
        for module in self._block.modules():
            own = [buffer for buffer in module.buffers(recurse=False) if buffer in before]
            if any(placed[buffer]._version != before[buffer][0] for buffer in own):
                self._earlier.update({buffer: before[buffer][1] for buffer in own})


class _MeetingPlace(TorchFunctionMode):
    """Brings the tensors of every operation together, differentiably: on the device, as a rule.

    What is written into stays where it is, and the others come to it. Numbers may stay on the host.

    Args:
        module: The user's module.
        device: The device.
    """

    def __init__(self, module: nn.Module, device: Device) -> None:
        super().__init__()
        self._device = device
        self._masters = frozenset(module.parameters())
        self._copies: dict[tuple[nn.Parameter, bool], Tensor] | None = None

    @property
    def runs_a_block(self) -> bool:
        """Whether a block runs at present."""
        return self._copies is not None

    @contextmanager
    def in_block(self) -> Iterator[None]:
        """Run a block until the end of the context: its parameters come once, then go."""
        self._copies = {}
        try:
            yield
        finally:
            self._copies = None

    def is_here(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return tensor.device == self._device.torch_device

    def placed(self, parameter: nn.Parameter) -> Tensor:
        """Return what a module has for a parameter: in a block a copy on the device."""
        return parameter if self._copies is None else self._copy(parameter)

    def _copy(self, parameter: nn.Parameter) -> Tensor:
        if self._copies is None:
            return self._device.move(parameter)
        key = (parameter, torch.is_grad_enabled())
        if key not in self._copies:
            self._copies[key] = self._device.move(parameter)
        return self._copies[key]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if name not in QUESTIONS and name not in KEEP_PLACE and func not in _ABOUT_GRAPHS:
            args, kwargs = self._together(name, args, kwargs)
        return func(*args, **kwargs)

    def _together(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        places = {self.is_here(tensor) for tensor in tensors_in((args, kwargs))}
        if len(places) < 2:
            return args, kwargs
        writes = args and (name == "__set__" or writes_first(name))
        written = next(tensors_in(args[0] if writes else kwargs.get("out")), None)
        on_host = written is not None and not self.is_here(written)
        found: tuple[tuple[Any, ...], dict[str, Any]] = map_tensors(
            self._to_host if on_host else self._to_device, (args, kwargs)
        )
        return found

    def _to_host(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self.is_here(tensor) else tensor

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.is_here(tensor):
            return tensor
        if isinstance(tensor, nn.Parameter) and tensor in self._masters:
            return self._copy(tensor)
        is_number = tensor.dim() == 0 and not tensor.requires_grad
        return tensor if is_number else self._device.move(tensor)


_ABOUT_GRAPHS = (torch.autograd.grad, torch.autograd.backward)
"""Functions that take tensors by their place in a graph, wherever they are."""
