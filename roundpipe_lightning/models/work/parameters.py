"""Estimates what the planner must know about a module from its parameters alone.

Nothing runs and no values are read, so a model on the meta device has the same profile as a real
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile, fingerprint
from roundpipe_lightning.planning.model.work import Amount, BlockWork, Work, WorkProfile

__all__ = ["module_fingerprint", "parameter_work", "profile_module"]

Blocks: TypeAlias = BlockStack | Chain | None
"""The blocks of a model: those of one stack that is called once, or the calls of a step.

None: the whole module is the tail segment, which the fused stage runs.
"""

_OPERATIONS_PER_SECOND = 1e12  # of no device in particular: only ratios of durations matter
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def profile_module(
    module: nn.Module,
    stack: Blocks,
    *,
    tokens_per_microbatch: int | None = None,
    compute_dtype: torch.dtype | None = None,
) -> ModelProfile:
    """Estimate sizes in bytes, and durations in a unit of their own, of blocks and segments.

    Durations are those of a device that does 10^12 operations per second, and count, per token and
    parameter, two operations forward, as many backward for the gradient of the input, and as many
    again for the gradient of the parameter if it gets one. Tables that are looked up
    (`nn.Embedding`) cost nothing; of the experts of a mixture only as many count as a token meets,
    where a `config` of the model says how many. Attention scores are left out: they depend on the
    length of the sequences. Modules registered before the first block belong to the head segment,
    others outside of the blocks to the tail segment. `boundary_bytes` is 0: parameters do not tell
    it. A call of a chain that needs no gradient has no backward.

    Args:
        module: The user's module; on the meta device too.
        stack: Its blocks.
        tokens_per_microbatch: Tokens, or samples where a sample is one row. None: 1.
        compute_dtype: What parameters are uploaded as. None: what they are.
    """
    tokens = 1 if tokens_per_microbatch is None else tokens_per_microbatch
    shares = _expert_shares(module)

    def num_bytes(tensors: Iterable[Tensor]) -> int:
        return sum(
            t.numel() * (compute_dtype if compute_dtype and t.is_floating_point() else t).itemsize
            for t in tensors
        )

    def profile(name: str, modules: Iterable[nn.Module]) -> BlockProfile:
        owners = list(modules)
        uses = [(p, _operations(owner, p, shares)) for owner, p in _parameter_uses(owners)]
        every_token = sum(count for _, count in uses)
        trained = sum(count for p, count in uses if p.requires_grad)
        return BlockProfile(
            name=name,
            forward_seconds=every_token * tokens / _OPERATIONS_PER_SECOND,
            backward_seconds=(every_token + trained) * tokens / _OPERATIONS_PER_SECOND,
            parameter_bytes=num_bytes(owned_tensors(owners)),
            trainable_bytes=num_bytes({p for p, _ in uses if p.requires_grad}),
        )

    head, tail = _segments(module, stack)
    chain = _chain(stack)
    blocks = [profile(link.name, link.block.modules()) for link in chain.links]
    return ModelProfile(
        blocks=tuple(
            block if link.backward else replace(block, backward_seconds=0.0, trainable_bytes=0)
            for link, block in zip(chain.links, blocks, strict=True)
        ),
        cuts=chain.cuts,
        head=profile("head segment", head),
        tail=profile("tail segment", tail),
        fingerprint=module_fingerprint(module, stack),
    )


def parameter_work(
    module: nn.Module, stack: Blocks, *, tokens_per_microbatch: int = 1
) -> WorkProfile:
    """Estimate a module's work from its parameters, where its code cannot be asked.

    Operations are those of `profile_module`. Bytes are those of the parameters and buffers as they
    are; of activations and boundaries nothing is known, so they are 0.
    """
    profile = profile_module(module, stack, tokens_per_microbatch=tokens_per_microbatch)
    head, tail = _segments(module, stack)
    blocks = [list(link.block.modules()) for link in _chain(stack).links]
    parts = (profile.head, *profile.blocks, profile.tail)
    works = [
        _segment_work(part, owned_tensors(owners))
        for part, owners in zip(parts, (head, *blocks, tail), strict=True)
    ]
    return WorkProfile(
        head=works[0],
        blocks=tuple(works[1:-1]),
        tail=works[-1],
        tied_parameters=sum(t.numel() for t in owned_tensors(head) & owned_tensors(tail)),
        fingerprint=profile.fingerprint,
        cuts=profile.cuts,
    )


def _segment_work(part: BlockProfile, tensors: set[Tensor]) -> BlockWork:
    def work(seconds: float) -> Work:
        return Work(matrix_operations=Amount(fixed=seconds * _OPERATIONS_PER_SECOND))

    return BlockWork(
        name=part.name,
        forward=work(part.forward_seconds),
        backward=work(part.backward_seconds),
        num_parameters=num_parameters(tensors),
        num_trainable=sum(
            tensor.numel() for tensor in tensors if tensor.requires_grad and part.trainable_bytes
        ),
        parameter_bytes=part.parameter_bytes,
        trainable_bytes=part.trainable_bytes,
    )


def module_fingerprint(module: nn.Module, stack: Blocks) -> str:
    """Return a digest of a module's structure, by which a plan for another model is refused.

    It covers the blocks' names and all parameters' names and shapes, so tied parameters, which have
    one name, differ from untied ones. Values, dtypes, devices and what is trained do not matter.
    """
    blocks = [f"block {name}" for name in _chain(stack).names]
    shapes = (f"{name} {tuple(p.shape)}" for name, p in module.named_parameters())
    return fingerprint([*blocks, *shapes])


def _chain(stack: Blocks) -> Chain:
    """Return the calls of a step; those of a stack are one after the other, each once."""
    if isinstance(stack, Chain):
        return stack
    return Chain.from_stacks(() if stack is None else (stack,))


def _segments(module: nn.Module, stack: Blocks) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules outside of the blocks: before the first one, and after it."""
    chain = _chain(stack)
    blocks = {link.block for link in chain.links}
    inside = {inner for block in (*blocks, *chain.others) for inner in block.modules()}
    head: list[nn.Module] = []
    tail: list[nn.Module] = []
    segment = head if blocks else tail
    for child in module.modules():
        if child in blocks:
            segment = tail
        elif child not in inside:
            segment.append(child)
    return head, tail


