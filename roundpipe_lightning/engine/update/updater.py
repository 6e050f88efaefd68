"""Updates: the optimizer's step, block by block, in a thread beside everything else.

Steps W8 and W9 of docs/design.md; docs/updates.md draws what overlaps.

A step that was begun before its gradients were there (`begin`) makes the update of a block as soon
as the block's gradients are; the rest when it is submitted. Nobody reads a parameter before its
update has ended. Every unit of parameters has one event (`HostStore.updates`), and whoever uploads
a block, or computes with it in place, waits for those of the parameters it reads. So the results
are those of an optimizer that is stepped before anything else goes on. Parameters are updated in
the module's order.

With `stale=True` a step computes with the values from before the update that runs meanwhile. They
are copied beside the parameters first (`keep`), and the events come when they are there:

```
step k+1 computes with     W(k)  = what the updates of steps 0 .. k-1 have made
update k, meanwhile        W(k) ──▶ W(k+1)
```

If step k+1 begins before the gradients of step k are there (`defer`), it is given the parameters
themselves, which are W(k) until then, and the copies when update k begins (`WeightVersions`).
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.engine.device.events import HostEvent, UpdateAborted
from roundpipe_lightning.engine.device.threads import add_note
from roundpipe_lightning.engine.exchange.exchange import Exchange
from roundpipe_lightning.engine.store.flat_buffers import fills_its_memory
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.gradient_reduce import add_to_grad
from roundpipe_lightning.engine.update.hosts_update import (
    HostsUpdate,
    JointStep,
    LatePart,
    grads_of,
)
from roundpipe_lightning.engine.update.partial_step import CapturedStep, is_foreign, plain_step


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateUnit:
    """Parameters that are updated together. Each parameter is in one unit."""

    name: str  # a block's name, or that of a parameter that has uses elsewhere
    parameters: tuple[nn.Parameter, ...]

    @property
    def num_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.parameters)


@dataclass(kw_only=True, eq=False)
class BegunStep:
    """A step whose gradients come block by block."""

    step: CapturedStep
    num_before: int
    joint: JointStep | None = None  # it, where other hosts make it, too
    taken: set[Tensor] = field(default_factory=set)  # updated before it is submitted


class _AddedBatch:
    """A batch whose gradients are added to `.grad` as they come; the one before may still go on."""

    def __init__(self) -> None:
        self._share: float | None = None
        self._late: list[Mapping[nn.Parameter, Tensor]] = []
        self._adding = threading.Lock()

    def weigh(self, share: float) -> None:
        """As of `Updater`."""
        with self._adding:
            late, self._late, self._share = self._late, [], share
            for gradients in late:
                add_to_grad(gradients, share=share)

    def add(
        self, gradients: dict[nn.Parameter, Tensor], elsewhere: Collection[nn.Parameter]
    ) -> Collection[nn.Parameter]:
        """Add gradients of a block, when the share is known; in a transfer thread."""
        mine = {p: g for p, g in gradients.items() if p not in elsewhere}
        with self._adding:
            if self._share is None:  # or a batch before is not over, and has none in `.grad` yet
                self._late.append(mine)
            else:
                add_to_grad(mine, share=self._share)
        return mine.keys()


def update_units(
    module: nn.Module, blocks: Mapping[str, nn.Module], *, shared: Collection[nn.Parameter]
) -> list[UpdateUnit]:
    """Divide a module's parameters: one unit per block, one per parameter `shared` with others."""
    block_of = {p: name for name, block in blocks.items() for p in block.parameters()}
    members: dict[str, list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        unit = name if parameter in shared else block_of.get(parameter, name)
        members.setdefault(unit, []).append(parameter)
    return [UpdateUnit(name=name, parameters=tuple(some)) for name, some in members.items()]


RunUnit: TypeAlias = Callable[[UpdateUnit, CapturedStep], None]
"""Makes the update of a unit."""


@dataclass(eq=False)
class Updater:
    """Steps optimizers in parts, in a thread of its own. A context manager.

    One thread submits and joins: the Trainer's. Any thread may wait for the update of a parameter.

    Attributes:
        is_joined: Whether what was submitted last has been waited for.
        hosts: Makes steps together with other hosts; None where there are none.
    """

    store: HostStore  # the parameters; the updater records their updates in it
    units: Sequence[UpdateUnit]
    _: KW_ONLY
    # whether steps compute with the values from before the update that runs meanwhile
    stale: bool = False
    # makes the update of a unit; for benchmarks, which give it a duration
    run_unit: RunUnit = lambda unit, step: step.run(unit.parameters)
    # where other hosts train, too: every step is made together with them. The updater closes it.
    exchange: Exchange | None = None

    def __post_init__(self) -> None:
        self.is_joined = True
        self.hosts = None if self.exchange is None else HostsUpdate(self.exchange, self.store)
        # As many as this thread has: matrix products (Muon) have the same bits then.
        self._num_threads = torch.get_num_threads()
        self._known = frozenset(self.units)
        self._unit_of = {p: unit for unit in self.units for p in unit.parameters}
        self._changed = threading.Condition()
        self._events: dict[UpdateUnit, HostEvent] = {}  # the ends of their last updates
        self._num_parts: Counter[UpdateUnit] = Counter()  # of a unit, still to be made
        self._num_put = self._num_done = 0  # jobs
        self._begun: BegunStep | None = None
        self._norms: dict[Tensor, Tensor] = {}  # of this step's gradients
        self._batch = _AddedBatch()
        self._error: BaseException | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="roundpipe-updates", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------ the Trainer's thread

    def begin(self, optimizer: Optimizer, *, waits: bool = False, adds_up: bool = False) -> None:
        """Submit an optimizer's step, made for each block when its gradients are there.

        What is made so reaches no `.grad`. `submit` makes the rest. Options are captured now.

        Args:
            waits: With other hosts: whether gradients are added up, but nothing is stepped before
                `submit`.
            adds_up: As of `JointStep`.
        """
        assert not self.stale, "a step computes with the values from before the update"
        step = CapturedStep(optimizer, gradients={})
        self._begun = BegunStep(step=step, num_before=self._num_put)
        if self.hosts is not None:
            self._begun.joint = self._join_hosts(
                self.hosts, step, begins_early=True, waits=waits, adds_up=adds_up
            )
        self.store.take_gradients = self._take

    def weigh(self, share: float | None) -> None:
        """Say that the batches before are over; and, if known, this host's share of the loss."""
        if self._begun is not None and self._begun.joint is not None:
            self._begun.joint.weigh(share)
        if share is not None:
            self._batch.weigh(share)

    @property
    def is_awaited(self) -> bool:
        """Whether other hosts wait for the step that was begun here, and for nothing else."""
        joint = None if self._begun is None else self._begun.joint
        return joint is not None and joint.is_weighed

    def add_up(self, *, adds: bool) -> None:
        """Say whether the batch that begins has each block's gradients added to `.grad` at once.

        Else they are given to whoever asks for the step's, when all are there: a second set.
        """
        before, self._batch = self._batch, _AddedBatch()
        if self.store.take_gradients in (None, before.add):
            self.store.take_gradients = self._batch.add if adds else None

    def _join_hosts(
        self,
        hosts: HostsUpdate,
        step: CapturedStep,
        *,
        begins_early: bool,
        waits: bool = False,
        adds_up: bool = False,
    ) -> JointStep:
        """Put a step that all hosts make; it waits for the gradients."""
        hosts.prepare(step.optimizer)
        trained = [p for p in step.parameters if p.requires_grad]
        outside = self.store.shared | self.store.outside_blocks
        units, last = list[UpdateUnit](), list[UpdateUnit]()
        for unit in self._in_order(trained):
            is_block = unit in self._known and outside.isdisjoint(unit.parameters)
            (units if is_block else last).append(unit)
        num_early = len(units) // 2
        units = [*reversed(units), *last]  # as gradients come
        chosen = set(trained)
        members = {unit.name: [p for p in unit.parameters if p in chosen] for unit in units}
        joint = JointStep(
            step,
            members,
            begins_early=begins_early,
            waits=waits,
            adds_up=adds_up,
            read_whole=self.store.read_whole,
        )
        self._put(partial(self._update_with_hosts, hosts, units, joint, num_early=num_early))
        return joint

    def measure_norms(self) -> None:
        """Measure the norm of each gradient of the next step when it is there; see `norm_of`.

        For who knows that these will be `.grad`: nothing is added to them, and no factor applied.
        """
        self._norms.clear()
        self.store.take_gradients = self._measure

    def norm_of(self, parameter: Tensor) -> Tensor:
        """Return the norm of a parameter's `.grad`; what was submitted must have been joined."""
        gradient, known = parameter.grad, self._norms.get(parameter)
        assert gradient is not None
        if known is not None and known.dtype is gradient.dtype:
            return known
        norm: Tensor = torch.linalg.vector_norm(gradient)
        return norm

    def can_defer(self, optimizer: Optimizer) -> bool:
        """Return whether all that it steps has a place for a copy, beside which nothing is."""
        members = {p for group in optimizer.param_groups for p in group["params"]}
        known = members & self._unit_of.keys()
        return (
            self.stale and known <= self.store.previous.keys() and all(map(fills_its_memory, known))
        )

    def defer(self, optimizer: Optimizer) -> None:
        """Capture an optimizer's options; `keep` and `submit` come when gradients are there.

        The next step may begin before. It computes with the parameters, in which the step before
        is done.
        """
        self.join()
        step = CapturedStep(optimizer, gradients={})
        step.count()
        self._begun = BegunStep(step=step, num_before=self._num_put)
        self.store.uses_previous = False

    def abandon(self, error: BaseException) -> int:
        """Make nothing more of the step that was begun, after an error in it.

        Returns how many parameters have been updated already.
        """
        begun, self._begun = self._begun, None
        self.store.take_gradients = None
        if begun is not None and begun.joint is not None and self.hosts is not None:
            self.hosts.give_up(begun.joint, error)
        with self._changed:
            self._changed.wait_for(self._is_idle)
        return 0 if begun is None else len(begun.taken)

    def submit(
        self,
        optimizer: Optimizer,
        *,
        release_gradients: bool = False,
        clip: Callable[[Tensor], Any] | None = None,
    ) -> Collection[Tensor]:
        """Submit an optimizer's step. The one before must have been joined.

        Args:
            optimizer: It must be one that may be stepped in parts (`reason_not_separable`). Its
                options and the gradients of its parameters are captured now.
            release_gradients: Whether parameters give their `.grad` away now: it is freed when it
                has been used, and what is written into `.grad` meanwhile (zeros, say) is not what
                the update reads.
            clip: As for `CapturedStep`; not of a step that was begun.

        Returns:
            Parameters whose gradients were taken before: a step was begun for them.
        """
        begun, self._begun = self._begun, None
        self.store.take_gradients = None
        self._norms.clear()
        if self.hosts is not None:
            return self._submit_to_hosts(self.hosts, optimizer, begun=begun, clip=clip)
        if begun is None:
            step = CapturedStep(optimizer, clip=clip)
            left: Collection[Tensor] = step.parameters
        else:
            step, left = begun.step, [p for p in begun.step.parameters if p not in begun.taken]
            step.give({p: p.grad for p in left if p.grad is not None})
        step.count()
        if release_gradients:
            for parameter in left:
                parameter.grad = None
        units = self._in_order(left)
        if not self.stale:
            self._announce(units, is_new=begun is None or not begun.taken)
        self._put(partial(self._update, units, step, begun=begun))
        return () if begun is None else begun.taken

    def _submit_to_hosts(
        self,
        hosts: HostsUpdate,
        optimizer: Optimizer,
        *,
        begun: BegunStep | None,
        clip: Callable[[Tensor], Any] | None,
    ) -> Collection[Tensor]:
        joint = None if begun is None else begun.joint
        if joint is None:
            step = CapturedStep(optimizer, gradients={})
            joint = self._join_hosts(hosts, step, begins_early=False, waits=True)
        joint.step.clip = clip
        joint.step.count()
        is_new = begun is None or not begun.taken
        for number, members in enumerate(joint.members):
            if not joint.is_given(number):
                self._announce(self._in_order(members), is_new=is_new)
                joint.give(number, grads_of(members))
                is_new = False
        joint.submit()
        self._put(lambda: None)  # after an error: lets go of who waits for what was announced late
        return () if begun is None else begun.taken

    def make_whole(self) -> None:
        """Join, and have all values here of which other hosts own a part; all hosts call this."""
        self.join()
        if self.hosts is not None:
            self.hosts.make_whole({unit.name: unit.parameters for unit in self.units})

    def late_values(self) -> list[LatePart]:
        return self.hosts.late_values([u.parameters for u in self.units]) if self.hosts else []

    def stepped_whole(self) -> None:
        """Mark 16-bit copies as old: an optimizer was stepped in another way than here."""
        if self.store.copies is not None:
            self.store.copies.forget()  # compiled kernels write unseen

    def keep(self, optimizers: Iterable[Optimizer], *, is_read: bool = False) -> None:
        """Copy what the optimizers are about to change: the next step computes with the copies.

        `is_read`: the next step has begun already, after `defer`.
        """
        self.join()
        if is_read:
            versions = self.store.versions
            self._put(partial(self._copy, self._in_order(self.store.previous), versions.switch))
            return
        changing = {
            p for o in optimizers for group in o.param_groups for p in group["params"]
        } & self._unit_of.keys()
        missing = changing - self.store.previous.keys()
        if missing:
            self.store.keep_previous(missing)
        units = self._in_order(self.store.previous)
        self._announce(units, is_new=True)
        self.store.uses_previous = True
        self._put(partial(self._copy, units))

    def join(self) -> None:
        """Wait for what was submitted; not for the parts of a step that has only begun.

        What the update has failed with is raised, once, with a note that says where.
        """
        begun = self._begun
        self.is_joined = True
        with self._changed:
            self._changed.wait_for(
                self._is_idle if begun is None else lambda: self._num_done >= begun.num_before
            )
            error, self._error = self._error, None
            if error is not None:
                self._forget_ended()
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame

    def _is_idle(self) -> bool:
        return self._num_done == self._num_put

    @contextmanager
    def latest(self) -> Iterator[None]:
        """Join, and have everybody compute with the newest values until the end of the context."""
        self.join()
        before, self.store.uses_previous = self.store.uses_previous, False
        try:
            yield
        finally:
            self.store.uses_previous = before

    def forget(self) -> None:
        """Join, and have the next step compute with the newest values: they came from elsewhere."""
        self.join()
        self.store.uses_previous = False

    def previous_values(self) -> Mapping[nn.Parameter, Tensor]:
        """Return the values that the next step computes with, where they are not the newest."""
        self.join()
        return self.store.previous if self.store.uses_previous else {}

    def restore(self, previous: Mapping[nn.Parameter, Tensor]) -> None:
        """Make the next step compute with the values that `previous_values` returned."""
        self.join()
        if previous:
            self.store.keep_previous(previous.keys())
            for parameter, values in previous.items():
                self.store.previous[parameter].copy_(values)
            self.store.uses_previous = True

    def close(self) -> None:
        """Finish what was submitted and join the thread. An error nobody joined for is lost."""
        self._jobs.put(None)
        self._thread.join()
        if self.exchange is not None:
            self.exchange.close()  # what arrives afterwards would be in part again
        if self.hosts is not None and self.hosts.round_rest():
            warnings.warn(
                "The training has ended before its time: of the parameters this host has now only "
                "16 bits where others own them. Load the last checkpoint.",
                stacklevel=2,
            )
        self.store.uses_previous = False
        self.store.updates.clear()

    def __enter__(self) -> Updater:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _in_order(self, parameters: Iterable[Tensor]) -> list[UpdateUnit]:
        chosen = dict.fromkeys(parameters)  # a set has another order on every host
        foreign = tuple(p for p in chosen if p not in self._unit_of)
        units = [u for u in self.units if not chosen.keys().isdisjoint(u.parameters)]
        if foreign:
            name = "parameters that are not the module's"
            units.append(UpdateUnit(name=name, parameters=foreign))  # type: ignore[arg-type]
        return units

    def _announce(self, units: Iterable[UpdateUnit], *, is_new: bool = False) -> None:
        """Make uploads of units, the first of a step perhaps, wait for one part more of each."""
        with self._changed:
            if is_new:
                self._forget_ended()
            for unit in (unit for unit in units if unit in self._known):
                if not self._num_parts[unit]:
                    self._events[unit] = event = HostEvent(f"update of {unit.name}")
                    self.store.updates.update(dict.fromkeys(unit.parameters, event))
                self._num_parts[unit] += 1

    def _forget_ended(self) -> None:
        """Forget updates that are over; parts of others may be in flight."""
        for parameter, event in list(self.store.updates.items()):
            if event.is_done:
                del self.store.updates[parameter]
        self._events = {unit: event for unit, event in self._events.items() if not event.is_done}

    def _put(self, job: Callable[[], None]) -> None:
        self.is_joined = False
        with self._changed:
            self._num_put += 1
        self._jobs.put(job)

    # ---------------------------------------------------------------------------- transfer threads

    def _take(
        self, gradients: dict[nn.Parameter, Tensor], elsewhere: Collection[nn.Parameter]
    ) -> Collection[nn.Parameter]:
        """Update what the step that was begun has all gradients of; nobody reads it any more."""
        begun = self._begun
        if begun is None:  # of a thread that was stuck in a step that was given up
            return ()
        known = begun.step.parameters
        mine: dict[Tensor, Tensor] = {p: g for p, g in gradients.items() if p in known}
        is_new = not begun.taken
        if begun.joint is not None:
            for number in sorted({begun.joint.number_of[p] for p in mine}):
                members = begun.joint.members[number]
                if any(p in elsewhere for p in members):  # more is to come
                    mine = {p: g for p, g in mine.items() if begun.joint.number_of[p] != number}
                    continue
                self._announce(self._in_order(members), is_new=is_new)
                some = {p: mine[p] for p in members if p in mine}
                begun.joint.give(number, some, is_weighed=False)
                begun.joint.await_room(lambda: self.store.is_given_up)
                is_new = False
            begun.taken.update(mine)
            return [parameter for parameter in gradients if parameter in mine]
        begun.step.give(mine)
        begun.taken.update(mine)
        for unit in self._in_order(mine):
            part = UpdateUnit(
                name=unit.name, parameters=tuple(p for p in unit.parameters if p in mine)
            )
            self._announce([unit], is_new=is_new)
            self._put(partial(self._update_part, unit, part, begun.step))
            is_new = False
        return [parameter for parameter in gradients if parameter in mine]

    def _measure(
        self,
        gradients: dict[nn.Parameter, Tensor],
        elsewhere: Collection[nn.Parameter],  # noqa: ARG002 - norms of others are measured later
    ) -> Collection[nn.Parameter]:
        self._put(partial(self._note_norms, dict(gradients)))
        return ()

    # ------------------------------------------------------------------------ the updater's thread

    def _note_norms(self, gradients: dict[nn.Parameter, Tensor]) -> None:
        for parameter, gradient in gradients.items():
            if gradient.layout is torch.strided:
                self._norms[parameter] = torch.linalg.vector_norm(gradient)

    def _serve(self) -> None:
        torch.set_num_threads(self._num_threads)
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    job()
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                with self._changed:
                    self._error = error
            del job
            if self._error is not None:  # whoever waits for an update that will not be made goes on
                with self._changed:
                    self._num_parts.clear()
                    events = list(self._events.values())
                for event in events:
                    event.fail(UpdateAborted())  # unless it has happened
            with self._changed:
                self._num_done += 1
                self._changed.notify_all()

    def _update(
        self, units: Sequence[UpdateUnit], step: CapturedStep, *, begun: BegunStep | None
    ) -> None:
        if self.stale and is_foreign(plain_step(type(step.optimizer))):
            # Nobody waits for a unit, and the step may count its calls where no trial can see it.
            every = tuple(p for unit in units for p in unit.parameters)
            units = [UpdateUnit(name="all parameters", parameters=every)]
        taken = () if begun is None else begun.taken
        for unit in units:
            left = tuple(p for p in unit.parameters if p not in taken)
            self._update_part(unit, UpdateUnit(name=unit.name, parameters=left), step)

    def _update_with_hosts(
        self, hosts: HostsUpdate, units: Sequence[UpdateUnit], joint: JointStep, *, num_early: int
    ) -> None:
        def run(number: int, parameters: Sequence[Tensor]) -> None:
            part = UpdateUnit(name=units[number].name, parameters=tuple(parameters))  # type: ignore[arg-type]
            self._run_part(part, joint.step)

        def ended(number: int, copied: Mapping[Tensor, slice]) -> None:
            self.store.received(units[number].parameters, copies=copied)
            self._end_part(units[number])

        try:
            hosts.step(joint, num_early=num_early, run=run, ended=ended)
        except BaseException as error:
            joint.fail(error)
            raise

    def _update_part(self, whole: UpdateUnit, unit: UpdateUnit, step: CapturedStep) -> None:
        self._run_part(unit, step)
        self.store.updated(unit.parameters, by=step.optimizer)
        if not self.stale:
            self._end_part(whole)

    def _run_part(self, unit: UpdateUnit, step: CapturedStep) -> None:
        try:
            self.run_unit(unit, step)
        except BaseException as error:
            kind = type(step.optimizer).__name__
            add_note(error, f"This happened while {kind} updated {unit.name!r}.")
            raise

    def _copy(self, units: Sequence[UpdateUnit], then: Callable[[], None] | None = None) -> None:
        for unit in units:
            for parameter in unit.parameters:
                place = self.store.previous.get(parameter)
                if place is not None:
                    place.copy_(parameter.detach())
            if then is None:
                self._end_part(unit)
        if then is not None:
            then()

    def _end_part(self, unit: UpdateUnit) -> None:
        if unit not in self._known:  # nobody waits for parameters that are not the module's
            return
        with self._changed:
            self._num_parts[unit] -= 1
            event = None if self._num_parts[unit] > 0 else self._events.get(unit)
        if event is not None:
            event.set()
