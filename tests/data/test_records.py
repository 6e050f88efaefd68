import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch import LightningModule

from roundpipe_lightning.data import (
    ChatDataModule,
    DatasetRecords,
    Record,
    RecordFiles,
    TextDataModule,
)
from roundpipe_lightning.data.chat import ConversationEncoder
from roundpipe_lightning.data.forms import Forms
from roundpipe_lightning.data.records import is_in_share, passes
from roundpipe_lightning.data.samples import StreamLoader
from roundpipe_lightning.errors import CheckpointError, ConfigurationError, DataError
from roundpipe_lightning.modules import TokenizerSource
from tests.kit.training import make_trainer

UNUSUAL = 'line\u2028separator, "quotes" and ünïcode\n'


def read(*paths: Path) -> list[Record]:
    files = RecordFiles(paths=[str(path) for path in paths])
    return [record for part in files.parts() for record in files.read(part)]


@pytest.mark.parametrize(
    ("name", "content", "fields", "last_place"),
    [
        ("a.jsonl", '{"text": "one"}\n\n{"text": "two"}', [{"text": "one"}, {"text": "two"}], 3),
        (
            "a.jsonl",  # records of several forms
            '{"prompt": "x"}\n{"prompt": [{"role": "user"}], "n": 1}',
            [{"prompt": "x"}, {"prompt": [{"role": "user"}], "n": 1}],
            2,
        ),
        ("a.jsonl", json.dumps({"text": UNUSUAL}, ensure_ascii=False), [{"text": UNUSUAL}], 1),
        (
            "a.csv",
            'text,label\n"one, two",x\nthree,y\n',
            [{"text": "one, two", "label": "x"}, {"text": "three", "label": "y"}],
            3,
        ),
        ("a.csv", "text;label\none, two;x\n", [{"text": "one, two", "label": "x"}], 2),
        ("a.tsv", "text\tlabel\none\tx\n", [{"text": "one", "label": "x"}], 2),
        ("a.csv", "\ufefftext\na\n", [{"text": "a"}], 2),  # as Excel writes it
        ("a.txt", "\ufeffa", [{"text": "a"}], None),
        ("a.md.gz", "\ufeffa", [{"text": "a"}], None),
        ("a.jsonl", '\ufeff{"text": "a"}\n\ufeff{"text": "b"}', [{"text": "a"}, {"text": "b"}], 2),
        ("a.json", '\ufeff{"text": "a"}\n\ufeff{"text": "b"}', [{"text": "a"}, {"text": "b"}], 2),
        ("a.jsonl", '\ufeff[{"text": "a"}]', [{"text": "a"}], 1),  # a list under another name
        ("a.txt", "a\nb\n", [{"text": "a\nb\n"}], None),
        ("a.json", '[\n {"text": "a"},\n {"text":\n "b"}]', [{"text": "a"}, {"text": "b"}], 3),
        ("a.json", '{"text": "a"}\n{"text": "b"}', [{"text": "a"}, {"text": "b"}], 2),
        ("a.json", "[]", [], None),
        ("a.jsonl.gz", '{"text": "a"}\n{"text": "b"}', [{"text": "a"}, {"text": "b"}], 2),
        ("a.json.gz", '[{"text": "a"}]', [{"text": "a"}], 1),
    ],
)
def test_files_are_read(
    tmp_path: Path, name: str, content: str, fields: list[Any], last_place: int | None
) -> None:
    path = tmp_path / name
    raw = content.encode()
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    records = read(path)
    assert [record.fields for record in records] == fields
    line = "" if last_place is None else f", line {last_place}"
    assert [record.place for record in records[-1:]] == [f"{path}{line}"] * (records != [])
    assert {record.part for record in records} <= {str(path)}


def test_the_records_of_an_object_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"version": 1, "data": [{"text": "a"}, {"text": "b"}]}))
    records = read(path)
    assert [record.text("text") for record in records] == ["a", "b"]
    assert records[-1].place == f"{path}, item 2"


