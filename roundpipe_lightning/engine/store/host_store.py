"""The host store: where the model lives.

Step W1 of docs/design.md.

The user's own parameters are the masters. The store lays each block's parameters out in flat
buffers in host memory, one per dtype, and points the parameters into them, so that a block travels
in one copy, whatever the number of its tensors (`store/flat_buffers.py`). A block's old memory
is free before the next block's buffers are made, so opening the store takes the model's memory and
one block's.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.events import HostEvent
from roundpipe_lightning.engine.store.flat_buffers import (
    FlatBuffer,
    MappedParameter,
    NarrowCopies,
    ParameterGroup,
    is_mapped,
    narrow_parameters,
    num_uses,
    overlapping,
    view_like,
)
from roundpipe_lightning.errors import ConfigurationError

TakeGradients: TypeAlias = Callable[
    [dict[nn.Parameter, Tensor], Collection[nn.Parameter]], Collection[nn.Parameter]
]
"""Given gradients that are complete while others are not, and whose will not be before the end;
returns whose it takes over."""


class HostStore:
    """All parameters of a module in host memory, grouped by block.

    Args:
        module: The user's module; its parameters stay in it.
        blocks: The blocks of its stacks, each once.
        upload_dtype: That of the copies from which some parameters are uploaded
            (`narrow_parameters`); None: there are none.
        moves: Whether anything is uploaded: forked processes then share the parameters' memory.

    Raises:
        ConfigurationError: If a parameter has no values (meta device), or was mapped from a file
            and has been converted or written to.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        upload_dtype: torch.dtype | None = None,
        moves: bool = True,
    ) -> None:
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                raise ConfigurationError(
                    f"Parameter {name!r} is on the meta device: it has a shape but no values. Load "
                    "or initialise the weights in `configure_model`."
                )
            if isinstance(parameter, MappedParameter):
                parameter.check_unconverted(name)
                parameter.check_unwritten(name)
        self._mapped = {p: name for name, p in module.named_parameters() if is_mapped(p)}
        uses = num_uses(module, blocks)
        #: Parameters used in more than one place: their gradients have several sources.
        self.shared = {p for block in blocks for p in block.parameters() if uses[p] > 1}
        aliased = overlapping(module.parameters())
        taken: set[nn.Parameter] = set()
        #: What is uploaded in place of some parameters.
        self.copies = None if upload_dtype is None else NarrowCopies(upload_dtype)
        narrow = narrow_parameters(module, blocks) if self.copies is not None else set()

        def group(parameters: Iterable[nn.Parameter]) -> ParameterGroup:
            mine = [parameter for parameter in parameters if parameter not in taken]
            taken.update(mine)
            return ParameterGroup(
                mine, aliased=aliased, narrow=narrow, copies=self.copies, is_shared=moves
            )

        self._blocks = {block: group(block.parameters()) for block in blocks}
        self._outside = group(module.parameters())
        #: Parameters that no block has.
        self.outside_blocks = frozenset(self._outside.parameters)
        self._heads = self.outside_blocks & narrow  # those of linear layers, which have copies
        groups = (*self._blocks.values(), self._outside)
        self._flat_of = {
            p: flat for group in groups for flat in group.buffers for p in flat.members
        }
        self._of_block = {block: tuple(block.parameters()) for block in blocks}
        self._ids_of_block = {b: frozenset(map(id, ps)) for b, ps in self._of_block.items()}
        self._pinned_by: Device | None = None
        #: The end of a parameter's last update, where parameters change while a step runs.
        self.updates: dict[nn.Parameter, HostEvent] = {}
        #: Parameters of which other hosts own a part, with the elements that are here. The others
        #: are zeros, or older than the copies.
        self.in_part: dict[nn.Parameter, slice] = {}
        #: Parameters with copies whose own values have been read by a step.
        self.read_whole: set[nn.Parameter] = set()
        #: Host values of parameters that are on the device of user code while a step runs.
        self.at_home: dict[nn.Parameter, Tensor] = {}
        #: Set where parameters are stepped as soon as their gradients are there.
        self.take_gradients: TakeGradients | None = None
        #: Whether the step in flight was given up.
        self.is_given_up = False
        #: Values that stand for parameters while the optimizer writes into them; empty: nothing.
        #: In the dtype that is uploaded.
        self.previous: dict[nn.Parameter, Tensor] = {}
        #: Parameters that the step has written into, with a number for the last time that none has
        #: had before: copies on devices may be older.
        self.rewritten: dict[nn.Parameter, int] = {}
        self._num_rewrites = 0
        #: Blocks that keep tensors in attributes: another worker may have made them.
        self.keepers: set[nn.Module] = set()
        #: Which of the two the steps that begin now are given.
        self.versions = WeightVersions(previous=False)

    def _uploaded_buffers(self) -> Iterator[Tensor]:
        for group in (*self._blocks.values(), self._outside):
            for flat in group.buffers:
                yield from (flat.uploaded, *(() if flat.kept is None else (flat.kept,)))

    def pin(self, device: Device) -> None:
        self._pinned_by = device
        for buffer in self._uploaded_buffers():
            device.pin(buffer)

    def close(self) -> None:
        """Give page locks back. The parameters stay as they are."""
        if self.copies is not None:
            self.copies.close()
        device, self._pinned_by = self._pinned_by, None
        if device is not None:
            for buffer in self._uploaded_buffers():
                device.unpin(buffer)

    def check_blocks(self) -> None:
        """Raise if a block has parameters that it had not when the store was made."""
        for block, known in self._ids_of_block.items():
            if not known.issuperset(map(id, block.parameters())):  # a module may make new ones then
                names = [name for name, p in block.named_parameters() if id(p) not in known]
                raise ConfigurationError(
                    f"A block ({type(block).__name__}) has parameters that it had not when the "
                    f"strategy set the workers up: {', '.join(names[:3])}. Load values in place, "
                    "with load_state_dict(...) without assign=True; add or replace parameters in "
                    "`configure_model`, which runs before. Some modules replace theirs while they "
                    "run (peft's LoRA on nn.MultiheadAttention). Adapt other layers, linear ones "
                    "say."
                )

    def parameters_of(self, block: nn.Module) -> tuple[nn.Parameter, ...]:
        return self._of_block[block]

    def buffers_of(self, block: nn.Module) -> list[FlatBuffer]:
        return self._blocks[block].buffers

    @property
    def uses_previous(self) -> bool:
        return self.versions.previous

    @uses_previous.setter
    def uses_previous(self, uses: bool) -> None:
        if uses != self.versions.previous:
            self.versions = WeightVersions(previous=uses)

    def memory_of(self, parameter: nn.Parameter) -> Tensor:
        """Return a parameter's values where they are, of the store's own storage if they can be."""
        self.check_whole(parameter)
        if parameter in self.at_home:
            return self.at_home[parameter].detach()
        flat = self._flat_of.get(parameter)
        values = parameter if flat is None else flat.view_of(parameter)
        is_present = values.data_ptr() == parameter.data_ptr()  # callbacks may swap `.data`
        return (values if is_present else parameter).detach()

    def check_whole(self, parameter: nn.Parameter) -> None:
        """Note that a step reads a parameter's own values; refuse it where they are not whole."""
        if self.copies is None or parameter not in self.copies:
            return
        if parameter in self.in_part:
            raise ConfigurationError(
                f"A parameter of a block, of shape {tuple(parameter.shape)}, is read outside its "
                "block for the first time now, when each of several hosts has a part of it. Read "
                "it in the first step, too, or set upload_dtype=None; see docs/nodes.md."
            )
        self.read_whole.add(parameter)

    def upload_source(self, parameter: nn.Parameter) -> Tensor:
        """Return what is uploaded of a parameter for the code outside the blocks."""
        if self.copies is not None and parameter in self.copies and parameter in self._heads:
            return self.copies.of(parameter)
        self.check_whole(parameter)
        return self.at_home.get(parameter, parameter).detach()

    def current_values(self, parameter: nn.Parameter) -> Tensor:
        served = self._served.get(parameter)
        return self.memory_of(parameter) if served is None else served

    def keep_previous(self, changing: Collection[nn.Parameter]) -> None:
        """Make room in `previous` for parameters that are to change while a step runs.

        Their whole buffers are kept, so that a block still travels in one copy.
        """
        for group in (*self._blocks.values(), self._outside):
            new = [flat for flat in group.buffers if flat.kept is None]
            self.previous |= group.keep(changing)
            for flat in new:
                if self._pinned_by is not None and flat.kept is not None:
                    self._pinned_by.pin(flat.kept)

    def renew_copies(self) -> None:
        """Cast what has changed since it was cast, but for what the optimizer is at.

        That is cast when it has been updated. Called between steps.
        """
        if self.copies is None:
            return
        for parameters in (*self._of_block.values(), self._heads):
            if all(event.is_done for event in self.updates_of(parameters)):
                here = (p for p in parameters if p not in self._served and p not in self.in_part)
                self.copies.renew({p: p for p in here})

    def updated(self, parameters: Iterable[nn.Parameter], *, by: Optimizer) -> None:
        """Cast parameters that an optimizer has stepped. Called before anybody may read them."""
        if self.copies is not None:
            self.copies.updated({p: p for p in parameters}, by)

    def received(
        self, parameters: Iterable[nn.Parameter], *, copies: Mapping[Tensor, slice]
    ) -> None:
        """Take note of values that came from other hosts. Called before anybody may read them.

        Of some parameters copies came, and no values, but for the elements that are this host's:
        memory of the others is given back.
        """
        if self.copies is not None:
            came = {p: copies[p] for p in parameters if p in copies}
            new = came.keys() - self.in_part.keys()
            self.in_part |= came
            self.release_rest(new)
            self.copies.note({p: p for p in came})
            # Of others, which this step had no gradients of, the copies may be newer than they are.
            self.copies.cast({p: p for p in parameters if p not in self.in_part})

    def release_rest(self, parameters: Iterable[Tensor]) -> None:
        """Give memory back of which the values are other hosts', of what is here in part."""
        for flat in {self._flat_of[p] for p in parameters if isinstance(p, nn.Parameter)}:
            flat.release(self.in_part)

    def rewrite(self, parameter: nn.Parameter, values: Tensor) -> bool:
        """Write values into a parameter while a step runs, for all that is uploaded from now on.

        The step has read the parameter, so its update has ended. Returns whether that was done; not
        where the step computes with other values than it has.
        """
        served = self._served.get(parameter)
        if served is not None and parameter.requires_grad:
            return False
        with torch.no_grad(), self.versions.writing():
            parameter.copy_(values)
            if served is not None:  # the optimizer is at others of its buffer
                served.copy_(values)
            if self.copies is not None:
                self.copies.cast({parameter: parameter})
        self._num_rewrites += 1
        self.rewritten[parameter] = self._num_rewrites
        return True

    def updates_of(self, parameters: Iterable[nn.Parameter]) -> list[HostEvent]:
        """Return the events to wait for before parameters are read: those of the optimizer.

        Then they have the values that the next step computes with. The event of an update that has
        failed raises `UpdateAborted`.
        """
        found = map(self.updates.get, parameters) if self.updates else ()
        return list(dict.fromkeys(event for event in found if event is not None))

    def await_updated(self, *parameters: nn.Parameter) -> None:
        for event in self.updates_of(parameters):
            event.wait()

    def value(self, parameter: nn.Parameter) -> Tensor:
        self.await_updated(parameter)
        return self.current_values(parameter)

    def whole_values(self, parameter: nn.Parameter, rounded: Tensor, *, device: Device) -> Tensor:
        """Upload a parameter's own values, where rounded ones have been uploaded.

        With `update="async"` there are those of the next step alone: the rounded ones have to do.
        """
        if not self.previous:
            return device.upload(self.value(parameter))
        warnings.warn(
            f"A weight of shape {tuple(parameter.shape)} is used where autocast does not round it, "
            "and has been rounded to 16 bits: with update='async' its own values are not kept. Set "
            "RoundPipeStrategy(upload_dtype=None), or update='exact'.",
            stacklevel=2,
        )
        return rounded.detach().to(parameter.dtype)

    @property
    def _served(self) -> Mapping[nn.Parameter, Tensor]:
        return self.previous if self.uses_previous else {}

    def check_unwritten(self, block: nn.Module) -> None:
        """Raise a ConfigurationError naming a parameter of a file that was written to."""
        for parameter in self._of_block[block] if self._mapped else ():
            if isinstance(parameter, MappedParameter) and parameter in self._mapped:
                parameter.check_unwritten(self._mapped[parameter])

    def upload_block(self, block: nn.Module, device: Device) -> dict[nn.Parameter, Tensor]:
        """Copy a block's parameters, those it shares with others included, to a device.

        It waits for the optimizer first. A device may make the copies later: until then the values
        count as read.
        """
        self.check_unwritten(block)
        self.await_updated(*self._of_block[block])
        if device.shares_host_memory:
            served = self._served
            return {p: served.get(p, p).detach().to(p.dtype) for p in self._of_block[block]}
        values: dict[nn.Parameter, Tensor] = {}
        with self.versions.reading(device) as reads_previous:
            previous = self.previous if reads_previous else {}
            for flat in self._blocks[block].buffers:
                members = flat.present_members()
                if members:
                    kept = flat.kept if reads_previous else None
                    there = device.upload(flat.uploaded if kept is None else kept)
                    # `.data` has a version of its own: what is done to one is not done to all.
                    values |= {p: view_like(there, at, p).data for p, at in members}
            for parameter in self._of_block[block]:
                if parameter not in values:
                    values[parameter] = device.upload(previous.get(parameter, parameter))
        return values


