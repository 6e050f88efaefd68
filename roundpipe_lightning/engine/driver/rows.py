"""Trials: where the tensors of a block's call have the batch's rows, and whether rows stay apart.

A block runs on a few of the first rows, five times. If rows are small, `...` are as many as there
are in the batch, else none:

```
1  [a]             shapes for one row
2  [a, b * 100]    shapes for two; a's results do not depend on the values of other rows,
3  [a, c * -100]   whatever these are,
4  [b, a, a, ...]  nor on its place or on the number of rows
5  [a, a, a, ...]  rows and tokens alike: all go to the same expert, which may have no more room
```

Values alone do not tell enough, so the runs are watched:

- Operations get a larger weight in place of a small one (a LayerScale of 1e-6, a gate of zeros),
  which would hide what it multiplies. What a block adds to an argument is compared, not the sum.
- Random draws are constants: dropout and DropPath would look like a dependence on other rows.
- A tensor without rows that is computed from rows (an auxiliary loss) is refused, even where it has
  the same value for all of them.
- Code that takes a number from rows may go by it, for values that are not among these rows.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from roundpipe_lightning.engine.driver.forms import CallForm, Rows, TensorForm
from roundpipe_lightning.engine.driver.row_watch import NumberWatch, RowWatch, cosines

RunBlock: TypeAlias = Callable[[Sequence[Any]], tuple[Sequence[Any], TreeSpec]]
"""Runs a block on flat arguments; returns its flat results and their structure."""

_Reading: TypeAlias = tuple[Rows | None, ...]
_TrialRow: TypeAlias = tuple[int, Callable[[Tensor, int], Tensor]]
"""One of the first rows, by its index, and what is made of it: of a tensor, by rows of `dim`."""

_NUM_FIRST = 3
_MOST_READINGS = 12
_MOST_BYTES = 2**20  # of the rows of a run with more than three
_OUTLIERS = 0.01  # share of the values of tokens that rounding may send to another expert
_LAYER_NUMBER = re.compile(r"(layer|block)_?(idx|index|id|number)")


class MixedRowsError(Exception):
    """A call cannot be made for parts of the batch.

    Attributes:
        reason: What the block does: a sentence's end, after the block's name.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotABlockError(MixedRowsError):
    """A call cannot be made on a worker at all."""


class _ReadingError(MixedRowsError):
    """The rows may lie elsewhere in the arguments than was tried."""


class _RaisedError(_ReadingError):
    """The block raised an error."""


@dataclass(frozen=True, slots=True)
class LazyArgument:
    """An argument that workers compute.

    Attributes:
        form: Its form.
        take: Returns the values of the rows from a start to a stop; without rows: all values.
    """

    form: TensorForm
    take: Callable[[int, int], Tensor]


@dataclass(frozen=True, slots=True)
class FormTrial:
    """The form of a call, found by running its block on a few rows.

    Attributes:
        form: The form.
        num_rows: Rows of the batch.
    """

    form: CallForm
    num_rows: int


def find_form(
    run_block: RunBlock,
    arguments: Sequence[Any],
    *,
    num_rows: int | None = None,
    buffers: Sequence[Tensor] = (),
    trusts_rows: bool = False,
) -> FormTrial:
    """Find where the tensors of a call have the batch's rows, by running it on a few of them.

    Args:
        run_block: Runs the block once. It is called five times, and again for each other way to
            read where the arguments have rows. Objects among these are passed as they are.
        arguments: Flat `(args, kwargs)`: a `LazyArgument` for each tensor that workers compute,
            other tensors and plain values. Parameters never have rows.
        num_rows: Rows of the batch; None: the first tensor tells, by dimension 0 or 1.
        buffers: Tensors that the block must not write into. They keep their values.
        trusts_rows: Take the rows to be independent: only shapes are found, by two runs.

    Raises:
        MixedRowsError: If the call cannot be made for parts of the batch.
    """
    values = [
        x.take(0, min(_NUM_FIRST, num_rows or _NUM_FIRST)) if isinstance(x, LazyArgument) else x
        for x in arguments
    ]
    first_error: _ReadingError | None = None
    for size, reading in _readings(arguments, num_rows):
        trial = _Trial(run_block, values, reading, size, buffers)
        try:
            return FormTrial(trial.trust_rows() if trusts_rows else trial.check_rows(), size)
        except _ReadingError as error:
            is_clearer = isinstance(first_error, _RaisedError) > isinstance(error, _RaisedError)
            if first_error is None or is_clearer:
                first_error = error
    raise first_error or MixedRowsError("none of its arguments has the batch's rows")


