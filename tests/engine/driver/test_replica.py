"""Replicas compute what the block computes, and change nothing of it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.driver.snapshot import take_snapshot
from roundpipe_lightning.engine.worker.replica import Replica


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return out


def replica_of(block: nn.Module) -> tuple[Replica, dict[nn.Parameter, nn.Parameter]]:
    """Return a replica with leaves of its own, and those by the parameters of the block."""
    snapshot = take_snapshot(block, None)
    leaves = {
        p: nn.Parameter(p.detach().clone(), requires_grad=trained)
        for p, trained in snapshot.parameters.items()
    }
    return Replica(snapshot, leaves.__getitem__, Tensor.clone), leaves


def check_parity(block: nn.Module, *, num_runs: int = 2) -> None:
    """Compare outputs and gradients; the block must get no gradient, nor change."""
    torch.manual_seed(0)
    inputs = [torch.randn(4, 3, 8) for _ in range(num_runs)]
    replica, leaves = replica_of(block)
    results = []
    for x in inputs:
        x = x.clone().requires_grad_()
        result = replica.run((x,), {}).result
        result.square().sum().backward()
        results.append((result, x.grad))
    assert all(p.grad is None for p in block.parameters())
    reference = copy.deepcopy(block) if not vars(block).get("is_own") else block
    for x, (result, gradient) in zip(inputs, results, strict=True):
        x = x.clone().requires_grad_()
        out = reference(x)
        out.square().sum().backward()
        assert torch.equal(out, result)
        assert x.grad is not None
        assert torch.equal(x.grad, gradient)
    for own, p in zip(block.parameters(), reference.parameters(), strict=True):
        leaf = leaves[own]
        assert (p.grad is None) == (leaf.grad is None)
        if p.grad is not None:
            assert torch.equal(p.grad, leaf.grad)  # type: ignore[arg-type]


def test_a_plain_block() -> None:
    check_parity(Layer())
