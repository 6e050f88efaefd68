import copy
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from benchmarks.checkpoint_loading import REPOSITORY, write_checkpoint
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.store.mapped_parameter import MappedParameter, is_mapped
from roundpipe_lightning.errors import CheckpointError, ConfigurationError
from roundpipe_lightning.models import weight_files
from roundpipe_lightning.models.weight_files import UnmappedWeightsWarning, mapped_parameters
from roundpipe_lightning.models.work.work_profile import step_profile
from roundpipe_lightning.modules import ModelSource
from tests.kit.architectures import TINY, Adapted, token_batches
from tests.kit.engine import (
    cpu_workers,
    differences,
    emulated_workers,
    engine_of,
    mean_step,
    plain_step,
    plan_of,
    stack_of,
)
from tests.models.test_load import EXPERTS, change, save, source


def adapted(folder: Path, **options: Any) -> Adapted:
    base = source(folder, **options).build()
    return Adapted(base, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))


def test_parameters_are_views_of_the_files(tmp_path: Path) -> None:
    saved = save(tmp_path, TINY, max_shard_size="10KB")
    model = source(tmp_path, frozen_weights="mmap").build()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert set(mapped_parameters(model)) == names
    for name, parameter in saved.named_parameters():
        loaded = model.get_parameter(name)
        assert isinstance(loaded, MappedParameter)
        assert torch.equal(loaded, parameter)
        assert not loaded.requires_grad
        assert loaded.file.parent == tmp_path
    assert model.lm_head.weight is model.model.embed_tokens.weight
    addresses = {p.data_ptr() for p in model.parameters()}
    HostStore(model, list(model.model.layers))
    assert {p.data_ptr() for p in model.parameters()} == addresses


def test_adapters_train_as_on_weights_in_memory(tmp_path: Path) -> None:
    save(tmp_path, TINY, max_shard_size="10KB")
    plain_module = adapted(tmp_path)
    batches = token_batches(4)
    plain = plain_step(plain_module, batches)
    files = {file: file.read_bytes() for file in tmp_path.glob("*.safetensors")}
    for devices in (cpu_workers(2), emulated_workers(2)):
        module = adapted(tmp_path, frozen_weights="mmap")
        assert len(mapped_parameters(module)) == 25
        stack = stack_of(module.blocks)
        plan = plan_of(stack, num_workers=2, num_microbatches=4)
        with engine_of(module, stack, plan, devices=devices) as engine:
            result = mean_step(engine, batches)
        assert not differences(module, result, plain), devices[0].name
        assert len(mapped_parameters(module)) == 25
        assert len(result.gradients) == 8
    assert all(file.read_bytes() == content for file, content in files.items())


def test_a_write_is_refused_when_the_block_is_used_next(tmp_path: Path) -> None:
    saved = save(tmp_path, TINY)
    model = source(tmp_path, frozen_weights="mmap").build()
    blocks = list(model.model.layers)
    store = HostStore(model, blocks)
    [worker] = emulated_workers(1)
    store.upload_block(blocks[1], worker)
    with torch.no_grad():
        blocks[1].self_attn.q_proj.weight.add_(1)
    store.upload_block(blocks[0], worker)
    worker.close()
    message = r"layers\.1\.self_attn\.q_proj\.weight .* was written to.*frozen_weights=memory"
    with pytest.raises(ConfigurationError, match=message):
        store.upload_block(blocks[1], worker)
    with pytest.raises(ConfigurationError, match=message):
        HostStore(model, blocks)
    again = source(tmp_path).build()
    assert torch.equal(
        again.model.layers[1].self_attn.q_proj.weight,
        saved.model.layers[1].self_attn.q_proj.weight,
    )


def test_what_is_converted_is_refused_and_what_is_trained_is_an_ordinary_parameter(
    tmp_path: Path,
) -> None:
    save(tmp_path, TINY)
    model: Any = source(tmp_path, frozen_weights="mmap").build()
    weight = model.model.norm.weight.requires_grad_(True)
    HostStore(model, list(model.model.layers))
    with torch.no_grad():
        weight.add_(1)
    HostStore(model, list(model.model.layers))
    assert "model.norm.weight" in model.state_dict()
    assert torch.equal(source(tmp_path).build().model.norm.weight + 1, weight)
    model.to(torch.bfloat16)
    with pytest.raises(ConfigurationError, match=r"converted to torch\.bfloat16.*precision"):
        HostStore(model, list(model.model.layers))


def test_checkpoints_leave_the_base_out(tmp_path: Path) -> None:
    save(tmp_path, TINY)
    module = adapted(tmp_path, frozen_weights="mmap")
    state = copy.deepcopy(module.state_dict())
    assert len(state) == 8
    assert all("lora_" in name for name in state)
    fresh = adapted(tmp_path, frozen_weights="mmap")
    with torch.no_grad():
        for parameter in fresh.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    fresh.load_state_dict(state)
    assert all(torch.equal(fresh.state_dict()[name], value) for name, value in state.items())
    with pytest.raises(RuntimeError, match=r"Missing key.*lora_A"):
        fresh.load_state_dict({})


