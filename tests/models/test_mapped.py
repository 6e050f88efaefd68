import copy
import pickle
import subprocess
import sys
import textwrap
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import bitsandbytes.functional
import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM

from benchmarks.checkpoint_loading import REPOSITORY, write_checkpoint
from roundpipe_lightning.engine.store.flat_buffers import MappedParameter, is_mapped
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.errors import CheckpointError, ConfigurationError, FitError
from roundpipe_lightning.models import weight_files
from roundpipe_lightning.models.export import ExportOptions, export_pretrained
from roundpipe_lightning.models.quantized import (
    _Encoding,
    dequantize_layer,
    encodings_of,
    quantize_frozen,
)
from roundpipe_lightning.models.weight_files import UnmappedWeightsWarning, mapped_parameters
from roundpipe_lightning.models.work.work_profile import parameter_work, step_profile
from roundpipe_lightning.modules import ModelSource
from roundpipe_lightning.planning.model.work import MicrobatchShape, ParameterStorage, size_model
from tests.kit.architectures import TINY, Adapted, token_batches
from tests.kit.engine import (
    cpu_workers,
    differences,
    emulated_workers,
    engine_of,
    mean_step,
    plain_step,
    plan_of,
    stack_of,
)
from tests.models.test_load import EXPERTS, change, save, source


def adapted(folder: Path, **options: Any) -> Adapted:
    base = source(folder, **options).build()
    return Adapted(base, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))


def test_parameters_are_views_of_the_files(tmp_path: Path) -> None:
    saved = save(tmp_path, TINY, max_shard_size="10KB")
    model = source(tmp_path, frozen_weights="mmap").build()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert set(mapped_parameters(model)) == names
    for name, parameter in saved.named_parameters():
        loaded = model.get_parameter(name)
        assert isinstance(loaded, MappedParameter)
        assert torch.equal(loaded, parameter)
        assert not loaded.requires_grad
        assert loaded.file.parent == tmp_path
    assert model.lm_head.weight is model.model.embed_tokens.weight
    addresses = {p.data_ptr() for p in model.parameters()}
    HostStore(model, list(model.model.layers))
    assert {p.data_ptr() for p in model.parameters()} == addresses


def test_adapters_train_as_on_weights_in_memory(tmp_path: Path) -> None:
    save(tmp_path, TINY, max_shard_size="10KB")
    plain_module = adapted(tmp_path)
    batches = token_batches(4)
    plain = plain_step(plain_module, batches)
    files = {file: file.read_bytes() for file in tmp_path.glob("*.safetensors")}
    for devices in (cpu_workers(2), emulated_workers(2)):
        module = adapted(tmp_path, frozen_weights="mmap")
        assert len(mapped_parameters(module)) == 25
        stack = stack_of(module.blocks)
        plan = plan_of(stack, num_workers=2, num_microbatches=4)
        with engine_of(module, stack, plan, devices=devices) as engine:
            result = mean_step(engine, batches)
        assert not differences(module, result, plain), devices[0].name
        assert len(mapped_parameters(module)) == 25
        assert len(result.gradients) == 8
    assert all(file.read_bytes() == content for file, content in files.items())


def test_a_write_is_refused_when_the_block_is_used_next(tmp_path: Path) -> None:
    saved = save(tmp_path, TINY)
    model = source(tmp_path, frozen_weights="mmap").build()
    blocks = list(model.model.layers)
    store = HostStore(model, blocks)
    [worker] = emulated_workers(1)
    store.upload_block(blocks[1], worker)
    with torch.no_grad():
        blocks[1].self_attn.q_proj.weight.add_(1)
    store.upload_block(blocks[0], worker)
    worker.close()
    message = r"layers\.1\.self_attn\.q_proj\.weight .* was written to.*frozen_weights=memory"
    with pytest.raises(ConfigurationError, match=message):
        store.upload_block(blocks[1], worker)
    with pytest.raises(ConfigurationError, match=message):
        HostStore(model, blocks)
    again = source(tmp_path).build()
    assert torch.equal(
        again.model.layers[1].self_attn.q_proj.weight,
        saved.model.layers[1].self_attn.q_proj.weight,
    )


