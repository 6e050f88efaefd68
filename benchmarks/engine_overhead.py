"""Measures the engine's cost on top of the arithmetic: one CPU worker against a plain loop.

Both run the same microbatches through the same model, the plain loop with full activation
checkpointing, so that both compute every block's forward twice. They alternate in one process; the
figure is the ratio of their times, pair by pair.

    python benchmarks/engine_overhead.py [--pairs 9] [--microbatches 4] [--output json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from roundpipe_lightning.models.blocks import find_stacks
from tests.kit.engine import engine_of, mean_step
from tests.kit.plans import default_plan, profile_module

ARCHITECTURE = {
    "hidden_size": 384,
    "intermediate_size": 1152,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}


class LanguageModel(nn.Module):
    """A causal language model with a training step."""

    def __init__(self, *, checkpointing: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3", **ARCHITECTURE)
        self.model = AutoModelForCausalLM.from_config(config).float().train()
        if checkpointing:
            for module in self.model.modules():
                if hasattr(module, "gradient_checkpointing"):
                    module.gradient_checkpointing = True
                    recompute = partial(checkpoint, use_reentrant=False)
                    module._gradient_checkpointing_func = recompute  # noqa: SLF001

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean loss of the batch."""
        del batch_idx
        loss: torch.Tensor = self.model(**batch, use_cache=False).loss
        return loss


def measure(pairs: int, first: Callable[[], Any], second: Callable[[], Any]) -> list[float]:
    """Return the ratio of two functions' times, pair by pair, the order alternating."""
    ratios = []
    for pair in range(pairs):
        seconds = {}
        for run in (first, second) if pair % 2 else (second, first):
            start = time.perf_counter()
            run()
            seconds[run] = time.perf_counter() - start
        ratios.append(seconds[first] / seconds[second])
    return ratios


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9, help="counted pairs of steps (default 9)")
    parser.add_argument("--microbatches", type=int, default=4, help="per step (default 4)")
    parser.add_argument(
        "--samples", type=int, default=2, help="sequences per microbatch (default 2)"
    )
    parser.add_argument("--tokens", type=int, default=128, help="tokens per sequence (default 128)")
    parser.add_argument(
        "--threads", type=int, default=None, help="intra-op threads (default torch's)"
    )
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    plain, ours = LanguageModel(checkpointing=True), LanguageModel(checkpointing=False)
    num_parameters = sum(p.numel() for p in ours.parameters())
    shape = (options.samples, options.tokens)
    batches = []
    for _ in range(options.microbatches):
        ids = torch.randint(0, ARCHITECTURE["vocab_size"], shape)
        batches.append({"input_ids": ids, "labels": ids})
    scale = 1 / len(batches)

    def run_plain() -> None:
        plain.zero_grad()
        for batch in batches:
            (plain.training_step(batch, 0) * scale).backward()

    stack = find_stacks(ours, None)[0]
    plan = default_plan(profile_module(ours, stack), num_workers=1, num_microbatches=len(batches))
    with engine_of(ours, stack, plan) as engine:
        run_ours = partial(mean_step, engine, batches)
        measure(2, run_ours, run_plain)  # warm up
        ratios = measure(options.pairs, run_ours, run_plain)

    result = {
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "pairs": options.pairs,
        "num_parameters": num_parameters,
        "num_microbatches": options.microbatches,
        "tokens_per_microbatch": options.samples * options.tokens,
        "intra_op_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    if options.output == "json":
        print(json.dumps(result))
        return
    print(
        f"{num_parameters / 1e6:.1f}M parameters, {options.microbatches} microbatches of "
        f"{options.samples * options.tokens} tokens, "
        f"{result['intra_op_threads']} intra-op threads\n"
        f"engine / plain loop: median {result['ratio_median']:.3f}, "
        f"from {result['ratio_min']:.3f} to {result['ratio_max']:.3f} in {options.pairs} pairs"
    )


if __name__ == "__main__":
    main()
