"""Logits that are computed only when code looks at them.

`LossFusion` answers the projection of hidden states onto the vocabulary with `LazyLogits`. They
take part in what models do before `cross_entropy` without being computed (`LogitForm`), and that
becomes `linear_cross_entropy`. Any other function runs what was recorded, once: the plain logits,
with a graph. So the results of any code are those of plain PyTorch; what it does decides the memory
only.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from roundpipe_lightning.engine.capture.placeholder import writes_first
from roundpipe_lightning.engine.capture.torch_functions import METADATA, Autocast, attribute_or_name
from roundpipe_lightning.engine.capture.trees import map_tensors, tensors_in
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.models.losses.logit_form import LogitForm, form_after, loss_of_form

__all__ = ["FusedLosses", "LazyLogits", "LossFusion", "LossMode"]

LossMode: TypeAlias = Literal["auto", "fused", "eager"]
"""Choice of losses computed without whole logits: large ones, all that can be, or none."""

LARGE_LOGITS_BYTES = 256 * 2**20
"""Under `"auto"`, logits that would take more than this in float32 are lazy."""


def are_large(num_tokens: int, vocabulary: int) -> bool:
    """Return whether logits are lazy under `"auto"`."""
    return num_tokens * vocabulary * torch.float32.itemsize > LARGE_LOGITS_BYTES


@dataclass(eq=False)
class LogitSource:
    """The computation of logits, and the properties known before it runs."""

    form: LogitForm
    function: Callable[..., Tensor]
    inputs: tuple[Tensor | None, ...]
    _: KW_ONLY
    fusion: LossFusion

    def __post_init__(self) -> None:
        self._logits: Tensor | None = None
        self._autocast = Autocast.now(self.form.hidden.device.type)
        self._records_gradients = torch.is_grad_enabled()
        self._is_inference = torch.is_inference_mode_enabled()
        parent = self.inputs[0]
        if isinstance(parent, LazyLogits):
            self.versions: list[tuple[Tensor, int]] = parent.source.versions
        else:
            tensors = (x for x in self.inputs if x is not None and not x.is_inference())
            self.versions = [(tensor, tensor._version) for tensor in tensors]

    @property
    def is_made(self) -> bool:
        return self._logits is not None

    def check_unchanged(self) -> None:
        """Raise if what the logits are made from has been written into; CaptureError: it has."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise CaptureError(
                "The hidden states or the output projection were written into after the logits "
                "were asked for and before they were used, so they cannot be made any more. Use "
                "the logits first, or have them made at once: RoundPipeStrategy(loss='eager')."
            )

    @contextmanager
    def original_modes(self) -> Iterator[None]:
        """Restore autocast and the gradient mode of the projection; nothing is lazy meanwhile."""
        with ExitStack() as contexts:
            contexts.enter_context(self.fusion.paused())
            if self._is_inference != torch.is_inference_mode_enabled():
                contexts.enter_context(torch.inference_mode(self._is_inference))
            contexts.enter_context(torch.set_grad_enabled(self._records_gradients))
            contexts.enter_context(self._autocast.restored())
            yield

    def materialize(self) -> Tensor:
        if self._logits is None:
            if not isinstance(self.inputs[0], LazyLogits):
                self.check_unchanged()
            inputs = [_materialized(x) if isinstance(x, Tensor) else x for x in self.inputs]
            with self.original_modes():
                self._logits = self.function(*inputs)
        return self._logits


