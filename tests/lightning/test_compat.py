import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

import roundpipe_lightning
from roundpipe_lightning.strategy import compat
from tests.kit.training import make_trainer

PACKAGE = Path(roundpipe_lightning.__file__).parent
COMPAT = Path(compat.__file__)


QUESTIONS = {
    *("skips_backward", "is_accumulating", "detects_anomalies", "divides_no_data", "current_hook"),
    *("combined_loader", "unloaded_states", "data_fetcher", "step_results", "epoch_results"),
    *("validation_results", "latest_metrics", "should_update_logs", "has_last_batch"),
    *("is_validation_due", "can_stop_early", "parallel_devices"),
}


class _Asking(Callback):
    """Calls every function of `compat` that asks, inside a training."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.fetches: list[str] = []

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        compat.listen_to_fetches(
            trainer,
            lambda: self.fetches.append("began"),
            lambda: self.fetches.append("ended"),
        )

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        compat.leave_fetches(trainer)
        assert (
            not {"_on_before_fetch", "_on_after_fetch"} & vars(trainer.fit_loop.epoch_loop).keys()
        )

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.answers = {name: getattr(compat, name)(trainer) for name in QUESTIONS}
        self.answers["consumed_loaders"] = compat.consumed_loaders(compat.combined_loader(trainer))


class _Logging(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Any = super().training_step(batch, batch_idx)
        self.log("loss", loss["loss"])
        return loss

    def train_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 4))

    def val_dataloader(self) -> Any:
        return DataLoader(RandomDataset(32, 2))


def _fit(tmp_path: Path, *callbacks: Callback) -> Trainer:
    trainer = make_trainer(tmp_path, max_epochs=1, callbacks=list(callbacks))
    trainer.fit(_Logging())
    return trainer


def test_what_is_asked_of_a_training(tmp_path: Path) -> None:
    callback, timer = _Asking(), Timer(duration={"hours": 1})
    trainer = _fit(tmp_path, callback, timer)
    answers = callback.answers
    no = ("skips_backward", "is_accumulating", "detects_anomalies", "divides_no_data")
    assert not any(answers[name] for name in no)
    assert answers["can_stop_early"]
    assert answers["current_hook"] == "on_train_batch_end"
    assert answers["has_last_batch"] is answers["is_validation_due"] is True
    assert list(answers["epoch_results"]) == ["training_step.loss"]
    assert isinstance(answers["epoch_results"]["training_step.loss"], compat.ResultMetric)
    assert answers["step_results"] is answers["epoch_results"]
    assert set(answers["latest_metrics"]) == {
        "_callback_metrics",
        "_logged_metrics",
        "_progress_bar_metrics",
    }
    assert answers["unloaded_states"] == []
    assert answers["parallel_devices"] == [torch.device("cpu")]
    assert answers["consumed_loaders"] == [False]
    assert answers["combined_loader"].flattened
    assert callback.fetches == ["began", "ended"] * 4
    assert compat.syncs_batchnorm(trainer.strategy) is False
    assert compat.timer_seconds(timer) == 3600


class _Changing(Callback):
    """Calls every function of `compat` that changes something."""

    has_run = False

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        fit_loop = trainer.fit_loop
        loop = fit_loop.epoch_loop
        compat.set_latest_metrics(trainer, compat.latest_metrics(trainer))
        compat.merge_logged(trainer)
        compat.skip_due_validation(trainer)
        assert not compat.is_validation_due(trainer)
        assert compat.is_validation_due(trainer), "it is skipped once"
        stepped = vars(loop)["_batches_that_stepped"]
        compat.count_stepped_batches(trainer, 2)
        assert vars(loop)["_batches_that_stepped"] == stepped + 2
        before = {one: set(vars(one)) for one in (fit_loop, loop, loop.val_loop)}
        compat.end_restart(fit_loop, loop, loop.val_loop)
        compat.restart_after_batch(trainer)
        compat.restart_in_validation(trainer)
        compat.set_first_loop_iter(trainer, None)
        assert compat.iterate_when_epoch_begins(trainer)
        connector = vars(trainer)["_logger_connector"]
        assert "_first_loop_iter" in vars(connector)
        assert {one: set(vars(one)) for one in before} == before, "these names are Lightning's"
        combined = compat.combined_loader(trainer)
        assert combined is not None
        iter(combined)
        compat.set_loaders(combined, combined.flattened)
        compat.set_consumed_loaders(combined, [True])
        assert compat.consumed_loaders(combined) == [True]
        compat.load_loader_states(combined, [])
        self.has_run = True


def test_what_is_changed_in_loops(tmp_path: Path) -> None:
    changing = _Changing()
    _fit(tmp_path, changing)
    assert changing.has_run


def test_classes_that_have_no_public_name() -> None:
    assert compat.WrappingCheckpointIO.__name__ == "_WrappingCheckpointIO"
    meta = compat.ResultMetadata("training_step", "loss")
    meta.sync = compat.ResultSync(_should=True)
    assert meta.sync.should
    assert compat.ResultMetric(meta, True).is_tensor
    assert callable(compat.set_sampler_epoch)


def test_no_other_file_uses_them() -> None:
    words = set()
    for node in ast.walk(ast.parse(COMPAT.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words |= set(node.value.split("."))  # of attrgetter
    known = {word for word in words if re.fullmatch("_[a-z]\\w*", word)}
    assert len(known) > 20
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path == COMPAT:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
                found += [f"{path}: {a.name}" for a in node.names if a.name.startswith("_")]
            elif isinstance(node, ast.Attribute) and node.attr in known:
                owner = node.value
                if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                    found.append(f"{path}:{node.lineno}: {node.attr}")
    assert found == []


_FETCHING = """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from roundpipe_lightning import RoundPipeStrategy

class Fetching(BoringModel):
    fetched = []

    def training_step(self, dataloader_iter):
        self.fetched.append(next(dataloader_iter))

strategy = RoundPipeStrategy()
Trainer(strategy=strategy, accelerator="cpu", max_epochs=1, barebones=True).fit(Fetching(), [0, 1])
print([batch for batch, *_ in Fetching.fetched])
"""


def test_a_checkout_of_lightning_is_not_the_users_code(tmp_path: Path) -> None:
    # Its fetcher was put back after planning, without the batches that it had read by then.
    (tmp_path / "lightning").symlink_to(Path(str(lightning.__file__)).parent)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{_FETCHING}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[0, 1]"