def form_key(
    modules: Iterable[tuple[str, type, Mapping[str, Any]]],
    arguments: Sequence[Any],
    *,
    num_rows: int | None,
    context: Hashable,
) -> Hashable:
    """Return a key that is equal for calls of the same form, such as those of equal layers.

    Args:
        modules: The name, the class and `vars` of each module in the block.
        arguments: As those of `find_form`.
        num_rows: As that of `find_form`.
        context: The structure of the arguments, autocast and whatever else a form depends on.
    """

    def argument_key(value: Any) -> Any:
        if isinstance(value, LazyArgument):
            return value.form
        if isinstance(value, Tensor):
            sizes = ("rows" if size == num_rows else size for size in value.shape)
            return (value.dtype, isinstance(value, nn.Parameter), *sizes)
        return _plain_key(value)

    keys = tuple((name, kind, *_module_key(values)) for name, kind, values in modules)
    return keys, tuple(map(argument_key, arguments)), context


def _module_key(values: Mapping[str, Any]) -> Iterator[Hashable]:
    for name, value in values.items():
        if name in ("_parameters", "_buffers"):
            for key, tensor in value.items():
                yield key, None if tensor is None else (tensor.shape, tensor.dtype)
        elif name.endswith("_hooks"):
            yield len(value)
        elif not (name.startswith("_") or _LAYER_NUMBER.search(name) or isinstance(value, float)):
            yield name, _plain_key(value)


def _kind_of(result: Any) -> Any:
    return (result.dtype,) if isinstance(result, Tensor) else _plain_key(result)


def _plain_key(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain_key, value))
    return getattr(value, "__code__", type(value))


# --- readings -------------------------------------------------------------------------------------


def _readings(arguments: Sequence[Any], num_rows: int | None) -> Iterator[tuple[int, _Reading]]:
    """Give ways to read where arguments have rows, with the number of rows, the likeliest first."""
    tensors = [x for x in arguments if _is_batch_tensor(x)]
    lazy = [x.form.rows for x in arguments if isinstance(x, LazyArgument) and x.form.rows]
    if num_rows is not None:
        leads = [(num_rows, lazy[0].dim if lazy else 0)]
    else:
        by_likelihood = sorted(tensors, key=lambda x: not (x.is_floating_point() and x.dim() > 1))
        shape = next((x.shape for x in by_likelihood if x.dim()), ())
        # The last dimension is that of features.
        leads = [(size, dim) for dim, size in enumerate(shape[: max(1, min(2, len(shape) - 1))])]
    shapes = list(dict.fromkeys(x.shape for x in tensors))  # tensors of one shape are read alike
    for size, lead_dim in leads:
        if not size:
            continue
        options = [_options(shape, size, lead_dim) for shape in shapes]
        for choice in itertools.islice(itertools.product(*options), _MOST_READINGS):
            places = iter([dict(zip(shapes, choice, strict=True))[x.shape] for x in tensors])
            reading = tuple(
                x.form.rows
                if isinstance(x, LazyArgument)
                else next(places)
                if _is_batch_tensor(x)
                else None
                for x in arguments
            )
            if any(reading):
                yield size, reading


def _is_batch_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter)


