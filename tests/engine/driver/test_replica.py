"""Replicas compute what the block computes, and change nothing of it."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from roundpipe_lightning.engine.driver.outcome import apply_outcome
from roundpipe_lightning.engine.driver.snapshot import DELETED, take_snapshot
from roundpipe_lightning.engine.worker.replica import Replica
from roundpipe_lightning.errors import ConfigurationError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(x)

    def mix(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return out


def replica_of(block: nn.Module) -> tuple[Replica, dict[nn.Parameter, nn.Parameter]]:
    """Return a replica with leaves of its own, and those by the parameters of the block."""
    snapshot = take_snapshot(block, None)
    leaves = {
        p: nn.Parameter(p.detach().clone(), requires_grad=trained)
        for p, trained in snapshot.parameters.items()
    }
    return Replica(snapshot, leaves.__getitem__, Tensor.clone), leaves


def check_parity(block: nn.Module, *, width: int = 8) -> None:
    """Run a replica and then the block, twice each: same outputs and gradients.

    The replica must leave the block as it was.
    """
    torch.manual_seed(0)
    inputs = [torch.randn(4, 3, width) for _ in range(2)]
    replica, leaves = replica_of(block)
    state = {name: value.clone() for name, value in block.state_dict().items()}
    snapshot = replica.snapshot
    results = [run_both_ways(lambda x: replica.run((x,), {}).result, x) for x in inputs]
    assert snapshot.is_current()
    assert all(torch.equal(value, state[name]) for name, value in block.state_dict().items())
    assert all(p.grad is None for p in block.parameters())
    for x, result in zip(inputs, results, strict=True):
        assert all(map(torch.equal, run_both_ways(block, x), result))
    assert leaves
    for p, leaf in leaves.items():
        assert (p.grad is None) == (leaf.grad is None)
        assert p.grad is None or torch.equal(p.grad, leaf.grad)  # type: ignore[arg-type]


def run_both_ways(function: Callable[[Tensor], Any], x: Tensor) -> tuple[Any, ...]:
    """Run a function forward without a graph, then with one and backward."""
    with torch.no_grad():
        without_graph = function(x)
    x = x.clone().requires_grad_()
    out: Tensor = function(x)
    out.square().sum().backward()
    assert x.grad is not None
    return without_graph, out, x.grad


def double_norm(self: Any, x: Tensor) -> Any:
    return functional.layer_norm(x, x.shape[-1:]) * (2 + self.weight)


class Wrapped(nn.Module):
    """A block that something is done to."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = Layer()
        change(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def bind_forward(layer: Any) -> None:  # Liger, unsloth
    layer.norm.forward = types.MethodType(double_norm, layer.norm)


def wrap_forward(layer: Any) -> None:  # accelerate
    layer.norm._old_forward = layer.norm.forward
    wrapper = functools.partial(lambda module, x: module._old_forward(x) * 2, layer.norm)
    layer.norm.forward = functools.update_wrapper(wrapper, layer.norm._old_forward)


def bind_method(layer: Any) -> None:
    layer.mix = layer.up.forward
    layer.forward = types.MethodType(lambda self, x: self.down(self.mix(x)), layer)


def refer_in_list(layer: Any) -> None:
    layer.parent = [layer]
    layer.table = {"up": layer.up}
    layer.pair = (layer.down, 2)
    layer.forward = types.MethodType(
        lambda self, x: self.pair[0](self.table["up"](self.parent[0].norm(x))) * self.pair[1],
        layer,
    )


def refer_to_outside(layer: Any) -> None:
    outside = nn.Linear(8, 8)
    layer.outside = [outside]
    layer.forward = types.MethodType(
        lambda self, x: self.outside[0](self.mix(x)).detach() + self.mix(x), layer
    )


def tie_weights(layer: Any) -> None:
    layer.up = nn.Linear(8, 8)
    layer.down = nn.Linear(8, 8)
    layer.down.weight = layer.up.weight


def use_twice(layer: Any) -> None:
    layer.up = layer.down = nn.Linear(8, 8)


def list_parameters(layer: Any) -> None:
    layer.scales = nn.ParameterList([torch.randn(8), torch.randn(8)])
    layer.shifts = nn.ParameterDict({"a": torch.randn(8)})
    layer.plain = [layer.scales[0]]
    layer.forward = types.MethodType(
        lambda self, x: self.plain[0] * x * self.scales[1] + self.shifts["a"], layer
    )


def compile_whole(layer: Any) -> None:
    layer.compile(backend="eager")


def compile_part(layer: Any) -> None:
    layer.up.compile(backend="eager")
    layer.norm = torch.compile(layer.norm, backend="eager")


def hook_backward(layer: Any) -> None:
    layer.up.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,))
    layer.down.register_full_backward_pre_hook(lambda module, go: (go[0] * 3,))
    layer.norm.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def hook_own_method(layer: Any) -> None:
    """Let the block look at features that its own hook keeps."""

    def keep(self: Any, module: Any, args: Any, output: Tensor) -> None:
        self.features = output

    layer.keep = types.MethodType(keep, layer)
    layer.up.register_forward_hook(layer.keep)
    layer.forward = types.MethodType(lambda self, x: self.mix(x) + self.features.mean(), layer)


