"""Work measured on the meta device against what can be counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.blocks import find_blocks
from roundpipe_lightning.models.work.parameters import module_fingerprint
from roundpipe_lightning.models.work.work_profile import work_profile
from roundpipe_lightning.planning.model.work import MicrobatchShape, WorkProfile

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
SHAPE = MicrobatchShape(sequences=3, seq_len=256)
TOKENS = SHAPE.tokens


def build(model_type: str, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()


def measure(model: nn.Module) -> WorkProfile:
    return work_profile(model, find_blocks(model, None), seq_len=128)


def test_a_dense_model_s_products_are_those_of_its_weights() -> None:
    model = build("llama", tie_word_embeddings=False)
    work = measure(model)
    features = 4 * 16 + 2 * 2 * 16 + 4 * 16  # queries, keys and values, output
    weights = 64 * features + 3 * 64 * 160
    for block in work.blocks:
        assert block.forward.matrix_operations.of(SHAPE) == 2 * TOKENS * weights
        assert block.backward.matrix_operations.of(SHAPE) == 4 * TOKENS * weights
        assert block.boundary_bytes.of(SHAPE) == TOKENS * 64 * 2
    tail = work.tail.forward.matrix_operations.of(SHAPE)
    assert tail == 2 * TOKENS * 64 * 512
    assert work.head.forward.matrix_operations.of(SHAPE) == 0
    assert work.num_parameters == sum(p.numel() for p in model.parameters())
    assert work.num_trainable == work.num_parameters
    assert work.fingerprint == module_fingerprint(model, find_blocks(model, None))


def test_attention_counts_the_pairs_that_its_mask_leaves() -> None:
    work = measure(build("qwen3"))
    pairs = SHAPE.sequences * SHAPE.seq_len**2 / 2
    forward = work.blocks[0].forward.attention_operations
    assert forward.of(SHAPE) == pytest.approx(4 * pairs * 4 * 16, rel=0.01)
    backward = work.blocks[0].backward.attention_operations
    assert backward.of(SHAPE) == pytest.approx(2.5 * forward.of(SHAPE))
    assert forward.per_square == pytest.approx(4 * 4 * 16 / 2)


def test_no_scores_are_kept() -> None:
    work = measure(build("qwen3"))
    assert work.blocks[0].kept_bytes.per_square == pytest.approx(0, abs=1e-6)


def test_windows_and_full_attention_in_turn_are_two_kinds_of_blocks() -> None:
    model = build(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=32,
        num_hidden_layers=4,
    )
    work = measure(model)
    pairs = [block.forward.attention_operations.of(SHAPE) for block in work.blocks]
    assert pairs[0] == pairs[2] < pairs[1] / 3 == pairs[3] / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_active_experts_count(dtype: torch.dtype) -> None:
    model = build("qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32).to(
        dtype
    )
    block = measure(model).blocks[0]
    expert = 3 * 64 * 32
    attention = 64 * (64 + 2 * 32) + 64 * 64
    per_token = 2 * (attention + 64 * 8 + 2 * expert)  # the router has 8 outputs
    assert block.forward.matrix_operations.of(SHAPE) == TOKENS * per_token
    assert block.backward.matrix_operations.of(SHAPE) == 2 * TOKENS * per_token
    weights = 8 * expert * torch.empty((), dtype=dtype).element_size()
    assert block.forward.matrix_bytes.fixed > weights  # all experts' weights are read
    assert block.num_parameters > 8 * expert  # all of them are uploaded


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21's own
def test_frozen_weights_have_no_gradients() -> None:
    model = build("qwen3")
    full = measure(model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    lora = measure(adapted)
    block, plain = lora.blocks[1], full.blocks[1]
    num_adapter = 4 * (64 + 64) + 4 * (64 + 32)
    assert block.num_trainable == num_adapter
    assert block.num_parameters == plain.num_parameters + num_adapter
    forward = block.forward.matrix_operations.of(SHAPE)
    assert forward == plain.forward.matrix_operations.of(SHAPE) + 2 * TOKENS * num_adapter
    backward = block.backward.matrix_operations.of(SHAPE)
    assert backward == plain.forward.matrix_operations.of(SHAPE) + 4 * TOKENS * num_adapter
    assert lora.head.backward.memory_bytes.of(SHAPE) == 0


def test_tied_parameters_are_counted_once() -> None:
    model = build("qwen3", tie_word_embeddings=True)
    work = measure(model)
    assert work.tied_parameters == 64 * 512
    assert work.head.num_parameters >= 64 * 512
    assert work.tail.num_parameters == 64 * 512 + 64
    assert work.num_trainable == sum(p.numel() for p in model.parameters())


def test_memory_in_use_is_seen() -> None:
    block = measure(build("llama")).blocks[0]
    kept, peak = block.kept_bytes.of(SHAPE), block.peak_bytes.of(SHAPE)
    assert block.boundary_bytes.of(SHAPE) < kept < peak
    assert block.forward_peak_bytes.of(SHAPE) < kept
    wide = TOKENS * 160 * 2  # gate, its activation, up and their product are kept
    assert kept > 4 * wide


def test_the_module_is_left_as_it_was() -> None:
    model = build("qwen3")
    before = dict(vars(model.model.layers[0]))  # type: ignore[index,union-attr]
    attention = model.config._attn_implementation  # type: ignore[union-attr]
    measure(model)
    assert vars(model.model.layers[0]) == before  # type: ignore[index,union-attr]
    assert model.config._attn_implementation == attention  # type: ignore[union-attr]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


class Plain(nn.Module):
    """A module that transformers knows nothing of, with PyTorch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.leave = nn.Linear(16, 4)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.enter(features)
        for layer in self.layers:
            hidden, _ = layer(hidden, scale=2.0)
        loss: Tensor = self.leave(hidden).square().mean()
        return loss


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 48)

    def forward(self, hidden: Tensor, *, scale: float) -> tuple[Tensor, float]:
        query, key, value = self.mix(hidden).unflatten(-1, (2, 24)).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden + scale * mixed.transpose(1, 2).flatten(2), scale


