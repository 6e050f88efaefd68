"""Calls of metrics in several microbatches, made into the one call of the full batch.

Some metrics cannot be merged: what they hold after two updates with parts of a batch does not
follow from what each part alone gives (`full_state_update`, wrappers, states that are averaged).
Their calls are noted, and when the step is done the metric itself gets what one device would have
given it. So are calls with nothing but real numbers (the loss, say), of any metric: such a number
counts as much as its microbatch does in the loss, not as one of many.

```
microbatch 0   metric(p0, t0) ──┐
microbatch 1   metric(p1, t1) ──┼──▶  metric(cat(p0, p1, p2), cat(t0, t1, t2))
microbatch 2   metric(p2, t2) ──┘
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.logging import weighted_mean

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
