"""Next-token training of any transformers causal language model: bytes, text or chat."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypedDict, cast

import torch
from torch import Tensor
from typing_extensions import NotRequired, override

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules.base import TransformersModule
from roundpipe_lightning.modules.source import Head, ModelSource

_PROBE_TOKENS = 4  # tokens of each of the two documents that a model is tried with


class TokenBatch(TypedDict):
    """One batch of sequences; all tensors are int64, of shape (sequences, tokens).

    Attributes:
        input_ids: Token ids.
        labels: The same ids; positions that are not to be predicted hold -100.
        attention_mask: 1 for tokens, 0 for padding. Left out where nothing is padded, and where
            several documents share a row.
        position_ids: Each token's place in its own document, where several documents share a row:
            transformers then keeps their attention apart.
    """

    input_ids: Tensor
    labels: Tensor
    attention_mask: NotRequired[Tensor]
    position_ids: NotRequired[Tensor]


class CausalLanguageModule(TransformersModule):
    """Next-token training of a transformers causal language model.

    The loss is the model's own (mean negative log-likelihood in nats per predicted token), whatever
    the architecture. What is predicted is the data's choice: every token of a text, the assistant's
    tokens of a chat. The arguments are those of `TransformersModule`.
    """

    def on_fit_start(self) -> None:
        """Try whether the model keeps packed documents apart, if the data packs any.

        Not where several processes share the model: a call of a part of it may hang them.
        """
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if getattr(data, "packs_documents", False) and self.trainer.world_size == 1:
            check_documents_apart(self.model)

    @override
    def example_batch(self, sequences: int, seq_len: int) -> TokenBatch:
        tokens = torch.zeros((sequences, seq_len), dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    def forward(self, batch: TokenBatch) -> Any:
        """The model's own output for a batch: its `loss` (a scalar) and its `logits`.

        Args:
            batch: Token ids, labels and what else the data gives, on one device.
        """
        model = self.built_model
        if "position_ids" in batch and runs_flash_attention(model):
            return model(**as_one_row(cast(Mapping[str, Tensor], batch)), use_cache=False)
        return model(**batch, use_cache=False)

    def training_step(self, batch: TokenBatch) -> Tensor:
        """Loss of one batch in nats per token, logged as `train_loss`."""
        loss: Tensor = self(batch).loss
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch: TokenBatch) -> None:
        """Log the loss of one validation batch as `val_loss`, averaged over the epoch."""
        self._log_loss("val_loss", batch, prog_bar=True)

    def test_step(self, batch: TokenBatch) -> None:
        """Log the loss of one test batch as `test_loss`, averaged over the epoch."""
        self._log_loss("test_loss", batch)

    def predict_step(self, batch: TokenBatch) -> dict[str, Tensor]:
        """The loss of a batch and the likeliest next token at every position.

        Returns:
            `loss`: scalar, nats per token. `next_tokens`: int64, the shape of `input_ids`.
        """
        output = self(batch)
        next_tokens = torch.argmax(output.logits, dim=-1)
        length = batch["input_ids"].shape[1]  # prompt tuning has positions before these
        return {"loss": output.loss, "next_tokens": next_tokens[:, -length:]}

    def _log_loss(self, name: str, batch: TokenBatch, **options: Any) -> None:
        """Log a loss whose mean over the epoch is that over all predicted tokens."""
        loss = self(batch).loss
        num_targets = int((batch["labels"][:, 1:] != -100).sum())
        if num_targets:
            self.log(name, loss, batch_size=num_targets, on_step=False, on_epoch=True, **options)


class VisionLanguageModule(CausalLanguageModule):
    """Next-token training of a model that reads text and images: `AutoModelForImageTextToText`."""

    whole_batches = True  # a row has any number of images

    @override
    def build_model(self, source: ModelSource) -> Any:
        return super().build_model(replace(source, head=Head.IMAGE_TEXT_TO_TEXT))


# --- several documents in one row -----------------------------------------------------------------


def runs_flash_attention(model: Any) -> bool:
    """Whether a transformers model calls a flash attention kernel."""
    return "flash" in str(getattr(model.config, "_attn_implementation", ""))


def as_one_row(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of packed documents as a single row.

    Flash attention tells documents apart by their positions in a single row only; with several
    rows it would let them see each other. Since every document starts with a label of -100, the
    loss is the same.

    Args:
        batch: Tensors of shape (rows, tokens), `position_ids` among them.
    """
    return {name: values.reshape(1, -1) for name, values in batch.items()}


@torch.no_grad()
def check_documents_apart(model: Any) -> None:
    """Refuse a model in which a packed document sees the one before it.

    Two rows differ in their first document only. If the model's logits for the second document
    differ, something leaks: a state that runs through the row, positions that are not used. One
    forward pass of a few tokens, where the model is. Flash attention, which may not run there, is
    left out: its rows are told apart by transformers itself.

    Raises:
        ConfigurationError: The documents are not kept apart.
    """
    if runs_flash_attention(model):
        return
    first = torch.arange(2 * _PROBE_TOKENS).reshape(2, _PROBE_TOKENS)
    second = torch.arange(_PROBE_TOKENS).expand(2, _PROBE_TOKENS)
    ids = torch.cat([first + 1, second + 1], dim=1).to(next(model.parameters()).device)
    positions = torch.arange(_PROBE_TOKENS, device=ids.device).repeat(2).expand(2, -1)
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    finally:
        model.train(was_training)
    own = logits[:, _PROBE_TOKENS:].float()
    leaked = (own[0] - own[1]).abs().max().item()
    noise = 100 * torch.finfo(logits.dtype).eps * own.abs().max().item()
    if not leaked <= noise:
        raise ConfigurationError(
            f"This model ({type(model).__name__}) does not keep the documents of a packed row "
            f"apart: the logits of one change by {leaked:.2g} with the document before it. Use "
            "data.packing=false, or another attention implementation (model.attention=sdpa)."
        )