def plain_call(module: nn.Module, sequences: int, seq_len: int) -> Any:
    return module(torch.zeros((sequences, seq_len, 8), device="meta"))


def test_any_module_is_measured() -> None:
    with torch.device("meta"):
        model = Plain()
    work = work_profile(model, find_blocks(model, None), call=plain_call, seq_len=128)
    assert work.head.forward.matrix_operations.of(SHAPE) == 2 * TOKENS * 8 * 16
    assert work.head.backward.matrix_operations.of(SHAPE) == 2 * TOKENS * 8 * 16
    assert work.blocks[1].forward.matrix_operations.of(SHAPE) == 2 * TOKENS * 16 * 48
    assert work.blocks[0].forward.attention_operations.per_square == pytest.approx(2 * 16)
    assert work.tail.backward.matrix_operations.of(SHAPE) == 4 * TOKENS * 16 * 4


def test_a_module_without_blocks_is_one_tail() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    work = work_profile(model, None, call=plain_call, seq_len=128)
    assert work.blocks == ()
    assert work.tail.forward.matrix_operations.of(SHAPE) == 2 * TOKENS * 8 * 16
    assert work.tail.num_parameters == 8 * 16 + 16


def test_weights_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="without weights"):
        work_profile(nn.Linear(2, 2), None)


def test_code_that_needs_values_is_refused() -> None:
    def call(module: nn.Module, sequences: int, seq_len: int) -> Any:
        return module(torch.zeros((int(torch.ones((), device="meta").item()), 2)))

    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="cannot be measured without values"):
        work_profile(model, None, call=call)


def test_models_that_need_their_masks_are_measured_as_configured() -> None:
    with torch.device("meta"):
        config = AutoConfig.for_model(
            "mpt", d_model=64, n_heads=4, n_layers=2, vocab_size=512, max_seq_len=8192
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    work = measure(model)
    assert work.blocks[0].kept_bytes.per_square > 0  # scores are kept
    assert work.blocks[0].forward.matrix_operations.per_square > 0


def test_long_sequences_are_tried_only() -> None:
    def call(module: nn.Module, sequences: int, seq_len: int) -> Any:
        if seq_len > 256:
            raise ValueError("too long")
        return plain_call(module, sequences, seq_len)

    with torch.device("meta"):
        model = Plain()
    block = work_profile(model, find_blocks(model, None), call=call, seq_len=128).blocks[0]
    assert len(set(block.peak_bytes.amounts)) == 1


def test_blocks_that_do_not_run_have_no_work() -> None:
    class Skipping(Plain):
        def forward(self, features: Tensor) -> Tensor:
            return self.leave(self.enter(features))  # type: ignore[no-any-return]

    with torch.device("meta"):
        model = Skipping()
    work = work_profile(model, find_blocks(model, None), call=plain_call, seq_len=128)
    assert work.blocks[0].forward.matrix_operations.of(SHAPE) == 0
    assert work.blocks[0].num_parameters == 16 * 48 + 48
