"""Whether every causal language model survives loading and exporting, to the bit.

For each architecture that transformers can build, a tiny random model is saved by transformers and
loaded by us, and exported by us and loaded by transformers. Parameters and buffers are compared.

    python benchmarks/weights_roundtrip.py [--only qwen3 mixtral] [--output json]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from architectures import SIZES, _model, architectures
from transformers import AutoConfig
from transformers.utils import logging

from roundpipe_lightning.models.export import ExportOptions, export_pretrained
from roundpipe_lightning.models.load import load_pretrained
from roundpipe_lightning.models.source import ModelSource

_SHARD_BYTES = 200_000  # several files for most models


def different(first: Any, second: Any) -> list[str]:
    """Names of the parameters and buffers that are not the same."""
    tensors = [
        {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for model in (first, second)
    ]
    names = tensors[0].keys() ^ tensors[1].keys()
    shared = tensors[0].keys() & tensors[1].keys()
    return sorted(names | {n for n in shared if not torch.equal(tensors[0][n], tensors[1][n])})


def examine(name: str, folder: Path) -> dict[str, str]:
    """Result for an architecture: `load` and `export` are `identical` or say why not."""
    try:
        model: Any = _model(name, SIZES, "causal", fill_unset=False)
        model.save_pretrained(folder / "saved", max_shard_size=_SHARD_BYTES)
        wanted = type(model).from_pretrained(folder / "saved", dtype=torch.float32)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises
        return {"skipped": f"{type(error).__name__}: {error}"[:200]}
    report = {}
    try:
        saved = str(folder / "saved")
        source = ModelSource(architecture={}, hub_name=saved, weights="pretrained", dtype="float32")
        loaded = load_pretrained(source, config=AutoConfig.from_pretrained(saved))
        report["load"] = ", ".join(different(wanted, loaded)) or "identical"
    except Exception as error:  # noqa: BLE001 - reported
        report["load"] = f"{type(error).__name__}: {error}"[:200]
    try:
        exported = folder / "exported"
        export_pretrained(model, exported, options=ExportOptions(max_shard_bytes=_SHARD_BYTES))
        read = type(model).from_pretrained(exported, dtype=torch.float32)
        report["export"] = ", ".join(different(wanted, read)) or "identical"
    except Exception as error:  # noqa: BLE001 - reported
        report["export"] = f"{type(error).__name__}: {error}"[:200]
    return report


def main() -> None:
    """Examine the architectures and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of architectures; all by default")
    parser.add_argument("--output", choices=["text", "json"], default="text")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    reports: dict[str, dict[str, str]] = {}
    for name in options.only or architectures("causal"):
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            reports[name] = examine(name, Path(folder))
        if options.output == "text":
            print(name, reports[name], file=sys.stderr)
    examined = {name: report for name, report in reports.items() if "skipped" not in report}
    result: dict[str, Any] = {
        "examined": len(examined),
        "skipped": len(reports) - len(examined),
        **{
            part: sum(report[part] == "identical" for report in examined.values())
            for part in ("load", "export")
        },
        "failed": {
            name: report
            for name, report in examined.items()
            if set(report.values()) != {"identical"}
        },
    }
    if options.output == "json":
        print(json.dumps(result))
        return
    print(
        f"{result['examined']} architectures: {result['load']} loaded and {result['export']} "
        f"exported identically, {result['skipped']} that transformers cannot build or save"
    )


if __name__ == "__main__":
    main()
