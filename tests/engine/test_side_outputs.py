import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.errors import CaptureError
from tests.kit.architectures import CausalLM, build_model, decoder_stack, token_batches
from tests.kit.engine import (
    Block,
    Regressor,
    Workers,
    check_parity,
    engine_step,
    layers_of,
    on_any_workers,
    plain_step,
    plan_of,
    regression_batches,
)


class Leaving(Block):
    penalty: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.penalty = hidden.pow(2).mean()
        return x + torch.tanh(hidden)


class Penalised(Regressor):
    def __init__(self, make_block: Callable[[], nn.Module] = Leaving) -> None:
        super().__init__(make_block=make_block)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        output = self(x)
        penalty = torch.stack([layer.penalty for layer in self.layers]).sum()  # type: ignore[misc]
        loss: Tensor = functional.mse_loss(output, y) + penalty
        return loss


@on_any_workers
@pytest.mark.parametrize("num_workers", [1, 3])
def test_attribute_of_a_block(num_workers: int, workers: Workers) -> None:
    module = Penalised()
    check_parity(module, num_workers=num_workers, devices=workers(num_workers), tolerance=1e-06)


class Described(Tensor):
    """Gives its attributes to what is computed of it, and copies them with itself.

    MONAI's MetaTensor does so.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors: Any = super()
        result = tensors.__torch_function__(func, types, args, kwargs)
        if isinstance(result, Described) and args and isinstance(args[0], Described):
            copied = copy.deepcopy if func is Tensor.clone else dict
            result.__dict__.update(copied(args[0].__dict__))
        return result


def test_what_is_computed_of_a_tensor_has_not_its_origin() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        x, y = batch
        output = view(x.as_subclass(Described).clone())
        penalties = [layer.penalty.clone() * 2 for layer in view.layers]
        loss = functional.mse_loss(output, y) + torch.stack(penalties).sum()
        return loss.as_subclass(Tensor)

    # emulated devices have a subclass of their own
    devices: list[Device] = [CpuDevice(0), CpuDevice(1)]
    check_parity(Penalised(), call=call, num_workers=2, devices=devices, tolerance=1e-06)


class PenalisedInBetween(Penalised):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        del batch_idx
        x, y = batch
        loss = torch.zeros((), device=x.device)
        for layer in self.layers:
            x = layer(x)
            assert isinstance(layer, Leaving)
            loss = loss + layer.penalty
        total: Tensor = functional.mse_loss(x, torch.zeros_like(x)) + loss * y.mean()
        return total


@on_any_workers
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_side_output_that_is_used_between_the_blocks(num_workers: int, workers: Workers) -> None:
    module = PenalisedInBetween()
    check_parity(module, num_workers=num_workers, devices=workers(num_workers), tolerance=1e-06)


def test_only_the_users_loss_decides_what_gets_a_gradient() -> None:
    """Detached, or used without gradients, a side output is a value like any other."""
    module = Penalised()

    def call(view: Any, batch: Any, index: int) -> Tensor:
        loss = functional.mse_loss(view(batch[0]), batch[1])
        with torch.no_grad():
            share = view.layers[0].penalty / (1 + view.layers[1].penalty)
        scaled: Tensor = loss * (1 + view.layers[2].penalty.detach()) * share
        return scaled

    check_parity(module, call=call, tolerance=1e-06)


def test_a_loss_of_side_outputs_alone() -> None:
    module = Penalised()

    def call(view: Any, batch: Any, index: int) -> Any:
        view(batch[0])
        return view.layers[1].penalty + view.layers[2].penalty

    stack = layers_of(module)
    batches = regression_batches(3)
    plain = plain_step(module, batches, call=call)
    result = engine_step(module, stack, plan_of(stack), batches, call=call)
    got = {name: result.gradients.get(p) for name, p in module.named_parameters()}
    for name, want in plain.gradients.items():
        found = got[name]
        if want is None:
            assert found is None or not found.any()
        else:
            assert found is not None
            torch.testing.assert_close(found, want)


class Differing(Block):
    penalty: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        self.penalty = hidden.pow(2).mean() if not torch.is_grad_enabled() else hidden.pow(2)
        return torch.tanh(hidden)


def test_a_recompute_that_makes_another_tensor_is_refused() -> None:
    module = Penalised(make_block=Differing)
    stack = layers_of(module)
    with pytest.raises(CaptureError, match="same functions"):
        engine_step(module, stack, plan_of(stack), regression_batches(3))


def test_a_recompute_writes_no_attributes() -> None:
    class Counting(Block):
        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            return super().forward(x)

    module = Regressor(2, make_block=Counting)
    stack = layers_of(module)
    engine_step(module, stack, plan_of(stack, num_workers=1), regression_batches(3))
    assert [layer.num_calls for layer in module.layers] == [3, 3]


def test_a_block_may_compute_with_what_it_made_with_a_graph_of_its_own() -> None:
    class Sloped(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                start = x.detach().requires_grad_()
                squares = start.square()
                (slope,) = torch.autograd.grad(squares.sum(), start)
            with torch.no_grad():
                scale = squares + slope
            return super().forward(x) * scale

    check_parity(Regressor(2, make_block=Sloped), devices=[CpuDevice(0), CpuDevice(1)])


class Appending(Block):
    def forward(self, x: Tensor, penalties: list[Tensor]) -> Tensor:  # type: ignore[override]
        hidden = super().forward(x)
        penalties.append(hidden.pow(2).mean())
        return x + torch.tanh(hidden)


class Collected(Regressor):
    """Gives its blocks a list to append to.

    Args:
        empty: Whether nothing is in it before.
    """

    def __init__(self, *, empty: bool) -> None:
        super().__init__(make_block=Appending)
        self.empty = empty

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden, penalties = self.head(x), [] if self.empty else [torch.zeros((), device=x.device)]
        for layer in self.layers:
            hidden = layer(hidden, penalties)
        output = self.tail(hidden).squeeze(-1)
        loss: Tensor = functional.mse_loss(output, y) + torch.stack(penalties).sum()
        return loss


@pytest.mark.parametrize("empty", [True, False])
def test_list_that_blocks_append_to(empty: bool) -> None:
    module = Collected(empty=empty)
    check_parity(module)


@on_any_workers
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_router_loss_of_a_mixture_of_experts(name: str, workers: Workers) -> None:
    module = CausalLM(build_model(name, output_router_logits=True, router_aux_loss_coef=0.5))
    twin = copy.deepcopy(module)
    check_parity(
        module,
        token_batches(3),
        stack=decoder_stack(module),
        devices=workers(2),
        tolerance=1e-06,
        twin=twin,
    )
    # The library registers its hooks in the first call; every microbatch makes one.
    hooks, expected = ([len(m._forward_hooks) for m in one.modules()] for one in (module, twin))
    assert hooks == expected
    assert any(hooks)


@on_any_workers
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_hidden_states_that_a_library_collects(name: str, workers: Workers) -> None:
    """The hidden states of all layers, the stack's input among them, in the loss."""

    def call(view: Any, batch: Any, index: int) -> Tensor:
        output = view.model(**batch, labels=batch["input_ids"], output_hidden_states=True)
        loss: Tensor = output.loss
        for number, states in enumerate(output.hidden_states):
            loss = loss + 0.01 * number * states.pow(2).mean() + 0.1 * states.mean()
        return loss

    module = CausalLM(build_model(name))
    check_parity(
        module,
        token_batches(3),
        stack=decoder_stack(module),
        call=call,
        devices=workers(2),
        tolerance=1e-06,
    )
