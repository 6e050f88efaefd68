from types import SimpleNamespace

import torch
from torch import nn

from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.work.parameters import (
    module_fingerprint,
    parameter_work,
    profile_module,
)
from roundpipe_lightning.planning.model.profile import ModelProfile


class Model(nn.Module):
    def __init__(self, *, num_layers: int = 3, tied: bool = False, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.register_buffer("positions", torch.zeros(6, dtype=torch.long))
        if tied:
            self.head.weight = self.embedding.weight


def profile_of(module: nn.Module) -> ModelProfile:
    return profile_module(module, find_stacks(module, None)[0])


def test_blocks_and_segments() -> None:
    profile = profile_of(Model())
    assert profile.block_names == ("layers.0", "layers.1", "layers.2")
    block = profile.blocks[1]
    assert block.parameter_bytes == block.trainable_bytes == 4 * 4 * 4
    assert block.forward_seconds == 2 * 16 / 1e12
    assert block.backward_seconds == 2 * block.forward_seconds
    assert profile.head.parameter_bytes == 10 * 4 * 4 + 6 * 8
    assert profile.head.trainable_bytes == 10 * 4 * 4
    assert profile.head.forward_seconds == 0
    assert profile.tail.parameter_bytes == (10 * 4 + 8) * 4
    assert profile.tail.forward_seconds == 2 * 48 / 1e12
    with torch.device("meta"):
        assert profile_of(Model()) == profile


def test_tied_parameters_are_placed_twice_and_multiplied_once() -> None:
    tied, untied = profile_of(Model(tied=True)), profile_of(Model())
    assert (tied.head, tied.tail) == (untied.head, untied.tail)
    assert tied.fingerprint != untied.fingerprint


def test_frozen_parameters_have_no_gradient() -> None:
    module = Model()
    module.layers[0].requires_grad_(False)
    frozen, trained, _ = profile_of(module).blocks
    assert frozen.trainable_bytes == 0
    assert frozen.backward_seconds == frozen.forward_seconds == trained.forward_seconds


def test_without_a_stack_all_is_tail() -> None:
    profile = profile_module(nn.Linear(3, 2), None)
    assert (profile.num_blocks, profile.head.parameter_bytes) == (0, 0)
    assert profile.tail.parameter_bytes == (3 * 2 + 2) * 4
    assert profile.tail.backward_seconds > 0


def test_only_the_experts_that_see_a_token_count() -> None:
    block = nn.Module()
    block.experts = nn.Parameter(torch.zeros(8, 4, 4))
    module = nn.Module()
    module.layers = nn.ModuleList([block])
    stack = find_stacks(module, ["layers"])[0]
    dense = profile_module(module, stack).blocks[0]
    module.config = SimpleNamespace(num_experts=8, num_experts_per_tok=2)  # type: ignore[assignment]
    sparse = profile_module(module, stack).blocks[0]
    assert sparse.forward_seconds == dense.forward_seconds / 4
    assert sparse.parameter_bytes == dense.parameter_bytes


def test_the_fingerprint_is_of_the_structure() -> None:
    def print_of(module: nn.Module) -> str:
        return module_fingerprint(module, find_stacks(module, None)[0])

    same = print_of(Model())
    assert print_of(Model().to(torch.bfloat16).requires_grad_(False)) == print_of(Model()) == same
    others = [Model(width=5), Model(num_layers=4), nn.ModuleDict({"model": Model()})]
    assert same not in {print_of(other) for other in others}
    assert module_fingerprint(Model(), None) != same


def test_work_from_parameters_has_their_bytes_and_operations() -> None:
    module = Model()
    module.layers[0].requires_grad_(False)
    stack = find_stacks(module, None)[0]
    work, profile = parameter_work(module, stack), profile_module(module, stack)
    assert work.fingerprint == profile.fingerprint
    assert [block.name for block in work.blocks] == list(profile.block_names)
    assert work.num_parameters == sum(t.numel() for t in module.parameters())
    assert work.blocks[0].num_trainable == 0
    parts = (profile.head, *profile.blocks, profile.tail)
    for part, expected in zip(work.segments, parts, strict=True):
        assert part.forward.matrix_operations.fixed == expected.forward_seconds * 1e12
        assert part.parameter_bytes == expected.parameter_bytes
        assert part.trainable_bytes == expected.trainable_bytes
