import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from tokenizers.processors import ByteLevel

from roundpipe_lightning.data import ChatDataModule, JudgedDataModule, PreferenceDataModule
from roundpipe_lightning.data.chat import ConversationEncoder
from roundpipe_lightning.data.forms import check_messages
from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.modules import TokenizerSource

MESSAGES = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "yes two?"},
    {"role": "assistant", "content": "no, two"},
]

WITHOUT_MARKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REASONING = (  # the last of the assistant's messages begins with its thoughts, earlier ones do not
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (  # as the hub's thinking models: earlier thoughts are left out, answers begin with them
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}"
    "{{ '<think>\n' + (m.reasoning_content or '') + '</think>' }}{% endif %}{{ m['content'] }}"
    "{% for call in m.tool_calls or () %}{{ '(' + call.function.name + ')' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
ENDING = (  # as gpt-oss ends the last message
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{{ '<|endoftext|>' if loop.last else '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COUNTING = (  # says how long the messages are before the first one
    "{{ messages | map(attribute='content') | join | length }}"
    "{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"
)


def tokenizer(template: str | None = None) -> Any:
    made = TokenizerSource().load()
    if template is not None:
        made.chat_template = template
    return made


def predicted(template: str | None, messages: Any) -> str:
    made = tokenizer(template)
    messages = list(check_messages(messages, place="p"))
    sample = ConversationEncoder(made, name="it")(messages, place="p")
    assert made.decode(sample.input_ids) == made.apply_chat_template(messages, tokenize=False)
    return str(made.decode(sample.labels[sample.labels != -100]))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, "yes<|im_end|>no, two<|im_end|>"),
        (WITHOUT_MARKS, "yes<|im_end|>no, two<|im_end|>"),
        (REASONING, "yes<|im_end|><think></think>no, two<|im_end|>"),
        (THINKING, "yes<|im_end|></think>no, two<|im_end|>"),
        (ENDING, "yes<|im_end|>no, two<|endoftext|>"),
    ],
    ids=["marked", "by difference", "last one differs", "prompt differs", "end differs"],
)
def test_the_assistants_words_and_their_end_are_predicted(
    template: str | None, expected: str
) -> None:
    assert predicted(template, MESSAGES) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (COUNTING, r"^p: message 3 \(assistant\) is learned.*generation marks"),
        ("{{ raise_exception('only the user may begin') }}", r"^p: .*only the user may begin"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        predicted(template, MESSAGES)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", r"a conversation is a list of messages"),
        ([], r"a conversation is a list of messages, and not an empty one"),
        (["hello"], r"message 1 is no object"),
        ([{"role": "bot", "content": "x"}], r"message 1 has the role 'bot'\. Known roles are sys"),
        ([{"content": "x"}], r"message 1 has the role None"),
        ([MESSAGES[0], {"role": "user", "content": ""}], r"message 2 \(user\) has no content"),
        ([{"role": "user"}], r"message 1 \(user\) has no content"),
        ([{"role": "system"}, *MESSAGES[1:]], r"message 1 \(system\) has no content"),
    ],
)
def test_a_conversation_that_is_none_is_named(messages: Any, message: str) -> None:
    with pytest.raises(DataError, match=f"^p: {message}"):
        predicted(None, messages)


def test_a_system_message_and_the_result_of_a_tool_may_be_empty() -> None:
    called = [*MESSAGES[1:], {"role": "tool", "content": ""}, MESSAGES[2]]
    assert predicted(None, [{"role": "system", "content": ""}, *called]).endswith("yes<|im_end|>")


def test_calls_of_tools_are_learned_or_refused() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    called: list[dict[str, Any]] = [MESSAGES[1], answer]
    assert '"name": "add"' in predicted(None, called)
    for template in (WITHOUT_MARKS, "{% generation %}a{% endgeneration %}"):
        with pytest.raises(DataError, match=r"message 2 calls the tool 'add', and .*_template\.$"):
            predicted(template, called)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("yes", {"reasoning_content": "hm"}),
        ("yes", {"thinking": "hm"}),
        ([{"type": "reasoning", "value": "hm"}, {"type": "text", "value": "yes"}], {}),
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}], {}),
    ],
    ids=str,
)
def test_reasoning_is_learned_or_refused(content: Any, field: dict[str, str]) -> None:
    said = [MESSAGES[1], {"role": "assistant", "content": content, **field}]
    assert predicted(THINKING, said) == "hm</think>yes<|im_end|>"
    assert predicted(THINKING, [*said, *said]) == "yes<|im_end|>hm</think>yes<|im_end|>"
    for template in (None, WITHOUT_MARKS):
        with pytest.raises(DataError, match=r"message 2 has reasoning, and .* does not write it"):
            predicted(template, said)


