"""Steps of the driver on emulated devices, where a tensor in the wrong place raises."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.emulation.race_checker import ProtocolChecker, ProtocolError
from roundpipe_lightning.emulation.server import EmulatedServer, ServedDevice
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.engine.device.events import Event
from roundpipe_lightning.engine.driver.block_calls import DriverBlockWarning
from roundpipe_lightning.engine.transfer.worker_transfers import WaitedFor, WorkerTransfers
from tests.engine.driver.kit import Comparison, LanguageModel, Layer, batch_of, largest_difference


def language_loss(module: Any, step: int) -> Tensor:
    loss: Tensor = module(*(x.to(module.embed.weight.device) for x in batch_of(step)))
    return loss


@contextmanager
def comparison_on(
    num_devices: int,
    make: Any = LanguageModel,
    *,
    direct: float | None = None,
    upload: float = float("inf"),
    **options: Any,
) -> Iterator[Comparison]:
    timing = EmulatedTiming(
        max_delay_seconds=1e-3, direct_bytes_per_second=direct, upload_bytes_per_second=upload
    )
    checker = ProtocolChecker()
    with (
        EmulatedServer(num_devices, checker=checker, poison=True, timing=timing) as server,
        Comparison(make, devices=server.devices, **options) as comparison,
    ):
        yield comparison


@pytest.mark.parametrize(
    "plan", [None, "forward 2 2 | backward 0 2 2", "forward 1 3 | backward 0 1 1 2"]
)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_gradients_are_those_of_the_whole_batch(plan: str | None, workers: int) -> None:
    with comparison_on(workers, plan=plan) as comparison:
        comparison.run(language_loss)


PLAN = "forward 2 2 | backward 0 2 2"


@pytest.mark.parametrize("plan", [None, PLAN])
@pytest.mark.parametrize("direct", [None, float("inf")], ids=["by the host", "direct"])
def test_a_tied_head_gets_both_gradients(plan: str | None, direct: float | None) -> None:
    with comparison_on(2, lambda: LanguageModel(tied=True), plan=plan, direct=direct) as comparison:
        comparison.run(language_loss)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("resident", [((0, 3), (2,)), ((0, 1, 2, 3), (0, 1, 2, 3))])
def test_resident_blocks_and_slots(slots: int, resident: tuple[tuple[int, ...], ...]) -> None:
    with comparison_on(2, plan=PLAN, weight_slots=slots, resident=resident) as comparison:
        comparison.run(language_loss)


def test_weights_that_an_optimizer_has_changed_are_uploaded_again() -> None:
    with comparison_on(2, plan=PLAN, resident=((0,), (3,))) as comparison:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in comparison.modules]
        comparison.run(language_loss, optimizers=optimizers)


class MaskedLayer(Layer):
    """Adds a bias of user code, by a mask, and drops some."""

    scale: Tensor

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.full((width,), 0.5))
        self.dropout = nn.Dropout(dropout)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, bias: Tensor, mask: Tensor, table: Tensor
    ) -> Tensor:
        added: Tensor = self.dropout(super().forward(hidden)) + bias * self.scale + table.sin()
        return hidden + added * mask[..., None]


class MaskedModel(LanguageModel):
    table: Tensor
    num_steps: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(layer=lambda width: MaskedLayer(width, dropout))
        self.bias = nn.Parameter(torch.randn(16))
        self.register_buffer("table", torch.randn(6, 16))
        self.register_buffer("num_steps", torch.zeros(()))

    def hidden(self, ids: Tensor) -> Tensor:
        hidden: Tensor = self.embed(ids)
        self.num_steps += 1
        bias, mask, table = self.bias.exp(), (ids > 3).float(), self.table * self.num_steps
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, bias, mask, table)
            if number == 1:
                hidden = hidden + bias * hidden.mean().item()  # user code looks
        return hidden


@pytest.mark.parametrize("plan", [None, PLAN])
@pytest.mark.parametrize("direct", [None, float("inf")], ids=["by the host", "direct"])
def test_tensors_of_user_code_go_to_workers_and_their_gradients_come_back(
    plan: str | None, direct: float | None
) -> None:
    with comparison_on(3, MaskedModel, plan=plan, direct=direct) as comparison:
        comparison.run(language_loss)
        plain, module = comparison.modules
        assert module.num_steps == plain.num_steps == 3
        assert type(module.num_steps) is Tensor


def test_blocks_draw_as_on_the_processor() -> None:
    gradients = []
    for num_devices in (0, 1, 3):
        with (
            comparison_on(num_devices, lambda: MaskedModel(0.3))
            if num_devices
            else Comparison(lambda: MaskedModel(0.3))
        ) as comparison:
            comparison.run(language_loss, tolerance=10.0)
            gradients.append(comparison.actual)
    for others in gradients[1:]:
        assert largest_difference(gradients[0], others)[1] < 1e-5


class NormedLayer(Layer):
    """Writes into buffers: its rows are not independent."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2))


