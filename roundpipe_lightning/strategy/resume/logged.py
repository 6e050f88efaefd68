"""Values logged so far in an epoch: means that are not finished yet, and the latest values.

Lightning keeps it out of checkpoints, so that an epoch's mean over a resumed run is a mean over
its rest, and what watches a metric (a scheduler, early stopping) finds none.
"""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from roundpipe_lightning.checkpoint.compatibility import InexactResumeWarning
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.compat import ResultMetadata, ResultMetric, ResultSync

_PLAIN = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)


def log_state(trainer: Trainer, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    if trainer.training and compat.epoch_results(trainer):
        compat.merge_logged(trainer)
    return LogSnapshot(trainer, metrics).state()


class LogSnapshot:
    """Snapshot of what training has logged so far, cheap enough for every batch.

    What Lightning has logged as tensors is held by reference, because it replaces tensors and
    changes none. Metric objects may change theirs, so all that may be one of those is copied.
    """

    def __init__(self, trainer: Trainer, metrics: Mapping[str, Metric]) -> None:
        results = compat.epoch_results(trainer)
        held = [*results.values(), *compat.validation_results(trainer).values()]
        latest = compat.latest_metrics(trainer)
        self._latest = latest if all(result.is_tensor for result in held) else _clone(latest)
        self._results = [(key, result, _changing(result)) for key, result in results.items()]
        self._metrics = _metric_states(trainer, metrics)

    def state(self) -> dict[str, Any]:
        results = {key: _result_state(result, then) for key, result, then in self._results}
        return {"latest": _clone(self._latest), "results": results, "metrics": self._metrics}


def set_latest(trainer: Trainer, state: Mapping[str, Any]) -> None:
    compat.set_latest_metrics(trainer, _clone(state["latest"]))


def set_log_state(trainer: Trainer, state: Mapping[str, Any]) -> None:
    set_latest(trainer, state)
    compat.set_first_loop_iter(trainer, _first_loop_iter(trainer))
    metrics = metrics_of(trainer.lightning_module)
    results = compat.epoch_results(trainer)
    for key, saved in state["results"].items():
        result = _result(saved, trainer, metrics)
        if result is not None:
            results[key] = result
    _set_metric_states(metrics, state["metrics"])


def _first_loop_iter(trainer: Trainer) -> bool | None:
    """Return Lightning's value after so many batches of an epoch; on None and True it resets."""
    num_batches = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    return num_batches == 1 if num_batches and trainer.fit_loop.restarting else None


def _changing(result: ResultMetric) -> dict[str, Any]:
    cache = result._forward_cache  # noqa: SLF001
    names = result._defaults if result.is_tensor else ()  # noqa: SLF001
    return {
        "has_reset": result.has_reset,
        "update_count": result._update_count,  # noqa: SLF001
        "forward_cache": cache if result.is_tensor else _clone(cache),
        "values": {name: getattr(result, name) for name in names},
    }


def _result_state(result: ResultMetric, changing: Mapping[str, Any]) -> dict[str, Any]:
    meta = result.meta
    module = (
        "torch" if getattr(torch, meta.reduce_fx.__name__, None) is meta.reduce_fx else "python"
    )
    cache = changing["forward_cache"]
    return {
        "meta": {name: getattr(meta, name) for name in _PLAIN},
        "reduce_fx": [module, meta.reduce_fx.__name__],
        "sync": {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": result.is_tensor,
        **_clone(changing),
        "forward_cache": _clone(cache) if isinstance(cache, Tensor) else None,
    }


def _result(
    state: Mapping[str, Any], trainer: Trainer, metrics: Mapping[str, Metric]
) -> ResultMetric | None:
    """Make a result as `self.log` would; None where its metric is gone from the module."""
    kind, name = state["reduce_fx"]
    meta = ResultMetadata(
        **state["meta"], reduce_fx=getattr(torch if kind == "torch" else builtins, name)
    )
    meta.sync = ResultSync(
        fn=trainer.strategy.reduce,
        _should=trainer.world_size > 1
        and (state["sync"]["should"] or (state["is_tensor"] and meta.fx == "training_step")),
        rank_zero_only=state["sync"]["rank_zero_only"],
    )
    result = ResultMetric(meta, state["is_tensor"])
    for attribute, value in state["values"].items():
        setattr(result, attribute, value.clone())
    if not result.is_tensor:
        metric = metrics.get(meta.metric_attribute or "")
        if metric is None:
            return None
        result.value = metric
    result.has_reset = state["has_reset"]
    result._update_count = state["update_count"]  # noqa: SLF001
    result._forward_cache = state["forward_cache"]  # noqa: SLF001
    return result


# Metric objects of the module: their states are not part of its state_dict -----------------------


def metrics_of(module: LightningModule) -> dict[str, Metric]:
    named = module.named_modules(remove_duplicate=False)
    return {name: part for name, part in named if isinstance(part, Metric)}


def _metric_states(trainer: Trainer, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """States of the module's metrics, but not of those of a validation that is in flight.

    Of several hosts each has its own; none are saved.
    """
    if trainer.world_size > 1:
        return {}
    results = compat.validation_results(trainer)
    unfinished = {id(result.value) for result in results.values() if not result.is_tensor}
    return {
        name: {"states": _clone(metric.metric_state), "update_count": metric._update_count}  # noqa: SLF001
        for name, metric in metrics.items()
        if id(metric) not in unfinished
    }


def _set_metric_states(metrics: Mapping[str, Metric], states: Mapping[str, Any]) -> None:
    if metrics and not states:
        warnings.warn(
            "The checkpoint is one of several hosts, which has no states of torchmetrics objects: "
            "what they have gathered in this epoch begins anew. Save at the end of an epoch.",
            category=InexactResumeWarning,
            stacklevel=2,
        )
    for name, saved in states.items():
        metric = metrics.get(name)
        if metric is None or set(saved["states"]) != set(metric.metric_state):
            continue  # another metric now: it begins anew
        for attribute, value in saved["states"].items():
            setattr(metric, attribute, _clone(value))
        metric._update_count = saved["update_count"]  # noqa: SLF001
        metric._computed = None  # noqa: SLF001


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _clone(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, list) else value  # metrics append, and change no entry
