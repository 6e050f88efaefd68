from __future__ import annotations

import abc
import pickle
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from roundpipe_lightning.engine.capture.view import LazyTable, View, ViewClasses, ViewMaker
from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    Block,
    Regressor,
    check_parity,
    differences,
    engine_for,
    mean_step,
    plain_step,
    regression_batches,
)


class Server:
    """Makes views whose parameters are twice the originals' and whose buffers are negated."""

    def __init__(self) -> None:
        self.asked: list[nn.Parameter] = []
        self.made: dict[Tensor, Tensor] = {}
        self.maker = ViewMaker(
            parameter=self._parameter, buffer=self._buffer, classes=ViewClasses()
        )

    def _parameter(self, parameter: nn.Parameter) -> Tensor:
        self.asked.append(parameter)
        if parameter not in self.made:
            self.made[parameter] = nn.Parameter(2 * parameter.detach())
        return self.made[parameter]

    def _buffer(self, buffer: Tensor) -> Tensor:
        return self.made.setdefault(buffer, -buffer)

    def view(self, module: nn.Module) -> Any:
        return self.maker.view_of(module)


class Base(nn.Module):
    """A user's module with attributes of all kinds."""

    shared_by_class = "class"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.absent = nn.Parameter(torch.ones(1))
        self.register_parameter("absent", None)
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("temporary", torch.ones(1), persistent=False)
        self.child = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(4)])
        self.table = nn.ModuleDict({"a": self.child, "b": nn.ReLU()})
        self.list = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(3)])
        self.dict = nn.ParameterDict({"x": nn.Parameter(torch.ones(1))})
        self.count = 0
        self.config: dict[str, Any] = {"size": 2}
        self._hidden = 1

    @property
    def hidden(self) -> int:
        return self._hidden

    @hidden.setter
    def hidden(self, value: int) -> None:
        self._hidden = value

    @staticmethod
    def static(x: int) -> int:
        return x + 1

    @classmethod
    def name_of_class(cls) -> str:
        return cls.__name__

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Derived(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + Base.forward(self, x)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def original() -> Base:
    return Base()


@pytest.fixture
def view(server: Server, original: Base) -> Any:
    return server.view(original)


def test_class_and_super(server: Server) -> None:
    view = server.view(Derived())
    assert isinstance(view, Derived)
    assert isinstance(view, Base)
    assert isinstance(view, View)
    assert view.__class__ is Derived
    assert type(view).__name__ == "Derived"
    assert view.name_of_class() == "Derived"
    assert view.static(1) == 2
    assert view.shared_by_class == "class"
    assert torch.equal(view(torch.ones(2)), torch.full((2,), 4.0))


def test_parameters_buffers_and_children_are_the_views(
    server: Server, original: Any, view: Any
) -> None:
    assert torch.equal(view.weight, torch.full((2,), 2.0))
    assert torch.equal(view.mean, torch.full((2,), -1.0))
    assert view.absent is None
    assert isinstance(view.child, View)
    assert view.child.weight is server.made[original.child.weight]
    assert view.table["a"] is view.child
    assert view.get_submodule("layers.2") is view.layers[2]
    assert view.get_parameter("child.weight") is view.child.weight
    assert server.view(original) is view


def test_nothing_is_placed_before_it_is_asked_for(server: Server, original: Any, view: Any) -> None:
    assert not server.asked
    assert view.child is not None
    assert len(view.layers) == 4
    assert not server.asked
    _ = view.weight
    assert server.asked == [original.weight]


def test_iteration_and_tables(original: Any, view: Any) -> None:
    placed = dict(view.named_parameters())
    assert list(placed) == [name for name, _ in original.named_parameters()]
    for name, parameter in original.named_parameters():
        assert torch.equal(placed[name], 2 * parameter)
    assert [p.shape for p in view.parameters()] == [p.shape for p in original.parameters()]
    assert all(torch.equal(b, -torch.ones_like(b)) for b in view.buffers())
    assert all(isinstance(m, View) for m in view.modules())
    assert all(isinstance(m, View) for m in view.children())
    assert {name for name, _ in view.named_modules()} == {n for n, _ in original.named_modules()}
    for table in ("_parameters", "_buffers", "_modules"):
        lazy = getattr(view, table)
        assert isinstance(lazy, LazyTable)
        assert list(dict(lazy)) == list(lazy) == list(getattr(original, table))
        assert all(dict(lazy)[key] is lazy[key] is lazy.get(key) for key in lazy)
        assert lazy.get("missing", 3) == 3
        copied = OrderedDict(lazy)
        assert all(copied[key] is lazy[key] for key in lazy)
    assert set(view.state_dict()) == set(original.state_dict())
    assert torch.equal(view.state_dict()["weight"], torch.full((2,), 2.0))


def test_module_lists_and_parameter_lists(server: Server, view: Any) -> None:
    assert [layer is view.layers[i] for i, layer in enumerate(view.layers)] == [True] * 4
    part = view.layers[1:3]
    assert len(part) == 2
    assert part[0] is view.layers[1]
    assert part[-1] is view.layers[2]
    assert view.layers[-1] is view.layers[3]
    assert len(view.list) == 3
    assert torch.equal(torch.cat(list(view.list)), torch.full((3,), 2.0))
    assert torch.equal(view.list[-1], torch.tensor([2.0]))
    assert torch.equal(view.dict["x"], torch.tensor([2.0]))
    assert next(iter(view.dict.items()))[0] == "x"
    assert list(view.table.keys()) == ["a", "b"]
    sequence = server.view(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    assert torch.equal(sequence[0].weight, sequence[:1][0].weight)
    assert sequence(torch.ones(1, 2)).shape == (1, 2)


def test_attributes_are_the_originals_live(original: Any, view: Any) -> None:
    assert view.config is original.config
    original.count = 5
    assert view.count == 5
    view.fresh = [1]
    assert original.fresh == [1]
    original.training = True
    view.hidden = 7
    assert original.hidden == view.hidden == 7
    assert original._hidden == 7
    del view.fresh
    assert not hasattr(original, "fresh")
    assert not hasattr(view, "fresh")
    with pytest.raises(AttributeError, match="missing"):
        _ = view.missing
    assert hasattr(view, "count")


def test_a_view_describes_itself_as_the_original(server: Server) -> None:
    module = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1))
    assert repr(server.maker.view_of(module)) == repr(module)


