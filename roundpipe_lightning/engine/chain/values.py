"""Runs of blocks, the values that pass between them, and their way from turn to turn."""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.module_writes import ModuleWrites
from roundpipe_lightning.engine.capture.placeholder import Form, LazyTensor
from roundpipe_lightning.engine.capture.torch_functions import (
    Autocast,
    Variables,
    autocast_as,
    autocast_now,
    variables_as,
    variables_now,
    version_of,
)
from roundpipe_lightning.engine.capture.trees import Copies, Reference, Swap, tensors_in
from roundpipe_lightning.engine.capture.view import View
from roundpipe_lightning.engine.chain.saved_outputs import (
    ChangedRecomputeWarning,
    KeptOutputs,
    Sample,
)
from roundpipe_lightning.engine.device.base import Device, strides_of_copy
from roundpipe_lightning.engine.transfer.boundary import BoundaryTensor
from roundpipe_lightning.engine.worker.loaded_blocks import ResidentBlocks
from roundpipe_lightning.engine.worker.turns import MicrobatchTurns
from roundpipe_lightning.engine.worker.user_code import UserCode
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.errors import CaptureError

if TYPE_CHECKING:
    from roundpipe_lightning.engine.chain.joined import JoinedValue
    from roundpipe_lightning.engine.chain.segments import Segments

Given: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]  # positional and keyword arguments

Watched: TypeAlias = Callable[[Sequence[Tensor]], AbstractContextManager[None]]
"""A context for a block that runs, made from the tensors that it takes."""

WRITTEN_SINCE = (
    "A tensor that block {!r} was given has been written into since: its recompute, or another "
    "piece of the batch, would find other values. Give the block a copy "
    "(`block(x, mask.clone())`), or make a new tensor instead of writing into it."
)


class Outcome:
    """Outcome of one run of a block: its result, and the writes into its arguments.

    Args:
        objects: Whether objects in the result are copied, too, not only containers.
        written: What the block got and wrote into: it is not what the user's code gave it.

    Attributes:
        tensors: The tensors that the block made, each once, and whether each is inside an object.
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
    """Run a block on arguments with other tensors inside, `watched` in a context for what it takes.

    It `repeats` if it is to be run again on the same arguments, or has been before. Then it may
    write into a tensor that it was given only if a module of it `writes` into what it gets.
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
    leaves = [(t, _num_hooks(t)) for t in taken if t.is_leaf]
    with watched(taken):
        result = block(*args, **kwargs)
    # Others that take the same tensor have leaves of their own.
    if any(_num_hooks(leaf) > before for leaf, before in leaves):
        warnings.warn(
            f"Block {name!r} registers a hook on a tensor that it is given: the hook sees the "
            "gradient from this block and later ones, without that from other uses. Register it "
            "on what the block computes.",
            stacklevel=2,
        )
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


def _num_hooks(tensor: Tensor) -> int:
    return len(tensor._backward_hooks or ())  # noqa: SLF001 - they are listed nowhere else


