"""What flows through a stack: the tensors that blocks make, and the calls that make them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.arguments import Copies, Reference, Swap
from roundpipe_lightning.engine.capture.module_writes import ModuleWrites
from roundpipe_lightning.engine.capture.placeholder import Phantom
from roundpipe_lightning.engine.chain.saved_outputs import KeptOutputs
from roundpipe_lightning.engine.transfer.boundary import BoundaryTensor, TransferEndpoint
from roundpipe_lightning.errors import CaptureError

Watched: TypeAlias = Callable[[Sequence[Tensor]], AbstractContextManager[None]]
"""A context for a block that runs, made from the tensors that it takes."""

Given: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class ValueOwner(Protocol):
    """The microbatch that a value belongs to."""

    def real(self, value: Value) -> Tensor:
        """Return what the user's code computes with in place of a value."""

    def detached(self, value: Value) -> Tensor:
        """Return a value without a graph."""


class Value(Reference):
    """A tensor that a block made.

    Args:
        owner: The microbatch.
        call: Number of the block's call.
        block_name: The block's name.
        tensor: The tensor, on the worker that made it.
        needs_gradient: Whether something trainable went into it.
        in_object: Whether the block put it into an object, a cache, say: later blocks do not
            get its values.
        segment: Number of the segment whose graph it is part of; None if it has no graph.

    Attributes:
        owner: The microbatch.
        here: The tensor on the present worker, during its turn; as long as its segment's graph if
            it is part of one.
        host: Its values on their way, from the end of its turn on, if they are still needed.
    """

    def __init__(
        self,
        owner: ValueOwner,
        *,
        call: int,
        block_name: str,
        tensor: Tensor,
        needs_gradient: bool,
        in_object: bool,
        segment: int | None,
    ) -> None:
        self.call = call
        self.block_name = block_name
        self.needs_gradient = needs_gradient
        self.in_object = in_object
        self.segment = segment
        self.here: Tensor | None = tensor
        self.host: BoundaryTensor | None = None
        self.owner = owner
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
        return 0 if self.host is None else self.host.num_bytes

    def phantom(self) -> Phantom:
        """Return what the user's code is to hand on."""
        known = None if self._phantom is None else self._phantom()
        if known is not None:
            return known
        assert self.here is not None, "made while the block's turn lasts"
        phantom = Phantom.of(self.here, self, requires_grad=self.needs_gradient)
        self._phantom = weakref.ref(phantom)
        return phantom

    def drop(self) -> None:
        """Forget the tensor: its step has ended."""
        self.here = self.host = self._kept_phantom = None

    def real(self) -> Tensor:
        """Return the tensor that the user's code computes with, with a gradient."""
        return self.owner.real(self)

    def detached(self) -> Tensor:
        """Return the values without a graph."""
        return self.owner.detached(self)


class Outcome:
    """What one run of a block gave: its result, and what it wrote into its arguments.

    Args:
        result: What the block returned.
        copies: The arguments that it got.
        block_name: Its name.
        objects: Whether objects in the result are copied, too, not only containers.
        written: What the block got and wrote into: it is not what the user's code gave it.

    Attributes:
        tensors: The tensors that the block made, each once, and whether each is inside an object.

    Raises:
        CaptureError: If it took something out of a container.
    """

    def __init__(
        self,
        result: Any,
        *,
        copies: Copies,
        block_name: str,
        objects: bool = True,
        written: Iterable[Tensor] = (),
    ) -> None:
        self._result = result
        self._objects = objects
        self._copies = copies  # keeps the identities of what the block got
        self._originals = copies.originals()
        for tensor in written:
            self._originals.pop(id(tensor), None)
        try:
            self._changes = list(copies.changes())
        except KeyError as error:
            raise CaptureError(
                f"Block {block_name!r} took {error} out of a container that it was given, which "
                "its recompute would miss. Let it work on a copy."
            ) from None
        self._slots: dict[int, int] = {}
        self.tensors: list[tuple[Tensor, bool]] = []
        Copies(self._note, objects=objects, known=self._originals).of(result)
        for change in self._changes:
            copies = Copies(self._note, objects=objects, known=self._originals)
            copies.of(change.value, in_object=change.in_object)

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
            copies = Copies(swap, objects=self._objects, known=self._originals)
            change.apply(copies.of(change.value, in_object=change.in_object))
        return Copies(swap, objects=self._objects, known=self._originals).of(self._result)


