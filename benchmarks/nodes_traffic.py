"""Measures what several hosts send, how long that takes, and their memory.

    python benchmarks/nodes_traffic.py wire [--hosts 2] [--blocks 12] [--megabytes 4]
    python benchmarks/nodes_traffic.py overlap [--share 0.8] --blocks 32 --megabytes 1
    python benchmarks/nodes_traffic.py memory [--hosts 2] [--mode clip] --blocks 30 --megabytes 12

`wire` counts the bytes that every host's interface sends in a step, against c P (n-1)/n. `overlap`
shapes the links so that the bytes of a step take `--share` of it at what gloo alone reaches over
them, and compares its time with that over unshaped ones. `memory` compares the memory of twice
as many blocks with that of `--blocks`, in every mode: the most that a host had in a step, per
parameter, against what the plans say. Give it 30 blocks: with fewer, not all that may be on its way
at once is, and counts as if it grew with the model.

As root the hosts are network namespaces, joined by a bridge; else they share the loopback, which
cannot be shaped. Devices are emulated: a block computes for `--seconds` forward, and three times as
long backward (its recompute included). Times and memory are those of the steps after the first
three: in these every host still has all parameters.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from nodes import networks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.engine.device.host_memory import keep_pieces_apart
from tests.kit.hosts import PlannedAsGpu

WARM_UP = 3
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 1.0},
    "accumulate": {"accumulate": 2},
    "rounds": {"rounds": 2},
    "async": {"update": "async"},
    "fp32": {"precision": "32-true"},
}
PORT = 29511


class TimedBlock(nn.Module):
    """A matrix, and time to compute with it."""

    def __init__(self, elements: int, *, server: EmulatedServer, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(elements // 64, 64))
        self.server, self.seconds = server, seconds

    def forward(self, x: Tensor) -> Tensor:
        x = self.server.work(x, forward_seconds=self.seconds, backward_seconds=2 * self.seconds)
        # A product, which autocast rounds: for other operations float32 values would be sent, too.
        return x + functional.linear(x, self.weight[:64])


class TimedModule(LightningModule):
    """Blocks, one after the other."""

    def __init__(self, given: argparse.Namespace, server: EmulatedServer) -> None:
        super().__init__()
        elements = given.megabytes * 2**20 // 4
        self.layers = nn.ModuleList(
            TimedBlock(elements, server=server, seconds=given.seconds) for _ in range(given.blocks)
        )
        self.head = nn.Linear(64, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        del batch_idx
        x = batch
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).float().pow(2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Marks(Callback):
    """Notes time and bytes sent where batches begin, and the most memory since the last one."""

    def __init__(self, interface: str, memory: PeakMemory) -> None:
        self._sent = Path(f"/sys/class/net/{interface}/statistics/tx_bytes")
        self._memory = memory
        self.marks: list[tuple[float, int, int]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.marks.append((time.perf_counter(), int(self._sent.read_text()), self._memory.take()))

    def on_train_end(self, *_: Any) -> None:
        self.on_train_batch_start()


def _resident_bytes() -> int:
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[1])


class PeakMemory:
    """Looks at this process's memory all the time."""

    def __init__(self) -> None:
        self._most = _resident_bytes()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self._most = max(self._most, _resident_bytes())
            time.sleep(0.002)

    def take(self) -> int:
        """Return the most bytes since this was last called."""
        most, self._most = max(self._most, _resident_bytes()), 0
        return most


