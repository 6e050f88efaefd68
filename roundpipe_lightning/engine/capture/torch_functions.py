"""Torch's functions by their names, and what is around them in a thread: modes and autocast.

Where weights were rounded before the upload, functions that autocast would run with rounded ones
anyway take them as they are; others get the weights' own values (`RoundedLeaves`).
"""

from __future__ import annotations

# ruff: noqa: SLF001 - PyTorch has no public way to the stack of modes
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from roundpipe_lightning.engine.capture.trees import map_tensors, tensors_in

#: Functions that ask about a tensor and give no tensor that its gradient flows through.
QUESTIONS = frozenset(
    """
    __get__ __hash__ __len__ __repr__ __format__ backward dim element_size is_contiguous
    is_floating_point item ndimension nelement numel register_hook requires_grad_ retain_grad size
    stride tolist
    """.split()
)
#: Functions and attributes that give a tensor and know its place themselves.
KEEP_PLACE = frozenset("H T cpu cuda imag mH mT real to".split())
#: Functions and attributes that a tensor answers without its values.
METADATA = frozenset(
    """
    __hash__ __len__ device dim dtype element_size get_device grad_fn is_complex is_contiguous
    is_cpu is_cuda is_floating_point is_inference is_leaf is_meta is_nested is_quantized is_sparse
    itemsize layout name names nbytes ndim ndimension nelement numel requires_grad shape size stride
    """.split()
)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written into; of inference mode's nobody counts that."""
    return 0 if tensor.is_inference() else tensor._version


def name_of(func: Callable[..., Any]) -> str:
    """Return a function's name, or that of the attribute that it gets if it makes a tensor."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = attribute_or_name(func)
        return attribute if attribute in KEEP_PLACE else name
    return name


def attribute_or_name(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", str(func))
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    return name


def is_called_from(*modules: str, within: str = "") -> bool:
    """Return whether code of a module is among the callers, or among those below another one's."""
    frame = inspect.currentframe()
    while frame is not None and (name := frame.f_globals.get("__name__")) not in modules:
        frame = None if name == within else frame.f_back
    return frame is not None


# Their gradients keep rows apart.
_PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "roundpipe_lightning")


def has_foreign_saved_tensor_hooks() -> bool:
    """Return whether hooks of the user's see saved tensors: they may change values."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    module = "" if hooks is None else getattr(hooks[0], "__module__", None) or ""
    return hooks is not None and module.partition(".")[0] not in _PACKAGES


def saved_tensor_hooks_away() -> AbstractContextManager[None]:
    """Keep what a graph saves as it is, whatever hooks (of checkpointing, say) are around."""
    there: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return nullcontext() if there is None else _saved_tensor_hooks_away()


@contextmanager
def _saved_tensor_hooks_away() -> Iterator[None]:
    taken = []
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks
    while (hooks := top(True)) is not None:
        if has_foreign_saved_tensor_hooks():
            warnings.warn(
                "Hooks on saved tensors see none of the blocks', which are recomputed. Where they "
                "change values, gradients differ: enter saved_tensors_hooks in a block's forward.",
                stacklevel=2,
            )
        torch._C._autograd._pop_saved_tensors_default_hooks()
        taken.append(hooks)
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def nodes_of(made: Iterable[Tensor], *, beyond: Iterable[Tensor] = ()) -> Iterator[Any]:
    """Return the nodes of the graph that made tensors, but for what is `beyond` others."""
    pending: list[Any] = [tensor.grad_fn for tensor in made]
    seen = {None, *(tensor.grad_fn for tensor in beyond)}
    while pending:
        node = pending.pop()
        if node not in seen:
            seen.add(node)
            yield node
            pending += [following for following, _ in node.next_functions]


def function_of_user(node: Any) -> str:
    """Return the name of the `autograd.Function` of a node, nothing where it is a library's."""
    function: Any = getattr(node, "_forward_cls", torch.autograd.Function)
    return "" if function.__module__.partition(".")[0] in _PACKAGES else function.__name__


