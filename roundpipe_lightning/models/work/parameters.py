"""Estimates what the planner must know about a module from its parameters alone.

Nothing runs and no values are read, so a model on the meta device has the same profile as a real
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, TypeAlias

from torch import Tensor, nn

from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.models.quantized import quantizable_weights
from roundpipe_lightning.planning.model.profile import fingerprint
from roundpipe_lightning.planning.model.work import Amount, BlockWork, Work, WorkProfile

Blocks: TypeAlias = BlockStack | Chain | None
"""The blocks of a model: those of one stack that is called once, or the calls of a step.

None: the whole module is the tail segment, which the fused stage runs.
"""

_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def parameter_work(module: nn.Module, stack: Blocks) -> WorkProfile:
    """Estimate a module's work from its parameters, where its code cannot be asked.

    Per token and parameter there are two operations forward, as many backward for the gradient of
    the input, and as many again for the gradient of the parameter if it gets one. Tables that are
    looked up (`nn.Embedding`) cost nothing; of the experts of a mixture only as many count as a
    token meets, where a `config` of the model says how many. Attention scores are left out: they
    depend on the length of the sequences. Modules registered before the first block belong to the
    head segment, others outside of the blocks to the tail segment. A call of a chain that needs no
    gradient has no backward.

    Bytes are those of the parameters and buffers as they are; of activations and boundaries nothing
    is known, so they are 0. The figures are those of one token, or of a sample that is one row.

    Args:
        module: The user's module; on the meta device too.
    """
    shares = _expert_shares(module)
    packed = quantizable_tensors(module)

    def work(name: str, owners: Sequence[nn.Module], *, has_backward: bool = True) -> BlockWork:
        uses = [(p, _operations(owner, p, shares)) for owner, p in _parameter_uses(owners)]
        every_token = sum(count for _, count in uses)
        trained = sum(count for p, count in uses if p.requires_grad)
        trainable = {p for p, _ in uses if p.requires_grad and has_backward}
        return BlockWork(
            name=name,
            forward=_operations_work(every_token),
            backward=_operations_work(every_token + trained if has_backward else 0),
            **sizes_of(owned_tensors(owners), trained=trainable, packed=packed),
        )

    head, tail = _segments(module, stack)
    chain = chain_of(stack)
    return WorkProfile(
        head=work("head segment", head),
        blocks=tuple(
            work(link.name, list(link.block.modules()), has_backward=link.backward)
            for link in chain.links
        ),
        tail=work("tail segment", tail),
        tied_parameters=sum(t.numel() for t in owned_tensors(head) & owned_tensors(tail)),
        fingerprint=module_fingerprint(module, stack),
        cuts=chain.cuts,
    )


def _operations_work(operations: float) -> Work:
    return Work(matrix_operations=Amount(fixed=float(operations)))


def module_fingerprint(module: nn.Module, stack: Blocks) -> str:
    """Return a digest of a module's structure, by which a plan for another model is refused.

    It covers the blocks' names and all parameters' names and shapes, so tied parameters, which have
    one name, differ from untied ones. Values, dtypes, devices and what is trained do not matter.
    """
    blocks = [f"block {name}" for name in chain_of(stack).names]
    shapes = (f"{name} {tuple(p.shape)}" for name, p in module.named_parameters())
    return fingerprint([*blocks, *shapes])


def chain_of(stack: Blocks) -> Chain:
    """Return the calls of a step; those of a stack are one after the other, each once."""
    if isinstance(stack, Chain):
        return stack
    return Chain.from_stacks(() if stack is None else (stack,))


def _segments(module: nn.Module, stack: Blocks) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules outside of the blocks: before the first one, and after it."""
    chain = chain_of(stack)
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
    owned = [(*m._parameters.values(), *m._buffers.values()) for m in owners]  # noqa: SLF001
    return {tensor for tensors in owned for tensor in tensors if tensor is not None}


def quantizable_tensors(module: nn.Module) -> set[Tensor]:
    return {getattr(layer, name) for layer, name in quantizable_weights(module)}


def sizes_of(tensors: Set[Tensor], *, trained: Set[Tensor], packed: Set[Tensor]) -> dict[str, Any]:
    """Return the numbers and bytes of parameters, by the names of `BlockWork`."""

    def count(some: Iterable[Tensor]) -> int:
        return sum(tensor.numel() for tensor in some if isinstance(tensor, nn.Parameter))

    return {
        "num_parameters": count(tensors),
        "num_trainable": sum(tensor.numel() for tensor in trained),
        "parameter_bytes": sum(tensor.nbytes for tensor in tensors),
        "trainable_bytes": sum(tensor.nbytes for tensor in trained),
        "num_quantizable": count(tensors & packed),
        "quantizable_bytes": sum(tensor.nbytes for tensor in tensors & packed),
    }


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