def test_what_is_converted_is_refused_and_what_is_trained_is_an_ordinary_parameter(
    tmp_path: Path,
) -> None:
    save(tmp_path, TINY)
    model: Any = source(tmp_path, frozen_weights="mmap").build()
    weight = model.model.norm.weight.requires_grad_(True)
    HostStore(model, list(model.model.layers))
    with torch.no_grad():
        weight.add_(1)
    HostStore(model, list(model.model.layers))
    assert "model.norm.weight" in model.state_dict()
    assert torch.equal(source(tmp_path).build().model.norm.weight + 1, weight)
    model.to(torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"converted to torch\.bfloat16.*precision"):
        HostStore(model, list(model.model.layers))


def test_checkpoints_leave_the_base_out(tmp_path: Path) -> None:
    save(tmp_path, TINY)
    module = adapted(tmp_path, frozen_weights="mmap")
    state = copy.deepcopy(module.state_dict())
    assert len(state) == 8
    assert all("lora_" in name for name in state)
    fresh = adapted(tmp_path, frozen_weights="mmap")
    with torch.no_grad():
        for parameter in fresh.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    fresh.load_state_dict(state)
    assert all(torch.equal(fresh.state_dict()[name], value) for name, value in state.items())
    with pytest.raises(RuntimeError, match=r"Missing key.*lora_A"):
        fresh.load_state_dict({})


def test_a_checkpoint_with_the_base_must_agree(tmp_path: Path) -> None:
    save(tmp_path, TINY)
    whole = adapted(tmp_path).state_dict()
    module = adapted(tmp_path, frozen_weights="mmap")
    module.load_state_dict(whole)
    name = "model.base_model.model.model.norm.weight"
    whole[name] = whole[name] + 1
    with pytest.raises(CheckpointError, match=r"other values for 1 frozen.*model\.norm\.weight"):
        module.load_state_dict(whole)
    assert len(mapped_parameters(module)) == 25


def test_a_step_is_planned_by_running_it_without_values(tmp_path: Path) -> None:
    save(tmp_path, TINY)
    works = [
        step_profile(
            (module := adapted(tmp_path, frozen_weights=place)),
            stack_of(module.blocks),
            microbatch=token_batches(1)[0],
            call=lambda copied, batch: copied.training_step(batch, 0),
        )
        for place in ("mmap", "memory")
    ]
    assert works[0].blocks[0].mapped_bytes > 0
    assert works[0].each(lambda part: replace(part, mapped_bytes=0)) == works[1]
    assert works[0].blocks[0].kept_bytes.fixed > 0


def test_copies_are_in_memory(tmp_path: Path) -> None:
    save(tmp_path, TINY)
    model = source(tmp_path, frozen_weights="mmap").build()
    for copied in (copy.deepcopy(model.lm_head), pickle.loads(pickle.dumps(model.lm_head))):
        assert type(copied.weight) is nn.Parameter
        assert torch.equal(copied.weight, model.lm_head.weight)
        with torch.no_grad():
            copied.weight.add_(1)
    assert is_mapped(model.lm_head.weight)
    HostStore(model, [])


def test_what_cannot_be_mapped_is_in_memory_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(tmp_path, EXPERTS)
    with pytest.warns(UnmappedWeightsWarning, match=r"4 parameters .*experts\.gate_up_proj first"):
        model = source(tmp_path, frozen_weights="mmap").build()
    assert not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(saved.get_parameter(n), p) for n, p in model.named_parameters())
    assert set(model.state_dict()) == {
        f"model.layers.{i}.mlp.experts.{name}"
        for i in (0, 1)
        for name in ("gate_up_proj", "down_proj")
    }
    with pytest.warns(UnmappedWeightsWarning, match=r"another dtype"):
        model = source(tmp_path, frozen_weights="mmap", dtype="bfloat16").build()
    assert mapped_parameters(model) == {}
    monkeypatch.setattr("roundpipe_lightning.engine.device.host_memory.free_host_bytes", lambda: 0)
    with pytest.raises(FitError, match="these weights in another dtype or in parts"):
        source(tmp_path, frozen_weights="mmap").build()
    save(tmp_path, TINY)
    assert mapped_parameters(source(tmp_path, frozen_weights="mmap").build())


