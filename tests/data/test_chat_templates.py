"""Chat templates of many families, which TRL ships, go through one table where it is installed."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from roundpipe_lightning.data.chat import ConversationEncoder
from roundpipe_lightning.data.forms import check_messages
from roundpipe_lightning.errors import DataError
from roundpipe_lightning.modules import byte_level_tokenizer

SPECIAL = """
<s> </s> <|start|> <|end|> <|return|> <|message|> <|channel|> <|call|> <|user|> <|assistant|>
<|eot_id|> <|observation|> <|start_header_id|> <|end_header_id|> <start_of_turn> <end_of_turn>
<|turn> <turn|> <end_of_utterance> <|END_OF_TURN_TOKEN|> <|eot|> <|eom|>
<\uff5cend\u2581of\u2581sentence\uff5c>
""".split()
TALK = [
    {"role": "user", "content": "Where?"},
    {"role": "assistant", "content": "In Oslo."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "In May."},
]
CALL = {"id": "abcdefghi", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLED = [
    TALK[0],
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": '{"t": 1}'},
    TALK[3],
]


def templates() -> list[Any]:
    spec = find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else Path("none")
    return [pytest.param(path, id=path.stem) for path in sorted(folder.glob("*.jinja"))]


def learned(path: Path, messages: Any) -> list[str]:
    """The learned parts; all that was written is in the sample."""
    made = byte_level_tokenizer()
    made.bos_token = "<s>"
    added = [AddedToken(name, special=True, normalized=False) for name in SPECIAL]
    made.add_tokens(added, special_tokens=True)
    made.chat_template = path.read_text(encoding="utf-8")
    checked = list(check_messages(messages, place="p"))
    sample = ConversationEncoder(made, name="it")(checked, place="p")
    parts: list[list[int]] = []
    part: list[int] = []
    for token, label in zip(sample.input_ids.tolist(), sample.labels.tolist(), strict=True):
        if label == token:
            part.append(token)
        elif part:
            parts, part = [*parts, part], []
    return [str(made.decode(each)) for each in ([*parts, part] if part else parts)]


@pytest.mark.soak
@pytest.mark.parametrize("path", templates())
def test_every_answer_is_learned_with_its_end(path: Path) -> None:
    for messages, answers in ((TALK, ["In Oslo.", "In May."]), (TALK[:2], ["In Oslo."])):
        parts = learned(path, messages)
        assert len(parts) == len(answers)
        for part, answer in zip(parts, answers, strict=True):
            before, _, end = part.partition(answer)
            assert end.strip() in SPECIAL or end.strip().endswith(("<|im_end|>", *SPECIAL))
            assert "Where" not in before
            assert "When" not in before


@pytest.mark.soak
@pytest.mark.parametrize("path", templates())
def test_calls_are_learned_or_refused(path: Path) -> None:
    try:
        call, answer = learned(path, CALLED)
    except DataError:
        return
    assert "weather" in call
    assert "Oslo" in call
    assert '\\"' not in call
    assert "In May." in answer
