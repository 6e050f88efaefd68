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
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

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


class _Rows(NamedTuple):
    """Where a tensor has the rows: `num_each` entries of a dimension for each."""

    dim: int
    num_each: int


@dataclass(frozen=True)
class _Mean:
    """What a mean over rows has given, or what is linear in it."""

    kind: LossKind
    targets: tuple[int, ...] = ()  # what says which targets a mean counts


#: What of the rows goes into a tensor; None: nothing. A text says why it is not known.
_State: TypeAlias = _Rows | _Mean | str | None
_Taken: TypeAlias = Sequence[tuple[Tensor, _Rows]]  # what has rows of what an operation takes


class _Op(NamedTuple):
    """One operation, with its arguments by name; a block's call counts as one."""

    name: str
    given: Mapping[str, Any]
    made: Sequence[Tensor]
    tags: Sequence[Any] = ()
    written: Sequence[Tensor] = ()


_SETTERS: Any = (Tensor.data.__set__, Tensor.grad.__set__)  # type: ignore[attr-defined, union-attr]


class _Numbers(TorchFunctionMode):
    """Notes the numbers that tensors without values are made of, and refuses hooks and setters."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.register_hook:
            whose = _IN_BLOCK if self._run.in_block else ""
            raise Unproven(f"a hook sees the gradient of a tensor{whose}")
        if func in _SETTERS and not self._run.in_block:
            raise Unproven("it sets `data` or `grad` of a tensor")
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor):
            data = args[func is Tensor.new_tensor :] or tuple((kwargs or {}).values())
            if not isinstance(data[0], Tensor):
                self._run.ops.append(_Op("tensor", {"data": data[0]}, [result]))
        return result


class _Run(TorchDispatchMode):
    """What a step does on so many rows.

    Args:
        known: What blocks give that give tensors like the first that they take: they do not run.
        alike: Gets what is found of this; None for others.

    Attributes:
        ops: What it computes outside the blocks, and the calls of these.
        hidden: What is made in blocks.
        in_block: Whether a block runs.
    """

    def __init__(
        self, num_rows: int, known: Mapping[object, Any], alike: dict[object, Any]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known, self._alike = known, alike
        self.ops: list[_Op] = []
        self.hidden: list[Tensor] = []
        self.in_block = False
        self.loss: Any = None
        self.logged: Sequence[Any] = ()
        self._num_rows = num_rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() == "aten::_local_scalar_dense":
            if not is_called_from(*_MASKS):
                raise Unproven("it reads the value of a tensor")
            return False  # whether a mask leaves all: the same is computed if not
        if func is torch.ops.aten.embedding.default and any(args[3:4]):
            raise Unproven("gradients of an embedding depend on its uses (scale_grad_by_freq)")
        result = without_values(func, args, kwargs)
        if has_foreign_saved_tensor_hooks():
            raise Unproven("hooks see the tensors that are saved for gradients")
        if self.in_block:
            self.hidden += tensors_in(result)
            # Experts with a capacity count who comes first. Small numbers are other sizes, too.
            is_count = func.overloadpacket is torch.ops.aten.cumsum and self._num_rows in _NUM_ROWS
            if is_count and args[0].dim() and args[0].shape[args[1]] % self._num_rows == 0:
                raise Unproven("a block counts along the rows (cumsum)")
            return result
        schema = func._schema  # noqa: SLF001
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        written = [
            given.get(argument.name)
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        name, made = schema.name.removeprefix("aten::"), tensors_in(result)
        self.ops.append(_Op(name, given, made, func.tags, tensors_in(written)))
        return result

    def around(self, forward: Callable[..., Any], block: object = None) -> Callable[..., Any]:
        """Return a block's `forward` that counts as one operation, or gives what is known of it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.in_block:
                return forward(*args, **kwargs)
            leaves = tree_leaves((args, kwargs))  # now: a cache is filled later
            given = {"all": [leaf for leaf in leaves if isinstance(leaf, (Tensor, *_PLAIN))]}
            taken = [(tensor, tensor._version) for tensor in tensors_in(given)]
            first = next(iter(tensors_in(given)), torch.empty(0))
            known = self._known.get(block)
            self.in_block = True
            try:
                if known is None:
                    result = forward(*args, **kwargs)
                else:
                    result = map_tensors(lambda _: torch.empty_like(first), known)
            finally:
                self.in_block = False
            made = tensors_in(result)
            is_like = all(t.shape == first.shape and t.dtype == first.dtype for t in made)
            stays = is_like and self._alike.get(block, result) is not None
            self._alike[block] = map_tensors(Tensor.detach, result) if stays else None
            _check_gradients(made, beyond=[tensor for tensor, _ in taken], whose=_IN_BLOCK)
            written = [tensor for tensor, version in taken if tensor._version != version]
            self.ops.append(_Op("block", given, made, written=written))
            return result

        return call


