"""What each of several hosts keeps of parameters that others own, and who reads them."""

import ctypes
import mmap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from roundpipe_lightning.errors import ConfigurationError, HostError
from roundpipe_lightning.planning.cost.device_memory import MemoryKind
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.hosts import PlannedAsGpu, host_trainer, raised, run_on_hosts

WIDTH = 256  # a matrix has 64 pages


class Wide(LightningModule):
    """Blocks whose matrices have many pages."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        y: Tensor = self.head(x)
        return y

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        del batch_idx
        loss: Tensor = self(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def resident_share(begin: int, num_bytes: int) -> float:
    """Return how much of some memory has pages."""
    num = -(-num_bytes // mmap.PAGESIZE)
    pages = (ctypes.c_ubyte * num)()
    found = ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), num * mmap.PAGESIZE, pages)
    assert found == 0
    return sum(page & 1 for page in pages) / num


class Looking(Callback):
    """Looks at parameters, and at their pages, between steps.

    Args:
        folder: Where checkpoints go.
        is_alone: Whether this host reads when the others do not.
    """

    def __init__(self, folder: Path, *, is_alone: bool) -> None:
        self._folder, self._is_alone = folder, is_alone
        self.shares: list[float] = []
        self.read: list[Tensor] = []
        self.saved: list[Tensor] = []
        self._places: list[tuple[int, int]] = []
        self.at_addresses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        step = trainer.global_step
        if step == 2 and self._is_alone:
            matrix = module.layers[0].weight
            address = (ctypes.c_float * matrix.numel()).from_address(matrix.data_ptr())
            self.at_addresses = [torch.tensor(address).view(matrix.shape)]
            self.read = [matrix.detach().clone()]
            return
        if step == 3:
            trainer.save_checkpoint(self._folder / "late.ckpt")
            trainer.save_checkpoint(self._folder / "weights.ckpt", weights_only=True)
        if step == 1:
            memory = [layer.weight.untyped_storage() for layer in module.layers]
            self._places = [(each.data_ptr(), each.nbytes()) for each in memory]
            return
        trainer.strategy.join_updates()  # type: ignore[attr-defined]
        self.shares += [resident_share(*place) for place in self._places]
        if step == 3:
            self.read += [p.detach().clone() for p in module.parameters()]
        if step == 4:
            module.on_save_checkpoint = self.look  # as LambdaCallback does
            trainer.save_checkpoint(self._folder / "looked.ckpt", weights_only=True)

    def look(self, checkpoint: dict[str, Any]) -> None:
        self.saved += [values.clone() for values in checkpoint["state_dict"].values()]


BLOCKS: Any = {"options": {"microbatching": "blocks", "num_microbatches": 2}}


def narrow_trainer(folder: Path, *, options: Any = None, kind: Any = None, **flags: Any) -> Trainer:
    options = {"upload_dtype": "bf16", **(options or {})}
    return host_trainer(
        folder, options, kind=kind or EmulatedStrategy, precision="bf16-mixed", **flags
    )


def train(rank: int, folder: Path) -> Looking:
    torch.manual_seed(3)
    looking = Looking(folder, is_alone=rank == 1)
    trainer = narrow_trainer(folder / f"host{rank}", max_steps=4, callbacks=[looking], **BLOCKS)
    data: Any = torch.randn(16, WIDTH)
    trainer.fit(Wide(), DataLoader(data, batch_size=2))
    return looking


def test_a_host_has_pages_of_what_it_owns(tmp_path: Path) -> None:
    """Whoever reads gets all values, and the pages are given back in the next step."""
    first, second = run_on_hosts(2, train, tmp_path)
    for seen in raised((first, second)):
        # Half of every matrix, and the page in which the other half begins.
        assert seen.shares
        assert max(seen.shares) < 0.6
    assert torch.equal(second.at_addresses[0], second.read[0])
    assert first.saved
    assert all(map(torch.equal, first.saved, second.saved))
    saved = torch.load(tmp_path / "late.ckpt", weights_only=False)
    weights = torch.load(tmp_path / "weights.ckpt", weights_only=False)["state_dict"]
    expected = zip(first.read, second.read[1:], saved["state_dict"].values(), strict=True)
    for mine, theirs, late in expected:
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, late)
    assert all(map(torch.equal, weights.values(), first.read))
    state = saved["optimizer_states"][0]["state"]
    assert all(state[number]["exp_avg"].shape == p.shape for number, p in enumerate(first.read))


class ReadsOutside(Wide):
    """Its step looks at a block's matrix on one host alone."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_rank > 0:
            return loss
        weight: Any = self.layers[1].weight
        loss += weight.float().square().sum() * self.trainer.num_nodes  # a host has its share
        return loss


def in_the_middle(self: Any, trainer: Trainer, module: Any, *_: Any) -> None:
    if trainer.global_step == 1 and trainer.is_global_zero:
        self.read = module.layers[1].weight.detach().clone()


