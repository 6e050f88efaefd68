"""Measures the device memory of a language model's loss: plainly, and in chunks.

The logits of N tokens over a vocabulary of V are N x V numbers, and a plain loss holds them several
times over. In chunks, what grows with the number of tokens is the gradient of the hidden states:

```
plain     N x V x (logits, their float32 copy, log-softmax, two gradients)   + N x H   + V x H
chunked   n x V x (logits)                      n chosen so that this fits   + N x H   + V x H
```

The arguments of both formulas are:

- `num_tokens`: tokens of a microbatch; for the chunked loss those that have a target;
- `hidden_size`: width of the hidden states;
- `vocabulary`: rows of the output projection;
- `compute_bytes`: of a number in the type of the matrix products, 2 under mixed precision;
- `parameter_bytes`: of a number of the weight and of the hidden states;
- `trains_weight`: whether the weight has a gradient.

The hidden states and the weight themselves are not counted; their gradients are.
"""

from __future__ import annotations

from roundpipe_lightning.models.losses.linear_cross_entropy import (
    DEFAULT_CHUNK_BYTES,
    chunk_tokens,
    logit_bytes,
)

_SOFTMAX_BYTES = 4  # the softmax is computed in float32


def chunked_loss_bytes(
    *,
    num_tokens: int,
    hidden_size: int,
    vocabulary: int,
    compute_bytes: int = 4,
    parameter_bytes: int = 4,
    trains_weight: bool = True,
    softcapped: bool = False,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> int:
    """Return the peak of `linear_cross_entropy`, from the final norm's output to its gradient."""
    per_logit = logit_bytes(compute_bytes=compute_bytes, softcapped=softcapped)
    tokens = chunk_tokens(
        num_tokens=max(1, num_tokens),
        vocabulary=vocabulary,
        bytes_per_logit=per_logit,
        chunk_bytes=chunk_bytes,
    )
    weight_elements = vocabulary * hidden_size
    total = tokens * vocabulary * per_logit
    total += 3 * tokens * hidden_size * max(_SOFTMAX_BYTES, compute_bytes)
    total += num_tokens * hidden_size * parameter_bytes
    if compute_bytes != parameter_bytes:
        total += weight_elements * compute_bytes
    if trains_weight:
        total += weight_elements * max(_SOFTMAX_BYTES, parameter_bytes)
        if parameter_bytes < _SOFTMAX_BYTES:
            total += weight_elements * parameter_bytes
    return total


def plain_loss_bytes(
    *,
    num_tokens: int,
    hidden_size: int,
    vocabulary: int,
    compute_bytes: int = 4,
    parameter_bytes: int = 4,
    trains_weight: bool = True,
) -> int:
    """Return the peak of the loss of transformers' models, which is in the backward pass.

    There are then: the logits (the model's output has them), their float32 copy where they have
    another type, the log-softmax, its gradient, and the gradient of the logits. The weight's
    gradient is made when that peak is over, but may itself be larger.
    """
    wide = max(compute_bytes, _SOFTMAX_BYTES)
    copies = compute_bytes + (wide if compute_bytes < wide else 0) + 3 * wide
    weight_elements = vocabulary * hidden_size
    cast = weight_elements * compute_bytes if compute_bytes != parameter_bytes else 0
    held = num_tokens * vocabulary * copies
    gradients = num_tokens * hidden_size * parameter_bytes
    if trains_weight:
        gradients += weight_elements * parameter_bytes
    late = num_tokens * vocabulary * (compute_bytes + wide) + gradients
    return cast + max(held, late)
