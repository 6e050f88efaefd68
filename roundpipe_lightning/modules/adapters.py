"""Parameter-efficient fine-tuning: the model's own weights stay, what peft adds is trained.

Every method of the installed peft can be named; its settings are the fields of peft's own
configuration class. Four short names stand for fields that peft calls differently per method:

| here | peft |
|---|---|
| `rank` | `r` |
| `alpha` | `lora_alpha`, `alpha` |
| `dropout` | `lora_dropout`, `vera_dropout`, `boft_dropout`, `module_dropout`, `encoder_dropout` |
| `init` | `init_lora_weights`, `init_ia3_weights`, `init_weights`, `prompt_tuning_init` |

peft takes seconds to import, so nothing of it is imported before there are adapters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from roundpipe_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

_SHORT_NAMES = {
    "rank": ("r",),
    "alpha": ("lora_alpha", "alpha"),
    "dropout": (
        "lora_dropout",
        "vera_dropout",
        "boft_dropout",
        "module_dropout",
        "encoder_dropout",
    ),
    "init": ("init_lora_weights", "init_ia3_weights", "init_weights", "prompt_tuning_init"),
}
_COUNTS = ("r", "init_r", "target_r", "num_virtual_tokens")
_OURS = frozenset({"peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version"})
ALL_LINEAR = "all-linear"
"""The value of `target_modules` that means every linear layer but the output's."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """A method of peft with its settings, and the saved adapter to start from, if any.

    Attributes:
        method: Name of peft's method: `lora`, `ia3`, `prompt_tuning`, `prefix_tuning`, `p_tuning`,
            `vera`, ... Variants are settings of theirs (`use_dora`, `use_rslora`).
        settings: Fields of peft's configuration class, or the short names in this file's table.
            None leaves peft's default.
        adapter: Folder or hub name of a saved adapter whose values, and whose settings, the
            training starts from; None begins anew.
        seed: Seed of the first values of what is added. The global generator of the CPU is left as
            it was. None draws from that generator.

    Raises:
        ConfigurationError: The method or a setting is unknown, or a figure is out of its range.
    """

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    adapter: str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        methods = _methods()
        if self.method not in methods:
            raise ConfigurationError(
                f"peft.method={self.method!r} is not a method of the installed peft."
                f"{_nearest(self.method, methods)} There are {', '.join(sorted(methods))}."
            )
        _check_ranges(self._fields(), self._short_names())
        self.config()

    @property
    def target_modules(self) -> str | tuple[str, ...] | None:
        """The layers that are adapted, as given: names, a pattern, or None for peft's choice."""
        names = self.settings.get("target_modules")
        return names if names is None or isinstance(names, str) else tuple(names)

    def config(self, *, task: str | None = None) -> PeftConfig:
        """Peft's configuration.

        Args:
            task: As peft spells it: `CAUSAL_LM`, `SEQ_CLS`, `SEQ_2_SEQ_LM`, ...; None: any.
        """
        try:
            with _quiet():
                return self._kind(task_type=task, **self._fields())
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"peft={self.method} cannot be set up: {error}") from error

    def apply(self, model: PreTrainedModel, *, task: str = "CAUSAL_LM") -> PeftModel:
        """Put adapters into a model, in place, and freeze all else.

        Args:
            model: The base.
            task: What it is for, as peft spells it.

        Raises:
            ConfigurationError: The model has no layer or parameter of one of the names, or the
                saved adapter is another method's.
            ModelSourceError: The saved adapter cannot be read, or is for another base.
        """
        from peft import get_peft_model

        from roundpipe_lightning.modules.saved_adapter import load_adapter

        if self.adapter is not None:
            return load_adapter(model, self.adapter, method=self.method)
        config = self.config(task=task)
        _check_modules(model, config)
        _check_parameters(model, config)
        try:
            with self._seeded(), _quiet():
                return cast("PeftModel", get_peft_model(model, config))
        except (ValueError, NotImplementedError) as error:
            raise ConfigurationError(
                f"peft={self.method} cannot be applied to this model: {error}"
            ) from error

    @property
    def _kind(self) -> type[PeftConfig]:
        return _methods()[self.method]

    def _short_names(self) -> dict[str, str]:
        """The field of this method that every short name stands for."""
        fields = {entry.name for entry in dataclasses.fields(self._kind)}
        found = {
            short: next((name for name in names if name in fields), None)
            for short, names in _SHORT_NAMES.items()
        }
        return {short: name for short, name in found.items() if name is not None}

    def _fields(self) -> dict[str, Any]:
        """The settings by the names of peft's fields."""
        known = {entry.name for entry in dataclasses.fields(self._kind)} - _OURS
        short_names, fields = self._short_names(), dict[str, Any]()
        for given, value in self.settings.items():
            name = short_names.get(given, given)
            if name not in known:
                raise ConfigurationError(
                    f"peft.{given} is not a setting of {self.method} "
                    f"({self._kind.__name__} in peft).{_nearest(given, known | set(short_names))}"
                )
            if name in fields:
                raise ConfigurationError(
                    f"peft.{given} and another setting both stand for {name!r}: drop one of them."
                )
            if value is not None:
                fields[name] = value
        return fields

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        if self.seed is None:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            yield


