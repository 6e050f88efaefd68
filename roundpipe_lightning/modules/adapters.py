"""Parameter-efficient fine-tuning: the model's own weights stay, what peft adds is trained.

peft takes seconds to import, so nothing of it is imported before there are adapters.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError
from roundpipe_lightning.models.export import saves_embedding
from roundpipe_lightning.models.load import first_lines, seeded, shape_differences
from roundpipe_lightning.models.weight_files import check_exported, reach_options

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
"""The value of `target_modules` that means every linear layer but the output's."""
_COUNTS = ("r", "init_r", "target_r", "num_virtual_tokens")
_NOT_SETTINGS = frozenset(
    {"peft_type", "task_type", "inference_mode", "auto_mapping", "peft_version"}
)


_HARMLESS = {
    "megatron_config": None,  # imports the module that `megatron_core` names
    "tokenizer_kwargs": None,  # may say trust_remote_code
    "prompt_tuning_init": "RANDOM",  # as a text, it is read with a tokenizer of any name
}
"""Fields of a saved adapter whose use runs code, and values that do not; its weights are saved."""


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """A method of peft with its settings, and the saved adapter to start from, if any.

    Attributes:
        config: Peft's configuration, such as `peft.LoraConfig(r=8, target_modules="all-linear")`.
        adapter: Folder or hub name of a saved adapter whose values, and whose settings, the
            training starts from; None begins anew.
        seed: Seed of the first values of what is added. The global generator of the CPU is left as
            it was. None draws from that generator.
    """

    config: PeftConfig = field(hash=False)
    adapter: str | None = None
    seed: int | None = None

    @property
    def method(self) -> str:
        return _method(self.config)

    def apply(self, model: PreTrainedModel, *, task: str = "CAUSAL_LM") -> PeftModel:
        """Put adapters into a model, in place, and freeze all else.

        Args:
            task: What it is for, as peft spells it: `CAUSAL_LM`, `SEQ_CLS`, `SEQ_2_SEQ_LM`, ...

        Raises:
            ConfigurationError: The model has no layer or parameter of one of the names, or the
                saved adapter is another method's.
            ModelSourceError: The saved adapter cannot be read, or is for another base.
        """
        from peft import TaskType, get_peft_model

        if self.adapter is not None:
            return _load_adapter(model, self.adapter, method=self.method)
        config = copy.deepcopy(self.config)  # peft writes the names it has found into it
        config.task_type = TaskType(task)
        _check_targets(model, config)
        try:
            with seeded(self.seed), _quiet():
                if not (getattr(config, "rank_pattern", 0) or getattr(config, "alpha_pattern", 0)):
                    # peft writes some for experts itself, and misses modules for them
                    warnings.filterwarnings("ignore", message=".*_pattern keys did not match")
                return cast("PeftModel", get_peft_model(model, config))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigurationError(
                f"peft={self.method} cannot be applied to this model: {error}"
            ) from error


def saved_adapters(folder: str) -> Adapters:
    import peft

    return Adapters(config=peft.PeftConfig.from_pretrained(folder), adapter=folder)


def peft_config(target: str, settings: Mapping[str, Any]) -> PeftConfig:
    """Make a configuration of peft from its class (`peft.LoraConfig`) and its fields."""
    import peft

    name = target.removeprefix("peft.")
    classes = {n: c for n, c in vars(peft).items() if isinstance(c, type) and "Config" in n}
    if name not in classes:
        raise ConfigurationError(
            f"peft._target_={target!r} is no configuration of the installed peft."
            f"{_nearest(name, classes)}"
        )
    kind = classes[name]
    known = {entry.name for entry in dataclasses.fields(kind)} - _NOT_SETTINGS
    for key, value in settings.items():
        if key not in known:
            hint = _nearest(key, known)
            raise ConfigurationError(f"peft.{key} is not a setting of {target}.{hint}")
        if key in _COUNTS and not (value is None or (isinstance(value, int) and value >= 1)):
            raise ConfigurationError(f"peft.{key}={value} must be a whole number, 1 or more.")
        if "dropout" in key and isinstance(value, (int, float)) and not 0 <= value < 1:
            raise ConfigurationError(
                f"peft.{key}={value} must lie between 0 and 1, 1 itself not included."
            )
        if key == "target_modules" and (isinstance(value, int) or value in ("", [])):
            raise ConfigurationError(
                f"peft.target_modules={value}: name the layers to adapt, or 'all-linear'."
            )
    try:
        with _quiet():
            made = kind(**{key: value for key, value in settings.items() if value is not None})
            return cast("PeftConfig", made)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{target} cannot be set up: {error}") from error


