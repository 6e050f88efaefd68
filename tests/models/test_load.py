import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from benchmarks.checkpoint_loading import run_case, write_checkpoint
from roundpipe_lightning.errors import ConfigurationError, FitError, ModelSourceError
from roundpipe_lightning.models.export import ExportOptions, export_pretrained
from roundpipe_lightning.models.load import draw_weights, load_module
from roundpipe_lightning.models.quantized import quantize_frozen
from roundpipe_lightning.modules import ModelSource
from tests.kit.architectures import TINY

EXPERTS: dict[str, Any] = {
    **TINY,
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
"""Options of a model with one tensor for all experts, where a checkpoint has one for each."""


def save(folder: Path, architecture: dict[str, Any], **options: Any) -> Any:
    model = ModelSource(architecture=architecture, seed=3, dtype=options.pop("dtype", None)).build()
    model.save_pretrained(folder, **options)
    return model


def save_packed(folder: Path) -> None:
    """A gpt-oss whose experts are codes of four bits with scales, as it is published."""
    sizes = {"hidden_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = save(folder, {**TINY, "model_type": "gpt_oss", **sizes}, dtype="bfloat16")
    packed: dict[str, Tensor | None] = {}
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{name}"
            experts, inputs, outputs = model.get_parameter(name).shape
            size = (experts, outputs, inputs // 32)
            packed[name] = None
            packed[f"{name}_blocks"] = torch.randint(255, (*size, 16), dtype=torch.uint8)
            packed[f"{name}_scales"] = torch.full(size, 120, dtype=torch.uint8)
    change(folder, **packed)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))


def source(folder: Path, **options: Any) -> ModelSource:
    return ModelSource(architecture={}, hub_name=str(folder), weights="pretrained", **options)


def change(folder: Path, **changes: Tensor | None) -> None:
    """Replace, add (to the first file) or remove tensors of a checkpoint; `__` stands for a dot."""
    files = sorted(folder.glob("*.safetensors"))
    for key, value in changes.items():
        name = key.replace("__", ".")
        holders = [file for file in files if name in load_file(file)] or files[:1]
        tensors = load_file(holders[0])
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
        save_file(tensors, holders[0], metadata={"format": "pt"})


def same_tensors(first: Any, second: Any) -> bool:
    pairs = zip(
        [*first.named_parameters(), *first.named_buffers()],
        [*second.named_parameters(), *second.named_buffers()],
        strict=True,
    )
    return all(a == b and x.dtype == y.dtype and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_weights_without_room_are_refused_before_they_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, TINY)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    monkeypatch.setattr("roundpipe_lightning.engine.device.host_memory.free_host_bytes", lambda: 99)
    with pytest.raises(FitError, match=r"host memory, and 0\.0 GiB are free here\. Use a machine"):
        source(tmp_path).build()


def test_experts_that_are_put_together_take_three_times_their_size_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, EXPERTS)
    model = source(tmp_path).build()
    sizes = [parameter.nbytes for parameter in model.parameters()]
    largest = max(p.nbytes for name, p in model.named_parameters() if "experts" in name)
    free = sum(sizes) + 2 * largest
    name = "roundpipe_lightning.engine.device.host_memory.free_host_bytes"
    monkeypatch.setattr(name, lambda: free)
    assert same_tensors(source(tmp_path).build(), model)
    monkeypatch.setattr(name, lambda: free - 1)
    with pytest.raises(FitError, match="Use a machine with more"):
        source(tmp_path).build()


UNPACKED = {"quantization_config": Mxfp4Config(dequantize=True)}


