"""Fine-tune models larger than your GPUs with PyTorch Lightning.

Importing this package makes `lightning.pytorch.Trainer(strategy="roundpipe")` known, and does
nothing else: no thread is started, no device is touched, no setting is changed.
"""

from typing import TYPE_CHECKING, Any

from roundpipe_lightning import errors, optim
from roundpipe_lightning.callbacks import (
    AnswerQuestions,
    ExportPretrained,
    LiveView,
    PipelineMonitor,
    PipelineTimeline,
    PlanReport,
    RunReport,
)
from roundpipe_lightning.checkpoint.io import RoundPipeAsyncCheckpointIO, RoundPipeCheckpointIO
from roundpipe_lightning.models.losses.linear_cross_entropy import linear_cross_entropy
from roundpipe_lightning.planning.cost.simulate import simulate
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.search.planner import plan_training
from roundpipe_lightning.planning.search.request import PlanningRequest
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy.checks import register as _register
from roundpipe_lightning.strategy.checks import replace_pytorch_lightning
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

if TYPE_CHECKING:
    from roundpipe_lightning.cli.finetune import finetune

__all__ = [
    "AnswerQuestions",
    "ExportPretrained",
    "HardwareSpec",
    "LiveView",
    "ModelProfile",
    "PipelineMonitor",
    "PipelineTimeline",
    "Plan",
    "PlanReport",
    "PlanningRequest",
    "RoundPipeAsyncCheckpointIO",
    "RoundPipeCheckpointIO",
    "RoundPipePrecision",
    "RoundPipeStrategy",
    "RunReport",
    "errors",
    "finetune",
    "linear_cross_entropy",
    "optim",
    "plan_training",
    "replace_pytorch_lightning",
    "simulate",
]

__version__ = "0.1.0"

_register(RoundPipeStrategy, name=RoundPipeStrategy.strategy_name)


def __getattr__(name: str) -> Any:
    """Load `finetune` when it is asked for: it brings Hydra, which training in code needs not."""
    if name != "finetune":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from roundpipe_lightning.cli.finetune import finetune

    return finetune
