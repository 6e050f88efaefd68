"""Which dimension of a call's tensors has the batch's rows, and whether the rows are independent.

A block is run on the rows of the first piece, of the second, of both, and on as many that are
alike. Where both together do not give what each gives by itself, the rows depend on each other.
Other rows can decide without a trace in these values: a branch that all of them take, a threshold
that is passed anyway. So the first piece's rows run beside much larger ones of either sign, too,
and beside as many as a small batch has.
Code of a block that takes a number from rows (`float`, `item`) may go by it, for numbers that these
runs do not have: such a block is taken to need all rows.
A block that calls the functions that an earlier one called, with the same numbers and shapes, does
the same with other weights: it is run on both pieces' rows and on the first's.

Values tell little about what has no rows: a mean over rows can be the same for other rows, such as
the balance of a router that begins with zeros. So what is computed from rows is marked. A weight
that begins with zeros (a gate, an adapter's second matrix) would hide what it multiplies: in these
runs it has other numbers.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roundpipe_lightning.engine.capture.module_writes import ModuleWrites
from roundpipe_lightning.engine.capture.placeholder import LazyTensor, writes_first
from roundpipe_lightning.engine.capture.torch_functions import (
    METADATA,
    attribute_or_name,
    function_of_user,
    has_foreign_saved_tensor_hooks,
    nodes_of,
    version_of,
)
from roundpipe_lightning.engine.capture.trees import Copies, Swap, map_tensors, tensors_in
from roundpipe_lightning.engine.capture.view import HOOKS
from roundpipe_lightning.engine.chain.joined import CallForm, JoinedValue, Shadow
from roundpipe_lightning.engine.chain.values import Given
from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.errors import CaptureError

BlockWrites: TypeAlias = Sequence[tuple[nn.Module, str, Any]]
"""Attributes that a block has written: module, name and value."""

FunctionCalls: TypeAlias = tuple[Any, ...]
"""The classes of a block's modules, what it is given, and the functions that it calls."""

_Run: TypeAlias = tuple[Sequence[Tensor], list[tuple[Tensor, int | None]]]  # with its leaves

_KEPT = (
    "Block {!r} puts tensors of the batch into a list, a closure or a global, which pieces of the "
    "batch would fill in any order, and again in a recompute. Let it return them or keep them as "
    "an attribute, or set num_microbatches=1."
)
_LET_GO_SECONDS = 1.0
_NUMBERS = frozenset({"__bool__", "__float__", "__int__", "item", "tolist"})
_PLAIN = (bool, int, float, str, type(None))
_SUMS = frozenset({"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__"})
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_TOLERANCE = 5e-2  # of narrower types, relative to the largest value
_BESIDE = {4: 100.0, 5: -100.0}  # what the second piece's rows are multiplied by in further runs
_MOST_BYTES = 2**24  # of a batch whose number of rows is tried
_FEW = 9  # entries of a list are attributes of their own


class NotByRowsError(Exception):
    """Why a call cannot be made on a part of the rows."""


class Argument(NamedTuple):
    """A tensor among a call's arguments."""

    tensor: Tensor  # as the user's code gave it
    joined: JoinedValue | None  # what it stands for, if pieces have made it


def arguments_of(given: Given) -> tuple[Sequence[Argument], bool]:
    """Return the tensors among a call's arguments, and whether there are objects that hold some.

    Entries that blocks have made in an object, a cache say, are left out: others do not read them.
    """
    found: list[Argument] = []

    def look(tensor: Any, in_object: bool) -> Any:  # noqa: FBT001 - a `Swap`
        if not _is_entry(tensor, in_object):
            found.append(Argument(tensor, joined_in(tensor)))
        return tensor

    copies = Copies(look)
    copies.arguments(given)
    return found, copies.hold_objects


def _is_entry(tensor: Any, in_object: bool) -> bool:  # noqa: FBT001
    joined = joined_in(tensor)
    return in_object and joined is not None and joined.in_object


def joined_in(tensor: Any) -> JoinedValue | None:
    value = tensor.value if isinstance(tensor, LazyTensor) else None
    return value if isinstance(value, JoinedValue) else None