class LazyLogits(Tensor):
    """Logits that are made when code looks at them. `LossFusion` makes it."""

    source: LogitSource

    @staticmethod
    def from_source(source: LogitSource) -> LazyLogits:
        """Return lazy logits, in the graph of what they depend on."""
        needs_gradient = any(x is not None and x.requires_grad for x in source.inputs)
        if needs_gradient and torch.is_grad_enabled():
            logits: LazyLogits = _LazyNode.apply(source, *source.inputs)  # type: ignore[no-untyped-call]
        else:
            logits = _wrapper(source)
        source.fusion.remember(logits)
        return logits

    def materialize(self) -> Tensor:
        if self.has_other_graph:
            values: Tensor = _Values.apply(self)  # type: ignore[no-untyped-call]
            return values
        return self.source.materialize()

    @property
    def has_other_graph(self) -> bool:
        """Whether an `autograd.Function` (checkpointing, say) has made it its output since."""
        node = self.grad_fn
        return node is not None and getattr(node, "source", None) is not self.source

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = attribute_or_name(func)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        lazy = [x for x in tensors_in((args, kwargs)) if isinstance(x, LazyLogits)]
        if isinstance(first, LazyLogits) and len(lazy) == 1:
            answer = _lazy_result(first, func, name, args[1:], kwargs)
            if answer is not None:
                return answer
        fusion = lazy[0].source.fusion
        if not all(logits.source.is_made for logits in lazy):
            fusion.report.add_made(name)
        if writes_first(name) or "out" in kwargs:
            fusion.materialize_pending()  # other lazy logits must not see what is written now
        args, kwargs = map_tensors(_materialized, (args, dict(kwargs)))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # the stub lacks `cls`
        """Run an operation that came past PyTorch's functions; autograd is above it."""
        args, kwargs = map_tensors(
            lambda x: x.materialize().detach() if isinstance(x, LazyLogits) else x,
            (args, dict(kwargs or {})),
        )
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.materialize())


