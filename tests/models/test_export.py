import copy
import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.checkpoint_loading import run_case, write_checkpoint
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.errors import CheckpointError, ConfigurationError, ModelSourceError
from roundpipe_lightning.models import export
from roundpipe_lightning.models.export import (
    DTYPES,
    ExportOptions,
    export_pretrained,
    find_pretrained,
)
from roundpipe_lightning.models.weight_files import MARKER
from roundpipe_lightning.modules import Adapters, ModelSource, byte_level_tokenizer
from tests.kit.architectures import TINY
from tests.models.test_load import EXPERTS, same_tensors, save, source

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True.:UserWarning"),
]

UNTIED = {**TINY, "tie_word_embeddings": False}
SMALL = 6_000
"""Bytes of a shard: several per model."""


def build(architecture: dict[str, Any]) -> Any:
    model = ModelSource(architecture=architecture, seed=1).build().eval()
    HostStore(model, list(model.model.layers))
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model.eval()(torch.arange(9)[None]).logits
    return result


def adapted(architecture: dict[str, Any], config: Any, **base: Any) -> Any:
    """A model with adapters whose values are not the first ones."""
    torch.manual_seed(4)
    model = get_peft_model(base.get("model") or build(architecture), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.eval()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("architecture", [TINY, EXPERTS], ids=["tied", "experts"])
@pytest.mark.parametrize("original_layout", [True, False])
@pytest.mark.parametrize("dtype", ["auto", "bf16"])
def test_a_model_loads_with_the_same_logits(
    tmp_path: Path, architecture: dict[str, Any], original_layout: bool, dtype: str
) -> None:
    model = build(architecture)
    folder = tmp_path / "out"
    options = ExportOptions(dtype=dtype, max_shard_bytes=SMALL, original_layout=original_layout)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert export_pretrained(model, folder, options=options) == folder
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    if dtype != "auto":
        assert loaded.dtype == DTYPES[dtype]
        for parameter in model.parameters():  # not the buffers
            parameter.data = parameter.data.to(loaded.dtype)
    assert torch.equal(logits(loaded), logits(model))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        assert sum(t.nbytes for t in tensors.values()) <= SMALL or len(tensors) == 1
        assert all(index["weight_map"][name] == file.name for name in tensors)
        stored.update(tensors)
    assert set(stored) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert ("model.layers.0.mlp.experts.gate_up_proj" in stored) == (
        architecture is EXPERTS and not original_layout
    )
    if not original_layout:  # then it can be mapped whole
        dtype = str(loaded.dtype).removeprefix("torch.")
        mapped = source(folder, frozen_weights="mmap", dtype=dtype).build()
        assert mapped.state_dict() == {}
        assert same_tensors(mapped, loaded)


def test_the_folder_is_what_save_pretrained_writes(tmp_path: Path) -> None:
    model = build(EXPERTS)
    export_pretrained(model, tmp_path / "ours", options=ExportOptions())
    model.save_pretrained(tmp_path / "theirs")
    assert names(tmp_path / "ours") - {MARKER} == names(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / n / "model.safetensors") for n in ("ours", "theirs"))
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for file in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "ours" / file).read_text()) == json.loads(
            (tmp_path / "theirs" / file).read_text()
        )


def test_an_adapter_loads_onto_its_base(tmp_path: Path) -> None:
    save(tmp_path / "base", TINY)
    base = source(tmp_path / "base").build()
    model = adapted(TINY, LoraConfig(r=2, target_modules=["q_proj"]), model=base)
    export_pretrained(model, tmp_path / "adapter", options=ExportOptions())
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    loaded = PeftModel.from_pretrained(source(tmp_path / "base").build(), tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(model))
    options = ExportOptions(dtype="bf16")
    export_pretrained(model, tmp_path / "adapter", options=options)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}


