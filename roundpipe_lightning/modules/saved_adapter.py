"""A saved adapter put onto its base, after a check that it was made for this base."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import cast

from peft import (
    PeftConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError

_MOST_NAMED = 4


def load_adapter(model: PreTrainedModel, source: str, *, method: str | None = None) -> PeftModel:
    """Put a saved adapter onto a model, in place, ready to be trained on.

    Args:
        model: The base.
        source: A folder that `save_pretrained` of a peft model wrote, or a hub name.
        method: Peft's method that is expected; None: any.

    Raises:
        ConfigurationError: The adapter is another method's.
        ModelSourceError: There is no adapter, it cannot be read, or it is for another base.
    """
    try:
        config = PeftConfig.from_pretrained(source)
        weights = load_peft_weights(source, device="cpu")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelSourceError(
            f"peft.adapter={source!r} is not a saved adapter that can be read ({error}). Give the "
            "folder that PeftModel.save_pretrained wrote: adapter_config.json beside "
            "adapter_model.safetensors."
        ) from error
    found = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    if method is not None and found != method:
        raise ConfigurationError(
            f"peft.adapter={source!r} is an adapter of method {found}, but peft.method={method}. "
            "Choose the group entry of that method, for example peft=lora."
        )
    config.inference_mode = False
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.23 has renamed
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        try:
            adapted = cast(PeftModel, get_peft_model(model, config))
        except (ValueError, NotImplementedError) as error:
            raise ModelSourceError(_another_base(source, config, [str(error)])) from error
        differences = _differences(get_peft_model_state_dict(adapted), weights)
        if differences:
            raise ModelSourceError(_another_base(source, config, differences))
        set_peft_model_state_dict(adapted, weights)
    return adapted


def _differences(wanted: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[str]:
    """Everything in which the file differs from what the adapted base needs."""
    shapes = [
        f"{name} is {tuple(given[name].shape)} in the file and {tuple(wanted[name].shape)} here"
        for name in wanted
        if name in given and given[name].shape != wanted[name].shape
    ]
    return [
        *_listed("wrong shapes", shapes),
        *_listed("missing in the file", sorted(set(wanted) - set(given))),
        *_listed("without a place in this base", sorted(set(given) - set(wanted))),
    ]


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return [f"{len(names)} {what} ({'; '.join(names[:_MOST_NAMED])}{more})"]


def _another_base(source: str, config: PeftConfig, differences: list[str]) -> str:
    base = config.base_model_name_or_path
    made_for = f", which was made for {base!r}," if base else ""
    return (
        f"peft.adapter={source!r}{made_for} does not fit this model: {', '.join(differences)}. "
        "Choose the model that it was trained on."
    )
