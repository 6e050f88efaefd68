import contextlib
import ctypes
import functools
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint import FileSystemReader  # type: ignore[attr-defined]
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils.data import DataLoader, Sampler

from roundpipe_lightning import RoundPipeCheckpointIO, RoundPipeStrategy
from roundpipe_lightning.cli.callbacks import GracefulInterrupt, LastCheckpoint
from roundpipe_lightning.engine.exchange import exchange
from roundpipe_lightning.engine.exchange.exchange import write_range
from roundpipe_lightning.engine.exchange.hosts import Hosts
from roundpipe_lightning.errors import CheckpointError, ConfigurationError, FitError, HostError
from roundpipe_lightning.optim import HostAdamW
from roundpipe_lightning.strategy.hosts import launch
from roundpipe_lightning.strategy.hosts.data import BatchShares
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.hosts import HostsAtWork, host_trainer, raised, run_on_hosts
from tests.kit.resumption import plain
from tests.kit.training import (
    WIDTH,
    Block,
    LanguageModel,
    PaddedSequences,
    Regressor,
    make_trainer,
    regression_data,
)
from tests.lightning.test_checkpoint import full_disk

GLOBAL_BATCH = 12
NUM_SAMPLES = 41  # the last batch is not full


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        optimizer: As of the modules; `"muon"` needs whole matrices, `"adamw, at times"` has
            matrices without gradients in most steps.
        padded: Whether samples have different numbers of targets.
        dropout: Inside the blocks.
        flags: Of the Trainer.
        options: Of the strategy.
        num_microbatches: Of the global batch.
        kind: Of the strategy.
        workers: Of two hosts, whose shares of a batch follow; empty: they are alike.
        tolerance: Largest difference from one host.
    """

    optimizer: str = "sgd"
    padded: bool = False
    dropout: float = 0.0
    flags: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    num_microbatches: int | None = None
    kind: type[RoundPipeStrategy] = RoundPipeStrategy
    workers: tuple[int, ...] = ()
    tolerance: float = 1e-6


class Reader(Callback):
    """Reads the parameters between two steps."""

    def __init__(self) -> None:
        self.read: list[Tensor] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 1:
            self.read += [p.detach().clone() for p in module.parameters()]


class WithMuon(Regressor):
    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.layers.parameters() if p.dim() == 2]
        return torch.optim.Muon(matrices, lr=0.02)


class Slowing(torch.optim.SGD):
    """Changes the options of its groups in every step."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["lr"] *= 0.8
        super().step()
        return loss


class WithSlowing(Regressor):
    def configure_optimizers(self) -> Any:
        return Slowing(self.parameters(), lr=0.1)


class AtTimes(Block):
    """Has a matrix that most steps do not use: an expert that gets no token, say."""

    def __init__(self) -> None:
        super().__init__()
        self.also = nn.Linear(WIDTH, WIDTH)
        self.uses_it = True

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.also(x) if self.uses_it else y


class UsedAtTimes(Regressor):
    def __init__(self, _: str, *, num_blocks: int, dropout: float) -> None:
        super().__init__("adamw", dropout=dropout)
        self.layers = nn.ModuleList(AtTimes() for _ in range(num_blocks))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for layer in self.layers:
            vars(layer)["uses_it"] = batch_idx in (0, 2)  # of four