def candidates(arguments: Sequence[Argument]) -> Iterator[Sequence[int | None]]:
    """Guess which dimension of every argument has the batch's rows, the likeliest guess first."""
    floating = [a for a in arguments if a.tensor.dim() > 1 and a.tensor.is_floating_point()]
    known = [a for a in arguments if a.joined is not None and a.joined.dim is not None]
    lead = next(iter((*known, *floating, *(a for a in arguments if a.tensor.dim()))), None)
    if lead is None:
        return
    shape = lead.tensor.shape
    # The last dimension is that of features.
    dims = range(max(1, min(2, len(shape) - 1))) if lead.joined is None else [lead.joined.dim or 0]
    for dim in dims:
        likely = [_dim_of(argument, shape[dim], dim) for argument in arguments]
        yield likely
        # All rows may share a square tensor: a mask of as many tokens as there are rows.
        shared = [
            None
            if a.joined is None and a is not lead and a.tensor.shape.count(shape[dim]) > 1
            else d
            for a, d in zip(arguments, likely, strict=True)
        ]
        if shared != likely:
            yield shared


def _dim_of(argument: Argument, num_rows: int, lead: int) -> int | None:
    if argument.joined is not None:
        return argument.joined.dim
    shape = argument.tensor.shape
    return next((d for d in (lead, 0) if d < len(shape) and shape[d] == num_rows), None)