def test_an_earlier_call_whose_reasoning_is_left_out_is_learned() -> None:
    call = {"type": "tool_call", "value": '{"name": "add", "arguments": {"x": 1}}'}
    parts = [{"type": "reasoning", "value": "hm"}, call]
    called = [MESSAGES[1], {"role": "assistant", "content": parts}]
    assert predicted(THINKING, called) == "hm</think>(add)<|im_end|>"
    both = [*called, {"role": "tool", "content": "2"}, MESSAGES[2]]
    assert predicted(THINKING, both) == "(add)<|im_end|></think>yes<|im_end|>"


CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>ARGUMENTS{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Zürich"}'),
        (
            "{% for k, v in c.function.arguments | items %}{{ k + '=' + v }}{% endfor %}",
            "city=Zürich",
        ),
        (
            "{{ '`' + c.function.arguments + '`' }}",
            '`{"city": "Zürich"}`',
        ),  # DeepSeek-V3 wants text
        ("{{ c.function.arguments }}", '{"city": "Zürich"}'),  # an object would be Python's repr
    ],
)
@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city": "Zürich"}'])
def test_arguments_have_the_form_that_the_template_takes(
    written: str, expected: str, arguments: Any
) -> None:
    function = {"name": "weather", "arguments": arguments}
    call = {"type": "function", "function": function}
    part = {"type": "tool_call", "value": json.dumps(function)}
    template = CALLS.replace("ARGUMENTS", written)
    made = tokenizer(template)
    for answer in (
        {"content": None, "tool_calls": [call]},
        {"content": None, "tool_calls": json.dumps([call])},
        {"tool_calls": [function]},
        {"content": [part]},
    ):
        messages = check_messages([MESSAGES[1], {"role": "assistant", **answer}], place="p")
        sample = ConversationEncoder(made, name="it")(messages, place="p")
        learned = made.decode(sample.labels[sample.labels != -100])
        assert learned == f"<weather>{expected}<|im_end|>"


