import asyncio
import builtins
import copy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric import Fabric
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors import accelerator_connector

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.checks import register, replace_pytorch_lightning
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.training import Regressor, make_trainer, regression_data, same_bits

# LightningCLI ------------------------------------------------------------------------------------


class Module(Regressor):
    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__(num_blocks=num_blocks)


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return regression_data(16)

    def val_dataloader(self) -> Any:
        return regression_data(8)


QUIET_FLAGS = {
    "accelerator": "cpu",
    "devices": 2,
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@pytest.fixture(autouse=True)
def command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI warns where it is given arguments and there is a command line, too.

    Its calls of jsonargparse are those of an earlier version.
    """
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


CLASS = "roundpipe_lightning.RoundPipeStrategy"


def _cli(folder: Path, *arguments: str, **given: Any) -> tuple[Trainer, RoundPipeStrategy]:
    flags = [f"--trainer.{name}={str(value).lower()}" for name, value in QUIET_FLAGS.items()]
    flags.append(f"--trainer.default_root_dir={folder}")
    classes: dict[str, Any] = {} if given.get("subclass_mode_model") else {"model_class": Module}
    cli = LightningCLI(
        **classes,
        datamodule_class=Data,
        seed_everything_default=3,
        args=["fit", *arguments, *flags],
        **given,
    )
    strategy = cli.trainer.strategy
    assert isinstance(strategy, RoundPipeStrategy)
    assert cli.trainer.global_step == 2
    return cli.trainer, strategy


def test_cli_by_name(tmp_path: Path) -> None:
    _, strategy = _cli(tmp_path, "--trainer.strategy=roundpipe")
    assert strategy.num_microbatches == 4


def test_cli_by_class_path_with_settings_and_subclass_mode(tmp_path: Path) -> None:
    trainer, strategy = _cli(
        tmp_path,
        f"--model={__name__}.Module" if __name__ in sys.modules else "--model=Module",
        "--model.num_blocks=4",
        f"--trainer.strategy={CLASS}",
        "--trainer.strategy.num_microbatches=2",
        "--trainer.strategy.recompute=full",
        "--trainer.strategy.update=exact",
        '--trainer.strategy.hints={"limits": {"fused": 1}}',
        subclass_mode_model=True,
    )
    assert strategy.num_microbatches == 2
    assert strategy.last_step is not None
    assert strategy.last_step.plan.partition.backward[0] <= 1
    assert isinstance(trainer.lightning_module, Module)


def test_cli_from_a_file_and_from_the_file_that_it_saves(tmp_path: Path) -> None:
    strategy_of = {
        "class_path": CLASS,
        "init_args": {"num_microbatches": 2, "update": "async", "timeout_seconds": 60},
    }
    config = tmp_path / "mine.yaml"
    config.write_text(yaml.safe_dump({"trainer": {"strategy": strategy_of}}))
    _, strategy = _cli(tmp_path / "first", "--config", str(config))
    assert strategy.num_microbatches == 2
    saved = tmp_path / "first" / "config.yaml"
    written = yaml.safe_load(saved.read_text())["trainer"]["strategy"]
    assert written["class_path"] == CLASS
    assert written["init_args"]["update"] == "async"
    _, again = _cli(tmp_path / "second", "--config", str(saved))
    assert again.num_microbatches == 2


def test_cli_says_what_is_wrong_with_a_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_microbatches=0: give a whole number of 1 or more"):
        _cli(tmp_path, f"--trainer.strategy={CLASS}", "--trainer.strategy.num_microbatches=0")


# Fabric ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: "roundpipe", RoundPipeStrategy], ids=["name", "instance"])
def test_fabric_is_refused_where_it_is_made(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"Fabric\(strategy='roundpipe'\).*own loop.*Trai"):
        Fabric(strategy=make(), accelerator="cpu")
    assert Fabric(accelerator="cpu", devices=1).world_size == 1


# pytorch_lightning -------------------------------------------------------------------------------


@contextmanager
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget that `pytorch_lightning` was imported, and what looks out for it."""
    others = [
        finder
        for finder in sys.meta_path
        if type(finder).__module__ != "roundpipe_lightning.strategy.checks"
    ]
    kept = {n: m for n, m in sys.modules.items() if n.startswith(_FOREIGN)}
    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", others)
        for name in kept:
            patch.delitem(sys.modules, name)
        try:
            yield
        finally:
            for name in [n for n in sys.modules if n.startswith(_FOREIGN)]:
                del sys.modules[name]


_FOREIGN = ("pytorch_lightning", "lightning_fabric")


@pytest.mark.filterwarnings("ignore")  # an import of another project
@pytest.mark.parametrize("first", ["roundpipe_lightning", "pytorch_lightning"])
def test_pytorch_lightnings_trainer_says_what_to_do(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _as_in_a_new_process(monkeypatch):
        if first == "roundpipe_lightning":
            register(RoundPipeStrategy, name="roundpipe")  # as its import does
        import pytorch_lightning  # `lightning` installs it

        register(RoundPipeStrategy, name="roundpipe")
        with pytest.raises(
            ConfigurationError, match=r"`import lightning\.pytorch as pl`.*replace_"
        ):
            pytorch_lightning.Trainer(strategy="roundpipe", accelerator="cpu", logger=False)
        with pytest.raises(ValueError, match=r"RoundPipeStrategy, a strategy for lightning\.pyt"):
            pytorch_lightning.Trainer(
                strategy=RoundPipeStrategy(),  # type: ignore[arg-type]
                accelerator="cpu",
                logger=False,
            )

        class Foreign(pytorch_lightning.LightningModule):
            pass

        trainer = Trainer(strategy="roundpipe", accelerator="cpu", logger=False)
        with pytest.raises(TypeError, match="must be a `LightningModule`"):
            trainer.fit(Foreign())  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="at the top of the program"):
            replace_pytorch_lightning()


def test_programs_that_import_pytorch_lightning_train(monkeypatch: pytest.MonkeyPatch) -> None:
    with _as_in_a_new_process(monkeypatch):
        replace_pytorch_lightning()
        replace_pytorch_lightning()
        pl = import_module("pytorch_lightning")
        assert import_module("lightning_fabric").Fabric is Fabric
        assert import_module("pytorch_lightning.loggers.csv_logs").CSVLogger is CSVLogger
        with pytest.raises(ModuleNotFoundError, match=r"pytorch_lightning\.nothing"):
            import_module("pytorch_lightning.nothing")
        trainer = pl.Trainer(strategy="roundpipe", accelerator="cpu", logger=False)
        assert isinstance(trainer.strategy, RoundPipeStrategy)


# One strategy object, several Trainers -----------------------------------------------------------


def test_strategy_object_serves_trainers_one_after_the_other() -> None:
    strategy = RoundPipeStrategy(num_microbatches=2)
    for flags in ({"devices": 2}, {"devices": 3, "precision": "bf16-true"}):
        torch.manual_seed(3)
        module = Regressor()
        own, shared = copy.deepcopy(module), copy.deepcopy(module)
        make_trainer(strategy=RoundPipeStrategy(num_microbatches=2), **flags).fit(
            own, regression_data()
        )
        trainer = make_trainer(strategy=strategy, **flags)
        trainer.fit(shared, regression_data())
        assert same_bits(shared, own)
        assert strategy.num_workers == flags["devices"]
        assert strategy.last_step is not None
        strategy = copy.deepcopy(strategy)  # as libraries do with the flags that they keep
    first, second = (make_trainer(strategy=strategy) for _ in range(2))
    with pytest.raises(ConfigurationError, match="one after the other"):
        first.fit(module, regression_data())
    module.on_step = lambda *_: make_trainer(strategy=strategy)
    with pytest.raises(ConfigurationError, match="Two Trainers"):
        second.fit(module, regression_data())


# A notebook --------------------------------------------------------------------------------------


class Notebook:
    """Runs cells as a kernel does: in the main thread, inside an event loop that is running.

    A kernel gives every cell Python's own handler of SIGINT, takes it back afterwards, and survives
    what a cell raises, SystemExit included.
    """

    def run(self, cell: Callable[[], Any]) -> BaseException | None:
        async def execute() -> BaseException | None:
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                cell()
            except BaseException as error:  # noqa: BLE001 - a kernel shows it and goes on
                return error
            finally:
                signal.signal(signal.SIGINT, before)
            return None

        return asyncio.run(execute())


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Notebook]:
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr(builtins, "__IPYTHON__", True, raising=False)
    before = signal.getsignal(signal.SIGINT)
    yield Notebook()
    signal.signal(signal.SIGINT, before)


