"""Published weights into a model of transformers, tensor by tensor.

The model is built on the meta device. The names and shapes of the checkpoint are compared with the
model's before a byte of them is read; then each tensor is read into memory of its own, in the dtype
it is to have, so the peak is the model and the tensors that one parameter is made of. What a
checkpoint calls its tensors, and which of them the model has fused, is transformers' own knowledge:
its loading runs here, on tensors that are read when it asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError
from roundpipe_lightning.models.checkpoint_files import find_checkpoint_files, opened
from roundpipe_lightning.models.checkpoint_match import check_match
from roundpipe_lightning.models.load_options import LoadOptions
from roundpipe_lightning.models.mapped import bring_into_memory, map_frozen
from roundpipe_lightning.models.quantized import quantize_frozen


def load_pretrained(
    name: str,
    *,
    config: PreTrainedConfig,
    options: LoadOptions,
    auto_class: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """A model with the weights of a local folder or of a name on the hub.

    Args:
        name: The folder or the name.
        config: The configuration that is published with the weights.
        options: How they are read.
        auto_class: Transformers' automatic class of the model.

    Raises:
        ModelSourceError: A file is missing, damaged or a pickle of more than tensors; or tensors
            are missing, extra or of another shape: all are listed.
        ConfigurationError: The files cannot be mapped.
        OSError: The hub cannot be reached; as transformers raises it.
    """
    if getattr(config, "quantization_config", None) is not None:
        if options.mapped or options.quantizes:
            raise ConfigurationError(
                f"The weights of {name!r} are published in a quantised form that has to be "
                "unpacked. Use model.frozen_weights=memory and model.frozen_bits=16."
            )
        # Its quantizer reads its own files in its own way.
        return cast(
            PreTrainedModel,
            auto_class.from_pretrained(
                name,
                config=config,
                trust_remote_code=options.trust_remote_code,
                **options.hub,
                **options.building,
            ),
        )
    files = find_checkpoint_files(name, hub_options=options.hub)
    with torch.device("meta"):
        skeleton = auto_class.from_config(config, trust_remote_code=options.trust_remote_code)
    build = type(skeleton).from_pretrained
    # Weights that are quantised are read from the mapping: the whole of them is never in memory.
    views = options.quantizes and all(file.suffix == ".safetensors" for file in files)
    mapped: dict[int, Path] | None = {} if options.mapped or views else None
    with _one_tensor_at_a_time(), opened(files, mapped=mapped) as tensors:
        check_match(skeleton, tensors, build=build, config=config, options=options, name=name)
        model = cast(
            PreTrainedModel,
            build(
                None,
                config=config,
                state_dict=tensors,
                ignore_mismatched_sizes=bool(options.unmatched) or options.new_head,
                **options.building,
            ),
        )
    model.config.name_or_path = model.name_or_path = name
    _load_generation_config(model, name, options=options)
    if mapped is not None:
        map_frozen(model, mapped, for_good=options.mapped)
    if options.quantizes:
        quantize_frozen(model, options.frozen_bits)
    if mapped is not None and not options.mapped:
        bring_into_memory(model)
    return model


@contextmanager
def _one_tensor_at_a_time() -> Iterator[None]:
    """Keep transformers from reading ahead in threads: all of a model may then be there twice."""
    variable = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


def _load_generation_config(model: PreTrainedModel, name: str, *, options: LoadOptions) -> None:
    """Take over how the published model generates, as `from_pretrained` does."""
    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(name, **options.hub)
    except OSError:  # there is none: the one made from the configuration stays
        return
    except ValueError as error:
        raise ModelSourceError(
            f"generation_config.json of {name!r} cannot be read: {error}."
        ) from error
