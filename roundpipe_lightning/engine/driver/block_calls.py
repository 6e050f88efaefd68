"""Calls of blocks: how each is run, as far as that is known before it runs.

```
first call of a class of blocks    tried on a few rows (`rows.py`): a form, or why there is none
another call, sizes seen before    form from the cache; the driver does not wait
another call, new sizes            rows from the cache, sizes from the first microbatch
rows mixed                         one microbatch, sizes from it
no block at all                    run by the driver, on the whole batch
```
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from roundpipe_lightning.engine.driver.calls import is_plain
from roundpipe_lightning.engine.driver.context import CallContext
from roundpipe_lightning.engine.driver.forms import CallForm, Rows, TensorForm
from roundpipe_lightning.engine.driver.lazy import LazyTensor
from roundpipe_lightning.engine.driver.outcome import Outcome
from roundpipe_lightning.engine.driver.rows import (
    LazyArgument,
    MixedRowsError,
    NotABlockError,
    find_form,
    form_key,
)
from roundpipe_lightning.engine.driver.snapshot import Snapshot

MakeReplica = Callable[[Snapshot], Callable[[tuple[Any, ...], dict[str, Any]], Outcome]]
"""Makes a replica of a block that the driver's thread runs; returns what runs it."""


class WholeBatchWarning(UserWarning):
    """A block's rows are not independent: it runs on the whole batch, on one worker at a time."""


class DriverBlockWarning(UserWarning):
    """A module among the blocks cannot run on workers: it runs where user code runs."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What is known of a call of a block.

    Attributes:
        form: Its form; without results, where the first microbatch will tell their sizes.
        num_rows: Rows of the batch.
        result_rows: Where results have rows, by the leaves of the results; None: not known.
        reason: Why the block runs in the driver; empty: it does not.
    """

    form: CallForm
    num_rows: int
    result_rows: tuple[Any, ...] | None = None
    reason: str = ""