@pytest.mark.filterwarnings(
    "ignore::roundpipe_lightning.models.weight_files.UnmappedWeightsWarning"
)
@pytest.mark.parametrize("architecture", [TINY, EXPERTS])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"frozen_bits": 4}])
def test_a_model_without_values_knows_what_will_be_mapped(
    tmp_path: Path, architecture: dict[str, Any], options: dict[str, Any]
) -> None:
    """So plans count what has to be read: other dtypes, codes, experts that are put together."""
    save(tmp_path, architecture)
    here = source(tmp_path, frozen_weights="mmap", **options)
    written = {**architecture, "dtype": "float32"}
    published = replace(here, hub_name="me/it", architecture_of="me/it", architecture=written)
    loaded = here.build()
    with torch.device("meta"):
        for planned in (here.build(), published.build()):
            assert set(mapped_parameters(planned)) == set(mapped_parameters(loaded))
            assert held_bytes(planned) == held_bytes(loaded)


def held_bytes(model: nn.Module) -> int:
    segments = parameter_work(model, None).segments
    return sum(part.parameter_bytes - part.mapped_bytes for part in segments)


@pytest.mark.parametrize(
    ("change_of", "message"),
    [
        ("platform", "Windows"),
        ("pickle", r"pytorch_model\.bin is none"),
        ("random", "model.weights=random has none"),
    ],
)
def test_refuses_what_cannot_be_mapped_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_of: str, message: str
) -> None:
    save(tmp_path, TINY)
    found = source(tmp_path, frozen_weights="mmap")
    if change_of == "platform":
        monkeypatch.setattr(weight_files.sys, "platform", "win32")  # type: ignore[attr-defined]
    elif change_of == "pickle":
        (tmp_path / "model.safetensors").unlink()
        torch.save({}, tmp_path / "pytorch_model.bin")
    else:
        found = ModelSource(architecture=TINY, frozen_weights="mmap")
    with pytest.raises(ConfigurationError, match=message):
        found.build()


