"""A trained model as a folder that everybody can load.

A model of transformers becomes what `save_pretrained` writes: safetensors shards with their index,
the configuration, the generation configuration, and the tokenizer if there is one. A model of peft
becomes an adapter folder, or, merged, a model.

The library's own `save_pretrained` first copies every parameter that shares a buffer with another,
which in the host store is all of them. Here shards are written one after the other, and nothing is
copied but what is converted or merged for a shard.
"""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.export_folder import replaced_folder
from roundpipe_lightning.models.export_options import DTYPES, ExportOptions
from roundpipe_lightning.models.weight_pieces import Group, groups_of, pieces_of

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
)


def export_pretrained(
    model: PreTrainedModel | PeftModel, folder: str | Path, *, options: ExportOptions
) -> Path:
    """Write a model or its adapter to a folder, which is replaced as a whole.

    Args:
        model: On the host. It is left as it is.
        folder: Where to.
        options: How.

    Returns:
        The folder.

    Raises:
        CheckpointError: The folder holds something else, or cannot be written; what was there
            before is untouched.
        ConfigurationError: The adapters cannot be merged.
    """
    folder = Path(folder)
    adapted = isinstance(model, PeftModel)
    about = {
        "kind": "adapter" if adapted and not options.merge else "model",
        "dtype": options.dtype,
        "merged": adapted and options.merge,
    }
    with replaced_folder(folder, about=about, overwrite=options.overwrite) as temporary:
        if isinstance(model, PeftModel) and not options.merge:
            _write_adapter(model, temporary, dtype=DTYPES[options.dtype])
        else:
            base = _mergeable(model) if isinstance(model, PeftModel) else model
            _write_model(base, temporary, options=options)
        _add_tokenizer(model, temporary, tokenizer=options.tokenizer)
    return folder


def find_pretrained(module: nn.Module, name: str | None = None) -> PreTrainedModel | PeftModel:
    """The model of transformers or peft in a user's module.

    Args:
        module: The user's module.
        name: Dotted name of the model in it; None finds it.

    Raises:
        ConfigurationError: There is none of that name, none at all, or several that are trained.
    """
    kinds = (PreTrainedModel, PeftModel)
    if name is not None:
        named = dict(module.named_modules()).get(name)
        if not isinstance(named, kinds):
            raise ConfigurationError(
                f"{type(module).__name__} has no model of transformers or peft called {name!r}."
            )
        return named
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        inside = any(path.startswith(f"{outer}.") or outer == "" for outer in found)
        if isinstance(part, kinds) and not inside:
            found[path] = part
    trained = {p: m for p, m in found.items() if any(q.requires_grad for q in m.parameters())}
    chosen = trained if len(found) > 1 else found
    if len(chosen) != 1:
        there = f"several ({', '.join(chosen)})" if chosen else "none that is to be exported"
        raise ConfigurationError(
            f"{type(module).__name__} has {there} of transformers' or peft's models. Name the one "
            "to export (model=...)."
        )
    model: PreTrainedModel | PeftModel = next(iter(chosen.values()))
    return model


def _mergeable(model: PeftModel) -> PreTrainedModel:
    if model.active_peft_config.is_prompt_learning:
        raise ConfigurationError(
            f"merge=true: {model.active_peft_config.peft_type.value} adds inputs, not weights, so "
            "it cannot be merged. Export the adapter (merge=false)."
        )
    return cast(PreTrainedModel, model.get_base_model())


def _write_model(model: PreTrainedModel, folder: Path, *, options: ExportOptions) -> None:
    dtype = DTYPES[options.dtype]
    config = copy.deepcopy(model.config)
    config.dtype = dtype or model.dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    groups = groups_of(pieces_of(model), model=model, original_layout=options.original_layout)
    shards = _plan_shards(groups, dtype=dtype, max_shard_bytes=options.max_shard_bytes)
    for file, tensors in _filled(shards, groups, dtype=dtype):
        save_file(tensors, folder / file, metadata={"format": "pt"})
        tensors.clear()
    if len(shards) > 1:
        _write_index(shards, folder)


def _plan_shards(
    groups: list[Group], *, dtype: torch.dtype | None, max_shard_bytes: int
) -> dict[str, dict[str, Tensor]]:
    """Which file holds which tensors; without values."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for group in groups:
        for name, like in group.like().items():
            tensor = _cast(like, dtype)
            if shards[-1] and size + tensor.nbytes > max_shard_bytes:
                shards.append({})
                size = 0
            shards[-1][name] = tensor
            size += tensor.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {f"model-{i:05}-of-{count:05}.safetensors": s for i, s in enumerate(shards, start=1)}


def _filled(
    shards: Mapping[str, Mapping[str, Tensor]], groups: list[Group], *, dtype: torch.dtype | None
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield every file with its tensors; only one file's are held at a time."""
    stream = (item for group in groups for item in group.tensors().items())
    for file, names in shards.items():
        tensors = {}
        for _ in names:
            name, tensor = next(stream)
            tensors[name] = _cast(tensor, dtype).contiguous()
        assert set(tensors) == set(names), "the layout does not depend on the values"
        yield file, tensors


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _write_index(shards: Mapping[str, Mapping[str, Tensor]], folder: Path) -> None:
    tensors = [tensor for shard in shards.values() for tensor in shard.values()]
    index = {
        "metadata": {
            "total_parameters": sum(tensor.numel() for tensor in tensors),
            "total_size": sum(tensor.nbytes for tensor in tensors),
        },
        "weight_map": {name: file for file, shard in shards.items() for name in shard},
    }
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _write_adapter(model: PeftModel, folder: Path, *, dtype: torch.dtype | None) -> None:
    with warnings.catch_warnings():
        # It looks for the base on the hub to see whether its vocabulary was resized.
        warnings.filterwarnings("ignore", message="Could not find a config file")
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")
        model.save_pretrained(str(folder), save_embedding_layers=_trains_embedding(model))
    if dtype is not None:
        for file in folder.rglob("adapter_model.safetensors"):
            tensors = {name: _cast(tensor, dtype) for name, tensor in load_file(file).items()}
            save_file(tensors, file, metadata={"format": "pt"})


def _trains_embedding(model: PeftModel) -> bool:
    """Whether an embedding has adapters: peft then saves it beside them."""
    base: Any = model.get_base_model()
    embeddings = [base.get_input_embeddings(), base.get_output_embeddings()]
    return any(hasattr(layer, "base_layer") for layer in embeddings)


def _add_tokenizer(model: Any, folder: Path, *, tokenizer: Any) -> None:
    """Write the tokenizer beside the model: it is what makes the folder usable."""
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(folder)
        return
    name = tokenizer if tokenizer is not None else _published_name(model)
    if not name:
        return
    for file in _TOKENIZER_FILES:
        found = cached_file(
            str(name),
            file,
            local_files_only=tokenizer is None,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=tokenizer is not None,
            _raise_exceptions_for_gated_repo=tokenizer is not None,
        )
        if found is not None and not (folder / file).exists():
            shutil.copyfile(found, folder / file)


def _published_name(model: Any) -> str | None:
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    name: str | None = getattr(base.config, "name_or_path", None)
    return name
