"""Reads per-layer timings of published pipelines; the form is published_pipeline_timings.yaml's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from decoder_sizes import Architecture
from hydra import compose, initialize_config_dir

from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile, fingerprint

DEFAULT_TIMINGS = Path(__file__).parent / "published_pipeline_timings.yaml"
_CONFIGS = Path(__file__).parents[1] / "conf" / "model"

_TOKENS_PER_MICROBATCH = 4 * 2048
_BYTES_PER_NUMBER = 2
_LOGIT_BYTES = 6  # 16-bit logits and their 32-bit copy or gradient
_LORA_RANKS = {"qwen3_235b_a22b": 32}  # published with LoRA; all others train every parameter

_RUN = re.compile(r"(?:(?P<count>\d+|one)\s+(?:stages?\s+)?of\s+)?(?P<size>\d+)\b")


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """One model of a timings file.

    Attributes:
        name: Its key.
        profile: Its blocks, in seconds and bytes; the tail segment is the LM head.
        hop_seconds: From one device to another.
        roundpipe: Blocks per stage of the published plan, forward and backward; None if not given.
        bound: Blocks per stage of the bound schedules, by schedule.
        published_ms: Published makespans, by schedule.
    """

    name: str
    profile: ModelProfile
    hop_seconds: float
    roundpipe: tuple[tuple[int, ...], tuple[int, ...]] | None
    bound: Mapping[str, tuple[int, ...]]
    published_ms: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class PublishedTimings:
    """A timings file.

    Attributes:
        num_devices: Devices of the server.
        num_microbatches: Microbatches of a step.
        models: The models, in the file's order.
    """

    num_devices: int
    num_microbatches: int
    models: tuple[PublishedModel, ...]


def load_timings(path: Path) -> PublishedTimings:
    """Read a timings file."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    return PublishedTimings(
        num_devices=int(data["num_devices"]),
        num_microbatches=int(data["num_microbatches"]),
        models=tuple(_model(name, entry) for name, entry in data["models"].items()),
    )


def parse_counts(value: object) -> tuple[int, ...]:
    """Read blocks per stage: a list, or words such as `one of 0, then 94 of 1 (the head alone)`."""
    if isinstance(value, list):
        return tuple(int(count) for count in value)
    counts: list[int] = []
    for match in _RUN.finditer(str(value)):
        repeat = {None: 1, "one": 1}.get(match["count"]) or int(match["count"])
        counts += [int(match["size"])] * repeat
    return tuple(counts)


def _model(name: str, entry: Mapping[str, Any]) -> PublishedModel:
    plan = entry.get("roundpipe_partition")
    bound = entry.get("bound_partition") or {}
    schedules = {
        "gpipe": "one_f_one_b_and_gpipe",
        "one_f_one_b": "one_f_one_b_and_gpipe",
        "interleaved_1f1b": "interleaved_and_looped_bfs",
        "looped_bfs": "interleaved_and_looped_bfs",
    }
    published = entry.get("published") or {}
    return PublishedModel(
        name=name,
        profile=_profile(name, entry),
        hop_seconds=entry["hop_ms"] / 1e3,
        roundpipe=(parse_counts(plan["forward"]), parse_counts(plan["backward"])) if plan else None,
        bound={s: parse_counts(bound[key]) for s, key in schedules.items() if key in bound},
        published_ms={schedule: row["makespan_ms"] for schedule, row in published.items()},
    )


def _profile(name: str, entry: Mapping[str, Any]) -> ModelProfile:
    layer, head = _sizes(name, entry)
    seconds = {
        key: entry[f"{key}_ms"] / 1e3
        for key in ("layer_forward", "layer_backward", "lm_head_forward", "lm_head_backward")
    }
    num_layers = int(entry["num_layers"])
    blocks = tuple(
        BlockProfile(
            name=f"layers.{index}",
            forward_seconds=seconds["layer_forward"],
            backward_seconds=seconds["layer_backward"],
            **layer,
        )
        for index in range(num_layers)
    )
    tail = BlockProfile(
        name="lm_head",
        forward_seconds=seconds["lm_head_forward"],
        backward_seconds=seconds["lm_head_backward"],
        **head,
    )
    return ModelProfile(blocks=blocks, tail=tail, fingerprint=fingerprint([name, str(num_layers)]))


def _sizes(name: str, entry: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Return sizes in bytes of a layer and of the LM head: the file's, else those of conf/model."""
    layer: dict[str, int] = {}
    head: dict[str, int] = {}
    config = _CONFIGS / f"{name}.yaml"
    if config.is_file():
        with initialize_config_dir(str(_CONFIGS.parent), version_base="1.3"):
            model = compose("train", overrides=[f"model={name}"]).model
        architecture = Architecture.from_config(model.architecture)
        layer, head = _known_sizes(architecture, lora_rank=_LORA_RANKS.get(name))
    if "layer_bytes" in entry:
        trained = layer.get("trainable_bytes", entry["layer_bytes"])
        layer["parameter_bytes"] = int(entry["layer_bytes"])
        layer["trainable_bytes"] = trained if name in _LORA_RANKS else int(entry["layer_bytes"])
    if "lm_head_bytes" in entry:
        head["parameter_bytes"] = int(entry["lm_head_bytes"])
        head["trainable_bytes"] = 0 if name in _LORA_RANKS else int(entry["lm_head_bytes"])
    if "boundary_bytes" in entry:
        layer["boundary_bytes"] = int(entry["boundary_bytes"])
    return layer, head


def _known_sizes(
    architecture: Architecture, *, lora_rank: int | None
) -> tuple[dict[str, int], dict[str, int]]:
    layer, head = architecture.layer_parameters, architecture.tail_parameters
    adapters = architecture.lora_parameters(rank=lora_rank) if lora_rank else 0
    kept = architecture.layer_activation_elements * _TOKENS_PER_MICROBATCH
    logits = architecture.vocab_size * _TOKENS_PER_MICROBATCH * _LOGIT_BYTES
    return (
        {
            "parameter_bytes": _BYTES_PER_NUMBER * (layer + adapters),
            "trainable_bytes": _BYTES_PER_NUMBER * (adapters if lora_rank else layer),
            "boundary_bytes": _BYTES_PER_NUMBER * architecture.hidden_size * _TOKENS_PER_MICROBATCH,
            "activation_bytes": _BYTES_PER_NUMBER * kept,
        },
        {
            "parameter_bytes": _BYTES_PER_NUMBER * head,
            "trainable_bytes": 0 if lora_rank else _BYTES_PER_NUMBER * head,
            "activation_bytes": logits,
        },
    )
