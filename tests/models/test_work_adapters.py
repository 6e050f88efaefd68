"""Work of models with adapters: whatever peft adds is measured as it would be trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from roundpipe_lightning.models.blocks import find_blocks
from roundpipe_lightning.models.work.work_profile import work_profile
from roundpipe_lightning.modules import Adapters
from roundpipe_lightning.planning.model.work import MicrobatchShape, Work, WorkProfile

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHAPE = MicrobatchShape(sequences=3, seq_len=256)
TOKENS = SHAPE.tokens
RANK = 4
QUERIES = ("q_proj", "v_proj")


def adapted(method: str, settings: dict[str, Any], *, model_type: str = "qwen3") -> nn.Module:
    sizes = {**SIZES, **(EXPERTS if model_type == "qwen3_moe" else {})}
    with torch.device("meta"):
        config = AutoConfig.for_model(model_type, **sizes)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return (
            Adapters(config=PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(method.upper())](**settings))
            .apply(model)
            .train()
        )


def measure(model: nn.Module) -> WorkProfile:
    return work_profile(model, find_blocks(model, None), seq_len=128)


def forward_operations(work: WorkProfile) -> list[float]:
    return [block.forward.matrix_operations.of(SHAPE) for block in work.blocks]


def backward_operations(work: WorkProfile) -> list[float]:
    return [block.backward.matrix_operations.of(SHAPE) for block in work.blocks]


METHODS: list[tuple[str, dict[str, Any]]] = [
    ("lora", {"target_modules": "all-linear"}),
    ("lora", {"target_modules": QUERIES, "use_dora": True}),
    ("lora", {"target_modules": QUERIES, "use_rslora": True}),
    ("lora", {"target_modules": QUERIES, "bias": "lora_only"}),
    ("lora", {"target_modules": QUERIES, "modules_to_save": ["lm_head"]}),
    ("ia3", {}),
    ("prompt_tuning", {"num_virtual_tokens": 4}),
    ("prefix_tuning", {"num_virtual_tokens": 4}),
    ("p_tuning", {"num_virtual_tokens": 4}),
    ("vera", {"target_modules": QUERIES}),
    ("loha", {"target_modules": QUERIES}),
    ("lokr", {"target_modules": QUERIES}),
    ("adalora", {"target_modules": QUERIES, "total_step": 10}),
    ("oft", {"target_modules": QUERIES}),
    ("ln_tuning", {}),
    ("trainable_tokens", {"token_indices": [1, 2]}),
]


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # norms, by peft
@pytest.mark.parametrize(("method", "settings"), METHODS)
def test_every_method_is_measured(method: str, settings: dict[str, Any]) -> None:
    model = adapted(method, settings)
    work = measure(model)
    assert work.num_trainable == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert all(block.has_backward for block in work.blocks)
    assert min(backward_operations(work)) > 0
    trains_before = method in ("prompt_tuning", "p_tuning", "trainable_tokens")
    assert bool(work.blocks[0].gradient_bytes.of(SHAPE)) == trains_before
    boundary = work.blocks[0].boundary_bytes
    assert [block.gradient_bytes for block in work.blocks[1:]] == [boundary] * 2
    assert work.tail.gradient_bytes == boundary


def test_a_block_below_the_first_that_is_trained_has_no_backward() -> None:
    settings = {"target_modules": QUERIES, "r": RANK}
    full = measure(adapted("lora", settings))
    work = measure(adapted("lora", {**settings, "layers_to_transform": [1]}))
    below, trained, above = work.blocks
    assert (below.has_backward, trained.has_backward, above.has_backward) == (False, True, True)
    assert below.backward == Work()
    assert below.kept_bytes.of(SHAPE) == below.peak_bytes.of(SHAPE) == 0
    assert below.forward_peak_bytes.of(SHAPE) > 0
    sizes = [block.gradient_bytes.of(SHAPE) for block in work.blocks]
    assert sizes == [0, 0, trained.boundary_bytes.of(SHAPE)]
    assert trained == full.blocks[0].__class__(**{**vars(full.blocks[0]), "name": trained.name})
    assert above.num_trainable == 0
    assert 0 < backward_operations(work)[2] < backward_operations(full)[2]


def test_a_model_of_which_the_head_alone_is_trained_runs_no_block_backward() -> None:
    model = adapted("lora", {"target_modules": QUERIES})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    work = measure(model)
    assert not any(block.has_backward for block in work.blocks)
    head = 2 * TOKENS * SIZES["hidden_size"] * SIZES["vocab_size"]
    assert work.tail.backward.matrix_operations.of(SHAPE) == head  # the weight's gradient alone
    assert work.tail.gradient_bytes.of(SHAPE) == 0


def test_the_first_block_s_input_needs_no_gradient() -> None:
    work = measure(adapted("lora", {"target_modules": QUERIES, "r": RANK}))
    plain = TOKENS * 2 * 64 * (64 + 2 * 32)  # queries, keys and values to their input
    adapters = TOKENS * 2 * 64 * RANK * 2
    first, second, third = backward_operations(work)
    assert second == third == first + plain + adapters


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_adapters_of_experts_are_added_to_all_of_them(model_type: str) -> None:
    settings = {"target_modules": QUERIES, "r": RANK}
    plain = measure(adapted("lora", settings, model_type=model_type))
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    model = adapted("lora", {**settings, "target_parameters": experts}, model_type=model_type)
    work = measure(model)
    stacks = [p for name, p in model.named_parameters() if p.dim() == 3]
    sizes = [stack.shape for stack in stacks[:2]]
    num_adapter = sum(RANK * count * (rows + columns) for count, rows, columns in sizes)
    assert work.blocks[1].num_trainable == plain.blocks[1].num_trainable + num_adapter
    folded = sum(2 * RANK * stack.numel() for stack in stacks[:2])
    more = forward_operations(work)[1] - forward_operations(plain)[1]
    assert more == 2 * folded  # W + B A, when peft registers it and when it is read
    grown = work.blocks[1].backward.matrix_operations.of(SHAPE)
    assert grown > plain.blocks[1].backward.matrix_operations.of(SHAPE) + 2 * folded


def test_the_results_of_attention_are_known() -> None:
    work = measure(adapted("lora", {"target_modules": QUERIES}))
    heads, features = 4, 16
    result = TOKENS * heads * (features * 2 + 4)  # in bfloat16, and a sum per row in float32
    assert work.blocks[1].attention_bytes.of(SHAPE) == result
