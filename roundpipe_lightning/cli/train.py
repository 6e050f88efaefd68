"""`python train.py` and `roundpipe-train`: the Hydra application that trains."""

import json
import logging
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import lightning
import torch
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, LightningModule, Trainer
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from typing_extensions import override

from roundpipe_lightning.callbacks import AnswerQuestions, ExportPretrained
from roundpipe_lightning.callbacks.monitor import figures_among, peak_host_bytes
from roundpipe_lightning.callbacks.pictures import PipelineTimeline
from roundpipe_lightning.cli.build import (
    Run,
    build_run,
    exists,
    for_hosts,
    log_settings,
    tell_settings,
)
from roundpipe_lightning.cli.callbacks import LastCheckpoint, hold_settings
from roundpipe_lightning.cli.objects import check_switch, run_explained, whole
from roundpipe_lightning.cli.run_folder import SavedRun, claim, line, mark_run, written_settings
from roundpipe_lightning.errors import ConfigurationError, PlanError
from roundpipe_lightning.files import read_json, write_text
from roundpipe_lightning.models.gguf import is_gguf
from roundpipe_lightning.models.quantized import represented_values
from roundpipe_lightning.modules import Adapters, CausalLanguageModule
from roundpipe_lightning.planning.cost.device_memory import size_text
from roundpipe_lightning.planning.report.description import count_text
from roundpipe_lightning.planning.report.step_record import IdleCause
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

log = logging.getLogger(__name__)

_OF_SWEEPS = ("hydra.mode=", "hydra.sweep", "hydra.launcher")  # overrides that start several jobs


def run(config: DictConfig) -> float | int | None:
    """One run on the command line: the metric for a sweeper, or an exit status."""
    try:
        return run_explained(train, config)
    except Exception:
        log.exception("The run failed.")
        raise


def train(config: DictConfig) -> float | None:
    """Train, validate and test as configured, and fill the run's folder.

    Returns:
        The metric named by `optimized_metric`, for sweepers; None if there is none.

    Raises:
        RoundPipeError: The configuration cannot work; nothing was written then.
        KeyboardInterrupt: Ctrl-C; the last checkpoint is in the folder.
        SystemExit: Another signal asked the run to stop, likewise; 128 plus its number.
    """
    run, metrics, figures = run_training(config)
    print_summary(run, figures)
    if figures["num_steps"] == 1 != run.trainer.max_steps:
        log.warning(
            "The training was a single optimizer step, since one batch takes all rows. Lower "
            "data.batch_size, or raise trainer.max_epochs."
        )
    name: str | None = run.config.optimized_metric
    is_left_out = not run.config.validate and str(name).startswith("val_")
    if name is not None and name not in metrics and not is_left_out:
        there = ", ".join(sorted(n for n in metrics if "/" not in n)) or "none"
        log.warning("optimized_metric=%s was not measured; there are: %s", name, there)
    return None if name is None else metrics.get(name)


def run_training(config: DictConfig) -> tuple[Run, dict[str, float], dict[str, Any]]:
    """As `train`: the run that has ended, what it measured, and the figures of its summary."""
    whole("seed", config.seed, least=0)
    for name in ("train", "validate", "test"):
        check_switch(name, config[name])
    lightning.seed_everything(config.seed, workers=True, verbose=False)
    run = build_run(_with_interval(for_hosts(config)))
    with claim(Path(run.config.paths.output_dir)):
        return _run_claimed(run)


def _run_claimed(run: Run) -> tuple[Run, dict[str, float], dict[str, Any]]:
    config, folder = run.config, Path(run.config.paths.output_dir)
    tell_settings(run)
    # the plan is written before the first step runs by it
    strategy, path = run.trainer.strategy, Path(run.config.paths.output_dir) / "plan.json"
    if isinstance(strategy, RoundPipeStrategy):
        strategy.plan_listeners.append(
            lambda event: None if path.exists() else event.description.plan.save(path)
        )
    log.info("Run folder %s, tags %s", folder, list(config.tags))
    begin = _Begin(run)
    if config.train:
        run.trainer.callbacks.insert(0, begin)  # type: ignore[attr-defined]
    else:
        begin.write()
    metrics: dict[str, float] = {}
    with run.interrupt:
        try:
            _run_stages(run, metrics)
        except SystemExit as error:  # how Lightning ends after an interrupt
            if isinstance(error.__context__, KeyboardInterrupt):  # one that was no signal, too
                _end_interrupted(run, run.interrupt.signal_number or signal.SIGINT)
            if run.interrupt.signal_number is None:
                raise
        if run.interrupt.signal_number is not None:
            _end_interrupted(run, run.interrupt.signal_number)
    figures = summarize(run, metrics)
    log.info("Finished: %s", figures)
    write_text(folder / "summary.json", json.dumps(figures, indent=2) + "\n")
    for callback in run.callbacks:
        if isinstance(callback, ExportPretrained) and config.train:
            write_card(callback.folder(run.trainer), folder)
    return run, metrics, figures


