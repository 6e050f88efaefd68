"""A step of any torch optimizer, captured, to be made for some parameters at a time.

```
optimizer   groups [ p0 p1 p2 p3 ]   state {p0: ..., p3: ...}   lr      .grad of every parameter
                      │  captured: hyper-parameters and gradients are those of this moment
                      ▼
part        groups [ a1 a2 ]         state {a1: ..., a2: ...}   lr      a1.grad, a2.grad
```

`a1` is an alias of `p1`: the same memory, a gradient of its own. A part is a shallow copy of the
optimizer whose groups have the aliases of some parameters, and it runs the class's own `step`. What
it does to a parameter is, to the bit, what the whole step does, for every optimizer that treats
each parameter by itself.

Not all do, and the code does not show which. So both ways are tried. A small copy of the optimizer
steps a few small parameters together; another copy steps them apart, in another order. The results
must be the same to the bit, and nothing but the parameters, their state and options that every step
changes in the same way (a group's count of steps) may have changed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils import _pytree as pytree

from roundpipe_lightning.errors import ConfigurationError

_OPTIONS_CHANGE = "its step changes the options of its groups by what their parameters are"
_COUNTING = WeakSet[Optimizer]()  # those whose steps were seen to change their groups' options


@dataclass(eq=False)
class CapturedStep:
    """One step of an optimizer, captured while gradients and hyper-parameters change already.

    `values_of` gives what of a parameter is stepped, of its gradient's shape.
    """

    optimizer: Optimizer  # its parameters and its state are changed where a part is run
    _: KW_ONLY
    # those to step with, as far as they are there; None: every parameter's `.grad`
    gradients: InitVar[Mapping[Tensor, Tensor] | None] = None
    # called with each gradient right before its part is run; changes it in place
    clip: Callable[[Tensor], Any] | None = None

    def __post_init__(self, gradients: Mapping[Tensor, Tensor] | None) -> None:
        self.values_of: Callable[[Tensor], Tensor] = Tensor.detach
        self._groups = [
            (list(group["params"]), _options(group)) for group in self.optimizer.param_groups
        ]
        self._places = {
            parameter: (index, position)
            for index, (members, _) in enumerate(self._groups)
            for position, parameter in enumerate(members)
        }
        self._gradients: dict[Tensor, Tensor] = {}
        if gradients is None:
            gradients = {p: p.grad for p in self._places if p.grad is not None}
        self.give(gradients)
        self._no_state = copy.copy(self.optimizer.state)
        self._no_state.clear()
        self._step = plain_step(type(self.optimizer))
        self._left: list[dict[str, Any]] = []  # the options that the step leaves
        if is_foreign(self._step):
            groups = [{**_chosen(some, []), "params": []} for some in copy.deepcopy(self.options)]
            if self.optimizer in _COUNTING:  # a step of no parameters leaves the same
                self._step(self._part(groups))
            self._left = list(map(_shared_options, groups))
        self._is_counted = False

    def count(self) -> None:
        """Give the optimizer, once, the options that the step leaves: the next one begins there.

        What a scheduler has changed since the capture stays.
        """
        if not self._is_counted:
            groups = zip(self.optimizer.param_groups, self.options, self._left, strict=False)
            for group, given, left in groups:
                group.update({k: v for k, v in left.items() if not _same(v, given.get(k))})
        self._is_counted = True

    def _part(self, groups: list[dict[str, Any]]) -> Optimizer:
        part = shallow_copy(self.optimizer)
        part.param_groups = groups
        part.state = copy.copy(self._no_state)
        return part

    @property
    def options(self) -> Sequence[Mapping[str, Any]]:
        """The groups' options, as they were captured; schedulers change the optimizer's."""
        return [options for _, options in self._groups]

    @property
    def parameters(self) -> Collection[Tensor]:
        return self._places.keys()

    def give(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Take gradients to step with, before their part is run."""
        self._gradients.update(gradients)

    def take(self, parameter: Tensor) -> Tensor | None:
        return self._gradients.pop(parameter, None)

    def run(self, parameters: Iterable[Tensor]) -> None:
        """Update some of its parameters, each once; then let their gradients go. Others stay."""
        places = sorted(self._places[p] for p in set(parameters) & self._places.keys())
        positions: dict[int, list[int]] = {}
        for index, position in places:
            positions.setdefault(index, []).append(position)
        aliases: dict[Tensor, Tensor] = {}
        groups = []
        for index, chosen in positions.items():
            members, options = self._groups[index]
            mine = {members[i]: self._alias(members[i]) for i in chosen}
            groups.append({**_chosen(options, chosen), "params": list(mine.values())})
            aliases |= mine
        if not groups:
            return
        part, state = self._part(groups), self.optimizer.state
        part.state.update({alias: state[p] for p, alias in aliases.items() if p in state})
        self._step(part)
        state.update({p: part.state[alias] for p, alias in aliases.items() if alias in part.state})
        left = [self._left[index] for index in positions] if self._left else []
        if left and not _same([*map(_shared_options, groups)], left):
            raise ConfigurationError(
                f"{type(self.optimizer).__name__} changes the options of its groups by what their "
                "parameters are, which its first steps did not: it must be stepped as a whole. "
                "Give it a hook: optimizer.register_step_pre_hook(lambda *_: None)."
            )

    def _alias(self, parameter: Tensor) -> Tensor:
        values = self.values_of(parameter)
        alias = (
            nn.Parameter(values, requires_grad=parameter.requires_grad)
            if isinstance(parameter, nn.Parameter)
            else values.requires_grad_(parameter.requires_grad)
        )
        alias.__dict__.update(parameter.__dict__)
        gradient = self.take(parameter)
        if gradient is not None and self.clip is not None:
            self.clip(gradient)
        if gradient is not None and gradient.dtype != alias.dtype:
            alias.grad_dtype = gradient.dtype
        alias.grad = gradient
        return alias