PARTS = (  # as Idefics 3 and SmolVLM have it
    "{% for m in messages %}{{ m.role | capitalize }}:{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
MARKED_PARTS = (  # as Llava 1.5 has it
    "{% for m in messages %}{{ m.role.upper() + ': ' }}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ part.text + ' ' }}{% endgeneration %}"
    "{% else %}{{ part.text + ' ' }}{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "expected"), [(PARTS, "a<|im_end|>"), (MARKED_PARTS, "a "), (None, "a<|im_end|>")]
)
def test_contents_have_the_form_that_the_template_takes(
    template: str | None, expected: str
) -> None:
    made = tokenizer(template)
    for wrap in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
        said = [{"role": role, "content": wrap("a")} for role in ("user", "assistant")]
        sample = ConversationEncoder(made, name="it")(check_messages(said, place="p"), place="p")
        assert made.decode(sample.labels[sample.labels != -100]) == expected


def test_words_that_a_template_leaves_out_are_refused_or_counted() -> None:
    silent = WITHOUT_MARKS.replace(
        "m['content']", "(m['content'] if m['role'] != 'system' else '')"
    )
    with pytest.raises(DataError, match=r"write the content of message 1 \(system\), 'be kind'\."):
        predicted(silent, MESSAGES)
    beside = CALLS.replace("(m.content or '')", "('' if m.tool_calls else m.content)")
    call = {"name": "add", "arguments": {}}
    said: list[Any] = [MESSAGES[1], {**MESSAGES[2], "tool_calls": [call]}]
    said.append({"role": "tool", "content": "2"})
    said = [*said, MESSAGES[4], *MESSAGES[3:]]
    said[-1] = {**said[-1], "reasoning": "hm"}
    made = ConversationEncoder(
        tokenizer(beside.replace("ARGUMENTS", "{{ m.thinking }}")), name="it"
    )
    with pytest.raises(DataError, match=r"message 6 has reasoning"):
        made(check_messages(said, place="p"), place="p")
    thinks = ConversationEncoder(tokenizer(THINKING), name="it")
    earlier = [MESSAGES[1], {**MESSAGES[2], "reasoning": "hm"}, *MESSAGES[3:]]
    thinks(check_messages(earlier, place="p"), place="p")
    split = WITHOUT_MARKS.replace("m['content']", "m['content'].split('</think>')[-1]")
    words = ConversationEncoder(tokenizer(split), name="it")
    earlier[1] = {**MESSAGES[2], "content": "<think>hm</think>yes"}
    words(check_messages(earlier, place="p"), place="p")
    assert thinks.left_out == words.left_out == {"reasoning of earlier answers": 1}
    with pytest.raises(
        DataError, match=r"write the content of message 2 \(assistant\), '<think>hm"
    ):
        words(check_messages(earlier[:2], place="p"), place="p")
    calls = ConversationEncoder(tokenizer(beside.replace("ARGUMENTS", "")), name="it")
    calls(check_messages(said[:3], place="p"), place="p")
    assert calls.left_out == {"words beside calls of tools": 1}


GPT_OSS = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
    "{% if m.role == 'assistant' and loop.last %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
OLMO = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% if m.role == 'assistant' and loop.last %}{{ eos_token }}{% else %}{{ BREAK }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
GLM = (
    "{% for m in messages %}{% set role = 'observation' if m.role == 'tool' else m.role %}"
    "{{ '<|' + role + '|>\n' }}"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TALK = [MESSAGES[1], MESSAGES[2], MESSAGES[3], MESSAGES[4]]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (GPT_OSS, TALK, "<|message|>yes<|end|><|message|>no, two<|return|>"),
        (PHI_3, TALK, "yes<|end|>no, two<|end|>\n<|im_end|>"),
        (OLMO.replace("BREAK", "'\n'"), TALK, "yes\nno, two<|im_end|>"),
        (OLMO.replace("BREAK", "''"), TALK, "yesno, two<|im_end|>"),
        (GLM, TALK, "\nyes<|user|>\nno, two<|user|>"),
        (GLM, TALK[:2], "\nyes<|user|>"),
        (GLM, [TALK[0], {**TALK[1], "thinking": "hm"}], "\n<think>hm</think>yes<|user|>"),
        (
            GLM,
            [TALK[0], CALL, {"role": "tool", "content": "1"}, TALK[1]],
            "\n<tool_call>f</tool_call><|observation|>\nyes<|user|>",
        ),
        (GLM, [TALK[0], CALL], "\n<tool_call>f</tool_call><|observation|>"),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["special tokens", "bytes"])
def test_what_ends_an_answer_is_learned(
    template: str, messages: Any, expected: str, known: bool, tmp_path: Path
) -> None:
    made = tokenizer(template)
    names = ("start", "end", "message", "return", "user", "assistant", "observation")
    if known:  # named among the added tokens alone
        special = [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in names]
        made.add_tokens(special, special_tokens=True)
        made.save_pretrained(tmp_path)
        made = TokenizerSource(name=str(tmp_path)).load()
    elif template is GPT_OSS:
        pytest.skip("its endings are tokens")
    sample = ConversationEncoder(made, name="it")(check_messages(messages, place="p"), place="p")
    assert made.decode(sample.labels[sample.labels != -100]) == expected


def test_a_template_that_ends_no_answer_is_refused() -> None:
    for end in ("", "\n", "\n\n"):
        template = (
            "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + END }}{% endfor %}"
        )
        with pytest.raises(ConfigurationError, match=r"^p: .* no token behind the last answer, so"):
            predicted(template.replace("END", repr(end)), MESSAGES)


def test_who_speaks_is_not_learned_without_a_generation_prompt() -> None:
    template = (
        "{% for m in messages %}{{ '### ' + m.role + ': ' + m.content + eos_token }}{% endfor %}"
    )
    said = [user("?"), assistant("a")]
    assert predicted(template, said) == "a<|im_end|>"
    assert predicted(template, [*said, *said]) == "a<|im_end|>a<|im_end|>"


@pytest.mark.parametrize("text", ["a b", "a  b", " a", "\ta\n b"])
@pytest.mark.parametrize("trim", [True, False])
def test_tokens_with_trimmed_offsets_lose_no_blanks(text: str, trim: bool) -> None:
    made = tokenizer(WITHOUT_MARKS)
    made.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim)
    flagged: dict[str, Any] = {**user(text), "train": True}
    for said in ([user("?"), assistant(text)], [flagged, assistant("?")]):
        sample = ConversationEncoder(made, name="it")(said, place="p")
        assert text + "<|im_end|>" in made.decode(sample.labels[sample.labels != -100])


