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
is given mere numbers is called again with the arguments of all microbatches:

```
microbatch 0   metric(p0, t0) ──┐
microbatch 1   metric(p1, t1) ──┼──▶  metric(cat(p0, p1, p2), cat(t0, t1, t2))
microbatch 2   metric(p2, t2) ──┘
```
"""

# torchmetrics has no public face for a metric's states, nor for how often it was updated.
# ruff: noqa: SLF001

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
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

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.logging import weighted_mean

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


# Calls that are made again with the arguments of all microbatches -------------------------------

_READS_THE_PAST = ("compute", "reset")
_UPDATES = ("forward", "update")


@dataclass(frozen=True, kw_only=True)
class MetricCall:
    """One call that user code made in a microbatch.

    Attributes:
        path: Which part of the metric was called; empty for all of it.
        method: `forward` or `update`.
        arguments: Leaves of positional and keyword arguments; tensors on the host.
        versions: How often each had been written into; None for what is no tensor.
        form: The containers around the leaves.
    """

    path: str
    method: str
    arguments: list[Any]
    versions: list[int | None]
    form: pytree.TreeSpec


class CallRecorder:
    """Watches over the copy of a metric that a microbatch uses.

    Args:
        name: The metric's name in the user's module.
        copy: The copy.
        is_mergeable: Whether the copy's states can be merged, so that not all calls are noted.

    Attributes:
        calls: Those that were noted.
        has_other_calls: Whether there were others, which the copy's states tell of.
    """

    def __init__(self, name: str, copy: nn.Module, *, is_mergeable: bool) -> None:
        self._name = name
        self._is_mergeable = is_mergeable
        self._open = False
        self._inside = False
        self.calls: list[MetricCall] = []
        self.has_other_calls = False
        for path, part in copy.named_modules():
            if isinstance(part, (Metric, MetricCollection)):
                for method in (*_UPDATES, *_READS_THE_PAST):
                    setattr(part, method, self._watched(path, getattr(part, method)))

    def open(self) -> None:
        """Begin: user code has the copy."""
        self.calls, self.has_other_calls = [], False
        self._open, self._inside = True, False

    def close(self) -> None:
        """End: whoever calls it now is the strategy."""
        self._open = False

    def _watched(self, path: str, method: Callable[..., Any]) -> Callable[..., Any]:
        name = method.__name__

        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._open or self._inside:
                return method(*args, **kwargs)
            if name in _READS_THE_PAST:
                raise ConfigurationError(_PART_ONLY.format(name=self._name, method=name))
            if not self._is_mergeable or _has_only_reals(args, kwargs):
                self.calls.append(_noted(path, name, args, kwargs))
            else:
                self.has_other_calls = True
            self._inside = True
            try:
                return method(*args, **kwargs)
            finally:
                self._inside = False

        return call


_PART_ONLY = (
    "training_step calls {method}() of the metric {name!r}, but each of several microbatches has a "
    "copy of the metric, which has seen nothing but that microbatch. Log the metric itself "
    "(self.log({name!r}, self.{name})), call {method}() in on_train_batch_end or "
    "on_train_epoch_end, or set num_microbatches=1."
)


def _has_only_reals(args: Any, kwargs: Any) -> bool:
    leaves = pytree.tree_leaves((args, kwargs))
    return bool(leaves) and all(
        leaf.dim() == 0 and leaf.is_floating_point()
        if isinstance(leaf, Tensor)
        else isinstance(leaf, float)
        for leaf in leaves
    )


def _noted(path: str, method: str, args: Any, kwargs: Any) -> MetricCall:
    leaves, form = pytree.tree_flatten((args, kwargs))
    kept = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return MetricCall(
        path=path,
        method=method,
        arguments=kept,
        versions=[leaf._version if isinstance(leaf, Tensor) else None for leaf in kept],
        form=form,
    )


def replay_calls(
    name: str,
    metric: nn.Module,
    recorders: Sequence[CallRecorder],
    *,
    shares: Sequence[float],
) -> None:
    """Make on a metric the calls that one device would have made.

    Args:
        name: The metric's name in the user's module.
        metric: The metric.
        recorders: One per microbatch.
        shares: The microbatches' shares of the loss: what numbers are averaged by.

    Raises:
        ConfigurationError: The arguments of the microbatches cannot be put together.
    """
    if any(recorder.has_other_calls for recorder in recorders):
        raise ConfigurationError(
            f"training_step gives the metric {name!r} numbers in one call and samples in another, "
            "which cannot be put together over microbatches. Use a metric for each of the two, or "
            "set num_microbatches=1."
        )
    merged: dict[tuple[str, str, int], list[tuple[float, MetricCall]]] = {}
    for share, recorder in zip(shares, recorders, strict=True):
        times: Counter[tuple[str, str]] = Counter()
        for call in recorder.calls:
            key = (call.path, call.method)
            merged.setdefault((*key, times[key]), []).append((share, call))
            times[key] += 1
    parts = dict(metric.named_modules())
    for (path, method, _), calls in merged.items():
        try:
            args, kwargs = _arguments_of_the_batch(calls)
        except ValueError as error:
            raise ConfigurationError(
                f"The metric {name!r} ({type(metric).__name__}) was called in training_step, but "
                f"its states cannot be merged over microbatches, and neither can the arguments of "
                f"{method}(): {error}. Give it one value per sample, update it in "
                "on_train_batch_end from what training_step returns, or set num_microbatches=1."
            ) from error
        getattr(parts[path], method)(*args, **kwargs)


def _arguments_of_the_batch(calls: Sequence[tuple[float, MetricCall]]) -> Any:
    """Put the arguments of one call together.

    Raises:
        ValueError: They do not fit together; the message says which.
    """
    first = calls[0][1]
    if any(call.form != first.form for _, call in calls):
        raise ValueError("they are not the same ones in every microbatch")
    shares = [share for share, _ in calls]
    leaves = []
    for place in range(len(first.arguments)):
        for _, call in calls:
            leaf, version = call.arguments[place], call.versions[place]
            if version is not None and leaf._version != version:
                raise ValueError("training_step wrote into one after the call")
        leaves.append(_joined([call.arguments[place] for _, call in calls], shares))
    return pytree.tree_unflatten(leaves, first.form)


def _joined(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """Return a value of the batch from those of its microbatches.

    Raises:
        ValueError: There is no rule for it.
    """
    first = values[0]
    if isinstance(first, Tensor):
        if first.dim() and all(v.shape[1:] == first.shape[1:] for v in values):
            return torch.cat(list(values))
        if first.dim() == 0 and all(v.dim() == 0 for v in values):
            return _number(values, shares)
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise ValueError(f"tensors of shapes {shapes} cannot be joined along their first dimension")
    return _number(values, shares)


def _number(values: Sequence[Any], shares: Sequence[float]) -> Any:
    """Return the one value there is, or the mean of real numbers."""
    first = values[0]
    if all(value is first or value == first for value in values):
        return first
    is_real = first.is_floating_point() if isinstance(first, Tensor) else isinstance(first, float)
    if is_real:
        return weighted_mean(values, weights=shares)
    raise ValueError(f"{', '.join(str(value) for value in values)} differ")


# Where metrics are: in host memory, as submodules; and what else is found -----------------------


def bring_home(name: str, metric: nn.Module) -> None:
    """Bring a metric to the host, where all the module's state is.

    Args:
        name: Its name in the user's module.
        metric: The metric, or a collection.

    Raises:
        ConfigurationError: It is on the meta device, and has no values.
    """
    devices = {part.device.type for part in metric.modules() if isinstance(part, Metric)}
    if "meta" in devices:
        raise ConfigurationError(
            f"The metric {name!r} is on the meta device, where it has no values. Make it without "
            "device='meta': metrics stay in host memory, and steps on a device get copies there."
        )
    if not devices <= {"cpu"}:
        metric.to("cpu")


class UnseenMetrics:
    """Metrics that a module keeps in lists and dicts, where no one finds them.

    PyTorch does not know them as submodules, so neither Lightning nor the strategy can stand copies
    in for them.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        known = {id(part) for part in module.modules()}
        self._unseen = [(n, m) for n, m in _in_containers(module) if id(m) not in known]
        self._owner = type(module).__name__

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say with an error about tensors on several devices that it may come from such a metric.

        Raises:
            ConfigurationError: In place of that error.
        """
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            is_metrics = "different devices in metric calculation" in text
            if not is_metrics and not (self._unseen and "all tensors to be on" in text):
                raise
            raise ConfigurationError(
                f"A metric met tensors of another device: {self._names()}. Assign it to an "
                "attribute of the module, or keep it in nn.ModuleList, nn.ModuleDict or "
                "MetricCollection; it is then found, and computes where its arguments are. Leave "
                ".to(device) out."
            ) from error

    def _names(self) -> str:
        return _words(self._unseen) or f"one that {self._owner} does not have as a submodule"

    @contextmanager
    def guarded(self, metrics: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
        """Refuse that microbatches, which run at once, update what has no copies.

        Args:
            metrics: The metrics that have copies; these must not be updated themselves.

        Raises:
            ConfigurationError: At the end, naming what was updated.
        """
        watched = [*self._unseen]
        for name, metric in metrics:
            watched += [(name, part) for part in metric.modules() if isinstance(part, Metric)]
        before = [metric._update_count for _, metric in watched]
        yield
        pairs = zip(watched, before, strict=True)
        updated = [place for place, count in pairs if place[1]._update_count != count]
        if updated:
            raise ConfigurationError(
                f"training_step updated {_words(updated)} past the copy that each microbatch has. "
                "Use metrics as attributes of the module (self.metric), or keep them in "
                "nn.ModuleList, nn.ModuleDict or MetricCollection instead of a list or a dict, or "
                "set num_microbatches=1."
            )


def _words(metrics: Sequence[tuple[str, Metric]]) -> str:
    return ", ".join(f"{name} ({type(metric).__name__})" for name, metric in metrics)


def _in_containers(module: nn.Module) -> Iterator[tuple[str, Metric]]:
    """Find metrics in the lists, tuples and dicts that are attributes of a module or a child."""
    for path, part in module.named_modules():
        if isinstance(part, Metric):
            continue
        for attribute, value in vars(part).items():
            place = f"{path}.{attribute}" if path else attribute
            if attribute.startswith("_") and attribute in vars(nn.Module()):
                continue
            if isinstance(value, (list, tuple)):
                items = [(f"{place}[{index}]", item) for index, item in enumerate(value)]
            elif isinstance(value, Mapping):
                items = [(f"{place}[{key!r}]", item) for key, item in value.items()]
            else:
                continue
            yield from ((name, item) for name, item in items if isinstance(item, Metric))
