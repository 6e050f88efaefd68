from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.fsdp import fully_shard

from roundpipe_lightning.checkpoint.io import RoundPipeAsyncCheckpointIO, RoundPipeCheckpointIO
from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.hosts import run_on_hosts
from tests.kit.resumption import plain
from tests.kit.training import (
    WIDTH,
    Regressor,
    make_trainer,
    parameter_error,
    regression_data,
)

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use .self.log.*sync_dist=True")


def _ddp() -> DDPStrategy:
    return DDPStrategy(process_group_backend="gloo")


def _fit(folder: Path, strategy: Any, *, num_epochs: int, **options: Any) -> Regressor:
    torch.manual_seed(3)
    module = Regressor("adamw", num_blocks=2)
    trainer = make_trainer(
        folder,
        strategy=strategy,
        callbacks=[ModelCheckpoint(folder, filename="x", enable_version_counter=False)],
        enable_checkpointing=True,
        max_epochs=num_epochs,
        use_distributed_sampler=False,
    )
    trainer.fit(module, regression_data(24), **options)
    return module


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let DDP find a process group of this process alone, which needs no port; and end it."""
    # Lightning's thread that looks after other processes, of which there are none, ends after 5 s.
    launcher = "lightning.pytorch.strategies.launchers.subprocess_script"
    monkeypatch.setattr(f"{launcher}._launch_process_observer", lambda *_: None)
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("other", [lambda: "auto", _ddp], ids=["one device", "ddp"])
@pytest.mark.parametrize("is_first", [True, False])
def test_another_strategy_goes_on_from_ours_and_we_from_its(
    tmp_path: Path, one_process: None, other: Any, is_first: bool
) -> None:
    expected = _fit(tmp_path / "expected", "auto", num_epochs=3)
    strategies: list[Any] = [other(), "roundpipe"] if is_first else ["roundpipe", other()]
    _fit(tmp_path / "part", strategies[0], num_epochs=2)
    path = tmp_path / "part" / "x.ckpt"
    module = _fit(tmp_path / "rest", strategies[1], num_epochs=3, ckpt_path=path)
    assert parameter_error(module, expected) < 1e-4


class Sharded(Regressor):
    """Each process has a part of every parameter."""

    def configure_model(self) -> None:
        meshes: Any = self.device_mesh
        for part in (*self.layers, self):
            fully_shard(part, mesh=meshes["data_parallel"])


def train_sharded(rank: int, folder: Path) -> None:
    """Go on for one epoch; every process has the same batches, as one device would."""
    torch.set_num_threads(1)
    strategy = ModelParallelStrategy(2, 1, False, process_group_backend="gloo")
    options: Any = {"devices": 2, "max_epochs": 2, "use_distributed_sampler": False}
    trainer = make_trainer(folder, strategy=strategy, **options)
    trainer.fit(Sharded("adamw", num_blocks=2), regression_data(24), ckpt_path=folder / "x.ckpt")
    trainer.save_checkpoint(folder / "fsdp.ckpt")
    assert trainer.global_rank == rank
    torch.distributed.destroy_process_group()


def test_fsdp_goes_on_from_ours_and_we_from_its(tmp_path: Path) -> None:
    """One epoch here, one in two processes with torch's FSDP2 (gloo, full state), one here."""
    expected = _fit(tmp_path / "expected", "auto", num_epochs=3)
    _fit(tmp_path, "roundpipe", num_epochs=1)
    group = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    launch = {**group, "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    places = [{**launch, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    assert run_on_hosts(2, train_sharded, tmp_path, environments=places) == [None, None]
    path = tmp_path / "fsdp.ckpt"
    saved = torch.load(path)
    assert saved["epoch"] == 2
    assert "roundpipe" not in saved
    module = _fit(tmp_path / "rest", "roundpipe", num_epochs=3, ckpt_path=path)
    assert parameter_error(module, expected) < 1e-4


def test_nothing_of_ours_disturbs_lightnings_own_parts(tmp_path: Path) -> None:
    for name, strategy in (("one", "auto"), ("ours", RoundPipeStrategy(num_microbatches=1))):
        _fit(tmp_path / name, strategy, num_epochs=1)
    one, ours = (torch.load(tmp_path / name / "x.ckpt") for name in ("one", "ours"))
    assert set(ours) == {*one, "roundpipe"}
    for key in ("loops", "state_dict"):
        assert plain(ours[key]) == plain(one[key])
    states, expected = ours["optimizer_states"][0], one["optimizer_states"][0]
    assert states["param_groups"] == expected["param_groups"]
    assert states["state"].keys() == expected["state"].keys()


# What does not fit -------------------------------------------------------------------------------


class _Other(Regressor):
    def __init__(self) -> None:
        super().__init__("adamw", num_blocks=2)
        self.head = nn.Linear(WIDTH, 2)
        self.more = nn.Linear(2, 2)


def _validate(folder: Path, module: LightningModule) -> None:
    make_trainer(folder, strategy="roundpipe").validate(
        module, regression_data(8), ckpt_path=folder / "x.ckpt"
    )


def test_checkpoint_of_another_model(tmp_path: Path) -> None:
    _fit(tmp_path, "roundpipe", num_epochs=1)
    with pytest.raises(CheckpointError) as error:
        _validate(tmp_path, _Other())
    message = str(error.value)
    assert "another model than _Other is here" in message
    assert "missing: more.weight, (2, 2); missing: more.bias, (2,); another shape: head." in message
    assert "ckpt_path" in message
    with pytest.raises(CheckpointError, match=r"extra: layers\.1.* and 3 more"):
        _validate(tmp_path, Regressor("adamw", num_blocks=1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pytorch-lightning_version": "99.1.0"},
            rf"by Lightning 99\.1\.0, and this is {lightning.__version__}.* lightning>=99\.1\.0",
        ),
        ({"roundpipe": {"format_version": 99}}, r"format_version=99.* Update roundpipe_lightning"),
        ({"optimizer_states": [{}, {}]}, r"the states of 2 optimizers, .* returned 1"),
        (
            {"optimizer_states": [{"state": {}, "param_groups": [{"params": [0, 1]}]}]},
            r"AdamW has parameter groups of 14 parameters, and the checkpoint's optimizer 2",
        ),
    ],
)
def test_checkpoint_that_does_not_fit(tmp_path: Path, change: Any, message: str) -> None:
    _fit(tmp_path, "roundpipe", num_epochs=1)
    path = tmp_path / "x.ckpt"
    torch.save({**torch.load(path), **change}, path)
    with pytest.raises(CheckpointError, match=message):
        _fit(tmp_path / "again", "roundpipe", num_epochs=2, ckpt_path=path)


def test_a_newer_patch_of_lightning_is_read(tmp_path: Path) -> None:
    _fit(tmp_path, "roundpipe", num_epochs=1)
    path = tmp_path / "x.ckpt"
    major, minor, _ = lightning.__version__.split(".")[:3]
    for version in (f"{major}.{minor}.999", "unknown"):
        checkpoint = {**torch.load(path), "pytorch-lightning_version": version}
        io = RoundPipeCheckpointIO()
        io.save_checkpoint(checkpoint, path)
        strategy = RoundPipeStrategy(checkpoint_io=RoundPipeAsyncCheckpointIO())
        strategy.connect(Regressor())
        assert strategy.load_checkpoint(path)["epoch"] == 0
