"""Conversations about images, for vision-language models."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from roundpipe_lightning.data.chat import ConversationEncoder, Messages, Options
from roundpipe_lightning.data.forms import Forms
from roundpipe_lightning.data.records import Record
from roundpipe_lightning.data.samples import Padding, Row, Sample, TooLong
from roundpipe_lightning.data.token_data import FileDataModule
from roundpipe_lightning.errors import ConfigurationError, DataError

_OF_TOKENS = ("input_ids", "labels", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True, kw_only=True, eq=False)
class SeenSample(Sample):
    """A conversation as tokens, an image's among them; the images are read when a row is made.

    `text` is the conversation as the template writes it, with a placeholder for each of `images`.
    """

    text: str
    images: Sequence[Any]
    place: str


class VisionDataModule(FileDataModule):
    """Conversations with images, which the model's own processor turns into tokens and pixels.

    An image is a file, relative to the file that names it, or a `data:` address, in one of OpenAI's
    content parts (`{"type": "image_url", "image_url": {"url": "cat.png"}}`) or beside the messages
    (`"images": ["cat.png"]`, whose places are `<image>` in the texts). What the assistant says is
    predicted. Every image is read once in `setup`, and again for each batch that it is in, so
    memory holds those of a batch alone (`num_workers` reads them in processes of their own).

    Args:
        options: The arguments of `FileDataModule`; `tokenizer` is a
            `roundpipe_lightning.modules.ProcessorSource`, `too_long` is `refuse` or `drop`.
    """

    kinds = ("conversation",)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        if self.options.policy not in (TooLong.REFUSE, TooLong.DROP):
            raise ConfigurationError(
                f"data.too_long={self.options.too_long} would cut images. Use refuse or drop."
            )
        self.forms = Forms(kinds=self.kinds, names=self.options.fields or {}, images=True)

    @cached_property
    def processor(self) -> Any:
        return self.tokenizer_source.load_processor()

    @property
    @override
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @cached_property
    def _encoder(self) -> _SeenEncoder:
        return _SeenEncoder(self.processor, name=self.tokenizer_name)

    @override
    def encode(self, record: Record) -> list[SeenSample]:
        content = self.forms.read(record)
        folder = Path(record.part).parent
        whole = self._encoder.seen(content.messages, folder, content.options, place=record.place)
        sample = self.fit_length(whole, place=record.place)
        if sample is not None and sample.num_targets == 0:
            self.skipped["without a word of the assistant"] += 1
            return []
        return [] if sample is None else [whole]

    @override
    def arrange(self, samples: Sequence[SeenSample]) -> Sequence[Row]:
        return _Rows(samples, self._encoder)

    @override
    def collate(self) -> Callable[[list[Row]], Any]:
        multiple_of = self.options.pad_to_multiple_of
        return _SeenBatch(Padding(pad_token=self.pad_token_id, multiple_of=multiple_of))


class _Rows(Sequence[Row]):
    """Rows that are made when they are asked for."""

    def __init__(self, samples: Sequence[SeenSample], encoder: _SeenEncoder) -> None:
        self._samples, self._encoder = samples, encoder

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        sample = self._samples[index]
        found = self._encoder.processed(sample.text, sample.images, place=sample.place)
        row = {name: _tensor(values) for name, values in found.items()}
        for name in set(_OF_TOKENS) & row.keys():
            row[name] = row[name][0]
        return {**row, "labels": sample.labels}

    def __iter__(self) -> Iterator[Row]:
        """Rows without their images, to count tokens."""
        return ({"input_ids": s.input_ids, "labels": s.labels} for s in self._samples)


def _tensor(values: Any) -> Tensor:
    if isinstance(values, Tensor) or not hasattr(values[0], "shape"):
        return torch.as_tensor(values)
    return torch.stack([torch.as_tensor(each) for each in values])


@dataclass(frozen=True)
class _SeenBatch:
    """Makes a batch of rows: tokens padded, images of all rows one after the other."""

    pad: Padding

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        of_tokens = [{n: row[n] for n in row if n in _OF_TOKENS} for row in rows]
        names = dict.fromkeys(name for row in rows for name in row if name not in _OF_TOKENS)
        seen = {name: [row[name] for row in rows if name in row] for name in names}
        return {**self.pad(of_tokens), **{name: _joined(each) for name, each in seen.items()}}


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors along their first dimension, the others filled up with zeros."""
    shape = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    whole = tensors[0].new_zeros((sum(map(len, tensors)), *shape))
    for part, tensor in zip(whole.split([len(t) for t in tensors]), tensors, strict=True):
        part[tuple(slice(size) for size in tensor.shape)] = tensor
    return whole