def test_weights_say_how_often_records_come(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n' * 10)
    a, b, c = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    source = RecordFiles(paths={a: 2.5, b: 0.3, c: 1})
    assert passes(source) == [(a, 1.0), (a, 1.0), (a, 0.5), (b, 0.3), (c, 1.0)]
    assert [index for index in range(10) if is_in_share(index, 0.3)] == [3, 6, 9]
    for wrong in (0, "b"):
        with pytest.raises(ConfigurationError, match=r"weight of .*a\.jsonl is .* It says how"):
            RecordFiles(paths={a: wrong})  # type: ignore[dict-item]
    options: Any = {"seq_len": 8, "batch_size": 1, "validation_files": [c]}
    data = ChatDataModule(
        files={a: 2.5, b: 0.3}, tokenizer=TokenizerSource(), packing=False, **options
    )
    data.setup()
    assert len(data.train_rows) == 25 + 3


def test_parquet_files_and_data_sets_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b", "c"]}), path, row_group_size=2)
    records = read(path)
    assert [record.text("text") for record in records] == ["a", "b", "c"]
    assert records[-1].place == f"{path}, row 2"
    options = {"data_files": str(path), "cache_dir": str(tmp_path / "cache")}
    source = DatasetRecords(path="parquet", split="train[:2]", options=options)
    found = [record for part in source.parts() for record in source.read(part)]
    assert [record.text("text") for record in found] == ["a", "b"]
    assert found[-1].place == "parquet, train[:2], row 1"


def test_folders_and_patterns_are_read_by_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.csv", "picture.png"):
        (tmp_path / name).touch()

    def names(*paths: str) -> list[str]:
        parts = RecordFiles(paths=[str(tmp_path / path) for path in paths]).parts()
        return [Path(part).name for part in parts]

    assert names("") == ["a.jsonl", "b.jsonl", "c.csv"]
    assert names("*.jsonl", "c.csv") == ["a.jsonl", "b.jsonl", "c.csv"]
    for paths in (("*.jsonl", "b.jsonl"), ("b.jsonl", "b.jsonl")):
        with pytest.raises(ConfigurationError, match=r"b\.jsonl is named twice\. Name it once"):
            names(*paths)


FLIPPED = bytearray(gzip.compress("".join(str(n * 7919) for n in range(500)).encode()))
FLIPPED[60] ^= 255


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": 2\n{"a": 3}', r"line 2: this is not JSON .*mend or remove"),
        ("a.jsonl", b'{}\n["x"]', r"line 2: this is a list, where a JSON object is needed"),
        ("a.jsonl", b'["x"]', r"line 1: this is a text, where a JSON object is needed"),
        ("a.jsonl", b'{}\n{"text": "\xff"}', r"a\.jsonl, line 2: this is not .* iconv -f latin1"),
        ("a.jsonl", '{"text": "x"}\n'.encode("utf-16"), r"line 1: this is not .* iconv -f utf-16"),
        ("a.txt", b"\xff", r"a\.txt, line 1: this is not a text in UTF-8"),
        (
            "a.csv",
            b"text\n1\nna\xefve",
            r"a\.csv, line 3: this is not .* iconv -f latin1 -t utf-8 ",
        ),
        ("a.json", b'[{"a": 1},\n {"a": 2]', r"a\.json, line 2: this is not JSON .*Mend the file"),
        ("a.json", b'[{"a": 1}, 3]', r"a\.json, line 1, item 2: this is a value of type int"),
        ("a.json", b'[{"a": 1},\n 3]', r"a\.json, line 2: this is a value of type int"),
        ("a.jsonl.gz", b"no gzip", r"a\.jsonl\.gz: this file cannot be read: Not a gzipped"),
        ("a.jsonl.gz", FLIPPED, r"a\.jsonl\.gz: this file cannot be read: Error -3 while deco"),
        ("a.jsonl.xz", b"\xfd7zXZ\0xxxx", r"a\.jsonl\.xz: this file cannot be read"),
        ("a.jsonl.bz2", b"BZh91AY&SYxxxx", r"a\.jsonl\.bz2: this file cannot be read"),
        ("a.parquet", b"PAR1PAR1", r"a\.parquet: this is no Parquet file"),
        ("a.csv", b"text,label\none,x,y", r"line 2: .*'text', 'label'.*Quote fields"),
        ("a.csv", b'label,text\ngood,"a\nbad,b\n', r"line 2: the row that begins here.*doubled"),
        ("a.csv", b'label;text\nx;y\nz;"a" b\n', r"line 3: the row that begins here"),
        ("a.tsv", b'size\tname\n5\t"3/4\n6\tb\n', r"a\.tsv, line 2: the row that begins here"),
        ("a.csv.gz", gzip.compress(b'text\n"a\nb\n'), r"line 2: the row that begins here"),
        ("a.csv", b'"text\na\n', r"line 1: the row that begins here"),
        ("a.csv", b"text,label\none", r"line 2: .*'text', 'label'.*Quote fields"),
    ],
)
def test_what_is_broken_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(path)


