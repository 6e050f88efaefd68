"""A tiny vision-language model with its processor, and images."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from roundpipe_lightning.modules import byte_level_tokenizer

_TEXT = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
_VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
_SIZE = {"height": 16, "width": 16}


def write_seeing_model(folder: Path, family: str = "gemma3") -> None:
    """Write a tiny model of a family with its processor."""
    processor, settings = {"gemma3": _gemma3, "llava": _llava, "idefics3": _idefics3}[family]()
    processor.save_pretrained(folder)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)


def _gemma3() -> tuple[Any, dict[str, Any]]:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = _tokenizer(boi_token="<start>", image_token="<soft>", eoi_token="<end>")
    words: Any = tokenizer.convert_tokens_to_ids(["<start>", "<soft>", "<end>"])
    names = ("boi_token_index", "image_token_index", "eoi_token_index")
    text = {**_TEXT, "sliding_window": 64}
    vision = {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
    return Gemma3Processor(
        Gemma3ImageProcessorPil(size=_SIZE), tokenizer, chat_template=_TEMPLATE, image_seq_length=4
    ), {
        **dict(zip(names, words, strict=True)),
        "mm_tokens_per_image": 4, "text_config": text, "vision_config": vision,
    }  # fmt: skip


def _llava() -> tuple[Any, dict[str, Any]]:
    from transformers import LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    tokenizer = _tokenizer(image_token="<start>")
    processor: Any = LlavaProcessor(
        LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size=_SIZE), tokenizer,
        patch_size=4, num_additional_image_tokens=1, vision_feature_select_strategy="default",
        chat_template=_TEMPLATE,
    )  # fmt: skip
    return processor, {
        "image_token_index": processor.image_token_id, "image_seq_length": 16,
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 16},
    }  # fmt: skip


def _idefics3() -> tuple[Any, dict[str, Any]]:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import (
        Idefics3ImageProcessorPil,
    )

    tokenizer = _tokenizer(image_token="<start>")
    size = {"longest_edge": 16}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    text = {**_TEXT, "model_type": "llama", "pad_token_id": 0}
    processor = Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=_TEMPLATE)
    return processor, {"text_config": text, "vision_config": _VISION}


def _tokenizer(**words: str) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer().backend_tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        extra_special_tokens=words,
    )


_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<start>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_image(path: Path, colour: str) -> None:
    """Write an image of one colour."""
    from PIL import Image

    Image.new("RGB", (24, 20), colour).save(path)
