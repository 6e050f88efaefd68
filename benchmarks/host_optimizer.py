"""Measures the optimizer in host memory against the memory, torch's fused AdamW, and DeepSpeed.

    python benchmarks/host_optimizer.py --output json

One step of AdamW over the parameters of a decoder, with gradients and upload copies of bfloat16 and
float32 masters and moments. Every round measures all contenders one after the other, with all
cores, in alternating order; figures are medians over the rounds of ratios within a round.

`bandwidth_share` is the bytes per second of `HostAdamW`, by those of copying memory. The optimizer
must read the gradient (2 bytes), read and write the master (8) and two moments (16), and write the
copy (2): 28 bytes per parameter. The copy loop reads and writes 4 bytes per parameter, by torch's
`copy_` or by one `memcpy` per thread, whichever is faster here.

`speedup_over_torch_fused` is against `torch.optim.AdamW(fused=True)` after casting the gradients to
float32 (into memory that is there already) and before casting the masters to the copies;
`speedup_over_deepspeed` likewise against `DeepSpeedCPUAdam`, where DeepSpeed is installed (it needs
a C++ compiler).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from roundpipe_lightning.optim import HostAdamW
from roundpipe_lightning.optim.kernel import usable_processors

BYTES_PER_PARAMETER = 2 + 2 * 4 + 4 * 4 + 2
COPY_BYTES_PER_PARAMETER = 2 * 4
MATRIX = (4096, 4096)
NORM = (4096,)
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}


class Model:
    """Parameters, gradients and copies, each kind in one buffer.

    Args:
        num_parameters: How many numbers; rounded up to whole layers.
    """

    def __init__(self, num_parameters: int) -> None:
        shapes = shapes_of(num_parameters)
        total = sum(torch.Size(shape).numel() for shape in shapes)
        self.num_parameters = total
        self.masters = torch.empty(total).uniform_(-0.02, 0.02)
        self.gradients = torch.empty(total, dtype=torch.bfloat16).uniform_(-1e-3, 1e-3)
        self.wide_gradients = torch.zeros(total)
        self.copies = torch.zeros(total, dtype=torch.bfloat16)
        self.parameters = [nn.Parameter(part) for part in cut(self.masters, shapes)]
        self._parts = [
            cut(buffer, shapes) for buffer in (self.gradients, self.wide_gradients, self.copies)
        ]

    def give_gradients(self, *, wide: bool) -> None:
        """Set `.grad` of all parameters to the float32 or to the bfloat16 buffer."""
        for parameter, part in zip(self.parameters, self._parts[wide], strict=True):
            parameter.grad = None
            parameter.grad_dtype = part.dtype
            parameter.grad = part

    def copies_of(self) -> dict[nn.Parameter, Tensor]:
        """Return every parameter's copy."""
        return dict(zip(self.parameters, self._parts[2], strict=True))


def shapes_of(num_parameters: int) -> list[tuple[int, ...]]:
    """Return matrices and norms of layers, at least so many numbers together."""
    if num_parameters < MATRIX[0] * MATRIX[1]:
        return [(num_parameters,)]
    shapes: list[tuple[int, ...]] = []
    while num_parameters > 0:
        shapes += [MATRIX, NORM]
        num_parameters -= MATRIX[0] * MATRIX[1] + NORM[0]
    return shapes


