"""Where microbatches begin: inside the calls of blocks, or before `training_step`.

`microbatching="auto"` runs the first batch of a form with `training_step` once, on all of it. The
next ones run it once per microbatch if that is proven to be the same:

- without values, every operation outside the blocks keeps rows apart until a mean over rows or
  targets, or a sum (`models/work/step_proof.py`);
- the first batch has written nothing into modules, their buffers, lists and dicts;
- all blocks ran on pieces of the batch;
- where the mean is over targets, those that `cross_entropy` got are as many for every microbatch as
  its weight says. They are counted in every later step, too.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.capture.trees import children_of, tensors_in
from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.engine.worker.user_code import Outside
from roundpipe_lightning.errors import BatchError, ConfigurationError, RoundPipeError
from roundpipe_lightning.models.batches import split_batch
from roundpipe_lightning.models.weights import microbatch_weights
from roundpipe_lightning.models.work.step_proof import LossKind, Unproven
from roundpipe_lightning.strategy.planning.inputs import prove

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


class SeenTargets:
    """Asked before every torch function outside the blocks: notes what `cross_entropy` counts.

    Args:
        inner: Asked next; None: nobody is.

    Attributes:
        counts: Per row of what `cross_entropy` got: how much of it counts, of a mean over targets.
    """

    def __init__(self, inner: Outside | None) -> None:
        self._inner = inner
        self.counts: list[Tensor] = []

    def __call__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func in (functional.cross_entropy, functional.nll_loss):
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

    def of_rows(self, num_rows: int) -> Tensor | None:
        """Return how much counts of every row, on the host; None if nothing was seen."""
        if not self.counts:
            return None
        return self.counts[-1].reshape(num_rows, -1).sum(-1).cpu()

    def total(self) -> float:
        return float(self.counts[-1].sum()) if self.counts else 0.0


class ModeChoice:
    """Chooses the mode of a training.

    Args:
        module: The user's module.
        stacks: Its blocks.
        mode: `"auto"`, `"blocks"` or `"step"`.
        fuses_loss: Whether the stages that were asked for need the loss of one microbatch at a
            time, so that a whole batch is one microbatch.
    """

    def __init__(
        self,
        module: LightningModule,
        stacks: Sequence[BlockStack],
        mode: str,
        *,
        fuses_loss: bool = False,
    ) -> None:
        self._warns = fuses_loss
        self._module = module
        self._stacks = stacks
        self._mode = mode
        self._chosen: dict[str, str] = {}  # by the text of a batch's form

    def begin(
        self,
        batch: Any,
        split: Callable[[], tuple[Sequence[Any], Sequence[float]]],
        *,
        num_pieces: int,
        may_split: bool,
        fusion: Outside | None,
        trains: bool,
    ) -> MicrobatchedBatch:
        """Return what is to be run of a batch.

        Args:
            batch: The batch.
            split: Splits it into microbatches, and returns these and their shares of the loss.
            num_pieces: Microbatches of the whole batch.
            may_split: Whether more than one microbatch was asked for.
            fusion: Asked before every torch function outside the blocks.
            trains: Whether gradients are wanted.

        Raises:
            BatchError: `microbatching="step"`, and it cannot be split.
        """
        form = str(form_of(batch))
        chosen = self._chosen.get(form) if self._mode == "auto" else self._mode
        if chosen not in (None, "blocks"):
            try:
                parts, shares = split()
            except BatchError:
                if self._mode == "step":
                    raise
            else:
                return MicrobatchedBatch(
                    parts=parts,
                    shares=shares,
                    count=len(parts),
                    joined=False,
                    fusion=fusion,
                    counts=chosen == LossKind.TARGETS.value,
                )
        looks = trains and chosen is None and may_split
        if self._warns and chosen == "blocks" and may_split:
            self._warns = False
            rank_zero_warn(
                "The whole batch is one microbatch: recompute='none', or a plan or hints that fuse "
                "blocks with the loss, go with microbatching='step' alone. Leave them out, or set "
                "microbatching='step' where it is the same.",
                stacklevel=2,
            )
        return MicrobatchedBatch(
            parts=[batch],
            shares=(1.0,),
            count=num_pieces,
            joined=True,
            fusion=fusion,
            first=FirstBatch(self._module, SeenTargets(fusion)) if looks else None,
        )

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
                f"proven to be the same: {error}. Where you know that it is, "
                "microbatching='step' is faster."
            )
            return
        self._chosen[str(form_of(batch))] = kind.value
        rank_zero_info(
            "roundpipe: microbatching='step' from the next batch on: the loss is proven to be a "
            "weighted mean over microbatches. "
            "microbatching='blocks' runs training_step on the whole batch."
        )

    def state_dict(self) -> dict[str, Any]:
        return dict(self._chosen)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._mode == "auto":
            self._chosen.update(state)


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
        if kind is LossKind.SUM:
            raise Unproven("its loss is a sum")
        try:
            parts = split_batch(batch, num_microbatches)
            shares = microbatch_weights(parts, "auto" if kind is LossKind.TARGETS else "samples")
        except RoundPipeError as error:
            raise Unproven(str(error)) from error
        if kind is LossKind.TARGETS:
            self._check_targets(parts, shares)

    def _check_targets(self, parts: Sequence[Any], shares: Sequence[float]) -> None:
        sizes = [len(next(tensors_in(part))) for part in parts]
        counts = self.targets.of_rows(sum(sizes))
        if counts is None or not float(counts.sum()):
            raise Unproven("its targets are not seen")
        seen = [float(some.sum() / counts.sum()) for some in counts.split(sizes)]
        if any(abs(a - b) > _TOLERANCE for a, b in zip(seen, shares, strict=True)):
            raise Unproven("its targets are others than the batch's labels")


@dataclass(kw_only=True)
class MicrobatchedBatch:
    """A batch that is about to be run.

    Attributes:
        parts: What `training_step` is called with; of the whole batch there is one.
        shares: Their shares of the loss; together 1.
        count: Microbatches.
        joined: Whether these are pieces of the one part, inside the calls of blocks.
        fusion: Asked before every torch function outside the blocks.
        first: What is seen of the first batch of a form.
        counts: Whether targets are counted.
    """

    parts: Sequence[Any]
    shares: Sequence[float]
    count: int
    joined: bool
    fusion: Outside | None
    first: FirstBatch | None = None
    counts: bool = False

    def __post_init__(self) -> None:
        self._seen = [SeenTargets(self.fusion) for _ in self.parts]
        self._thread = threading.local()

    def begin(self, index: int) -> None:
        """Called in the thread of a part, before its step."""
        self._thread.index = index

    @property
    def outside(self) -> Outside | None:
        """Asked before every torch function outside the blocks."""
        if self.first is not None:
            return self.first.targets
        return self._count if self.counts else self.fusion

    def _count(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._seen[self._thread.index](func, args, kwargs)

    def check_shares(self) -> None:
        """Compare the shares with the targets that the losses have counted.

        Raises:
            ConfigurationError: They differ.
        """
        totals = [one.total() for one in self._seen]
        if not sum(totals):
            return
        if any(
            abs(total / sum(totals) - share) > _TOLERANCE
            for total, share in zip(totals, self.shares, strict=True)
        ):
            raise ConfigurationError(
                "The loss counts other targets than the batch's labels, so the microbatches' "
                "losses cannot be weighed. Set RoundPipeStrategy(microbatching='blocks')."
            )


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
