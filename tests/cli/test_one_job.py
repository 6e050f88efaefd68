from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import roundpipe_commands
from roundpipe_lightning import Plan
from roundpipe_lightning.cli.job import Job
from roundpipe_lightning.cli.plan.answer import cheapest_changes
from roundpipe_lightning.modules import ModelSource
from roundpipe_lightning.modules.meta_model import MetaModel
from tests.kit.architectures import TINY
from tests.kit.programs import run_program
from tests.kit.runs import SMALL, compose_small, run_here

OPEN = [override for override in SMALL if not override.startswith("partition.")]


def plan_small(folder: Path, *overrides: str) -> str:
    done = run_program(roundpipe_commands.plan, folder, *OPEN, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_planned_is_what_runs(tmp_path: Path) -> None:
    page = plan_small(tmp_path, "hydra.run.dir=plan")
    run_here(tmp_path, "hydra.run.dir=run", "partition.num_microbatches=auto")
    planned, ran = (Plan.load(tmp_path / name / "plan.json") for name in ("plan", "run"))
    assert planned.num_microbatches == ran.num_microbatches
    assert (planned.team_size, planned.round_size) == (ran.team_size, ran.round_size)
    assert planned.block_names == ran.block_names
    line = page.strip().splitlines()[-1]
    assert line.startswith("Train it: python train.py ")
    again = shlex.split(line)[4:]
    done = run_program(roundpipe_commands.train, tmp_path, *again, "hydra.run.dir=again")
    assert done.returncode == 0, done.stderr
    assert Plan.load(tmp_path / "again" / "plan.json") == planned


@pytest.mark.parametrize(
    ("override", "kind", "factor"),
    [
        ("trainer.strategy.update=async", "optimizer state", 12 / 8),
        ("trainer.precision=bf16-true", "gradients", 1 / 2),
        ("+trainer.strategy.gradient_dtype=bf16", "gradients", 1 / 2),
        ("optimizer=sgd", "optimizer state", 4 / 8),
        ("trainer.accumulate_grad_batches=2", "gradients", 2),
        ("train=false", "optimizer state", 0),
    ],
)
def test_a_plan_honours_what_training_honours(
    tmp_path: Path, override: str, kind: str, factor: float
) -> None:
    models: dict[str, MetaModel] = {}

    def host(*overrides: str) -> int:
        config = compose_small(tmp_path, *overrides)
        memory = Job(config, models=models).answer().memory.host
        return {name.value: size for name, size in memory.num_bytes}.get(kind, 0)

    assert host(override.lstrip("+")) == pytest.approx(factor * host(), rel=0.01)


def test_a_training_without_room_is_refused_before_it_takes_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundpipe_lightning.cli.plan.answer.free_host_bytes", lambda: 500_000)
    monkeypatch.setattr(ModelSource, "_load_pretrained", None)
    done = run_here(tmp_path, "optimizer.lr=1e-5", status=3)
    assert "of host memory are missing" in done.stderr
    assert "What makes room for it: (1) " in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_pure_bfloat16_with_small_steps_is_offered_with_its_warning(tmp_path: Path) -> None:
    models: dict[str, MetaModel] = {}
    for rate, warns in (("1e-5", True), ("1e-3", False)):
        few = ("hardware=rtx4090x2", "hardware.host_memory=0.6MB", f"optimizer.lr={rate}")
        job = Job(compose_small(tmp_path, *few), models=models)
        found = cheapest_changes(job, is_measured=False, count=30)
        costs = {" ".join(remedy.change.overrides): remedy.change.cost for remedy, _ in found}
        assert costs["optimizer=adamw_8bit"] == "AdamW's moments are rounded to 8 bits"
        assert ("WARNING" in costs["trainer.precision=bf16-true"]) == warns


def test_a_pair_of_changes_or_more_hosts_leave_all_parameters_trained(tmp_path: Path) -> None:
    few = ("hardware=rtx4090x2", "hardware.host_memory=0.4MB", "partition.num_microbatches=2")
    found = cheapest_changes(Job(compose_small(tmp_path, *few)), is_measured=False)
    first = found[0][0].change
    assert first.overrides == ("optimizer=adamw_8bit", "trainer.precision=bf16-true")
    assert first.cost.startswith("AdamW's moments are rounded to 8 bits; weights are kept in bfl")
    assert len({remedy.change.overrides for remedy, _ in found}) == len(found) >= 3
    little = Job(compose_small(tmp_path, *few, "hardware.host_memory=0.6MB"))
    every = cheapest_changes(little, is_measured=False, count=30)
    assert ("nodes=2", "data.batch_size=2") in {remedy.change.overrides for remedy, _ in every}


def test_another_hub_name_alone_means_its_weights(tmp_path: Path) -> None:
    ModelSource(architecture=TINY).build().save_pretrained(tmp_path / "model")
    name = f"model.hub_name={tmp_path / 'model'}"
    assert Job(compose_small(tmp_path, name)).source.is_pretrained
    sizes = [each for each in SMALL if not each.startswith("model.")]
    for overrides, pretrained in (("", False), (f" {name}", True)):
        chosen = f"model=qwen3_0_6b{overrides}".split()
        job = Job(compose_small(tmp_path, *sizes, *chosen))
        assert job.source.is_pretrained == pretrained


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("hardware=rtx4090x8", "has no accelerators. Train with hardware=auto"),
        ("hardware.host_memory=lots", "such as hardware.host_memory=600GiB"),
        ("hardware=rtx4090x2 trainer.accelerator=cpu", "drop one of the two"),
        ("hardware_file=rtx409x8", "The nearest are rtx4090"),
        ("hardware_file=mine.yaml", "mine.yaml: devices_per_root"),
        ("model.hub_name=empty", "holds no weights"),
        ("partition=saved partition.plan=plan.json", "The plan is for 2 workers"),
        ("partition=saved", "plan='plan.json' does not exist. Runs and roundpipe-plan"),
        ("module=preference", "module=preference and data=preference go together"),
        ("optimizer.lr=abc", "optimizer.lr=abc: could not convert string to float"),
        ("seed=abc", "seed='abc': give a whole number"),
        ("seed=-1", "seed=-1 must be 0 or more"),
        ("hardware_file=broken.yaml", "broken.yaml is not YAML: while parsing"),
        ("callbacks.last_checkpoint.every_n_steps=0", "every_n_steps=0 must be 1 or more"),
        ("callbacks.last_checkpoint.dirpath=foo://bar", "foo://bar/last.ckpt cannot be reached"),
        (
            "experiment=dpo data.text.train_bytes=9",
            "There is no setting data.text.train_bytes. --cfg",
        ),
        ("trainer.devices=0", "trainer.devices=0 must be 1 or more"),
        ("hardware.cpu_workers=0", "hardware.cpu_workers=0 must be 1 or more"),
        ("trainer.max_steps=abc", "trainer.max_steps='abc': give a whole number"),
        ("trainer.gradient_clip_val=abc", "trainer: `gradient_clip_val` should be an int or a flo"),
        ("scheduler.min_lr_rate=abc", "scheduler.min_lr_rate=abc must be between 0.0 and 1.0"),
        ("trainer.val_check_interval=99999 trainer.check_val_every_n_epoch=1", "must be less than"),
        ("paths.log_dir=s3://bucket", "paths.log_dir=s3://bucket: a run's folder is on this"),
    ],
)
def test_bad_input_ends_with_2_and_leaves_nothing(
    tmp_path: Path, overrides: str, named: str
) -> None:
    ModelSource(architecture=TINY).load_config().save_pretrained(tmp_path / "empty")
    (tmp_path / "mine.yaml").write_text("devices: {rtx4090: 2}\ndevices_per_root: 3\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    if "plan.json" in overrides:
        plan_small(tmp_path, "hardware.cpu_workers=2", "hydra.run.dir=.", "data.batch_size=4")
    before = sorted(tmp_path.iterdir())
    sizes = [each for each in SMALL if "num_microbatches" not in each and "hardware" not in each]
    done = run_program(roundpipe_commands.train, tmp_path, *sizes, *overrides.split())
    assert done.returncode == 2, done.stdout + done.stderr
    assert named in done.stderr
    assert len(done.stderr.partition("Error:")[2].strip().splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before