def read_on_one(_: int, folder: Path, hook: str, num: int) -> list[Tensor]:
    torch.manual_seed(3)
    promise = {"requires_optimizer_sync": False}
    callback = type("Early", (Callback,), {**promise, hook: in_the_middle} if hook else {})()
    flags = {"num_nodes": num, "callbacks": [callback], **BLOCKS}
    trainer = narrow_trainer(folder, max_steps=3, **flags)
    module = Wide() if hook else ReadsOutside()
    trainer.fit(module, DataLoader(torch.randn(16, WIDTH), batch_size=4 // num))  # type: ignore[arg-type]
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("hook", ["on_before_backward", "on_after_backward"])
def test_who_reads_in_the_middle_of_a_step_is_refused_at_once(tmp_path: Path, hook: str) -> None:
    """Others wait for its gradients then, and cannot answer."""
    first, second = run_on_hosts(2, read_on_one, tmp_path, hook, 2)
    assert type(first) is ConfigurationError
    assert "in_the_middle" in str(first)
    assert "looks at parameters while the step is made" in str(first)
    assert "on_train_batch_end" in str(first)
    assert type(second) is HostError
    assert "Host 1 lost host 0" in str(second)


def test_a_step_may_look_at_a_matrix_outside_its_block(tmp_path: Path) -> None:
    one = read_on_one(0, tmp_path, "", 1)
    for seen in raised(run_on_hosts(2, read_on_one, tmp_path, "", 2)):
        assert all(float((a - b).abs().mean()) < 1e-3 for a, b in zip(seen, one, strict=True))


class Locked(Callback):
    """Notes what is page-locked beside parameters: gradients, and little else.

    Hosts tell each other their shares of the loss late.
    """

    num_bytes = 0

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        runtime = trainer.strategy._runtime  # type: ignore[attr-defined]
        joined = runtime._joined

        def slowly(*arguments: Any) -> Any:
            time.sleep(0.3)  # all gradients could come meanwhile
            return joined(*arguments)

        runtime._joined = slowly

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        engine = trainer.strategy._runtime._engine  # type: ignore[attr-defined]
        self.num_bytes = max(self.num_bytes, engine.staging_bytes)


def train_locked(_: int, folder: Path, num: int, mode: dict[str, Any]) -> tuple[int, int]:
    """Return what was page-locked, and what gradients take in the plan."""
    locked, plans = Locked(), list[Any]()
    rounds, num_layers = mode.pop("rounds", 1), 16
    stages = {"forward": [1] * (num_layers - 1), "backward": [1] * num_layers, "round_size": 1}
    trainer = narrow_trainer(
        folder,
        kind=PlannedAsGpu,
        options={
            "hardware": "rtx4090",
            "microbatching": "step",
            "num_microbatches": rounds,
            "hints": stages,
        },
        max_steps=3,
        num_nodes=num,
        callbacks=[locked],
        **mode,
    )
    listeners = trainer.strategy.plan_listeners  # type: ignore[attr-defined]
    listeners.append(lambda event: plans.append(event.description))
    data: Any = torch.randn(8 * num, WIDTH)
    trainer.fit(Wide(num_layers), DataLoader(data, batch_size=2))
    return locked.num_bytes, plans[-1].memory.host.of(MemoryKind.GRADIENTS)


@pytest.mark.parametrize(
    ("num", "mode"),
    [
        (1, {"accumulate_grad_batches": 2}),
        pytest.param(2, {"accumulate_grad_batches": 2}, marks=pytest.mark.soak),
        pytest.param(2, {}, marks=pytest.mark.soak),
        pytest.param(2, {"rounds": 2}, marks=pytest.mark.soak),
    ],
)
def test_gradients_take_no_more_than_the_plan_says(
    tmp_path: Path, num: int, mode: dict[str, Any]
) -> None:
    """Of what is sent and added up at once few blocks' wait, however slow others are."""
    for measured, planned in raised(run_on_hosts(num, train_locked, tmp_path, num, mode)):
        assert measured <= 1.02 * planned  # whole pages


class Reading(Dataset[Tensor]):
    """Looks at a parameter, in a loader's process or in a thread."""

    def __init__(self, module: Wide) -> None:
        self._module = module

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self._look).result()

    def _look(self) -> Tensor:
        return torch.ones(WIDTH) * float(self._module.head.weight.detach()[0, 0])


def train_reading(rank: int, folder: Path, num_workers: int) -> None:
    module = Wide()
    trainer = narrow_trainer(folder / f"host{rank}", max_steps=2)
    loader = DataLoader(
        Reading(module),
        batch_size=2,
        num_workers=num_workers,
        multiprocessing_context="fork" if num_workers else None,
    )
    trainer.fit(module, loader)


@pytest.mark.parametrize(
    ("num_workers", "where"), [(1, "a process of a loader"), (0, "a thread that is not the")]
)
def test_who_cannot_have_all_values_is_refused(
    tmp_path: Path, num_workers: int, where: str
) -> None:
    """Memory is that of the host, with zeros for what others own."""
    for seen in run_on_hosts(2, train_reading, tmp_path, num_workers):
        assert type(seen) is ConfigurationError
        assert f"looks at parameters in {where}" in str(seen)
