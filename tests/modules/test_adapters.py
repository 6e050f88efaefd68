"""What peft adds to a model, and what is refused with which words."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError
from roundpipe_lightning.modules import Adapters, CausalLanguageModule, ModelSource
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
    """Last parts of the names of what is trained."""
    return {
        name.replace(".default", "").split("layers.0.")[-1]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and ".layers.1." not in name
    }


LORA: dict[str, Any] = {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}


def test_lora_trains_its_matrices_alone() -> None:
    model = Adapters(method="lora", settings=LORA).apply(tiny())
    names = {f"self_attn.{m}_proj.lora_{half}.weight" for m in "qv" for half in "AB"}
    assert trained(model) == names
    config: Any = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (2, 4)


@pytest.mark.parametrize(
    ("method", "settings", "one_of_them"),
    [
        ("lora", {**LORA, "use_dora": True}, "self_attn.q_proj.lora_magnitude_vector.weight"),
        ("lora", {**LORA, "modules_to_save": ["norm"]}, "base_model.model.model.norm"),
        ("lora", {**LORA, "target_modules": "all-linear"}, "mlp.down_proj.lora_A.weight"),
        ("lora", {**LORA, "target_modules": r".*0\.mlp\.up_proj"}, "mlp.up_proj.lora_B.weight"),
        ("ia3", {"target_modules": ["k_proj"], "feedforward_modules": []}, "self_attn.k_proj.ia3"),
        ("prompt_tuning", {"num_virtual_tokens": 3}, "prompt_encoder.embedding.weight"),
        ("prefix_tuning", {"num_virtual_tokens": 3}, "prompt_encoder.embedding.weight"),
        ("p_tuning", {"num_virtual_tokens": 3}, "prompt_encoder.mlp_head.0.weight"),
        ("vera", {"rank": 2, "target_modules": ["q_proj"]}, "self_attn.q_proj.vera_lambda_b"),
    ],
)
def test_methods_and_settings(method: str, settings: dict[str, Any], one_of_them: str) -> None:
    names = trained(Adapters(method=method, settings=settings).apply(tiny()))
    assert any(one_of_them in name for name in names), names


def test_experts_are_adapted_by_the_names_of_their_parameters() -> None:
    settings = {**LORA, "target_parameters": ["experts.gate_up_proj"]}
    model = Adapters(method="lora", settings=settings).apply(
        ModelSource(architecture=EXPERTS).build()
    )
    assert any("experts.lora_A" in name for name in trained(model)), trained(model)


def test_predictions_are_for_the_text_and_not_for_a_prompt() -> None:
    soft = Adapters(method="prompt_tuning", settings={"num_virtual_tokens": 3})
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
        model = Adapters(method="lora", settings=LORA, seed=seed).apply(tiny())
        found.append(next(p for n, p in model.named_parameters() if "lora_A" in n))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_equal_adapters_are_equal() -> None:
    first, second = (Adapters(method="lora", settings=dict(LORA)) for _ in range(2))
    assert (first, hash(first)) == (second, hash(second))
    assert first != Adapters(method="lora", settings={**LORA, "rank": 3})


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("lorra", {}, r"peft.method='lorra' is not a method.*The nearest are lora"),
    ("lora", {"rnk": 2}, r"peft.rnk is not a setting of lora.*The nearest are rank"),
    ("lora", {**LORA, "rank": 0}, r"peft.rank=0 must be a whole number, 1 or more"),
    ("lora", {**LORA, "rank": 1.5}, r"peft.rank=1.5 must be a whole number"),
    ("lora", {**LORA, "dropout": 1.0}, r"peft.dropout=1.0 must lie between 0 and 1"),
    ("lora", {**LORA, "r": 3}, r"'r': drop one of them"),
    ("lora", {**LORA, "target_modules": []}, r"target_modules is empty"),
    ("prompt_tuning", {"num_virtual_tokens": 0}, r"peft.num_virtual_tokens=0 must be"),
    ("lora", {**LORA, "bias": "some", "target_modules": ["q_proj"]}, r"bias"),
    ("lora", {**LORA, "target_modules": ["q_prj"]}, r"no layer 'q_prj'.*nearest are q_proj"),
    ("lora", {**LORA, "target_modules": ["q_proj", "v_prj"]}, r"no layer 'v_prj'"),
    ("lora", {**LORA, "target_modules": r".*\.c_attn"}, r"matches no module"),
    ("lora", {**LORA, "modules_to_save": ["lm_hed"]}, r"modules_to_save.*nearest are lm_head"),
    ("lora", {**LORA, "target_parameters": ["experts.up"]}, r"has no parameter 'experts.up'"),
    ("lora", {**LORA, "target_modules": ["self_attn"]}, r"(?s)cannot be applied.*not supported"),
]


@pytest.mark.parametrize(("method", "settings", "message"), REFUSED)
def test_refusals_name_the_setting(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Adapters(method=method, settings=settings).apply(tiny())


def test_experts_that_a_model_does_not_have_are_told_from_those_it_has() -> None:
    settings = {**LORA, "target_parameters": ["experts.up_proj"]}
    with pytest.raises(ConfigurationError, match=r"nearest are experts.gate_up_proj"):
        Adapters(method="lora", settings=settings).apply(ModelSource(architecture=EXPERTS).build())


# --- saved adapters ---------------------------------------------------------------------------


def saved(folder: Path) -> PeftModel:
    model = Adapters(method="lora", settings=LORA, seed=5).apply(tiny())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(1.0)
    model.save_pretrained(str(folder))
    return model


def test_a_saved_adapter_is_gone_on_with(tmp_path: Path) -> None:
    first = saved(tmp_path)
    again = Adapters(method="lora", adapter=str(tmp_path)).apply(tiny())
    assert trained(again) == trained(first)
    for (name, expected), (_, parameter) in zip(
        first.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), name


def test_an_adapter_for_another_base_is_refused_with_all_differences(tmp_path: Path) -> None:
    saved(tmp_path)
    adapters = Adapters(method="lora", adapter=str(tmp_path))
    message = r"does not fit this model: 4 missing in the file \(.*layers\.2\..*"
    with pytest.raises(ModelSourceError, match=message):
        adapters.apply(tiny(num_hidden_layers=3))
    with pytest.raises(ModelSourceError, match=r"wrong shapes.*\(2, 16\) in the file"):
        adapters.apply(tiny(hidden_size=8))
    with pytest.raises(ModelSourceError, match=r"4 without a place in this base"):
        adapters.apply(tiny(num_hidden_layers=1))
    gpt2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40}
    with pytest.raises(ModelSourceError, match=r"Choose the model that it was trained on"):
        adapters.apply(ModelSource(architecture=gpt2).build())


def test_another_methods_adapter_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ConfigurationError, match=r"adapter of method lora, but peft.method=ia3"):
        Adapters(method="ia3", adapter=str(tmp_path)).apply(tiny())


def test_a_folder_without_an_adapter_and_a_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"adapter_config\.json beside"):
        Adapters(method="lora", adapter=str(tmp_path)).apply(tiny())
    saved(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelSourceError, match="is not a saved adapter that can be read"):
        Adapters(method="lora", adapter=str(tmp_path)).apply(tiny())


def test_an_adapter_that_lacks_a_tensor(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, file)
    with pytest.raises(ModelSourceError, match="1 missing in the file"):
        Adapters(method="lora", adapter=str(tmp_path)).apply(tiny())
