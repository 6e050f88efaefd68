"""Random small programs of user code, against plain PyTorch.

Models differ in depth, skips, shared blocks, passes with other numbers of rows, values that user
code reads in the middle, code that writes in place, hooks, and what blocks return.
"""

from __future__ import annotations

import faulthandler
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.driver.kit import Comparison

WIDTH = 8


class Block(nn.Module):
    """A block of a random kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, hidden: Tensor, other: Tensor | None = None) -> Any:
        change = torch.tanh(self.inner(self.norm(hidden)))
        result = hidden + change
        if other is not None:
            result = result + 0.1 * other
        if self.kind == "keeps":
            self.kept = change * 2  # of the result it would get what hooks on that have changed
        if self.kind == "pair":
            return result, result.mean(-1, keepdim=True)
        if self.kind == "dict":
            return {"hidden": result, "name": "x"}
        if self.kind == "attention":
            weights = functional.softmax(result @ result.transpose(-1, -2) / WIDTH, dim=-1)
            return result + weights @ hidden
        if self.kind == "mean":
            return result - result.mean(0)  # mixes rows
        return result


class Program(nn.Module):
    """A model and the random choices of its forward pass."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        choices = random.Random(seed)
        kinds = ["plain", "plain", "keeps", "pair", "dict", "attention", "mean"]
        self.blocks = nn.ModuleList(
            [Block(choices.choice(kinds)) for _ in range(choices.randint(1, 6))]
        )
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)
        self.norm = nn.LayerNorm(WIDTH)
        if choices.random() < 0.3:
            block: Any = self.blocks[0]
            block.inner.weight = self.embed.weight
        self.seen: list[float] = []

    def add_hooks(self) -> Program:
        """Add hooks, which a copy would have to itself."""
        choices = random.Random(self.seed + 1)
        blocks: Any = self.blocks
        for block in blocks:
            if choices.random() < 0.2:
                block.register_forward_pre_hook(lambda _, args: (args[0] * 1.1, *args[1:]))
            if choices.random() < 0.1:
                block.inner.register_forward_hook(
                    lambda _, args, output: self.seen.append(output.detach().mean().item())
                )
            if choices.random() < 0.1:
                block.inner.weight.register_hook(lambda gradient: gradient * 2)
        return self

    def inputs(self, step: int) -> Tensor:
        choices = random.Random(self.seed + 2)
        generator = torch.Generator().manual_seed(step)
        rows, length = choices.choice([1, 2, 3, 5, 8, 9]), choices.choice([1, 3, 4])
        return torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.double)

    def loss(self, step: int) -> Tensor:
        """Run the program: every run of a step makes the same choices."""
        choices = random.Random(self.seed * 1000 + step % 2)
        batch = self.inputs(step)
        loss = self.run(batch, choices)
        if choices.random() < 0.3:
            loss = loss + self.run(torch.cat([batch, batch.flip(0)])[1:], choices)
        if choices.random() < 0.2:
            with torch.no_grad():
                target = self.run(batch * 0.5, choices)
            loss = loss * (1 + target.abs())
        if choices.random() < 0.2:
            loss.backward(retain_graph=True)
            loss = loss * 0.5
        return loss

    def run(self, batch: Tensor, choices: random.Random) -> Tensor:
        hidden: Any = self.embed(batch)
        earlier = [hidden]
        for _ in range(choices.randint(1, 7)):
            block = choices.choice(list(self.blocks))
            other = choices.choice(earlier) if choices.random() < 0.3 else None
            result: Any = block(hidden) if other is None else block(hidden, other)
            if isinstance(result, tuple):
                hidden = result[0] + result[1]
            elif isinstance(result, dict):
                hidden = result["hidden"]
            else:
                hidden = result
            hidden = self.between(hidden, earlier, choices)
            earlier.append(hidden)
        blocks: Any = self.blocks
        kept: Any = sum(block.kept.mean() for block in blocks if hasattr(block, "kept"))
        for block in self.blocks:
            vars(block).pop("kept", None)
        logits = self.head(self.norm(hidden))
        labels = torch.arange(batch.shape[0] * batch.shape[1]) % 4
        loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), labels) + 0.1 * kept
        return loss

    def between(self, hidden: Tensor, earlier: list[Tensor], choices: random.Random) -> Tensor:
        """Do what user code does between blocks."""
        choice = choices.random()
        if choice < 0.1:
            self.seen.append(hidden.detach().mean().item())
        elif choice < 0.2:
            hidden = hidden + choices.choice(earlier)
        elif choice < 0.3:
            hidden = hidden - 0.1 * hidden.mean(0)
        elif choice < 0.37:
            hidden = hidden * 1
            hidden += 0.5
        elif choice < 0.44 and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        elif choice < 0.5:
            hidden = hidden.detach() + 0.1 * hidden
        elif choice < 0.55:
            hidden = hidden.flip(0)
        elif choice < 0.62:
            first, second = hidden.chunk(2, -1)
            hidden = torch.cat([second.sigmoid(), first], dim=-1)
        elif choice < 0.66:
            hidden[..., 0] = 0.5
        return hidden


@pytest.fixture
def often_switched() -> Iterator[None]:
    """Let threads take turns as often as they can; end the process where none goes on."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    faulthandler.dump_traceback_later(500, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    sys.setswitchinterval(interval)


def check_program(seed: int) -> None:
    choices = random.Random(seed)
    torch.manual_seed(seed)
    compared = Comparison(
        lambda: Program(seed).double(),
        blocks=lambda m: {f"blocks.{index}": block for index, block in enumerate(m.blocks)},
        num_microbatches=choices.randint(1, 6),
        num_workers=choices.randint(1, 4),
    )
    with compared as comparison:
        pair: list[Any] = [comparison.plain, comparison.module]
        programs = [program.add_hooks() for program in pair]
        for hooked in programs:
            hooked.seen = []
        comparison.run(lambda module, step: module.loss(step), steps=3, tolerance=1e-8)
        torch.testing.assert_close(programs[0].seen, programs[1].seen)


@pytest.mark.filterwarnings("ignore:Block .* runs on the ")
@pytest.mark.usefixtures("often_switched")
@pytest.mark.parametrize("start", range(0, 30, 10))
def test_random_programs(start: int) -> None:
    check_programs(range(start, start + 10))


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:Block .* runs on the ")
@pytest.mark.usefixtures("often_switched")
@pytest.mark.parametrize("start", range(30, 330, 50))
def test_many_random_programs(start: int) -> None:
    check_programs(range(start, start + 50))


def check_programs(seeds: range, check: Callable[[int], None] = check_program) -> None:
    for seed in seeds:
        print("program", seed)
        check(seed)
