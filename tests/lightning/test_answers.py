"""Questions before and after a training: the answers are those of plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from roundpipe_lightning import AnswerQuestions
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules import byte_level_tokenizer
from tests.kit.runs import SMALL, composed, summary

CHATS = Path(__file__).parents[2] / "examples" / "data" / "chat.jsonl"
QUESTIONS = ["What comes after 41?", "Why?"]
NUM_TOKENS = 6


def run(folder: Path, *overrides: str, steps: int = 3) -> dict[str, Any]:
    small = [each for each in SMALL if "data.text" not in each and "seq_len" not in each]
    words = ("model.architecture.initializer_range=0.3", "data=chat", f"data.files=[{CHATS}]")
    more = ("callbacks=export", f"trainer.max_steps={steps}", "optimizer.lr=0.1", *overrides)
    train(composed("train", *small, f"paths.output_dir={folder}", *words, *more))
    return summary(folder)


def generated(folder: Path) -> list[str]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "export")
    tokenizer: Any = byte_level_tokenizer()
    texts = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )
        tokens = model.generate(**prompt, max_new_tokens=NUM_TOKENS, do_sample=False)
        said = tokens[0, prompt["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(said, skip_special_tokens=True).strip())
    return texts


@pytest.mark.parametrize("trainer", ["roundpipe", "single_device"])
def test_the_model_answers_as_transformers_does(trainer: str, tmp_path: Path) -> None:
    asked = f"{{_target_: roundpipe_lightning.AnswerQuestions, max_new_tokens: {NUM_TOKENS}}}"
    words = (f"trainer={trainer}", f"+callbacks.answers={asked}")
    found = run(tmp_path / "run", *words, f"+callbacks.answers.questions={QUESTIONS}")
    answers = found["answers"]
    assert [each["question"] for each in answers] == QUESTIONS
    assert [each["after"] for each in answers] == generated(tmp_path / "run")
    plain = run(tmp_path / "plain", f"trainer={trainer}")
    assert plain["answers"] == []
    assert found["loss_last"] == plain["loss_last"]  # training is not touched
    run(tmp_path / "untrained", "trainer=single_device", "optimizer.lr=0", steps=1)
    assert [each["before"] for each in answers] == generated(tmp_path / "untrained")
    assert generated(tmp_path / "untrained") != generated(tmp_path / "run")


def test_a_text_is_no_list_of_questions() -> None:
    with pytest.raises(ConfigurationError, match="give a list of questions"):
        AnswerQuestions("Why?")
