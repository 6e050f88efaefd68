"""GGUF files of tiny models, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from roundpipe_lightning.modules import byte_level_tokenizer

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""A model whose rows are whole blocks of 32, as arguments of `AutoConfig.for_model`."""


def write_gguf(
    model: Any,
    file: Path,
    *,
    kind: Kind = Kind.F32,
    architecture: str | None = None,
    left_out: str = "",
) -> None:
    """Write a model of llama or qwen3 with the tokenizer of bytes.

    Args:
        kind: Of the matrices; vectors are float32.
        architecture: The name to write; None: the model's.
        left_out: End of the names of tensors that are not written.
    """
    config = model.config
    known = config.model_type
    writer = gguf.GGUFWriter(file, architecture or known)
    writer.add_name("Tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    if config.rope_parameters["rope_type"] != "default":
        writer.add_tensor("rope_freqs.weight", np.ones(config.head_dim // 2, np.float32))
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, config.vocab_size)
    for name, values in quantized(model, kind).items():
        if not left_out or not name.endswith(left_out):
            is_block = values.dtype == np.uint8
            writer.add_tensor(name, values, raw_dtype=kind if is_block else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, num_tokens: int) -> None:
    tokenizer: Any = byte_level_tokenizer()
    by_number = {number: token for token, number in tokenizer.get_vocab().items()}
    by_number[len(by_number)] = merged = "\u0100\u0100"  # a file has one merge at least: of zeros
    by_number[len(by_number)] = "<|endoftext|>"  # which transformers would add
    tokens = [by_number.get(number, f"<|unused{number}|>") for number in range(num_tokens)]
    special = {*tokenizer.all_special_tokens, *tokens[len(by_number) - 1 :], "<|im_start|>"}
    types = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([types.CONTROL if t in special else types.NORMAL for t in tokens])
    writer.add_token_merges([" ".join(merged)])
    writer.add_pad_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)


def quantized(model: Any, kind: Kind) -> Mapping[str, np.ndarray[Any, Any]]:
    """Return the tensors of a file by their names there: matrices in blocks of `kind`."""
    config = model.config
    architecture = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == config.model_type)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    tensors = {}
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, end = key.rpartition(".")
        if config.model_type == "llama" and stem.endswith(("q_proj", "k_proj")):
            tensor = _interleaved(tensor, heads=tensor.shape[0] // config.head_dim)
        values = tensor.detach().float().numpy()
        if tensor.dim() == 2 and kind is not Kind.F32:
            values = gguf.quantize(values, kind)
        tensors[f"{names.get_name(stem)}.{end}"] = values
    return tensors


def _interleaved(weight: Tensor, *, heads: int) -> Tensor:
    """Rows of each head in the order in which llama.cpp rotates them: 0, n/2, 1, n/2 + 1, ..."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


@torch.no_grad()
def round_weights(model: Any, kind: Kind) -> None:
    """Give the matrices of a model the values that blocks of `kind` stand for."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            blocks = gguf.quantize(parameter.numpy(), kind)
            parameter.copy_(torch.from_numpy(gguf.dequantize(blocks, kind)))
