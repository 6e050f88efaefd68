"""The folder of a run: what is read from one that somebody else may have written.

A checkpoint is passed on with the folder of its run. What stands there is data: plain values of
classes that are listed here, checked like typed settings. No other class is built by its name, no
trust is taken, nothing of the environment is filled in, and no file outside the folder is read,
unless the same words are typed on the command line.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

from omegaconf import DictConfig, OmegaConf
from omegaconf.resolvers import oc

from roundpipe_commands import as_setting
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.files import read_json, read_yaml, write_text

_PROGRAM = "roundpipe_lightning"
_MARKER = "run.json"
_SETTINGS = "config.yaml"
_LOCK = ".run.lock"
_TOKENIZER = "data.tokenizer"

_MODULES = (
    *("CausalLanguageModule", "SequenceClassificationModule", "VisionLanguageModule"),
    *("DirectPreferenceModule", "KahnemanTverskyModule", "OddsRatioModule", "RewardModule"),
)
_PEFT_CLASSES = (
    *("AdaLoraConfig", "IA3Config", "LoHaConfig", "LoKrConfig", "LoraConfig", "OFTConfig"),
    *("PrefixTuningConfig", "PromptEncoderConfig", "PromptTuningConfig"),
)
_CLASSES: Mapping[str, frozenset[str]] = {
    "model": frozenset({f"{_PROGRAM}.modules.ModelSource"}),
    "module": frozenset(f"{_PROGRAM}.modules.{name}" for name in _MODULES),
    "peft": frozenset(f"peft.{name}" for name in _PEFT_CLASSES),
    _TOKENIZER: frozenset(
        f"{_PROGRAM}.modules.{name}" for name in ("TokenizerSource", "ProcessorSource")
    ),
    "model.pretrained_options.quantization_config": frozenset(
        f"transformers.{name}" for name in ("BitsAndBytesConfig", "Mxfp4Config")
    ),
}
"""The groups that are read of a run, and the classes that each may have."""

_GROUPS = ("model", "module", "peft", _TOKENIZER)

_PLACES = ("model.hub_name", f"{_TOKENIZER}.name", f"{_TOKENIZER}.chat_template", "peft.adapter")
"""Settings that may name a file or a folder."""

_PEFT_FIELDS = frozenset(
    {
        *("_target_", "adapter", "frozen_bits", "seed", "bias", "modules_to_save"),
        *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "lora_bias", "alpha"),
        *("target_modules", "target_parameters", "exclude_modules", "feedforward_modules"),
        *("init_lora_weights", "init_ia3_weights", "init_weights", "fan_in_fan_out"),
        *("layers_to_transform", "layers_pattern", "layer_replication", "rank_pattern"),
        *("alpha_pattern", "trainable_token_indices", "ensure_weight_tying"),
        *("num_virtual_tokens", "prefix_projection", "prompt_tuning_init", "encoder_dropout"),
        *("encoder_hidden_size", "encoder_num_layers", "encoder_reparameterization_type"),
    }
)
"""Fields of peft that are values. Others import a module, or read a tokenizer or other adapters."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """A run's folder with its settings, as values that nothing has been made of.

    Attributes:
        settings: What `config.yaml` says; interpolations are texts.
    """

    folder: Path
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> SavedRun:
        """Read a run's folder; ConfigurationError: its `config.yaml` is damaged or something else.

        OSError: it cannot be read.
        """
        return cls(folder=folder, settings=read_yaml(folder / _SETTINGS))

    def value(self, key: str) -> Any:
        """Return a setting by its dotted name; None: the run has none."""
        return _value(self.settings, key)

    def line(self, key: str) -> str | None:
        """Return a setting for a page that is shown; None: the run has none."""
        value = self.value(key)
        return None if value is None else line(value)

    def groups(self, typed: Mapping[str, Any]) -> dict[str, dict[str, Any] | None]:
        """Return the settings of model, module, adapters and tokenizer.

        Args:
            typed: Settings of the command line. They change the run's; a group with another class
                takes the place of the run's. What a run may not say alone is allowed where they say
                the same.

        Raises:
            ConfigurationError: The run says what it may not say; the message has the words to type.
        """
        groups = {name: self._group(name, typed) for name in _GROUPS}
        words_typed = set(_texts(typed))
        refusals = {
            str(value): (path, value, reason)  # a model and its tokenizer have one folder
            for name, group in reversed(groups.items())
            for path, value, reason in _refusals(group, name, self.folder)
            if _value(typed, path) != value and value not in words_typed
        }
        if refusals:
            named = "; ".join(f"{path}={value} {why}" for path, value, why in refusals.values())
            words = " ".join(_words(path, value) for path, value, _ in refusals.values())
            raise ConfigurationError(
                f"{self.folder / _SETTINGS}: {named}. A run's folder is data, and somebody else "
                f"may have written it. If you trust what it names, type it again: {words}"
            )
        return groups

    def _group(self, name: str, typed: Mapping[str, Any]) -> dict[str, Any] | None:
        saved, changes = self.value(name), _value(typed, name) or {}
        target = changes.get("_target_")
        is_chosen = target in _CLASSES[name] or target not in (None, _value(saved, "_target_"))
        if is_chosen or saved is None:
            return changes or None
        if not isinstance(saved, Mapping) or "_target_" not in saved:
            raise ConfigurationError(
                f"{self.folder / _SETTINGS}: {name} has no class (_target_), so this is no "
                f"config.yaml of a run. Choose one on the command line: {name}=..."
            )
        merged: dict[str, Any] = _merged(_without_trust(saved), changes)
        return None if merged["_target_"] is None else merged


def written_settings(config: DictConfig) -> dict[str, Any]:
    """Return a configuration as values, but for those of the environment: they may be secrets.

    `token=${oc.env:HF_TOKEN}` stays as it was typed, where settings are saved or logged.
    """

    def as_typed(*words: object) -> str:
        return f"${{oc.env:{','.join(map(str, words))}}}"

    OmegaConf.register_new_resolver("oc.env", as_typed, replace=True)
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    return dict(values)


def line(value: object) -> str:
    """Return a value as one line of text, without what a table or a terminal would obey."""
    return re.sub(r"[|`<>]", " ", "".join(c if c.isprintable() else " " for c in str(value)))


def find_run(checkpoint: Path) -> SavedRun | None:
    """Return the run that wrote `RUN/checkpoints/NAME` or `RUN/NAME`; None: there is none.

    ConfigurationError: its files are damaged.
    """
    parent = checkpoint.resolve().parent
    for folder in (parent, *([parent.parent] if parent.name == "checkpoints" else [])):
        if is_run(folder) and (folder / _SETTINGS).stat().st_uid == checkpoint.stat().st_uid:
            return SavedRun.read(folder)
    return None


def is_run(folder: Path) -> bool:
    """Return whether this program has trained in a folder; ConfigurationError: a file is broken."""
    if not ((folder / _MARKER).is_file() and (folder / _SETTINGS).is_file()):
        return False
    return read_json(folder / _MARKER).get("program") == _PROGRAM


def mark_run(folder: Path) -> None:
    """Write the file by which a folder is known to be that of a run."""
    write_text(folder / _MARKER, json.dumps({"program": _PROGRAM}) + "\n")


@contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Keep a folder for this process, with a lock file that names it and is removed in the end.

    Raises:
        ConfigurationError: Another process has the folder.
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _LOCK
    descriptor = _open_lock(path)
    try:
        os.truncate(path, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        # Hazard: between an unlock and a removal another process could lock the file.
        with suppress(OSError):
            path.unlink()
        os.close(descriptor)
        if sys.platform == "win32":
            path.unlink(missing_ok=True)


def _open_lock(path: Path) -> int:
    """Open and lock a file; the lock ends with the process, whatever ends it, on any host."""
    while True:
        if sys.platform == "win32":  # a file that is open cannot be removed there
            with suppress(FileNotFoundError), _refused_as_held(path):
                path.unlink()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if sys.platform != "win32":
                # Hazard: flock would be inherited by forked workers, and outlive a killed run.
                with _refused_as_held(path):
                    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # else the holder has just removed it
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def _refused_as_held(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if not isinstance(error, (BlockingIOError, PermissionError)):
            return  # a file system without locks
        holder = path.read_text("utf-8", "replace") or "another process"
        raise ConfigurationError(
            f"hydra.run.dir={path.parent}: the run of {line(holder)} writes this folder. Name "
            "another folder, or wait until that run has ended."
        ) from error


def _value(settings: Any, key: str) -> Any:
    for name in key.split("."):
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings


def _merged(saved: Any, changes: Any) -> Any:
    if not (isinstance(saved, Mapping) and isinstance(changes, Mapping)):
        return changes
    return {**saved, **{key: _merged(saved.get(key), value) for key, value in changes.items()}}


def _without_trust(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = ((key, each) for key, each in value.items() if key != "trust_remote_code")
        return {key: _without_trust(each) for key, each in kept}
    return [_without_trust(each) for each in value] if isinstance(value, list) else value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str):
        yield value


def _refusals(value: Any, path: str, folder: Path) -> Iterator[tuple[str, Any, str]]:
    """Yield the settings that a run may not say alone: path, value and reason."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _refusals(each, f"{path}.{key}", folder)
    elif isinstance(value, list):
        for each in value:
            yield from _refusals(each, path, folder)
    elif value is not None:
        reason = _reason(path, value, folder)
        if reason is not None:
            yield path, value, reason


