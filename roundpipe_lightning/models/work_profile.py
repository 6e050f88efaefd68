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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from roundpipe_lightning.engine.stack import BlockStack
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.meta_attention import FusedAttention, transformers_attention
from roundpipe_lightning.models.meter import Count, Meter
from roundpipe_lightning.models.profile import module_fingerprint
from roundpipe_lightning.planning.work import Amount, BlockWork, Peak, Work, WorkProfile

__all__ = ["Call", "causal_lm_call", "work_profile"]

Call: TypeAlias = Callable[[nn.Module, int, int], Any]
"""Runs a module on so many sequences of so many tokens, and returns its loss or any result."""

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
            configuration says.

    Raises:
        ConfigurationError: The module has parameters elsewhere, or its code needs values.
    """
    if any(p.device.type != "meta" for p in module.parameters()):
        raise ConfigurationError(
            "Work is measured without weights: build the module under torch.device('meta')."
        )
    with _attention(module, fused=fused_attention), _gradients(module):
        runs, long_runs = (
            [_measure(module, stack, call, *shape) for shape in _shapes(length)]
            for length in (seq_len, _LONG * seq_len)
        )
    names = stack.names if stack is not None else ()
    owners = [list(block.modules()) for block in (stack.blocks if stack is not None else ())]
    inside = {inner for modules in owners for inner in modules}
    rest = [m for m in module.modules() if m not in inside]
    in_head = runs[0].head_modules if stack is not None else set()
    head, tail = ([m for m in rest if (m in in_head) == wanted] for wanted in (True, False))
    shared = _tensors(head) & _tensors(tail)
    parts = [
        _block_work(
            name,
            modules,
            runs=[run.parts[index] for run in runs],
            long_runs=[run.parts[index] for run in long_runs],
            seq_len=seq_len,
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


def _shapes(seq_len: int) -> tuple[tuple[int, int], ...]:
    return ((1, seq_len), (1, 2 * seq_len), (2, seq_len))


# --- one run ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Part:
    """What one segment or block did in one run."""

    forward: Count = field(default_factory=Count)
    backward: Count = field(default_factory=Count)
    boundary_bytes: int = 0
    kept_bytes: int = 0
    forward_peak_bytes: int = 0
    peak_bytes: int = 0


@dataclass(kw_only=True)
class _Run:
    """What the head, every block, and the tail did, in this order."""

    parts: list[_Part]
    head_modules: set[nn.Module]


def _measure(
    module: nn.Module, stack: BlockStack | None, call: Call, sequences: int, seq_len: int
) -> _Run:
    """Run the user's code once; blocks measure themselves and stand in for their likes."""
    meter = Meter()
    blocks = stack.blocks if stack is not None else ()
    recorder = _Recorder(meter=meter, last=len(blocks) - 1)
    kinds = _kinds(blocks)
    hooks = [m.register_forward_hook(recorder.saw) for m in module.modules()]
    try:
        with FusedAttention(), meter, contextlib.ExitStack() as patches:
            for index, block in enumerate(blocks):
                step = recorder.step(index, kinds[index], block.forward)
                patches.enter_context(_replaced_forward(block, step))
            recorder.begin()
            result = call(module, sequences, seq_len)
            recorder.end(result)
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigurationError(
            f"The work of {type(module).__name__} cannot be measured without values: {error}. "
            "Its plan can be made from its parameters alone, or from measured times."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    parts = [recorder.head, *(recorder.blocks[kind] for kind in kinds), recorder.tail]
    return _Run(parts=parts, head_modules=recorder.head_modules)


class _Recorder:
    """Follows one run through the segments.

    Attributes:
        head: What the head segment did.
        blocks: What the blocks did, by kind.
        tail: What the tail segment did.
        head_modules: The modules that ran before the first block.
    """

    def __init__(self, *, meter: Meter, last: int) -> None:
        self.head, self.tail = _Part(), _Part()
        self.blocks: dict[int, _Part] = {}
        self.head_modules: set[nn.Module] = set()
        self._meter = meter
        self._last = last
        self._in_head = last >= 0
        self._head_output: Tensor | None = None
        self._tail_input: Tensor | None = None
        self._outputs: dict[int, Any] = {}
        self._before = 0

    def saw(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        """Note a module that has run."""
        if self._in_head:
            self.head_modules.add(module)

    def begin(self) -> None:
        """Begin the first segment."""
        self._meter.reset()
        self._before = self._meter.live_bytes

    def step(self, index: int, kind: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return what runs in place of a block's forward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if index == 0:
                self._end_head(_hidden(args, kwargs))
            if kind not in self.blocks:
                self.blocks[kind], self._outputs[kind] = _measure_block(
                    self._meter, forward, args, kwargs
                )
            output = self._outputs[kind]
            if index == self._last:
                output = self._begin_tail(output)
            return output

        return run

    def end(self, result: Any) -> None:
        """End the tail segment: run its backward, then the head's."""
        meter = self._meter
        self.tail.forward = meter.count
        self.tail.kept_bytes = meter.live_bytes - self._before
        losses = [leaf for leaf in tree_leaves(result) if _needs_grad(leaf)]
        peak = meter.peak_bytes
        meter.reset()
        if losses:
            torch.autograd.backward(losses, [torch.empty_like(loss) for loss in losses])
        self.tail.backward = meter.count
        self.tail.peak_bytes = max(peak, meter.peak_bytes) - self._before
        if self._head_output is not None and self._head_output.requires_grad:
            meter.reset()
            self._head_output.backward(torch.empty_like(self._head_output))
            self.head.backward = meter.count

    def _end_head(self, hidden: Tensor) -> None:
        meter = self._meter
        self._in_head = False
        self._head_output = hidden
        self.head.forward = meter.count
        self.head.boundary_bytes = _size(hidden)
        self.head.kept_bytes = meter.live_bytes - self._before
        self.head.peak_bytes = meter.peak_bytes - self._before
        self.head.forward_peak_bytes = self.head.peak_bytes

    def _begin_tail(self, output: Any) -> Any:
        fresh = tree_map(_leaf, output)
        self._meter.reset()
        self._before = self._meter.live_bytes
        return fresh


def _measure_block(
    meter: Meter, forward: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[_Part, Any]:
    """Run a block forward and backward on leaves of its own."""
    part = _Part()
    hidden = _hidden(args, kwargs)

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return _leaf(leaf) if leaf is hidden else leaf.detach()

    args, kwargs = tree_map(own, (args, kwargs))
    before = meter.live_bytes
    with torch.no_grad():
        meter.reset()
        output = forward(*args, **kwargs)
        part.forward = meter.count
        part.forward_peak_bytes = meter.peak_bytes - before
    part.boundary_bytes = max((_size(leaf) for leaf in _floats(output)), default=0)
    outside = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
    output = None
    before = meter.live_bytes
    with torch.enable_grad():
        meter.reset()
        result = forward(*args, **kwargs)
        part.kept_bytes = meter.live_bytes - before
        roots = [leaf for leaf in tree_leaves(result) if _needs_grad(leaf)]
        peak = meter.peak_bytes
        result = None
        if roots:
            gradients = [torch.empty_like(root) for root in roots[:1]]
            meter.reset()
            torch.autograd.backward(roots[:1], gradients)
            part.backward = meter.count
    part.peak_bytes = max(peak, meter.peak_bytes) - before
    return part, outside


# --- pieces -------------------------------------------------------------------------------------


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


def _block_work(
    name: str,
    modules: Sequence[nn.Module],
    *,
    runs: Sequence[_Part],
    long_runs: Sequence[_Part],
    seq_len: int,
) -> BlockWork:
    """Put the runs and the parameters together."""

    def amount(value: Callable[[_Part], float]) -> Amount:
        return Amount.fit(*(value(run) for run in runs), seq_len=seq_len)

    def peak(value: Callable[[_Part], float]) -> Peak:
        long = Amount.fit(*(value(run) for run in long_runs), seq_len=_LONG * seq_len)
        return Peak(amounts=(amount(value), long))

    def work(count: Callable[[_Part], Count]) -> Work:
        return Work(
            matrix_operations=amount(lambda run: count(run).matrix_operations),
            grouped_operations=amount(lambda run: count(run).grouped_operations),
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
        num_parameters=sum(tensor.numel() for tensor in tensors),
        num_trainable=sum(tensor.numel() for tensor in trained),
        parameter_bytes=sum(_size(tensor) for tensor in tensors),
        trainable_bytes=sum(_size(tensor) for tensor in trained),
        boundary_bytes=amount(lambda run: run.boundary_bytes),
        kept_bytes=amount(lambda run: run.kept_bytes),
        forward_peak_bytes=peak(lambda run: run.forward_peak_bytes),
        peak_bytes=peak(lambda run: run.peak_bytes),
    )


def _tensors(modules: Iterable[nn.Module]) -> set[Tensor]:
    owned = [(*m._parameters.values(), *m._buffers.values()) for m in modules]  # noqa: SLF001
    return {tensor for tensors in owned for tensor in tensors if tensor is not None}


def _kinds(blocks: Sequence[nn.Module]) -> list[int]:
    """Number the kinds of blocks: equal types, parameters and plain attributes are one kind.

    An attribute that differs in every block is the block's number or name, and says nothing.
    """
    described = [_description(block) for block in blocks]
    keys = {key for description in described for key in description}
    telling = [
        key
        for key in sorted(keys)
        if len({description.get(key) for description in described}) < max(len(blocks), 2)
    ]
    seen: dict[tuple[str | None, ...], int] = {}
    return [
        seen.setdefault(tuple(description.get(key) for key in telling), len(seen))
        for description in described
    ]


def _description(block: nn.Module) -> Mapping[str, str]:
    lines: dict[str, str] = {}
    for name, module in block.named_modules():
        lines[f"{name}:"] = f"{type(module).__module__}.{type(module).__qualname__}"
        for key, value in vars(module).items():
            if isinstance(value, bool | int | float | str) or value is None:
                lines[f"{name}:{key}"] = repr(value)
    for name, parameter in block.named_parameters():
        lines[name] = f"{parameter.dtype} {tuple(parameter.shape)} {parameter.requires_grad}"
    return lines


@contextlib.contextmanager
def _replaced_forward(block: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let an instance run something else for a while."""
    own = block.__dict__.get("forward")
    block.__dict__["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del block.__dict__["forward"]
        else:
            block.__dict__["forward"] = own


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


def _hidden(args: Any, kwargs: Any) -> Tensor:
    """The tensor that flows from block to block: the first one with a gradient or of numbers."""
    floats = _floats((args, kwargs))
    if not floats:
        raise ConfigurationError("A block is called without a tensor of numbers.")
    return floats[0]


def _floats(tree: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().requires_grad_()
    return value


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
