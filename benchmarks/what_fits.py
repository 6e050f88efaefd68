"""Writes the tables of docs/fits.md: which model fits which machine, and how fast it is predicted.

Nothing is measured: the planner says it, with a few even partitions for each case, so the real plan
may be faster. Energy is an upper bound: every device at its board's power, and the host, all the
time.

    python benchmarks/what_fits.py --write docs/fits.md
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hydra import compose, initialize_config_dir

from roundpipe_lightning.cli.job import Job, MetaModel
from roundpipe_lightning.errors import RoundPipeError
from roundpipe_lightning.planning.model.hardware import config_folder
from roundpipe_lightning.planning.search.fit import fit_training
from roundpipe_lightning.planning.search.partition import QUICK

_GIB = 2**30
_SEQUENCES, _SEQ_LEN = 32, 2048
_HOST_WATTS = 300.0  # assumed: processors, memory, fans

METHODS = {"full": "peft=none", "LoRA": "peft=lora", "QLoRA": "peft=qlora"}
MODELS = ("qwen3_4b", "llama3_1_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_a22b")


@dataclass(frozen=True)
class Machine:
    """A machine to plan for, and the power that a board may take by its data sheet."""

    hardware: str
    devices: int
    host_gib: int
    board_watts: float


MACHINES = {
    "One RTX 4090, 128 GiB of host memory": Machine("rtx4090", 1, 128, 450),
    "Two RTX 3090, 256 GiB of host memory": Machine("rtx3090", 2, 256, 350),
    "Four RTX 4090, 512 GiB of host memory": Machine("rtx4090", 4, 512, 450),
    "Eight RTX 4090, 1 TiB of host memory": Machine("rtx4090", 8, 1024, 450),
    "One H100 SXM, 1 TiB of host memory": Machine("h100", 1, 1024, 700),
}
_HEADER = "| model | method | tokens/s | hours per million | kWh per million | host memory |"


def row(model: str, method: str, machine: Machine, models: dict[str, MetaModel]) -> str:
    """The line of a table for one training."""
    overrides = [
        f"model={model}",
        METHODS[method],
        "model.attention=flex_attention",  # a fused kernel, which gpt-oss has not by default
        f"hardware={machine.hardware}",
        f"hardware.devices={machine.devices}",
        f"hardware.host_memory={machine.host_gib}GiB",
        f"data.seq_len={_SEQ_LEN}",
        f"data.batch_size={_SEQUENCES}",
        "trainer.strategy.microbatching=step",
        "paths.output_dir=unused",
    ]
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        job = Job(compose("train", overrides=overrides), models=models)
    counts = [_SEQUENCES // size for size in (2, 1) if _SEQUENCES // size >= job.num_workers]
    answer = fit_training(*(replace(job.training(count), effort=QUICK) for count in counts))
    needed = f"{answer.memory.host.total_bytes / _GIB:,.0f} GiB"
    if not answer.fits or answer.prediction is None:
        short = "host" if answer.memory.host.total_bytes > machine.host_gib * _GIB else "device"
        return f"| `{model}` | {method} | does not fit ({short} memory) | | | {needed} |"
    speed = answer.job.step_tokens / answer.prediction.step_seconds
    hours = 1e6 / speed / 3600
    watts = _HOST_WATTS + machine.devices * machine.board_watts
    energy = watts * hours / 1000
    return f"| `{model}` | {method} | {speed:,.0f} | {hours:.3f} | {energy:.2f} | {needed} |"


def tables() -> Iterator[str]:
    models: dict[str, MetaModel] = {}
    for title, machine in MACHINES.items():
        yield f"### {title}\n"
        yield f"{_HEADER}\n|---|---|---|---|---|---|"
        for model in MODELS:
            for method in METHODS:
                with suppress(RoundPipeError):  # its plan cannot be made without values
                    yield row(model, method, machine, models)
        yield ""


def main() -> None:
    """Print the tables, or put them between the marks of a page."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--write", type=Path, help="page whose tables are replaced")
    page = parser.parse_args().write
    text = "\n".join(tables())
    if page is None:
        sys.stdout.write(text + "\n")
        return
    marks = r"(<!-- tables -->\n).*(<!-- end of tables -->)"
    written = re.sub(marks, rf"\1\n{text}\n\2", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    page.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
