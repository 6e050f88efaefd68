"""One run of a block on private copies of its arguments, and what it gave."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from torch import Tensor, nn

from roundpipe_lightning.engine.capture.arguments import Copies, Swap
from roundpipe_lightning.engine.capture.placeholder import LazyTensor
from roundpipe_lightning.engine.capture.trees import tensors_in
from roundpipe_lightning.engine.capture.view import View
from roundpipe_lightning.errors import CaptureError

Given: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments

Watched: TypeAlias = Callable[[Sequence[Tensor]], AbstractContextManager[None]]
"""A context for a block that runs, made from the tensors that it takes."""


class Outcome:
    """Outcome of one run of a block: its result, and the writes into its arguments.

    Args:
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
        objects: bool,
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
        self._swapped(result, self._number)
        for change in self._changes:
            self._swapped(change.value, self._number, in_object=change.in_object)

    def _swapped(self, node: Any, swap: Swap, *, in_object: bool = False) -> Any:
        if type(node) is Tensor and id(node) not in self._originals:
            return swap(node, in_object)  # as below, sooner
        copies = Copies(swap, objects=self._objects, known=self._originals)
        return copies.copied(node, in_object=in_object)

    def _number(self, tensor: Tensor, in_object: bool) -> Tensor:  # noqa: FBT001 - a `Swap`
        if id(tensor) not in self._slots:
            self._slots[id(tensor)] = len(self.tensors)
            self.tensors.append((tensor, in_object))
        return tensor

    def handed_out(self, stand_in: Callable[[int, bool], Any]) -> Any:
        """Return the result and make the changes, with other tensors.

        `stand_in` gives what the user's code gets for a tensor of that number; the flag says that
        it is inside an object.
        """

        def swap(tensor: Tensor, in_object: bool) -> Any:  # noqa: FBT001 - a `Swap`
            return stand_in(self._slots[id(tensor)], in_object)

        for change in self._changes:
            change.apply(self._swapped(change.value, swap, in_object=change.in_object))
        return self._swapped(self._result, swap)


def works_in_place(block: nn.Module) -> bool:
    """Return whether a module of a block says of itself that it writes into what it gets."""
    for module in block.modules():
        # A module looks for what it does not have for microseconds.
        own = module.__dict__
        known = own["_view_of"].__dict__ if isinstance(module, View) else own
        may_say = "inplace" in own or "inplace" in known or hasattr(type(module), "inplace")
        if may_say and getattr(module, "inplace", False) is True:
            return True
    return False


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
        watched: Entered while the block runs, with what it takes.
        repeats: Whether it is to be run again on the same arguments, or has been before.
        writes: Whether a module of it writes into what it gets.

    Raises:
        CaptureError: If it `repeats` and writes into a tensor that it was given.
    """
    taken: list[Tensor] = []

    def take_apart(tensor: Any, in_object: bool) -> Any:  # noqa: FBT001 - a `Swap`
        here = take(tensor, in_object)
        if isinstance(here, LazyTensor):
            return here
        here = here.clone() if writes else here
        taken.append(here)
        return here

    copies = Copies(take_apart, objects=repeats)
    args, kwargs = copies.arguments(given)
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
    if not {*map(id, tensors_in(result))}.isdisjoint(map(id, taken)) and any(
        module._backward_hooks or module._backward_pre_hooks  # noqa: SLF001
        for module in block.modules()
    ):
        written = taken  # with a graph what it hands back is another tensor, for the hooks
    return Outcome(result, copies=copies, block_name=name, objects=repeats, written=written)
