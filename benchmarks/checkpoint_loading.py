"""Measures the host memory that loading and exporting a checkpoint take.

A sharded bfloat16 checkpoint is written to a temporary folder; every case then runs in a process of
its own, whose high-water mark of resident memory is compared with what it had after its imports.

    python benchmarks/checkpoint_loading.py [--megabytes 1000] [--shard-megabytes 100]
        [--case same_dtype ...] [--output json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]

CASES = {
    "same_dtype": {"dtype": "bfloat16"},
    "to_float32": {"dtype": "float32"},
    "mapped": {"frozen_weights": "mmap"},
    "quantized_8": {"frozen_bits": 8},
    "quantized_4": {"frozen_bits": 4},
    "transformers_to_float32": {"dtype": "float32"},
}
"""Settings of `ModelSource`; the last is transformers' own loading, for comparison."""

EXPORTS = {
    "export": {"dtype": "auto"},
    "export_to_bfloat16": {"dtype": "bf16"},
    "transformers_save_pretrained": {},
}
"""Exports of a float32 model in the host store; the last is transformers' own, for comparison."""

_MIB = 2**20


def architecture(num_megabytes: int) -> dict[str, Any]:
    """A Qwen3 of 16 blocks whose bfloat16 weights take about so many MB (10^6 bytes)."""
    width = max(64, 64 * round((num_megabytes * 1e6 / 2 / (16 * 16)) ** 0.5 / 64))
    return {
        "model_type": "qwen3",
        "vocab_size": 1024,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 16,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }


def write_checkpoint(folder: Path, *, num_megabytes: int, shard_megabytes: int) -> None:
    """Write a model of random weights, as `save_pretrained` does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**architecture(num_megabytes))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    model.save_pretrained(folder, max_shard_size=f"{shard_megabytes}MB")


def resident_bytes(field: str) -> int:
    """A figure of this process from the kernel, in bytes."""
    with Path("/proc/self/status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{field}:"))


def measure(case: str, folder: Path) -> dict[str, Any]:
    """Load in this process, open the host store as the engine does, and report."""
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    from roundpipe_lightning.engine.store.host_store import HostStore
    from roundpipe_lightning.models.blocks import find_stacks
    from roundpipe_lightning.modules import ModelSource

    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before, began = resident_bytes("VmRSS"), time.perf_counter()
    if case.startswith("transformers"):
        model = AutoModelForCausalLM.from_pretrained(folder, **CASES[case])
    else:
        source = ModelSource(
            architecture={}, hub_name=str(folder), weights="pretrained", **CASES[case]
        )
        model = source.build()
    loaded_seconds = time.perf_counter() - began
    loaded_peak = resident_bytes("VmHWM") - before
    module = nn.ModuleDict({"model": model})
    stack = find_stacks(module, None)[0]
    assert stack is not None
    store = HostStore(module, stack.blocks)
    tensors = {p.data_ptr(): p.nbytes for p in model.parameters()}
    total = sum(tensors.values())
    store.close()
    return {
        "case": case,
        "model_bytes": total,
        "largest_shard_bytes": max(f.stat().st_size for f in folder.glob("*.safetensors")),
        "peak_bytes": resident_bytes("VmHWM") - before,
        "peak_bytes_after_loading": loaded_peak,
        "anonymous_bytes": resident_bytes("RssAnon"),
        "max_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "load_seconds": round(loaded_seconds, 3),
    }


def measure_export(case: str, folder: Path) -> dict[str, Any]:
    """Load in this process, open the host store, export, and report what exporting took."""
    import peft  # noqa: F401 - imported before the measurement begins, as transformers is
    import torch

    from roundpipe_lightning.engine.store.host_store import HostStore
    from roundpipe_lightning.models.export import ExportOptions, export_pretrained
    from roundpipe_lightning.modules import ModelSource

    torch.set_num_threads(1)
    model = ModelSource(
        architecture={}, hub_name=str(folder), weights="pretrained", dtype="float32"
    ).build()
    HostStore(model, list(model.model.layers))
    shard_bytes = max(f.stat().st_size for f in folder.glob("*.safetensors"))
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_bytes("VmRSS")
    output = folder / "exported"
    if case.startswith("transformers"):
        model.save_pretrained(output, max_shard_size=shard_bytes)
    else:
        options = ExportOptions(max_shard_bytes=shard_bytes, **EXPORTS[case])
        export_pretrained(model, output, options=options)
    shutil.rmtree(output)
    return {
        "case": case,
        "model_bytes": sum(p.nbytes for p in model.parameters()),
        "largest_shard_bytes": shard_bytes,
        "peak_bytes": resident_bytes("VmHWM") - before,
    }


def run_case(case: str, folder: Path) -> dict[str, Any]:
    """Measure in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", case, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        check=True,
        capture_output=True,
        text=True,
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    limit = report["largest_shard_bytes"] + (report["model_bytes"] if case in CASES else 0)
    report["peak_over_store"] = round(report["peak_bytes"] / report["model_bytes"], 4)
    report["within_limit"] = report["peak_bytes"] <= 1.05 * limit
    return report


def main() -> None:
    """Write the checkpoint, run the cases, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--shard-megabytes", type=int, default=100)
    parser.add_argument("--case", nargs="+", choices=[*CASES, *EXPORTS])
    parser.add_argument("--output", choices=["text", "json"], default="text")
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        case, folder = options.measure
        run = measure if case in CASES else measure_export
        print(json.dumps(run(case, Path(folder))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(
            folder,
            num_megabytes=options.megabytes,
            shard_megabytes=options.shard_megabytes,
        )
        reports = [run_case(case, folder) for case in options.case or [*CASES, *EXPORTS]]
    if options.output == "json":
        print(json.dumps({"cases": reports}))
        return
    for report in reports:
        print(
            f"{report['case']:24} model {report['model_bytes'] / _MIB:7.0f} MiB, shard "
            f"{report['largest_shard_bytes'] / _MIB:5.0f} MiB, peak "
            f"{report['peak_bytes'] / _MIB:7.0f} MiB ({report['peak_over_store']:.2f} of the store"
            f"), {report.get('load_seconds', 0):.1f} s"
        )


if __name__ == "__main__":
    main()
