"""`torchmetrics` objects inside steps: stand-ins that hand what they have seen to the originals.

A metric accumulates by changing its own attributes, which several microbatch threads must not do at
once, and it lives in host memory, while its arguments may be on a device. So

- every microbatch gets a fresh copy of each metric; when the step is done, the copies' states are
  *merged*, first microbatch first, into what the metric would hold after one update on the full
  batch;
- a step that nothing is split in (evaluation, one microbatch) is *lent* a copy with the metric's
  state, and the state is brought back afterwards. On CPU workers it is lent the metric itself.

Only states that can be merged without loss are: sums, extrema and concatenations. A metric with
other states, one whose update looks at what it has seen so far (`full_state_update`) and one that
is given mere numbers is called again with the arguments of all microbatches (metric_calls.py).
"""

# torchmetrics has no public face for a metric's states.
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import (
    dim_zero_cat,
    dim_zero_max,
    dim_zero_min,
    dim_zero_sum,
)
from torchmetrics.wrappers import MetricTracker

from roundpipe_lightning.strategy.metric_calls import CallRecorder, replay_calls
from roundpipe_lightning.strategy.metric_places import UnseenMetrics, bring_home

_EXACT_REDUCTIONS: frozenset[Callable[..., Any]] = frozenset(
    (dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat)
)


class MetricStandIns:
    """The metrics of a module and their copies.

    Args:
        module: The user's module; metrics that are added to it later are not seen.
        in_place: Whether steps compute where the metrics are, on the host.
    """

    def __init__(self, module: nn.Module, *, in_place: bool) -> None:
        self._in_place = in_place
        self._roots: list[tuple[str, nn.Module]] = []
        for name, metric in _metric_roots(module):
            if not any(metric is known for _, known in self._roots):
                self._roots.append((name, metric))
        self._copies: list[list[nn.Module]] = []
        self._recorders: list[list[CallRecorder]] = []
        self._lent: list[nn.Module] | None = None
        self._unseen = UnseenMetrics(module)
        for name, metric in self._roots:
            bring_home(name, metric)

    @contextmanager
    def lent(self) -> Iterator[Mapping[nn.Module, nn.Module]]:
        """Lend every metric, state and all, to one step that nothing is split in.

        Yields:
            What stands in for each metric.
        """
        originals = [metric for _, metric in self._roots]
        if self._in_place:
            yield {metric: metric for metric in originals}
            return
        if self._lent is None:
            self._lent = [self._copy(metric) for metric in originals]
        for place, metric in enumerate(originals):
            if _has_grown(metric, self._lent[place]):
                self._lent[place] = self._copy(metric)
        for metric, copy in zip(originals, self._lent, strict=True):
            _hand_over(metric, copy)
        with self._unseen.explained():
            yield dict(zip(originals, self._lent, strict=True))
        for metric, copy in zip(originals, self._lent, strict=True):
            _hand_over(copy, metric)

    @contextmanager
    def for_microbatches(
        self, shares: Sequence[float]
    ) -> Iterator[Callable[[int], Mapping[nn.Module, nn.Module]]]:
        """Provide the microbatches of a step with metrics, and gather what they have seen.

        Args:
            shares: The microbatches' shares of the loss.

        Yields:
            What stands in for each metric, by the index of the microbatch.

        Raises:
            ConfigurationError: A metric was used in a way that has no meaning for a part of a
                batch.
        """
        if len(shares) == 1:
            with self.lent() as lent:
                yield lambda _: lent
            return
        self._prepare(len(shares))
        open_now = [r for recorders in self._recorders[: len(shares)] for r in recorders]
        for recorder in open_now:
            recorder.open()
        try:
            with self._unseen.explained(), self._unseen.guarded(self._roots):
                yield self._of
        finally:
            for recorder in open_now:
                recorder.close()
        self._merge(shares)

    def _prepare(self, num_microbatches: int) -> None:
        """Have that many sets of copies ready, with nothing in them."""
        while len(self._copies) < num_microbatches:
            self._copies.append([])
            self._recorders.append([])
            for place in range(len(self._roots)):
                self._copies[-1].append(nn.Module())
                self._recorders[-1].append(self._renew(self._copies[-1], place))
        for copies, recorders in zip(
            self._copies[:num_microbatches], self._recorders, strict=False
        ):
            for place, (_, metric) in enumerate(self._roots):
                if _has_grown(metric, copies[place]):
                    recorders[place] = self._renew(copies, place)
                for part in _parts(copies[place]):
                    part.reset()
                    part._forward_cache = None

    def _renew(self, copies: list[nn.Module], place: int) -> CallRecorder:
        """Make the copy of a metric for one microbatch, and what watches over it."""
        name, metric = self._roots[place]
        copy = copies[place] = self._copy(metric)
        return CallRecorder(name, copy, is_mergeable=_is_mergeable(metric))

    def _of(self, microbatch: int) -> dict[nn.Module, nn.Module]:
        """Copies for one microbatch, by the metric they stand in for.

        The dictionary holds only until a metric changes: its hash is made of its state.
        """
        copies = self._copies[microbatch]
        return {metric: copy for (_, metric), copy in zip(self._roots, copies, strict=True)}

    def original(self, copy: Metric) -> Metric:
        """Return the metric that a copy stands in for (or the metric itself, if it is no copy)."""
        for copies in (*self._copies, self._lent or ()):
            for (_, metric), root in zip(self._roots, copies, strict=False):
                for original, part in zip(_parts(metric), _parts(root), strict=True):
                    if part is copy:
                        return original
        return copy

    def _merge(self, shares: Sequence[float]) -> None:
        """Bring what the copies have seen into the metrics."""
        for place, (name, metric) in enumerate(self._roots):
            copies = [self._copies[index][place] for index in range(len(shares))]
            recorders = [self._recorders[index][place] for index in range(len(shares))]
            if any(recorder.calls for recorder in recorders):
                replay_calls(name, metric, recorders, shares=shares)
                continue
            used = [copy for copy in copies if any(p._update_count for p in _parts(copy))]
            if used:
                for part, *part_copies in zip(_parts(metric), *map(_parts, used), strict=True):
                    _merge(part, part_copies)

    def _copy(self, metric: nn.Module) -> nn.Module:
        copy = _copy(metric)
        if not self._in_place:
            for part in _parts(copy):
                _follow_arguments(part)
        return copy


