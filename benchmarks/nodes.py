"""Trainings on several hosts, which are processes of this machine, with faults and against one.

    python benchmarks/nodes.py kills --trials 60
    python benchmarks/nodes.py equal

As root every host is in a network namespace of its own, and a bridge connects them; else they share
the loopback, and no link can be cut. `kills` ends a random host at a random moment (kill -9,
SIGSTOP, a link that is down): all others have to end by themselves, with a `HostError` that names
it, and the training resumed with as many hosts has to end with the very bits of one that nothing
happened to. `equal` compares losses, gradients, parameters and moments with one host's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.cli.callbacks import LastCheckpoint
from roundpipe_lightning.errors import HostError
from tests.kit.hosts import StartedHost, raised, start_hosts
from tests.kit.training import QUIET, Regressor, make_trainer, regression_data

NUM_STEPS = 30
GLOBAL_BATCH = 12
LIMIT_SECONDS = 10.0
Links: TypeAlias = Literal["cut", "none"]
_FAULTS = ("kill", "stop", "link")
_ROUNDING = 1e-5
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a part; the exit status says whether all was as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=("kills", "equal"))
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    part = kills(given.trials, given.seed) if given.part == "kills" else equal()
    print(json.dumps(part, indent=2))
    return 0 if not part["wrong"] else 1


# Faults ------------------------------------------------------------------------------------------


def kills(trials: int, seed: int) -> dict[str, Any]:
    """Let hosts be lost, and the training be resumed."""
    chosen, found, wrong = random.Random(seed), [], []
    with networks(3) as links, tempfile.TemporaryDirectory() as name:
        whole = {num: parameters(run(num, Path(name) / f"{num}", links)) for num in (2, 3)}
        kinds = _FAULTS if links == "cut" else _FAULTS[:2]
        for trial in range(trials):
            num, kind = 2 + trial % 2, kinds[trial // 2 % len(kinds)]
            one = lose_one(num, kind, Path(name) / f"trial{trial}", links, chosen)
            found.append(one)
            try:
                resumed = parameters(run(num, Path(name) / f"trial{trial}", links))
                if not all(map(torch.equal, resumed, whole[num])):
                    one["wrong"] = "the resumed training ended with other bits"
            except HostError as error:
                one["wrong"] = f"the training could not be resumed: {error}"
            if "wrong" in one:
                wrong.append(one)
            shutil.rmtree(Path(name) / f"trial{trial}")
            print(json.dumps(one), file=sys.stderr, flush=True)
    seconds = {
        kind: [s for one in found if one["kind"] == kind for s in one["seconds"]] for kind in kinds
    }
    return {
        "trials": trials,
        "links": links,
        "seconds until survivors ended": {
            kind: {"median": round(statistics.median(some), 2), "most": round(max(some), 2)}
            for kind, some in seconds.items()
        },
        "steps at which": sorted(one["step"] for one in found),
        "wrong": wrong,
    }


def lose_one(
    num: int, kind: str, folder: Path, links: Links, chosen: random.Random
) -> dict[str, Any]:
    """Lose a host at a random moment; return how the others ended."""
    lost, step = chosen.randrange(num), chosen.randrange(1, NUM_STEPS - 4)
    hosts = start(num, folder, links)
    place = folder / f"step{lost}"
    while not (place.exists() and int(place.read_text() or 0) >= step):
        if not hosts[lost].process.is_alive():
            return {"kind": kind, "step": step, "seconds": [], "wrong": hosts[lost].result()}
        time.sleep(0.002)
    time.sleep(chosen.uniform(0, 0.1))
    begun = time.monotonic()
    if kind == "link":
        _ip(f"link set rp{lost} down")
    else:
        os.kill(hosts[lost].process.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    wrong, seconds = [], []
    for rank, host in enumerate(hosts):
        if rank == lost and kind != "link":
            continue
        result = host.result()
        seconds.append(round(time.monotonic() - begun, 2))
        names = str(lost) if rank != lost else "\\d"  # who is cut off cannot know who is
        if not isinstance(result, HostError) or not re.search(rf"lost host {names} ", str(result)):
            wrong.append(f"host {rank}: {result!r}"[:300])
        if seconds[-1] > LIMIT_SECONDS:
            wrong.append(f"host {rank} ended after {seconds[-1]} s")
    if kind == "link":
        _ip(f"link set rp{lost} up")
    else:
        hosts[lost].process.kill()
        hosts[lost].process.join()
    one: dict[str, Any] = {"kind": kind, "num": num, "lost": lost, "step": step, "seconds": seconds}
    return {**one, "wrong": wrong} if wrong else one


# Trainings ---------------------------------------------------------------------------------------


class Place(Callback):
    """Writes down which step a host is at."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._path.write_text(str(trainer.global_step))


