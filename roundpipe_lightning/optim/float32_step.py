"""Steps of any optimizer on bfloat16 parameters, computed in float32 and rounded stochastically.

An optimizer adds its update to the parameter in the parameter's own dtype, so nothing that comes
after it can bring back what was rounded away. For the time of a step the parameters and their
gradients are therefore float32, and the optimizer, whichever it is, sees no bfloat16:

```
bfloat16 parameter ── widen ──▶ float32 ── optimizer.step() ── round ──▶ bfloat16, in place
bfloat16 gradient  ── widen ──▶ float32
                                float32 moments, made by the optimizer, kept
```

The memory for it is 8 bytes per parameter that has a gradient, until the step has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundpipe_lightning.optim.rounding import round_stochastically


class Float32Step:
    """Parameters that are widened once their gradients are there, and rounded after the step.

    Args:
        parameters: Parameters with the seed of each; those that are not bfloat16, or have no
            gradient, are left alone.
    """

    def __init__(self, parameters: Iterable[tuple[nn.Parameter, int]]) -> None:
        self._parameters = tuple(parameters)
        self._narrow: list[tuple[nn.Parameter, Tensor, Tensor, int]] = []

    def widen(self) -> None:
        """Make the parameters and their gradients float32."""
        for parameter, seed in self._parameters:
            gradient = parameter.grad
            if parameter.dtype is not torch.bfloat16 or gradient is None:
                continue
            self._narrow.append((parameter, parameter.data, gradient, seed))
            parameter.data = parameter.data.float()
            parameter.grad = gradient.float()

    def round(self) -> None:
        """Round the results into the parameters' own memory."""
        for parameter, own, _, seed in self._narrow:
            round_stochastically(parameter.data, out=own, seed=seed)
        self.narrow()

    def narrow(self) -> None:
        """Put the parameters and gradients back as they were before `widen`."""
        for parameter, own, gradient, _ in self._narrow:
            parameter.data = own
            parameter.grad = gradient
        self._narrow.clear()


@contextmanager
def in_float32(parameters: Iterable[tuple[nn.Parameter, int]]) -> Iterator[None]:
    """Make parameters float32 for the body of the context, which steps them.

    Should the body raise, they are as they were before it.

    Args:
        parameters: Parameters with the seed of each, as for `Float32Step`.
    """
    step = Float32Step(parameters)
    try:
        step.widen()
        yield
        step.round()
    finally:
        step.narrow()


def step_in_float32(
    optimizer: Optimizer, *, closure: Callable[[], Any], seed_of: Callable[[int], int], **given: Any
) -> Any:
    """Call `optimizer.step(closure)` with float32 parameters.

    Args:
        optimizer: Any optimizer that calls the closure before it looks at gradients.
        closure: Computes the loss and the gradients, on bfloat16 parameters.
        seed_of: The seed of a parameter, by its number in the optimizer.
        **given: Further arguments of `step`.

    Returns:
        What `step` returned.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    step = Float32Step((p, seed_of(number)) for number, p in enumerate(parameters))

    def widened() -> Any:
        result = closure()
        step.widen()
        return result

    try:
        result = optimizer.step(closure=widened, **given)
        step.round()
    finally:
        step.narrow()
    return result


def rounds_itself(optimizer: object) -> bool:
    """Say whether an optimizer rounds its bfloat16 parameters stochastically by itself."""
    return bool(getattr(optimizer, "rounds_stochastically", False))


def keep_wide_state(optimizer: Optimizer) -> None:
    """Keep the state of bfloat16 parameters in float32 when it is loaded.

    `Optimizer.load_state_dict` casts floating point state to the dtype of the parameter. What a
    float32 step has made is float32 and must stay so; bfloat16 state, of a training without
    stochastic rounding, becomes float32.
    """
    loaded: list[Mapping[str, Any]] = []

    def before(_: Optimizer, state_dict: Mapping[str, Any]) -> None:
        loaded[:] = [state_dict]

    def after(optimizer: Optimizer) -> None:
        for source in loaded:
            _widen_state(optimizer, source)
        loaded.clear()

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


def _widen_state(optimizer: Optimizer, source: Mapping[str, Any]) -> None:
    numbers = [number for group in source["param_groups"] for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        if parameter.dtype is not torch.bfloat16:
            continue
        for key, value in source["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                dtype = torch.promote_types(value.dtype, torch.float32)
                optimizer.state[parameter][key] = value.detach().to(dtype, copy=True)
