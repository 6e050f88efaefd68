from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.blocks import _largest_list, find_stacks


class Block(nn.Module):
    def __init__(self, width: int = 4, *, num_experts: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))


class OtherBlock(Block):
    pass


class Model(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(4, 8)


class Towers(nn.Module):
    """Two stacks, a small network outside of them and a list inside of their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block(2) for _ in range(2))
        self.bridge = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 4))
        self.layers = nn.ModuleList(Block(num_experts=3) for _ in range(3))


class Stage(nn.Module):
    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.change = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"model": Model([Block() for _ in range(3)])})


def lists(**children: Sequence[nn.Module]) -> nn.Module:
    module = nn.Module()
    for name, blocks in children.items():
        setattr(module, name, nn.ModuleList(blocks))
    return module


def with_alias() -> nn.Module:
    module = model()
    module.alias = module.model.layers  # type: ignore[union-attr]
    return module


def found(module: nn.Module) -> tuple[str, int] | None:
    stack = _largest_list(module)
    return None if stack is None else (stack.name, len(stack.blocks))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(model, ("model.layers", 3), id="a list of layers"),
        pytest.param(
            lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            ("", 3),
            id="a sequential is its own stack",
        ),
        pytest.param(
            lambda: Model([Block(num_experts=9), Block(num_experts=1)]),
            ("layers", 2),
            id="the outer list",
        ),
        pytest.param(
            lambda: Model([nn.Sequential(Block(), Block()), nn.Sequential()]),
            ("layers", 2),
            id="of equal lists the outer one",
        ),
        pytest.param(
            lambda: lists(many=[Block(2) for _ in range(6)], large=[Block(16), Block(16)]),
            ("large", 2),
            id="bytes decide, not the number",
        ),
        pytest.param(
            lambda: lists(mixed=[Block(2), Block(2), OtherBlock(64)], plain=[Block(8), Block(8)]),
            ("plain", 2),
            id="only the commonest type counts",
        ),
        pytest.param(
            lambda: lists(mixed=[Block(2), Block(2), OtherBlock(64)]),
            ("mixed", 3),
            id="but all children are blocks",
        ),
        pytest.param(with_alias, ("model.layers", 3), id="a list with two names"),
        pytest.param(lambda: nn.Linear(2, 2), None, id="no list"),
        pytest.param(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), None, id="nothing repeats"),
        pytest.param(lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), None, id="no parameters"),
        pytest.param(nn.Sequential, None, id="empty"),
        pytest.param(lambda: nn.Sequential(nn.Linear(2, 2)), None, id="one"),
        pytest.param(lambda: Model([Block(), OtherBlock()]), None, id="two types"),
        pytest.param(lambda: Model([Block()] * 2), None, id="a block that runs twice"),
    ],
)
def test_the_largest_repeated_list(
    make: Callable[[], nn.Module], expected: tuple[str, int] | None
) -> None:
    assert found(make()) == expected
    with torch.device("meta"):
        assert found(make()) == expected


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("qwen3", "model.layers"), ("gpt2", "transformer.h"), ("qwen3_moe", "model.layers")],
)
def test_models_of_transformers(model_type: str, name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, num_hidden_layers=3)
    with torch.device("meta"):
        module = nn.ModuleDict({"model": AutoModelForCausalLM.from_config(config)})
    assert found(module) == (f"model.{name}", 3)


@pytest.mark.parametrize(
    ("names", "name", "blocks"),
    [
        (["model.layers"], "model.layers", [f"model.layers.{i}" for i in range(3)]),
        ("model.layers", "model.layers", [f"model.layers.{i}" for i in range(3)]),
        (
            ["model.layers.2", "model.layers.0"],
            "model.layers",
            ["model.layers.2", "model.layers.0"],
        ),
        (
            ["model.embedding", "model.layers.0"],
            "model.embedding to model.layers.0",
            ["model.embedding", "model.layers.0"],
        ),
        (["model.layers.0.linear"], "model.layers.0", ["model.layers.0.linear"]),
    ],
)
def test_blocks_by_name(names: Sequence[str], name: str, blocks: list[str]) -> None:
    module = model()
    (stack,) = find_stacks(module, names)
    assert (stack.name, list(stack.names)) == (name, blocks)
    assert stack.blocks == tuple(module.get_submodule(block) for block in blocks)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"blocks=\[\] names no block"),
        (["model.layers", "model.head"], "'model.layers' is a ModuleList"),
        (["model", "model.head"], "'model.head' is inside of 'model'"),
        (["model.head", "model"], "'model.head' is inside of 'model'"),
        (["model.head", "model.head"], "twice"),
        (["model.layers.0.experts"], "the list is empty"),
        (
            ["model.layer"],
            r"blocks='model.layer'.*nearest names are 'mod.*lists of blocks are 'model.l.*=None",
        ),
    ],
)
def test_names_that_make_no_stack(names: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_stacks(model(), names)


@pytest.mark.parametrize(
    ("make", "names", "stacks"),
    [
        (Towers, None, [("tower", 2), ("layers", 3)]),
        (model, None, [("model.layers", 3)]),
        (lambda: nn.Linear(2, 2), None, []),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None, [("", 2)]),
        (
            lambda: Model([Stage(4, 2), Stage(8, 3)]),
            None,
            [("layers.0.blocks", 2), ("layers.1.blocks", 3)],
        ),
        (lambda: Model([Stage(4, 2), Stage(4, 2)]), None, [("layers", 2)]),
        (Towers, ["layers", "tower"], [("layers", 3), ("tower", 2)]),
        (Towers, ["layers"], [("layers", 3)]),
        (Towers, ["tower.0", "layers.1"], [("tower.0 to layers.1", 2)]),
    ],
)
def test_several_stacks(
    make: Callable[[], nn.Module], names: list[str] | None, stacks: list[tuple[str, int]]
) -> None:
    assert [(stack.name, len(stack.blocks)) for stack in find_stacks(make(), names)] == stacks


def test_stacks_that_cannot_be() -> None:
    module = Towers()
    with pytest.raises(ConfigurationError, match=r"'towr'.*nearest names are 'tower'"):
        find_stacks(module, ["towr", "layers"])
    module.tower.append(module.layers[0])
    with pytest.raises(ConfigurationError, match="'tower' is in another of these lists"):
        find_stacks(module, ["tower", "layers"])
    assert [stack.name for stack in find_stacks(module, None)] == ["layers"]
