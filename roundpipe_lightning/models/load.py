"""Published weights into a model of transformers, tensor by tensor.

The model is built on the meta device. The names and shapes of the checkpoint are compared with the
model's before a byte of them is read; then each tensor is read into memory of its own, in the dtype
it is to have, so the peak is the model and the tensors that one parameter is made of. What a
checkpoint calls its tensors, and which of them the model has fused, is transformers' own knowledge:
its loading runs here, on tensors that are read when it asks for them. `load_module` and
`draw_weights` serve any module that was built on the meta device.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.device.host_memory import check_host_memory
from roundpipe_lightning.errors import ConfigurationError, ModelSourceError
from roundpipe_lightning.models.gguf import is_gguf, read_model
from roundpipe_lightning.models.quantized import (
    quantizable_weights,
    quantize_frozen,
    quantized_on_arrival,
)
from roundpipe_lightning.models.weight_files import find_weight_files, map_frozen, opened
from roundpipe_lightning.planning.model.work import ParameterStorage

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from roundpipe_lightning.models.source import ModelSource

_REPORTER = "transformers.modeling_utils"
_QUESTION = "Is model.hub_name the model you mean, and is its config.json that of its weights?"
_GGUF_HINT = (
    "Where transformers takes a field of the configuration wrongly from a GGUF file, set it: "
    "+model.config_changes.head_dim=64."
)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def load_pretrained(source: ModelSource, *, config: PreTrainedConfig) -> PreTrainedModel:
    """A model with the weights of a local folder, of a GGUF file or of a name on the hub.

    Args:
        config: The configuration that is published with the weights.

    Raises:
        ModelSourceError: A file is missing, damaged or a pickle of more than tensors; or tensors
            are missing, extra or of another shape: all are listed.
        FitError: The host has no memory for them; nothing has been read then.
        ConfigurationError: The files cannot be mapped.
        OSError: The hub cannot be reached; as transformers raises it.
    """
    name, auto_class = str(source.hub_name), source.head.auto_class
    trust: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    with torch.device("meta"):
        skeleton = auto_class.from_config(config, **trust).requires_grad_(False)
    is_packed = getattr(config, "quantization_config", None) is not None
    if source.unpacks or not (is_packed or source.maps_weights):
        _check_memory(skeleton, config=config, source=source)
    mapped: dict[int, Path] = {}
    arriving: Any = nullcontext({})
    if source.quantizes:
        arriving = quantized_on_arrival(skeleton, source.frozen_bits)
    with _one_tensor_at_a_time(), arriving as made:
        if is_packed:  # its quantizer reads its own files in its own way
            options = {**source.hub_options, **source.building_options}
            model = auto_class.from_pretrained(name, config=config, **trust, **options)
            # An export has no codes: the names that a checkpoint gives them are not for it.
            model._weight_conversions = None  # noqa: SLF001
        elif is_gguf(name):
            options = {"config": config, **source.building_options}
            with _reports_kept():
                model, loaded = read_model(name, auto_class, **options)
            wanted = skeleton.state_dict()
            pairs = ((k, t.shape, wanted[k].shape) for k, t in model.state_dict().items())
            # transformers 5.20 takes tensors of any shape from such a file
            odd = {pair for pair in pairs if pair[1] != pair[2]} | set(loaded["mismatched_keys"])
            _check_loaded(skeleton, {**loaded, "mismatched_keys": odd}, source=source)
        else:
            model, mapped = _read(source, skeleton, config=config)
    if source.maps_weights:
        map_frozen(model, lambda _, each: mapped.get(each.data_ptr()))
    if source.quantizes:
        quantize_frozen(model, source.frozen_bits, made)
    if not source.maps_weights:
        for parameter in model.parameters():  # the mapping ends with its last view
            if parameter.data_ptr() in mapped:
                parameter.data = parameter.data.clone()
    return cast("PreTrainedModel", model)


def _read(
    source: ModelSource, skeleton: PreTrainedModel, *, config: PreTrainedConfig
) -> tuple[PreTrainedModel, dict[int, Path]]:
    """Return the model, and the file of each parameter that is a view of one by its address."""
    name, hub_options = str(source.hub_name), source.hub_options
    files = find_weight_files(name, hub_options=hub_options)
    build = partial(type(skeleton).from_pretrained, None, config=config, **source.building_options)
    # Weights that are quantised are read from the mapping: the whole of them is never in memory.
    views = source.quantizes and all(file.suffix == ".safetensors" for file in files)
    mapped: dict[int, Path] = {}
    is_mapped = source.maps_weights or views
    with opened(files, mapped=mapped if is_mapped else None) as tensors:
        if source.maps_weights:
            _check_memory(skeleton, config=config, source=source, mapped=tensors)
        _check_match(skeleton, tensors, build=build, source=source)
        may_differ = bool(source.unmatched_tensors) or source.has_new_head
        model = build(state_dict=tensors, ignore_mismatched_sizes=may_differ)
    model.config.name_or_path = model.name_or_path = name
    _load_generation_config(model, name, hub_options=hub_options)
    return model, mapped


def _check_memory(
    skeleton: PreTrainedModel,
    *,
    config: PreTrainedConfig,
    source: ModelSource,
    mapped: Mapping[str, Any] | None = None,
) -> None:
    """Refuse weights that have no room before any is read; FitError: they have none.

    Of `mapped` files a parameter takes none where a tensor has its shape and dtype. One that is put
    together from several tensors takes three times its size meanwhile.
    """
    dtype = source.parameter_dtype or getattr(config, "dtype", None) or torch.float32
    there = _shapes_of(mapped or {}, dtype)
    found = quantizable_weights(skeleton) if source.quantizes else ()
    packed: set[nn.Parameter] = {getattr(*each) for each in found}
    read = packed | {each for each in skeleton.parameters() if tuple(each.shape) not in there}
    num = sum(each.numel() for each in packed)
    storage = ParameterStorage(frozen_bits=source.frozen_bits)
    largest = max((p.numel() for _, p in _put_together(skeleton) if p in read), default=0)
    check_host_memory(
        (sum(each.numel() for each in read) + 2 * largest) * dtype.itemsize
        - storage.saved_bytes(num, num * dtype.itemsize),
        what=f"Reading {source.hub_name!r}",
        way_out="Use a machine with more, model.dtype=bfloat16, or, where adapters alone are "
        "trained, model.frozen_weights=mmap or peft.frozen_bits=4."
        if mapped is None
        else "Its files have these weights in another dtype or in parts: on a machine with more, "
        "roundpipe-export original_layout=false writes a folder that can be mapped whole.",
    )


def _shapes_of(tensors: Mapping[str, Any], dtype: torch.dtype) -> set[tuple[int, ...]]:
    """The shapes of tensors in files that have a dtype: what parameters may be views of."""
    there = (each for each in tensors.values() if _DTYPES.get(each.get_dtype()) == dtype)
    return {tuple(tensor.shape) for tensor in there}


def map_without_values(model: PreTrainedModel, source: ModelSource) -> None:
    """Have a model on the meta device know which parameters will stay in their files.

    A local folder is looked at; what the hub has is as published: in the configuration's dtype, and
    in the parts that transformers puts together.
    """
    name, dtype = str(source.hub_name), next(model.parameters()).dtype
    if Path(name).is_dir():
        files = find_weight_files(name, hub_options=source.hub_options)
        with opened(files, mapped={}) as tensors:
            there = _shapes_of(tensors, dtype)
        map_frozen(model, lambda _, each: files[0] if tuple(each.shape) in there else None)
        return
    put_together = {key for key, _ in _put_together(model)}
    as_published = dtype == getattr(source.load_config(), "dtype", None)

    def find_file(key: str, _: nn.Parameter) -> Path | None:
        return Path(name) if as_published and key not in put_together else None

    map_frozen(model, find_file)


def _put_together(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """The parameters that transformers makes of several tensors of a checkpoint, by name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    conversions = get_model_conversion_mapping(model)
    patterns = [
        pattern
        for each in conversions
        if isinstance(each, WeightConverter)
        for pattern in each.target_patterns
    ]
    named = model.named_parameters()
    return [(key, each) for key, each in named if any(pattern in key for pattern in patterns)]