def test_a_view_is_saved_as_the_original(server: Server) -> None:
    original = Derived()
    saved = pickle.loads(pickle.dumps(server.view(original)))
    assert type(saved) is Derived
    assert torch.equal(saved.child.weight, original.child.weight)


def test_a_view_reads_what_it_has_written(original: Any, view: Any) -> None:
    """Another microbatch's write in between must not be seen."""
    other = Server().view(original)
    view.last = "mine"
    other.last = "theirs"
    assert [view.last, other.last, original.last] == ["mine", "theirs", "theirs"]


def test_a_view_kept_on_its_module_is_the_original_there(original: Any, view: Any) -> None:
    view.chosen = view.layers[2]
    assert view.chosen is view.layers[2]
    assert original.chosen is original.layers[2]


def test_a_view_is_made_while_another_microbatch_writes() -> None:
    modules: list[Any] = []

    def write(given: Any) -> Any:
        for module in modules:
            setattr(module, f"late{len(vars(module))}", 1)
            module.register_module(f"module{len(module._modules)}", None)
            module.register_parameter(f"weight{len(module._parameters)}", None)
        return given

    class Writing:
        def __get__(self, instance: object, owner: type) -> Any:
            return write(0)

    class Written(Base):
        count: Any = Writing()  # looked for on the class when a view is made

    modules.append(Written())
    maker = ViewMaker(parameter=write, buffer=write, classes=ViewClasses(), is_fixed=True)
    assert maker.view_of(modules[0]).weight is modules[0].weight


def test_training_mode_of_views_and_originals(original: Any, view: Any) -> None:
    assert view.training
    assert view.child.training
    view.eval()
    assert not original.training
    assert not original.child.training
    assert not view.layers[0].training


def test_assigned_buffers_are_the_views_and_are_reported(original: Any, view: Any) -> None:
    fresh = torch.zeros(2)
    view.mean = fresh
    view._buffers["temporary"] = None
    assert view.mean is fresh
    assert torch.equal(original.mean, torch.ones(2))
    assert view._buffers.assigned() == {"mean": fresh, "temporary": None}
    view._buffers.note_written_back()
    assert view._buffers.assigned() == {}
    assert view.mean is fresh


