"""What flows through a stack: the tensors that blocks make, and the calls that make them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.arguments import Copies, Reference, Swap
from roundpipe_lightning.engine.capture import Phantom
from roundpipe_lightning.engine.writes import ModuleWrites
from roundpipe_lightning.errors import CaptureError

Watched: TypeAlias = Callable[[Sequence[Tensor]], AbstractContextManager[None]]
"""A context for a block that runs, made from the tensors that it takes."""


class ValueOwner(Protocol):
    """The pass that a value belongs to."""

    def real(self, value: Value) -> Tensor | None:
        """Return what the user's code gets for a value; None while blocks are to come."""

    def detached(self, value: Value) -> Tensor | None:
        """Return a value without a graph; None if it has been dropped."""


class Value(Reference):
    """A tensor that a block made.

    Args:
        owner: The pass.
        block: Number of the block.
        block_name: Its name.
        tensor: The tensor, on the worker that made it.
        needs_gradient: Whether something trainable went into it.
        in_object: Whether the block put it into an object, a cache, say: later blocks do not
            get its values.

    Attributes:
        here: The tensor on the present worker, while its stage runs.
        host: Its values on the host, from the end of its stage on, if they are still needed.
    """

    def __init__(
        self,
        owner: ValueOwner,
        *,
        block: int,
        block_name: str,
        tensor: Tensor,
        needs_gradient: bool,
        in_object: bool,
    ) -> None:
        self.block = block
        self.block_name = block_name
        self.needs_gradient = needs_gradient
        self.in_object = in_object
        self.here: Tensor | None = tensor
        self.host: Tensor | None = None
        self._owner = owner
        self.form = (tensor.shape, tensor.dtype)
        self._phantom: weakref.ref[Phantom] | None = None
        self._kept_phantom = self.phantom() if in_object else None

    @property
    def is_held(self) -> bool:
        """Whether the user's code still has the phantom, and could use the values."""
        return not self.in_object and self._phantom is not None and self._phantom() is not None

    @property
    def host_bytes(self) -> int:
        """Bytes on the host."""
        return 0 if self.host is None else self.host.nbytes

    def phantom(self) -> Phantom:
        """Return what the user's code is to hand on."""
        known = None if self._phantom is None else self._phantom()
        if known is not None:
            return known
        assert self.here is not None, "made while the block's stage runs"
        phantom = Phantom.of(self.here, self, requires_grad=self.needs_gradient)
        self._phantom = weakref.ref(phantom)
        return phantom

    def drop(self) -> None:
        """Forget the tensor: its pass has ended."""
        self.here = self.host = self._kept_phantom = None

    def real(self) -> Tensor | None:
        """Return the tensor, where the user's code may use it; None while blocks are to come."""
        return self._owner.real(self)

    def detached(self) -> Tensor | None:
        """Return the values, which may be used at any time; None if they have been dropped."""
        return self._owner.detached(self)


class Outcome:
    """What one run of a block gave: its result, and what it wrote into its arguments.

    Args:
        result: What the block returned.
        copies: The arguments that it got.
        block_name: Its name.

    Attributes:
        tensors: The tensors that the block made, each once, and whether each is inside an object.

    Raises:
        CaptureError: If it took something out of a container.
    """

    def __init__(self, result: Any, *, copies: Copies, block_name: str) -> None:
        self._result = result
        self._copies = copies  # keeps the identities of what the block got
        self._originals = copies.originals()
        try:
            self._changes = list(copies.changes())
        except KeyError as error:
            raise CaptureError(
                f"Block {block_name!r} took {error} out of a container that it was given, which "
                "its recompute would miss. Let it work on a copy."
            ) from None
        self._slots: dict[int, int] = {}
        self.tensors: list[tuple[Tensor, bool]] = []
        Copies(self._note, known=self._originals).of(result)
        for change in self._changes:
            Copies(self._note, known=self._originals).of(change.value, in_object=change.in_object)

    def _note(self, tensor: Tensor, in_object: bool) -> Tensor:  # noqa: FBT001 - a `Swap`
        if id(tensor) not in self._slots:
            self._slots[id(tensor)] = len(self.tensors)
            self.tensors.append((tensor, in_object))
        return tensor

    def handed_out(self, stand_in: Callable[[int, bool], Any]) -> Any:
        """Return the result and make the changes, with other tensors.

        Args:
            stand_in: Gives what the user's code gets for a tensor of that number; the flag says
                that it is inside an object.
        """

        def swap(tensor: Tensor, in_object: bool) -> Any:  # noqa: FBT001 - a `Swap`
            return stand_in(self._slots[id(tensor)], in_object)

        for change in self._changes:
            copies = Copies(swap, known=self._originals)
            change.apply(copies.of(change.value, in_object=change.in_object))
        return Copies(swap, known=self._originals).of(self._result)


