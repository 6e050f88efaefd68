"""Row operations: functions of torch that compute each row of a batch from that row alone.

User code works with lazy tensors of a whole batch. A row operation is run once for each microbatch:

```
batch        h [7, T, C]  ──  h.view(7, T, 4, -1).transpose(1, 2)  ──▶  [7, 4, T, C / 4]
microbatch   h [3, T, C]  ──  h.reshape(-1, T, 4, C / 4) ...
```

A table says by name which rule tells where a function's results have the rows. The rules follow
dimensions, not sizes: `[T, B, C]` flattened to `[T * B, C]` mixes rows, whatever T and B are. Every
answer is tried on tensors without values, for the batch and for a microbatch of one row.
"""

from __future__ import annotations

# ruff: noqa: SLF001 - PyTorch has no public way to whether any autocast is on
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_flatten, tree_unflatten

from roundpipe_lightning.engine.driver.forms import CallForm, Rows, TensorForm


@dataclass(frozen=True, eq=False, slots=True)
class RowOperation:
    """An operation that keeps the rows of a batch apart.

    Attributes:
        name: Its name in messages and timelines.
        form: Where arguments and results have the rows.
        function: Runs it on the parts of a microbatch, which have the places of the arguments.
        is_differentiable: Whether gradients reach the arguments, where their dtype has gradients.
    """

    name: str
    form: CallForm
    function: Callable[..., Any]
    is_differentiable: bool = True


def row_operation(
    func: Callable[..., Any], args: Any, kwargs: Any, *, is_lazy: Callable[[Any], bool]
) -> RowOperation | None:
    """Return how a call of a torch function is run for each microbatch, None where it mixes rows.

    Args:
        func: As `__torch_function__` gets it.
        args: Positional arguments, lazy tensors among them.
        kwargs: Arguments by name.
        is_lazy: Tells which tensors are lazy: these have `rows` and `num_rows`.
    """
    rule = _RULES.get(func)
    if rule is None or kwargs.get("inplace") or kwargs.get("out") is not None:
        return None
    with torch._C.DisableTorchFunction():  # reads of shapes would come back to the lazy tensors
        autocast = _autocast_now() if torch._C._is_any_autocast_enabled() else None
        arguments = (_description(args, is_lazy), _description(kwargs, is_lazy))
        key = (func, arguments, autocast, torch.get_default_dtype())
        try:
            if key in _CACHE:
                return _CACHE[key]
        except TypeError:  # an argument that has no hash
            return _Call(func, args, kwargs, is_lazy).operation(rule)
        if len(_CACHE) >= _CACHE_SIZE:
            _CACHE.clear()
        operation = _CACHE[key] = _Call(func, args, kwargs, is_lazy).operation(rule)
        return operation


_CACHE_SIZE = 4096
_CACHE: dict[Any, RowOperation | None] = {}


#: Types of many arguments: known at once.
_PLAIN_TYPES = frozenset({int, bool, str, type(None), torch.dtype})


def _description(value: Any, is_lazy: Callable[[Any], bool]) -> Any:
    """Return what the form of a call depends on in an argument; of a float whether it is 0."""
    if type(value) in _PLAIN_TYPES:
        return type(value), value  # 1 == True == 1.0
    if isinstance(value, Tensor):
        lazy: Any = value
        kind = (lazy.rows, lazy.num_rows) if is_lazy(value) else isinstance(value, nn.Parameter)
        return value.shape, value.dtype, value.device, kind
    if isinstance(value, float):
        return float, value == 0
    if isinstance(value, tuple | list):
        return type(value), *[_description(x, is_lazy) for x in value]
    if isinstance(value, dict):
        return tuple([(name, _description(x, is_lazy)) for name, x in value.items()])
    if isinstance(value, slice):  # slices have no hash before Python 3.12
        return slice, *[_description(x, is_lazy) for x in (value.start, value.stop, value.step)]
    return type(value), value