class RecordSizes(Callback):
    """Samples of every batch of this host."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        tensors = batch.values() if isinstance(batch, dict) else batch
        self.seen.append(len(next(iter(tensors))))


def train(rank: int, num: int, folder: Path, case: Case) -> dict[str, Any]:
    torch.manual_seed(3)
    size, module, validation = GLOBAL_BATCH // num, nn.Module(), None
    num_samples = NUM_SAMPLES if case.num_microbatches is None else 3 * GLOBAL_BATCH
    if case.padded:
        module = LanguageModel(case.optimizer)
        data = DataLoader(PaddedSequences(num_samples), batch_size=size, shuffle=True)
    else:
        kinds = {"muon": WithMuon, "slowing": WithSlowing, "adamw, at times": UsedAtTimes}
        kind = kinds.get(case.optimizer, Regressor)
        module = kind(case.optimizer, num_blocks=3, dropout=case.dropout)
        data = regression_data(num_samples, batch_size=size, shuffle=True)
        validation = regression_data(30, batch_size=size)
    options, flags = dict(case.options), {"max_epochs": 2, **case.flags}
    share = Fraction(1, num)
    if case.workers and num == 2:
        flags["devices"] = case.workers[rank]
        share = Fraction(case.workers[rank], sum(case.workers))
        options["memory_share"] = (0.25, 0.75)[rank]
    if case.num_microbatches is not None:
        options["num_microbatches"] = int(case.num_microbatches * share)
    sizes = RecordSizes()
    reader = Reader()
    trainer = make_trainer(
        folder / f"host{rank}",
        strategy=case.kind(timeout_seconds=60, **options),
        num_nodes=num,
        callbacks=[sizes, *([reader] if rank == num - 1 else [])],  # the others do not know
        **flags,
    )
    trainer.fit(module, data, validation)
    states = [v for s in trainer.optimizers[0].state.values() for v in s.values()]
    return {
        "moments": sum(v.numel() for v in states if torch.is_tensor(v)),
        "read": reader.read,
        "sizes": sizes.seen,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "parameters": [p.detach().clone() for p in module.parameters()],
        "steps": trainer.global_step,
    }


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


CASES = {
    "sgd": Case(),
    "adamw, clipped": Case("adamw", flags={"gradient_clip_val": 0.1}),
    "padded": Case(padded=True),
    "padded, step": Case(padded=True, options={"microbatching": "step"}, num_microbatches=6),
    "padded, blocks": Case(padded=True, options={"microbatching": "blocks"}, num_microbatches=6),
    "accumulated": Case(
        padded=True, flags={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    ),
    "accumulated, uploaded": Case(
        padded=True,
        flags={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "devices": 2},
        options={"microbatching": "step"},
        num_microbatches=6,
        kind=EmulatedStrategy,
    ),
    "values clipped": Case(flags={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "dropout": Case(dropout=0.3, options={"microbatching": "step"}, num_microbatches=6),
    "muon": Case("muon"),
    "slowing": Case("slowing"),
    "uneven": Case("adamw", flags={"gradient_clip_val": 0.1}, workers=(2, 1)),
    "uneven, dropout": Case(
        dropout=0.3, options={"microbatching": "step"}, num_microbatches=6, workers=(2, 1)
    ),
    "uneven, padded": Case(
        padded=True, options={"microbatching": "step"}, num_microbatches=6, workers=(2, 1)
    ),
    "uploaded": Case("adamw", flags={"devices": 2}, kind=EmulatedStrategy),
    "uploaded in 16 bits": Case(
        flags={"precision": "bf16-mixed"},
        options={"upload_dtype": "bf16", "microbatching": "step"},
        num_microbatches=6,
        kind=EmulatedStrategy,
        tolerance=2e-3,  # 1/6 and 1/3 of 1/2 are rounded differently in 16 bits
    ),
    "uploaded in 16 bits, used at times": Case(
        "adamw, at times",
        flags={"precision": "bf16-mixed"},
        options={"upload_dtype": "bf16", "microbatching": "blocks", "num_microbatches": 2},
        kind=EmulatedStrategy,
        tolerance=2e-3,
    ),
}


_ON_THREE = ("sgd", "padded, step", "uploaded in 16 bits")


@pytest.fixture(scope="module")
def one_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    return functools.cache(lambda name: train(0, 1, tmp_path_factory.mktemp("one"), CASES[name]))


@pytest.fixture(scope="module")
def hosts() -> Iterator[Callable[[int], HostsAtWork]]:
    """Hosts that were started once, by their number."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda num: stack.enter_context(HostsAtWork(num)))


@pytest.mark.suite(
    "2-sgd",
    "2-adamw, clipped",
    "2-padded, step",
    "2-padded, blocks",
    "2-accumulated, uploaded",
    "2-muon",
    "2-uneven",
    "2-uneven, dropout",
    "2-uploaded in 16 bits, used at times",
    "3-padded, step",
)
@pytest.mark.parametrize(
    ("num", "name"), [*((2, name) for name in CASES), *((3, name) for name in _ON_THREE)]
)
def test_numbers_of_one_host(
    tmp_path: Path,
    num: int,
    name: str,
    one_host: Callable[[str], Any],
    hosts: Callable[[int], HostsAtWork],
) -> None:
    case, one = CASES[name], one_host(name)
    runs = hosts(num).run(train, num, tmp_path, case)
    again = hosts(num).run(train, num, tmp_path, case) if name == "sgd" else runs
    for rank, seen in enumerate(raised(runs)):
        assert seen["steps"] == one["steps"]
        assert difference(seen["parameters"], one["parameters"]) < case.tolerance
        if seen["read"]:
            assert difference(seen["read"], one["read"]) < case.tolerance
        assert seen["metrics"] == pytest.approx(one["metrics"], rel=10 * case.tolerance)
        if name == "uneven":  # three batches of 12, and what is left of the epoch
            assert seen["sizes"][:4] == ([8, 8, 8, 3], [4, 4, 4, 2])[rank]
            part = seen["moments"] / one["moments"]
            assert part == pytest.approx((0.25, 0.75)[rank], abs=0.05)  # pieces are aligned
        assert difference(seen["parameters"], again[rank]["parameters"]) == 0


# Overlap -----------------------------------------------------------------------------------------

