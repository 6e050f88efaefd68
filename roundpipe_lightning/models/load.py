"""Published weights into a model of transformers, tensor by tensor.

The model is built on the meta device. The names and shapes of the checkpoint are compared with the
model's before a byte of them is read; then each tensor is read into memory of its own, in the dtype
it is to have, so the peak is the model and the tensors that one parameter is made of. What a
checkpoint calls its tensors, and which of them the model has fused, is transformers' own knowledge:
its loading runs here, on tensors that are read when it asks for them.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from roundpipe_lightning.engine.device.host_memory import check_host_memory
from roundpipe_lightning.errors import ConfigurationError, ModelSourceError
from roundpipe_lightning.models.load_module import shape_text
from roundpipe_lightning.models.quantized import quantizable_weights, quantize_frozen
from roundpipe_lightning.models.weight_files import (
    bring_into_memory,
    find_weight_files,
    map_frozen,
    opened,
)
from roundpipe_lightning.planning.model.work import ParameterStorage

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
_REPORTER = "transformers.modeling_utils"
_QUESTION = "Is model.hub_name the model you mean, and is its config.json that of its weights?"
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for reading weights.

    Attributes:
        dtype: Of the parameters; None keeps that of the configuration (`"auto"`).
        attention: Transformers' attention implementation; None lets it choose.
        unmatched: Regular expressions of tensors that may be missing from the checkpoint (they are
            drawn anew) or that it may have besides (they are left out).
        new_head: Whether what stands on top of the base model may be missing or another one.
        mapped: Whether parameters stay in the files, frozen, where the files hold them as they are.
        frozen_bits: 8 or 4 quantise the linear layers while the weights are read, and freeze the
            model; 16 leaves them as they are.
        trust_remote_code: Whether code that comes with the model may run.
        others: Further keyword arguments of `from_pretrained`.
    """

    dtype: torch.dtype | None = None
    attention: str | None = None
    unmatched: Sequence[str] = ()
    new_head: bool = False
    mapped: bool = False
    frozen_bits: int = 16
    trust_remote_code: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quantizes(self) -> bool:
        return self.frozen_bits < 16

    @property
    def hub(self) -> dict[str, Any]:
        return {key: value for key, value in self.others.items() if key in _HUB_OPTIONS}

    @property
    def building(self) -> dict[str, Any]:
        """Options that say how the model is built."""
        options = {key: value for key, value in self.others.items() if key not in _HUB_OPTIONS}
        if self.attention is not None:
            options["attn_implementation"] = self.attention
        return {"dtype": self.dtype or "auto", **options}


def load_pretrained(
    name: str,
    *,
    config: PreTrainedConfig,
    options: LoadOptions,
    auto_class: Any = None,
) -> PreTrainedModel:
    """A model with the weights of a local folder or of a name on the hub.

    Args:
        config: The configuration that is published with the weights.
        auto_class: Transformers' automatic class of the model; None: `AutoModelForCausalLM`.

    Raises:
        ModelSourceError: A file is missing, damaged or a pickle of more than tensors; or tensors
            are missing, extra or of another shape: all are listed.
        FitError: The host has no memory for them; nothing has been read then.
        ConfigurationError: The files cannot be mapped.
        OSError: The hub cannot be reached; as transformers raises it.
    """
    if auto_class is None:
        from transformers import AutoModelForCausalLM as auto_class  # noqa: N813
    if getattr(config, "quantization_config", None) is not None:
        if options.mapped or options.quantizes:
            raise ConfigurationError(
                f"The weights of {name!r} are published in a quantised form that has to be "
                "unpacked. Use model.frozen_weights=memory and model.frozen_bits=16."
            )
        # Its quantizer reads its own files in its own way.
        model = auto_class.from_pretrained(
            name,
            config=config,
            trust_remote_code=options.trust_remote_code,
            **options.hub,
            **options.building,
        )
        return cast("PreTrainedModel", model)
    with torch.device("meta"):
        skeleton = auto_class.from_config(config, trust_remote_code=options.trust_remote_code)
    _check_memory(skeleton, config=config, options=options, name=name)
    files = find_weight_files(name, hub_options=options.hub)
    build = partial(type(skeleton).from_pretrained, None, config=config, **options.building)
    # Weights that are quantised are read from the mapping: the whole of them is never in memory.
    views = options.quantizes and all(file.suffix == ".safetensors" for file in files)
    mapped: dict[int, Path] | None = {} if options.mapped or views else None
    with _one_tensor_at_a_time(), opened(files, mapped=mapped) as tensors:
        _check_match(skeleton, tensors, build=build, options=options, name=name)
        model = build(
            state_dict=tensors,
            ignore_mismatched_sizes=bool(options.unmatched) or options.new_head,
        )
    model.config.name_or_path = model.name_or_path = name
    _load_generation_config(model, name, options=options)
    if mapped is not None:
        map_frozen(model, mapped, for_good=options.mapped)
    if options.quantizes:
        quantize_frozen(model, options.frozen_bits)
    if mapped is not None and not options.mapped:
        bring_into_memory(model)
    return cast("PreTrainedModel", model)