def prove_step(
    *,
    batch: Any,
    run: Callable[[Any, Callable[..., Callable[..., Any]]], tuple[Any, list[Any]]],
    sizes: Sequence[int] = (),
    known: dict[Any, Any] | None = None,
    divided: Set[int] | None = None,
) -> LossKind:
    """Return what the loss of a batch is of the losses of its microbatches.

    Args:
        batch: A batch, of which only shapes and dtypes are looked at.
        run: Runs the step on a copy of the batch without values. It wraps the blocks' `forward`
            with what it is given, and returns the loss, and what was logged.
        sizes: Numbers of rows with which it has to compute the same, too.
        known: What is known of blocks since earlier proofs.
        divided: Dimensions along which blocks were seen to treat entries independently; None:
            where the rows are.

    Raises:
        Unproven: With the reason, if no proof is found.
    """
    leaves: list[Any] = []
    map_leaves(leaves.append, batch)
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise Unproven("the batch has more than tensors")
    if len({leaf.shape[:1] for leaf in leaves}) != 1 or not leaves[0].dim():
        raise Unproven("the batch's tensors have not all the same first dimension")

    def made(num_rows: int) -> _Run:
        one = _Run(num_rows, known or {}, alike)
        given = map_tensors(lambda t: t.new_empty((num_rows, *t.shape[1:]), device="meta"), batch)
        with one, _Numbers(one):
            one.loss, one.logged = run(given, one.around)
        return one

    alike: dict[object, Any] = {}
    runs = [made(number) for number in _NUM_ROWS]
    if not all(_is_the_same(made(number), runs) for number in sizes):
        raise Unproven(_OTHER)
    proof = _Proof(*runs)
    kind = proof.kind()
    if divided is not None and proof.block_dims != divided:
        raise Unproven("blocks were not seen to keep the batch's rows apart")
    if known is not None:
        known.update(alike)
    return kind


def _computed(run: _Run) -> list[tuple[str, Any]]:
    """Return what a run computes and logs, but for what depends on how tensors lie in memory."""
    moved = _MOVED | _CONSTANT | {"slice"}
    logged = [("log", value) for value in run.logged if not isinstance(value, Tensor)]
    return [(op.name, _settings(op)) for op in run.ops if op.name not in moved] + logged


def _is_the_same(run: _Run, runs: Sequence[_Run]) -> bool:
    """Whether a run computes what two others do, whose numbers may differ where theirs do."""
    here, one, other = map(_computed, (run, *runs))
    return len(here) == len(one) and all(
        a == b or (a[0] == b[0] and b != c) for a, b, c in zip(here, one, other, strict=False)
    )


