"""Measures a model's work on the meta device: no weights, no accelerator, no architecture's name.

The user's code runs as it is, under a `Meter`, three times: with one sequence of s tokens, one of
2 s and two of s, from which follow the coefficients of `Amount`. The blocks of the stack cut it
into segments as the engine does: what runs before the first block is the head, what runs after the
last one the tail. Blocks that are alike are measured once. A block's forward and backward passes
run by themselves, on its own inputs, so that what it keeps in between is seen as well. Three more
runs, 16 times as long, find the memory of long sequences, where another moment may need the most.

A mixture's experts run through transformers' grouped product, whose shapes are those of the tokens
that are sent to experts, not of the experts that there are; so active experts are counted, and all
experts' weights as bytes. Gradients are added to those that are there already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.work.meta_attention import transformers_attention
from roundpipe_lightning.models.work.meta_run import (
    Call,
    Part,
    Run,
    kinds_of,
    measure_run,
    num_bytes,
    num_parameters,
)
from roundpipe_lightning.models.work.meter import Count
from roundpipe_lightning.models.work.parameters import module_fingerprint
from roundpipe_lightning.planning.model.work import Amount, BlockWork, Peak, Work, WorkProfile

__all__ = ["Call", "causal_lm_call", "work_profile"]

_ATTENTION = "roundpipe_counted"
_LONG = 16
"""How many times as long the sequences are that find the memory of long ones."""


def causal_lm_call(module: nn.Module, sequences: int, seq_len: int) -> Tensor:
    """Run a causal language model of transformers and return its mean loss.

    The loss reads the logits once and leaves their gradient in their place, as fused losses do.
    """
    tokens = torch.zeros((sequences, seq_len), dtype=torch.long, device="meta")
    logits = module(input_ids=tokens, use_cache=False).logits
    loss: Tensor = _FusedLoss.apply(logits)  # type: ignore[no-untyped-call]
    return loss


def work_profile(
    module: nn.Module,
    stack: BlockStack | None,
    *,
    call: Call = causal_lm_call,
    seq_len: int = 2048,
    fused_attention: bool = True,
) -> WorkProfile:
    """Measure a module's work.

    Args:
        module: The user's module on the meta device, in the compute dtype.
        stack: Its blocks. None: the whole module is the tail segment.
        call: What a training step runs.
        seq_len: Tokens of the shorter sequences. Where attention has a window, results are best
            close to it.
        fused_attention: Whether transformers' models use fused attention whatever their
            configuration says, where their code allows it.

    Raises:
        ConfigurationError: The module has parameters elsewhere, or its code needs values.
    """
    if any(p.device.type != "meta" for p in module.parameters()):
        raise ConfigurationError(
            "Work is measured without weights: build the module under torch.device('meta')."
        )
    runs, long_runs = _short_and_long(module, stack, call, seq_len=seq_len, fused=fused_attention)
    names = stack.names if stack is not None else ()
    owners = [list(block.modules()) for block in (stack.blocks if stack is not None else ())]
    inside = {inner for modules in owners for inner in modules}
    rest = [m for m in module.modules() if m not in inside]
    in_head = runs.head_modules if stack is not None else set()
    head, tail = ([m for m in rest if (m in in_head) == wanted] for wanted in (True, False))
    shared = _tensors(head) & _tensors(tail)
    parts = [
        _block_work(
            name,
            modules,
            runs=runs.of(index),
            long_runs=long_runs.of(index),
        )
        for index, (name, modules) in enumerate(
            zip(["head segment", *names, "tail segment"], [head, *owners, tail], strict=True)
        )
    ]
    return WorkProfile(
        head=parts[0],
        blocks=tuple(parts[1:-1]),
        tail=parts[-1],
        tied_parameters=sum(t.numel() for t in shared),
        fingerprint=module_fingerprint(module, stack),
    )


# --- all runs -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Runs:
    """One sequence of `seq_len` tokens, one twice as long, and two of `seq_len`.

    Attributes:
        seq_len: Tokens of the shorter sequences.
        parts: Per run what the head, every block, and the tail did, in this order.
        head_modules: The modules that ran before the first block.
    """

    seq_len: int
    parts: list[list[Part]]
    head_modules: set[nn.Module]

    def of(self, index: int) -> _PartRuns:
        """One part in all runs."""
        return _PartRuns(seq_len=self.seq_len, runs=[parts[index] for parts in self.parts])


@dataclass(kw_only=True)
class _PartRuns:
    """The three runs of one part."""

    seq_len: int
    runs: list[Part]

    def amount(self, value: Callable[[Part], float]) -> Amount:
        """Fit one of the numbers."""
        return Amount.fit(*(value(run) for run in self.runs), seq_len=self.seq_len)


def _short_and_long(
    module: nn.Module, stack: BlockStack | None, call: Call, *, seq_len: int, fused: bool
) -> tuple[_Runs, _Runs]:
    """Run short sequences, and long ones if the model takes them.

    Some models' code handles its masks itself and cannot do without them: they are measured with
    the attention that their configuration names.
    """
    kinds = kinds_of(stack.blocks) if stack is not None else []

    def run(sequences: int, seq_len: int) -> Run:
        return measure_run(module, stack, call, sequences, seq_len, kinds=kinds)

    with _gradients(module):
        try:
            with _attention(module, fused=fused):
                runs = _three_runs(run, seq_len=seq_len)
        except ConfigurationError:
            if not fused:
                raise
            fused = False
            runs = _three_runs(run, seq_len=seq_len)
        try:
            with _attention(module, fused=fused):
                return runs, _three_runs(run, seq_len=_LONG * seq_len)
        except ConfigurationError:
            return runs, runs


def _three_runs(run: Callable[[int, int], Run], *, seq_len: int) -> _Runs:
    shapes = ((1, seq_len), (1, 2 * seq_len), (2, seq_len))
    runs = [run(*shape) for shape in shapes]
    return _Runs(
        seq_len=seq_len,
        parts=[run.parts for run in runs],
        head_modules=runs[0].head_modules,
    )


def _block_work(
    name: str,
    modules: Iterable[nn.Module],
    *,
    runs: _PartRuns,
    long_runs: _PartRuns,
) -> BlockWork:
    """Put the runs and the parameters together."""
    amount = runs.amount

    def peak(value: Callable[[Part], float]) -> Peak:
        return Peak(amounts=(amount(value), long_runs.amount(value)))

    def work(count: Callable[[Part], Count]) -> Work:
        return Work(
            matrix_operations=amount(lambda run: count(run).matrix_operations),
            matrix_bytes=amount(lambda run: count(run).matrix_bytes),
            attention_operations=amount(lambda run: count(run).attention_operations),
            memory_bytes=amount(lambda run: count(run).memory_bytes),
        )

    tensors = _tensors(modules)
    trained = {tensor for tensor in tensors if tensor.requires_grad}
    return BlockWork(
        name=name,
        forward=work(lambda run: run.forward),
        backward=work(lambda run: run.backward),
        num_parameters=num_parameters(tensors),
        num_trainable=sum(tensor.numel() for tensor in trained),
        parameter_bytes=sum(num_bytes(tensor) for tensor in tensors),
        trainable_bytes=sum(num_bytes(tensor) for tensor in trained),
        boundary_bytes=amount(lambda run: run.boundary_bytes),
        gradient_bytes=amount(lambda run: run.gradient_bytes),
        kept_bytes=amount(lambda run: run.kept_bytes),
        attention_bytes=amount(lambda run: run.forward.attention_bytes),
        forward_peak_bytes=peak(lambda run: run.forward_peak_bytes),
        peak_bytes=peak(lambda run: run.peak_bytes),
    )


def _tensors(modules: Iterable[nn.Module]) -> set[Tensor]:
    owned = [(*m._parameters.values(), *m._buffers.values()) for m in modules]  # noqa: SLF001
    return {tensor for tensors in owned for tensor in tensors if tensor is not None}


# --- how the model runs --------------------------------------------------------------------------


class _FusedLoss(torch.autograd.Function):
    """A loss that reads the logits once, and turns them into their gradient where they are."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        """Read the logits."""
        ctx.save_for_backward(logits)
        return torch.logsumexp(logits.flatten(), dim=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Write the gradient over them."""
        (logits,) = ctx.saved_tensors
        changed: Tensor = logits.detach().mul_(gradient)
        return changed


@contextlib.contextmanager
def _gradients(module: nn.Module) -> Iterator[None]:
    """Give parameters gradients to add to, as every microbatch but the first one has."""
    trained = [p for p in module.parameters() if p.requires_grad]
    before = [p.grad for p in trained]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    try:
        yield
    finally:
        for parameter, gradient in zip(trained, before, strict=True):
            parameter.grad = gradient


@contextlib.contextmanager
def _attention(module: nn.Module, *, fused: bool) -> Iterator[None]:
    """Have transformers' models call fused attention, by the name they look it up with."""
    from transformers import AttentionInterface

    configs = {
        id(config): config
        for child in module.modules()
        if (config := getattr(child, "config", None)) is not None
        and hasattr(config, "_attn_implementation")
    }
    if not fused or not configs:
        yield
        return
    before = {key: config._attn_implementation for key, config in configs.items()}  # noqa: SLF001
    AttentionInterface.register(_ATTENTION, transformers_attention)
    try:
        for config in configs.values():
            config._attn_implementation = _ATTENTION  # noqa: SLF001
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]  # noqa: SLF001
