"""Shrinks the configuration of any transformers model by the names of its fields.

No architecture is known here. A field called `*hidden_size` becomes small whichever model has it,
in sub-configurations too; a list with one entry per layer keeps as many different entries as fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import AutoConfig, PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny model.

    Attributes:
        hidden: Width of the residual stream.
        intermediate: Width inside of a feed-forward block.
        layers: Number of layers.
        heads: Number of attention heads.
        key_value_heads: Number of heads for keys and values, where there may be fewer.
        head: Width of one head.
        rank: Width of low-rank projections and states.
        vocabulary: Number of tokens.
        experts: Number of experts of a mixture.
        positions: Longest sequence.
        window: Tokens in a sliding window, a chunk or a block of attention.
    """

    hidden: int = 64
    intermediate: int = 96
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    head: int = 16
    rank: int = 16
    vocabulary: int = 128
    experts: int = 4
    positions: int = 64
    window: int = 8


Rule = Callable[[Any, TinySizes], Any]

_LAYER_COUNT = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers"
    r"|num_global_layers|num_blocks|depth|\w+_num_hidden_layers|num_layers_per_stack"
)

#: Sub-configurations of what does not generate text.
_OTHER = re.compile("vision|visual|image|audio|speech|codec|vq")

#: Fields that may be None and get a value where a model cannot be built without.
_FILLED = (
    r"head_dim|num_key_value_heads|n_routed_experts|n_shared_experts|num_experts_per_tok|\w*topk"
)

