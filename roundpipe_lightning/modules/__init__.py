"""Modules of `train.py`: LightningModules without a line about pipelines."""

from roundpipe_lightning.modules.adapters import Adapters
from roundpipe_lightning.modules.base import TransformersModule
from roundpipe_lightning.modules.causal_lm import (
    CausalLanguageModule,
    TokenBatch,
    VisionLanguageModule,
)
from roundpipe_lightning.modules.classification import ClassBatch, SequenceClassificationModule
from roundpipe_lightning.modules.preference import (
    DirectPreferenceModule,
    JudgedBatch,
    KahnemanTverskyModule,
    OddsRatioModule,
    PairModule,
    PreferenceBatch,
    RewardModule,
)
from roundpipe_lightning.modules.source import ModelSource
from roundpipe_lightning.modules.tokenizer import (
    ProcessorSource,
    TokenizerSource,
    byte_level_tokenizer,
)

__all__ = [
    "Adapters",
    "CausalLanguageModule",
    "ClassBatch",
    "DirectPreferenceModule",
    "JudgedBatch",
    "KahnemanTverskyModule",
    "ModelSource",
    "OddsRatioModule",
    "PairModule",
    "PreferenceBatch",
    "ProcessorSource",
    "RewardModule",
    "SequenceClassificationModule",
    "TokenBatch",
    "TokenizerSource",
    "TransformersModule",
    "VisionLanguageModule",
    "byte_level_tokenizer",
]
