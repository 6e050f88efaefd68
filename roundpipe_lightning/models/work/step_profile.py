"""Measures the work of a training step on the batch that is about to be trained on.

The user's own step runs once on the meta device, on a copy of the module and with a microbatch's
shapes, cut into segments as `meta_run` does. Nothing is fitted: the figures are those of this
shape, which is all that the plan of a running training needs. The module is left as it is.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from roundpipe_lightning.engine.capture.trees import map_tensors
from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.engine.microbatch import loss_of
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.losses.lazy_logits import LossFusion
from roundpipe_lightning.models.work.meta_copy import MetaCopy
from roundpipe_lightning.models.work.meta_run import Part, measure_run, num_bytes, num_parameters
from roundpipe_lightning.models.work.meter import Count
from roundpipe_lightning.models.work.parameters import module_fingerprint
from roundpipe_lightning.planning.model.work import Amount, BlockWork, Peak, Work, WorkProfile

__all__ = ["StepProfile", "step_profile"]


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """What a training step does.

    Attributes:
        work: Its work; all amounts are fixed, those of one microbatch.
        writes_buffers: Whether the forward pass writes into buffers, such as running statistics.
    """

    work: WorkProfile
    writes_buffers: bool


def step_profile(
    module: nn.Module,
    stack: BlockStack | None,
    *,
    microbatch: Any,
    call: Callable[[Any, Any], Any],
    compute_dtype: torch.dtype | None = None,
    fusion: LossFusion | None = None,
    settings: Mapping[str, Any] | None = None,
    replaced: Iterable[tuple[object, object]] = (),
) -> StepProfile:
    """Measure the step of one microbatch without running it on values.

    Args:
        module: The user's module; it is not changed.
        stack: Its blocks. None: the whole module is the tail segment.
        microbatch: What the step is called with; only the shapes of its tensors are used.
        call: Runs the step on a copy of the module and of the microbatch, on the meta device.
        compute_dtype: What autocast computes in; None: what the parameters are.
        fusion: Computes losses without whole logits, as the engine will; None: nothing does.
        settings: Attributes of the copy's root that differ from the module's.
        replaced: Pairs of an object that the module holds and what the copy has in its place.

    Raises:
        ConfigurationError: The step needs values, has no loss, or would change what is no part of
            the module.
        Exception: Whatever the user's code raised.
    """
    copy = MetaCopy(module, compute_dtype=compute_dtype, settings=settings, replaced=replaced)
    meta_stack = (
        None
        if stack is None
        else BlockStack(
            name=stack.name,
            blocks=tuple(copy.of(block) for block in stack.blocks),
            names=stack.names,
        )
    )

    if fusion is not None and meta_stack is not None:
        for block in meta_stack.blocks:
            block.__dict__["forward"] = _without_fusion(fusion, block.forward)

    def on_meta(tensor: Tensor) -> Tensor:
        dtype = compute_dtype if tensor.is_floating_point() and compute_dtype else tensor.dtype
        return torch.empty_like(tensor, dtype=dtype, device="meta")

    def run(root: nn.Module, _sequences: int, _seq_len: int) -> Tensor:
        loss = loss_of(_fused(fusion, lambda: call(root, map_tensors(on_meta, microbatch))))
        if loss is None or not loss.requires_grad:
            raise ConfigurationError("The step returned no loss to train on.")
        return loss

    for parameter in copy.module.parameters():  # to add to, as every microbatch but the first has
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    with _alone():
        measured = measure_run(copy.module, meta_stack, run, 1, 1)
    if copy.refusal is not None:  # and the user's code went on without it
        raise ConfigurationError(f"Something could not be copied: {copy.refusal}.")
    head = {copy.original(child) for child in measured.head_modules}
    work = _work(module, stack, measured.parts, head_modules=head)
    if compute_dtype is not None:
        work = _with_boundaries_of(work, module, compute_dtype)
    return StepProfile(work=work, writes_buffers=copy.wrote_buffers)


def _fused(fusion: LossFusion | None, call: Callable[[], Any]) -> Any:
    """Run a step whose logits are put off."""
    if fusion is None:
        return call()
    with fusion.active():
        return fusion.materialized(call())


def _without_fusion(fusion: LossFusion, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A block's forward, in which nothing is put off."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with fusion.paused():
            return forward(*args, **kwargs)

    return run


@contextlib.contextmanager
def _alone() -> Any:
    """Keep a run quiet and on the meta device."""
    with (
        torch.device("meta"),
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        torch.autograd.set_detect_anomaly(False),  # it would find gradients that are not a number
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def _work(
    module: nn.Module,
    stack: BlockStack | None,
    parts: list[Part],
    *,
    head_modules: set[nn.Module],
) -> WorkProfile:
    """Put what ran together with the original's parameters."""
    blocks = stack.blocks if stack is not None else ()
    owners = [list(block.modules()) for block in blocks]
    inside = {inner for modules in owners for inner in modules}
    rest = [child for child in module.modules() if child not in inside]
    in_head = head_modules if stack is not None else set()
    head, tail = ([m for m in rest if (m in in_head) == wanted] for wanted in (True, False))
    names = ["head segment", *(stack.names if stack is not None else ()), "tail segment"]
    works = [
        _block_work(name, part, _tensors(modules))
        for name, part, modules in zip(names, parts, [head, *owners, tail], strict=True)
    ]
    return WorkProfile(
        head=works[0],
        blocks=tuple(works[1:-1]),
        tail=works[-1],
        tied_parameters=sum(t.numel() for t in _tensors(head) & _tensors(tail)),
        fingerprint=module_fingerprint(module, stack),
    )


