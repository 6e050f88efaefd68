r"""Everything that is to be measured on a GPU, by one command, what matters most first.

    python benchmarks/gpu_session.py --out results                  # all of it
    python benchmarks/gpu_session.py --list
    python benchmarks/gpu_session.py --out results --only longest_1_7b blocks_32b_2
    python benchmarks/gpu_session.py --out results --first 4 --total-seconds 580

Every job has a time limit, of 9 minutes at most, after which it and its processes are ended; what
it had said until then is kept. `results/results.jsonl` has one line per job: name, command, return
code, seconds, and the answer, or what was measured before the end. `results/log.txt` has all that
was said. Jobs that have a line there already are left out, so the same command goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parent.parent
THROUGHPUT = ("benchmarks/train_throughput.py", "--output", "json")
CARD = ("--memory-cap-gib", "24")
HALF = ("--upload-dtype", "bf16")
_KEPT_LINES = 40  # of what a job said before it was ended


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command and its time.

    Attributes:
        name: For messages and `--only`.
        arguments: Of this Python.
        limit_seconds: After which it is ended.
    """

    name: str
    arguments: tuple[str, ...]
    limit_seconds: float = 540.0

    @property
    def command(self) -> str:
        """The command as a person would type it."""
        return " ".join(("python", *self.arguments))


def _throughput(name: str, *arguments: str, limit_seconds: float = 540.0) -> Job:
    return Job(name=name, arguments=(*THROUGHPUT, *arguments), limit_seconds=limit_seconds)


def _depth(model: str, blocks: int, *arguments: str) -> Job:
    """A model of full width and a few of its blocks, on a card of 24 GB."""
    name = f"blocks_{model.split('_')[1]}_{blocks}"
    return _throughput(
        name,
        *("--system", "ours", "--model", model, "--num-blocks", str(blocks)),
        *(*CARD, "--turns", "1", "--steps", "2", *arguments),
    )


def _long(name: str, tokens: int, blocks: int) -> Job:
    job = _depth(
        "qwen3_235b_a22b",
        blocks,
        *("--train", "lora", "--precision", "bf16-true"),
        *("--seq-len", str(tokens), "--microbatches", "1"),
    )
    return Job(name=f"{job.name}_{name}", arguments=job.arguments)


SMALL = ("--model", "qwen3_1_7b", "--seq-len", "2048")
LORA_8B = ("--model", "llama3_1_8b", "--train", "lora", "--precision", "bf16-true")
TO_CAP = (*CARD, "--capped", "ours", "roundpipe")

JOBS: tuple[Job, ...] = (
    Job(  # what is wrong shows here first; ten minutes leave time for two of the next ones
        name="tests",
        arguments=(
            *("-m", "pytest", "tests/gpu", "-q", "--no-header", "--maxfail", "5"),
            *("-W", "default"),  # what other versions of libraries warn of there is no failure
            *("--session-timeout", "180"),  # says what has failed, as the limit below does not
        ),
        limit_seconds=240.0,
    ),
    _throughput(
        "full_1_7b_64k",
        *("--system", "ours", "checkpointed", *SMALL, "--microbatches", "32", *HALF),
    ),
    _throughput(
        "full_1_7b_256k",
        *("--system", "ours", "checkpointed", *SMALL, "--microbatches", "128", *HALF),
        *("--turns", "3", "--steps", "1"),
    ),
    _throughput(
        "lora_8b_capped",
        *("--system", "ours", "checkpointed", *LORA_8B, "--seq-len", "2048"),
        *("--microbatches", "16", *TO_CAP, "--turns", "3"),
    ),
    _throughput(
        "full_4b_capped",
        *("--system", "ours", "checkpointed", "--model", "qwen3_4b", "--seq-len", "2048"),
        *("--microbatches", "32", *TO_CAP, *HALF, "--turns", "3", "--steps", "1"),
    ),
    _throughput(
        "longest_1_7b",
        *("--longest", "--system", "ours", "--model", "qwen3_1_7b", *CARD, *HALF),
        *("--least-units", "64", "--most-units", "256"),
    ),
    _throughput(
        "longest_8b",
        *("--longest", "--system", "ours", "--model", "llama3_1_8b", "--num-blocks", "4"),
        *(*CARD, *HALF, "--least-units", "48", "--most-units", "128"),
    ),
    *(
        _depth("qwen3_32b", n, *HALF, *("--seq-len", "16384", "--microbatches", "4"))
        for n in (2, 4, 8)
    ),
    *(_long("31k", 31744, n) for n in (2, 4)),
    *(_long("64k", 65536, n) for n in (2, 4)),
    _throughput(
        "published_1_7b_64k",
        *("--system", "ours", "roundpipe", *SMALL, "--microbatches", "32", *HALF),
        *("--turns", "3"),
    ),
    _throughput(
        "published_1_7b_256k",
        *("--system", "ours", "roundpipe", *SMALL, "--microbatches", "128", *HALF),
        *("--turns", "2", "--steps", "1"),
    ),
    _throughput(
        "fsdp_1_7b_64k",
        *("--system", "ours", "fsdp", *SMALL, "--microbatches", "32", *HALF),
        *("--turns", "2", "--steps", "1"),
    ),
    _throughput(
        "published_8b_capped",
        *("--system", "ours", "roundpipe", *LORA_8B, "--seq-len", "2048"),
        *("--microbatches", "16", *CARD, "--turns", "2"),
    ),
    _throughput(
        "published_4b_capped",
        *("--system", "ours", "roundpipe", "--model", "qwen3_4b", "--seq-len", "2048"),
        *("--microbatches", "32", *CARD, *HALF, "--turns", "2", "--steps", "1"),
    ),
    _throughput(
        "async_1_7b_64k",
        *("--system", "ours", "checkpointed", *SMALL, "--microbatches", "32", *HALF),
        *("--update", "async", "--turns", "3"),
    ),
)