def _autocast_now() -> tuple[torch.dtype | None, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return (_autocast_dtype("cpu"), _autocast_dtype(accelerator.type) if accelerator else None)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    is_enabled = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(
        device_type
    )
    return torch.get_autocast_dtype(device_type) if is_enabled else None


class _MixesRowsError(Exception):
    """An operation may mix rows."""


def _refuse() -> NoReturn:
    raise _MixesRowsError


#: What functions raise for tensors without values, or for arguments that they do not take.
_ERRORS = (
    _MixesRowsError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip


@dataclass(eq=False, slots=True)
class _Operand:
    """A tensor among the arguments.

    Attributes:
        can_be_cut: Whether it may have rows: parameters and lazy tensors without rows may not.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    rows: Rows | None
    can_be_cut: bool

    @classmethod
    def of(cls, tensor: Any, is_lazy: Callable[[Any], bool]) -> _Operand:
        rows = tensor.rows if is_lazy(tensor) else None
        is_input = not is_lazy(tensor) and not isinstance(tensor, nn.Parameter)
        can_be_cut = is_input and tensor.layout is torch.strided
        return cls(tensor.shape, tensor.dtype, tensor.device, rows, can_be_cut)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def row_dim(self) -> int:
        """Dimension of the rows, counted from the last one: -1 for the last."""
        return self.rows.dim - self.ndim if self.rows is not None else _refuse()

    def empty(self, num_rows: int, device: torch.device | str) -> Tensor:
        """Return a tensor without values, for a number of rows."""
        shape = TensorForm.of_batch(self.shape, self.dtype, self.rows).shape_for(num_rows)
        return torch.empty(shape, dtype=self.dtype, device=device)


class _Call:
    """A call whose rule is asked where the results have the rows.

    Args:
        func: As `__torch_function__` gets it.
        args: Positional arguments.
        kwargs: Arguments by name.
        is_lazy: Tells which tensors are lazy.
    """

    def __init__(
        self, func: Callable[..., Any], args: Any, kwargs: Any, is_lazy: Callable[[Any], bool]
    ) -> None:
        self.func = self.function = func
        leaves, self._structure = tree_flatten((args, kwargs))
        lazies: list[Any] = [x for x in leaves if isinstance(x, Tensor) and is_lazy(x)]
        self._row_counts: set[int] = {x.num_rows for x in lazies}
        self.device = lazies[0].device if lazies else torch.device("meta")
        self.leaves = [_Operand.of(x, is_lazy) if isinstance(x, Tensor) else x for x in leaves]
        self.operands = [x for x in self.leaves if isinstance(x, _Operand)]
        self.args, self.kwargs = tree_unflatten(self.leaves, self._structure)

    def operation(self, rule: _Rule) -> RowOperation | None:
        try:
            with torch.no_grad():
                return self._operation(rule)
        except _ERRORS:  # user code gets the error itself when the function runs on values
            return None

    def _operation(self, rule: _Rule) -> RowOperation | None:
        if len(self._row_counts) != 1 or all(x.rows is None for x in self.operands):
            return None
        if self.kwargs.get("device") is not None and rule is not _cast:
            return None
        rows = rule(self)
        leaves, structure = tree_flatten(self.result)
        results = tuple(TensorForm.of_batch(x.shape, x.dtype, rows) for x in leaves)
        for num_rows in (self.num_rows, 1):  # sizes among the arguments may fit the batch alone
            parts, parts_structure = tree_flatten(self._run(self.function, num_rows))
            forms = [(form.shape_for(num_rows), form.dtype) for form in results]
            if parts_structure != structure or [(x.shape, x.dtype) for x in parts] != forms:
                return None
        name = getattr(self.func, "__name__", "")
        if name == "__get__":
            name = self.func.__self__.__name__  # type: ignore[attr-defined]
        places = tuple(x.rows if isinstance(x, _Operand) else None for x in self.leaves)
        form = CallForm(places, results, structure)
        return RowOperation(name, form, self.function, name not in _WITHOUT_GRADIENT)

    def _run(self, function: Callable[..., Any], num_rows: int) -> Any:
        with _values_away(self.device) as device:
            leaves = [
                x.empty(num_rows, device)
                if isinstance(x, _Operand)
                else torch.device(device)
                if isinstance(x, torch.device)
                else x
                for x in self.leaves
            ]
            args, kwargs = tree_unflatten(leaves, self._structure)
            return function(*args, **kwargs)

    # What rules ask

    @property
    def num_rows(self) -> int:
        (num_rows,) = self._row_counts
        return num_rows

    @property
    def repeat(self) -> int:
        return next(x.rows.repeat for x in self.operands if x.rows is not None)

    @cached_property
    def result(self) -> Any:
        """What the function returns for the whole batch, without values."""
        return self._run(self.func, self.num_rows)

    @property
    def output(self) -> Tensor:
        """The first tensor that the function returns."""
        output: Tensor = tree_flatten(self.result)[0][0]
        return output

    @property
    def input(self) -> _Operand:
        """The first argument, which must be the only tensor with rows."""
        first = self.args[0]
        if [x for x in self.operands if x.rows is not None] != [first]:
            _refuse()
        return first  # type: ignore[no-any-return]

    def argument(self, index: int, *names: str, default: Any = None) -> Any:
        if len(self.args) > index:
            return self.args[index]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def align(self, operands: Iterable[_Operand]) -> int:
        """Cut operands that are broadcast with each other; return their `row_dim`."""
        places = {(x.row_dim, x.rows.repeat) for x in operands if x.rows is not None}
        ((row_dim, repeat),) = places if len(places) == 1 else _refuse()
        for x in operands:
            if x.ndim >= -row_dim:
                self.cut(x, Rows(x.ndim + row_dim, repeat))
        return row_dim

    def cut(self, operand: _Operand, rows: Rows) -> None:
        """Cut an operand at the dimension of the rows, unless it is broadcast there."""
        size = operand.shape[rows.dim]
        if operand.rows is None and size != 1:
            if size != self.num_rows * rows.repeat or not operand.can_be_cut:
                _refuse()
            operand.rows = rows


@contextmanager
def _values_away(device: torch.device) -> Iterator[torch.device | str]:
    """Compute without values in the context, on the device that it gives.

    Autocast passes by tensors of the meta device, but not fake ones, which cost more.
    """
    if _autocast_dtype(device.type) is None:
        yield "meta"
        return
    with FakeTensorMode():
        yield device


#: Returns where the results of a call have the rows; refuses calls that may mix them.
_Rule = Callable[[_Call], Rows]


def _elementwise(call: _Call) -> Rows:
    """The arguments' dimensions are those of the result, counted from the last one."""
    row_dim = call.align(call.operands)
    return Rows(call.output.ndim + row_dim, call.repeat)


def _matrices(call: _Call) -> Rows:
    """Functions of batches of matrices."""
    return _elementwise(call) if call.align(call.operands) <= -3 else _refuse()


def _loss(call: _Call) -> Rows:
    return _elementwise(call) if call.kwargs.get("reduction") == "none" else _refuse()


def _cast(call: _Call) -> Rows:
    """Casts: parts are on the devices of their workers, and stay there."""
    for index, leaf in enumerate(call.leaves):
        if isinstance(leaf, str):
            leaf = call.leaves[index] = torch.device(leaf)
        if isinstance(leaf, torch.device | _Operand):
            device = leaf if isinstance(leaf, torch.device) else leaf.device
            if device not in (call.device, torch.device(call.device.type)):
                _refuse()
        elif isinstance(leaf, int) and not isinstance(leaf, bool):  # the number of a device
            _refuse()
    dtype = call.output.dtype
    call.function = lambda x, *_, **__: x.to(dtype)
    return call.args[0].rows or _refuse()  # type: ignore[no-any-return]


def _keep_dims(call: _Call) -> Rows:
    """The dimensions of the first argument are those of the result, counted from the first one."""
    return call.input.rows or _refuse()


def _linear(call: _Call) -> Rows:
    return _keep_dims(call) if call.input.row_dim != -1 else _refuse()


def _embedding(call: _Call) -> Rows:
    """Look rows of a table up; other options write into the table, or count its rows' uses."""
    options = [call.argument(i, name) for i, name in _EMBEDDING_OPTIONS]
    is_lookup = all(option is None or option is False for option in options)
    return _keep_dims(call) if is_lookup else _refuse()


_EMBEDDING_OPTIONS = ((3, "max_norm"), (5, "scale_grad_by_freq"), (6, "sparse"))


def _dropout(call: _Call) -> Rows:
    draws = call.argument(1, "p", default=0.5) and call.argument(2, "training", default=True)
    return _refuse() if draws else _keep_dims(call)


def _normalized(call: _Call) -> Rows:
    is_inside = call.input.row_dim >= -len(call.argument(1, "normalized_shape"))
    return _refuse() if is_inside else _keep_dims(call)


def _first(num_dims: int | None = None) -> _Rule:
    """Functions of batches `[B, C, ...]`, which take a tensor without B, too."""

    def rule(call: _Call) -> Rows:
        is_batch = num_dims in (None, call.input.ndim)
        return (
            _keep_dims(call) if is_batch and call.input.row_dim == -call.input.ndim else _refuse()
        )

    return rule


def _along(index: int, default: Any = None, *, is_shared: bool = False) -> _Rule:
    """Functions along other dimensions than the rows'.

    Args:
        index: Place of the dimensions among the arguments.
        default: What they are where no such argument is there; None: all.
        is_shared: Whether tensors other than the first are for all rows.
    """

    def rule(call: _Call) -> Rows:
        dims = call.argument(index, "dim", "axis", "dims", default=default)
        if isinstance(dims, _Operand):  # max(x, y)
            return _elementwise(call)
        dims = dims if isinstance(dims, tuple | list) else (dims,)
        row_dim = call.input.row_dim if is_shared else call.align(call.operands)
        return _beside(call, dims, row_dim)

    return rule


def _beside(call: _Call, dims: Sequence[Any], row_dim: int) -> Rows:
    ndim = max(x.ndim for x in call.operands)
    if not dims or not all(type(dim) is int for dim in dims):
        _refuse()
    removed, dim = {dim % ndim for dim in dims}, row_dim + ndim
    if dim in removed:
        _refuse()
    is_kept = call.output.ndim == ndim
    return Rows(
        dim if is_kept else dim - sum(removed_dim < dim for removed_dim in removed), call.repeat
    )


def _flip(call: _Call) -> Rows:
    dims = call.argument(1, "dims")
    return _beside(
        call, dims if isinstance(dims, tuple | list) else call.args[1:], call.input.row_dim
    )


def _stack(call: _Call) -> Rows:
    row_dim = call.align(call.operands)
    ndim = call.output.ndim
    dim, rows_dim = call.argument(1, "dim", default=0) % ndim, ndim - 1 + row_dim
    return Rows(rows_dim + (dim <= rows_dim), call.repeat)


def _pad(call: _Call) -> Rows:
    sizes = call.argument(1, "pad")
    pair = -1 - call.input.row_dim
    return _refuse() if any(sizes[2 * pair : 2 * pair + 2]) else _elementwise(call)


def _matmul(call: _Call) -> Rows:
    return _product(call, call.args[0], call.argument(1, "other", "mat2", "vec"))


def _product(call: _Call, first: _Operand, second: _Operand) -> Rows:
    """The rows are a dimension of batches of matrices, or one of matrices that is not summed."""
    factors = [x for x in (first, second) if x.rows is not None]
    if all(x.row_dim <= -3 for x in factors):
        row_dim = call.align((first, second))
    elif factors == [first] and first.row_dim == -2:
        row_dim = -2
    elif factors == [second] and second.row_dim == -1 and second.ndim > 1:
        row_dim = -1
    else:
        _refuse()
    row_dim += (second.ndim == 1) + (first.ndim == 1 and row_dim < -1)  # vectors lose a dimension
    return Rows(call.output.ndim + row_dim, call.repeat)


def _attention(call: _Call) -> Rows:
    """Attention without random numbers; grouped heads are no batch of matrices."""
    options = (call.argument(4, "dropout_p"), call.kwargs.get("enable_gqa"))
    return _refuse() if any(options) else _matrices(call)


def _einsum(call: _Call) -> Rows:
    """Sums named by letters: the letter of the rows must be in the result."""
    inputs, output = call.args[0].replace(" ", "").split("->")
    terms = list(zip(inputs.split(","), call.args[1:], strict=True))
    (letter,) = {term[x.rows.dim] for term, x in terms if x.rows is not None}
    (repeat,) = {x.rows.repeat for _, x in terms if x.rows is not None}
    if "." in inputs or any(term.count(letter) > 1 for term, _ in terms):
        _refuse()
    for term, x in terms:
        if letter in term:
            call.cut(x, Rows(term.index(letter), repeat))
    return Rows(output.index(letter), repeat)


def _sum_with_product(call: _Call) -> Rows:
    summand, first, second = call.args
    rows = _product(call, first, second)
    output = call.output
    call.align((summand, _Operand(output.shape, output.dtype, call.device, rows, can_be_cut=False)))
    return rows


def _reshape(call: _Call) -> Rows:
    """Views that group dimensions: the rows must lead their group.

    `[P, rows, S]`, with the dimensions around the rows multiplied, becomes an output
    where the dimensions before that of the rows have P entries, too.
    """
    sizes, num_before = list(call.output.shape), math.prod(call.input.shape[: call.input.row_dim])
    if 0 in sizes or call.output.dtype != call.input.dtype:
        _refuse()
    place, *_ = [
        place
        for place, size in enumerate(sizes)
        if math.prod(sizes[:place]) == num_before and (size > 1 or call.num_rows == 1)
    ]
    if sizes[place] % call.num_rows:
        _refuse()
    rows = Rows(place, sizes[place] // call.num_rows)
    sizes[place] = -1
    # A part may have strides that the batch has not: `view` could fail.
    call.function = lambda x, *_, **__: x.reshape(sizes)
    return rows


def _view(call: _Call) -> Rows:
    """Views that move or drop dimensions, or take some of their entries."""
    return _rows_in_view(call, *call.args[1:], **call.kwargs)


def _matrix_view(call: _Call) -> Rows:
    return _view(call) if call.input.ndim <= 2 else _refuse()


def _rows_in_view(call: _Call, *args: Any, **kwargs: Any) -> Rows:
    """Return where a view has the dimension of the rows, which gets a stride like no other."""
    x, row_dim = call.input, call.input.row_dim
    strides = list(torch.empty(x.shape, device="meta").stride())
    strides[row_dim] = 2 * math.prod(x.shape) + 1
    mark = (strides[row_dim], x.shape[row_dim]) if 0 not in x.shape else _refuse()
    marked = torch.empty_strided(x.shape, strides, device="meta")
    views = tree_flatten(call.func(marked, *args, **kwargs))[0]
    (place,) = {list(zip(y.stride(), y.shape, strict=True)).index(mark) for y in views}
    return Rows(place, call.repeat)


def _expand(call: _Call) -> Rows:
    rows = _view(call)
    sizes = list(call.output.shape)
    sizes[rows.dim] = -1
    call.function = lambda x, *_, **__: x.expand(sizes)
    return rows


def _index(call: _Call) -> Rows:
    """Indexing: a tensor or list of indices puts its dimensions in the place of that it indexes."""
    items = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    basic: list[Any] = []
    for item in items:
        if isinstance(item, _Operand) and item.dtype in (torch.int64, torch.int32):
            basic += [0, *[None] * item.ndim]
        elif isinstance(item, list) and all(type(x) is int for x in item):
            basic += [0, None]
        elif isinstance(item, _Operand | list | bool):
            _refuse()
        else:
            basic.append(item)
    slices = [item for item in items if isinstance(item, slice)]
    if not {type(x) for y in slices for x in (y.start, y.stop, y.step)} <= {int, type(None)}:
        _refuse()
    num_advanced = sum(isinstance(item, _Operand | list) for item in items)
    if num_advanced > 1 or (num_advanced and any(isinstance(item, int) for item in items)):
        _refuse()
    return _rows_in_view(call, tuple(basic))


_WITHOUT_GRADIENT = frozenset({"detach", "zeros_like", "ones_like", "full_like"})

#: Names of functions, methods and attributes by their rule.
_NAMES: tuple[tuple[_Rule, str], ...] = (
    (
        _elementwise,
        """
        __abs__ __add__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __invert__ __le__ __lt__
        __mod__ __mul__ __ne__ __neg__ __or__ __pos__ __pow__ __radd__ __rdiv__ __rfloordiv__
        __rmod__ __rmul__ __rpow__ __rsub__ __rtruediv__ __sub__ __truediv__ __xor__ __rand__
        __ror__ __rxor__
        abs absolute acos acosh add addcdiv addcmul asin asinh atan atan2 atanh bitwise_and
        bitwise_not bitwise_or bitwise_xor broadcast_tensors ceil celu clamp clamp_max clamp_min
        clip clone contiguous copysign cos cosh deg2rad detach digamma div divide elu eq erf erfc
        erfinv exp exp2 expand_as expit expm1 fix float_power floor floor_divide fmax fmin fmod frac
        full_like ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh
        heaviside hypot isclose isfinite isinf isnan isneginf isposinf ldexp le leaky_relu lerp less
        less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not
        logical_or logical_xor logit logsigmoid lt masked_fill maximum minimum mish mul multiply
        nan_to_num ne neg negative nextafter not_equal ones_like positive pow prelu rad2deg
        reciprocal relu relu6 remainder repeat round rsqrt rsub selu sgn sigmoid sign signbit silu
        sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh tanhshrink
        threshold tile true_divide trunc where xlog1py xlogy zeros_like
        """,
    ),
    (
        _loss,
        """
        binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss
        smooth_l1_loss
        """,
    ),
    (_cast, "bfloat16 bool byte double float half int long short to type type_as"),
    (_keep_dims, "one_hot"),
    (_linear, "nn.functional.linear"),
    (_embedding, "nn.functional.embedding"),
    (_dropout, "nn.functional.dropout"),
    (_normalized, "layer_norm rms_norm"),
    (_first(), "group_norm"),
    (_first(3), "conv1d conv_transpose1d max_pool1d avg_pool1d adaptive_avg_pool1d"),
    (_first(4), "conv2d conv_transpose2d max_pool2d avg_pool2d adaptive_avg_pool2d pixel_shuffle"),
    (_first(5), "conv3d conv_transpose3d max_pool3d avg_pool3d adaptive_avg_pool3d"),
    (
        _along(1),
        """
        all amax amin any argmax argmin cummax cummin cumprod cumsum count_nonzero gather
        log_softmax logcumsumexp logsumexp max mean median min nanmean nanmedian nansum prod
        softmax softmin std std_mean sum var var_mean
        """,
    ),
    (_along(1, is_shared=True), "index_select"),
    (_along(1, -1), "argsort glu mode sort"),
    (_along(1, 0), "cat concat concatenate"),
    (_along(2), "norm repeat_interleave roll take_along_dim vector_norm"),
    (_along(2, -1), "diff kthvalue topk vecdot"),
    (_along(2, 1), "cosine_similarity normalize"),
    (_flip, "flip"),
    (_stack, "stack"),
    (_pad, "nn.functional.pad"),
    (_matmul, "__matmul__ bmm matmul mm mv"),
    (_sum_with_product, "addmm baddbmm"),
    (_attention, "scaled_dot_product_attention"),
    (_einsum, "einsum"),
    (_matrices, "cdist tril triu"),
    (_reshape, "flatten ravel reshape squeeze unflatten unsqueeze view"),
    (_expand, "expand broadcast_to"),
    (
        _view,
        """
        adjoint chunk diagonal mH mT moveaxis movedim narrow permute select split
        split_with_sizes swapaxes swapdims t tensor_split transpose unbind unfold
        """,
    ),
    (_matrix_view, "H T"),
    (_index, "__getitem__"),
)


def _rules() -> Iterator[tuple[Any, _Rule]]:
    places = (torch, Tensor, functional, torch.special, torch.linalg)
    for rule, names in _NAMES:
        for name in names.split():
            *path, name = name.split(".")
            for place in places if not path else (functional,):
                function = getattr(place, name, None)
                if isinstance(function, types.GetSetDescriptorType | property):
                    function = function.__get__
                if callable(function):
                    yield function, rule


_RULES: dict[Any, _Rule] = dict(_rules())