def is_transformed() -> bool:
    level = torch.autograd.forward_ad._current_level
    return level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def untransformed() -> AbstractContextManager[Any]:
    """Compute outside the transforms of torch.func until the end of the context."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    return temporarily_clear_interpreter_stack()


class ModeStack:
    """The modes of one thread that are put away while the engine runs.

    Its contexts are entered several times for every block: those of generators cost ten times more.
    """

    def __init__(self) -> None:
        self.away: list[Any] = []  # the modes that are put away
        self.is_active = False  # whether the user's code outside the blocks runs

    def without(self) -> AbstractContextManager[None]:
        return _Without(self)

    def again(self) -> AbstractContextManager[None]:
        return _Again(self)


class _Without(AbstractContextManager[None]):
    __slots__ = ("_stack", "_taken", "_was_active")

    def __init__(self, stack: ModeStack) -> None:
        self._stack = stack

    def __enter__(self) -> None:
        stack = self._stack
        self._taken: list[Any] = []
        while torch._C._len_torch_function_stack():
            self._taken.insert(0, torch._C._pop_torch_function_stack())
        stack.away += self._taken
        self._was_active, stack.is_active = stack.is_active, False

    def __exit__(self, *error: object) -> None:
        del self._stack.away[len(self._stack.away) - len(self._taken) :]
        self._stack.is_active = self._was_active
        for mode in self._taken:
            torch._C._push_on_torch_function_stack(mode)


class _Again(AbstractContextManager[None]):
    __slots__ = ("_back", "_stack")

    def __init__(self, stack: ModeStack) -> None:
        self._stack = stack

    def __enter__(self) -> None:
        self._back, self._stack.away = self._stack.away, []
        for mode in self._back:
            torch._C._push_on_torch_function_stack(mode)

    def __exit__(self, *error: object) -> None:
        for _ in self._back:
            torch._C._pop_torch_function_stack()
        self._stack.away = self._back


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """The state of autocast for a type of device."""

    device_type: str
    enabled: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Autocast:
        """Return the state of this thread; off on the meta device, which autocast lacks."""
        if device_type == "meta":
            return cls(device_type=device_type, enabled=False, dtype=torch.float32)
        return cls(
            device_type=device_type,
            enabled=torch.is_autocast_enabled(device_type),
            dtype=torch.get_autocast_dtype(device_type),
        )

    def restored(self) -> AbstractContextManager[Any]:
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False
        )


def autocast_now() -> list[Autocast]:
    accelerator = torch.accelerator.current_accelerator()
    types = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [Autocast.now(kind) for kind in types]


def autocast_as(states: Iterable[Autocast]) -> AbstractContextManager[Any]:
    others = [state for state in states if state != Autocast.now(state.device_type)]
    if not others:
        return nullcontext()
    contexts = ExitStack()
    for state in others:
        contexts.enter_context(state.restored())
    return contexts


#: Objects of the user's code that have values for each thread.
THREAD_LOCALS: ContextVar[Sequence[threading.local]] = ContextVar("threading.local", default=())


class Variables(NamedTuple):
    """Context variables of a thread, and what the user's `threading.local` objects have in it."""

    context: Context
    locals: Sequence[tuple[threading.local, dict[str, Any]]]


def variables_now() -> Variables:
    return Variables(copy_context(), [(one, dict(vars(one))) for one in THREAD_LOCALS.get()])


@contextmanager
def variables_as(variables: Variables) -> Iterator[None]:
    missing = object()
    tokens = [
        (variable, variable.set(value))
        for variable, value in variables.context.items()
        if variable.get(missing) is not value
    ]
    before = variables_now().locals
    _set_locals(variables.locals)
    try:
        yield
    finally:
        _set_locals(before)
        for variable, token in reversed(tokens):
            variable.reset(token)


def set_variables(variables: Variables) -> None:
    for variable, value in variables.context.items():
        if variable.get(variables) is not value:
            variable.set(value)
    _set_locals(variables.locals)


def _set_locals(values: Sequence[tuple[threading.local, dict[str, Any]]]) -> None:
    for one, own in values:
        vars(one).clear()
        vars(one).update(own)


def without_autocast() -> AbstractContextManager[Any]:
    """Compute without autocast until the end of the context.

    A backward pass does: under autocast it would round the gradients of operations that the user's
    code has run outside it.
    """
    if not torch._C._is_any_autocast_enabled():  # the public way asks for each device
        return nullcontext()
    return autocast_as([replace(state, enabled=False) for state in autocast_now()])