def _block_work(name: str, part: Part, tensors: set[Tensor]) -> BlockWork:
    def fixed(value: float) -> Amount:
        return Amount(fixed=float(value))

    def work(count: Count) -> Work:
        return Work(
            matrix_operations=fixed(count.matrix_operations),
            matrix_bytes=fixed(count.matrix_bytes),
            attention_operations=fixed(count.attention_operations),
            memory_bytes=fixed(count.memory_bytes),
        )

    trained = {tensor for tensor in tensors if tensor.requires_grad}
    return BlockWork(
        name=name,
        forward=work(part.forward),
        backward=work(part.backward),
        num_parameters=num_parameters(tensors),
        num_trainable=sum(tensor.numel() for tensor in trained),
        parameter_bytes=sum(num_bytes(tensor) for tensor in tensors),
        trainable_bytes=sum(num_bytes(tensor) for tensor in trained),
        boundary_bytes=fixed(part.boundary_bytes),
        gradient_bytes=fixed(part.gradient_bytes),
        kept_bytes=fixed(part.kept_bytes),
        attention_bytes=fixed(part.forward.attention_bytes),
        forward_peak_bytes=Peak(amounts=(fixed(part.forward_peak_bytes),)),
        peak_bytes=Peak(amounts=(fixed(part.peak_bytes),)),
    )


def _tensors(modules: Iterable[nn.Module]) -> set[Tensor]:
    owned = [(*m._parameters.values(), *m._buffers.values()) for m in modules]  # noqa: SLF001
    return {tensor for tensors in owned for tensor in tensors if tensor is not None}


def _with_boundaries_of(
    work: WorkProfile, module: nn.Module, compute_dtype: torch.dtype
) -> WorkProfile:
    """Give boundaries the parameters' width: autocast leaves what flows between blocks wide."""
    widest = max((p.itemsize for p in module.parameters() if p.is_floating_point()), default=0)
    factor = max(1.0, widest / compute_dtype.itemsize)
    return replace(
        work,
        blocks=tuple(
            replace(block, boundary_bytes=Amount(fixed=factor * block.boundary_bytes.fixed))
            for block in work.blocks
        ),
    )