class _Proof:
    """Follows the rows through two runs of a step.

    What is not noted of a tensor shows in its shape: its rows follow from the same rows,
    or it has none and no row goes into it.
    """

    def __init__(self, one: _Run, other: _Run) -> None:
        self._runs = one, other
        self._own: set[int] = set()  # memory that the step made
        self._noted: dict[int, _Mean | str] = {}  # by tensor, and by memory if that was written
        self._numbers: set[int] = set()  # memory that holds the numbers of the rows
        self._hidden = {*map(id, one.hidden)}
        self.block_dims: set[int] = set()  # where the rows are in what blocks take

    def kind(self) -> LossKind:
        one, other = self._runs
        same = [op.name for op in one.ops] == [op.name for op in other.ops]
        if not same or len(one.logged) != len(other.logged):
            raise Unproven(_OTHER)
        for op, again in zip(one.ops, other.ops, strict=True):
            self._follow(op, again)
        if not isinstance(one.loss, Tensor):
            raise Unproven("it returns no loss")
        _check_gradients([one.loss])
        state = self._state(one.loss, other.loss)
        if not isinstance(state, _Mean):
            raise Unproven(_reason(state))
        for a, b in zip(one.logged, other.logged, strict=True):
            if not isinstance(a, Tensor):
                if a != b:
                    raise Unproven("it logs a number that depends on the rows")
            elif (logged := self._state(a, b)) not in (None, state):
                raise Unproven(f"it logs what is no such mean: {_reason(logged)}")
        return state.kind

    def _follow(self, op: _Op, other: _Op) -> None:
        pairs = zip(tensors_in(op.given), tensors_in(other.given), strict=True)
        taken = [(a, self._state(a, b)) for a, b in pairs]
        made, others = {*map(id, op.made)}, {_memory(a) for a, _ in taken} - self._own
        self._own |= {*map(_memory, op.made)} - others
        self._hidden -= made
        differs = _settings(op) != _settings(other)
        for a, b in zip(op.made, other.made, strict=True):
            state = _NUMBER if differs else self._state_of(op, taken, a, _rows_of(a, b))
            if isinstance(state, _Mean | str):
                self._noted[id(a)] = state
        mixes = differs or any(state for _, state in taken)
        for a, b in zip(op.written, other.written, strict=True):
            if _memory(a) not in self._own:
                raise Unproven("it writes into the batch, a parameter or a buffer")
            by_rows = op.name == "block" and isinstance(_rows_of(a, b), _Rows)
            if mixes and id(a) not in made and not by_rows:
                self._noted[id(a)] = _mixing(op)
            if id(a) in self._noted:  # what shares its memory has it, too
                self._noted[_memory(a)] = self._noted[id(a)]

    def _state(self, a: Tensor, b: Tensor) -> _State:
        if id(a) in self._hidden:
            return "a block leaves it beside its output"
        noted = [self._noted[key] for key in (_memory(a), id(a)) if key in self._noted]
        if noted:
            return next((note for note in noted if isinstance(note, str)), noted[0])
        is_same = _memory(a) in self._own or a.is_meta or b.is_meta or torch.equal(a, b)
        return _rows_of(a, b) if is_same else _NUMBER

    def _state_of(
        self, op: _Op, taken: Sequence[tuple[Tensor, _State]], made: Tensor, rows: _State
    ) -> _State:
        states = [state for _, state in taken]
        reasons = [state for state in (*states, rows) if isinstance(state, str)]
        if reasons:
            return reasons[0]
        if torch.Tag.nondeterministic_seeded in op.tags and op.name != "native_dropout":
            return f"it draws random numbers ({op.name})"
        if any(isinstance(state, _Mean) for state in states):
            return _linear(op, states, rows)
        with_rows = [(tensor, state) for tensor, state in taken if isinstance(state, _Rows)]
        if not with_rows:
            if op.name == "arange" and not made.is_floating_point() and rows == _Rows(0, 1):
                self._numbers.add(_memory(made))
            elif rows is not None and op.name not in _CONSTANT:
                return f"it numbers the rows, or the like ({op.name})"
            return rows
        if not isinstance(rows, _Rows):
            return _reduction(op, states, with_rows)
        if op.name == "block":
            self.block_dims.add(with_rows[0][1].dim)
        if op.name == "index":
            keeps = self._looks_up_rows(op, with_rows, made, rows)
        else:
            keeps = _keeps_rows(op, with_rows, made, rows)
            if any(_memory(tensor) in self._numbers for tensor, _ in with_rows):
                keeps &= op.name in _MOVED
                self._numbers.add(_memory(made))
        return rows if keeps else _mixing(op)

    def _looks_up_rows(self, op: _Op, with_rows: _Taken, made: Tensor, rows: _Rows) -> bool:
        """Return whether every row of `x[i, j]` follows from the same row of `x`, `i` and `j`."""
        places = {id(tensor): place for tensor, place in with_rows}
        source = places.get(id(op.given["self"]))
        for dim, index in enumerate(op.given["indices"]):
            is_of_rows = source is not None and source.dim == dim
            if id(index) not in places:
                if is_of_rows and index is not None:
                    return False
                continue
            place, are_numbers = places[id(index)], _memory(index) in self._numbers
            alike = place.num_each == rows.num_each and are_numbers is is_of_rows
            if is_of_rows and source != _Rows(dim, 1):  # not its rows are numbered
                return False
            if not alike or index.dim() - place.dim != made.dim() - rows.dim:
                return False
        return True


def _keeps_rows(op: _Op, with_rows: _Taken, made: Tensor, rows: _Rows) -> bool:
    """Return whether every row of what was made follows from the same row of what was taken."""
    (tensor, place), *others = with_rows
    name, given = op.name, op.given
    if name in _VIEWS:
        lead = math.prod(tensor.shape[: place.dim]) == math.prod(made.shape[: rows.dim])
        return lead and not others
    if any(one.num_each != rows.num_each for _, one in with_rows):
        return False
    if torch.Tag.pointwise in op.tags or name in _POINTWISE:
        return all(x.dim() - one.dim == made.dim() - rows.dim for x, one in with_rows)
    if name in ("cat", "stack"):
        return bool(given.get("dim", 0) % made.dim() != rows.dim)
    if name == "gather":
        both = [one for _, one in with_rows] == [rows, rows]
        return both and given["dim"] % made.dim() != rows.dim
    if name in _NLL:
        return all(one.dim == rows.dim == 0 for _, one in with_rows)
    if name in _OF_ONE and not others:
        # Padded along the rows with (1, -1), a tensor has as many.
        pads_others = len(given.get("pad", ())) // 2 < made.dim() - rows.dim
        return given[_OF_ONE[name]] is tensor and place == rows and pads_others
    along = name in _MOVES or (name in _ALONG and place.dim not in _dims(op, tensor))
    return name == "block" or (along and not others)