def reason_against_pieces(block: nn.Module, writes: ModuleWrites) -> str:
    """Return what has to look at a whole batch, in words; nothing if nothing is known to."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    tables = [f"_{kind}_hooks" for kind in kinds]
    hooked = {module for module, written in writes if any(map(written.get, tables))}
    for name, module in block.named_modules():
        if module in hooked or any(module.__dict__[table] for table in tables):
            return (
                f"a hook looks at {name or 'it'}, once per batch (with microbatching='step', once "
                "per microbatch)"
            )
        if getattr(module, "scale_grad_by_freq", False):
            return f"gradients of {name} depend on how often it is used (scale_grad_by_freq)"
    return ""


def state_of(
    module: nn.Module,
    writes: Sequence[tuple[nn.Module, Mapping[str, Any]]] = (),
    *,
    attributes: bool = True,
) -> int:
    """Return a number that changes with what a module computes, whatever its parameters are.

    It knows classes and hooks and, of `attributes`, plain values and buffers of one number.
    """
    found: list[Any] = []
    written = {id(one): values for one, values in writes}
    for one in module.modules():
        own = vars(one)
        found += (id(one), id(type(one).forward), id(own.get("forward")))
        found += (tuple(own[table]) for table in HOOKS)
        if attributes:
            held = [*own.values(), *written.get(id(one), {}).values()]
            held += [x for v in held if type(v) in (list, tuple) and len(v) < _FEW for x in v]
            found += (v for v in held if isinstance(v, _PLAIN))
            buffers = (b for b in own["_buffers"].values() if b is not None and b.numel() == 1)
            found += ((id(b), version_of(b)) for b in buffers)
    return hash(tuple(found))


class RowTrial:
    """Runs of a block on a few rows."""

    def __init__(
        self,
        arguments: Sequence[Argument],
        shadows: Sequence[Shadow],
        dims: Sequence[int | None],
        sizes: Sequence[int],
    ) -> None:
        # The code may go by the number of rows: there are those of the batch, if that is small.
        rows = [s.both.nbytes for s, dim in zip(shadows, dims, strict=True) if dim is not None]
        is_small = sum(rows) * sum(sizes) < _MOST_BYTES * sum(sizes[:2])
        self._num_rows = sum(sizes if is_small else sizes[:2])
        self._num_beside = -(-self._num_rows // sizes[1])
        self._taken = {
            id(a.tensor): (shadow, dim)
            for a, shadow, dim in zip(arguments, shadows, dims, strict=True)
        }
        self._dims = tuple(dims)
        self._marks = RowMarks()
        self._results: dict[int, Sequence[Tensor]] = {}
        self._writes: dict[int, BlockWrites] = {}
        self._known: Sequence[int | None] | None = None  # dimensions of what a like block gave

    def run(
        self,
        block: nn.Module,
        run_block: Callable[[Swap], Sequence[Tensor]],
        take_writes: Callable[[], BlockWrites],
        *,
        gradient: bool,
        known: Mapping[FunctionCalls, Sequence[int | None]],
        again: AbstractContextManager[None],
    ) -> FunctionCalls:
        """Run a block on both pieces' rows, the first's, the second's, and many that are alike.

        Args:
            gradient: Whether gradients that code of the user's makes are compared, too.
            known: The dimensions of what other blocks gave.
            again: Entered while it runs once more.

        Raises:
            NotByRowsError: If it raises an error, or gradients of rows depend on other rows.
        """

        def run(part: int, *, gradient: bool = False) -> _Run:
            leaves: list[tuple[Tensor, int | None]] = []

            def take(tensor: Any, in_object: bool) -> Any:  # noqa: FBT001 - a `Swap`
                if _is_entry(tensor, in_object):
                    return tensor
                shadow, dim = self._taken[id(tensor)]
                if dim is not None and part == 3:
                    return self._marks.mark(_alike(shadow.both, dim))
                rows = shadow[part] if part < 3 else shadow.both
                if dim is not None and part in _BESIDE:
                    beside = shadow.second
                    if beside.is_floating_point() and bool(beside.isfinite().all()):
                        # In other places: tokens could be taken for rows, and rows go by all.
                        others = [d for d in range(beside.dim()) if d != dim]
                        beside = beside.roll([1] * len(others), others) if others else beside
                        beside = (beside + _numbers(beside)) * _BESIDE[part]
                    many = torch.cat([shadow.first, *[beside] * self._num_beside], dim)
                    return self._marks.mark(many.narrow(dim, 0, self._num_rows))
                if gradient and rows.is_floating_point():
                    rows = rows.detach().requires_grad_()
                    leaves.append((rows, dim))
                return rows.clone() if dim is None else self._marks.mark(rows.clone())

            with torch.set_grad_enabled(gradient), _explained(), self._marks:
                made = run_block(take)
            self._results[part] = [self._bare(tensor) for tensor in made]
            self._writes[part] = [
                (module, name, self._bare(value) if isinstance(value, Tensor) else value)
                for module, name, value in take_writes()
            ]
            return made, leaves

        with self._marks.recorded() as functions:
            made, _ = run(2)
        # Blocks that call the same functions may keep more of what these give: in a cache.
        calls = (*map(type, block.modules()), *self._dims, gradient, len(made), *functions)
        self._known = known.get(calls)
        with again:
            first = run(0, gradient=gradient)
        if self._known is None:
            run(1)
            run(3)
            for part in _BESIDE:
                with suppress(NotByRowsError):  # it may refuse such numbers
                    run(part)
                take_writes()
        if gradient:
            names = [name for name in map(function_of_user, nodes_of(first[0])) if name]
            if names or self._marks.sees_gradients:
                both = run(1, gradient=True), run(2, gradient=True)
                with torch.enable_grad(), _explained():
                    _compare_gradients([first, *both], (*names, "a hook")[0])
        return calls

    def _bare(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        bare = tensor.detach()
        return self._marks.mark(bare) if self._marks.has(tensor) else bare

    def form(
        self, *, num_rows: int, trusts_rows: bool, name: str, settle: Callable[[], None]
    ) -> tuple[CallForm, list[Shadow]]:
        """Return the form of the call, and what it gave for the rows; `settle` ends all work.

        Raises:
            NotByRowsError: If it is not the same on parts of the rows.
            CaptureError: If it puts tensors where nobody finds them.
        """
        left = {part: self._left_tensors(writes) for part, writes in self._writes.items()}
        plain = [
            {(id(m), name): v for m, name, v in self._writes[part] if isinstance(v, _PLAIN)}
            for part in (0, 2)
        ]
        if plain[0] != plain[1] or any(one.keys() != left[0].keys() for one in left.values()):
            raise NotByRowsError("it keeps values of the batch in attributes")
        self._writes.clear()
        if self._marks.sees_numbers and not trusts_rows:
            raise NotByRowsError(
                "its code takes a number from the rows, and may go by it (RoundPipeStrategy("
                "trust_rows=True) splits it all the same)"
            )
        results = {
            part: [*self._results[part], *(one[key] for key in left[0])]
            for part, one in left.items()
        }
        made = [tensor for result in results.values() for tensor in result]
        if self._marks.alive(besides=made, settle=settle):
            raise CaptureError(_KEPT.format(name))
        if self._known is not None:
            results[1] = list(map(_rows_after, results[0], results[2], self._known))
        if len({len(result) for result in results.values()}) != 1:
            raise NotByRowsError("it gives other outputs for another number of rows")
        shadows = [Shadow(*parts) for parts in zip(results[0], results[1], results[2], strict=True)]
        values = tuple(
            self._dim_made(
                shadow,
                {part: results[part][slot] for part in (3, *_BESIDE) if part in results},
                num_rows=num_rows,
                trusts_rows=trusts_rows,
            )
            for slot, shadow in enumerate(shadows)
        )
        return CallForm(arguments=self._dims, values=values, left=tuple(left[0])), shadows

    def _left_tensors(self, writes: BlockWrites) -> dict[tuple[nn.Module, str], Tensor]:
        """Return the attributes that are tensors made of rows."""
        last = {(module, name): value for module, name, value in writes}
        left = {key: value for key, value in last.items() if isinstance(value, Tensor)}
        if any(map(self._marks.has, tensors_in([v for k, v in last.items() if k not in left]))):
            raise NotByRowsError("it keeps values of the batch in attributes")
        return {key: value for key, value in left.items() if self._marks.has(value)}

    def _dim_made(
        self, shadow: Shadow, more: Mapping[int, Tensor], *, num_rows: int, trusts_rows: bool
    ) -> int | None:
        first, second, both = shadow
        differing = [
            d for d, (a, b) in enumerate(zip(first.shape, both.shape, strict=False)) if a != b
        ]
        if first.dim() != both.dim() or len(differing) > 1:
            raise NotByRowsError("its output has the batch's rows in no one dimension")
        dim = differing[0] if differing else None
        if dim is None:
            same = not self._marks.has(both) and _close(first, both) and _close(second, both)
        elif both.shape[dim] != num_rows or first.shape[dim] + second.shape[dim] != num_rows:
            raise NotByRowsError("its output has another number of rows than its input")
        else:
            same = _close(torch.cat([first, second], dim), both) and all(
                _close(made.narrow(dim, 0, 1).expand_as(made), made)
                if part == 3
                else _close(made.narrow(dim, 0, first.shape[dim]), first)
                for part, made in more.items()
            )
        if not (same or trusts_rows):
            raise NotByRowsError(
                "what it gives for a row depends on the other rows (RoundPipeStrategy("
                "trust_rows=True) splits it all the same)"
            )
        return dim


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (StepAborted, torch.OutOfMemoryError, NotByRowsError):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise NotByRowsError(f"it raises {kind} on a part of the batch") from error


class RowMarks(TorchFunctionMode):
    """Marks results of torch's functions that have a marked argument, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._marked: dict[int, weakref.ref[Tensor]] = {}
        self.sees_gradients = False  # whether a hook sees gradients, or what is saved for them
        self.sees_numbers = False  # whether Python was given a number that was computed from rows
        self._calls: list[str] | None = None
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}  # with what stands for each here

    @contextmanager
    def recorded(self) -> Iterator[list[str]]:
        """Give the functions that are called meanwhile, each with its arguments but for values."""
        calls: list[str] = []
        self._calls = calls
        yield calls
        self._calls = None

    def mark(self, tensor: Tensor) -> Tensor:
        self._marked[id(tensor)] = weakref.ref(tensor)
        return tensor

    def has(self, tensor: Tensor) -> bool:
        known = self._marked.get(id(tensor))
        return known is not None and known() is tensor

    def alive(self, *, besides: Iterable[Tensor], settle: Callable[[], None]) -> bool:
        """Return whether anybody keeps a marked tensor that is not one of those given.

        Those are often views, which keep what they are views of. An accelerator's threads keep
        what it works on, and let go a little after `settle` has waited for it.
        """
        given = {id(t) for tensor in besides for t in (tensor, tensor._base)}  # noqa: SLF001

        def is_kept() -> bool:
            return any(ref() is not None and key not in given for key, ref in self._marked.items())

        for release in (gc.collect, settle):
            if not is_kept():
                return False
            release()
        end = time.monotonic() + _LET_GO_SECONDS
        while is_kept():
            if time.monotonic() > end:
                return True
            time.sleep(1e-3)
        return False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = attribute_or_name(func)
        if name in _NUMBERS and args[0].is_floating_point() and args[0].numel() == 1:
            self.sees_numbers |= self.has(args[0])
        args, kwargs = self._with_numbers(name, args, kwargs)
        result = func(*args, **kwargs)
        self.sees_gradients |= func is Tensor.register_hook or has_foreign_saved_tensor_hooks()
        if self._calls is not None and name not in METADATA:
            self._calls.append(f"{name}{map_tensors(self._told, (args, kwargs))}")
        if name not in METADATA and any(map(self.has, tensors_in((args, kwargs)))):
            written = args[:1] if writes_first(name) else kwargs.get("out")
            for tensor in tensors_in((result, written)):
                self.mark(tensor)
        return result

    def _with_numbers(self, name: str, args: Any, kwargs: Any) -> Any:
        """Return arguments with other numbers in a weight of zeros: the first, a bias is later."""
        weights = (x for x in tensors_in((args, kwargs)) if isinstance(x, nn.Parameter))
        weight = next(weights, None)
        if weight is None or name in METADATA | _SUMS or writes_first(name):
            return args, kwargs
        if id(weight) not in self._weights:
            twin: Tensor = weight
            if weight.is_floating_point() and not weight.count_nonzero():
                with torch.no_grad():
                    twin = torch.ones_like(weight, dtype=torch.float32).view(-1).cumsum(0).cos()
                    # a matrix keeps what it gets as large as it is; of a vector roots may be taken
                    twin = twin / weight.shape[-1] ** 0.5 if weight.dim() > 1 else twin.abs()
                    twin = twin.to(weight.dtype).view(weight.shape)
                twin.requires_grad_(weight.requires_grad)
            self._weights[id(weight)] = weight, twin
        twin = self._weights[id(weight)][1]
        return map_tensors(lambda x: twin if x is weight else x, (args, kwargs))

    def _told(self, tensor: Tensor) -> Any:
        is_number = tensor.numel() == 1 and not (self.has(tensor) or tensor.is_floating_point())
        return tensor.tolist() if is_number else (tensor.dtype, tensor.shape, self.has(tensor))


