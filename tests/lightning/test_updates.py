import copy
import mmap
import os
import re
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.callbacks.weight_averaging import EMAWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.engine.update.partial_step import CapturedStep, reason_not_separable
from roundpipe_lightning.engine.update.updater import Updater, UpdateUnit
from roundpipe_lightning.errors import ConfigurationError, GradientError
from roundpipe_lightning.models.batches import batch_size_of, split_batch
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy import runtime
from roundpipe_lightning.strategy.planning.inputs import storage_of
from roundpipe_lightning.strategy.step import loss_with_gradients
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.strategy.updates import parameter_watch
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.moments import call_in_backward
from tests.kit.training import (
    WIDTH,
    ByHand,
    Regressor,
    make_trainer,
    regression_data,
    same_bits,
    train_alike,
)

pytestmark = pytest.mark.usefixtures("steps_of_microbatches")


class Overlapping(RoundPipeStrategy):
    """Overlaps steps on CPU workers, too."""

    _overlaps_on_host = True


class PlainLoop(SingleDeviceStrategy):
    """Lightning's one device, which runs the microbatches of a batch one after the other."""

    def __init__(self, num_microbatches: int) -> None:
        super().__init__(device=torch.device("cpu"))
        self.num_microbatches = num_microbatches

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        module = self.lightning_module
        assert module is not None
        microbatches = split_batch(batch, self.num_microbatches)
        sizes = [batch_size_of(microbatch) for microbatch in microbatches]
        shares = [size / sum(sizes) for size in sizes]
        scale = 1.0 / module.trainer.accumulate_grad_batches
        sums: dict[nn.Parameter, Tensor] = {}
        total = torch.zeros(())
        for microbatch, share in zip(microbatches, shares, strict=True):
            loss: Any = module.training_step(microbatch, batch_idx)
            trained = [p for p in module.parameters() if p.requires_grad]
            found = torch.autograd.grad(
                loss, trained, torch.full_like(loss, share * scale), allow_unused=True
            )
            for parameter, gradient in zip(trained, found, strict=True):
                if gradient is not None:
                    sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
            total = total + loss.detach() * share
        return loss_with_gradients(total, gradients=sums, backward_scale=scale)


class Grouped(Regressor):
    """Two groups that do not follow the blocks, and a schedule that changes with every step."""

    kind: Callable[..., Optimizer] = torch.optim.AdamW

    def configure_optimizers(self) -> Any:
        members = list(self.parameters())
        optimizer = type(self).kind(
            [{"params": members[::2]}, {"params": members[1::2], "lr": 0.02}], lr=0.01
        )
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def shuffled() -> Any:
    return regression_data(29, shuffle=True)


def fit(
    strategy: Any, module: LightningModule | None = None, **flags: Any
) -> tuple[LightningModule, Trainer]:
    torch.manual_seed(3)
    module = Grouped() if module is None else module
    trainer = make_trainer(strategy=strategy, **{"max_epochs": 2, **flags})
    trainer.fit(module, shuffled(), regression_data(9))
    return module, trainer


def _fit_with_everything_on(
    folder: Path, strategy: Any, devices: int
) -> tuple[LightningModule, Trainer]:
    torch.manual_seed(3)
    module = Grouped(num_blocks=3)
    trainer = make_trainer(
        folder,
        strategy=strategy,
        devices=devices,
        callbacks=[
            EMAWeightAveraging(decay=0.9, use_buffers=False),
            ModelCheckpoint(folder / "saved", every_n_train_steps=7),
        ],
        enable_checkpointing=True,
        gradient_clip_val=0.05,
        accumulate_grad_batches=2,
        val_check_interval=12,
        max_epochs=2,
        max_steps=20,
    )
    trainer.fit(module, regression_data(98, batch_size=4, shuffle=True), regression_data(4))
    assert trainer.global_step == 20
    return module, trainer


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> tuple[LightningModule, Trainer]:
    return _fit_with_everything_on(tmp_path_factory.mktemp("one"), PlainLoop(2), 1)


