"""From settings to objects."""

from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from roundpipe_lightning.cli.build import build, build_run, choose_devices
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.modules import CausalLanguageModule
from tests.kit.runs import compose_small

ROUNDPIPE = {"_target_": "roundpipe_lightning.RoundPipeStrategy"}


@pytest.mark.parametrize(
    ("accelerator", "devices", "strategy", "on_cpu", "on_gpu"),
    [
        ("auto", "auto", ROUNDPIPE, 4, "auto"),
        ("cpu", "auto", ROUNDPIPE, 4, 4),
        ("gpu", "auto", ROUNDPIPE, "auto", "auto"),
        ("auto", "auto", "roundpipe", 4, "auto"),
        ("auto", 2, ROUNDPIPE, 2, 2),
        ("auto", "auto", "auto", "auto", "auto"),  # each CPU device would be a process
    ],
)
def test_workers_are_all_accelerators_or_some_of_the_cpu(
    accelerator: str,
    devices: int | str,
    strategy: object,
    on_cpu: int | str,
    on_gpu: int | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = {"accelerator": accelerator, "devices": devices, "strategy": strategy}
    config = OmegaConf.create({"trainer": trainer, "hardware": {"cpu_workers": 4}})
    for available, expected in ((False, on_cpu), (True, on_gpu)):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda found=available: found)
        assert choose_devices(config) == expected


def test_the_configuration_that_was_given_is_left_alone(tmp_path: Path) -> None:
    config = compose_small(tmp_path)
    run = build_run(config)
    assert config.trainer.devices == "auto"
    assert run.config.trainer.devices == 4
    assert run.trainer.num_devices == 4


def test_a_strategy_can_be_named(tmp_path: Path) -> None:
    run = build_run(compose_small(tmp_path, "trainer.strategy=roundpipe"))
    assert type(run.trainer.strategy).__name__ == "RoundPipeStrategy"


def test_lists_are_plain_lists() -> None:
    optimizer = build(OmegaConf.create({"_target_": "builtins.dict", "betas": [0.9, 0.95]}))
    assert type(optimizer["betas"]) is list
    assert build(None) is None


def test_a_mistake_in_the_code_keeps_its_place(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"full_key: data.*") as caught:
        build_run(compose_small(tmp_path, "+data.nonsense=1"))
    assert "nonsense" in str(caught.value)


def test_an_interrupt_within_a_step_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = CausalLanguageModule.training_step, []

    def interrupted(self: CausalLanguageModule, batch: object) -> object:
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(CausalLanguageModule, "training_step", interrupted)
    config = compose_small(
        tmp_path, "experiment=single_device", "callbacks.last_checkpoint.every_n_steps=1"
    )
    with pytest.raises(KeyboardInterrupt):
        train(config)
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["global_step"] == 2
