"""AdamW in host memory: one pass over master, gradient and moments, with all cores.

All that a step needs is read once and written once: the gradient's cast to float32, the moments'
conversion and the cast to the copy that is uploaded are done on the way.

```
memory      gradient bf16     moments             master fp32         copy bf16
              │ cast            │ (decode)          │                    ▲ cast
              ▼                 ▼                   ▼                    │
            ────────────────── a step of AdamW, in fp32 ─────────────────┘
                                │ (encode)          │
memory                          ▼                   ▼
```

Machine code does so in registers (`optim/native.py`). Where it cannot be made, torch's operations
do on pieces that stay in the cache (`optim/state.py`), with the same bits.

The state of a parameter is found in `state[parameter]`, whatever object the parameter is, so the
optimizer may be stepped in parts (`update/partial_step.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from roundpipe_lightning.engine.capture.randomness import mix
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.optim.disk import StateFiles
from roundpipe_lightning.optim.kernel import StepKernel
from roundpipe_lightning.optim.state import (
    FlatParameter,
    MomentFormat,
    Settings,
    StatePlace,
    check_options,
    flattened_like,
    memory_of,
    shaped,
)

_HOW_TORCH_STEPS = {
    "amsgrad": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": True,
    "decoupled_weight_decay": True,
}  # the options of `torch.optim.AdamW` that are fixed here; in every group, for checkpoints
_STEPPED_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class HostAdamW(Optimizer):
    """AdamW for parameters in host memory, with a choice of how the state is kept.

    With `moments="fp32"` and float32 parameters its numbers are, to the bit, those of
    `torch.optim.AdamW(fused=True)`, for any number of threads. A state dict has the same form and
    can be loaded by either.

    Args:
        params: Parameters or parameter groups, as for every torch optimizer.
        lr: Learning rate.
        betas: Decay of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the weights per step, times `lr`.
        maximize: Whether to go up the gradient.
        moments: `"fp32"` (8 bytes per parameter), `"bf16"` (4) or `"8bit"` (2.03).
        stochastic_rounding: Whether parameters of bfloat16 are rounded at random after a step, so
            that small updates are not lost. The moments of `"bf16"` and `"8bit"` always are.
        offload: None keeps the state in memory; `"disk"` in a file that is mapped into memory.
        offload_dir: Folder of that file, on a fast local disk. Needed with `offload="disk"`.
        num_threads: Threads of a step; None: torch's intra-op threads, but one core in eight is
            left to the threads that copy and launch.
        kernel: `"native"` steps in machine code, made when it is first wanted; `"torch"` with
            torch's operations, which takes longer; `"auto"` in machine code where it can be made
            and gives the bits of torch's operations. The numbers are the same.
        seed: Of all rounding at random.

    Raises:
        ConfigurationError: An option is out of its range, or a parameter cannot be stepped.
        OffloadError: The disk has no room for the state.
    """

    def __init__(  # noqa: PLR0913 - torch's arguments and ours
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        moments: str = "fp32",
        stochastic_rounding: bool = True,
        offload: str | None = None,
        offload_dir: str | Path | None = None,
        num_threads: int | None = None,
        kernel: str = "auto",
        seed: int = 0,
    ) -> None:
        if num_threads is not None and num_threads < 1:
            raise ConfigurationError(f"num_threads={num_threads!r}: give 1 or more, or None.")
        _check_choice("moments", moments, [form.value for form in MomentFormat])
        _check_choice("kernel", kernel, ("auto", "torch", "native"))
        self._moments = MomentFormat(moments)
        self._kernel = StepKernel(
            moments=self._moments,
            stochastic_rounding=stochastic_rounding,
            num_threads=num_threads,
            choice=kernel,
            files=_files(offload, offload_dir),
        )
        self.rounds_stochastically = stochastic_rounding
        """Whether masters of bfloat16 are rounded here; nobody else needs to, then."""
        self._seed = seed
        self._num_known = 0
        given: Any = betas  # checked with the group
        defaults = {
            "lr": lr,
            "betas": tuple(given) if isinstance(given, Sequence) else given,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            **_HOW_TORCH_STEPS,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own where given; raises as the class does."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_options(group)
            for parameter in group["params"]:
                self._check_parameter(parameter)
            self._number(group["params"])
        except Exception:
            self.param_groups.pop()
            raise

    def _check_parameter(self, parameter: Tensor) -> None:
        if parameter.device.type not in ("cpu", "meta"):
            raise ConfigurationError(
                f"Parameter {self.name_of(parameter)} is on {parameter.device}; HostAdamW steps "
                "parameters in host memory. Leave the model on the CPU (RoundPipeStrategy does), "
                "or use torch.optim.AdamW."
            )
        if parameter.requires_grad and parameter.dtype not in _STEPPED_DTYPES:
            raise ConfigurationError(
                f"Parameter {self.name_of(parameter)} is of {parameter.dtype}; HostAdamW steps "
                "real floating point numbers of 16, 32 or 64 bits. Use torch.optim.AdamW for "
                "others."
            )

    def name_of(self, parameter: Tensor) -> str:
        """Return a parameter's name for errors: its own if the optimizer was given names."""
        for index, group in enumerate(self.param_groups):
            for place, member in enumerate(group["params"]):
                if member is parameter:
                    names = group.get("param_names")
                    return repr(names[place]) if names else f"{place} of group {index}"
        return f"of shape {tuple(parameter.shape)}"

    def _number(self, parameters: Iterable[Tensor]) -> None:
        """Give parameters what must not depend on when they are first stepped."""
        trained = []
        for parameter in parameters:
            if self._moments.rounds(parameter):
                self.state[parameter]["noise_seed"] = mix(self._seed, self._num_known)
            self._num_known += 1
            if parameter.requires_grad and "step" not in self.state[parameter]:
                trained.append(parameter)
        files = self._kernel.files
        if files is not None and not any(parameter.is_meta for parameter in trained):
            # the disk says now whether there is room
            fields = [self._moments.fields(parameter) for parameter in trained]
            for parameter, tensors in zip(trained, files.allocate(fields), strict=True):
                self.state[parameter].update(step=_zero(), **tensors)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: Evaluates the loss again; called first.

        Raises:
            ConfigurationError: A gradient is sparse.
            OffloadError: The state could not be written to the disk. The step has been made, and
                the state is still whole in memory: save a checkpoint elsewhere.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        stepped, with_gaps = [], []
        for group in self.param_groups:
            settings = _settings(group)
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                values = flattened_like(parameter, parameter)
                if values.data_ptr() != parameter.data_ptr():
                    with_gaps.append((parameter, values))
                stepped.append(self._flat(parameter, values, settings))
        if stepped:
            torch._foreach_add_([parameter.step for parameter in stepped], 1)
            self._kernel.step(stepped)
        for parameter, values in with_gaps:
            parameter.copy_(shaped(values, parameter))
        return loss

    def _flat(self, parameter: Tensor, values: Tensor, settings: Settings) -> FlatParameter:
        gradient = parameter.grad
        assert gradient is not None, "asked only for parameters with a gradient"
        if gradient.layout is not torch.strided:
            raise ConfigurationError(
                f"The gradient of parameter {self.name_of(parameter)} is sparse. Make its "
                "embedding with sparse=False, or use torch.optim.SparseAdam."
            )
        state = self.state[parameter]
        if "step" not in state:
            state.update(step=_zero(), **self._moments.allocate(parameter))
        seed = state.get("noise_seed", self._seed)
        return FlatParameter(
            values=values,
            gradient=flattened_like(gradient, parameter),
            state=self._moments.flat(state, parameter),
            step=state["step"],
            copy=self._kernel.copies.get(memory_of(parameter)),
            seed=mix(seed, int(state["step"]) + 1),
            settings=settings,
        )

    def write_copies(self, copies: Mapping[nn.Parameter, Tensor]) -> None:
        """Set the tensors into which every step also writes new values, cast, in the same pass.

        Args:
            copies: For each parameter, a tensor of its shape in any floating dtype: what is
                uploaded to the devices. A parameter must stay in its memory while it has one.

        Raises:
            ConfigurationError: A copy has another shape than its parameter, or gaps.
        """
        flat = {}
        for parameter, copy in copies.items():
            mine = flattened_like(copy, parameter)
            if copy.shape != parameter.shape or mine.data_ptr() != copy.data_ptr():
                raise ConfigurationError(
                    f"The copy of a parameter of shape {tuple(parameter.shape)} and strides "
                    f"{parameter.stride()} has shape {tuple(copy.shape)} and strides "
                    f"{copy.stride()}: both must be the same, without gaps."
                )
            if flattened_like(parameter, parameter).data_ptr() == parameter.data_ptr():
                flat[memory_of(parameter)] = mine
        self._kernel.copies = flat

    def close(self) -> None:
        self._kernel.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of `torch.optim.AdamW`.

        Moments of 8 bits are decoded to float32, which loses nothing when they are encoded again.
        """
        form = super().state_dict()
        ids = {
            number: parameter
            for saved, group in zip(form["param_groups"], self.param_groups, strict=True)
            for number, parameter in zip(saved["params"], group["params"], strict=True)
        }
        form["state"] = {
            number: self._moments.export(state, ids[number])
            for number, state in form["state"].items()
            if number in ids and int(state.get("step", 0))
        }
        return form

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state, of this class or of `torch.optim.AdamW`.

        The moments are converted to this optimizer's format; how the steps are computed is not
        taken over (`fused`, `foreach`, `capturable`).

        Raises:
            ConfigurationError: The state is that of another kind of Adam.
            CheckpointError: The state does not fit the parameters.
        """
        for group in state_dict["param_groups"]:
            check_options(group)
        kept = self.state
        super().load_state_dict({**state_dict, "state": {}})
        self.state = kept
        saved = state_dict["state"]
        for old, group in zip(state_dict["param_groups"], self.param_groups, strict=True):
            group.update(_HOW_TORCH_STEPS)
            for number, parameter in zip(old["params"], group["params"], strict=True):
                self._restore(parameter, saved.get(number))

    def _restore(self, parameter: Tensor, saved: Mapping[str, Any] | None) -> None:
        state = self.state[parameter]
        if not saved:
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()
            return
        if "step" not in state:
            self._number([parameter])
        if "step" not in state:
            state.update(step=_zero(), **self._moments.allocate(parameter))
        self._moments.restore(saved, state, parameter, name=self.name_of(parameter))

    @property
    def kernel(self) -> str:
        return "native" if self._kernel.is_native else "torch"

    @property
    def state_place(self) -> StatePlace:
        size, on_disk = self._moments.bytes_per_parameter(), self._kernel.files is not None
        return StatePlace(memory_bytes=0 if on_disk else size, disk_bytes=size if on_disk else 0)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r}: choose one of {', '.join(choices)}.")


def _files(offload: str | None, folder: str | Path | None) -> StateFiles | None:
    if offload not in (None, "disk"):
        raise ConfigurationError(f"offload={offload!r}: give 'disk' or None.")
    if offload is None:
        return None
    if folder is None:
        raise ConfigurationError(
            "offload='disk' needs offload_dir: a folder on a fast local disk (NVMe) with room for "
            "the optimizer's state."
        )
    return StateFiles(Path(folder).expanduser())


def _settings(group: Mapping[str, Any]) -> Settings:
    beta1, beta2 = group["betas"]
    return Settings(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        maximize=bool(group["maximize"]),
    )


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float32)
