"""Sources of tokenizers and processors: published ones, or bytes."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoProcessor, AutoTokenizer, PreTrainedTokenizerFast
from typing_extensions import override

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError
from roundpipe_lightning.models.gguf import is_gguf, read_tokenizer
from roundpipe_lightning.models.weight_files import reach_options, unreadable

_SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
_PAD_TOKENS = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]", "<|endoftext|>")
"""What vocabularies reserve for padding: those of Llama 3.1 and Mistral name no pad token."""

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
        name: Name on the Hugging Face hub, a local folder with `tokenizer.json`, or a GGUF file;
            None: one token for each byte, with a pad token and a chat template, which needs no
            file.
        revision: Branch, tag or commit on the hub; None: the newest.
        chat_template: File with a Jinja template that takes the place of the tokenizer's own.
        pad_token: A token of the vocabulary to pad with. None keeps the tokenizer's own; one that
            has none pads with a token that its vocabulary reserves, else with its unknown or
            end-of-text token. Padding is masked and never learned, whatever it is.
        trust_remote_code: Whether Python code that comes with it may run.
    """

    name: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    pad_token: str | None = None
    trust_remote_code: bool = False

    def load(self) -> Any:
        """The tokenizer; ModelSourceError: it cannot be found, or is none."""
        if self.name is None:
            return self._completed(byte_level_tokenizer())
        if is_gguf(self.name):
            return self._completed(read_tokenizer(self.name))
        return self._completed(_pretrained(AutoTokenizer, self))

    def _completed(self, tokenizer: Any) -> Any:
        if self.chat_template is not None:
            path = Path(self.chat_template).expanduser()
            if not path.is_file():
                raise ConfigurationError(
                    f"chat_template={self.chat_template!r} is not a file (looked in {Path.cwd()}). "
                    "Name a file with a Jinja template, or leave it out for the tokenizer's own."
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
        if tokenizer.pad_token is None:
            reserved = [name for name in _PAD_TOKENS if name in tokenizer.get_vocab()]
            tokenizer.pad_token = next(
                filter(None, [*reserved, tokenizer.unk_token, tokenizer.eos_token]), None
            )
        return tokenizer


@dataclass(frozen=True, kw_only=True)
class ProcessorSource(TokenizerSource):
    """Source of a processor of transformers: a tokenizer and what prepares images for the model."""

    def load_processor(self) -> Any:
        """The processor, its tokenizer with the template and the pad token.

        ModelSourceError: it cannot be found, or the model has none for images.
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
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
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
