"""Modules of `train.py`: LightningModules without a line about pipelines."""

from roundpipe_lightning.models.source import ModelSource
from roundpipe_lightning.modules.adapters import Adapters
from roundpipe_lightning.modules.language import (
    CausalLanguageModule,
    ClassBatch,
    SequenceClassificationModule,
    TokenBatch,
    TransformersModule,
    VisionLanguageModule,
)
from roundpipe_lightning.modules.preference import (
    DirectPreferenceModule,
    JudgedBatch,
    KahnemanTverskyModule,
    OddsRatioModule,
    PairModule,
    PreferenceBatch,
    RewardModule,
)
from roundpipe_lightning.modules.source import (
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