def shallow_copy(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer of the same class with the same attributes, but its class's `step`."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(vars(optimizer))
    twin.__dict__.pop("step", None)  # wrapped by a learning rate scheduler
    return twin


def is_foreign(code: Any) -> bool:
    """Return whether a class or a function is neither torch's, nor this package's, nor built in."""
    return code.__module__.partition(".")[0] not in ("torch", "roundpipe_lightning", "builtins")


def plain_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """Return a class's `step` without the hooks that torch runs around it."""
    step: Any = kind.step
    plain: Callable[[Optimizer], Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain


def _options(group: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        return {
            key: list(value) if key == "param_names" else copy.deepcopy(value)
            for key, value in group.items()
            if key != "params"
        }


def _shared_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in group.keys() - {"params", "param_names"}}


def _chosen(options: Mapping[str, Any], positions: list[int]) -> dict[str, Any]:
    names = options.get("param_names")
    if names is None:
        return dict(options)
    return {**options, "param_names": [names[i] for i in positions]}


_NUM_STEPS = 3
_NUM_PER_KIND = 2  # parameters of the same group, dtype and number of dimensions
_LONGEST = 3  # of a dimension
# A learning rate scheduler wraps `step`, and sets `_opt_called`.
_OF_EVERY_OPTIMIZER = frozenset(
    """
    defaults state param_groups step _opt_called _zero_grad_profile_name
    _warned_capturable_if_run_uncaptured
    """.split()
)


def reason_not_separable(optimizer: Optimizer) -> str | None:
    """Return why an optimizer must be stepped as a whole; None if it may be stepped in parts.

    It and its parameters stay as they are. What its hooks do is not asked here, see `has_hooks`.
    """
    own_step = vars(optimizer).get("step")
    if own_step is not None and getattr(own_step, "__wrapped__", None) is not type(optimizer).step:
        return "its step was replaced"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "it is differentiable"
    own = pytree.tree_leaves(_attributes(optimizer))
    if any(isinstance(leaf, (Tensor, nn.Module, Optimizer)) for leaf in own):
        return "it keeps tensors beside the state of its parameters"
    of_class = _class_attributes(optimizer)
    try:
        with trial() as drew:
            reason = _try(optimizer, drew=drew)
        changes = not _same(_class_attributes(optimizer), of_class)
        return "its step changes attributes of its class" if changes else reason
    except ConfigurationError:
        return _OPTIONS_CHANGE
    except Exception as error:  # noqa: BLE001 - whatever its code does not like about the trial
        return f"a trial on small tensors failed ({type(error).__name__}: {error})"
    finally:
        for (kind, name), value in of_class.items():
            if not _same(vars(kind).get(name), value):
                setattr(kind, name, value)


def reason_not_with_gradients(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot step with gradients of its parameters' `grad_dtype`.

    It is tried on small tensors: the step must be, but for rounding, the one with gradients of the
    parameters' own dtype. The optimizer and its parameters stay as they are.
    """
    try:
        with trial():
            mixed, plain = _small_copy(optimizer), _small_copy(optimizer)
            for parameter in _parameters(plain):
                parameter.grad_dtype = parameter.dtype
            for number in range(_NUM_STEPS):
                for twin in (mixed, plain):
                    _draw_gradients(twin, seed=number)
                    plain_step(type(twin))(twin)
    except Exception as error:  # noqa: BLE001 - whatever its code does not like about the trial
        return f"{type(error).__name__}: {error}"
    pairs = zip(_parameters(mixed), _parameters(plain), strict=True)
    return None if all(_close(one, other) for one, other in pairs) else "its step is another then"


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether an optimizer that may be stepped in parts treats every element by itself.

    It is tried on small tensors: two copies step a half of each, and together do what one does. The
    optimizer and its parameters stay as they are.
    """
    try:
        with trial():
            whole, *halves = (_small_copy(optimizer) for _ in range(3))
            for twin in (whole, *halves):
                twin.state.clear()
            for number in range(_NUM_STEPS):
                for twin in (whole, *halves):
                    _draw_gradients(twin, seed=number)
                plain_step(type(whole))(whole)
                for half, twin in enumerate(halves):
                    step = CapturedStep(twin, gradients={})
                    step.values_of = partial(_half_of, half=half)
                    step.give({p: _half_of(p.grad, half) for p in _parameters(twin)})  # type: ignore[arg-type]  # drawn
                    step.run(step.parameters)
    except Exception:  # noqa: BLE001 - whatever its code does not like about the trial
        return False
    apart = zip(*map(_parameters, halves), strict=True)
    joined = [torch.cat([_half_of(p, half) for half, p in enumerate(pair)]) for pair in apart]
    pairs = zip(_parameters(whole), joined, strict=True)
    return all(_close(one.detach().reshape(-1), other) for one, other in pairs)


@contextmanager
def trial() -> Iterator[Callable[[], bool]]:
    """Let nobody notice a trial; gives what says whether it has drawn random numbers so far."""
    generator = torch.default_generator
    before = generator.get_state()
    try:
        with warnings.catch_warnings():  # said when it is stepped in earnest
            warnings.simplefilter("ignore")
            yield lambda: not torch.equal(generator.get_state(), before)
    finally:
        generator.set_state(before)


def _half_of(tensor: Tensor, half: int) -> Tensor:
    flat = tensor.detach().view(-1)
    middle = flat.numel() // 2
    return flat[middle:] if half else flat[:middle]


def has_hooks(optimizer: Optimizer) -> bool:
    """Return whether code of others runs before or after a step, which is to find it whole."""
    return bool(
        optimizer._optimizer_step_pre_hooks  # noqa: SLF001 - no public way to ask
        or optimizer._optimizer_step_post_hooks  # noqa: SLF001
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
    )


def _try(optimizer: Optimizer, *, drew: Callable[[], bool]) -> str | None:
    together, apart = _small_copy(optimizer), _small_copy(optimizer)
    attributes: dict[str, Any] = {}
    for number in range(_NUM_STEPS):
        for twin in (together, apart):
            _draw_gradients(twin, seed=number)
        given = copy.deepcopy([*map(_shared_options, together.param_groups)])
        plain_step(type(together))(together)
        if not _same([*map(_shared_options, together.param_groups)], given):
            _COUNTING.update((optimizer, apart))
        if number == 0:  # a change that only a first step makes is no harm
            attributes = copy.deepcopy(_attributes(together))
        captured = CapturedStep(apart)
        captured.count()
        for parameter in reversed(list(captured.parameters)):
            captured.run([parameter])
    if drew():
        return "it draws random numbers in the order of the parameters"
    if not set(together.state) <= set(_parameters(together)):
        return "its state has entries that belong to no parameter"
    left = [[*map(_shared_options, twin.param_groups)] for twin in (together, apart)]
    if not _same(*left):
        return _OPTIONS_CHANGE
    if not _same(_attributes(together), attributes):
        return "its step changes attributes of the optimizer"
    for one, other in zip(_parameters(together), _parameters(apart), strict=True):
        if not _same(
            [one.detach(), together.state.get(one)], [other.detach(), apart.state.get(other)]
        ):
            return "what it does to a parameter depends on other parameters"
    return None


def _small_copy(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same options, without state, on small parameters."""
    twin = shallow_copy(optimizer)
    for name, value in _attributes(twin).items():
        setattr(twin, name, copy.deepcopy(value))
    twin.state = copy.copy(optimizer.state)
    twin.state.clear()
    twin.param_groups = []
    for group in optimizer.param_groups:
        options = copy.deepcopy({key: value for key, value in group.items() if key != "params"})
        found: dict[tuple[torch.dtype, int], list[Tensor]] = {}
        for parameter in group["params"]:
            kind = found.setdefault((parameter.dtype, parameter.dim()), [])
            if len(kind) < _NUM_PER_KIND:
                kind.append(parameter)
        members = [parameter for kind in found.values() for parameter in kind]
        small = [nn.Parameter(_corner(parameter)) for parameter in members]
        for parameter, stand_in in zip(members, small, strict=True):
            if parameter.is_leaf and parameter.grad_dtype is not None:
                stand_in.grad_dtype = parameter.grad_dtype
            if parameter in optimizer.state:
                twin.state[stand_in] = pytree.tree_map_only(
                    Tensor, _corner, copy.copy(optimizer.state[parameter])
                )
        if "param_names" in options:
            options["param_names"] = [str(index) for index in range(len(members))]
        twin.param_groups.append({**options, "params": small})
    begin_training(twin)
    return twin


def begin_training(optimizer: Any) -> None:
    """Put a schedule-free optimizer into the mode in which alone it steps."""
    getattr(optimizer, "train", bool)()


def _corner(tensor: Tensor) -> Tensor:
    return tensor.detach()[(slice(_LONGEST),) * tensor.dim()].clone()


def _draw_gradients(optimizer: Optimizer, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in _parameters(optimizer):
        drawn = torch.randn(parameter.shape, generator=generator).bfloat16()  # exact in any dtype
        parameter.grad = drawn.to(parameter.grad_dtype or parameter.dtype)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of the class: neither parameters nor those that every optimizer has."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OF_EVERY_OPTIMIZER and not name.startswith("_optimizer_")  # its hooks
    }


def _class_attributes(optimizer: Optimizer) -> dict[tuple[type, str], Any]:
    """Return copies of the values that classes of others than torch keep."""
    return {
        (kind, name): copy.deepcopy(value)
        for kind in type(optimizer).__mro__
        if is_foreign(kind)
        for name, value in vars(kind).items()
        if isinstance(value, (int, float, list, dict, set, Tensor)) and not name.startswith("__")
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        same = (one == other) | (one.isnan() & other.isnan())  # what is not a number equals itself
        return torch.equal(one, other) or bool(same.all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _close(one: Tensor, other: Tensor) -> bool:
    """Compare up to some steps' rounding in the tensors' own dtype."""
    tolerance = 2 * _NUM_STEPS * torch.finfo(one.dtype).eps
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
