"""A conversation with a model: it answers in evaluation steps, so any strategy runs it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jinja2 import TemplateError
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import TextStreamer
from typing_extensions import override

from roundpipe_lightning.errors import ConfigurationError

_MANY = 2**31


class ChatModule(LightningModule):
    """Answers one question after the other; what was said before is part of the next question.

    `trainer.predict(module, module.questions(ask), return_predictions=False)` talks until `ask`
    has nothing more to ask. Ctrl-C ends an answer.

    Args:
        model: A causal language model of transformers or peft.
        tokenizer: With a chat template.
        write: Takes the text of an answer, piece by piece.
        system: The first message; None: none.
        options: Further arguments of `model.generate`: `max_new_tokens`, `do_sample`, ...

    Attributes:
        messages: What was said.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        write: Callable[[str], object],
        system: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not hasattr(model, "generate"):
            raise ConfigurationError(
                "This model gives scores or classes and no text. Talk to one of module=causal_lm."
            )
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template, so it is unknown "
                "how the model takes a conversation. Give one: --chat-template FILE."
            )
        self.model = model
        self.tokenizer = tokenizer
        self.write = write
        self.options = options
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.stopped = False

    def questions(self, ask: Callable[[], str | None]) -> Questions:
        """The data of `trainer.predict`: questions, until `ask` returns None."""
        return Questions(self, ask)

    @override
    def predict_step(self, batch: Tensor) -> Tensor:
        """Write the answer to a conversation; both are int64 token ids, of shape (1, tokens)."""
        self.stopped = False
        streamer = _Pieces(self.tokenizer, self.write)
        before = None
        in_main = threading.current_thread() is threading.main_thread()
        if in_main:
            before = signal.signal(signal.SIGINT, self._stop)
        try:
            tokens: Tensor = self.model.generate(
                input_ids=batch,
                attention_mask=batch.new_ones(batch.shape),
                streamer=streamer,
                stopping_criteria=[lambda ids, scores, **_: self._is_stopped(ids)],
                pad_token_id=self.tokenizer.pad_token_id,
                **self.options,
            )
        finally:
            if in_main:
                signal.signal(signal.SIGINT, before)
        answer = tokens[0, batch.shape[1] :].tolist()
        content = self.tokenizer.decode(answer, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": content})
        return tokens

    def _stop(self, *_: Any) -> None:
        self.stopped = True

    def _is_stopped(self, ids: Tensor) -> Tensor:
        return ids.new_full((len(ids),), self.stopped, dtype=torch.bool)


class Questions:
    """Conversations up to the next question. It has a length, so that none is asked for early."""

    def __init__(self, module: ChatModule, ask: Callable[[], str | None]) -> None:
        self._module, self._ask = module, ask

    def __len__(self) -> int:
        return _MANY

    def __iter__(self) -> Iterator[Tensor]:
        messages = self._module.messages
        while (question := self._ask()) is not None:
            messages.append({"role": "user", "content": question})
            try:
                yield self._module.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
                )
            except (ValueError, TypeError, TemplateError) as error:
                raise ConfigurationError(
                    f"The chat template refuses this conversation: {error}. Talk without --system, "
                    "or with another template: --chat-template FILE."
                ) from error


class _Pieces(TextStreamer):
    """Text of tokens as they come, the question's left out."""

    def __init__(self, tokenizer: Any, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write_piece = write

    @override
    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._write_piece(text + "\n" if stream_end else text)