def _dims(op: _Op, tensor: Tensor) -> set[int]:
    given, dims = op.given, op.given.get("dim", 0)
    if "normalized_shape" in given:
        dims = range(-len(given["normalized_shape"]), 0)
    elif op.name == "slice":
        all_of_it = None, tensor.shape[dims], torch.iinfo(torch.int64).max
        dims = None if not given.get("start") and given.get("end") in all_of_it else dims
    return {dim % tensor.dim() for dim in ([dims] if isinstance(dims, int) else dims or ())}


def _reduction(op: _Op, states: Sequence[_State], with_rows: _Taken) -> _State:
    given, mean = op.given, _Mean(LossKind.ROWS)
    if op.name in _NLL:
        lead = isinstance(states[0], _Rows) and states[0].dim == 0
        if not lead or states[0] != states[1] or any(states[2:]):
            return _mixing(op)
        counted = id(given["target"]), id(given["weight"]), int(given["ignore_index"])
        mean = _Mean(LossKind.TARGETS, counted)
    elif op.name in _LOSSES:
        if len({(tensor.dim() - place.dim, place.num_each) for tensor, place in with_rows}) > 1:
            return _COMPARED
    elif op.name not in ("mean", "sum"):
        return _mixing(op)
    sums = op.name == "sum" or given.get("reduction", 1) == 2
    return "it sums over rows" if sums else mean


def _linear(op: _Op, states: Sequence[_State], rows: _State) -> _State:
    """Return the state of what is made of a mean over rows."""
    mean, *others = (state for state in states if isinstance(state, _Mean))
    name = op.name.removesuffix("_")
    is_linear = (
        name in ("add", "sub", "neg")
        or op.name in _MOVED
        or (name == "mul" and not others)
        or (name == "div" and states[1:] in ([], [None]) and not op.given.get("rounding_mode"))
    )
    if is_linear and rows is None and {*states} <= {mean, None}:
        return mean
    return f"it computes with a mean over rows ({op.name})"


def _rows_of(a: Tensor, b: Tensor) -> _Rows | str | None:
    """Return the rows of a tensor: where its sizes differ; None if they do not."""
    if a.dim() != b.dim():
        return "a tensor has more dimensions for more rows"
    dims = [d for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
    if not dims:
        return None
    each = [a.shape[dims[0]] / _NUM_ROWS[0], b.shape[dims[0]] / _NUM_ROWS[1]]
    if len(dims) > 1 or each[0] != each[1] or each[0] != int(each[0]):
        return _COMPARED
    return _Rows(dims[0], int(each[0]))


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
    settings = [value for name, value in op.given.items() if name not in _SIZES]
    return [leaf for leaf in tree_leaves(settings) if isinstance(leaf, _PLAIN)]


def _mixing(op: _Op) -> str:
    return f"its rows are not known to stay apart ({op.name})"


def _reason(state: _State) -> str:
    if isinstance(state, str):
        return state
    return "it depends on no row" if state is None else "its rows are not reduced alike"


_NUMBER = "it computes with the number of rows"
_OTHER = "it computes something else for another number of rows"
_COMPARED = "rows are compared with each other, or left out"

_PLAIN = (bool, int, float, complex, str, torch.dtype)
_SIZES = frozenset("size end repeats".split())
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
_SAME = frozenset("_to_copy clone detach alias lift_fresh".split())
_VIEWS = frozenset(
    "view _unsafe_view reshape _reshape_alias unsqueeze squeeze expand flatten".split()
)
_MOVES = frozenset("permute transpose t".split())
_MOVED = _VIEWS | _MOVES | _SAME
_ALONG = frozenset(
    """
    native_layer_norm _fused_rms_norm rms_norm slice select split split_with_sizes unbind _softmax
    _log_softmax cumsum sum mean amax amin max min argmax argmin any all logsumexp
    linalg_vector_norm
    """.split()
)
#: Operations that keep the rows of one argument apart, by its name, if no other one has rows.
_OF_ONE = {"mm": "self", "addmm": "mat1", "embedding": "indices", "convolution": "input"} | (
    dict.fromkeys(
        ("constant_pad_nd", "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), "self"
    )
)
_NLL = frozenset("nll_loss_forward nll_loss2d_forward".split())
_LOSSES = frozenset(
    """
    mse_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
    soft_margin_loss
    """.split()
)
