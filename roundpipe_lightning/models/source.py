"""Sources of a model: an architecture written out, or published weights."""

import contextlib
import difflib
import enum
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel

from roundpipe_lightning.errors import ConfigurationError, RoundPipeError
from roundpipe_lightning.models.gguf import find_gguf, is_gguf, read_fields
from roundpipe_lightning.models.load import load_pretrained, map_without_values, seeded
from roundpipe_lightning.models.quantized import quantize_frozen
from roundpipe_lightning.models.weight_files import (
    check_can_map,
    check_has_weights,
    reach_options,
    unreadable,
)

_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "weights": ("auto", "random", "pretrained"),
    "frozen_weights": ("memory", "mmap"),
    "frozen_bits": (16, 8, 4),
    "dtype": ("auto", "float32", "bfloat16", "float16", "float64", None),
    "trust_remote_code": (False, True),  # a text such as "no" would let code run
}


class Head(str, enum.Enum):
    """Head on top of the blocks: which of transformers' automatic classes makes the model."""

    CAUSAL_LM = "AutoModelForCausalLM"
    SEQUENCE_CLASSIFICATION = "AutoModelForSequenceClassification"
    IMAGE_TEXT_TO_TEXT = "AutoModelForImageTextToText"

    @property
    def auto_class(self) -> Any:
        return getattr(transformers, self.value)


def _check_fields(
    fields: Mapping[str, Any], known: PreTrainedConfig, *, place: str = "model.architecture"
) -> None:
    """Refuse fields that a configuration does not have: transformers keeps and ignores them."""
    names = known.to_dict()
    for name, value in fields.items():
        if not (name in names or hasattr(known, name) or _is_read(name, known)):
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            hint = f" The nearest are {', '.join(near)}." if near else ""
            raise ConfigurationError(
                f"{place}.{name}: a configuration of {known.model_type!r} has no such field.{hint}"
            )
        part = vars(known).get(name)
        if isinstance(value, Mapping) and isinstance(part, PreTrainedConfig):
            _check_fields(value, part, place=f"{place}.{name}")


def _is_read(name: str, known: PreTrainedConfig) -> bool:
    """Return whether the model's code reads a field that its configuration does not declare."""
    library, folder = Path(transformers.__file__).parent, Path(inspect.getfile(type(known))).parent
    files = [library / "modeling_utils.py", library / "modeling_rope_utils.py"]
    reads = re.compile(rf"""config\.{re.escape(name)}\b|["']{re.escape(name)}["']""")
    return any(reads.search(p.read_text("utf-8")) for p in (*files, *folder.glob("modeling_*.py")))