def train(given: argparse.Namespace) -> dict[str, Any]:
    """Train as one host; return what was seen of it."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    keep_pieces_apart(2**22)  # emulated devices' memory is the heap's, which would keep some
    memory = PeakMemory()
    marks = Marks(given.interface, memory)
    with EmulatedServer(1, tags=False) as server:
        module = TimedModule(given, server)
        trainer = Trainer(
            strategy=PlannedAsGpu(
                devices=server.devices,
                num_microbatches=given.rounds,
                microbatching="blocks" if given.rounds == 1 else "step",
                update=given.update,
                upload_dtype=None if given.precision == "32-true" else "bf16",
                gradient_dtype=given.gradient_dtype,
                timeout_seconds=120,
                hardware="rtx4090",
                replan=False,
                hints={
                    "forward": [1] * (given.blocks - 1),
                    "backward": [1] * given.blocks,
                    **({"round_size": 1} if given.rounds > 1 else {}),
                },
            ),
            precision=given.precision,
            accumulate_grad_batches=given.accumulate,
            gradient_clip_val=given.clip,
            num_nodes=given.hosts,
            devices=1,
            max_steps=given.steps,
            callbacks=[marks],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        plans: list[Any] = []
        trainer.strategy.plan_listeners.append(lambda event: plans.append(event.description))
        num_batches = given.accumulate * (given.steps + 1)
        data: Any = torch.randn(4 * given.hosts * num_batches, 64)
        trainer.fit(module, DataLoader(data, batch_size=4))
    steady = marks.marks[WARM_UP * given.accumulate : -1]
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "step_seconds": statistics.median(after[0] - at[0] for at, after in pairwise(steady)),
        "bytes_per_step": (steady[-1][1] - steady[0][1]) / (len(steady) - 1),
        "planned_bytes": plans[-1].memory.host.total_bytes,
        "plan": str(plans[-1].memory.host),
        "resident_bytes": max(mark[2] for mark in steady),
    }


# The network -------------------------------------------------------------------------------------


def send_only(given: argparse.Namespace) -> dict[str, Any]:
    """Send as `train` does and do nothing else, both ways at once; return what is reached."""
    rank, num, chunks = int(os.environ["NODE_RANK"]), given.hosts, 24
    dist.init_process_group("gloo", rank=rank, world_size=num)
    counts = [0 if host == rank else 2**18 for host in range(num)]
    begun: list[Any] = []
    dist.barrier()
    start = time.perf_counter()
    for _ in range(chunks):
        if len(begun) == 4:
            begun.pop(0).wait()
        sent, taken = torch.ones(sum(counts)), torch.empty(sum(counts))
        begun.append(dist.all_to_all_single(taken, sent, counts, counts, async_op=True))
    for work in begun:
        work.wait()
    dist.barrier()
    seconds = time.perf_counter() - start
    return {"bits_per_second": 32 * chunks * sum(counts) / seconds}


def shape(host: int, bits_per_second: float) -> None:
    """Let a host send so much."""
    rate, burst = f"{int(bits_per_second)}bit", str(max(32_768, int(bits_per_second / 8 / 250)))
    where = f"tc -n rp{host} qdisc replace dev eth0 root"
    command = f"{where} tbf rate {rate} burst {burst} latency 40ms"
    subprocess.run(command.split(), check=True)
    stays_fast = "sysctl -qw net.ipv4.tcp_slow_start_after_idle=0"
    subprocess.run(["ip", "netns", "exec", f"rp{host}", *stays_fast.split()], check=True)


def run_hosts(
    given: argparse.Namespace, *, is_apart: bool, part: str = "host"
) -> list[dict[str, Any]]:
    """Train once on all hosts, or run another part; return what each has seen."""
    started = []
    for rank in range(given.hosts):
        interface = "eth0" if is_apart else "lo"
        space = ["ip", "netns", "exec", f"rp{rank}"] if is_apart else []
        environment = {
            **os.environ,
            "MASTER_ADDR": "10.77.0.1" if is_apart else "127.0.0.1",
            "MASTER_PORT": str(PORT),
            "NODE_RANK": str(rank),
            "GLOO_SOCKET_IFNAME": interface,
            "OMP_NUM_THREADS": "1",
        }
        options = [f"--{name}={value}" for name, value in vars(given).items() if name in _PASSED]
        command = [*space, sys.executable, __file__, part, "--interface", interface, *options]
        started.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        )
    found = []
    for process in started:
        said, _ = process.communicate(timeout=540)
        if process.returncode:
            raise SystemExit("A host has failed; its output says why.")
        found.append(json.loads(said.splitlines()[-1]))
    return found


_ON_HOSTS = {"host": train, "send": send_only}
_PASSED = (
    *("hosts", "blocks", "megabytes", "seconds", "steps", "gradient_dtype"),
    *("accumulate", "clip", "precision", "rounds", "update"),
)


def measure_memory(given: argparse.Namespace, mode: str) -> dict[str, Any]:
    """Return bytes per parameter, measured on every host and planned."""
    sizes = []
    for blocks in (given.blocks, 2 * given.blocks):
        of_mode = argparse.Namespace(**{**vars(given), **MODES[mode], "blocks": blocks})
        sizes.append(run_hosts(of_mode, is_apart=False))

    def per_parameter(kind: str) -> list[float]:
        return [
            (more[kind] - less[kind]) / (more["parameters"] - less["parameters"])
            for less, more in zip(*sizes, strict=True)
        ]

    measured, planned = per_parameter("resident_bytes"), per_parameter("planned_bytes")[0]
    return {
        "planned": planned,
        "measured": measured,
        "over_plan": [each / planned for each in measured],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("wire", "overlap", "memory", *_ON_HOSTS))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--megabytes", type=int, default=4, help="of a block's parameters")
    parser.add_argument("--seconds", type=float, default=0.05, help="of a block's forward pass")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.8, help="of a step that the network needs")
    parser.add_argument("--gradient_dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--precision", choices=("bf16-mixed", "32-true"), default="bf16-mixed")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--update", choices=("exact", "async"), default="exact")
    parser.add_argument("--mode", choices=MODES, help="of `memory`: only this one")
    parser.add_argument("--interface", default="lo")
    given = parser.parse_args()
    if given.part in _ON_HOSTS:
        print(json.dumps(_ON_HOSTS[given.part](given)))
        return
    if given.part == "memory":
        modes = [given.mode] if given.mode else list(MODES)
        for mode in modes:
            if mode == "async" and given.hosts > 1:  # refused
                continue
            row = measure_memory(given, mode)
            print(mode, json.dumps(row), flush=True)
        return
    with networks(given.hosts) as links:
        is_apart = links == "cut"
        free = run_hosts(given, is_apart=is_apart)
        num, first = given.hosts, free[0]
        per_value = {"fp32": 6, "bf16": 4}[given.gradient_dtype]
        expected = per_value * first["parameters"] * (num - 1) / num
        sent = max(each["bytes_per_step"] for each in free) / (1 if is_apart else num)
        answer = {
            "step_seconds": first["step_seconds"],
            "bytes_per_step": sent,
            "bytes_over_formula": sent / expected,
        }
        if given.part == "overlap":
            if not is_apart:
                raise SystemExit("Links can be shaped as root only.")
            rate = 8 * sent / (given.share * first["step_seconds"])
            for host in range(num):
                shape(host, rate)
            reached = run_hosts(given, is_apart=True, part="send")[0]["bits_per_second"] / rate
            for host in range(num):
                shape(host, rate / reached)
            shaped = run_hosts(given, is_apart=True)[0]["step_seconds"]
            answer |= {
                "megabits_per_second": rate / reached / 1e6,
                "reached_by_gloo_alone": reached,
                "shaped_step_seconds": shaped,
                "shaped_over_free": shaped / first["step_seconds"],
            }
    print(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
