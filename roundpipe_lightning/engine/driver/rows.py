"""Trials: where the tensors of a block's call have the batch's rows, and whether rows stay apart.

A block runs on one to three rows, a few times:

```
1  [a]             shapes for one row
2  [a, b * 100]    shapes for two rows; what is computed for a is the same beside other rows,
3  [a, c * -100]   whatever their values are,
4  [b, a, a]       wherever a lies, and however many rows there are
5  [a, a, a, ...]  rows and tokens alike: all of them go to the same expert, which may be full
```

Values alone do not tell enough, so the runs are watched:

- a small weight (a LayerScale of 1e-6, a gate of zeros) would hide what it multiplies: operations
  get a larger one, and where a result has the shape of an argument, the difference is compared;
- random numbers are constants, else dropout and DropPath would look like a dependence;
- a tensor without rows that was computed from rows (a block's auxiliary loss) is a mean over the
  rows even where its value is the same for all of them;
- Python code that takes a number from rows may go by it for values that the trial does not have.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from roundpipe_lightning.engine.driver.forms import CallForm, Rows, TensorForm

RunBlock: TypeAlias = Callable[[Sequence[Any]], tuple[Sequence[Any], TreeSpec]]
"""Runs a block on flat arguments; returns its flat results and their structure."""

_Reading: TypeAlias = tuple[Rows | None, ...]
_Row: TypeAlias = tuple[int, float]  # one of the first rows, and what it is multiplied by

_ALIKE = 0.0  # stands for the factor of rows whose tokens are alike
_FIRST_ROWS = 3
_MOST_READINGS = 12
_MOST_ALIKE_BYTES = 2**20
_SMALL_WEIGHT = 1e-2
_OUTLIERS = 0.01  # share of tokens that rounding may send to another expert
_TOLERANCES = {8: 1e-9, 4: 1e-4, 2: 5e-2, 1: 1e-1}  # by bytes of the narrowest dtype computed in
_NUMBERS = frozenset(
    {"__bool__", "__complex__", "__float__", "__index__", "__int__", "item", "tolist", "numpy"}
    | {"__array__", "equal", "allclose", "is_nonzero"}
)
_INDICES = frozenset({"nonzero", "argwhere", "nonzero_static", "nonzero_numpy"})
_DROPOUTS = ("dropout", "attention", "rnn", "lstm", "gru")


class MixedRowsError(Exception):
    """A call cannot be made for parts of the batch.

    Attributes:
        reason: What the block does, to follow its name.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _ReadingError(MixedRowsError):
    """The rows may be elsewhere in the arguments than was tried."""


class _RaisedError(_ReadingError):
    """The block raised an error."""


@dataclass(frozen=True, slots=True)
class LazyArgument:
    """An argument of which the first rows can be computed.

    Attributes:
        rows: Where it has the rows; None: it is the same for all.
        take: Returns the values of the rows from a start to a stop; without rows: all values.
    """

    rows: Rows | None
    take: Callable[[int, int], Tensor]


@dataclass(frozen=True, slots=True)
class FormTrial:
    """What was found by running a block on a few rows.

    Attributes:
        form: The form of the call.
        num_rows: Rows of the batch.
    """

    form: CallForm
    num_rows: int


def find_form(
    run: RunBlock,
    arguments: Sequence[Any],
    *,
    num_rows: int | None = None,
    buffers: Sequence[Tensor] = (),
    trusts_rows: bool = False,
) -> FormTrial:
    """Find where the tensors of a call have the batch's rows, by running it on a few.

    Args:
        run: Runs the block once. It is called two to six times for each way to read the arguments.
            Objects among the arguments are passed as they are.
        arguments: Flat `(args, kwargs)`: `LazyArgument`s, tensors and plain values.
        num_rows: Rows of the batch; None: the first tensor tells, by dimension 0 or 1.
        buffers: Tensors that the block must not write into; they keep their values.
        trusts_rows: Take the rows to be independent: only shapes are found, by two runs.

    Raises:
        MixedRowsError: If the call cannot be made for parts of the batch.
    """
    first_error: _ReadingError | None = None
    for rows_here, reading in _readings(arguments, num_rows):
        trial = _Trial(run, arguments, reading, rows_here, buffers)
        try:
            return FormTrial(trial.find_form(trusts_rows=trusts_rows), rows_here)
        except _ReadingError as error:
            if first_error is None or (
                isinstance(first_error, _RaisedError) and not isinstance(error, _RaisedError)
            ):
                first_error = error
    raise first_error or MixedRowsError("none of its arguments has the batch's rows")


