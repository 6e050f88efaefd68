"""The same questions to a model before its training and after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.export import find_pretrained
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy


class AnswerQuestions(Callback):
    """Asks a causal language model the same questions before the first step and after the last.

    It answers where its parameters are, which is host memory under RoundPipe: for small models.
    Where several processes share the model, it is not asked.

    Args:
        questions: Each is the first message of a conversation of its own.
        max_new_tokens: Tokens of an answer at most.

    Attributes:
        before: The answers before the first step of this run.
        after: The answers after the last.
    """

    def __init__(self, questions: Sequence[str], *, max_new_tokens: int = 32) -> None:
        if isinstance(questions, str) or max_new_tokens < 1:
            raise ConfigurationError(
                f"AnswerQuestions(questions={questions!r}, max_new_tokens={max_new_tokens}): give "
                "a list of questions, and at least one token."
            )
        self.questions = questions
        self.before: Sequence[str] = ()
        self.after: Sequence[str] = ()
        self._max_new_tokens = max_new_tokens

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = self._answers(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, RoundPipeStrategy):
            trainer.strategy.join_updates()
        self.after = self._answers(trainer, pl_module)

    def _answers(self, trainer: Trainer, pl_module: LightningModule) -> Sequence[str]:
        if trainer.world_size > 1:
            return ()
        tokenizer = trainer.datamodule.tokenizer  # type: ignore[attr-defined]
        return answer(
            find_pretrained(pl_module),
            tokenizer,
            self.questions,
            max_new_tokens=self._max_new_tokens,
        )


@torch.no_grad()
def answer(
    model: Any, tokenizer: Any, questions: Sequence[str], *, max_new_tokens: int
) -> list[str]:
    """Return the likeliest answers of a model of transformers or peft, all written in one batch."""
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # on the right, where the answers begin together
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    device = next(model.parameters()).device
    with _evaluating(model):
        tokens = model.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    texts: list[str] = tokenizer.batch_decode(tokens[:, width:], skip_special_tokens=True)
    return [text.strip() for text in texts]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation, and each of its modules back into the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