def test_a_template_without_an_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundpipe_lightning.data.chat._TEMPLATE_SECONDS", 0.2)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigurationError, match=r"^p: .*takes more than 0\.2 seconds"):
        predicted(loops, MESSAGES)
    for template, reason in (("{{ 1 / 0 }}", "division by zero"), ("{% for %}", "Expected an")):
        with pytest.raises(DataError, match=rf"^p: .*refuses this conversation: {reason}"):
            predicted(template, MESSAGES)


def test_a_tokenizer_without_a_template_is_refused() -> None:
    made = tokenizer()
    made.chat_template = None
    with pytest.raises(ConfigurationError, match=r"tokenizer 'x' has no chat template.*Jinja"):
        ConversationEncoder(made, name="'x'")


# --- the data module ------------------------------------------------------------------------------


def write(path: Path, *conversations: Any) -> str:
    lines = [json.dumps({"messages": messages}) for messages in conversations]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def talk(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]


def make(folder: Path, *conversations: Any, **options: Any) -> ChatDataModule:
    settings = {"seq_len": 96, "batch_size": 2, "validation_share": 0.2, **options}
    path = write(folder / "chat.jsonl", *conversations)
    return ChatDataModule(files=[path], tokenizer=TokenizerSource(), **settings)


def test_packed_batches_have_positions_and_no_mask(tmp_path: Path) -> None:
    data = make(tmp_path, *[talk("a" * length) for length in range(1, 21)])
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"].shape == (2, 96)
    assert data.packs_documents
    starts = (batch["position_ids"] == 0).sum(dim=1)
    assert (starts >= 2).all()


def test_single_batches_are_padded_to_their_longest(tmp_path: Path) -> None:
    talks = [talk("a" * length) for length in range(1, 21)]
    data = make(tmp_path, *talks, packing=False, pad_to_multiple_of=16)
    data.setup()
    lengths = set()
    for batch in data.train_dataloader():
        assert set(batch) == {"input_ids", "labels", "attention_mask"}
        longest = int(batch["attention_mask"].sum(dim=1).max())
        assert 0 <= batch["input_ids"].shape[1] - longest < 16
        assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
        lengths.add(batch["input_ids"].shape[1])
    assert len(lengths) > 1


def test_validation_samples_are_not_trained_on_and_do_not_depend_on_the_seed(
    tmp_path: Path,
) -> None:
    talks = [talk(f"{number:02}") for number in range(10)]

    def parts(seed: int) -> list[list[Any]]:
        data = make(tmp_path, *talks, packing=False, seed=seed)
        data.setup()
        loaders = (data.train_dataloader(), data.val_dataloader())
        return [[row.tolist() for batch in loader for row in batch["labels"]] for loader in loaders]

    train, validation = parts(0)
    assert (len(train), len(validation)) == (8, 2)
    assert not any(row in train for row in validation)
    assert parts(1)[1] == validation
    assert parts(1)[0] != train
    every = make(tmp_path, *talks, packing=False, validation_share=0)
    every.setup()
    assert sum(len(batch["labels"]) for batch in every.train_dataloader()) == 10
    assert every.val_dataloader() == []


def test_validation_files_can_be_named(tmp_path: Path) -> None:
    extra = write(tmp_path / "validation.jsonl", talk("other"))
    data = make(tmp_path, talk("a"), talk("b"), packing=False, validation_files=[extra])
    data.setup()
    assert [len(batch["labels"]) for batch in data.val_dataloader()] == [1]


