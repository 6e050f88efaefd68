"""`torchmetrics` objects inside steps: lent to the step, on the device where it computes.

A metric accumulates by changing its own attributes, and lives in host memory, while its arguments
may be on a device. So a step on the whole batch is *lent* a copy with the metric's state, and the
state is brought back afterwards. On CPU workers it is lent the metric itself. Where a step runs
once per microbatch, at the same time, its metrics are refused.
"""

# torchmetrics has no public face for a metric's states.
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from roundpipe_lightning.errors import ConfigurationError


class LentMetrics:
    """The metrics of a module, and their copies on a device.

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
        self._copies: list[nn.Module] = []
        self._unseen = [name for name, _ in _in_containers(module)]
        for name, metric in self._roots:
            bring_to_host(name, metric)

    @contextmanager
    def lent(self) -> Iterator[Mapping[nn.Module, nn.Module]]:
        """Lend every metric, state and all, to one step on the whole batch.

        Yields:
            What stands in for each metric.
        """
        originals = [metric for _, metric in self._roots]
        if self._in_place:
            yield {metric: metric for metric in originals}
            return
        if not self._copies:
            self._copies = [_copy(metric) for metric in originals]
        for place, metric in enumerate(originals):
            if len(_parts(metric)) != len(_parts(self._copies[place])):  # a tracker, every epoch
                self._copies[place] = _copy(metric)
        for metric, copy in zip(originals, self._copies, strict=True):
            _hand_over(metric, copy)
        with self._unseen_explained():
            yield dict(zip(originals, self._copies, strict=True))
        for metric, copy in zip(originals, self._copies, strict=True):
            _hand_over(copy, metric)

    def of_step(
        self, num_microbatches: int
    ) -> AbstractContextManager[Mapping[nn.Module, nn.Module]]:
        """Lend every metric to a step, if that runs once."""
        if num_microbatches == 1:
            return self.lent()
        return nullcontext({metric: _RefusedMetric(name) for name, metric in self._roots})

    def original(self, copy: Metric) -> Metric:
        """Return the metric that a copy stands in for (or the metric itself, if it is no copy)."""
        for (_, metric), root in zip(self._roots, self._copies, strict=False):
            for original, part in zip(_parts(metric), _parts(root), strict=True):
                if part is copy:
                    return original
        return copy

    @contextmanager
    def _unseen_explained(self) -> Iterator[None]:
        """Say with an error about tensors on several devices that it may come from a metric.

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
            names = ", ".join(self._unseen) or "one that the module does not have as a submodule"
            raise ConfigurationError(
                f"A metric met tensors of another device: {names}. Assign it to an attribute of "
                "the module, or keep it in nn.ModuleList, nn.ModuleDict or MetricCollection; it is "
                "then found, and computes where its arguments are. Leave .to(device) out."
            ) from error


class _RefusedMetric(nn.Module):
    """Stands for a metric where the step runs once per microbatch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigurationError(
            f"training_step uses the metric {self._name!r}, but microbatching='step' runs it once "
            "per microbatch, all at the same time. Set microbatching='blocks', or leave it out; or "
            "update the metric in on_train_batch_end."
        )

    update = compute = reset = forward


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
    for part in _parts(copy):
        _follow_arguments(part)
    return copy


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


def bring_to_host(name: str, metric: nn.Module) -> None:
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
