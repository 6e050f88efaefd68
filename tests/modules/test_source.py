from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError
from roundpipe_lightning.modules import ModelSource
from roundpipe_lightning.modules.source import Head
from roundpipe_lightning.modules.tokenizer import TokenizerSource, byte_level_tokenizer
from tests.kit.architectures import TINY


def test_random_weights_follow_the_seed_alone() -> None:
    first = ModelSource(architecture=TINY, seed=1).build()
    torch.rand(7)
    second = ModelSource(architecture=TINY, seed=1).build()
    other = ModelSource(architecture=TINY, seed=2).build()
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_building_leaves_the_global_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    ModelSource(architecture=TINY).build()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_builds_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = ModelSource(architecture=TINY).build()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_builds_in_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    model = ModelSource(architecture=TINY).build()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_takes_the_attention_implementation() -> None:
    model = ModelSource(architecture=TINY, attention="eager").build()
    assert model.config._attn_implementation == "eager"


@pytest.mark.filterwarnings("ignore:.*newly initialized")
def test_a_head_for_classes_stands_on_either_kind_of_weights(tmp_path: Path) -> None:
    changes = {"num_labels": 3, "pad_token_id": 5}
    options: dict[str, Any] = {"head": Head.SEQUENCE_CLASSIFICATION, "config_changes": changes}
    drawn = ModelSource(architecture=TINY, **options).build()
    base = ModelSource(architecture=TINY, seed=3).build()
    base.save_pretrained(tmp_path)
    source = ModelSource(architecture={}, hub_name=str(tmp_path), weights="pretrained", **options)
    loaded = source.build()
    for model in (drawn, loaded):
        assert model.get_parameter("score.weight").shape == (3, 16)
        assert model.config.pad_token_id == 5
    assert source.load_config().num_labels == 3
    name = "model.embed_tokens.weight"
    assert torch.equal(loaded.get_parameter(name), base.get_parameter(name))


def test_pretrained_weights_come_from_a_local_folder(tmp_path: Path) -> None:
    saved = ModelSource(architecture=TINY, seed=3).build()
    saved.save_pretrained(tmp_path)
    source = ModelSource(architecture={}, hub_name=str(tmp_path), weights="pretrained")
    loaded = source.build()
    assert loaded.training
    assert source.load_config().hidden_size == 16
    expected = saved.state_dict()
    assert all(torch.equal(expected[name], value) for name, value in loaded.state_dict().items())


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    source = ModelSource(architecture=TINY, hub_name=str(tmp_path), weights="pretrained")
    with pytest.raises(ModelSourceError, match="cannot be loaded from the local folder"):
        source.build()


def test_a_hub_that_cannot_be_reached_is_named_with_the_remedies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    source = ModelSource(architecture={}, hub_name="nobody/no-such-model", weights="pretrained")
    with pytest.raises(ModelSourceError) as raised:
        source.build()
    for wanted in ("'nobody/no-such-model'", "local folder", "model.weights=random", "HF_HOME"):
        assert wanted in str(raised.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "zero"}, "model.weights='zero' is not one of auto, random"),
        ({"weights": "pretrained"}, "needs model.hub_name"),
    ],
)
def test_refuses_unknown_weights(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelSource(architecture=TINY, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen33"}, "model_type='qwen33'"),
        ({"model_type": None}, "model_type=None"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_refuses_a_wrong_architecture(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelSource(architecture={**TINY, **change}).build()


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
