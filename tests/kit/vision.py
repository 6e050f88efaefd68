"""A tiny vision-language model with its processor, and images."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from roundpipe_lightning.modules import byte_level_tokenizer

_WORDS = {"boi_token": "<start>", "image_token": "<soft>", "eoi_token": "<end>"}
_TEXT = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 64,
}  # fmt: skip
_VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    "vision_use_head": False,
}  # fmt: skip


def write_seeing_model(folder: Path) -> None:
    """Write a tiny model of Gemma 3 with its processor."""
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level_tokenizer().backend_tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        extra_special_tokens=_WORDS,
    )
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = Gemma3Processor(images, tokenizer, chat_template=_TEMPLATE, image_seq_length=4)
    processor.save_pretrained(folder)
    ids: Any = tokenizer.convert_tokens_to_ids([*_WORDS.values()])
    config = AutoConfig.for_model(
        "gemma3",
        mm_tokens_per_image=4,
        boi_token_index=ids[0],
        image_token_index=ids[1],
        eoi_token_index=ids[2],
        text_config=_TEXT,
        vision_config=_VISION,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)


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