def _compare_gradients(runs: Sequence[_Run], whose: str) -> None:
    """Compare gradients for rows with those for more rows; `whose` names what makes them."""
    shadows = [Shadow(*parts) for parts in zip(*(made for made, _ in runs), strict=True)]
    found: list[Sequence[Tensor | None]] = []
    for part, (made, leaves) in enumerate(runs):
        roots = [
            (root, _cotangent(shadow, part))
            for root, shadow in zip(made, shadows, strict=True)
            if root.requires_grad
        ]
        known = {id(leaf) for leaf, _ in leaves}
        weights: list[Tensor] = [n.variable for n in nodes_of(made) if hasattr(n, "variable")]
        leaves += [(weight, None) for weight in weights if id(weight) not in known]
        found.append(
            torch.autograd.grad(
                [root for root, _ in roots],
                [leaf for leaf, _ in leaves],
                [gradient for _, gradient in roots],
                allow_unused=True,
            )
        )
    pairs = [
        (first + second if dim is None else torch.cat([first, second], dim), both)
        for (_, dim), first, second, both in zip(leaves, *found, strict=True)
        if first is not None and second is not None and both is not None
    ]
    scale = max((_scale_of(both) for _, both in pairs), default=0.0)
    if not all(_close(parts, both, scale=scale) for parts, both in pairs):
        raise NotByRowsError(
            f"the gradients that it makes itself ({whose}) depend on other rows "
            "(RoundPipeStrategy(trust_rows=True) splits it all the same)"
        )