def test_samples_without_a_word_of_the_assistant_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    silent = [{"role": "user", "content": "?"}]
    with caplog.at_level(logging.WARNING):
        data = make(tmp_path, *[talk("a")] * 9, silent, packing=False)
        data.setup()
    assert "1 of 10 samples left out: without a word of the assistant" in caplog.text
    with pytest.raises(DataError, match=r"chat\.jsonl, line 10: the assistant says nothing"):
        make(tmp_path, *[talk("a")] * 9, silent, no_target="refuse").setup()
    with pytest.raises(DataError, match=r"no sample that can be used \(2 without a word"):
        make(tmp_path, silent, silent).setup()


def test_nothing_is_left_out_in_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    talks = [*[talk("a")] * 39, talk("b" * 200)]
    data = make(tmp_path, *talks, too_long="drop", packing=False, batch_size=8)
    with caplog.at_level(logging.WARNING):
        data.setup()
    figures = r"31 samples in 31 rows, [\d,]+ tokens, \d+% of them learned"
    aside = r"8 samples of these files set aside to validate on"
    dropped = r"1 of 40 samples left out: longer than data\.seq_len=96 tokens"
    ends = r"an answer ends with '<\|im_end\|>'"
    assert re.fullmatch(
        rf"Data: .*\(messages\); {figures}; {aside}; {dropped}; {ends}\.", data.summary
    )
    assert caplog.text == ""  # few
    assert [len(batch["labels"]) for batch in data.train_dataloader()] == [8, 8, 8, 7]
    left = make(tmp_path, *talks[:35], packing=False, batch_size=8, drop_last=True)
    left.setup()
    assert len(left.train_dataloader()) == 3
    assert "; the last 4 of an epoch left out (data.drop_last=true)" in left.summary


def test_marks_without_an_end_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ends = {"": "'a'", "<|im_end|>": "'<|im_end|>'", "<|im_end|>\n": r"'<|im_end|>\n'"}
    for end, said in ends.items():
        template = tmp_path / "marked.jinja"
        template.write_text(
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
            f"{{{{ m.content + {end!r} }}}}{{% endgeneration %}}"
            "{% else %}{{ m.content }}{% endif %}{% endfor %}"
        )
        data = make(tmp_path, *[talk("a")] * 20, packing=False)
        data.tokenizer_source = TokenizerSource(chat_template=str(template))
        caplog.clear()
        data.setup()
        assert f"; an answer ends with {said}." in data.summary
        assert ("marks no token that ends an answer" in caplog.text) is (end == "")


def test_bad_records_are_counted_and_shown_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = ['{"messages": [', '["x"]', '{"messages": []}', '{"other": 1}', "[" * 900 + "]" * 900]
    good = [json.dumps({"messages": talk("a")})] * 20
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*good, *bad * 3, *good]))
    options: dict[str, Any] = {"seq_len": 96, "batch_size": 2, "validation_share": 0}
    options |= {"files": [str(path)], "tokenizer": TokenizerSource(), "packing": False}
    with pytest.raises(DataError) as raised:
        ChatDataModule(**options).setup()
    lines = str(raised.value).splitlines()
    assert lines[0] == "15 records cannot be used:"
    assert [int(line.partition("line ")[2].partition(":")[0]) for line in lines[1:11]] == [
        *range(21, 31)
    ]
    assert lines[11:] == [
        "and 5 more",
        "Mend or remove them, or leave them out: data.bad_records=skip.",
    ]
    data = ChatDataModule(**options, bad_records="skip")
    with caplog.at_level(logging.WARNING):
        data.setup()
    assert len(data.train_rows) == 40
    assert "15 of 55 samples left out: that cannot be used (27 %)" in caplog.text
    assert "a.jsonl, line 22: this is a list" in caplog.text
    stream = ChatDataModule(**options, bad_records="skip", streaming=True)
    stream.setup()
    assert len(list(stream.train_dataloader())) == 20
    table = tmp_path / "a.csv"
    table.write_text("prompt,completion\nq,a\nq\nq,a,b\nq,a\n")
    data = ChatDataModule(**{**options, "files": [str(table)]}, bad_records="skip")
    data.setup()
    assert len(data.train_rows) == 2


