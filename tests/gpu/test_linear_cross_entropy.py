from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.loss_memory import chunked_loss_bytes
from roundpipe_lightning import linear_cross_entropy
from roundpipe_lightning.models.losses.lazy_logits import LossFusion
from tests.kit.architectures import tiny_causal_lm, token_batches

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU; none is visible to torch"
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_gradients_and_memory(dtype: torch.dtype) -> None:
    width, vocabulary, num_tokens = 256, 50_000, 2048
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, width, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda", dtype=dtype) / 16).requires_grad_()
    labels = torch.randint(vocabulary, (num_tokens,), device="cuda")
    wide = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    want = functional.cross_entropy(functional.linear(*wide), labels)
    wanted = torch.autograd.grad(want, wide)
    del wide
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=2**26)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    peak = torch.cuda.max_memory_allocated() - before
    torch.testing.assert_close(loss, want, rtol=1e-2, atol=1e-2)
    for gradient, other in zip(gradients, wanted, strict=True):
        error = (gradient.float() - other).norm() / other.norm()
        assert error < (1e-4 if dtype == torch.float32 else 2e-2)
    estimated = chunked_loss_bytes(
        num_tokens=num_tokens,
        hidden_size=width,
        vocabulary=vocabulary,
        compute_bytes=dtype.itemsize,
        parameter_bytes=dtype.itemsize,
        chunk_bytes=2**26,
    )
    assert (
        peak <= 1.1 * estimated + 2**25
    )  # 16-bit products of slices, and the libraries' workspace


def test_a_model_s_own_loss() -> None:
    module = tiny_causal_lm("gemma2", tied=True).model.cuda()
    batch: dict[str, Any] = {key: x.cuda() for key, x in token_batches(1)[0].items()}
    fusion, losses = LossFusion("fused"), []
    try:
        for context in (torch.enable_grad(), fusion.active()):
            with context:
                losses.append(module(**batch, labels=batch["input_ids"], use_cache=False).loss)
    finally:
        module.cpu()
    assert fusion.report.num_fused == 1
    torch.testing.assert_close(losses[1], losses[0])