def form_key(block: nn.Module, arguments: Sequence[Any], context: Hashable) -> Hashable:
    """Return a key that is equal for calls of the same form, such as those of equal layers.

    It has the block's classes, hooks, flags, names and the shapes of parameters, and the shapes of
    arguments but for rows. Numbers among the attributes are left out: a layer's index is one.

    Args:
        arguments: Flat: a pair of a tensor's form and its `requires_grad`, or a plain value.
        context: The structure of the arguments, autocast and whatever else the form depends on.
    """
    modules = tuple((name, *_module_key(module)) for name, module in block.named_modules())
    return modules, tuple(map(_plain_key, arguments)), context


def _module_key(module: nn.Module) -> tuple[Any, ...]:
    tables: dict[str, Any] = vars(module)
    tensors = (*tables["_parameters"].items(), *tables["_buffers"].items())
    return (
        type(module),
        tuple((name, None if t is None else (t.shape, t.dtype)) for name, t in tensors),
        tuple((k, _plain_key(v)) for k, v in tables.items() if k[:1] != "_" and k != "forward"),
        tuple(len(v) for k, v in tables.items() if k.endswith("_hooks")),
    )


def _plain_key(value: Any) -> Any:
    if value is None or isinstance(value, (bool, str, TensorForm, torch.dtype)):
        return value
    if isinstance(value, tuple):
        return tuple(map(_plain_key, value))
    return getattr(value, "__code__", type(value))


# --- readings -------------------------------------------------------------------------------------


def _readings(arguments: Sequence[Any], num_rows: int | None) -> Iterator[tuple[int, _Reading]]:
    """Give the ways to read where arguments have rows, the likeliest first."""
    tensors = [x for x in arguments if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]
    lazy = (x.rows.dim for x in arguments if isinstance(x, LazyArgument) and x.rows is not None)
    if num_rows is not None:
        leads = [(num_rows, next(lazy, 0))]
    else:
        floating = [x for x in tensors if x.dim() > 1 and x.is_floating_point()]
        lead = next(iter((*floating, *(x for x in tensors if x.dim()))), None)
        if lead is None:
            return
        # The last dimension is that of features.
        leads = [(lead.shape[dim], dim) for dim in range(max(1, min(2, lead.dim() - 1)))]
    shapes = list(dict.fromkeys(x.shape for x in tensors))
    for size, lead_dim in leads:
        options = [_options(shape, size, lead_dim) for shape in shapes]
        for choice in itertools.islice(itertools.product(*options), _MOST_READINGS):
            by_shape = dict(zip(shapes, choice, strict=True))
            reading = tuple(
                x.rows
                if isinstance(x, LazyArgument)
                else by_shape[x.shape]
                if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)
                else None
                for x in arguments
            )
            if any(reading):
                yield size, reading


def _options(shape: torch.Size, num_rows: int, lead_dim: int) -> list[Rows | None]:
    """Return the places that rows may have in a tensor. No dimension may: all rows share it."""
    dims = dict.fromkeys([lead_dim, *range(len(shape))])
    exact = [Rows(dim) for dim in dims if dim < len(shape) and shape[dim] == num_rows]
    several = shape[0] // num_rows if shape and not exact and num_rows else 0
    is_multiple = several > 1 and shape[0] % num_rows == 0
    return [*exact, None, *([Rows(0, several)] if is_multiple else [])]


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Results:
    """Results of a run, and the arguments that it had."""

    leaves: Sequence[Any]
    structure: TreeSpec
    arguments: Sequence[Any]


