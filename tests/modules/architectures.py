"""Small architectures for the tests."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