def prune(layer: Any) -> None:
    from torch.nn.utils import prune as pruning

    pruning.l1_unstructured(layer.up, "weight", amount=0.5)


def use_old_weight_norm(layer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer.up)


def freeze_part(layer: Any) -> None:
    layer.up.requires_grad_(False)


def use_cached_weight_norm(layer: Any) -> None:
    parametrizations.weight_norm(layer.up)

    def forward(self: Any, x: Tensor) -> Tensor:
        out: Tensor = self.mix(self.mix(x))
        return out

    layer.forward = types.MethodType(forward, layer)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: None,
        bind_forward,
        wrap_forward,
        bind_method,
        refer_in_list,
        refer_to_outside,
        tie_weights,
        use_twice,
        list_parameters,
        compile_whole,
        compile_part,
        hook_backward,
        prune,
        use_old_weight_norm,
        freeze_part,
        use_cached_weight_norm,
        lambda layer: parametrizations.weight_norm(layer.up),
        lambda layer: parametrizations.orthogonal(layer.up),
        lambda layer: layer.register_module("norm", nn.BatchNorm1d(3)),
        lambda layer: layer.eval(),
    ],
)
def test_replicas_compute_what_blocks_do(change: Callable[[Any], Any]) -> None:
    with torch.compiler.set_stance("force_eager"):
        check_parity(Wrapped(change))
        layer = Layer()
        change(layer)
        if not vars(layer)["_forward_hooks"]:
            check_parity(layer)


def test_weights_that_parametrize_caches() -> None:
    block = Wrapped(use_cached_weight_norm)
    with parametrize.cached():
        replica, leaves = replica_of(block)
        x = torch.randn(4, 3, 8)
        run_both_ways(lambda x: replica.run((x,), {}).result, x)
        assert not parametrize._cache
    run_both_ways(block, x)
    assert all(torch.equal(p.grad, leaf.grad) for p, leaf in leaves.items())  # type: ignore[arg-type]


class Recurrent(nn.Module):
    def __init__(self, *, weight_norm: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True, bidirectional=True)
        if weight_norm:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                nn.utils.weight_norm(self.lstm, "weight_hh_l0")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lstm(x)[0]
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


def test_compiled_blocks() -> None:
    layer: Any = Layer()
    compiled: Any = torch.compile(layer, backend="eager")
    with torch.compiler.set_stance("force_eager"):
        check_parity(compiled)


@pytest.mark.parametrize("weight_norm", [False, True])
def test_recurrent_blocks(weight_norm: bool) -> None:
    block: Any = Recurrent(weight_norm=weight_norm)
    flat_weights = [*block.lstm._flat_weights]
    replica, leaves = replica_of(block)
    replica.run((torch.randn(4, 3, 8),), {})
    lstm: Any = replica.module.lstm
    kept = lstm._flat_weights
    known = set(leaves.values())
    assert all(leaf in known for leaf in kept if isinstance(leaf, nn.Parameter))
    assert weight_norm or lstm._flat_weight_refs[1]() is lstm.weight_hh_l0
    assert all(a is b for a, b in zip(flat_weights, block.lstm._flat_weights, strict=True))
    check_parity(block)


def test_attention_blocks() -> None:
    check_parity(Attention())
    check_parity(Attention().eval())
    check_parity(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))


