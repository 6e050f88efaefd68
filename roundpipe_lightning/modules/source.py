"""Sources of a model: an architecture written out, or published weights."""

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from typing_extensions import override

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError, RoundPipeError
from roundpipe_lightning.models.load import LoadOptions, load_pretrained
from roundpipe_lightning.models.quantized import quantize_frozen
from roundpipe_lightning.models.weight_files import (
    check_can_map,
    check_has_weights,
    reach_options,
    unreadable,
)

_CHOICES: dict[str, tuple[Any, ...]] = {
    "weights": ("auto", "random", "pretrained"),
    "frozen_weights": ("memory", "mmap"),
    "frozen_bits": (16, 8, 4),
    "dtype": ("auto", "float32", "bfloat16", "float16", "float64", None),
}


class Head(str, enum.Enum):
    """Head on top of the blocks: which of transformers' automatic classes makes the model."""

    CAUSAL_LM = "AutoModelForCausalLM"
    SEQUENCE_CLASSIFICATION = "AutoModelForSequenceClassification"
    IMAGE_TEXT_TO_TEXT = "AutoModelForImageTextToText"

    @property
    def auto_class(self) -> Any:
        return getattr(transformers, self.value)


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
        hub_name: Name on the Hugging Face hub (`"Qwen/Qwen3-0.6B"`) or a local folder written by
            `save_pretrained`, for pretrained weights.
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
            weights: the number of classes, say.

    Raises:
        ConfigurationError: A choice is unknown, or the part of the source it needs is missing.
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
    config_changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                words = ", ".join("null" if each is None else str(each) for each in known)
                raise ConfigurationError(f"model.{name}={value!r} is not one of {words}.")
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
        fields = {**self.architecture, **self.config_changes}
        model_type = fields.pop("model_type", None)
        if model_type not in CONFIG_MAPPING:
            raise ConfigurationError(
                f"model.architecture.model_type={model_type!r} is not an architecture that the "
                "installed transformers knows. Examples: qwen3, llama, gpt_oss, qwen3_moe."
            )
        try:
            return AutoConfig.for_model(model_type, **fields)
        except (StrictDataclassError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"model.architecture is not a valid {model_type!r} architecture: {error}"
            ) from error

    def _published_config(self) -> PreTrainedConfig:
        assert self.hub_name is not None
        with _explained(self.hub_name):
            self._check_remote_code()
            config = AutoConfig.from_pretrained(
                self.hub_name,
                trust_remote_code=self.trust_remote_code,
                **self._load_options.hub,
                **self.config_changes,
            )
            return cast(PreTrainedConfig, config)

    def check_weights(self) -> None:
        """Look whether there are published weights, if they are wanted, without reading any.

        Raises:
            ModelSourceError: There are none.
        """
        if not self.is_pretrained:
            return
        assert self.hub_name is not None
        with _explained(self.hub_name):
            check_has_weights(self.hub_name, hub_options=self._load_options.hub)

    def build(self) -> PreTrainedModel:
        """The model, ready to be trained, in torch's default dtype.

        Raises:
            ConfigurationError: The architecture's fields are not those of its `model_type`.
            ModelSourceError: Published weights were asked for and cannot be loaded.
        """
        on_host = torch.empty(0).device.type != "meta"
        if self.is_pretrained and on_host:
            model = self._load_pretrained()
        else:
            model = self._from_config()
            if self.quantizes:
                quantize_frozen(model, self.frozen_bits)
            elif self.keeps_weights_in_files:  # on the meta device: as `load_pretrained` does
                model.requires_grad_(False)
        model.train()
        return model

    def _from_config(self) -> PreTrainedModel:
        """The model with random weights, or on the meta device, where there are none to read."""
        if not self.is_pretrained and self._is_mapped and torch.empty(0).device.type != "meta":
            raise ConfigurationError(
                "model.frozen_weights=mmap keeps published weights in their files, and "
                "model.weights=random has none. Set model.weights=pretrained."
            )
        options: dict[str, Any] = {"trust_remote_code": self.trust_remote_code}
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        config = self.load_config()
        dtype = self._dtype or getattr(config, "dtype", None) or torch.get_default_dtype()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)
            from_config = cast(Callable[..., PreTrainedModel], self.head.auto_class.from_config)
            model = from_config(config, dtype=dtype, **options)
        if self.is_pretrained:
            model.config.name_or_path = model.name_or_path = cast(str, self.hub_name)
        return model

    @property
    def quantizes(self) -> bool:
        return self.frozen_bits < 16

    @property
    def keeps_weights_in_files(self) -> bool:
        """Whether the weights stay in the files they are published in."""
        return self.is_pretrained and self._is_mapped

    @property
    def _is_mapped(self) -> bool:
        return self.frozen_weights == "mmap"

    @property
    def _dtype(self) -> torch.dtype | None:
        """Dtype of the parameters; None: that of the configuration."""
        adopts = self.is_pretrained and (self.quantizes or self.keeps_weights_in_files)
        if self.dtype is None and not adopts:
            return torch.get_default_dtype()
        return None if self.dtype in (None, "auto") else getattr(torch, self.dtype)

    @property
    def _load_options(self) -> LoadOptions:
        return LoadOptions(
            dtype=self._dtype,
            attention=self.attention,
            unmatched=tuple(self.unmatched_tensors),
            new_head=self.head is Head.SEQUENCE_CLASSIFICATION,
            mapped=self._is_mapped,
            frozen_bits=self.frozen_bits,
            trust_remote_code=self.trust_remote_code,
            others={
                **(reach_options(self.hub_name) if self.hub_name else {}),
                **({} if self.revision is None else {"revision": self.revision}),
                **(self.pretrained_options or {}),
            },
        )

    def _load_pretrained(self) -> PreTrainedModel:
        assert self.hub_name is not None
        options = self._load_options
        if options.mapped:
            check_can_map()
        config = self._published_config()
        with _explained(self.hub_name):
            return load_pretrained(
                self.hub_name, config=config, options=options, auto_class=self.head.auto_class
            )

    def _check_remote_code(self) -> None:
        """Refuse to run code that comes with the weights, unless asked for."""
        assert self.hub_name is not None
        fields, _ = PreTrainedConfig.get_config_dict(self.hub_name, **self._load_options.hub)
        files = fields.get("auto_map")
        known = fields.get("model_type") in CONFIG_MAPPING
        if files and not known and not self.trust_remote_code:
            named = ", ".join(sorted(map(str, files.values())))
            raise ConfigurationError(
                f"{self.hub_name!r} wants to run code of its own ({named}), for the installed "
                f"transformers has no architecture {fields.get('model_type')!r}. It is refused "
                "unless model.trust_remote_code=true; read the code first."
            )


