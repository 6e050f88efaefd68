"""`torchmetrics` objects inside steps: kept on the host, they compute where their arguments are.

A metric accumulates by changing its own attributes, and lives in host memory, while its arguments
may be on a device. So for the time of a step on the whole batch it follows its arguments, and comes
back with what the step returns. Where a step runs once per microbatch, at the same time, its
metrics are refused.
"""

# torchmetrics has no public face for a metric's states.
# ruff: noqa: SLF001

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from roundpipe_lightning.errors import ConfigurationError, StepModeError

_OF_EVERY_MODULE = vars(nn.Module()).keys()
_HOST = torch.device("cpu")


class LentMetrics:
    """The metrics of a module, as they are used in steps.

    Args:
        module: The user's module; metrics that are added to it later are not seen.
        in_place: Whether steps compute where the metrics are, on the host.

    Raises:
        ConfigurationError: A metric is on the meta device, and has no values.
    """

    def __init__(self, module: nn.Module, *, in_place: bool) -> None:
        self._in_place = in_place
        self._roots = list(_metric_roots(module))
        for name, metric in self._roots:
            devices = {part.device.type for part in _parts(metric)}
            if "meta" in devices:
                raise ConfigurationError(
                    f"The metric {name!r} is on the meta device, where it has no values. Make it "
                    "without device='meta': metrics stay in host memory between steps."
                )
            if devices != {"cpu"}:
                metric.to("cpu")

    @property
    def metrics(self) -> Sequence[nn.Module]:
        return [metric for _, metric in self._roots]

    @contextmanager
    def lent(self, *, is_whole: bool = True) -> Iterator[None]:
        """Let metrics follow their arguments in a step on the whole batch; refuse others."""
        parts = [] if self._in_place and is_whole else self._parts
        with _unseen_explained():
            do: Callable[..., None] = _follow
            if not is_whole:
                do = _refuse
            undo = [_before_use(part, partial(do, name, part)) for name, part in parts]
            try:
                yield
            finally:
                for end in undo:
                    end()
                for _, part in parts:
                    _bring_to_host(part)

    def states(self) -> list[dict[str, Any]]:
        """Return what metrics have on devices: attributes of each of their parts, by name."""
        return [
            {
                name: value
                for name, value in vars(part).items()
                if name not in _OF_EVERY_MODULE and _is_on_device(value)
            }
            for _, part in self._parts
        ]

    def put_back(self, states: Sequence[dict[str, Any]]) -> None:
        """Set these attributes again, with their values on the host."""
        for (_, part), state in zip(self._parts, states, strict=True):
            vars(part).update(state, _device=_HOST)

    @property
    def _parts(self) -> list[tuple[str, Metric]]:
        return [(name, part) for name, metric in self._roots for part in _parts(metric)]


def _metric_roots(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, (Metric, MetricCollection, MetricTracker)):
            yield path + name, child
        else:
            yield from _metric_roots(child, f"{path}{name}.")


def _parts(metric: nn.Module) -> list[Metric]:
    return [part for part in metric.modules() if isinstance(part, Metric)]


def _is_on_device(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return any(isinstance(leaf, Tensor) and leaf.device != _HOST for leaf in leaves)


def _refuse(name: str, *_: Any, **__: Any) -> NoReturn:
    raise StepModeError(f"training_step uses the metric {name!r}")


def _follow(_: str, metric: Metric, arguments: Any, *, lists: bool) -> None:
    """Let a metric compute where its arguments are.

    Elements of list states stay where they are until something is computed from them.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
    device = tensors[0].device if tensors else metric.device
    if lists or device != metric.device:
        _move(metric, device, lists=lists)


def _before_use(metric: Metric, do: Callable[..., None]) -> Callable[[], None]:
    """Have something done before a metric is used, until what is returned is called."""

    def after(method: Callable[..., Any], *, lists: bool) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            do((args, kwargs), lists=lists)
            return method(*args, **kwargs)

        return call

    methods = {name: vars(metric)[name] for name in ("update", "compute")}
    for name, method in methods.items():
        vars(metric)[name] = after(method, lists=name == "compute")
    # `forward` is the class's: a copy of the metric that is made meanwhile keeps its own.
    handle = metric.register_forward_pre_hook(
        lambda _, args, kwargs: do((args, kwargs), lists=False), with_kwargs=True
    )

    def end() -> None:
        handle.remove()
        vars(metric).update(methods)

    return end


def _move(metric: Metric, device: torch.device, *, lists: bool) -> None:
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


def _bring_to_host(metric: Metric) -> None:
    metric.to("cpu")
    for name in vars(metric).keys() - _OF_EVERY_MODULE:
        vars(metric)[name] = pytree.tree_map_only(Tensor, Tensor.cpu, vars(metric)[name])


@contextmanager
def _unseen_explained() -> Iterator[None]:
    """Say with an error of torchmetrics about several devices what it takes here."""
    try:
        yield
    except RuntimeError as error:
        places = traceback.extract_tb(error.__traceback__)
        is_metrics = any(f"{os.sep}torchmetrics{os.sep}" in place.filename for place in places)
        if not is_metrics or "device" not in str(error):
            raise
        raise ConfigurationError(
            "A metric met tensors of another device. Assign it to an attribute of the module, or "
            "keep it in nn.ModuleList, nn.ModuleDict or MetricCollection; it is then found, and "
            "computes where its arguments are. Leave .to(device) out."
        ) from error
