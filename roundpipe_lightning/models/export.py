"""A trained model as a folder that everybody can load, and that is replaced as a whole.

A model of transformers becomes what `save_pretrained` writes: safetensors shards with their index,
the configuration, the generation configuration, and the tokenizer if there is one. A model of peft
becomes an adapter folder, or, merged, a model.

The library's own `save_pretrained` first copies every parameter that shares a buffer with another,
which in the host store is all of them. Here tensors are written one after the other, to their
places, and nothing is copied but what is converted or merged for a block.

What was there before stays until the new folder is complete:

```
model/                    the previous export
.model.1f3a.tmp/          1. written beside it, flushed
.model.1f3a.old/          2. the previous one steps aside
model/                    3. the new one takes its place; the previous one is removed
```

An error before step 2 leaves the previous export where it is; one in step 3 puts it back. Between
the two renames a crash leaves it whole under its name of step 2.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from roundpipe_lightning.errors import (
    CheckpointError,
    ConfigurationError,
    ModelSourceError,
    RoundPipeError,
)
from roundpipe_lightning.files import checksum, new_folder, place_folder
from roundpipe_lightning.models.gguf import is_gguf, read_tokenizer
from roundpipe_lightning.models.weight_files import MARKER, reach_options, unreadable

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    Pretrained: TypeAlias = PreTrainedModel | PeftModel

DTYPES = {
    "auto": None,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Values of `dtype`; `auto` keeps that of every parameter."""

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model"),
    *("chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json"),
)


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of an export; checked when they are made, long before the export.

    Attributes:
        dtype: `"auto"`, `"fp32"`, `"bf16"` or `"fp16"`, of the tensors in the files.
        merge: Whether adapters are merged into their base, which is then exported whole.
        overwrite: Whether a folder that holds anything but an earlier export may be replaced.
        max_shard_bytes: Largest size of a safetensors file; a larger tensor has one of its own.
        original_layout: Whether parameters that transformers has fused are taken apart as published
            checkpoints have them. Without, `model.frozen_weights=mmap` can map every parameter.
        tokenizer: A tokenizer with `save_pretrained`, a folder or a hub name whose tokenizer is
            added; None takes that of the folder the model was loaded from, if it has one.

    Raises:
        ConfigurationError: The dtype is unknown, or the size is not positive.
    """

    dtype: str = "auto"
    merge: bool = False
    overwrite: bool = False
    max_shard_bytes: int = 5_000_000_000
    original_layout: bool = True
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigurationError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}.")
        for name in ("merge", "overwrite", "original_layout"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name}={getattr(self, name)!r}: set true or false.")
        if type(self.max_shard_bytes) is not int or self.max_shard_bytes < 1:
            raise ConfigurationError(
                f"max_shard_bytes={self.max_shard_bytes} must be a number of bytes, 1 or more."
            )


def export_pretrained(model: Pretrained, folder: str | Path, *, options: ExportOptions) -> Path:
    """Write a model or its adapter to a folder, which is replaced as a whole; return the folder.

    Raises:
        CheckpointError: The folder holds something else, or cannot be written; what was there
            before is untouched.
        ConfigurationError: The adapters cannot be merged.
    """
    folder = Path(folder)
    merged = _is_adapted(model) and options.merge
    kind = "adapter" if _is_adapted(model) and not options.merge else "model"
    about = {"kind": kind, "dtype": options.dtype, "merged": merged}
    with _replaced_folder(folder, about=about, overwrite=options.overwrite) as temporary:
        _write_settings(model, temporary, options=options)
        if kind == "adapter":
            _write_adapter(cast("PeftModel", model), temporary, dtype=DTYPES[options.dtype])
        else:
            _write_model(_without_adapters(model, merge=True), temporary, options=options)
    return folder


def check_exportable(model: Pretrained, folder: str | Path, *, options: ExportOptions) -> None:
    """Try before a training what an export after it does, but for the weights themselves.

    Raises:
        CheckpointError: The folder holds something else, or its disk has no room.
        ConfigurationError: The adapters, or a part of the settings, cannot be saved.
    """
    folder = Path(folder).expanduser()
    check_replaceable(folder, overwrite=options.overwrite)
    with TemporaryDirectory() as scratch:
        _write_settings(model, Path(scratch), options=options)
    num_bytes = _num_bytes(model, options)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise CheckpointError(
            f"output_dir={folder}: the export takes {num_bytes / 2**30:.1f} GiB, and its disk has "
            f"{free / 2**30:.1f} GiB left. Free some space or choose another folder."
        )


def _num_bytes(model: Pretrained, options: ExportOptions) -> int:
    """Bytes of the tensors in the files of an export."""
    from roundpipe_lightning.models.weight_groups import weight_groups

    if _is_adapted(model) and not options.merge:
        likes: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    else:
        groups = weight_groups(_without_adapters(model, merge=True), original_layout=False)
        likes = [tensor for group in groups for tensor in group.like().values()]
    dtype = DTYPES[options.dtype]
    return sum(
        like.numel() * (dtype.itemsize if dtype and like.is_floating_point() else like.itemsize)
        for like in likes
    )


def find_pretrained(module: nn.Module, name: str | None = None) -> Pretrained:
    """The model of transformers or peft in a user's module, or the one of a dotted name in it.

    ConfigurationError: there is none of that name, none at all, or several that are trained.
    """
    from transformers import PreTrainedModel

    if name is not None:
        named = dict(module.named_modules()).get(name)
        if not (isinstance(named, PreTrainedModel) or _is_adapted(named)):
            raise ConfigurationError(
                f"{type(module).__name__} has no model of transformers or peft called {name!r}."
            )
        return cast("Pretrained", named)
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        inside = any(path.startswith(f"{outer}.") or outer == "" for outer in found)
        if not inside and (isinstance(part, PreTrainedModel) or _is_adapted(part)):
            found[path] = part
    trained = {p: m for p, m in found.items() if any(q.requires_grad for q in m.parameters())}
    chosen = trained if len(found) > 1 else found
    if len(chosen) != 1:
        there = f"several ({', '.join(chosen)})" if chosen else "none that is to be exported"
        raise ConfigurationError(
            f"{type(module).__name__} has {there} of transformers' or peft's models. Name the one "
            "to export (model=...)."
        )
    model: Pretrained = next(iter(chosen.values()))
    return model


def _is_adapted(model: Any) -> bool:
    peft = sys.modules.get("peft")  # slow to import; without it there is none of its models
    return peft is not None and isinstance(model, peft.PeftModel)


def _without_adapters(model: Any, *, merge: bool) -> PreTrainedModel:
    """The model below peft's, whose adapters are merged as they are written."""
    if not _is_adapted(model):
        return cast("PreTrainedModel", model)
    if merge and model.active_peft_config.is_prompt_learning:
        raise ConfigurationError(
            f"merge=true: {model.active_peft_config.peft_type.value} adds inputs, not weights, so "
            "it cannot be merged. Export the adapter (merge=false)."
        )
    return cast("PreTrainedModel", model.get_base_model())


