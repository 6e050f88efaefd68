"""Models that fill a cache of keys and values while they train: right, and without keeping it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from torch import Tensor

from roundpipe_lightning.engine.capture.placeholder import LazyTensor
from tests.kit.architectures import decoder_stack, tiny_causal_lm, token_batches
from tests.kit.engine import (
    cpu_workers,
    differences,
    emulated_workers,
    engine_of,
    mean_step,
    plain_step,
    plan_of,
)


@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gemma2"])
def test_a_cache_that_nobody_reads_is_not_kept(name: str) -> None:
    module = tiny_causal_lm(name, tied=True)
    stack, batches = decoder_stack(module), token_batches(2)
    kept: list[Any] = []
    caches: list[weakref.ref[Any]] = []

    def call(view: Any, batch: dict[str, Tensor], index: int) -> Any:
        output = view.model(**batch, labels=batch["input_ids"], use_cache=True)
        cache = output.past_key_values
        kept.append([type(layer.keys) for layer in cache.layers])
        caches.append(weakref.ref(cache))
        return output.loss

    plain = plain_step(module, batches, call=call)
    for make_workers in (cpu_workers, emulated_workers):
        kept.clear()
        caches.clear()
        plan = plan_of(stack, num_workers=2, num_microbatches=2)
        with engine_of(module, stack, plan, devices=make_workers(2)) as engine:
            result = mean_step(engine, batches, call=call)
            assert not differences(module, result, plain)
            assert kept == [[LazyTensor] * len(stack.blocks)] * 2, "names of tensors, not tensors"
            gc.collect()
            assert [cache() for cache in caches] == [None, None]
