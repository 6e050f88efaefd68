"""The strategy's part in checkpoints: what goes in, when it may change, and what does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.plugins import CheckpointIO
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.checkpoint.fit import (
    check_optimizer_states,
    check_versions,
    differences,
)
from roundpipe_lightning.checkpoint.frozen_base import (
    FROZEN_KEY,
    describe_frozen,
    left_out,
    load_without_base,
    split_frozen,
)
from roundpipe_lightning.checkpoint.io import RoundPipeAsyncCheckpointIO, RoundPipeCheckpointIO
from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.strategy import compat
from roundpipe_lightning.strategy.resume.resume import ResumePoint
from roundpipe_lightning.strategy.runtime import Session
from roundpipe_lightning.strategy.updating import PREVIOUS_KEY, UpdatingStrategy

CHECKPOINT_KEY = "roundpipe"
CHECKPOINT_VERSION = 2


class CheckpointingStrategy(UpdatingStrategy):
    """A strategy whose checkpoints hold all that a resumed run needs."""

    exclude_frozen_parameters = False
    """Whether checkpoints leave out what is not trained."""

    _session: Session | None = None
    _fit_session: Session | None = None

    def __init__(self, **arguments: Any) -> None:
        self._resume = ResumePoint()
        self._fails = False
        self._runs = False
        super().__init__(**arguments)

    @property
    def _trained(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """How checkpoints are written; an empty wrapper (`AsyncCheckpointIO()`) gets ours."""
        io = self._checkpoint_io
        if io is None:
            io = self._checkpoint_io = RoundPipeCheckpointIO()
        elif isinstance(io, compat.WrappingCheckpointIO) and io.checkpoint_io is None:
            io.checkpoint_io = RoundPipeCheckpointIO()
        return io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    def setup(self, trainer: Trainer) -> None:
        """From here to the teardown, the end of background work is certain to be waited for."""
        self._runs = True
        super().setup(trainer)

    # Told by the Trainer, for what a resumed run needs -------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Give loaders of training batches a position that can be saved."""
        trainer = self._trained.trainer
        if trainer.sanity_checking:
            self._resume.sanity_check_begins()
        return self._resume.train_loader(dataloader) if trainer.training else dataloader

    def on_train_start(self) -> None:
        """Go on where the checkpoint was written, if one was loaded."""
        super().on_train_start()
        self._resume.training_begins(self._trained.trainer)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        """Move nothing but what is not in host memory, and note that a batch has begun."""
        if self._trained.trainer.training:
            self._resume.batch_begins(self._trained.trainer)
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_validation_start(self) -> None:
        """Note where the random generators stand before a validation."""
        super().on_validation_start()
        if not self._trained.trainer.sanity_checking:
            self._resume.validation_begins()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Note that the batch's gradients have been added."""
        super().post_backward(closure_loss)
        self._resume.gradients_were_added()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step when nothing that is still to be written into a checkpoint would change."""
        io = self._checkpoint_io
        if not isinstance(io, RoundPipeAsyncCheckpointIO):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def computed() -> Any:
            loss = closure()  # the writer goes on during the batch
            self._release(io)
            return loss

        return super().optimizer_step(optimizer, computed, model, **kwargs)

    def _is_writing(self) -> bool:
        io = self._checkpoint_io
        return isinstance(io, RoundPipeAsyncCheckpointIO) and not io.snapshots.is_idle

    def _release(self, io: RoundPipeAsyncCheckpointIO) -> None:
        if io.snapshots.is_idle:
            return
        parameters = self._trained.parameters()
        frozen = [value.untyped_storage() for value in parameters if not value.requires_grad]
        io.release(unchanged=frozen)

    def on_exception(self, exception: BaseException) -> None:
        """Keep the error that ends the training from being hidden by one of a checkpoint."""
        self._fails = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Let Lightning clean up, checkpoints that are still being written among the rest.

        Raises:
            CheckpointError: A checkpoint could not be written in the background.
        """
        self._resume.end()
        fails, self._fails, self._runs = self._fails, False, False
        try:
            super().teardown()
        except CheckpointError as error:
            if not fails:
                raise
            warnings.warn(f"A checkpoint was lost besides: {error}", stacklevel=2)

    # Saving --------------------------------------------------------------------------------------

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write a plain Lightning checkpoint, with optimizer states also what resuming needs."""
        module, session = self._trained, self._fit_session or self._session
        if self.exclude_frozen_parameters:
            _, frozen = split_frozen(module, module.state_dict())
            if frozen:
                checkpoint = {**checkpoint, FROZEN_KEY: describe_frozen(module, frozen)}
        if "optimizer_states" in checkpoint:
            checkpoint = {
                **checkpoint,
                CHECKPOINT_KEY: {
                    "format_version": CHECKPOINT_VERSION,
                    **self._resume.state(module.trainer),
                    "planning": session.state_dict() if session else None,
                    PREVIOUS_KEY: session.previous_parameters() if session else {},
                },
            }
        io = self.checkpoint_io
        if not isinstance(io, RoundPipeAsyncCheckpointIO):
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        io.save_snapshot(checkpoint, filepath, storage_options, steady=self._steady_memory())
        if not self._runs or _some_logger_reads(module.trainer):
            io.wait()

    def _steady_memory(self) -> list[torch.UntypedStorage]:
        """What only an optimizer step changes; nothing where a callback changes weights, too."""
        averaging = (StochasticWeightAveraging, WeightAveraging)
        callbacks: Any = self._trained.trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(callback, averaging) for callback in callbacks):
            return []
        states = (state for optimizer in self.optimizers for state in optimizer.state.values())
        held = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        tensors = [*self._trained.parameters(), *held]
        return [value.untyped_storage() for value in tensors if value.device.type == "cpu"]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state, without what is frozen where that is to be left out."""
        state = super().lightning_module_state_dict()
        return split_frozen(self._trained, state)[0] if self.exclude_frozen_parameters else state

    # Loading -------------------------------------------------------------------------------------

    def load_checkpoint(
        self,
        checkpoint_path: Any,
        weights_only: bool | None = None,  # noqa: FBT001 - Lightning's signature
    ) -> dict[str, Any]:
        """Read a checkpoint.

        Raises:
            CheckpointError: It cannot be read, or a newer version wrote it.
        """
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        check_versions(checkpoint, path=checkpoint_path, newest=CHECKPOINT_VERSION)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002 - Lightning's signature
        """Restore the module; the base that a checkpoint leaves out must be there already.

        Raises:
            CheckpointError: The checkpoint is of another model, or the base is another one.
        """
        if left_out(checkpoint):
            load_without_base(self._trained, checkpoint, strict=strict)
            return
        try:
            super().load_model_state_dict(checkpoint, strict=strict)
        except RuntimeError as error:
            found = differences(self._trained, checkpoint["state_dict"])
            if not found:
                raise
            raise CheckpointError(
                f"The checkpoint is of another model than {type(self._trained).__name__} is here: "
                f"{found}. Build the model as it was trained, name another checkpoint "
                "(ckpt_path=...), or load a part of it with strict_loading=False."
            ) from error

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizers and, if the checkpoint has it, what else a resumed run needs.

        Raises:
            CheckpointError: The optimizers are others than the checkpoint's.
        """
        check_optimizer_states(self.optimizers, checkpoint["optimizer_states"])
        super().load_optimizer_state_dict(checkpoint)
        ours = checkpoint.get(CHECKPOINT_KEY)
        if ours is None:
            return
        self._resume.load(self._trained.trainer, ours, checkpoint.get("loops", {}))
        if self._session is None:
            return
        if ours.get("planning") is not None:
            self._session.load_state_dict(ours["planning"])
        self._session.load_previous_parameters(ours.get(PREVIOUS_KEY, {}))


def _some_logger_reads(trainer: Trainer) -> bool:
    """Whether a logger does something with a checkpoint when it has been saved."""
    known = (CSVLogger, TensorBoardLogger)
    return any(
        type(logger).after_save_checkpoint is not Logger.after_save_checkpoint
        for logger in trainer.loggers
        if not isinstance(logger, known)
    )