def _method(config: PeftConfig) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type)).lower()


def _check_targets(model: nn.Module, config: PeftConfig) -> None:
    modules = [name for name, _ in model.named_modules() if name]
    adaptable = [name for name, m in model.named_modules() if m._parameters]  # noqa: SLF001
    parameters = dict(model.named_parameters())
    targets = getattr(config, "target_modules", None)
    if not isinstance(targets, str):
        _check_names("peft.target_modules", targets or (), modules, offered=adaptable)
    elif targets != ALL_LINEAR and not any(re.fullmatch(targets, name) for name in modules):
        raise ConfigurationError(
            f"peft.target_modules={targets!r} is taken as a regular expression for whole names "
            f"and matches no module. Names are like {adaptable[len(adaptable) // 2]!r}."
        )
    whole = getattr(config, "modules_to_save", None) or ()
    _check_names("peft.modules_to_save", whole, modules, offered=adaptable)
    stacked = [name for name, parameter in parameters.items() if parameter.dim() > 2]
    names = getattr(config, "target_parameters", None) or ()
    _check_names(
        "peft.target_parameters", names, list(parameters), offered=stacked, kind="parameter"
    )


def _check_names(
    setting: str,
    names: Iterable[str],
    present: Sequence[str],
    *,
    offered: Sequence[str],
    kind: str = "layer",
) -> None:
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


def _load_adapter(model: PreTrainedModel, source: str, *, method: str) -> PeftModel:
    """Put a saved adapter onto a model, in place, ready to be trained on."""
    import peft
    from huggingface_hub import snapshot_download
    from peft.utils import SAFETENSORS_WEIGHTS_NAME
    from safetensors import SafetensorError

    reach: Any = reach_options(source)  # peft asks a hub that does not answer for half a minute
    try:
        config = peft.PeftConfig.from_pretrained(source, **reach)
        if (Path(source) / SAFETENSORS_WEIGHTS_NAME).is_file():
            check_exported(Path(source) / SAFETENSORS_WEIGHTS_NAME)
        folder = snapshot_download(source, **reach) if reach else source
        weights = peft.load_peft_weights(folder, device="cpu")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelSourceError(
            f"peft.adapter={source!r} is not a saved adapter that can be read ({error}). Give the "
            "folder that PeftModel.save_pretrained wrote: adapter_config.json beside "
            "adapter_model.safetensors."
        ) from error
    if _method(config) != method:
        raise ConfigurationError(
            f"peft.adapter={source!r} is an adapter of method {_method(config)}, but peft={method} "
            "was chosen. Choose the group entry of that method, for example peft=lora."
        )
    config.inference_mode = False
    for name in _HARMLESS.keys() & vars(config):
        setattr(config, name, _HARMLESS[name])
    with _quiet():
        try:
            adapted = cast("PeftModel", peft.get_peft_model(model, config))
        except (ValueError, NotImplementedError) as error:
            raise ModelSourceError(_another_base(source, config, str(error))) from error
        known = peft.get_peft_model_state_dict(
            adapted, save_embedding_layers=saves_embedding(adapted)
        )
        lines = shape_differences(known, weights)
        if lines:
            what = f"{len(lines)} differences: {first_lines(lines)}"
            raise ModelSourceError(_another_base(source, config, what))
        peft.set_peft_model_state_dict(adapted, weights)
    return adapted


def _another_base(source: str, config: PeftConfig, what: str) -> str:
    base = config.base_model_name_or_path
    made_for = f", which was made for {base!r}," if base else ""
    return (
        f"peft.adapter={source!r}{made_for} does not fit this model: {what}. "
        "Choose the model that it was trained on."
    )
