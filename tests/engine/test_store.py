import copy
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.emulation.tagged_tensor import tag_of, untag
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.errors import ConfigurationError
from tests.kit.engine import WIDTH, LockingDevice, Regressor


def _storages(parameters: Any) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in parameters}


def assert_uploads_all(store: HostStore, blocks: list[nn.Module], device: Device) -> None:
    for block in blocks:
        values = store.upload_block(block, device)
        assert set(values) == set(block.parameters())
        for parameter, value in values.items():
            host = value if tag_of(value) is None else untag(value)
            assert torch.equal(host, parameter)
            assert value.shape == parameter.shape
            assert value.stride() == parameter.stride()
            assert not value.requires_grad


def test_one_buffer_per_block_and_the_rest() -> None:
    module = Regressor(3)
    wanted = copy.deepcopy(module.state_dict())
    identities = list(module.parameters())
    store = HostStore(module, list(module.layers))
    for block in module.layers:
        assert len(_storages(block.parameters())) == 1
    outside = [*module.head.parameters(), *module.tail.parameters()]
    assert len(_storages(outside)) == 1
    assert len(_storages(module.parameters())) == 4
    assert all(a is b for a, b in zip(module.parameters(), identities, strict=True))
    assert all(type(p) is nn.Parameter for p in module.parameters())
    for name, value in module.state_dict().items():
        assert torch.equal(value, wanted[name])
    assert_uploads_all(store, list(module.layers), CpuDevice())
    assert_uploads_all(store, list(module.layers), EmulatedDevice(1))


def test_every_parameter_begins_at_a_cache_line() -> None:
    module = Regressor(2)
    HostStore(module, list(module.layers))
    for parameter in module.parameters():
        offset = parameter.storage_offset() * parameter.element_size()
        assert offset % 64 == 0


def _blocks(module: Regressor) -> list[Any]:
    return list(module.layers)


def test_buffers_of_their_own_for_dtypes_and_frozen_parameters() -> None:
    module = Regressor(2)
    _blocks(module)[0].inner.requires_grad_(False)
    _blocks(module)[0].norm.to(torch.bfloat16)
    store = HostStore(module, list(module.layers))
    device = LockingDevice()
    assert len(_storages(_blocks(module)[0].parameters())) == 3
    values = store.upload_block(_blocks(module)[0], device)
    assert device.num_uploads == 3
    for parameter, value in values.items():
        assert value.dtype == parameter.dtype
        assert torch.equal(untag(value), parameter)


def test_a_kind_of_which_all_parameters_are_empty() -> None:
    module = Regressor(2)
    _blocks(module)[1].gap = nn.Parameter(torch.zeros(0), requires_grad=False)
    store = HostStore(module, list(module.layers))
    assert_uploads_all(store, list(module.layers), EmulatedDevice(0))


def test_tied_and_shared_parameters_stay_one() -> None:
    module = Regressor(3)
    first, last = _blocks(module)[0], _blocks(module)[2]
    last.inner.weight = first.inner.weight
    _blocks(module)[1].norm.weight = module.head.bias
    store = HostStore(module, list(module.layers))
    assert last.inner.weight is first.inner.weight
    assert store.shared == {first.inner.weight, module.head.bias}
    assert_uploads_all(store, list(module.layers), EmulatedDevice(0))


def test_overlapping_parameters_keep_their_memory() -> None:
    module = Regressor(2)
    memory = torch.randn(3 * WIDTH)
    _blocks(module)[0].norm.weight = nn.Parameter(memory[:WIDTH])
    _blocks(module)[0].norm.bias = nn.Parameter(memory[WIDTH // 2 : WIDTH // 2 + WIDTH])
    _blocks(module)[1].norm.bias = nn.Parameter(memory[2 * WIDTH :])
    store = HostStore(module, list(module.layers))
    with torch.no_grad():
        memory[:WIDTH] = torch.arange(WIDTH, dtype=torch.float)
    assert torch.equal(_blocks(module)[0].norm.weight, torch.arange(WIDTH, dtype=torch.float))
    assert torch.equal(_blocks(module)[0].norm.bias[: WIDTH // 2], torch.arange(4.0, 8.0))
    assert_uploads_all(store, list(module.layers), EmulatedDevice(0))


def test_parameters_of_every_form() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(2.0))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.transposed = nn.Parameter(torch.randn(3, 5).t())
            self.channels = nn.Parameter(
                torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
            )
            self.whole = nn.Parameter(torch.arange(6), requires_grad=False)
            self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    first, second = Odd(), Odd()
    first.strided = nn.Parameter(torch.randn(4, 6)[:, ::2])
    second.expanded = nn.Parameter(torch.ones(1).expand(4), requires_grad=False)
    module = nn.ModuleList([first, second])
    wanted = {name: value.clone() for name, value in module.state_dict().items()}
    store = HostStore(module, list(module))
    for name, value in module.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert first.transposed.stride() == (1, 5)
    assert first.channels.is_contiguous(memory_format=torch.channels_last)
    assert_uploads_all(store, list(module), EmulatedDevice(0))


def test_data_that_was_swapped_is_what_is_uploaded() -> None:
    """Weight averaging puts other values into `.data` for a while."""
    module = Regressor(2)
    store = HostStore(module, list(module.layers))
    parameter = next(iter(_blocks(module)[1].parameters()))
    own = parameter.data
    parameter.data = torch.full_like(own, 7.0)
    assert_uploads_all(store, list(module.layers), EmulatedDevice(0))
    parameter.data = own
    with torch.no_grad():
        parameter.fill_(3.0)
    assert_uploads_all(store, list(module.layers), EmulatedDevice(0))


def test_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        module = nn.ModuleList([nn.Linear(2, 2)])
    with pytest.raises(ConfigurationError, match=r"'0\.weight'.*configure_model"):
        HostStore(module, list(module))


def test_pages_are_locked_and_given_back() -> None:
    module = Regressor(2)
    store = HostStore(module, list(module.layers))
    device = LockingDevice()
    store.pin(device)
    assert set(device.locked) == _storages(module.parameters())
    store.close()
    store.close()
    assert not device.locked


def test_a_second_store_on_the_same_module() -> None:
    module = Regressor(2)
    wanted = copy.deepcopy(module.state_dict())
    HostStore(module, list(module.layers))
    store = HostStore(module, list(module.layers)[::-1])
    assert all(torch.equal(v, wanted[n]) for n, v in module.state_dict().items())
    assert_uploads_all(store, list(module.layers)[::-1], EmulatedDevice(0))


def test_no_stack_and_no_parameters() -> None:
    HostStore(nn.Identity(), [])
    block = nn.ReLU()
    store = HostStore(nn.Sequential(nn.ReLU()), [block])
    assert store.upload_block(block, EmulatedDevice(0)) == {}