class _Begin(Callback):
    """Writes the settings of a run once nothing can refuse it any more: a checkpoint, say.

    A folder in which a run goes on is as it was before that.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_written = False

    @override
    def on_sanity_check_start(self, *_: Any) -> None:
        self.write()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run.checkpoint is not None:
            hold_settings(trainer, _typed_options(self._run.config))
        self.write()

    def write(self) -> None:
        if not self._is_written:
            log_settings(self._run)
            _save_config(self._run)
            self._is_written = True


def _typed_options(config: DictConfig) -> dict[str, Any]:
    """The options of the optimizer that were typed; of a configuration from elsewhere all."""
    options: Any = OmegaConf.to_container(config.optimizer, resolve=True)
    if HydraConfig.initialized():
        words = (word.lstrip("+") for word in HydraConfig.get().overrides.task)
        names = {word.partition("=")[0] for word in words}
        options = {name: value for name, value in options.items() if f"optimizer.{name}" in names}
    return dict(options)


def _run_stages(run: Run, metrics: dict[str, float]) -> None:
    """Fit, validate and test as configured; `metrics` receives what they measured."""
    config, trainer = run.config, run.trainer
    checkpoint = run.checkpoint
    # said for Lightning's own strategies, which take None for False where an address is given
    plain: Any = {"datamodule": run.data, "weights_only": True}
    if config.train:
        trainer.fit(run.module, ckpt_path=checkpoint, **plain)
        if checkpoint is not None and not run.statistics.num_steps:
            sys.stderr.write(
                f"Warning: nothing was trained: {checkpoint} is of step {trainer.global_step}. "
                f"Raise trainer.max_steps={trainer.max_steps}, or what else ended that run.\n"
            )
        checkpoint = None  # from here on the weights are those that were trained
        _save_plan(run)
        _keep_metrics(run, metrics)
    is_asked = run.interrupt.signal_number is not None  # while the last step ended
    if trainer.world_size > 1:
        is_asked = trainer.strategy.reduce_boolean_decision(is_asked, all=False)
    if is_asked:
        return
    if config.validate and run.statistics.validated_step != trainer.global_step:
        trainer.validate(run.module, ckpt_path=checkpoint, verbose=False, **plain)
        _keep_metrics(run, metrics)
    if config.test:
        trainer.test(run.module, ckpt_path=checkpoint, verbose=False, **plain)
        _keep_metrics(run, metrics)


def _keep_metrics(run: Run, metrics: dict[str, float]) -> None:
    metrics.update({name: float(value) for name, value in run.trainer.callback_metrics.items()})
    if run.statistics.validated_step != run.trainer.global_step:
        metrics.pop("val_loss", None)  # measured before the last step


def _with_interval(config: DictConfig) -> DictConfig:
    """The configuration, in which a share of an epoch as `val_check_interval` may stand alone."""
    interval = config.trainer.get("val_check_interval")
    if isinstance(interval, float) and config.trainer.get("check_val_every_n_epoch") is None:
        config = config.copy()
        config.trainer.check_val_every_n_epoch = 1
    return config


def _end_interrupted(run: Run, signal_number: int) -> NoReturn:
    """Say how the run goes on, and end with the status that the signal stands for."""
    _save_plan(run)
    for callback in run.callbacks:
        if isinstance(callback, LastCheckpoint) and exists(callback.path):
            sys.stderr.write(f"Go on with: {_command(f'ckpt_path={callback.path}')}\n")
    if signal_number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + signal_number)


def _command(*overrides: str) -> str:
    """The command line of this run with other overrides at its end."""
    if not HydraConfig.initialized():
        return " ".join(overrides)
    program = Path(sys.argv[0])
    words = ["python", str(program)] if program.suffix == ".py" else [program.name]
    named = {override.partition("=")[0] for override in overrides}
    given = HydraConfig.get().overrides
    kept = [
        override
        for override in (*given.hydra, *given.task)
        if override.partition("=")[0] not in named and not override.startswith(_OF_SWEEPS)
    ]
    return shlex.join([*words, *kept, *overrides])


def _save_config(run: Run) -> None:
    """Write what is run; an evaluation leaves what the training whose folder it is in has run."""
    path = Path(run.config.paths.output_dir) / "config.yaml"
    if run.config.train or not path.exists():
        mark_run(path.parent)
        write_text(path, OmegaConf.to_yaml(OmegaConf.create(written_settings(run.config))))


def _save_plan(run: Run) -> None:
    strategy = run.trainer.strategy
    if isinstance(strategy, RoundPipeStrategy) and strategy.plan is not None:
        strategy.plan.save(Path(run.config.paths.output_dir) / "plan.json")


def summarize(run: Run, metrics: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a run that has ended, whatever its strategy, and what it has measured.

    docs/configuration.md defines each of them; a figure that the run did not have is None. The idle
    shares are those of a `PipelineTimeline` among the callbacks.
    """
    statistics, strategy = run.statistics, run.trainer.strategy
    figures: dict[str, Any] = {
        "tokens_per_second": statistics.tokens_per_second,
        "loss_first": statistics.loss_first,
        "loss_last": statistics.loss_last,
        "val_loss": metrics.get("val_loss"),
        "test_loss": metrics.get("test_loss"),
        "metrics": {
            name: value
            for name, value in metrics.items()
            if name.startswith(("val_", "test_")) and not name.endswith("_loss")
        },
        "bubble_predicted": None,
        "bubble_measured": None,
        "peak_device_bytes": None,
        "peak_host_bytes": peak_host_bytes(),
        "num_workers": run.trainer.num_devices,
        "num_microbatches": 1,
        "num_steps": statistics.num_steps,
        "left_out": list(getattr(run.data, "left_out", ())),
        "answers": [
            {"question": question, "before": before, "after": after}
            for asked in run.callbacks
            if isinstance(asked, AnswerQuestions)
            for question, before, after in zip(
                asked.questions, asked.before, asked.after, strict=False
            )
        ],
    }
    if isinstance(strategy, RoundPipeStrategy):
        for timeline in run.callbacks:
            if isinstance(timeline, PipelineTimeline):
                figures["bubble_predicted"] = timeline.predicted_bubble_fraction
                figures["bubble_measured"] = timeline.measured_bubble_fraction
        figures["peak_device_bytes"] = strategy.peak_device_bytes
        figures["num_workers"] = strategy.num_workers
        figures["num_microbatches"] = strategy.num_microbatches
    elif strategy.root_device.type != "cpu":
        figures["peak_device_bytes"] = torch.accelerator.max_memory_allocated(strategy.root_device)
    return figures