@pytest.mark.parametrize("disabled", [False, True])
def test_adapters(disabled: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["up", "down"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(Wrapped(lambda layer: None), config)
    block = model.base_model.model.layer
    if not disabled:
        check_parity(block)
        return
    x = torch.randn(4, 3, 8)
    with model.disable_adapter():
        replica, _ = replica_of(block)
        expected = block(x)
    assert torch.equal(replica.run((x,), {}).result, expected)
    assert not torch.equal(block(x), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_blocks(bits: int) -> None:
    pytest.importorskip("bitsandbytes")
    from roundpipe_lightning.models.quantized import quantize_frozen

    block = Wrapped(lambda layer: None)
    quantize_frozen(block, bits)
    block.layer.norm.requires_grad_(True)
    check_parity(block)


def test_parameters_of_bitsandbytes() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    block = nn.Sequential(
        nn.Linear(64, 64), bitsandbytes.nn.Linear4bit(64, 64, compute_dtype=torch.float32)
    ).to("cpu")
    x = torch.randn(4, 64)
    expected = block(x)
    replica = Replica(take_snapshot(block, None), lambda p: p, lambda b: b)
    assert torch.equal(replica.run((x,), {}).result, expected)


# ------------------------------------------------------------------------------------ outcomes


class Counting(Layer):
    """Assigns, deletes and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.old: Any = None
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.up.auxiliary = x.mean()
        self.mean = x.mean().detach()
        if hasattr(self, "old"):
            del self.old
        return super().forward(x)


def test_assigned_attributes() -> None:
    block = Counting()
    replica, _ = replica_of(block)
    x = torch.randn(4, 3, 8)
    for _ in range(2):  # each run starts from the snapshot
        outcome = replica.run((x,), {})
        found = {(a.module, a.name): a for a in outcome.attributes}
        assert set(found) == {
            (block, "calls"), (block.up, "auxiliary"), (block, "mean"), (block, "old"),
        }  # fmt: skip
        assert found[block, "calls"].value == 1
        assert found[block, "old"].value is DELETED
        assert found[block, "mean"].is_buffer
        assert not outcome.written_buffers
    assert block.calls == 0
    apply_outcome(replica.snapshot, outcome.hook_calls, outcome.attributes)
    assert block.calls == 1
    assert "old" not in vars(block)
    assert torch.equal(block.get_buffer("mean"), x.mean())
    assert torch.equal(block.up.auxiliary, x.mean())  # type: ignore[arg-type]
    assert "mean" in block.state_dict()
    assert "auxiliary" not in block.up.state_dict()


def run_once(block: nn.Module, forward: Callable[..., Any]) -> Any:
    block.forward = types.MethodType(forward, block)
    replica, _ = replica_of(block)
    outcome = replica.run((torch.randn(4, 3, 8),), {})
    apply_outcome(replica.snapshot, outcome.hook_calls, outcome.attributes)
    return outcome


def test_members_of_the_block_that_it_assigns_are_the_users_own() -> None:
    block: Any = Layer()
    up, down, bias = block.up, block.down, block.up.bias

    def forward(self: Any, x: Tensor) -> Tensor:
        self.up, self.down = self.down, self.up
        self.favourite = [self.up]
        self.method = self.up.forward
        self.norm.shift = self.up.bias
        self.register_buffer("cache", x.mean(), persistent=False)
        return x

    run_once(block, forward)
    assert block.up is down
    assert block.down is up
    assert block.favourite == [down]
    assert block.method.__self__ is down
    assert block.norm.shift is down.bias
    assert bias is up.bias
    assert "cache" in dict(block.named_buffers())
    assert "cache" not in block.state_dict()


def test_equal_values_that_are_others_are_assigned() -> None:
    block: Any = Layer()
    block.flag = 1
    block.values = torch.zeros(2)

    def forward(self: Any, x: Tensor) -> Tensor:
        self.flag = True
        self.values = torch.zeros(2)
        return x

    run_once(block, forward)
    assert block.flag is True


@pytest.mark.parametrize("value", [nn.Parameter(torch.zeros(2)), nn.Linear(2, 2)])
def test_new_parameters_are_refused(value: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.fresh = value
        return x

    with pytest.raises(ConfigurationError, match=r"sets Layer\.fresh to a new parameter"):
        run_once(Layer(), forward)


def test_computed_weights_are_no_attributes() -> None:
    for change in (prune, use_old_weight_norm):
        replica, _ = replica_of(Wrapped(change))
        assert not replica.run((torch.randn(4, 3, 8),), {}).attributes


def test_written_buffers() -> None:
    block = nn.Sequential(nn.BatchNorm1d(3), nn.Identity())
    block[1].register_buffer("still", torch.zeros(3))
    replica, _ = replica_of(block)
    x = torch.randn(4, 3, 8)
    outcome = replica.run((x,), {})
    written = {a.name: a.value for a in outcome.written_buffers}
    assert set(written) == {"running_mean", "running_var", "num_batches_tracked"}
    assert not outcome.attributes
    block(x)
    assert all(torch.equal(block[0].get_buffer(name), value) for name, value in written.items())
    replica, _ = replica_of(block.eval())
    assert not replica.run((x,), {}).written_buffers


def test_a_run_that_raises_leaves_no_trace() -> None:
    block: Any = Layer()
    replica, _ = replica_of(block)

    def fail(*_: Any) -> None:
        setattr(replica.module.norm, "count", 1)  # noqa: B010
        raise KeyError

    block.up.register_forward_pre_hook(fail)
    replica, _ = replica_of(block)
    with pytest.raises(KeyError):
        replica.run((torch.randn(4, 3, 8),), {})
    vars(replica.module.up)["_forward_pre_hooks"].clear()
    assert not replica.run((torch.randn(4, 3, 8),), {}).attributes


# --------------------------------------------------------------------------------------- hooks


def test_hooks_inside_run_once_where_they_are_applied() -> None:
    seen: list[Any] = []
    block = Layer()
    block.up.register_forward_hook(lambda module, args, output: seen.append((module, output)))
    block.norm.register_forward_hook(
        lambda module, args, kwargs, output: seen.append((module, kwargs)),
        with_kwargs=True,
        always_call=True,
    )
    block.register_forward_hook(lambda *_: pytest.fail("this is the driver's"))
    block.register_forward_pre_hook(lambda *_: pytest.fail("this is the driver's"))
    replica, _ = replica_of(block)
    outcome = replica.run((torch.randn(4, 3, 8),), {})
    assert not seen
    assert [call.module for call in outcome.hook_calls] == [block.norm, block.up]
    apply_outcome(replica.snapshot, outcome.hook_calls, outcome.attributes)
    assert [module for module, _ in seen] == [block.norm, block.up]
    assert seen[1][1] is outcome.hook_calls[1].output


def test_hooks_that_change_an_output_are_refused() -> None:
    block: Any = Wrapped(lambda layer: None)

    def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output / 2

    block.layer.up.register_forward_hook(lambda module, args, output: output)  # changes nothing
    handle = block.layer.up.register_forward_hook(halve)
    snapshot = take_snapshot(block, None, name="layers.3")
    outcome = Replica(snapshot, lambda p: p, lambda b: b).run((torch.randn(4, 3, 8),), {})
    handle.remove()  # too late: the call was posted
    with pytest.raises(ConfigurationError, match=r"halve.*layers\.3\.layer\.up \(Linear\)"):
        apply_outcome(snapshot, outcome.hook_calls, outcome.attributes)


def test_hooks_of_the_blocks_own_run_on_the_replica() -> None:
    block: Any = Wrapped(hook_own_method)
    replica, _ = replica_of(block)
    x = torch.randn(4, 3, 8)
    outcome = replica.run((x,), {})
    assert torch.equal(outcome.result, block(x))
    ((module, name, value, _),) = outcome.attributes
    assert module is block.layer
    assert name == "features"
    block.layer.__dict__["features"] = None
    apply_outcome(replica.snapshot, outcome.hook_calls, outcome.attributes)
    assert block.layer.features is value


def test_checkpoints_inside_a_block_record_once() -> None:
    block: Any = Layer()
    block.calls = 0
    block.up.register_forward_hook(lambda *_: None)

    def part(self: Any, x: Tensor) -> Any:
        self.calls += 1
        return self.up(x)

    def forward(self: Any, x: Tensor) -> Any:
        return self.down(checkpoint(self.part, x, use_reentrant=False))

    block.part = types.MethodType(part, block)
    block.forward = types.MethodType(forward, block)
    replica, _ = replica_of(block)
    for _ in range(2):
        outcome = replica.run((torch.randn(4, 3, 8, requires_grad=True),), {})
        outcome.result.sum().backward()
        assert len(outcome.hook_calls) == 1
        assert [a.value for a in outcome.attributes] == [1]


def test_global_hooks_run_once_for_the_modules_inside() -> None:
    seen: list[nn.Module] = []
    replica, _ = replica_of(Layer())
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, o: seen.append(m))
    try:
        replica.run((torch.randn(4, 3, 8),), {})
    finally:
        handle.remove()
    assert seen == [replica.module.norm, replica.module.up, replica.module.down]