@contextlib.contextmanager
def _explained(hub_name: str) -> Iterator[None]:
    """Turn what transformers raises for a name it cannot load into a `ModelSourceError`."""
    try:
        yield
    except RoundPipeError:
        raise  # it says itself what is wrong
    except (OSError, ValueError) as error:
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


_SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{% for call in message['tool_calls'] %}"
    "{{ call | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

NUM_BYTE_TOKENS = 256 + len(_SPECIAL)
"""Tokens of the byte tokenizer that has learned no longer pieces."""


@dataclass(frozen=True, kw_only=True)
class TokenizerSource:
    """Source of a tokenizer; nothing is read until `load`.

    Attributes:
        name: Name on the Hugging Face hub or a local folder with `tokenizer.json`; None: one token
            for each byte, with a pad token and a chat template, which needs no file.
        revision: Branch, tag or commit on the hub; None: the newest.
        chat_template: File with a Jinja template that takes the place of the tokenizer's own.
        pad_token: A token of the vocabulary to pad with, for tokenizers that have none.
        trust_remote_code: Whether Python code that comes with it may run.
    """

    name: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    pad_token: str | None = None
    trust_remote_code: bool = False

    def load(self) -> Any:
        """The tokenizer.

        Raises:
            ModelSourceError: It cannot be found, or is none.
            ConfigurationError: The template's file is missing, the pad token is unknown, or it has
                code of its own that may not run.
        """
        if self.name is None:
            return self._completed(byte_level_tokenizer())
        return self._completed(_pretrained(AutoTokenizer, self))

    def _completed(self, tokenizer: Any) -> Any:
        if self.chat_template is not None:
            path = Path(self.chat_template).expanduser()
            if not path.is_file():
                raise ConfigurationError(
                    f"data.tokenizer.chat_template={self.chat_template!r} is not a file (looked in "
                    f"{Path.cwd()}). Name a file with a Jinja template, or null for the "
                    "tokenizer's own."
                )
            tokenizer.chat_template = path.read_text(encoding="utf-8")
        if self.pad_token is not None:
            if self.pad_token not in tokenizer.get_vocab():
                raise ConfigurationError(
                    f"data.tokenizer.pad_token={self.pad_token!r} is not in the tokenizer's "
                    f"vocabulary of {len(tokenizer)} tokens. Its special tokens are "
                    f"{', '.join(map(repr, tokenizer.all_special_tokens)) or 'none'}."
                )
            tokenizer.pad_token = self.pad_token
        return tokenizer


