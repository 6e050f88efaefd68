"""The commands: `roundpipe-train`, `-plan`, `-data` and `-export` with Hydra, `-chat` and `-merge`.

This module stands beside the package, because importing the package imports torch and Lightning,
which takes seconds. What needs neither (`--help`, `--cfg job`, a wrong key) does not wait for them.
"""

from __future__ import annotations

import argparse
import codecs
import difflib
import gc
import importlib
import io
import itertools
import json
import logging
import os
import re
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn, TextIO

from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf, read_write
from typing_extensions import override

EXIT_ERROR = 1
"""Exit status after an error that names its cause."""

EXIT_BAD_INPUT = 2
"""Exit status after an error that a setting mends."""

EXIT_DOES_NOT_FIT = 3
"""Exit status where a machine has no memory for a training."""

EXIT_INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the number of SIGINT."""


_RANKS = ("RANK", "SLURM_PROCID", "NODE_RANK")
_CHOICES = ("recipe", "experiment")  # groups whose files choose in other groups
_MODULES = {"plan": "plan.command", "export": "checkpoints"}

_NO_OPTION = re.compile(r"(?:unrecognized arguments|ambiguous option): (.+?)(?: could match .*)?\n")

_HELP = {
    "train": """\
roundpipe-train, or python train.py: trains a model that may be larger than the devices,
then validates and tests it. Settings are given as name=value; a run has a folder below logs/.

  roundpipe-train                                            a small model, in two minutes
  roundpipe-train recipe=smollm2_135m/lora                   a real one, asked before and after
  roundpipe-train recipe=qwen3_32b/lora data=chat.jsonl      a published recipe on your file
  roundpipe-train recipe=qwen3_8b/qlora data=chats.json model=my/folder trainer.max_epochs=2
  roundpipe-train ckpt_path=last                             goes on with the newest run
  roundpipe-train -m optimizer.lr=1e-4,1e-5                  several runs, and a table of them

""",
    "plan": """\
roundpipe-plan: says what a training needs and how fast it will be, before it runs. It
takes the settings of roundpipe-train, and machines that are elsewhere.

  roundpipe-plan model=qwen3_32b hardware=rtx4090x8             eight of them
  roundpipe-plan model=qwen3_1_7b hardware=auto longest=true    the longest sequence that fits

""",
    "data": """\
roundpipe-data: says what is in data files, in which form, and shows a sample as tokens, with
those marked that are learned. It takes the settings of roundpipe-train.

  roundpipe-data data=chats.json
  roundpipe-data recipe=qwen3_32b/lora data=chats.json

""",
    "export": """\
roundpipe-export: writes a checkpoint as a folder of Hugging Face, or as an adapter folder.
It takes checkpoints of one file and folders; roundpipe-merge makes one file of a folder.

  roundpipe-export ckpt_path=last
  roundpipe-export ckpt_path=logs/train/runs/2030-01-31_12-00-00 merge=true output_dir=merged