#: Functions that autocast runs with rounded operands, on every kind of device.
_ROUND = frozenset(
    """
    __matmul__ __rmatmul__ addmm baddbmm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d linear matmul mm multi_head_attention_forward
    """.split()
)
#: Functions that do not compute with values, beside questions.
_WITHOUT_VALUES = frozenset(
    """
    __deepcopy__ __set__ data_ptr register_post_accumulate_grad_hook share_memory_ untyped_storage
    """.split()
)
#: Functions that give views.
_VIEWS = frozenset(
    """
    T __getitem__ chunk expand flatten mT narrow permute select split squeeze swapaxes t transpose
    unbind unsqueeze view
    """.split()
)


class _Whole(torch.autograd.Function):
    """A weight's own values in place of its rounded leaf, which gets their gradient."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, values: Tensor) -> Tensor:  # noqa: ARG004
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradient, None


class RoundedLeaves:
    """Leaves of weights that were rounded.

    Args:
        whole: Returns a parameter's own values; given its leaf, too.

    Attributes:
        masters: What each leaf stands for, by its identity.
        views: Views of them, by their identity, with what makes that of own values.
        are_made_whole: Whether an operation has got own values since `forget_views`.
    """

    def __init__(self, whole: Callable[[nn.Parameter, Tensor], Tensor]) -> None:
        self.masters: dict[int, nn.Parameter] = {}
        self.are_made_whole = False
        self._values_of = whole
        self._values: dict[int, Tensor] = {}
        self._dtypes: set[torch.dtype] = set()
        self.views: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}

    def forget_views(self) -> None:
        self.views.clear()
        self.are_made_whole = False

    def renew(self, leaf: Tensor) -> None:
        self._values.pop(id(leaf), None)

    def add(self, leaves: Mapping[nn.Parameter, nn.Parameter]) -> None:
        for parameter, leaf in leaves.items():
            if leaf.dtype is not parameter.dtype:
                self.masters[id(leaf)] = parameter
                self._dtypes.add(leaf.dtype)

    def suit(self, func: Callable[..., Any], *, device_type: str) -> bool:
        """Return whether autocast would round the weights that a function takes to what they are.

        Views of them aside.
        """
        return (
            name_of(func) in _ROUND
            and torch.is_autocast_enabled(device_type)
            and self._dtypes == {torch.get_autocast_dtype(device_type)}
        )

    def replaced(
        self, func: Callable[..., Any], args: Any, kwargs: Any, *, device_type: str
    ) -> tuple[Any, Any, Any]:
        """Return what a function gives if it gives a view, else `NotImplemented`; its arguments."""
        name = name_of(func)
        if name in QUESTIONS or name in _WITHOUT_VALUES:
            return NotImplemented, args, kwargs
        tensors = [x for x in tensors_in((args, kwargs)) if x.is_floating_point()]
        rounded = {x.dtype for x in tensors if self._is_rounded(x)}
        if not rounded:
            return NotImplemented, args, kwargs
        if name in _VIEWS:
            result = func(*args, **kwargs)
            for number, view in enumerate([result] if isinstance(result, Tensor) else result):
                self.views[id(view)] = view, partial(self._view, func, args, kwargs, number)
            return result, args, kwargs
        others = {x.dtype for x in tensors if not self._is_rounded(x)}
        rounds = name in _ROUND and torch.is_autocast_enabled(device_type)
        # A product with other operands than rounded ones would fail.
        if others == rounded or (rounds and rounded == {torch.get_autocast_dtype(device_type)}):
            return NotImplemented, args, kwargs
        self.are_made_whole = True
        return NotImplemented, *map_tensors(self._made_whole, (args, kwargs))

    def _is_rounded(self, tensor: Tensor) -> bool:
        return id(tensor) in self.masters or id(tensor) in self.views

    def _made_whole(self, tensor: Tensor) -> Tensor:
        key = id(tensor)
        if key in self.views:
            return self.views[key][1]()
        if key not in self.masters:
            return tensor
        if key not in self._values:
            self._values[key] = self._values_of(self.masters[key], tensor)
        whole: Tensor = _Whole.apply(tensor, self._values[key])  # type: ignore[no-untyped-call]
        return whole

    def _view(self, func: Callable[..., Any], args: Any, kwargs: Any, number: int) -> Tensor:
        args, kwargs = map_tensors(self._made_whole, (args, kwargs))
        result: Any = func(*args, **kwargs)
        return result if isinstance(result, Tensor) else result[number]