def _methods() -> dict[str, type[PeftConfig]]:
    """The configuration classes of the installed peft by the names of their methods."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    kinds: Mapping[Any, type[PeftConfig]] = PEFT_TYPE_TO_CONFIG_MAPPING
    return {name.value.lower(): kind for name, kind in kinds.items()}


def _check_ranges(fields: Mapping[str, Any], short_names: Mapping[str, str]) -> None:
    given = {name: short for short, name in short_names.items()}
    for name, value in fields.items():
        said = f"peft.{given.get(name, name)}={value}"
        if name in _COUNTS and not (isinstance(value, int) and value >= 1):
            raise ConfigurationError(f"{said} must be a whole number, 1 or more.")
        if "dropout" in name and not isinstance(value, bool) and not 0 <= value < 1:
            raise ConfigurationError(f"{said} must lie between 0 and 1, 1 itself not included.")
        if name.startswith("target_modules") and not value:
            raise ConfigurationError(
                "peft.target_modules is empty: name the layers to adapt, or 'all-linear'."
            )


def _check_modules(model: nn.Module, config: PeftConfig) -> None:
    """Find every module that is to be adapted or trained whole."""
    modules = [name for name, _ in model.named_modules() if name]
    adaptable = [name for name, m in model.named_modules() if m._parameters]  # noqa: SLF001
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, str):
        if targets != ALL_LINEAR and not any(re.fullmatch(targets, name) for name in modules):
            raise ConfigurationError(
                f"peft.target_modules={targets!r} is taken as a regular expression for whole names "
                f"and matches no module. Names are like {adaptable[len(adaptable) // 2]!r}."
            )
    else:
        _check_names("peft.target_modules", targets or (), modules, offered=adaptable)
    whole = getattr(config, "modules_to_save", None) or ()
    _check_names("peft.modules_to_save", whole, modules, offered=adaptable)


def _check_parameters(model: nn.Module, config: PeftConfig) -> None:
    names = [name for name, _ in model.named_parameters()]
    targets = getattr(config, "target_parameters", None) or ()
    stacked = [name for name, p in model.named_parameters() if p.dim() > 2]
    _check_names("peft.target_parameters", targets, names, offered=stacked, kind="parameter")


def _check_names(
    setting: str,
    names: Iterable[str],
    present: Sequence[str],
    *,
    offered: Sequence[str],
    kind: str = "layer",
) -> None:
    """Raise unless every name is that of something in the model, or ends the name of something."""
    for name in names:
        if not any(full == name or full.endswith(f".{name}") for full in present):
            parts = 1 + name.count(".")
            ends = {".".join(full.split(".")[-parts:]) for full in offered}
            there = f" There are {', '.join(sorted(ends))}." if ends else ""
            raise ConfigurationError(
                f"{setting}: the model has no {kind} {name!r}.{_nearest(name, ends)}"
                + (there or f" It has no {kind} that this could mean.")
            )


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f" The nearest are {', '.join(near)}." if near else ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.23 has renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        yield
