import functools
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from roundpipe_lightning.engine.chain.chain import BlockStack
from tests.kit.engine import VOCABULARY, stack_of

ARCHITECTURES = ("qwen3", "llama", "gpt_oss", "qwen3_moe", "gemma2", "gpt2")

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SPECIAL: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
_GPT2_SIZES: dict[str, Any] = {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 64}
_GPT2_DROPOUTS = ("attn_pdrop", "resid_pdrop", "embd_pdrop")

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
"""The smallest causal language model, as arguments of `AutoConfig.for_model`."""


class CausalLM(nn.Module):
    """The user's module around a model of transformers; it uses the embedding in the tail too."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        loss: Tensor = self.model(**batch, labels=ids, use_cache=False).loss
        penalty: Tensor = self.model.get_input_embeddings()(ids).pow(2).mean()
        return loss + 1e-3 * penalty


def build_model(name: str, *, tied: bool = True, dropout: float = 0.0, **options: Any) -> Any:
    """Build a model of transformers.

    Args:
        name: Its model type.
        tied: Whether the LM head is the embedding.
        dropout: Of the attention, and of all else where the architecture has it.
        options: Further entries of its configuration.
    """
    torch.manual_seed(0)
    if name == "gpt2":
        options = {**_GPT2_SIZES, **dict.fromkeys(_GPT2_DROPOUTS, dropout), **options}
    else:
        options = {**_SIZES, "attention_dropout": dropout, **options}
    config = AutoConfig.for_model(
        name,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{**_SPECIAL.get(name, {}), **options},
    )
    config.tie_word_embeddings = tied
    return AutoModelForCausalLM.from_config(config).float().train()


@functools.cache
def tiny_causal_lm(name: str, *, tied: bool) -> CausalLM:
    """Return a model without dropout; whoever asks gets the same one, and leaves it as it was."""
    return CausalLM(build_model(name, tied=tied))


def decoder_stack(module: CausalLM) -> BlockStack:
    model = module.model
    layers = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    return stack_of(tuple(layers))


def token_batches(num_microbatches: int, *, length: int = 9) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    batches = []
    for _ in range(num_microbatches):
        ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, length - 2 :] = 0
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def token_data() -> DataLoader[Any]:
    rows: Any = [
        {name: tensor[row] for name, tensor in batch.items()}
        for batch in token_batches(4)
        for row in range(2)
    ]
    return DataLoader(rows, batch_size=4)


class Adapted(nn.Module):
    """The user's module: adapters, none of them zero, on a causal language model."""

    def __init__(self, base: Any, config: LoraConfig) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = get_peft_model(base, config)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        base: Any = self.model.get_base_model()
        return tuple(base.model.layers)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, labels=batch["input_ids"], use_cache=False).loss
        return loss
