"""`self.log` and `torchmetrics` objects inside steps.

A step on the whole batch logs as on one device, but with values on the host. Those of a device
come with what the step returns, beside its backward pass, and are logged then (`log_noted`), or
when the step itself asks what was logged. Where a step runs once per microbatch, at the same time,
each notes its calls. When all are done, `log_means` makes the calls that one device
would have made: with means, weighted by `batch_size=` where the user gave one, else by the shares
of the loss. What *is* the loss is weighted as the loss.

A metric accumulates by changing its own attributes, and lives in host memory, while its arguments
may be on a device. So for the time of a step on the whole batch it follows its arguments, and comes
back with what the step returns. Where a step runs once per microbatch, at the same time, its
metrics are refused.
"""

from __future__ import annotations

# torchmetrics has no public face for a metric's states.
# ruff: noqa: SLF001
import inspect
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from numbers import Number
from typing import Any, NoReturn, TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

from roundpipe_lightning.errors import ConfigurationError, StepModeError
from roundpipe_lightning.strategy import compat

_MEANS = (torch.mean, "mean", "avg")
_POSITIONAL = tuple(inspect.signature(LightningModule.log).parameters)[3:]
"""Parameters of `LightningModule.log` after the value, in their order."""

LogCall: TypeAlias = tuple[str, Any, dict[str, Any]]
"""Name, value and other arguments of a call of `self.log`."""