class WeightVersions:
    """Source of the uploads of some steps. Steps that share it read the same values at all times.

    With `update="async"` two steps may be in flight. When the earlier one has ended, the values of
    the later one are put into the copy that the earlier one has read. Uploads read the copy from
    then on, and the optimizer may write into the parameters:

    ```
    step k     │ reads the copy, W(k-1) ───────────── its backward pass ends
    step k+1   │            begins: reads the parameters, W(k) ──┬─▶ reads the copy, now W(k)
    updater    │                           parameters ─▶ copy ───┘ switch ─▶ update k
    ```

    Args:
        previous: Whether from the copy beside the parameters.
    """

    def __init__(self, *, previous: bool) -> None:
        self._changed = threading.Condition()
        self.previous = previous
        self._num_reading = {False: 0, True: 0}  # by whether from the copy

    def begin_reading(self) -> tuple[bool, Callable[[], None]]:
        """Return whether to read the copy, and what to call when the reading is over."""
        with self._changed:
            previous = self.previous
            self._num_reading[previous] += 1
        return previous, partial(self._end_reading, previous=previous)

    def _end_reading(self, *, previous: bool) -> None:
        with self._changed:
            self._num_reading[previous] -= 1
            self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not any(self._num_reading.values()))
            yield

    @contextmanager
    def reading(self, device: Device) -> Iterator[bool]:
        """Read until what was launched on a device in the context has been done there.

        Gives whether from the copy.
        """
        previous, end = self.begin_reading()
        try:
            yield previous
            copied = device.mark_event("values are copied")
        except BaseException:  # what arrives is not used
            end()
            raise
        copied.when_done(end)

    def switch(self) -> None:
        with self._changed:
            self.previous = True
            self._changed.wait_for(lambda: not self._num_reading[False])