_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


@contextmanager
def _one_tensor_at_a_time() -> Iterator[None]:
    """Keep transformers from reading ahead in threads: all of a model may then be there twice."""
    variable = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        yield
    finally:
        del os.environ[variable]
        if before is not None:
            os.environ[variable] = before


def _load_generation_config(
    model: PreTrainedModel, name: str, *, hub_options: Mapping[str, Any]
) -> None:
    """Take over how the published model generates, as `from_pretrained` does."""
    from transformers import GenerationConfig

    if not model.can_generate():
        return
    try:
        model.generation_config = GenerationConfig.from_pretrained(name, **hub_options)
    except OSError:  # there is none: the one made from the configuration stays
        return
    except ValueError as error:
        raise ModelSourceError(
            f"generation_config.json of {name!r} cannot be read: {error}."
        ) from error


def _check_match(
    skeleton: PreTrainedModel,
    tensors: Mapping[str, Any],
    *,
    build: Callable[..., Any],
    source: ModelSource,
) -> None:
    """Compare names and shapes, as they are once transformers has renamed and fused them.

    Its loading runs once on tensors without values, so that its rules are the ones that hold.
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
                report = _ESCAPE.sub("", "\n".join(each.getMessage() for each in reports))
                raise ModelSourceError(
                    f"The tensors of {source.hub_name!r} cannot be put together to the parameters "
                    f"of {type(skeleton).__name__}:\n{report or error}\n{_QUESTION}"
                ) from error
    _check_loaded(skeleton, found, source=source, tensors=tensors, odd=odd)


def _check_loaded(
    skeleton: PreTrainedModel,
    found: Mapping[str, Any],
    *,
    source: ModelSource,
    tensors: Mapping[str, Any] = MappingProxyType({}),
    odd: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> None:
    """Refuse weights that are not those of the model; ModelSourceError: all are listed.

    Args:
        found: What transformers says that it has not loaded.
        tensors: Those in the files, where they are read by name.
        odd: The shapes that some of them were taken to have.
    """
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    meant = [re.compile(pattern) for pattern in source.unmatched_tensors]
    prefix = skeleton.base_model_prefix
    if source.has_new_head and prefix:
        meant.append(re.compile(rf"^(?!{re.escape(prefix)}\.)"))

    def unexpected(keys: Iterable[str]) -> list[str]:
        return sorted(key for key in keys if not any(p.search(key) for p in meant))

    wanted = skeleton.state_dict()
    lines = [f"  missing: {k}, {_shape(wanted.get(k))}" for k in unexpected(found["missing_keys"])]
    extra = unexpected(found["unexpected_keys"])
    lines += [f"  extra: {key}, {shapes.get(key, 'shape unknown')}" for key in extra]
    differing = {key: (tuple(has), tuple(wants)) for key, has, wants in found["mismatched_keys"]}
    for key in (*unexpected(differing), *unexpected(odd)):
        has, wants = differing.get(key) or (shapes[key], odd[key])
        lines.append(f"  another shape: {key}, {has} instead of {wants}")
    # a tensor that is renamed or fused is one of fractions, unless the model has others
    usual = next(iter(wanted.values())) if all(map(_is_fraction, wanted.values())) else None
    for key, tensor in tensors.items():
        like = wanted.get(key, None if key in found["unexpected_keys"] else usual)
        if like is not None and (kind := _another_kind(tensor, like)) is not None:
            lines.append(f"  another kind: {key}, {kind} instead of {like.dtype}")
    if lines:
        hint = _GGUF_HINT if is_gguf(source.hub_name) else _QUESTION
        raise ModelSourceError(
            f"{len(lines)} tensors of {source.hub_name!r} do not fit {type(skeleton).__name__}:\n"
            + "\n".join(lines)
            + f"\n{hint} Tensors that may differ are named by model.unmatched_tensors "
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
def _reports_kept() -> Iterator[list[logging.LogRecord]]:
    """Keep transformers' report about a checkpoint to ourselves, and its progress bar away."""
    from transformers.utils import logging as transformers_logging

    reporter, keeper = logging.getLogger(_REPORTER), BufferingHandler(capacity=sys.maxsize)
    propagated, shows_progress = reporter.propagate, transformers_logging.is_progress_bar_enabled()
    reporter.propagate = False
    reporter.addHandler(keeper)
    transformers_logging.disable_progress_bar()
    try:
        yield keeper.buffer
    finally:
        reporter.removeHandler(keeper)
        reporter.propagate = propagated
        if shows_progress:
            transformers_logging.enable_progress_bar()


