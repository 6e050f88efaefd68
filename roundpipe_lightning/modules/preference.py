"""Direct preference optimization: learn from pairs of a better and a worse answer."""

from __future__ import annotations

import copy
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as PyTorch's own documentation has it
from transformers import PreTrainedModel
from typing_extensions import override

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules.adapters import Adapters
from roundpipe_lightning.modules.base import TransformersModule
from roundpipe_lightning.modules.source import ModelSource

_REFERENCE = "reference."


class PreferenceBatch(TypedDict):
    """One batch of pairs: of the two texts of a pair the chosen one is the first.

    Both are in one tensor, so that a batch that is split keeps them together. All tensors are
    int64, of shape (pairs, 2, tokens).

    Attributes:
        input_ids: Token ids of the prompt and an answer.
        attention_mask: 1 for tokens, 0 for padding.
        labels: The ids of the answer, -100 everywhere else.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


class DirectPreferenceModule(TransformersModule):
    r"""Direct preference optimization (arXiv 2305.18290) of a causal language model.

    With $\pi$ the model that is trained, $\pi_0$ the reference, $x$ a prompt, $y_w$ the chosen and
    $y_l$ the rejected answer, an answer's *reward* is $r(y) = \beta\,(\log \pi(y|x) - \log
    \pi_0(y|x))$, the *margin* is $m = r(y_w) - r(y_l)$, and the loss of a pair, in nats, is

    $$ -(1 - \epsilon) \log \sigma(m) - \epsilon \log \sigma(-m), $$

    equation 7 of the paper for $\epsilon = 0$. The loss of a batch is the mean over its pairs.
    Logged beside it: the mean margin, and the share of pairs in which the chosen answer has the
    higher reward.

    The reference is the model as it was before training. With adapters it is the model without
    them, which costs no memory: it has the same parameters. Else it is a frozen copy, which the
    source builds a second time. It is in no checkpoint, since it can be made again.

    Args:
        source: The architecture and where its weights come from.
        beta: How expensive it is to move away from the reference: $\beta$, above 0.
        label_smoothing: Share of pairs that are taken to be the wrong way round: $\epsilon$, from 0
            to below one half.
        options: The other arguments of `TransformersModule`.

    Raises:
        ConfigurationError: A figure is out of its range.
    """

    averages_samples = True

    def __init__(
        self,
        source: ModelSource,
        *,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(source, **options)
        if beta <= 0:
            raise ConfigurationError(f"module.beta={beta} must be above 0.")
        if not 0 <= label_smoothing < 0.5:
            raise ConfigurationError(
                f"module.label_smoothing={label_smoothing} must be 0 or more and below 0.5, where "
                "the pairs say nothing."
            )
        self.beta = beta
        self.label_smoothing = label_smoothing
        self.reference: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        reference = self.source.build().requires_grad_(requires_grad=False)
        if self.adapters is None:
            self.model = self.build_model(self.source)
        else:
            self.model = _with_adapters(reference, self.adapters)
        self.reference = reference

    def on_train_start(self) -> None:
        assert self.reference is not None, "configure_model ran before"
        self.reference.eval()

    @override
    def example_batch(self, sequences: int, seq_len: int) -> PreferenceBatch:
        tokens = torch.zeros((sequences, 2, seq_len), dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    def forward(self, batch: PreferenceBatch) -> Tensor:
        """Rewards of a batch of pairs, float32, shape (pairs, 2), the chosen answer's first.

        Args:
            batch: Pairs, on one device.
        """
        model = self.built_model
        with torch.no_grad():
            before = log_likelihoods(self.reference, batch)
        return self.beta * (log_likelihoods(model, batch) - before)

    def training_step(self, batch: PreferenceBatch) -> Tensor:
        """Loss of one batch, logged as `train_loss` beside margin and accuracy."""
        return self._loss("train", self(batch), on_step=True, on_epoch=False)

    def validation_step(self, batch: PreferenceBatch) -> None:
        """Log `val_loss`, `val_margin` and `val_accuracy`, averaged over the pairs of the epoch."""
        self._loss("val", self(batch), on_step=False, on_epoch=True)

    def test_step(self, batch: PreferenceBatch) -> None:
        self._loss("test", self(batch), on_step=False, on_epoch=True)

    def predict_step(self, batch: PreferenceBatch) -> Tensor:
        """Rewards, as `forward` gives them."""
        rewards: Tensor = self(batch)
        return rewards

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in [name for name in state if name.startswith(_REFERENCE)]:
            del state[name]

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.reference is not None, "configure_model ran before"
        own = self.reference.state_dict(prefix=_REFERENCE)
        checkpoint["state_dict"].update(own)

    def _loss(self, stage: str, rewards: Tensor, **when: Any) -> Tensor:
        margins = rewards[:, 0] - rewards[:, 1]
        loss = preference_loss(margins, label_smoothing=self.label_smoothing)
        pairs = len(margins)
        accuracy = (margins > 0).float().mean()
        self.log(f"{stage}_loss", loss, prog_bar=True, batch_size=pairs, **when)
        self.log(f"{stage}_margin", margins.detach().mean(), batch_size=pairs, **when)
        self.log(f"{stage}_accuracy", accuracy, prog_bar=True, batch_size=pairs, **when)
        return loss


def preference_loss(margins: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Mean over pairs of the loss that `DirectPreferenceModule` documents, a scalar in nats.

    Args:
        margins: Reward of the chosen answer less that of the rejected one, shape (pairs,).
        label_smoothing: Share of pairs that are taken to be the wrong way round.
    """
    right, wrong = -F.logsigmoid(margins), -F.logsigmoid(-margins)
    return ((1 - label_smoothing) * right + label_smoothing * wrong).mean()


def log_likelihoods(model: Any, batch: PreferenceBatch) -> Tensor:
    """Log-likelihoods of the answers under a model, in nats, float32, shape (pairs, 2).

    Chosen and rejected ones go through the model in one call.

    Args:
        batch: Pairs, on one device.
    """
    labels = batch["labels"].flatten(0, 1)
    logits = model(
        input_ids=batch["input_ids"].flatten(0, 1),
        attention_mask=batch["attention_mask"].flatten(0, 1),
        use_cache=False,
    ).logits
    losses = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none"
    )
    return -losses.reshape(len(labels), -1).sum(dim=1).reshape(-1, 2)


def _with_adapters(base: PreTrainedModel, adapters: Adapters) -> Any:
    """A second model over the parameters of the first, with adapters.

    Switching adapters off and on again would do on one device. Here several microbatches run at
    once, and the switch is the same for all of them.
    """
    shared: dict[int, Any] = {id(t): t for t in (*base.parameters(), *base.buffers())}
    before = {name: _state_of(parameter) for name, parameter in base.named_parameters()}
    model = adapters.apply(copy.deepcopy(base, shared), task="CAUSAL_LM")
    own = [
        name
        for name, parameter in base.named_parameters()
        if parameter.requires_grad or _state_of(parameter) != before[name]
    ]
    if own:
        raise ConfigurationError(
            f"These adapters change the model's own weights ({own[0]} and {len(own) - 1} more), so "
            "the model without them is no reference. Use peft.bias=none and an initialisation that "
            "leaves the weights as they are (peft.init_lora_weights=true)."
        )
    return model


def _state_of(parameter: nn.Parameter) -> tuple[int, int]:
    """Return figures that differ after a write: the values' address and their version counter."""
    return (0 if parameter.is_meta else parameter.data_ptr(), parameter._version)