class BlockCall:
    """The call of a block by the user's code, kept for the recompute.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        objects: Whether objects among them are copied, too, not only containers.

    Attributes:
        values: What the block made; set when it has run.
        arguments: Tensors among the arguments that no block made.
        inputs: Values of earlier blocks among them.
        writes: What the user's code has written into the block's attributes before.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, objects: bool) -> None:
        self._objects = objects
        self.values: list[Value] = []
        self.arguments: list[Tensor] = []
        self.inputs: list[Value] = []
        self.writes: ModuleWrites = []
        self._given = Copies(self._keep, objects=objects).of((args, kwargs))
        self._autocast = [_autocast_of(kind) for kind in _device_types()]

    def _keep(self, tensor: Tensor, in_object: bool) -> Tensor | Value:  # noqa: FBT001 - a `Swap`
        if not isinstance(tensor, Phantom):
            self.arguments.append(tensor)
            return tensor
        value: Value = tensor.value
        if not (in_object and value.in_object):
            self.inputs.append(value)
        return value

    def run(
        self,
        block: nn.Module,
        take: Swap,
        *,
        given: tuple[Any, Any],
        watched: Watched,
        block_name: str,
    ) -> Outcome:
        """Run the block on the user's arguments.

        Args:
            block: The block's stand-in on a worker.
            take: Brings a tensor to where the block computes.
            given: Positional and keyword arguments.
            watched: Watches over the block while it runs, told what it takes.
            block_name: The block's name.

        Raises:
            CaptureError: If the block writes into a tensor that it was given.
        """
        writes = any(getattr(module, "inplace", False) is True for module in block.modules())
        taken: list[Tensor] = []

        def take_apart(tensor: Any, in_object: bool) -> Any:  # noqa: FBT001 - a `Swap`
            here = take(tensor, in_object)
            if isinstance(here, Phantom):
                return here
            here = here.clone() if writes else here
            taken.append(here)
            return here

        copies = Copies(take_apart, objects=self._objects)
        args, kwargs = copies.of(given)
        versions = [tensor._version for tensor in taken] if self._objects else []
        with watched(taken):
            result = block(*args, **kwargs)
        if not writes and any(t._version != v for t, v in zip(taken, versions, strict=False)):
            raise CaptureError(
                f"Block {block_name!r} writes into a tensor that it was given, which its recompute "
                "would find changed. Let it work on a copy (`x = x + ...` instead of `x += ...`), "
                "or give the module that writes an attribute `inplace = True`."
            )
        return Outcome(result, copies=copies, block_name=block_name)

    def run_again(
        self, block: nn.Module, take: Swap, *, watched: Watched, block_name: str
    ) -> Outcome:
        """Run the block on the same arguments, under the same autocast.

        Args:
            block: The block's stand-in on a worker.
            take: Brings a tensor to where the block computes.
            watched: Watches over the block while it runs, told what it takes.
            block_name: The block's name.

        Raises:
            CaptureError: If it gives other tensors than the first time.
        """
        with ExitStack() as contexts:
            for state in self._autocast:
                kind, enabled, dtype = state
                if state != _autocast_of(kind):
                    contexts.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            outcome = self.run(
                block, take, given=self._given, watched=watched, block_name=block_name
            )
        forms = [(tensor.shape, tensor.dtype) for tensor, _ in outcome.tensors]
        if forms != [value.form for value in self.values]:
            raise CaptureError(
                f"Block {block_name!r} gave other tensors in its recompute than in its forward "
                f"pass ({len(forms)}, not {len(self.values)}, or of other shapes or types): it "
                "depends on something that the forward pass has changed."
            )
        return outcome


def _autocast_of(kind: str) -> tuple[str, bool, torch.dtype]:
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _device_types() -> list[str]:
    """Where autocast can be on."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