def test_a_name_with_colons_is_read_as_it_is(tmp_path: Path) -> None:
    for name in ("good.jsonl", "good.jsonl::z.jsonl", "zip:__x::y.jsonl", "a[1]*?.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    texts = {Path(record.part).name: record.text("text") for record in read(tmp_path)}
    assert all(name == text for name, text in texts.items())
    assert len(texts) == 4


def test_what_has_no_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({f"c{n}": 1 for n in range(20_000)}))
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: this record has 20,000 fields"):
        read(tmp_path / "a.jsonl")
    monkeypatch.setattr("roundpipe_lightning.data.records._LONGEST_LINE", 100)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' + b" " * 1000))
    with pytest.raises(DataError, match=r"b\.jsonl\.gz, line 2: this line has more than 100 ch"):
        read(tmp_path / "b.jsonl.gz")
    monkeypatch.setattr("roundpipe_lightning.data.records.LONGEST_TEXT", 100)
    (tmp_path / "c.txt").write_text("x" * 101)
    with pytest.raises(DataError, match=r"c\.txt: a text has 101 characters, .* Split it into"):
        forms("text").read(read(tmp_path / "c.txt")[0])


def test_paths_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match=r"nothing is found at .*none\.jsonl"):
        read(tmp_path / "none.jsonl")
    (tmp_path / "a.xml").touch()
    with pytest.raises(ConfigurationError, match=r"suffix that is not known\. Known are \.jsonl"):
        read(tmp_path / "a.xml")
    with pytest.raises(ConfigurationError, match="there are none"):
        RecordFiles(paths=())
    with pytest.raises(DataError, match=r"'nobody/nothing' is no file here, and .*hf auth login"):
        list(RecordFiles(paths="nobody/nothing").read("nobody/nothing"))
    (tmp_path / "a.txt").touch()
    assert RecordFiles(paths=f"{tmp_path}/a.txt").parts() == (f"{tmp_path}/a.txt",)


ASKED = {"role": "user", "content": "q"}
SAID = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
TURNS = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
PARTS = [{"type": "text", "text": "q"}]
OTHER_PARTS = [{"type": "text", "value": "q"}]


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
        ({"messages": [{"role": "user", "content": OTHER_PARTS}, SAID]}, "messages", [ASKED, SAID]),
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
        (
            {"instruction": "q", "output": '[{"name": "x", "role": "y"}, 1]'},
            "Alpaca",
            [ASKED, {"role": "assistant", "content": '[{"name": "x", "role": "y"}, 1]'}],
        ),
        (
            {"prompt": '{"x": 1}', "completion": json.dumps([SAID])},
            "prompt/completion",
            [{"role": "user", "content": '{"x": 1}'}, SAID],
        ),
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
        assert content.answers == ([ASKED, SAID], [ASKED, {**SAID, "content": "b"}])
    for said in (
        {"prompt": "q", "completion": "a"},
        {"messages": [ASKED, SAID]},
        {"conversations": TURNS},
        {"instruction": "q", "output": "a"},
    ):
        content = forms("judged", "pair").read(record({**said, "label": "False"}))
        assert (content.answers, content.desirable) == (([ASKED, SAID],), False)


def test_an_answer_may_be_the_whole_conversation() -> None:
    """As UltraFeedback has them: `prompt` is the first message of `chosen`, too."""
    whole = {"chosen": [ASKED, SAID], "rejected": [ASKED, {**SAID, "content": "b"}]}
    for fields in (whole, {"prompt": "q", **whole}, {"prompt": [ASKED], **whole}):
        content = forms("pair").read(record({**fields, "system": "s", "tools": '[{"a": 1}]'}))
        assert content.answers == tuple([SYSTEM, *said] for said in whole.values())
        assert content.tools == [{"a": 1}]
    repeated = {"prompt": "q", "completion": [ASKED, SAID]}
    assert forms("conversation").read(record(repeated)).messages == [ASKED, SAID]
    factory = {f"{name}_messages": said for name, said in whole.items()}  # LLaMA-Factory's
    content = forms("pair").read(record(factory))
    assert content.answers == tuple(whole.values())
    later = {"prompt": [ASKED, SAID], "completion": [ASKED, {**SAID, "content": "b"}]}
    assert len(forms("conversation").read(record(later)).messages) == 4