def test_test_files_have_rows_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "test.jsonl", talk("tested"))
    data = make(tmp_path, *[talk("a")] * 9, packing=False, test_files=[path])
    data.setup()
    for loader in (data.test_dataloader(), data.predict_dataloader()):
        [batch] = loader
        assert "tested" in data.tokenizer.decode(batch["input_ids"][0])
    plain = make(tmp_path, *[talk("a")] * 9, packing=False)
    plain.setup()
    assert len(list(plain.test_dataloader())) == len(list(plain.val_dataloader())) == 1


def test_long_conversations_are_refused_dropped_or_cut(tmp_path: Path) -> None:
    talks = [*[talk("a")] * 9, talk("b" * 200)]
    with pytest.raises(DataError, match=r"line 10: .* tokens, more than data\.seq_len=96"):
        make(tmp_path, *talks).setup()
    dropped = make(tmp_path, *talks, too_long="drop")
    dropped.setup()
    assert dropped.skipped == {"longer than data.seq_len=96 tokens": 1}
    cut = make(tmp_path, *talks, too_long="cut_end", packing=False, validation_share=0.1)
    cut.setup()
    rows = [row for batch in cut.train_dataloader() for row in batch["input_ids"]]
    assert cut.skipped == {}
    assert max(len(row) for row in rows) <= 96


def test_a_conversation_cut_before_the_answer_is_left_out(tmp_path: Path) -> None:
    late = [{"role": "user", "content": "?" * 200}, {"role": "assistant", "content": "a"}]
    data = make(tmp_path, *[talk("a")] * 9, late, too_long="cut_end", no_target="refuse")
    with pytest.raises(DataError, match=r"line 10: .*conversation as far as it is kept"):
        data.setup()


def test_too_few_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"1 sample cannot be split for training and valid"
    ):
        make(tmp_path, talk("a")).setup()
    with pytest.raises(ConfigurationError, match=r"less than one batch of data\.batch_size=4"):
        make(tmp_path, *[talk("a")] * 3, batch_size=4, packing=False).setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1}, r"data\.seq_len=1 must be a whole number of at least 2"),
        ({"seq_len": "long"}, r"data\.seq_len=long must be a whole number"),
        ({"batch_size": 0}, r"data\.batch_size=0 must be a whole number of at least 1"),
        ({"validation_share": 1.0}, r"data\.validation_share=1\.0 must be 0 \(no validation\)"),
        ({"too_long": "cut"}, r"data\.too_long='cut' is not one of"),
        ({"bad_records": "keep"}, r"data\.bad_records='keep': give refuse or skip"),
        ({"drop_last": 1}, r"data\.drop_last=1: give true or false"),
        ({"no_target": "keep"}, r"data\.no_target='keep' is not one of drop, refuse"),
    ],
)
def test_settings_are_checked(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(tmp_path, talk("a"), **options)


def test_a_missing_pad_token_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    class WithoutPad:
        name = "mine"

        def load(self) -> Any:
            made = tokenizer()
            made.pad_token = None
            return made

    data = ChatDataModule(
        files=[str(tmp_path / "none.jsonl")], tokenizer=WithoutPad(), seq_len=8, batch_size=1
    )
    with pytest.raises(ConfigurationError, match=r"'mine' has no pad token.*'<\|im_end\|>'"):
        data.setup()


# Preferences --------------------------------------------------------------------------------------


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


GOOD = {"prompt": "?", "chosen": "yes", "rejected": "no"}


def make_pairs(
    folder: Path,
    *records: Any,
    kind: type[PreferenceDataModule] = PreferenceDataModule,
    **options: Any,
) -> PreferenceDataModule:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    settings = {"seq_len": 96, "batch_size": 1, "pad_to_multiple_of": 4, **options}
    return kind(files=[str(path)], tokenizer=TokenizerSource(), **settings)


def scored(data: PreferenceDataModule) -> list[str]:
    batch = next(iter(data.val_dataloader()))
    return [data.tokenizer.decode(row[row != -100]) for row in batch["labels"][0]]


@pytest.mark.parametrize(
    "record",
    [
        GOOD,
        {"prompt": [user("?")], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
        {
            "chosen": [user("1"), assistant("2"), user("?"), assistant("yes")],
            "rejected": [user("1"), assistant("2"), user("?"), assistant("no")],
        },
    ],
    ids=["texts", "messages", "conversations"],
)
def test_the_last_answer_of_each_is_scored(tmp_path: Path, record: Any) -> None:
    data = make_pairs(tmp_path, record, record)
    data.setup()
    assert scored(data) == ["yes<|im_end|>", "no<|im_end|>"]


def test_both_texts_of_a_pair_are_in_one_row(tmp_path: Path) -> None:
    long = {"prompt": "?", "chosen": "y" * 20, "rejected": "n"}
    data = make_pairs(tmp_path, *[GOOD] * 3, *[long] * 3, batch_size=4)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert {values.shape[:2] for values in batch.values()} == {torch.Size([4, 2])}
    assert batch["input_ids"].shape[2] % 4 == 0
    lengths = batch["attention_mask"].sum(dim=2)
    assert (lengths[:, 0] >= lengths[:, 1]).all()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "?", "chosen": "yes"},
            r"The nearest is preference pairs.*data\.fields={rejected",
        ),
        ({**GOOD, "rejected": "yes"}, r"chosen and the rejected answer are the same"),
        ({**GOOD, "chosen": ""}, r"the field 'chosen' is empty"),
        ({**GOOD, "chosen": [user("x")]}, r"'chosen' does not end with an answer"),
        ({"chosen": "yes", "rejected": "no"}, r"'chosen' does not end with an answer.*prompt"),
        ({**GOOD, "prompt": [{"from": "us", "value": "?"}]}, r"turn 1 is from 'us'"),
        ({**GOOD, "chosen": "y" * 200}, r"tokens, more than data\.seq_len=96"),
    ],
)
def test_a_pair_that_is_none_is_named(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"pairs\.jsonl, line 2: .*{message}"):
        make_pairs(tmp_path, GOOD, record).setup()


