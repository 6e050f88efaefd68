"""Any optimizer steps bfloat16 parameters as if they were float32, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.optim.float32_step import (
    in_float32,
    keep_wide_state,
    step_in_float32,
)
from roundpipe_lightning.optim.rounding import round_stochastically

MAKERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def _closure(parameters: list[nn.Parameter], step: int) -> Any:
    def closure() -> float:
        for number, parameter in enumerate(parameters):
            assert parameter.dtype is torch.bfloat16 or number == 1
            generator = torch.Generator().manual_seed(10 * step + number)
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = noise.to(torch.bfloat16).to(parameter.dtype)
        return 1.5

    return closure


@pytest.mark.parametrize("name", MAKERS)
def test_step_is_the_float32_step_rounded(name: str) -> None:
    start = [torch.randn(6, 5), torch.randn(4), torch.randn(5, 6).t()]
    parameters = [nn.Parameter(t.to(torch.bfloat16)) for t in start]
    parameters[1] = nn.Parameter(parameters[1].detach().float())  # float32: left alone
    wide = [nn.Parameter(p.detach().float()) for p in parameters]
    memory = [p.data_ptr() for p in parameters]
    ours, reference = MAKERS[name](parameters), MAKERS[name](wide)
    for step in range(3):
        for parameter, expected in zip(parameters, wide, strict=True):
            expected.data.copy_(parameter.detach())
        _closure(parameters, step)()
        for parameter, expected in zip(parameters, wide, strict=True):
            assert parameter.grad is not None
            expected.grad = parameter.grad.float()
        reference.step()
        result = step_in_float32(ours, closure=_closure(parameters, step), seed_of=lambda n: n + 7)
        assert result == 1.5
        for number, (parameter, expected) in enumerate(zip(parameters, wide, strict=True)):
            exact: Tensor = expected.detach()
            if number != 1:
                rounded = torch.empty_like(parameter.detach())
                exact = round_stochastically(exact, out=rounded, seed=number + 7)
            assert torch.equal(parameter.detach(), exact)
            assert parameter.grad is not None
            assert parameter.grad.dtype is parameter.dtype
    assert [p.data_ptr() for p in parameters] == memory
    states = [t for s in ours.state.values() for t in s.values() if isinstance(t, Tensor)]
    assert {state.dtype for state in states} == {torch.float32}


def test_error_in_a_step_leaves_the_parameters_as_they_were() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            assert closure is not None
            closure()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(1.0)
            raise ZeroDivisionError("broken")

    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    own = parameter.data_ptr()
    with pytest.raises(ZeroDivisionError, match="broken"):
        step_in_float32(
            Broken([parameter], lr=1.0), closure=_closure([parameter], 0), seed_of=lambda n: n
        )
    assert parameter.dtype is torch.bfloat16
    assert parameter.data_ptr() == own
    assert parameter.tolist() == [1.0, 1.0, 1.0]
    assert parameter.grad is not None
    assert parameter.grad.dtype is torch.bfloat16


def test_context_rounds_what_its_body_has_stepped() -> None:
    parameter = nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    idle = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))  # no gradient: not widened
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD([parameter, idle], lr=1e-3)
    with in_float32([(parameter, 3), (idle, 4)]):
        assert parameter.dtype is torch.float32
        assert idle.dtype is torch.bfloat16
        optimizer.step()
    assert parameter.double().mean().item() == pytest.approx(0.999, abs=1e-4)
    assert len(parameter.unique()) == 2


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_loaded_state_is_float32(saved: torch.dtype) -> None:
    def trained(dtype: torch.dtype) -> Optimizer:
        parameter = nn.Parameter(torch.ones(5, dtype=dtype))
        parameter.grad = torch.full_like(parameter, 1 / 3)
        optimizer = torch.optim.AdamW([parameter])
        optimizer.step()
        return optimizer

    state_dict = trained(saved).state_dict()
    parameter = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter])
    keep_wide_state(optimizer)
    optimizer.load_state_dict(state_dict)
    for key, value in state_dict["state"][0].items():
        loaded = optimizer.state[parameter][key]
        assert loaded.dtype is torch.float32
        assert torch.equal(loaded, value.float())
        assert loaded is not value
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    optimizer.load_state_dict(state_dict)
    assert optimizer.state[parameter]["exp_avg"].dtype is torch.float32
