import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from roundpipe_lightning.data import ChatDataModule
from roundpipe_lightning.errors import ConfigurationError, ModelSourceError, RoundPipeError
from roundpipe_lightning.models.source import Head
from roundpipe_lightning.modules import Adapters, CausalLanguageModule, ModelSource
from roundpipe_lightning.modules import adapters as adapters_module
from roundpipe_lightning.modules.adapters import peft_config, saved_adapters
from roundpipe_lightning.modules.source import TokenizerSource, byte_level_tokenizer
from tests.kit.architectures import TINY

EXPERTS = {
    **TINY,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def tiny(**changes: Any) -> Any:
    return ModelSource(architecture={**TINY, **changes}).build()


def trained(model: nn.Module) -> set[str]:
    return {
        name.replace(".default", "").split("layers.0.")[-1]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".layers.1." not in name
    }


LORA: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}


def lora(settings: dict[str, Any] = LORA, **options: Any) -> Adapters:
    return Adapters(config=peft_config("peft.LoraConfig", settings), **options)


def test_lora_trains_its_matrices_alone() -> None:
    model = lora().apply(tiny())
    names = {f"self_attn.{m}_proj.lora_{half}.weight" for m in "qv" for half in "AB"}
    assert trained(model) == names
    config: Any = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (2, 4)


@pytest.mark.parametrize(
    ("kind", "settings", "one_of_them"),
    [
        ("Lora", {**LORA, "use_dora": True}, "self_attn.q_proj.lora_magnitude_vector.weight"),
        ("Lora", {**LORA, "modules_to_save": ["norm"]}, "base_model.model.model.norm"),
        ("Lora", {**LORA, "target_modules": "all-linear"}, "mlp.down_proj.lora_A.weight"),
        ("Lora", {**LORA, "target_modules": r".*0\.mlp\.up_proj"}, "mlp.up_proj.lora_B.weight"),
        ("IA3", {"target_modules": ["k_proj"], "feedforward_modules": []}, "self_attn.k_proj.ia3"),
        ("PromptTuning", {"num_virtual_tokens": 3}, "prompt_encoder.embedding.weight"),
        ("PrefixTuning", {"num_virtual_tokens": 3}, "prompt_encoder.embedding.weight"),
        ("PromptEncoder", {"num_virtual_tokens": 3}, "prompt_encoder.mlp_head.0.weight"),
        ("Vera", {"r": 2, "target_modules": ["q_proj"]}, "self_attn.q_proj.vera_lambda_b"),
    ],
)
def test_methods_and_settings(kind: str, settings: dict[str, Any], one_of_them: str) -> None:
    adapters = Adapters(config=peft_config(f"peft.{kind}Config", settings))
    names = trained(adapters.apply(tiny()))
    assert any(one_of_them in name for name in names), names


def test_experts_are_adapted_by_the_names_of_their_parameters() -> None:
    model = lora({**LORA, "target_parameters": ["experts.gate_up_proj"]}).apply(
        ModelSource(architecture=EXPERTS).build()
    )
    assert any("experts.lora_A" in name for name in trained(model)), trained(model)


def test_patterns_that_peft_writes_itself_bring_no_warnings(
    recwarn: pytest.WarningsRecorder,
) -> None:
    lora({**LORA, "target_modules": "all-linear"}).apply(ModelSource(architecture=EXPERTS).build())
    assert [str(warning.message) for warning in recwarn if "pattern" in str(warning.message)] == []


def test_predictions_are_for_the_text_and_not_for_a_prompt() -> None:
    soft = Adapters(config=peft_config("peft.PromptTuningConfig", {"num_virtual_tokens": 3}))
    source = ModelSource(architecture=TINY)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1)
    module = CausalLanguageModule(source, optimizer=optimizer, adapters=soft)
    module.configure_model()
    ids = torch.arange(12).reshape(2, 6)
    found = module.predict_step({"input_ids": ids, "labels": ids})
    assert found["next_tokens"].shape == ids.shape


def test_the_seed_decides_the_first_values_and_leaves_the_generator_alone() -> None:
    before = torch.get_rng_state()
    found = []
    for seed in (3, 3, 4):
        model = lora(seed=seed).apply(tiny())
        found.append(next(p for n, p in model.named_parameters() if "lora_A" in n))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_equal_adapters_stay_equal_and_can_be_used_again() -> None:
    first, second = (
        lora({**LORA, "target_modules": "all-linear"}),
        lora({**LORA, "target_modules": "all-linear"}),
    )
    first.apply(tiny())
    assert (first, hash(first)) == (second, hash(second))
    assert first != lora()