def test_pairs_that_are_too_long_can_be_dropped_or_cut(tmp_path: Path) -> None:
    long = {"prompt": "?" * 90, "chosen": "yes", "rejected": "no"}
    dropped = make_pairs(tmp_path, GOOD, GOOD, long, too_long="drop")
    dropped.setup()
    assert sum(dropped.skipped.values()) == 1
    cut = make_pairs(tmp_path, long, long, too_long="cut_start")
    cut.setup()
    assert scored(cut) == ["yes<|im_end|>", "no<|im_end|>"]
    with pytest.raises(DataError, match=r"nothing is left of the chosen answer.*cut_start"):
        make_pairs(tmp_path, long, long, too_long="cut_end").setup()


def test_judged_answers_stand_beside_answers_to_other_prompts(tmp_path: Path) -> None:
    records = [
        {"prompt": "a?", "completion": "yes", "label": True},
        {"prompt": "a?", "completion": "no", "label": False},
        {"prompt": "b?", "chosen": "good", "rejected": "bad"},
    ]
    (tmp_path / "judged.jsonl").write_text("\n".join(map(json.dumps, records[:2])))
    (tmp_path / "pairs.jsonl").write_text(json.dumps(records[2]))
    data = JudgedDataModule(
        files=[str(tmp_path / "judged.jsonl"), str(tmp_path / "pairs.jsonl")],
        validation_files=[str(tmp_path / "judged.jsonl"), str(tmp_path / "pairs.jsonl")],
        tokenizer=TokenizerSource(),
        seq_len=96,
        batch_size=4,
    )
    data.setup()
    [batch] = data.val_dataloader()
    answers = [[data.tokenizer.decode(a[a != -100]) for a in row] for row in batch["labels"]]
    ended = [["yes", "good"], ["no", "good"], ["good", "yes"], ["bad", "yes"]]
    assert answers == [[f"{text}<|im_end|>" for text in row] for row in ended]
    assert batch["desirable"].tolist() == [True, False, True, False]
    prompts = [[data.tokenizer.decode(ids)[17:19] for ids in row] for row in batch["input_ids"]]
    assert prompts == [["a?", "a?"]] * 2 + [["b?", "b?"]] * 2
    with pytest.raises(ConfigurationError, match=r"All \d answers .* to the same prompt"):
        make_pairs(tmp_path, *records[:2] * 2, kind=JudgedDataModule).setup()