_SECONDS = 60.0  # none of it is waited for, but where something is broken
_summed, _entered = threading.Event(), threading.Event()


class Waiting(Block):
    """Waits in its backward pass for the sums of others; says when it runs forward again."""

    def forward(self, x: Tensor) -> Tensor:
        if _summed.is_set():
            _entered.set()
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self._wait)
        return y

    @staticmethod
    def _wait(gradient: Tensor) -> None:
        planned = gradient.is_meta  # not a step
        assert planned or _summed.wait(_SECONDS), "no gradients leave during the backward pass"


def train_waiting(rank: int, folder: Path, flags: dict[str, Any]) -> int:
    """Train two steps that end only if the exchange goes on beside both passes."""
    num_written, add_into = 0, exchange._add_into

    def added(sums: Tensor, taken: Sequence[Tensor]) -> None:
        _summed.set()
        add_into(sums, taken)

    def written(values: Sequence[Tensor], elements: slice, new: Tensor) -> None:
        nonlocal num_written
        num_written += 1
        if num_written == len(module.layers) + 2:  # the last unit of the first step
            assert _entered.wait(_SECONDS), "the first block waits for the last one's values"
        write_range(values, elements, new)

    torch.manual_seed(3)
    module = Regressor(num_blocks=4)
    module.layers[0] = Waiting()
    strategy = RoundPipeStrategy(
        timeout_seconds=_SECONDS,
        microbatching="step",  # else blocks are tried before
        num_microbatches=2,
        hints={"forward": (1, 1, 1), "backward": (1, 1, 1, 1)},
    )
    trainer = make_trainer(folder, strategy=strategy, num_nodes=2, max_steps=2, **flags)
    with mock.patch.multiple(exchange, _add_into=added, write_range=written):
        trainer.fit(module, regression_data(24, batch_size=6))
    return num_written


@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 0.1}], ids=["plain", "clipped"])
def test_hosts_exchange_beside_both_passes(tmp_path: Path, flags: dict[str, Any]) -> None:
    for seen in run_on_hosts(2, train_waiting, tmp_path, flags):
        assert seen == 12


# Faults ------------------------------------------------------------------------------------------


def _once_wrong() -> Iterator[Any]:
    yield ZeroDivisionError("of one host")
    while True:
        yield mock.DEFAULT


class EndOrWait(Callback):
    """Ends the last host in the middle; the others are busy before, or when it happens."""

    def __init__(self, how: str, *, is_last: bool, process: Path) -> None:
        self._how, self._is_last, self._process = how, is_last, process

    def on_train_batch_start(self, trainer: Trainer, _: Any, __: Any, batch_idx: int) -> None:
        if not self._is_last:
            if self._how == "stopped" and batch_idx == 1:
                ctypes.PyDLL(None).sleep(3)  # with Python's lock, and longer than others wait
            if self._how == "busy" and batch_idx == 2:
                time.sleep(60)  # is interrupted
        elif batch_idx == 2:
            self._process.write_text(str(os.getpid()))
            if self._how == "raises":
                raise ZeroDivisionError("of one host")
            if self._how == "leaves one out":
                vars(exchange)["_values_of"] = mock.Mock(
                    wraps=exchange._values_of, side_effect=_once_wrong()
                )
                return
            os.kill(os.getpid(), signal.SIGSTOP if self._how == "stopped" else signal.SIGKILL)


