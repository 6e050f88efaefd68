"""Memory and time of a language model's loss: on whole logits, and in chunks.

The plain loss is the one of transformers' models (`ForCausalLMLoss`) on the result of their output
projection. Both get the last hidden states and the weight, and give the loss and both gradients.
Counted are the bytes of all tensors that come on top of hidden states and weight, at the peak: on
the processor by a dispatch mode, on a GPU by its allocator. Straight lines through the peaks of
several token counts are extrapolated.

    python benchmarks/linear_cross_entropy.py [--output json] [--device cuda]
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch
from loss_memory import chunked_loss_bytes, plain_loss_bytes
from torch import Tensor
from torch.nn import functional
from transformers.loss.loss_utils import ForCausalLMLoss

from roundpipe_lightning.models.losses.linear_cross_entropy import linear_cross_entropy
from roundpipe_lightning.models.work.meter import Meter

LIMIT_PERCENT = 5
FAR_TOKENS = 32_768
FREE_SHARE = 0.8  # of the free memory may be used by the plain loss
TOKEN_STEP = 512

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One loss, forward and backward.

    Attributes:
        tokens: How many.
        peak_bytes: At the peak, beside hidden states and weight.
        seconds: How long it took.
        loss: Its value.
    """

    tokens: int
    peak_bytes: int
    seconds: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Line:
    """Peak bytes as a function of the number of tokens.

    Attributes:
        fixed_bytes: Without tokens.
        token_bytes: For every token.
    """

    fixed_bytes: float
    token_bytes: float

    def at(self, tokens: int) -> float:
        """Return the bytes for a number of tokens."""
        return self.fixed_bytes + self.token_bytes * tokens


def fit(measurements: Sequence[Measurement]) -> Line:
    """Return the line through the peaks by least squares."""
    count = len(measurements)
    mean_tokens = sum(m.tokens for m in measurements) / count
    mean_bytes = sum(m.peak_bytes for m in measurements) / count
    spread = sum((m.tokens - mean_tokens) ** 2 for m in measurements)
    rise = sum((m.tokens - mean_tokens) * (m.peak_bytes - mean_bytes) for m in measurements)
    slope = rise / spread if spread else 0.0
    return Line(fixed_bytes=mean_bytes - slope * mean_tokens, token_bytes=slope)


class PlainOutput:
    """Result of a model of transformers: the loss, and the logits with it."""

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
        self.logits = functional.linear(hidden, weight)
        self.loss = ForCausalLMLoss(self.logits, labels, vocab_size=weight.shape[0])


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The same loss in chunks."""
    targets = functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return linear_cross_entropy(hidden, weight, targets)


def measure(loss: Callable[[Tensor, Tensor, Tensor], Any], *operands: Tensor) -> Measurement:
    """Run a loss forward and backward.

    Args:
        loss: Returns the loss, or an object that has one; it is held until the end.
        *operands: Hidden states (1, tokens, width), weight and labels.
    """
    hidden, weight, _ = operands
    hidden.grad = weight.grad = None
    on_gpu = hidden.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    if on_gpu:
        output = loss(*operands)
        value = output if isinstance(output, Tensor) else output.loss
        value.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with Meter() as meter:
            output = loss(*operands)
            value = output if isinstance(output, Tensor) else output.loss
            value.backward()
        peak = meter.peak_bytes
    return Measurement(
        tokens=hidden.shape[1],
        peak_bytes=peak,
        seconds=round(time.perf_counter() - start, 3),
        loss=float(value.detach()),
    )


def operands_of(
    tokens: int, *, width: int, vocabulary: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, weight and labels of one sequence."""
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(1, tokens, width, generator=generator)
    weight = torch.empty(vocabulary, width).uniform_(-0.02, 0.02, generator=generator)
    labels = torch.randint(vocabulary, (1, tokens), generator=generator)
    return (
        hidden.to(device, dtype).requires_grad_(),
        weight.to(device, dtype).requires_grad_(),
        labels.to(device),
    )


def most_tokens(*, width: int, vocabulary: int, element_bytes: int, device: str) -> int:
    """Return the largest number of tokens for which the plain loss fits the free memory."""
    free = psutil.virtual_memory().available
    if device != "cpu":
        free = torch.cuda.mem_get_info()[0]

    def needed(tokens: int) -> int:
        return plain_loss_bytes(
            num_tokens=tokens,
            hidden_size=width,
            vocabulary=vocabulary,
            compute_bytes=element_bytes,
            parameter_bytes=element_bytes,
        )

    tokens = TOKEN_STEP
    while needed(tokens + TOKEN_STEP) <= FREE_SHARE * free:
        tokens += TOKEN_STEP
    return tokens


