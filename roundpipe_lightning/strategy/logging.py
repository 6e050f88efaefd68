"""`self.log` inside steps: recorded where they run, replayed once in the main thread.

Lightning's `log` is not thread-safe, takes every call for a batch of its own, and keeps values
where they are, on any worker's device. So each microbatch writes its calls into a `LogRecorder`,
and when the step is done `replay_logs` makes of the calls of all microbatches the calls that one
device would have made on the full batch, with values on the host:

| `reduce_fx` | merged value |
|---|---|
| mean | mean, weighted by `batch_size=` where the user gave one, else by the shares of the loss |
| sum, min, max | sum, minimum, maximum |
| whatever, but the value *is* the loss | as the loss: mean weighted by the shares |
| whatever, but the value is a `torchmetrics.Metric` | the metric, its states merged before |

Lightning looks for the number of samples in the batch itself when `self.log` is called. A step that
has taken something out of its batch (`batch.pop("text")`) has taken it out of a microbatch, or of a
copy on a device; on one device Lightning would not have found it any more (`LoggedBatch`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy import compat

_MEANS = (torch.mean, "mean", "avg")


@dataclass(frozen=True, kw_only=True)
class LogCall:
    """One call of `self.log`.

    Attributes:
        name: The key.
        value: A number, a tensor (a copy) or a metric.
        arguments: The other arguments that were given.
    """

    name: str
    value: Any
    arguments: dict[str, Any]


class LogRecorder:
    """Stands in for `self.log` on the view of one microbatch.

    Args:
        needs_size: Whether Lightning refuses calls without `batch_size`, as it does where the step
            fetches its batches itself.
    """

    def __init__(self, *, needs_size: bool = False) -> None:
        self.calls: list[LogCall] = []
        self._needs_size = needs_size

    def __call__(self, name: str, value: Any, *args: Any, **arguments: Any) -> None:
        """Remember a call; the parameters are those of `LightningModule.log`."""
        if isinstance(value, Tensor):
            value = value.detach().clone()
        arguments.update(zip(_POSITIONAL, args, strict=False))
        if self._needs_size and arguments.get("batch_size") is None:
            raise MisconfigurationException(
                "With `def training_step(self, dataloader_iter)`, `self.log(..., batch_size=...)` "
                "should be provided."
            )
        self.calls.append(LogCall(name=name, value=value, arguments=arguments))


class OwnLog:
    """The module's own `log`, where a step gets past its view: recorded there, too.

    A function that was put onto the module, such as `module.training_step = wrapped`, knows the
    module and not a microbatch's view of it.

    Args:
        module: The user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._here = threading.local()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Let calls from the threads of microbatches go to their recorders."""
        attributes = vars(self._module)
        before = {"log": attributes["log"]} if "log" in attributes else {}
        own = self._module.log

        def log(*arguments: Any, **options: Any) -> None:
            getattr(self._here, "recorder", own)(*arguments, **options)

        attributes["log"] = log
        try:
            yield
        finally:
            del attributes["log"]
            attributes.update(before)

    @contextmanager
    def recording_into(self, recorder: Callable[..., None]) -> Iterator[None]:
        """Name the recorder of the microbatch that this thread runs."""
        self._here.recorder = recorder
        try:
            yield
        finally:
            del self._here.recorder


_POSITIONAL = (
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "enable_graph",
    "sync_dist",
    "sync_dist_group",
    "add_dataloader_idx",
    "batch_size",
    "metric_attribute",
    "rank_zero_only",
)
"""Parameters of `LightningModule.log` after the value, in their order."""


def replay_logs(
    recorders: Sequence[LogRecorder],
    *,
    shares: Sequence[float],
    losses: Sequence[Tensor | None],
    log: Callable[..., None],
    metric_of: Callable[[Metric], Metric],
) -> None:
    """Make the calls that one device would have made.

    Args:
        recorders: One per microbatch.
        shares: The microbatches' shares of the loss.
        losses: Their losses, on the host.
        log: The original `LightningModule.log`; called in the order of the first calls.
        metric_of: The module's own metric for the stand-in that a microbatch logged.
    """
    merged: dict[tuple[str, int], dict[int, LogCall]] = {}
    for microbatch, recorder in enumerate(recorders):
        times: dict[str, int] = {}
        for call in recorder.calls:
            time = times[call.name] = times.get(call.name, -1) + 1
            merged.setdefault((call.name, time), {})[microbatch] = call
    for calls in merged.values():
        first = next(iter(calls.values()))
        if isinstance(first.value, Metric):
            log(first.name, metric_of(first.value), **first.arguments)
        elif not isinstance(first.value, (Tensor, Number)):
            log(first.name, first.value, **first.arguments)  # Lightning says what is wrong with it
        else:
            value, arguments = _merge(calls, shares=shares, losses=losses)
            log(first.name, value, **arguments)


def _merge(
    calls: dict[int, LogCall], *, shares: Sequence[float], losses: Sequence[Tensor | None]
) -> tuple[Any, dict[str, Any]]:
    """Make one call's value and arguments of the same call in several microbatches."""
    arguments = dict(next(iter(calls.values())).arguments)
    sizes = [call.arguments.get("batch_size") for call in calls.values()]
    arguments["batch_size"] = None if None in sizes else sum(sizes)
    values = [
        call.value.cpu() if isinstance(call.value, Tensor) else call.value
        for call in calls.values()
    ]
    if len(values) == 1:
        return values[0], arguments
    own_shares = [shares[microbatch] for microbatch in calls]
    if _are_the_losses(values, [losses[microbatch] for microbatch in calls]):
        return weighted_mean(values, weights=own_shares), arguments
    reduce_fx = arguments.get("reduce_fx", "mean")
    if reduce_fx not in _MEANS:
        raise ConfigurationError(
            f"self.log(..., reduce_fx={reduce_fx!r}) with microbatching='step': microbatches are "
            "put together as means. Set microbatching='blocks', or leave it out."
        )
    weights = own_shares if None in sizes else [float(size or 0) for size in sizes]
    return weighted_mean(values, weights=weights), arguments


