"""The driver: runs user code once, with proxies in place of the blocks' `forward`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten

from roundpipe_lightning.engine.device.events import StepAborted
from roundpipe_lightning.engine.driver.block_calls import BlockForms
from roundpipe_lightning.engine.driver.calls import Call
from roundpipe_lightning.engine.driver.draws import DeviceDraws, own_draws
from roundpipe_lightning.engine.driver.forms import Rows
from roundpipe_lightning.engine.driver.lazy import gathered
from roundpipe_lightning.engine.driver.parameters import ParameterWatch
from roundpipe_lightning.engine.driver.route import Route
from roundpipe_lightning.engine.driver.rows import NotABlockError
from roundpipe_lightning.engine.driver.snapshot import (
    MOST_SNAPSHOTS,
    ForwardProxy,
    Snapshot,
    take_snapshot,
)
from roundpipe_lightning.engine.driver.step import Project, Step
from roundpipe_lightning.engine.driver.torch_functions import lazy_arguments
from roundpipe_lightning.engine.transfer.parts import Place


class StepExecutor(Protocol):
    """Runs the workers' part of steps."""

    root: Place
    draws: DeviceDraws

    def start(self, step: Step) -> Callable[[], None]:
        """Let the workers begin; returns what waits until all have left the step.

        In between user code computes in the calling thread.
        """

    def bring(self, block: nn.Module) -> None:
        """Let user code run a block itself, where it computes, for the rest of the step."""

    def run_part(
        self,
        call: Call,
        part: int,
        values: Callable[[Any, Rows | None], Tensor],
        parameter: Callable[[nn.Parameter], Tensor],
    ) -> Sequence[Any]:
        """Run a call for a part in this thread, with a graph; return its leaves."""


class BlockProxy(ForwardProxy):
    """Stands in a block's `forward` while steps run: posts a call."""

    def __init__(self, driver: Driver, block: nn.Module, name: str) -> None:
        self._driver, self._block, self.name = driver, block, name
        self.instance_forward = vars(block).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._driver.call_block(self._block, self, args, kwargs)


class Driver:
    """Runs steps of user code. Thread: the Trainer's.

    Args:
        blocks: The blocks by name.
        trainable: All parameters of the module that may be trained.
        forms: Forms of calls that are known.
        project: As of `Step`.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        *,
        trainable: Collection[nn.Parameter],
        forms: BlockForms,
        executor: StepExecutor,
        project: Project | None = None,
    ) -> None:
        self._project = project
        self._proxies_of = {block: BlockProxy(self, block, name) for name, block in blocks.items()}
        self._trainable = tuple(trainable)
        self._forms, self._executor, self._is_first = forms, executor, True
        self._snapshots: dict[nn.Module, list[Snapshot]] = {}
        self._step: Step | None = None
        self._watch = ParameterWatch(self._await_calls)

    @contextmanager
    def step(self, route: Route, *, seed: int) -> Iterator[Step]:
        """Run user code of one step in the body. Its backward passes belong into the body, too."""
        step = Step(
            route=route,
            trainable=self._trainable,
            seed=seed,
            root=self._executor.root,
            project=self._project,
            watch=self._watch,
            run_part=self._executor.run_part,
        )
        join_workers = self._executor.start(step)
        self._step = step
        try:
            with (
                self._proxies(),
                lazy_arguments(),
                self._waiting_optimizers(),
                own_draws(self._executor.draws, always=self._is_first),
            ):
                yield step
            self._is_first = False
        except BaseException as error:
            if isinstance(error, StepAborted):  # user code has waited for what has failed
                step.raise_error()
            step.abort()
            raise
        finally:
            self._step = None
            step.close()
            join_workers()
            self._watch.release()
            step.release()
        step.raise_error()

    def _await_calls(self) -> None:
        if self._step is not None:
            self._step.await_forward()

    @contextmanager
    def _waiting_optimizers(self) -> Iterator[None]:
        """Let optimizers wait for the posted calls: some write by functions on many tensors."""
        thread = threading.get_ident()

        def wait(*_: Any) -> None:
            if threading.get_ident() == thread:
                self._await_calls()

        with register_optimizer_step_pre_hook(wait):
            yield

    @contextmanager
    def _proxies(self) -> Iterator[None]:
        with ExitStack() as restored:
            for block, proxy in self._proxies_of.items():
                attributes = vars(block)
                proxy.instance_forward = attributes.get("forward")
                attributes["forward"] = proxy
                restored.callback(_restore, attributes, proxy)
                if attributes.get("_compiled_call_impl") is not None:  # workers run it uncompiled
                    restored.callback(
                        attributes.__setitem__,
                        "_compiled_call_impl",
                        attributes["_compiled_call_impl"],
                    )
                    attributes["_compiled_call_impl"] = None
            yield

    def call_block(
        self, block: nn.Module, proxy: BlockProxy, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Post a call of a block."""
        step = self._step
        assert step is not None, "proxies stand only while a step runs"
        snapshots = self._snapshots.setdefault(block, [])
        snapshot = next((s for s in snapshots if s.is_current()), None)
        if snapshot is None:
            snapshot = take_snapshot(block, None, name=proxy.name)
            snapshots[:] = [snapshot, *snapshots][:MOST_SNAPSHOTS]
        leaves, structure = tree_flatten((args, kwargs))
        leaves = [step.present_value(leaf) for leaf in leaves]
        with step.trying_block():
            known, key = self._forms.form_of(
                proxy.name,
                snapshot,
                leaves,
                structure,
                is_whole=step.route.num_microbatches == 1,
            )
        if not known.reason:
            try:
                return step.post_block(
                    snapshot,
                    known,
                    leaves=leaves,
                    structure=structure,
                    learn=partial(self._forms.learn, key),
                )
            except NotABlockError as error:
                self._forms.refuse(proxy.name, key, error.reason)
        self._executor.bring(block)
        forward = proxy.instance_forward or partial(type(block).forward, block)
        return forward(*gathered(args), **gathered(kwargs))


def _restore(attributes: dict[str, Any], proxy: BlockProxy) -> None:
    if proxy.instance_forward is None:
        del attributes["forward"]
    else:
        attributes["forward"] = proxy.instance_forward