""",
}
"""What a command does, for `--help`; Hydra adds the groups."""


class _HeldErrors(io.StringIO):
    """Holds what is written to standard error back."""

    def __init__(self, screen: TextIO) -> None:
        super().__init__()
        self.screen = screen

    def release(self) -> None:
        sys.stderr = self.screen
        self.screen.write(self.getvalue())
        self.truncate(0)


class _Job:
    """Runs a job of a command, in this process or in one that a launcher of Hydra (joblib) starts.

    It has no open file, so that it can be pickled. What became of each job is a line of a file.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        handle, self._path = tempfile.mkstemp(prefix="roundpipe-jobs-")
        os.close(handle)
        weakref.finalize(self, Path(self._path).unlink, missing_ok=True)

    def __call__(self, config: Any) -> Any:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        if isinstance(sys.stderr, _HeldErrors):
            sys.stderr.release()
        about = HydraConfig.get()
        number = 0 if OmegaConf.is_missing(about.job, "num") else about.job.num
        entry: dict[str, Any] = {"status": EXIT_ERROR, "number": number}
        entry |= {"overrides": list(about.overrides.task), "folder": about.runtime.output_dir}
        try:
            result = _run(self.name, config)
            entry["status"] = result if isinstance(result, int) else 0
        finally:
            with Path(self._path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        is_sweep = about.mode is RunMode.MULTIRUN
        return None if is_sweep and isinstance(result, int) else result

    def entries(self) -> list[dict[str, Any]]:
        """Overrides, folder and exit status of the jobs so far, in the order of their numbers."""
        lines = Path(self._path).read_text("utf-8").splitlines()
        return sorted(map(json.loads, lines), key=lambda entry: entry["number"])


def _launch(name: str) -> None:
    """Hand the command line to Hydra, and each job to `run` of the module of that name.

    `run` returns an exit status (int), or a metric for sweepers (float or None), or exits itself.
    """
    import hydra

    guard_streams()
    folder = _config_folder()
    # behind the options: Hydra reads settings in one go
    sys.argv[1:] = sorted(in_settings(sys.argv[1:], folder, command=name), key=_is_setting)
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.stdout.write(_HELP[name])
    else:
        name_machines(folder)
        if name == "plan" and not {"-m", "--multirun"} & set(sys.argv[1:]):
            sys.argv[1:] = [re.sub(r"^nodes=(.+,[^\]]+)$", r"nodes=[\1]", a) for a in sys.argv[1:]]
    errors = _HeldErrors(sys.stderr)
    job = _Job(name)
    try:
        sys.stderr = errors  # until the first job begins: Hydra explains itself at length
        hydra.main(version_base="1.3", config_path=str(folder), config_name=name)(job)()
    except KeyboardInterrupt:
        _compare(job.entries())
        errors.screen.write("Stopped.\n")
        sys.exit(EXIT_INTERRUPTED)
    except SystemExit as ended:
        unknown = _NO_OPTION.search(errors.getvalue())
        jobs = job.entries()
        if unknown or (not jobs and isinstance(ended.__context__, Exception)):
            errors.truncate(0)
            cause = ended.__context__ or ended
            said = _not_a_setting(unknown[1]) if unknown else explain(cause, name, folder)
            errors.screen.write(f"Error: {said}\n")
            sys.exit(EXIT_BAD_INPUT)
        if len(jobs) <= 1 or ended.code != 1:  # of several jobs, the others have run as well
            raise
    finally:
        errors.release()
    jobs = job.entries()
    _compare(jobs)
    statuses = [entry["status"] for entry in jobs]
    if status := EXIT_ERROR if EXIT_ERROR in statuses else max(statuses, default=0):
        sys.exit(status)


class _Stream:
    """A standard stream that may end (`| head`), or be full: the rest is left out, the run goes on.

    The log in the run's folder has all of it.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._ending_quietly():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._ending_quietly():
            self._stream.flush()

    @contextmanager
    def _ending_quietly(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # what is still buffered ends there, too
            os.close(nowhere)


def guard_streams() -> None:
    """Make standard streams take any text, and let none of them end a command."""
    if sys.stdin is None:  # closed
        sys.stdin = Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - to the end
    elif hasattr(sys.stdin, "reconfigure"):
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"  # bytes of UTF-8 are no error
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else None, errors="replace")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, _Stream(stream))


class RunFolder(Callback):
    """Removes what a refused command has put into its folder, which may be a person's own.

    Hydra makes the folder and writes into it before the command has read a setting.
    """

    def __init__(self) -> None:
        self._entries: set[str] | None = None
        self._new_folders: list[Path] = []

    @override
    def on_run_start(self, config: Any, **_: Any) -> None:
        folder = Path(config.hydra.run.dir).absolute()
        missing = [path for path in folder.parents if not path.exists()]
        with suppress(OSError):  # which Hydra meets as well, and is explained then
            is_new = _make_named_by_time(config.hydra.run) or not folder.exists()
            folder = Path(config.hydra.run.dir).absolute()
            self._new_folders = [folder, *missing] if is_new else missing
            self._entries = set() if is_new else {path.name for path in folder.iterdir()}

    @override
    def on_multirun_start(self, config: Any, **_: Any) -> None:
        with suppress(OSError):
            _make_named_by_time(config.hydra.sweep)

    @override
    def on_run_end(self, config: Any, **options: Any) -> None:
        job_return = options["job_return"]
        is_first = all(os.environ.get(name, "0") == "0" for name in _RANKS)  # of several hosts
        if self._entries is None or job_return.status is not JobStatus.COMPLETED or not is_first:
            return
        status = job_return.return_value  # or a metric, which may be 2.0
        if not isinstance(status, int) or status not in (EXIT_BAD_INPUT, EXIT_DOES_NOT_FIT):
            return
        folder = Path(config.hydra.runtime.output_dir)
        log = Path(config.hydra.job_logging.handlers.file.filename).name
        new = {path.name for path in folder.iterdir()} - self._entries
        if not new <= {".hydra", log, "config.yaml", "run.json"}:
            return  # it was refused after it had begun: what it has done stays
        logging.shutdown()
        hydra_files = ("config.yaml", "hydra.yaml", "overrides.yaml") if ".hydra" in new else ()
        for name in (*(f".hydra/{file}" for file in hydra_files), *(new - {".hydra"})):
            with suppress(OSError):
                (folder / name).unlink()
        for path in ([folder / ".hydra"] if ".hydra" in new else []) + self._new_folders:
            with suppress(OSError):  # in use, or gone: another command was refused
                path.rmdir()


def _make_named_by_time(node: Any) -> bool:
    """Make the folder of a run or a sweep that is named by the second, which another may have.

    False: it has a name of its own, which Hydra makes.
    """
    written: Any = OmegaConf.to_container(node, resolve=False)
    is_by_time = "${now:" in written["dir"]
    if is_by_time:
        with read_write(node):
            node.dir = str(new_folder(Path(node.dir)))
    return is_by_time


def new_folder(path: Path) -> Path:
    """Make a folder, with a number behind its name where there is one of that name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = path if number == 1 else path.with_name(f"{path.name}_{number}")
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError


def _run(name: str, config: Any) -> Any:
    """Run a command's module; what has no memory, as early as its libraries are read, is a line."""
    try:
        return _module(f"cli.{_MODULES.get(name, name)}").run(config)
    except (MemoryError, ImportError) as error:
        is_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        if not is_memory or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.stderr.write(
            "Error: this process may have no more memory. Raise its limit (ulimit -v, or that of "
            "the job), or set a smaller model, data.batch_size or data.seq_len.\n"
        )
        return EXIT_DOES_NOT_FIT


train = partial(_launch, "train")
"""Train, validate and test as configured."""

plan = partial(_launch, "plan")
"""Say what a training needs and how fast it will be, before it runs."""

data = partial(_launch, "data")
"""Say what is in data files, and show a sample as tokens."""

export = partial(_launch, "export")
"""Write a checkpoint as a Hugging Face folder, or as an adapter folder."""


class _Parser(argparse.ArgumentParser):
    """Says what it refuses as the other commands do."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"Error: {message}. See {self.prog} --help.\n")


def chat(arguments: Sequence[str] | None = None) -> int:
    """Talk to a trained model; return the exit status."""
    parser = _Parser(
        prog="roundpipe-chat",
        description="Talk to a trained model. Its weights stay in host memory, or in their files, "
        "and pass through one device block by block, so a model of any size answers.",
        epilog="Ctrl-C ends an answer; Ctrl-D, or Ctrl-C at a question, ends the conversation.",
    )
    parser.add_argument(
        "model",
        help="a checkpoint, a run's folder, `last`, an exported folder, a GGUF file, or a hub name",
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="NAME=VALUE",
        help="settings of the run that it may not say alone: model.trust_remote_code=true",
    )
    parser.add_argument("--system", help="the system message")
    parser.add_argument("--chat-template", help="file with a Jinja template")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    guard_streams()
    options = parser.parse_args(arguments)
    wrong = [word for word in options.settings if not _is_setting(word)]
    if wrong:
        parser.error(f"unrecognized arguments: {' '.join(wrong)}")
    status: int = _module("cli.checkpoints").talk(options)
    return status


def merge(arguments: Sequence[str] | None = None) -> int:
    """Write the checkpoint in a folder as one file; return the exit status."""
    parser = _Parser(
        prog="roundpipe-merge",
        description="Write the checkpoint in a folder as one file, which any Lightning "
        "strategy reads. A folder of Hugging Face is what roundpipe-export writes.",
        epilog="Example: roundpipe-merge logs/train/runs/NAME/checkpoints/last.ckpt one.ckpt",
    )
    parser.add_argument("folder", help="the checkpoint, a folder with .metadata; or a run's folder")
    parser.add_argument("file", help="the file to write; what is there is replaced as a whole")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="also read objects other than tensors, numbers and text: reading them may run code",
    )
    guard_streams()
    options = parser.parse_args(arguments)
    merge_checkpoint = _module("checkpoint.io").merge_checkpoint
    from roundpipe_lightning.errors import CheckpointError

    folder = Path(options.folder)
    if (folder / "checkpoints").is_dir():  # a run's
        folder = folder / "checkpoints" / "last.ckpt"
    try:
        merge_checkpoint(folder, options.file, weights_only=not options.trust)
    except CheckpointError as error:
        sys.stderr.write(f"Error: {error}\n")
        return EXIT_BAD_INPUT
    return 0


def _module(name: str) -> Any:
    """A module of `roundpipe_lightning`.

    It is imported without garbage collection, which is a fifth of the time: all of it stays.
    """
    name = f"roundpipe_lightning.{name}"
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


def _compare(jobs: list[dict[str, Any]]) -> None:
    """Print a line for each job of a sweep: what was special, and the figures of its summary."""
    if len(jobs) <= 1:
        return
    from rich.console import Console
    from rich.table import Table

    common = set.intersection(*(set(entry["overrides"]) for entry in jobs))
    summaries = []
    for entry in jobs:
        file = Path(entry["folder"]) / "summary.json"
        summaries.append(json.loads(file.read_text("utf-8")) if file.is_file() else {})
    wanted = ("loss_last", "val_loss", "test_loss", "tokens_per_second")
    figures = [name for name in wanted if any(s.get(name) is not None for s in summaries)]
    table = Table("", "job", *figures, title="This sweep", title_justify="left")
    table.columns[1].overflow = "fold"
    for number, (entry, summary) in enumerate(zip(jobs, summaries, strict=True)):
        special = " ".join(text for text in entry["overrides"] if text not in common)
        failed = "failed: " if entry["status"] else ""
        values = (summary.get(figure) for figure in figures)
        texts = ("" if value is None else f"{value:.5g}" for value in values)
        table.add_row(str(number), failed + special, *texts)
    Console().print(table)
    sys.stdout.write(f"Each job's folder is in {Path(jobs[0]['folder']).parent}\n")


_ELSEWHERE = {
    "data": "dataset datasets dataset_name",
    "model": "base_model model_name_or_path model_name",
    "scheduler": "lr_scheduler_type lr_scheduler",
    "optimizer.lr": "learning_rate",
    "trainer.max_epochs": "num_train_epochs num_epochs epochs",
    "trainer.accumulate_grad_batches": "gradient_accumulation_steps",
    "trainer.gradient_clip_val": "max_grad_norm",
    "data.batch_size": "per_device_train_batch_size micro_batch_size",
    "data.seq_len": "max_seq_length max_seq_len max_length sequence_len cutoff_len",
    "data.packing": "sample_packing",
    "data.validation_share": "val_set_size val_size",
    "scheduler.num_warmup_steps": "warmup_ratio warmup_steps",
    "peft.r": "lora_r lora_rank",
    "peft.target_modules": "lora_target_modules lora_target",
}
"""What Axolotl, LLaMA-Factory and TRL call a setting."""


def explain(error: BaseException, name: str, folder: Path) -> str:
    """One line for what Hydra has refused, with the names that are near."""
    lines = [line.strip() for line in str(error).splitlines()]
    first = next(filter(None, lines), type(error).__name__)
    named = re.search(r"Could not (?:find|load) '([^']+)'", str(error))
    missing = None if named is None else named[1]
    if first.startswith("Config group override must be"):  # a number, such as hardware=4090
        words = (w.replace("=", "/", 1) for w in sys.argv[1:] if re.fullmatch(r"\w+=[\w.-]+", w))
        unknown = (word for word in words if not (folder / f"{word}.yaml").is_file())
        missing = next((w for w in unknown if (folder / w.partition("/")[0]).is_dir()), None)
    if missing is not None:
        group, _, file = missing.partition("/")
        paths = [path.relative_to(folder / group) for path in (folder / group).rglob("*.yaml")]
        files = sorted(p.with_suffix("").as_posix() for p in paths if p.parts[0] != "base")
        model, _, method = file.partition("/")
        below = [one for one in files if one.startswith(f"{model}/")]
        is_short = below and not method  # a model without a method
        near = [] if is_short else difflib.get_close_matches(file, below or files, n=1)
        meant = f" Did you mean {group}={near[0]}?" if near else ""
        return f"{group}={file} does not exist.{meant} There are: {', '.join(below or files)}."
    reason = error if isinstance(error, OSError) else error.__cause__
    if isinstance(reason, OSError):
        settings = "hydra.run.dir, paths.log_dir or task_name"
        return f"The run's folder cannot be made: {reason}. Set {settings}."
    override = getattr(error, "override", None)
    if override is not None and "=" not in override:
        return _not_a_setting(override)
    if override is not None:
        quoted = "'" + override.replace("=", '="', 1) + "\"'"
        why = first.partition(" expecting")[0]
        return f"{override!r} cannot be read ({why}). Text is given as {quoted}."
    refused = re.match(r"Could not override '([^']+)'", first)
    if refused is None:
        return " ".join(filter(None, lines))
    key = refused[1].partition("@")[0]
    word = key.rpartition(".")[2]
    ours = [setting for setting, theirs in _ELSEWHERE.items() if word in theirs.split()]
    groups = [path.name for path in folder.iterdir()]
    is_argument = key == f"trainer.{word}" and word not in groups
    if is_argument and word in signature(_module("cli.build").Trainer).parameters:
        return f"Lightning's Trainer has {word}, conf/trainer does not: +{key}=... hands it over."
    near = ours or [
        other
        for other in _near(key, [*dict.fromkeys(groups + _keys(name, folder))])
        if other != key
    ]
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    if not _is_unread(key, [], folder):
        return f"There is no setting {key}.{meant} --cfg job shows all; +{key}=... adds one."
    others = [
        f" roundpipe-{other} has it."
        for other in _HELP
        if re.search(rf"^{key}:", (folder / f"{other}.yaml").read_text("utf-8"), re.MULTILINE)
    ]
    return f"There is no setting {key}.{meant}{''.join(others)} --cfg job shows all."


def _not_a_setting(words: str) -> str:
    return (
        f"{words!r} is no setting. Write them as NAME=VALUE, such as data=chats.jsonl; see --help."
    )


def _keys(name: str, folder: Path) -> list[str]:
    """All settings of a command with its defaults, as `group.name`."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder), version_base="1.3"):
        config: Any = OmegaConf.to_container(compose(name))

    def below(node: Any, start: str) -> Iterator[str]:
        for key, value in node.items():
            yield f"{start}{key}"
            if isinstance(value, dict):
                yield from below(value, f"{start}{key}.")

    return list(below(config, ""))


def _is_setting(word: str) -> bool:
    return word[:1] == "~" or ("=" in word and word[:1] != "-")


_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false", "None": "null"}
"""What files and Python call these values: Hydra would read texts, and a text counts as true."""


def in_settings(arguments: list[str], folder: Path, *, command: str = "train") -> list[str]:
    """The command line with files and models by name as settings.

    `data=` and `model=` name a file of `conf/data` and `conf/model`. A value that names none and
    has a dot, a slash or a star in it, is a list, or is here, is a file of data (`data.files=`), or
    a model of the hub or a folder (`model.hub_name=`). Files alone are data, too, of `data=chat`.
    `hardware=` with a file of YAML is `hardware_file=`. An added setting that nothing would read
    (`+push_to_hub=`) loses its `+`, so that it is refused, unless another refers to it.
    """
    given = dict(each.split("=", 1) for each in arguments if "=" in each)
    found = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if value in _WORDS and not _is_there(folder / name):
            argument = f"{name}={_WORDS[value]}"
        if name[:1] == "+" and _is_unread(name.lstrip("+"), arguments, folder):
            argument = argument.lstrip("+")
        if name == "hardware" and value.endswith((".yaml", ".yml")):
            argument = f"hardware_file={value}"
        is_group = _is_there(folder / name / f"{value}.yaml")
        is_place = re.search(r"[./*{\[]", value) or (value and _is_there(Path(value)))
        if name == "data.files" and "data" not in given and value[:1] not in ("", "'", '"'):
            found += _data_settings(value, given, folder)
        elif name not in ("data", "model") or is_group or not is_place:
            found.append(argument)
        elif name == "data":
            found += _data_settings(value, given, folder)
        else:
            found += _model_settings(value, folder)
    return for_export(found) if command == "export" else found


def for_export(settings: Sequence[str]) -> list[str]:
    """The settings of an export: model, module, adapters and tokenizer are the run's, if any.

    So there is nothing yet that `model.dtype=...` could change: Hydra is told to add it.
    """
    parts = ("model.", "module.", "peft.", "data.tokenizer.")
    return [f"++{each}" if each.startswith(parts) else each for each in settings]


def _is_unread(key: str, arguments: list[str], folder: Path) -> bool:
    """Return whether nothing would read an added setting, because no class is given it."""
    group = key.partition(".")[0].partition("@")[0]
    is_given = (folder / group).is_dir() and group not in ("partition", "paths")
    return not (is_given or any(f"${{{key}" in argument for argument in arguments))


def _data_settings(value: str, given: dict[str, str], folder: Path) -> list[str]:
    files = value if value[0] in "{[" else f"[{_quoted(value)}]"
    module = given.get("module", "causal_lm")
    if module != "causal_lm" and (folder / "module" / f"{module}.yaml").is_file():
        kinds = {"orpo": "preference", "reward": "preference"}
        return [f"data={kinds.get(module, module)}", f"data.files={files}"]
    chosen = (folder / group / f"{given[group]}.yaml" for group in _CHOICES if group in given)
    chooses = any("override /data" in f.read_text("utf-8") for f in chosen if f.is_file())
    if chooses or "recipe" in given:
        return [f"data.files={files}"]
    return ["data=chat", f"data.files={files}"]


def _model_settings(value: str, folder: Path) -> list[str]:
    for file in (folder / "model").glob("*.yaml"):
        if f"\nhub_name: {value} " in file.read_text("utf-8"):
            return [f"model={file.stem}", "model.weights=pretrained"]
    return ["model=hub", f"model.hub_name={_quoted(value)}"]


def _quoted(value: str) -> str:
    """A text as Hydra reads it: backslashes are themselves, but for those before a quote."""
    inside = re.sub(r"(\\+)(?='|$)", r"\1\1", value).replace("'", "\\'")
    return f"'{inside}'"


def as_setting(value: Any) -> str:
    """A value as it is typed on the command line."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(as_setting, value))}]"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _is_there(path: Path) -> bool:
    """Return whether something has a name, which may be too long for one."""
    with suppress(OSError, ValueError):
        return path.exists()
    return False


def _near(key: str, keys: list[str]) -> list[str]:
    last = key.rpartition(".")[2]
    same = [found for found in keys if found.rpartition(".")[2] == last]
    return same[:3] or difflib.get_close_matches(key, keys, n=2, cutoff=0.7)


def name_machines(folder: Path) -> None:
    """Let Hydra know machines by device and number: `hardware=rtx4090x8`."""
    from hydra.core.config_store import ConfigStore

    others = {"auto", "cpu", "gpu", "mixed"}
    for device in {path.stem for path in (folder / "hardware").glob("*.yaml")} - others:
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 16):
            node = {"defaults": [device, "_self_"], "devices": count}
            ConfigStore.instance().store(group="hardware", name=f"{device}x{count}", node=node)


def _config_folder() -> Path:
    """The folder `conf`: in a wheel inside the package, in a checkout beside it."""
    spec = find_spec("roundpipe_lightning")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    return next(path / "conf" for path in (package, package.parent) if (path / "conf").is_dir())