@dataclass(frozen=True, kw_only=True)
class ProcessorSource(TokenizerSource):
    """Source of a processor of transformers: a tokenizer and what prepares images for the model."""

    def load_processor(self) -> Any:
        """The processor, its tokenizer with the template and the pad token.

        Raises:
            ModelSourceError: It cannot be found, or the model has none for images.
            ConfigurationError: As for `load`, or a library is missing.
        """
        if self.name is None:
            raise ConfigurationError(
                "data=vision needs the processor of a model: set data.tokenizer.name, or model=... "
                "of the hub or of a folder."
            )
        try:
            processor = _pretrained(AutoProcessor, self)
        except ImportError as error:  # of its videos, say
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise ConfigurationError(
                f"The processor of {self.name!r} needs a library that is not installed: {lines[0]}"
            ) from error
        if not hasattr(processor, "image_processor"):
            raise ModelSourceError(
                f"{self.name!r} has no processor for images: choose a vision-language model, such "
                "as google/gemma-3-4b-it."
            )
        self._completed(processor.tokenizer)
        if self.chat_template is not None:
            processor.chat_template = processor.tokenizer.chat_template
        return processor

    @override
    def load(self) -> Any:
        return self.load_processor().tokenizer


def byte_level_tokenizer(
    texts: Iterable[str] = (), *, num_tokens: int = NUM_BYTE_TOKENS
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a pad token and a chat template, learned on the spot.

    Args:
        texts: What the pieces longer than a byte are learned from.
        num_tokens: Size of the vocabulary at most; with the least, every byte is a token.

    Returns:
        A tokenizer for which any text is encodable; `save_pretrained` writes it to a folder.

    Raises:
        ConfigurationError: There is no room for the bytes and the special tokens.
    """
    if num_tokens < NUM_BYTE_TOKENS:
        raise ConfigurationError(
            f"num_tokens={num_tokens} has no room for 256 bytes and {len(_SPECIAL)} special "
            f"tokens: use {NUM_BYTE_TOKENS} or more."
        )
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    pad, _, end = _SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, eos_token=end, chat_template=_TEMPLATE
    )


def _pretrained(kind: Any, source: TokenizerSource) -> Any:
    name = source.name
    assert name is not None
    at: dict[str, Any] = {} if source.revision is None else {"revision": source.revision}
    at |= reach_options(name)
    try:  # without a word on code of its own, transformers would ask at the keyboard
        return kind.from_pretrained(name, trust_remote_code=source.trust_remote_code, **at)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigurationError(
                f"The tokenizer {name!r} wants to run code of its own. It is refused unless "
                "model.trust_remote_code=true; read the code first."
            ) from error
        raise unreadable(
            f"The tokenizer {name!r}",
            name,
            error,
            otherwise="Set data.tokenizer.name to a folder that holds tokenizer.json and "
            "tokenizer_config.json, or to null for bytes.",
        ) from error