def end_at(rank: int, num: int, folder: Path, how: str) -> None:
    """Train on hosts of which the last one ends in the middle."""
    torch.manual_seed(3)
    process = folder / "process"
    trainer = host_trainer(
        folder,
        num_nodes=num,
        callbacks=[EndOrWait(how, is_last=rank == num - 1, process=process)],
        gradient_clip_val=1.0 if how == "leaves one out" else None,  # all leave before one is used
    )
    data = regression_data(NUM_SAMPLES, batch_size=GLOBAL_BATCH // num)
    patience = 2.0 if how == "stopped" else 60.0  # others are heard at once, or they live
    try:
        with mock.patch("roundpipe_lightning.engine.exchange.hosts.PATIENCE_SECONDS", patience):
            trainer.fit(Regressor(num_blocks=2), data)
    except HostError:
        if how == "stopped":
            os.kill(int(process.read_text()), signal.SIGKILL)
        raise


@pytest.mark.parametrize(
    ("how", "num", "lost_error", "message"),
    [
        ("killed", 3, ProcessLookupError, "it has ended"),
        ("raises", 2, ZeroDivisionError, ": it raised ZeroDivisionError: of one host"),
        ("leaves one out", 2, ZeroDivisionError, ": it raised ZeroDivisionError: of one host"),
        ("stopped", 2, ProcessLookupError, "it is stopped"),
        ("busy", 2, ProcessLookupError, "it has ended"),
    ],
)
def test_who_is_left_says_so(
    tmp_path: Path, how: str, num: int, lost_error: Any, message: str
) -> None:
    *left, lost = run_on_hosts(num, end_at, num, tmp_path, how)
    assert type(lost) is lost_error
    for each in left:
        assert type(each) is HostError
        assert re.search(r"block (layers\.\d|head\.(weight|bias))", str(each))
        assert re.search(
            rf"lost host {num - 1} \(.*batch \d, after \d .*{message}", str(each), re.DOTALL
        )


class Signalled(Callback):
    """Sends the last host a signal at a batch's start or end."""

    def __init__(self, hook: str, *, rank: int) -> None:
        if rank:
            setattr(self, hook, self._send)

    @staticmethod
    def _send(trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx in (-1, 1):
            signal.raise_signal(signal.SIGTERM)


class LateWork:
    """Is not done before the other host has said its last word, or a moment has passed."""

    def __init__(self, work: Any, hosts: Hosts) -> None:
        self._work, self._changed, self._is_asked = work, hosts.watch._changed, False

    def is_completed(self) -> bool:
        return self._is_asked and bool(self._work.is_completed())

    def wait(self, seconds: Any) -> None:
        if not self._is_asked:
            self._is_asked = True
            self._changed.wait(0.3)
            raise RuntimeError("not done yet")
        self._work.wait(seconds)


def _wait_late(hosts: Hosts, work: Any, what: str) -> None:
    plain_wait(hosts, LateWork(work, hosts), what)


plain_wait = Hosts.wait


class LateStrategy(RoundPipeStrategy):
    """Is the last to leave the last barrier."""

    def barrier(self, name: str | None = None) -> None:
        is_last = self.global_rank == 0 and self._module.trainer.interrupted
        late = mock.patch.object(Hosts, "wait", _wait_late)
        with late if is_last else contextlib.nullcontext():
            super().barrier(name)


def stop_at(rank: int, folder: Path, hook: str, is_command: bool) -> tuple[int, int | None]:
    """Train on two hosts until one is sent a signal; return when that stopped this one."""
    torch.manual_seed(3)
    interrupt = GracefulInterrupt()
    saves = LastCheckpoint(str(folder), every_n_steps=99)
    with interrupt if is_command else contextlib.nullcontext():
        trainer = host_trainer(
            folder,
            kind=LateStrategy,
            callbacks=[saves, *[interrupt] * is_command, Signalled(hook, rank=rank)],
            enable_checkpointing=True,
        )
        with contextlib.suppress(SIGTERMException):
            trainer.fit(Regressor("adamw", num_blocks=2), regression_data(36, batch_size=6))
    return trainer.global_step, interrupt.signal_number


@pytest.mark.long("on_train_batch_start-2-False", "on_train_batch_end-3-True")
@pytest.mark.parametrize(
    ("hook", "step", "is_command"),
    [
        ("on_train_start", 1, False),
        ("on_train_batch_start", 2, True),
        ("on_train_batch_start", 2, False),
        ("on_train_batch_end", 3, True),
        ("on_train_batch_end", 3, False),
    ],
)
def test_a_signal_to_one_host_stops_all_after_the_same_step(
    tmp_path: Path, hook: str, step: int, is_command: bool
) -> None:
    expected = (step, signal.SIGTERM if is_command else None)
    assert run_on_hosts(2, stop_at, tmp_path, hook, is_command) == [expected] * 2
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == step


def stop_by(rank: int, folder: Path, how: str) -> tuple[int, int]:
    """Train on two hosts of which one has a reason to stop; return where this one did."""
    stops = {
        "timer": Timer(timedelta(hours=rank), interval="step"),
        "early stopping": EarlyStopping(
            "loss", stopping_threshold=1e9 if rank else None, check_on_train_epoch_end=True
        ),
    }
    trainer = host_trainer(folder / f"host{rank}", max_epochs=4, callbacks=[stops[how]])
    trainer.fit(Regressor(num_blocks=2), regression_data(24, batch_size=6))
    return trainer.current_epoch, trainer.global_step


@pytest.mark.parametrize(("how", "place"), [("timer", (0, 0)), ("early stopping", (1, 2))])
def test_a_callback_of_one_host_stops_all(tmp_path: Path, how: str, place: tuple[int, int]) -> None:
    assert run_on_hosts(2, stop_by, tmp_path, how) == [place] * 2


class GathersEveryStep(Regressor):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        gathered: Any = self.all_gather(torch.ones(1))
        self.log("batches", gathered.sum())


def evaluate(rank: int, folder: Path, how: str) -> None:
    callback = Callback()
    if how == "signal" and rank:
        vars(callback)["on_validation_batch_start"] = lambda *_: signal.raise_signal(signal.SIGTERM)
    trainer = host_trainer(folder, callbacks=[callback], use_distributed_sampler=False)
    num_batches = 3 + (rank if how == "batches" else 0)
    module = GathersEveryStep(num_blocks=2)
    trainer.validate(module, regression_data(4 * num_batches, batch_size=4))


def test_hosts_that_evaluate_differently_are_named(tmp_path: Path) -> None:
    for seen in run_on_hosts(2, evaluate, tmp_path, "batches"):
        assert type(seen) is HostError
        assert re.search("in validation_step.*different numbers|lost host .", str(seen))
    first, second = run_on_hosts(2, evaluate, tmp_path, "signal")
    assert type(second) is SIGTERMException
    assert type(first) is HostError
    assert "Host 0 lost host 1" in str(first)
    assert "it raised SIGTERMException" in str(first)


def meet(rank: int, folder: Path, how: str) -> None:
    """Train on three hosts, of which not all get as far as to meet."""
    if rank in {"waits": (1, 2), "comes": (1,)}.get(how, ()):
        return  # it does not come
    gets_to = {"connects": (torch.distributed, "init_process_group")}
    where, name = gets_to.get(how, (time, "sleep"))
    kill = mock.Mock(side_effect=lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    patience = 2.0 if how == "comes" else 5.0
    with (
        mock.patch("roundpipe_lightning.engine.exchange.hosts.PATIENCE_SECONDS", patience),
        mock.patch.object(where, name, kill) if rank == 2 else contextlib.nullcontext(),
    ):
        seconds = 2.0 if how == "waits" else 60.0
        strategy = RoundPipeStrategy(timeout_seconds=seconds)
        trainer = make_trainer(folder, strategy=strategy, num_nodes=3)
        trainer.fit(Regressor(num_blocks=2), regression_data(12, batch_size=4))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("waits", "Host 0 has waited .* s for hosts that have not come: 1, 2 of 3"),
        ("comes", "lost host 2 .before all had met.: it came, and is not heard since 2 s"),
        ("connects", "lost host 2 .before all had met.: it has ended"),
    ],
)
def test_who_is_lost_before_all_have_met_is_named(tmp_path: Path, how: str, message: str) -> None:
    first = run_on_hosts(3, meet, tmp_path, how)[0]
    assert type(first) is HostError
    assert re.search(message, str(first))


def fit_once(rank: int, folder: Path) -> int:
    trainer = host_trainer(folder / f"host{rank}", max_steps=1)
    trainer.fit(Regressor(num_blocks=2), regression_data(12, batch_size=6))
    return trainer.global_step


@pytest.mark.parametrize("restarts", [("0", "0"), ("2", "1")])
def test_hosts_meet_again_that_an_agent_has_restarted(
    tmp_path: Path, restarts: Sequence[str]
) -> None:
    """The store has what hosts told before; agents count the restarts after a failure of theirs."""
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(agent.port),
            "WORLD_SIZE": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "test",
            "LOCAL_RANK": "0",
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
        }
        for rank in (0, 1)
    ]
    assert run_on_hosts(2, fit_once, tmp_path, environments=places) == [1, 1]
    for place, count in zip(places, restarts, strict=True):
        place["TORCHELASTIC_RESTART_COUNT"] = count
    assert run_on_hosts(2, fit_once, tmp_path, environments=places) == [1, 1]