@pytest.mark.suite("RoundPipeStrategy-2", "EmulatedStrategy-2")
@pytest.mark.parametrize(
    ("strategy", "devices"), [(RoundPipeStrategy, 2), (Overlapping, 2), (EmulatedStrategy, 2)]
)
def test_20_steps_with_everything_on_are_those_of_one_device(
    tmp_path: Path, one_device: tuple[LightningModule, Trainer], strategy: Any, devices: int
) -> None:
    expected, one = one_device
    run = strategy(num_microbatches=2, dry_run=False)
    module, many = _fit_with_everything_on(tmp_path, run, devices)
    assert same_bits(module, expected)
    assert many.fit_loop.state_dict() == one.fit_loop.state_dict()
    assert many.callback_metrics["val_loss"] == one.callback_metrics["val_loss"]


class _Early:
    """Counts what was stepped before the step was submitted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_begun = self.num_taken = 0
        begin, submit = Updater.begin, Updater.submit

        def counted(updater: Updater, optimizer: Optimizer, **options: Any) -> None:
            self.num_begun += 1
            begin(updater, optimizer, **options)

        def recording(updater: Updater, optimizer: Optimizer, **options: Any) -> Any:
            taken = submit(updater, optimizer, **options)
            self.num_taken += len(taken)
            return taken

        monkeypatch.setattr(Updater, "begin", counted)
        monkeypatch.setattr(Updater, "submit", recording)


@pytest.mark.parametrize("strategy", [Overlapping, EmulatedStrategy])
def test_blocks_stepped_during_the_backward_pass(
    strategy: Any, slow_updates: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = _Early(monkeypatch)
    expected, _ = fit(PlainLoop(2), max_epochs=3)
    module, trainer = fit(strategy(num_microbatches=2, dry_run=False), devices=2, max_epochs=3)
    assert same_bits(module, expected)
    assert early.num_begun == trainer.global_step - 1 > 0, "in the first step it looks who reads"
    in_blocks = len([name for name, _ in module.named_parameters() if "layers" in name])
    assert early.num_taken == early.num_begun * in_blocks


def _small_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler(device="cpu", init_scale=2.0)  # no step is skipped


class _Looks(Callback):
    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda *_: None)


class _Saves(Callback):
    def on_exception(self, *_: Any) -> None:
        """Save, perhaps."""


@pytest.mark.parametrize(
    "flags",
    [
        {"gradient_clip_val": 1.0},
        {"accumulate_grad_batches": 2},
        {"callbacks": [_Looks("on_after_backward")]},
        {"callbacks": [_Looks("on_before_zero_grad")]},
        {"callbacks": [_Saves()]},
        {"callbacks": [ModelCheckpoint(save_on_exception=True)], "enable_checkpointing": True},
        {"detect_anomaly": True},
        {"plugins": [RoundPipePrecision("16-mixed", scaler=_small_scaler())]},
    ],
)
def test_who_looks_at_all_gradients_gets_them(flags: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    early = _Early(monkeypatch)
    fit(EmulatedStrategy(num_microbatches=1, dry_run=False), max_steps=2, **flags)
    assert not early.num_begun


def test_hooks_of_parameters_get_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    early, module, seen = _Early(monkeypatch), Grouped(), []
    weight = module.get_parameter("layers.1.inner.weight")
    weight.register_hook(lambda gradient: seen.append(gradient.shape))
    fit(EmulatedStrategy(num_microbatches=1, dry_run=False), module, max_steps=3)
    assert len(seen) == 3
    assert not early.num_begun


class _Broken(Regressor):
    """Fails in the backward pass of the second step, when some block has been stepped."""

    def __init__(self, taken: threading.Event) -> None:
        super().__init__(num_blocks=2)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.taken = [taken]

    def forward(self, x: Tensor) -> Tensor:
        is_broken = self.trainer.global_step == 1

        def fail() -> None:
            if is_broken:
                assert self.taken[0].wait(timeout=60)
                raise ValueError("late in the backward pass")

        return super().forward(call_in_backward(self.embed(x), fail))


def test_a_step_that_fails_half_way_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = threading.Event()
    take = Updater._take

    def recording(updater: Updater, gradients: Any, elsewhere: Any) -> Any:
        found = take(updater, gradients, elsewhere)
        if module.trainer.global_step == 1:
            taken.set()
        return found

    monkeypatch.setattr(Updater, "_take", recording)
    module = _Broken(taken)
    with pytest.raises(ValueError, match="late in the backward pass") as caught:
        fit(EmulatedStrategy(num_microbatches=1, dry_run=False), module)
    notes = " ".join(vars(caught.value)["__notes__"])
    assert re.search(r"\d+ parameters had been updated already when the step failed", notes)
    assert not [t for t in threading.enumerate() if t.name == "roundpipe-updates"]


@pytest.mark.parametrize("name", ["AdamW8bit", "Lion8bit"])
def test_optimizers_of_bitsandbytes(name: str) -> None:
    """They keep tables, and settings by the number of the parameter: they are stepped whole."""
    kind = getattr(pytest.importorskip("bitsandbytes").optim, name)

    class Chosen(Grouped):
        pass

    Chosen.kind = staticmethod(partial(kind, min_8bit_size=64))
    assert "keeps tensors" in str(reason_not_separable(kind(Regressor().parameters(), lr=0.01)))
    options: Any = {"data": shuffled(), "max_epochs": 2, "tolerance": 0.0, "first": PlainLoop(2)}
    one, _ = train_alike(Chosen, EmulatedStrategy(num_microbatches=2), **options)
    assert all(p.isfinite().all() for p in one.parameters())


def waiting_and_not() -> list[RoundPipeStrategy]:
    return [RoundPipeStrategy(num_microbatches=2), Overlapping(num_microbatches=2)]


def _read(module: Any, seen: list[Tensor]) -> None:
    seen.append(torch.cat([p.detach().flatten() for p in module.parameters()]))


def _in_callback(hook: str, seen: list[Tensor]) -> Any:
    reads = {hook: lambda self, trainer, module, *_: _read(module, seen)}
    return Grouped(), shuffled(), [type("Reads", (Callback,), reads)()]


def _in_module(hook: str, seen: list[Tensor]) -> Any:
    def note(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(super(kind, self), hook)(*args, **kwargs)
        _read(self, seen)
        return result

    kind = type("Reads", (Grouped,), {hook: note})
    return kind(), shuffled(), []


def _after_step(seen: list[Tensor]) -> Any:
    class Hooked(Grouped):
        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            made[0][0].register_step_post_hook(lambda *_: _read(self, seen))
            return made

    return Hooked(), shuffled(), []


def _in_collate(seen: list[Tensor]) -> Any:
    module = Grouped()

    def collate(rows: Any) -> Any:
        _read(module, seen)
        return torch.utils.data.default_collate(rows)

    data = regression_data(12).dataset
    return module, torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate), []


def _in_new_loaders(seen: list[Tensor]) -> Any:
    class Chooses(Grouped):
        def train_dataloader(self) -> Any:
            _read(self, seen)
            return shuffled()

    return Chooses(), None, []


READERS: dict[str, Callable[[list[Tensor]], Any]] = {
    **{
        f"callback's {hook}": partial(_in_callback, hook)
        for hook in (
            "on_train_batch_end",
            "on_train_batch_start",
            "on_train_epoch_end",
            "on_train_epoch_start",
            "on_validation_start",
            "on_train_end",
            "on_before_zero_grad",
            "on_after_backward",
        )
    },
    **{
        f"module's {hook}": partial(_in_module, hook)
        for hook in (
            "on_train_batch_end",
            "on_validation_model_zero_grad",
            "on_after_batch_transfer",
            "lr_scheduler_step",
            "optimizer_step",
        )
    },
    "hook of the step": _after_step,
    "collate function": _in_collate,
    "loaders that are made anew": _in_new_loaders,
}


@pytest.mark.suite(
    "callback's on_train_batch_end",
    "callback's on_train_batch_start",
    "callback's on_validation_start",
    "module's on_train_batch_end",
    "module's on_after_batch_transfer",
    "module's optimizer_step",
    "hook of the step",
    "collate function",
    "loaders that are made anew",
)
@pytest.mark.parametrize("name", READERS)
def test_whoever_reads_finds_finished_parameters(name: str, slow_updates: None) -> None:
    runs = []
    for strategy in waiting_and_not():
        torch.manual_seed(3)
        seen: list[Tensor] = []
        module, data, callbacks = READERS[name](seen)
        trainer = make_trainer(
            strategy=strategy,
            callbacks=callbacks,
            max_epochs=2,
            limit_train_batches=2,
            reload_dataloaders_every_n_epochs=1,
        )
        trainer.fit(module, data, regression_data(9))
        runs.append(seen)
    assert len(runs[0]) == len(runs[1]) > 0
    assert all(map(torch.equal, *runs))


def _norm(module: nn.Module) -> Tensor:
    return torch.stack([p.detach().norm() for p in module.parameters()])


class _Kept(Callback):
    """Keeps views, without a clone, and looks at them long after."""

    def __init__(self, note: Callable[[Any], Any]) -> None:
        self.note = note
        self.views: list[Any] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.views = [value.view(-1) for value in module.state_dict().values()]
            self.views += [p.detach().numpy() for p in module.parameters()]
        self.note([torch.as_tensor(view).clone() for view in self.views])


class _Averages(Callback):
    """Has the parameters themselves since the beginning."""

    def __init__(self, note: Callable[[Any], Any]) -> None:
        self.note = note

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        self.parameters = list(module.parameters())

    def on_train_batch_start(self, *_: Any) -> None:
        self.note([p.clone() for p in self.parameters])


class _Moments(Callback):
    def __init__(self, note: Callable[[Any], Any]) -> None:
        self.note = note

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        state = trainer.optimizers[0].state
        self.note([state[p]["exp_avg"].clone() for p in trainer.lightning_module.parameters()])


class _Gradients(Callback):
    def __init__(self, note: Callable[[Any], Any]) -> None:
        self.note = note

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.note([p.grad.clone() for p in module.parameters()])


class _Copies(Callback):
    def __init__(self, note: Callable[[Any], Any]) -> None:
        self.note = note

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        twin = copy.deepcopy(module.layers)
        assert {type(p) for p in twin.parameters()} == {nn.Parameter}
        self.note([p.detach().clone() for p in twin.parameters()])


class _Forks(Callback):
    """Has another process look, whose memory is what it was when that was made."""

    def __init__(self, note: Callable[[Any], Any]) -> None:
        self.note = note

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        memory = torch.frombuffer(mmap.mmap(-1, 4), dtype=torch.float32)
        child = os.fork()
        if child == 0:
            memory[0] = sum(float(p.detach().sum()) for p in module.parameters())
            os._exit(0)
        os.waitpid(child, 0)
        self.note([memory.clone()])


@pytest.mark.filterwarnings("ignore:.*use of fork.. may lead to deadlocks")
@pytest.mark.parametrize("kind", [_Kept, _Averages, _Moments, _Gradients, _Copies, _Forks])
def test_whoever_looks_finds_what_one_device_has(kind: Any, slow_updates: None) -> None:
    runs = []
    for strategy in (PlainLoop(2), EmulatedStrategy(num_microbatches=2, dry_run=False)):
        seen: list[Tensor] = []
        flags: Any = {"limit_val_batches": 0, "max_epochs": 1}
        fit(strategy, devices=1, callbacks=[kind(seen.extend)], **flags)
        runs.append(seen)
    assert len(runs[0]) == len(runs[1]) > 0
    assert all(map(torch.equal, *runs))


def test_a_gradient_that_is_gone_is_no_silence() -> None:
    class LooksLate(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                _ = module.layers[0].inner.weight.grad

    strategy = EmulatedStrategy(num_microbatches=2, dry_run=False)
    run = partial(fit, strategy, max_epochs=1)
    with pytest.raises(GradientError, match=r"LooksLate.on_train_batch_end .*_sync = True"):
        run(callbacks=[LooksLate()])
    kind = type("Says", (LooksLate,), {"requires_optimizer_sync": True})
    run(callbacks=[kind()])


class _LooksOnce(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step in (2, 3):
            _norm(module)


@pytest.mark.parametrize(
    ("callback", "told"),
    [
        (_LooksOnce(), r"_LooksOnce.on_train_batch_end \(test_updates.py:\d+\) looks at param"),
        (LambdaCallback(on_after_backward=lambda *_: None), "on_after_backward of LambdaCallback"),
        (_Kept(lambda views: None), "Somebody keeps a view of a parameter"),
    ],
)
def test_lost_overlap_is_told_once(callback: Any, told: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = EmulatedStrategy(num_microbatches=2, dry_run=False)
        fit(strategy, callbacks=[callback], max_epochs=1)
    assert len([w for w in caught if re.search(told, str(w.message))]) == 1


def test_all_is_the_users_again_afterwards() -> None:
    mine = [LambdaCallback()]
    strategy = EmulatedStrategy(num_microbatches=2, dry_run=False)
    module, trainer = fit(strategy, callbacks=mine, max_steps=2)
    assert trainer.callbacks == mine  # type: ignore[attr-defined]
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    assert {type(o.state) for o in trainer.optimizers} == {defaultdict}


def test_whose_hooks_are_to_find_gradients() -> None:
    class Mine(Callback):
        def on_after_backward(self, *_: Any) -> None:
            pass

    class Blind(Mine):
        requires_optimizer_sync = False

        def on_after_backward(self, *_: Any) -> None:
            pass

    class Seeing(Blind):
        def on_after_backward(self, *_: Any) -> None:
            pass

    hook = "on_after_backward"
    assert parameter_watch.needs_gradients(Mine(), hook)
    assert not parameter_watch.needs_gradients(Blind(), hook)
    assert parameter_watch.needs_gradients(Seeing(), hook)
    assert parameter_watch.needs_gradients(LambdaCallback(on_after_backward=lambda *_: None), hook)
    assert not parameter_watch.needs_gradients(Regressor(), hook)


def test_a_step_runs_while_the_next_batch_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = threading.Event()
    waited: list[bool] = []

    def run(unit: UpdateUnit, step: CapturedStep) -> None:
        waited.append(fetched.wait(60))
        step.run(unit.parameters)

    class Batches(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            if index == 1:
                fetched.set()
            return torch.ones(8), torch.ones(1)

    monkeypatch.setattr(runtime, "Updater", partial(Updater, run_unit=run))
    trainer = make_trainer(
        strategy=Overlapping(num_microbatches=1), max_epochs=1, limit_val_batches=0
    )
    # Lightning fetches a batch ahead where it does not know how many there are.
    loader = torch.utils.data.DataLoader(Batches(), batch_size=1)
    trainer.fit(Regressor(), loader)
    assert all(waited)
    assert trainer.global_step == 2


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_are_dropped_when_they_have_been_used(keeps: bool) -> None:
    in_step: list[int] = []
    after: list[int] = []

    class Looks(Callback):
        requires_optimizer_sync = keeps

        def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
            after.append(sum(p.grad is not None for p in module.parameters()))

        def on_before_zero_grad(self, *_: Any) -> None:
            """Be there."""

    torch.manual_seed(3)
    module = Grouped(on_step=lambda *_: in_step.append(sum(p.grad is not None for p in watched)))
    watched = list(module.parameters())
    fit(
        Overlapping(num_microbatches=1, dry_run=False),
        module,
        callbacks=[Looks()],
        limit_val_batches=0,
    )
    assert set(after) == {len(watched)}
    assert set(in_step[1:]) == ({len(watched)} if keeps else {0})


class _Fails(torch.optim.SGD):
    count = 0
    allowed = 0

    def step(self, closure: Any = None) -> Any:
        members = [p for group in self.param_groups for p in group["params"]]
        if any(p.ndim == 2 and len(p) == 1 for p in members):  # the head
            type(self).count += 1
            if self.count > self.allowed:
                raise OSError("the disk is full")
        return super().step(closure)


@pytest.mark.parametrize("allowed", [2, 7])  # the latter: in the last step
def test_an_error_in_the_updater_is_raised_once(allowed: int) -> None:
    class Kind(_Fails):
        pass

    class Failing(Regressor):
        def configure_optimizers(self) -> Any:
            optimizer = Kind(self.parameters(), lr=0.1)
            Kind.allowed = 10**9
            return optimizer

        def on_fit_start(self) -> None:
            Kind.count, Kind.allowed = 0, allowed

    with pytest.raises(OSError, match="the disk is full") as caught:
        fit(Overlapping(num_microbatches=2), Failing(), limit_val_batches=0)
    notes = vars(caught.value)["__notes__"]
    assert notes == ["This happened while Kind updated 'head.weight'."]
    module, _ = fit(Overlapping(num_microbatches=2))
    assert all(p.isfinite().all() for p in module.parameters())


def test_an_error_of_the_user_does_not_lose_the_last_step(slow_updates: None) -> None:
    def fail(view: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise KeyError("mine")

    modules = []
    for strategy in waiting_and_not():
        torch.manual_seed(3)
        modules.append(Regressor(on_step=fail))
        with pytest.raises(KeyError, match="mine"):
            fit(strategy, modules[-1])
    assert same_bits(*modules)


# ------------------------------------------------------------------------------------ asynchronous


class _Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class Sum(LightningModule):
    """Half the square of the sum of two weights: each one's gradient is their sum."""

    layers: Any
    kind = torch.optim.SGD

    def __init__(self, rates: list[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Adds() for _ in range(2))
        self.rates = rates
        self.history: list[float] = []

    def forward(self, batch: Tensor) -> Tensor:
        x = torch.zeros_like(batch)
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean() / 2  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.evaluated = float(self(batch)[0].detach()) / 2

    def on_train_batch_end(self, *_: Any) -> None:
        self.history.append(float(self.layers[0].weight.detach()))

    def configure_optimizers(self) -> Any:
        optimizer = self.kind(self.parameters(), lr=1.0)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.rates[step])
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