def _options(shape: torch.Size, num_rows: int, lead_dim: int) -> list[Rows | None]:
    """Return the places that rows may have in a tensor. None stands for a tensor of all rows."""
    dims = dict.fromkeys([lead_dim, 0, *range(len(shape) - 1)])
    exact = [Rows(dim) for dim in dims if dim < len(shape) and shape[dim] == num_rows]
    has_several = shape and not exact and shape[0] > num_rows and shape[0] % num_rows == 0
    return [*exact, None, *([Rows(0, shape[0] // num_rows)] if has_several else [])]


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of the block: its arguments, its results and their structure."""

    arguments: Sequence[Any]
    results: Sequence[Any]
    structure: TreeSpec
    num_rows: int


class _Trial:
    """Runs of a block on a few rows, for one way to read where these are."""

    def __init__(
        self,
        run_block: RunBlock,
        values: Sequence[Any],
        reading: _Reading,
        num_rows: int,
        buffers: Sequence[Tensor],
    ) -> None:
        self._run_block = run_block
        self._reading = reading
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]
        self._num_first = min(_NUM_FIRST, num_rows)
        self._values = [
            x if p is None else x.detach().narrow(p.dim, 0, self._num_first * p.repeat)
            for x, p in zip(values, reading, strict=True)
        ]
        sizes = [x.nbytes for x, p in zip(self._values, reading, strict=True) if p is not None]
        most_rows = _MOST_BYTES * self._num_first // max(sum(sizes), 1)
        self._num_rows = max(_NUM_FIRST, min(num_rows, most_rows))
        self._watch: RowWatch | None = None

    def trust_rows(self) -> CallForm:
        return self._form(self._run([_A]), self._run([_A, _B]))

    def check_rows(self) -> CallForm:
        watch = self._watch = RowWatch()
        one_row, two_rows = self._run([_A]), self._run_beside(1, 100.0)
        form = self._form(one_row, two_rows)
        two_other_rows = self._run_beside(2, -100.0)
        more_rows = self._run([_B, *[_A] * (self._num_rows - 1)])
        equal_rows = self._run([(0, _make_alike)] * self._num_rows)
        if watch.sees_numbers:
            raise MixedRowsError("its code takes a number from the rows, and may go by it")
        runs = (one_row, two_rows, two_other_rows, more_rows, equal_rows)
        last = self._num_rows - 1
        pairs = (
            (0.0, (two_rows, 0), (two_other_rows, 0)),  # rounded alike: as many rows
            (_OUTLIERS, (one_row, 0), (two_rows, 0)),
            (_OUTLIERS, (one_row, 0), (more_rows, 1)),
            (_OUTLIERS, (one_row, 0), (more_rows, last)),
            (_OUTLIERS, (equal_rows, 0), (equal_rows, last)),
        )
        for run in runs:
            self._form(one_row, run)
        for slot, result in enumerate(form.results):
            if not isinstance(result, TensorForm):
                continue
            if any(result.shape_for(run.num_rows) != run.results[slot].shape for run in runs):
                raise _ReadingError("the sizes of what it gives depend on the rows")
            if result.rows is None and any(watch.is_marked(run.results[slot]) for run in runs):
                raise _ReadingError("it computes a tensor from all rows together")
            for outliers, part, other_part in pairs:
                values, *bases = self._part(slot, result.rows, *part)
                other_values = self._part(slot, result.rows, *other_part)[0]
                if not _are_close(values, other_values, bases, watch.tolerance, outliers):
                    raise _ReadingError("what it gives for a row depends on the other rows")
        return form

    def _run_beside(self, index: int, factor: float) -> _Run:
        try:
            return self._run([_A, (index, functools.partial(_enlarge, factor=factor))])
        except _RaisedError:  # it may refuse such numbers
            return self._run([_A, (index, _fill)])

    def _run(self, rows: Sequence[_TrialRow]) -> _Run:
        arguments = [
            x if p is None else torch.cat([self._row(x, p, *row) for row in rows], p.dim)
            for x, p in zip(self._values, self._reading, strict=True)
        ]
        # A block may write into them.
        copies = [x.detach().clone() if _is_batch_tensor(x) else x for x in arguments]
        devices = {x.device for x in copies if isinstance(x, Tensor) and x.device.type != "cpu"}
        try:
            with _isolated(devices), contextlib.ExitStack() as modes:
                if self._watch is not None:
                    self._watch.mark_rows(copies, self._reading)
                    modes.enter_context(self._watch)
                    modes.enter_context(NumberWatch(self._watch))
                results, structure = self._run_block(copies)
        except (MixedRowsError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise _RaisedError(f"it does not run on {len(rows)} of the rows ({text})") from error
        finally:
            written_buffers = [pair for pair in self._buffers if not torch.equal(*pair)]
            for buffer, saved_buffer in written_buffers:
                buffer.detach().copy_(saved_buffer)
        if written_buffers:
            raise MixedRowsError("it writes into buffers")
        return _Run(arguments, results, structure, len(rows))

    def _row(
        self, values: Tensor, place: Rows, index: int, change: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        start = min(index, self._num_first - 1) * place.repeat
        row = values.narrow(place.dim, start, place.repeat)
        # Numbers of a mask mean something.
        can_change = row.is_floating_point() and row.numel() and bool((row.abs() < 1e4).all())
        return change(row, place.dim) if can_change else row

    def _form(self, one_row: _Run, more_rows: _Run) -> CallForm:
        """Return the form of a call by its results for one row and for more."""
        pairs = list(zip(one_row.results, more_rows.results, strict=False))
        if one_row.structure != more_rows.structure or any(
            _kind_of(x) != _kind_of(y) for x, y in pairs
        ):
            raise _ReadingError("it gives other values for another number of rows")
        forms = [_tensor_form(x, y) if isinstance(x, Tensor) else x for x, y in pairs]
        return CallForm(self._reading, tuple(forms), one_row.structure)

    def _part(self, slot: int, place: Rows | None, run: _Run, row: int) -> list[Tensor]:
        """Return the result for a row, and arguments that something may have been added to."""
        whole = run.results[slot]
        if place is None:
            return [whole]
        bases = [
            x
            for x, p in zip(run.arguments, self._reading, strict=True)
            if p == place and x.shape == whole.shape and x.dtype == whole.dtype
        ]
        return [x.narrow(place.dim, row * place.repeat, place.repeat) for x in (whole, *bases)]


def _fill(row: Tensor, dim: int) -> Tensor:
    """Return other numbers for a row of zeros, which would hide what they are multiplied by."""
    del dim
    lowest, highest = row.aminmax()
    return row + cosines(row) if lowest == highest else row


def _enlarge(row: Tensor, dim: int, factor: float) -> Tensor:
    """Return a row of larger numbers, in other places: a batch of one row has no other row."""
    dims = [d for d in range(row.dim()) if d != dim]
    return ((row.roll([1] * len(dims), dims) if dims else row) + cosines(row)) * factor


def _make_alike(row: Tensor, dim: int) -> Tensor:
    """Return a row whose tokens are the first one."""
    del dim
    for token_dim in range(row.dim() - 1):
        row = row.narrow(token_dim, 0, 1).expand_as(row)
    return row


_A: _TrialRow = (0, _fill)
_B: _TrialRow = (1, _fill)


def _tensor_form(one_row: Tensor, more_rows: Tensor) -> TensorForm:
    if one_row.layout is not torch.strided:
        raise MixedRowsError("it gives a tensor that is not dense")
    sizes = enumerate(zip(one_row.shape, more_rows.shape, strict=False))
    dims = [dim for dim, (size, other_size) in sizes if size != other_size]
    if one_row.dim() != more_rows.dim() or len(dims) > 1:
        raise _ReadingError("what it gives has the batch's rows in no one dimension")
    rows = Rows(dims[0], one_row.shape[dims[0]]) if dims else None
    return TensorForm(one_row.shape, one_row.dtype, rows)


def _are_close(
    values: Tensor, other_values: Tensor, bases: Sequence[Tensor], tolerance: float, outliers: float
) -> bool:
    """Return whether values agree, but for rounding, in all but a share of them.

    Args:
        bases: Tensors that something may have been added to: rounding is relative to this.
    """
    if not values.numel():
        return True
    if not values.is_floating_point():
        return float((values != other_values).double().mean()) <= outliers
    epsilon = torch.finfo(values.dtype).eps
    x, y, *bases = (tensor.to("cpu", torch.float64) for tensor in (values, other_values, *bases))
    differences = [x - base for base in bases] or [x]
    scale = min(float(difference.abs().nan_to_num(0, 0, 0).amax()) for difference in differences)
    bound = tolerance * scale + 2 * epsilon * x.abs().nan_to_num(0, 0, 0)
    is_close = ((x - y).abs() <= bound) | (x == y) | (x.isnan() & y.isnan())
    return float((~is_close).double().mean()) <= outliers


@contextlib.contextmanager
def _isolated(devices: Iterable[torch.device]) -> Iterator[None]:
    """Record no graph, and leave random generators and other state of the process as they are."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # as modes cannot be compiled
        # A cast of a larger weight in place of a small one must not be kept for later calls.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device in devices:
            stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
        yield
