import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.optim.lr_scheduler import StepLR

from roundpipe_lightning import optim
from roundpipe_lightning.errors import OffloadError
from roundpipe_lightning.optim import disk
from roundpipe_lightning.strategy.planning.inputs import storage_of
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from tests.kit.training import Regressor, make_trainer, regression_data, same_bits


class _Small(Regressor):
    """Trained by the optimizer that a function makes."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def configure_optimizers(self) -> Any:
        optimizer = self._make(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}


def _train(folder: Path, make: Any, *, max_epochs: int = 3, seed: int = 3, **given: Any) -> Any:
    seed_everything(seed, verbose=False)
    module = _Small(make)
    trainer = make_trainer(
        folder,
        strategy=RoundPipeStrategy(num_microbatches=2),
        devices=2,
        max_epochs=max_epochs,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
    )
    trainer.fit(module, regression_data(), **given)
    return module, trainer


def _fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


@pytest.mark.parametrize("offload", [None, "disk"])
def test_trains_as_torch_fused_to_the_bit(offload: str | None, tmp_path: Path) -> None:
    module, _ = _train(
        tmp_path,
        lambda p: optim.HostAdamW(p, lr=0.01, offload=offload, offload_dir=tmp_path),
    )
    reference, _ = _train(tmp_path, _fused)
    assert same_bits(module, reference)


def test_a_disk_that_fills_up_in_the_middle_ends_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fills_up(number: int, start: int, size: int) -> None:
        calls.append(size)
        if len(calls) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "_sync", fills_up)
    made: list[optim.HostAdamW] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        made.append(optim.HostAdamW(parameters, lr=0.01, offload="disk", offload_dir=tmp_path))
        return made[0]

    with pytest.raises(OffloadError, match=r"kept on disk.*No space left.*are free there"):
        _train(tmp_path, make)
    states = made[0].state_dict()["state"].values()
    assert all(state["exp_avg_sq"].isfinite().all() for state in states)  # can still be saved
    assert any(state["step"] > 1 for state in states)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_resumes_to_the_bit(moments: str, tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return optim.HostAdamW(parameters, lr=0.01, moments=moments)

    whole, _ = _train(tmp_path, make)
    _, half = _train(tmp_path, make, max_epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = _train(tmp_path, make, seed=99, ckpt_path=str(tmp_path / "half.ckpt"))
    assert same_bits(resumed, whole)


def test_a_checkpoint_goes_on_with_torch_fused(tmp_path: Path) -> None:
    whole, _ = _train(tmp_path, _fused)
    _, half = _train(tmp_path, lambda p: optim.HostAdamW(p, lr=0.01), max_epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = _train(tmp_path, _fused, seed=99, ckpt_path=str(tmp_path / "half.ckpt"))
    assert same_bits(resumed, whole)


def _on_one_device(folder: Path, make: Any, **given: Any) -> Any:
    seed_everything(99, verbose=False)
    module = _Small(make)
    trainer = make_trainer(folder, devices=1, max_epochs=2)
    trainer.fit(module, regression_data(), **given)
    return module, trainer


@pytest.mark.parametrize("offload", [None, "disk"])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_checkpoints_go_to_lightnings_one_device_and_back(
    moments: str, offload: str | None, tmp_path: Path
) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return optim.HostAdamW(
            parameters, lr=0.01, moments=moments, offload=offload, offload_dir=tmp_path
        )

    _, half = _train(tmp_path, make, max_epochs=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["optimizer_states"][0]
    wide = {"exp_avg", "exp_avg_sq", "step"}
    assert all(wide <= state.keys() for state in saved["state"].values())
    reference = _on_one_device(tmp_path, _fused, ckpt_path=str(tmp_path / "half.ckpt"))[1]
    assert reference.current_epoch == 2
    steps = {int(s["step"]) for s in reference.optimizers[0].state_dict()["state"].values()}
    assert steps == {2 + 4}  # one epoch of windows of two batches, one of single batches
    reference.save_checkpoint(tmp_path / "whole.ckpt")
    module, trainer = _train(tmp_path, make, ckpt_path=str(tmp_path / "whole.ckpt"))
    assert trainer.current_epoch == 3
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(("moments", "expected"), [("fp32", 8), ("bf16", 4), ("8bit", 2 + 8 / 256)])
def test_the_plan_counts_the_state(moments: str, expected: float, tmp_path: Path) -> None:
    module = Regressor()
    module.head.requires_grad_(requires_grad=False)
    kept = optim.HostAdamW(module.parameters(), moments=moments)
    assert storage_of([kept]).optimizer_bytes == expected
    away = optim.HostAdamW(
        module.parameters(), moments=moments, offload="disk", offload_dir=tmp_path
    )
    storage = storage_of([away])
    assert (storage.optimizer_bytes, storage.disk_bytes) == (0, expected)


def test_its_threads_end_with_the_training(tmp_path: Path) -> None:
    _, trainer = _train(tmp_path, lambda p: optim.HostAdamW(p, lr=0.01), max_epochs=1)
    assert trainer.optimizers  # still there, with its state
    assert not [t for t in threading.enumerate() if t.name.startswith("roundpipe-optimizer")]
