"""Every private name of Lightning that this package depends on, each in one place.

No other file uses one of these names (`tests/lightning/test_compat.py` holds both ends: each
name against the installed Lightning, and the other files against this list). So an upgrade of
Lightning that renames something fails in that test and is mended here. Checked with Lightning 2.6.
"""

# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import RestartStage as _ValidationStage
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.loops.training_epoch_loop import RestartStage as _RestartStage
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_unflatten

ResultMetric = _ResultMetric
ResultMetadata = _Metadata
ResultSync = _Sync
WrappingCheckpointIO = _WrappingCheckpointIO
set_sampler_epoch = _set_sampler_epoch

# What a Trainer has, for each `get(trainer)`.
skips_backward = attrgetter("fit_loop._skip_backward")
can_stop_early = attrgetter("fit_loop._can_stop_early")
detects_anomalies = attrgetter("_detect_anomaly")
current_hook = attrgetter("lightning_module._current_fx_name")
parallel_devices = attrgetter("_accelerator_connector._parallel_devices")
combined_loader = attrgetter("fit_loop._combined_loader")
unloaded_states = attrgetter("fit_loop._combined_loader_states_to_load")
data_fetcher = attrgetter("fit_loop._data_fetcher")
step_results = attrgetter("_results")
epoch_results = attrgetter("fit_loop.epoch_loop._results")
validation_results = attrgetter("fit_loop.epoch_loop.val_loop._results")
should_update_logs = attrgetter("_logger_connector.should_update_logs")
timer_seconds = attrgetter("_duration")  # of a Timer

# The batch that runs -----------------------------------------------------------------------------


def begins_window(trainer: Trainer) -> bool:
    """Return whether the batch is the first whose gradients are accumulated."""
    return trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0


def is_accumulating(trainer: Trainer) -> bool:
    return bool(trainer.fit_loop._should_accumulate())