_MOST_NAMED = 3


def load_module(module: nn.Module, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Read the weights of any module from safetensors files, whose names are its own.

    For use in `configure_model`, on a module that was built under `torch.device("meta")`:

    ```python
    with torch.device("meta"):
        self.model = MyModel()
    load_module(self.model, "path/to/folder")
    ```

    Args:
        module: On the meta device or on the host.
        path: A safetensors file, or a folder all of whose safetensors files are read.
        dtype: Of floating point tensors; None keeps the module's.

    Raises:
        ModelSourceError: There is no file, one is damaged, or tensors are missing, extra or of
            another shape: all are listed, and nothing has been read then.
        ConfigurationError: A buffer is on the meta device and in no file.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ModelSourceError(f"The folder {path} has no safetensors file.")
    saved = _holders(module.state_dict(keep_vars=True))
    with opened(files) as tensors:
        # Of the names of a tied tensor one will do.
        known = {name for _, names in saved for name in names if not {*names}.isdisjoint(tensors)}
        lines = shape_differences(module.state_dict(), tensors, may_lack=known)
        if lines:
            raise ModelSourceError(
                f"{len(lines)} tensors of {path} do not fit {type(module).__name__}:\n"
                + "\n".join(lines)
            )
        for old, names in saved:
            found = next(name for name in names if name in tensors)
            wanted = (dtype or old.dtype) if old.is_floating_point() else old.dtype
            _assign(module, names, tensors[found][...].to(wanted), like=old)
    left = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if left:
        raise ConfigurationError(
            f"Buffer {left[0]} has no values: it is not saved with the weights, and the module was "
            "built on the meta device. Make it in __init__ under torch.device('cpu')."
        )


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw from a seed, and leave the CPU's global generator as it was; None draws from that."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def draw_weights(module: nn.Module, *, seed: int) -> None:
    """Draw the weights of a module that is on the meta device, module by module.

    It is a model of transformers, or one all of whose parts with parameters can `reset_parameters`
    (else a ConfigurationError). The global generator of the CPU is left as it was.
    """
    from transformers import PreTrainedModel

    with seeded(seed):
        if isinstance(module, PreTrainedModel):
            _materialize(module)
            module.init_weights()
            return
        for name, part in module.named_modules():
            owns = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            if owns and not callable(getattr(part, "reset_parameters", None)):
                raise ConfigurationError(
                    f"{name or type(module).__name__} has parameters or buffers of its own and no "
                    "reset_parameters() that draws them. Add the method, or build it on the host."
                )
        _materialize(module)
        for part in module.modules():
            if hasattr(part, "reset_parameters"):
                reset: Any = part.reset_parameters
                reset()


def draw_buffers(module: nn.Module) -> None:
    """Compute the buffers of transformers' models that no checkpoint has (rotary frequencies)."""
    from transformers import PreTrainedModel

    unsaved = [tensor for tensor in module.buffers() if tensor.is_meta]
    kept = {id(tensor) for tensor in (*module.parameters(), *module.buffers())} - set(
        map(id, unsaved)
    )
    _materialize(module)
    for tensor in (*module.parameters(), *module.buffers()):
        if id(tensor) in kept:
            tensor._is_hf_initialized = True  # type: ignore[attr-defined] # noqa: SLF001 - its mark
    for model in module.modules() if unsaved else ():
        if isinstance(model, PreTrainedModel):
            model.init_weights()
            return


def shape_differences(
    wanted: Mapping[str, Tensor], found: Mapping[str, Any], *, may_lack: Collection[str] = ()
) -> list[str]:
    """Name every tensor that is missing, extra, of another shape or kind, in a line each."""
    lines = [
        f"  missing: {name}, {_shape(tensor)}"
        for name, tensor in wanted.items()
        if name not in found and name not in may_lack
    ]
    lines += [f"  extra: {k}, {_shape(t)}" for k, t in found.items() if k not in wanted]
    lines += [
        f"  another shape: {name}, {_shape(found[name])} instead of {_shape(tensor)}"
        for name, tensor in wanted.items()
        if name in found and _shape(found[name]) != _shape(tensor)
    ]
    lines += [
        f"  another kind: {name}, {kind} instead of {tensor.dtype}"
        for name, tensor in wanted.items()
        if name in found and (kind := _another_kind(found[name], tensor)) is not None
    ]
    return lines


def _another_kind(found: Any, tensor: Tensor) -> str | None:
    """Return the dtype of whole numbers that are to be loaded as fractions, or the other way."""
    if found is None:
        return None
    kind = str(found.dtype if isinstance(found, Tensor) else found.get_dtype())
    is_same = (re.match(r"torch\.(b?float|complex)|B?F\d|C\d", kind) is not None) == _is_fraction(
        tensor
    )
    return None if is_same else kind


def _is_fraction(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def first_lines(lines: Sequence[str]) -> str:
    """Return the first few of them as one line, and how many more there are."""
    more = f" and {len(lines) - _MOST_NAMED} more" if len(lines) > _MOST_NAMED else ""
    return f"{'; '.join(line.strip() for line in lines[:_MOST_NAMED])}{more}"


def _shape(tensor: Any) -> str:
    return "shape unknown" if tensor is None else str(tuple(tensor.shape))


def _materialize(module: nn.Module) -> None:
    tensors = dict(module.named_parameters(remove_duplicate=False))
    for old, names in _holders({**tensors, **dict(module.named_buffers(remove_duplicate=False))}):
        if old.is_meta:
            _assign(module, names, torch.empty_like(old, device="cpu"), like=old)


def _holders(tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, list[str]]]:
    """Every tensor once, with all of its names."""
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, tensor in tensors.items():
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _assign(module: nn.Module, names: list[str], values: Tensor, *, like: Tensor) -> None:
    """Put one tensor, a parameter if the old one was, in all places that had the old one."""
    is_parameter = isinstance(like, nn.Parameter)
    new = nn.Parameter(values, like.requires_grad) if is_parameter else values
    for name in names:
        owner, _, key = name.rpartition(".")
        setattr(module.get_submodule(owner), key, new)
