import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.emulation.placement import DeviceMismatchError
from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.emulation.tagged_tensor import tag_of
from roundpipe_lightning.engine.device.base import Device
from tests.kit.engine import (
    WIDTH,
    Block,
    Regressor,
    cpu_workers,
    differences,
    emulated_workers,
    engine_step,
    layers_of,
    plain_step,
    plan_of,
    regression_batches,
)

SERVERS: dict[str, Callable[[], Sequence[Device]]] = {
    "processor": lambda: cpu_workers(3),
    "3": lambda: emulated_workers(3),
    "4 on 2 devices": lambda: [EmulatedDevice(i // 2) for i in range(4)],
}


def assert_equal_to_plain_loop(module: Any, server: str, batches: Sequence[Any]) -> None:
    """Compare to the bit in one round of all microbatches, else within rounding."""
    stack, num_microbatches = layers_of(module), len(batches)
    original = copy.deepcopy(module.state_dict())
    plain = plain_step(module, batches)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    exact = 1e-6 if isinstance(module, Tied | Closing) else 0.0  # uses that are summed apart
    for round_size, tolerance in ((num_microbatches, exact), (1, 1e-6)):
        module.load_state_dict(original)
        devices = SERVERS[server]()
        plan = plan_of(
            stack,
            num_workers=len(devices),
            num_microbatches=num_microbatches,
            round_size=round_size,
        )
        result = engine_step(module, stack, plan, batches, devices=devices)
        assert not differences(module, result, plain, tolerance=tolerance)
        assert all(tag_of(gradient) is None for gradient in result.gradients.values())
        assert all(parameter.grad is None for parameter in module.parameters())
        if round_size == num_microbatches:
            for name, buffer in module.named_buffers():
                assert torch.equal(buffer, buffers[name]), name


class Masked(Regressor):
    """Makes masks, labels and weights before the stack and uses them after it."""

    @property
    def device(self) -> torch.device:
        """As a LightningModule has it."""
        return self.tail.weight.device

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        num = len(x)
        order = torch.arange(num, device=x.device)
        keep = torch.zeros(num, device=self.device)
        keep[1:] = 1
        weights = torch.tensor([0.5] * num, device=x.device) + x.new_ones(num)
        early = self.device
        output = self.tail(self.run_blocks(self.head(x))).squeeze(-1)
        assert self.device == output.device
        late = torch.full((num,), 2.0, device=self.device)
        keep = keep.to(self.device) if early != self.device else keep
        loss = (output[order] - y).pow(2) * keep * weights * late
        chosen = torch.where(keep > 0, output, torch.zeros_like(y))
        total: Tensor = loss.sum() / keep.sum() + chosen.gather(0, order).mean()
        return total + torch.stack([output.mean(), y.mean(), weights.mean()]).sum()


class Writing(Regressor):
    """Writes into tensors that were made before the stack."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scores = torch.zeros(len(x), device=x.device)
        table = torch.zeros(2, len(x), device=x.device)
        total = torch.zeros((), device=x.device)
        output = self.tail(self.run_blocks(self.head(x))).squeeze(-1)
        scores += output
        table[0] = output * 2
        table[1].copy_(y)
        table[1, 1:].mul_(output[1:])
        total += functional.mse_loss(scores, y)
        total.add_(table.square().mean())
        return total


class Closing(Regressor):
    """Reaches parameters past `self`: kept in lists and closures, as attributes and moved."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.mixing = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.kept = [self.scale, self.shift, self.mixing]
        self.kept_modules = [self.head]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        scale, shift, mixing = self.kept
        hidden = self.kept_modules[0](x) * scale + shift
        hidden = self.run_blocks(hidden) @ mixing
        hidden = hidden + torch.stack([scale, shift]).sum(0) + hidden @ mixing.T
        hidden = hidden + mixing.to(torch.float64).to(torch.float32)[0] + mixing.mT[1]
        output = self.tail(hidden + functional.linear(hidden, weight=mixing)).squeeze(-1)
        penalty = sum(parameter.pow(2).mean() for parameter in self.kept)
        loss: Tensor = functional.mse_loss(output, y) + penalty
        return loss


class Buffered(Regressor):
    """Has buffers outside the blocks and in them, written in place and assigned anew."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("nothing", None)
            self.calls: Tensor
            self.mean: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__(make_block=self.Block)
        self.register_buffer("offset", torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)
        self.offset: Tensor
        self.seen: Tensor
        self.last: Tensor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.seen += 1
        hidden = self.run_blocks(self.head(x) + self.offset)
        self.last = hidden.detach().mean(0)
        output = self.tail(hidden - self.offset).squeeze(-1)
        loss: Tensor = functional.mse_loss(output, y)
        return loss


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.linear(x))
        return x + hidden


class Normalised(Regressor):
    def __init__(self) -> None:
        super().__init__(make_block=NormBlock)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))  # type: ignore[assignment]
        self.tail = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1))  # type: ignore[assignment]


class Tied(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.tail = nn.Linear(WIDTH, WIDTH)
        self.tail.weight = self.head.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss: Tensor = functional.mse_loss(self.tail(self.run_blocks(self.head(x))).sum(-1), y)
        return loss


MODULES = [Masked, Writing, Closing, Buffered, Normalised, Tied]


def batches_for(module: type[Regressor]) -> list[tuple[Tensor, Tensor]]:
    """Return microbatches; one where buffers are written."""
    return regression_batches(1 if module in (Buffered, Normalised) else 3)


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.__name__)
def test_user_code_for_one_device_runs_on_several(module: type[Regressor], server: str) -> None:
    assert_equal_to_plain_loop(module(), server, batches_for(module))


class Caching(nn.Module):
    """A block with a fault: it keeps a tensor of the device on which it ran first."""

    cache: dict[str, Tensor]

    def __init__(self, cache: dict[str, Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.cache = cache

    def forward(self, x: Tensor) -> Tensor:
        one = self.cache.setdefault("one", torch.ones(WIDTH, device=x.device))
        hidden: Tensor = self.linear(x)
        return hidden * one


def test_a_misplaced_tensor_is_found() -> None:
    cache: dict[str, Tensor] = {}
    module = Regressor(3, make_block=lambda: Caching(cache))
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=3, num_microbatches=2)
    batches = regression_batches(2)
    with pytest.raises(DeviceMismatchError, match="same device") as caught:
        engine_step(module, stack, plan, batches, devices=emulated_workers(3))
    (note,) = getattr(caught.value, "__notes__", ["FORWARD stage 1"])
    assert "FORWARD stage 1" in note
    cache.clear()
    plain = plain_step(module, batches)
    cache.clear()
    result = engine_step(
        module,
        stack,
        plan_of(stack, num_workers=1, num_microbatches=2),
        batches,
        devices=emulated_workers(1),
    )
    assert not differences(module, result, plain)


def test_a_tensor_left_on_the_host_is_found() -> None:
    module = Regressor()

    def call(view: Any, batch: Any, index: int) -> Any:
        return view.training_step(batch, 0) + torch.ones(3).sum() * torch.ones(1)

    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=1)
    with pytest.raises(DeviceMismatchError, match="on the host"):
        engine_step(
            module, stack, plan, regression_batches(1), call=call, devices=emulated_workers(2)
        )
