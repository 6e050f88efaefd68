"""Where microbatches begin: inside the calls of blocks, or before `training_step`.

`microbatching="auto"` runs the first batch of a form with `training_step` once, on all of it. The
next ones run it once per microbatch if that is proven to be the same:

- without values, every operation outside the blocks keeps rows apart until a mean over rows or
  targets, or a sum (`models/work/step_proof.py`);
- the first batch has written nothing into modules, their buffers, lists and dicts;
- all blocks ran on pieces of the batch.

Where the mean is over targets, those that `cross_entropy` gets have to be as many for every
microbatch as its weight says. They are counted in every step, and the numbers come to the host with
the loss: no microbatch waits for its device. A batch for which they differ is run again as a whole,
before anything is updated; with `microbatching="step"` it is an error.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections import ChainMap, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.capture.torch_functions import (
    THREAD_LOCALS,
    set_variables,
    variables_as,
    variables_now,
    version_of,
)
from roundpipe_lightning.engine.capture.trees import children_of, tensors_in
from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.engine.worker.user_code import Outside
from roundpipe_lightning.errors import BatchError, StepModeError
from roundpipe_lightning.models.batches import batch_size_of, split_batch, targets_of_rows
from roundpipe_lightning.models.work.meta_copy import (
    is_of_user,
    objects_of_code,
    reads_outside,
    thread_locals_of,
    variables_of_code,
)
from roundpipe_lightning.models.work.step_proof import LossKind, Unproven
from roundpipe_lightning.strategy.options import Options
from roundpipe_lightning.strategy.planning.dry_run import prove

_LOSSES = (functional.cross_entropy, functional.nll_loss)
_CONTAINERS = (list, tuple, dict, set, deque)
_PLAIN = (type(None), bool, int, float, str, bytes)
_CODE = type | ModuleType | FunctionType | BuiltinFunctionType | MethodType
_BASES = frozenset(LightningModule.__mro__)
_DEPTH = 200
_MANY = {False: 100_000, True: 1000}  # entries, by `is_for_step`: these are looked at every step
_MOST_BYTES = {False: 2**26, True: 10**6}
_TOLERANCE = 1e-9

_Look: TypeAlias = tuple[str, Callable[[], Any], Any]
"""Something that a step reads: its name, how it is read, and what was found of it."""

Contents: TypeAlias = dict[tuple[int, str], Any]  # by holder and name

BatchForm: TypeAlias = tuple[Any, ...]  # structure, dtypes and numbers of dimensions of a batch


def form_of(batch: Any) -> BatchForm:
    if isinstance(batch, Tensor):
        return (str(batch.dtype), batch.dim())
    children = tuple((str(key), form_of(child)) for key, child in children_of(batch))
    return (type(batch).__name__, *children)


def _num_targets(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """Return how much of its target a function averages over; None if it is no such mean."""
    if func not in _LOSSES or not torch.is_grad_enabled():
        return None
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    target, weight = given["target"], given.get("weight")
    if given.get("reduction", "mean") != "mean" or target.is_floating_point():
        return None
    counts: Tensor = target != given.get("ignore_index", -100)
    if weight is None:
        return counts.sum()
    return torch.where(counts, weight.detach()[target.clamp(min=0)], 0).double().sum()


class ModeChoice:
    """Chooses the mode of a training."""

    def __init__(
        self,
        module: LightningModule,
        stacks: Sequence[BlockStack],
        options: Options,
    ) -> None:
        self._module = module
        self._stacks = stacks
        self._mode = options.microbatching
        self._fuses_loss = self._warns = options.fuses_loss
        known = getattr(module, "averages_samples", False)
        self._tells = self._mode == "step" and not known
        self._num_cut = 0  # training batches that were split
        # by the text of a batch's form; and what a proven step reads
        self._chosen: dict[str, tuple[str, Sequence[_Look]]] = {}
        self._sizes: set[Any] = set()  # forms, and shapes of tensors, for which it is proven
        self._known: dict[nn.Module, Any] = {}  # of blocks, since earlier proofs
        self._has_begun = False

    def begin(
        self,
        batch: Any,
        arguments: Sequence[Any],
        *,
        count: int,
        is_whole: bool,
        fusion: Outside | None,
        trains: bool,
    ) -> MicrobatchedBatch:
        """Return what is to be run of a batch.

        Args:
            count: Microbatches of a full batch.
            is_whole: Whether some block has to run on whole batches.
            fusion: Asked before every torch function outside the blocks.

        Raises:
            BatchError: `microbatching="step"`, and it cannot be split.
        """
        if not self._has_begun:
            self._has_begun = True
            THREAD_LOCALS.set(thread_locals_of(self._module))
        chosen = self._mode if self._mode != "auto" else self._chosen_for(batch, arguments, count)
        is_cut = trains and count > 1
        if is_cut and self._tells:
            self._tell(batch, arguments, count)
        if chosen not in (None, "blocks"):
            cut = self._split(batch, count, chosen, fusion)
            self._num_cut += is_cut
            # What the first batch sets, once, is no write: transformers does.
            is_seldom = self._num_cut > 1 and self._num_cut.bit_count() == 1
            if is_cut and is_seldom and self._mode == "step":
                cut.watched = contents_of(self._module)
            return cut
        if self._warns and chosen == "blocks" and count > 1:
            self._warns = False
            rank_zero_warn(
                "The whole batch is one microbatch: recompute='none', or a plan or hints that fuse "
                "blocks with the loss, go with microbatching='step' alone. Leave them out, or set "
                "microbatching='step' where it is the same.",
                stacklevel=2,
            )
        with suppress(BatchError):
            count = max(1, min(count, batch_size_of(batch)))
        return MicrobatchedBatch(
            parts=[batch],
            counts=[1],
            num_microbatches=1 if is_whole or self._fuses_loss else count,
            joined=True,
            fusion=fusion,
            contents=contents_of(self._module) if is_cut and chosen is None else None,
        )

    def _chosen_for(self, batch: Any, arguments: Sequence[Any], count: int) -> str | None:
        form = str(form_of(batch))
        chosen, looks = self._chosen.get(form, (None, ()))
        is_new = self._size_of(batch) not in self._sizes
        if is_new and chosen not in (None, "blocks") and count > 1:
            try:  # of a checkpoint: the code may be another one now
                kind, looks = self._prove(batch, arguments, count)
                if kind != chosen:
                    raise Unproven("the loss is another mean for other sizes")
                self._chosen[form] = kind, looks
            except Unproven as error:
                return self._go_back(batch, str(error))
        for name, get, found in looks:
            if _content(get(), is_for_step=True) != found:
                return self._go_back(batch, f"the step reads {name}, which has changed")
        return chosen

    def _prove(
        self,
        batch: Any,
        arguments: Sequence[Any],
        count: int,
        divided: Set[int] | None = None,
    ) -> tuple[str, Sequence[_Look]]:
        kind, read = prove(
            self._module,
            self._stacks,
            batch=batch,
            arguments=arguments,
            num_microbatches=count,
            known=self._known,
            divided=divided,
        )
        self._sizes.add(self._size_of(batch))
        return kind.value, [(name, get, _content(get(), is_for_step=True)) for name, get in read]

    def _size_of(self, batch: Any) -> Any:
        return form_of(batch), *(tensor.shape for tensor in tensors_in(batch))

    def _go_back(self, batch: Any, reason: str) -> str:
        self._chosen[str(form_of(batch))] = "blocks", ()
        rank_zero_info(
            f"roundpipe: microbatching='blocks' from this batch on: {reason}. Nothing was updated "
            "with it before."
        )
        return "blocks"

    def _split(
        self, batch: Any, count: int, chosen: str, fusion: Outside | None
    ) -> MicrobatchedBatch:
        if count > 1:  # the last batch of an epoch, or a host's part of one, may have fewer rows
            count = min(count, max(1, batch_size_of(batch)))
        parts = split_batch(batch, count)
        by_targets = chosen != LossKind.ROWS.value and count > 1
        sizes = [batch_size_of(part) for part in parts] if count > 1 else [1]
        targets = targets_of_rows(batch) if by_targets else None
        return MicrobatchedBatch(
            parts=parts,
            counts=sizes if targets is None else [int(t.sum()) for t in targets.split(sizes)],
            num_microbatches=count,
            joined=False,
            fusion=fusion,
            checks=by_targets,
            is_proven=self._mode == "auto",
        )

    def _tell(self, batch: Any, arguments: Sequence[Any], count: int) -> None:
        """Say once, where `step` was asked for, why it is not proven to be the same."""
        self._tells = False
        try:
            self._prove(batch, arguments, count)
        except Unproven as error:
            rank_zero_info(
                "roundpipe: microbatching='step' is not proven to give what training_step on the "
                f"whole batch does: {error}. Microbatches weigh by the targets of cross_entropy, "
                "else by samples. microbatching='blocks' is exact; where your loss is a mean over "
                "samples, averages_samples = True in the module's class says so."
            )

    def falls_back(self, batch: Any, error: StepModeError) -> bool:
        """Return whether a batch is run again as a whole, as its form is from now on.

        Args:
            batch: The batch; nothing was updated yet.
        """
        return self._mode == "auto" and bool(self._go_back(batch, error.reason))

    def decide(
        self,
        batch: Any,
        arguments: Sequence[Any],
        before: Contents,
        *,
        num_microbatches: int,
        divided: Set[int],
        reason: str,
    ) -> None:
        """Choose, when the first batch has ended.

        Args:
            before: `contents_of` the module before it.
            num_microbatches: Of a batch in the other mode.
            divided: Dimensions along which blocks were divided.
            reason: What speaks against it already; empty: nothing.
        """
        form = str(form_of(batch))
        try:
            if reason:
                raise Unproven(reason)
            if name := changed_since(before, self._module):
                raise Unproven(f"a list, a dict, an object or a counter is written into ({name})")
            self._chosen[form] = self._prove(batch, arguments, num_microbatches, divided)
        except Unproven as error:
            self._chosen[form] = "blocks", ()
            rank_zero_info(
                "roundpipe: microbatching='blocks', because training_step on microbatches is not "
                f"proven to be the same: {error}. The head and the loss are computed on one worker "
                "then, while others wait; where you know that it is the same, "
                "microbatching='step' is faster. Naming either settles it."
            )
            return
        rank_zero_info(
            "roundpipe: microbatching='step' from the next batch on: the loss is proven to be a "
            "weighted mean over microbatches, which costs nothing but rounding; "
            "microbatching='blocks' keeps training_step whole. Naming either settles it."
        )

    def state_dict(self) -> dict[str, Any]:
        return {form: chosen for form, (chosen, _) in self._chosen.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._chosen.update((form, (chosen, ())) for form, chosen in state.items())


def contents_of(module: LightningModule) -> Contents:
    """Return what modules, the user's classes and objects of their files hold beside tensors."""
    modules = list(module.modules())
    classes = [kind for kind in type(module).__mro__ if kind not in _BASES]
    own, seen = vars(LightningModule()).keys(), {id(child): child for child in modules}
    variables = {(id(v), v.name): _content(value, seen) for v, value in copy_context().items()}
    return variables | {
        (id(holder), name): _content(value, seen)
        for holder in {id(h): h for h in (*modules, *classes, *objects_of_code(module))}.values()
        for name, value in sorted(vars(holder).items())
        if name not in own
    }


