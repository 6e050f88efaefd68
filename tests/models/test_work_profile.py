import gc
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from peft import LoraConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from roundpipe_lightning.engine.chain.chain import Link
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.work.meta_run import kinds_of
from roundpipe_lightning.models.work.work_profile import (
    causal_lm_call,
    module_fingerprint,
    work_profile,
)
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
SHAPE = MicrobatchShape(sequences=3, seq_len=256)
TOKENS = SHAPE.tokens


def build(model_type: str, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        config = AutoConfig.for_model(model_type, **{**SIZES, **changes})
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()


def measure(model: nn.Module) -> WorkProfile:
    return work_profile(model, find_stacks(model, None)[0], seq_len=128)


def forward_operations(work: WorkProfile) -> list[float]:
    return [part.forward.matrix_operations.of(SHAPE) for part in work.segments]


def backward_operations(work: WorkProfile) -> list[float]:
    return [part.backward.matrix_operations.of(SHAPE) for part in work.segments]


def test_a_dense_model_s_products_are_those_of_its_weights() -> None:
    model = build("llama", tie_word_embeddings=False)
    work = measure(model)
    features = 4 * 16 + 2 * 2 * 16 + 4 * 16  # queries, keys and values, output
    weights = 64 * features + 3 * 64 * 160
    assert forward_operations(work) == [0, *[2 * TOKENS * weights] * 3, 2 * TOKENS * 64 * 512]
    assert backward_operations(work)[1:4] == [4 * TOKENS * weights] * 3
    assert {block.boundary_bytes.of(SHAPE) for block in work.blocks} == {TOKENS * 64 * 2}
    assert work.num_parameters == sum(p.numel() for p in model.parameters())
    assert work.num_trainable == work.num_parameters
    assert work.fingerprint == module_fingerprint(model, find_stacks(model, None)[0])


def test_attention_counts_the_pairs_that_its_mask_leaves() -> None:
    work = measure(build("qwen3"))
    pairs = SHAPE.sequences * SHAPE.seq_len**2 / 2
    forward = work.blocks[0].forward.attention_operations
    assert forward.of(SHAPE) == pytest.approx(4 * pairs * 4 * 16, rel=0.01)
    backward = work.blocks[0].backward.attention_operations
    assert backward.of(SHAPE) == pytest.approx(2.5 * forward.of(SHAPE))
    assert forward.per_square == pytest.approx(4 * 4 * 16 / 2)
    assert work.blocks[0].kept_bytes.per_square == pytest.approx(0, abs=1e-6)  # no scores
    result = TOKENS * 4 * (16 * 2 + 4)  # in bfloat16, and a sum per row and head in float32
    assert work.blocks[0].attention_bytes.of(SHAPE) == result


def test_windows_and_full_attention_in_turn_are_two_kinds_of_blocks() -> None:
    model: Any = build(
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=32,
        num_hidden_layers=4,
    )
    eager = measure(model)  # transformers has no fused attention for it by default
    assert all(block.kept_bytes.per_square > 0 for block in eager.blocks)
    model.set_attn_implementation("flex_attention")
    work = measure(model)
    pairs = [block.forward.attention_operations.of(SHAPE) for block in work.blocks]
    assert pairs[0] == pairs[2] < pairs[1] / 3 == pairs[3] / 3


@dataclass
class _Encoding:
    bits: int
    shape: torch.Size = torch.Size((4, 4))  # noqa: RUF009

    def __getattribute__(self, name: str) -> Any:
        if name == "bits":
            raise ValueError("as transformers' configurations say of what differs between layers")
        return super().__getattribute__(name)


class _Numbered(nn.Module):
    """Block that knows its number, and something else."""

    def __init__(self, number: int, other: Any) -> None:
        super().__init__()
        self.linear, self.number, self.name = nn.Linear(4, 4), number, f"{number}.in_4bit"
        self.other = other
        self.register_buffer("mask", torch.ones(4))


@pytest.mark.parametrize(
    ("others", "kinds"),
    [
        ([0.5] * 5, [0] * 5),
        ([F.relu] * 5, [0] * 5),
        ([{"a": {"b": _Encoding(number)}} for number in (4, 4, 4, 8, 8)], [0, 0, 0, 1, 1]),
        ([(1, 0), (0, 1)], [0, 1]),
        ([False, True], [0, 1]),
        ([1, 2], [0, 1]),
        ([0.1, 0.2, 0.3, 0.4], [0, 1, 2, 3]),
        (["a", "b", "c", "d"], [0, 1, 2, 3]),
        ([F.relu, F.gelu], [0, 1]),
        ([partial(torch.roll, dims=dim) for dim in (0, 1)], [0, 1]),
        ([nn.Parameter(torch.ones(size)) for size in (1, 2)], [0, 1]),
        ([nn.ReLU(), nn.GELU()], [0, 1]),
    ],
)
def test_blocks_of_one_kind_differ_by_their_numbers_alone(
    others: list[Any], kinds: list[int]
) -> None:
    few = len(others) < 3  # a number of one of few may be something else
    blocks = [_Numbered(0 if few else i, other) for i, other in enumerate(others)]
    links = [Link(block=block, name=f"blocks.{i}") for i, block in enumerate(blocks)]
    assert kinds_of(links) == kinds


def test_blocks_of_two_lists_are_counted_apart() -> None:
    """As those of a model with adapters, and of its reference."""
    links = [
        Link(block=_Numbered(i, other and f"{i}.{other}"), name=f"{model}.blocks.{i}")
        for model, other in (("reference", ""), ("model", "adapted"))
        for i in range(4)
    ]
    assert kinds_of(links) == [0] * 4 + [1] * 4


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


def test_tied_parameters_are_counted_once() -> None:
    model = build("qwen3", tie_word_embeddings=True)
    work = measure(model)
    assert work.tied_parameters == 64 * 512
    assert work.head.num_parameters >= 64 * 512
    assert work.tail.num_parameters == 64 * 512 + 64
    assert work.num_trainable == sum(p.numel() for p in model.parameters())


def test_wide_adapters_leave_boundaries_of_a_narrow_base_narrow() -> None:
    def boundary(model: nn.Module) -> float:
        stack = find_stacks(model, None)[0]
        work = work_profile(model, stack, seq_len=128, compute_dtype=torch.bfloat16, settings={})
        return work.blocks[0].boundary_bytes.of(SHAPE)

    adapters = Adapters(config=LoraConfig(r=2, target_modules="all-linear"))
    assert boundary(build("qwen3").float()) == TOKENS * 64 * 4
    narrow: Any = build("qwen3")
    adapters.apply(narrow)
    assert {p.dtype for p in narrow.parameters() if p.requires_grad} == {torch.float32}
    assert boundary(narrow) == TOKENS * 64 * 2


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
    work = work_profile(model, find_stacks(model, None)[0], call=plain_call, seq_len=128)
    head, block, tail = 8 * 16, 16 * 48, 16 * 4
    assert forward_operations(work) == [2 * TOKENS * x for x in (head, block, block, tail)]
    assert backward_operations(work)[0] == 2 * TOKENS * head
    assert backward_operations(work)[-1] == 4 * TOKENS * tail
    assert work.blocks[0].forward.attention_operations.per_square == pytest.approx(2 * 16)


class Cache:
    """Keys and values of every layer; it holds itself, as some objects do."""

    def __init__(self) -> None:
        self.layers: list[Tensor] = []
        self.itself = self


class Caching(Plain):
    """A module whose blocks read and write an object that they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CachingLayer() for _ in range(2))

    def forward(self, features: Tensor) -> Tensor:
        hidden, cache = self.enter(features), Cache()
        cache.layers.append(hidden)
        for layer in self.layers:
            hidden = layer(hidden, cache)
        assert len(cache.layers) == 1  # a block that is measured writes into a copy
        loss: Tensor = self.leave(hidden).square().mean()
        return loss


class CachingLayer(Layer):
    def forward(self, hidden: Tensor, cache: Cache) -> Tensor:  # type: ignore[override]
        cache.layers = [*cache.layers, super().forward(hidden, scale=2.0)[0]]
        return cache.layers[-1] + cache.layers[0]


def test_blocks_get_copies_of_objects_that_hold_tensors() -> None:
    with torch.device("meta"):
        model, plain = Caching(), Plain()
    expected = work_profile(plain, find_stacks(plain, None)[0], call=plain_call, seq_len=128)
    thresholds = gc.get_threshold()
    try:  # whenever the collector finds what an earlier block left in a circle
        for often in (80, 240, 320, 360, 720):
            gc.set_threshold(often, 1, 1)
            work = work_profile(model, find_stacks(model, None)[0], call=plain_call, seq_len=128)
            assert work.blocks[0].kept_bytes == work.blocks[1].kept_bytes
    finally:
        gc.set_threshold(*thresholds)
    assert forward_operations(work) == forward_operations(expected)


def test_a_module_without_blocks_is_one_tail() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
    work = work_profile(model, None, call=plain_call, seq_len=128)
    assert work.blocks == ()
    assert work.tail.forward.matrix_operations.of(SHAPE) == 2 * TOKENS * 8 * 16
    assert work.tail.num_parameters == 8 * 16 + 16


def test_what_cannot_be_measured_is_refused() -> None:
    def call(module: nn.Module, sequences: int, seq_len: int) -> Any:
        return module(torch.zeros((int(torch.ones((), device="meta").item()), 2)))

    with pytest.raises(ConfigurationError, match="without weights"):
        work_profile(nn.Linear(2, 2), None)
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
    block = work_profile(model, find_stacks(model, None)[0], call=call, seq_len=128).blocks[0]
    assert len(block.peak_bytes.amounts) == 1


def test_blocks_that_do_not_run_have_no_work() -> None:
    class Skipping(Plain):
        def forward(self, features: Tensor) -> Tensor:
            return self.leave(self.enter(features))  # type: ignore[no-any-return]

    with torch.device("meta"):
        model = Skipping()
    work = work_profile(model, find_stacks(model, None)[0], call=plain_call, seq_len=128)
    assert work.blocks[0].forward.matrix_operations.of(SHAPE) == 0
    assert work.blocks[0].num_parameters == 16 * 48 + 48


# --- adapters -------------------------------------------------------------------------------------

RANK = 4
QUERIES = ("q_proj", "v_proj")


def adapted(method: str, settings: dict[str, Any], *, model_type: str = "qwen3") -> nn.Module:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model: Any = build(model_type, **(experts if model_type == "qwen3_moe" else {}))
    config = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(method.upper())](**settings)
    with torch.device("meta"):
        return Adapters(config=config).apply(model).train()


def test_frozen_weights_have_no_gradients() -> None:
    full = measure(build("qwen3"))
    lora = measure(adapted("lora", {"target_modules": QUERIES, "r": RANK}))
    num_adapter = RANK * (64 + 64) + RANK * (64 + 32)
    assert lora.blocks[1].num_trainable == num_adapter
    assert lora.blocks[1].num_parameters == full.blocks[1].num_parameters + num_adapter
    plain = forward_operations(full)[2]
    assert forward_operations(lora)[2] == plain + 2 * TOKENS * num_adapter
    assert backward_operations(lora)[2] == plain + 4 * TOKENS * num_adapter
    assert lora.head.backward.memory_bytes.of(SHAPE) == 0


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


@pytest.mark.suite(
    "lora-settings1",
    "ia3-settings5",
    "prompt_tuning-settings6",
    "prefix_tuning-settings7",
    "adalora-settings12",
    "ln_tuning-settings14",
    "trainable_tokens-settings15",
)
@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # norms, by peft
@pytest.mark.parametrize(("method", "settings"), METHODS)
def test_every_method_is_measured(method: str, settings: dict[str, Any]) -> None:
    model = adapted(method, settings)
    work = measure(model)
    assert work.num_trainable == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert all(block.has_backward for block in work.blocks)
    assert min(backward_operations(work)[1:]) > 0
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
    assert 0 < backward_operations(work)[3] < backward_operations(full)[3]


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
    _, first, second, third, _ = backward_operations(work)
    assert second == third == first + plain + adapters


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_adapters_of_experts_are_added_to_all_of_them(model_type: str) -> None:
    settings = {"target_modules": QUERIES, "r": RANK}
    plain = measure(adapted("lora", settings, model_type=model_type))
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    model = adapted("lora", {**settings, "target_parameters": experts}, model_type=model_type)
    work = measure(model)
    stack = find_stacks(model, None)[0]

    def call(root: nn.Module, *size: int) -> Any:
        return causal_lm_call(root.get_submodule("0"), *size)

    copied = work_profile(nn.Sequential(model), stack, call=call, seq_len=128, settings={})
    assert copied.segments == work.segments
    stacks = [p for name, p in model.named_parameters() if p.dim() == 3]
    sizes = [stack.shape for stack in stacks[:2]]
    num_adapter = sum(RANK * count * (rows + columns) for count, rows, columns in sizes)
    assert work.blocks[1].num_trainable == plain.blocks[1].num_trainable + num_adapter
    folded = sum(2 * RANK * stack.numel() for stack in stacks[:2])
    more = forward_operations(work)[2] - forward_operations(plain)[2]
    assert more == 2 * folded  # W + B A, when peft registers it and when it is read
    assert backward_operations(work)[2] > backward_operations(plain)[2] + 2 * folded
