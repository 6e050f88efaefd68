"""The checkpoint that a run goes on from."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.types import STEP_OUTPUT
from typing_extensions import override


class LastCheckpoint(Checkpoint):
    """Keeps one file, `last.ckpt`: the state after the latest step that was worth saving.

    It is written every `every_n_steps` optimizer steps, after the last step, and when the run is
    interrupted between two steps. Inside a step nothing is saved, because weights may be half
    updated there; the file of before then stays.

    Args:
        dirpath: Folder of the file.
        every_n_steps: Optimizer steps between two saves.
    """

    def __init__(self, dirpath: str, *, every_n_steps: int) -> None:
        super().__init__()
        self.path = Path(dirpath) / "last.ckpt"
        self.every_n_steps = every_n_steps
        self._saved_step = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from the step that the run starts at."""
        self._saved_step = trainer.global_step

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Save after every `every_n_steps` optimizer steps, and after the last."""
        step = trainer.global_step
        if step - self._saved_step >= self.every_n_steps or step == trainer.max_steps:
            self._save(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the end of a run that was not ended by its number of steps."""
        self._save(trainer)

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save an interrupted run if it stands between two steps."""
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        between_steps = progress.ready == progress.processed  # type: ignore[attr-defined]
        if isinstance(exception, KeyboardInterrupt) and between_steps:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        fast = trainer.fast_dev_run  # type: ignore[attr-defined]
        if fast or trainer.global_step == self._saved_step:
            return
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved_step = trainer.global_step
