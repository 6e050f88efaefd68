import copy
import functools
import pickle
import time
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint, Timer

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.checkpoint.compatibility import InexactResumeWarning
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.planning.inputs import storage_of
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.training import (
    WIDTH,
    Regressor,
    make_trainer,
    regression_data,
    same_bits,
    train_alike,
)

pytestmark = pytest.mark.filterwarnings(r"ignore:`?.fit\(ckpt_path=")


class _CountedAdamW(torch.optim.AdamW):
    """A user's optimizer that notes its steps."""

    calls: ClassVar[list[str]] = []

    def __init__(self, parameters: Any, label: str) -> None:
        super().__init__(parameters, lr=0.01)
        self.label = label

    def step(self, *arguments: Any, **options: Any) -> Any:
        self.calls.append(self.label)
        return super().step(*arguments, **options)


class _Counted(Regressor):
    """Trained by it."""

    def configure_optimizers(self) -> Any:
        return _CountedAdamW(self.parameters(), "mine")


def test_clocks_that_tests_replace_are_read_as_on_one_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reads(strategy: Any) -> int:
        num_reads = 0

        def counted(clock: Any) -> Any:
            def read() -> Any:
                nonlocal num_reads
                num_reads += 1
                return clock()

            return read

        with monkeypatch.context() as patch:
            for name in ("monotonic", "perf_counter"):
                patch.setattr(time, name, counted(getattr(time, name)))
            trainer = make_trainer(strategy=strategy, max_epochs=1, callbacks=[Timer()])
            trainer.fit(Regressor(), regression_data(), regression_data())
        return num_reads

    assert reads("roundpipe") == reads("auto") > 0


class _Copies(Callback):
    """Copies the Trainer's callbacks and thereby all that they know of."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        copied = copy.deepcopy(trainer.callbacks)  # type: ignore[attr-defined]
        for callback in copied:
            callback.on_train_batch_start(trainer, trainer.lightning_module, None, 0)


def test_a_trainer_can_be_copied_and_pickled() -> None:
    strategy = EmulatedStrategy(num_microbatches=2)
    trainer = make_trainer(strategy=strategy, max_epochs=1, callbacks=[_Copies()])
    trainer.fit(Regressor(), regression_data())
    for copied in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        copied.fit_loop.max_epochs = 2
        copied.fit(copied.lightning_module, regression_data())
        assert copied.global_step == 2 * trainer.global_step


class _Closing(torch.optim.AdamW):
    """Needs a closure and evaluates it without gradients, as some libraries' optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step()


@pytest.mark.filterwarnings("ignore:The memory of LBFGS's state is not in the plan")
@pytest.mark.parametrize(
    "make_optimizer", [functools.partial(torch.optim.LBFGS, max_iter=4), _Closing]
)
def test_optimizers_that_evaluate_the_loss_themselves(make_optimizer: Any) -> None:
    class Closes(Regressor):
        def configure_optimizers(self) -> Any:
            return make_optimizer(self.parameters(), lr=0.1)

    ours = [kind(num_microbatches=1) for kind in (RoundPipeStrategy, EmulatedStrategy)]
    flags: Any = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    train_alike(Closes, *ours, tolerance=0.0, **flags)