@dataclass(frozen=True, kw_only=True)
class CallPlace:
    """Which call it is.

    Attributes:
        number: Number of the call in its microbatch's step.
        block: The block.
        name: Its name.
        position: Its position in the chain; None for a call that was not planned.
        gradient: Whether gradients were enabled.
        segment: Number of the segment whose graph it is part of; None if it keeps no graph.
        cut: Whether user code came before it.
    """

    number: int
    block: nn.Module
    name: str
    position: int | None
    gradient: bool
    segment: int | None
    cut: bool


class BlockCall:
    """The call of a block by the user's code, kept for the recompute.

    Args:
        place: Which call it is.
        args: Positional arguments.
        kwargs: Keyword arguments.
        writes: What the user's code has written into the block's attributes before.

    Attributes:
        place: Which call it is.
        values: What the block made; set when it has run.
        arguments: Tensors among the arguments that no block made.
        inputs: Values of earlier blocks among them.
        writes: What the user's code has written into the block's attributes before.
        wanted: Whether something trainable goes into it.
        begins_group: Whether its recompute does not follow that of the call before.
        kept: What its recompute does not run again; None: it runs everything.
    """

    def __init__(
        self, place: CallPlace, args: tuple[Any, ...], kwargs: dict[str, Any], writes: ModuleWrites
    ) -> None:
        self.place = place
        self.writes = writes
        self.values: list[Value] = []
        self.arguments: list[Tensor] = []
        self.inputs: list[Value] = []
        self.begins_group = False
        self.kept: KeptOutputs | None = None
        self._given: Given | None = None
        self._autocast: list[tuple[str, bool, torch.dtype]] = []
        self._versions: list[int] = []
        if place.gradient:
            self._given = Copies(self._keep).of((args, kwargs))
        self.wanted = place.gradient and (
            any(parameter.requires_grad for parameter in place.block.parameters())
            or any(tensor.requires_grad for tensor in self.arguments)
            or any(value.needs_gradient for value in self.inputs)
        )
        if self.wanted:
            self._autocast = [_autocast_of(kind) for kind in _device_types()]
            self._versions = [tensor._version for tensor in self.arguments]
        else:  # it never runs again
            self._given = None
            self.arguments.clear()
            self.inputs.clear()

    def _keep(self, tensor: Tensor, in_object: bool) -> Tensor | Value:  # noqa: FBT001 - a `Swap`
        if not isinstance(tensor, Phantom):
            self.arguments.append(tensor)
            return tensor
        value: Value = tensor.value
        if not (in_object and value.in_object):
            self.inputs.append(value)
        return value

    def keeping(
        self, worker: TransferEndpoint, *, again: bool, stays: Callable[[], bool]
    ) -> AbstractContextManager[None]:
        """Keep, while the block runs, what its recompute need not run again, or give it.

        Args:
            worker: Where it runs.
            again: Whether it is the recompute.
            stays: Says whether what is kept may stay on the worker.
        """
        if self.kept is None:
            return nullcontext()
        if again:
            return self.kept.replayed(worker)
        return self.kept.recorded(worker, stays=stays())

    def run(self, block: nn.Module, take: Swap, *, given: Given, watched: Watched) -> Outcome:
        """Run the block on the user's arguments.

        Args:
            block: The block's stand-in on a worker.
            take: Brings a tensor to where the block computes.
            given: Positional and keyword arguments.
            watched: Watches over the block while it runs, told what it takes.

        Raises:
            CaptureError: If the block writes into a tensor that it was given.
        """
        return run_block(
            block,
            take,
            given=given,
            watched=watched,
            name=self.place.name,
            repeats=self.place.gradient,
            # The user's module answers sooner than its view, unless that has attributes of its own.
            writes=works_in_place(block if self.writes else self.place.block),
        )

    def run_again(self, block: nn.Module, take: Swap, *, watched: Watched) -> Outcome:
        """Run the block on the same arguments, under the same autocast.

        Args:
            block: The block's stand-in on a worker.
            take: Brings a tensor to where the block computes.
            watched: Watches over the block while it runs, told what it takes.

        Raises:
            CaptureError: If it gives other tensors than the first time, or cannot get the same.
        """
        if any(t._version != v for t, v in zip(self.arguments, self._versions, strict=True)):
            raise CaptureError(
                f"A tensor that block {self.place.name!r} was given has been written into since: "
                "its recompute would find other values. Give the block a copy "
                "(`block(x, mask.clone())`), or make a new tensor instead of writing into it."
            )
        with ExitStack() as contexts:
            for state in self._autocast:
                kind, enabled, dtype = state
                if state != _autocast_of(kind):
                    contexts.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            assert self._given is not None, "kept where a gradient is wanted"
            outcome = self.run(block, take, given=self._given, watched=watched)
        forms = [(tensor.shape, tensor.dtype) for tensor, _ in outcome.tensors]
        if forms != [value.form for value in self.values]:
            raise CaptureError(
                f"Block {self.place.name!r} gave other tensors in its recompute than in its "
                f"forward pass ({len(forms)}, not {len(self.values)}, or of other shapes or "
                "types): it depends on something that the forward pass has changed."
            )
        return outcome


