"""Logits that are not made unless somebody looks at them.

Models that compute their own loss project the hidden states onto the vocabulary, scale, shift and
reshape the logits, and hand them to `cross_entropy`. `LossFusion` answers the projection with a
`LazyLogits` in place of the logits. It takes part in all that without being computed, and
`cross_entropy` becomes `linear_cross_entropy`:

```
user code      logits = F.linear(h, w)    logits[:, :-1].float()    F.cross_entropy(…, labels)
here           LazyLogits(Form)  ───▶ LazyLogits(Form')  ─▶ linear_cross_entropy(h', w, …)
                    │ any other function
                    └─▶ what was put off is run, once: the plain logits, with a graph
```

So the results of any code are those of plain PyTorch; what it does decides the memory only.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from roundpipe_lightning.engine.capture.torch_functions import METADATA, attribute_or_name
from roundpipe_lightning.engine.capture.trees import map_tensors, tensors_in
from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.models.losses.logit_form import Autocast, Form, changed, consumed

__all__ = ["FusedLosses", "LazyLogits", "LossFusion", "LossMode"]

LossMode: TypeAlias = Literal["auto", "fused", "eager"]
"""Which losses are computed without whole logits: large ones, all that can be, or none."""

LARGE_LOGITS_BYTES = 256 * 2**20
"""Under `"auto"`, logits are put off that would take more than this in float32."""

_MANY_PENDING = 64  # stand-ins that a thread keeps in mind until it looks which ones still exist


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """What a function's result depends on beside its arguments."""

    gradient: bool
    inference: bool
    autocast: Autocast

    @classmethod
    def now(cls, device_type: str) -> Circumstances:
        return cls(
            gradient=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=Autocast.now(device_type),
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        with ExitStack() as contexts:
            if self.inference != torch.is_inference_mode_enabled():
                contexts.enter_context(torch.inference_mode(self.inference))
            contexts.enter_context(torch.set_grad_enabled(self.gradient))
            contexts.enter_context(self.autocast.again())
            yield


class Recipe:
    """How logits are made, and what is known of them as long as they are not.

    Args:
        form: What they are.
        function: Makes them from the inputs.
        inputs: Hidden states, weight and bias, or the logits that these are made from.
        fusion: Counts what becomes of them.
    """

    def __init__(
        self,
        form: Form,
        function: Callable[..., Tensor],
        inputs: tuple[Tensor | None, ...],
        *,
        fusion: LossFusion,
    ) -> None:
        self.form = form
        self.function = function
        self.inputs = inputs
        self.fusion = fusion
        self.circumstances = Circumstances.now(form.hidden.device.type)
        self._real: Tensor | None = None
        parent = inputs[0]
        if isinstance(parent, LazyLogits):
            self.versions: list[tuple[Tensor, int]] = parent.recipe.versions
        else:
            tensors = (x for x in inputs if x is not None and not x.is_inference())
            self.versions = [(tensor, tensor._version) for tensor in tensors]

    @property
    def is_made(self) -> bool:
        """Whether the logits are there."""
        return self._real is not None

    def check_unchanged(self) -> None:
        """Raise if what the logits are made from has been written into.

        Raises:
            CaptureError: It has.
        """
        if any(tensor._version != version for tensor, version in self.versions):
            raise CaptureError(
                "The hidden states or the output projection were written into after the logits "
                "were asked for and before they were used, so they cannot be made any more. Use "
                "the logits first, or have them made at once: RoundPipeStrategy(loss='eager')."
            )

    def logits(self) -> Tensor:
        """Return the logits, made once."""
        if self._real is None:
            if not isinstance(self.inputs[0], LazyLogits):
                self.check_unchanged()
            inputs = [x.logits() if isinstance(x, LazyLogits) else x for x in self.inputs]
            with self.fusion.aside(), self.circumstances.again():
                self._real = self.function(*inputs)
        return self._real


class LazyLogits(Tensor):
    """Logits that are made when they are looked at. `LossFusion` makes it."""

    recipe: Recipe

    @staticmethod
    def of(recipe: Recipe) -> Tensor:
        """Return the stand-in, in the graph of what the logits depend on."""
        needs_gradient = any(x is not None and x.requires_grad for x in recipe.inputs)
        if needs_gradient and torch.is_grad_enabled():
            stand_in: Tensor = _StandIn.apply(recipe, *recipe.inputs)  # type: ignore[no-untyped-call]
        else:
            stand_in = _wrapper(recipe)
        recipe.fusion.remember(stand_in)
        return stand_in

    def logits(self) -> Tensor:
        """Return the real ones."""
        if self.has_other_graph:
            values: Tensor = _Values.apply(self)  # type: ignore[no-untyped-call]
            return values
        return self.recipe.logits()

    @property
    def has_other_graph(self) -> bool:
        """Whether an `autograd.Function` (checkpointing, say) has made it its output since."""
        node = self.grad_fn
        return node is not None and getattr(node, "recipe", None) is not self.recipe

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = attribute_or_name(func)
        if name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and len(_deferred_in((args, kwargs))) == 1:
            answer = _answered(first, func, name, args[1:], kwargs)
            if answer is not None:
                return answer
        return _run_on_real(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # the stub lacks `cls`
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation that came past PyTorch's functions; autograd is above it."""
        args, kwargs = map_tensors(
            lambda x: x.logits().detach() if isinstance(x, LazyLogits) else x,
            (args, dict(kwargs or {})),
        )
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """That of the logits."""
        return repr(self.logits())


def _answered(
    stand_in: LazyLogits,
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Tensor | None:
    """Return a loss, or what stands for the result of a function; None to run it."""
    recipe = stand_in.recipe
    if recipe.is_made or stand_in.has_other_graph:
        return None
    recipe.check_unchanged()
    loss = consumed(recipe.form, name, args, kwargs)
    if loss is not None:
        recipe.fusion.report.add_fused()
        return loss
    form = changed(recipe.form, name, args, kwargs)
    if form is None or form is recipe.form:
        return None if form is None else stand_in
    return LazyLogits.of(
        Recipe(
            form,
            lambda logits: func(logits, *args, **kwargs),
            (stand_in,),
            fusion=recipe.fusion,
        )
    )


def _run_on_real(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run a function on the logits themselves."""
    recipes = [stand_in.recipe for stand_in in _deferred_in((args, kwargs))]
    fusion = recipes[0].fusion
    if not all(recipe.is_made for recipe in recipes):
        fusion.report.add_made(name)
    writes = name == "__setitem__" or name.startswith("__i") or "out" in kwargs
    if writes or (name.endswith("_") and not name.endswith("__")):
        fusion.settle()  # what has been put off must not see what is written now
    args, kwargs = map_tensors(_real, (args, dict(kwargs)))
    return func(*args, **kwargs)


def _deferred_in(node: Any) -> list[LazyLogits]:
    return [x for x in tensors_in(node) if isinstance(x, LazyLogits)]


def _real(tensor: Tensor) -> Tensor:
    return tensor.logits() if isinstance(tensor, LazyLogits) else tensor


def _wrapper(recipe: Recipe) -> LazyLogits:
    form = recipe.form
    wrapper: LazyLogits = torch.Tensor._make_wrapper_subclass(
        LazyLogits, form.shape, dtype=form.dtype, device=form.hidden.device
    )
    wrapper.recipe = recipe
    return wrapper


class _StandIn(torch.autograd.Function):
    """Puts a stand-in into the graph, for code that takes it past PyTorch's functions."""

    @staticmethod
    def forward(ctx: Any, recipe: Recipe, *inputs: Tensor | None) -> Tensor:  # noqa: ARG004
        ctx.recipe = recipe
        return _wrapper(recipe)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        recipe: Recipe = ctx.recipe
        with recipe.fusion.aside(), recipe.circumstances.again():
            leaves = [
                None if x is None else _real(x).detach().requires_grad_(x.requires_grad)
                for x in recipe.inputs
            ]
            wanted = [x for x in leaves if x is not None and x.requires_grad]
            gradients = iter(torch.autograd.grad(recipe.function(*leaves), wanted, gradient))
        return None, *(
            next(gradients) if x is not None and x.requires_grad else None for x in leaves
        )


class _Values(torch.autograd.Function):
    """The logits, in the graph that their stand-in has got from somebody else."""

    @staticmethod
    def forward(ctx: Any, stand_in: LazyLogits) -> Tensor:  # noqa: ARG004
        return stand_in.recipe.logits().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # noqa: ARG004
        return gradient


# --- where it begins ------------------------------------------------------------------------------


class FusedLosses:
    """What became of the logits that were put off; several threads count.

    Attributes:
        num_fused: Losses that were computed without the logits.
        made: What the logits were made for, with how often.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_fused = 0
        self.made: Counter[str] = Counter()

    def add_fused(self) -> None:
        """Count a loss."""
        with self._lock:
            self.num_fused += 1

    def add_made(self, reason: str) -> None:
        """Count logits that were made."""
        with self._lock:
            self.made[reason] += 1


class LossFusion:
    """Puts logits off; asked before every torch function of the user's code outside the blocks.

    Args:
        mode: `"fused"`: every projection onto more numbers than it takes. `"auto"`: those whose
            result is large.
        large_logits_bytes: What is large under `"auto"`, in float32.

    Attributes:
        report: What became of them.
    """

    def __init__(
        self,
        mode: Literal["auto", "fused"],
        *,
        large_logits_bytes: int = LARGE_LOGITS_BYTES,
    ) -> None:
        self._mode = mode
        self._large_logits_bytes = large_logits_bytes
        self._thread = _OfThread()
        self.report = FusedLosses()

    def __call__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return a stand-in for the result of an output projection, else `NotImplemented`."""
        if func is not functional.linear or self._thread.is_aside:
            return NotImplemented
        recipe = self._recipe(*args, **kwargs)
        return NotImplemented if recipe is None else LazyLogits.of(recipe)

    def _recipe(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Recipe | None:  # noqa: A002 - PyTorch's signature
        sources = [input, weight] if bias is None else [input, weight, bias]
        if not all(map(_is_ordinary, sources)) or torch.compiler.is_compiling():
            return None
        if input.dim() < 2 or weight.dim() != 2 or input.shape[-1] != weight.shape[1]:
            return None
        if bias is not None and bias.shape != weight.shape[:1]:
            return None
        autocast = Autocast.now(input.device.type)
        if not (input.is_floating_point() and self._is_wanted(input, weight)):
            return None
        if len({x.dtype for x in sources}) > 1 and not autocast.enabled:
            return None
        casts = autocast.enabled and input.dtype is not torch.float64
        form = Form(
            hidden=input,
            weight=weight,
            bias=bias,
            autocast=autocast,
            dtype=autocast.dtype if casts else input.dtype,
        )
        return Recipe(form, functional.linear, (input, weight, bias), fusion=self)

    def _is_wanted(self, hidden: Tensor, weight: Tensor) -> bool:
        vocabulary, width = weight.shape
        num_tokens = hidden.numel() // max(1, width)
        if self._mode == "fused":
            return vocabulary > width and num_tokens > 0
        return num_tokens * vocabulary * torch.float32.itemsize > self._large_logits_bytes

    @contextmanager
    def everywhere(self) -> Iterator[LossFusion]:
        """Ask for every torch function of this thread, until the end of the context.

        For plain PyTorch code; the engine asks by itself.
        """
        with _Everywhere(self):
            yield self
            self.settle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Put nothing off in this thread until the end of the context."""
        before, self._thread.is_aside = self._thread.is_aside, True
        try:
            yield
        finally:
            self._thread.is_aside = before

    def remember(self, stand_in: Tensor) -> None:
        """Take note of logits of this thread that have been put off."""
        pending = self._thread.pending
        pending.append(weakref.ref(stand_in))
        if len(pending) > self._thread.most_pending:
            pending[:] = [reference for reference in pending if reference() is not None]
            self._thread.most_pending = max(_MANY_PENDING, 2 * len(pending))

    @property
    def num_pending(self) -> int:
        """How many stand-ins of this thread are kept in mind."""
        return len(self._thread.pending)

    def settle(self) -> None:
        """Make the logits of this thread that somebody still holds: their sources go away."""
        pending, self._thread.pending = self._thread.pending, []
        for reference in pending:
            stand_in = reference()
            if isinstance(stand_in, LazyLogits) and not stand_in.recipe.is_made:
                self.report.add_made("kept")
                stand_in.logits()

    def settled(self, output: Any) -> Any:
        """Return what user code has returned, with logits in place of their stand-ins."""
        output = map_tensors(_real, output)
        self.settle()
        return output


class _OfThread(threading.local):
    """What a thread has put off."""

    def __init__(self) -> None:
        self.is_aside = False
        self.pending: list[weakref.ref[Tensor]] = []
        self.most_pending = _MANY_PENDING


class _Everywhere(TorchFunctionMode):
    """Asks for every torch function of a thread."""

    def __init__(self, fusion: LossFusion) -> None:
        super().__init__()
        self._fusion = fusion

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        answer = self._fusion(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if answer is NotImplemented else answer


def _is_ordinary(value: Any) -> bool:
    """Say whether a tensor's operations are PyTorch's own: no quantised one, say."""
    kind = type(value)
    return kind in (Tensor, nn.Parameter) or hasattr(kind, "computes_as_plain_tensor")