#: The first pattern that matches a whole field name decides.
_RULES: tuple[tuple[str, Rule], ...] = (
    (r"\w*(drop(out)?|pdrop|dropout_\w+|layerdrop|drop_rate|jitter_noise)\w*", lambda v, s: 0.0),
    (r"mask_(time|feature)_prob", lambda v, s: 0.0),
    (r"type_vocab_size|task_type_vocab_size", lambda v, s: v),
    (r"\w*vocab_size\w*|\w*hash_byte_group_vocab|unpadded_vocab_size", lambda v, s: s.vocabulary),
    (_LAYER_COUNT.pattern, lambda v, s: min(v, s.layers)),
    (r"num_kv_shared_layers|max_window_layers", lambda v, s: min(v, s.layers // 2)),
    (r"num_dense_layers|first_k_dense_replace|moe_layer_start_index", lambda v, s: min(v, 1)),
    (r"(attn|expert)_layer_offset", lambda v, s: min(v, 1)),
    ((r"(attn|expert)_layer_period|layer_group_size|\w*interval|sliding_window_pattern"
     r"|n_layers_per_attn_res_block|global_attn_every_n_layers"), lambda v, s: min(v, 2)),
    (r"moe_layer_end_index", lambda v, s: s.layers - 1),
    (r"\w*(num|n)_(local_|routed_|moe_)?experts|moe_num_experts|zero_expert_num",
     lambda v, s: min(v, s.experts)),
    (r"(num|n)_shared_experts", lambda v, s: min(v, 1)),
    (r"num_experts_per_tok(en)?|\w*top_?k|moe_k|top_k_experts", lambda v, s: min(v, 2)),
    (r"n_groups?|topk_group|num_expert_group|o_groups|\w*n_?groups", lambda v, s: min(v, 1)),
    (r"num_query_groups|\w*num_key_value_heads|num_kv_heads|kv_n_heads",
     lambda v, s: min(v, s.key_value_heads)),
    ((r"\w*_num_value_heads|\w*_num_key_heads|\w*_num_heads|\w*attention_heads|n_heads?|num_heads"
     r"|\w+_n_heads"), lambda v, s: min(v, s.heads)),
    (r"qk_head_dim", lambda v, s: 2 * s.head),
    ((r"\w*head_?dim|dim_head|d_head|d_kv|kv_channels|\w*_head_size|\w*d_head|rotary_dim"
     r"|qk_rope_head_dim"), lambda v, s: s.head),
    ((r"hidden_size_per_layer_input|d_rel|ple_embed_dim|pronunciation_embed_dim|shape_embed_dim"
     r"|router_hidden_size"), lambda v, s: s.rank),
    ((r"\w*hidden_size\w*|d_model|n_embd|emb_dim|embedding_(size|dim)|dim_model_base|lru_width"
     r"|word_embed_proj_dim|(projector|adapter)_(in|out)\w*_(dim|size)|\w*_out_channel|\w*conv_channels|input_embedding_size|output_embedding_size"),
     lambda v, s: s.hidden),
    ((r"\w*intermediate_size\w*|\w*ffn_dim|d_ff|dff|d_inner|dim_ff|n_inner|\w*ffn_hidden_size"
     r"|feed_forward_size|mlp_dim"), lambda v, s: s.intermediate),
    (r"\w*(_rank|lowrank)|\w*d_state|\w*state_size", lambda v, s: min(v, s.rank)),
    ((r"\w*max_\w*position\w*|n_positions|n_ctx|max_seq_len|context_length|model_max_length"
     r"|max_(source|target)_positions"), lambda v, s: s.positions),
    ((r"\w*sliding_window\w*|\w*chunk_size|attention_window_size|window_size|\w*chunk_length"
     r"|local_attention|block_size|index_block_size"), lambda v, s: min(v, s.window)),
    (r"image_size|crop_size", lambda v, s: 32),
    (r"\w*token_(id|index)", lambda v, s: v % s.vocabulary),
)  # fmt: skip


def tiny_config(model_type: str, sizes: TinySizes, *, fill_unset: bool = False) -> PretrainedConfig:
    """Return a small configuration of an architecture.

    Args:
        model_type: transformers' name of it.
        sizes: What it is to measure.
        fill_unset: Whether sizes that the architecture leaves at None get a value.
    """
    full = AutoConfig.for_model(model_type)
    changes = _changes(full.to_dict(), sizes, fill_unset=fill_unset)
    try:
        small = AutoConfig.for_model(model_type, **changes)
    except Exception:  # noqa: BLE001 - it wants its lists cut in the same breath
        changes = _merged(changes, _lists(full.to_dict(), full.to_dict(), sizes))
        small = AutoConfig.for_model(model_type, **changes)
    for _ in range(2):  # lists that the configuration made itself, from the counts given to it
        lists = _lists(full.to_dict(), small.to_dict(), sizes)
        small = AutoConfig.for_model(model_type, **_merged(changes, lists))
    return small


def _changes(fields: Mapping[str, Any], sizes: TinySizes, *, fill_unset: bool) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            if "model_type" in value:
                # The decoder has the most layers: it is what a user would have pipelined.
                fewer = replace(sizes, layers=2) if _OTHER.search(name) else sizes
                inner = _changes(value, fewer, fill_unset=fill_unset)
                changes[name] = {"model_type": value["model_type"], **inner}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            changes[name] = _small(name, value, sizes)
        elif value is None and fill_unset and re.fullmatch(_FILLED, name):
            changes[name] = _small(name, 1 << 20, sizes)
    if _all_heads_have_keys(fields) and "num_key_value_heads" in changes:
        changes["num_key_value_heads"] = sizes.heads
    changes.update(_state_space_heads(fields, sizes))
    if isinstance(hidden := fields.get("hidden_size"), int) and "attention_hidden_size" in fields:
        # Some attend in a multiple of the width.
        wide = fields["attention_hidden_size"] // hidden * sizes.hidden
        changes["attention_hidden_size"] = wide
        changes["attention_head_dim"] = wide // sizes.heads
    if "is_decoder" in fields:
        changes["is_decoder"] = True
    return {k: v for k, v in changes.items() if k in fields and v != fields[k]}


def _all_heads_have_keys(fields: Mapping[str, Any]) -> bool:
    heads = fields.get("num_attention_heads")
    return heads is not None and heads == fields.get("num_key_value_heads")


def _state_space_heads(fields: Mapping[str, Any], sizes: TinySizes) -> dict[str, int]:
    """Return the number of heads of a state-space block: its inner width is a multiple of ours."""
    expand = fields.get("mamba_expand", fields.get("expand"))
    if expand is None:
        return {}
    inner = int(expand * sizes.hidden)
    names = ["mamba_n_heads", "mamba_num_heads"]
    if "num_attention_heads" not in fields:
        names.append("num_heads")
    heads = {name: inner // sizes.head for name in names if name in fields}
    return {**heads, **{name: inner for name in ("mamba_d_ssm",) if name in fields}}


def _small(name: str, value: Any, sizes: TinySizes) -> Any:
    for pattern, rule in _RULES:
        if re.fullmatch(pattern, name):
            return rule(value, sizes) if value > 0 else value
    return value


def _lists(full: Mapping[str, Any], small: Mapping[str, Any], sizes: TinySizes) -> dict[str, Any]:
    """Lists with an entry per layer, or with numbers of layers, cut to the layers that are left."""
    counts = {v for k, v in full.items() if _LAYER_COUNT.fullmatch(k) and isinstance(v, int)}
    changes: dict[str, Any] = {}
    for name, value in full.items():
        now = small.get(name)
        if isinstance(value, Mapping) and isinstance(now, Mapping) and "model_type" in value:
            fewer = replace(sizes, layers=2) if _OTHER.search(name) else sizes
            changes[name] = _lists(value, now, fewer)
        elif isinstance(value, list | tuple) and value and isinstance(now, list | tuple):
            if len(value) in counts:
                if len(now) != sizes.layers or _kinds(now) < min(_kinds(value), sizes.layers):
                    changes[name] = _varied(value, sizes.layers)
            elif all(_is_pattern(v) for v in value):  # [[kinds, times], ...]
                pattern = [kind for kinds, times in value for kind in kinds * times]
                if len(pattern) in counts:
                    changes[name] = [[_varied(pattern, sizes.layers), 1]]
            elif all(type(v) is int for v in value) and name.endswith(("layers", "ids", "idxs")):
                chosen = value[:: max(1, max(counts) // sizes.layers)]
                changes[name] = sorted({v * sizes.layers // max(counts) for v in chosen})
            elif name.endswith("token_id"):
                changes[name] = [v % sizes.vocabulary for v in value]
    return changes


def _is_pattern(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], list)


def _kinds(values: Sequence[Any]) -> int:
    return len({str(v) for v in values})


def _varied(values: Sequence[Any], length: int) -> list[Any]:
    """Return `length` entries in their order, every kind of entry among them if possible."""
    firsts: dict[str, int] = {}
    for index, value in enumerate(values):
        firsts.setdefault(str(value), index)
    chosen = sorted(firsts.values())[:length]
    others = [index for index in range(len(values)) if index not in chosen]
    return [values[i] for i in sorted([*chosen, *others[: length - len(chosen)]])]


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    both = {**first, **second}
    for name in first.keys() & second.keys():
        if isinstance(first[name], Mapping) and isinstance(second[name], Mapping):
            both[name] = _merged(first[name], second[name])
    return both
