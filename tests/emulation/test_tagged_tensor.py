import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.emulation.placement import DeviceMismatchError
from roundpipe_lightning.emulation.tagged_tensor import move, tag, tag_of, tagged_mode, untag
from tests.kit.moments import with_gradient

W0, W1 = "emulated:0", "emulated:1"


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _leaf(*shape: int, device_name: str = W0) -> Tensor:
    return tag(_randn(*shape), device_name).requires_grad_()


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def _attention(x: Tensor, mask: Tensor | None = None) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


# --- mixing ---------------------------------------------------------------------------------------

MIXTURES: dict[str, Callable[[], object]] = {
    "add": lambda: tag(_randn(3), W0) + tag(_randn(3), W1),
    "add a host tensor": lambda: tag(_randn(3), W0) + _randn(3),
    "add to a host tensor": lambda: _randn(3) + tag(_randn(3), W0),
    "0-dim of another device": lambda: tag(_randn(3), W0) * tag(_randn(), W1),
    "0-dim on a device, vector on the host": lambda: _randn(3) * tag(_randn(), W0),
    "in place": lambda: tag(_randn(3), W0).add_(tag(_randn(3), W1)),
    "in place on the host": lambda: _randn().add_(tag(_randn(), W0)),
    "matmul": lambda: tag(_randn(3, 3), W0) @ tag(_randn(3, 3), W1),
    "cat": lambda: torch.cat([tag(_randn(3), W0), tag(_randn(3), W1)]),
    "stack of scalars": lambda: torch.stack([tag(_randn(), W0), _randn()]),
    "embedding": lambda: functional.embedding(torch.arange(2), tag(_randn(4, 3), W0)),
    "cross_entropy": lambda: functional.cross_entropy(
        tag(_randn(4, 3), W0), torch.arange(3).repeat(2)[:4]
    ),
    "out=": lambda: torch.add(tag(_randn(3), W0), tag(_randn(3), W0), out=_randn(3)),
    "device indices, host tensor": lambda: _randn(3)[tag(torch.arange(2), W0)],
    "equal": lambda: torch.equal(tag(_randn(3), W0), _randn(3)),
    "foreach": lambda: torch._foreach_add([tag(_randn(3), W0)], [tag(_randn(3), W1)]),
    "sdpa mask": lambda: _attention(tag(_randn(1, 1, 2, 4), W0), _randn(1, 1, 2, 2)),
    "data": lambda: setattr(tag(_randn(3), W0), "data", tag(_randn(3), W1)),
    "data from the host": lambda: setattr(tag(_randn(3), W0), "data", _randn(3)),
    "grad": lambda: setattr(tag(_randn(3), W0), "grad", _randn(3)),
    "a trainable host scalar": lambda: tag(_randn(3), W0) * nn.Parameter(_randn()),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixing_raises(mixture: str, inference: bool) -> None:
    if inference and "trainable" in mixture:
        return
    with torch.inference_mode(inference), pytest.raises(DeviceMismatchError):
        MIXTURES[mixture]()


def test_the_error_names_operation_operands_and_places() -> None:
    with pytest.raises(DeviceMismatchError) as caught:
        torch.mm(tag(_randn(2, 3), W0), tag(_randn(3, 4), W1))
    assert str(caught.value) == (
        "aten.mm.default: expected all tensors to be on the same device, "
        "but found self (2, 3) on emulated:0 and mat2 (3, 4) on emulated:1"
    )


def _with_item(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = 5.0
    x[1, 1] = torch.tensor(2.0)
    return x


PERMITTED: dict[str, Callable[[Tensor], Tensor]] = {
    "a host scalar": lambda x: x * torch.tensor(2.0),
    "where": lambda x: torch.where(x > 0, x, torch.tensor(0.0)),
    "masked_fill": lambda x: x.masked_fill(x > 0, torch.tensor(3.0)),
    "host indices": lambda x: x[torch.arange(2)],
    "index_put": lambda x: x.clone().index_put_((torch.arange(2),), torch.tensor(1.0)),
    "copy_ from the host": lambda x: x.clone().copy_(torch.ones(3, 4)),
    "copy_ from another device": lambda x: x.clone().copy_(tag(torch.ones(3, 4), W1)),
    "numbers": lambda x: (2 * x + 1).clamp(0, 1),
    "setitem": _with_item,
}


@pytest.mark.parametrize("permitted", PERMITTED)
def test_what_accelerators_take_is_taken(permitted: str) -> None:
    x = _randn(3, 4)
    result = PERMITTED[permitted](tag(x, W0))
    assert tag_of(result) == W0
    assert torch.equal(untag(result), PERMITTED[permitted](x))


def test_copy_into_a_host_tensor_downloads() -> None:
    host, tagged = torch.zeros(3), tag(_randn(3), W0)
    assert host.copy_(tagged) is host
    assert torch.equal(host, untag(tagged))


# --- autograd -------------------------------------------------------------------------------------


def _wrong_way(x: Tensor) -> Tensor:
    """Send the gradient to another device than the tensor's."""
    return with_gradient(x, lambda gradient: tag(untag(gradient), W1))


def test_backward_meets_mixed_places() -> None:
    x = _leaf(3)
    with pytest.raises(DeviceMismatchError, match="emulated:1"):
        _wrong_way(x.exp()).sum().backward()


def test_a_gradient_in_the_wrong_place_is_found() -> None:
    x = _leaf(3)
    _wrong_way(x).sum().backward()
    with pytest.raises(DeviceMismatchError, match=r"gradient of a tensor \(3,\) on emulated:0"):
        _ = x.grad


@pytest.mark.parametrize("way", ["move", "to", "to device=", "to a tensor"])
def test_gradients_come_back_over_devices(way: str) -> None:
    target = tag(torch.ones(1), W1)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "move": lambda x: move(x, W1),
        "to": lambda x: x.to(target.device),
        "to device=": lambda x: x.to(device="cpu:1", dtype=torch.float32),
        "to a tensor": lambda x: x.to(target),
    }
    x = _leaf(3)
    there = ways[way](x)
    assert tag_of(there) == W1
    (there * tag(torch.full((3,), 2.0), W1)).sum().backward()
    assert tag_of(_grad(x)) == W0
    assert _grad(x).tolist() == [2, 2, 2]


def test_gradients_come_back_from_and_to_the_host() -> None:
    host = _randn(3).requires_grad_()
    down = (move(host, W0) * 2).cpu()
    assert type(down) is Tensor
    down.sum().backward()
    assert type(_grad(host)) is Tensor
    assert _grad(host).tolist() == [2, 2, 2]
    x = _leaf(3)
    x.to("cpu").exp().sum().backward()
    assert tag_of(_grad(x)) == W0


def test_double_backward() -> None:
    x = _leaf(3)
    (first,) = torch.autograd.grad(move(x, W1).pow(3).sum(), x, create_graph=True)
    first.sum().backward()
    assert torch.allclose(untag(_grad(x)), 6 * _randn(3))


def test_moving_nowhere_is_free() -> None:
    x = _leaf(3)
    assert move(x, W0) is x
    assert x.to(x.device) is x
    assert x.to(torch.float32) is x


# --- operations -----------------------------------------------------------------------------------


def _in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1].mul_(3).add_(y[:, 0])
    y.view(-1)[2:4].zero_()
    y.t_().unsqueeze_(0).squeeze_(0)
    return y.relu_()