def _write_settings(model: Pretrained, folder: Path, *, options: ExportOptions) -> None:
    """Write all but the weights: the tokenizer, and a model's configurations."""
    _add_tokenizer(model, folder, tokenizer=options.tokenizer)
    if _is_adapted(model) and not options.merge:
        return
    base = _without_adapters(model, merge=True)
    config = copy.deepcopy(base.config)
    config.dtype = DTYPES[options.dtype] or base.dtype
    config.architectures = [type(base).__name__]
    config.save_pretrained(folder)
    if base.can_generate():
        try:
            base.generation_config.save_pretrained(folder)
        except ValueError as error:
            lines = (line.lstrip("- ") for line in str(error).splitlines()[1:])
            reason = next(filter(None, lines), str(error)).rstrip(".")
            raise ConfigurationError(
                f"The model's generation_config cannot be saved, so there would be no export: "
                f"{reason}. Mend model.generation_config before training."
            ) from error


def _write_model(model: PreTrainedModel, folder: Path, *, options: ExportOptions) -> None:
    from huggingface_hub import split_state_dict_into_shards_factory

    from roundpipe_lightning.models.weight_groups import weight_groups

    dtype = DTYPES[options.dtype]
    groups = weight_groups(model, original_layout=options.original_layout)
    likes = {name: _cast(t, dtype) for group in groups for name, t in group.like().items()}
    split = split_state_dict_into_shards_factory(
        likes,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=options.max_shard_bytes,
    )
    places: dict[str, tuple[Path, int]] = {}
    for file, names in split.filename_to_tensors.items():
        places |= _begin_file(folder / file, {name: likes[name] for name in names})
    for group in groups:
        for name, tensor in group.tensors().items():
            path, begin = places.pop(name)
            with path.open("r+b") as opened:
                opened.seek(begin)
                values = _cast(tensor, dtype).contiguous().flatten()
                opened.write(values.view(torch.uint8).numpy().data)
    assert not places, "the layout does not depend on the values"
    if split.is_sharded:
        total = sum(tensor.numel() for tensor in likes.values())
        index = {
            "metadata": {"total_parameters": total, **split.metadata},
            "weight_map": split.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _begin_file(file: Path, likes: Mapping[str, Tensor]) -> dict[str, tuple[Path, int]]:
    """Write the head of a safetensors file; return where each tensor's values are to begin."""
    from safetensors.torch import save

    ordered = sorted(likes, key=lambda name: -likes[name].itemsize)  # so that all are aligned
    empty = {name: torch.empty(0, dtype=likes[name].dtype) for name in ordered}
    head = json.loads(save(empty, metadata={"format": "pt"})[8:])  # knows the names of dtypes
    end = 0
    for name in ordered:
        begin, end = end, end + likes[name].nbytes
        head[name].update(shape=list(likes[name].shape), data_offsets=[begin, end])
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    return {name: (file, 8 + len(text) + head[name]["data_offsets"][0]) for name in ordered}


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def saves_embedding(model: PeftModel) -> bool:
    """Return whether an embedding has adapters: peft saves it beside them.

    Where it is not told, it asks the hub for the base, to see whether its vocabulary was resized.
    """
    base: Any = model.get_base_model()
    embeddings = (base.get_input_embeddings(), base.get_output_embeddings())
    return any(hasattr(layer, "base_layer") for layer in embeddings)


def _write_adapter(model: PeftModel, folder: Path, *, dtype: torch.dtype | None) -> None:
    from safetensors.torch import load_file, save_file

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")
        model.save_pretrained(str(folder), save_embedding_layers=saves_embedding(model))
    if dtype is not None:
        for file in folder.rglob("adapter_model.safetensors"):
            tensors = {name: _cast(tensor, dtype) for name, tensor in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})