class _Trial:
    """Runs of a block on a few rows, for one way to read where these are."""

    def __init__(
        self,
        run: RunBlock,
        arguments: Sequence[Any],
        reading: _Reading,
        num_rows: int,
        buffers: Sequence[Tensor],
    ) -> None:
        self._run_block = run
        self._reading = reading
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._num_first = min(_FIRST_ROWS, num_rows)
        self._first = [self._first_rows(x, p) for x, p in zip(arguments, reading, strict=True)]
        row_bytes = sum(
            x.nbytes for x, place in zip(self._first, reading, strict=True) if place
        ) // max(self._num_first, 1)
        self._num_alike = max(3, min(num_rows, _MOST_ALIKE_BYTES // max(row_bytes, 1)))
        self._watch = _Watch()
        self._modes: tuple[AbstractContextManager[Any], ...] = ()

    def _first_rows(self, argument: Any, place: Rows | None) -> Any:
        if isinstance(argument, LazyArgument):
            return argument.take(0, self._num_first).detach()
        if place is None:
            return argument
        return argument.detach().narrow(place.dim, 0, self._num_first * place.repeat)

    def find_form(self, *, trusts_rows: bool) -> CallForm:
        if trusts_rows:
            return self._form(self._run([(0, 1.0)]), self._run([(0, 1.0), (1, 1.0)]))
        self._modes = (self._watch, _Numbers(self._watch))
        one = self._run([(0, 1.0)])
        beside = [self._run_beside(1, 100.0), self._run_beside(2, -100.0)]
        three = self._run([(1, 1.0), (0, 1.0), (0, 1.0)])
        alike = self._run([(0, _ALIKE)] * self._num_alike)
        form = self._form(one, beside[0])
        if self._watch.sees_numbers:
            raise MixedRowsError("its code takes a number from the rows, and may go by it")
        for results in (beside[1], three, alike):
            self._check_shapes(form, results)
        tolerance = self._watch.tolerance
        for slot, made in enumerate(form.results):
            if not isinstance(made, TensorForm):
                continue
            if made.rows is None:
                every = [r.leaves[slot] for r in (one, *beside, three, alike)]
                if any(map(self._watch.is_marked, every)):
                    raise _ReadingError("it computes a tensor from all rows together")
                pairs = [(_Part(every[0], ()), _Part(x, ()), _OUTLIERS) for x in every[1:]]
            else:
                parts = [self._part(r, slot, made, 0) for r in (one, *beside, alike)]
                late = [self._part(three, slot, made, row) for row in (1, 2)]
                last = self._part(alike, slot, made, self._num_alike - 1)
                pairs = [
                    (parts[1], parts[2], 0.0),
                    *((parts[0], part, _OUTLIERS) for part in (parts[1], *late)),
                    (parts[3], last, _OUTLIERS),
                ]
            if not all(_close(x, y, tolerance, share) for x, y, share in pairs):
                raise _ReadingError("what it gives for a row depends on the other rows")
        return form

    def _run_beside(self, row: int, factor: float) -> _Results:
        try:
            return self._run([(0, 1.0), (row, factor)])
        except _RaisedError:  # it may refuse such numbers
            return self._run([(0, 1.0), (row, 1.0)])

    def _run(self, rows: Sequence[_Row]) -> _Results:
        leaves = [
            self._rows_of(x, place, rows)
            for x, place in zip(self._first, self._reading, strict=True)
        ]
        for leaf, place in zip(leaves, self._reading, strict=True):
            if place is not None:
                self._watch.mark(leaf)
        kept = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
        try:
            with contextlib.ExitStack() as stack:
                for context in (
                    _same_randomness(leaves),
                    torch.no_grad(),
                    _without_autocast_cache(),
                ):
                    stack.enter_context(context)
                for mode in self._modes:
                    stack.enter_context(mode)
                results, structure = self._run_block(leaves)
        except (MixedRowsError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            kind = type(error).__name__
            reason = f"it raises {kind} for {len(rows)} rows ({error})"
            raise _RaisedError(reason) from error
        finally:
            written = [pair for pair in self._buffers if not torch.equal(*pair)]
            for buffer, before in written:
                buffer.detach().copy_(before)
        if written:
            raise MixedRowsError("it writes into buffers")
        return _Results(results, structure, kept)

    def _rows_of(self, first: Any, place: Rows | None, rows: Sequence[_Row]) -> Any:
        if place is None:
            is_own = isinstance(first, Tensor) and not isinstance(first, nn.Parameter)
            return first.detach().clone() if is_own else first
        return torch.cat([self._row(first, place, *row) for row in rows], place.dim)

    def _row(self, first: Tensor, place: Rows, index: int, factor: float) -> Tensor:
        index = min(index, self._num_first - 1)
        row = first.narrow(place.dim, index * place.repeat, place.repeat)
        if not row.is_floating_point() or not row.numel() or not bool(row.isfinite().all()):
            return row
        if factor == _ALIKE:
            for dim in range(row.dim() - 1):
                row = row.narrow(dim, 0, 1).expand_as(row)
            return row
        if factor != 1.0:
            # In other places: what is at the largest place differs, too.
            dims = [dim for dim in range(row.dim()) if dim != place.dim]
            row = row.roll([1] * len(dims), dims) if dims else row
            return (row + _numbers(row)) * factor
        return row + _numbers(row) if bool((row == row.flatten()[0]).all()) else row

    # --- results ----------------------------------------------------------------------------------

    def _form(self, one: _Results, two: _Results) -> CallForm:
        """Return the form of the results for one row and for two."""
        self._check_structure(one, two)
        forms = [
            _form_of(x, y) if isinstance(x, Tensor) else x
            for x, y in zip(one.leaves, two.leaves, strict=True)
        ]
        return CallForm(self._reading, tuple(forms), one.structure)

    def _check_structure(self, one: _Results, other: _Results) -> None:
        if one.structure != other.structure or not all(
            isinstance(y, Tensor) and x.dtype == y.dtype
            if isinstance(x, Tensor)
            else not isinstance(y, Tensor) and _is_equal(x, y)
            for x, y in zip(one.leaves, other.leaves, strict=True)
        ):
            raise _ReadingError("it gives other values for another number of rows")

    def _check_shapes(self, form: CallForm, results: _Results) -> None:
        places = zip(self._reading, results.arguments, strict=True)
        num_rows = next(x.shape[p.dim] // p.repeat for p, x in places if p is not None)
        for made, x in zip(form.results, results.leaves, strict=True):
            if isinstance(made, TensorForm) and made.shape_for(num_rows) != x.shape:
                raise _ReadingError("the sizes of what it gives depend on the rows")

    def _part(self, results: _Results, slot: int, made: TensorForm, row: int) -> _Part:
        """Return what was computed for a row, with the arguments that it may have been added to."""
        assert made.rows is not None, "a result has rows where there is a part for each"
        place, whole = made.rows, results.leaves[slot]

        def part(tensor: Tensor) -> Tensor:
            return tensor.narrow(place.dim, row * place.repeat, place.repeat)

        bases = [
            part(x)
            for x, argument_place in zip(results.arguments, self._reading, strict=True)
            if argument_place == place and x.shape == whole.shape and x.dtype == whole.dtype
        ]
        return _Part(part(whole), bases)


@dataclass(frozen=True, slots=True)
class _Part:
    """Values for a row, and arguments that they may be the sum of with something."""

    values: Tensor
    bases: Sequence[Tensor]


def _form_of(one: Tensor, two: Tensor) -> TensorForm:
    differing = [d for d, (a, b) in enumerate(zip(one.shape, two.shape, strict=False)) if a != b]
    if one.dim() != two.dim() or len(differing) > 1:
        raise _ReadingError("what it gives has the batch's rows in no one dimension")
    if not differing:
        return TensorForm(one.shape, one.dtype, None)
    dim = differing[0]
    if two.shape[dim] != 2 * one.shape[dim]:
        raise _ReadingError("the sizes of what it gives depend on the rows")
    return TensorForm(one.shape, one.dtype, Rows(dim, one.shape[dim]))


def _is_equal(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (
        one == other or not isinstance(one, (bool, int, float, str, torch.Size))
    )


def _close(one: _Part, other: _Part, tolerance: float, outliers: float) -> bool:
    """Return whether values agree, but for rounding, in all but a share of the tokens."""
    x, y = one.values, other.values
    if x.shape != y.shape:
        return False
    if not (x.is_floating_point() or x.is_complex()):
        return float((x != y).float().mean()) <= outliers if x.numel() else True
    x, y = x.to(torch.float64), y.to(torch.float64)
    added = [(x - base.to(torch.float64)) for base in one.bases] or [x]
    scale = (
        min(float(values.abs().nan_to_num(0, 0, 0).amax()) for values in added) if x.numel() else 0
    )
    bound = tolerance * scale + 2 * torch.finfo(one.values.dtype).eps * x.abs()
    is_far = ~(((x - y).abs() <= bound) | (x == y) | (x.isnan() & y.isnan()))
    return float(is_far.float().mean()) <= outliers if x.numel() else True


def _numbers(like: Tensor) -> Tensor:
    numbers = torch.arange(like.numel(), device=like.device, dtype=torch.float32).cos()
    return numbers.to(like.dtype).view(like.shape)


# --- what is watched ------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """While entered: marks what is computed from rows; weights are not small, draws are constants.

    Attributes:
        sees_numbers: Whether Python code was given a number that was computed from rows.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sees_numbers = False
        self._narrowest = 8
        self._marked: set[StorageWeakRef] = set()
        self._weights = WeakTensorKeyDictionary()

    @property
    def tolerance(self) -> float:
        return _TOLERANCES[self._narrowest]

    def mark(self, tensor: Tensor) -> None:
        if tensor.layout is torch.strided:
            self._marked.add(StorageWeakRef(tensor.untyped_storage()))

    def is_marked(self, tensor: Any) -> bool:
        return (
            isinstance(tensor, Tensor)
            and tensor.layout is torch.strided
            and StorageWeakRef(tensor.untyped_storage()) in self._marked
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):  # noqa: SLF001
            result = func(*args, **kwargs)
            self._mark_results(args, kwargs, result)
            return result
        name = func._schema.name.removeprefix("aten::")  # noqa: SLF001
        if not func._schema.is_mutable:  # noqa: SLF001
            args, kwargs = tree_map(self._weight, (args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = _draw_constant(func, name, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if func._schema.is_mutable:  # noqa: SLF001
            self._mark_results(args, kwargs, (result, args[:1], kwargs.get("out")))
        elif not (name.startswith("new_") or name.endswith("_like") or name in _INDICES):
            self._mark_results(args, kwargs, result)
        return result

    def _mark_results(self, args: Any, kwargs: Any, results: Any) -> None:
        is_from_rows = any(map(self.is_marked, tree_leaves((args, kwargs))))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor):
                if tensor.is_floating_point():
                    self._narrowest = min(self._narrowest, tensor.element_size())
                if is_from_rows:
                    self.mark(tensor)

    def _weight(self, value: Any) -> Any:
        """Return a parameter, or one with larger numbers in place of a small one."""
        if not isinstance(value, nn.Parameter) or not value.is_floating_point():
            return value
        if value not in self._weights:
            weight: Tensor = value.detach()
            largest = float(weight.abs().amax()) if weight.numel() else 1.0
            if largest < _SMALL_WEIGHT:
                weight = weight * (0.1 / largest) if largest else _numbers(weight) * 0.1
            self._weights[value] = weight
        return self._weights[value]


class _Numbers(TorchFunctionMode):
    """Sees where Python code takes numbers from rows.

    Several integers, such as those of tokens for each expert, are sizes of parts: what follows
    from these is seen in the results.
    """

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _NUMBERS:
            tensor = args[0]
            if tensor.is_floating_point() or tensor.numel() == 1 or name in ("equal", "allclose"):
                self._watch.sees_numbers |= any(map(self._watch.is_marked, args))
        elif name == "_pack_padded_sequence":  # it reads lengths
            self._watch.sees_numbers |= self._watch.is_marked(args[1])
        return func(*args, **(kwargs or {}))


def _draw_constant(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Draw the same random number for every row; drop nothing."""
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001
    args = [
        0.0 if n in ("p", "dropout_p", "dropout") else x for n, x in zip(names, args, strict=False)
    ]
    kwargs = {n: 0.0 if n == "dropout_p" else x for n, x in kwargs.items()}
    result = func(*args, **kwargs)
    if not any(part in name for part in _DROPOUTS):
        bounds = dict(zip(names, args, strict=False))
        middle = (bounds.get("from", 0.0) + bounds.get("to", 1.0)) / 2 if "uniform" in name else 0.5
        for tensor in tree_leaves(result):
            is_number = tensor.is_floating_point()
            tensor.fill_(1 if "bernoulli" in name else middle if is_number else 0)
    return result


@contextlib.contextmanager
def _same_randomness(leaves: Iterable[Any]) -> Iterator[None]:
    """Leave all random generators as they are."""
    devices = {x.device for x in leaves if isinstance(x, Tensor) and x.device.type != "cpu"}
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    state = random.getstate()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices:
            stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        try:
            yield
        finally:
            random.setstate(state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Cast weights anew: a cast of a larger one in place of a small one must not be kept."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