@pytest.mark.parametrize(
    "options",
    [
        {"frozen_weights": "mmap"},
        {"frozen_weights": "mmap", "pretrained_options": UNPACKED},
        {"frozen_bits": 4},
    ],
)
def test_published_codes_cannot_be_mapped_or_quantised_again(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """With and without values, so a plan says it before anything is downloaded."""
    save_packed(tmp_path)
    for device in ("cpu", "meta"):
        with torch.device(device), pytest.raises(ConfigurationError, match="a quantised form"):
            source(tmp_path, **options).build()


def test_published_codes_are_unpacked_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_packed(tmp_path)
    model: Any = source(tmp_path, dtype="bfloat16", pretrained_options=UNPACKED).build()
    for original_layout in (True, False):
        folder = tmp_path / str(original_layout)
        export_pretrained(model, folder, options=ExportOptions(original_layout=original_layout))
        assert same_tensors(AutoModelForCausalLM.from_pretrained(folder), model)
    packed = source(tmp_path, frozen_bits=4, pretrained_options=UNPACKED).build()
    quantize_frozen(model, 4)
    assert same_tensors(packed, model)
    monkeypatch.setattr("roundpipe_lightning.engine.device.host_memory.free_host_bytes", lambda: 99)
    with pytest.raises(FitError, match=r"host memory, and 0\.0 GiB are free here"):
        source(tmp_path, pretrained_options=UNPACKED).build()


@pytest.mark.parametrize("architecture", [TINY, EXPERTS], ids=["tied", "experts"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loads_what_transformers_loads(
    tmp_path: Path, architecture: dict[str, Any], dtype: str
) -> None:
    save(tmp_path, architecture, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = source(tmp_path, dtype=dtype).build()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    assert same_tensors(model, expected)
    ids = torch.arange(9)[None]
    assert torch.equal(model.eval()(ids).logits, expected.eval()(ids).logits)
    if architecture["tie_word_embeddings"]:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.name_or_path == str(tmp_path)
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_every_tensor_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    save(tmp_path, EXPERTS, max_shard_size="10KB")
    expert = "model.layers.0.mlp.experts.1.up_proj.weight"
    change(
        tmp_path,
        **{
            "model.layers.0.self_attn.q_proj.weight": None,
            "model.layers.1.self_attn.v_proj.weight": None,
            "model.layers.0.extra.weight": torch.zeros(3),
            "model.norm.weight": torch.zeros(7),
            expert: torch.zeros(7, 16),
        },
    )
    with pytest.raises(ModelSourceError) as raised:
        source(tmp_path).build()
    lines = str(raised.value).splitlines()
    assert lines[0] == f"5 tensors of {str(tmp_path)!r} do not fit Qwen3MoeForCausalLM:"
    assert set(lines[1:6]) == {
        "  missing: model.layers.0.self_attn.q_proj.weight, (16, 16)",
        "  missing: model.layers.1.self_attn.v_proj.weight, (8, 16)",
        "  extra: model.layers.0.extra.weight, (3,)",
        "  another shape: model.norm.weight, (7,) instead of (16,)",
        f"  another shape: {expert}, (7, 16) instead of (8, 16)",
    }
    assert "model.unmatched_tensors" in lines[-1]


def test_differences_that_are_meant(tmp_path: Path) -> None:
    saved = save(tmp_path, TINY)
    change(
        tmp_path,
        **{"model.layers.0.self_attn.q_proj.weight": None, "head.weight": torch.zeros(3)},
    )
    model = source(tmp_path, unmatched_tensors=[r"q_proj", r"^head\."]).build()
    layer = model.model.layers[0].self_attn
    assert torch.equal(layer.k_proj.weight, saved.model.layers[0].self_attn.k_proj.weight)
    assert 0.01 < layer.q_proj.weight.std() < 0.03  # drawn anew
    with pytest.raises(ModelSourceError, match=r"1 tensors .*\n  extra: head\.weight"):
        source(tmp_path, unmatched_tensors=[r"q_proj"]).build()


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    save(tmp_path, TINY, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    index = tmp_path / "model.safetensors.index.json"

    def refused(message: str) -> None:
        with pytest.raises(ModelSourceError, match=message):
            source(tmp_path).build()

    shards[1].write_bytes(shards[1].read_bytes()[:-100])
    refused(rf"{shards[1].name} cannot be read.*cut short")
    shards[1].write_bytes(b"nonsense" * 100)
    refused(rf"{shards[1].name} cannot be read")
    for shard in shards[:2]:
        shard.unlink()
    refused(rf"names 2 of {len(shards)} files that are not there: {shards[0].name}, ")
    for outside in ("../outside.safetensors", "/outside.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": outside}}))
        refused(f"leads out of its folder, to {re.escape(outside)}")
    index.write_text("{")
    refused(r"index .* cannot be read")
    index.unlink()
    refused(r"holds no weights.*model\.safetensors")


def test_a_pickle_of_tensors_alone_is_read(tmp_path: Path) -> None:
    model = save(tmp_path, TINY)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert same_tensors(source(tmp_path).build(), model)


class Harmful:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return eval, ("1 / 0",)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_anything_else_is_refused(tmp_path: Path, zipped: bool) -> None:
    save(tmp_path, TINY)
    (tmp_path / "model.safetensors").unlink()
    file = tmp_path / "pytorch_model.bin"
    if zipped:
        torch.save({"x": Harmful()}, file)
    else:
        file.write_bytes(pickle.dumps({"x": Harmful()}, protocol=2))
    with pytest.raises(ModelSourceError, match=r"pytorch_model\.bin is a pickle .* refused"):
        source(tmp_path).build()


def test_a_model_that_wants_to_run_its_own_code(tmp_path: Path) -> None:
    save(tmp_path, TINY)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields.update(model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    path.write_text(json.dumps(fields))
    (tmp_path / "configuration_own.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(ConfigurationError, match=r"configuration_own.*trust_remote_code=true"):
        source(tmp_path).build()


@pytest.mark.parametrize("published", [True, False])
def test_fields_of_a_configuration_can_be_changed(tmp_path: Path, published: bool) -> None:
    save(tmp_path, TINY)
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    changes = {"max_position_embeddings": 256, "rope_parameters": scaled}
    options: dict[str, Any] = {"architecture": TINY}
    if published:
        options = {"architecture": {}, "hub_name": str(tmp_path), "weights": "pretrained"}
    plain = ModelSource(**options).load_config()
    changed = ModelSource(**options, config_changes=changes)
    config = changed.load_config()
    assert config.max_position_embeddings == 256
    theta = plain.rope_parameters["rope_theta"]  # what is not named stays
    assert config.rope_parameters == {"rope_theta": theta, **scaled}
    assert changed.build().config.rope_parameters == config.rope_parameters
    if published:
        with pytest.raises(ConfigurationError, match=r"config_changes\.max_positions: .*no such"):
            ModelSource(**options, config_changes={"max_positions": 256}).load_config()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust_remote_code": "no"}, r"trust_remote_code='no' is not one of False, True"),
        ({"frozen_weights": "disk"}, r"frozen_weights='disk' is not one of memory, mmap"),
        ({"dtype": "int3"}, r"dtype='int3' is not one of auto, float32"),
    ],
)
def test_refuses_unknown_choices(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ModelSource(architecture=TINY, **options)


def test_auto_is_the_published_dtype(tmp_path: Path) -> None:
    save(tmp_path, TINY, dtype="bfloat16")
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert source(tmp_path, dtype="auto").build().dtype == torch.bfloat16
    assert source(tmp_path).build().dtype == torch.float32


@pytest.mark.soak
@pytest.mark.parametrize("case", ["to_float32", "mapped"])
def test_peak_memory_is_the_store_and_a_shard(tmp_path: Path, case: str) -> None:
    """The same at 1 GB: benchmarks/checkpoint_loading.py; here with room for lazy imports."""
    write_checkpoint(tmp_path, num_megabytes=300, shard_megabytes=40)
    report = run_case(case, tmp_path)
    if case == "mapped":
        assert report["peak_bytes"] < 0.2 * report["model_bytes"]
    else:
        limit = report["model_bytes"] + report["largest_shard_bytes"]
        assert report["model_bytes"] < report["peak_bytes"] < 1.05 * limit + 2**25


class Small(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embedding.weight
        with torch.device("cpu"):
            self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.embedding(ids))) * self.scale
        return result


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors)
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: tensors[name] for name in part}, folder / f"{number}.safetensors")


