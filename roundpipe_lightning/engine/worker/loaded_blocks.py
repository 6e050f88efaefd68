"""Blocks on a worker: their parameters, their buffers and the views that compute with them.

Step W4 of docs/design.md.

```
host      parameters ── upload ──▶ leaves ── views of the blocks ── run ──▶ gradients ── download
          buffers    ◀──────────── what the forward pass has written
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.module_writes import ModuleWrites
from roundpipe_lightning.engine.capture.torch_functions import RoundedLeaves
from roundpipe_lightning.engine.capture.trees import tensors_in
from roundpipe_lightning.engine.capture.view import (
    DELETED,
    LazyTable,
    View,
    ViewClasses,
    ViewMaker,
    put,
    write_through,
)
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.store.block_layout import (
    BlockLayout,
    Region,
    gradient_dtype,
    sum_wide,
)
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.gradient_reduce import Gradients
from roundpipe_lightning.engine.transfer.weight_prefetch import StageWeights
from roundpipe_lightning.errors import CaptureError, ConfigurationError, StepModeError
from roundpipe_lightning.planning.schedule.stages import StageKind

EarlierBuffers: TypeAlias = list[tuple[nn.Module, str, Any]]
"""Modules, and names of their buffers, with what those were before."""

_MOST_KEPT_BYTES = 2**20
"""What an attribute had before is kept for the recompute up to this size: a larger one is what a
block leaves for others (attention weights), and does not read."""


@dataclass(eq=False)
class PlacedBuffers:
    """The buffers of views on one device, and the way back for what the forward pass wrote."""

    device: Device
    _: KW_ONLY
    keep_writes: bool  # whether writes are the user's (forward) or an echo of them (recompute)
    # whether there may be none: several microbatches would make them, in any order. They are made
    # in copies then.
    refuses: bool = False

    def __post_init__(self) -> None:
        self._placed: dict[Tensor, tuple[Tensor, int]] = {}

    def place(self, buffer: Tensor) -> Tensor:
        if buffer not in self._placed:
            if not self.device.shares_host_memory:
                with torch.inference_mode(buffer.is_inference()):  # else nobody counts its writes
                    # another microbatch may write the buffer before the upload reads it
                    placed = self.device.upload(self.device.snapshot(buffer))
            else:
                in_place = self.keep_writes and not self.refuses
                placed = buffer if in_place else buffer.clone()
            self._placed[buffer] = (placed, placed._version)
        return self._placed[buffer][0]

    @property
    def written(self) -> list[Tensor]:
        """Buffers that were written into here and not brought to the host since."""
        return [b for b, (placed, version) in self._placed.items() if _version(placed) != version]

    def write_back(
        self,
        views: Mapping[nn.Module, nn.Module],
        *,
        owner_of: Callable[[Tensor], Device] | None = None,
    ) -> bool:
        """Bring buffers that changed here to the host, and those that were assigned anew.

        `owner_of` says where an assigned tensor is, if it may be elsewhere than here. Returns
        whether there was anything to bring; a StepModeError where that is refused.
        """
        if not self.keep_writes:
            return False
        wrote = False
        for original, view in views.items():
            buffers, table = original.__dict__["_buffers"], _buffers(view)
            if not (buffers or table):
                continue
            wrote |= self._copy_to_host([b for b in buffers.values() if b in self._placed])
            for name, value in self.assigned(original, view).items():
                owner = self.device if owner_of is None or value is None else owner_of(value)
                host = None if value is None else owner.download(value)
                # One that appears (an index that is made when it is first asked for) is no write:
                # every microbatch makes the same.
                appears = name not in table.known
                is_new = name not in buffers
                if is_new or not appears or not _equal(buffers[name], host):
                    if not (appears and is_new):
                        self._check_allowed()
                        wrote = True
                    buffers[name] = host
                if owner is self.device and buffers[name] is host and host is not None:
                    self._placed[host] = (value, value._version)
            table.note_written_back()
        return wrote

    def assigned(self, original: nn.Module, view: nn.Module) -> dict[str, Any]:
        found = {}
        for name, value in _buffers(view).assigned().items():
            host = original.__dict__["_buffers"].get(name)
            # `self.count += 1` assigns what it has written into
            if host is None or value is not self._placed.get(host, (None,))[0]:
                found[name] = value
        return found

    @contextmanager
    def watched(self, modules: Mapping[nn.Module, nn.Module]) -> Iterator[EarlierBuffers]:
        """Give, when the context ends, the buffers of modules that were written in it, as before.

        All buffers of such a module, because batch normalisation writes its running statistics
        behind the back of the version counter; only its count of batches shows the write.
        """
        before = [
            (original, view, {n: self._seen(original, n, b) for n, b in _buffers(view).items()})
            for original, view in modules.items()
        ]
        found: EarlierBuffers = []
        yield found
        for original, view, seen in before:
            now = _buffers(view)
            if all(now.get(n) is here and _version(here) == v for n, (here, v, _) in seen.items()):
                continue
            for name, (here, _, kept) in seen.items():
                if kept is here and kept is not None:  # not written back yet
                    kept = original.__dict__["_buffers"][name].clone()
                found.append((original, name, kept))

    def _seen(
        self, original: nn.Module, name: str, here: Tensor | None
    ) -> tuple[Tensor | None, int, Tensor | None]:
        """Return a buffer, its version, and what keeps its values if it is written into now.

        That is the buffer itself where the host has the same values until they are written back.
        """
        if here is None:
            return None, 0, None
        host: Any = original.__dict__["_buffers"].get(name)
        placed, version = self._placed.get(host, (None, 0))
        if placed is here and here._version == version and not self.device.shares_host_memory:
            return here, version, here
        return here, here._version, here.clone()

    @contextmanager
    def replaced(self, buffers: EarlierBuffers, views: ViewMaker) -> Iterator[None]:
        """Let views have other buffers until the context ends, and then those of the originals."""
        before = []
        for original, name, value in buffers:
            table = _buffers(views.view_of(original))
            host: Any = dict.get(table, name)
            before.append((table, host, self._placed.get(host)))
            if host is None:
                table[name] = value
            else:
                self._placed[host] = (value, 0)
        try:
            yield
        finally:
            for table, host, placed in before:
                table.reset()
                if host is not None:
                    self._placed.pop(host)
                    if placed is not None:
                        self._placed[host] = placed

    def _copy_to_host(self, buffers: Sequence[Tensor]) -> bool:
        """Download the buffers of one module if one of them has changed.

        All of them, because batch normalisation writes its running statistics behind the back of
        the version counter; only its count of batches shows the write.
        """
        if not any(self._placed[b][0]._version != self._placed[b][1] for b in buffers):
            return False
        self._check_allowed()
        for buffer in buffers:
            placed = self._placed[buffer][0]
            if not self.device.shares_host_memory:
                with torch.no_grad():
                    buffer.copy_(self.device.download(placed))
            self._placed[buffer] = (placed, placed._version)
        return True

    def _check_allowed(self) -> None:
        if self.refuses:
            raise StepModeError("the step writes into buffers (running statistics, for example)")


@dataclass(eq=False)
class ResidentBlocks:
    """Blocks on a worker, with a leaf for every parameter."""

    kind: StageKind  # what is done with them. What a BACKWARD stage's recompute writes is an echo.
    _: KW_ONLY
    store: HostStore
    device: Device
    classes: ViewClasses
    # those of their stage run, whose uploads are in flight; None: they are uploaded here, where
    # nothing is uploaded ahead
    weights: StageWeights | None = None
    await_upload: Callable[[Event], None] | None = None
    refuses: bool = False  # as of `PlacedBuffers`
    # leaves in host memory, where a step finds those of the step before
    kept: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_bytes = 0
        self.microbatches: list[int] = []  # that have run backward, and are not sent yet
        self._leaves: dict[nn.Parameter, nn.Parameter] = {}
        self._renewed: dict[nn.Parameter, int] = {}  # by `HostStore.rewritten`
        self.rounded = RoundedLeaves(partial(self.store.whole_values, device=self.device))
        self._placed: dict[nn.Module, tuple[nn.Parameter, ...]] = {}  # in the order of the layout
        keeps = self.kind is not StageKind.BACKWARD
        self._buffers = PlacedBuffers(self.device, keep_writes=keeps, refuses=self.refuses)
        self._writes: list[tuple[nn.Module, str, Any]] = []
        self._overwritten: list[tuple[nn.Module, str, Any]] = []
        self._buffered: dict[nn.Module, list[nn.Module]] = {}  # a block's modules with buffers
        self._maker = ViewMaker(
            parameter=self._leaf,
            buffer=self._buffers.place,
            classes=self.classes,
            write=self._write,
            check_entry=self._check_entry,
            is_fixed=True,
        )

    def bring(self, blocks: Iterable[nn.Module]) -> None:
        """Upload blocks that are not here yet.

        Before any of them runs: what is done while a block runs is counted as the block's
        (side_outputs.py).
        """
        for block in blocks:
            if block not in self._buffered:
                if self.weights is None:
                    for parameter, value in self.store.upload_block(block, self.device).items():
                        self._add_leaf(parameter, value)
                else:
                    self._add_region(block, self.weights.regions[block])
                self._buffered[block] = [m for m in block.modules() if m.__dict__["_buffers"]]
                for module in self._buffered[block]:
                    for buffer in module.buffers(recurse=False):
                        self._buffers.place(buffer)

    def _add_region(self, block: nn.Module, region: Region) -> None:
        leaves = region.leaves()
        if self.store.shared:  # another block here may have some of them, too
            leaves = {p: self._leaves.get(p, leaf) for p, leaf in leaves.items()}
        self._leaves.update(leaves)
        if self.store.copies is not None:
            self.rounded.add(leaves)
        self._placed[block] = tuple(leaves.values())
        self.num_bytes += region.layout.form.num_bytes

    def _add_leaf(self, parameter: nn.Parameter, value: Tensor) -> None:
        if parameter not in self._leaves:
            leaf = self.kept.get(parameter)
            if leaf is None or not _is_as_new(leaf, parameter, value):
                # In FORWARD stages, too, though no graph is kept: PyTorch folds other products
                # where a weight needs no gradient, and other products round differently.
                leaf = nn.Parameter(value, requires_grad=parameter.requires_grad)
                if parameter.requires_grad:
                    sum_wide(leaf, gradient_dtype(parameter))
                if not torch.is_inference_mode_enabled():
                    self.kept[parameter] = leaf
            self._leaves[parameter] = leaf
            self.rounded.add({parameter: leaf})
            self.num_bytes += leaf.nbytes

    def _leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in self._leaves:
            raise CaptureError(
                f"A block has a parameter of shape {tuple(parameter.shape)} that it did not have "
                "when training began: a module replaces its parameters while it runs (peft's LoRA "
                "on nn.MultiheadAttention does). Adapt other layers, linear ones say."
            )
        return self._leaves[parameter]

    def block(self, block: nn.Module) -> nn.Module:
        if self.weights is not None:
            event = self.weights.events.pop(block, None)
            if event is not None:
                (self.await_upload or self.device.await_event)(event)
            if self.store.rewritten:  # since the upload began
                for parameter in self.store.parameters_of(block):
                    times = self.store.rewritten.get(parameter, 0)
                    if times != self._renewed.get(parameter, 0):
                        self._renewed[parameter] = times
                        # It may be written into again before the upload is made.
                        values = self.device.upload(self.device.snapshot(parameter))
                        self._leaves[parameter].data.copy_(values)
                        self.rounded.renew(self._leaves[parameter])
        return self._maker.view_of(block)

    @contextmanager
    def written(self, writes: ModuleWrites) -> Iterator[None]:
        """Let the blocks see what a microbatch's user code has written, until the context ends."""
        before = []
        for module, attributes in writes:
            view = self._maker.view_of(module)
            for name, value in attributes.items():
                here = self._maker.view_of(value) if isinstance(value, nn.Module) else value
                before.append((view, name, put(view, name, here)))
        try:
            yield
        finally:
            for view, name, value in reversed(before):
                put(view, name, value)

    def _check_entry(self, name: str, value: Any) -> None:
        """Refuse a parameter of the block's own making: no optimizer and no other run has it."""
        if isinstance(value, nn.Module) and not isinstance(value, View):
            made = list(value.parameters())
        else:
            made = [value] if isinstance(value, nn.Parameter) else []
        if any(self.original_of(parameter) is parameter for parameter in made):
            raise ConfigurationError(
                f"A block sets {name!r} to a new parameter, or to a module with some, while it "
                "runs: no optimizer would have it, nor the block's next run. Make it a buffer, or "
                "set it in configure_model or, later, when no step runs."
            )

    def _write(self, module: nn.Module, name: str, value: Any) -> None:
        self._check_entry(name, value)
        self._writes.append((module, name, value))
        if self.kind is not StageKind.BACKWARD:  # a recompute's writes are an echo
            of_class = getattr(type(module), name, DELETED)
            self._overwritten.append((module, name, module.__dict__.get(name, of_class)))
            write_through(module, name, value)

    def take_writes(self) -> list[tuple[nn.Module, str, Any]]:
        writes, self._writes = self._writes, []
        return writes

    def written_tensor(self, module: nn.Module, name: str) -> Tensor:
        """Return what a block left in an attribute since `take_writes`; CaptureError if none."""
        for one, attribute, value in reversed(self._writes):
            if one is module and attribute == name and isinstance(value, Tensor):
                return value
        raise CaptureError(
            f"A block leaves a tensor in the attribute {name!r} in some of its calls only, which "
            "pieces of a batch cannot put together. Let it always do so, or set num_microbatches=1."
        )

    @contextmanager
    def watched(self, block: nn.Module) -> Iterator[tuple[EarlierBuffers, ModuleWrites]]:
        """Give, when the context ends, what a block has written over, as it was before."""
        attributes: ModuleWrites = []
        self._overwritten.clear()
        modules = {module: self._maker.view_of(module) for module in self._buffered[block]}
        with self._buffers.watched(modules) as buffers:
            yield buffers, attributes
        # what a block has said of its own parameters' `requires_grad` is kept
        for parameter in self.store.parameters_of(block):
            trained = self._leaves[parameter].requires_grad
            if trained is parameter.requires_grad:
                continue
            if self.weights is None:
                parameter.requires_grad_(trained)
            elif trained:  # its block's gradients have no place for it
                raise CaptureError(
                    f"A block makes a frozen parameter of shape {tuple(parameter.shape)} trainable "
                    "while it runs. Do it before the step, in on_train_batch_start say."
                )
        for module, name, value in reversed(self._overwritten):  # the first write comes last
            if sum(tensor.nbytes for tensor in tensors_in(value)) <= _MOST_KEPT_BYTES:
                attributes.append((module, {name: value}))

    @contextmanager
    def undone(self, block: nn.Module) -> Iterator[list[str]]:
        """Undo at the end of the context what the block has written; names the buffers then."""
        self._overwritten.clear()
        before = [
            (table, name, here, None if here is None else here.clone())
            for table in (_buffers(self._maker.view_of(m)) for m in self._buffered[block])
            for name, here in table.items()
        ]
        written: list[str] = []
        try:
            yield written
        finally:
            for table, name, here, values in before:
                if table[name] is not here:
                    table[name] = here
                    written.append(name)
                if values is not None and not torch.equal(here, values):
                    written.append(name)
                    with torch.no_grad():
                        here.copy_(values)
            for module, name, value in reversed(self._overwritten):
                write_through(module, name, value)
                put(self._maker.view_of(module), name, value)
            self._writes.clear()
            self._overwritten.clear()

    def assigns_buffers(self, block: nn.Module) -> bool:
        return any(
            self._buffers.assigned(module, self._maker.view_of(module))
            for module in self._buffered[block]
        )

    def restored(self, buffers: EarlierBuffers) -> AbstractContextManager[None]:
        return self._buffers.replaced(buffers, self._maker)

    def leaf_of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        return self._leaves.get(parameter)

    def original_of(self, leaf: Tensor) -> Tensor:
        return next((p for p, known in self._leaves.items() if known is leaf), leaf)

    @property
    def gradient_bytes(self) -> int:
        gradients = (leaf.grad for leaf in self._leaves.values())
        return sum(gradient.nbytes for gradient in gradients if gradient is not None)

    def buffer_of(self, buffer: Tensor) -> Tensor:
        return self._buffers.place(buffer)

    def end_forward(self) -> bool:
        return self._buffers.write_back(self._maker.made)

    def placed(self) -> list[tuple[BlockLayout, Sequence[nn.Parameter]]]:
        assert self.weights is not None, "it is a stage run's"
        return [
            (region.layout, self._placed[block])
            for block, region in self.weights.regions.items()
            if block in self._placed
        ]

    @contextmanager
    def refuses_gradients(self) -> Iterator[None]:
        """Refuse code of a block that gives gradients to the block's parameters."""
        before = [(leaf, leaf.grad) for leaf in self._leaves.values()]
        for leaf, _ in before:
            leaf.grad = None
        try:
            yield
            if any(leaf.grad is not None for leaf, _ in before):
                raise CaptureError(
                    "A block calls backward(), which gives gradients to its parameters: they would "
                    "be added to the batch's. Write torch.autograd.grad(loss, inputs) in it."
                )
        finally:
            for leaf, gradient in before:
                leaf.grad = gradient

    def take_gradients(self) -> Gradients:
        found: Gradients = {}
        for parameter, leaf in self._leaves.items():
            if leaf.grad is not None:
                found[parameter] = self.device.download(leaf.grad)
                leaf.grad = None
        return found

    def close(self) -> None:
        """Break the circles between views and their maker, so that memory is free at once."""
        self._maker.close()
        for leaf in self._leaves.values():  # they may live on
            leaf.grad = None
        self._leaves.clear()
        self._placed.clear()
        self._buffered.clear()


def _is_as_new(leaf: nn.Parameter, parameter: nn.Parameter, value: Tensor) -> bool:
    """Return whether a leaf is as one made now, whatever code that used it has done to it."""
    sums = torch.promote_types(value.dtype, gradient_dtype(parameter))
    return (
        (leaf.data_ptr(), leaf.stride()) == (value.data_ptr(), value.stride())
        and (leaf.shape, leaf.dtype) == (value.shape, value.dtype)
        and leaf.requires_grad is parameter.requires_grad
        and (not leaf.requires_grad or gradient_dtype(leaf) is sums)
        and not (leaf._backward_hooks or leaf._post_accumulate_grad_hooks or leaf.__dict__)  # noqa: SLF001
    )


def _buffers(view: nn.Module) -> LazyTable[Any]:
    table: LazyTable[Any] = view.__dict__["_buffers"]
    return table


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor._version