NO_LAYER = r"no layer 'q_prj'.*nearest are q_proj"
NO_MODULE = r"modules_to_save.*nearest are lm_head"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_alfa": 2}, r"peft.lora_alfa is not a setting of .*nearest are lora_alpha"),
        ({"rank": 2}, r"peft.rank is not a setting of peft.LoraConfig"),
        ({"r": 0}, r"peft.r=0 must be a whole number, 1 or more"),
        ({"r": 1.5}, r"peft.r=1.5 must be a whole number"),
        ({"lora_dropout": 1.0}, r"peft.lora_dropout=1.0 must lie between 0 and 1"),
        ({"target_modules": []}, r"target_modules=\[\]: name the layers"),
        ({"bias": "some"}, r"bias"),
        ({"target_modules": ["v_proj", "q_prj"]}, NO_LAYER),
        ({"target_modules": r".*\.c_attn"}, r"matches no module"),
        ({"modules_to_save": ["lm_hed"]}, NO_MODULE),
        ({"target_parameters": ["experts.up"]}, r"has no parameter 'experts.up'"),
        ({"target_modules": ["self_attn"]}, r"(?s)cannot be applied.*not supported"),
    ],
)
def test_refusals_name_the_setting(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        lora({**LORA, **settings}).apply(tiny())


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("Lorra", {}, r"peft._target_='peft.LorraConfig' is no conf.*nearest are LoraConfig"),
        ("PromptTuning", {"num_virtual_tokens": 0}, r"peft.num_virtual_tokens=0 must be"),
    ],
)
def test_refusals_of_other_methods(kind: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        peft_config(f"peft.{kind}Config", settings)


def test_experts_that_a_model_does_not_have_are_told_from_those_it_has() -> None:
    adapters = lora({**LORA, "target_parameters": ["experts.up_proj"]})
    with pytest.raises(ConfigurationError, match=r"nearest are experts.gate_up_proj"):
        adapters.apply(ModelSource(architecture=EXPERTS).build())


# --- saved adapters ---------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> PeftModel:
    model = lora(seed=5).apply(tiny())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(1.0)
    model.save_pretrained(str(tmp_path))
    return model


def test_a_saved_adapter_is_gone_on_with(saved: PeftModel, tmp_path: Path) -> None:
    again = lora(adapter=str(tmp_path)).apply(tiny())
    assert trained(again) == trained(saved)
    for (name, expected), (_, parameter) in zip(
        saved.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), name


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40}


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (
            {**TINY, "num_hidden_layers": 3},
            r"does not fit this model: 4 differences: missing: .*layers\.2\..* and 1 more",
        ),
        ({**TINY, "hidden_size": 8}, r"another shape: .*\(2, 16\) instead of"),
        ({**TINY, "num_hidden_layers": 1}, r"4 differences: extra: "),
        (GPT2, r"Choose the model that it was trained on"),
    ],
)
def test_an_adapter_for_another_base_is_refused_with_all_differences(
    saved: PeftModel, tmp_path: Path, architecture: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelSourceError, match=message):
        lora(adapter=str(tmp_path)).apply(ModelSource(architecture=architecture).build())


def test_another_methods_adapter_is_refused(saved: PeftModel, tmp_path: Path) -> None:
    ia3 = Adapters(config=peft_config("peft.IA3Config", {}), adapter=str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"adapter of method lora, but peft=ia3"):
        ia3.apply(tiny())


def test_a_folder_without_an_adapter_and_broken_files(saved: PeftModel, tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"adapter_config\.json beside"):
        lora(adapter=str(tmp_path / "none")).apply(tiny())
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)
    with pytest.raises(ModelSourceError, match="1 differences: missing: "):
        lora(adapter=str(tmp_path)).apply(tiny())
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelSourceError, match="is not a saved adapter that can be read"):
        lora(adapter=str(tmp_path)).apply(tiny())