def changed_since(before: Contents, module: LightningModule) -> str:
    """Return the name of an entry of `contents_of` a module that has changed, or is new.

    Libraries set some flags in their first step: these are left out.
    """
    after = contents_of(module)
    new = (key for key in after.keys() - before.keys() if not isinstance(after[key], bool))
    old = (key for key, content in before.items() if key not in after or after[key] != content)
    return next((name for _, name in (*old, *new)), "")


def shared_contents(module: LightningModule) -> dict[Any, Any]:
    """Return what is held by what runs of a block share: not by what they assign to attributes."""
    modules = list(module.modules())
    seen, own = {id(child): child for child in modules}, vars(LightningModule()).keys()
    found = {
        (id(holder), name, id(value)): _content(value, ChainMap({}, seen))
        for holder in (*modules, *objects_of_code(module))
        for name, value in vars(holder).items()
        if name not in own
        if isinstance(value, _CONTAINERS) or is_of_user(sys.modules.get(type(value).__module__))
    }
    tables = [(t, name) for t, name in variables_of_code(module) if "__spec__" in t]
    # The whole module's numbers are no block's own: a block writes them past its view.
    tables += [(vars(module), n) for n, v in vars(module).items() if isinstance(v, _PLAIN)]
    return found | {(id(t), name): _content(t.get(name), ChainMap({}, seen)) for t, name in tables}


