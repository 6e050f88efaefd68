"""Whether a checkpoint's tensors are a model's: differences are found before anything is read."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from roundpipe_lightning.errors import ModelSourceError
from roundpipe_lightning.models.load_options import LoadOptions

_REPORTER = "transformers.modeling_utils"
_QUESTION = "Is model.hub_name the model you mean, and is its config.json that of its weights?"
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def check_match(
    skeleton: PreTrainedModel,
    tensors: Mapping[str, Any],
    *,
    build: Callable[..., Any],
    config: PreTrainedConfig,
    options: LoadOptions,
    name: str,
) -> None:
    """Compare names and shapes, as they are once transformers has renamed and fused them.

    Its loading runs once on tensors without values, so that its rules are the ones that hold.

    Args:
        skeleton: The model on the meta device.
        tensors: The checkpoint's tensors; only their shapes are looked at.
        build: `from_pretrained` of the model's class.
        config: The model's configuration.
        options: Which differences are meant.
        name: Of the checkpoint, for the message.

    Raises:
        ModelSourceError: Listing every tensor that is missing, extra or of another shape.
    """
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    load = partial(build, None, config=config, device_map={"": "meta"}, **_reporting(options))
    odd: dict[str, tuple[int, ...]] = {}
    with _reports_kept() as reports:
        try:
            _, found = load(state_dict=_without_values(shapes))
        except RuntimeError as error:  # parts of one parameter that do not fit together
            odd = _shapes_of_the_others(shapes)
            try:
                _, found = load(state_dict=_without_values({**shapes, **odd}))
            except RuntimeError:
                raise ModelSourceError(
                    f"The tensors of {name!r} cannot be put together to the parameters of "
                    f"{type(skeleton).__name__}:\n{_plain(reports) or error}\n{_QUESTION}"
                ) from error
    meant = [re.compile(pattern) for pattern in options.unmatched]
    prefix = skeleton.base_model_prefix
    if options.new_head and prefix:
        meant.append(re.compile(rf"^(?!{re.escape(prefix)}\.)"))

    def unexpected(keys: Iterable[str]) -> list[str]:
        return sorted(key for key in keys if not any(p.search(key) for p in meant))

    wanted = skeleton.state_dict()
    lines = [
        f"  missing: {key}, {_shape(wanted.get(key))}" for key in unexpected(found["missing_keys"])
    ]
    lines += [
        f"  extra: {key}, {shapes.get(key, 'shape unknown')}"
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


def check_module_match(module: nn.Module, tensors: Mapping[str, Any], *, name: str) -> None:
    """Compare names and shapes of a plain module with a checkpoint's.

    Raises:
        ModelSourceError: Listing every tensor that is missing, extra or of another shape.
    """
    wanted = module.state_dict()
    aliases = _aliases(module)
    missing = [
        key for key in wanted if key not in tensors and not aliases.get(key, set()) & set(tensors)
    ]
    lines = [f"  missing: {key}, {_shape(wanted[key])}" for key in missing]
    lines += [f"  extra: {key}, {_shape(tensors[key])}" for key in tensors if key not in wanted]
    lines += [
        f"  another shape: {key}, {_shape(tensors[key])} instead of {_shape(wanted[key])}"
        for key in wanted
        if key in tensors and tuple(tensors[key].shape) != tuple(wanted[key].shape)
    ]
    if lines:
        raise ModelSourceError(
            f"{len(lines)} tensors of {name} do not fit {type(module).__name__}:\n"
            + "\n".join(lines)
        )


def _aliases(module: nn.Module) -> dict[str, set[str]]:
    """Names of one tensor, for those that have several."""
    names: dict[int, set[str]] = {}
    for key, value in module.state_dict(keep_vars=True).items():
        names.setdefault(id(value), set()).add(key)
    return {key: group for group in names.values() if len(group) > 1 for key in group}


def _shape(tensor: Any) -> str:
    return "shape unknown" if tensor is None else str(tuple(tensor.shape))


def _reporting(options: LoadOptions) -> dict[str, Any]:
    return {**options.building, "output_loading_info": True, "ignore_mismatched_sizes": True}


def _without_values(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}


def _shapes_of_the_others(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors that are shaped unlike most whose names differ in numbers alone: as the most."""
    alike: dict[str, list[str]] = {}
    for key in shapes:
        alike.setdefault(re.sub(r"\d+", "#", key), []).append(key)
    odd = {}
    for keys in alike.values():
        usual = Counter(shapes[key] for key in keys).most_common(1)[0][0]
        odd.update({key: usual for key in keys if shapes[key] != usual})
    return odd


def _plain(reports: list[str]) -> str:
    return _ESCAPE.sub("", "\n".join(reports))


@contextmanager
def _reports_kept() -> Iterator[list[str]]:
    """Keep transformers' report about a checkpoint to ourselves, and its progress bar away."""
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
