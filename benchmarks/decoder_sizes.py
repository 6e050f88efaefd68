"""Sizes of a decoder-only language model, from the numbers of its published configuration.

No weights, no framework, no device: the keys are those of a transformers configuration. Covered are
dense and mixture-of-experts decoders with grouped-query attention and gated feed-forward layers,
such as Llama, Qwen3, Qwen3-MoE and GPT-OSS. With h features, d features per head, H heads, K
key-value heads, f inner features of a feed-forward layer, E experts of which A serve a token, and V
tokens in the vocabulary:

    attention     h d (2 H + 2 K)             [+ biases, + 2 d for normalised queries and keys]
    feed-forward  3 h f per dense layer or expert, + h E for the router
    norms         2 h per layer, h for the last one
    head, tail    V h each (the same tensor where tied)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roundpipe_lightning.errors import PlanError

_QK_NORM = ("qwen3", "qwen3_moe")
_BIASED_EXPERTS = ("gpt_oss",)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The numbers of a decoder that its sizes follow from.

    Attributes:
        num_layers: Decoder layers.
        hidden_size: Features between the layers.
        num_heads: Attention heads.
        num_key_value_heads: Heads of keys and values.
        head_dim: Features of a head.
        feed_forward_size: Inner features of a feed-forward layer, or of one expert.
        num_experts: Experts of a layer; 0 for a dense one.
        num_active_experts: Experts that serve a token; 0 for a dense one.
        vocab_size: Tokens in the vocabulary.
        tied: Whether the LM head is the embedding.
        attention_bias: Whether the attention projections have biases.
        normalised_queries: Whether queries and keys are normalised per head.
        biased_experts: Whether experts and router have biases, and heads a sink.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    feed_forward_size: int
    vocab_size: int
    num_experts: int = 0
    num_active_experts: int = 0
    tied: bool = False
    attention_bias: bool = False
    normalised_queries: bool = False
    biased_experts: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Read the keys of a transformers configuration.

        Raises:
            PlanError: If a number is missing.
        """
        try:
            heads = int(config["num_attention_heads"])
            hidden = int(config["hidden_size"])
            experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
            inner = config.get("moe_intermediate_size") if experts else None
            return cls(
                num_layers=int(config["num_hidden_layers"]),
                hidden_size=hidden,
                num_heads=heads,
                num_key_value_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or hidden // heads),
                feed_forward_size=int(inner or config["intermediate_size"]),
                num_experts=experts,
                num_active_experts=int(config["num_experts_per_tok"]) if experts else 0,
                vocab_size=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
                attention_bias=bool(config.get("attention_bias", False)),
                normalised_queries=config.get("model_type") in _QK_NORM,
                biased_experts=config.get("model_type") in _BIASED_EXPERTS,
            )
        except KeyError as error:
            raise PlanError(
                f"The architecture lacks {error}: give a full configuration."
            ) from error

    @property
    def attention_features(self) -> int:
        """Features of all heads' queries."""
        return self.num_heads * self.head_dim

    @property
    def key_value_features(self) -> int:
        """Features of all heads' keys."""
        return self.num_key_value_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        hidden, inner = self.hidden_size, self.feed_forward_size
        features, kv_features = self.attention_features, self.key_value_features
        attention = hidden * (2 * features + 2 * kv_features)
        attention += (features + 2 * kv_features + hidden) if self.attention_bias else 0
        attention += 2 * self.head_dim if self.normalised_queries else 0
        experts = max(self.num_experts, 1)
        feed_forward = experts * 3 * hidden * inner + self.num_experts * hidden
        if self.biased_experts:
            attention += self.num_heads
            feed_forward += experts * (2 * inner + hidden) + self.num_experts
        return attention + feed_forward + 2 * hidden

    def lora_parameters(self, *, rank: int) -> int:
        """Parameters of LoRA adapters on every linear layer of one layer, experts included.

        An adapter of a product from i to o features has rank (i + o) (arXiv 2106.09685).
        """
        hidden, inner = self.hidden_size, self.feed_forward_size
        attention = 2 * (hidden + self.attention_features + hidden + self.key_value_features)
        feed_forward = 3 * (hidden + inner) * max(self.num_experts, 1)
        return rank * (attention + feed_forward)

    @property
    def head_parameters(self) -> int:
        """Parameters of the embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def tail_parameters(self) -> int:
        """Parameters of the last norm and the LM head, a tied one included."""
        return self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied tensor counted once."""
        ends = self.tail_parameters + (0 if self.tied else self.head_parameters)
        return self.num_layers * self.layer_parameters + ends

    @property
    def layer_activation_elements(self) -> int:
        """Numbers that one layer's backward keeps per token.

        Two norms keep input and result (4 h), two residual sums 2 h, their 32-bit copies count
        twice (2 h more); attention keeps queries, keys and values, the first two again where they
        are rotated, and its output; a feed-forward layer keeps gate, up, activated gate and product
        (4 f per active expert), experts also the routed inputs and outputs (2 h each). Scores are
        not kept (FlashAttention, arXiv 2205.14135).
        """
        features, kv_features = self.attention_features, self.key_value_features
        attention = 3 * features + 3 * kv_features
        active = max(self.num_active_experts, 1)
        feed_forward = active * 4 * self.feed_forward_size
        routed = 2 * self.num_active_experts * self.hidden_size
        return 8 * self.hidden_size + attention + feed_forward + routed
