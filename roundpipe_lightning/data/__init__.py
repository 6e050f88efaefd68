"""What `train.py` trains on. Nothing is downloaded, and nothing is read at import."""

from roundpipe_lightning.data.byte_windows import ByteDataModule
from roundpipe_lightning.data.corpus import TextFolder

__all__ = ["ByteDataModule", "TextFolder"]