def test_a_patched_forward_runs_on_the_view(server: Server) -> None:
    """Libraries put `module.forward = functools.partial(..)` or bound methods in the instance."""
    original = Base()

    def patched(self: Any, x: Tensor) -> Tensor:
        result: Tensor = self.weight + x
        return result

    original.forward = types.MethodType(patched, original)  # type: ignore[method-assign]
    assert torch.equal(server.view(original)(torch.ones(2)), torch.full((2,), 3.0))
    inner = original.child
    old = inner.forward
    inner.forward = lambda input: old(input) + 1  # type: ignore[method-assign]  # noqa: A006
    assert server.view(original).child(torch.ones(2)).shape == (2,)


def test_hooks_see_the_view(server: Server) -> None:
    original, seen = Base(), []
    handle = original.register_forward_hook(lambda module, args, output: seen.append(module))
    view = server.view(original)
    view(torch.ones(2))
    handle.remove()
    view(torch.ones(2))
    assert seen == [view]


def test_classes_that_do_unusual_things(server: Server) -> None:
    class Registered:
        classes: list[str] = []  # noqa: RUF012

        def __init_subclass__(cls, *, label: str, **kwargs: Any) -> None:
            Registered.classes.append(label)

    class Unusual(nn.Module, Registered, abc.ABC, label="once"):
        __slots__ = ("slot",)

        def __init__(self) -> None:
            super().__init__()
            self.slot = 3
            self.linear = nn.Linear(1, 1)

        def __getattr__(self, name: str) -> Any:
            if name == "forwarded":
                return "from the original's own __getattr__"
            return super().__getattr__(name)

        @abc.abstractmethod
        def needed(self) -> int: ...

    class Concrete(Unusual, label="twice"):
        def needed(self) -> int:
            return 1

    view = server.view(Concrete())
    assert Registered.classes == ["once", "twice"]
    assert view.needed() == 1
    assert view.forwarded == "from the original's own __getattr__"
    assert isinstance(view.linear, View)


def test_closed_views_hold_nothing(server: Server) -> None:
    view = server.view(Base())
    child = view.child
    server.maker.close()
    assert not view.__dict__
    assert not child.__dict__


REGISTERS: list[Callable[[Any], None]] = [
    lambda v: v.register_buffer("late", torch.ones(1)),
    lambda v: v.add_module("late", nn.ReLU()),
    lambda v: setattr(v, "late", nn.ReLU()),
]


@pytest.mark.parametrize("register", REGISTERS)
def test_what_is_registered_late_is_there(server: Server, register: Callable[[Any], None]) -> None:
    original = Base()
    view = server.view(original)
    register(view)
    assert view.late is not None


