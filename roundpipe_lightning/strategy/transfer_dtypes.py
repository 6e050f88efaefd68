"""What weights travel in and gradients are summed up in, where not the parameters' own format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.store.block_layout import gradient_dtype
from roundpipe_lightning.engine.store.upload_copies import NarrowCopies
from roundpipe_lightning.engine.update.separable import reason_not_with_gradients
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.planning.model.work import BlockWork, WorkProfile
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy.options import Options

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def upload_dtype_of(options: Options, precision: RoundPipePrecision) -> torch.dtype | None:
    """Return the dtype of the copies that are uploaded; None: masters are.

    Raises:
        ConfigurationError: The precision does not compute in it.
    """
    if options.upload_dtype is None:
        return None
    dtype = DTYPES[options.upload_dtype]
    if precision.autocast_dtype is not dtype:
        raise ConfigurationError(
            f"upload_dtype={options.upload_dtype!r} with precision={str(precision.precision)!r}: "
            "weights can only be rounded before the upload where autocast would round them after "
            "it. Set Trainer(precision='bf16-mixed') with 'bf16', precision='16-mixed' with "
            "'fp16', or leave upload_dtype out."
        )
    return dtype


class GradientFormat:
    """Has a module's gradients summed up in the dtype that was asked for.

    Args:
        options: The strategy's.
        precision: The precision plugin.

    Raises:
        ConfigurationError: The loss is scaled, which small formats of gradients do not bear.
    """

    def __init__(self, options: Options, precision: RoundPipePrecision) -> None:
        name = options.gradient_dtype
        if name == "bf16" and precision.scaler is not None:
            raise ConfigurationError(
                "gradient_dtype='bf16' with precision='16-mixed': the loss scaler looks at "
                "gradients of float32. Set Trainer(precision='bf16-mixed'), or leave "
                "gradient_dtype out."
            )
        self._dtype = None if name is None else DTYPES[name]
        self._set: list[nn.Parameter] = []

    def begin(self, module: nn.Module) -> None:
        """Set torch's `grad_dtype` of all parameters that may be trained."""
        for parameter in module.parameters() if self._dtype is not None else ():
            differs = gradient_dtype(parameter) is not self._dtype
            if parameter.is_floating_point() and differs:
                parameter.grad = None  # of a use before; a training begins with zero_grad
                parameter.grad_dtype = self._dtype
                self._set.append(parameter)

    def check(self, optimizers: Sequence[Optimizer], *, widened: Collection[Optimizer]) -> None:
        """Refuse optimizers that cannot step with such gradients.

        Args:
            optimizers: They, and what they step, stay as they are.
            widened: Those that see float32 only.

        Raises:
            ConfigurationError: Naming the first.
        """
        for optimizer in optimizers if self._set else ():
            reason = None if optimizer in widened else reason_not_with_gradients(optimizer)
            if reason is not None:
                raise ConfigurationError(
                    f"gradient_dtype={_name_of(self._dtype)!r}: {type(optimizer).__name__} cannot "
                    f"step with gradients of another dtype than the parameters' ({reason}). Use "
                    "roundpipe_lightning.optim.HostAdamW, which takes any, or leave gradient_dtype "
                    "out; for bfloat16 parameters stochastic_rounding=True works with any "
                    "optimizer, too."
                )

    def end(self) -> None:
        """Put parameters back whose gradients are gone."""
        for parameter in self._set:
            if parameter.grad is None:
                parameter.grad_dtype = parameter.dtype
        self._set = []


class TravelSizes:
    """Knows in which sizes weights and gradients travel, for the planner.

    Args:
        stacks: All blocks.
        dtype: Of the copies from which matrices are uploaded; None: there are none.

    Attributes:
        narrow: The parameters that have such copies (`NarrowCopies`).
    """

    def __init__(self, stacks: Iterable[BlockStack], dtype: torch.dtype | None) -> None:
        blocks = [block for stack in stacks for block in stack.blocks] if dtype is not None else []
        uses = Counter(parameter for block in blocks for parameter in block.parameters())
        alone = (parameter for parameter, count in uses.items() if count == 1)
        self.narrow = frozenset(filter(NarrowCopies.narrows, alone))
        self._dtype = dtype

    def of(self, work: WorkProfile, chain: Chain) -> WorkProfile:
        """Return a model with blocks of these sizes.

        Gradients that are sent in fewer bytes than the parameters have count as these: a device
        sums them up in the parameters' own dtype before.

        Args:
            work: The model, a block per call of the chain.
            chain: The calls.
        """
        if len(work.blocks) != len(chain.links):  # of another chain, which is looked at again
            return work
        pairs = zip(work.blocks, chain.links, strict=True)
        return replace(work, blocks=tuple(self._moved(part, link.block) for part, link in pairs))

    def _moved(self, part: BlockWork, block: nn.Module) -> BlockWork:
        parameters = list(block.parameters())
        narrow = self._dtype.itemsize if self._dtype is not None else 0
        saved = sum(p.numel() * (p.itemsize - narrow) for p in parameters if p in self.narrow)
        trained = [p for p in parameters if p.requires_grad] if part.trainable_bytes else []
        wider = sum(p.numel() * max(0, gradient_dtype(p).itemsize - p.itemsize) for p in trained)
        return replace(
            part,
            parameter_bytes=part.parameter_bytes - saved,
            trainable_bytes=part.trainable_bytes + wider,
        )


def _name_of(dtype: torch.dtype | None) -> str:
    return next(name for name, known in DTYPES.items() if known is dtype)
