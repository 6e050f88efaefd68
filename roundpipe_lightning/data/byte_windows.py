"""Text on the user's machine, byte by byte; by default Python's own standard library."""

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from roundpipe_lightning.data.bytes import NUM_TOKENS, pack
from roundpipe_lightning.data.corpus import TextFolder
from roundpipe_lightning.data.loader import ResumableLoader, SeededOrder, Windows
from roundpipe_lightning.errors import ConfigurationError


class ByteDataModule(LightningDataModule):
    """Byte-level windows of source text that is already on the user's machine.

    Nothing is downloaded and nothing is written. The files are read in `setup`, so making the
    data module costs nothing. The order of the training windows depends on `seed` and the epoch
    alone, and a checkpoint continues in the middle of an epoch.

    Args:
        seq_len: Tokens (bytes) of a window.
        batch_size: Windows in a batch, before it is split into microbatches.
        text: Which files are read, and how much of them.
        seed: Seed of the order of the training windows.
        num_workers: Processes that prepare batches; 0: none.

    Raises:
        ConfigurationError: A figure is too small, or (in `setup`) there is too little text.
    """

    num_tokens = NUM_TOKENS
    """Size that a model's vocabulary must have at least."""

    def __init__(
        self,
        *,
        seq_len: int,
        batch_size: int,
        text: TextFolder,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("seq_len", seq_len, 2),
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if value < least:
                raise ConfigurationError(f"data.{name}={value} must be at least {least}.")
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.text = text
        self.seed = seed
        self.num_workers = num_workers
        self._train: Tensor | None = None
        self._validation: Tensor | None = None

    @override
    def setup(self, stage: str | None = None) -> None:
        """Read and pack the text, once."""
        if self._train is not None:
            return
        corpus = self.text.read()
        train = pack(corpus.train, seq_len=self.seq_len)
        validation = pack(corpus.validation, seq_len=self.seq_len)
        self._require(train, part="training", setting="train_bytes")
        self._require(validation, part="validation", setting="validation_bytes")
        self._train, self._validation = train, validation

    def train_dataloader(self) -> ResumableLoader:
        """Batches of training windows in the epoch's own order."""
        assert self._train is not None, "Lightning calls setup first"
        windows = Windows(self._train)
        return ResumableLoader(
            windows,
            order=SeededOrder(len(windows), seed=self.seed),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
        )

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Batches of validation windows, always the same."""
        assert self._validation is not None, "Lightning calls setup first"
        return DataLoader(
            Windows(self._validation),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            drop_last=True,
            persistent_workers=self.num_workers > 0,
        )

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The validation windows: this data has no third part."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """The validation windows."""
        return self.val_dataloader()

    def _require(self, windows: Tensor, *, part: str, setting: str) -> None:
        """Refuse a part that is too small for one batch, which would silently train nothing."""
        if windows.shape[0] < self.batch_size:
            raise ConfigurationError(
                f"The {part} text makes {windows.shape[0]} windows of data.seq_len={self.seq_len} "
                f"bytes, less than one batch of data.batch_size={self.batch_size}. Raise "
                f"data.text.{setting}, or lower data.seq_len or data.batch_size."
            )