def report(settings: argparse.Namespace) -> dict[str, Any]:
    """Measure both losses at several token counts."""
    dtype = getattr(torch, settings.dtype)
    sizes: dict[str, Any] = {"width": settings.hidden, "vocabulary": settings.vocabulary}
    largest = settings.tokens or most_tokens(
        **sizes, element_bytes=dtype.itemsize, device=settings.device
    )
    counts = sorted({max(1, largest // parts) for parts in settings.parts})
    plain, ours = [], []
    for tokens in counts:
        operands = operands_of(tokens, **sizes, dtype=dtype, device=settings.device)
        plain.append(measure(PlainOutput, *operands))
        ours.append(measure(chunked, *operands))
        del operands
    lines = {"plain": fit(plain), "chunked": fit(ours)}
    weight_bytes = settings.vocabulary * settings.hidden * dtype.itemsize
    formula: dict[str, Any] = {
        "num_tokens": counts[-1],
        "hidden_size": settings.hidden,
        "vocabulary": settings.vocabulary,
        "compute_bytes": dtype.itemsize,
        "parameter_bytes": dtype.itemsize,
    }
    return {
        "vocabulary": settings.vocabulary,
        "hidden_size": settings.hidden,
        "dtype": settings.dtype,
        "tokens": counts,
        "plain": [asdict(m) for m in plain],
        "chunked": [asdict(m) for m in ours],
        "lines": {name: asdict(line) for name, line in lines.items()},
        "percent_of_plain": percent(ours[-1].peak_bytes, plain[-1].peak_bytes),
        "percent_without_the_weight_s_gradient": percent(
            ours[-1].peak_bytes - weight_bytes, plain[-1].peak_bytes
        ),
        "far_tokens": FAR_TOKENS,
        "percent_of_plain_far": percent(
            lines["chunked"].at(FAR_TOKENS), lines["plain"].at(FAR_TOKENS)
        ),
        "seconds_of_plain": round(ours[-1].seconds / plain[-1].seconds, 2),
        "planned_bytes": {
            "plain": plain_loss_bytes(**formula),
            "chunked": chunked_loss_bytes(**formula),
        },
        "device": settings.device if settings.device == "cpu" else torch.cuda.get_device_name(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def percent(part: float, whole: float) -> float:
    """Return a share in percent."""
    return round(100 * part / whole, 2)


def print_report(result: dict[str, Any]) -> None:
    """Print as text."""
    mib = 2**20
    print(
        f"vocabulary {result['vocabulary']}, hidden {result['hidden_size']}, {result['dtype']}, "
        f"{result['device']}"
    )
    print(f"{'tokens':>8} {'plain MiB':>11} {'chunked MiB':>12} {'plain s':>9} {'chunked s':>10}")
    for plain, ours in zip(result["plain"], result["chunked"], strict=True):
        print(
            f"{plain['tokens']:8} {plain['peak_bytes'] / mib:11.1f} "
            f"{ours['peak_bytes'] / mib:12.1f} {plain['seconds']:9.2f} {ours['seconds']:10.2f}"
        )
    for name, line in result["lines"].items():
        print(
            f"{name}: {line['fixed_bytes'] / mib:.1f} MiB + {line['token_bytes'] / 1024:.1f} KiB "
            "per token"
        )
    print(
        f"at {result['tokens'][-1]} tokens {result['percent_of_plain']} % of the plain loss's "
        f"memory ({result['percent_without_the_weight_s_gradient']} % without the weight's "
        "gradient, which both must give)"
    )
    print(f"at {FAR_TOKENS} tokens {result['percent_of_plain_far']} %, extrapolated")


def main() -> None:
    """Measure and print; fails where the extrapolated share is above the limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=0, help="0: as many as the plain loss can")
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 2, 1])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    settings = parser.parse_args()
    result = report(settings)
    if settings.output == "json":
        print(json.dumps(result, indent=1))
    else:
        print_report(result)
    if result["percent_of_plain_far"] > LIMIT_PERCENT:
        raise SystemExit(f"more than {LIMIT_PERCENT} % of the plain loss's memory")


if __name__ == "__main__":
    main()