def test_a_flipped_bit_of_an_export_is_found(tmp_path: Path) -> None:
    export_pretrained(build(TINY), tmp_path / "model", options=ExportOptions())
    model = adapted(TINY, LoraConfig(r=2, target_modules=["q_proj"]))
    export_pretrained(model, tmp_path / "adapter", options=ExportOptions())
    source(tmp_path / "model").build()
    for file in tmp_path.glob("*/*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    with pytest.raises(ModelSourceError, match=r"model\.safetensors differs from its checksum"):
        source(tmp_path / "model").build()
    again = Adapters(config=LoraConfig(), adapter=str(tmp_path / "adapter"))
    with pytest.raises(ModelSourceError, match=r"adapter_model\.safetensors differs from its"):
        again.apply(build(TINY))


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        (TINY, LoraConfig(r=2, target_modules="all-linear")),
        (TINY, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)),
        (UNTIED, LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])),
        (UNTIED, LoraConfig(r=2, target_modules=["embed_tokens"])),
        (
            TINY,
            LoraConfig(
                r=2,
                target_modules=["q_proj"],
                modules_to_save=["embed_tokens", "lm_head"],
                ensure_weight_tying=True,
            ),
        ),
        (
            TINY,
            IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        ),
        (
            EXPERTS,
            LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["experts.down_proj"]),
        ),
    ],
    ids=["lora", "dora", "modules_to_save", "embedding", "tied", "ia3", "experts"],
)
def test_a_merged_model_is_what_peft_merges(
    tmp_path: Path, architecture: dict[str, Any], config: Any
) -> None:
    model = adapted(architecture, config)
    before = logits(model)
    options = ExportOptions(merge=True, max_shard_bytes=SMALL)
    export_pretrained(model, tmp_path / "out", options=options)
    assert torch.equal(logits(model), before)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), before, rtol=1e-4, atol=1e-5)
    assert torch.equal(logits(loaded), logits(copy.deepcopy(model).merge_and_unload()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), r"PROMPT_TUNING adds"),
        (LoraConfig(r=2, target_modules=["embed_tokens"]), r"are one weight.*merge=false"),
        (
            LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]),
            r"are one weight, and the adapters change each in another way: .*ensure_weight_tying",
        ),
        (LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"]), r"each in another way"),
        (
            LoraConfig(r=2, target_modules=["embed_tokens"], modules_to_save=["lm_head"]),
            r"each in another way",
        ),
    ],
    ids=["prompt", "tied embedding", "both saved", "both adapted", "adapted and saved"],
)
def test_what_cannot_be_merged_is_said(tmp_path: Path, config: Any, message: str) -> None:
    model = adapted(TINY, config)
    with pytest.raises(ConfigurationError, match=message):
        export_pretrained(model, tmp_path / "out", options=ExportOptions(merge=True))
    assert names(tmp_path) == set()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left"),
        SafetensorError("I/O error: No space left"),
        KeyboardInterrupt(),
    ],
    ids=["system", "library", "interrupt"],
)
def test_a_failure_leaves_the_previous_export_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    model, folder = build(TINY), tmp_path / "out"
    options = ExportOptions(max_shard_bytes=SMALL)
    export_pretrained(model, folder, options=options)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    begin_file, begun = export._begin_file, list[Any]()

    def fail_on_second(*arguments: Any) -> Any:
        begun.append(arguments)
        if len(begun) == 2:
            raise error
        return begin_file(*arguments)

    monkeypatch.setattr(export, "_begin_file", fail_on_second)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError
    with pytest.raises(expected) as raised:
        export_pretrained(model, folder, options=options)
    if expected is CheckpointError:
        assert "No space left" in str(raised.value)
        assert "untouched" in str(raised.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert names(tmp_path) == {"out"}


def test_settings_and_folders_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"auto, fp32, bf16, fp16"):
        ExportOptions(dtype="int8")
    with pytest.raises(ConfigurationError, match=r"1 or more"):
        ExportOptions(max_shard_bytes=0)
    model, folder = build(TINY), tmp_path / "out"
    folder.mkdir()
    export_pretrained(model, folder, options=ExportOptions(max_shard_bytes=SMALL))  # empty: fine
    export_pretrained(model, folder, options=ExportOptions())
    assert "model.safetensors.index.json" not in names(folder)
    (folder / MARKER).unlink()
    with pytest.raises(CheckpointError, match=r"no earlier export .*overwrite=true"):
        export_pretrained(model, folder, options=ExportOptions())
    export_pretrained(model, folder, options=ExportOptions(overwrite=True))
    assert MARKER in names(folder)
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"is a file or a link"):
        export_pretrained(model, tmp_path / "file", options=ExportOptions(overwrite=True))


@pytest.mark.parametrize("given", [None, "object", "folder"])
def test_the_tokenizer_comes_along(tmp_path: Path, given: str | None) -> None:
    tokenizer = byte_level_tokenizer(["some text"])
    holder = tmp_path / ("base" if given is None else "tokenizer")
    tokenizer.save_pretrained(holder)
    save(tmp_path / "base", TINY)
    model = source(tmp_path / "base").build()
    chosen = {None: None, "object": tokenizer, "folder": str(holder)}[given]
    export_pretrained(model, tmp_path / "out", options=ExportOptions(tokenizer=chosen))
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded("some text")["input_ids"] == tokenizer("some text")["input_ids"]
    assert loaded.chat_template == tokenizer.chat_template
    assert AutoConfig.from_pretrained(tmp_path / "out").hidden_size == 16


class Two(nn.Module):
    """A trained model and a frozen copy of it, as for preference training."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.policy = build(TINY)
        self.reference = build(TINY).requires_grad_(not frozen)
        self.other = nn.Linear(2, 2)


def test_finds_the_model_to_export() -> None:
    module = Two(frozen=True)
    assert find_pretrained(module) is module.policy
    assert find_pretrained(module, "reference") is module.reference
    assert find_pretrained(module.policy) is module.policy
    with pytest.raises(ConfigurationError, match=r"several \(policy, reference\).*model="):
        find_pretrained(Two(frozen=False))
    with pytest.raises(ConfigurationError, match=r"Linear has none"):
        find_pretrained(nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match=r"no model .* called 'other'"):
        find_pretrained(module, "other")


@pytest.mark.soak
def test_exporting_takes_no_second_copy(tmp_path: Path) -> None:
    """The same at 2 GB, and that of save_pretrained: benchmarks/checkpoint_loading.py."""
    write_checkpoint(tmp_path, num_megabytes=150, shard_megabytes=15)
    report = run_case("export_to_bfloat16", tmp_path)
    assert report["peak_bytes"] < 4 * report["largest_shard_bytes"]
    assert report["peak_bytes"] < 0.3 * report["model_bytes"]
