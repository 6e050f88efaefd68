"""Conversations, in the tokenizer's own chat template, and answers that were compared or judged."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, TypeAlias, cast

import torch
from jinja2 import TemplateError
from typing_extensions import override

from roundpipe_lightning.data.forms import REASONING, Content, Message, is_trained, read_arguments
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

_OTHER, _NEXT = "\ufdd0", "\ufdd1"  # characters that no text has
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING_END = re.compile(r"</\w+>")
_BREAK = re.compile(r"\n+")
_TOKEN = re.compile(r"<[^<>\s]+>")
_CONTINUES = re.compile(r"[^<\n]")
"""A text that goes on behind an answer with neither a line break nor a role."""

_TEMPLATE_SECONDS = 10
_TEMPLATE_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TemplateError,
    TypeError,
    ValueError,
)
"""What a template raises: it is a program, written by whoever published the tokenizer."""


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
    message that is, with and without it, and the difference is its part: its text and what ends it.

    Templates differ in the form that they take: contents as texts or as lists of parts, arguments
    of calls as objects or as JSON. The first form in which every text is written is taken.

    Args:
        tokenizer: A fast tokenizer of transformers with a chat template.
        name: What it is called, for messages.

    Attributes:
        endings: Tokens that end the learned parts, with how many parts they end.
        left_out: Parts of conversations that the template did not write, by kind.
    """

    def __init__(self, tokenizer: Any, *, name: str) -> None:
        if not tokenizer.chat_template:
            raise ConfigurationError(
                f"The tokenizer {name} has no chat template, so it is not known how a conversation "
                "is written. Take the tokenizer of the model's chat variant, or set "
                "data.tokenizer.chat_template to a file with a Jinja template."
            )
        self.tokenizer = tokenizer
        self.endings: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self._is_marked = _MARKED.search(str(tokenizer.get_chat_template())) is not None
        # all_special_tokens are the named ones alone: gpt-oss's <|end|> is not among them
        added = tokenizer.added_tokens_decoder.values()
        specials = {*tokenizer.all_special_tokens, *(str(each) for each in added if each.special)}
        self._specials = tuple(sorted(specials, key=len, reverse=True))
        self._forms: dict[Any, MessageForm] = {}

    def __call__(self, messages: Messages, *, place: str, **options: Any) -> Sample:
        """Encode a conversation that `check_messages` has checked; DataError: it cannot be written.

        `options` are further variables of the template, such as `tools`.
        """
        flagged = any(is_trained(message) is not None for message in messages)
        by_marks = self._is_marked and not flagged
        encode = self._encode_marked if by_marks else self._encode_by_difference
        sample = encode(messages, options, place=place)
        is_target = sample.labels != IGNORED
        last = torch.nonzero(is_target & ~torch.cat([is_target[1:], is_target.new_zeros(1)]))
        for at in last.flatten().tolist():
            ending = self.tokenizer.decode(sample.input_ids[at])
            if ending.isspace():  # a line break behind the token
                ending = self.tokenizer.decode(sample.input_ids[max(0, at - 1) : at + 1])
            self.endings[ending] += 1
        return sample

    @property
    def misses_ends(self) -> bool:
        """Whether a template's marks leave out every token that could end an answer."""
        known = any(token in ending for ending in self.endings for token in self._specials)
        return self._is_marked and bool(self.endings) and not known

    @property
    def remark(self) -> str:
        """What ends the learned parts, and what the template has left out, for a summary."""
        ends = " or ".join(repr(token) for token, _ in self.endings.most_common(3))
        left_out = "".join(
            f"; the template leaves out {what} ({count:,} times)"
            for what, count in self.left_out.items()
        )
        return f"; an answer ends with {ends}{left_out}" if ends else left_out

    def last_answer(self, messages: Messages, *, place: str, **options: Any) -> Sample:
        """A conversation that ends with the assistant's message, which alone is predicted."""
        sample = self(messages, place=place, **options)
        targets = torch.nonzero(sample.labels != IGNORED).flatten().tolist()
        if targets:
            earlier = torch.nonzero(sample.labels[: targets[-1]] == IGNORED).flatten().tolist()
            sample.labels[: earlier[-1]] = IGNORED  # the last run of targets begins after it
        return sample

    def _encode_marked(self, messages: Messages, options: Options, *, place: str) -> Sample:
        messages = self._in_form(messages, options, place=place)
        self._check_written(messages, self._render(messages, options, place=place), place=place)
        found = self._render(
            messages,
            options,
            place=place,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
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
        """A sample whose targets are the tokens that begin, or go on, in some spans of its text.

        A token covers the text from the end of the one before it: some tokenizers (GPT-NeoX's) take
        blanks out of the offsets of the tokens that they are in, down to empty ones.
        """
        targets, covered = [], 0
        for start, stop in offsets:
            start = min(start, covered)
            covered = max(covered, stop)
            targets.append(any(start < min(stop, end) and stop > begin for begin, end in spans))
        return Sample.of(ids, targets=targets)

    def spans(
        self, messages: Messages, options: Options, *, place: str
    ) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as a text, and the spans in it that are learned."""
        messages = self._in_form(messages, options, place=place)
        text = self._render(messages, options, place=place)
        self._check_written(messages, text, place=place)
        spans = []
        for index, message in enumerate(messages):
            answers = message["role"] == "assistant"
            flag = is_trained(message)
            if answers if flag is None else flag:
                begin, end = self._span(text, messages, index, options, place=place)
                if answers:
                    text, end = self._ended(text, end, messages, index, options, place=place)
                spans.append((begin, end))
        return text, spans

    def _span(
        self, text: str, messages: Messages, index: int, options: Options, *, place: str
    ) -> tuple[int, int]:
        """Where a message is written, without who speaks."""
        message, earlier = messages[index], messages[:index]
        before = self._render(earlier, options, place=place)
        prompt = before
        if message["role"] == "assistant":
            prompt = self._render(earlier, options, place=place, add_generation_prompt=True)
        through = self._render(messages[: index + 1], options, place=place)
        if text.startswith(through) and through.startswith(prompt):
            span: Any = (len(prompt), len(through.rstrip()))
        else:
            span = self._replaced(text, messages, index, options, place=place)
            if span is not None and text.startswith(prompt):
                span = (len(prompt), span[1])
        if span is None:
            raise DataError(
                f"{place}: message {index + 1} ({message['role']}) is learned, but the "
                "template writes the conversation around it in another way once it is "
                "there, so its tokens cannot be found. Use a template with generation "
                "marks (data.tokenizer.chat_template)."
            )
        if prompt == before:  # no generation prompt says who speaks, so the words begin the span
            written = self._render([*earlier, _other(message)], options, place=place)
            begin = written.find(_OTHER)
            if begin >= span[0] and text.startswith(written[:begin]):
                span = (begin, span[1])
        return cast(tuple[int, int], span)

    def _replaced(
        self, text: str, messages: Messages, index: int, options: Options, *, place: str
    ) -> tuple[int, int] | None:
        """The span of a message: where the text differs if the message says something else.

        Templates leave the reasoning of earlier messages out, or end the last one in another way,
        so that no part of a conversation need be the beginning of the whole.
        """
        changed = [*messages[:index], _other(messages[index]), *messages[index + 1 :]]
        written = self._render(changed, options, place=place)
        head, tail = written.partition(_OTHER)[0], written.rpartition(_OTHER)[2]
        if not text.startswith(head) or not text[len(head) :].endswith(tail):
            return None
        through = self._render(changed[: index + 1], options, place=place)
        ending = through.rpartition(_OTHER)[2].rstrip()
        if not ending or not tail.startswith(ending):
            if _CONTINUES.match(tail):
                return None
            ending = self._token_that_ends(tail, changed, index, options, place=place)
        return (len(head), len(text) - len(tail) + len(ending))

    def _token_that_ends(
        self, tail: str, changed: Messages, index: int, options: Options, *, place: str
    ) -> str:
        """The token at the beginning of a text that ends an answer and begins no other message."""
        token = self._token(tail)
        if not token or index + 1 == len(changed):
            return token
        following = [_other(changed[index + 1], _NEXT), *changed[index + 2 :]]
        written = self._render([*changed[: index + 1], *following], options, place=place)
        between = written.rpartition(_OTHER)[2].partition(_NEXT)[0].removeprefix(token)
        return token if any(map(str.isalnum, between)) else ""  # what says who speaks next is left

    def _ended(
        self, text: str, end: int, messages: Messages, index: int, options: Options, *, place: str
    ) -> tuple[str, int]:
        """The text, and the end of an answer in it with what ends the answer.

        Where the template writes nothing behind an answer, the next message's role ends it
        (GLM-4.5), or a line break. Behind the last answer the role is written that would come next.
        """
        message = messages[index]
        calls = bool(message.get("tool_calls"))
        said = _text_of(message).rstrip()
        if text.endswith(self._specials, 0, end) or not (calls or text.endswith(said, 0, end)):
            return text, end
        through = self._render(messages[: index + 1], options, place=place).rstrip()
        if through.endswith(self._specials):  # a token ends the last answer alone (OLMo)
            return text, end + len(_first(_BREAK, text[end:]))
        is_last = index == len(messages) - 1
        tail = self._next_turn(text[:end], messages, options, place) if is_last else text[end:]
        marker = self._token(tail) or _first(_BREAK, tail)
        if is_last and not marker.strip():
            raise ConfigurationError(
                f"{place}: the chat template writes no token behind the last answer, so the model "
                "would not learn to stop. Use a template that does, with {{ eos_token }} behind "
                "each answer: data.tokenizer.chat_template."
            )
        return (text[:end] + marker if is_last else text), end + len(marker)

    def _token(self, text: str) -> str:
        """The special token, or what looks like one, at the beginning of a text."""
        known = next((each for each in self._specials if text.startswith(each)), None)
        return known or _first(_TOKEN, text)

    def _next_turn(self, text: str, messages: Messages, options: Options, place: str) -> str:
        """What would be written behind a conversation if it went on; nothing if it cannot."""
        *earlier, last = messages
        calls = bool(last.get("tool_calls"))
        turn = {"role": "tool" if calls else "user", "content": _NEXT}
        answer = last if calls else {"role": "assistant", "content": _OTHER}
        form = self._form_of(messages, options, place=place)
        with suppress(DataError):
            written: str = self._render(
                [*earlier, *form.apply([answer, turn])], options, place=place
            )
            if not calls:
                return written.rpartition(_OTHER)[2]
            if written.startswith(text):
                return written.removeprefix(text)
        return ""

    def _form_of(self, messages: Messages, options: Options, *, place: str) -> MessageForm:
        """The form of messages that the template takes, tried with texts that no one writes."""
        shape = tuple(
            (m["role"], isinstance(m.get("content"), str), bool(m.get("tool_calls")))
            for m in messages
        )
        if shape not in self._forms:
            probes = [_probe(message, number) for number, message in enumerate(messages)]
            signs = {sign for _, signs in probes for sign in signs}
            lost: dict[MessageForm, int] = {}
            for form in MessageForm.known():
                with suppress(DataError):
                    written = self._render(
                        form.apply([probe for probe, _ in probes]), options, place=place
                    )
                    lost[form] = sum(sign not in written for sign in signs)
                if lost.get(form) == 0:
                    break
            self._forms[shape] = min(lost, key=lambda form: lost[form], default=MessageForm())
        return self._forms[shape]

    def _in_form(self, messages: Messages, options: Options, *, place: str) -> Messages:
        return self._form_of(messages, options, place=place).apply(messages)

    def _render(self, messages: Messages, options: Options, *, place: str, **how: Any) -> Any:
        if not messages:
            return ""
        how.setdefault("tokenize", False)
        try:
            with _time_limit(_TEMPLATE_SECONDS):
                return self.tokenizer.apply_chat_template(list(messages), **options, **how)
        except TimeoutError as error:
            raise ConfigurationError(
                f"{place}: the tokenizer's chat template takes more than {_TEMPLATE_SECONDS} "
                "seconds for this conversation. Use another one: data.tokenizer.chat_template."
            ) from error
        except _TEMPLATE_ERRORS as error:
            raise DataError(
                f"{place}: the tokenizer's chat template refuses this conversation: "
                f"{str(error) or type(error).__name__}. Mend or remove it, or use another "
                "template: data.tokenizer.chat_template."
            ) from error

    def _check_written(self, messages: Messages, text: str, *, place: str) -> None:
        """Raise a DataError if a template leaves out a message's words, or calls of tools.

        Reasoning of earlier messages is left out by many templates, as it is where the model
        answers, and so are words beside calls of tools. Both are counted.
        """
        way_out = "Use one that does: data.tokenizer.chat_template."
        squeezed = _squeezed(text)

        def is_written(words: str) -> bool:  # some templates write the results of tools as JSON
            as_json = json.dumps(words, ensure_ascii=False)[1:-1]
            return _squeezed(words) in squeezed or _squeezed(as_json) in squeezed

        for number, message in enumerate(messages, start=1):
            for name in _calls(message):
                if name not in text:
                    raise DataError(
                        f"{place}: message {number} calls the tool {name!r}, and the tokenizer's "
                        f"chat template does not write calls. {way_out}"
                    )
        for number, message in enumerate(messages, start=1):
            is_last = number == len(messages)
            for words in _texts_of(message):
                answer = _REASONING_END.split(words)[-1]
                if is_written(words):
                    continue
                if not is_last and answer != words and is_written(answer):
                    self.left_out["reasoning of earlier answers"] += 1
                elif message.get("tool_calls"):
                    self.left_out["words beside calls of tools"] += 1
                else:
                    raise DataError(
                        f"{place}: the tokenizer's chat template does not write the content of "
                        f"message {number} ({message['role']}), {words[:40]!r}. {way_out}"
                    )
            if not is_written(str(message.get(REASONING[0], ""))):
                if is_last:
                    raise DataError(
                        f"{place}: message {number} has reasoning, and the tokenizer's chat "
                        f"template does not write it. {way_out} Or remove it."
                    )
                self.left_out["reasoning of earlier answers"] += 1


@dataclass(frozen=True, kw_only=True)
class MessageForm:
    """A form of messages that a chat template takes.

    Attributes:
        content_parts: Whether contents are lists of parts; else they are texts.
        json_arguments: Whether the arguments of calls are JSON in a text; else they are objects.
    """

    content_parts: bool = False
    json_arguments: bool = False

    @classmethod
    def known(cls) -> Iterator[MessageForm]:
        """All forms, the commonest first."""
        for parts, as_json in product((False, True), repeat=2):
            yield cls(content_parts=parts, json_arguments=as_json)

    def apply(self, messages: Messages) -> list[Message]:
        return [self._applied(message) for message in messages]

    def _applied(self, message: Message) -> Message:
        changes: dict[str, Any] = {}
        content = message.get("content")
        if self.content_parts and isinstance(content, str):
            changes["content"] = [{"type": "text", "text": content}]
        if message.get("tool_calls"):
            changes["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return {**message, **changes}

    def _call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call["function"]
        arguments = function.get("arguments")
        if not self.json_arguments:
            arguments = read_arguments(arguments)
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}


def _probe(message: Message, number: int) -> tuple[Message, list[str]]:
    """A message with words, and arguments of calls, that no other has; and what they are."""
    words, argument = (f"{_OTHER}{number}{kind}{_OTHER}" for kind in ("words", "argument"))
    probe, signs = dict(message), []
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        probe["content"] = words
        signs.append(words)
    if message.get("tool_calls"):
        signs.append(argument)
        probe["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"name": argument}}}
            for call in message["tool_calls"]
        ]
    return probe, signs


def _other(message: Message, words: str = _OTHER) -> Message:
    """A message of the same role that says something else, and calls no tools."""
    parts = isinstance(message.get("content"), list)
    content: Any = [{"type": "text", "text": words}] if parts else words
    thoughts = {name: words for name in REASONING if name in message}
    return {"role": message["role"], "content": content, **thoughts}


def _calls(message: Message) -> list[str]:
    return [str(call["function"]["name"]) for call in message.get("tool_calls") or ()]


def _texts_of(message: Message) -> list[str]:
    content = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    return [str(part.get("text", "")) for part in parts]


def _text_of(message: Message) -> str:
    return "".join(_texts_of(message))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise a TimeoutError in the main thread after some seconds, where the system has timers."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:  # a timer of somebody else goes on
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)


def _first(pattern: re.Pattern[str], text: str) -> str:
    """What a pattern finds at the beginning of a text."""
    found = pattern.match(text)
    return found.group() if found else ""


def _squeezed(text: str) -> str:
    """A text without blanks and line breaks, which templates take away and put in."""
    return "".join(text.split())


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