def train(rank: int, num: int, folder: Path, links: Links, steps: int) -> list[Tensor]:
    """Train on one of the hosts, from the last checkpoint if there is one."""
    if links == "cut":
        with Path(f"/var/run/netns/rp{rank}").open() as namespace:
            ctypes.CDLL(None).setns(namespace.fileno(), _NEW_NETWORK)
    for message in QUIET:
        warnings.filterwarnings("ignore", message.removeprefix("ignore:"))
    torch.manual_seed(3)
    torch.set_num_threads(1)
    last = folder / "last.ckpt"
    module = Regressor("adamw", num_blocks=3, dropout=0.1)
    trainer = make_trainer(
        folder / f"host{rank}",
        strategy=RoundPipeStrategy(
            num_microbatches=GLOBAL_BATCH // num, microbatching="step", timeout_seconds=60
        ),
        num_nodes=num,
        max_steps=steps,
        max_epochs=-1,
        enable_checkpointing=True,
        callbacks=[
            LastCheckpoint(str(folder), every_n_steps=2),
            Place(folder / f"step{rank}"),
            Seen(folder / f"losses{rank}"),
        ],
    )
    data = regression_data(60, batch_size=GLOBAL_BATCH // num, shuffle=True)
    trainer.fit(module, data, ckpt_path=last if last.exists() else None)
    return [p.detach().clone() for p in module.parameters()]


def start(num: int, folder: Path, links: Links, steps: int = NUM_STEPS) -> list[StartedHost]:
    folder.mkdir(parents=True, exist_ok=True)
    main = "10.77.0.1" if links == "cut" else "127.0.0.1"
    card = {"GLOO_SOCKET_IFNAME": "eth0"} if links == "cut" else {}
    environments = [{"MASTER_ADDR": main, "NODE_RANK": str(rank), **card} for rank in range(num)]
    return start_hosts(num, train, num, folder, links, steps, environments=environments)


def run(num: int, folder: Path, links: Links, steps: int = NUM_STEPS) -> list[Any]:
    return [host.result() for host in start(num, folder, links, steps)]


def parameters(results: list[Any]) -> list[Tensor]:
    """Return those of host 0, which all have."""
    for result in raised(results):
        if not all(map(torch.equal, result, results[0])):
            raise ValueError("Hosts ended with different parameters.")
    first: list[Tensor] = results[0]
    return first


# Networks ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def networks(num: int) -> Iterator[Links]:
    """Give every host a namespace, if this is root on Linux; yield whether links can be cut."""
    try:
        _ip("link add rpbridge type bridge")
    except (OSError, subprocess.CalledProcessError):
        yield "none"
        return
    try:
        _ip("link set rpbridge up")
        for host in range(num):
            _ip(f"netns add rp{host}")
            _ip(f"link add rp{host} type veth peer name eth0 netns rp{host}")
            _ip(f"link set rp{host} master rpbridge up")
            _ip(f"-n rp{host} link set lo up")
            _ip(f"-n rp{host} addr add 10.77.0.{host + 1}/24 dev eth0")
            _ip(f"-n rp{host} link set eth0 up")
        yield "cut"
    finally:
        for host in range(num):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns del rp{host}")
        _ip("link del rpbridge")


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


# Against one host --------------------------------------------------------------------------------


class Seen(Callback):
    """Keeps the loss of every step in a file."""

    def __init__(self, path: Path) -> None:
        self._path, self._losses = path, list[float]()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._losses.append(float(trainer.callback_metrics["loss_step"]))
        self._path.write_text(json.dumps(self._losses))


def equal() -> dict[str, Any]:
    """Compare 2, 3 and 4 hosts with one, in float32: the largest differences."""
    with tempfile.TemporaryDirectory() as name:
        seen = {num: _seen(num, Path(name)) for num in (1, 2, 3, 4)}
    differences = {
        num: {
            what: max(float((a - b).abs().max()) for a, b in zip(some, seen[1][what], strict=True))
            for what, some in seen[num].items()
        }
        for num in (2, 3, 4)
    }
    wrong = [num for num, of in differences.items() if max(of.values()) > _ROUNDING]
    return {"differences by hosts": differences, "wrong": wrong}


def _seen(num: int, folder: Path) -> dict[str, list[Tensor]]:
    first = _moments(num, folder / f"{num} first", steps=1)
    found = _moments(num, folder / f"{num}", steps=NUM_STEPS)
    # AdamW's first average is a tenth of the gradient
    return {**found, "gradients": [each * 10 for each in first["moments"][::2]]}


def _moments(num: int, folder: Path, *, steps: int) -> dict[str, list[Tensor]]:
    trained = parameters(run(num, folder, links="none", steps=steps))
    saved = torch.load(folder / "last.ckpt", weights_only=False)["optimizer_states"][0]["state"]
    moments = [state[key] for state in saved.values() for key in ("exp_avg", "exp_avg_sq")]
    losses = [torch.tensor(json.loads((folder / "losses0").read_text()))]
    return {"losses": losses, "parameters": trained, "moments": moments}


if __name__ == "__main__":
    sys.exit(main())
