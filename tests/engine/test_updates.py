from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.update.updater import Updater, UpdateUnit, update_units


class Model(nn.Module):
    """An embedding, blocks that share a scale, and a head."""

    embedding: Any
    layers: Any
    head: Any

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(2, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        for layer in list(self.layers)[1:]:
            layer.scale = self.layers[0].bias  # shared by all of them
        self.head = nn.Linear(3, 2)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def store(model: Model) -> Iterator[HostStore]:
    store = HostStore(model, list(model.layers))
    yield store
    store.close()


def units_of(model: Model, store: HostStore) -> list[UpdateUnit]:
    blocks = {f"layers.{index}": layer for index, layer in enumerate(model.layers)}
    return update_units(model, blocks, shared=store.shared)


def sgd_with_gradients(model: nn.Module, *, lr: float = 1.0) -> torch.optim.SGD:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_a_step_that_was_left_out_makes_nothing_staler(model: Model, store: HostStore) -> None:
    with Updater(store, units_of(model, store), stale=True) as updater:
        optimizer = sgd_with_gradients(model)
        updater.keep([optimizer])
        updater.submit(optimizer)
        updater.join()
        assert not torch.equal(store.value(model.head.weight), model.head.weight)
        updater.keep([optimizer])  # gradients overflowed: no update
        assert torch.equal(store.value(model.head.weight), model.head.weight)


def test_what_is_not_trained_has_no_second_copy(model: Model) -> None:
    model.embedding.requires_grad_(False)
    for layer in model.layers:
        layer.weight.requires_grad_(False)
    store = HostStore(model, list(model.layers))
    with Updater(store, units_of(model, store), stale=True) as updater:
        updater.keep([torch.optim.SGD([*model.head.parameters(), model.layers[0].bias], lr=1.0)])
        updater.join()
        assert model.embedding.weight not in store.previous
        assert model.layers[1].weight not in store.previous
        assert {model.head.weight, model.head.bias, model.layers[0].bias} <= set(store.previous)
    store.close()


def test_parameters_that_come_later_are_kept_too(model: Model, store: HostStore) -> None:
    with Updater(store, units_of(model, store), stale=True) as updater:
        optimizer = torch.optim.SGD(model.head.parameters(), lr=1.0)
        updater.keep([optimizer])
        updater.join()
        optimizer.add_param_group({"params": list(model.layers[1].parameters())})
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        updater.keep([optimizer])
        before = model.layers[1].weight.detach().clone()
        updater.submit(optimizer)
        updater.join()
        assert torch.equal(store.value(model.layers[1].weight), before)
        assert torch.equal(model.layers[1].weight, before - 1)


def test_parameters_that_are_not_the_modules_are_stepped(model: Model, store: HostStore) -> None:
    foreign = nn.Parameter(torch.ones(2))
    foreign.grad = torch.ones(2)
    with Updater(store, units_of(model, store)) as updater:
        optimizer = sgd_with_gradients(model)
        optimizer.add_param_group({"params": [foreign]})
        updater.submit(optimizer)
        updater.join()
    assert torch.equal(foreign, torch.zeros(2))