# Launches ----------------------------------------------------------------------------------------


def test_an_address_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**_BY_HAND, "MASTER_ADDR": "no-such-host.invalid"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(HostError, match=r"port 29500 of no-such-host\.invalid"):
        launch.connect(LightningEnvironment(), rank=1, num_nodes=2, timeout_seconds=1)


class OwnOrder(Sampler[int]):
    """Draws from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(self._seed))
        return iter(order.tolist())

    def __len__(self) -> int:
        return 24


def fit_differently(rank: int, folder: Path, what: str) -> None:
    torch.manual_seed(3 + (rank if what == "seed" else 0))
    module = Regressor(num_blocks=2)
    module.save_hyperparameters({"width": 1 + (rank if what == "width" else 0)})
    data = regression_data(24, batch_size=6)
    if what == "order":
        data = DataLoader(data.dataset, batch_size=6, sampler=OwnOrder(rank))
    version = torch.__version__ if what != "torch" or rank == 0 else "2.0.0"
    flags: dict[str, Any] = {"num_nodes": 2 + (rank if what == "num_nodes" else 0)}
    if what == "accumulate":
        flags["accumulate_grad_batches"] = 1 + rank
    part: Any = (0.5, 0.75)[rank] if what == "memory" else "auto"
    trainer = host_trainer(folder, {"memory_share": part}, **flags)
    with mock.patch.object(torch, "__version__", version):
        trainer.fit(module, data)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("seed", "the fingerprint of a parameter .* is .'layers.0.*on host 0 and .'layers.0"),
        ("width", "hparams.width is '1' on host 0 and '2' on host 1"),
        ("torch", "torch's version is .* on host 0 and '2.0.0' on host 1"),
        ("order", r"the order of the data, .*, is \[.*\] on host 0 and \["),
        ("accumulate", "accumulate_grad_batches is 1 on host 0 and 2 on host 1"),
        ("memory", "memory_share is 0.5, 0.75 on the hosts: .* 1 together"),
        ("num_nodes", "num_nodes=2 on host 0, but 3 on host 1"),
    ],
)
def test_hosts_that_differ_are_refused(tmp_path: Path, what: str, message: str) -> None:
    first, second = run_on_hosts(2, fit_differently, tmp_path, what)
    assert type(first) is ConfigurationError
    assert type(second) in (ConfigurationError, HostError)  # lost host 0, if that was faster
    assert re.search(message, str(first))


_SLURM = {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
_TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}
_BY_HAND = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500", "NODE_RANK": "1"}


@pytest.mark.parametrize(
    "variables",
    [_BY_HAND, {**_SLURM, "SLURM_NTASKS_PER_NODE": "1"}, {**_TORCHRUN, "GROUP_RANK": "1"}],
    ids=["by hand", "slurm", "torchrun"],
)
def test_ranks(tmp_path: Path, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with mock.patch.object(rank_zero_only, "rank"), mock.patch.object(fabric_rank_zero, "rank"):
        trainer = make_trainer(tmp_path, strategy="roundpipe", num_nodes=2)
        assert (trainer.global_rank, trainer.node_rank, trainer.local_rank) == (1, 1, 0)
        assert trainer.world_size == trainer.num_nodes == 2
        assert trainer._accelerator_connector.is_distributed
        assert not trainer.is_global_zero


@pytest.mark.parametrize(
    ("variables", "num_nodes", "message"),
    [
        ({"MASTER_ADDR": "host0", "NODE_RANK": "1"}, 2, "MASTER_PORT is not set.*torchrun"),
        ({**_BY_HAND, "NODE_RANK": "2"}, 2, "NODE_RANK=2 with num_nodes=2"),
        ({"LOCAL_RANK": "1"}, 1, "LOCAL_RANK=1 is set.*Unset it"),
        ({**_TORCHRUN, "WORLD_SIZE": "16"}, 2, "16 processes were launched for num_nodes=2"),
        ({**_TORCHRUN, "LOCAL_RANK": "1"}, 2, "as number 1 of its host.*--nproc-per-node=1"),
        (_TORCHRUN, 1, r"2 processes were launched.*without torchrun.*Trainer\(num_nodes"),
        ({**_SLURM, "SLURM_NTASKS_PER_NODE": "2"}, 1, "2 processes were launched"),
    ],
)
def test_wrong_launches(
    tmp_path: Path,
    variables: dict[str, str],
    num_nodes: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        make_trainer(tmp_path, strategy="roundpipe", num_nodes=num_nodes)


# Checkpoints -------------------------------------------------------------------------------------


class WithHostAdamW(Regressor):
    """Its bits of moments, or where they lie, are the name of the optimizer."""

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return super().configure_optimizers()
        if self.optimizer == "muon":
            return torch.optim.Muon([p for p in self.layers.parameters() if p.dim() == 2], lr=0.02)
        if self.optimizer == "disk":
            return HostAdamW(self.parameters(), offload="disk", offload_dir=tempfile.gettempdir())
        return HostAdamW(self.parameters(), lr=0.01, moments=self.optimizer)


def save_and_resume(
    rank: int,
    num: int,
    folder: Path,
    max_steps: int,
    path: Path | None,
    optimizer: str,
    form: Any = "file",
) -> list[Tensor]:
    torch.manual_seed(3)
    module = WithHostAdamW(optimizer, num_blocks=2)
    data = regression_data(NUM_SAMPLES, batch_size=GLOBAL_BATCH // num, shuffle=True)
    trainer = host_trainer(
        folder / f"host{rank}",
        {"checkpoint_io": RoundPipeCheckpointIO(form=form)},
        num_nodes=num,
        max_epochs=-1,
        max_steps=max_steps,
        enable_checkpointing=True,
        callbacks=[
            ModelCheckpoint(
                folder / "saved", filename=f"{num}-{{step}}", every_n_train_steps=6, save_top_k=-1
            )
        ],
    )
    trainer.fit(module, data, ckpt_path=path)
    return [p.detach().clone() for p in module.parameters()]


def chain_of_resumes(
    rank: int, num: int, folder: Path, saved_by_one: Path, kind: str, form: str
) -> dict[str, Any]:
    whole = save_and_resume(rank, num, folder, 10, None, kind, form)
    mine = folder / "saved" / f"{num}-step=6.ckpt"
    return {
        "whole": whole,
        "same": save_and_resume(rank, num, folder / "same", 10, mine, kind, form),
        "from one": save_and_resume(rank, num, folder / "one", 10, saved_by_one, kind, form),
    }


@pytest.mark.suite("8bit-file", "adamw-distributed")
@pytest.mark.parametrize(
    ("kind", "form"),
    [("adamw", "file"), ("8bit", "file"), ("adamw", "distributed"), ("muon", "distributed")],
)
def test_a_checkpoint_goes_on_with_any_number_of_hosts(
    tmp_path: Path, kind: str, form: str
) -> None:
    tolerance = 1e-2 if kind == "muon" else 1e-6  # Muon rounds gradients to 16 bits
    one = save_and_resume(0, 1, tmp_path, 10, None, kind, form)
    first, second = run_on_hosts(
        2, chain_of_resumes, 2, tmp_path, tmp_path / "saved" / "1-step=6.ckpt", kind, form
    )
    for seen in raised((first, second)):
        assert difference(seen["whole"], one) < tolerance
        assert difference(seen["same"], seen["whole"]) == 0, "the same number: the same bits"
        assert difference(seen["from one"], one) < tolerance
    saved = tmp_path / "saved" / "2-step=6.ckpt"
    two = save_and_resume(0, 1, tmp_path / "two", 10, saved, kind, form)
    assert difference(two, one) < tolerance
    if (kind, form) == ("adamw", "distributed"):
        given = (3, tmp_path / "three", 10, saved, kind, form)
        for seen in run_on_hosts(3, save_and_resume, *given):
            assert difference(seen, one) < 1e-6


def save_in(rank: int, folder: Path, forms: Sequence[Any], optimizer: str) -> None:
    """Train the same for each form, with parameters that hosts have a part of."""
    for form in forms:
        torch.manual_seed(3)
        trainer = host_trainer(
            folder / f"host{rank}",  # host 0's is the one that counts
            {"upload_dtype": "bf16", "checkpoint_io": RoundPipeCheckpointIO(form=form)},
            kind=EmulatedStrategy,
            num_nodes=3,
            precision="bf16-mixed",
            max_steps=2,
            callbacks=[LastCheckpoint(str(folder / f"host{rank}" / form), every_n_steps=2)],
            enable_checkpointing=True,
        )
        data = regression_data(24, batch_size=4)
        trainer.fit(WithHostAdamW(optimizer, num_blocks=2), data)


@pytest.mark.parametrize("optimizer", ["adamw", "8bit"])
def test_every_host_writes_its_part(
    tmp_path: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forms = ("file", "distributed")
    assert run_on_hosts(3, save_in, tmp_path, forms, optimizer) == [None] * 3
    paths = [tmp_path / "host0" / form / "last.ckpt" for form in forms]
    one, parts = (RoundPipeCheckpointIO().load_checkpoint(path) for path in paths)
    for key in ("state_dict", "optimizer_states"):
        assert plain(parts[key]) == plain(one[key])
    hosts_of: dict[str, set[str]] = {}
    for index, entry in FileSystemReader(paths[1]).read_metadata().storage_data.items():
        hosts_of.setdefault(index.fqn, set()).add(entry.relative_path[:5])
    assert set.union(*hosts_of.values()) == {"host0", "host1", "host2"}
    has_ranges = optimizer == "adamw"  # else whole parameters
    assert (max(map(len, hosts_of.values())) > 1) == has_ranges
    dcp_to_torch_save(paths[1], tmp_path / "torch.pt")
    assert plain(torch.load(tmp_path / "torch.pt")["state_dict"]) == plain(one["state_dict"])
    if has_ranges:
        free = "roundpipe_lightning.engine.device.host_memory.free_host_bytes"
        monkeypatch.setattr(free, lambda: 0)
        with pytest.raises(FitError, match="roundpipe-merge makes it one file, whose tensors"):
            RoundPipeCheckpointIO().load_checkpoint(paths[1])
    (lost,) = paths[1].glob("host1-*")
    lost.unlink()
    with pytest.raises(CheckpointError, match=f"its file {lost.name} is missing"):
        RoundPipeCheckpointIO().load_checkpoint(paths[1])


def test_what_a_host_gave_before_its_end_is_taken() -> None:
    """It says that it has ended over another connection, which may be faster."""
    hosts: Any = mock.Mock(spec=Hosts, is_closed=False, timeout_seconds=60)
    hosts.watch = mock.Mock(lost=(1, "raised an error"))
    hosts._lost.return_value = HostError("lost")
    late = mock.Mock(**{"is_completed.return_value": False})
    late.wait.side_effect = [RuntimeError("time out"), True]
    Hosts.wait(hosts, late, "step")
    late.wait.side_effect = RuntimeError("time out")
    with pytest.raises(HostError, match="lost"):
        Hosts.wait(hosts, late, "step")


def test_state_on_a_disk_is_refused(tmp_path: Path) -> None:
    for seen in run_on_hosts(2, save_and_resume, 2, tmp_path, 1, None, "disk"):
        assert type(seen) is ConfigurationError
        assert "HostAdamW(offload='disk') does not work on several hosts yet" in str(seen)


class SavesAndGoesOn(Callback):
    """Saves onto a full disk, and goes on; its own state shows parameters of one host."""

    def __init__(self, path: Path, *, is_full: bool, reads: bool) -> None:
        self._path, self._is_full, self._reads = path, is_full, reads
        self.said = ""
        self.read: list[Tensor] = []

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._module = pl_module

    def state_dict(self) -> dict[str, Any]:
        if self._reads:
            self.read = [p.detach().clone() for p in self._module.parameters()]
        return {"sum": sum(float(p.sum()) for p in self.read)}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step != 2:
            return
        try:
            with full_disk(1000) if self._is_full else contextlib.nullcontext():
                trainer.save_checkpoint(self._path)
        except CheckpointError as error:
            self.said = str(error)
        self.after = [p.detach().clone() for p in self._module.parameters()]


def save_and_go_on(rank: int, folder: Path, form: Any, full: int, reader: int) -> Any:
    torch.manual_seed(3)
    saves = SavesAndGoesOn(folder / "x.ckpt", is_full=rank == full, reads=rank == reader)
    trainer = host_trainer(
        folder,
        {"upload_dtype": "bf16", "checkpoint_io": RoundPipeCheckpointIO(form=form)},
        kind=EmulatedStrategy,
        precision="bf16-mixed",
        max_steps=4,
        callbacks=[saves],
    )
    module = Regressor("adamw", num_blocks=2)
    trainer.fit(module, regression_data(24, batch_size=6))
    return saves.said, saves.read or saves.after, saves.after, trainer.global_step


@pytest.mark.suite("distributed-1--1", "file--1-0")
@pytest.mark.parametrize(
    ("form", "full", "reader"),
    [("file", 0, -1), ("distributed", 1, -1), ("file", -1, 0), ("distributed", -1, 1)],
)
def test_a_save_that_fails_or_whose_callbacks_read_stops_nobody(
    tmp_path: Path, form: str, full: int, reader: int
) -> None:
    seen = run_on_hosts(2, save_and_go_on, tmp_path, form, full, reader)
    for said, read, after, steps in raised(seen):
        assert steps == 4
        assert ("untouched" in said) == (full >= 0)
        assert difference(read, after) == difference(read, seen[0][2]) == 0
    if full < 0:
        state = RoundPipeCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")["state_dict"]
        assert difference(list(state.values()), seen[0][2]) == 0


def share_by_speed(rank: int, num: int, folder: Path, max_steps: int, path: Path | None) -> Any:
    """Train with shares that are measured: host 0 is said to be twice as fast."""
    torch.manual_seed(3)
    module, sizes = Regressor("adamw", num_blocks=2), RecordSizes()
    trainer = host_trainer(
        folder / f"host{rank}",
        {"host_share": "measured"},
        num_nodes=num,
        max_epochs=-1,
        max_steps=max_steps,
        enable_checkpointing=True,
        callbacks=[sizes, LastCheckpoint(str(folder), every_n_steps=99)],
    )
    data = regression_data(12 * 14, batch_size=GLOBAL_BATCH // num, shuffle=True)
    with mock.patch.object(BatchShares, "rate", return_value=2.0 - rank):
        trainer.fit(module, data, ckpt_path=path)
    return sizes.seen, [p.detach().clone() for p in module.parameters()]


def measure_and_resume(rank: int, folder: Path) -> Any:
    whole = share_by_speed(rank, 2, folder / "whole", 18, None)
    share_by_speed(rank, 2, folder / "first", 12, None)
    return whole, share_by_speed(rank, 2, folder / "rest", 18, folder / "first" / "last.ckpt")


def test_shares_follow_what_is_measured(tmp_path: Path) -> None:
    _, one = share_by_speed(0, 1, tmp_path / "one", 18, None)
    runs = raised(run_on_hosts(2, measure_and_resume, tmp_path))
    for rank, ((sizes, parameters), (rest, resumed)) in enumerate(runs):
        start = sizes.index(8 - 4 * rank)
        assert 10 <= start <= 13
        assert sizes == [6] * start + [8 - 4 * rank] * (18 - start)
        assert rest == sizes[12:], "a resumed run has the shares that were measured"
        assert difference(parameters, one) < 1e-6
        assert difference(parameters, resumed) == 0