class BlockForms:
    """Forms of the calls that have been seen. Thread: the Trainer's.

    Args:
        make_replica: Makes what runs a block on a few rows.
        trusts_rows: Whether rows are taken to be independent, without a look.
    """

    def __init__(self, make_replica: MakeReplica, *, trusts_rows: bool = False) -> None:
        self._make_replica, self._trusts_rows = make_replica, trusts_rows
        self._block_keys: dict[nn.Module, tuple[Snapshot, Hashable]] = {}
        self._verdicts: dict[Hashable, CallForm | MixedRowsError] = {}
        self._refused: dict[Hashable, str] = {}
        self._mixed: dict[Hashable, tuple[str, str]] = {}  # calls that are to run whole
        self._forms: dict[Hashable, CallForm] = {}
        #: Blocks that run on the whole batch, and why.
        self.whole: dict[str, str] = {}

    def form_of(
        self,
        name: str,
        snapshot: Snapshot,
        leaves: Sequence[Any],
        structure: TreeSpec,
        *,
        is_whole: bool = False,
    ) -> tuple[BlockForm, Hashable]:
        """Return what is known of a call, and the key under which its sizes are to be kept.

        Args:
            is_whole: Whether the batch is one microbatch anyway.
        """
        context = CallContext.current("cpu")
        objects = [x for x in leaves if not isinstance(x, Tensor) and not is_plain(x)]
        reason = ""
        fills_objects = bool(objects) and not context.grad_enabled
        if fills_objects:  # a cache of keys and values: its length decides on sizes
            is_whole = True
        elif any(map(_has_tensors, objects)):
            reason = (
                "it is given an object that holds tensors, which a recompute would find changed"
            )
        kind = (self._block_key(snapshot), structure, context.modes, context.autocast, is_whole)
        num_rows = _num_rows(leaves)
        key = (*kind, tuple(map(_sized_key, leaves)))
        whole = BlockForm(CallForm(tuple(None for _ in leaves), (), structure), num_rows)
        if reason:
            if reason not in self._refused.values():
                self._warn_of_driver(name, reason)
            self._refused[key] = reason
            return replace(whole, reason=reason), key
        whole_key = (*key, num_rows)  # sizes of the whole batch
        for known_key in (key, whole_key):
            if known_key in self._forms and not fills_objects:
                form = self._forms[known_key]
                return BlockForm(form, _rows_in(leaves, form) or num_rows), known_key
        if is_whole:
            return replace(whole, reason=self._refused.get(whole_key, "")), whole_key
        shape_key = (*kind, tuple(map(_unsized_key, leaves)))
        if shape_key not in self._verdicts:
            self._verdicts[shape_key] = self._try(name, snapshot, leaves, structure)
        verdict = self._verdicts[shape_key]
        if isinstance(verdict, NotABlockError):
            return replace(whole, reason=verdict.reason), key
        if isinstance(verdict, MixedRowsError):
            self._mixed[whole_key] = (name, verdict.reason)
            return whole, whole_key
        rows = tuple(x.rows if isinstance(x, TensorForm) else None for x in verdict.results)
        form = CallForm(verdict.arguments, (), verdict.structure)
        found = _rows_in(leaves, form)
        if found is None:  # rows lie where they did not lie when it was tried
            return whole, whole_key
        return BlockForm(form, found, rows), key

    def learn(self, key: Hashable, form: CallForm) -> None:
        """Keep the form of a call, which has run: its sizes are known now."""
        self._forms[key] = form
        name, reason = self._mixed.pop(key, ("", ""))
        if name and name not in self.whole:  # one that raised on few rows has not raised on all
            self.whole[name] = reason
            warnings.warn(
                f"Block {name!r} runs on the whole batch, not on microbatches: {reason}. Workers "
                "share a batch only where its rows are independent.",
                category=WholeBatchWarning,
                stacklevel=2,
            )

    def _block_key(self, snapshot: Snapshot) -> Hashable:
        known = self._block_keys.get(snapshot.block)
        if known is None or known[0] is not snapshot:
            modules = [(s.path, s.kind, s.attributes) for s in snapshot.states]
            known = (snapshot, form_key(modules, (), num_rows=None, context=None))
            self._block_keys[snapshot.block] = known
        return known[1]

    def _try(
        self, name: str, snapshot: Snapshot, leaves: Sequence[Any], structure: TreeSpec
    ) -> CallForm | MixedRowsError:
        def run(arguments: Sequence[Any]) -> tuple[list[Any], TreeSpec]:
            copies = [x if isinstance(x, Tensor) or is_plain(x) else deepcopy(x) for x in arguments]
            versions = versions_of(copies)
            args, kwargs = tree_unflatten(copies, structure)
            outcome = run_replica(args, kwargs)
            if versions_of(copies) != versions:
                raise NotABlockError("it writes into a tensor that it is given")
            if outcome.written_buffers:
                raise MixedRowsError("it writes into its buffers")
            flat, results = flatten_outcome(outcome, snapshot)
            if (reason := reason_against(outcome)) is not None:
                raise NotABlockError(reason)
            return flat, results

        if snapshot.has_script_modules:
            reason = "it has TorchScript modules, which cannot be copied"
            self._warn_of_driver(name, reason)
            return NotABlockError(reason)
        run_replica = self._make_replica(snapshot)
        arguments = [
            LazyArgument(x.output.form, _taker(x)) if isinstance(x, LazyTensor) else x
            for x in leaves
        ]
        lazy = [x for x in leaves if isinstance(x, LazyTensor)]
        try:
            trial = find_form(
                run,
                arguments,
                num_rows=lazy[0].num_rows if lazy else None,
                trusts_rows=self._trusts_rows,
            )
        except NotABlockError as error:
            self._warn_of_driver(name, error.reason)
            return error
        except MixedRowsError as error:
            return error
        return trial.form

    def refuse(self, name: str, key: Hashable, reason: str) -> None:
        """Note what a block's first call has shown: it cannot run on workers."""
        self._refused[key] = reason
        self._warn_of_driver(name, reason)

    @staticmethod
    def _warn_of_driver(name: str, reason: str) -> None:
        warnings.warn(
            f"Block {name!r} runs on the first device, on the whole batch, because {reason}. Let "
            "it return tensors, numbers, and lists, tuples or dicts of them, or name other blocks "
            "with RoundPipeStrategy(blocks=[...]).",
            category=DriverBlockWarning,
            stacklevel=2,
        )


def flatten_outcome(outcome: Outcome, snapshot: Snapshot) -> tuple[list[Any], TreeSpec]:
    """Return what a run of a block gave as leaves and their structure.

    Modules are named by their paths: equal layers share the form of their calls.
    """
    hook_calls: list[Any] = list(outcome.hook_calls)
    hook_calls = [call._replace(module=snapshot.path_of(call.module)) for call in hook_calls]
    attributes: list[Any] = list(outcome.attributes)
    attributes = [
        a._replace(module=snapshot.path_of(a.module), is_buffer="buffer" if a.is_buffer else "")
        for a in attributes
    ]
    return tree_flatten((outcome.result, hook_calls, attributes))


