"""Where microbatches begin: inside the calls of blocks, or before `training_step`.

`microbatching="auto"` runs the first batch of a form with `training_step` once, on all of it. The
next ones run it once per microbatch if that is proven to be the same:

- without values, every operation outside the blocks keeps rows apart until a mean over rows or
  targets, or a sum (`models/work/step_proof.py`);
- the first batch has written nothing into modules, their buffers, lists and dicts;
- all blocks ran on pieces of the batch;
- where the mean is over targets, those that `cross_entropy` got are as many for every microbatch as
  its weight says.

They are counted in every later step, too, and in all of `microbatching="step"`. A later batch for
which they differ is run again as a whole, before anything is updated; with `"step"` it is an error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.capture.trees import children_of
from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.engine.worker.user_code import Outside
from roundpipe_lightning.errors import BatchError, ConfigurationError
from roundpipe_lightning.models.batch_sizes import targets_of_rows
from roundpipe_lightning.models.batches import batch_size_of, split_batch
from roundpipe_lightning.models.work.step_proof import LossKind, Unproven
from roundpipe_lightning.strategy.options import Options
from roundpipe_lightning.strategy.planning.dry_run import prove

_CONTAINERS = (list, dict, set, deque)
_BASES = frozenset(LightningModule.__mro__)
_DEPTH, _MANY = 4, 1000
_TOLERANCE = 1e-9

BatchForm: TypeAlias = tuple[Any, ...]
"""Structure, dtypes and numbers of dimensions of a batch."""


def form_of(batch: Any) -> BatchForm:
    if isinstance(batch, Tensor):
        return (str(batch.dtype), batch.dim())
    children = tuple((str(key), form_of(child)) for key, child in children_of(batch))
    return (type(batch).__name__, *children)


class StepModeError(ConfigurationError):
    """A step does what cannot be done once per microbatch, in the mode that does so.

    Args:
        reason: What it does.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason}, but microbatching='step' runs training_step once per microbatch. Set "
            "microbatching='blocks', or leave it out."
        )
        self.reason = reason


class SeenTargets:
    """Asked before every torch function outside the blocks: notes what `cross_entropy` counts.

    Args:
        inner: Asked next; None: nobody is.

    Attributes:
        counts: Per call, and per row of what it got: how much of it counts, of a mean over targets.
    """

    def __init__(self, inner: Outside | None) -> None:
        self._inner = inner
        self.counts: list[Tensor] = []

    def __call__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func in (functional.cross_entropy, functional.nll_loss) and torch.is_grad_enabled():
            self._note(*args, **kwargs)
        return NotImplemented if self._inner is None else self._inner(func, args, kwargs)

    def _note(
        self,
        input: Tensor,  # noqa: A002, ARG002
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,  # noqa: ARG002, FBT001
        ignore_index: int = -100,
        reduce: bool | None = None,  # noqa: ARG002, FBT001
        reduction: str = "mean",
        label_smoothing: float = 0.0,  # noqa: ARG002
    ) -> None:
        if reduction != "mean" or target.is_floating_point():
            return
        counts = target != ignore_index
        if weight is not None:
            counts = torch.where(counts, weight[target.clamp(min=0)], 0)
        self.counts.append(counts.detach().double())


