"""One run of a model's code on the meta device, cut into segments and measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.work.meta_attention import FusedAttention
from roundpipe_lightning.models.work.meta_values import held_tensors, map_held_tensors
from roundpipe_lightning.models.work.meter import Count, Meter

__all__ = ["Call", "Part", "Run", "kinds_of", "measure_run", "num_bytes"]

Call: TypeAlias = Callable[[nn.Module, int, int], Any]
"""Runs a module on so many sequences of so many tokens, and returns its loss or any result."""


@dataclass(kw_only=True)
class Part:
    """What one segment or block did in one run; the fields are those of `BlockWork`."""

    forward: Count = field(default_factory=Count)
    backward: Count = field(default_factory=Count)
    boundary_bytes: int = 0
    gradient_bytes: int = 0
    kept_bytes: int = 0
    forward_peak_bytes: int = 0
    peak_bytes: int = 0


@dataclass(kw_only=True)
class Run:
    """What one run found.

    Attributes:
        parts: What the head, every block, and the tail did, in this order.
        head_modules: The modules, blocks' apart, that ran before the first block.
    """

    parts: list[Part]
    head_modules: set[nn.Module]


def measure_run(
    module: nn.Module,
    stack: BlockStack | None,
    call: Call,
    sequences: int,
    seq_len: int,
    *,
    kinds: Sequence[int] | None = None,
) -> Run:
    """Run the user's code once; blocks measure themselves and stand in for their likes.

    Args:
        module: The user's module on the meta device.
        stack: Its blocks. None: everything is the tail.
        call: What a training step runs.
        sequences: Number of sequences.
        seq_len: Tokens of each.
        kinds: What `kinds_of` says of the blocks, where that is known.

    Raises:
        ConfigurationError: The code needs values, or fails for another reason.
    """
    meter = Meter()
    blocks = stack.blocks if stack is not None else ()
    recorder = _Recorder(meter=meter, last=len(blocks) - 1)
    kinds = kinds_of(blocks) if kinds is None else kinds
    inside = {inner for block in blocks for inner in block.modules()}
    outside = [child for child in module.modules() if child not in inside]
    hooks = [child.register_forward_hook(recorder.saw) for child in outside]
    try:
        with FusedAttention(), _autocast_on_meta(), meter, contextlib.ExitStack() as patches:
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
            f"The work of {type(module).__name__} cannot be measured without values: "
            f"{str(error).rstrip('.')}. "
            "Its plan can be made from its parameters alone, or from measured times."
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    blocks_ran = [recorder.blocks.get(index, Part()) for index in range(len(blocks))]
    parts = [recorder.head, *blocks_ran, recorder.tail]  # a block may have been left out
    return Run(parts=parts, head_modules=recorder.head_modules)


class _Recorder:
    """Follows one run through the segments.

    Attributes:
        head: What the head segment did.
        blocks: What the blocks did, by index; blocks that are alike share theirs.
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
        self._head_outputs: list[Tensor] = []
        self._alike: dict[tuple[int, tuple[bool, ...]], tuple[Part, Any]] = {}
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
                self._end_head(args, kwargs)
            wanted = tuple(leaf.requires_grad for leaf in held_tensors((args, kwargs)))
            if (kind, wanted) not in self._alike:
                self._alike[kind, wanted] = _measure_block(self._meter, forward, args, kwargs)
            self.blocks[index], output = self._alike[kind, wanted]
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
        outputs, self._head_outputs = self._head_outputs, []
        if outputs:
            meter.reset()
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
            self.head.backward = meter.count

    def _end_head(self, args: Any, kwargs: Any) -> None:
        meter = self._meter
        hidden = _hidden(args, kwargs)
        self._in_head = False
        self._head_outputs = [t for t in held_tensors((args, kwargs)) if _needs_grad(t)]
        self.head.forward = meter.count
        self.head.boundary_bytes = num_bytes(hidden)
        self.head.kept_bytes = meter.live_bytes - self._before
        self.head.peak_bytes = meter.peak_bytes - self._before
        self.head.forward_peak_bytes = self.head.peak_bytes

    def _begin_tail(self, output: Any) -> Any:
        fresh = tree_map(_leaf, output)
        self._meter.reset()
        self._before = self._meter.live_bytes
        self.tail.gradient_bytes = _gradient_bytes(fresh)
        return fresh


def _measure_block(
    meter: Meter, forward: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Part, Any]:
    """Run a block forward and backward on leaves of its own.

    Returns:
        What it did, and its outputs, which need a gradient if it was trained or its inputs needed
        one.
    """
    part = Part()
    part.gradient_bytes = _gradient_bytes(_hidden(args, kwargs))

    def run() -> Any:
        own_args, own_kwargs = map_held_tensors(_leaf, (args, kwargs))
        return forward(*own_args, **own_kwargs)

    before = meter.live_bytes
    with torch.no_grad():
        meter.reset()
        leaves, structure = tree_flatten(run())
    part.forward = meter.count
    part.forward_peak_bytes = meter.peak_bytes - before
    part.boundary_bytes = max((num_bytes(leaf) for leaf in _floats(leaves)), default=0)
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    wanted = _measure_backward(meter, part, run)
    for leaf, is_wanted in zip(leaves, wanted, strict=True):
        if is_wanted:
            leaf.requires_grad_()
    return part, tree_unflatten(leaves, structure)


def _measure_backward(meter: Meter, part: Part, run: Callable[[], Any]) -> list[bool]:
    """Run a block with a graph, and backward if anything in it or before it is trained.

    Returns:
        For each of its outputs whether it needs a gradient.
    """
    before = meter.live_bytes
    with torch.enable_grad():
        meter.reset()
        outputs = tree_leaves(run())
        wanted = [_needs_grad(output) for output in outputs]
        roots = [output for output in outputs if _needs_grad(output)][:1]
        del outputs
        if not roots:  # no graph is made, and nothing recomputed
            return wanted
        part.kept_bytes = meter.live_bytes - before
        peak = meter.peak_bytes
        meter.reset()
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        part.backward = meter.count
    part.peak_bytes = max(peak, meter.peak_bytes) - before
    return wanted


def kinds_of(blocks: Sequence[nn.Module]) -> list[int]:
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


class _Autocast(torch.autocast):
    """Autocast that takes the meta device, too, where it changes nothing."""

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *args, **kwargs)


@contextlib.contextmanager
def _autocast_on_meta() -> Iterator[None]:
    """Let code that asks its tensors for their device say `torch.autocast(that, ...)`."""
    before = torch.autocast
    torch.autocast = _Autocast  # type: ignore[misc]
    try:
        yield
    finally:
        torch.autocast = before  # type: ignore[misc]


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
    """Cut a tensor off its graph; it still needs a gradient if it did."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _gradient_bytes(tree: Any) -> int:
    """Size of the gradient of what flows from block to block; 0 if it needs none."""
    return max((num_bytes(leaf) for leaf in _floats(tree) if leaf.requires_grad), default=0)


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def num_parameters(tensors: Iterable[Tensor]) -> int:
    """Count the numbers in the parameters among some tensors; the others are buffers."""
    return sum(tensor.numel() for tensor in tensors if isinstance(tensor, nn.Parameter))


def num_bytes(tensor: Tensor) -> int:
    """Size of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
