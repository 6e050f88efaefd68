from pathlib import Path

import pytest

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError
from roundpipe_lightning.modules.tokenizer import TokenizerSource, byte_level_tokenizer


def test_every_text_is_bytes_and_comes_back() -> None:
    tokenizer = TokenizerSource().load()
    text = "ünïcode, tabs\tand <|im_end|>"
    ids = tokenizer.encode(text)
    assert len(tokenizer) == 259
    assert tokenizer.decode(ids) == text
    assert ids[-1] == tokenizer.eos_token_id  # one token, not its characters


def test_longer_pieces_are_learned_from_texts() -> None:
    texts = ["round and round and round"] * 3
    tokenizer = byte_level_tokenizer(texts, num_tokens=280)
    assert len(tokenizer.encode(texts[0])) < len(texts[0]) / 2
    assert tokenizer.decode(tokenizer.encode(texts[0])) == texts[0]
    assert byte_level_tokenizer(texts, num_tokens=280).get_vocab() == tokenizer.get_vocab()


def test_a_saved_tokenizer_is_loaded_with_its_template(tmp_path: Path) -> None:
    saved = byte_level_tokenizer(["some text"], num_tokens=262)
    saved.save_pretrained(tmp_path)
    loaded = TokenizerSource(name=str(tmp_path)).load()
    assert loaded.get_vocab() == saved.get_vocab()
    messages = [{"role": "user", "content": "hi"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n"
    )


def test_template_and_pad_token_can_be_given(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    source = TokenizerSource(chat_template=str(template), pad_token="<|im_start|>")
    tokenizer = source.load()
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hi"
    assert tokenizer.pad_token_id == 1


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"chat_template='no\.jinja' is not a file"):
        TokenizerSource(chat_template="no.jinja").load()
    with pytest.raises(ConfigurationError, match=r"pad_token='<none>' is not in .*'<\|pad\|>'"):
        TokenizerSource(pad_token="<none>").load()
    with pytest.raises(ModelSourceError, match=r"cannot be loaded from the local folder"):
        TokenizerSource(name=str(tmp_path)).load()
    with pytest.raises(ConfigurationError, match=r"num_tokens=258 has no room"):
        byte_level_tokenizer(num_tokens=258)