class ModeChoice:
    """Chooses the mode of a training.

    Args:
        module: The user's module.
        stacks: Its blocks.
        options: The strategy's settings.
    """

    def __init__(
        self, module: LightningModule, stacks: Sequence[BlockStack], options: Options
    ) -> None:
        self._module = module
        self._stacks = stacks
        self._mode = options.microbatching
        self._shrinks = options.num_microbatches == "auto"
        self._fuses_loss = self._warns = options.fuses_loss
        self._tells = self._mode == "step"
        self._chosen: dict[str, str] = {}  # by the text of a batch's form

    def begin(
        self, batch: Any, *, count: int, is_whole: bool, fusion: Outside | None, trains: bool
    ) -> MicrobatchedBatch:
        """Return what is to be run of a batch.

        Args:
            batch: The batch.
            count: Microbatches of a full batch.
            is_whole: Whether some block has to run on whole batches.
            fusion: Asked before every torch function outside the blocks.
            trains: Whether gradients are wanted.

        Raises:
            BatchError: `microbatching="step"`, and it cannot be split.
        """
        chosen = self._chosen.get(str(form_of(batch))) if self._mode == "auto" else self._mode
        if chosen not in (None, "blocks"):
            try:
                return self._split(batch, count, chosen, fusion)
            except BatchError:
                if self._mode == "step":
                    raise
        looks = trains and chosen is None and count > 1
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
            first=FirstBatch(self._module, SeenTargets(fusion)) if looks else None,
        )

    def _split(
        self, batch: Any, count: int, chosen: str, fusion: Outside | None
    ) -> MicrobatchedBatch:
        """Split a batch; a small one into fewer microbatches, if their number is not the user's."""
        if self._shrinks and count > 1:
            count = min(count, max(1, batch_size_of(batch)))
        parts = split_batch(batch, count)
        return MicrobatchedBatch(
            parts=parts,
            counts=_counts_of(batch, parts, by_targets=chosen != LossKind.ROWS.value),
            num_microbatches=count,
            joined=False,
            fusion=fusion,
            checks=count > 1 and chosen != LossKind.ROWS.value,
        )

    def tell(self, batch: MicrobatchedBatch) -> None:
        """Say once by what microbatches are weighed where nothing shows it."""
        if self._tells and batch.checks and not batch.sees_targets:
            self._tells = False
            rank_zero_info(
                "roundpipe: microbatching='step': training_step computes no cross_entropy, so its "
                "microbatches weigh by their samples. Where its loss is no mean over samples, set "
                "microbatching='blocks', or leave it out."
            )

    def falls_back(self, batch: Any, error: StepModeError) -> bool:
        """Return whether a batch is run again as a whole, as its form is from now on.

        Args:
            batch: The batch; nothing was updated yet.
            error: What it was refused for.
        """
        if self._mode != "auto":
            return False
        self._chosen[str(form_of(batch))] = "blocks"
        rank_zero_info(
            f"roundpipe: microbatching='blocks' from this batch on: {error.reason}. Nothing was "
            "updated with it before."
        )
        return True

    def decide(
        self,
        batch: Any,
        arguments: Sequence[Any],
        first: FirstBatch,
        *,
        num_microbatches: int,
        reason: str,
    ) -> None:
        """Choose, when the first batch has ended.

        Args:
            batch: The batch.
            arguments: The other arguments of `training_step`.
            first: What was seen.
            num_microbatches: Of a batch in the other mode.
            reason: What speaks against it already; empty: nothing.
        """
        try:
            if reason:
                raise Unproven(reason)
            kind = prove(
                self._module,
                self._stacks,
                batch=batch,
                arguments=arguments,
                num_microbatches=num_microbatches,
            )
            first.check(batch, kind, num_microbatches)
        except Unproven as error:
            self._chosen[str(form_of(batch))] = "blocks"
            rank_zero_info(
                "roundpipe: microbatching='blocks', because training_step on microbatches is not "
                f"proven to be the same: {error}. The head and the loss are computed on one worker "
                "then, while others wait; where you know that it is the same, "
                "microbatching='step' is faster. Naming either settles it."
            )
            return
        self._chosen[str(form_of(batch))] = kind.value
        rank_zero_info(
            "roundpipe: microbatching='step' from the next batch on: the loss is proven to be a "
            "weighted mean over microbatches, which costs nothing but rounding; "
            "microbatching='blocks' keeps training_step whole. Naming either settles it."
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(self._chosen)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._mode == "auto":
            self._chosen.update(state)


def _counts_of(batch: Any, parts: Sequence[Any], *, by_targets: bool) -> Sequence[int]:
    """Return what the loss of each part is taken to average over: its targets, or its rows."""
    if len(parts) == 1:
        return [1]
    sizes = [batch_size_of(part) for part in parts]
    targets = targets_of_rows(batch) if by_targets else None
    return sizes if targets is None else [int(some.sum()) for some in targets.split(sizes)]


class FirstBatch:
    """What is seen in the first batch of a form.

    Args:
        module: The user's module.
        targets: What the loss counts.
    """

    def __init__(self, module: LightningModule, targets: SeenTargets) -> None:
        self._module = module
        self.targets = targets
        self._before = self._contents()

    def _contents(self) -> list[Any]:
        """Return what modules and the classes of the user's hold beside tensors."""
        modules = list(self._module.modules())
        classes = [kind for kind in type(self._module).__mro__ if kind not in _BASES]
        held = [vars(holder) for holder in (*modules, *classes)]
        seen = set(map(id, modules))
        own = vars(LightningModule()).keys()
        return [
            [
                (name, _content(value, seen))
                for name, value in sorted(some.items())
                if name not in own
            ]
            for some in held
        ]

    def check(self, batch: Any, kind: LossKind, num_microbatches: int) -> None:
        """Compare what was seen with what microbatches would do.

        Raises:
            Unproven: They would do something else.
        """
        if self._contents() != self._before:
            raise Unproven("it writes into a list, a dict, an object or a counter")
        try:
            parts = split_batch(batch, num_microbatches)
        except BatchError as error:
            raise Unproven(str(error)) from error
        if kind is LossKind.ROWS:
            return
        if not self.targets.counts:
            raise Unproven("its targets are not seen")
        sizes = [batch_size_of(part) for part in parts]
        seen = self.targets.counts[-1].reshape(sum(sizes), -1).sum(-1).split(sizes)
        counts = _counts_of(batch, parts, by_targets=True)
        if not _are_proportional([float(some.sum()) for some in seen], counts):
            raise Unproven("its targets are others than the batch's labels")


@dataclass(kw_only=True)
class MicrobatchedBatch:
    """A batch that is about to be run.

    Attributes:
        parts: What `training_step` is called with; of the whole batch there is one.
        counts: What the loss of each is taken to average over.
        num_microbatches: Microbatches of all parts.
        joined: Whether these are pieces of the one part, inside the calls of blocks.
        fusion: Asked before every torch function outside the blocks.
        first: What is seen of the first batch of a form.
        checks: Whether what the losses do average over is compared with `counts`.
    """

    parts: Sequence[Any]
    counts: Sequence[int]
    num_microbatches: int
    joined: bool
    fusion: Outside | None
    first: FirstBatch | None = None
    checks: bool = False

    def __post_init__(self) -> None:
        self._seen = [SeenTargets(self.fusion) for _ in self.parts]
        self._totals: dict[int, list[float]] = {}
        self._thread = threading.local()

    @property
    def shares(self) -> Sequence[float]:
        """Shares of the parts in the loss; together 1."""
        total = sum(self.counts)  # 0 where nothing is a target: the loss is not a number then
        return [count / total if total else 1 / len(self.counts) for count in self.counts]

    @property
    def sees_targets(self) -> bool:
        """Whether the losses have counted targets."""
        return any(self._totals.values())

    @property
    def outside(self) -> Outside | None:
        """Asked before every torch function outside the blocks."""
        if self.first is not None:
            return self.first.targets
        return self._note if self.checks else self.fusion

    def _note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._seen[self._thread.index](func, args, kwargs)

    def begin(self, index: int) -> None:
        """Called in the thread of a part, before its step."""
        self._thread.index = index

    def check(self, index: int, output: Any) -> None:
        """Called in the thread of a part after its step, before its backward pass.

        No block has all its gradients before every part has been here: nothing is updated.

        Raises:
            StepModeError: The parts' losses cannot be put together, or there is more than a loss.
        """
        if len(self.parts) > 1 and isinstance(output, Mapping) and set(output) != {"loss"}:
            raise StepModeError("training_step returns more than the loss")
        if not self.checks:
            return
        self._totals[index] = [float(counts.sum()) for counts in self._seen[index].counts]
        totals = dict(self._totals)  # others may come meanwhile
        if any(len(some) != len(totals[index]) for some in totals.values()):
            raise StepModeError("the loss has other terms in other microbatches")
        for seen in zip(*totals.values(), strict=True):
            if not _are_proportional(seen, [self.counts[one] for one in totals]):
                raise StepModeError("the loss counts other targets than the batch's labels")
        sizes = [batch_size_of(part) for part in self.parts]
        if not totals[index] and not _are_proportional(self.counts, sizes):
            raise StepModeError("it is not seen which targets the loss counts")


def _are_proportional(some: Sequence[float], others: Sequence[float]) -> bool:
    total, other = sum(some), sum(others)
    if not (total and other):
        return not (any(some) or any(others))
    return all(abs(a / total - b / other) <= _TOLERANCE for a, b in zip(some, others, strict=True))


def _content(value: Any, seen: set[int], depth: int = 0) -> Any:
    """Return what tells whether something was written into; of large things only their size."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if (
        id(value) in seen
        or (callable(value) and not isinstance(value, nn.Module))
        or depth > _DEPTH
    ):
        return None
    seen = seen | {id(value)}
    if isinstance(value, _CONTAINERS):
        if len(value) > _MANY:
            return len(value)
        items = value.items() if isinstance(value, dict) else value
        return [_content(item, seen, depth + 1) for item in items]
    if isinstance(value, tuple):
        return [_content(item, seen, depth + 1) for item in value]
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict) and not isinstance(value, ModuleType | Trainer):
        return id(value), _content(held, seen, depth)
    return id(value)