def check_output(output: Any) -> None:
    """Refuse what automatic optimization refuses, in its words (MisconfigurationException)."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        ClosureResult.from_training_step_output(output)


def syncs_batchnorm(strategy: Strategy) -> bool:
    return getattr(strategy, "_layer_sync", None) is not None


def divides_no_data(trainer: Trainer) -> bool:
    """Return whether `use_distributed_sampler=False` was given; from now on it is as if it was.

    Lightning's sampler would deal single samples to hosts, and repeat some.
    """
    connector = trainer._accelerator_connector
    if connector.use_distributed_sampler:
        connector.use_distributed_sampler = False
        connector.__dict__["_roundpipe_divides"] = True
    return "_roundpipe_divides" not in vars(connector)


def stop_after_batch(trainer: Trainer) -> None:
    trainer._signal_connector.received_sigterm = True


def defer_sigterm(trainer: Trainer, ask: Callable[[], None]) -> None:
    """Have a SIGTERM call `ask`, where Lightning's handler would wait for the other hosts.

    Called before Lightning registers its handler.
    """
    vars(trainer._signal_connector)["_sigterm_notifier_fn"] = lambda *_: ask()


# Loaders -----------------------------------------------------------------------------------------


def set_loaders(combined: CombinedLoader, loaders: Sequence[Any]) -> None:
    combined._iterables = tree_unflatten(list(loaders), combined._spec)


def load_loader_states(combined: CombinedLoader, states: list[Any]) -> None:
    combined._load_state_dicts(states)


def consumed_loaders(combined: CombinedLoader | None) -> list[bool]:
    return list(getattr(getattr(combined, "_iterator", None), "_consumed", ()))


def set_consumed_loaders(combined: CombinedLoader, consumed: Sequence[bool]) -> None:
    iterator: Any = combined._iterator
    iterator._consumed = list(consumed)


def listen_to_fetches(
    trainer: Trainer, began: Callable[[], None], ended: Callable[[], None]
) -> None:
    """Call functions around every fetch of a training batch, where Lightning tells its profiler."""
    loop: Any = trainer.fit_loop.epoch_loop
    own_began, own_ended = loop._on_before_fetch, loop._on_after_fetch

    def fetch_begins() -> None:
        began()
        own_began()

    def fetch_ended() -> None:
        own_ended()
        ended()

    loop._on_before_fetch, loop._on_after_fetch = fetch_begins, fetch_ended


def leave_fetches(trainer: Trainer) -> None:
    for name in ("_on_before_fetch", "_on_after_fetch"):
        trainer.fit_loop.epoch_loop.__dict__.pop(name, None)


# What was logged ---------------------------------------------------------------------------------

_LATEST = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def latest_metrics(trainer: Trainer) -> dict[str, dict[str, Any]]:
    connector = trainer._logger_connector
    return {name: dict(getattr(connector, name)) for name in _LATEST}


def set_latest_metrics(trainer: Trainer, latest: Mapping[str, Mapping[str, Any]]) -> None:
    for name in _LATEST:
        setattr(trainer._logger_connector, name, latest[name])


def merge_logged(trainer: Trainer) -> None:
    connector = trainer._logger_connector
    _ = connector.callback_metrics, connector.logged_metrics, connector.progress_bar_metrics


def set_first_loop_iter(trainer: Trainer, value: bool | None) -> None:  # noqa: FBT001 - three states
    trainer._logger_connector._first_loop_iter = value


# Where the loops stand ---------------------------------------------------------------------------

_DUE = "_should_check_val_fx"


def has_last_batch(trainer: Trainer) -> bool:
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def is_validation_due(trainer: Trainer) -> bool:
    fetcher = trainer.fit_loop._data_fetcher
    assert fetcher is not None
    return bool(getattr(trainer.fit_loop.epoch_loop, _DUE)(fetcher))


def skip_due_validation(trainer: Trainer) -> None:
    """Make the epoch's loop find, when it asks next, that no validation is due."""
    loop = trainer.fit_loop.epoch_loop

    def no_longer(_: Any) -> bool:
        skip_no_validation(trainer)
        return False

    loop.__dict__[_DUE] = no_longer


def skip_no_validation(trainer: Trainer) -> None:
    trainer.fit_loop.epoch_loop.__dict__.pop(_DUE, None)


def end_restart(*loops: Any) -> None:
    """Let loops go on as if they had not been restarted; with `max_steps` the setter does not."""
    for loop in loops:
        loop._restarting = False


def restart_after_batch(trainer: Trainer) -> None:
    """Make the loops begin with complete counters: Lightning changes none of them."""
    loop = trainer.fit_loop.epoch_loop
    loop._restart_stage = _RestartStage.RESTARTED_ON_LAST
    trainer.fit_loop._restarting = False  # the hooks at the end of the epoch are due
    loop.val_loop._has_run = False  # by an earlier training of the same Trainer


def restart_in_validation(trainer: Trainer) -> None:
    loop = trainer.fit_loop.epoch_loop.val_loop
    loop._restart_stage = _ValidationStage.RESTARTED_MID_EVALUATION
    loop._restarting = False


def count_stepped_batches(trainer: Trainer, count: int) -> None:
    """Add to the number of batches after which the optimizer stepped: the x axis of loggers."""
    trainer.fit_loop.epoch_loop._batches_that_stepped += count


def end_epoch_metrics(trainer: Trainer) -> None:
    trainer._logger_connector.on_epoch_end()


def log_epoch_metrics(trainer: Trainer) -> None:
    trainer._logger_connector.update_train_epoch_metrics()


def iterate_when_epoch_begins(trainer: Trainer) -> bool:
    """Let loaders be asked for new iterators as if nothing was resumed, where an epoch begins next.

    Return whether they will be asked.
    """
    trainer.fit_loop._resuming_from_checkpoint = False
    return trainer.current_epoch > 0 and not trainer.fit_loop.epoch_loop.restarting