def print_summary(run: Run, figures: Mapping[str, Any]) -> None:
    """Print the figures in words on standard output, and where the run's folder is."""
    unit = " nats per token" if isinstance(run.module, CausalLanguageModule) else ""
    table = Table(title="This run", show_header=False, title_justify="left")
    table.add_column(style="bold")
    rows = (
        trained_row(run.module),
        summary_rows(figures, unit=unit),
        monitored_rows(run.callbacks),
    )
    for row in chain(*rows):
        table.add_row(*row)
    console = Console()
    console.print(table)
    folder = run.config.paths.output_dir
    if figures["answers"]:
        console.print(answers_table(figures["answers"]))
        console.print(f"Talk to it: roundpipe-chat {folder}", soft_wrap=True, highlight=False)
    console.print(f"Everything is in {folder}", soft_wrap=True, highlight=False)


def answers_table(answers: Iterable[Mapping[str, str]]) -> Table:
    """Answers to the same questions, before and after."""
    table = Table("Question", "Before", "After", title="Its answers", title_justify="left")
    for each in answers:
        table.add_row(*(escape(each[name]) for name in ("question", "before", "after")))
    return table


def summary_rows(figures: Mapping[str, Any], *, unit: str) -> list[tuple[str, str]]:
    """The rows of the table, of the figures of `summarize`; `unit` follows a loss."""
    steps, workers = (count_text(figures[f"num_{noun}s"], noun) for noun in ("step", "worker"))
    parts = count_text(figures["num_microbatches"], "microbatch")
    rows = [("Training", f"{steps} of {parts} on {workers}")]
    rows += [("Not trained on", text) for text in figures["left_out"] or ()]
    first, last = figures["loss_first"], figures["loss_last"]
    if first is not None and last is not None:
        rows.append(("Training loss", f"from {first:.2f} to {last:.2f}{unit}"))
    for name, loss in (("Validation", figures["val_loss"]), ("Test", figures["test_loss"])):
        if loss is not None:
            rows.append((f"{name} loss", f"{loss:.2f}{unit}"))
    rows += [(name, f"{value:.4g}") for name, value in figures["metrics"].items()]
    if figures["tokens_per_second"] is not None:
        rows.append(("Speed", f"{figures['tokens_per_second']:,.0f} tokens a second"))
    measured, predicted = figures["bubble_measured"], figures["bubble_predicted"]
    if measured is not None and predicted is not None:
        idle = f"{measured:.0%} of the time ({predicted:.0%} expected)"
        rows.append(("Workers waited", idle))
    for name, key in (("on a device", "device"), ("of the process", "host")):
        size = figures[f"peak_{key}_bytes"]
        if size is not None:
            rows.append((f"Most memory {name}", size_text(size)))
    return rows


