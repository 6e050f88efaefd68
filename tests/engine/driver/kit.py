"""A small language model, and the comparison of steps with plain PyTorch on the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.driver.route import Route
from roundpipe_lightning.engine.one_step import OneStepEngine
from roundpipe_lightning.planning.schedule.plan import PipelineConfig, Plan
from roundpipe_lightning.planning.schedule.stages import Partition


class Layer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        added: Tensor = self.down(functional.gelu(self.up(self.norm(hidden))))
        return hidden + added


class LanguageModel(nn.Module):
    def __init__(
        self,
        num_layers: int = 4,
        width: int = 16,
        vocabulary: int = 48,
        layer: Callable[[int], nn.Module] = Layer,
        *,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([layer(width) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.norm(self.hidden(ids)))
        if labels is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch_of(
    step: int, rows: int = 8, length: int = 6, vocabulary: int = 48
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels = torch.randint(0, vocabulary, (rows, length), generator=generator)
    labels[0, 2:] = -100
    return ids, labels


def joined_plan(partition: str, *, num_microbatches: int, num_workers: int) -> Plan:
    """Return a plan of one round in which all microbatches go forward first."""
    stages = Partition.parse(partition)
    config = PipelineConfig(
        num_microbatches=num_microbatches, round_size=num_microbatches, joined=True
    )
    layout = config.with_stages(stages)
    return Plan(
        **{name: getattr(layout, name) for name in config.__dataclass_fields__},
        partition=layout.partition,
        model="test",
        num_workers=num_workers,
        block_names=tuple(f"layers.{index}" for index in range(stages.num_blocks)),
    )


def take_gradients(module: nn.Module) -> dict[str, Tensor]:
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return gradients


def largest_difference(expected: dict[str, Tensor], actual: dict[str, Tensor]) -> tuple[str, float]:
    """Return the parameter whose gradient differs most, and by how much of its norm."""
    worst = ("", 0.0)
    largest = max((x.norm().item() for x in expected.values()), default=0.0)
    for name in expected.keys() | actual.keys():
        one, two = expected.get(name), actual.get(name)
        if one is None or two is None:
            present = two if one is None else one
            assert present is not None
            difference = 9.0 if present.norm() else 0.0
        else:
            scale = max(one.norm().item(), 1e-4 * largest, 1e-9)
            difference = ((one - two).norm() / scale).item()
        if not difference <= worst[1]:
            worst = (name, difference)
    return worst


class Comparison:
    """A module beside a copy of it that the driver runs.

    Args:
        devices: Of the workers; None: the processor.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        *,
        blocks: Callable[[Any], dict[str, nn.Module]] | None = None,
        num_microbatches: int = 4,
        num_workers: int = 2,
        plan: str | None = None,
        devices: Sequence[Device] | None = None,
        **held: Any,
    ) -> None:
        torch.manual_seed(0)
        self.plain = make().train()
        self.module = copy.deepcopy(self.plain)
        found = (blocks or layers_of)(self.module)
        if devices is None:
            devices = [CpuDevice(index) for index in range(num_workers)]
        num_workers = len(devices)
        if plan is None:
            self.route = Route.dealt(num_microbatches=num_microbatches, num_workers=num_workers)
        else:
            made = joined_plan(plan, num_microbatches=num_microbatches, num_workers=num_workers)
            self.route = Route.of_plan(replace(made, **held), list(found.values()))
        self.engine = OneStepEngine(self.module, found, devices=devices)
        self.engine.__enter__()
        self.driver, self.executor = self.engine.driver, self.engine.executor

    @property
    def modules(self) -> tuple[Any, Any]:
        return self.plain, self.module

    def __enter__(self) -> Comparison:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def step(self, loss_of: Callable[[Any, int], Tensor], step: int = 0) -> Tensor:
        """Run a step of the driver's module."""
        with self.driver.step(self.route, seed=step) as present:
            self.last = present
            loss = loss_of(self.module, step)
            loss.backward()
        return loss

    def run(
        self,
        loss_of: Callable[[Any, int], Tensor],
        *,
        steps: int = 3,
        tolerance: float = 1e-5,
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        """Run steps of both, and compare losses and gradients."""
        for step in range(steps):
            torch.manual_seed(100 + step)
            expected_loss = loss_of(self.plain, step)
            expected_loss.backward()
            torch.manual_seed(100 + step)
            loss = self.step(loss_of, step)
            for optimizer in optimizers:
                optimizer.step()
            expected, actual = take_gradients(self.plain), take_gradients(self.module)
            assert abs(expected_loss.item() - loss.item()) <= tolerance * abs(expected_loss.item())
            self.actual = actual
            worst = largest_difference(expected, actual)
            assert worst[1] <= tolerance, (step, worst)


def layers_of(module: Any) -> dict[str, nn.Module]:
    return {f"layers.{index}": layer for index, layer in enumerate(module.layers)}
