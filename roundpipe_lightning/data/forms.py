"""Forms of records: conversations, instructions, texts and pairs, recognised by their fields."""

from __future__ import annotations

import difflib
import json
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundpipe_lightning.data.records import Record, check_text, suffix_of
from roundpipe_lightning.errors import ConfigurationError, DataError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles that a message may have; whether a template knows all of them is the template's matter."""

Message = Mapping[str, Any]

_SPEAKERS = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    **{role: role for role in ROLES},
}
"""Roles by what ShareGPT's `from` says."""

_QUESTIONS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
)


@dataclass(frozen=True, kw_only=True)
class Content:
    """What a record says, whatever its form.

    Attributes:
        text: A text that is learned as it is; None: there are messages.
        messages: A conversation that is learned.
        answers: Conversations that end with the chosen and with the rejected answer, or with one
            that was judged.
        desirable: Whether the one answer is wanted; None where nothing was judged.
        tools: What the template is given as tools.
    """

    text: str | None = None
    messages: Sequence[Message] = ()
    answers: Sequence[Sequence[Message]] = ()
    desirable: bool | None = None
    tools: Any = None

    @property
    def options(self) -> dict[str, Any]:
        """Further variables of the template."""
        return {"tools": self.tools} if self.tools else {}


@dataclass(frozen=True)
class Form:
    """A form of records.

    Attributes:
        kind: `text`, `conversation`, `pair` or `judged`: what can be learned from it.
        needs: Fields that it has.
        read: Makes content of a record of this form.
    """

    name: str
    kind: str
    needs: tuple[str, ...]
    read: Callable[[Record], Content]


@dataclass(kw_only=True)
class Forms:
    """Recognises the form of records; all records of a file have the same.

    Attributes:
        kinds: Kinds of forms that are wanted.
        names: The records' own name of a field by the name that it has in a form.
        images: Whether messages may have images; they have parts then, as transformers takes them.
    """

    kinds: Sequence[str]
    images: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    found: dict[str, tuple[Form, str, str]] = field(default_factory=dict)
    """Form and place of the first record of each file, and names of its fields that none reads."""

    def __post_init__(self) -> None:
        known = sorted({name for form in _FORMS for name in form.needs} | set(_BESIDE))
        for name in self.names:
            if name not in known:
                raise ConfigurationError(
                    f"data.fields.{name}: there is no such field. There are {', '.join(known)}."
                )

    def read(self, record: Record) -> Content:
        """The content of a record; DataError: its form is not known, not wanted, or another one."""
        own = {name: _without_null(value) for name, value in record.fields.items()}
        renamed = {name: _without_null(record.get(given)) for name, given in self.names.items()}
        fields = _Watched({**own, **renamed})
        record = Record(fields=fields, place=record.place, part=record.part)
        first, place, _ = self.found.get(record.part, (None, "", ""))
        form = self._recognise(record)
        if first is None:
            if form.kind not in self.kinds:
                raise DataError(
                    f"{record.place}: this is {form.name} ({', '.join(form.needs)}), and what is "
                    "trained learns from "
                    f"{' or '.join(_KINDS[kind].partition(':')[0] for kind in self.kinds)}. "
                    f"From {_KINDS[form.kind]}."
                )
        elif form is not first:
            raise DataError(
                f"{record.place}: this record is {form.name}, and the file began with "
                f"{first.name} ({place}). Give records of different forms files of their own: "
                "data.files takes several."
            )
        fields.seen.clear()
        content = form.read(record)
        check_text(vars(content), place=record.place)
        unread = own.keys() - fields.seen - set(self.names.values()) - _VERDICT
        self.found.setdefault(record.part, (form, record.place, ", ".join(sorted(unread))))
        verdicts = (str(record.fields.get(name)).strip().lower() for name in _VERDICT)
        if form.kind == "conversation" and "false" in verdicts:
            raise DataError(
                f"{record.place}: this answer was judged as unwanted (label: false), and would be "
                "learned here. Leave it out, or learn from what was judged: module=kto data=kto."
            )
        seen = (
            number
            for said in (content.messages, *content.answers)
            for number, message in enumerate(said, start=1)
            if isinstance(message.get("content"), list)
        )
        number = None if self.images else next(seen, None)
        if number is not None:
            raise DataError(
                f"{record.place}: message {number} has an image, and what is trained reads text "
                "alone. Remove it, or train a model that sees: recipe=gemma3_4b/vision, or "
                "module=vision data=vision with model=... of your own."
            )
        return content

    def _recognise(self, record: Record) -> Form:
        there = {name for name, value in record.fields.items() if value is not None}
        fitting = [form for form in _FORMS if there.issuperset(form.needs)]
        asks = there >= {"chosen", "rejected"}  # `conversations` is what they answer
        wanted = [
            form
            for form in fitting
            if form.kind in self.kinds and not (asks and form.needs == ("conversations",))
        ]
        for form in (*wanted, *fitting):
            if form.needs != ("conversations",) or _speaks(record) == form.name:
                return form
        usable = [form for form in _FORMS if form.kind in self.kinds]
        for form in usable:
            if record.fields.keys() >= set(form.needs):
                null = next(name for name in form.needs if name not in there)
                raise DataError(
                    f"{record.place}: the field {null!r} is null ({form.name}). Give it a value "
                    "or leave the record out."
                )
        nearest = max(usable, key=lambda form: _likeness(form.needs, there))
        missing = [name for name in nearest.needs if name not in there]
        given = ", ".join(map(repr, record.fields)) or "none"
        changes = ", ".join(f"{name}: ..." for name in missing)
        is_table = suffix_of(Path(record.part)) in (".csv", ".tsv")
        by = " (so the first line names them)" if is_table else ""
        raise DataError(
            f"{record.place}: the fields {given}{by} are of no known form. The nearest is "
            f"{nearest.name} ({', '.join(nearest.needs)}): rename the fields, or say which they "
            f"are, data.fields={{{changes}}}."
        )


