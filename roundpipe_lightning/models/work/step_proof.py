"""Proof that a training step may run once per microbatch: its loss is a weighted mean over rows.

The step runs twice without values, on batches of two numbers of rows. Where a tensor's size differs
between the two, it has the rows. Every operation outside the blocks then has to keep the rows
apart, and in their order, until a mean ends them:

```
ids (rows, 9) ─ embed, blocks ─▶ (rows, 9, 8) ─ head, view ─▶ (9 rows, 64) ─ cross_entropy ─▶ ()
      rows                            rows                         rows            mean over targets
```

What follows a mean has to be linear. What is not known to keep rows apart is taken not to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundpipe_lightning.engine.capture.torch_functions import (
    function_of_user,
    has_foreign_saved_tensor_hooks,
    is_called_from,
    nodes_of,
)
from roundpipe_lightning.engine.capture.trees import map_leaves, map_tensors, tensors_in
from roundpipe_lightning.models.work.meter import without_values

_NUM_ROWS = (97, 101)
_MASKS = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")
_IN_BLOCK = " in a block"


class LossKind(Enum):
    """What the loss of a batch is of the losses of its microbatches."""

    ROWS = "rows"  # their mean, each weighted by its rows
    TARGETS = "targets"  # their mean, each weighted by its targets


class Unproven(BaseException):
    """Why a step may not run once per microbatch."""


@dataclass(frozen=True)
class _Rows:
    """A tensor with rows, `num_each` entries of a dimension for each."""

    dim: int
    num_each: int
    are_numbers: bool = False  # whether it holds the numbers of the rows


@dataclass(frozen=True)
class _Reduced:
    """A tensor without rows that a mean over them has given, or what is linear in it."""

    kind: LossKind
    targets: tuple[int, ...] = ()  # what says which targets a mean counts


@dataclass(frozen=True)
class _Mixed:
    """A tensor that depends on rows in another way."""

    reason: str


_State: TypeAlias = _Rows | _Reduced | _Mixed | None  # None: no row goes into it


@dataclass(kw_only=True)
class _Op:
    """One operation; `name` is that of a block's call where it has no function."""

    name: str
    tags: Sequence[Any] = ()
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    taken: Sequence[Tensor] = ()
    made: Sequence[Tensor]
    written: Sequence[Tensor] = ()


@dataclass(kw_only=True)
class _Run:
    """What a step did on so many rows.

    Attributes:
        ops: What it computed outside the blocks, and the calls of these.
        logged: What it logged.
    """

    inputs: list[Tensor]
    ops: list[_Op] = field(default_factory=list)
    loss: Tensor | None = None
    logged: list[Any] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


_SETTERS: Any = (Tensor.data.__set__, Tensor.grad.__set__)  # type: ignore[attr-defined, union-attr]


class _Numbers(TorchFunctionMode):
    """Notes the numbers that tensors without values are made of, and refuses hooks and setters."""

    def __init__(self, ops: list[_Op], tracer: _Tracer) -> None:
        super().__init__()
        self._ops = ops
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            whose = _IN_BLOCK if self._tracer.is_paused else ""
            raise Unproven(f"a hook sees the gradient of a tensor{whose}")
        if func in _SETTERS and not self._tracer.is_paused:
            raise Unproven("it sets `data` or `grad` of a tensor")
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor):
            data = args[func is Tensor.new_tensor :] or tuple((kwargs or {}).values())
            if not isinstance(data[0], Tensor):
                self._ops.append(_Op(name="tensor", args=data[:1], made=[result]))
        return result