class Value(Reference):
    """A tensor that a block made.

    Args:
        tensor: The tensor, on the worker that made it; None: it is made of pieces.
        in_object: Whether the block put it into an object, a cache, say: later blocks do not
            get its values.

    Attributes:
        needs_gradient: Whether something trainable went into it.
        segment: Number of the segment whose graph it is part of; None if it has no graph.
        here: The tensor on the present worker, during its turn; as long as its segment's graph if
            it is part of one.
        host: Its values on their way, from the end of its turn on, if they are still needed.
        copy: What the user's code computes with, and may write into.
        is_wanted: Whether somebody else than who holds the lazy tensor could use the values.
    """

    def __init__(
        self,
        owner: Segments,
        call: BlockCall,
        tensor: Tensor | None,
        *,
        form: Form,
        in_object: bool,
    ) -> None:
        self.owner = owner
        self.call = call.number
        self.block_name = call.name
        dtype = form.dtype
        self.needs_gradient = call.wanted and (dtype.is_floating_point or dtype.is_complex)
        self.in_object = in_object
        self.segment = call.segment
        self.here = tensor
        self.host: BoundaryTensor | JoinedValue | None = None
        self.form = form
        self.is_wanted: Callable[[], bool] = lambda: False
        self.copy: Tensor | None = None
        self.copy_version = 0  # of the copy when it was made
        self.copy_segment = 0
        self._lazy: weakref.ref[LazyTensor] | None = None
        self._kept_lazy = self.lazy() if in_object else None

    @property
    def is_held(self) -> bool:
        """Whether the user's code still has the lazy tensor, and could use the values."""
        return not self.in_object and (self.has_lazy or self.is_wanted())

    @property
    def is_written(self) -> bool:
        """Whether the user's code has written into its copy, which takes the value's place then."""
        return self.copy is not None and version_of(self.copy) != self.copy_version

    @property
    def latest(self) -> Value | Tensor:
        return self.copy if self.copy is not None and self.is_written else self

    @property
    def has_lazy(self) -> bool:
        return self._lazy is not None and self._lazy() is not None

    def lazy(self) -> LazyTensor:
        known = None if self._lazy is None else self._lazy()
        if known is not None:
            return known
        lazy = LazyTensor.standing_for(self, form=self.form, requires_grad=self.needs_gradient)
        self._lazy = weakref.ref(lazy)
        return lazy

    def forget_host(self) -> None:
        if self.host is not None:
            self.host.release()
            self.host = None

    def drop(self) -> None:
        self.here = self.host = self.copy = self._kept_lazy = None

    def materialize(self) -> Tensor:
        return self.owner.materialize(self)

    def detached(self) -> Tensor:
        return self.owner.detached(self)


Source: TypeAlias = Value | Tensor
"""Origin of a tensor that a block or a segment takes: another block's value, or user code."""