def works_in_place(block: nn.Module) -> bool:
    """Say whether a module of a block says of itself that it writes into what it gets."""
    return any(getattr(module, "inplace", False) is True for module in block.modules())


def run_block(
    block: nn.Module,
    take: Swap,
    *,
    given: Given,
    watched: Watched,
    name: str,
    repeats: bool,
    writes: bool,
) -> Outcome:
    """Run a block on arguments with other tensors inside.

    Args:
        block: The block's stand-in on a worker.
        take: Brings a tensor to where the block computes.
        given: Positional and keyword arguments.
        watched: Watches over the block while it runs, told what it takes.
        name: The block's name.
        repeats: Whether it is to be run again on the same arguments, or has been before.
        writes: Whether a module of it writes into what it gets.

    Raises:
        CaptureError: If it `repeats` and writes into a tensor that it was given.
    """
    taken: list[Tensor] = []

    def take_apart(tensor: Any, in_object: bool) -> Any:  # noqa: FBT001 - a `Swap`
        here = take(tensor, in_object)
        if isinstance(here, Phantom):
            return here
        here = here.clone() if writes else here
        taken.append(here)
        return here

    copies = Copies(take_apart, objects=repeats)
    args, kwargs = copies.of(given)
    looked_at = taken if repeats or writes else []
    # Nobody counts writes into tensors of inference mode: a block that writes may have written.
    versions = [None if tensor.is_inference() else tensor._version for tensor in looked_at]
    with watched(taken):
        result = block(*args, **kwargs)
    written = [
        tensor
        for tensor, version in zip(looked_at, versions, strict=True)
        if (writes if version is None else tensor._version != version)
    ]
    if written and not writes:
        raise CaptureError(
            f"Block {name!r} writes into a tensor that it was given, which its recompute "
            "would find changed. Let it work on a copy (`x = x + ...` instead of `x += ...`), "
            "or give the module that writes an attribute `inplace = True`."
        )
    return Outcome(
        result, copies=copies, block_name=name, objects=repeats, written=written if writes else ()
    )


def _autocast_of(kind: str) -> tuple[str, bool, torch.dtype]:
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _device_types() -> list[str]:
    """Where autocast can be on."""
    accelerator = torch.accelerator.current_accelerator()
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]
