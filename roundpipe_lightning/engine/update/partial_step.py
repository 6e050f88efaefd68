"""A step of any torch optimizer, captured, to be made for some parameters at a time.

```
optimizer   groups [ p0 p1 p2 p3 ]   state {p0: ..., p3: ...}   lr      .grad of every parameter
                      │  captured: hyper-parameters and gradients are those of this moment
                      ▼
part        groups [ a1 a2 ]         state {a1: ..., a2: ...}   lr      a1.grad, a2.grad
```

`a1` is an alias of `p1`: the same memory, a gradient of its own. A part is a shallow copy of the
optimizer whose groups have the aliases of some parameters, and it runs the class's own `step`. What
it does to a parameter is, to the bit, what the whole step does, for every optimizer that
`update/separable.py` finds to treat each parameter by itself.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class CapturedStep:
    """One step of an optimizer, captured while gradients and hyper-parameters change already.

    Args:
        optimizer: Whose step. Its parameters and its state are changed where a part is run.
        gradients: Those to step with, as far as they are there; None: every parameter's `.grad`.
        clip: Called with each gradient right before its part is run; changes it in place.

    Attributes:
        values_of: Gives what of a parameter is stepped, of its gradient's shape.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        gradients: Mapping[Tensor, Tensor] | None = None,
        clip: Callable[[Tensor], Any] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.clip = clip
        self.values_of: Callable[[Tensor], Tensor] = Tensor.detach
        self._groups = [
            (list(group["params"]), _options(group)) for group in optimizer.param_groups
        ]
        self._places = {
            parameter: (index, position)
            for index, (members, _) in enumerate(self._groups)
            for position, parameter in enumerate(members)
        }
        self._gradients: dict[Tensor, Tensor] = {}
        if gradients is None:
            gradients = {p: p.grad for p in self._places if p.grad is not None}
        self.give(gradients)
        self._no_state = copy.copy(optimizer.state)
        self._no_state.clear()

    @property
    def options(self) -> Sequence[Mapping[str, Any]]:
        """The groups' options, as they were captured; schedulers change the optimizer's."""
        return [options for _, options in self._groups]

    @property
    def parameters(self) -> Collection[Tensor]:
        return self._places.keys()

    def give(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Take gradients to step with, before their part is run."""
        self._gradients.update(gradients)

    def take(self, parameter: Tensor) -> Tensor | None:
        """Return a gradient and let it go."""
        return self._gradients.pop(parameter, None)

    def run(self, parameters: Iterable[Tensor]) -> None:
        """Update some of the parameters. Each is updated once; then its gradient is let go.

        Args:
            parameters: Those of the optimizer are updated, others left alone.
        """
        places = sorted(self._places[p] for p in set(parameters) & self._places.keys())
        positions: dict[int, list[int]] = {}
        for index, position in places:
            positions.setdefault(index, []).append(position)
        aliases: dict[Tensor, Tensor] = {}
        groups = []
        for index, chosen in positions.items():
            members, options = self._groups[index]
            mine = {members[i]: self._alias(members[i]) for i in chosen}
            groups.append({**_chosen(options, chosen), "params": list(mine.values())})
            aliases |= mine
        if not groups:
            return
        part = shallow_copy(self.optimizer)
        part.param_groups = groups
        part.state = copy.copy(self._no_state)
        state = self.optimizer.state
        part.state.update({alias: state[p] for p, alias in aliases.items() if p in state})
        plain_step(type(self.optimizer))(part)
        state.update({p: part.state[alias] for p, alias in aliases.items() if alias in part.state})

    def _alias(self, parameter: Tensor) -> Tensor:
        values = self.values_of(parameter)
        alias = (
            nn.Parameter(values, requires_grad=parameter.requires_grad)
            if isinstance(parameter, nn.Parameter)
            else values.requires_grad_(parameter.requires_grad)
        )
        alias.__dict__.update(parameter.__dict__)
        gradient = self.take(parameter)
        if gradient is not None and self.clip is not None:
            self.clip(gradient)
        if gradient is not None and gradient.dtype != alias.dtype:
            alias.grad_dtype = gradient.dtype
        alias.grad = gradient
        return alias


def shallow_copy(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class with the same attributes, but its class's `step`."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.__dict__.pop("step", None)  # wrapped by a learning rate scheduler
    return twin


def is_foreign(code: Any) -> bool:
    """Return whether a class or a function is neither torch's, nor this package's, nor built in."""
    return code.__module__.partition(".")[0] not in ("torch", "roundpipe_lightning", "builtins")


def plain_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return a class's `step` without the hooks that torch runs around it."""
    step: Any = kind.step
    plain: Callable[[Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain


def _options(group: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        return {
            key: list(value) if key == "param_names" else copy.deepcopy(value)
            for key, value in group.items()
            if key != "params"
        }


def _chosen(options: dict[str, Any], positions: list[int]) -> dict[str, Any]:
    names = options.get("param_names")
    if names is None:
        return options
    return {**options, "param_names": [names[i] for i in positions]}