def monitored_rows(callbacks: Iterable[Callback]) -> list[tuple[str, str]]:
    """Rows of the summary's table that a `PipelineMonitor` has measured over the whole run."""
    figures = figures_among(callbacks)
    rows = []
    if "tflop_per_second" in figures:
        peak = figures.get("share_of_peak")
        of_peak = "" if peak is None else f", {peak:.1%} of the devices' peak"
        rows.append(("Arithmetic", f"{figures['tflop_per_second']:.3g} TFLOP/s{of_peak}"))
    if "idle_share" in figures:
        parts = {cause.value: figures[f"idle_{cause.value}_share"] for cause in IdleCause}
        longest = sorted(parts.items(), key=lambda part: -part[1])
        named = ", ".join(f"{name} {share:.0%}" for name, share in longest if share >= 0.005)
        idle = f"{figures['idle_share']:.0%} of the time: {named}"
        rows.append(("Idle altogether", idle))
    return rows


def trained_row(module: nn.Module) -> list[tuple[str, str]]:
    """The row of the table that says how much is trained beside a frozen model; else none."""
    adapters = getattr(module, "adapters", None)
    if not isinstance(adapters, Adapters):
        return []
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    represented = represented_values(module)
    total = sum(represented.get(p, p.numel()) for p in module.parameters())
    share = f"{trained / total:.2%}" if total else "nothing to train"
    return [("Trained (peft)", f"{adapters.method}: {trained:,} of {total:,} parameters ({share})")]


_SERVE_MODEL = """\
```bash
vllm serve {folder}

{download}# with transformers 5, not with the 4.57 of llama.cpp's requirements.txt
python llama.cpp/convert_hf_to_gguf.py {here} --outfile model.gguf --outtype q8_0
llama-server -m model.gguf

echo 'FROM ./model.gguf' > Modelfile
ollama create {name} -f Modelfile && ollama run {name}
```"""

_SERVE_ADAPTER = """\
```bash
vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {name}={folder}

{download}{get} base
python llama.cpp/convert_hf_to_gguf.py base --outfile base.gguf --outtype q8_0
python llama.cpp/convert_lora_to_gguf.py {here} --base base --outfile adapter.gguf
llama-server -m base.gguf --lora adapter.gguf

printf 'FROM ./base.gguf\\nADAPTER ./adapter.gguf\\n' > Modelfile
ollama create {name} -f Modelfile && ollama run {name}
```

`roundpipe-export merge=true` merges the adapter into its base, which needs no base beside it."""

_SERVE_ON_GGUF = """\
The base is a GGUF file, on which `roundpipe-chat` puts this adapter. `roundpipe-export merge=true`
writes an ordinary model of both, which vLLM, llama.cpp and Ollama serve."""

_SERVE_OTHERS = """\
vLLM and llama.cpp do not load this kind of adapter, or with another scale; `peft` does. Merged into
its base (`roundpipe-export merge=true`), where it can be, it is a model that both serve."""

_SERVE_SCORES = "`AutoModelForSequenceClassification` loads it; an adapter needs `peft` besides."

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # ranks that vLLM takes as the largest one
_UNSERVED = ("use_dora", "use_rslora", "modules_to_save", "alpha_pattern", "lora_bias")
"""Settings of an adapter that vLLM refuses, or llama.cpp leaves out."""