def _lazy_result(
    logits: LazyLogits,
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Tensor | None:
    """Return a fused loss, or lazy logits for the result of a function; None to run it."""
    source = logits.source
    if source.is_made or logits.has_other_graph:
        return None
    source.check_unchanged()
    loss = loss_of_form(source.form, name, args, kwargs)
    if loss is not None:
        source.fusion.report.add_fused()
        return loss
    form = form_after(source.form, name, args, kwargs)
    if form is None or form is source.form:
        return None if form is None else logits
    return LazyLogits.from_source(
        LogitSource(form, lambda x: func(x, *args, **kwargs), (logits,), fusion=source.fusion)
    )


def _materialized(tensor: Tensor) -> Tensor:
    return tensor.materialize() if isinstance(tensor, LazyLogits) else tensor


def _wrapper(source: LogitSource) -> LazyLogits:
    form = source.form
    wrapper: LazyLogits = torch.Tensor._make_wrapper_subclass(
        LazyLogits, form.shape, dtype=form.dtype, device=form.hidden.device
    )
    wrapper.source = source
    return wrapper


class _LazyNode(torch.autograd.Function):
    """Puts lazy logits into the graph, for code that takes them past PyTorch's functions."""

    @staticmethod
    def forward(ctx: Any, source: LogitSource, *inputs: Tensor | None) -> Tensor:  # noqa: ARG004
        ctx.source = source
        return _wrapper(source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        source: LogitSource = ctx.source
        with source.original_modes():
            leaves = [
                None if x is None else _materialized(x).detach().requires_grad_(x.requires_grad)
                for x in source.inputs
            ]
            wanted = [x for x in leaves if x is not None and x.requires_grad]
            gradients = iter(torch.autograd.grad(source.function(*leaves), wanted, gradient))
        return None, *(
            next(gradients) if x is not None and x.requires_grad else None for x in leaves
        )


class _Values(torch.autograd.Function):
    """The logits, in the graph that another `autograd.Function` has given to the lazy ones."""

    @staticmethod
    def forward(ctx: Any, logits: LazyLogits) -> Tensor:  # noqa: ARG004
        return logits.source.materialize().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return gradient


class FusedLosses:
    """Counts of losses without logits, and of what logits were made for; several threads count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_fused = 0
        self.made: Counter[str] = Counter()

    def add_fused(self) -> None:
        with self._lock:
            self.num_fused += 1

    def add_made(self, reason: str) -> None:
        with self._lock:
            self.made[reason] += 1


class _ThreadState(threading.local):
    """Lazy logits that a thread has pending, by their number."""

    def __init__(self) -> None:
        self.is_paused = False
        self.numbers = itertools.count()
        self.pending: weakref.WeakValueDictionary[int, LazyLogits] = weakref.WeakValueDictionary()


class LossFusion:
    """Makes logits lazy; asked before every torch function of the user's code outside the blocks.

    Args:
        mode: `"fused"`: every projection onto more numbers than it takes. `"auto"`: those whose
            result is large.
    """

    def __init__(self, mode: Literal["auto", "fused"]) -> None:
        self._mode = mode
        self._thread = _ThreadState()
        self.report = FusedLosses()

    def __call__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return lazy logits for the result of an output projection, else `NotImplemented`."""
        if func is not functional.linear or self._thread.is_paused:
            return NotImplemented
        source = self._source(*args, **kwargs)
        return NotImplemented if source is None else LazyLogits.from_source(source)

    def _source(
        self,
        input: Tensor,  # noqa: A002 - PyTorch's signature
        weight: Tensor,
        bias: Tensor | None = None,
    ) -> LogitSource | None:
        tensors = [input, weight] if bias is None else [input, weight, bias]
        if not all(map(_is_ordinary, tensors)) or torch.compiler.is_compiling():
            return None
        if input.dim() < 2 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
            return None
        if bias is not None and bias.shape != weight.shape[:1]:
            return None
        autocast = Autocast.now(input.device.type)
        if not (input.is_floating_point() and self._is_wanted(input, weight)):
            return None
        if len({x.dtype for x in tensors}) > 1 and not autocast.enabled:
            return None
        casts = autocast.enabled and input.dtype is not torch.float64
        form = LogitForm(
            hidden=input,
            weight=weight,
            bias=bias,
            autocast=autocast,
            dtype=autocast.dtype if casts else input.dtype,
        )
        return LogitSource(form, functional.linear, (input, weight, bias), fusion=self)

    def _is_wanted(self, hidden: Tensor, weight: Tensor) -> bool:
        vocabulary, width = weight.shape
        num_tokens = hidden.numel() // max(1, width)
        if self._mode == "fused":
            return vocabulary > width and num_tokens > 0
        return are_large(num_tokens, vocabulary)

    @contextmanager
    def active(self) -> Iterator[LossFusion]:
        """Look at every torch function of this thread, until the end of the context.

        For plain PyTorch code; the engine asks by itself.
        """
        with _FusionMode(self):
            yield self
            self.materialize_pending()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make nothing lazy in this thread until the end of the context."""
        before, self._thread.is_paused = self._thread.is_paused, True
        try:
            yield
        finally:
            self._thread.is_paused = before

    def remember(self, logits: LazyLogits) -> None:
        self._thread.pending[next(self._thread.numbers)] = logits

    def materialize_pending(self) -> None:
        """Make the logits of this thread that code still holds: their sources go away."""
        pending = list(self._thread.pending.values())
        self._thread.pending.clear()
        for logits in pending:
            if not logits.source.is_made:
                self.report.add_made("kept")
                logits.materialize()

    def materialized(self, output: Any) -> Any:
        output = map_tensors(_materialized, output)
        self.materialize_pending()
        return output


class _FusionMode(TorchFunctionMode):
    """Asks a fusion before every torch function of a thread."""

    def __init__(self, fusion: LossFusion) -> None:
        super().__init__()
        self._fusion = fusion

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = self._fusion(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if answer is NotImplemented else answer


def _is_ordinary(value: Any) -> bool:
    """Whether a tensor's operations are PyTorch's own: no quantised one, say."""
    kind = type(value)
    return kind in (Tensor, nn.Parameter) or hasattr(kind, "computes_as_plain_tensor")