class _Drawing(torch.optim.Optimizer):
    """Begins with random numbers, counts beside its parameters' states, steps in a mode alone."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.is_training = False

    def train(self) -> None:
        self.is_training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        assert self.is_training
        self.state["number"] = self.state.get("number", 0) + 1  # type: ignore[index,call-overload]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["velocity"] = torch.randn_like(parameter)
                state["velocity"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(state["velocity"], alpha=group["lr"])
        return loss


class _Drawn(Regressor):
    def configure_optimizers(self) -> Any:
        return _Drawing(self.parameters(), lr=0.01)

    def on_train_start(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.optimizer.train()


@pytest.mark.filterwarnings("ignore:_Drawing is stepped as a whole")
def test_an_optimizer_that_draws_random_numbers_draws_the_same() -> None:
    ours = [kind(num_microbatches=1) for kind in (RoundPipeStrategy, EmulatedStrategy)]
    train_alike(_Drawn, *ours, tolerance=0.0)


class _Entries(Callback):
    """Notes the entries of checkpoints that hooks are given."""

    def __init__(self) -> None:
        self.found: list[set[str]] = []

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.found.append(set(checkpoint) - {"callbacks"})

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.on_save_checkpoint(trainer, module, checkpoint)


def test_hooks_are_given_lightnings_entries_of_a_checkpoint(tmp_path: Path) -> None:
    entries, path = _Entries(), tmp_path / "saved.ckpt"
    trainer = make_trainer(strategy="roundpipe", max_epochs=1, callbacks=[entries])
    trainer.fit(Regressor(), regression_data())
    trainer.save_checkpoint(path)
    trainer = make_trainer(strategy="roundpipe", max_epochs=2, callbacks=[entries])
    trainer.fit(Regressor(), regression_data(), ckpt_path=path)
    saved, loaded = entries.found
    assert saved == loaded
    assert "roundpipe" in torch.load(path, weights_only=True)


def test_a_users_optimizer_makes_no_step_but_the_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_CountedAdamW, "calls", [])
    trainer = make_trainer(strategy="roundpipe", max_epochs=1)
    trainer.fit(_Counted(), regression_data())
    assert _CountedAdamW.calls == ["mine"] * trainer.global_step


def test_the_state_of_a_users_optimizer_is_known_nevertheless() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert storage_of([_CountedAdamW([parameter], "mine")]).optimizer_bytes == 8.0


def test_slurm_environment_named_outside_of_a_job() -> None:
    environment = SLURMEnvironment(auto_requeue=False)
    trainer = make_trainer(strategy="roundpipe", devices=2, max_epochs=1, plugins=[environment])
    trainer.fit(Regressor(), regression_data())
    assert trainer.world_size == 1


def _fit(module: Regressor, **options: Any) -> Trainer:
    path = options.pop("ckpt_path", None)
    strategy = RoundPipeStrategy(num_microbatches=2)
    trainer = make_trainer(strategy=strategy, num_sanity_val_steps=0, **options)
    torch.manual_seed(0)
    trainer.fit(module, regression_data(), regression_data(), ckpt_path=path)
    return trainer


@pytest.mark.parametrize("states", [[], {}])
def test_a_checkpoint_whose_optimizer_states_were_taken_out(tmp_path: Path, states: Any) -> None:
    torch.manual_seed(3)
    first = Regressor("adamw")
    _fit(first, max_epochs=1).save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt")
    torch.save({**checkpoint, "optimizer_states": states}, tmp_path / "x.ckpt")
    module = Regressor("adamw")
    with pytest.warns(InexactResumeWarning, match="no states of optimizers"):
        trainer = _fit(module, max_epochs=2, ckpt_path=tmp_path / "x.ckpt")
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    assert steps == {4}  # those of the second epoch
    assert not same_bits(module, first)


class _FailingValidation(Regressor):
    """Fails in the middle of the validation after the second epoch, if it is asked to."""

    fails = True

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.fails and self.current_epoch == 1 and batch_idx == 2:
            raise OverflowError("the validation failed")
        super().validation_step(batch, batch_idx)


def test_an_interrupted_validation_is_counted_once(tmp_path: Path) -> None:
    whole = Regressor()
    expected = _fit(whole).fit_loop.state_dict()
    saves = {"callbacks": [OnExceptionCheckpoint(tmp_path)], "enable_checkpointing": True}
    with pytest.raises(OverflowError, match="the validation failed"):
        _fit(_FailingValidation(), **saves)
    module = _FailingValidation()
    module.fails = False
    resumed = _fit(module, ckpt_path=tmp_path / "on_exception.ckpt")
    progress = "epoch_loop.val_loop.batch_progress"
    assert resumed.fit_loop.state_dict()[progress] == expected[progress]
    assert resumed.fit_loop.state_dict()["epoch_progress"] == expected["epoch_progress"]


def _beside(step: Any) -> Any:
    """Return a function that knows the module from the step, not from an argument."""

    @functools.wraps(step)
    def wrapped(*arguments: Any) -> Any:
        return step(*arguments)

    return wrapped


@pytest.mark.filterwarnings("ignore:The training step never ran the blocks")
def test_a_step_that_was_put_onto_the_module_logs_once_per_batch() -> None:
    def metrics(module: Regressor) -> Any:
        strategy = RoundPipeStrategy(num_microbatches=4)
        trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1)
        trainer.fit(module, regression_data())
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    torch.manual_seed(4)
    module = Regressor()
    wrapped = copy.deepcopy(module)
    wrapped.training_step = _beside(wrapped.training_step)  # type: ignore[method-assign]
    assert metrics(wrapped) == pytest.approx(metrics(module))
    assert "log" not in vars(wrapped)


def _called(step: Any, times: list[int], *arguments: Any) -> Any:
    times.append(len(times))
    return step(*arguments)


def _of_module(module: Any, *arguments: Any) -> Any:
    return type(module).training_step(module, *arguments)


@pytest.mark.parametrize(
    "bound",
    [
        lambda module: types.MethodType(_of_module, module),
        lambda module: functools.partial(module.training_step),
        lambda module: functools.partial(_called, module.training_step, []),
        lambda module: functools.partial(_of_module, module),
    ],
)
def test_a_step_that_was_bound_to_the_module_runs_in_stages(bound: Any) -> None:
    module = Regressor()
    module.training_step = bound(module)  # type: ignore[method-assign]
    strategy = EmulatedStrategy(num_microbatches=2)
    trainer = make_trainer(strategy=strategy, devices=2, max_epochs=1)
    trainer.fit(module, regression_data())  # a step that runs no blocks would warn


@pytest.mark.parametrize("name", ["training_step", "validation_step", "test_step", "predict_step"])
def test_a_step_that_knows_nothing_of_devices_is_refused(name: str) -> None:
    module = Regressor()
    setattr(module, name, _beside(getattr(module, name)))
    trainer = make_trainer(strategy=EmulatedStrategy(num_microbatches=2), devices=2)
    run = {"test_step": trainer.test, "predict_step": trainer.predict}.get(name, trainer.fit)
    with pytest.raises(ConfigurationError, match=rf"Regressor\.{name} was replaced on the object"):
        run(module, regression_data())  # type: ignore[operator]
    on_host = make_trainer(strategy="roundpipe", devices=2, max_epochs=1)
    if name in ("test_step", "predict_step"):
        getattr(on_host, name.removesuffix("_step"))(module, regression_data())


class _PreparesItself(torch.nn.Module):
    """Writes into its weight in its first call, as ActNorm and S4 do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.is_ready = True
            torch.nn.init.constant_(self.inner.weight, 0.01)
        return x + torch.tanh(self.inner(x))