_LABELS = ("id2label", "label2id")
"""Fields of a configuration that are replaced whole."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """An architecture and where its weights come from.

    Nothing is built or read when a source is made: `load_config` reads the architecture, `build`
    makes the model on the device and in the dtype that are torch's defaults at that moment, so
    `with torch.device("meta"): source.build()` needs no memory.

    Attributes:
        architecture: Every field of the transformers configuration, `model_type` among them. Used
            for random weights; published weights bring their own.
        architecture_of: The name on the hub whose architecture that is; None: nobody's.
        revision: Branch, tag or commit of the weights on the hub; None: the newest.
        hub_name: Name on the Hugging Face hub (`"Qwen/Qwen3-0.6B"`), a local folder written by
            `save_pretrained`, or a GGUF file (`package:NAME/FILE.gguf`: one in an installed Python
            package), for pretrained weights.
        weights: `"random"`: drawn from the architecture's own initialisation, which needs no hub
            and no file; `"pretrained"`: read from the hub, its cache, or a local folder; `"auto"`:
            read where `hub_name` names another model than `architecture_of`.
        seed: Seed of the random weights. The global generator of the CPU is left as it was.
        attention: Name of transformers' attention implementation (`"sdpa"`, `"eager"`, ...);
            None takes the best one the architecture supports.
        dtype: Of the parameters: `"float32"`, `"bfloat16"`, ... or `"auto"`, that of the published
            configuration. None is torch's default, which the Trainer's precision sets (float32
            for `*-mixed`); mapped or quantised weights take that of the configuration instead.
        trust_remote_code: Whether Python code that comes with the weights may run.
        unmatched_tensors: Regular expressions of tensors that may be missing from the weights (they
            are drawn anew) or that the weights may have besides (they are left out).
        frozen_weights: Where published weights are kept: in `"memory"`, or with `"mmap"` in their
            safetensors files, so that the model may be larger than host memory. The whole model is
            frozen then: it is for training adapters.
        frozen_bits: 16, or 8 or 4 to quantise the linear layers of the model, which is then frozen
            whole: for training adapters.
        pretrained_options: Further keyword arguments for `from_pretrained`.
        head: What stands on top of the blocks.
        config_changes: Fields of the configuration that are set to other values, whatever the
            weights: the number of classes, say, or the scaling of rotary positions. Of a field that
            is an object the keys that are named change.
    """

    architecture: Mapping[str, Any]
    architecture_of: str | None = None
    hub_name: str | None = None
    revision: str | None = None
    weights: str = "auto"
    seed: int = 0
    attention: str | None = None
    dtype: str | None = None
    trust_remote_code: bool = False
    unmatched_tensors: Sequence[str] = ()
    frozen_weights: str = "memory"
    frozen_bits: int = 16
    pretrained_options: Mapping[str, Any] | None = None
    head: Head = Head.CAUSAL_LM
    config_changes: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                words = ", ".join("null" if each is None else str(each) for each in known)
                raise ConfigurationError(f"model.{name}={value!r} is not one of {words}.")
        if not isinstance(self.pretrained_options or {}, Mapping):
            raise ConfigurationError(
                f"model.pretrained_options={self.pretrained_options!r}: give arguments of "
                "from_pretrained by their names."
            )
        if self.is_pretrained and self.hub_name is None:
            raise ConfigurationError(
                "model.weights=pretrained needs model.hub_name: a name on the Hugging Face hub or "
                "a local folder. This model has neither; use model.weights=random."
            )

    @property
    def is_pretrained(self) -> bool:
        if self.weights == "auto":
            return self.hub_name not in (None, self.architecture_of)
        return self.weights == "pretrained"

    def load_config(self) -> PreTrainedConfig:
        """The transformers configuration of the model, for its sizes.

        Where the architecture of the published weights is written out, nothing is read.

        Raises:
            ConfigurationError: The architecture's fields are not those of its `model_type`.
            ModelSourceError: Published weights were asked for and cannot be found.
        """
        is_written = self.hub_name == self.architecture_of and self.revision is None
        if self.is_pretrained and not (is_written and self.architecture):
            return self._published_config()
        fields = {**self.architecture, **self._changes_of(self.architecture)}
        model_type = fields.pop("model_type", None)
        if model_type not in CONFIG_MAPPING:
            raise ConfigurationError(
                f"model.architecture.model_type={model_type!r} is not an architecture that the "
                "installed transformers knows. Examples: qwen3, llama, gpt_oss, qwen3_moe."
            )
        known: PreTrainedConfig | None = None
        with contextlib.suppress(StrictDataclassError, ValueError):  # some have no defaults
            known = CONFIG_MAPPING[model_type]()
        if known is not None:
            _check_fields(self.architecture, known)
        try:
            return AutoConfig.for_model(model_type, **fields)
        except (StrictDataclassError, TypeError, ValueError, KeyError) as error:
            raise ConfigurationError(
                f"model.architecture is not a valid {model_type!r} architecture: {error}"
            ) from error

    def _published_config(self) -> PreTrainedConfig:
        assert self.hub_name is not None
        if is_gguf(self.hub_name):
            return AutoConfig.for_model(**read_fields(self.hub_name, self.config_changes or {}))
        with _explained(self.hub_name):
            fields, _ = PreTrainedConfig.get_config_dict(self.hub_name, **self.hub_options)
            files = fields.get("auto_map")
            known = fields.get("model_type") in CONFIG_MAPPING
            if files and not known and not self.trust_remote_code:
                named = ", ".join(sorted(map(str, files.values())))
                raise ConfigurationError(
                    f"{self.hub_name!r} wants to run code of its own ({named}), for the installed "
                    f"transformers has no architecture {fields.get('model_type')!r}. It is refused "
                    "unless model.trust_remote_code=true; read the code first."
                )
            options = {"trust_remote_code": self.trust_remote_code, **self.hub_options}
            config = AutoConfig.from_pretrained(self.hub_name, **options)
            if changes := self._changes_of(vars(config)):
                unknown = next((name for name in changes if not hasattr(config, name)), None)
                if unknown is not None:
                    raise ConfigurationError(
                        f"model.config_changes.{unknown}: the configuration of {self.hub_name!r} "
                        "has no such field."
                    )
                config = AutoConfig.from_pretrained(self.hub_name, **options, **changes)
            return cast(PreTrainedConfig, config)

    def _changes_of(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The changes of a configuration's fields, objects with the keys that stay."""
        changes = dict(self.config_changes or {})
        for name, value in changes.items():
            if isinstance(value, Mapping) and name not in _LABELS:
                changes[name] = {**(fields.get(name) or {}), **value}
        return changes

    def check_weights(self) -> None:
        """Look for published weights, if they are wanted; ModelSourceError: there are none."""
        if not self.is_pretrained:
            return
        assert self.hub_name is not None
        if is_gguf(self.hub_name):
            find_gguf(self.hub_name)
            return
        with _explained(self.hub_name):
            check_has_weights(self.hub_name, hub_options=self.hub_options)

    def build(self) -> PreTrainedModel:
        """The model, ready to be trained, in torch's default dtype.

        ConfigurationError: the architecture is invalid; ModelSourceError: weights cannot be loaded.
        """
        on_host = torch.empty(0).device.type != "meta"
        if self.is_pretrained and on_host:
            model = self._load_pretrained()
        else:
            model = self._from_config()
            if self.keeps_weights_in_files:  # on the meta device: as `load_pretrained` does
                map_without_values(model, self)
            if self.quantizes:
                quantize_frozen(model, self.frozen_bits)
        model.train()
        return model

    def _from_config(self) -> PreTrainedModel:
        """The model with random weights, or on the meta device, where there are none to read."""
        if not self.is_pretrained and self.maps_weights and torch.empty(0).device.type != "meta":
            raise ConfigurationError(
                "model.frozen_weights=mmap keeps published weights in their files, and "
                "model.weights=random has none. Set model.weights=pretrained."
            )
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        config = self.load_config()
        self._check_form(config)
        dtype = self.parameter_dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
        with seeded(self.seed):
            from_config = cast(Callable[..., PreTrainedModel], self.head.auto_class.from_config)
            try:
                model = from_config(config, dtype=dtype, **options)
            except (*_FOREIGN, ImportError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "dimension" not in str(error):
                    raise
                wrong = f"model.attention={self.attention}"
                if self.attention is None or not isinstance(error, (ValueError, ImportError)):
                    wrong = f"model.architecture cannot be built: {type(error).__name__}"
                raise ConfigurationError(f"{wrong}: {error}") from error
        if self.is_pretrained:
            model.config.name_or_path = model.name_or_path = cast(str, self.hub_name)
        return model

    @property
    def quantizes(self) -> bool:
        return self.frozen_bits < 16

    @property
    def keeps_weights_in_files(self) -> bool:
        """Whether the weights stay in the files they are published in."""
        return self.is_pretrained and self.maps_weights

    @property
    def maps_weights(self) -> bool:
        return self.frozen_weights == "mmap"

    @property
    def has_new_head(self) -> bool:
        """Whether what stands on top of the base model may be missing or another one."""
        return self.head is Head.SEQUENCE_CLASSIFICATION

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """Dtype of the parameters; None: that of the configuration."""
        adopts = self.quantizes or self.maps_weights
        if self.dtype is None and not adopts:
            return torch.get_default_dtype()
        return None if self.dtype in (None, "auto") else getattr(torch, self.dtype)

    @property
    def hub_options(self) -> dict[str, Any]:
        """Options of transformers that say where files are."""
        given = self.pretrained_options or {}
        return {
            **(reach_options(self.hub_name) if self.hub_name else {}),
            **({} if self.revision is None else {"revision": self.revision}),
            **{key: value for key, value in given.items() if key in _HUB_OPTIONS},
        }

    @property
    def building_options(self) -> dict[str, Any]:
        """Options of `from_pretrained` that say how the model is built."""
        given = self.pretrained_options or {}
        options = {key: value for key, value in given.items() if key not in _HUB_OPTIONS}
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        return {"dtype": self.parameter_dtype or "auto", **options}

    def _load_pretrained(self) -> PreTrainedModel:
        assert self.hub_name is not None
        if self.maps_weights:
            check_can_map()
        config = self.load_config() if is_gguf(self.hub_name) else self._published_config()
        self._check_form(config)
        with _explained(self.hub_name):
            return load_pretrained(self, config=config)

    @property
    def unpacks(self) -> bool:
        """Whether weights that are published as codes are asked for in whole."""
        packing = (self.pretrained_options or {}).get("quantization_config")
        return getattr(packing, "dequantize", False)

    def _check_form(self, config: PreTrainedConfig) -> None:
        """Refuse to map weights that are published as codes, and to quantise what stays codes."""
        if self.keeps_weights_in_files and is_gguf(self.hub_name):
            raise ConfigurationError(
                "model.frozen_weights=mmap maps safetensors files, and the weights of "
                f"{self.hub_name!r} are dequantised into memory. Write them to a folder, and train "
                f"that: roundpipe-export model={self.hub_name} dtype=bf16 output_dir=FOLDER."
            )
        is_packed = getattr(config, "quantization_config", None) is not None
        is_packed |= self.unpacks and self.hub_name == self.architecture_of
        ways = ["model.frozen_weights=memory"] if self.keeps_weights_in_files else []
        if self.quantizes and not self.unpacks:
            ways.append("model.frozen_bits=16")
        if is_packed and ways:
            raise ConfigurationError(
                f"The weights of {self.hub_name!r} are published in a quantised form that has to "
                f"be unpacked. Use {' and '.join(ways)}."
            )


_FOREIGN = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, AssertionError, StrictDataclassError),
)
"""What transformers raises for files of a model that are something else."""


@contextlib.contextmanager
def _explained(hub_name: str) -> Iterator[None]:
    """Turn what transformers raises for a name it cannot load into a `ModelSourceError`."""
    try:
        yield
    except RoundPipeError:
        raise  # it says itself what is wrong
    except _FOREIGN as error:
        raise unreadable(
            repr(hub_name),
            hub_name,
            error,
            otherwise="Name a local folder that holds config.json and the safetensors files"
            + (
                "."
                if Path(hub_name).exists()
                else f"; or fill the cache where the hub is reached (`hf download {hub_name}`) and "
                "point HF_HOME to it here, with HF_HUB_OFFLINE=1. For trials of a training "
                "model.weights=random needs no hub."
            ),
        ) from error
