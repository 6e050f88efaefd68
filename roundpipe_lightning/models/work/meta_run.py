"""One run of a model's code on the meta device, cut into segments and measured.

Blocks run on tensors of their own, apart from the graph and from what other blocks hold: a cache of
keys and values, for example, is an object that a block reads and writes. So a block that is
measured gets copies of the objects that hold tensors, and what it writes is not seen by others, or
by itself when it runs again.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from roundpipe_lightning.engine.capture.trees import Copies
from roundpipe_lightning.engine.chain.chain import Chain, Link
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.work.meter import Count, FusedAttention, Meter

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device)
_DEPTH = 4
_EVERY_MODULE = frozenset(vars(nn.Module()))
_MANY_BLOCKS = 3  # fewer blocks than this may count something else, such as dimensions

Call: TypeAlias = Callable[[nn.Module, int, int], Any]
"""Runs a module on so many sequences of so many tokens, and returns its loss or any result."""


@dataclass(kw_only=True)
class SegmentCost:
    """Work of one segment or block in one run; the fields are those of `BlockWork`."""

    forward: Count = field(default_factory=Count)
    backward: Count = field(default_factory=Count)
    boundary_bytes: int = 0
    gradient_bytes: int = 0
    kept_bytes: int = 0
    forward_peak_bytes: int = 0
    peak_bytes: int = 0


def measure_run(
    module: nn.Module,
    chain: Chain,
    call: Call,
    sequences: int,
    seq_len: int,
    *,
    kinds: Sequence[int],
    outside: tuple[Sequence[nn.Module], Sequence[Tensor]],
) -> tuple[list[SegmentCost], set[nn.Module]]:
    """Run the user's code once; blocks are measured by themselves, alike ones once.

    Args:
        kinds: `kinds_of` the chain's links.
        outside: `outside_of` them.

    Returns:
        The costs of the head, every block, and the tail, in this order; and the modules, blocks'
        apart, that ran before the first block.

    Raises:
        ConfigurationError: The code needs values, or fails for another reason.
    """
    meter = Meter()
    blocks = [link.block for link in chain.links]
    recorder = _Recorder(
        meter=meter,
        ends={index for index in range(len(blocks)) if chain.ends_pass(index)},
        outside=outside[1],
    )
    hooks = [child.register_forward_hook(recorder.after_module) for child in outside[0]]
    collects = gc.isenabled()
    gc.disable()  # a circle of references that ends later would be missed in what a block keeps
    try:
        with FusedAttention(), meter, contextlib.ExitStack() as patches:
            patches.enter_context(patch.object(torch, "autocast", _Autocast))
            for index, block in enumerate(blocks):
                forward = recorder.measured_forward(index, kinds[index], block.forward)
                patches.enter_context(patch.object(block, "forward", forward))
            recorder.begin()
            recorder.end(call(module, sequences, seq_len))
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
        if collects:
            gc.enable()
    of_blocks = [  # the code may have left one out
        recorder.blocks.get(index, SegmentCost()) for index in range(len(blocks))
    ]
    return [recorder.head, *of_blocks, recorder.tail], recorder.head_modules


def outside_of(
    module: nn.Module, chain: Chain
) -> tuple[Sequence[nn.Module], Sequence[nn.Parameter]]:
    """Return the modules and the trained parameters that no block of a chain has."""
    blocks = [link.block for link in chain.links]
    inner = {p for block in blocks for p in block.parameters()}
    inside = {child for block in blocks for child in block.modules()}
    return (
        [child for child in module.modules() if child not in inside],
        [p for p in module.parameters() if p.requires_grad and p not in inner],
    )


class _Recorder:
    """Follows one run through the segments; `ends` are blocks behind which other code runs."""

    def __init__(self, *, meter: Meter, ends: Set[int], outside: Sequence[Tensor]) -> None:
        self.head, self.tail = SegmentCost(), SegmentCost()
        # what the blocks did, by index; blocks that are alike share theirs
        self.blocks: dict[int, SegmentCost] = {}
        self.head_modules: set[nn.Module] = set()  # the modules that ran before the first block
        self._meter = meter
        self._ends = ends
        self._in_head = bool(ends)
        self._tail_inputs: list[Tensor] = [*outside]
        self._head_outputs: list[Tensor] = []
        self._alike: dict[tuple[Any, ...], tuple[SegmentCost, Any]] = {}
        self._before = 0

    def after_module(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        if self._in_head:
            self.head_modules.add(module)

    def begin(self) -> None:
        self._meter.reset()
        self._before = self._meter.live_bytes

    def measured_forward(
        self, index: int, kind: int, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            if self._in_head:
                self._end_head(args, kwargs)
            taken = _held_tensors((args, kwargs))
            key = (kind, *((leaf.shape, leaf.dtype, leaf.requires_grad) for leaf in taken))
            if key not in self._alike:
                self._alike[key] = _measure_block(self._meter, forward, args, kwargs)
            cost, output = self._alike[key]
            before = self.blocks.get(index, cost)  # a call of another length may be the largest
            self.blocks[index] = max(before, cost, key=lambda one: one.kept_bytes)
            if index in self._ends:  # behind the last one that is called the tail begins
                output = tree_map(_leaf, output)
                self._tail_inputs += filter(_needs_grad, tree_leaves(output))
                self.begin()
                self.tail.gradient_bytes = _gradient_bytes(output)
            return output

        return measured

    def end(self, result: Any) -> None:
        """End the tail segment: run its backward, then the head's."""
        meter = self._meter
        self.tail.forward = meter.count
        self.tail.kept_bytes = meter.live_bytes - self._before
        losses = [leaf for leaf in tree_leaves(result) if _needs_grad(leaf)]
        peak = meter.peak_bytes
        meter.reset()
        if losses and self._tail_inputs:  # not into blocks, whose router logits it may have taken
            gradients = [torch.empty_like(loss) for loss in losses]
            torch.autograd.backward(losses, gradients, inputs=self._tail_inputs)
        self.tail.backward = meter.count
        self.tail.peak_bytes = max(peak, meter.peak_bytes) - self._before
        outputs, self._head_outputs = self._head_outputs, []
        if outputs:
            meter.reset()
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
            self.head.backward = meter.count

    def _end_head(self, args: Any, kwargs: Any) -> None:
        meter = self._meter
        self._in_head = False
        self._head_outputs = [t for t in _held_tensors((args, kwargs)) if _needs_grad(t)]
        self.head.forward = meter.count
        self.head.boundary_bytes = _hidden(args, kwargs).nbytes
        self.head.kept_bytes = meter.live_bytes - self._before
        self.head.peak_bytes = meter.peak_bytes - self._before
        self.head.forward_peak_bytes = self.head.peak_bytes


