"""The engine: everything that runs steps of a module, opened and closed as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import torch
from torch import nn

from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.device.threads import divided_intra_op_threads
from roundpipe_lightning.engine.driver.block_calls import BlockForms
from roundpipe_lightning.engine.driver.driver import Driver
from roundpipe_lightning.engine.driver.route import Route
from roundpipe_lightning.engine.driver.step import Project, Step
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.transfer.worker_transfers import Transfers
from roundpipe_lightning.engine.worker.executor import Executor


class OneStepEngine:
    """Runs steps of a module on the workers. A context manager.

    Args:
        module: The user's module. While the engine is open its parameters lie in flat buffers; they
            stay ordinary parameters.
        blocks: The blocks to pipeline, by name.
        devices: One for each worker. User code computes on the first one.
        trusts_rows: Whether rows of blocks are taken to be independent, without a look.
        project: As of `Step`.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        *,
        devices: Sequence[Device],
        trusts_rows: bool = False,
        project: Project | None = None,
    ) -> None:
        self._project = project
        self._module, self._blocks = module, dict(blocks)
        self._devices, self._trusts_rows = tuple(devices), trusts_rows
        self._resources = ExitStack()

    def __enter__(self) -> OneStepEngine:
        with ExitStack() as resources:  # gives back what there is if the rest fails
            devices, blocks = self._devices, self._blocks
            moves = any(not device.shares_host_memory for device in devices)
            self.store = store = HostStore(
                self._module, tuple(dict.fromkeys(blocks.values())), moves=moves
            )
            resources.callback(store.close)
            for device in devices:
                device.reset_peak_bytes()
            accelerator = next((d for d in devices if not d.shares_host_memory), None)
            if accelerator is not None:
                store.pin(accelerator)
            on_host = sum(device.shares_host_memory for device in devices)
            num_threads = resources.enter_context(divided_intra_op_threads(num_workers=on_host))
            root = devices[0].with_own_queue()
            self.transfers = transfers = Transfers(
                store,
                devices=devices,
                names={block: name for name, block in blocks.items()},
                root=root,
            )
            resources.callback(transfers.close)
            inside = {id(module) for block in blocks.values() for module in block.modules()}
            self.executor = Executor(
                devices,
                blocks=blocks,
                store=store,
                transfers=transfers,
                root=root,
                outside=[m for m in self._module.modules() if id(m) not in inside],
                prepare_thread=partial(torch.set_num_threads, num_threads),
            )
            resources.callback(self.executor.close)
            self.driver = Driver(
                blocks,
                trainable=list(self._module.parameters()),
                forms=BlockForms(self.executor.make_replica, trusts_rows=self._trusts_rows),
                executor=self.executor,
                project=self._project,
            )
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, route: Route, *, seed: int) -> AbstractContextManager[Step]:
        """Run user code of one step in the context; see `Driver.step`."""
        self.store.check_blocks()
        return self.driver.step(route, seed=seed)

    def close(self) -> None:
        """Join the threads and give page-locked memory back. The parameters stay where they are."""
        self._resources.close()
