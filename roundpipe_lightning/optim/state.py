"""The state of a parameter: its tensors, and the ordinary form that checkpoints have.

```
kept      step   noise_seed   exp_avg | exp_avg_codes + exp_avg_scales    (and so exp_avg_sq)
ordinary  step   noise_seed   exp_avg                                     exp_avg_sq
```
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundpipe_lightning.errors import CheckpointError, ConfigurationError
from roundpipe_lightning.optim.moments import (
    Field,
    MomentFormat,
    dense_like,
    moments_in,
)
from roundpipe_lightning.optim.pieces import flat_like

_LARGE = 1 << 20  # elements of a parameter whose bytes are those of a large model


class StateLayout:
    """How the state is kept. Never changes, so copies of this object are the object itself.

    Args:
        form: Of the moments.
    """

    def __init__(self, *, form: MomentFormat) -> None:
        self.form = form
        self.moments = moments_in(form)

    def __deepcopy__(self, memo: dict[int, Any]) -> StateLayout:
        return self

    def fields(self, parameter: Tensor) -> dict[str, Field]:
        """Return the tensors of a parameter's moments."""
        first, second = (moment.fields(parameter) for moment in self.moments)
        return {**first, **second}

    def rounds(self, parameter: Tensor) -> bool:
        """Say whether something of a parameter is rounded at random."""
        return self.form is not MomentFormat.FP32 or parameter.dtype is torch.bfloat16

    def allocate(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors, in memory, for moments of zero."""
        return {name: field.zeros(parameter) for name, field in self.fields(parameter).items()}

    def flat(self, state: Mapping[str, Any], parameter: Tensor) -> dict[str, Tensor]:
        """Return the tensors as vectors in the order of the parameter's memory."""
        return {
            name: state[name].as_strided((state[name].numel(),), (1,))
            for name in self.fields(parameter)
        }

    def ordinary(self, state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        """Return a state as `torch.optim.AdamW` has it."""
        vectors = self.flat(state, parameter)
        moments = {m.name: m.read(vectors, parameter) for m in self.moments}
        rest = {key: value for key, value in state.items() if key not in vectors}
        return {**rest, **moments}

    def take(
        self, saved: Mapping[str, Any], state: dict[str, Any], parameter: Tensor, *, name: str
    ) -> None:
        """Copy an ordinary state into a parameter's.

        Args:
            saved: From a checkpoint.
            state: With all its tensors.
            parameter: Whose.
            name: What errors call it.

        Raises:
            CheckpointError: Something is missing, or has another shape.
        """
        vectors = self.flat(state, parameter)
        for moment in self.moments:
            values = saved.get(moment.name)
            if not isinstance(values, Tensor) or values.shape != parameter.shape:
                found = (
                    f"has shape {tuple(values.shape)}"
                    if isinstance(values, Tensor)
                    else f"is missing (there are {', '.join(map(str, saved))})"
                )
                raise CheckpointError(
                    f"The optimizer state of parameter {name}, of shape {tuple(parameter.shape)}, "
                    f"does not fit: {moment.name} {found}. Resume with the kind of optimizer that "
                    "wrote the checkpoint, or start it anew from the weights alone."
                )
            moment.write(flat_like(values.to("cpu"), dense_like(parameter)), vectors)
        state["step"].fill_(float(saved["step"]))
        if "noise_seed" in saved:
            state["noise_seed"] = int(saved["noise_seed"])

    def clear(self, state: Mapping[str, Any]) -> None:
        """Set the moments and the number of steps to zero."""
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()

    def bytes_per_parameter(self) -> float:
        """Return the bytes of the moments per parameter, for large parameters of float32."""
        large = torch.empty(_LARGE, device="meta")
        return sum(field.num_bytes(large) for field in self.fields(large).values()) / _LARGE


@dataclass(frozen=True, kw_only=True)
class StatePlace:
    """What the state of large parameters takes.

    Attributes:
        memory_bytes: Per parameter, in memory.
        disk_bytes: Per parameter, on disk.
    """

    memory_bytes: float
    disk_bytes: float

    @classmethod
    def of(cls, layout: StateLayout, *, on_disk: bool) -> StatePlace:
        """Return what a layout takes in the one place or the other."""
        size = layout.bytes_per_parameter()
        return cls(memory_bytes=0.0 if on_disk else size, disk_bytes=size if on_disk else 0.0)


def check_options(group: Mapping[str, Any]) -> None:
    """Refuse options of a parameter group that cannot be, or that ask for another algorithm.

    Raises:
        ConfigurationError: Naming the option.
    """
    if group.get("amsgrad"):
        raise ConfigurationError(
            "amsgrad=True: HostAdamW keeps no largest second moment. Use amsgrad=False, or "
            "torch.optim.AdamW."
        )
    if not group.get("decoupled_weight_decay", True):
        raise ConfigurationError(
            "The parameter group is that of Adam, whose weight decay goes through the moments "
            "(decoupled_weight_decay=False). Use torch.optim.Adam, or start HostAdamW anew."
        )
    for name in ("lr", "eps", "weight_decay"):
        value = float(group[name])
        if not 0.0 <= value < float("inf"):
            raise ConfigurationError(f"{name}={value!r}: give a number of 0 or more.")
    betas = tuple(float(beta) for beta in group["betas"])
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigurationError(f"betas={betas!r}: give two numbers from 0 to below 1.")