def _autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.t()
        assert y.dtype is torch.bfloat16
        return y.float()


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "views": lambda x: x.view(2, 2, 4)[:, 0].transpose(0, 1).reshape(-1).unsqueeze(1).expand(-1, 3),
    "in-place": _in_place,
    "as_strided": lambda x: x.as_strided((2, 3), (1, 2), 1),
    "cat, stack, split": lambda x: torch.cat([torch.stack(x.unbind()), *x.split(2)]),
    "softmax": lambda x: x.softmax(-1).log(),
    "dropout": lambda x: functional.dropout(x, 0.5),
    "norms": lambda x: functional.rms_norm(functional.layer_norm(x, (4,)), (4,)),
    "embedding": lambda x: functional.embedding(x.detach().abs().long().clamp(max=3), x),
    "cross_entropy": lambda x: functional.cross_entropy(x, x.detach().argmax(-1)),
    "sdpa": lambda x: _attention(x.view(1, 1, 4, 4)),
    "sdpa with a mask": lambda x: _attention(x.view(1, 1, 4, 4), x.detach() > 0),
    "gather": lambda x: x.gather(1, x.detach().argsort(1)),
    "sort": lambda x: x.sort(dim=0).values.cumsum(0),
    "conv": lambda x: functional.conv1d(x.view(1, 4, 4), x.view(2, 4, 2)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "new and like": lambda x: x * x.new_ones(4) + torch.ones_like(x) + x.new_tensor([1.0]),
    "foreach": lambda x: torch._foreach_mul([x, x + 1], 2.0)[1],
    "autocast": _autocast,
    "complex": lambda x: torch.view_as_real(torch.polar(x.abs(), x)),
    "dtype": lambda x: x.double().to(torch.float32),
    "data-dependent": lambda x: x[x > 0] * len((x > 0).nonzero()),
    "where in place": lambda x: x.masked_fill(x < 0, float("-inf")).exp(),
}