def outside_reader() -> Callable[[nn.Module], list[Any]]:
    """Return a function that reads what a block may read from other objects."""
    known: dict[nn.Module, list[Callable[[], Any]]] = {}

    def values(block: nn.Module) -> list[Any]:
        if block not in known:
            known[block] = reads_outside(block)
        return [_content(get(), is_for_step=True) for get in known[block]]

    return values


def _content(
    value: Any,
    seen: MutableMapping[int, Any] | None = None,
    depth: int = 0,
    *,
    is_for_step: bool = False,
) -> Any:
    """Return what tells whether something was written into; of large things only what they hold.

    Args:
        seen: What was looked at, by its identity: nothing is twice.
        is_for_step: Leave out what does not decide what a step computes: tensors' values.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        if is_for_step:
            return value.dtype, value.shape
        return id(value), version_of(value)
    is_large = hasattr(type(value), "nbytes") and value.nbytes > _MOST_BYTES[is_for_step]
    if (
        is_large
        or isinstance(value, Trainer | _CODE)
        or (is_for_step and isinstance(value, nn.Module))
    ):
        return id(value)
    seen = {} if seen is None else seen
    if id(value) in seen or depth > _DEPTH:
        return None
    seen[id(value)] = value
    held = value if isinstance(value, _CONTAINERS) else getattr(value, "__dict__", None)
    hides = held is None or any("__reduce__" in vars(kind) for kind in type(value).__mro__[:-1])
    if hides and held is not value and not is_for_step:
        try:  # slots, numbers of a random generator
            held = value.__reduce_ex__(4)[1:]
        except Exception:  # noqa: BLE001 - whatever its code raises
            return id(value)
    if held is None:
        return id(value)
    if len(held) > _MANY[is_for_step]:
        return list(map(id, (*held, *held.values()) if isinstance(held, dict) else held))
    items = held.items() if isinstance(held, dict) else held
    return [_content(item, seen, depth + 1, is_for_step=is_for_step) for item in items]


@dataclass(kw_only=True)
class MicrobatchedBatch:
    """A batch that is about to be run."""

    parts: Sequence[Any]  # what `training_step` is called with; of the whole batch there is one
    counts: Sequence[int]  # what the loss of each is taken to average over
    num_microbatches: int  # microbatches of all parts
    joined: bool  # whether these are pieces of the one part, inside the calls of blocks
    fusion: Outside | None  # asked before every torch function outside the blocks
    # `contents_of` the module, before the first batch of a form; None for others
    contents: Contents | None = None
    watched: Contents | None = None  # the same, where it is warned of what the parts change
    checks: bool = False  # whether what the losses do average over is compared with `counts`
    notes: bool = False  # whether it is noted: hosts weigh by it
    is_proven: bool = False  # whether the step was proven to be the same on microbatches

    def __post_init__(self) -> None:
        self._seen: list[list[Tensor]] = [[] for _ in self.parts]
        self._ratios: dict[int, list[float]] = {}  # of what the first part's losses counted
        self._thread = threading.local()
        self._has_warned = False
        self._variables = self._left = variables_now()  # the last part's stay

    @property
    def shares(self) -> Sequence[float]:
        total = sum(self.counts)  # 0 where nothing is a target: the loss is not a number then
        return [count / total if total else 1 / len(self.counts) for count in self.counts]

    @property
    def outside(self) -> Outside | None:
        return self._note if self.checks or self.notes else self.fusion

    def averages_over(self, seen: Sequence[Sequence[Tensor]]) -> Sequence[float]:
        """Return over how much each mean over targets in the loss went; else the batch's rows.

        Args:
            seen: The `targets` of every part, on the host.
        """
        if any(seen):
            return [float(sum(terms)) for terms in zip(*seen, strict=True)]
        if len(self.parts) > 1:
            return [float(sum(self.counts))]
        targets = targets_of_rows(self.parts[0])
        try:
            return [float(batch_size_of(self.parts[0]) if targets is None else targets.sum())]
        except BatchError:
            return [1.0]

    def _note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        count = _num_targets(func, args, kwargs)
        if count is not None:
            self._seen[self._thread.index].append(count)
        return NotImplemented if self.fusion is None else self.fusion(func, args, kwargs)

    def warn_of_changes(self, changed: str) -> None:
        """Warn of what the step has changed, by its name, if every part has."""
        if changed and len(self.parts) > 1 and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"The step, or another thread, writes {changed}: with microbatching='step' a step "
                "does so once per microbatch, of its rows, and an attribute keeps the last one's "
                "value. Set microbatching='blocks' where that is not what one device has.",
                stacklevel=2,
            )

    def end(self, module: LightningModule) -> None:
        """Called in the Trainer's thread when the parts' steps have returned."""
        set_variables(self._left)
        if self.watched is not None:
            self.warn_of_changes(changed_since(self.watched, module))

    @contextmanager
    def running(self, index: int) -> Iterator[None]:
        """Entered in the thread of a part, around its step.

        That sees, and sets, the context variables of the Trainer's thread.
        """
        self._thread.index = index
        with variables_as(self._variables):
            yield
            self._left = variables_now()

    @property
    def targets(self) -> Sequence[Tensor]:
        """How many targets each loss has counted so far in the part in whose thread this is."""
        return self._seen[self.part]

    @property
    def part(self) -> int:
        """The part in whose thread this is asked; the first one in a thread of none."""
        return getattr(self._thread, "index", 0)

    def check_output(self, output: Any) -> None:
        """Raise a StepModeError if a part's step has returned more than a loss."""
        if len(self.parts) > 1 and isinstance(output, Mapping) and set(output) != {"loss"}:
            raise StepModeError("training_step returns more than the loss")

    def check_targets(self, index: int, returned: Mapping[str, Any]) -> None:
        """Called in the thread of a part before its gradients are added to others'.

        No block has all its gradients before every part has been here: nothing is updated.

        Args:
            returned: Among others its `targets`, on the host.

        Raises:
            StepModeError: The parts' losses cannot be put together.
        """
        # Of what is not seen the mean is over rows; in all parts the ratio has to be the same.
        count, seen = self.counts[index], returned["targets"]
        terms = [float(t) for t in seen] or [float(batch_size_of(self.parts[index]))]
        if count:
            first = self._ratios.setdefault(0, [term / count for term in terms])
            same = len(first) == len(terms) and all(
                math.isclose(term / count, ratio, rel_tol=_TOLERANCE)
                for term, ratio in zip(terms, first, strict=True)
            )
        else:
            same = not any(terms)
        if not same and seen:
            raise StepModeError("the loss counts other targets than the batch's labels")
        if not same:
            raise StepModeError("it is not seen which targets the loss counts")