def test_an_adapter_is_not_asked_of_a_hub_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hang(*_: Any, local_files_only: bool = False, **__: Any) -> str:
        assert local_files_only
        raise OSError("not in the cache")

    monkeypatch.setattr(adapters_module, "reach_options", lambda _: {"local_files_only": True})
    monkeypatch.setattr("peft.config.hf_hub_download", hang)
    with pytest.raises(ModelSourceError, match=r"Can't find 'adapter_config\.json' at 'no/where'"):
        lora(adapter="no/where").apply(tiny())


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


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    source = ModelSource(architecture=TINY, hub_name=str(tmp_path), weights="pretrained")
    with pytest.raises(ModelSourceError, match="cannot be loaded from this place"):
        source.build()


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


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["<|eot_id|>", "<|finetune_right_pad_id|>"], "<|finetune_right_pad_id|>"),  # Llama 3.1
        (["<pad>"], "<pad>"),  # Mistral
        ([], "<|im_end|>"),
    ],
)
def test_a_tokenizer_without_a_pad_token_pads_with_a_reserved_one(
    tmp_path: Path, names: list[str], chosen: str
) -> None:
    made = byte_level_tokenizer()
    made.add_tokens(names, special_tokens=True)
    made.pad_token = None
    made.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"  # the byte tokenizer has one under its own name
    path.write_text(path.read_text().replace("<|pad|>", "<|other|>"))
    assert TokenizerSource(name=str(tmp_path)).load().pad_token == chosen
    (tmp_path / "a.jsonl").write_text('{"prompt": "q", "completion": "a"}\n' * 4)
    data = ChatDataModule(
        files=[str(tmp_path / "a.jsonl")],
        tokenizer=TokenizerSource(name=str(tmp_path)),
        seq_len=64,
        batch_size=1,
        packing=False,
    )
    data.setup()


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
    with pytest.raises(ModelSourceError, match=r"cannot be loaded from this place"):
        TokenizerSource(name=str(tmp_path)).load()
    with pytest.raises(ConfigurationError, match=r"num_tokens=258 has no room"):
        byte_level_tokenizer(num_tokens=258)


@pytest.mark.parametrize("source", ["adapter", "chat"])
def test_a_saved_adapter_runs_no_code(source: str, tmp_path: Path) -> None:
    marker, folder, tokenizer = tmp_path / "ran", tmp_path / "adapter", tmp_path / "tokenizer"
    config = peft_config("peft.PromptTuningConfig", {"num_virtual_tokens": 2})
    Adapters(config=config).apply(tiny()).save_pretrained(str(folder))
    tokenizer.mkdir()
    (tokenizer / "evil.py").write_text(f"import os; os.mkdir({str(marker)!r})\nclass T: pass\n")
    (tokenizer / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}})
    )
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings |= {
        "prompt_tuning_init": "TEXT",
        "prompt_tuning_init_text": "x",
        "tokenizer_name_or_path": str(tokenizer),
        "tokenizer_kwargs": {"trust_remote_code": True},
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    adapters = saved_adapters(str(folder))
    if source == "adapter":
        adapters = Adapters(config=config, adapter=str(folder))
    model = adapters.apply(tiny())
    assert isinstance(model, PeftModel)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "null"),
        ("config.json", "[]"),
        ("config.json", '{"model_type": 3}'),
        ("config.json", "[" * 100_000),
        ("config.json", '{"model_type": "qwen3", "hidden_size": "x"}'),
        ("model.safetensors", "{}"),
    ],
)
def test_a_model_folder_with_something_else_is_a_sentence(
    file: str, content: str, tmp_path: Path
) -> None:
    tiny().save_pretrained(tmp_path)
    (tmp_path / file).write_text(content)
    source = ModelSource(architecture={}, hub_name=str(tmp_path), weights="pretrained")
    with pytest.raises(RoundPipeError, match=re.escape(str(tmp_path))):
        source.build()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "null"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": 3}'),
    ],
)
def test_a_tokenizer_folder_with_something_else_is_a_sentence(
    file: str, content: str, tmp_path: Path
) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(RoundPipeError, match=re.escape(str(tmp_path))):
        TokenizerSource(name=str(tmp_path)).load()


def test_a_negative_size_is_named() -> None:
    source = ModelSource(architecture={**TINY, "hidden_size": -32})
    with torch.device("meta"), pytest.raises(ConfigurationError, match=r"model\.architecture"):
        source.build()


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name] = tensors[name].view(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = ModelSource(architecture={}, hub_name=str(tmp_path), weights="pretrained")
    with pytest.raises(ModelSourceError, match=f"another kind: {name}, I32 instead of torch.float"):
        source.build()
