"""A GGUF file through the commands: planned, trained, exported, talked to."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

import roundpipe_commands
from roundpipe_commands import chat
from roundpipe_lightning.cli.objects import visible
from roundpipe_lightning.models.source import ModelSource
from tests.kit.gguf import LLAMA, round_weights, write_gguf
from tests.kit.programs import run_program

CHATS = Path(__file__).parents[2] / "examples" / "data" / "chat.jsonl"
QUESTION = "What comes after 41?"


def run(name: str, folder: Path, *words: str) -> str:
    done = run_program(getattr(roundpipe_commands, name), folder, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def answer(name: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    questions = [QUESTION]

    def ask(_: str) -> str:
        if not questions:
            raise EOFError
        return questions.pop()

    monkeypatch.setattr(builtins, "input", ask)
    capsys.readouterr()
    settings = ["model.hub_name=tiny.gguf"] if name == Path("run") else []
    assert chat([str(name), *settings, "--max-new-tokens=6"]) == 0
    return capsys.readouterr().out.strip("\n")


def generated(model: Any, folder: Path) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"
    )
    tokens = model.generate(**prompt, max_new_tokens=6, do_sample=False)
    text: str = tokenizer.decode(
        tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return text.strip("\n")


def test_a_file_is_trained_exported_and_talked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base: Any = ModelSource(architecture={**LLAMA, "initializer_range": 0.3}, seed=3).build()
    write_gguf(base, tmp_path / "tiny.gguf", kind=Kind.Q8_0)
    round_weights(base, Kind.Q8_0)
    words = (
        *("model=tiny.gguf", "peft=lora", f"data={CHATS}", "data.seq_len=256", "data.batch_size=2"),
        *("hardware=cpu", "hardware.devices=2", "trainer.max_steps=2", "optimizer.lr=0.1"),
        *("scheduler.num_warmup_steps=0", "trainer.enable_progress_bar=false", "callbacks=minimal"),
    )
    assert "Predicted step" in run("plan", tmp_path, *words)
    run("train", tmp_path, *words, "hydra.run.dir=run")
    for folder, overrides in {"adapter": (), "merged": ("merge=true",)}.items():
        base_file = "model.hub_name=tiny.gguf"  # outside of the run's folder: it is typed again
        run("export", tmp_path, "ckpt_path=run", f"output_dir={folder}", base_file, *overrides)
        card = (tmp_path / folder / "README.md").read_text("utf-8")
        assert "| Base | tiny.gguf |" in card
        assert ("The base is a GGUF file" in card) == (folder == "adapter")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    merged: Any = AutoModelForCausalLM.from_pretrained("merged")
    adapted = PeftModel.from_pretrained(base, "adapter")
    with torch.no_grad():
        tokens = torch.arange(40)[None]
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits)
    texts = {name: answer(Path(name), monkeypatch, capsys) for name in ("run", "adapter", "merged")}
    assert set(texts.values()) == {visible(generated(merged, tmp_path / "merged"))}
    with adapted.disable_adapter():
        expected = generated(adapted, tmp_path / "merged")
    talked = answer(Path("tiny.gguf"), monkeypatch, capsys)
    assert talked == visible(expected) != texts["run"]
    run("export", tmp_path, "model=tiny.gguf", "output_dir=plain")
    plain: Any = AutoModelForCausalLM.from_pretrained("plain")
    assert generated(plain, Path("plain")) == expected
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text("utf-8"))
    assert settings["base_model_name_or_path"] == "tiny.gguf"
