"""One run of a model's code on the meta device, cut into segments and measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from roundpipe_lightning.engine.stack import BlockStack
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.meta_attention import FusedAttention
from roundpipe_lightning.models.meter import Count, Meter

__all__ = ["Call", "Part", "Run", "measure_run", "num_bytes"]

Call: TypeAlias = Callable[[nn.Module, int, int], Any]
"""Runs a module on so many sequences of so many tokens, and returns its loss or any result."""


@dataclass(kw_only=True)
class Part:
    """What one segment or block did in one run; the fields are those of `BlockWork`."""

    forward: Count = field(default_factory=Count)
    backward: Count = field(default_factory=Count)
    boundary_bytes: int = 0
    kept_bytes: int = 0
    forward_peak_bytes: int = 0
    peak_bytes: int = 0


@dataclass(kw_only=True)
class Run:
    """What one run found.

    Attributes:
        parts: What the head, every block, and the tail did, in this order.
        head_modules: The modules that ran before the first block.
    """

    parts: list[Part]
    head_modules: set[nn.Module]


def measure_run(
    module: nn.Module, stack: BlockStack | None, call: Call, sequences: int, seq_len: int
) -> Run:
    """Run the user's code once; blocks measure themselves and stand in for their likes.

    Args:
        module: The user's module on the meta device.
        stack: Its blocks. None: everything is the tail.
        call: What a training step runs.
        sequences: Number of sequences.
        seq_len: Tokens of each.

    Raises:
        ConfigurationError: The code needs values, or fails for another reason.
    """
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
    except ConfigurationError:
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError) as error:
        raise ConfigurationError(
            f"The work of {type(module).__name__} cannot be measured without values: {error}. "
            "Its plan can be made from its parameters alone, or from measured times."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    blocks_ran = [recorder.blocks.get(kind, Part()) for kind in kinds]  # or were left out
    parts = [recorder.head, *blocks_ran, recorder.tail]
    return Run(parts=parts, head_modules=recorder.head_modules)


class _Recorder:
    """Follows one run through the segments.

    Attributes:
        head: What the head segment did.
        blocks: What the blocks did, by kind.
        tail: What the tail segment did.
        head_modules: The modules that ran before the first block.
    """

    def __init__(self, *, meter: Meter, last: int) -> None:
        self.head, self.tail = Part(), Part()
        self.blocks: dict[int, Part] = {}
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
        self.head.boundary_bytes = num_bytes(hidden)
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
) -> tuple[Part, Any]:
    """Run a block forward and backward on leaves of its own."""
    part = Part()
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
    part.boundary_bytes = max((num_bytes(leaf) for leaf in _floats(output)), default=0)
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


def num_bytes(tensor: Tensor) -> int:
    """Size of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
