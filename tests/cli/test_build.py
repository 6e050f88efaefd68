from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule

from roundpipe_lightning.cli.build import build_run, check_batches
from roundpipe_lightning.cli.job import Job
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.data import ClassificationDataModule
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules import CausalLanguageModule, SequenceClassificationModule
from tests.kit.runs import compose_small


@pytest.mark.parametrize(
    ("overrides", "on_cpu", "on_gpu"),
    [
        ("", (4, "32-true", None), ("auto", "bf16-mixed", "bf16")),
        ("hardware=cpu", (4, "32-true", None), (4, "32-true", None)),
        ("trainer.devices=2", (2, "32-true", None), (2, "bf16-mixed", "bf16")),
        ("trainer.precision=16-mixed", (4, "16-mixed", None), ("auto", "16-mixed", "fp16")),
        ("trainer.precision=bf16-true", (4, "bf16-true", None), ("auto", "bf16-true", None)),
        ("hardware=rtx4090x2", (2, "bf16-mixed", "bf16"), (2, "bf16-mixed", "bf16")),
    ],
)
def test_words_are_filled_in_for_the_machine(
    tmp_path: Path,
    overrides: str,
    on_cpu: tuple[object, ...],
    on_gpu: tuple[object, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = compose_small(tmp_path, "hardware=auto", *overrides.split())
    for available, expected in ((False, on_cpu), (True, on_gpu)):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda found=available: found)
        trainer = Job(config).config.trainer
        assert (trainer.devices, trainer.precision, trainer.strategy.upload_dtype) == expected


def test_each_cpu_device_of_other_strategies_would_be_a_process(tmp_path: Path) -> None:
    job = Job(compose_small(tmp_path, "trainer.strategy=auto"))
    assert job.config.trainer.devices == "auto"


def test_the_configuration_that_was_given_is_left_alone(tmp_path: Path) -> None:
    config = compose_small(tmp_path)
    run = build_run(config)
    assert config.trainer.devices == "auto"
    assert run.config.trainer.devices == 4
    assert run.trainer.num_devices == 4


def test_a_strategy_can_be_named(tmp_path: Path) -> None:
    run = build_run(compose_small(tmp_path, "trainer.strategy=roundpipe"))
    assert type(run.trainer.strategy).__name__ == "RoundPipeStrategy"


def test_parts_of_ones_own_are_not_refused() -> None:
    check_batches(LightningModule(), object.__new__(ClassificationDataModule))
    check_batches(object.__new__(SequenceClassificationModule), LightningDataModule())


def test_a_mistake_in_the_code_keeps_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^data: .*argument 'nonsense'"):
        build_run(compose_small(tmp_path, "+data.nonsense=1"))


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
