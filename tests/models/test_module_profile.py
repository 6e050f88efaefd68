from types import SimpleNamespace

import torch
from torch import nn

from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.work.parameters import module_fingerprint, parameter_work
from roundpipe_lightning.planning.model.work import BlockWork, WorkProfile


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


def work_of(module: nn.Module) -> WorkProfile:
    return parameter_work(module, find_stacks(module, None)[0])


def operations(part: BlockWork) -> tuple[float, float]:
    return part.forward.matrix_operations.fixed, part.backward.matrix_operations.fixed


def test_blocks_and_segments() -> None:
    work = work_of(Model())
    assert work.block_names == ("layers.0", "layers.1", "layers.2")
    block = work.blocks[1]
    assert block.parameter_bytes == block.trainable_bytes == 4 * 4 * 4
    assert operations(block) == (2 * 16, 4 * 16)
    assert work.head.parameter_bytes == 10 * 4 * 4 + 6 * 8
    assert work.head.trainable_bytes == 10 * 4 * 4
    assert operations(work.head) == (0, 0)
    assert work.tail.parameter_bytes == (10 * 4 + 8) * 4
    assert operations(work.tail) == (2 * 48, 4 * 48)
    assert work.num_parameters == sum(t.numel() for t in Model().parameters())
    with torch.device("meta"):
        assert work_of(Model()) == work


def test_tied_parameters_are_placed_twice_and_multiplied_once() -> None:
    tied, untied = work_of(Model(tied=True)), work_of(Model())
    assert (tied.head, tied.tail) == (untied.head, untied.tail)
    assert tied.fingerprint != untied.fingerprint


def test_frozen_parameters_have_no_gradient() -> None:
    module = Model()
    module.layers[0].requires_grad_(False)
    frozen, trained, _ = work_of(module).blocks
    assert frozen.num_trainable == frozen.trainable_bytes == 0
    forward, backward = operations(frozen)
    assert backward == forward == operations(trained)[0]


def test_without_a_stack_all_is_tail() -> None:
    work = parameter_work(nn.Linear(3, 2), None)
    assert (work.blocks, work.head.parameter_bytes) == ((), 0)
    assert work.tail.parameter_bytes == (3 * 2 + 2) * 4
    assert operations(work.tail)[1] > 0


def test_only_the_experts_that_see_a_token_count() -> None:
    block = nn.Module()
    block.experts = nn.Parameter(torch.zeros(8, 4, 4))
    module = nn.Module()
    module.layers = nn.ModuleList([block])
    stack = find_stacks(module, ["layers"])[0]
    dense = parameter_work(module, stack).blocks[0]
    module.config = SimpleNamespace(num_experts=8, num_experts_per_tok=2)  # type: ignore[assignment]
    sparse = parameter_work(module, stack).blocks[0]
    assert operations(sparse)[0] == operations(dense)[0] / 4
    assert sparse.parameter_bytes == dense.parameter_bytes


def test_the_fingerprint_is_of_the_structure() -> None:
    def print_of(module: nn.Module) -> str:
        return module_fingerprint(module, find_stacks(module, None)[0])

    same = print_of(Model())
    assert print_of(Model().to(torch.bfloat16).requires_grad_(False)) == print_of(Model()) == same
    others = [Model(width=5), Model(num_layers=4), nn.ModuleDict({"model": Model()})]
    assert same not in {print_of(other) for other in others}
    assert module_fingerprint(Model(), None) != same
