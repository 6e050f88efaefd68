"""Snapshots keep a block as it was, and are the same object while it stays so."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.driver.snapshot import ForwardProxy, take_snapshot
from roundpipe_lightning.engine.worker.replica import Replica


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.down = nn.Linear(4, 4)
        self.scale: Any = 1.0
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x)) * self.scale + self.shift
        return out if self.training else -out


def delete_and_add(block: Any) -> None:
    del block.scale
    block.other = 1.0


CHANGES: list[Callable[[Any], Any]] = [
    lambda block: block.eval(),
    lambda block: block.up.eval(),
    lambda block: setattr(block, "scale", 2.0),
    lambda block: setattr(block, "scale", torch.tensor(1.0)),
    lambda block: setattr(block, "scale", 1),  # equal, and another
    lambda block: setattr(block, "other", None),
    lambda block: delattr(block, "scale"),
    delete_and_add,
    lambda block: setattr(block, "up", nn.Linear(4, 4)),
    lambda block: setattr(block, "shift", torch.zeros(4)),
    lambda block: setattr(block.up, "weight", nn.Parameter(torch.zeros(4, 4))),
    lambda block: setattr(block.up, "bias", None),
    lambda block: block.up.weight.requires_grad_(False),
    lambda block: setattr(block.up, "__class__", type("Linear2", (nn.Linear,), {})),
    lambda block: block.up.register_forward_hook(lambda *_: None),
    lambda block: block.up.register_forward_pre_hook(lambda *_: None),
    lambda block: block.up.register_full_backward_hook(lambda *_: None),
    lambda block: block.add_module("third", nn.Identity()),
    lambda block: setattr(block, "__dict__", {**vars(block), "scale": 3.0}),
]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_make_another_snapshot(change: Callable[[Any], Any]) -> None:
    block: Any = Layer()
    first = take_snapshot(block, None, name="layers.0")
    assert take_snapshot(block, first, name="layers.0") is first
    change(block)
    second = take_snapshot(block, first, name="layers.0")
    assert second is not first
    assert take_snapshot(block, second) is second


@pytest.mark.parametrize("change", CHANGES)
def test_changes_do_not_reach_a_snapshot(change: Callable[[Any], Any]) -> None:
    block: Any = Layer()
    x = torch.randn(2, 4)
    expected = block(x)
    trained = {p: p.requires_grad for p in block.parameters()}
    snapshot = take_snapshot(block, None)
    change(block)
    replica = Replica(snapshot, lambda p: p, lambda b: b)
    assert torch.equal(replica.run((x,), {}).result, expected)
    assert snapshot.parameters == trained
    assert not vars(replica.module.up)["_forward_hooks"]


def test_values_are_shared() -> None:
    block = Layer()
    snapshot = take_snapshot(block, None)
    with torch.no_grad():
        block.up.weight.zero_()
        block.get_buffer("shift").add_(1)
    replica = Replica(snapshot, lambda p: p, lambda b: b)
    x = torch.randn(2, 4)
    assert torch.equal(replica.run((x,), {}).result, block(x))
    assert take_snapshot(block, snapshot) is snapshot


def test_parameters_and_buffers_stand_once_and_in_order() -> None:
    block = Layer()
    block.down.weight = block.up.weight
    block.down.register_buffer("tied", block.shift)  # type: ignore[arg-type]
    block.down.register_buffer("missing", None)
    block.down.register_parameter("absent", None)
    snapshot = take_snapshot(block, None)
    assert all(a is b for a, b in zip(snapshot.parameters, block.parameters(), strict=True))
    assert len(snapshot.parameters) == 3
    assert len(snapshot.buffers) == 1
    assert [state.path for state in snapshot.states] == ["", "up", "down"]
    assert snapshot.name == "Layer"


class Proxy(ForwardProxy):
    def __init__(self, module: nn.Module) -> None:
        self.instance_forward = vars(module).get("forward")
        vars(module)["forward"] = self

    def __call__(self, *args: Any) -> Any:
        raise AssertionError("replicas must look past it")


def test_proxies_are_looked_past() -> None:
    block = nn.Sequential(Layer(), Layer())
    inner: Any = block[1]
    inner.forward = types.MethodType(lambda self, x: self.up(x) * 2, inner)
    x = torch.randn(2, 4)
    expected = block(x)
    proxies = [Proxy(module) for module in (block, *block)]
    replica = Replica(take_snapshot(block, None), lambda p: p, lambda b: b)
    assert torch.equal(replica.run((x,), {}).result, expected)
    assert replica.run((x,), {}).attributes == ()
    assert len(proxies) == 3


def test_modules_whose_hash_changes() -> None:
    class Metric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = 0

        def __hash__(self) -> int:
            return hash(self.total)

        def forward(self, x: Tensor) -> Tensor:
            self.total += 1
            return x

    block = nn.Sequential(Metric(), Metric())
    replica = Replica(take_snapshot(block, None), lambda p: p, lambda b: b)
    outcome = replica.run((torch.zeros(2),), {})
    assert [a.module is m for a, m in zip(outcome.attributes, block, strict=True)] == [True, True]


def test_script_modules_are_found() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2)))
    block = nn.Sequential(nn.Linear(2, 2), scripted)
    snapshot = take_snapshot(block, None)
    assert snapshot.has_script_modules
    assert take_snapshot(block, snapshot) is snapshot
    assert not take_snapshot(Layer(), None).has_script_modules