def run(job: Job, *, log: TextIO, limit_seconds: float) -> dict[str, Any]:
    """Run a job and return its line of the results.

    Args:
        job: What to run.
        log: Takes all that it says.
        limit_seconds: After which it and its processes are ended.
    """
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *job.arguments],
            cwd=ROOT,
            stdout=out,
            stderr=said,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": _path()},
            start_new_session=True,
        )
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            _end(process)
        out.seek(0)
        said.seek(0)
        answer, words = out.read(), said.read()
    log.write(f"\n##### {job.name}: {job.command}\n{answer}\n{words}")
    log.flush()
    return {
        "job": job.name,
        "command": job.command,
        "code": code,
        "seconds": round(time.monotonic() - began, 1),
        **_found(answer, words),
    }


def _path() -> str:
    """Import path of the package: this checkout first."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and those that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _found(answer: str, words: str) -> dict[str, Any]:
    """The answer if there is one; else what was measured until then, and the last words."""
    try:
        return {"answer": json.loads(answer)}
    except json.JSONDecodeError:
        lines = words.splitlines()
        measured = []
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):
                measured.append(json.loads(line))
        last = [*answer.splitlines(), *lines][-_KEPT_LINES:]
        return {"measured": measured, "last_words": last}


def _chosen(only: Sequence[str], *, first: int | None, done: set[str]) -> list[Job]:
    unknown = set(only) - {job.name for job in JOBS}
    if unknown:
        raise SystemExit(f"There are no jobs {sorted(unknown)}; see --list.")
    jobs = [job for job in JOBS if (not only or job.name in only) and job.name not in done]
    return jobs[:first]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_results"), help="output folder")
    parser.add_argument("--only", nargs="+", default=[], help="names of jobs")
    parser.add_argument("--first", type=int, help="run so many jobs")
    parser.add_argument("--total-seconds", type=float, help="begin no job that may last longer")
    parser.add_argument("--list", action="store_true", help="print the commands and do nothing")
    parser.add_argument("--output", choices=["json"], default="json", help="of the results")
    return parser.parse_args()


def main() -> None:
    """Run the jobs."""
    given = _arguments()
    if given.list:
        for job in JOBS:
            print(f"{job.name:24} {job.limit_seconds:4.0f} s  {job.command}")
        return
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "results.jsonl"
    lines = results.read_text().splitlines() if results.exists() else []
    end = time.monotonic() + (given.total_seconds or float("inf"))
    with results.open("a") as rows, (given.out / "log.txt").open("a") as log:
        for job in _chosen(
            given.only, first=given.first, done={json.loads(x)["job"] for x in lines}
        ):
            left = end - time.monotonic()
            if left < 60.0:
                break
            row = run(job, log=log, limit_seconds=min(job.limit_seconds, left))
            rows.write(json.dumps(row) + "\n")
            rows.flush()
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