class _Tracer(TorchDispatchMode):
    def __init__(self, run: _Run, num_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ops, self._hidden = run.ops, run.hidden
        self._num_rows = num_rows
        self.is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() == "aten::_local_scalar_dense":
            if not is_called_from(*_MASKS):
                raise Unproven("it reads the value of a tensor")
            return False  # whether a mask leaves all: the same is computed if not
        result = without_values(func, args, kwargs)
        if has_foreign_saved_tensor_hooks():
            raise Unproven("hooks see the tensors that are saved for gradients")
        if self.is_paused:
            self._hidden += _tensors(result)
            # Experts with a capacity count who comes first. Small numbers are other sizes, too.
            is_count = func.overloadpacket is torch.ops.aten.cumsum and self._num_rows in _NUM_ROWS
            if is_count and args[0].dim() and args[0].shape[args[1]] % self._num_rows == 0:
                raise Unproven("a block counts along the rows (cumsum)")
        else:
            declared = func._schema.arguments  # noqa: SLF001
            written = [
                kwargs.get(argument.name, value)
                for argument, value in zip_longest(declared, args)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            self._ops.append(
                _Op(
                    name=func._schema.name.removeprefix("aten::"),  # noqa: SLF001
                    tags=func.tags,
                    args=args,
                    kwargs=kwargs,
                    taken=_tensors((args, kwargs)),
                    made=_tensors(result),
                    written=_tensors(written),
                )
            )
        return result

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a block's `forward` that counts as one operation."""

        def call(*args: Any, **kwargs: Any) -> Any:
            taken = _tensors((args, kwargs))
            versions = [tensor._version for tensor in taken]
            before, self.is_paused = self.is_paused, True
            try:
                result = forward(*args, **kwargs)
            finally:
                self.is_paused = before
            if not before:
                _check_gradients(_tensors(result), beyond=taken, whose=_IN_BLOCK)
                written = [t for t, v in zip(taken, versions, strict=True) if t._version != v]
                self._ops.append(
                    _Op(name="block", taken=taken, made=_tensors(result), written=written)
                )
            return result

        return call


def _tensors(node: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(node) if isinstance(leaf, Tensor)]


def prove_step(
    *,
    batch: Any,
    run: Callable[[Any, Callable[[Callable[..., Any]], Callable[..., Any]]], tuple[Any, list[Any]]],
    sizes: Sequence[int] = (),
    divided: Set[int] | None = None,
) -> LossKind:
    """Return what the loss of a batch is of the losses of its microbatches.

    Args:
        batch: A batch, of which only shapes and dtypes are looked at.
        run: Runs the step on a copy of the batch without values. It wraps the blocks' `forward`
            with what it is given, and returns the loss, and what was logged.
        sizes: Numbers of rows with which it has to compute the same, too.
        divided: Dimensions along which blocks were seen to treat entries independently; None:
            where the rows are.

    Raises:
        Unproven: With the reason, if no proof is found.
    """
    num_rows: set[int | None] = set()

    def look(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            raise Unproven("the batch has more than tensors")
        num_rows.add(leaf.shape[0] if leaf.dim() else None)
        return leaf

    map_leaves(look, batch)
    if len(num_rows) != 1 or None in num_rows:
        raise Unproven("the batch's tensors have not all the same first dimension")
    runs = [_run(batch, number, run) for number in _NUM_ROWS]
    for number in sizes:
        if _computed(_run(batch, number, run)) != _computed(runs[0]):
            raise Unproven("it computes something else for another number of rows")
    proof = _Proof(*runs)
    kind = proof.kind()
    if divided is not None and proof.block_dims != divided:
        raise Unproven("blocks were not seen to keep the batch's rows apart")
    return kind


def _computed(run: _Run) -> list[str]:
    """Return what a run computes, but for what depends on how tensors lie in memory."""
    moved = _VIEWS | _MOVES | _SAME | _CONSTANT | {"slice"}
    return [op.name for op in run.ops if op.name not in moved]


def _run(batch: Any, num_rows: int, run: Callable[..., Any]) -> _Run:
    def sized(tensor: Tensor) -> Tensor:
        return torch.empty((num_rows, *tensor.shape[1:]), dtype=tensor.dtype, device="meta")

    given = map_tensors(sized, batch)
    made = _Run(inputs=tensors_in(given))
    tracer = _Tracer(made, num_rows)
    with tracer, _Numbers(made.ops, tracer):
        loss, logged = run(given, tracer.around)
    made.loss, made.logged = loss, logged
    return made


class _Proof:
    """Follows the rows through two runs of a step."""

    def __init__(self, one: _Run, other: _Run) -> None:
        names = [op.name for op in one.ops], [op.name for op in other.ops]
        if names[0] != names[1] or len(one.logged) != len(other.logged):
            raise Unproven("it computes something else for another number of rows")
        self._runs = one, other
        self._states: dict[int, _State] = {}
        self._sharing: dict[int, list[Tensor]] = {}  # tensors that the step made, by their memory
        self._given: set[int] = set()  # memory that it did not make
        self.block_dims: set[int] = set()  # where the rows are in what blocks take

    def kind(self) -> LossKind:
        one, other = self._runs
        for a, b in zip(one.inputs, other.inputs, strict=True):
            self._states[id(a)] = self._rows_of(a, b)
            self._given.add(_memory(a))
        for hidden in one.hidden:
            self._states[id(hidden)] = _Mixed("a block leaves it beside its output")
        for mine, theirs in zip(one.ops, other.ops, strict=True):
            self._follow(mine, theirs)
        if not isinstance(one.loss, Tensor):
            raise Unproven("it returns no loss")
        _check_gradients([one.loss])
        state = self._states.get(id(one.loss))
        if not isinstance(state, _Reduced):
            raise Unproven(_reason(state))
        for value, again in zip(one.logged, other.logged, strict=True):
            logged = self._states.get(id(value))
            if logged is not None and logged != state:
                raise Unproven(f"it logs what is no such mean: {_reason(logged)}")
            if not isinstance(value, Tensor) and value != again:
                raise Unproven("it logs a number that depends on the rows")
        return state.kind

    def _rows_of(self, a: Tensor, b: Tensor) -> _State:
        """Return the rows of a tensor: where its sizes differ; None if they do not."""
        if a.dim() != b.dim():
            return _Mixed("a tensor has more dimensions for more rows")
        dims = [d for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
        if not dims:
            return None
        each = [a.shape[dims[0]] / _NUM_ROWS[0], b.shape[dims[0]] / _NUM_ROWS[1]]
        if len(dims) > 1 or each[0] != each[1] or each[0] != int(each[0]):
            return _Mixed("rows are compared with each other, or left out")
        return _Rows(dims[0], int(each[0]))

    def _follow(self, op: _Op, other: _Op) -> None:
        for a, b in zip(op.taken, other.taken, strict=True):
            if id(a) not in self._states:
                if _memory(a) not in self._sharing:
                    self._given.add(_memory(a))
                if not (a.is_meta or b.is_meta) and not (a is b or torch.equal(a, b)):
                    self._states[id(a)] = _Mixed("it computes with the number of rows")
        taken = [self._states.get(id(tensor)) for tensor in op.taken]
        number = _Mixed("it computes with the number of rows")
        differs = _settings(op) != _settings(other)
        for a, b in zip(op.made, other.made, strict=True):
            rows = self._rows_of(a, b)
            state = number if differs else self._state_of(op, taken, a, rows)
            self._states[id(a)] = state
            if _memory(a) not in self._given:
                self._sharing.setdefault(_memory(a), []).append(a)
        made = set(map(id, op.made))
        for tensor in op.written:
            if _memory(tensor) in self._given:
                raise Unproven("it writes into the batch, a parameter or a buffer")
            state = self._states.get(id(tensor))
            by_rows = isinstance(state, _Rows)
            is_known = id(tensor) in made or (op.name == "block" and by_rows)
            if not (any(taken) or differs or state):
                continue  # a constant into a constant
            for one in self._sharing.get(_memory(tensor), ()):
                stays = is_known and by_rows and isinstance(self._states[id(one)], _Rows)
                if not (stays or (one is tensor and is_known)):
                    self._states[id(one)] = _mixing(op)

    def _state_of(self, op: _Op, taken: Sequence[_State], made: Tensor, rows: _State) -> _State:
        mixed = next((s for s in (*taken, rows) if isinstance(s, _Mixed)), None)
        if mixed is not None:
            return mixed
        if torch.Tag.nondeterministic_seeded in op.tags and op.name not in _DROPOUTS:
            return _Mixed(f"it draws random numbers ({op.name})")
        if any(isinstance(state, _Reduced) for state in taken):
            return _linear(op, taken, rows)
        if not any(isinstance(state, _Rows) for state in taken):
            if rows is None or op.name in _CONSTANT:
                return rows
            if op.name == "arange" and not made.is_floating_point() and rows == _Rows(0, 1):
                return _Rows(0, 1, are_numbers=True)
            return _Mixed(f"it numbers the rows, or the like ({op.name})")
        if rows is None:
            return self._reduction(op, taken)
        assert isinstance(rows, _Rows)
        if op.name == "index":
            return rows if self._looks_up_rows(op, made, rows) else _mixing(op)
        if any(isinstance(state, _Rows) and state.are_numbers for state in taken):
            moved = op.name in _VIEWS or op.name in _MOVES or op.name in _SAME
            if not (moved and self._keeps_rows(op, taken, made, rows)):
                return _mixing(op)
            return replace(rows, are_numbers=True)
        return rows if self._keeps_rows(op, taken, made, rows) else _mixing(op)

    def _keeps_rows(self, op: _Op, taken: Sequence[_State], made: Tensor, rows: _Rows) -> bool:
        """Return whether every row of what was made follows from the same row of what was taken."""
        with_rows = [
            (tensor, state)
            for tensor, state in zip(op.taken, taken, strict=True)
            if isinstance(state, _Rows)
        ]
        (tensor, state), *others = with_rows
        if op.name in _VIEWS:
            lead = math.prod(tensor.shape[: state.dim]) == math.prod(made.shape[: rows.dim])
            return lead and not others
        if any(one.num_each != rows.num_each for _, one in with_rows):
            return False
        if torch.Tag.pointwise in op.tags or op.name in _POINTWISE:
            return all(x.dim() - one.dim == made.dim() - rows.dim for x, one in with_rows)
        if op.name in _JOINS:
            dim = op.args[1] if len(op.args) > 1 else op.kwargs.get("dim", 0)
            return bool(dim % made.dim() != rows.dim)
        if op.name == "gather":
            return taken == [rows, rows] and op.args[1] % made.dim() != rows.dim
        if op.name in ("nll_loss_forward", "nll_loss2d_forward"):
            return all(one.dim == rows.dim == 0 for _, one in with_rows)
        if op.name == "block":
            self.block_dims.add(state.dim)
            return True
        if others:
            return False
        if op.name in ("mm", "addmm"):
            return taken[-2] == state == rows and rows.dim == 0
        if op.name == "embedding":
            return taken[0] is None
        if op.name in _LEADING:
            is_padded = op.name == "constant_pad_nd" and len(op.args[1]) == 2 * made.dim()
            return taken[0] == state == rows and rows.dim == 0 and not is_padded
        return op.name in _MOVES or (op.name in _ALONG and state.dim not in _dims(op, tensor))

    def _looks_up_rows(self, op: _Op, made: Tensor, rows: _Rows) -> bool:
        """Return whether every row of `x[i, j]` follows from the same row of `x`, `i` and `j`."""
        source, indices = op.args[0], op.args[1]
        state = self._states.get(id(source))
        for dim, index in enumerate(indices):
            of_index = None if index is None else self._states.get(id(index))
            if not isinstance(of_index, _Rows):
                if isinstance(state, _Rows) and dim == state.dim and index is not None:
                    return False
                continue
            num_each = state.num_each if isinstance(state, _Rows) and dim == state.dim else 0
            if num_each > 1:  # not its rows are numbered
                return False
            if of_index.are_numbers is not bool(num_each) or of_index.num_each != rows.num_each:
                return False
            if index.dim() - of_index.dim != made.dim() - rows.dim:
                return False
        return True

    def _reduction(self, op: _Op, taken: Sequence[_State]) -> _State:
        if op.name in ("nll_loss_forward", "nll_loss2d_forward"):
            lead = all(isinstance(state, _Rows) and state.dim == 0 for state in taken[:2])
            if not lead or taken[0] != taken[1] or any(taken[2:]):
                return _mixing(op)
            if int(op.args[3]) == 1:
                counted = (id(op.args[1]), id(op.args[2]), int(op.args[4]))
                return _Reduced(LossKind.TARGETS, counted)
            return _SUM
        if op.name in _LOSSES:
            places = {
                (tensor.dim() - state.dim, state.num_each)
                for tensor, state in zip(op.taken, taken, strict=True)
                if isinstance(state, _Rows)
            }
            if len(places) > 1:
                return _Mixed("rows are compared with each other, or left out")
            reduction = [arg for arg in op.args[2:] if isinstance(arg, int)] or [1]
            return _SUM if reduction[0] == 2 else _Reduced(LossKind.ROWS)
        if op.name == "mean":
            return _Reduced(LossKind.ROWS)
        return _SUM if op.name == "sum" else _mixing(op)


_SUM = _Mixed("it sums over rows")


def _check_gradients(
    made: Sequence[Tensor], *, beyond: Sequence[Tensor] = (), whose: str = ""
) -> None:
    """Refuse gradients that code of the user's makes: it may look at those of all rows."""
    for node in nodes_of(made, beyond=beyond):
        if getattr(node, "_forward_cls", None) is BackwardHookFunction:
            raise Unproven("a hook sees the gradients of a module")
        if name := function_of_user(node):
            raise Unproven(f"it has gradients of its own ({name}){whose}")


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _settings(op: _Op) -> list[Any]:
    """Return an operation's numbers, but for those that only say how many rows there are."""
    if op.name in ("full", "new_full"):
        return [op.args[-1]]
    if op.name == "arange":
        return [*op.args[:-1][:1], *op.args[2:]]  # where it begins, and its step
    if op.name in _SIZED:
        return []
    leaves = tree_leaves((op.args, dict(op.kwargs)))
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor)]


def _mixing(op: _Op) -> _Mixed:
    return _Mixed(f"its rows are not known to stay apart ({op.name})")


def _reason(state: _State) -> str:
    if isinstance(state, _Mixed):
        return state.reason
    return "it depends on no row" if state is None else "its rows are not reduced alike"


def _linear(op: _Op, taken: Sequence[_State], rows: _State) -> _State:
    """Return the state of what is made of a mean over rows."""
    reduced = [state for state in taken if isinstance(state, _Reduced)]
    name = op.name.removesuffix("_")
    is_linear = (
        name in ("add", "sub", "neg")
        or op.name in _VIEWS | _MOVES | _SAME
        or (name == "mul" and len(reduced) == 1)
        or (name == "div" and taken[1:] in ([], [None]) and not op.kwargs.get("rounding_mode"))
    )
    if is_linear and rows is None and set(taken) <= {reduced[0], None}:
        return reduced[0]
    return _Mixed(f"it computes with a mean over rows ({op.name})")


def _dims(op: _Op, tensor: Tensor) -> set[int]:
    """Return the dimensions along which an operation looks, of those that it leaves as long."""
    if op.name in _NORMS:
        return set(range(tensor.dim() - len(op.args[1]), tensor.dim()))
    place = {"split": 2, "split_with_sizes": 2, "slice": 1, "cumsum": 1}.get(
        op.name, 1 if "softmax" in op.name else None
    )
    if place is None:
        return set()  # what it looked along is gone
    dim = op.args[place] if len(op.args) > place else op.kwargs.get("dim", 0)
    start, end = (*op.args[2:4], None, None)[:2]
    is_all = not start and end in (None, tensor.shape[dim], torch.iinfo(torch.int64).max)
    return set() if op.name == "slice" and is_all else {dim % tensor.dim()}


_DROPOUTS = frozenset({"native_dropout"})
_CONSTANT = frozenset(
    """
    empty empty_like empty_strided expand full full_like new_empty new_full new_ones new_zeros ones
    ones_like repeat scalar_tensor zeros zeros_like
    """.split()
)
_POINTWISE = frozenset(
    """
    _to_copy clone copy copy_ detach alias lift_fresh fill_ zero_ zeros_like ones_like full_like
    empty_like masked_fill masked_fill_ where native_dropout contiguous floor_divide
    """.split()
)
_SIZED = (_CONSTANT - {"ones_like", "zeros_like", "full_like", "scalar_tensor"}) | {
    "view",
    "_unsafe_view",
    "reshape",
    "_reshape_alias",
    "slice",
}
_SAME = frozenset("_to_copy clone detach alias lift_fresh".split())
_VIEWS = frozenset(
    "view _unsafe_view reshape _reshape_alias unsqueeze squeeze expand flatten".split()
)
_MOVES = frozenset("permute transpose t".split())
_NORMS = frozenset("native_layer_norm _fused_rms_norm rms_norm".split())
_ALONG = _NORMS | frozenset(
    """
    slice select split split_with_sizes unbind _softmax _log_softmax cumsum sum mean amax amin max
    min argmax argmin any all logsumexp linalg_vector_norm
    """.split()
)
_JOINS = frozenset("cat stack".split())
_LEADING = frozenset(
    "convolution constant_pad_nd max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d".split()
)
_LOSSES = frozenset(
    """
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    soft_margin_loss
    """.split()
)
