import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from roundpipe_lightning.engine.update.partial_step import (
    CapturedStep,
    has_hooks,
    reason_not_separable,
)
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.optim.adamw import HostAdamW


class Lion(Optimizer):
    """A user's optimizer: signs of a moving average."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(average.lerp(p.grad, 0.5).sign_(), alpha=group["lr"])
                    average.lerp_(p.grad, 1 - group["beta"])
        return loss


class StateFromTheStart(Lion):
    """Makes its state when it is made."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["average"] = torch.full_like(p, 0.25)


class CountsInGroup(Lion):
    """Its rate follows from a count of steps in its groups, which is there from the first step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] *= 0.5 ** group["count"]
        return super().step(closure)


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "ASGD": torch.optim.ASGD,
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1),
    "AdamW": torch.optim.AdamW,
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True, amsgrad=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "NAdam foreach": lambda p: torch.optim.NAdam(p, foreach=True),
    "Adafactor foreach": lambda p: torch.optim.Adafactor(p, foreach=True),
    "RMSprop, upwards": lambda p: torch.optim.RMSprop(p, maximize=True),
    "AdamW fused with a tensor for lr": lambda p: torch.optim.AdamW(
        p, lr=torch.tensor(0.01), fused=True
    ),
    "groups of many options": lambda p: torch.optim.AdamW(
        [
            {**p[0], "betas": (0.5, 0.9), "weight_decay": 0.3, "foreach": True},
            {**p[1], "amsgrad": True, "maximize": True, "eps": 1e-3},
        ]
    ),
    "AdamW with a tensor for lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "Adamax": torch.optim.Adamax,
    "Muon": torch.optim.Muon,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "HostAdamW": HostAdamW,
    "HostAdamW with 8 bits": lambda p: HostAdamW(p, moments="8bit"),
    "Lion": Lion,
    "state from the start": StateFromTheStart,
    "counts in its groups": CountsInGroup,
}


def parameters(*, flat: bool) -> list[nn.Parameter]:
    shapes: list[tuple[int, ...]] = [(7, 5), (33, 4), (5, 5)] + ([(9,), ()] if flat else [])
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


def groups(members: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Two groups whose parameters are not neighbours."""
    return [{"params": members[::2]}, {"params": members[1::2], "lr": 0.02}]


@pytest.mark.parametrize("name", KINDS)
def test_parts_give_the_bits_of_the_whole(name: str) -> None:
    ours = parameters(flat=name != "Muon")
    theirs = copy.deepcopy(ours)
    divided, whole = KINDS[name](groups(ours)), KINDS[name](groups(theirs))
    assert reason_not_separable(divided) is None
    for number in range(5):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn(one.shape)
            other.grad = one.grad.clone()
        if number == 3:  # one that no loss depended on
            ours[1].grad = theirs[1].grad = None
        whole.step()
        captured = CapturedStep(divided)
        captured.count()
        for optimizer in (divided, whole):  # what a scheduler does right after
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.5
        for one in ours:  # what Lightning does right after
            one.grad = None
        captured.run([ours[2], ours[0]])
        captured.run([ours[1], *ours[3:]])
    captured.count()  # was counted
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    options = [
        [{**group, "params": ()} for group in optimizer.param_groups]
        for optimizer in (divided, whole)
    ]
    assert options[0] == options[1]
    torch.testing.assert_close(
        divided.state_dict()["state"], whole.state_dict()["state"], rtol=0, atol=0
    )


def test_every_optimizer_of_torch_is_looked_at() -> None:
    every = {
        kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    tried = {type(make(groups(parameters(flat=False)))) for make in KINDS.values()}
    assert every - tried == {torch.optim.LBFGS, torch.optim.SparseAdam}


def test_names_of_parameters_go_with_them() -> None:
    seen: list[list[str]] = []

    class Named(Lion):
        def step(self, closure: Any = None) -> Any:
            seen.extend(list(group["param_names"]) for group in self.param_groups)

    members = parameters(flat=True)
    optimizer = Named([(f"p{i}", p) for i, p in enumerate(members)])
    CapturedStep(optimizer).run([members[3], members[1]])
    assert seen == [["p1", "p3"]]


def test_options_that_follow_from_parameters_in_later_steps_end_the_training() -> None:
    members = parameters(flat=True)
    optimizer = _SumsLater(members)
    assert reason_not_separable(optimizer) is None
    for number in range(4):
        for parameter in members:
            parameter.grad = torch.ones_like(parameter)
        captured = CapturedStep(optimizer)
        captured.count()
        late = pytest.raises(ConfigurationError, match="must be stepped as a whole")
        with late if number == 3 else contextlib.nullcontext():
            captured.run(members[:2])


class _Counts(Lion):
    def step(self, closure: Any = None) -> Any:
        self.count = getattr(self, "count", 0) + 1
        return super().step(closure)


class _CountsInClass(Lion):
    count = 0

    def step(self, closure: Any = None) -> Any:
        _CountsInClass.count += 1
        return super().step(closure)


class _SumsInGroup(Lion):
    begins = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            if group["count"] > self.begins:
                group["sum"] = sum(float(p.grad.sum()) for p in group["params"])
        return super().step(closure)


class _SumsLater(_SumsInGroup):
    begins = 3


class _ScalesByAllNorms(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"]]
        squares = sum(float(p.grad.square().sum()) for p in every)
        for p in every:
            p.sub_(p.grad / squares**0.5)


class _Noise(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p))


class _GlobalState(Lion):
    def step(self, closure: Any = None) -> Any:
        self.state["everything"]["count"] = 1  # type: ignore[index]
        return super().step(closure)


class _KeepsTensors(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.everything = [p for group in self.param_groups for p in group["params"]]


class _Fails(Lion):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("needs 4096 numbers")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (_Counts, "attributes of the optimizer"),
        (_CountsInClass, "attributes of its class"),
        (_SumsInGroup, "options of its groups"),
        (_ScalesByAllNorms, "depends on other parameters"),
        (_Noise, "draws random numbers"),
        (_GlobalState, "belong to no parameter"),
        (_KeepsTensors, "keeps tensors"),
        (_Fails, "needs 4096 numbers"),
        (torch.optim.SparseAdam, "dense gradients"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "on supported devices"),
        (torch.optim.LBFGS, "keeps tensors"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), "differentiable"),
    ],
)
def test_optimizers_that_cannot_be_divided(kind: Any, reason: str) -> None:
    members = parameters(flat=True)
    optimizer = kind(members)
    before: list[Tensor] = [p.detach().clone() for p in members]
    state = torch.get_rng_state()
    found = reason_not_separable(optimizer)
    assert found is not None
    assert reason in found
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, b) for p, b in zip(members, before, strict=True))
    assert kind is torch.optim.LBFGS or not optimizer.state
    assert _CountsInClass.count == 0


def test_a_replaced_step_is_not_divided_and_a_scheduler_replaces_nothing() -> None:
    optimizer = torch.optim.SGD(parameters(flat=True), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert reason_not_separable(optimizer) is None
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    assert reason_not_separable(optimizer) == "its step was replaced"


def test_hooks_are_seen() -> None:
    optimizer = torch.optim.SGD(parameters(flat=True), lr=0.1)
    assert not has_hooks(optimizer)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert has_hooks(optimizer)
    handle.remove()
    assert not has_hooks(optimizer)
    everywhere = register_optimizer_step_pre_hook(lambda *_: None)
    assert has_hooks(optimizer)
    everywhere.remove()
