"""One run of a block on a worker: as it is, compiled, or again for its backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from roundpipe_lightning.engine.capture.compiled import BlockCompiler
from roundpipe_lightning.engine.capture.side_outputs import Watch
from roundpipe_lightning.engine.capture.view import put
from roundpipe_lightning.engine.chain.saved_outputs import KeptOutputs
from roundpipe_lightning.engine.chain.values import BlockCall, Outcome
from roundpipe_lightning.engine.transfer.pinned_pool import PinnedPool
from roundpipe_lightning.engine.worker.loaded_blocks import ResidentBlocks
from roundpipe_lightning.engine.worker.user_code import UserCode
from roundpipe_lightning.engine.worker.worker import Worker


class BlockRunner:
    """Runs the blocks of one microbatch.

    Args:
        user: The user code around them.
        worker: Returns the worker whose turn it is.
        keeps: Names of operations that a recompute does not run again.
        stays: Says whether what they give may stay on the worker whose turn it is.
        pool: Where they travel through on the host; None where no worker needs any.
        compiler: Compiles blocks; None: they run as they are.
    """

    def __init__(
        self,
        user: UserCode,
        *,
        worker: Callable[[], Worker],
        keeps: Sequence[str] = (),
        stays: Callable[[], bool] = lambda: False,
        pool: PinnedPool | None = None,
        compiler: BlockCompiler | None = None,
    ) -> None:
        self._user = user
        self._worker = worker
        self._keeps = keeps
        self._stays = stays
        self._pool = pool
        self._compiler = compiler

    def prepare(self, call: BlockCall) -> None:
        """Let a call keep what its recompute need not run again, if it will have one."""
        if self._keeps and call.wanted and call.place.segment is None:
            call.kept = KeptOutputs(self._keeps, pool=self._pool)

    def run(
        self,
        call: BlockCall,
        resident: ResidentBlocks,
        *,
        take: Any,
        given: tuple[Any, Any] | None,
    ) -> Outcome:
        """Run a block on what the user's code has given it, or None: once more on the same.

        Args:
            call: Which block, and what is known of the call.
            resident: Its parameters on the worker.
            take: Brings a tensor to where the block computes.
            given: Positional and keyword arguments.
        """
        user, place = self._user, call.place
        again = given is None

        def watched(taken: Sequence[Tensor]) -> _Both:
            watch = _watch(call, again=again)
            return _Both(
                user.side_outputs.block(place.number, watch, taken, name=place.name),
                user.resumed(),
            )

        with (
            user.in_block(place.number, resident, gathers=not place.gradient),
            resident.written(call.writes) if call.writes else nullcontext(),
            call.keeping(self._worker(), again=again, stays=self._stays),
        ):
            block = self._runnable(call, resident)
            if given is None:
                outcome = call.run_again(block, take, watched=watched)
            else:
                outcome = call.run(block, take, given=given, watched=watched)
            self._note_draws(call)
        for module, attribute, value in resident.take_writes():
            # This microbatch's user code reads the attributes that its block has written.
            put(user.maker.view_of(module), attribute, value)
            user.writes.renew(module, attribute, value)
            if self._compiler is not None:
                self._compiler.leave(place.name, f"it writes an attribute ({attribute})")
        return outcome

    def _runnable(self, call: BlockCall, resident: ResidentBlocks) -> nn.Module:
        """Return what runs a block: its view, or compiled code."""
        place = call.place
        view = resident.block(place.block)
        if self._compiler is None:
            return view
        return self._compiler.stand_in(
            view, block=place.block, name=place.name, placed=resident, stream=self._user.stream
        )

    def _note_draws(self, call: BlockCall) -> None:
        stream = self._user.stream
        if self._compiler is not None and stream is not None and stream.num_draws:
            self._compiler.note_draw(call.place.name)

    def note_side_outputs(self, calls: Sequence[BlockCall]) -> None:
        """Let blocks run as they are of which more than the output was used."""
        if self._compiler is not None:
            for number in self._user.side_outputs.calls_with_leaves:
                self._compiler.leave(
                    calls[number].place.name, "a tensor that it leaves beside its output is used"
                )


class _Both:
    """Two contexts. A class: it is entered for every run of a block.

    Args:
        outer: Entered first, left last.
        inner: The other one.
    """

    __slots__ = ("_inner", "_outer")

    def __init__(
        self, outer: AbstractContextManager[None], inner: AbstractContextManager[None]
    ) -> None:
        self._outer = outer
        self._inner = inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._inner.__exit__(kind, error, traceback)
        self._outer.__exit__(kind, error, traceback)


def _watch(call: BlockCall, *, again: bool) -> Watch:
    if not call.place.gradient:
        return Watch.UNWATCHED
    if call.place.segment is not None:
        return Watch.NOTHING
    return Watch.FIND if again else Watch.MARK