def check_messages(value: Any, *, place: str) -> Sequence[Message]:
    """The messages of a conversation, contents of several parts joined if all of them are text.

    DataError: it is empty, no list, or a message has no content or no role that is known.
    """
    value = _from_json(value)
    if not _is_list(value) or not value:
        raise DataError(
            f"{place}: a conversation is a list of messages, and not an empty one, such as "
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}].'
        )
    return [_message(each, number, place) for number, each in enumerate(value, start=1)]


def is_trained(message: Message) -> bool | None:
    """Whether a message is learned by its own flag (one of `_FLAGS`); None: it has none."""
    flag = next((message[name] for name in _FLAGS if name in message), None)
    return None if flag is None else bool(flag)


_FLAGS = ("train", "training", "weight", "loss_weight")
_DETAIL = "train_detail"  # Axolotl's flags of parts of a message


def _message(given: Any, number: int, place: str) -> Message:
    if not isinstance(given, Mapping):
        raise DataError(f"{place}: message {number} is no object with a role and a content.")
    message = {str(name): value for name, value in given.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise DataError(
            f"{place}: message {number} has the role {role!r}. Known roles are {', '.join(ROLES)}."
        )
    for name in _FLAGS:
        if message.get(name, 0) not in (0, 1):
            raise DataError(
                f"{place}: message {number} has {name}={message[name]!r}. Use true or false, or 1 "
                "or 0."
            )
    if _DETAIL in message:
        raise _partial_flag(_DETAIL, number, place)
    if message.get("tool_calls"):
        message["tool_calls"] = _as_calls(message["tool_calls"], f"{place}: message {number}")
    content: Any = message.get("content")
    if _is_list(content):
        message["content"] = content = _join_parts(content, message, number, place)
    thoughts = next((message[name] for name in REASONING if message.get(name)), None)
    if thoughts is not None:
        message |= dict.fromkeys(REASONING, thoughts)
    if content is not None and not isinstance(content, (str, list)):
        raise DataError(
            f"{place}: the content of message {number} ({role}) is neither a text nor a list of "
            "texts and images."
        )
    speaks = role in ("user", "assistant") and not message.get("tool_calls")
    is_empty = not (content.strip() if isinstance(content, str) else content)
    if is_empty and (speaks or (content is None and role != "assistant")):
        raise DataError(
            f"{place}: message {number} ({role}) has no content. Give it one or remove it."
        )
    return message


REASONING = ("reasoning_content", "thinking", "reasoning")
"""What chat templates and data sets call a message's reasoning."""


def _join_parts(content: Any, message: dict[str, Any], number: int, place: str) -> Any:
    """A content of parts as a text, or as parts if one is an image; the others go beside it."""
    parts = []
    for given in content:
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind in REASONING:
            said = str(given.get(kind, given.get("value")))
            message[kind] = "\n".join([message[kind], said] if kind in message else [said])
        elif kind == "tool_call":
            calls = _as_calls(given.get("value"), f"{place}: message {number}")
            message["tool_calls"] = [*message.get("tool_calls", ()), *calls]
        else:
            parts.append(_part(given, number, place))
    sees = any(part["type"] == "image" for part in parts)
    return parts if sees else "".join(part["text"] for part in parts)


def _as_calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Calls of tools, a JSON object or a list of them, as chat templates take them.

    Arguments stay as they are written, an object or its JSON: templates differ in what they take.
    """
    listed = _from_json(value)
    calls = []
    for call in listed if _is_list(listed) else [listed]:
        call = _from_json(call)
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or "name" not in function:
            raise DataError(
                f"{place} has a call of a tool that is no JSON object with a 'name': {call!r}."
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str) and not isinstance(read_arguments(arguments), Mapping):
            raise DataError(
                f"{place} calls the tool {function['name']!r} with arguments that are no JSON "
                f"object: {arguments[:60]!r}. Mend or remove the record."
            )
        calls.append({"type": "function", **(call if "function" in call else {"function": call})})
    return calls


def read_arguments(arguments: Any) -> Any:
    """The arguments of a call as an object where they are its JSON; an empty text says none."""
    return _from_json(arguments.strip() or "{}") if isinstance(arguments, str) else arguments


def _part(part: Any, number: int, place: str) -> dict[str, Any]:
    """One of OpenAI's content parts as transformers has it; an image may be beside the messages."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    given = {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}
    kind = given.get("type")
    text = given.get("text", given.get("value"))
    flag = next((name for name in _FLAGS if name in given), None)
    if flag is not None:
        raise _partial_flag(flag, number, place)
    if kind in ("text", "input_text", "output_text") and isinstance(text, str):
        return {"type": "text", "text": text}
    if kind in ("image_url", "image", "input_image"):
        names = ("image_url", "image", "url", "path", "base64", "value")
        image: Any = next((given[name] for name in names if name in given), None)
        address = isinstance(image, Mapping) and isinstance(image.get("url"), str)
        return {"type": "image", "image": image["url"] if address else image}
    raise DataError(
        f"{place}: message {number} has a part of type {kind!r}. Texts and images are known: "
        '{"type": "text", "text": "..."}, {"type": "image_url", "image_url": {"url": "a.png"}}.'
    )


def _partial_flag(name: str, number: int, place: str) -> DataError:
    return DataError(
        f"{place}: message {number} has parts that are learned or not ({name!r}), and messages are "
        "only as a whole. Set the flag of the message ('train'), or remove it from the parts."
    )


_UNKNOWN = ("audio", "audios", "video", "videos")
"""Fields beside the messages whose places in the texts would be learned as words."""

_IMAGE = "<image>"  # place of an image in a text, as ShareGPT's files with images have it


def _with_images(record: Record, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with the images that stand beside them, each at its place.

    Without places they are at the beginning of the first message of the user.
    """
    unknown = next((name for name in _UNKNOWN if record.fields.get(name)), None)
    if unknown is not None:
        raise DataError(
            f"{record.place}: the field {unknown!r} has more than texts and images, which alone "
            "are learned. Leave the record out, or remove the field and its places in the texts."
        )
    beside = record.fields.get("images", record.fields.get("image"))
    images = list(beside) if _is_list(beside) else [beside]
    if beside is None or beside == "" or not images:
        return messages
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str) and _IMAGE in content:
            first, *others = content.split(_IMAGE)
            parts: Any = [{"type": "text", "text": first}]
            for text in others:
                parts += [{"type": "image", "image": None}, {"type": "text", "text": text}]
            content = [part for part in parts if part.get("text", _IMAGE)]
        found.append({**message, "content": content})
    places = [
        part
        for message in found
        if isinstance(message["content"], list)
        for part in message["content"]
        if part["type"] == "image" and part["image"] is None
    ]
    if not places:
        asked = next((m for m in found if m["role"] == "user"), found[0])
        text = asked["content"]
        said = [{"type": "text", "text": text}] if isinstance(text, str) else text
        places = [{"type": "image", "image": None} for _ in images]
        asked["content"] = [*places, *said]
    if len(places) != len(images):
        raise DataError(
            f"{record.place}: the messages have {len(places)} places of images, and 'images' has "
            f"{len(images)}. Give each place one."
        )
    for part, image in zip(places, images, strict=True):
        part["image"] = image
    return found


class _Watched(UserDict[str, Any]):
    """Fields that note which of them are read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.seen: set[str] = set()
        super().__init__(fields)

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)


def _without_null(value: Any) -> Any:
    """A value without the null entries of its objects.

    Columns of Parquet files and data sets give every row the keys of all rows, null where a row
    has none: they would be learned as arguments of calls and as properties of tools.
    """
    if isinstance(value, Mapping):
        return {name: _without_null(each) for name, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if _is_list(value) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _from_json(value: Any) -> Any:
    """A list or an object that a column of a table holds as JSON."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _speaks(record: Record) -> str:
    """Whether the turns of `conversations` are ShareGPT's or have roles."""
    turns = _from_json(record.fields["conversations"])
    first = turns[0] if isinstance(turns, Sequence) and turns else None
    return "ShareGPT" if isinstance(first, Mapping) and "from" in first else "messages"


def _messages(name: str) -> Callable[[Record], Content]:
    return lambda record: _conversation(record, record.get(name))


def _messages_or_turns(record: Record) -> Content:
    said = _said("user", record.get("conversations"), record)
    return _conversation(record, said)


def _turns(turns: Any, record: Record) -> list[Message]:
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        speaker = turn.get("from") if isinstance(turn, Mapping) else None
        if not isinstance(speaker, str) or speaker not in _SPEAKERS:
            raise DataError(
                f"{record.place}: turn {number} is from {speaker!r}. Known are "
                f"{', '.join(_SPEAKERS)}."
            )
        message = {"role": _SPEAKERS[speaker], "content": turn.get("value")}
        call = _from_json(message["content"])
        calls = [call] if isinstance(call, Mapping) else call
        if speaker == "function_call" and _is_list(calls):
            message = {"role": "assistant", "content": ""}
            message["tool_calls"] = calls
        flags = {name: turn[name] for name in (*_FLAGS, _DETAIL) if name in turn}
        messages.append({**message, **flags})
    return messages


def _instruction(record: Record) -> list[Message]:
    """What Alpaca's fields before the answer say."""
    messages = []
    history = _from_json(record.fields.get("history")) or ()
    if not _is_list(history) or not all(_is_list(pair) and len(pair) == 2 for pair in history):
        raise DataError(
            f"{record.place}: the field 'history' is no list of pairs of a question and its answer."
        )
    for question, answer in history:
        messages += [*_said("user", question, record), *_said("assistant", answer, record)]
    asked = [record.get("instruction"), record.fields.get("input")]
    return [*messages, *_said("user", "\n\n".join(str(text) for text in asked if text), record)]


def _alpaca(record: Record) -> Content:
    return _conversation(record, [*_instruction(record), *_given("assistant", record, "output")])


def _question(prompt: str, answer: str) -> Callable[[Record], Content]:
    return lambda record: _answered(record, _given("user", record, prompt), answer)


def _answered(record: Record, asked: Sequence[Any], answer: str) -> Content:
    """What was asked with its answer, a field that may have the whole conversation."""
    before = check_messages(asked, place=record.place) if asked else ()
    said = check_messages(_given("assistant", record, answer), place=record.place)
    is_whole = bool(before) and said[0]["role"] != "assistant" and before[-1] in said
    return _conversation(record, said if is_whole else [*before, *said])


_VERDICTS = {"true": True, "false": False, "1": True, "0": False}
_VERDICT = {"label", "kto_tag"}


def _judged(read: Callable[[Record], Content]) -> Callable[[Record], Content]:
    """KTO's: a conversation, and whether its last answer is wanted."""

    def judged(record: Record) -> Content:
        label = record.get("label")
        wanted = _VERDICTS.get(str(label).strip().lower())
        if wanted is None:
            raise DataError(
                f"{record.place}: the label {label!r} says neither true (a wanted answer) nor "
                "false."
            )
        said = read(record)
        return Content(answers=(said.messages,), desirable=wanted, tools=said.tools)

    return judged


def _pair(*names: str) -> Callable[[Record], Content]:
    def pair(record: Record) -> Content:
        before = _before(record)
        chosen, rejected = (_answered(record, before, name) for name in names)
        return Content(answers=(chosen.messages, rejected.messages), tools=chosen.tools)

    return pair


def _before(record: Record) -> Sequence[Any]:
    """What is before the answers of a pair."""
    fields = record.fields
    names = ("conversations", "instruction", "prompt", "question", "input")
    name = next((name for name in names if fields.get(name) is not None), None)
    if name == "instruction":
        return _instruction(record)
    return () if name is None else _said("user", fields[name], record)


def _given(role: str, record: Record, name: str) -> list[Any]:
    """What a field says, which a text alone must not leave empty."""
    value = record.get(name)
    is_text = isinstance(value, str) or not isinstance(value, (Mapping, Sequence))
    return _said(role, record.text(name) if is_text else value, record)


def _said(role: str, value: Any, record: Record) -> list[Any]:
    """Messages, turns or a text as messages; JSON that is neither of the first two is a text."""
    turns = _from_json(value)
    turns = [turns] if isinstance(turns, Mapping) else turns
    first = turns[0] if _is_list(turns) and turns else None
    given = set(first) if isinstance(first, Mapping) else set()
    speaks = {"from", "value"} <= given or {"role", "content"} <= given
    if not _is_list(turns) or (isinstance(value, str) and not speaks):
        return [{"role": role, "content": value}]
    return _turns(turns, record) if "from" in given else list(turns)


def _conversation(record: Record, given: Any) -> Content:
    """A conversation with what stands beside it."""
    messages = check_messages(given, place=record.place)
    system = record.fields.get("system") or record.fields.get("system_prompt")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    messages = _with_images(record, messages)
    tools: Any = _from_json(record.fields.get("tools")) or None
    if _is_list(tools):
        tools = [_from_json(tool) for tool in tools]
    return Content(messages=messages, tools=tools)


_KINDS = {
    "pair": "pairs of answers: module=preference data=preference (recipe=.../dpo)",
    "judged": "judged answers: module=kto data=kto (recipe=.../kto)",
    "conversation": "conversations: module=causal_lm data=chat",
    "text": "texts: module=causal_lm data=chat or data=text",
}
"""What each kind is, and what learns from it, by name."""

_FORMS: Iterable[Form] = (
    *(
        Form("preference pairs", "pair", names, _pair(*names))
        for names in (("chosen", "rejected"), ("chosen_messages", "rejected_messages"))
    ),
    *(
        Form("judged answers", "judged", (*needs, "label"), _judged(read))
        for needs, read in (
            (("prompt", "completion"), _question("prompt", "completion")),
            (("messages",), _messages("messages")),
            (("conversations",), _messages_or_turns),
            (("instruction", "output"), _alpaca),
        )
    ),
    Form("messages", "conversation", ("messages",), _messages("messages")),
    Form("ShareGPT", "conversation", ("conversations",), _messages_or_turns),
    Form("messages", "conversation", ("conversations",), _messages("conversations")),
    Form("messages", "conversation", ("conversation",), _messages("conversation")),
    Form("Alpaca", "conversation", ("instruction", "output"), _alpaca),
    *(
        Form(f"{ask}/{answer}", "conversation", (ask, answer), _question(ask, answer))
        for ask, answer in _QUESTIONS
    ),
    Form("texts", "text", ("text",), lambda record: Content(text=record.text("text"))),
)
"""All forms; of several that fit the first one is taken, a wanted one before the others."""

_BESIDE = ("system", "tools", "history", "input", "prompt", "instruction")
"""Fields that some forms may have besides."""


def _likeness(needs: Sequence[str], there: Iterable[str]) -> float:
    """How much like the fields of a form the fields of a record are, 0 to 1."""
    best = (
        max((difflib.SequenceMatcher(None, need, name).ratio() for name in there), default=0.0)
        for need in needs
    )
    return sum(best) / len(needs)