def test_fields_that_are_not_read_are_named() -> None:
    known = forms("conversation", prompt="ask", completion="say")
    given = {"ask": "q", "say": "a", "system": "s", "label": True, "context": "c", "area": 1}
    known.read(record(given))
    assert known.found["a.jsonl"][2] == "area, context"


def test_calls_of_tools_and_own_names_of_fields_are_read() -> None:
    call = {"name": "add", "arguments": {"x": 1}}
    turns = [TURNS[0], {"from": "function_call", "value": json.dumps(call)}, TURNS[1]]
    content = forms("conversation").read(record({"conversations": turns, "tools": '[{"a": 1}]'}))
    assert content.messages[1]["tool_calls"] == [{"type": "function", "function": call}]
    assert content.tools == [{"a": 1}]
    turns[1]["value"] = json.dumps([call, call])
    content = forms("conversation").read(record({"conversations": turns}))
    assert content.messages[1]["tool_calls"] == [{"type": "function", "function": call}] * 2
    named = forms("conversation", prompt="ask", completion="reply")
    assert named.read(record({"ask": "q", "reply": "a"})).messages == [ASKED, SAID]
    assert forms("text", text="body").read(record({"body": "q"})).text == "q"


def test_the_nulls_of_a_table_are_no_arguments(tmp_path: Path) -> None:
    def asks(name: str, arguments: Any, properties: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        tool = {"name": name, "parameters": {"type": "object", "properties": properties}}
        return {"messages": [ASKED, {**SAID, "tool_calls": [call]}], "tools": [tool]}

    said = [
        asks("move", {"x": 0, "to": {"a": 1}}, {"x": {"type": "number"}}),
        asks("say", {"text": "hi", "to": {"b": 1}}, {"text": {"type": "string"}}),
    ]
    pq.write_table(pa.Table.from_pylist(said), tmp_path / "a.parquet")
    data_set = datasets.Dataset.from_list(said)
    for rows in (read(tmp_path / "a.parquet"), [record(row) for row in data_set]):
        found = [forms("conversation").read(row) for row in rows]
        assert [content.messages for content in found] == [row["messages"] for row in said]
        assert [content.tools for content in found] == [row["tools"] for row in said]
    kept = asks("say", '{"text": null}', {})
    content = forms("conversation").read(record({**kept, "tools": [json.dumps(kept["tools"][0])]}))
    assert content.messages == kept["messages"]
    assert content.tools == kept["tools"]


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
        ({"instruction": "q", "output": "a", "history": ["q"]}, r"'history' is no list of pairs"),
        ({"question": "q", "answer": None, "response": 3}, r"field 'answer' is null \(question/an"),
        (
            {"conversations": TURNS, "chosen": "a", "rejected": "b"},
            r"this is preference pairs .*trained learns from .* From pairs of answers: module=pref",
        ),
        ({"prompt": "q", "completion": "a", "label": False}, r"judged as unwanted .*module=kto"),
        ({"messages": [ASKED, SAID], "label": "false"}, r"judged as unwanted .*module=kto"),
        ({"instruction": "q", "output": "a", "kto_tag": False}, r"judged as unwanted"),
        ({"prompt": "q", "completion": 3}, r"the field 'completion' is a value of type int"),
        ({"messages": [{**ASKED, "content": 3}]}, r"content of message 1 \(user\) is neither a te"),
        ({"conversations": [{"from": ["us"], "value": "a"}]}, r"turn 1 is from \['us'\]"),
        ({"messages": [ASKED], "image": 3}, r"message 1 has an image"),
        ({"messages": [ASKED, SAID], "videos": ["a.mp4"]}, r"the field 'videos' has more than"),
        ({"messages": [{**ASKED, "train": "yes"}]}, r"message 1 has train='yes'\. Use true or"),
        (
            {"messages": [ASKED, {**SAID, "content": [{**PARTS[0], "train": False}]}]},
            r"message 2 has parts that are learned or not \('train'\), .* Set the flag of the mess",
        ),
        (
            {"conversations": [TURNS[0], {**TURNS[1], "train_detail": [{"train": False}]}]},
            r"message 2 has parts that are learned or not \('train_detail'\)",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            r"message 1 has an image, .* recipe=gemma3_4b/vision",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_call", "value": "x"}]}]},
            r"message 1 has a call of a tool that is no JSON object with a 'name': 'x'",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x=1"}]}
                ]
            },
            r"message 1 calls the tool 'f' with arguments that are no JSON object: 'x=1'\. Mend or",
        ),
        ({"messages": [{**ASKED, "content": "cut \ud83d"}]}, r"half of .*: 'cut \\ud83d'\. Mend"),
        ({"messages": json.dumps([{**ASKED, "content": "\ud83d"}])}, r"half of a character"),
        ({"messages": [ASKED, SAID], "tools": [{"name": "\udfff"}]}, r"half of a character"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_way_out(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=f"^a.jsonl, line 1: .*{message}"):
        forms("conversation", "text").read(record(fields))


def test_a_table_without_names_is_explained(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("1+1?,2\n2+1?,3\n")
    (first,) = read(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r"line 2: the fields '1\+1\?', '2' \(so the first line n"):
        forms().read(first)


def test_an_image_in_an_answer_is_named() -> None:
    seen = [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}, SAID]
    with pytest.raises(DataError, match=r"message 1 has an image"):
        forms("pair").read(record({"chosen": seen, "rejected": seen}))


def test_a_file_has_one_form() -> None:
    known = forms()
    known.read(record({"text": "x"}))
    with pytest.raises(DataError, match=r"line 2: this record is Alpaca.*texts \(a.jsonl, line 1"):
        known.read(record({"instruction": "q", "output": "a"}, line=2))
    with pytest.raises(ConfigurationError, match=r"data\.fields\.txt: there is no such field"):
        forms(txt="body")


@pytest.mark.parametrize("flag", ["train", "weight", "loss_weight"])
def test_a_message_says_whether_it_is_learned(flag: str) -> None:
    tokenizer = TokenizerSource().load()
    messages: list[Any] = [{**ASKED, flag: 1}, {**SAID, flag: 0}, ASKED, {**SAID, "content": "b"}]
    sample = ConversationEncoder(tokenizer, name="it")(messages, place="p")
    learned = tokenizer.decode(sample.labels[sample.labels != -100])
    assert learned == "q<|im_end|>b<|im_end|>"


# Streams ------------------------------------------------------------------------------------------


def write(folder: Path, num_files: int = 3, num_texts: int = 20) -> list[str]:
    paths = []
    for file in range(num_files):
        path = folder / f"{file}.jsonl"
        texts = [f"{file}{text:02}" * (1 + text % 5) for text in range(num_texts)]
        if file == 0:
            texts[-1] = "abcdefgh" * 20  # makes several batches
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
        paths.append(str(path))
    return paths


def make(folder: Path, *, chat: bool = False, **options: Any) -> Any:
    paths = write(folder)
    settings = {"seq_len": 8, "batch_size": 2, "run_records": 7, **options}
    kind = ChatDataModule if chat else TextDataModule
    return kind(
        files=paths,
        validation_files=paths[:1],
        tokenizer=TokenizerSource(),
        streaming=True,
        **settings,
    )


def loader(folder: Path, *, num_ahead: int = 0, **options: Any) -> StreamLoader:
    stream = make(folder, **options).train_dataloader().stream
    return StreamLoader(stream, num_workers=options.get("num_workers", 0), num_ahead=num_ahead)


def rows(batches: Any) -> list[Any]:
    return [{name: values.tolist() for name, values in batch.items()} for batch in batches]


def test_every_text_is_read_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    used = loader(tmp_path)
    first, second = rows(used), rows(used)
    tokens = [token for batch in first for row in batch["input_ids"] for token in row]
    whole = TokenizerSource().load().decode(tokens).split("<|im_end|>")
    lines = [line for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    written = [json.loads(line)["text"] for line in lines]
    assert len(set(whole)) == len(whole) >= len(written) - 5  # the last batch is not full
    assert set(whole[:-1]) <= set(written)
    assert whole[:7] != sorted(whole[:7])
    assert first != second
    assert rows(loader(tmp_path)) == first
    assert rows(loader(tmp_path, seed=1)) != first


@pytest.mark.parametrize("num_used", [1, 4, 11, 20])
@pytest.mark.parametrize(
    "options",
    [
        {"keep_apart": True},
        {"keep_apart": False},
        {"chat": True, "seq_len": 16},
        {"chat": True, "packing": False, "seq_len": 16},
    ],
    ids=str,
)
def test_a_loop_goes_on_with_the_next_batch(
    num_used: int, options: dict[str, Any], tmp_path: Path
) -> None:
    whole = loader(tmp_path, **options)
    expected = [*rows(whole), *rows(whole)]
    first = loader(tmp_path, **options)
    list(islice(first, num_used))
    state = json.loads(json.dumps(first.state_dict()))  # whole numbers and lists alone
    second = loader(tmp_path, **options)
    second.load_state_dict(state)
    assert [*rows(second), *rows(second)] == expected[num_used:]


def test_processes_go_on_in_their_turn(tmp_path: Path) -> None:
    expected = rows(loader(tmp_path, num_workers=2))
    assert sorted(map(str, expected)) != sorted(map(str, rows(loader(tmp_path))))
    first = loader(tmp_path, num_workers=2)
    batches = iter(first)
    list(islice(batches, 3))
    state = first.state_dict()
    list(batches)  # so that the processes end
    second = loader(tmp_path, num_workers=2)
    second.load_state_dict(state)
    assert rows(second) == expected[3:]
    with pytest.raises(CheckpointError, match=r"saved with 2 processes .*now there are 1"):
        loader(tmp_path).load_state_dict(state)


class Recorder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Any) -> Any:
        self.seen.append(batch["input_ids"].tolist())
        return self.weight * 1.0

    def validation_step(self, batch: Any) -> None:
        assert batch["input_ids"].shape[1] == 8

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def run(folder: Path, steps: int, checkpoint: Path | None = None) -> list[Any]:
        module = Recorder()
        trainer = make_trainer(
            tmp_path,
            max_steps=steps,
            max_epochs=-1,
            check_val_every_n_epoch=None,
            val_check_interval=4,
        )
        trainer.fit(module, datamodule=make(tmp_path), ckpt_path=checkpoint)
        trainer.save_checkpoint(folder)
        return module.seen

    num_batches = len(rows(loader(tmp_path)))
    steps = num_batches + 5  # into the second epoch
    expected = run(tmp_path / "whole.ckpt", steps)
    for stop in (3, num_batches + 2):
        first = run(tmp_path / "part.ckpt", stop)
        rest = run(tmp_path / "rest.ckpt", steps, tmp_path / "part.ckpt")
        assert [*first, *rest] == expected


@pytest.mark.parametrize(
    ("num_texts", "options"),
    [
        (3, {}),
        (6, {"num_workers": 2, "run_records": 3}),
        (12, {"seq_len": 8, "too_long": "drop"}),
    ],
)
def test_a_stream_that_fills_no_batch_is_refused(
    tmp_path: Path, num_texts: int, options: dict[str, Any]
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "q", "completion": "a"}\n' * num_texts)
    settings: dict[str, Any] = {"seq_len": 128, "batch_size": 4, "packing": False, **options}
    data = ChatDataModule(
        files=[str(path)],
        tokenizer=TokenizerSource(),
        streaming=True,
        validation_share=0,
        **settings,
    )
    data.setup()
    message = r"a\.jsonl: the records of a whole epoch make no batch.*Give more, or lower"
    with pytest.raises(DataError, match=message):
        list(data.train_dataloader())


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"data\.run_records=0 must be a whole number of at least 1"
    ):
        make(tmp_path, run_records=0)
    with pytest.raises(
        ConfigurationError, match=r"data\.streaming=true .* name data\.validation_f"
    ):
        TextDataModule(
            files="a", tokenizer=TokenizerSource(), seq_len=8, batch_size=1, streaming=True
        )
    data = make(tmp_path)
    data.setup()
    with (tmp_path / "1.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n{broken")
    with pytest.raises(DataError, match=r"1\.jsonl, line 21: this is not JSON"):
        list(data.train_dataloader())