RATES = [0.25, 0.125, 0.25, 0.5, 0.125, 0.25, 0.5, 0.25, 0.5, 0.5]


def by_hand(staleness: int, *, window: int = 1, num_batches: int = 8) -> list[float]:
    """Weights after every batch, when gradients are of weights that are so many updates old."""
    weights = [1.0]
    after = []
    for batch in range(num_batches):
        if batch % window == window - 1:
            step = len(weights) - 1
            gradient = 2 * weights[max(0, step - staleness)]
            weights.append(weights[-1] - RATES[step] * gradient)
        after.append(weights[-1])
    return after


class _Counts(torch.optim.SGD):
    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


class _Whole(Sum):
    kind = _Counts


class _CountsInGroup(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()
        return loss


class _InParts(Sum):
    kind = _CountsInGroup


@pytest.mark.suite(
    "async-1-_InParts-EmulatedStrategy-1",
    "async-1-_Whole-Overlapping-1",
    "async-1-Sum-Overlapping-2",
    "exact-0-_Whole-EmulatedStrategy-2",
    "exact-0-_InParts-Overlapping-2",
    "exact-0-Sum-EmulatedStrategy-1",
)
@pytest.mark.parametrize(
    ("make", "kind", "window"),
    [
        (Sum, EmulatedStrategy, 1),
        (Sum, Overlapping, 2),
        (_Whole, EmulatedStrategy, 2),
        (_Whole, Overlapping, 1),
        (_InParts, EmulatedStrategy, 1),
        (_InParts, Overlapping, 2),
    ],
)
@pytest.mark.parametrize(("update", "staleness"), [("exact", 0), ("async", 1)])
def test_staleness_by_hand(
    make: type[Sum],
    kind: type[RoundPipeStrategy],
    window: int,
    update: str,
    staleness: int,
    slow_updates: None,
) -> None:
    module = make(RATES)
    trainer = make_trainer(
        strategy=kind(num_microbatches=2, update=update),
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=window,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, vectors(), vectors(1))
    assert module.history == by_hand(staleness, window=window)
    assert module.history not in (by_hand(1 - staleness, window=window), by_hand(2, window=window))
    assert module.evaluated == module.history[-1]  # the newest
    (group,) = trainer.optimizers[0].param_groups
    assert group.get("count") == (trainer.global_step if make is _InParts else None)


def vectors(num_batches: int = 4) -> Any:
    return torch.utils.data.DataLoader([torch.zeros(1)] * 4 * num_batches, batch_size=4)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------- bad input


class _Poisoned(Regressor):
    layers: Any

    def on_train_start(self) -> None:
        self.handle = self.layers[2].inner.weight.register_hook(self._poison)

    def _poison(self, gradient: Tensor) -> Tensor:
        poisoned = gradient.clone()
        if self.trainer.global_step == 3:
            poisoned[0, :2] = float("nan")
        return poisoned


@pytest.mark.parametrize("kind", [RoundPipeStrategy, Overlapping])
def test_a_nan_is_named(kind: Any) -> None:
    message = (
        r"gradient of 'layers\.2\.inner\.weight' \(block 'layers\.2'\) has 2 values of 128 that "
        r"are not finite .* in batch 3 of epoch 0\. The optimizer has not stepped"
    )
    module = _Poisoned()
    strategy = kind(num_microbatches=2, check_gradients=True)
    with pytest.raises(GradientError, match=message):
        fit(strategy, module, gradient_clip_val=0.1)
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_names_it_too() -> None:
    with pytest.raises(GradientError, match=r"layers\.2\.inner\.weight"):
        fit(RoundPipeStrategy(num_microbatches=2), _Poisoned(), detect_anomaly=True)


def test_without_a_wish_a_nan_is_what_it_is_on_one_device() -> None:
    module, _ = fit(RoundPipeStrategy(num_microbatches=2), _Poisoned())
    assert module.get_parameter("layers.2.inner.weight").isnan().any()


_CALLS: list[int] = []


class _CountsCalls(torch.optim.SGD):
    """A step of one's own, which does what no trial can see."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        _CALLS.append(len(self.param_groups[0]["params"]))
        return result


def test_async_calls_the_step_of_an_optimizer_of_ones_own_once() -> None:
    class Own(Sum):
        kind = _CountsCalls

        def on_train_start(self) -> None:
            _CALLS.clear()

    strategy = RoundPipeStrategy(num_microbatches=2, update="async")
    make_trainer(strategy=strategy, max_epochs=1).fit(Own(RATES), vectors())
    assert _CALLS == [2] * 4


def test_async_is_refused_where_the_module_steps_itself() -> None:
    with pytest.raises(ConfigurationError, match="update='async': ByHand sets automatic_opt"):
        fit(RoundPipeStrategy(num_microbatches=1, update="async"), ByHand())


class _Unfreezes(Callback):
    """Hands the optimizer a parameter that it has not."""

    def on_train_epoch_start(self, trainer: Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.head.bias.requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": [module.head.bias], "lr": 0.5})


class _Starts(Grouped):
    """The bias of the head is not trained from the start."""

    head: Any

    def configure_optimizers(self) -> Any:
        self.head.bias.requires_grad_(False)
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def test_parameters_added_to_the_optimizer_later(slow_updates: None) -> None:
    strategies = [Overlapping(num_microbatches=4), EmulatedStrategy(num_microbatches=4)]
    flags: Any = {"callbacks": lambda: [_Unfreezes()], "max_epochs": 2, "data": shuffled()}
    one, *_ = train_alike(_Starts, *strategies, first=PlainLoop(4), tolerance=0.0, **flags)
    torch.manual_seed(3)
    assert not torch.equal(one.head.bias, _Starts().head.bias)


def test_the_second_copy_is_counted() -> None:
    module = Regressor()
    module.layers.requires_grad_(False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before, after = (storage_of([optimizer], keeps_previous=way) for way in (False, True))
    assert after.optimizer_bytes - before.optimizer_bytes == 4.0
    master = module.get_parameter("head.weight")
    narrow = storage_of([optimizer], keeps_previous=True, masters={master})
    saved = (after.optimizer_bytes - narrow.optimizer_bytes) * (WIDTH + 1)
    assert saved == pytest.approx(2 * WIDTH)


@pytest.mark.suite("norm-0.05-2", "value-0.01-1")
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("algorithm", "limit"), [("norm", 0.05), ("value", 0.01)])
def test_clipping_is_that_of_one_device(algorithm: str, limit: float, window: int) -> None:
    train_alike(
        Grouped,
        Overlapping(num_microbatches=2),
        EmulatedStrategy(num_microbatches=2),
        first=PlainLoop(2),
        tolerance=0.0,
        data=regression_data(29, shuffle=True),
        gradient_clip_val=limit,
        gradient_clip_algorithm=algorithm,
        accumulate_grad_batches=window,
        max_epochs=window,
    )


@pytest.mark.parametrize("mode", ["blocks", "step"])
def test_batches_in_flight_are_clipped_in_both_modes(mode: Any) -> None:
    options: Any = {"num_microbatches": 2, "microbatching": mode, "update": "async"}
    train_alike(
        Regressor,
        EmulatedStrategy(**options),
        first=RoundPipeStrategy(**options),
        gradient_clip_val=0.05,
        max_epochs=2,
    )


@pytest.mark.parametrize("kind", [Overlapping, EmulatedStrategy])
def test_norms_are_measured_while_the_backward_pass_runs(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those of gradients that come last, outside the blocks, are left for the end."""
    threads: Counter[str] = Counter()
    norm = torch.linalg.vector_norm

    def counted(x: Tensor, *args: Any) -> Any:
        threads[threading.current_thread().name] += x.ndim > 0
        return norm(x, *args)

    expected, _ = fit(PlainLoop(2), gradient_clip_val=0.05, max_steps=3)
    monkeypatch.setattr(torch.linalg, "vector_norm", counted)
    flags: Any = {"gradient_clip_val": 0.05, "max_steps": 3, "devices": 2}
    module, _ = fit(kind(num_microbatches=2, dry_run=False), **flags)
    assert same_bits(module, expected)
    in_blocks = len([name for name, _ in module.named_parameters() if "layers" in name])
    outside = len(list(module.parameters())) - in_blocks
    assert threads == {"roundpipe-updates": 3 * in_blocks, "MainThread": 3 * (outside + 1)}


class Scales(Grouped):
    """Notes the loss scale after every batch, and overflows with the largest one."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        plugin: Any = self.trainer.precision_plugin
        self.scales.append(plugin.loss_scale)


@pytest.mark.suite("EmulatedStrategy-async", "Overlapping-exact")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # the first is skipped
@pytest.mark.parametrize("update", ["exact", "async"])
@pytest.mark.parametrize("strategy", [Overlapping, EmulatedStrategy])
def test_steps_whose_gradients_overflow_are_skipped(strategy: Any, update: str) -> None:
    modules: list[Any] = []
    for kind in (RoundPipeStrategy, strategy):
        torch.manual_seed(3)
        scaler = torch.amp.GradScaler(device="cpu", init_scale=2.0**24, growth_interval=3)
        module, _ = fit(
            kind(num_microbatches=2, update=update, dry_run=False),
            Scales(),
            devices=2,
            max_epochs=3,
            plugins=[RoundPipePrecision("16-mixed", scaler=scaler)],
            gradient_clip_val=0.5,
        )
        modules.append(module)
    one, other = modules
    assert one.scales == other.scales
    fallen = [after < before for before, after in zip(one.scales, one.scales[1:], strict=False)]
    assert any(fallen), "a step is skipped"
    assert not all(fallen), "one is made"
    assert same_bits(one, other)
