"""Tensors that know their emulated device: placement on several devices, tested without one.

A `TaggedTensor` computes on the CPU, with the CPU's kernels and the CPU's bits, but carries the
name of a device, such as `"emulated:3"`. An operation that meets two names raises, forward and
backward, where hardware would raise "Expected all tensors to be on the same device":

```
 host tensor --tag()--> TaggedTensor "emulated:0" --+-- add --> DeviceMismatchError
                        TaggedTensor "emulated:1" --+
```

What `.device` reports
    `torch.device("cpu", 3)` for `"emulated:3"`; every host tensor reports `torch.device("cpu")`.
    PyTorch stores that index in the tensor, ignores it when it computes, and compares it. So
    `x.device != y.device`, `x.to(y.device)`, `torch.arange(n, device=x.device)` (in `tagged_mode`),
    PyTorch's own checks and its grouping of tensors by device do what they do on accelerators, and
    `.device.type` leads user code to kernels that exist here. A fake `torch.device("cuda", 3)`
    cannot be had soundly: the autograd engine of a CPU build has no queue for it and aborts the
    process; faked in Python alone, it would send `torch.autocast(x.device.type)` and checks of the
    device's capability to a backend that is not there.

What is as on CUDA
    A host tensor of no dimension may take part in an element-wise operation, host index tensors may
    index a tagged tensor, and `copy_` crosses devices. Nothing else mixes. `item()` and `tolist()`
    download; `numpy()` refuses. Where PyTorch itself compares devices, its own RuntimeError comes.

What is not
    - A host tensor of no dimension that requires a gradient is refused beside a tagged one:
      hardware brings its gradient back to the host, the emulation could not.
    - `resize_`, `set_` and an `out=` of another shape are refused, and so is pickling.
    - Outside of `tagged_mode`, `host.to(x.device)` and factories with `device=x.device` give host
      tensors, for no tagged tensor takes part in the call. The next operation then raises.
    - A gradient left in the wrong place by a custom `autograd.Function` is found when `.grad` is
      read or when it meets another tensor, not by the autograd engine.
    - `host.data = tagged` (`module.to(x.device)`) is refused; outside of `tagged_mode` not seen.
    - Random numbers come from the host's generator, whatever the device.
"""

# ruff: noqa: SLF001 - the operations of PyTorch and the fields of a tensor subclass are private

import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from roundpipe_lightning.emulation.placement import (
    DeviceMismatchError,
    Operand,
    check_places,
    device_of,
    is_foreach,
    operands_of,
    place_of_device,
)

_aten = torch.ops.aten
_RESIZING = frozenset({_aten.resize_, _aten.resize_as_, _aten.set_})


