"""What callbacks that hear of plans and steps have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, MutableSequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy


class CollectsLosses(Callback):
    """Keeps the losses of batches, with the optimizer steps that came before their ends."""

    _losses: MutableSequence[tuple[int, float]]

    def on_train_start(self, *_: Any) -> None:
        """Forget an earlier training."""
        self._losses.clear()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002
        outputs: Any,
        *_: Any,
    ) -> None:
        if isinstance(outputs, Mapping) and "loss" in outputs:
            loss = float(outputs["loss"]) * trainer.accumulate_grad_batches  # as before its share
            self._losses.append((trainer.global_step, loss))


class Listening(Callback):
    """Takes what the strategy tells while `fit` runs; a subclass names one of its lists."""

    _hears_of = "plan_listeners"
    _needs_roundpipe = False

    @abstractmethod
    def _take(self, told: Any) -> None:
        """Called with each plan, or each step."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Register with the strategy. An earlier fit may have failed before teardown.

        Raises:
            ConfigurationError: The strategy is not roundpipe's, and this needs it.
        """
        super().setup(trainer, pl_module, stage)
        strategy = trainer.strategy
        self._unregister(trainer)
        if isinstance(strategy, RoundPipeStrategy):
            if stage == "fit":
                getattr(strategy, self._hears_of).append(self._take)
        elif self._needs_roundpipe:
            raise ConfigurationError(
                f"{type(self).__name__} needs Trainer(strategy='roundpipe'), found "
                f"{type(strategy).__name__}. Leave the callback out, or change the strategy."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002
        self._unregister(trainer)

    def _unregister(self, trainer: Trainer) -> None:
        listeners: list[Any] = getattr(trainer.strategy, self._hears_of, [])
        if self._take in listeners:
            listeners.remove(self._take)