def weighted_mean(values: Sequence[Any], *, weights: Sequence[float]) -> Any:
    """Mean of numbers or tensors; equal values give exactly that value.

    What has no weight has no say, even if it is not a number: the loss of a microbatch in which
    there is nothing to predict, say.

    Args:
        values: At least one; tensors of one shape, on the host.
        weights: As many, not all zero.

    Returns:
        A tensor of at least float32 precision, or a float if `values` are numbers.
    """
    if any(weights):
        values = [value for value, weight in zip(values, weights, strict=True) if weight]
        weights = [weight for weight in weights if weight]
    first = values[0]
    exact = [_as_float64(value) for value in values]
    if all(torch.equal(value, exact[0]) for value in exact):
        return first
    total = float(sum(weights))
    shares = [float(weight) / total if total else 1 / len(values) for weight in weights]
    parts = [value * share for value, share in zip(exact, shares, strict=True)]
    return _like(first, torch.stack(parts).sum(0), at_least=torch.float32)


def _like(first: Any, result: Tensor, *, at_least: torch.dtype | None = None) -> Any:
    if not isinstance(first, Tensor):
        return result.item()
    return result.to(torch.promote_types(first.dtype, at_least) if at_least else first.dtype)


def _as_float64(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)


def _are_the_losses(values: Sequence[Any], losses: Sequence[Tensor | None]) -> bool:
    return all(
        loss is not None and torch.equal(_as_float64(value), _as_float64(loss))
        for value, loss in zip(values, losses, strict=True)
    )


class LoggedBatch:
    """Follows what a step takes out of its batch.

    Args:
        batch: On the host, as hooks are given it; it is not changed.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._left = batch

    def look_at(self, used: Any) -> None:
        """Look at a microbatch, or at a copy of the batch, after its step.

        Args:
            used: What the step was called with.
        """
        self._left = _left_of(self._batch, used)

    def show_rest_to(self, module: LightningModule) -> None:
        """Let Lightning look for the number of samples in what is left, until the next batch."""
        results = compat.step_results(module.trainer)
        if results is not None and results.batch is self._batch:
            results.batch = self._left


def _left_of(batch: Any, used: Any) -> Any:
    """Return a batch without the entries of mappings that `used` has no more."""
    if not isinstance(batch, Mapping) or not isinstance(used, Mapping):
        return batch
    left = {key: _left_of(value, used[key]) for key, value in batch.items() if key in used}
    same = len(left) == len(batch) and all(left[key] is batch[key] for key in left)
    return batch if same else left
