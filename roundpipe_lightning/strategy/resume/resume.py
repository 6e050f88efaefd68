"""State that a checkpoint needs beyond Lightning's own, so that a resumed run is the same run.

| part | saved | restored |
|---|---|---|
| random generators | as they stand between two batches | before the first batch |
| position in the data | batches trained on, and how the order was drawn | at the first batch |
| a partly filled accumulation window | its gradients | before the first batch |
| what was logged | unfinished means, the latest values, metrics' states | before the first batch |
| the place in the loop | which hook was running | what followed it is done first |
| the end | whether the training was asked to stop, its limits | what was due at the end is done |
"""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from roundpipe_lightning.checkpoint.compatibility import InexactResumeWarning, reading
from roundpipe_lightning.engine.store.block_layout import gradient_dtype
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.compat import ResultMetadata, ResultMetric, ResultSync
from roundpipe_lightning.strategy.resume.data_position import PositionedLoader, position_of
from roundpipe_lightning.strategy.resume.loops import (
    LoopPosition,
    defer_limits,
    finish_training,
    go_on,
    is_epoch_over,
    position_in_loops,
    restore_progress,
    restore_stop,
    stop_state,
)
from roundpipe_lightning.strategy.resume.randomness import (
    State,
    host_state,
    random_state,
    set_host_state,
    set_random_state,
)

