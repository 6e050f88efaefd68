"""Data modules of `train.py`. Nothing is downloaded, and nothing is read at import."""

from roundpipe_lightning.data.chat import ChatDataModule, JudgedDataModule, PreferenceDataModule
from roundpipe_lightning.data.records import DatasetRecords, Record, RecordFiles
from roundpipe_lightning.data.text import (
    ByteDataModule,
    ClassificationDataModule,
    TextDataModule,
    TextFolder,
)
from roundpipe_lightning.data.token_data import FileDataModule, FileOptions
from roundpipe_lightning.data.vision import VisionDataModule

__all__ = [
    "ByteDataModule",
    "ChatDataModule",
    "ClassificationDataModule",
    "DatasetRecords",
    "FileDataModule",
    "FileOptions",
    "JudgedDataModule",
    "PreferenceDataModule",
    "Record",
    "RecordFiles",
    "TextDataModule",
    "TextFolder",
    "VisionDataModule",
]