def test_a_checkpoint_with_the_base_must_agree(tmp_path: Path) -> None:
    save(tmp_path, TINY)
    whole = adapted(tmp_path).state_dict()
    module = adapted(tmp_path, frozen_weights="mmap")
    module.load_state_dict(whole)
    name = "model.base_model.model.model.norm.weight"
    whole[name] = whole[name] + 1
    with pytest.raises(CheckpointError, match=r"other values for 1 frozen.*model\.norm\.weight"):
        module.load_state_dict(whole)
    assert len(mapped_parameters(module)) == 25


def test_a_step_is_planned_by_running_it_without_values(tmp_path: Path) -> None:
    save(tmp_path, TINY)
    works = [
        step_profile(
            (module := adapted(tmp_path, frozen_weights=place)),
            stack_of(module.blocks),
            microbatch=token_batches(1)[0],
            call=lambda copied, batch: copied.training_step(batch, 0),
        )
        for place in ("mmap", "memory")
    ]
    assert works[0] == works[1]
    assert works[0].blocks[0].kept_bytes.fixed > 0


def test_copies_are_in_memory(tmp_path: Path) -> None:
    save(tmp_path, TINY)
    model = source(tmp_path, frozen_weights="mmap").build()
    for copied in (copy.deepcopy(model.lm_head), pickle.loads(pickle.dumps(model.lm_head))):
        assert type(copied.weight) is nn.Parameter
        assert torch.equal(copied.weight, model.lm_head.weight)
        with torch.no_grad():
            copied.weight.add_(1)
    assert is_mapped(model.lm_head.weight)
    HostStore(model, [])


def test_what_cannot_be_mapped_is_in_memory_with_a_warning(tmp_path: Path) -> None:
    saved = save(tmp_path, EXPERTS)
    with pytest.warns(UnmappedWeightsWarning, match=r"4 parameters .*experts\.gate_up_proj first"):
        model = source(tmp_path, frozen_weights="mmap").build()
    assert not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(saved.get_parameter(n), p) for n, p in model.named_parameters())
    assert set(model.state_dict()) == {
        f"model.layers.{i}.mlp.experts.{name}"
        for i in (0, 1)
        for name in ("gate_up_proj", "down_proj")
    }
    with pytest.warns(UnmappedWeightsWarning, match=r"another dtype"):
        model = source(tmp_path, frozen_weights="mmap", dtype="bfloat16").build()
    assert mapped_parameters(model) == {}


@pytest.mark.parametrize(
    ("change_of", "message"),
    [
        ("platform", "Windows"),
        ("pickle", r"pytorch_model\.bin is none"),
        ("random", "model.weights=random has none"),
    ],
)
def test_refuses_what_cannot_be_mapped_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_of: str, message: str
) -> None:
    save(tmp_path, TINY)
    found = source(tmp_path, frozen_weights="mmap")
    if change_of == "platform":
        monkeypatch.setattr(weight_files.sys, "platform", "win32")  # type: ignore[attr-defined]
    elif change_of == "pickle":
        (tmp_path / "model.safetensors").unlink()
        torch.save({}, tmp_path / "pytorch_model.bin")
    else:
        found = ModelSource(architecture=TINY, frozen_weights="mmap")
    with pytest.raises(ConfigurationError, match=message):
        found.build()


@pytest.mark.soak
def test_training_takes_no_memory_for_the_base(tmp_path: Path) -> None:
    """Anonymous memory is what cannot be read again; pages of the file are the kernel's to drop."""
    write_checkpoint(tmp_path, num_megabytes=200, shard_megabytes=40)
    script = """
        import sys
        from pathlib import Path
        import torch
        from benchmarks.checkpoint_loading import resident_bytes
        from tests.models.test_mapped import adapted
        from tests.kit.engine import emulated_workers, engine_of, mean_step, plan_of, stack_of
        from tests.kit.architectures import token_batches

        torch.set_num_threads(1)
        before = resident_bytes("RssAnon")
        module = adapted(Path(sys.argv[1]), frozen_weights="mmap")
        total = sum(parameter.nbytes for parameter in module.parameters())
        stack = stack_of(module.blocks)
        plan = plan_of(stack, num_workers=2, num_microbatches=2)
        with engine_of(module, stack, plan, devices=emulated_workers(2)) as engine:
            mean_step(engine, token_batches(2))
            grown = resident_bytes("RssAnon") - before
        print(grown / total)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        cwd=REPOSITORY,
        env={"PATH": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.5


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    save(tmp_path, TINY)
    change(tmp_path, **{"model.norm.weight": torch.full((16,), 3.0)})
    model = source(tmp_path, frozen_weights="mmap").build()
    assert isinstance(model.model.norm.weight, MappedParameter)
    assert torch.equal(model.model.norm.weight, torch.full((16,), 3.0))