def _metric_roots(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Metrics and collections of metrics with their names, the outermost ones only."""
    for name, child in module.named_children():
        if isinstance(child, (Metric, MetricCollection, MetricTracker)):
            yield path + name, child
        else:
            yield from _metric_roots(child, f"{path}{name}.")


def _parts(metric: nn.Module) -> list[Metric]:
    """Return all metric objects in a metric, wrapper or collection, itself included."""
    return [part for part in metric.modules() if isinstance(part, Metric)]


def _has_grown(metric: nn.Module, copy: nn.Module) -> bool:
    """Say whether a metric has other parts than its copy: a tracker has one more every epoch."""
    return len(_parts(metric)) != len(_parts(copy))


def _copy(metric: nn.Module) -> nn.Module:
    """Copy a metric, without cached results (they may hang on a graph, which cannot be copied)."""
    caches = [(part, part._forward_cache, part._computed) for part in _parts(metric)]
    try:
        for part, _, _ in caches:
            part._forward_cache = part._computed = None
        copy = deepcopy(metric)
    finally:
        for part, forward_cache, computed in caches:
            part._forward_cache, part._computed = forward_cache, computed
    if isinstance(copy, MetricCollection):
        # Whether two metrics share a state is guessed from their first values: not from a part of
        # a batch.
        copy._enable_compute_groups = False
        copy._groups_checked = False
        copy._groups = {}
    return copy


def _is_mergeable(metric: nn.Module) -> bool:
    """Say whether all states of a metric follow from those of parts of a batch."""
    return all(
        part.full_state_update is False
        and not part.dist_sync_on_step
        and part._defaults  # else it is a wrapper
        and all(reduction in _EXACT_REDUCTIONS for reduction in part._reductions.values())
        for part in _parts(metric)
    )


@torch.no_grad()
def _merge(metric: Metric, copies: list[Metric]) -> None:
    """Add what the copies have seen to the metric, as one call of `update` or `forward` would."""
    for copy in copies:
        copy.cpu()
    batch, *others = copies
    for copy in others:
        copy.merge_state(batch)  # what comes in counts as the earlier
        batch = copy
    called_forward = any(copy._forward_cache is not None for copy in copies)
    if called_forward:
        batch._computed = None
        batch._update_count = copies[0]._update_count
        metric._forward_cache = batch.compute()
    if metric._update_count:
        batch.merge_state(metric)
    for state in metric._defaults:
        value = getattr(batch, state)
        # A list of its own: the copy's is emptied in place when the copy is reset.
        setattr(metric, state, list(value) if isinstance(value, list) else value)
    metric._update_count += copies[0]._update_count
    metric._computed = None


def _follow_arguments(metric: Metric) -> None:
    """Have a metric compute where its arguments are.

    Elements of list states stay where they are until something is computed from them.
    """

    def placed(method: Callable[..., Any], *, lists: bool) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            device = tensors[0].device if tensors else metric.device
            if lists or device != metric.device:
                _move(metric, device, lists=lists)
            return method(*args, **kwargs)

        return call

    metric.forward = placed(metric.forward, lists=False)  # type: ignore[method-assign]
    metric.update = placed(metric.update, lists=False)  # type: ignore[method-assign]
    metric.compute = placed(metric.compute, lists=True)  # type: ignore[method-assign]


def _move(metric: Metric, device: torch.device, *, lists: bool) -> None:
    """Move a metric's tensors, and the elements of its list states only if `lists`."""
    kept: list[tuple[Metric, str, Any]] = []
    if not lists:
        for part in _parts(metric):
            for state in part._defaults:
                value = getattr(part, state)
                if isinstance(value, list):
                    kept.append((part, state, value))
                    setattr(part, state, [])
    metric.to(device)
    for part, state, value in kept:
        setattr(part, state, value)


_NOT_HANDED_OVER = frozenset(
    (*(vars(nn.Module()).keys() - {"_buffers"}), "forward", "update", "compute", "_defaults")
)
"""Attributes of a metric that belong to the object and not to what it has seen."""


def _hand_over(source: nn.Module, target: nn.Module) -> None:
    """Give one metric's state, of whatever kind, to its copy or back; tensors go to the host."""
    for giver, taker in zip(_parts(source), _parts(target), strict=True):
        for name, value in vars(giver).items():
            if name not in _NOT_HANDED_OVER and not callable(value):
                vars(taker)[name] = pytree.tree_map_only(Tensor, Tensor.cpu, value)
        taker._device = torch.device("cpu")
