"""`finetune()`: a training in one call, for notebooks and scripts without Lightning.

It composes the configuration of `train.py` and runs it: what is here can be said on the command
line, and the run's folder is that of a command.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from torch import nn

from roundpipe_commands import as_setting, explain, name_machines, new_folder
from roundpipe_lightning.callbacks import PlanReport
from roundpipe_lightning.cli.run_folder import claim
from roundpipe_lightning.cli.train import run_training, summary_rows, trained_row, write_card
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.files import write_text
from roundpipe_lightning.models.weight_files import make_repository, push_folder
from roundpipe_lightning.planning.model.hardware import config_folder
from roundpipe_lightning.planning.schedule.plan import Plan

_OBJECTIVES = {
    "sft": "module=causal_lm data=chat",
    "text": "module=causal_lm data=text",
    "dpo": "module=preference data=preference",
    "orpo": "module=orpo data=preference",
    "kto": "module=kto data=kto",
    "reward": "module=reward data=preference",
    "classification": "module=classification data=classification",
    "vision": "module=vision data=vision",
}
"""Groups of the configuration that an objective stands for."""

_COMPARING = ("dpo", "orpo", "kto")
_RATES = {True: (1e-5, 5e-7), False: (2e-4, 5e-6)}
"""The learning rate and that of `_COMPARING`, of all weights or of adapters."""


@dataclass(frozen=True, kw_only=True)
class FineTuned:
    """What `finetune` has made; a notebook shows it with its plan and its pictures.

    Attributes:
        folder: Of the run: `config.yaml`, `metrics.csv`, `timeline.svg`, checkpoints.
        model_folder: The trained model, or the adapter, as transformers and peft load it.
        figures: Those of `summary.json`: losses, tokens a second, memory, idle time.
        plan: By which the last steps ran.
        plan_text: The plan in words.
        rows: The figures in words, by name.
    """

    folder: Path
    model_folder: Path
    figures: Mapping[str, Any]
    plan: Plan | None
    plan_text: str
    rows: Sequence[tuple[str, str]]

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.rows)

    def _repr_html_(self) -> str:
        cells = (
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self.rows
        )
        pictures = [path.read_text("utf-8") for path in sorted(self.folder.glob("*.svg"))]
        return "\n".join(
            [
                f"<table>{''.join(cells)}</table>",
                f"<details><summary>Plan</summary><pre>{html.escape(self.plan_text)}</pre></details>",
                *(f"<div>{picture}</div>" for picture in pictures),
            ]
        )


def finetune(  # noqa: PLR0913 - all but two are keyword-only, each a setting of its own
    model: str | Path | nn.Module,
    data: str | Path | Sequence[str | Path] | Iterable[Mapping[str, Any]],
    *,
    method: str = "lora",
    objective: str = "sft",
    tokenizer: Any = None,
    seq_len: int = 1024,
    batch_size: int = 16,
    learning_rate: float | None = None,
    epochs: int = 1,
    folder: str | Path | None = None,
    push_to_hub: str | None = None,
    overrides: Sequence[str] = (),
) -> FineTuned:
    """Fine-tune a model on data, and write the result as a folder that transformers or peft load.

    It runs on all GPUs of the machine, or else on CPU workers.

    Args:
        model: Name on the Hugging Face hub, a folder of `save_pretrained`, a name of `conf/model`
            that needs neither (`"tiny"`), or a model of transformers. That one is copied, and left
            as it is.
        data: A file or several, or records: dicts in any form that a line of a file may have.
        method: `"full"`, `"lora"`, `"qlora"`, or another file of `conf/peft`.
        objective: `"sft"`: the assistant's answers; `"text"`: every token of texts; `"dpo"`,
            `"orpo"`: the better of two answers; `"kto"`: the wanted answers; `"reward"`: a score;
            `"classification"`; `"vision"`: answers about images.
        tokenizer: A tokenizer, its folder or hub name; None: the model's.
        seq_len: Most tokens of a sample, and of a row of several.
        batch_size: Rows of a batch, the same on any number of devices.
        learning_rate: The peak; None: 2e-4, with `"dpo"`, `"orpo"` and `"kto"` 5e-6; for `"full"`
            1e-5 and 5e-7.
        epochs: Passes over the data.
        folder: Of the run; None: a new one in `logs/finetune/runs`.
        push_to_hub: `"user/model"`: the result is also uploaded to the hub, private at first.
        overrides: Any other settings, as on the command line of `train.py`:
            `["trainer.max_steps=100", "hardware=rtx4090x4"]`.

    Raises:
        RoundPipeError: Something cannot work; the message says what to change.
        KeyboardInterrupt: The training was interrupted; its last checkpoint is in the folder.
    """
    if objective not in _OBJECTIVES:
        raise ConfigurationError(f"objective={objective!r} is not one of {', '.join(_OBJECTIVES)}.")
    if push_to_hub is not None:
        make_repository(push_to_hub)
    if folder is None:
        now = datetime.now().astimezone()
        run = new_folder(Path(f"logs/finetune/runs/{now:%Y-%m-%d_%H-%M-%S}").absolute())
    else:
        run = Path(folder).expanduser().absolute()
        with claim(run):
            pass  # refused before records are written into the folder of another run
    settings: dict[str, Any] = {
        "paths.output_dir": str(run),
        "data.files": _files(data, run),
        "data.seq_len": seq_len,
        "data.batch_size": batch_size,
        "optimizer.lr": learning_rate or _RATES[method == "full"][objective in _COMPARING],
        "trainer.max_epochs": epochs,
        "trainer.max_steps": -1,
    }
    name = _model_name(model, run)
    chosen = name if (config_folder() / "model" / f"{name}.yaml").is_file() else None
    if chosen is None:
        settings |= {"model.hub_name": name, "model.weights": "pretrained"}
    if tokenizer is not None:
        settings["data.tokenizer.name"] = _saved(tokenizer, run / "tokenizer")
    elif isinstance(model, nn.Module):
        settings["data.tokenizer.name"] = getattr(model, "name_or_path", None)
        if not settings["data.tokenizer.name"]:
            raise ConfigurationError(
                "tokenizer: the model names none. Give one, its folder or its name."
            )
    words = [
        f"model={chosen or 'hub'}",
        f"peft={'none' if method == 'full' else method}",
        *_OBJECTIVES[objective].split(),
        "callbacks=export",
        *(f"{key}={as_setting(value)}" for key, value in settings.items()),
        *overrides,
    ]
    name_machines(config_folder())
    try:
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            config = compose("train", overrides=words)
    except HydraException as error:
        raise ConfigurationError(explain(error, "train", config_folder())) from error
    done, _, figures = run_training(config)
    if push_to_hub is not None:
        write_card(run / "export", run, name=push_to_hub)
        push_folder(run / "export", push_to_hub)
    report = next((c for c in done.callbacks if isinstance(c, PlanReport)), None)
    rows = [
        *trained_row(done.module),
        *summary_rows(figures, unit=""),
        ("Model", str(run / "export")),
    ]
    plan = run / "plan.json"
    return FineTuned(
        folder=run,
        model_folder=run / "export",
        figures=figures,
        plan=Plan.load(plan) if plan.exists() else None,
        plan_text="\n".join(report.texts) if report is not None else "",
        rows=rows,
    )


def _files(data: Any, run: Path) -> list[str]:
    """The paths of the data; records are written into the run's folder first."""
    if isinstance(data, (str, Path)):
        return [str(data)]
    items = [] if isinstance(data, Mapping) else list(data)  # one of splits, say
    if items and all(isinstance(item, (str, Path)) for item in items):
        return [str(item) for item in items]
    if not items or not all(isinstance(item, Mapping) for item in items):
        raise ConfigurationError(
            "data: give a file, several files, one split of a data set, or records such as "
            '{"messages": [{"role": "user", "content": "..."}, ...]}.'
        )
    path = run / "data.jsonl"
    try:
        lines = [json.dumps(dict(item), ensure_ascii=False) + "\n" for item in items]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"data: records are of texts, numbers and lists ({error}). Name an image by its file."
        ) from error
    run.mkdir(parents=True, exist_ok=True)
    write_text(path, "".join(lines))
    return [str(path)]


def _model_name(model: Any, run: Path) -> str:
    """The name of a model; one that is given is written into the run's folder."""
    if isinstance(model, (str, Path)):
        return str(model)
    if not hasattr(model, "save_pretrained") or hasattr(model, "peft_config"):
        raise ConfigurationError(
            f"model: a {type(model).__name__} is no plain model of transformers. Train any other "
            'module with Trainer(strategy="roundpipe"); merge adapters first (merge_and_unload).'
        )
    return _saved(model, run / "base")


def _saved(given: Any, folder: Path) -> str:
    if isinstance(given, (str, Path)):
        return str(given)
    given.save_pretrained(folder)
    return str(folder)
