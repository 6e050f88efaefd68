"""Measures the memory of whole trainings against what their plans say.

Each case is a run of `train.py` in a process of its own, on CPU workers, whose devices are host
memory. Measured is the most memory of the process beyond what it has after its imports, without
pages of files (the page cache of mapped weights gives way). It is to be within 10 % of the plan.

    python benchmarks/memory_truth.py                    # 0.6B: full, LoRA, on mapped weights
    python benchmarks/memory_truth.py --small            # fewer features, in seconds
    python benchmarks/memory_truth.py --case lora
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401 - imports are not counted

from roundpipe_lightning.cli.build import build_run
from roundpipe_lightning.planning.model.hardware import config_folder
from roundpipe_lightning.planning.report.description import PlanDescription

GIB = 2**30
COMMON = (
    "model=qwen3_0_6b",
    "hardware=cpu",
    "data.seq_len=128",
    "data.batch_size=8",
    "trainer.max_steps=3",
    "callbacks=minimal",
    "logger=none",
    "validate=false",
    "optimized_metric=null",
)
WARM_UP = [*COMMON[1:], "model=tiny", "trainer.max_steps=1", "peft=lora"]
CASES = {
    "full": (),
    "full, 2 microbatches": ("partition.num_microbatches=2",),
    "lora": ("peft=lora",),
    "mapped": ("peft=lora", "model.frozen_weights=mmap", "model.weights=pretrained"),
}
SMALL = (
    "model.architecture.hidden_size=256",
    "model.architecture.intermediate_size=768",
    "model.architecture.num_hidden_layers=4",
)


def write_weights(overrides: list[str], folder: str) -> None:
    """Write random weights of the configured model, as published ones lie in a folder."""
    config = configuration(overrides)
    architecture = OmegaConf.to_container(config.model.architecture)
    made = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
    AutoModelForCausalLM.from_config(made).save_pretrained(folder)


def own_bytes() -> int:
    """Return the memory of this process without pages of files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))


class Peak:
    """The most memory of this process until the end of the context, looked at by a thread."""

    def __init__(self) -> None:
        self.num_bytes = self.before = own_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self.num_bytes = max(self.num_bytes, own_bytes())

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def configuration(overrides: list[str]) -> Any:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return compose("train", overrides=overrides)


def measure(overrides: list[str], answer: Any) -> None:
    """Run a training and put its figures, in bytes, into a queue."""
    plans: list[PlanDescription] = []
    folder = next(given for given in overrides if given.startswith("paths."))
    for given in ([*WARM_UP, folder], overrides):  # what is imported on the way is not counted
        plans.clear()
        run = build_run(configuration(given))
        run.trainer.strategy.plan_listeners.append(lambda event: plans.append(event.description))
        gc.collect()
        with Peak() as peak:
            run.trainer.fit(run.module, datamodule=run.data)
    plan, memory = plans[0].plan, plans[0].memory
    workers = min(plan.num_workers, plan.num_microbatches)
    answer.put(
        {
            "measured_bytes": peak.num_bytes - peak.before,
            "planned_bytes": memory.host.total_bytes + workers * memory.device.total_bytes,
            "host": str(memory.host),
            "device": str(memory.device),
        }
    )


def run_alone(function: Callable[..., None], *args: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=function, args=args)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{function.__name__} has failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--small", action="store_true", help="fewer features")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("overrides", nargs="*", help="of the configuration, as for train.py")
    args = parser.parse_args()
    context, rows = multiprocessing.get_context("spawn"), {}
    for name in [args.case] if args.case else CASES:
        with tempfile.TemporaryDirectory() as folder:
            overrides = [*COMMON, *CASES[name], *(SMALL if args.small else ()), *args.overrides]
            overrides.append(f"paths.output_dir={folder}")
            if name == "mapped":
                run_alone(write_weights, overrides, folder)
                overrides += ["model.architecture=null", f"model.hub_name={folder}"]
            answer = context.SimpleQueue()
            run_alone(measure, overrides, answer)
            rows[name] = answer.get()
        row = rows[name]
        if args.output == "text":
            measured, planned = row["measured_bytes"], row["planned_bytes"]
            print(
                f"{name:22} measured {measured / GIB:6.2f} GiB, planned {planned / GIB:6.2f} GiB, "
                f"ratio {measured / planned:.2f}\n  {row['device']}\n  {row['host']}",
                flush=True,
            )
    if args.output == "json":
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