def unflatten_outcome(tree: Any, snapshot: Snapshot) -> Outcome:
    """Return what a block gave of the whole batch, for the user's own modules."""
    result, hook_calls, attributes = tree
    return Outcome(
        result,
        [call._replace(module=snapshot.module_at(call.module)) for call in hook_calls],
        [
            a._replace(module=snapshot.module_at(a.module), is_buffer=bool(a.is_buffer))
            for a in attributes
        ],
    )


def sized_form(
    form: CallForm,
    result_rows: tuple[Any, ...] | None,
    leaves: Sequence[Any],
    structure: TreeSpec,
    num_rows: int,
) -> CallForm:
    """Return a form with the sizes that a microbatch of some rows has shown."""
    places = result_rows or (None,) * len(leaves)
    results = tuple(
        _form_of_part(leaf, rows, num_rows) if isinstance(leaf, Tensor) else leaf
        for leaf, rows in zip(leaves, places, strict=True)
    )
    return replace(form, results=results, structure=structure)


def _form_of_part(tensor: Tensor, rows: Rows | None, num_rows: int) -> TensorForm:
    if rows is not None:
        rows = Rows(rows.dim, tensor.shape[rows.dim] // num_rows)
    return TensorForm.of_batch(tensor.shape, tensor.dtype, rows)


def _taker(lazy: LazyTensor) -> Callable[[int, int], Tensor]:
    def take(start: int, stop: int) -> Tensor:
        del start  # the first rows alone are asked for
        return lazy.output.call.step.first_rows(lazy.output, stop)

    return take


def versions_of(tree: Any) -> list[int]:
    """Return how often each tensor of a tree was written into, where that is counted."""
    tensors = (x for x in tree_leaves(tree) if isinstance(x, Tensor) and not x.is_inference())
    return [tensor._version for tensor in tensors]


def reason_against(outcome: Outcome) -> str | None:
    """Return why what a block gave cannot be put together from microbatches; None: it can."""
    for leaf in tree_leaves((outcome.result, [x.value for x in outcome.attributes])):
        is_function = callable(leaf) and not isinstance(leaf, nn.Module | type)
        if not isinstance(leaf, Tensor) and (is_function or not is_plain(leaf)):
            return f"it returns a {type(leaf).__name__}, which may hold tensors"
    return None


def _num_rows(leaves: Sequence[Any]) -> int:
    lazy = next((x for x in leaves if isinstance(x, LazyTensor)), None)
    if lazy is not None:
        return lazy.num_rows
    first = next((x for x in leaves if isinstance(x, Tensor) and x.dim()), None)
    return 1 if first is None else first.shape[0]


def _rows_in(leaves: Sequence[Any], form: CallForm) -> int | None:
    """Return the number of rows that all arguments agree on; None: they do not."""
    found = set()
    for leaf, rows in zip(leaves, form.arguments, strict=True):
        if isinstance(leaf, LazyTensor):
            if leaf.rows != rows:
                return None
            if rows is not None:
                found.add(leaf.num_rows)
        elif rows is not None:
            if leaf.dim() <= rows.dim:
                return None
            found.add(leaf.shape[rows.dim] // rows.repeat)
    return found.pop() if len(found) == 1 else None


def _sized_key(leaf: Any) -> Hashable:
    if isinstance(leaf, LazyTensor):
        return leaf.output.form
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else _plain_key(leaf)


def _unsized_key(leaf: Any) -> Hashable:
    if isinstance(leaf, LazyTensor):
        return (leaf.rows and leaf.rows.dim, leaf.dim(), leaf.dtype)
    return (leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else _plain_key(leaf)


def _plain_key(leaf: Any) -> Hashable:
    is_value = leaf is None or isinstance(leaf, bool | str | int)
    return (leaf,) if is_value else (type(leaf),)


def _has_tensors(value: Any) -> bool:
    return next(_tensors_in(value, set()), None) is not None


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield the tensors that an object holds."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or is_plain(value):
        return
    seen.add(id(value))
    entries: Sequence[Any] = ()
    if isinstance(value, dict):
        entries = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        entries = list(value)
    elif hasattr(value, "__dict__"):
        entries = list(vars(value).values())
    for entry in entries:
        yield from _tensors_in(entry, seen)
