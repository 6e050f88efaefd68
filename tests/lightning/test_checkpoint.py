import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.plugins.precision import MixedPrecision
from peft import LoraConfig, get_peft_model
from torch import Tensor

from roundpipe_lightning.checkpoint.compatibility import check_base, describe_frozen, load_state
from roundpipe_lightning.checkpoint.io import RoundPipeAsyncCheckpointIO, RoundPipeCheckpointIO
from roundpipe_lightning.errors import CheckpointError
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit.architectures import build_model, token_data
from tests.kit.training import Regressor, make_trainer, regression_data, same_bits


@contextmanager
def full_disk(after_bytes: int) -> Iterator[None]:
    """Let every write into a file fail once the file has grown to so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 1
    path.write_bytes(content)


def large() -> dict[str, Any]:
    return {"state_dict": {"a": torch.ones(50_000), "b": torch.zeros(50_000)}}


def test_saves_and_loads(tmp_path: Path) -> None:
    io = RoundPipeCheckpointIO()
    path = tmp_path / "new folder" / "x.ckpt"
    io.save_checkpoint(large(), path)
    loaded = io.load_checkpoint(path, weights_only=True)
    assert torch.equal(loaded["state_dict"]["a"], torch.ones(50_000))
    assert os.listdir(path.parent) == ["x.ckpt"]  # noqa: PTH208 - hidden files count
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    io.remove_checkpoint(path)
    assert not path.exists()


def test_full_disk_leaves_the_previous_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    io = RoundPipeCheckpointIO()
    path = tmp_path / "last.ckpt"
    io.save_checkpoint({"state_dict": {"a": torch.ones(3)}}, path)
    before = path.read_bytes()
    with full_disk(after_bytes=100_000), pytest.raises(CheckpointError) as error:
        io.save_checkpoint(large(), path)
    assert str(path) in str(error.value)
    assert "untouched" in str(error.value)
    assert "Free some space" in str(error.value)
    assert isinstance(error.value.__cause__, OSError)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["last.ckpt"]  # noqa: PTH208 - hidden files count


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="could not be written"):
        RoundPipeCheckpointIO().save_checkpoint(large(), tmp_path / "file" / "x.ckpt")


def test_object_that_cannot_be_saved_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises((AttributeError, TypeError), match=r"pickle|local object"):
        RoundPipeCheckpointIO().save_checkpoint({"x": lambda: None}, tmp_path / "x.ckpt")
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - hidden files count


@pytest.mark.parametrize("kept", [0, 1, 100, 200_000, 401_000])
def test_truncated_file(tmp_path: Path, kept: int) -> None:
    io = RoundPipeCheckpointIO()
    path = tmp_path / "x.ckpt"
    io.save_checkpoint(large(), path)
    path.write_bytes(path.read_bytes()[:kept])
    for weights_only in (True, False):
        with pytest.raises(CheckpointError, match="truncated or damaged") as error:
            io.load_checkpoint(path, weights_only=weights_only)
        assert str(path) in str(error.value)


@pytest.mark.parametrize("checks", [True, False])
def test_a_flipped_bit_is_found_where_there_are_checksums(tmp_path: Path, checks: bool) -> None:
    path = tmp_path / "x.ckpt"
    torch.serialization.set_crc32_options(checks)
    try:
        torch.save(large(), path)
    finally:
        torch.serialization.set_crc32_options(True)
    flip_bit(path)
    if not checks:
        RoundPipeCheckpointIO().load_checkpoint(path)
        return
    with pytest.raises(CheckpointError, match=r"its entry .*data/\d differs from its checksum"):
        RoundPipeCheckpointIO().load_checkpoint(path)


def _without(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def spoil(checkpoint: Any) -> None:
        for key in keys[:-1]:
            checkpoint = checkpoint[key]
        del checkpoint[keys[-1]]

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("state_dict"), "it has no state_dict"),
        (_without("optimizer_states", 0, "param_groups"), "optimizer_states does not fit"),
        (_without("roundpipe", "random_state"), "'roundpipe' does not fit.*KeyError"),
        (_without("roundpipe", "logged"), "'roundpipe' does not fit.*KeyError"),
        (_without("roundpipe", "gradients"), "'roundpipe' does not fit.*KeyError"),
        (lambda c: c.update(roundpipe=3), "'roundpipe' does not fit.*AttributeError"),
        (lambda c: c["roundpipe"].update(format_version=2), "an earlier .* Use that version, or"),
        (lambda c: c["roundpipe"].update(data=[{}]), "'roundpipe' does not fit.*KeyError"),
    ],
)
def test_what_does_not_fit_is_one_error(tmp_path: Path, spoil: Any, message: str) -> None:
    trainer = make_trainer(strategy="roundpipe", max_steps=2)
    trainer.fit(Regressor("adamw"), regression_data(16))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    checkpoint = torch.load(tmp_path / "x.ckpt")
    spoil(checkpoint)
    torch.save(checkpoint, tmp_path / "x.ckpt")
    trainer = make_trainer(strategy="roundpipe", max_steps=4)
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(Regressor("adamw"), regression_data(16), ckpt_path=tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        ("sgd", "adamw", r"optimizer_states does not fit here .*of another training"),
        ("adamw", "sgd", r"another optimizer than SGD: it has no dampening, momentum"),
    ],
)
def test_a_checkpoint_of_another_optimizer_is_refused(
    tmp_path: Path, before: str, now: str, message: str
) -> None:
    trainer = make_trainer(strategy="roundpipe", max_steps=2)
    trainer.fit(Regressor(before), regression_data(16))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer = make_trainer(strategy="roundpipe", max_steps=4)
    with pytest.raises(CheckpointError, match=message):
        trainer.fit(Regressor(now), regression_data(16), ckpt_path=tmp_path / "x.ckpt")


def test_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    path.write_text("hello, this is no checkpoint")
    with pytest.raises(CheckpointError, match="not in torch's format"):
        RoundPipeCheckpointIO().load_checkpoint(path)


def test_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
        RoundPipeCheckpointIO().load_checkpoint(tmp_path / "none.ckpt")


@pytest.mark.parametrize("kind", [RoundPipeCheckpointIO, RoundPipeAsyncCheckpointIO])
def test_remote_path_goes_lightnings_way(kind: Any) -> None:
    io = kind()
    path = "memory://roundpipe/x.ckpt"
    io.save_checkpoint({"a": torch.ones(2)}, path)
    with pytest.warns(UserWarning, match=r"memory://roundpipe/x\.ckpt is one file"):
        kind(form="distributed").save_checkpoint({"a": torch.ones(2)}, path)
    assert torch.equal(io.load_checkpoint(path)["a"], torch.ones(2))
    io.remove_checkpoint(path)


# With the Trainer --------------------------------------------------------------------------------


def _fit(folder: Path, strategy: Any, **flags: Any) -> tuple[Regressor, Trainer]:
    torch.manual_seed(3)
    module = Regressor("adamw")
    callback = ModelCheckpoint(folder, monitor="val_loss", save_last=True)
    trainer = make_trainer(
        folder,
        strategy=strategy,
        callbacks=[callback],
        enable_checkpointing=True,
        **{"max_epochs": 2, **flags},
    )
    trainer.fit(module, regression_data(), regression_data(8))
    return module, trainer


def test_loss_scale_moves_between_strategies(tmp_path: Path) -> None:
    def plugin(ours: bool, scale: float) -> Any:
        scaler = torch.amp.GradScaler(device="cpu", init_scale=scale)
        if ours:
            return RoundPipePrecision("16-mixed", scaler=scaler)
        return MixedPrecision("16-mixed", "cpu", scaler)

    for ours in (True, False):
        trainer = make_trainer(
            strategy="roundpipe" if ours else "auto", plugins=[plugin(ours, 128.0)], max_epochs=1
        )
        trainer.fit(Regressor(), regression_data())
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        other = make_trainer(
            strategy="auto" if ours else "roundpipe", plugins=[plugin(not ours, 2.0)], max_epochs=1
        )
        other.fit(Regressor(), regression_data(), ckpt_path=tmp_path / "x.ckpt")
        restored = other.precision_plugin
        assert isinstance(restored, (RoundPipePrecision, MixedPrecision))
        assert restored.scaler is not None
        assert restored.scaler.get_scale() == 128.0


def test_asynchronous_checkpoints_are_written_by_ours() -> None:
    trainer = make_trainer(strategy="roundpipe", plugins=[AsyncCheckpointIO()])
    wrapper = trainer.strategy.checkpoint_io
    assert isinstance(wrapper, AsyncCheckpointIO)
    assert isinstance(wrapper.checkpoint_io, RoundPipeCheckpointIO)


class Tuned(LightningModule):
    """A base that is the same every time, with adapters that are not."""

    def __init__(
        self, *, targets: tuple[str, ...] = ("q_proj",), base: dict[str, Any] | None = None
    ) -> None:
        super().__init__()
        self.targets, self.base = targets, base or {}
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.random.fork_rng(devices=[]):
                model = build_model("qwen3", **self.base)
            config = LoraConfig(r=2, target_modules=list(self.targets), lora_dropout=0.1)
            self.model = get_peft_model(model, config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, labels=batch["input_ids"], use_cache=False).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(folder: Path, *, num_epochs: int, module: Tuned | None = None, **options: Any) -> Tuned:
    torch.manual_seed(1)
    module = Tuned() if module is None else module
    excludes = options.pop("excludes", True)
    trainer = make_trainer(
        folder,
        strategy=RoundPipeStrategy(num_microbatches=2, exclude_frozen_parameters=excludes),
        devices=2,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        enable_checkpointing=True,
        max_epochs=num_epochs,
    )
    trainer.fit(module, token_data(), **options)
    return module


def checkpoint_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / "epoch=0.ckpt", weights_only=True)
    return found


def test_only_what_is_trained_is_saved_and_a_resume_is_exact(tmp_path: Path) -> None:
    expected = fit(tmp_path / "whole", num_epochs=2)
    fit(tmp_path / "part", num_epochs=1)
    state = checkpoint_of(tmp_path / "part")["state_dict"]
    assert state
    assert all("lora_" in name for name in state)
    path = tmp_path / "part" / "epoch=0.ckpt"
    again = fit(tmp_path / "rest", num_epochs=2, ckpt_path=path)
    assert same_bits(again, expected)


def test_everything_is_saved_unless_asked_otherwise(tmp_path: Path) -> None:
    module = fit(tmp_path, num_epochs=1, excludes=False)
    checkpoint = checkpoint_of(tmp_path)
    assert set(checkpoint["state_dict"]) == set(module.state_dict())
    assert "roundpipe_frozen" not in checkpoint


def test_it_can_be_validated_and_read_by_one_device(tmp_path: Path) -> None:
    trained = fit(tmp_path, num_epochs=1)
    path, losses = tmp_path / "epoch=0.ckpt", []
    for strategy in ("auto", "roundpipe"):
        module = Tuned()
        module.strict_loading = strategy != "auto"
        trainer = make_trainer(strategy=strategy)
        losses += trainer.validate(module, token_data(), ckpt_path=path, verbose=False)
        assert same_bits(module, trained)
    assert losses[0]["val_loss"] == pytest.approx(losses[1]["val_loss"], rel=1e-5)


REFUSED: list[tuple[Tuned, str]] = [
    (Tuned(base={"initializer_range": 0.5}), r"q_proj.base_layer.weight has other values"),
    (Tuned(base={"intermediate_size": 64}), r"gate_proj.weight is \(64, 32\) here, \(48, 32\)"),
    (Tuned(base={"num_hidden_layers": 3}), r"layers.3.* does not exist here"),
    (Tuned(targets=("q_proj", "v_proj")), r"v_proj.weight does not exist here"),
]


@pytest.mark.parametrize(("module", "message"), REFUSED)
def test_another_base_is_refused(tmp_path: Path, module: Tuned, message: str) -> None:
    fit(tmp_path, num_epochs=1)
    trainer = make_trainer(strategy="roundpipe")
    with pytest.raises(CheckpointError, match=message):
        trainer.validate(module, token_data(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)


def test_a_base_in_fewer_bits_is_the_same_base() -> None:
    module = torch.nn.Linear(7, 5)
    described = {"roundpipe_frozen": describe_frozen(module, ["weight", "bias"])}
    check_base(module.to(torch.bfloat16), described)
    check_base(module.to(torch.float32), described)
    with torch.no_grad():
        module.weight.add_(0.1)
    with pytest.raises(CheckpointError, match="weight has other values"):
        check_base(module, described)


def test_a_base_of_whole_numbers_is_compared_too() -> None:
    module = torch.nn.Module()
    codes = torch.arange(100, dtype=torch.uint8)
    module.register_parameter("codes", torch.nn.Parameter(codes, requires_grad=False))
    described = {"roundpipe_frozen": describe_frozen(module, ["codes"])}
    check_base(module, described)
    codes.add_(1)
    with pytest.raises(CheckpointError, match="codes has other values"):
        check_base(module, described)


def test_what_was_trained_must_fit() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    module[0].requires_grad_(False)
    described = describe_frozen(module, ["0.weight", "0.bias"])
    state = {"1.weight": torch.ones(2, 2), "2.bias": torch.ones(2)}
    checkpoint = {"roundpipe_frozen": described, "state_dict": state}
    message = r"missing: 1\.bias, \(2,\); extra: 2\.bias, \(2,\)"
    with pytest.raises(CheckpointError, match=message):
        load_state(module, checkpoint, strict=True)
    load_state(module, checkpoint, strict=False)
    assert torch.equal(module.get_parameter("1.weight"), torch.ones(2, 2))


class Holder(LightningModule):
    """Its network is a hyperparameter, as in programs whose parts a configuration makes."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*is an instance of `nn.Module`:UserWarning")
@pytest.mark.filterwarnings("ignore::roundpipe_lightning.engine.chain.pieces.WholeBatchWarning")
@pytest.mark.parametrize("strategy", [RoundPipeStrategy, EmulatedStrategy])
def test_a_network_among_the_hyperparameters(tmp_path: Path, strategy: Any) -> None:
    layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)) for _ in range(3)]
    module = Holder(torch.nn.Sequential(*layers))
    trainer = make_trainer(tmp_path, strategy=strategy(), max_epochs=1)
    trainer.fit(module, regression_data())
    path = tmp_path / "x.ckpt"
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=False)
    found, state = saved["hyper_parameters"]["net"].state_dict(), saved["state_dict"]
    assert all(torch.equal(found[name], state[f"net.{name}"]) for name in found)
    assert [buffer.__dict__ for buffer in module.net.buffers()] == [{}] * 9
