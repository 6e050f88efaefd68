"""User code outside the blocks: run on a view, on whichever worker has the turn.

The head segment runs on one worker and the tail segment on another, but the user's code is one
function that was written for one device. Parameters and buffers of the view are placed where the
code runs when it asks for them. A tensor made on an earlier worker is brought by the operation that
uses it, differentiably; an in-place operation goes to where its target is instead. A master that
reaches an operation past the view (kept in a list, say) is replaced by its leaf, so that its
gradient is not lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import (
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from roundpipe_lightning.engine.capture.module_writes import ParameterWrites, Writes, refuse_write
from roundpipe_lightning.engine.capture.placeholder import (
    Called,
    LazyTensor,
    make_proxy,
    writes_first,
)
from roundpipe_lightning.engine.capture.randomness import RANDOM_FUNCTIONS, RandomStream
from roundpipe_lightning.engine.capture.side_outputs import ORIGIN, SideOutputs
from roundpipe_lightning.engine.capture.torch_functions import (
    KEEP_PLACE,
    METADATA,
    QUESTIONS,
    ModeStack,
    RoundedLeaves,
    attribute_or_name,
    is_transformed,
    name_of,
    untransformed,
    without_autocast,
)
from roundpipe_lightning.engine.capture.trees import map_tensors, parameters_in, tensors_in
from roundpipe_lightning.engine.capture.view import (
    DELETED,
    HOOKS,
    View,
    ViewClasses,
    ViewMaker,
    write_through,
)
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.store.block_layout import gradient_dtype, sum_wide
from roundpipe_lightning.engine.transfer.gradient_reduce import Gradients, fold
from roundpipe_lightning.engine.worker.loaded_blocks import PlacedBuffers, ResidentBlocks
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.errors import CaptureError, ConfigurationError

#: Functions that ask nothing of a tensor's values, or that leave its graph.
_WITHOUT_VALUES = METADATA | {"detach"}
_DATA: Any = Tensor.data.__get__  # type: ignore[attr-defined]
_GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]
_READS_GRADIENT = (
    "A step, or a block, reads a parameter's .grad, which is None in steps. What the batch before "
    "gave is there in on_after_backward, on_before_optimizer_step and after the batch: keep it in "
    "an attribute."
)

#: Types of arguments that neither are parameters nor hold some.
_NO_MASTERS = frozenset({int, float, bool, str, slice, type(None), torch.dtype})

#: Functions that neither draw random numbers nor write, as far as some have been seen.
_PLAIN: set[Any] = set()
_KINDS_OF_TORCH = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


Outside: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Asked before every torch function outside the blocks: the function and its arguments, all on one
device. Returns the result, or `NotImplemented` where the function is to run as it is."""


class RootView(View):
    """A view of the whole module: it knows on which device its code runs at present."""

    @property
    def device(self) -> Any:
        return self.__dict__["_present_device"]()


def root_view(
    module: nn.Module, maker: ViewMaker, present_device: Callable[[], torch.device]
) -> nn.Module:
    """Return the view of the whole module, whose `device` is where its code runs at present."""
    has_device = isinstance(getattr(type(module), "device", None), property)
    view = maker.view_of(module, *((RootView,) if has_device else ()))
    dict.update(view.__dict__, _present_device=present_device)
    return view


