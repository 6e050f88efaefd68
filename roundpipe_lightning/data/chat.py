"""Conversations, in the tokenizer's own chat template, and answers that were compared or judged."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import torch
from jinja2 import TemplateError
from typing_extensions import override

from roundpipe_lightning.data.forms import REASONING, Content, Message, is_trained
from roundpipe_lightning.data.records import Record
from roundpipe_lightning.data.samples import (
    IGNORED,
    Padding,
    Row,
    Sample,
    TooLong,
    as_row,
    first_rows,
    packed_row,
    packed_rows,
)
from roundpipe_lightning.data.text import text_sample
from roundpipe_lightning.data.token_data import FileDataModule
from roundpipe_lightning.errors import ConfigurationError, DataError

Messages: TypeAlias = Sequence[Message]
Options: TypeAlias = Mapping[str, Any]
"""Further variables of a template."""

_OTHER = "\ufdd0"  # a character that no text has
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatDataModule(FileDataModule):
    """Conversations, instructions with answers, and texts, in any form that `Forms` knows.

    Conversations are written with the tokenizer's own chat template, and only what the assistant
    says is predicted; a message may say otherwise (`train`). Of texts every token is predicted, and
    a long one makes several samples. With packing, short conversations share a row: less is
    computed for padding, and no attention crosses from one conversation into another.

    Args:
        packing: Whether conversations share rows.
        no_target: What becomes of a conversation in which the assistant says nothing (that is
            left of it): `drop` or `refuse`.
        options: The other arguments of `FileDataModule`.
    """

    kinds = ("conversation", "text")

    def __init__(self, *, packing: bool = True, no_target: str = "drop", **options: Any) -> None:
        super().__init__(**options)
        if no_target not in ("drop", "refuse"):
            raise ConfigurationError(f"data.no_target={no_target!r} is not one of drop, refuse.")
        self.packing = packing
        self.no_target = no_target

    @property
    def packs_documents(self) -> bool:
        """Whether several documents share a row and must not see each other."""
        return self.packing

    @cached_property
    def _encoder(self) -> ConversationEncoder:
        return ConversationEncoder(self.tokenizer, name=self.tokenizer_name)

    @override
    def encode(self, record: Record) -> list[Sample]:
        content = self.forms.read(record)
        if content.text is not None:
            whole = text_sample(content.text, self.tokenizer, name=self.tokenizer_name)
            starts = range(0, len(whole) - 1, self.seq_len)
            return [whole[start : start + self.seq_len] for start in starts]
        whole = self._encoder(content.messages, place=record.place, **content.options)
        sample = self.fit_length(whole, place=record.place)
        if sample is not None and sample.num_targets == 0:
            if self.no_target == "refuse":
                raise DataError(
                    f"{record.place}: the assistant says nothing in the conversation"
                    f"{' as far as it is kept' if len(sample) < len(whole) else ''}, so there is "
                    "nothing to learn. Remove it, or set data.no_target=drop."
                )
            self.skipped["without a word of the assistant"] += 1
            return []
        return [] if sample is None else [sample]

    @override
    def arrange(self, samples: Sequence[Sample]) -> Sequence[Row]:
        """Conversations in rows: packed, or one in each."""
        if self.packing:
            return packed_rows(samples, seq_len=self.seq_len)
        return [as_row(sample) for sample in samples]

    @override
    def take(self, samples: list[Sample]) -> tuple[Sequence[Row], list[Sample]]:
        seq_len = self.seq_len if self.packing else 0
        rows, rest = first_rows(samples, num_rows=self.batch_size, seq_len=seq_len)
        as_one = packed_row if self.packing else lambda row: as_row(row[0])
        return [as_one(row) for row in rows], rest


class ConversationEncoder:
    """Turns conversations into samples in which only what the assistant says is predicted.

    Where the template marks the assistant's part (`{% generation %}`), the marks decide. Else, and
    where a message says itself whether it is learned, the conversation is rendered up to each
    message that is, with and without it, and the difference is its part: its text and the token
    that ends it.

    Args:
        tokenizer: A fast tokenizer of transformers with a chat template.
        name: What it is called, for messages.
    """

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        if not tokenizer.chat_template:
            raise ConfigurationError(
                f"The tokenizer {name} has no chat template, so it is not known how a conversation "
                "is written. Take the tokenizer of the model's chat variant, or set "
                "data.tokenizer.chat_template to a file with a Jinja template."
            )
        self.tokenizer = tokenizer
        self._is_marked = _MARKED.search(str(tokenizer.get_chat_template())) is not None

    def __call__(self, messages: Messages, *, place: str, **options: Any) -> Sample:
        """Encode a conversation that `check_messages` has checked; DataError: it cannot be written.

        `options` are further variables of the template, such as `tools`.
        """
        flagged = any(is_trained(message) is not None for message in messages)
        by_marks = self._is_marked and not flagged
        encode = self._encode_marked if by_marks else self._encode_by_difference
        return encode(messages, options, place=place)

    def last_answer(self, messages: Messages, *, place: str, **options: Any) -> Sample:
        """A conversation that ends with the assistant's message, which alone is predicted."""
        sample = self(messages, place=place, **options)
        targets = torch.nonzero(sample.labels != IGNORED).flatten().tolist()
        if targets:
            earlier = torch.nonzero(sample.labels[: targets[-1]] == IGNORED).flatten().tolist()
            sample.labels[: earlier[-1]] = IGNORED  # the last run of targets begins after it
        return sample

    def _encode_marked(self, messages: Messages, options: Options, *, place: str) -> Sample:
        found = self._render(
            messages,
            options,
            place=place,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        _check_written(messages, self.tokenizer.decode(found["input_ids"]), place=place)
        targets = [bool(mark) for mark in found["assistant_masks"]]
        return Sample.of(found["input_ids"], targets=targets)

    def _encode_by_difference(self, messages: Messages, options: Options, *, place: str) -> Sample:
        text, spans = self.spans(messages, options, place=place)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return self.sample(encoded["input_ids"], encoded["offset_mapping"], spans)

    @staticmethod
    def sample(
        ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
    ) -> Sample:
        """A sample whose targets are the tokens that begin, or go on, in some spans of its text."""
        targets = [
            any(start < stop and start < end and stop > begin for begin, end in spans)
            for start, stop in offsets
        ]
        return Sample.of(ids, targets=targets)

    def spans(
        self, messages: Messages, options: Options, *, place: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as a text, and the spans in it that are learned."""
        text = self._render(messages, options, place=place)
        _check_written(messages, text, place=place)
        spans = []
        for index, message in enumerate(messages):
            answers = message["role"] == "assistant"
            flag = is_trained(message)
            if answers if flag is None else flag:
                before = self._render(
                    messages[:index], options, place=place, add_generation_prompt=answers
                )
                through = self._render(messages[: index + 1], options, place=place)
                if text.startswith(through) and through.startswith(before):
                    span: Any = (len(before), len(through.rstrip()))
                else:
                    span = self._replaced(text, messages, index, options, place=place)
                    if span is not None and text.startswith(before):
                        span = (len(before), span[1])
                if span is None:
                    raise DataError(
                        f"{place}: message {index + 1} ({message['role']}) is learned, but the "
                        "template writes the conversation around it in another way once it is "
                        "there, so its tokens cannot be found. Use a template with generation "
                        "marks (data.tokenizer.chat_template)."
                    )
                if not answers:  # no answer begins with who speaks
                    span = (max(span[0], text.find(_text_of(message).strip(), span[0])), span[1])
                spans.append(span)
        return text, spans

    def _replaced(
        self, text: str, messages: Messages, index: int, options: Options, *, place: str
    ) -> tuple[int, int] | None:
        """The span of a message: where the text differs if the message says something else.

        Templates leave the reasoning of earlier messages out, or end the last one in another way,
        so that no part of a conversation need be the beginning of the whole.
        """
        message = messages[index]
        parts = isinstance(message.get("content"), list)
        content: Any = [{"type": "text", "text": _OTHER}] if parts else _OTHER
        other = {"role": message["role"], "content": content}
        other |= {name: _OTHER for name in REASONING if name in message}
        changed = [*messages[:index], other, *messages[index + 1 :]]
        written = self._render(changed, options, place=place)
        head, tail = written.partition(_OTHER)[0], written.rpartition(_OTHER)[2]
        if not text.startswith(head) or not text[len(head) :].endswith(tail):
            return None
        through = self._render(changed[: index + 1], options, place=place)
        endings = (through.rpartition(_OTHER)[2].rstrip(), *self.tokenizer.all_special_tokens)
        ending = next((each for each in endings if tail.startswith(each)), None)
        return None if ending is None else (len(head), len(text) - len(tail) + len(ending))

    def _render(self, messages: Messages, options: Options, *, place: str, **how: Any) -> Any:
        if not messages:
            return ""
        how.setdefault("tokenize", False)
        try:
            return self.tokenizer.apply_chat_template(list(messages), **options, **how)
        except (ValueError, TypeError, TemplateError) as error:
            raise DataError(
                f"{place}: the tokenizer's chat template refuses this conversation: {error}. Mend "
                "or remove it, or use another template: data.tokenizer.chat_template."
            ) from error


def _calls(message: Message) -> list[str]:
    calls = message.get("tool_calls") or ()
    return [str(call.get("function", call).get("name")) for call in calls]


def _check_written(messages: Messages, text: str, *, place: str) -> None:
    """Raise a DataError if a template leaves out calls of tools, or the last message's reasoning.

    Reasoning of earlier messages is left out by many, as it is where the model answers.
    """
    way_out = "Use one that does: data.tokenizer.chat_template."
    for number, message in enumerate(messages, start=1):
        for name in _calls(message):
            if name not in text:
                raise DataError(
                    f"{place}: message {number} calls the tool {name!r}, and the tokenizer's chat "
                    f"template does not write calls. {way_out}"
                )
    if str(messages[-1].get(REASONING[0], "")).strip() not in text:
        raise DataError(
            f"{place}: message {len(messages)} has reasoning, and the tokenizer's chat template "
            f"does not write it. {way_out} Or remove it."
        )


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    return "".join(str(part.get("text", "")) for part in parts)


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
    """

    kinds: ClassVar[Sequence[str]] = ("pair",)

    @cached_property
    def _encoder(self) -> ConversationEncoder:
        return ConversationEncoder(self.tokenizer, name=self.tokenizer_name)

    @override
    def encode(self, record: Record) -> Sequence[Any]:
        content = self.forms.read(record)
        chosen, rejected = (
            self._answer(answer, name, record, content)
            for name, answer in zip(("chosen", "rejected"), content.answers, strict=True)
        )
        if chosen is None or rejected is None:
            self.skipped[f"longer than data.seq_len={self.seq_len} tokens"] += 1
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

    def _answer(
        self, messages: Messages, field: str, record: Record, content: Content
    ) -> Sample | None:
        """A prompt with one of its answers, the last message alone as the target."""
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise DataError(
                f"{record.place}: the field {field!r} does not end with an answer of the assistant "
                "to something. Give a prompt, or messages that end with one."
            )
        whole = self._encoder.last_answer(messages, place=record.place, **content.options)
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
    """

    kinds = ("judged", "pair")

    @override
    def encode(self, record: Record) -> list[Judged]:
        content = self.forms.read(record)
        if content.desirable is None:
            return [(s, n == 0) for pair in super().encode(record) for n, s in enumerate(pair)]
        sample = self._answer(content.answers[0], "completion", record, content)
        if sample is None:
            self.skipped[f"longer than data.seq_len={self.seq_len} tokens"] += 1
        return [] if sample is None else [(sample, content.desirable)]

    @override
    def arrange(self, samples: Sequence[Judged]) -> Sequence[Row]:
        """Rows of shape (2, tokens): each prompt with its answer, and with another one's."""
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