@pytest.mark.filterwarnings("ignore:Block")
@pytest.mark.parametrize("plan", [None, PLAN])
def test_running_statistics_come_home(plan: str | None) -> None:
    with comparison_on(2, lambda: LanguageModel(layer=NormedLayer), plan=plan) as comparison:
        comparison.run(language_loss)
        plain, module = comparison.modules
        for expected, buffer in zip(plain.buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(buffer, expected)


def test_a_shared_block_and_one_that_is_called_out_of_the_plan() -> None:
    def loss_of(module: Any, step: int) -> Tensor:
        ids, labels = (x.to(module.embed.weight.device) for x in batch_of(step))
        hidden = module.embed(ids)
        for number in (0, 1, 2, 1, 0, 3) if step == 1 else (0, 1, 2, 3):
            hidden = module.layers[number](hidden)
        logits = module.head(module.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    with comparison_on(2, plan=PLAN) as comparison:
        comparison.run(loss_of, steps=4)


def test_gradients_are_added_to_those_that_are_there() -> None:
    def twice(module: Any, step: int) -> Tensor:
        return language_loss(module, step) * 2

    with comparison_on(2, plan=PLAN) as comparison:
        for module in comparison.modules:
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
        comparison.run(twice)


def test_frozen_parameters_and_those_that_user_code_writes() -> None:
    def loss_of(module: Any, step: int) -> Tensor:
        module.layers[0].requires_grad_(step != 1)
        module.embed.requires_grad_(step == 2)
        if step == 1:
            with torch.no_grad():
                module.norm.weight.mul_(1.5)
        return language_loss(module, step)

    with comparison_on(2, plan=PLAN) as comparison:
        comparison.run(loss_of)
        plain, module = comparison.modules
        assert torch.equal(plain.norm.weight, module.norm.weight)


def test_a_step_without_a_graph() -> None:
    with comparison_on(2, plan=PLAN) as comparison:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                expected = language_loss(comparison.plain, 0)
                with comparison.driver.step(comparison.route, seed=0):
                    actual = language_loss(comparison.module, 0).item()
            assert actual == pytest.approx(expected.item(), rel=1e-5)
        comparison.run(language_loss)


class FailingLayer(Layer):
    fails = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.fails and threading.current_thread().name.startswith("worker"):
            raise ValueError("the layer fails")
        return super().forward(hidden)


def test_after_an_error_the_next_step_is_right() -> None:
    with comparison_on(2, lambda: LanguageModel(layer=FailingLayer), plan=PLAN) as comparison:
        comparison.run(language_loss, steps=1)
        comparison.modules[1].layers[2].fails = True
        with (
            pytest.raises(ValueError, match="the layer fails"),
            comparison.driver.step(comparison.route, seed=0),
        ):
            language_loss(comparison.module, 0).backward()
        comparison.modules[1].layers[2].fails = False
        with pytest.raises(KeyError), comparison.driver.step(comparison.route, seed=0):
            vars(comparison)[str(language_loss(comparison.module, 0).item())]
        comparison.module.zero_grad()
        comparison.run(language_loss)


@pytest.mark.parametrize("reason", list(WaitedFor), ids=lambda reason: reason.value)
def test_the_checker_sees_a_wait_that_is_missing(
    reason: WaitedFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = WorkerTransfers.await_event

    def forget(self: WorkerTransfers, event: Event, waited_for: WaitedFor) -> None:
        if waited_for is not reason:
            wait(self, event, waited_for)

    with comparison_on(2, plan=PLAN, upload=1e5) as comparison:
        comparison.run(language_loss, steps=1)
        monkeypatch.setattr(WorkerTransfers, "await_event", forget)
        with (
            pytest.raises(ProtocolError),
            comparison.driver.step(comparison.route, seed=0),
        ):
            language_loss(comparison.module, 0).backward()


def test_a_copy_that_fails_is_raised_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ServedDevice, *_: Any, **__: Any) -> Event:
        raise RuntimeError(f"the link of {self.name} is broken")

    with comparison_on(2, plan=PLAN) as comparison:
        comparison.run(language_loss, steps=1)
        with monkeypatch.context() as patched:
            patched.setattr(ServedDevice, "copy", fails)
            with (
                pytest.raises(RuntimeError, match="is broken") as caught,
                comparison.driver.step(comparison.route, seed=0),
            ):
                language_loss(comparison.module, 0).backward()
        assert "queue of" in " ".join(getattr(caught.value, "__notes__", ()))
        comparison.run(language_loss, steps=1)


class ClosureLayer(Layer):
    """No block: what it returns cannot be looked into."""

    scale: Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, hidden: Tensor) -> Any:
        result = super().forward(hidden) * self.scale
        return lambda: result


def test_a_module_that_is_no_block_runs_where_user_code_computes() -> None:
    def loss_of(module: Any, step: int) -> Tensor:
        ids, labels = (x.to(module.embed.weight.device) for x in batch_of(step))
        hidden = module.embed(ids)
        for layer in module.layers:
            hidden = layer(hidden)
            hidden = hidden() if callable(hidden) else hidden
        logits = module.head(module.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    makers = iter([Layer, ClosureLayer, Layer, ClosureLayer])

    def make_layer(width: int) -> nn.Module:
        return next(makers)(width)

    def make() -> LanguageModel:
        return LanguageModel(layer=make_layer)

    with comparison_on(2, make, plan=PLAN) as comparison, pytest.warns(DriverBlockWarning):
        comparison.run(loss_of)