def _reason(path: str, value: Any, folder: Path) -> str | None:
    """Return why a run may not say a setting alone; None: it may."""
    group, _, key = path.rpartition(".")
    text = str(value)
    if key == "_target_":
        return None if value in _CLASSES.get(group, ()) else "is a class that is not listed"
    if key.startswith("_") and key not in ("_convert_", "_partial_"):
        return "is a word of the program"
    if "${" in text:
        return "would be filled in from elsewhere"
    if path in _PLACES and _is_outside(text, folder):
        return "is outside of the folder"
    if group == "peft" and key not in _PEFT_FIELDS and value is not False:
        return "may read other files"
    if group.startswith("model.pretrained_options") and not group.endswith("quantization_config"):
        return "may run code"
    if (key == "attention" or key.endswith("implementation")) and "/" in text:
        return "is code of a repository"
    return None


def _is_outside(name: str, folder: Path) -> bool:
    """Return whether a name is that of a file or a folder, and not one inside a run's folder."""
    path = Path(name).expanduser()
    is_here = path.exists() or name[:1] in ("/", "~", ".") or path.is_absolute()
    return is_here and not path.resolve().is_relative_to(folder.resolve())


def _words(path: str, value: Any) -> str:
    text = str(value) if re.fullmatch(r"[\w./:~-]+", str(value)) else as_setting(value)
    return shlex.quote(f"{path}={text}")