def owned_tensors(owners: Iterable[nn.Module]) -> set[Tensor]:
    """The parameters and buffers of modules, those of their children apart."""
    owned = [(*m._parameters.values(), *m._buffers.values()) for m in owners]  # noqa: SLF001
    return {tensor for tensors in owned for tensor in tensors if tensor is not None}


def num_parameters(tensors: Iterable[Tensor]) -> int:
    """Count the numbers in the parameters among some tensors; the others are buffers."""
    return sum(tensor.numel() for tensor in tensors if isinstance(tensor, nn.Parameter))


def _parameter_uses(owners: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Every use of a parameter: a tied one once per module that has it."""
    for owner in owners:
        for parameter in owner._parameters.values():  # noqa: SLF001
            if parameter is not None:
                yield owner, parameter


def _operations(owner: nn.Module, parameter: nn.Parameter, shares: dict[int, float]) -> float:
    """Operations that one token costs forward."""
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        return 0.0
    share = shares.get(parameter.shape[0], 1.0) if parameter.dim() >= 3 else 1.0
    return 2.0 * parameter.numel() * share


def _expert_shares(module: nn.Module) -> dict[int, float]:
    """Per number of experts the share of them that a token meets, from the configurations."""
    shares: dict[int, float] = {}
    for child in module.modules():
        config = getattr(child, "config", None)
        active = getattr(config, "num_experts_per_tok", None)
        for name in _EXPERT_COUNTS:
            count = getattr(config, name, None)
            if isinstance(active, int) and isinstance(count, int) and 0 < active <= count:
                shares[count] = active / count
    return shares
