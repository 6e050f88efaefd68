"""The systems that `benchmarks/train_throughput.py` compares train the same thing."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.throughput_systems import Ours, Resident, System, Task, serve

TASK = Task(
    model="qwen3_1_7b",
    num_blocks=2,
    width=32,
    precision="32-true",
    seq_len=16,
    num_microbatches=2,
    device="cpu",
)


def losses(system: System, *, steps: int) -> list[float]:
    try:
        return [system.run(1)["loss"] for _ in range(steps)]
    finally:
        system.close()


def test_ours_and_plain_pytorch_have_the_same_losses() -> None:
    plain = losses(Resident(TASK, checkpointed=True), steps=3)
    assert losses(Ours(TASK), steps=3) == pytest.approx(plain, rel=1e-5)
    assert plain[0] != plain[1]


def test_a_task_keeps_width_and_cuts_depth() -> None:
    whole, cut = Task(model="qwen3_32b"), Task(model="qwen3_32b", num_blocks=2)
    assert cut.config()["num_hidden_layers"] == 2
    assert cut.config()["hidden_size"] == whole.config()["hidden_size"] == 5120
    assert cut.tokens == 8 * 2048


class Pipe:
    """The end of a pipe that a system's process has."""

    def __init__(self, *asked: int | None) -> None:
        self.asked = list(asked)
        self.sent: list[dict[str, Any]] = []

    def recv(self) -> int | None:
        return self.asked.pop(0)

    def send(self, answer: dict[str, Any]) -> None:
        self.sent.append(answer)


def test_a_library_that_is_not_installed_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "roundpipe", None)
    pipe = Pipe(1, None)
    serve(pipe, "roundpipe", TASK)
    assert "not installed" in pipe.sent[0]["error"]


def test_a_memory_cap_without_a_gpu_is_refused() -> None:
    pipe = Pipe(1, None)
    serve(pipe, "plain", Task(model="qwen3_1_7b", device="cpu", memory_cap_gib=24))
    assert "--memory-cap-gib needs a CUDA device" in pipe.sent[0]["error"]