@contextmanager
def logged_from(
    module: LightningModule, used: Any, *, before_read: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Let Lightning look for the number of samples in the batch that a step was called with.

    The step may take something out of it (`batch.pop("text")`); hooks are given another one.
    `before_read` is called when the step asks what was logged.
    """
    results = compat.step_results(module.trainer)
    if results is None:
        yield
        return
    of_step = threading.get_ident()

    def metrics(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == of_step:
            before_read()
        return type(results).metrics(results, *args, **kwargs)

    own, batch = vars(results), results.batch
    own.update(batch=used, metrics=metrics)
    try:
        yield
    finally:
        own["batch"] = batch
        del own["metrics"]


def host_log(
    module: LightningModule,
    *,
    into: list[LogCall] | None = None,
    syncs: bool = False,
    is_part: bool = False,
) -> Callable[..., None]:
    """Return what stands in for `self.log` in a step, on the whole batch or `is_part` of it.

    Args:
        into: Gets the calls, in place of Lightning; on several hosts those of means, which
            `log_means` takes over all of them.
        syncs: Whether other hosts have parts of the batch: Lightning reduces over them then.
    """
    own = module.log

    def log(name: str, value: Any, *args: Any, **arguments: Any) -> None:
        is_reduced = syncs and not isinstance(value, Metric)
        if is_reduced or into is not None:
            arguments.update(zip(_POSITIONAL, args, strict=False))
            args = ()
        is_mean = arguments.get("reduce_fx", "mean") in _MEANS
        if is_part and isinstance(value, Metric):
            _refuse(name)
        if is_part and not is_mean:
            raise StepModeError(f"{name!r} is logged with reduce_fx={arguments['reduce_fx']!r}")
        if into is not None and (not syncs or (is_reduced and is_mean)):
            into.append((name, _noted(value), arguments))
            return
        if is_reduced:
            if into is None and arguments.get("on_step"):
                raise ConfigurationError(
                    f"self.log({name!r}, on_step=True) in an evaluation on several hosts, which "
                    "may have other numbers of batches. Leave on_step out."
                )
            arguments["sync_dist"] = True
        if isinstance(value, Tensor):
            value = value.detach().cpu()
        elif isinstance(value, Metric):
            value.to("cpu")  # Lightning moves its own values to where a metric is
        own(name, value, *args, **arguments)

    return log


def _noted(value: Any) -> Any:
    if isinstance(value, Metric):
        return value, value._forward_cache
    return value.detach().clone() if isinstance(value, Tensor) else value


def log_noted(log: Callable[..., None], calls: list[LogCall]) -> None:
    """Make calls that were noted in a step on the whole batch, and forget them."""
    for name, value, arguments in calls:
        if isinstance(value, tuple):
            metric, of_call = value
            last, metric._forward_cache = metric._forward_cache, of_call
            log(name, metric, **arguments)
            metric._forward_cache = last
        else:
            log(name, value, **arguments)
    calls.clear()


def log_means(
    logged: Sequence[Sequence[LogCall]],
    *,
    shares: Sequence[float],
    losses: Sequence[Tensor | None],
    log: Callable[..., None],
    batch_size: int | None = None,
    syncs: bool = False,
    is_proven: bool = False,
) -> None:
    """Make the calls that one device would have made.

    Args:
        logged: Every microbatch's calls, their values on the host.
        losses: Their losses, on the host.
        log: The original `LightningModule.log`; called in the order of the first calls.
        batch_size: Samples of the whole batch where Lightning would look for them in a part.
        syncs: Whether other hosts log the same.
        is_proven: Whether all that is logged is known to be such a mean as the loss.
    """
    merged: dict[tuple[str, int], dict[int, tuple[Any, dict[str, Any]]]] = {}
    for microbatch, noted in enumerate(logged):
        times: dict[str, int] = {}
        for name, value, arguments in noted:
            time = times[name] = times.get(name, -1) + 1
            merged.setdefault((name, time), {})[microbatch] = value, arguments
    for (name, _), calls in merged.items():
        values = [value for value, _ in calls.values()]
        arguments = dict(next(iter(calls.values()))[1])
        sizes = [each.get("batch_size") for _, each in calls.values()]
        arguments["batch_size"] = batch_size if None in sizes else sum(sizes)
        if syncs:  # else Lightning warns; they are the same on all hosts
            arguments["sync_dist"] = True
        weights: Sequence[Any] = [shares[microbatch] for microbatch in calls]
        if not isinstance(values[0], (Tensor, Number)):
            value = values[0]  # Lightning says what is wrong with it
        else:
            of_loss = all(
                loss is not None
                and torch.equal(torch.as_tensor(value, dtype=torch.float64), loss.to(torch.float64))
                for value, loss in zip(values, [losses[index] for index in calls], strict=True)
            )
            if not (is_proven or of_loss or None in sizes):
                weights = sizes
            value = weighted_mean(values, weights=weights)
        log(name, value, **arguments)


def weighted_mean(values: Sequence[Any], *, weights: Sequence[float]) -> Any:
    """Mean of numbers or tensors; equal values give exactly that value.

    What has no weight has no say, even if it is not a number: the loss of a microbatch in which
    there is nothing to predict, say.

    Args:
        values: At least one; tensors of one shape, on the host.
        weights: As many; all zero: the values weigh the same.

    Returns:
        A tensor of at least float32 precision, or a float if `values` are numbers.
    """
    if any(weights):
        values = [value for value, weight in zip(values, weights, strict=True) if weight]
        weights = [weight for weight in weights if weight]
    first = values[0]
    exact = [torch.as_tensor(value, dtype=torch.float64) for value in values]
    if all(torch.equal(value, exact[0]) for value in exact):
        return first
    total = float(sum(weights))
    shares = [float(weight) / total if total else 1 / len(values) for weight in weights]
    mean = torch.stack([value * share for value, share in zip(exact, shares, strict=True)]).sum(0)
    if not isinstance(first, Tensor):
        return mean.item()
    return mean.to(torch.promote_types(first.dtype, torch.float32))


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
        self._module, self._in_place = module, in_place
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
    def lent(self, log: Callable[..., None], *, is_whole: bool = True) -> Iterator[None]:
        """Let metrics follow their arguments in a step on the whole batch; refuse others.

        `log` stands in for the module's own, which is on its class or was set on it by the user.
        """
        parts = [] if self._in_place and is_whole else self._parts
        do: Callable[..., None] = _follow
        if not is_whole:
            do = _refuse
        undo = [_before_use(part, partial(do, name, part)) for name, part in parts]
        before = vars(self._module).get("log")
        vars(self._module)["log"] = log
        try:
            yield
        except RuntimeError as error:
            _explain_unseen(error)
            raise
        finally:
            if before is None:
                vars(self._module).pop("log", None)
            else:
                vars(self._module)["log"] = before
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


def _bring_to_host(metric: Metric) -> None:
    metric.to("cpu")
    for name in vars(metric).keys() - _OF_EVERY_MODULE:
        vars(metric)[name] = pytree.tree_map_only(Tensor, Tensor.cpu, vars(metric)[name])


def _explain_unseen(error: RuntimeError) -> None:
    """Say with an error of torchmetrics about several devices what it takes here."""
    places = traceback.extract_tb(error.__traceback__)
    is_metrics = any(f"{os.sep}torchmetrics{os.sep}" in place.filename for place in places)
    if is_metrics and "device" in str(error):
        raise ConfigurationError(
            "A metric met tensors of another device. Assign it to an attribute of the module, or "
            "keep it in nn.ModuleList, nn.ModuleDict or MetricCollection; it is then found, and "
            "computes where its arguments are. Leave .to(device) out."
        ) from error
