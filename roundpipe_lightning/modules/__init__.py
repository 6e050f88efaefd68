"""What `train.py` trains: LightningModules without a line about pipelines."""

from roundpipe_lightning.modules.adapters import Adapters
from roundpipe_lightning.modules.causal_lm import CausalLanguageModule, TokenBatch
from roundpipe_lightning.modules.schedule import WarmupCosine
from roundpipe_lightning.modules.source import ModelSource, Weights
from roundpipe_lightning.modules.tokenizer import TokenizerSource, byte_level_tokenizer

__all__ = [
    "Adapters",
    "CausalLanguageModule",
    "ModelSource",
    "TokenBatch",
    "TokenizerSource",
    "WarmupCosine",
    "Weights",
    "byte_level_tokenizer",
]
