"""Answers in files that were compared in pairs, or judged one by one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from typing_extensions import override

from roundpipe_lightning.data.chat import ConversationEncoder
from roundpipe_lightning.data.forms import Message
from roundpipe_lightning.data.records import Record
from roundpipe_lightning.data.samples import (
    IGNORED,
    Padding,
    Row,
    Sample,
    TooLong,
    as_row,
)
from roundpipe_lightning.data.token_data import FileDataModule
from roundpipe_lightning.errors import ConfigurationError, DataError

Pair = tuple[Sample, Sample]
"""A prompt with the better answer, and with the worse one."""

Judged = tuple[Sample, bool]
"""A prompt with an answer, and whether that is wanted."""


class PreferenceDataModule(FileDataModule):
    """Pairs: `{"prompt": "...", "chosen": "...", "rejected": "..."}` per line.

    Texts are taken as one exchange between user and assistant. Messages or ShareGPT's turns may
    stand in their place: `prompt` may be a list of messages, and so may `chosen` and `rejected`,
    which then end with the assistant's or, without a `prompt`, hold the whole conversation. All are
    written with the tokenizer's chat template; of each only the last answer is scored.

    Args:
        options: The fields of `FileOptions`; `seq_len` and `batch_size` (in pairs) among them.
            `too_long=cut_end` cuts answers, `cut_start` cuts prompts.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    kinds: ClassVar[Sequence[str]] = ("pair",)

    @cached_property
    def _encoder(self) -> ConversationEncoder:
        return ConversationEncoder(self.tokenizer, name=self.tokenizer_name)

    @override
    def encode(self, record: Record) -> Sequence[Any]:
        """A pair as tokens."""
        content = self.content(record)
        chosen, rejected = (
            self._answer([*content.messages, *answer], name, record)
            for name, answer in zip(("chosen", "rejected"), content.answers, strict=True)
        )
        if chosen is None or rejected is None:
            self.skip(f"longer than data.seq_len={self.seq_len} tokens")
            return []
        if torch.equal(chosen.input_ids, rejected.input_ids):
            raise DataError(
                f"{record.place}: the chosen and the rejected answer are the same"
                f"{' as far as they are kept' if self.options.policy is TooLong.CUT_END else ''}, "
                "so there is nothing to prefer. Remove the sample."
            )
        return [(chosen, rejected)]

    @override
    def arrange(self, samples: Sequence[Any]) -> Sequence[Row]:
        """Pairs as rows of shape (2, tokens), the chosen answer first."""
        stack = Padding(pad_token=self.pad_token_id)
        return [stack([as_row(chosen), as_row(rejected)]) for chosen, rejected in samples]

    def _answer(self, messages: Sequence[Message], field: str, record: Record) -> Sample | None:
        """A prompt with one of its answers, the last message alone as the target."""
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise DataError(
                f"{record.place}: the field {field!r} does not end with an answer of the assistant "
                "to something. Give a prompt, or messages that end with one."
            )
        whole = self._encoder.last_answer(messages, place=record.place)
        sample = self.options.policy.apply(whole, limit=self.seq_len, place=record.place)
        if sample is not None and sample.num_targets == 0:
            raise DataError(
                f"{record.place}: nothing is left of the {field} answer within "
                f"data.seq_len={self.seq_len} tokens. Raise it, or set data.too_long=cut_start."
            )
        return sample


class JudgedDataModule(PreferenceDataModule):
    """Judged answers: `{"prompt": "...", "completion": "...", "label": true}` per line.

    A pair counts as two: a wanted answer and one that is not. Each answer's row also has the prompt
    with the next answer to another prompt, cut to `seq_len` tokens.

    Args:
        options: As for `PreferenceDataModule`.

    Raises:
        ConfigurationError: A setting is out of its range.
    """

    kinds = ("judged", "pair")

    @override
    def encode(self, record: Record) -> list[Judged]:
        """A judged answer, or a pair as two of them, as tokens."""
        content = self.content(record)
        if content.desirable is None:
            return [(s, n == 0) for pair in super().encode(record) for n, s in enumerate(pair)]
        [answer] = content.answers
        sample = self._answer([*content.messages, *answer], "completion", record)
        if sample is None:
            self.skip(f"longer than data.seq_len={self.seq_len} tokens")
        return [] if sample is None else [(sample, content.desirable)]

    @override
    def arrange(self, samples: Sequence[Judged]) -> Sequence[Row]:
        """Rows of shape (2, tokens): each prompt with its answer, and with another one's.

        Raises:
            ConfigurationError: All prompts are the same.
        """
        stack = Padding(pad_token=self.pad_token_id)
        starts = [int((sample.labels != IGNORED).nonzero()[0]) for sample, _ in samples]
        prompts = [
            tuple(sample.input_ids[:start].tolist())
            for (sample, _), start in zip(samples, starts, strict=True)
        ]
        rows = []
        for index, (sample, desirable) in enumerate(samples):
            later = ((index + step) % len(samples) for step in range(1, len(samples)))
            other = next((each for each in later if prompts[each] != prompts[index]), None)
            if other is None:
                raise ConfigurationError(
                    f"All {len(samples)} answers of a part of the data are to the same prompt, and "
                    "KTO compares each prompt with an answer to another one. Give more samples, or "
                    "a larger data.validation_share or other data.validation_files."
                )
            begin, end = sample[: starts[index]], samples[other][0]
            mismatched = Sample(
                input_ids=torch.cat([begin.input_ids, end.input_ids[starts[other] :]]),
                labels=torch.cat([begin.labels, end.labels[starts[other] :]]),
            )[: self.seq_len]
            row = stack([as_row(sample), as_row(mismatched)])
            rows.append({**row, "desirable": torch.tensor(desirable)})
        return rows
