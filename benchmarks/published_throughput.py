"""Predicts published throughputs and longest sequences, and prints them beside what was measured.

Inputs are the device's file (conf/hardware/rtx4090.yaml, eight times) and models
(conf/model); no weights and no GPU are needed, and nothing is specific to a model.

    python benchmarks/published_throughput.py [--models NAME ...] [--hardware NAME] [--output json]
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from peft import LoraConfig
from torch import nn

from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.work.work_profile import work_profile
from roundpipe_lightning.modules import Adapters, ModelSource
from roundpipe_lightning.planning.cost.costs import UpdateTiming
from roundpipe_lightning.planning.cost.memory import MemoryModel, longest_that_fits
from roundpipe_lightning.planning.cost.predict import Exchange, StepModel, StepPrediction
from roundpipe_lightning.planning.model.hardware import HardwareSpec, load_hardware, network_rate
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.model.work import (
    BlockWork,
    MicrobatchShape,
    ParameterStorage,
    WeightStorage,
    WorkProfile,
    time_model,
    work_seconds,
)
from roundpipe_lightning.planning.schedule.plan import PipelineLayout
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.plans import balanced_partition

HERE = Path(__file__).parent
MODELS = HERE.parent / "conf" / "model"

SHAPE = MicrobatchShape(sequences=4, seq_len=2048)
DTYPE = "float16_accumulate_float16"
ROUND_SIZE = 8

TOKENS_PER_STEP = {
    "qwen3_1_7b": 1_048_576,
    "llama3_1_8b": 524_288,
    "gpt_oss_20b": 262_144,
    "qwen3_32b": 262_144,
    "qwen3_235b_a22b": 131_072,
}
LORA_RANKS = {"qwen3_235b_a22b": 32}
TIMINGS = {
    "RoundPipe async": UpdateTiming.BEHIND_NEXT_STEP,
    "RoundPipe sync": UpdateTiming.AFTER_STEP,
}
STORAGES = {
    "page-locked, 16 bits": ParameterStorage(),
    "page-locked, 8 bits": ParameterStorage(frozen_bits=8),
    "page-locked, 4 bits": ParameterStorage(frozen_bits=4),
    "memory-mapped, 16 bits": ParameterStorage(weights=WeightStorage.MEMORY_MAPPED),
    "memory-mapped, 8 bits": ParameterStorage(weights=WeightStorage.MEMORY_MAPPED, frozen_bits=8),
    "memory-mapped, 4 bits": ParameterStorage(weights=WeightStorage.MEMORY_MAPPED, frozen_bits=4),
}
NETWORKS = ("10GbE", "100GbE")
HOSTS = (2, 8)
TITLES = {
    "throughput": "Tokens per second",
    "frozen": "Tokens per second by where frozen weights lie",
    "adapters": "Tokens per second by what is adapted",
    "sequences": "Longest sequences, in units of 1024 tokens",
    "layers": "Milliseconds of a microbatch of 4 x 2048 tokens",
    "network": "Tokens per step and host from which on a network is hidden",
}


@dataclass(frozen=True)
class Model:
    """One published model on the machine.

    Attributes:
        name: Its file in conf/model.
        work: What it computes.
        hardware: The machine.
    """

    name: str
    work: WorkProfile
    hardware: HardwareSpec

    @property
    def is_frozen(self) -> bool:
        """Whether most of it is not trained."""
        return self.name in LORA_RANKS

    @cached_property
    def profile(self) -> ModelProfile:
        """Profile with the times of a published microbatch."""
        return time_model(self.work, hardware=self.hardware, shape=SHAPE, dtype=DTYPE)

    @cached_property
    def layout(self) -> PipelineLayout:
        """The best even stages that fit the devices, microbatches in rounds of 8, no teams."""
        num_microbatches = TOKENS_PER_STEP[self.name] // SHAPE.tokens
        memory = MemoryModel(work=self.work, hardware=self.hardware, shape=SHAPE)
        layouts = [
            PipelineLayout(
                partition=partition, num_microbatches=num_microbatches, round_size=ROUND_SIZE
            )
            for partition in even_partitions(self.profile)
        ]
        fitting = [each for each in layouts if memory.report(each).fits]
        return min(fitting, key=lambda each: self.seconds(each, num_microbatches=2 * ROUND_SIZE))

    def seconds(self, layout: PipelineLayout, *, num_microbatches: int) -> float:
        """Time that the pipeline takes for a small step with these stages."""
        small = PipelineLayout(
            partition=layout.partition, num_microbatches=num_microbatches, round_size=ROUND_SIZE
        )
        return (
            StepModel(
                profile=self.profile,
                hardware=self.hardware,
                num_trainable=0,
                storage=ParameterStorage(),
                timing=UpdateTiming.BEHIND_NEXT_STEP,
            )
            .predict(small)
            .pipeline_seconds
        )

    def tokens_per_second(self, timing: UpdateTiming, storage: ParameterStorage) -> float:
        """Predicted throughput; the published synchronous steps overlap with no optimizer."""
        step = self.predict(timing, storage)
        seconds = step.step_seconds
        if timing is UpdateTiming.AFTER_STEP:
            seconds = max(step.pipeline_seconds, step.host_seconds) + step.optimizer_seconds
        return TOKENS_PER_STEP[self.name] / seconds

    def predict(self, timing: UpdateTiming, storage: ParameterStorage) -> StepPrediction:
        """Predicted step."""
        return StepModel(
            profile=self.profile,
            hardware=self.hardware,
            num_trainable=self.work.num_trainable,
            storage=storage,
            timing=timing,
        ).predict(self.layout)

    def longest_sequence(self) -> float:
        """Longest sequences in units of 1024 tokens, one per device, one block per stage.

        They are multiples of 128 tokens, with one or two slots for weights.
        """
        ones = (1,) * len(self.work.blocks)
        layouts = [
            PipelineLayout(
                partition=Partition(forward=ones, backward=(0, *ones)),
                num_microbatches=self.hardware.num_devices,
                round_size=self.hardware.num_devices,
                weight_slots=slots,
            )
            for slots in (1, 2)
        ]

        def shortage(count: int) -> float:
            shape = MicrobatchShape(sequences=1, seq_len=128 * count)
            memory = MemoryModel(work=self.work, hardware=self.hardware, shape=shape)
            return min(memory.report(layout).missing_share for layout in layouts)

        return longest_that_fits(shortage, too_long=2**20) / 8


def even_partitions(profile: ModelProfile) -> Iterator[Partition]:
    """Partitions with stages of about equal duration, one to four blocks per BACKWARD stage."""
    forward = sum(block.forward_seconds for block in profile.blocks)
    both = forward + sum(block.backward_seconds for block in profile.blocks)
    for size in range(1, 5):
        num_backward = -(-profile.num_blocks // size)
        fewest = max(1, round(num_backward * forward / both))
        half, every = -(-profile.num_blocks // 2), profile.num_blocks
        for num_forward in sorted({fewest, fewest + 1, fewest + 2, half, every}):
            yield balanced_partition(
                profile, num_fused=0, num_forward=num_forward, num_backward=num_backward
            )


def measure(name: str, *, rank: int | None = None, experts: bool = False) -> WorkProfile:
    """Measure a model of conf/model on the meta device.

    Args:
        name: Its file.
        rank: Of its LoRA adapters, 0: none; None: as it was published.
        experts: Whether a mixture's experts get adapters, too, where there are any.
    """
    with initialize_config_dir(str(MODELS.parent), version_base="1.3"):
        config = compose("train", overrides=[f"model={name}"])
    # A fused kernel, which transformers chooses for all but gpt-oss.
    architecture = OmegaConf.to_container(config.model.architecture)
    source = ModelSource(architecture=architecture, attention="flex_attention")
    rank = LORA_RANKS.get(name, 0) if rank is None else rank
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model: nn.Module = source.build()
            if rank:
                model = adapted(model, rank=rank, experts=experts)
    finally:
        torch.set_default_dtype(before)
    return work_profile(model, find_stacks(model, None)[0], seq_len=SHAPE.seq_len)


def adapted(model: Any, *, rank: int, experts: bool) -> nn.Module:
    """Add LoRA to every linear layer of the blocks, and to the parameters of a mixture's experts.

    What is no linear layer but has stacked matrices is taken for experts.
    """
    stack = find_stacks(model, None)[0]
    assert stack is not None
    block = stack.blocks[0]
    layers = {
        name.rpartition(".")[2]
        for name, child in block.named_modules()
        if isinstance(child, nn.Linear)
    }
    stacked = {
        ".".join(name.split(".")[-2:]) for name, p in block.named_parameters() if p.dim() == 3
    }
    config = LoraConfig(
        r=rank,
        target_modules=sorted(layers),
        target_parameters=sorted(stacked) if experts else None,
    )
    return Adapters(config=config).apply(model)


def published(path: Path) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Rows of a published table: the system, and a number for each model."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        yield row["system"], {name: float(row[name]) for name in TOKENS_PER_STEP}


def throughput_rows(models: Iterable[Model]) -> list[dict[str, Any]]:
    """Predicted and published throughput."""
    return [
        {
            "model": model.name,
            "system": system,
            "published": values[model.name],
            **compared(
                model.tokens_per_second(TIMINGS[system], ParameterStorage()), values[model.name]
            ),
        }
        for model in models
        for system, values in published(HERE / "published_throughput.csv")
    ]


def frozen_rows(models: Iterable[Model]) -> list[dict[str, Any]]:
    """Predicted throughput of models with frozen weights, by where and how these are stored."""
    return [
        {
            "model": model.name,
            "weights": name,
            "predicted": model.tokens_per_second(UpdateTiming.BEHIND_NEXT_STEP, storage),
        }
        for model in models
        if model.is_frozen
        for name, storage in STORAGES.items()
    ]


def adapter_rows(models: Iterable[Model]) -> list[dict[str, Any]]:
    """Predicted throughput of models with adapters, by what is adapted."""
    return [
        {
            "model": model.name,
            "adapters": name,
            "trainable": float(variant.work.num_trainable),
            "predicted": variant.tokens_per_second(
                UpdateTiming.BEHIND_NEXT_STEP, ParameterStorage()
            ),
        }
        for model in models
        if model.is_frozen
        for name, variant in {
            "attention": model,
            "attention and experts": Model(
                name=model.name, work=measure(model.name, experts=True), hardware=model.hardware
            ),
        }.items()
    ]


def sequence_rows(models: Iterable[Model]) -> list[dict[str, Any]]:
    """Predicted and published longest sequences."""
    ((_, values),) = published(HERE / "published_max_sequence.csv")
    return [
        {
            "model": model.name,
            "published": values[model.name],
            **compared(model.longest_sequence(), values[model.name]),
        }
        for model in models
    ]


def network_rows(models: Iterable[Model]) -> list[dict[str, Any]]:
    """From how many tokens on the network is hidden, by published and by predicted throughput."""
    rows = []
    throughput = dict(published(HERE / "published_throughput.csv"))["RoundPipe async"]
    for model, nodes in itertools.product(models, HOSTS):
        storage, known = ParameterStorage(), throughput[model.name]
        hosts = replace(model, hardware=replace(model.hardware, num_nodes=nodes))
        step = hosts.predict(UpdateTiming.BEHIND_NEXT_STEP, storage)
        for name in NETWORKS:
            hardware = replace(hosts.hardware, network_bytes_per_second=network_rate(name))
            exchange = Exchange(
                work=model.work, storage=storage, hardware=hardware, steps_at_end=False
            )
            tokens = TOKENS_PER_STEP[model.name] * exchange.share_of_room(step, model.profile)
            rows.append(
                {
                    "model": model.name,
                    "hosts": str(nodes),
                    "network": name,
                    "GB sent a step": exchange.num_bytes / 1e9,
                    "by published tokens/s": exchange.seconds * known,
                    **compared(tokens, exchange.seconds * known),
                }
            )
    return rows


def layer_rows(models: Iterable[Model]) -> list[dict[str, Any]]:
    """Predicted and published times of layers and LM heads: what efficiencies are fitted to."""
    text = (HERE / "published_pipeline_timings.yaml").read_text(encoding="utf-8")
    timings = yaml.safe_load(text)["models"]
    rows = []
    for model in models:
        parts: dict[str, Sequence[BlockWork]] = {
            "layer": model.work.blocks,
            "lm_head": [model.work.tail],
        }
        for part, blocks in parts.items():
            for direction in ("forward", "backward"):
                seconds = statistics.fmean(
                    work_seconds(
                        getattr(block, direction),
                        hardware=model.hardware,
                        shape=SHAPE,
                        dtype=DTYPE,
                    )
                    for block in blocks
                )
                measured = timings[model.name][f"{part}_{direction}_ms"]
                rows.append(
                    {
                        "model": model.name,
                        "part": f"{part} {direction}",
                        "published": measured,
                        **compared(1000 * seconds, measured),
                    }
                )
    return rows


def compared(predicted: float, measured: float) -> dict[str, float]:
    """A prediction and its error."""
    return {"predicted": predicted, "error": predicted / measured - 1}


def summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Median and worst error of the models whose weights are trained."""
    errors = [abs(row["error"]) for row in rows]
    return {"median": statistics.median(errors), "worst": max(errors)} if errors else {}


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as Markdown."""
    if not rows:
        return ""
    names = list(rows[0])
    lines = [f"| {' | '.join(names)} |", f"|{'|'.join('---' for _ in names)}|"]
    lines += [f"| {' | '.join(shown(name, row[name]) for name in names)} |" for row in rows]
    return f"{title}\n\n" + "\n".join(lines) + "\n"


def shown(name: str, value: Any) -> str:
    """A cell."""
    if not isinstance(value, float):
        return str(value)
    if name == "error":
        return f"{value:+.1%}"
    return f"{value:,.0f}" if value > 300 or value.is_integer() else f"{value:.1f}"


def main() -> None:
    """Predict and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(TOKENS_PER_STEP), metavar="NAME")
    parser.add_argument("--hardware", default="rtx4090x8", help="name or file (default rtx4090x8)")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    hardware = load_hardware(options.hardware)
    models = [
        Model(name=name, work=measure(name), hardware=hardware)
        for name in options.models or TOKENS_PER_STEP
    ]
    throughput = throughput_rows(models)
    targets = [row for row in throughput if row["model"] not in LORA_RANKS]
    error = summary(targets)
    rows = {
        "throughput": throughput,
        "frozen": frozen_rows(models),
        "adapters": adapter_rows(models),
        "sequences": sequence_rows(models),
        "layers": layer_rows(models),
        "network": network_rows(m for m in models if not m.is_frozen),
    }
    tables = {name: table(TITLES[name], rows[name]) for name in rows}
    if options.output == "json":
        result = {
            **rows,
            "throughput_error": error,
            "tables": tables,
            "partitions": {model.name: str(model.layout.partition) for model in models},
        }
        print(json.dumps(result))
        return
    for name, text in tables.items():
        print(text)
        if name == "throughput" and targets:
            print("Errors without LoRA: median {median:.1%}, worst {worst:.1%}\n".format(**error))


if __name__ == "__main__":
    main()
