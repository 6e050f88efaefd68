"""Forms of records: recognised by their fields, and brought into one."""

import json
from typing import Any

import pytest

from roundpipe_lightning.data import Record
from roundpipe_lightning.data.chat import ConversationEncoder
from roundpipe_lightning.data.forms import Forms
from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.modules import TokenizerSource

ASKED = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
PARTS = [{"type": "text", "text": "q"}]


def forms(*kinds: str, **names: str) -> Forms:
    return Forms(kinds=kinds or ("conversation", "text", "pair", "judged"), names=names)


def record(fields: dict[str, Any], line: int = 1) -> Record:
    return Record(fields=fields, place=f"a.jsonl, line {line}", part="a.jsonl")


@pytest.mark.parametrize(
    ("fields", "name", "messages"),
    [
        ({"messages": [ASKED, SAID], "source": "x"}, "messages", [ASKED, SAID]),
        ({"messages": json.dumps([ASKED, SAID])}, "messages", [ASKED, SAID]),
        ({"conversations": [ASKED, SAID]}, "messages", [ASKED, SAID]),
        ({"messages": [{"role": "user", "content": PARTS}, SAID]}, "messages", [ASKED, SAID]),
        ({"conversations": TURNS, "system": "s"}, "ShareGPT", [SYSTEM, ASKED, SAID]),
        ({"instruction": "q", "input": "", "output": "a"}, "Alpaca", [ASKED, SAID]),
        ({"instruction": "q", "input": None, "output": "a"}, "Alpaca", [ASKED, SAID]),
        (
            {"instruction": "q", "input": "i", "output": "a", "history": [["x", "y"]]},
            "Alpaca",
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "y"},
                {"role": "user", "content": "q\n\ni"},
                SAID,
            ],
        ),
        ({"prompt": "q", "completion": "a"}, "prompt/completion", [ASKED, SAID]),
        ({"prompt": [SYSTEM, ASKED], "completion": [SAID]}, "prompt/completion", None),
        ({"question": "q", "answer": "a"}, "question/answer", [ASKED, SAID]),
    ],
)
def test_conversations_are_recognised(
    fields: dict[str, Any], name: str, messages: list[Any] | None
) -> None:
    known = forms("conversation", "text")
    content = known.read(record(fields))
    assert known.found["a.jsonl"][0].name == name
    assert content.messages == (messages or [SYSTEM, ASKED, SAID])


@pytest.mark.parametrize(
    "before",
    [
        {"prompt": "q"},
        {"prompt": [ASKED]},
        {"conversations": [TURNS[0]]},
        {"instruction": "q", "input": ""},
    ],
    ids=str,
)
def test_pairs_and_judged_answers_are_recognised(before: dict[str, Any]) -> None:
    turn = {"from": "gpt", "value": "a"}
    for chosen in ("a", [SAID], turn):
        content = forms("pair").read(record({**before, "chosen": chosen, "rejected": "b"}))
        assert content.messages == [ASKED]
        assert content.answers[0] == [SAID]
    judged = {"prompt": "q", "completion": "a", "label": "False"}
    content = forms("judged").read(record(judged))
    assert (content.messages, content.answers, content.desirable) == ([ASKED], ([SAID],), False)


def test_calls_of_tools_and_own_names_of_fields_are_read() -> None:
    call = {"name": "add", "arguments": {"x": 1}}
    turns = [TURNS[0], {"from": "function_call", "value": json.dumps(call)}, TURNS[1]]
    content = forms("conversation").read(record({"conversations": turns, "tools": '[{"a": 1}]'}))
    assert content.messages[1]["tool_calls"] == [{"type": "function", "function": call}]
    assert content.tools == [{"a": 1}]
    named = forms("conversation", prompt="ask", completion="reply")
    assert named.read(record({"ask": "q", "reply": "a"})).messages == [ASKED, SAID]
    assert forms("text", text="body").read(record({"body": "q"})).text == "q"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"instruct": "q", "outputs": "a"},
            r"'instruct', 'outputs' are of no .*nearest is Alpaca .*data\.fields={instruction: \.",
        ),
        ({"chosen": "a", "rejected": "b"}, r"preference pairs .*module=preference data=preference"),
        ({"conversations": [{"from": "us", "value": "a"}]}, r"turn 1 is from 'us'\. Known are hum"),
        ({"instruction": "q", "output": ""}, r"the field 'output' is empty\. Remove"),
        ({"question": "q", "answer": None, "response": 3}, r"of no known form"),
        ({"prompt": "q", "completion": 3}, r"the field 'completion' is a value of type int"),
        ({"messages": [{**ASKED, "train": "yes"}]}, r"message 1 has train='yes'\. Use true or"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"message 1 has an image, .* recipe=gemma3_4b/qlora",
        ),
    ],
)
def test_what_cannot_be_read_is_named_with_the_way_out(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=f"^a.jsonl, line 1: .*{message}"):
        forms("conversation", "text").read(record(fields))


def test_a_file_has_one_form() -> None:
    known = forms()
    known.read(record({"text": "x"}))
    with pytest.raises(DataError, match=r"line 2: this record is Alpaca.*texts \(a.jsonl, line 1"):
        known.read(record({"instruction": "q", "output": "a"}, line=2))
    with pytest.raises(ConfigurationError, match=r"data\.fields\.txt: there is no such field"):
        forms(txt="body")


@pytest.mark.parametrize("flag", ["train", "weight"])
def test_a_message_says_whether_it_is_learned(flag: str) -> None:
    tokenizer = TokenizerSource().load()
    messages: list[Any] = [{**ASKED, flag: 1}, {**SAID, flag: 0}, ASKED, {**SAID, "content": "b"}]
    sample = ConversationEncoder(tokenizer, name="it")(messages, place="p")
    learned = tokenizer.decode(sample.labels[sample.labels != -100])
    assert learned == "q<|im_end|>b<|im_end|>"