def cut(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return views of a buffer, one behind the other."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(buffer.split(sizes), shapes, strict=True)]


Contender = Callable[[], object]


def surrounded(model: Model, optimizer: torch.optim.Optimizer) -> Contender:
    """Return a step between the casts that an optimizer for float32 needs."""

    def step() -> None:
        model.wide_gradients.copy_(model.gradients)
        optimizer.step()
        model.copies.copy_(model.masters)

    model.give_gradients(wide=True)
    step()
    return step


def deepspeed_optimizer(model: Model) -> torch.optim.Optimizer | None:
    """Return DeepSpeed's optimizer; None where it is not installed or cannot be compiled."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
                model.parameters, adamw_mode=True, **OPTIONS
            )
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        print(f"without DeepSpeed: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return optimizer


def copy_by_threads(source: Tensor, target: Tensor, *, num_threads: int) -> None:
    """Copy with one `memcpy` per thread."""
    pairs = zip(source.chunk(num_threads), target.chunk(num_threads), strict=True)
    threads = [
        threading.Thread(target=np.copyto, args=(to.numpy(), part.numpy())) for part, to in pairs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def contenders(
    model: Model, *, num_threads: int, formats: Sequence[str], kernels: Sequence[str]
) -> Iterator[tuple[str, Contender, bool]]:
    """Yield name, what to time, and whether it reads the float32 gradients."""
    for kernel in kernels:
        for form in formats:
            mine = HostAdamW(
                model.parameters, moments=form, num_threads=num_threads, kernel=kernel, **OPTIONS
            )
            mine.write_copies(model.copies_of())
            words = ["host", form * (form != "fp32"), kernel * (kernel != kernels[0])]
            yield "_".join(word for word in words if word), mine.step, False
    fused = torch.optim.AdamW(model.parameters, fused=True, **OPTIONS)
    yield "torch_fused", surrounded(model, fused), True
    deepspeed = deepspeed_optimizer(model)
    if deepspeed is not None:
        yield "deepspeed", surrounded(model, deepspeed), True
    masters = model.masters
    yield "copy_torch", lambda: model.wide_gradients.copy_(masters), True
    yield (
        "copy_threads",
        lambda: copy_by_threads(masters, model.wide_gradients, num_threads=num_threads),
        True,
    )


def measure(
    model: Model,
    *,
    num_rounds: int,
    num_threads: int,
    formats: Sequence[str],
    kernels: Sequence[str] = ("auto",),
) -> dict[str, list[float]]:
    """Return seconds per round of every contender; the round before the first is not counted.

    Every other round goes through them backwards, so that nobody always follows the same one.
    """
    entered = list(contenders(model, num_threads=num_threads, formats=formats, kernels=kernels))
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in entered}
    for number in range(num_rounds + 1):
        for name, run, wide in entered[:: -1 if number % 2 else 1]:
            model.give_gradients(wide=wide)
            start = time.perf_counter()
            with torch.no_grad():
                run()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def summarize(seconds: dict[str, list[float]], model: Model, num_threads: int) -> dict[str, Any]:
    """Return the figures."""
    host = seconds["host"]

    def ratio(name: str) -> float | None:
        if name not in seconds:
            return None
        pairs = zip(seconds[name], host, strict=True)
        return round(statistics.median(other / mine for other, mine in pairs), 3)

    copies = {name: statistics.median(seconds[name]) for name in ("copy_torch", "copy_threads")}
    fastest = min(copies, key=copies.__getitem__)
    by_time = ratio(fastest)
    assert by_time is not None, "the copy loops always run"
    medians = {name: statistics.median(some) for name, some in seconds.items()}
    return {
        "bandwidth_share": round(by_time * BYTES_PER_PARAMETER / COPY_BYTES_PER_PARAMETER, 3),
        "speedup_over_torch_fused": ratio("torch_fused"),
        "speedup_over_deepspeed": ratio("deepspeed"),
        "num_parameters": model.num_parameters,
        "num_threads": num_threads,
        "kernel": HostAdamW(model.parameters[:1]).kernel,
        "num_rounds": len(host),
        "copy_loop": fastest,
        "bytes_per_parameter": BYTES_PER_PARAMETER,
        "host_bytes_per_second": model.num_parameters * BYTES_PER_PARAMETER / medians["host"],
        "copy_bytes_per_second": model.num_parameters * COPY_BYTES_PER_PARAMETER / copies[fastest],
        "seconds": {name: round(value, 5) for name, value in medians.items()},
        "torch": torch.__version__,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--num-parameters", type=int, default=200_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(usable_processors()))
    parser.add_argument(
        "--formats", nargs="*", default=[], choices=["bf16", "8bit"], help="measure these as well"
    )
    parser.add_argument(
        "--torch-operations", action="store_true", help="measure kernel='torch' as well"
    )
    parser.add_argument("--output", choices=["text", "json"], default="text")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = Model(options.num_parameters)
    seconds = measure(
        model,
        num_rounds=options.rounds,
        num_threads=options.threads,
        formats=["fp32", *options.formats],
        kernels=["auto", "torch"] if options.torch_operations else ["auto"],
    )
    result = summarize(seconds, model, options.threads)
    if options.output == "json":
        print(json.dumps(result, indent=2))
        return
    for name, value in result.items():
        print(f"{name:26} {value}")


if __name__ == "__main__":
    main()