def saved_small(folder: Path) -> tuple[Small, dict[str, Tensor]]:
    module = Small()
    module.norm.running_mean = torch.arange(4.0)
    tensors = {n: t.clone() for n, t in module.state_dict().items() if n != "head.weight"}
    write(folder, tensors)
    return module, tensors


def test_a_module_on_meta_gets_the_files_weights(tmp_path: Path) -> None:
    expected, _ = saved_small(tmp_path)
    module = on_meta(Small)
    load_module(module, tmp_path)
    assert module.head.weight is module.embedding.weight
    ids = torch.arange(6)
    assert torch.equal(module.eval()(ids), expected.eval()(ids))
    module = on_meta(Small)
    load_module(module, tmp_path, dtype=torch.bfloat16)
    assert module.embedding.weight.dtype == torch.bfloat16
    assert module.norm.num_batches_tracked.dtype == torch.long


def test_all_differences_are_listed(tmp_path: Path) -> None:
    _, tensors = saved_small(tmp_path)
    del tensors["norm.bias"]
    write(tmp_path, {**tensors, "other": torch.zeros(2), "norm.weight": torch.zeros(3)})
    module = on_meta(Small)
    with pytest.raises(ModelSourceError) as raised:
        load_module(module, tmp_path)
    assert str(raised.value).splitlines()[1:] == [
        "  missing: norm.bias, (4,)",
        "  extra: other, (2,)",
        "  another shape: norm.weight, (3,) instead of (4,)",
    ]
    assert module.embedding.weight.is_meta  # nothing has been read


