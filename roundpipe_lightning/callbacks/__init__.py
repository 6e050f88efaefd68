"""Callbacks that look into the pipeline, ask the model, and hand it on."""

from roundpipe_lightning.callbacks.answers import AnswerQuestions
from roundpipe_lightning.callbacks.export import ExportPretrained
from roundpipe_lightning.callbacks.live import LiveView
from roundpipe_lightning.callbacks.monitor import PipelineMonitor
from roundpipe_lightning.callbacks.pictures import PipelineTimeline, PlanReport, RunReport

__all__ = [
    "AnswerQuestions",
    "ExportPretrained",
    "LiveView",
    "PipelineMonitor",
    "PipelineTimeline",
    "PlanReport",
    "RunReport",
]