@pytest.mark.parametrize("mode", ["grad", "no_grad", "inference"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_give_the_plain_bits(operation: str, mode: str) -> None:
    guards = {"grad": torch.enable_grad, "no_grad": torch.no_grad}
    guard = guards.get(mode, torch.inference_mode)
    plain, tagged = _randn(4, 4).requires_grad_(), _leaf(4, 4)
    results = []
    for x in (plain, tagged):
        torch.manual_seed(0)
        with guard():
            y = OPERATIONS[operation](x)
        if y.requires_grad:
            y.nan_to_num().sum().backward()
        results.append(y.detach())
    assert tag_of(results[1]) == W0
    assert results[0].stride() == results[1].stride()
    assert torch.equal(results[0], untag(results[1]))
    if mode == "grad":
        assert torch.equal(_grad(plain), untag(_grad(tagged)))


def test_foreach_is_one_operation_per_position() -> None:
    a, b = tag(torch.ones(2), W0), tag(torch.ones(2), W1)
    out = torch._foreach_add([a, b], [a, b])
    assert [tag_of(x) for x in out] == [W0, W1]
    torch._foreach_mul_([a, b], torch.tensor(3.0))
    assert a.tolist() == b.tolist() == [3, 3]
    torch._foreach_copy_([a, b], [b, torch.zeros(2)])
    assert [tag_of(a), tag_of(b), b.tolist()] == [W0, W1, [0, 0]]


def test_optimizer_and_clipping_over_two_devices() -> None:
    parameters = [nn.Parameter(tag(_randn(3), name)) for name in (W0, W1)]
    plain = [nn.Parameter(_randn(3)) for _ in parameters]
    for group in (parameters, plain):
        optimizer = torch.optim.AdamW(group, lr=0.1, foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            for p in group:
                p.pow(2).sum().backward()
            optimizer.step()
    for p, q in zip(parameters, plain, strict=True):
        assert torch.equal(untag(p), q)
    assert [tag_of(p) for p in parameters] == [W0, W1]


def test_views_share_their_memory() -> None:
    base = tag(torch.zeros(4), W0)
    view = base[1:3]
    view.fill_(7)
    assert base.tolist() == [0, 7, 7, 0]
    base.data.add_(1)
    assert view.tolist() == [8, 8]
    base.detach()[0] = 5
    assert base[0].item() == 5


def test_writing_what_backward_needs_is_still_found() -> None:
    x = _leaf(3)
    y = x.exp()
    z = y.sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_values_for_python() -> None:
    x = tag(torch.tensor([1.5]), W0)
    assert (x.item(), float(x), x.tolist(), f"{x[0]:.1f}") == (1.5, 1.5, [1.5], "1.5")
    assert bool(x)
    assert len(x) == 1
    assert [tag_of(e) for e in x] == [W0]
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        x.numpy()


def test_set_data_swaps_the_values() -> None:
    parameter = nn.Parameter(tag(torch.ones(2), W0))
    parameter.data = tag(torch.full((3,), 2.0), W0)
    assert parameter.shape == (3,)
    assert (parameter * 2).tolist() == [4, 4, 4]
    with tagged_mode(), pytest.raises(DeviceMismatchError, match="data of a tensor on the host"):
        nn.Linear(1, 1).to(parameter.device)


def test_parameter_and_deepcopy() -> None:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(tag(_randn(2, 2), W0))
    module.bias = nn.Parameter(tag(_randn(2), W0))
    module(tag(_randn(1, 2), W0)).sum().backward()
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, nn.Parameter)
    assert tag_of(twin.weight) == tag_of(_grad(twin.weight)) == W0
    with torch.no_grad():
        module.weight.zero_()
    assert untag(twin.weight).abs().sum() > 0
    with pytest.raises(RuntimeError, match="only leaves"):
        copy.deepcopy(module.weight * 2)


def test_refusals() -> None:
    x = tag(torch.ones(2), W0)
    with pytest.raises(TypeError, match="untag"):
        pickle.dumps(x)
    with pytest.raises(DeviceMismatchError, match="storage"):
        x.resize_(4)
    with pytest.raises(DeviceMismatchError, match="storage"):
        x.set_(tag(torch.ones(3), W0))  # type: ignore[call-overload]


def test_out_of_another_shape_is_refused() -> None:
    x = tag(torch.ones(2), W0)
    with pytest.raises(DeviceMismatchError, match="resize"):
        torch.add(x, x, out=tag(torch.empty(0), W0))


# --- factories ------------------------------------------------------------------------------------


def _under_device(device: torch.device) -> Tensor:
    with device:
        return torch.ones(2)


FACTORIES: dict[str, Callable[[torch.device], Tensor]] = {
    "arange": lambda device: torch.arange(3, device=device),
    "zeros": lambda device: torch.zeros(3, device=device),
    "full": lambda device: torch.full((2, 2), 1.0, device=device),
    "rand": lambda device: torch.rand(3, device=device),
    "randint": lambda device: torch.randint(0, 3, (3,), device=device),
    "tensor": lambda device: torch.tensor([1, 2], device=device),
    "as_tensor": lambda device: torch.as_tensor([1, 2], device=device),
    "zeros_like": lambda device: torch.zeros_like(torch.ones(2), device=device),
    "new_zeros": lambda device: torch.ones(2).new_zeros(3, device=device),
    "new_tensor": lambda device: torch.ones(2).new_tensor([3], device=device),
    "to": lambda device: torch.ones(2).to(device),
    "to, dtype": lambda device: torch.ones(2).to(device=device, dtype=torch.int32),
    "eye": lambda device: torch.eye(2, device=device),
    "linspace": lambda device: torch.linspace(0, 1, 3, device=device),
    "tril_indices": lambda device: torch.tril_indices(2, 2, device=device),
    "context": _under_device,
    "module": lambda device: nn.Linear(2, 2, device=device).weight,
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("factory", FACTORIES)
def test_factories_under_the_mode(factory: str, inference: bool) -> None:
    device = tag(torch.ones(1), "emulated:2").device
    with torch.inference_mode(inference), tagged_mode():
        assert tag_of(FACTORIES[factory](device)) == "emulated:2"
        assert tag_of(FACTORIES[factory](torch.device("cpu"))) is None
    assert tag_of(FACTORIES[factory](device)) is None


def test_a_tensor_of_scalars_that_are_elsewhere() -> None:
    scalars = list(tag(torch.tensor([1, 2]), W1))
    with tagged_mode():
        made = torch.tensor(scalars, device=tag(torch.ones(1), "emulated:2").device)
        on_host = torch.tensor(scalars)
    assert (tag_of(made), made.dtype, untag(made).tolist()) == ("emulated:2", torch.int64, [1, 2])
    assert type(on_host) is Tensor
    assert on_host.tolist() == [1, 2]


def test_factories_that_require_gradients() -> None:
    with tagged_mode():
        x = torch.tensor([1.0], device="cpu:0", requires_grad=True)
        y = torch.ones(1, device="cpu:0", requires_grad=True)
        (x * y).sum().backward()
    assert x.is_leaf
    assert tag_of(_grad(x)) == tag_of(_grad(y)) == W0


def test_the_mode_ends() -> None:
    for _ in range(2):
        with tagged_mode(), pytest.raises(ZeroDivisionError):
            _ = 1 / 0
        assert tag_of(torch.zeros(1, device="cpu:0")) is None