def test_refuses_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"has no safetensors file"):
        load_module(Small(), tmp_path)
    saved_small(tmp_path)
    file = tmp_path / "0.safetensors"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ModelSourceError, match=r"0\.safetensors cannot be read"):
        load_module(Small(), tmp_path)
    module = on_meta(Small)
    module.scale = torch.zeros(1, device="meta")
    saved_small(tmp_path)
    with pytest.raises(ConfigurationError, match=r"Buffer scale has no values"):
        load_module(module, tmp_path)


def test_weights_are_drawn_by_seed_alone() -> None:
    before = torch.random.get_rng_state()
    stack = [on_meta(lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))) for _ in range(3)]
    for module, seed in zip(stack, (1, 1, 2), strict=True):
        draw_weights(module, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(stack[0][0].weight, stack[1][0].weight)
    assert not torch.equal(stack[0][0].weight, stack[2][0].weight)
    assert 0.05 < stack[0][0].weight.std() < 0.1
    assert torch.equal(stack[0][1].weight, torch.ones(64))


def test_a_model_of_transformers_is_drawn_as_it_draws_itself() -> None:
    model = on_meta(lambda: ModelSource(architecture=TINY).build())
    draw_weights(model, seed=3)
    built = ModelSource(architecture=TINY, seed=3).build()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in built.named_parameters():
        drawn, wanted = (
            tensor.detach().std().item() for tensor in (model.get_parameter(name), parameter)
        )
        assert drawn == pytest.approx(wanted, rel=0.3, abs=1e-6), name
    for name, buffer in built.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_a_part_that_cannot_be_drawn_is_named() -> None:
    module = on_meta(lambda: nn.ModuleDict({"part": Small()}))
    with pytest.raises(ConfigurationError, match=r"^part has parameters.*reset_parameters"):
        draw_weights(module, seed=0)