@pytest.mark.soak
def test_training_takes_no_memory_for_the_base(tmp_path: Path) -> None:
    """Anonymous memory is what cannot be read again; pages of the file are the kernel's to drop."""
    write_checkpoint(tmp_path, num_megabytes=200, shard_megabytes=40)
    script = """
        import sys
        from pathlib import Path
        import torch
        from benchmarks.checkpoint_loading import resident_bytes
        from tests.models.test_mapped import adapted
        from tests.kit.engine import emulated_workers, engine_of, mean_step, plan_of, stack_of
        from tests.kit.architectures import token_batches

        torch.set_num_threads(1)
        before = resident_bytes("RssAnon")
        module = adapted(Path(sys.argv[1]), frozen_weights="mmap")
        total = sum(parameter.nbytes for parameter in module.parameters())
        stack = stack_of(module.blocks)
        plan = plan_of(stack, num_workers=2, num_microbatches=2)
        with engine_of(module, stack, plan, devices=emulated_workers(2)) as engine:
            mean_step(engine, token_batches(2))
            grown = resident_bytes("RssAnon") - before
        print(grown / total)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        cwd=REPOSITORY,
        env={"PATH": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.5


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    save(tmp_path, TINY)
    change(tmp_path, **{"model.norm.weight": torch.full((16,), 3.0)})
    model = source(tmp_path, frozen_weights="mmap").build()
    assert isinstance(model.model.norm.weight, MappedParameter)
    assert torch.equal(model.model.norm.weight, torch.full((16,), 3.0))


def adapted_base(bits: int, **options: Any) -> Adapted:
    base = ModelSource(architecture=TINY, frozen_bits=bits).build()
    return Adapted(base, LoraConfig(r=2, target_modules="all-linear", **options))


def linear_layers(model: Any) -> dict[str, nn.Linear]:
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name != "lm_head"
    }


def by_hand(layer: Any, bits: int) -> Tensor:
    """The weight from its codes, without the library: the table of NF4, or equal steps."""
    weight: Tensor = layer.weight
    codes = layer.weight_codes.flatten()
    if bits == 4:
        codes = torch.stack([codes >> 4, codes & 15], dim=1).flatten()
        make_table: Any = bitsandbytes.functional.get_4bit_type
        table: Tensor = make_table("nf4", device="cpu")
    else:
        table = torch.arange(-127, 129).clamp(max=127) / 127
    scales = layer.weight_scales.view(torch.float32).repeat_interleave(64)
    values: Tensor = table[codes.long()] * scales
    return values.to(weight.dtype).view(weight.shape)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_those_of_the_library(bits: int, dtype: str) -> None:
    plain = ModelSource(architecture=TINY, dtype=dtype).build()
    model: Any = ModelSource(architecture=TINY, dtype=dtype, frozen_bits=bits).build()
    limit = {8: 0.02, 4: 0.15}[bits]
    for name, layer in linear_layers(model).items():
        assert encodings_of(layer)
        weight = plain.get_parameter(f"{name}.weight").detach()
        assert layer.weight.dtype == weight.dtype
        error = (layer.weight.float() - weight.float()).abs().mean()
        assert error < limit * weight.float().abs().mean()
        assert torch.equal(layer.weight, by_hand(layer, bits))
    assert not encodings_of(model.lm_head)
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    assert not any(p.requires_grad for p in model.parameters())
    before = {name: layer.weight for name, layer in linear_layers(model).items()}
    model.to(torch.bfloat16).half().float()  # no cast touches the scales
    layers = linear_layers(model)
    assert all(torch.equal(weight, layers[name].weight) for name, weight in before.items())


@pytest.mark.parametrize("bits", [8, 4])
def test_the_store_shrinks_with_the_bits(bits: int) -> None:
    architecture = {**TINY, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    sizes = []
    for frozen_bits in (16, bits):
        model = ModelSource(
            architecture=architecture, dtype="bfloat16", frozen_bits=frozen_bits
        ).build()
        store = HostStore(model, list(model.model.layers))
        sizes.append(sum(p.nbytes for p in store.parameters_of(model.model.layers[0])))
    scales = 4 / 64 / 2  # a float32 for 64 weights of two bytes
    assert sizes[1] / sizes[0] == pytest.approx(bits / 16 + scales, rel=0.02)


@pytest.mark.suite("lora-4", "dora-8")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_adapters_train_as_in_plain_pytorch(bits: int, options: dict[str, Any]) -> None:
    module, batches = adapted_base(bits, **options), token_batches(4)
    plain = plain_step(module, batches)
    frozen = {n: p.clone() for n, p in module.named_parameters() if not p.requires_grad}
    stack = stack_of(module.blocks)
    plan = plan_of(stack, num_workers=2, num_microbatches=4)
    for devices in (cpu_workers(2), emulated_workers(2)):
        with engine_of(module, stack, plan, devices=devices) as engine:
            result = mean_step(engine, batches)
        assert not differences(module, result, plain), devices[0].name
        assert len(result.gradients) == sum(p.requires_grad for p in module.parameters())
    assert all(torch.equal(module.get_parameter(name), p) for name, p in frozen.items())


@pytest.mark.parametrize("frozen_weights", ["memory", "mmap"])
def test_published_weights_are_quantised_as_they_are_read(
    tmp_path: Path, frozen_weights: str
) -> None:
    saved = save(tmp_path, TINY, dtype="bfloat16", max_shard_size="10KB")
    model = source(tmp_path, frozen_bits=4, frozen_weights=frozen_weights).build()
    quantize_frozen(saved, 4)
    for name, parameter in saved.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    in_files = set(mapped_parameters(model))
    assert ("model.embed_tokens.weight" in in_files) == (frozen_weights == "mmap")
    assert not any("self_attn.q_proj" in name for name in in_files)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len(model.state_dict()) == (28 if frozen_weights == "mmap" else 28 + 10 + 1)


MIXTURES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": {
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
}
"""Options of the forms of fused experts."""


@pytest.mark.parametrize("kind", MIXTURES)
def test_fused_experts_are_quantised_as_they_are_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"num_experts_per_tok": 2, **MIXTURES[kind]}
    if kind == "deepseek_v3":
        sizes |= {"head_dim": 4, "num_key_value_heads": 2}
    save(tmp_path, {**TINY, "model_type": kind, "tie_word_embeddings": False, **sizes})
    alive: list[int] = []
    read: list[weakref.ref[Tensor]] = []

    def counted(_layer: Any, _name: str, weight: Tensor | None) -> None:
        if weight is not None and weight.dim() == 3 and not weight.is_meta:
            read.append(weakref.ref(weight))
            alive.append(sum(each() is not None for each in read))

    hook = register_module_parameter_registration_hook(counted)
    base = source(tmp_path, frozen_bits=4).build()
    hook.remove()
    assert len(alive) == (2 if kind == "deepseek_v3" else 4)
    assert max(alive) <= 2, "each is quantised when it has been put together"
    experts = [m for m in base.modules() if getattr(m, "gate_up_proj_codes", None) is not None]
    assert len(experts) == (1 if kind == "deepseek_v3" else 2)
    assert all(layer.down_proj_codes.dtype is torch.uint8 for layer in experts)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).requires_grad_(False)
    stack = stack_of(tuple(plain.model.layers))
    for bits, model in ((4, base), (8, source(tmp_path, frozen_bits=8).build())):
        planned = ParameterStorage(frozen_bits=bits).stored(
            size_model(parameter_work(plain, stack), shape=MicrobatchShape(sequences=1, seq_len=9))
        )
        parts = (planned.head, *planned.blocks, planned.tail)
        assert sum(part.parameter_bytes for part in parts) == sum(
            t.nbytes for t in [*model.parameters(), *model.buffers()]
        )
    for name, parameter in plain.named_parameters():
        parameter.data = _value(base, name)
    config = LoraConfig(r=2, target_modules=["q_proj", "o_proj", "q_a_proj"])
    ours, theirs = Adapted(base, config), Adapted(plain, config)
    batch, whole_weights = token_batches(1)[0], []
    dequantize = _Encoding.dequantize

    def noted(self: Any, *args: Any) -> Tensor:
        weight = dequantize(self, *args)
        whole_weights.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(_Encoding, "dequantize", noted)
    loss = ours.training_step(batch, 0)
    assert len(whole_weights) == len([n for n, _ in base.named_parameters() if "_codes" in n])
    assert not any(weight() is not None for weight in whole_weights), "the graph has the codes"
    expected = theirs.training_step(batch, 0)
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    for name, parameter in theirs.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            torch.testing.assert_close(
                ours.get_parameter(name).grad, parameter.grad, rtol=0, atol=0, msg=name
            )


def _value(model: Any, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    value: Tensor = getattr(model.get_submodule(owner), last)
    return value.detach()


def test_a_pickle_of_tensors_is_quantised_too(tmp_path: Path) -> None:
    saved = save(tmp_path, TINY)
    (tmp_path / "model.safetensors").unlink()
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    layer = source(tmp_path, frozen_bits=8).build().model.layers[0].mlp.up_proj
    assert set(layer.state_dict()) == {"weight_codes", "weight_scales"}
    weight = layer.weight
    dequantize_layer(layer)
    assert type(layer) is nn.Linear
    assert torch.equal(layer.weight, weight)
    assert set(layer.state_dict()) == {"weight"}


def test_a_state_dict_comes_back() -> None:
    first, second = adapted_base(4), adapted_base(4)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.zero_()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    batch = token_batches(1)[0]
    assert torch.equal(first.training_step(batch, 0), second.training_step(batch, 0))


def test_exports_are_dequantised(tmp_path: Path) -> None:
    module = adapted_base(4)
    ids = torch.arange(9)[None]
    expected = module.eval().model(input_ids=ids).logits
    export_pretrained(module.model, tmp_path / "merged", options=ExportOptions(merge=True))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(ids).logits, expected, rtol=1e-4, atol=1e-5)
    export_pretrained(module.model, tmp_path / "adapter", options=ExportOptions())
    base = ModelSource(architecture=TINY, frozen_bits=4).build()
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(loaded(input_ids=ids).logits, expected)
    base = ModelSource(architecture=TINY, frozen_bits=4).build()
    export_pretrained(base, tmp_path / "base", options=ExportOptions())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for name, layer in linear_layers(base).items():
        assert torch.equal(plain.get_parameter(f"{name}.weight"), layer.weight)


def test_refuses_what_cannot_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"frozen_bits=3 is not one of 16, 8, 4"):
        ModelSource(architecture=TINY, frozen_bits=3)
    with pytest.raises(ConfigurationError, match=r"Embedding has no linear layer or experts"):
        quantize_frozen(nn.Embedding(2, 2), 8)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    found = ModelSource(architecture=TINY, frozen_bits=4)  # planning needs no library
    with pytest.raises(ConfigurationError, match=r"needs bitsandbytes.*\[quant\]"):
        found.build()