@dataclass(kw_only=True, eq=False)
class UserCode(TorchFunctionMode):
    """Runs user code outside the blocks; a context for the thread that does.

    It has less than 30 attributes: Python finds those of an object with more in a slower way, which
    took a tenth of the time of an operation in a block.
    """

    _host: ClassVar[Device] = CpuDevice()
    module: nn.Module
    worker: Callable[[], Worker]  # returns the worker, of all `workers`, that has the turn
    workers: Sequence[Worker]
    # the microbatch's random numbers; None leaves the process's generators in use
    stream: RandomStream | None
    classes: ViewClasses
    outside: Outside | None = None  # asked before every torch function outside the blocks, or None
    # whether the code may write into parameters, as it runs once; None: where it computes in their
    # memory
    may_write: bool | None = None
    writes: Writes = field(default_factory=Writes)  # of attributes

    def __post_init__(self) -> None:
        super().__init__()
        self.side_outputs = SideOutputs()
        #: Gives what a later segment uses for a tensor of an earlier one; None where there is none.
        self.cut: Callable[..., Tensor] | None = None
        #: Refuses `torch.autograd.grad` of outputs and inputs where it would miss something, and
        #: `backward` of outputs where it would miss or leave something.
        self.check_gradients: Callable[..., None] | None = None
        self._devices = tuple(w.device for w in self.workers)
        self._crosses = not all(device.shares_host_memory for device in self._devices)
        #: Called before the code writes into a parameter, or could: others may be reading it.
        self.before_write: Callable[[], None] = lambda: None
        #: Returns the name of a block whose backward pass is to come and has the parameter, or "".
        self.used_by: Callable[[nn.Parameter], str] = lambda p: ""
        #: Called before the code reads a buffer, which blocks may have written into.
        self.before_read: Callable[[], None] = lambda: None
        self._parameter_writes = ParameterWrites(
            is_watched=self._crosses or self.may_write is not None, leaf=self._leaf_to_write
        )
        self._modes = ModeStack()
        self._resident: ResidentBlocks | None = None
        self._masters = frozenset(map(id, parameters_in(self.module)))  # hashes of tensors are slow
        self._gathers = False
        self.leaves: dict[tuple[int, nn.Parameter], nn.Parameter] = {}
        self._rounded = RoundedLeaves(lambda p, leaf: self.worker().whole_values(p, leaf))
        self.streamed: set[nn.Parameter] = set()  # those of blocks that ran without a plan
        self._buffers: dict[int, PlacedBuffers] = {}
        self.maker = ViewMaker(
            parameter=self._leaf, buffer=self._buffer, classes=self.classes, write=self._note_write
        )
        self._blocks: tuple[nn.Module, ...] = ()
        # attributes written since the last call of a block, with what they had then
        self._since_blocks: dict[tuple[int, str], tuple[nn.Module, Any]] = {}

    def open_view(self, blocks: Iterable[nn.Module], *, called: Called) -> nn.Module:
        """Make the view of the module, in which blocks are proxies that call `called`."""
        self._blocks = tuple(blocks)
        self.maker.add_later(
            self._blocks,
            lambda block: make_proxy(block, maker=self.maker, classes=self.classes, called=called),
        )
        present = self.worker  # until `close`
        return root_view(self.module, self.maker, lambda: present().device.torch_device)

    def _leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        worker = self.worker()
        key = (worker.index, parameter)
        if key not in self.leaves:
            with self.suspended(), untransformed():
                values = worker.outside(parameter)
                worker.renew(parameter, values)
                leaf = nn.Parameter(values, requires_grad=parameter.requires_grad)
                sum_wide(leaf, gradient_dtype(parameter))
                self.leaves[key] = leaf
                self._rounded.add({parameter: leaf})
        return self.leaves[key]

    def _leaf_to_write(self, parameter: nn.Parameter) -> nn.Parameter:
        self.before_write()
        return self._leaf(parameter) if id(parameter) in self._masters else parameter

    @cached_property
    def _in_blocks(self) -> frozenset[int]:
        return frozenset(id(module) for block in self._blocks for module in block.modules())

    def _note_write(self, module: nn.Module, name: str, value: Any) -> None:
        """Hear that the code has written an attribute.

        Where it runs once, code that reaches the module past its view finds it at once: a block
        that keeps a reference to the whole module, say.
        """
        waits = self.may_write is False or id(module) in self._in_blocks or name in HOOKS
        if waits or isinstance(value, (nn.Module, nn.Parameter)):
            self.writes.note(module, name, value)
            return
        self.writes.mark()
        before = vars(module).get(name, DELETED)
        self._since_blocks.setdefault((id(module), name), (module, before))
        write_through(module, name, value)

    def hold_last_writes(self) -> None:
        """Let what was written after the last block wait for the recomputes of blocks."""
        for (_, name), (module, before) in self._since_blocks.items():
            self.writes.note(module, name, vars(module).get(name, DELETED))
            write_through(module, name, before)

    def _buffer(self, buffer: Tensor) -> Tensor:
        with self.suspended(), untransformed():
            if self._crosses:
                self.before_read()
            return self._present_buffers().place(buffer)

    def _present_buffers(self) -> PlacedBuffers:
        worker = self.worker()
        if worker.index not in self._buffers:
            self._buffers[worker.index] = PlacedBuffers(
                worker.device, keep_writes=True, refuses=self.refuses_writes
            )
        return self._buffers[worker.index]

    @property
    def refuses_writes(self) -> bool:
        """Whether nothing may be written: as the code runs several times."""
        return self.may_write is False

    def write_buffers_back(self) -> bool:
        """Bring to the host what user code wrote into buffers, if any; at the end of its turn."""
        return self._present_buffers().write_back(self.maker.views, owner_of=self.owner_of)

    def renew_buffers(self) -> None:
        """Let the code see what blocks have written into buffers that it has read before."""
        if self._crosses:
            self.write_buffers_back()
            self._buffers.clear()

    def check_call(self, block: nn.Module, name: str) -> None:
        """Raise a CaptureError if something is around the call of a block that misses it."""
        self._since_blocks.clear()
        written = self._present_buffers().written if self._crosses else []
        if written and not set(written).isdisjoint(block.buffers()):
            raise CaptureError(
                f"The step writes into a buffer of block {name!r} and then calls it: the device "
                "that runs the block does not see that. Write in a hook (on_train_batch_start, "
                "say), or give the block the values as an argument."
            )
        if self.maker.is_changed(block):
            around = "with other parameters, buffers or modules in it (functional_call, say)"
        elif is_transformed():
            around = "inside a transform (vmap, grad or jvp of torch.func, forward_ad)"
        else:
            return
        raise CaptureError(
            f"Block {name!r} is called {around}: the worker that runs it does not know of that. "
            "Call a copy, made by copy.deepcopy: it runs as part of the step, outside the blocks."
        )

    @property
    def used_parameters(self) -> set[nn.Parameter]:
        return {parameter for _, parameter in self.leaves} | self.streamed

    def check_kept(self) -> None:
        """Raise if the code has changed what later steps would not know of.

        It has made something trainable, whose gradient would be missing, or has replaced modules or
        parameters.
        """
        for module, view in self.maker.made.items():
            tables = view.__dict__["_modules"], view.__dict__["_parameters"]
            if any(table.is_changed for table in tables):
                raise ConfigurationError(
                    "training_step has replaced a module or a parameter of "
                    f"{type(module).__name__}, which the next step would not find. Do it in a "
                    "hook, on_train_batch_start say, or put it under a new name."
                )
        for (_, parameter), leaf in self.leaves.items():
            if leaf.requires_grad and not parameter.requires_grad:
                name = self._name_of(parameter)
                raise ConfigurationError(
                    f"training_step made {name!r} trainable (requires_grad_, or set_adapter of "
                    "peft). What is trained is fixed before a step begins: do it in "
                    "on_train_batch_start or configure_model. Adapters that a step changes "
                    "between must all be trainable before it."
                )

    def write_parameters_back(self) -> None:
        """Write what the code outside the blocks has written into parameters into the masters.

        It is refused where it may not, or the optimizer's step is still being made.
        """
        if not self._parameter_writes.may_be_any:
            return
        with self.suspended(), torch.no_grad():
            written = self._parameter_writes.take_written(keeps=bool(self.may_write))
            if written:
                self.before_write()
            for leaf in written:
                known = (key for key, value in self.leaves.items() if value is leaf)
                index, parameter = next(known, (0, leaf))
                worker = self.workers[index]
                if leaf.dtype is not parameter.dtype:
                    raise ConfigurationError(
                        f"training_step writes into the parameter {self._name_of(parameter)!r}, "
                        "which workers have rounded to 16 bits: set "
                        "RoundPipeStrategy(upload_dtype=None), on the command line "
                        "trainer.strategy.upload_dtype=null."
                    )
                if block := self.used_by(parameter):
                    raise ConfigurationError(
                        f"training_step writes into the parameter {self._name_of(parameter)!r} "
                        f"after it has called block {block!r}, whose backward pass would be that "
                        "of other values. Write before the call, or when no step runs, in "
                        "on_train_batch_end or a callback."
                    )
                if not self.may_write or (
                    id(parameter) in self._masters and not worker.rewrite(parameter, leaf)
                ):
                    self._refuse_write(leaf)
                for (other, master), stale in self.leaves.items():
                    if master is parameter and stale is not leaf:
                        self.workers[other].renew(parameter, stale.data)

    def _refuse_write(self, written: Tensor) -> None:
        originals = (p for (_, p), leaf in self.leaves.items() if leaf is written)
        parameter = next(originals, written)
        if id(parameter) in self._masters:  # not of a module that the step has made
            refuse_write(self._name_of(parameter))

    def _name_of(self, parameter: Tensor) -> str:
        return next(n for n, p in self.module.named_parameters() if p is parameter)

    def take_gradients(self) -> dict[int, Gradients]:
        """Take the gradients of all leaves from them, by the number of the worker."""
        found: dict[int, Gradients] = {}
        for (worker, parameter), leaf in self.leaves.items():
            if leaf.grad is not None:
                fold(found.setdefault(worker, {}), {parameter: leaf.grad})
                leaf.grad = None
        return found

    def leaves_of(self, parameter: nn.Parameter) -> list[nn.Parameter]:
        return [leaf for (_, known), leaf in self.leaves.items() if known is parameter]

    def close(self) -> None:
        """Break the circles of references, so that memory is free at once. Nothing works after."""
        self.classes.end_swaps()
        self.maker.close()
        self.leaves.clear()
        self._buffers.clear()
        self.streamed.clear()
        self.side_outputs.clear()
        self.stream = self.cut = self.check_gradients = None
        del self.worker, self._rounded, self.before_write, self._parameter_writes
        del self.before_read, self.used_by

    def owner_of(self, tensor: Tensor) -> Device:
        """Return the device that holds a tensor, the present worker's if several do."""
        for device in (self.worker().device, *self._devices):
            if device.holds(tensor):
                return device
        return self._host

    def worker_of(self, tensor: Tensor) -> Worker | None:
        """Return the worker in whose memory a tensor is, the present one if several share it.

        None for a host tensor of a run whose workers do not compute there.
        """
        for worker in (self.worker(), *self.workers):
            if tensor.device == worker.device.torch_device:
                return worker
        return None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch over the operations until the end of the context: user code runs."""
        _watch_custom_functions()
        with self.resumed():
            self._modes.is_active = True
            try:
                yield
            finally:
                self._modes.is_active = False

    def suspended(self) -> AbstractContextManager[None]:
        return self._modes.without()

    def resumed(self) -> AbstractContextManager[None]:
        return self._modes.again()

    @contextmanager
    def in_block(
        self, number: int, resident: ResidentBlocks, *, gathers: bool = False
    ) -> Iterator[None]:
        """Run a block until the end of the context.

        It `gathers` where tensors that it keeps in objects (a cache) may be on other devices.
        """
        self._resident, self._gathers = resident, gathers and self._crosses
        outer, stream = self._parameter_writes, self.stream
        self._parameter_writes = inner = ParameterWrites(is_watched=True, compares=True)
        if stream is not None:
            stream.begin_block(number)
        try:
            yield
        finally:
            if stream is not None:
                stream.end_block()
            self._resident, self._gathers = None, False
            resident.rounded.forget_views()
            self.side_outputs.end_block()
            self._parameter_writes = outer
            written = inner.take_written()  # what was put elsewhere is put back
        for leaf in written:
            self._refuse_write(resident.original_of(leaf))

    @property
    def runs_a_block(self) -> bool:
        return self._resident is not None

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        watched = nullcontext() if self.stream is None else self.stream.watched()
        with watched, self.resumed(), without_autocast():
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A block's operation passes here in a microsecond: no call that is not needed is made.
        kwargs, resident = kwargs or {}, self._resident
        if resident is None or func not in _PLAIN or self._gathers or resident.rounded.views:
            return self._call(func, args, kwargs)
        given, rounded = (*args, *kwargs.values()) if kwargs else args, resident.rounded
        outputs = self.side_outputs
        looks = outputs.looks_at_arguments
        for x in given:
            kind = type(x)
            if kind is Tensor:
                if looks and (outputs.marks or getattr(x, ORIGIN, None) is not None):
                    outputs.check_tensor(x)
            elif kind not in _NO_MASTERS and (
                kind is not nn.Parameter
                or id(x) in self._masters
                or (
                    id(x) in rounded.masters
                    and not rounded.suit(func, device_type=resident.device.torch_device.type)
                )
            ):
                return self._call(func, args, kwargs)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if outputs.looks_at_results:
            outputs.observe(result)
        return result

    def _call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a torch function as the code that runs, in a block or outside, is to see it."""
        resident, outputs = self._resident, self.side_outputs
        if self._parameter_writes.is_watched or type(func) is MethodWrapperType:
            values = self._parameter_writes.note(func, args, kwargs)
            if values is not None:
                return values
        answer: Any = NotImplemented
        if self._modes.is_active:
            answer, args, kwargs = self._outside_blocks(func, args, kwargs)
        elif resident is not None:
            answer, args, kwargs = self._on_resident_leaves(func, args, kwargs, resident.rounded)
            if self._gathers and (name := name_of(func)) not in QUESTIONS | KEEP_PLACE:
                args, kwargs = self._brought_together(name, args, kwargs, leaf=lambda x: x)
            if outputs.looks_at_arguments:
                outputs.check(args)
                outputs.check(kwargs.values())
        if answer is not NotImplemented:
            return answer
        if resident is not None and func is Tensor.backward:
            with resident.refuses_gradients():
                return func(*args, **kwargs)
        if self.stream is None:
            return func(*args, **kwargs)
        result = self.stream.call(func, args, kwargs)
        if outputs.looks_at_results:
            outputs.observe(result)
        if resident is not None and _is_plain(func):
            _PLAIN.add(func)
        return result

    def _outside_blocks(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        name = name_of(func)
        if name in QUESTIONS:
            if name == "backward" and self.check_gradients is not None:
                self.check_gradients(tensors_in(args[0]))
            elif func == _GRADIENT and any(args[0] is leaf for leaf in self.leaves.values()):
                warnings.warn(_READS_GRADIENT, stacklevel=3)
            return NotImplemented, args, kwargs
        if func is torch.autograd.grad and self.check_gradients is not None:
            if not is_transformed():  # else these are the transform's own
                self.check_gradients(args[0], args[1])
            return func(*args, **kwargs), args, kwargs
        if self.cut is not None and name not in _WITHOUT_VALUES and func != _DATA:
            args, kwargs = self._cut_off(self.cut, name, args, kwargs)
        answer: Any = NotImplemented
        if self._rounded.masters:
            answer, args, kwargs = self._with_whole_values(func, args, kwargs, self._rounded)
        if answer is not NotImplemented:
            return answer, args, kwargs
        if self._crosses and name not in KEEP_PLACE:
            args, kwargs = self._brought_together(name, args, kwargs, leaf=self._leaf_for)
        else:
            args = tuple([self._leaf_for(x) for x in args])
            if kwargs:
                kwargs = {key: self._leaf_for(x) for key, x in kwargs.items()}
        answer = NotImplemented if self.outside is None else self.outside(func, args, kwargs)
        return answer, args, kwargs

    def _cut_off(self, cut: Callable[..., Tensor], name: str, args: Any, kwargs: Any) -> Any:
        """Put leaves in for tensors of earlier segments; one that is written into stays."""
        written = set(map(id, tensors_in(args[:1] if writes_first(name) else kwargs.get("out"))))
        # A lazy tensor may begin a segment, which makes the other tensors those of an earlier one.
        tensors = sorted(tensors_in((args, kwargs)), key=lambda x: not isinstance(x, LazyTensor))
        taken = {id(x): cut(x, writer=name if id(x) in written else "") for x in tensors}
        if all(taken[id(x)] is x for x in tensors):
            return args, kwargs
        return map_tensors(lambda x: taken.get(id(x), x), (args, kwargs))

    def cut_off_for_function(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        cut = self.cut
        if cut is None or not self._modes.is_active:
            return args
        with self.suspended():
            tensors = sorted(tensors_in(args), key=lambda x: not isinstance(x, LazyTensor))
            taken = {id(x): cut(x) for x in tensors}
        return tuple(taken.get(id(x), x) for x in args)

    def _with_whole_values(
        self, func: Any, args: Any, kwargs: Any, rounded: RoundedLeaves
    ) -> tuple[Any, Any, Any]:
        kind = self.worker().device.torch_device.type
        return rounded.replaced(func, args, kwargs, device_type=kind)

    def _on_resident_leaves(
        self, func: Any, args: Any, kwargs: Any, rounded: RoundedLeaves
    ) -> tuple[Any, Any, Any]:
        assert self._resident is not None, "a block runs"
        args = tuple([self._resident_leaf_for(x) for x in args])
        if kwargs:
            kwargs = {key: self._resident_leaf_for(x) for key, x in kwargs.items()}
        if func == _GRADIENT and self._resident.original_of(args[0]) is not args[0]:
            warnings.warn(_READS_GRADIENT, stacklevel=4)
            return None, args, kwargs  # not what another microbatch has given
        if not rounded.masters:
            return NotImplemented, args, kwargs
        return self._with_whole_values(func, args, kwargs, rounded)

    def _resident_leaf_for(self, value: Any) -> Any:
        """Return the stage's leaf of a master that a block reaches past its stand-in.

        Also in a list; all else as it is.
        """
        if isinstance(value, (list, tuple)):
            return _replaced(value, self._resident_leaf_for)
        if id(value) not in self._masters:
            return value
        assert self._resident is not None, "a block runs"
        leaf = self._resident.leaf_of(value)
        if leaf is None:
            name = self._name_of(value)
            raise CaptureError(
                f"A block uses the parameter {name!r}, which is not registered in it: the worker "
                "that runs the block does not have it. Register it in the block, or hand it to the "
                "block as an argument."
            )
        return leaf

    def _leaf_for(self, value: Any) -> Any:
        """Return the leaf of a master or a side output, also in a list; all else as it is."""
        if isinstance(value, nn.Parameter):
            return self._leaf(value) if id(value) in self._masters else value
        if isinstance(value, Tensor):
            return self.side_outputs.leaf_for(value)
        return _replaced(value, self._leaf_for) if isinstance(value, (list, tuple)) else value

    def _brought_together(
        self, name: str, args: Any, kwargs: Any, *, leaf: Callable[[Any], Any]
    ) -> Any:
        """Bring the tensors among the arguments to one device, if they are on several.

        Where all are on an earlier worker they stay: a view of a straggler must remain one, so that
        writing into it is writing into the straggler.
        """
        places: set[torch.device] = set()

        def stand_in(value: Tensor) -> Tensor:
            value = leaf(value)
            owner = self.owner_of(value)
            if owner is not self._host:
                places.add(owner.torch_device)
            return value

        args, kwargs = map_tensors(stand_in, (args, kwargs))
        if len(places) < 2:
            return args, kwargs
        target = self.worker().device
        stays = args and (name == "__getitem__" or writes_first(name))
        base = kwargs.get("out", args[0] if stays else None)
        if isinstance(base, Tensor):
            target = self.owner_of(base)

        def bring(value: Tensor) -> Tensor:
            on_other_worker = not target.holds(value) and self.owner_of(value) is not self._host
            return target.bring(value, self.owner_of(value)) if on_other_worker else value

        return map_tensors(bring, (args, kwargs))


@cache
def _watch_custom_functions() -> None:
    """Let what users' `autograd.Function`s take be cut off, too: no mode of torch sees their calls.

    It stays for good; a thread without user code calls them as before.
    """
    functions: Any = torch.autograd.Function
    apply = functions.apply.__func__

    def cut_off_and_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, UserCode):
                taken = mode.cut_off_for_function((*args, *kwargs.values()))
                args, named = taken[: len(args)], taken[len(args) :]
                kwargs = dict(zip(kwargs, named, strict=True))
        return apply(cls, *args, **kwargs)

    functions.apply = classmethod(cut_off_and_apply)


def _is_plain(func: Callable[..., Any]) -> bool:
    if isinstance(func, MethodWrapperType):
        return func.__name__ == "__get__" and attribute_or_name(func) not in ("data", "grad")
    name = getattr(func, "__name__", "")
    module = getattr(func, "__module__", None) or ""
    of_torch = isinstance(func, _KINDS_OF_TORCH) or module.startswith("torch.")
    return of_torch and not (name in RANDOM_FUNCTIONS or "dropout" in name or writes_first(name))


def _replaced(values: Sequence[Any], leaf: Callable[[Any], Any]) -> Sequence[Any]:
    """Return a list or tuple with leaves in place of tensors; as it is where there are none."""
    if not any(isinstance(value, Tensor) for value in values):
        return values
    leaves = [leaf(value) for value in values]
    changed = any(new is not value for new, value in zip(leaves, values, strict=True))
    return leaves if changed else values