class TaggedTensor(torch.Tensor):
    """A tensor on an emulated device: made by `tag`, `move` and operations on tagged tensors."""

    computes_as_plain_tensor = True  # its operations are PyTorch's own

    _raw: torch.Tensor  # the values: an ordinary CPU tensor that never requires a gradient
    _tag: str

    @staticmethod
    def __new__(cls, raw: torch.Tensor, device_name: str) -> "TaggedTensor":
        """Wrap `raw`, without a copy, as a tensor on `device_name`."""
        # A view of a normal tensor made in inference mode is normal: follow the raw tensor.
        same = raw.is_inference() == torch.is_inference_mode_enabled()
        with nullcontext() if same else torch.inference_mode(raw.is_inference()):
            wrapper = torch.Tensor._make_wrapper_subclass(
                cls,
                raw.shape,
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                dtype=raw.dtype,
                layout=raw.layout,
                device=device_of(device_name),
            )
        if raw.is_conj() or raw.is_neg():
            torch._C._set_conj(wrapper, raw.is_conj())
            torch._C._set_neg(wrapper, raw.is_neg())
        wrapper._raw = raw
        wrapper._tag = device_name
        return wrapper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The call as the user wrote it: C++ would answer some without `__torch_dispatch__`."""
        if not all(map(_comes_after, types)):
            return NotImplemented
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            special = _SPECIAL_FUNCTIONS.get(func)
            return func(*args, **kwargs) if special is None else special(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Every operation, forward and backward: check the places, compute, tag what comes out."""
        kwargs = dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):
            raise DeviceMismatchError(f"{func} is not an operation that an emulated device can run")
        return func.decompose(*args, **kwargs) if _composite(func) else _execute(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TaggedTensor({self._raw!r}, device_name={self._tag!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a pickle would lose the place."""
        raise TypeError(
            f"a tensor on {self._tag} cannot be pickled; download it first with untag()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "TaggedTensor":
        """A copy on the same device, with the gradient; a parameter stays one."""
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise RuntimeError(
                "only leaves of the graph can be deep-copied; detach() the tensor first"
            )
        twin = TaggedTensor(self._raw.clone(), self._tag)
        twin.requires_grad_(self.requires_grad)
        memo[id(self)] = twin
        if getattr(self, "_is_param", False):
            twin._is_param = True
        if self.grad is not None:
            twin.grad = self.grad.clone()
        return twin

    def begin_read(self) -> Callable[[], Any] | None:
        """As on an accelerator: `device/accelerator.py`."""
        hardware = getattr(_thread, "hardware", None)
        return None if hardware is None else hardware.begin_read(self)

    def __format__(self, spec: str) -> str:
        return format(self.item() if self.dim() == 0 else repr(self), spec)


@functools.cache
def _comes_after(kind: Any) -> bool:
    """Whether a class of tensors has no functions of its own, which would go before these."""
    own: Any = kind.__torch_function__
    plain: Any = torch.Tensor.__torch_function__
    return (
        issubclass(kind, TaggedTensor)
        or own is torch._C._disabled_torch_function_impl
        or getattr(own, "__func__", own) is plain.__func__
    )


def swap(parameter: torch.nn.Parameter, other: torch.Tensor) -> None:
    """Exchange what a parameter and another tensor are; hooks go with the values.

    What `parameter.data = values` does on hardware, where host and device tensors are of one class.
    """
    one, two = parameter.__dict__, other.__dict__
    kinds = type(parameter), type(other)
    for name in ("_raw", "_tag", "_is_param"):
        values = one.pop(name, None), two.pop(name, None)
        for attributes, value in zip((two, one), values, strict=True):
            if value is not None:
                attributes[name] = value
    other.__class__, parameter.__class__ = kinds  # type: ignore[assignment]
    torch._C._swap_tensor_impl(parameter, other)


def tag(tensor: torch.Tensor, device_name: str) -> TaggedTensor:
    """Upload: a copy of a host tensor on a device, a leaf that requires no gradient.

    Args:
        device_name: `"emulated:<index>"`; the index is at most 127, as torch.device's.
    """
    if isinstance(tensor, TaggedTensor):
        raise DeviceMismatchError(
            f"cannot upload a tensor to {device_name}: it is on {tensor._tag}; use move()"
        )
    return _placed(tensor, device_name)  # type: ignore[return-value]


def untag(tagged: torch.Tensor) -> torch.Tensor:
    """Download: a copy of a tagged tensor as a host tensor, a leaf that requires no gradient."""
    if not isinstance(tagged, TaggedTensor):
        raise DeviceMismatchError("cannot download a tensor that is on the host")
    return _placed(tagged, None)


def tag_of(tensor: torch.Tensor) -> str | None:
    """The name of the device a tensor is on; None for a host tensor."""
    return tensor._tag if isinstance(tensor, TaggedTensor) else None


def raw_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tagged tensor, in the same memory; a host tensor itself."""
    return tensor._raw if isinstance(tensor, TaggedTensor) else tensor


def move(tensor: torch.Tensor, device_name: str | None) -> torch.Tensor:
    """Copy a tensor to a device, or to the host (None); its gradient comes back to where it was.

    Like `Tensor.to`, a tensor that is there already is returned itself.
    """
    if tag_of(tensor) == device_name:
        return tensor
    return _Move.apply(tensor, device_name)  # type: ignore[no-any-return, no-untyped-call]


_thread = threading.local()


@contextmanager
def on_hardware(hardware: Any) -> Iterator[None]:
    """Let the calling thread's moves and backward passes be those of an `EmulatedServer`."""
    before = getattr(_thread, "hardware", None)
    _thread.hardware = hardware
    try:
        yield
    finally:
        _thread.hardware = before


@contextmanager
def tagged_mode() -> Iterator[None]:
    """Let creating or moving a tensor with `device=cpu:<index>` tag what comes out, in this thread.

    Needed where no tagged tensor takes part in the call: `torch.arange(n, device=x.device)`,
    `host.to(x.device)`, `torch.tensor(values, device=x.device)`.
    """
    with _FactoryDispatch(), _FactoryFunctions():  # type: ignore[no-untyped-call]
        yield


def _placed(tensor: torch.Tensor, device_name: str | None) -> torch.Tensor:
    raw = tensor._raw if isinstance(tensor, TaggedTensor) else tensor.detach()
    copy = raw.clone()
    return copy if device_name is None else TaggedTensor(copy, device_name)


class _Move(torch.autograd.Function):
    """Transfers are differentiable: the gradient takes the same way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, device_name: str | None) -> torch.Tensor:
        ctx.source = tag_of(tensor)
        hardware = getattr(_thread, "hardware", None)
        make = functools.partial(_placed, tensor, device_name)
        return make() if hardware is None else hardware.move(tensor, device_name, make)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return move(gradient, ctx.source), None


def _execute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that has a kernel on the raw tensors and tag its results."""
    packet = func.overloadpacket
    if packet in _RESIZING:
        if len(args) == 2 and args[0] is args[1]:  # its own storage
            return args[0]
        raise DeviceMismatchError(
            f"{func} cannot change the storage of a tensor on an emulated device"
        )
    operands = list(operands_of(func, args, kwargs, place_of=tag_of))
    if kwargs.get("device") is not None:
        return _execute_to(place_of_device(kwargs["device"]), func, args, kwargs)
    check_places(func, operands)
    hardware = getattr(_thread, "hardware", None)
    if func is _aten._local_scalar_dense.default and hardware is not None:
        hardware.begin_read(args[0])()
    out = func(*_raw(args), **_raw(kwargs))
    _check_shapes(func, operands)
    if is_foreach(func) and isinstance(out, list | tuple):
        places = [o.place for o in operands if o.name == "self"]
        tagged = [_tagged(x, place) for x, place in zip(out, places, strict=True)]
        return return_and_correct_aliasing(func, args, kwargs, type(out)(tagged))
    written = [o for o in operands if o.written]
    place = next((o.place for o in written or operands if o.place is not None), None)
    if place is None:  # values were written into a host tensor
        return written[0].tensor if func._schema.returns else None
    if isinstance(out, torch.Tensor):
        wrapped: Any = TaggedTensor(out, place)
    else:
        wrapped = tree_map_only(torch.Tensor, lambda x: _tagged(x, place), out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _execute_to(place: str | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if place is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = func(*_raw(args), **_raw(kwargs))
    return tree_map_only(torch.Tensor, lambda x: _tagged(x, place), out)


@functools.cache
def _composite(func: Any) -> bool:
    """Whether the CPU runs `func` as a composition of others (seen here in inference mode)."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(func.name(), "CompositeImplicitAutograd") and not has_kernel(
        func.name(), "CPU"
    )


def _raw(tree: Any) -> Any:
    kind = type(tree)
    if kind is TaggedTensor:
        return tree._raw
    if kind is tuple or kind is list:
        return kind([_raw(item) for item in tree])
    if kind is dict:
        return {key: _raw(item) for key, item in tree.items()}
    return tree


def _tagged(tensor: torch.Tensor, place: str | None) -> torch.Tensor:
    return tensor if place is None else TaggedTensor(tensor, place)


def _check_shapes(func: Any, operands: list[Operand]) -> None:
    """Raise if an operation gave an `out=` another shape: its wrapper cannot follow."""
    if torch.Tag.inplace_view in func.tags:
        return
    for operand in operands:
        tensor = operand.tensor
        if not operand.written or not isinstance(tensor, TaggedTensor):
            continue
        if tensor._raw.shape != tensor.shape:
            raise DeviceMismatchError(
                f"{func} cannot resize {operand}: give it a tensor of the result's shape"
            )


def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`x.to(...)`: a change of place goes through `move`, so the gradient finds its way back."""
    tensor, given = args[0], [*args[1:], *(v for k, v in kwargs.items() if k != "memory_format")]
    place, dtype, found = None, None, False
    for value in given:
        if isinstance(value, torch.Tensor):
            place, dtype, found = tag_of(value), value.dtype, True
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, str | torch.device):
            if torch.device(value).type != "cpu":
                break  # PyTorch's own error: there is no such device here
            place, found = place_of_device(value), True
    else:
        if found and place != tag_of(tensor):
            layout = {k: v for k, v in kwargs.items() if k == "memory_format"}
            return move(tensor, place).to(dtype or tensor.dtype, **layout)
    return func(*args, **kwargs)  # type: ignore[no-any-return]


def _numpy(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> NoReturn:
    raise TypeError(
        f"can't convert a tensor on {tag_of(args[0])} to numpy. "
        "Use Tensor.cpu() to copy the tensor to host memory first."
    )


def _set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    target, value = args
    if tag_of(target) is None or tag_of(value) != tag_of(target):
        raise DeviceMismatchError(
            f"cannot set .data of a tensor on {tag_of(target) or 'the host'} "
            f"to one on {tag_of(value) or 'the host'}"
        )
    func(*args, **kwargs)
    target._raw = value._raw


def _get_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    gradient: torch.Tensor | None = func(*args, **kwargs)
    if gradient is not None:
        _check_gradient(args[0], gradient)
    return gradient


def _set_grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args[1] is not None:
        _check_gradient(args[0], args[1])
    func(*args, **kwargs)


def _check_gradient(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    if tag_of(tensor) != tag_of(gradient):
        raise DeviceMismatchError(
            f"the gradient of a tensor {tuple(tensor.shape)} on {tag_of(tensor) or 'the host'} "
            f"is on {tag_of(gradient) or 'the host'}"
        )


def _backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    hardware = getattr(_thread, "hardware", None)
    if hardware is None:
        return func(*args, **kwargs)

    def run() -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return hardware.run_backward(run)


def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`x.new_tensor(data)` and the old `x.new(...)`: made on the host, then uploaded."""
    tensor = args[0]
    place = tensor._tag
    if kwargs.get("device") is not None:
        place = place_of_device(kwargs["device"])
    requires_grad = kwargs.pop("requires_grad", False)
    made = func(tensor._raw, *args[1:], **{k: v for k, v in kwargs.items() if k != "device"})
    return _placed(made, place).requires_grad_(requires_grad)


_SPECIAL_FUNCTIONS: Mapping[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    torch.Tensor.to: _to,
    torch.Tensor.type_as: lambda _, args, __: move(args[0], tag_of(args[1])).to(args[1].dtype),
    torch.Tensor.cpu: lambda _, args, __: move(args[0], None),
    torch.Tensor.tolist: lambda _, args, __: move(args[0].detach(), None).tolist(),
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _numpy,
    torch.Tensor.__dlpack__: _numpy,
    torch.Tensor.data_ptr: lambda _, args, __: args[0]._raw.data_ptr(),
    torch.Tensor.backward: _backward,
    torch.autograd.backward: _backward,
    torch.autograd.grad: _backward,
    torch.Tensor.new: _new,
    torch.Tensor.new_tensor: _new,
    torch.Tensor.data.__get__: lambda _, args, __: TaggedTensor(args[0]._raw, args[0]._tag),  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    torch.Tensor.grad.__get__: _get_grad,  # type: ignore[union-attr]
    torch.Tensor.grad.__set__: _set_grad,  # type: ignore[union-attr]
}


class _FactoryDispatch(TorchDispatchMode):
    """Tags the results of operations that take a `device=` and no tagged tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload) and _composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        place = place_of_device(kwargs.get("device"))
        if place is None or any(issubclass(t, TaggedTensor) for t in types):
            return func(*args, **kwargs)
        return _execute_to(place, func, args, kwargs)


class _FactoryFunctions(TorchFunctionMode):
    """`torch.tensor` and its like, which build their result without asking the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.data.__set__ and isinstance(args[1], TaggedTensor):  # type: ignore[attr-defined]
            return _set_data(func, args, kwargs)  # a host tensor would have no memory
        converters = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
        if func not in converters or isinstance(args[0], TaggedTensor):
            return func(*args, **kwargs)
        place = place_of_device(kwargs.get("device"))
        args = tree_map_only(TaggedTensor, lambda tensor: tensor._raw, args)  # a list of scalars
        if place is None:
            return func(*args, **kwargs)
        del kwargs["device"]
        requires_grad = kwargs.pop("requires_grad", False)
        made = move(func(*args, **kwargs), place)
        return made.requires_grad_() if requires_grad else made
