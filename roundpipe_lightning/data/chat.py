"""Conversations in files, for fine-tuning a model that chats."""

from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from roundpipe_lightning.data.conversation import ConversationEncoder
from roundpipe_lightning.data.files import FileDataModule, FileOptions, Files, TokenizerMaker
from roundpipe_lightning.data.records import Record
from roundpipe_lightning.data.samples import Row, Sample, as_row, packed_rows
from roundpipe_lightning.errors import ConfigurationError, DataError


class ChatDataModule(FileDataModule):
    """Conversations: `{"messages": [{"role": "user", "content": "..."}, ...]}` per line.

    They are written with the tokenizer's own chat template, and only what the assistant says is
    predicted. With packing, short conversations share a row: less is computed for padding, and no
    attention crosses from one conversation into another.

    Args:
        files: Paths of JSON lines, folders, patterns; or an object that has records.
        tokenizer: Loads the tokenizer.
        packing: Whether conversations share rows.
        no_target: What becomes of a conversation in which the assistant says nothing (that is
            left of it): `drop` or `refuse`.
        field: Field of a record that has the messages.
        options: The fields of `FileOptions`; `seq_len` and `batch_size` among them.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    def __init__(
        self,
        *,
        files: Files,
        tokenizer: TokenizerMaker,
        packing: bool = True,
        no_target: str = "drop",
        field: str = "messages",
        **options: Any,
    ) -> None:
        super().__init__(files, tokenizer=tokenizer, options=FileOptions(**options))
        if no_target not in ("drop", "refuse"):
            raise ConfigurationError(f"data.no_target={no_target!r} is not one of drop, refuse.")
        self.packing = packing
        self.no_target = no_target
        self.field = field
        self._encoder: ConversationEncoder | None = None

    @property
    def packs_documents(self) -> bool:
        """Whether several documents share a row and must not see each other."""
        return self.packing

    @override
    def encode(self, record: Record) -> Sample | None:
        """A conversation as tokens."""
        if self._encoder is None:
            self._encoder = ConversationEncoder(
                self.tokenizer, name=self.tokenizer_name, field=self.field
            )
        whole = self._encoder(record)
        sample = self.options.policy.apply(whole, limit=self.seq_len, place=record.place)
        if sample is None:
            self.skip(f"longer than data.seq_len={self.seq_len} tokens")
            return None
        if sample.num_targets == 0:
            if self.no_target == "refuse":
                raise DataError(
                    f"{record.place}: the assistant says nothing in the conversation"
                    f"{' as far as it is kept' if len(sample) < len(whole) else ''}, so there is "
                    "nothing to learn. Remove it, or set data.no_target=drop."
                )
            self.skip("without a word of the assistant")
            return None
        return sample

    @override
    def arrange(self, samples: Sequence[Sample]) -> Sequence[Row]:
        """Conversations in rows: packed, or one in each."""
        if self.packing:
            return packed_rows(samples, seq_len=self.seq_len)
        return [as_row(sample) for sample in samples]