def _check_memory(
    skeleton: PreTrainedModel, *, config: PreTrainedConfig, options: LoadOptions, name: str
) -> None:
    """Refuse weights that have no room before any is read; FitError: they have none."""
    if options.mapped:
        return
    dtype = options.dtype or getattr(config, "dtype", None) or torch.float32
    count, saved = sum(parameter.numel() for parameter in skeleton.parameters()), 0.0
    if options.quantizes:
        skeleton.requires_grad_(False)
        packed = sum(getattr(*found).numel() for found in quantizable_weights(skeleton))
        storage = ParameterStorage(frozen_bits=options.frozen_bits)
        saved = storage.saved_bytes(packed, packed * dtype.itemsize)
    check_host_memory(
        count * dtype.itemsize - saved,
        what=f"Reading {name!r}",
        way_out="Use a machine with more, model.dtype=bfloat16, or, where adapters alone are "
        "trained, model.frozen_weights=mmap or peft.frozen_bits=4.",
    )


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
    from transformers import GenerationConfig

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


# --- whether the tensors are the model's ----------------------------------------------------------


def _check_match(
    skeleton: PreTrainedModel,
    tensors: Mapping[str, Any],
    *,
    build: Callable[..., Any],
    options: LoadOptions,
    name: str,
) -> None:
    """Compare names and shapes, as they are once transformers has renamed and fused them.

    Its loading runs once on tensors without values, so that its rules are the ones that hold.

    Raises:
        ModelSourceError: Listing every tensor that is missing, extra or of another shape.
    """
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    load = partial(
        build, device_map={"": "meta"}, output_loading_info=True, ignore_mismatched_sizes=True
    )
    odd: dict[str, tuple[int, ...]] = {}
    with _reports_kept() as reports:
        try:
            _, found = load(state_dict=_without_values(shapes))
        except RuntimeError as error:  # parts of one parameter that do not fit together
            odd = _unusual_shapes(shapes)
            try:
                _, found = load(state_dict=_without_values({**shapes, **odd}))
            except RuntimeError:
                report = _ESCAPE.sub("", "\n".join(reports))
                raise ModelSourceError(
                    f"The tensors of {name!r} cannot be put together to the parameters of "
                    f"{type(skeleton).__name__}:\n{report or error}\n{_QUESTION}"
                ) from error
    meant = [re.compile(pattern) for pattern in options.unmatched]
    prefix = skeleton.base_model_prefix
    if options.new_head and prefix:
        meant.append(re.compile(rf"^(?!{re.escape(prefix)}\.)"))

    def unexpected(keys: Iterable[str]) -> list[str]:
        return sorted(key for key in keys if not any(p.search(key) for p in meant))

    wanted = skeleton.state_dict()
    lines = [
        f"  missing: {key}, {shape_text(wanted.get(key))}"
        for key in unexpected(found["missing_keys"])
    ]
    lines += [
        f"  extra: {key}, {shape_text(tensors.get(key))}"
        for key in unexpected(found["unexpected_keys"])
    ]
    mismatched = {key: (tuple(has), tuple(wants)) for key, has, wants in found["mismatched_keys"]}
    lines += [
        f"  another shape: {key}, {mismatched[key][0]} instead of {mismatched[key][1]}"
        for key in unexpected(mismatched)
    ]
    lines += [f"  another shape: {k}, {shapes[k]} instead of {odd[k]}" for k in unexpected(odd)]
    if lines:
        raise ModelSourceError(
            f"{len(lines)} tensors of {name!r} do not fit {type(skeleton).__name__}:\n"
            + "\n".join(lines)
            + f"\n{_QUESTION} Tensors that may differ are named by model.unmatched_tensors "
            "(regular expressions): missing ones are then drawn anew, extra ones left out."
        )


def _without_values(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


def _unusual_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors that are shaped unlike most whose names differ in numbers alone: as the most."""
    alike: dict[str, list[str]] = {}
    for key in shapes:
        alike.setdefault(re.sub(r"\d+", "#", key), []).append(key)
    odd = {}
    for keys in alike.values():
        usual = Counter(shapes[key] for key in keys).most_common(1)[0][0]
        odd.update({key: usual for key in keys if shapes[key] != usual})
    return odd


@contextmanager
def _reports_kept() -> Iterator[list[str]]:
    """Keep transformers' report about a checkpoint to ourselves, and its progress bar away."""
    from transformers.utils import logging as transformers_logging

    reports: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            reports.append(record.getMessage())

    reporter, keeper = logging.getLogger(_REPORTER), Keeper()
    propagated, shows_progress = reporter.propagate, transformers_logging.is_progress_bar_enabled()
    reporter.propagate = False
    reporter.addHandler(keeper)
    transformers_logging.disable_progress_bar()
    try:
        yield reports
    finally:
        reporter.removeHandler(keeper)
        reporter.propagate = propagated
        if shows_progress:
            transformers_logging.enable_progress_bar()
