"""`roundpipe-chat`: answers are those of plain transformers, whatever is talked to."""

from __future__ import annotations

import builtins
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from peft import LoraConfig, PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from roundpipe_commands import chat as main
from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.cli.objects import visible
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.export import ExportOptions, export_pretrained
from roundpipe_lightning.modules import Adapters, ModelSource, byte_level_tokenizer
from roundpipe_lightning.modules.chat import ChatModule
from roundpipe_lightning.planning.model.hardware import config_folder
from tests.kit.architectures import TINY
from tests.kit.runs import SMALL
from tests.kit.training import make_trainer
from tests.models.test_load import save_packed

ARCHITECTURE = {**TINY, "initializer_range": 0.3, "max_position_embeddings": 512}
CHATS = Path(__file__).parents[2] / "examples" / "data" / "chat.jsonl"
QUESTIONS = ["What comes after 41?", "And then?"]
NUM_TOKENS = 6


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model: Any = ModelSource(architecture=ARCHITECTURE, seed=3).build()
    model.save_pretrained(tmp_path / "base")
    byte_level_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def answers(model: Any, template: str | None = None) -> str:
    """What transformers answers, as the command prints it."""
    tokenizer: Any = byte_level_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    messages: list[dict[str, str]] = []
    said = ""
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt"
        )
        tokens = model.generate(
            **prompt,
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        answer = tokenizer.decode(
            tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
        )
        messages.append({"role": "assistant", "content": answer})
        said += answer + "\n"
    return said + "\n"


@pytest.mark.parametrize("kind", ["checkpoint", "model", "codes", "adapter"])
def test_it_answers_as_transformers_does(
    kind: str,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, typed = str(base), []
    if kind == "codes":
        save_packed(base)
    expected: Any = AutoModelForCausalLM.from_pretrained(base)
    if kind == "adapter":
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        adapted = Adapters(config=config, seed=1).apply(expected)
        name = str(export_pretrained(adapted, tmp_path / "adapter", options=ExportOptions()))
        expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), name)
    template = None
    if kind == "checkpoint":
        name, file = str(tmp_path / "run"), tmp_path / "template"
        template = str(byte_level_tokenizer().chat_template).replace("assistant\\n", "says ")
        file.write_text(template, encoding="utf-8")
        pretrained = (f"model.hub_name={base}", "model.weights=pretrained")
        chats = ("data=chat", f"data.files=[{CHATS}]", f"data.tokenizer.chat_template={file}")
        small = [each for each in SMALL if "data.text" not in each and "seq_len" not in each]
        typed = [pretrained[0], chats[-1]]
        words = [*small, f"paths.output_dir={name}", *pretrained, *chats, "callbacks=export"]
        with initialize_config_dir(str(config_folder()), version_base="1.3"):
            train(compose("train", overrides=[*words, "optimizer.lr=0.1"]))
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    questions = iter(QUESTIONS)

    def ask(_: str) -> str:
        question = next(questions, None)
        if question is None:
            raise EOFError
        return question

    monkeypatch.setattr(builtins, "input", ask)
    capsys.readouterr()
    assert main([name, *typed, f"--max-new-tokens={NUM_TOKENS}"]) == 0
    assert capsys.readouterr().out == visible(answers(expected, template))


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, looks = ChatModule._is_stopped, list[int]()

    def press(module: ChatModule, ids: Tensor) -> Tensor:
        looks.append(len(ids))
        if len(looks) == 3:
            signal.raise_signal(signal.SIGINT)
        return look(module, ids)

    monkeypatch.setattr(ChatModule, "_is_stopped", press)
    model = ModelSource(architecture=ARCHITECTURE, seed=3).build()
    model.generation_config.eos_token_id = None
    pieces: list[str] = []
    module = ChatModule(
        model, byte_level_tokenizer(), write=pieces.append, max_new_tokens=NUM_TOKENS
    )
    questions = iter(QUESTIONS)
    trainer = make_trainer(tmp_path, strategy=RoundPipeStrategy(), devices=1)
    trainer.predict(
        module, module.questions(lambda: next(questions, None)), return_predictions=False
    )
    assert len(looks) == 3 + NUM_TOKENS
    assert [message["role"] for message in module.messages] == ["user", "assistant"] * 2
    assert "".join(pieces).count("\n") >= 2


def test_what_cannot_be_talked_to_is_explained(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = None
    for file in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        (base / file).unlink(missing_ok=True)
    tokenizer.save_pretrained(base)
    assert main([str(base)]) == 2
    assert "has no chat template" in capsys.readouterr().err
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"base_model_name_or_path": ""}')
    assert main([str(tmp_path / "adapter")]) == 2
    assert "names no base" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    assert "nor a folder here" in capsys.readouterr().err
    for words, said in {
        "--max-new-tokens=0": "--max-new-tokens=0 must be 1 or more",
        "--temperature=nan": "--temperature=nan must be 0 or more",
        f"--chat-template={base}/none": "/none' is not a file (looked in",
    }.items():
        assert main([str(base), words]) == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([str(base), "and", "more"])
    assert capsys.readouterr().err.startswith("Error: unrecognized arguments: and more. See ")
    assert main([str(base), "model.dtype=float32"]) == 2
    assert (
        "model.dtype=float32: settings are for the checkpoint of a run" in capsys.readouterr().err
    )
    assert not torch.is_inference_mode_enabled()
    model: Any = ModelSource(architecture=ARCHITECTURE).build()
    module = ChatModule(model, byte_level_tokenizer(), write=str)
    module.tokenizer.chat_template = "{{ raise_exception('no questions') }}"
    with pytest.raises(ConfigurationError, match=r"refuses this .*no questions\. Talk without"):
        next(iter(module.questions(lambda: "Why?")))
    with pytest.raises(ConfigurationError, match="gives scores or classes and no text"):
        ChatModule(model.model, byte_level_tokenizer(), write=str)