@dataclass(eq=False)
class BlockCall:
    """A call of a block by the user's code, kept for the recompute."""

    block: nn.Module
    given: InitVar[Given]
    _: KW_ONLY
    name: str
    number: int
    position: int | None  # its position in the chain; None for a call that was not planned
    gradient: bool
    # number of the segment whose graph it is part of; None if it keeps no graph
    segment: int | None
    cut: bool
    writes: ModuleWrites  # what the user's code has written into the block's attributes before
    # returns what is kept of a tensor among the arguments
    source_of: Callable[[Tensor | Value], Source]

    def __post_init__(self, given: Given) -> None:
        self.values: list[Value] = []  # what the block made; set when it has run
        self.arguments: list[Tensor] = []  # tensors among the arguments that no block made
        self.inputs: list[Value] = []  # values of earlier blocks among them
        self.begins_group = False  # whether its recompute does not follow that of the call before
        # what its recompute does not run again; None: it runs everything
        self.kept: KeptOutputs | None = None
        # modules and names of attributes that it leaves tensors in, the last of its values
        self.left: Sequence[tuple[nn.Module, str]] = ()
        self._given: Given | None = None
        # buffers that it writes over, as its recompute finds them
        self._buffers: list[tuple[nn.Module, str, BoundaryTensor | None]] = []
        self._sample: Sample | None = None
        self._idle_hooks: set[int] = set()
        self._autocast: list[Autocast] = []
        self._variables: Variables | None = None
        self._versions: list[int] = []
        if self.gradient:
            self._given = Copies(self._keep).arguments(given)
        self.wanted: bool = self.gradient and (
            any(value.needs_gradient for value in self.inputs)
            or any(tensor.requires_grad for tensor in self.arguments)
            or any(parameter.requires_grad for parameter in self.block.parameters())
        )
        self.is_recomputed = self.wanted and self.segment is None
        if self.is_recomputed:
            self._autocast, self._variables = autocast_now(), variables_now()
            self._versions = list(map(version_of, self.arguments))
        else:
            self._given = None  # it never runs again
        if not self.wanted:
            self.arguments.clear()
            self.inputs.clear()

    def _keep(self, tensor: Tensor | Value, in_object: bool) -> Source:  # noqa: FBT001 - a `Swap`
        source = self.source_of(tensor)
        if not isinstance(source, Value):
            self.arguments.append(source)
        elif not (in_object and source.in_object):
            self.inputs.append(source)
        return source

    @contextmanager
    def keeping(
        self, turns: MicrobatchTurns, resident: ResidentBlocks, *, sources: Sources, again: bool
    ) -> Iterator[None]:
        """Keep, while the block runs, what its recompute takes from its forward pass, or give it.

        That is what need not run again, and what the block writes over and the recompute reads.
        """
        worker, kept = turns.worker, self.kept
        if again:
            before, self._buffers = self._buffers, []
            taken = [(m, name, None if b is None else b.take(worker)) for m, name, b in before]
            with resident.restored(taken), kept.replayed(worker) if kept else nullcontext():
                yield
            return
        with (
            resident.watched(self.block) as (buffers, attributes),
            kept.recorded(worker, stays=turns.stays_here) if kept else nullcontext(),
        ):
            yield
        self._buffers = [
            (m, name, None if b is None else sources.pack(b)) for m, name, b in buffers
        ]
        self.writes = [*attributes, *self.writes]

    def check(self, outcome: Outcome, device: Device) -> None:
        if not self.is_recomputed:
            return
        sample = Sample((tensor for tensor, _ in outcome.tensors), device)
        if self._sample is None:
            self._sample = sample
            return
        dtypes = [state.dtype for state in self._autocast if state.enabled]
        if not sample.is_close(self._sample, dtypes=dtypes):
            warnings.warn(
                f"Block {self.name!r} gave other values in its recompute than in its forward pass: "
                "what it reads has changed since, so gradients are wrong. Draw random numbers with "
                "torch, not with `random` or numpy; keep what a block changes in buffers; give it "
                "what others change as an argument; or set RoundPipeStrategy(recompute='none').",
                ChangedRecomputeWarning,
                stacklevel=2,
            )

    def run_forward(
        self,
        resident: ResidentBlocks,
        block: nn.Module,
        take: Swap,
        *,
        given: Given,
        watched: Watched,
        again: bool = False,
    ) -> Outcome:
        once = self.is_recomputed and block.__dict__["_forward_hooks"]
        with self._hooks_once(block, again=again) if once else nullcontext():
            outcome = run_block(
                block,
                take,
                given=given,
                watched=watched,
                name=self.name,
                repeats=self.gradient,
                # The user's module answers sooner than its view, unless that has attributes of its
                # own.
                writes=works_in_place(block if self.writes else self.block),
            )
        outcome.tensors += [(resident.written_tensor(m, name), False) for m, name in self.left]
        return outcome

    @contextmanager
    def _hooks_once(self, block: nn.Module, *, again: bool) -> Iterator[None]:
        """Leave out of the recompute the block's forward hooks that have changed nothing."""
        own = block.__dict__  # past a view's `__setattr__`, which writes into the module
        hooks = own["_forward_hooks"]
        kept = OrderedDict(
            (key, hook if again else self._noting(key, hook))
            for key, hook in hooks.items()
            if not (again and key in self._idle_hooks)
        )
        dict.update(own, _forward_hooks=kept)
        try:
            yield
        finally:
            dict.update(own, _forward_hooks=hooks)

    def _noting(self, key: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward hook that notes whether it has changed the output."""

        def noting(*args: Any) -> Any:
            versions = list(map(version_of, tensors_in(args[-1])))
            result = hook(*args)
            if result is None and versions == list(map(version_of, tensors_in(args[-1]))):
                self._idle_hooks.add(key)
            return result

        return noting

    def run_again(
        self, resident: ResidentBlocks, block: nn.Module, take: Swap, *, watched: Watched
    ) -> Outcome:
        """Run the block on the same arguments, under the same autocast and context variables.

        A CaptureError says that it gives other tensors than the first time, or cannot get the same.
        """
        if any(version_of(t) != v for t, v in zip(self.arguments, self._versions, strict=True)):
            raise CaptureError(WRITTEN_SINCE.format(self.name))
        assert self._given is not None, "kept where a gradient is wanted"
        assert self._variables is not None
        with autocast_as(self._autocast), variables_as(self._variables):
            outcome = self.run_forward(
                resident, block, take, given=self._given, watched=watched, again=True
            )
        forms = [(tensor.shape, tensor.dtype) for tensor, _ in outcome.tensors]
        if forms != [(value.form.shape, value.form.dtype) for value in self.values]:
            raise CaptureError(
                f"Block {self.name!r} gave other tensors in its recompute than in its "
                f"forward pass ({len(forms)}, not {len(self.values)}, or of other shapes or "
                "types): it depends on something that the forward pass has changed."
            )
        return outcome


@dataclass(eq=False)
class Sources:
    """The tensors of one microbatch that go from turn to turn, and their gradients.

    What is taken in one turn is likely to be taken in the next: it is sent ahead, to the worker of
    that turn, when the turn ends.

    Attributes:
        gradients: Of what has been taken, as far as they were found.
    """

    user: UserCode
    turns: MicrobatchTurns

    def __post_init__(self) -> None:
        self._boundaries: dict[Tensor, BoundaryTensor] = {}
        self._taken: dict[BoundaryTensor | JoinedValue, None] = {}  # in the present turn
        self.gradients: dict[Source, BoundaryTensor] = {}
        self._strides: dict[Source, tuple[int, ...]] = {}  # of gradients, as they came

    def here(self, source: Source, *, repeats: bool = False) -> Tensor:
        """Return a source on the present worker, without a graph.

        Where it `repeats`, a later turn takes it, too: its values are then kept on the host.
        """
        worker = self.turns.worker
        if isinstance(source, Value):
            if source.here is not None:
                return source.here.detach()
            assert source.host is not None, "kept when its turn ended"
            return source.host.on(worker)
        if source not in self._boundaries:
            if not repeats and worker.device.holds(source):
                return source.detach()
            # User code keeps it, too: it need not leave before somebody else asks for it.
            maker = self.user.worker_of(source)
            made = None if maker is worker or maker is None else self.turns.ends.get(maker)
            self._boundaries[source] = BoundaryTensor(source, maker, keeps=True, made=made)
        boundary = self._boundaries[source]
        if repeats:
            self._taken[boundary] = None
        return boundary.on(worker)

    def pack(self, tensor: Tensor, *, for_next: bool = False) -> BoundaryTensor:
        """Return a tensor that the present turn has made as something that can travel.

        `for_next` says that the next turn takes it, and no other after that.
        """
        maker, follower = self.user.worker_of(tensor), self.turns.next_worker
        keeps = self.turns.stays_here
        if for_next and maker is not None and follower is not None:
            keeps = keeps or follower.device.reaches(maker.device)
        return BoundaryTensor(tensor, maker, keeps=keeps)

    def send_ahead(self, boundaries: Iterable[BoundaryTensor | JoinedValue]) -> None:
        """End the turn: send what the next one is likely to take to its worker."""
        worker = self.turns.next_worker
        if worker is not None:
            for boundary in (*boundaries, *self._taken):
                boundary.send_to(worker)
        self._taken.clear()

    def leaf(
        self,
        leaves: dict[Source, Tensor],
        source: Source,
        *,
        repeats: bool = False,
        stays: bool = False,
    ) -> Tensor:
        """Return a leaf for a source; one of user code may be made where it `stays`."""
        if source not in leaves:
            if isinstance(source, Value):
                here, wanted = self.here(source, repeats=repeats), source.needs_gradient
            else:
                here = source.detach() if stays else self.here(source, repeats=repeats)
                wanted = source.requires_grad
            leaves[source] = leaf = here.requires_grad_(wanted)
            if wanted:
                leaf.register_hook(partial(self._note_strides, source))
        return leaves[source]

    def _note_strides(self, source: Source, gradient: Tensor) -> None:
        if gradient.layout is torch.strided:
            self._strides[source] = strides_of_copy(gradient)

    def add_gradient(self, source: Source, gradient: Tensor, worker: Worker) -> None:
        known = self.gradients.get(source)
        whole = gradient if known is None else gradient + known.take(worker)
        self.gradients[source] = BoundaryTensor(whole, worker)

    def fetch_gradients(self, leaves: dict[Source, Tensor]) -> None:
        for source, leaf in leaves.items():
            gradient = leaf.grad
            if gradient is not None:
                strides = self._strides.pop(source, gradient.stride())
                if strides != gradient.stride():  # a `.grad` has its leaf's
                    # With others, what a block makes of it would be rounded in another way.
                    form = gradient.new_empty_strided(gradient.shape, strides)
                    gradient = form.copy_(gradient)
                self.gradients[source] = self.pack(gradient, for_next=True)
        leaves.clear()

    def clear(self) -> None:
        self._boundaries.clear()
        self._taken.clear()
        self.gradients.clear()