class _SeenEncoder(ConversationEncoder):
    """Conversations as a processor writes them."""

    def __init__(self, processor: Any, *, name: str) -> None:
        tokenizer = processor.tokenizer
        tokenizer.chat_template = processor.chat_template or tokenizer.chat_template
        super().__init__(tokenizer, name=name)
        self._processor = processor

    def seen(self, messages: Messages, folder: Path, options: Options, *, place: str) -> SeenSample:
        """A conversation as a sample; `folder` is where the paths of its images begin."""
        parts = [p for m in messages if isinstance(m.get("content"), list) for p in m["content"]]
        images = [
            folder / image if isinstance(image, str) and _is_path(image) else image
            for image in (part["image"] for part in parts if part["type"] == "image")
        ]
        text, spans = self.spans(messages, options, place=place)
        found = self.processed(
            text,
            images,
            place=place,
            return_offsets_mapping=True,
            return_text_replacement_offsets=True,
        )
        if "text_replacement_offsets" not in found:  # Idefics 3's, in transformers 5.23
            raise ConfigurationError(
                f"The processor of this model ({type(self._processor).__name__}) does not tell "
                "where images stand among its tokens, so the assistant's words cannot be found. "
                "Choose another vision-language model: Gemma 3, Llava, Qwen2.5-VL or SmolVLM."
            )
        moves = [(m["span"][1], m["new_span"][1]) for m in found["text_replacement_offsets"][0]]

        def moved(at: int) -> int:
            return at + next((new - old for old, new in reversed(moves) if old <= at), 0)

        spans = [(moved(begin), moved(end)) for begin, end in spans]
        sample = self.sample(found["input_ids"][0], found["offset_mapping"][0], spans)
        return SeenSample(
            input_ids=sample.input_ids, labels=sample.labels, text=text, images=images, place=place
        )

    def processed(self, text: str, images: Sequence[Any], *, place: str, **how: Any) -> Any:
        """What the processor makes of a text and its images."""
        given = [_image(image, place) for image in images] or None
        try:
            return self._processor(
                text=[text], images=given, add_special_tokens=False, padding=False, **how
            )
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{place}: the model's processor does not take this conversation: {error}"
            ) from error


def _is_path(image: str) -> bool:
    return "://" not in image and not image.startswith("data:")


def _image(given: Any, place: str) -> Any:
    """An image in memory, upright and as three colours; a DataError: it cannot be read."""
    from PIL import Image, ImageOps

    source: Any = given.get("bytes") or given.get("path") if isinstance(given, Mapping) else given
    shown = "in the record" if isinstance(source, bytes) else repr(str(source))
    if isinstance(source, str) and source.startswith("data:"):
        shown = repr(source[:80])
    try:
        if isinstance(source, str) and source.startswith("data:"):
            source = base64.b64decode(source.partition(",")[2], validate=True)
        if isinstance(source, str) and not _is_path(source):
            source = source.removeprefix("file://")
        if isinstance(source, str) and "://" in source:
            raise OSError("it is an address; download it and name the file")
        if isinstance(source, (str, Path)) and Path(source).exists() and not Path(source).is_file():
            raise OSError("it is no file")  # opening a pipe would wait for its other end
        if isinstance(source, bytes):
            source = io.BytesIO(source)
        if isinstance(source, Image.Image):
            return ImageOps.exif_transpose(source).convert("RGB")
        with Image.open(source) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, AttributeError, Image.DecompressionBombError) as error:
        raise DataError(
            f"{place}: the image {shown} cannot be read ({error}). Mend or remove it; paths are "
            "relative to the file that names them."
        ) from error