def test_a_parameter_that_is_parametrized_for_a_while(server: Server) -> None:
    """As peft does with the parameters of experts, in every forward pass."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    original: Any = nn.Linear(2, 2)
    weight, view = original.weight, server.view(original)
    leaf = view.weight
    for _ in range(2):
        parametrize.register_parametrization(view, "weight", Doubled())
        assert type(view).__name__ == "ParametrizedLinear"
        assert isinstance(view, nn.Linear)
        assert torch.equal(view.weight, 2 * leaf)
        assert (type(original), original.weight) == (nn.Linear, weight)
        assert not hasattr(original, "parametrizations")
        parametrize.remove_parametrizations(view, "weight", leave_parametrized=False)
        assert view.weight is leaf
        assert cast(Any, view)._parameters.assigned() == {}
        assert not hasattr(view, "parametrizations")
    assert view.__class__ is nn.Linear


def test_a_wrapper_hands_on_the_view_of_what_it_wraps(server: Server) -> None:
    class Inner(nn.Linear):
        def whoever(self) -> Any:
            return self

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner(2, 2)
            self.mine = "mine"

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.inner, name)

    view: Any = server.view(cast(Any, Wrapper()))
    assert view.whoever() is view.inner
    assert view.weight is view.inner.weight
    assert (view.mine, view.in_features) == ("mine", 2)
    assert not hasattr(view, "nothing")


def test_a_method_that_is_kept_of_a_module_below(server: Server) -> None:
    class Inner(nn.Linear):
        def whoever(self) -> Any:
            return self

    inner, unrelated = Inner(2, 2), Inner(2, 2)
    outer: Any = nn.Sequential(inner)
    outer.kept, outer.other = inner.whoever, unrelated.whoever
    view: Any = server.view(outer)
    assert view.kept() is view[0]
    assert view.other() is unrelated


def test_what_is_deleted_is_gone(server: Server) -> None:
    original: Any = nn.Linear(2, 2)
    original.note = "a"
    view = server.view(original)
    del view.weight, view.note
    assert not hasattr(view, "weight")
    assert not hasattr(view, "note")
    assert hasattr(original, "weight"), "tables are the view's own"
    assert not hasattr(original, "note")
    with pytest.raises(AttributeError, match="note"):
        del view.note
    view.note = "b"
    assert (view.note, original.note) == ("b", "b")


def test_user_code_in_steps_reads_and_writes_its_module() -> None:
    module: Any = Regressor()
    module.seen = {}
    module.total = 0.0

    def call(view: Any, batch: Any, index: int) -> Any:
        view.mine = index
        view.seen[index] = type(view).__name__
        loss = view.training_step(batch, 0)
        assert view.mine == index
        view.total = loss.item()
        return loss

    with engine_for(module, num_workers=3, num_microbatches=3) as engine:
        result = mean_step(engine, regression_batches(3), call=call)
    assert module.seen == dict.fromkeys(range(3), "Regressor")
    assert module.mine in range(3)
    assert module.total in [float(loss) for loss in result.losses if loss is not None]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def parametrized_step(view: Any, batch: Any, index: int) -> Any:
    parametrize.register_parametrization(view.head, "weight", Doubled())
    try:
        return view.training_step(batch, 0)
    finally:
        parametrize.remove_parametrizations(view.head, "weight", leave_parametrized=False)


def test_a_view_that_has_another_class_while_its_microbatch_waits_for_a_turn() -> None:
    """On one worker the other microbatches take their turns before, and do the same."""
    check_parity(Regressor(), call=parametrized_step, num_workers=1)


def test_a_view_that_never_gets_its_own_class_back_holds_up_no_other() -> None:
    module = Regressor()

    def fail(view: Any, batch: Any, index: int) -> Any:
        parametrize.register_parametrization(view.head, "weight", Doubled())
        raise ZeroDivisionError

    batches = regression_batches(3)
    plain = plain_step(module, batches, call=parametrized_step)
    whole = Partition(forward=(), backward=(len(module.layers),))  # a turn for each microbatch
    with engine_for(module, num_workers=1, partition=whole, timeout_seconds=60) as engine:
        with pytest.raises(ZeroDivisionError):
            mean_step(engine, batches, call=fail)
        assert not differences(module, mean_step(engine, batches, call=parametrized_step), plain)


def _hook(leaf: Any) -> None:
    leaf.register_hook(lambda gradient: 2 * gradient)


def _hook_after(leaf: Any) -> None:
    leaf.register_post_accumulate_grad_hook(lambda it: setattr(it, "grad", 3 * it.grad))


def _attribute(leaf: Any) -> None:
    leaf.note = "of this step"


def _other_memory(module: Any) -> None:
    module.layers[0].inner.weight.data = module.layers[0].inner.weight.data.clone()


def _freeze(module: Any) -> None:
    module.layers[0].inner.weight.requires_grad_(False)


@pytest.mark.parametrize("in_block", [None, _hook, _hook_after, _attribute])
@pytest.mark.parametrize("between", [None, _other_memory, _freeze])
def test_a_leaf_in_host_memory_serves_the_next_step_where_it_is_as_new(
    in_block: Callable[[Any], None] | None, between: Callable[[Any], None] | None
) -> None:
    seen: list[tuple[Any, str]] = []
    change = in_block

    class Meddling(Block):
        def forward(self, x: Tensor) -> Tensor:
            leaf = self.inner.weight
            seen.append((leaf, getattr(leaf, "note", "")))
            if change is not None:
                change(leaf)
            return super().forward(x)

    module, batches = Regressor(1, make_block=Meddling), regression_batches(1)
    partition = Partition(forward=(), backward=(1,))
    with engine_for(
        module, devices=[CpuDevice()], num_microbatches=1, partition=partition
    ) as engine:
        mean_step(engine, batches)
        change = None
        if between is not None:
            between(module)
        result = mean_step(engine, batches)
        (first, _), (second, note) = seen
        assert (first is second) == (in_block is None and between is None)
        assert not note
        assert not differences(module, result, plain_step(module, batches))
