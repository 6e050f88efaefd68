from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from roundpipe_lightning.errors import ConfigurationError, ModelSourceError
from roundpipe_lightning.models.load_module import draw_weights, load_module
from roundpipe_lightning.modules import ModelSource
from tests.kit.architectures import TINY


class Small(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 6, bias=False)
        self.head.weight = self.embedding.weight
        with torch.device("cpu"):
            self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.embedding(ids))) * self.scale
        return result


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    names = sorted(tensors)
    for number, part in enumerate((names[:2], names[2:])):
        save_file({name: tensors[name] for name in part}, folder / f"{number}.safetensors")


def saved_small(folder: Path) -> tuple[Small, dict[str, Tensor]]:
    module = Small()
    module.norm.running_mean = torch.arange(4.0)
    tensors = {n: t.clone() for n, t in module.state_dict().items() if n != "head.weight"}
    write(folder, tensors)
    return module, tensors


def test_a_module_on_meta_gets_the_files_weights(tmp_path: Path) -> None:
    expected, _ = saved_small(tmp_path)
    module = on_meta(Small)
    load_module(module, tmp_path)
    assert module.head.weight is module.embedding.weight
    ids = torch.arange(6)
    assert torch.equal(module.eval()(ids), expected.eval()(ids))
    module = on_meta(Small)
    load_module(module, tmp_path, dtype=torch.bfloat16)
    assert module.embedding.weight.dtype == torch.bfloat16
    assert module.norm.num_batches_tracked.dtype == torch.long


def test_all_differences_are_listed(tmp_path: Path) -> None:
    _, tensors = saved_small(tmp_path)
    del tensors["norm.bias"]
    write(tmp_path, {**tensors, "other": torch.zeros(2), "norm.weight": torch.zeros(3)})
    module = on_meta(Small)
    with pytest.raises(ModelSourceError) as raised:
        load_module(module, tmp_path)
    assert str(raised.value).splitlines()[1:] == [
        "  missing: norm.bias, (4,)",
        "  extra: other, (2,)",
        "  another shape: norm.weight, (3,) instead of (4,)",
    ]
    assert module.embedding.weight.is_meta  # nothing has been read


def test_refuses_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"has no safetensors file"):
        load_module(Small(), tmp_path)
    saved_small(tmp_path)
    file = tmp_path / "0.safetensors"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ModelSourceError, match=r"0\.safetensors cannot be read"):
        load_module(Small(), tmp_path)
    module = on_meta(Small)
    module.scale = torch.zeros(1, device="meta")
    saved_small(tmp_path)
    with pytest.raises(ConfigurationError, match=r"Buffer scale has no values"):
        load_module(module, tmp_path)


def test_weights_are_drawn_by_seed_alone() -> None:
    before = torch.random.get_rng_state()
    stack = [on_meta(lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))) for _ in range(3)]
    for module, seed in zip(stack, (1, 1, 2), strict=True):
        draw_weights(module, seed=seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(stack[0][0].weight, stack[1][0].weight)
    assert not torch.equal(stack[0][0].weight, stack[2][0].weight)
    assert 0.05 < stack[0][0].weight.std() < 0.1
    assert torch.equal(stack[0][1].weight, torch.ones(64))


def test_a_model_of_transformers_is_drawn_as_it_draws_itself() -> None:
    model = on_meta(lambda: ModelSource(architecture=TINY).build())
    draw_weights(model, seed=3)
    built = ModelSource(architecture=TINY, seed=3).build()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in built.named_parameters():
        drawn, wanted = (
            tensor.detach().std().item() for tensor in (model.get_parameter(name), parameter)
        )
        assert drawn == pytest.approx(wanted, rel=0.3, abs=1e-6), name
    for name, buffer in built.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_a_part_that_cannot_be_drawn_is_named() -> None:
    module = on_meta(lambda: nn.ModuleDict({"part": Small()}))
    with pytest.raises(ConfigurationError, match=r"^part has parameters.*reset_parameters"):
        draw_weights(module, seed=0)
