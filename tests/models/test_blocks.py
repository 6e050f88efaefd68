"""The stack of blocks is found by what repeats, or taken by its name."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.blocks import find_blocks, find_stacks


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


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _model() -> Wrapper:
    return Wrapper(Model([Block() for _ in range(3)]))


def test_the_list_of_layers_is_found() -> None:
    module = _model()
    stack = find_blocks(module, None)
    assert stack is not None
    assert stack.name == "model.layers"
    assert stack.names == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert stack.blocks == tuple(module.get_submodule(name) for name in stack.names)


def test_a_sequential_is_its_own_stack() -> None:
    stack = find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), None)
    assert stack is not None
    assert (stack.name, stack.names) == ("", ("0", "1", "2"))


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(2, 2),
        nn.Sequential(nn.Linear(2, 2), nn.ReLU()),
        nn.Sequential(nn.ReLU(), nn.ReLU()),
        nn.Sequential(),
        nn.Sequential(nn.Linear(2, 2)),
        Model([Block(), OtherBlock()]),
    ],
)
def test_no_stack(module: nn.Module) -> None:
    assert find_blocks(module, None) is None


def test_a_block_that_runs_twice_is_no_stack() -> None:
    shared = Block()
    assert find_blocks(Model([shared, shared]), None) is None


def test_the_outer_list_is_taken() -> None:
    stack = find_blocks(Model([Block(num_experts=9), Block(num_experts=1)]), None)
    assert stack is not None
    assert stack.name == "layers"


def test_of_equal_lists_the_outer_one_is_taken() -> None:
    layers = [nn.Sequential(Block(), Block()), nn.Sequential()]
    stack = find_blocks(Model(layers), None)
    assert stack is not None
    assert stack.name == "layers"


def test_bytes_decide_and_not_the_number_of_blocks() -> None:
    module = nn.Module()
    module.many = nn.ModuleList(Block(2) for _ in range(6))
    module.large = nn.ModuleList(Block(16) for _ in range(2))
    stack = find_blocks(module, None)
    assert stack is not None
    assert stack.name == "large"


def test_only_the_commonest_type_counts_but_all_children_are_blocks() -> None:
    module = nn.Module()
    module.mixed = nn.ModuleList([Block(2), Block(2), OtherBlock(64)])
    module.plain = nn.ModuleList([Block(8), Block(8)])
    stack = find_blocks(module, None)
    assert stack is not None
    assert stack.name == "plain"
    del module.plain
    stack = find_blocks(module, None)
    assert stack is not None
    assert len(stack.blocks) == 3


def test_a_list_with_two_names_counts_once() -> None:
    module = _model()
    module.alias = module.model.layers
    stack = find_blocks(module, None)
    assert stack is not None
    assert stack.name == "model.layers"


def test_the_meta_device_will_do() -> None:
    with torch.device("meta"):
        stack = find_blocks(_model(), None)
    assert stack is not None
    assert len(stack.blocks) == 3


@pytest.mark.parametrize("names", [["model.layers"], "model.layers"])
def test_a_list_by_name(names: Sequence[str]) -> None:
    stack = find_blocks(_model(), names)
    assert stack is not None
    assert stack.name == "model.layers"
    assert len(stack.blocks) == 3


def test_blocks_by_name() -> None:
    module = _model()
    stack = find_blocks(module, ["model.layers.2", "model.layers.0"])
    assert stack is not None
    assert stack.name == "model.layers"
    assert stack.blocks == (module.model.layers[2], module.model.layers[0])  # type: ignore[index]
    stack = find_blocks(module, ["model.embedding", "model.layers.0"])
    assert stack is not None
    assert stack.name == "model.embedding to model.layers.0"
    stack = find_blocks(nn.Sequential(nn.Linear(2, 2)), ["0"])
    assert stack is not None
    assert stack.names == ("0",)


def test_an_unknown_name_says_what_is_near_and_what_there_is() -> None:
    with pytest.raises(ConfigurationError) as caught:
        find_blocks(_model(), ["model.layer"])
    message = str(caught.value)
    assert "blocks='model.layer'" in message
    assert "nearest names are 'model.layers'" in message
    assert "lists of blocks are 'model.layers'" in message
    assert "blocks=None" in message


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"blocks=\[\] names no block"),
        (["model.layers", "model.head"], "'model.layers' is a ModuleList"),
        (["model", "model.head"], "'model.head' is inside of 'model'"),
        (["model.head", "model"], "'model.head' is inside of 'model'"),
        (["model.head", "model.head"], "twice"),
        (["model.layers.0.experts"], "the list is empty"),
    ],
)
def test_names_that_make_no_stack(names: Sequence[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_blocks(_model(), names)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("qwen3", "model.layers"), ("gpt2", "transformer.h"), ("qwen3_moe", "model.layers")],
)
def test_models_of_transformers(model_type: str, name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, num_hidden_layers=3)
    with torch.device("meta"):
        module = Wrapper(AutoModelForCausalLM.from_config(config))
    stack = find_blocks(module, None)
    assert stack is not None
    assert stack.name == f"model.{name}"
    assert len(stack.blocks) == 3


# --- several stacks -------------------------------------------------------------------------------


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


def _found(module: nn.Module, names: list[str] | None = None) -> list[tuple[str, int]]:
    return [(stack.name, len(stack.blocks)) for stack in find_stacks(module, names)]


def test_all_stacks_are_found_as_they_are_registered() -> None:
    assert _found(Towers()) == [("tower", 2), ("layers", 3)]
    assert _found(_model()) == [("model.layers", 3)]
    assert _found(nn.Linear(2, 2)) == []
    assert _found(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == [("", 2)]


def test_the_blocks_of_stages_that_differ_in_size() -> None:
    stages = [Stage(4, 2), Stage(8, 3)]
    assert _found(Model(stages)) == [("layers.0.blocks", 2), ("layers.1.blocks", 3)]
    assert _found(Model([Stage(4, 2), Stage(4, 2)])) == [("layers", 2)]


def test_stacks_by_name() -> None:
    assert _found(Towers(), ["layers", "tower"]) == [("layers", 3), ("tower", 2)]
    assert _found(Towers(), ["layers"]) == [("layers", 3)]
    assert _found(Towers(), ["tower.0", "layers.1"]) == [("tower.0 to layers.1", 2)]


def test_stacks_that_share_a_block() -> None:
    module = Towers()
    module.tower.append(module.layers[0])
    with pytest.raises(ConfigurationError, match="'tower' is in another of these lists"):
        find_stacks(module, ["tower", "layers"])
    assert _found(module) == [("layers", 3)]


def test_a_list_that_does_not_exist_among_others() -> None:
    with pytest.raises(ConfigurationError, match=r"'towr'.*nearest names are 'tower'"):
        find_stacks(Towers(), ["towr", "layers"])
