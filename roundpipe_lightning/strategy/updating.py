"""What a strategy tells the updates of: steps, and who reads or replaces parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.optim import HostAdamW
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.gradient_check import check_gradients
from roundpipe_lightning.strategy.optimizer_sync import Updates, check_flags, check_owners
from roundpipe_lightning.strategy.options import Options
from roundpipe_lightning.strategy.runtime import Session
from roundpipe_lightning.strategy.trained_parameters import TrainedParameters
from roundpipe_lightning.strategy.transfer_dtypes import GradientFormat

PREVIOUS_KEY = "previous_parameters"
"""Where a checkpoint has what the next step computes with, where the module has newer values."""


class UpdatingStrategy(ParallelStrategy):
    """A strategy whose optimizer may still step while Lightning goes on."""

    _updates: Updates | None = None

    _gradients: GradientFormat | None = None

    _overlaps_on_host = False
    """Whether `update="exact"` overlaps on CPU workers, too, which have no cores left for it."""

    def _begin_gradients(self, options: Options) -> None:
        """Have gradients summed up in the dtype that was asked for."""
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        assert isinstance(precision, RoundPipePrecision)
        self._gradients = GradientFormat(options, precision)
        self._gradients.begin(module)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers and refuse those that cannot step here."""
        super().setup_optimizers(trainer)
        check_flags(self.optimizers)

    def _begin_updates(self, session: Session, *, options: Options) -> None:
        """Prepare for the steps of a training."""
        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        check_owners(module, self.optimizers)
        assert isinstance(precision, RoundPipePrecision)
        assert self._gradients is not None
        widened = [o for o in self.optimizers if precision.widens(o)]
        self._gradients.check(self.optimizers, widened=widened)
        stale = options.update == "async"
        if stale and not module.automatic_optimization:
            raise ConfigurationError(
                f"update='async': {type(module).__name__} sets automatic_optimization=False and "
                "steps its optimizers itself, so nothing can be stepped later. Leave update out, "
                "or use automatic optimization."
            )
        anomalies = compat.detects_anomalies(module.trainer)
        checks_gradients = options.check_gradients or anomalies
        trained = TrainedParameters(module, self.optimizers)

        def check(optimizer: Optimizer) -> None:
            trained.check()
            if checks_gradients and precision.scaler is None:  # a scaler skips the step itself
                check_gradients(optimizer, module=module, blocks=session.blocks)

        self._updates = Updates(
            module,
            optimizers=self.optimizers,
            batches=session,
            stale=stale,
            overlaps=session.overlaps_updates,
            check=check,
            begins_early=precision.scaler is None
            and type(precision) is RoundPipePrecision
            and not checks_gradients,
            are_written=self._is_writing,
        )
        precision.takes_clipping = self._updates.take_clipping

    def _is_writing(self) -> bool:
        """Say whether a checkpoint is being written that reads parameters where they are."""
        return False

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the batch and make the optimizer's step, or have it made while Lightning goes on."""
        lightnings = super().optimizer_step

        def make(closure: Callable[[], Any]) -> Any:
            return lightnings(optimizer, closure, model, **kwargs)

        module, precision = self.lightning_module, self.precision_plugin
        assert module is not None
        if self._updates is None or not module.automatic_optimization:
            return make(closure)
        plain = isinstance(precision, RoundPipePrecision) and precision.steps_plainly(optimizer)
        return self._updates.step(optimizer, closure, make=make, divisible=plain and not kwargs)

    def join_updates(self) -> None:
        """Wait for the optimizer: parameters and its state are then those after the last step.

        Raises:
            Exception: What the optimizer has raised, once.
        """
        if self._updates is not None:
            self._updates.join()

    # Whoever reads parameters --------------------------------------------------------------------

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return an optimizer's state after its last step."""
        self.join_updates()
        return super().optimizer_state(optimizer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state after the last step."""
        self.join_updates()
        return super().lightning_module_state_dict()

    def load_checkpoint(
        self,
        checkpoint_path: Any,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> dict[str, Any]:
        """Read a checkpoint; what is trained is about to be replaced."""
        updater = None if self._updates is None else self._updates.updater
        if updater is not None:
            updater.forget()
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        return checkpoint

    def on_exception(self, exception: BaseException) -> None:
        """Let the last step end; what the optimizer raises besides is not the cause."""
        with contextlib.suppress(Exception):
            self.join_updates()
        super().on_exception(exception)

    def teardown(self) -> None:
        """Give the Trainer its callbacks back, then let Lightning clean up."""
        updates, self._updates = self._updates, None
        if updates is not None:
            updates.close()
            precision = self.precision_plugin
            assert isinstance(precision, RoundPipePrecision)
            precision.takes_clipping = None
        if self._gradients is not None:
            self._gradients.end()
        for optimizer in self.optimizers:
            if isinstance(optimizer, HostAdamW):
                optimizer.close()  # its threads; the state stays
        super().teardown()