class _Prepared(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_PreparesItself() for _ in range(3))

    def on_fit_start(self) -> None:
        self(torch.zeros(2, WIDTH))


@pytest.mark.parametrize("strategy", [RoundPipeStrategy, EmulatedStrategy])
def test_blocks_that_prepare_themselves_may_be_called_before_the_first_step(strategy: Any) -> None:
    train_alike(_Prepared, strategy(num_microbatches=1), tolerance=0.0)


class _Referring(torch.nn.Module):
    """Reads what the step sets, and logs, past its arguments."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.inner, self.whole = torch.nn.Linear(WIDTH, WIDTH), [module]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (module,) = self.whole
        module.log("rate", module.rate + module.last)
        hidden: torch.Tensor = module.rate * module.last * torch.tanh(self.inner(x))
        return x + hidden


class _Referred(Regressor):
    last = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_Referring(self) for _ in range(3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rate = 1 / (1 + batch_idx)
        loss = super().training_step(batch, batch_idx)
        self.last = 0.9 * self.last
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rate = 0.5
        super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
def test_blocks_that_refer_to_the_whole_module(kind: Any) -> None:
    data = regression_data()
    ours = [kind(num_microbatches=count) for count in (1, 4)]
    one, *others = train_alike(_Referred, *ours, data=data, validation=data)
    for other in others:
        assert other.last == one.last
        logged, wanted = other.trainer.callback_metrics, one.trainer.callback_metrics
        torch.testing.assert_close(logged, wanted)