def _add_tokenizer(model: Any, folder: Path, *, tokenizer: Any) -> None:
    """Write the tokenizer beside the model: it is what makes the folder usable."""
    from transformers.utils.hub import cached_file

    name, is_named = tokenizer, tokenizer is not None
    files: tuple[str, ...] = _TOKENIZER_FILES
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
        # SentencePiece's own file, which llama.cpp reads: transformers 5 leaves it out.
        files, is_named = ("tokenizer.model",), False
        name = getattr(getattr(tokenizer, "tokenizer", tokenizer), "name_or_path", None)
    elif name is None:
        name = getattr(_without_adapters(model, merge=False).config, "name_or_path", None)
    if is_gguf(name) and not hasattr(tokenizer, "save_pretrained"):
        read_tokenizer(name).save_pretrained(folder)
    if not name or is_gguf(name):
        return
    options = {"local_files_only": True} if tokenizer is None else reach_options(str(name))
    for file in files:
        try:
            found = cached_file(
                str(name),
                file,
                **options,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=is_named,
                _raise_exceptions_for_gated_repo=is_named,
            )
        except OSError as error:
            what, otherwise = f"tokenizer={str(name)!r}", "Name a folder that has one."
            raise unreadable(what, str(name), error, otherwise=otherwise) from error
        if found is not None and not (folder / file).exists():
            shutil.copyfile(found, folder / file)
    if is_named and not any((folder / file).exists() for file in files):
        raise ModelSourceError(f"tokenizer={str(name)!r} has none of the files of a tokenizer.")


def check_replaceable(folder: Path, *, overwrite: bool) -> None:
    """Raise a CheckpointError if a folder holds something else, and `overwrite` is not set."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CheckpointError(f"output_dir={folder} is a file or a link, not a folder of its own.")
    if not folder.is_dir() or overwrite or (folder / MARKER).is_file():
        return
    held = sorted(path.name for path in folder.iterdir())
    if held:
        raise CheckpointError(
            f"output_dir={folder} holds {len(held)} files that are no earlier export "
            f"({', '.join(held[:3])}, ...). Choose another folder, or set overwrite=true to "
            "replace the whole of it."
        )


@contextmanager
def _replaced_folder(folder: Path, *, about: Mapping[str, Any], overwrite: bool) -> Iterator[Path]:
    """Yield an empty folder; put it in `folder`'s place, or remove it after an error."""
    from safetensors import SafetensorError

    folder = Path(os.path.abspath(folder.expanduser()))  # noqa: PTH100 - links stay as they are
    check_replaceable(folder, overwrite=overwrite)
    try:
        with new_folder(folder) as temporary:
            yield temporary
            weights = sorted(temporary.rglob("*.safetensors"))
            checksums = {str(path.relative_to(temporary)): checksum(path) for path in weights}
            marker = json.dumps({**about, "crc32": checksums}, indent=1) + "\n"
            (temporary / MARKER).write_text(marker, encoding="utf-8")
            for path in temporary.rglob("*"):  # what was written survives a power cut
                if path.is_file():
                    with path.open("r+b") as file:  # Windows flushes only what may be written
                        os.fsync(file.fileno())
            place_folder(temporary, folder)
    except (OSError, SafetensorError) as error:
        if isinstance(error, RoundPipeError):
            raise
        raise CheckpointError(
            f"The export to {folder} failed: {error}. What was there before is untouched. Free "
            "some space or choose another output_dir."
        ) from error