_PLAIN_INITS = ("true", "false", "gaussian", "eva", "orthogonal")


def _serve(settings: Mapping[str, Any] | None) -> tuple[str, int]:
    """How a model, or an adapter with these settings, is served, and the rank to serve it with."""
    if settings is None:
        return _SERVE_MODEL, 0
    # PiSSA and its like change the base's weights; both programs would add to the published ones.
    changes_base = str(settings.get("init_lora_weights", True)).lower() not in _PLAIN_INITS
    unknown = changes_base or settings.get("bias", "none") != "none"
    if settings.get("peft_type") != "LORA" or unknown or any(map(settings.get, _UNSERVED)):
        return _SERVE_OTHERS, 0
    largest = max([settings["r"], *(settings.get("rank_pattern") or {}).values()])
    rank = next((rank for rank in _RANKS if rank >= largest), None)
    return (_SERVE_OTHERS, 0) if rank is None else (_SERVE_ADAPTER, rank)


def write_card(folder: Path, run: Path, *, name: str | None = None) -> None:
    """Write `README.md` into an exported folder, from the files of the run that are there.

    Paths of this machine are left out, since the folder is made to be published. `name` is that of
    the model on the hub; None: the folder's.
    """
    saved = SavedRun.read(run)
    adapter = folder / "adapter_config.json"
    settings = json.loads(adapter.read_text("utf-8")) if adapter.is_file() else None
    base = _public(saved.line("model.hub_name"))
    learned = saved.line("module._target_") or ""
    header = {"library_name": "transformers" if settings is None else "peft"}
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base or "") is not None
    place = base if on_hub else "/path/to/" + re.sub(r"[^\w.-]", "_", base or "BASE")
    if base and on_hub:
        header["base_model"] = base
    serve, rank = _serve(settings)
    if settings is not None and is_gguf(base):
        serve = _SERVE_ON_GGUF
    if learned.endswith(("ClassificationModule", "RewardModule")):
        serve = _SERVE_SCORES
    else:
        sees = learned.endswith("VisionLanguageModule")
        header["pipeline_tag"] = "image-text-to-text" if sees else "text-generation"
    files = saved.value("data.files") or ()
    names = [str(_public(line(file))) for file in ([files] if isinstance(files, str) else files)]
    title = (name or folder.resolve().name).rpartition("/")[2]
    rows = [
        ("Base", base or "random weights"),
        ("Learned", learned.rpartition(".")[2]),
        ("Data", ", ".join(names) or saved.line("data._target_")),
        *_figures(run / "summary.json"),
        *(
            (key, saved.line(key))
            for key in ("data.seq_len", "data.batch_size", "optimizer.lr", "trainer.precision")
        ),
    ]
    lines = [
        "---",
        *(f"{key}: {value}" for key, value in header.items()),
        "tags: [roundpipe_lightning]",
        "---",
        f"# {title}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in rows),
        *_plan(run / "plan.json"),
        "",
        "## Serve it",
        "",
        serve.format(
            folder=name or ".",
            here=title if name else ".",
            download=f"hf download {name} --local-dir {title}\n" if name else "",
            name=title,
            base=place,
            get=f"hf download {place} --local-dir" if on_hub else f"ln -s {place}",
            rank=rank,
        ),
    ]
    write_text(folder / "README.md", "\n".join(lines) + "\n")


def _figures(path: Path) -> list[tuple[str, str]]:
    """The rows of a run's summary, which a run that has not ended has none of."""
    try:
        return summary_rows(read_json(path), unit="") if path.exists() else []
    except (ConfigurationError, LookupError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, ConfigurationError) else f"{path}: {error!r}"
        warnings.warn(f"The card has no figures of the run: {reason}", stacklevel=2)
        return []


def _plan(path: Path) -> list[str]:
    try:
        plan = Plan.load(path)
    except PlanError:  # the run was not one of round-robin workers, or of another version
        return []
    text = f"{plan.partition}, {plan.num_microbatches} microbatches, {plan.num_workers} workers"
    return ["", "## The plan it was trained by", "", f"```text\n{text}\n```"]


def _public(name: str | None) -> str | None:
    """A hub name as it is; of a file, or a path of this machine, the last part."""
    is_public = name is None or not (is_gguf(name) or Path(name).exists())
    return name if is_public else Path(str(name)).name