@contextmanager
def _stop_button(moment: str) -> Iterator[Callable[[str], None]]:
    """Presses the stop button when a moment comes for the second time."""
    left = [2]

    def passes(name: str) -> None:
        if name == moment:
            left[0] -= 1
            if not left[0]:
                signal.raise_signal(signal.SIGINT)

    yield passes


class _Interrupted(Regressor):
    """Tells where it is."""

    def __init__(self, passes: Callable[[str], None]) -> None:
        super().__init__()
        self.passes = passes

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.passes("training_step")
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.passes("before the update")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.passes("validation_step")


@pytest.mark.usefixtures("steps_of_microbatches")
@pytest.mark.parametrize("moment", ["training_step", "before the update", "validation_step"])
def test_start_interrupt_start_again(notebook: Notebook, moment: str) -> None:
    def trainer() -> Trainer:
        strategy = RoundPipeStrategy(dry_run=False)
        return make_trainer(strategy=strategy, devices=2, max_epochs=2)

    def fit(module: Regressor, trainer: Trainer) -> None:
        module.train()  # Lightning leaves it in evaluation mode when validation is interrupted
        trainer.fit(module, regression_data(16), regression_data(8))

    torch.manual_seed(3)
    with _stop_button(moment) as passes:
        module = _Interrupted(passes)
        start = {name: value.clone() for name, value in module.state_dict().items()}
        first = trainer()
        raised = notebook.run(lambda: fit(module, first))
    assert isinstance(raised, SystemExit)  # what Lightning makes of the interrupt
    assert first.interrupted
    assert not [thread for thread in threading.enumerate() if "roundpipe" in thread.name]
    second = trainer()
    module.load_state_dict(start)
    assert notebook.run(lambda: fit(module, second)) is None
    assert second.global_step == 4
    again = _Interrupted(lambda name: None)
    again.load_state_dict(start)
    assert notebook.run(lambda: fit(again, trainer())) is None
    assert same_bits(module, again)


def test_trainer_is_made_in_a_notebook_with_any_number_of_devices(notebook: Notebook) -> None:
    made: list[Trainer] = []

    def cell() -> None:
        made.append(Trainer(strategy="roundpipe", accelerator="cpu", devices=4, logger=False))

    assert notebook.run(cell) is None
    assert made[0].num_devices == 4
    assert made[0].strategy.launcher is None  # nothing that a notebook could not start


@pytest.mark.parametrize(("devices", "threads"), [(1, 3), (3, 1), (4, 1)])
def test_workers_that_take_every_core_leave_one_thread(devices: int, threads: int) -> None:
    seen: list[int] = []

    class Asks(Regressor):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        trainer = make_trainer(strategy="roundpipe", devices=devices, max_steps=1)
        trainer.fit(Asks(), regression_data())
        assert seen == [threads]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
