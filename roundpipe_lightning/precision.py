"""Number formats of a training run: what the masters, the compute copies and the loss scale are.

| `precision` | masters (host) | compute (device) | loss scaling |
|---|---|---|---|
| `32-true` | float32 | float32 | none |
| `64-true` | float64 | float64 | none |
| `bf16-true` | bfloat16 | bfloat16 | none |
| `16-true` | float16 | float16 | none |
| `bf16-mixed` | float32 | bfloat16 where autocast allows | none |
| `16-mixed` | float32 | float16 where autocast allows | dynamic |
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from roundpipe_lightning.engine.capture.randomness import mix
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.optim.rounding import keep_wide_state, rounds_itself, step_in_float32

_TRUE_DTYPES = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}
_AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
SUPPORTED_PRECISIONS = (*_TRUE_DTYPES, *_AUTOCAST_DTYPES)
"""Every value `RoundPipePrecision(precision=...)` takes."""

_LIGHTNINGS_MIXED_KEY = "MixedPrecision"
"""Key of the loss scale in a checkpoint, as Lightning's own plugin writes it."""


class RoundPipePrecision(Precision):
    """Precision plugin of the roundpipe strategy; `Trainer(precision=...)` makes one by itself.

    There are two kinds of context, because the microbatches of a step run in threads of their
    own: *process-wide* state (the default dtype) is set once around the step by
    `train_step_context`, while *thread-local* state (autocast) is entered in every thread through
    `thread_context`.

    Args:
        precision: One of `SUPPORTED_PRECISIONS`.
        scaler: The loss scaler of `16-mixed`; it works on gradients in host memory, so its device
            is `cpu`. `None` makes one with torch's defaults.
        stochastic_rounding: For `bf16-true`: the optimizer steps in float32, keeps its state in
            float32, and its results are rounded to the bfloat16 masters without bias. What is drawn
            follows from the seed of the run (`seed_everything`) and the number of the step.
            `HostAdamW` rounds by itself, with no need of this.

    Raises:
        ConfigurationError: `precision` is unknown, or a scaler or stochastic rounding is asked for
            where it has no use.
    """

    def __init__(
        self,
        precision: str = "32-true",
        *,
        scaler: torch.amp.GradScaler | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        super().__init__()
        if precision not in SUPPORTED_PRECISIONS:
            raise ConfigurationError(
                f"precision={precision!r} is not known to roundpipe; choose one of "
                f"{', '.join(SUPPORTED_PRECISIONS)}."
            )
        if scaler is not None and precision != "16-mixed":
            raise ConfigurationError(
                f"precision={precision!r} needs no loss scaling: leave `scaler` out, or "
                "choose precision='16-mixed'."
            )
        if stochastic_rounding and precision != "bf16-true":
            raise ConfigurationError(
                f"stochastic_rounding=True with precision={precision!r}: only bfloat16 masters are "
                "rounded. Set Trainer(precision='bf16-true'), or leave stochastic_rounding out."
            )
        if scaler is None and precision == "16-mixed":
            scaler = torch.amp.GradScaler(device="cpu")
        self.stochastic_rounding = stochastic_rounding
        """Whether the optimizer's results are rounded to bfloat16 without bias."""
        self._rounding_seed: int | None = None  # that of the run, from the first step on
        self._num_steps = 0
        self.precision = precision  # type: ignore[assignment]  # a plain str in our signature
        self.scaler = scaler
        self.takes_clipping: (
            Callable[[Callable[[], None], Optimizer, float, GradClipAlgorithmType], bool] | None
        ) = None
        """Called with how to clip gradients, and whose, to what and by what; returns whether that
        will be done later. The strategy sets it for the time of a training."""
        self.compute_device_type = "cpu"
        """Device type the workers compute on; the strategy sets it, autocast needs it."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "takes_clipping": None}

    @classmethod
    def from_lightning(
        cls, plugin: Precision, *, stochastic_rounding: bool = False
    ) -> RoundPipePrecision:
        """Take over what `Trainer(precision=...)` made: the same precision, as a roundpipe plugin.

        Args:
            plugin: One of Lightning's own plugins for a plain precision, or one of ours (returned
                as it is, unless it is to round).

        Raises:
            ConfigurationError: The plugin does something else (quantisation, sharding, ...), or
                its masters are not bfloat16 and stochastic rounding is asked for.
        """
        if isinstance(plugin, RoundPipePrecision):
            if plugin.stochastic_rounding or not stochastic_rounding:
                return plugin
            return cls(str(plugin.precision), scaler=plugin.scaler, stochastic_rounding=True)
        if type(plugin) is MixedPrecision and plugin.scaler is not None:
            scaler = torch.amp.GradScaler(device="cpu")
            scaler.load_state_dict(plugin.scaler.state_dict() or scaler.state_dict())
            return cls("16-mixed", scaler=scaler, stochastic_rounding=stochastic_rounding)
        if type(plugin) in (Precision, HalfPrecision, DoublePrecision, MixedPrecision):
            return cls(str(plugin.precision), stochastic_rounding=stochastic_rounding)
        raise ConfigurationError(
            f"The precision plugin {type(plugin).__name__} does not work with "
            "strategy='roundpipe': it changes modules or steps in its own way. Leave it out and "
            f"set Trainer(precision=...) to one of {', '.join(SUPPORTED_PRECISIONS)}."
        )

    @property
    def master_dtype(self) -> torch.dtype:
        return _TRUE_DTYPES.get(str(self.precision), torch.float32)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return _AUTOCAST_DTYPES.get(str(self.precision))

    @property
    def loss_scale(self) -> float:
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def thread_context(self) -> AbstractContextManager[Any]:
        """Thread-local state of one microbatch thread: autocast for `*-mixed`, else nothing."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(
            self.compute_device_type, dtype=self.autocast_dtype, cache_enabled=False
        )

    # Process-wide state and conversions, for Lightning ------------------------------------------

    @property
    def _plain(self) -> Precision:
        match str(self.precision):
            case "64-true":
                return DoublePrecision()
            case "bf16-true" | "16-true" as half:
                return HalfPrecision(half)
        return Precision()

    def convert_module(self, module: Module) -> Module:
        return self._plain.convert_module(module)

    def convert_input(self, data: Any) -> Any:
        return self._plain.convert_input(data)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._plain.tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        with self.tensor_init_context(), self.thread_context():
            yield

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        if self.scaler is not None:
            tensor = self.scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure and the optimizer; a scaler skips the step where gradients overflowed."""
        if self.widens(optimizer):
            return step_in_float32(
                optimizer,
                closure=partial(self._wrap_closure, model, optimizer, closure),
                seed_of=self.next_rounding(),
                **kwargs,
            )
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        closure_result = closure()
        skipped_backward = closure_result is None and model.automatic_optimization
        if not skipped_backward and not _unscales_by_itself(optimizer):
            self.scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        if skipped_backward:
            return closure_result
        step_output = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return step_output

    def steps_plainly(self, optimizer: Optimizer) -> bool:
        """Return whether a step is the optimizer's own `step()`, on gradients that are there."""
        unscales = self.scaler is not None and _unscales_by_itself(optimizer)
        return not (unscales or self.widens(optimizer))

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        if clip_val > 0 and self.scaler is not None and _unscales_by_itself(optimizer):
            raise ConfigurationError(
                f"gradient_clip_val={clip_val} with precision='16-mixed': "
                f"{type(optimizer).__name__} unscales the gradients inside its own step, too late "
                "for clipping. Build it with fused=False, or leave gradient_clip_val out."
            )
        clip = partial(super().clip_gradients, optimizer, clip_val, gradient_clip_algorithm)
        takes = self.takes_clipping
        if (
            clip_val <= 0
            or takes is None
            or not takes(clip, optimizer, clip_val, gradient_clip_algorithm)
        ):
            clip()

    def connect(
        self, model: Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[Module, list[Optimizer], list[Any]]:
        """Make the optimizers keep their float32 state when it is loaded from a checkpoint."""
        if self.stochastic_rounding:
            for optimizer in filter(self.widens, optimizers):
                keep_wide_state(optimizer)
        return super().connect(model, optimizers, lr_schedulers)

    def widens(self, optimizer: object) -> bool:
        return self.stochastic_rounding and not rounds_itself(optimizer)

    def next_rounding(self) -> Callable[[int], int]:
        """Return the seeds of the next step's rounding, by the number of the parameter."""
        if self._rounding_seed is None:
            self._rounding_seed = torch.default_generator.initial_seed()
        seed, step = self._rounding_seed, self._num_steps
        self._num_steps += 1
        return lambda number: mix(seed, step, number)

    def state_dict(self) -> dict[str, Any]:
        if not self.stochastic_rounding:
            return {}
        return {"rounding_seed": self._rounding_seed, "num_steps": self._num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.stochastic_rounding and state_dict:
            self._rounding_seed = state_dict["rounding_seed"]
            self._num_steps = state_dict["num_steps"]

    # Checkpoints: the loss scale, under the name every Lightning strategy looks for -------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None:
            checkpoint[_LIGHTNINGS_MIXED_KEY] = self.scaler.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.scaler is not None and checkpoint.get(_LIGHTNINGS_MIXED_KEY):
            self.scaler.load_state_dict(checkpoint[_LIGHTNINGS_MIXED_KEY])


def _unscales_by_itself(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