_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class ResumePoint:
    """Collects and restores the state of one training beyond what Lightning saves."""

    def __init__(self) -> None:
        self._loaded: Mapping[str, Any] | None = None
        self._stateful: list[Any] = []
        self._has_gradients = False
        self._logged_before: LogSnapshot | None = None
        self._metrics: dict[str, Any] = {}
        self._before_validation: State | None = None
        self._at_validation: State | None = None
        self._quiet: Any = None
        self._positions: WeakSet[Any] = WeakSet()
        self._put_back: Callable[[], bool] | None = None
        self._latest: tuple[Trainer, Mapping[str, Any]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave the positions out: a copy of the Trainer asks for loaders of its own."""
        return {name: value for name, value in vars(self).items() if name != "_positions"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _positions=WeakSet())

    def end(self) -> None:
        self._put_limits_back()
        for position in self._positions:
            position.close()
        if self._latest is not None:  # no batch was left; a sanity check forgets what is logged
            trainer, logged = self._latest
            compat.set_latest_metrics(trainer, _clone(logged["latest"]))
            self._latest = None
        if self._quiet is not None and self._quiet in warnings.filters:
            warnings.filters.remove(self._quiet)  # type: ignore[attr-defined]  # a list in CPython
        self._quiet = None

    # Called by the strategy ----------------------------------------------------------------------

    def train_loader(self, loader: Any) -> Any:
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            return loader
        positioned = PositionedLoader(loader, waits=self._loaded is not None)
        self._positions.add(position_of(positioned))
        return positioned

    def batch_begins(self, trainer: Trainer) -> None:
        self._has_gradients = False
        self._logged_before = LogSnapshot(trainer, self._metrics)

    def gradients_were_added(self) -> None:
        self._has_gradients = True

    def sanity_check_begins(self) -> None:
        """The check before the training is about to be set up; it leaves no trace."""
        self._before_validation = host_state()

    def validation_begins(self) -> None:
        """A validation inside a training begins; its loaders have been asked for iterators."""
        if self._at_validation is not None:  # one that is run again
            set_host_state(self._at_validation)
            self._at_validation = None
        self._before_validation = host_state()

    def state(self, trainer: Trainer) -> dict[str, Any]:
        place = position_in_loops(trainer)
        combined = compat.combined_loader(trainer)
        inside_batch = place is LoopPosition.INSIDE_BATCH
        num_undone = len(getattr(compat.data_fetcher(trainer), "batches", ())) + inside_batch
        loaders = [] if combined is None else combined.flattened
        positions = [position_of(loader) for loader in loaders]
        is_over = is_epoch_over(trainer) and not inside_batch
        before: State | None = None  # the host's generators, where the part that runs is repeated
        if trainer.sanity_checking or place is LoopPosition.VALIDATION:
            before = self._before_validation
        elif inside_batch:
            found = (position.before_fetch(1) for position in positions if position is not None)
            before = next(filter(None, found), None)
        logged = self._logged_before
        if not inside_batch or logged is None:
            if trainer.training and compat.epoch_results(trainer):
                compat.merge_logged(trainer)
            logged = LogSnapshot(trainer, metrics_of(trainer.lightning_module))
        return {
            "place": place.value,
            "random_state": {**random_state(), **(before or {})},
            "data": [
                None if position is None else position.state(num_ahead=num_undone, is_over=is_over)
                for position in positions
            ],
            "consumed": compat.consumed_loaders(combined),
            "epoch": trainer.fit_loop.epoch_progress.current.processed,  # type: ignore[attr-defined]
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "gradients": self._gradients(trainer, place),
            "is_exact": not (inside_batch and self._has_gradients),
            "logged": logged.state(),
            "stop": stop_state(trainer),
        }

    def _gradients(self, trainer: Trainer, place: LoopPosition) -> dict[str, Tensor]:
        module = trainer.lightning_module
        progress: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        inside = compat.is_accumulating(trainer)
        if place is LoopPosition.INSIDE_BATCH:  # those of the batches before it
            inside = progress.processed % trainer.accumulate_grad_batches != 0
        if module.automatic_optimization and (not inside or not progress.ready):
            return {}
        named = module.named_parameters()
        return {name: value.grad for name, value in named if value.grad is not None}

    def load(self, trainer: Trainer, state: Mapping[str, Any], loops: Mapping[str, Any]) -> None:
        """Restore what can be before the data is set up: of what `state` returned."""
        set_random_state(state["random_state"])
        self._loaded, self._latest = state, (trainer, state["logged"])
        fit_loop = loops.get("fit_loop", {}).get("state_dict", {})
        self._stateful = list(fit_loop.get("combined_loader", ()))
        restore_progress(trainer, LoopPosition(state["place"]))
        is_asked = restore_stop(trainer, state.get("stop", {}))
        self._put_back = defer_limits(trainer, LoopPosition(state["place"]), is_asked=is_asked)
        if not state["is_exact"]:
            warnings.warn(
                "The checkpoint was written inside a batch, after its gradients had been added: "
                "the resumed run trains on that batch again and may differ from one that was not "
                "stopped. Save in on_train_batch_end, on_validation_end or on_train_epoch_end.",
                category=InexactResumeWarning,
                stacklevel=2,
            )

    def training_begins(self, trainer: Trainer) -> None:
        """Restore the rest, when the data is set up and before the first batch."""
        state, self._loaded, self._latest = self._loaded, None, None
        self._metrics = metrics_of(trainer.lightning_module)
        combined = compat.combined_loader(trainer)
        assert combined is not None
        ends, is_over, validates = self._put_limits_back(), True, False
        if state is not None:
            place = LoopPosition(state["place"])
            is_over = place is LoopPosition.EPOCH_END
            with reading("entry 'roundpipe'"):
                named = dict(trainer.lightning_module.named_parameters())
                for name in state["gradients"].keys() & named.keys():
                    dtype = gradient_dtype(named[name])
                    named[name].grad = state["gradients"][name].to(named[name].device, dtype)
                self._place_data(trainer, state)
                if place in (
                    LoopPosition.BATCH_END,
                    LoopPosition.VALIDATION,
                    LoopPosition.VALIDATION_END,
                ):
                    trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
                set_log_state(trainer, state["logged"])
            validates = go_on(trainer, place)
            set_random_state(state["random_state"])
            if place is LoopPosition.VALIDATION:
                self._at_validation = host_state()
        # The user sees the loaders that were given.
        own = [loader.loader if position_of(loader) else loader for loader in combined.flattened]
        compat.set_loaders(combined, own)
        if ends and not is_over:
            finish_training(trainer, validates=validates)

    def _put_limits_back(self) -> bool:
        put_back, self._put_back = self._put_back, None
        return put_back is not None and put_back()

    def _place_data(self, trainer: Trainer, state: Mapping[str, Any]) -> None:
        combined = compat.combined_loader(trainer)
        assert combined is not None
        positions = [position_of(loader) for loader in combined.flattened]
        found = [position for position in positions if position is not None]
        for member in found:
            member.siblings = found
        begun = any(member.is_open for member in found)
        for position, place in zip(positions, state["data"], strict=False):
            if position is not None and place is not None:
                position.resume(place, epoch=state["epoch"])
        # Lightning loads the states of loaders inside an epoch only, and not of early ones.
        pending = compat.unloaded_states(trainer)
        begins = found and not any("constructed" in place for place in state["data"] if place)
        if begun and begins and compat.iterate_when_epoch_begins(trainer):
            combined.reset()  # what was fetched ahead comes after draws of on_train_epoch_start
            for member in found:
                member.close()
        elif begun or pending:  # set up before the checkpoint was loaded, or read ahead
            combined.reset()
            compat.load_loader_states(combined, self._stateful)
            pending.clear()
            iter(compat.data_fetcher(trainer))
        if len(compat.consumed_loaders(combined)) == len(state["consumed"]) > 0:
            compat.set_consumed_loaders(combined, state["consumed"])
        if all(position is not None for position in positions):
            before = list(warnings.filters)
            warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
            self._quiet = next((entry for entry in warnings.filters if entry not in before), None)


# What was logged so far in an epoch: means that are not finished yet, and the latest values.
# Lightning keeps it out of checkpoints, so that an epoch's mean over a resumed run is a mean over
# its rest, and what watches a metric (a scheduler, early stopping) finds none.

_PLAIN = """
    fx name prog_bar logger on_step on_epoch enable_graph add_dataloader_idx dataloader_idx
    metric_attribute
""".split()


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
        self._results = {
            key: {**vars(result), "_forward_cache": cache if result.is_tensor else _clone(cache)}
            for key, result in results.items()
            for cache in [result._forward_cache]  # noqa: SLF001
        }
        self._metrics = _metric_states(trainer, metrics)

    def state(self) -> dict[str, Any]:
        results = {key: _result_state(then) for key, then in self._results.items()}
        return {"latest": _clone(self._latest), "results": results, "metrics": self._metrics}


def set_log_state(trainer: Trainer, state: Mapping[str, Any]) -> None:
    compat.set_latest_metrics(trainer, _clone(state["latest"]))
    # Lightning's own value after so many batches of an epoch; on None and True it resets.
    num_batches = trainer.fit_loop.epoch_loop.batch_progress.current.completed
    goes_on = num_batches and trainer.fit_loop.restarting
    compat.set_first_loop_iter(trainer, num_batches == 1 if goes_on else None)
    metrics = metrics_of(trainer.lightning_module)
    results = compat.epoch_results(trainer)
    for key, saved in state["results"].items():
        result = _result(saved, trainer, metrics)
        if result is not None:
            results[key] = result
    _set_metric_states(metrics, state["metrics"])


def _result_state(then: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `_result` takes, of the attributes of a result."""
    meta, cache = then["meta"], then["_forward_cache"]
    is_torchs = getattr(torch, meta.reduce_fx.__name__, None) is meta.reduce_fx
    return {
        "meta": {name: getattr(meta, name) for name in _PLAIN},
        "reduce_fx": ["torch" if is_torchs else "python", meta.reduce_fx.__name__],
        "sync": {"should": meta.sync.should, "rank_zero_only": meta.sync.rank_zero_only},
        "is_tensor": then["is_tensor"],
        "has_reset": then["has_reset"],
        "update_count": then["_update_count"],
        "forward_cache": _clone(cache) if isinstance(cache, Tensor) else None,
        "values": {n: _clone(then[n]) for n in then["_defaults"] if then["is_tensor"]},
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
    with trainer.precision_plugin.forward_context():  # the number format that it starts anew with
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