def _measure_block(
    meter: Meter, forward: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[SegmentCost, Any]:
    """Run a block forward and backward on leaves of its own.

    Return what it did, and its outputs, which need a gradient if it or its inputs did.
    """
    cost = SegmentCost(gradient_bytes=_gradient_bytes(_hidden(args, kwargs)))

    def run_block() -> Any:
        own_args, own_kwargs = Copies(lambda held, _: _leaf(held)).copied((args, kwargs))
        return forward(*own_args, **own_kwargs)

    before = meter.live_bytes
    with torch.no_grad():
        meter.reset()
        leaves, structure = tree_flatten(run_block())
    cost.forward = meter.count
    cost.forward_peak_bytes = meter.peak_bytes - before
    cost.boundary_bytes = max((leaf.nbytes for leaf in _floats(leaves)), default=0)
    leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    wanted = _measure_backward(meter, cost, run_block)
    for leaf, is_wanted in zip(leaves, wanted, strict=True):
        if is_wanted:
            leaf.requires_grad_()
    return cost, tree_unflatten(leaves, structure)


def _measure_backward(meter: Meter, cost: SegmentCost, run_block: Callable[[], Any]) -> list[bool]:
    """Run a block with a graph, and backward if anything in it or before it is trained.

    Return for each of its outputs whether it needs a gradient.
    """
    before = meter.live_bytes
    with torch.enable_grad():
        meter.reset()
        outputs = tree_leaves(run_block())
        wanted = [_needs_grad(output) for output in outputs]
        roots = [output for output in outputs if _needs_grad(output)][:1]
        del outputs
        if not roots:  # no graph is made, and nothing recomputed
            return wanted
        cost.kept_bytes = meter.live_bytes - before
        peak = meter.peak_bytes
        meter.reset()
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        cost.backward = meter.count
    cost.peak_bytes = max(peak, meter.peak_bytes) - before
    return wanted


def kinds_of(links: Sequence[Link]) -> list[int]:
    """Number the kinds of blocks: equal types, parameters, buffers and attributes are one kind.

    Numbers that count the blocks of one list, by their dotted names, and names that hold such a
    number say nothing.
    """
    described = [_description(link.block) for link in links]
    lists: dict[str, list[dict[str, str]]] = {}
    for link, description in zip(links, described, strict=True):
        blocks, _, number = link.name.rpartition(".")
        call = number.partition("#")[2]  # of many in a step
        lists.setdefault(f"{blocks}#{call}", []).append(description)
    for alike in lists.values():
        for key in {key for description in alike for key in description}:
            if _counts_blocks([description.get(key) for description in alike]):
                for description in alike:
                    description.pop(key, None)
    seen: dict[frozenset[tuple[str, str]], int] = {}
    return [seen.setdefault(frozenset(one.items()), len(seen)) for one in described]


def _counts_blocks(values: Sequence[str | None]) -> bool:
    """Return whether values differ by their blocks' numbers alone; of few blocks nobody can say."""
    present = {value: index for index, value in enumerate(values) if value is not None}
    num_present = len(values) - values.count(None)
    return len(present) == num_present >= _MANY_BLOCKS and any(
        len({_unnumbered(value, first + index) for value, index in present.items()}) == 1
        for first in (0, 1)
    )


def _unnumbered(value: str, number: int) -> str:
    if value == str(number):
        return "#"
    alone = rf"(?<!\d){number}(?![\da-z])"  # not that of 'loaded_in_4bit'
    return re.sub("'[^']*'", lambda name: re.sub(alone, "#", name[0]), value)


def _description(block: nn.Module) -> dict[str, str]:
    lines: dict[str, str] = {}
    for name, module in block.named_modules():
        lines[f"{name}:"] = f"{type(module).__module__}.{type(module).__qualname__}"
        for key, value in vars(module).items():
            if key not in _EVERY_MODULE or value:  # most have no hooks and no parameters
                lines[f"{name}:{key}"] = _described(value)
    return lines


def _described(value: Any, depth: int = 0) -> str:
    """Return what tells values apart: of objects, whether they are the same one."""
    if value is None or isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.requires_grad}"
    if isinstance(value, nn.Module):
        return ""  # described by itself
    held: Sequence[Any] | None = None
    if isinstance(value, Mapping):
        held = list(itertools.chain.from_iterable(value.items()))
    elif isinstance(value, list | tuple):
        held = value
    elif isinstance(value, set | frozenset):
        held = sorted(value, key=repr)
    elif is_dataclass(value) and hasattr(value, "__dict__") and not isinstance(value, type):
        # not by getattr: transformers' configurations refuse to give what differs between layers
        held = list(itertools.chain.from_iterable(vars(value).items()))
    elif isinstance(value, partial):
        held = (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        held = (value.__func__, value.__self__)
    elif isinstance(value, FunctionType):
        held = (id(value.__code__), value.__defaults__, value.__kwdefaults__, *_closure(value))
    if held is None or depth > _DEPTH:
        return f"object at {id(value):x}"
    return f"{type(value).__name__}({', '.join(_described(one, depth + 1) for one in held)})"


def _closure(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it is empty
            yield cell.cell_contents


class _Autocast(torch.autocast):
    """Autocast that takes the meta device, too, where it changes nothing.

    Code may ask its tensors for their device and say `torch.autocast(that, ...)`.
    """

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == "meta" else device_type, *args, **kwargs)


def _hidden(args: Any, kwargs: Any) -> Tensor:
    """The tensor that flows from block to block: the first one of floating-point numbers."""
    floats = _floats((args, kwargs))
    if not floats:
        raise ConfigurationError("A block is called without a tensor of numbers.")
    return floats[0]


def _floats(tree: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point()]


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _gradient_bytes(tree: Any) -> int:
    return max((leaf.nbytes for leaf in _floats(tree) if leaf.requires_grad), default=0)


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _held_tensors(value: Any) -> list[Tensor]:
    """All tensors in containers and objects, each once."""
    copies = Copies(lambda tensor, _: tensor)
    copies.copied(value)
    return [held for held in copies.originals().values() if isinstance(held, Tensor)]