def _rows_after(first: Tensor, both: Tensor, dim: int | None) -> Tensor:
    return both if dim is None else both.tensor_split([first.shape[dim]], dim)[1]


def _alike(tensor: Tensor, dim: int) -> Tensor:
    """Return a tensor of the same shape whose rows are one row, and its tokens one token.

    A block that treats rows independently makes rows of them that are alike, too. One that has no
    more than so much room for all rows, such as experts with a capacity, does not.
    """
    narrowed = range(tensor.dim() - 1) if tensor.is_floating_point() else ()
    for other in {dim, *narrowed}:
        tensor = tensor.narrow(other, 0, 1).expand_as(tensor)
    return tensor.clone()


def _cotangent(shadow: Shadow, part: int) -> Tensor:
    """Return a gradient for what a block gives: nothing for what has no rows."""
    first, second, both = shadow
    dims = [d for d, (a, b) in enumerate(zip(first.shape, both.shape, strict=True)) if a != b]
    if not dims:
        return torch.zeros_like(both)
    whole = _numbers(both)
    num, more = first.shape[dims[0]], second.shape[dims[0]]
    return [whole.narrow(dims[0], 0, num), whole.narrow(dims[0], num, more), whole][part]


def _numbers(like: Tensor) -> Tensor:
    return torch.arange(like.numel(), device=like.device).cos().to(like.dtype).view(like.shape)


def _scale_of(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num(0, 0, 0).max()) if tensor.numel() else 0.0


def _close(one: Tensor, other: Tensor, *, scale: float | None = None) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    scale = _scale_of(other) if scale is None else scale
    tolerance = _TOLERANCES.get(one.dtype, _TOLERANCE)
    return torch.allclose(one, other, rtol=0, atol=tolerance * max(scale, 1e-30), equal_nan=True)
