"""Learning from answers that were compared or judged: DPO, ORPO, reward models, KTO."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as PyTorch's own documentation has it
from transformers import PreTrainedModel
from typing_extensions import override

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.source import Head, ModelSource
from roundpipe_lightning.modules.adapters import Adapters
from roundpipe_lightning.modules.language import TransformersModule

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


class JudgedBatch(PreferenceBatch):
    """One batch of judged answers, of shape (samples, 2, tokens).

    The first text of a sample is its prompt and answer, the second one its prompt and the answer to
    another prompt, from which the distance to the reference is estimated.

    Attributes:
        desirable: Whether the answer is wanted, bool, shape (samples,).
    """

    desirable: Tensor


class PairModule(TransformersModule):
    """Training on pairs; what differs is how answers are scored, and the loss of the scores.

    The loss of a batch is the mean over its pairs. Logged beside it: the mean margin (the score of
    the chosen answer less that of the rejected one), and the share of pairs in which it is above 0.
    """

    averages_samples = True

    @override
    def example_batch(self, sequences: int, seq_len: int) -> PreferenceBatch:
        tokens = torch.zeros((sequences, 2, seq_len), dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}

    def forward(self, batch: PreferenceBatch) -> Tensor:
        """Scores of a batch of pairs, float32, shape (pairs, 2), the chosen answer's first."""
        raise NotImplementedError

    def loss(self, scores: Tensor) -> Tensor:
        return preference_loss(scores[:, 0] - scores[:, 1])

    def figures(self, batch: Any) -> dict[str, Tensor]:
        """What is logged of a batch, scalars, `loss` among them."""
        scores = self(batch)
        margins = scores[:, 0] - scores[:, 1]
        return {"loss": self.loss(scores), **_of_margins(margins)}

    def predict_step(self, batch: Any) -> Tensor:
        scores: Tensor = self(batch)
        return scores

    @override
    def logged(self, stage: str, batch: Any, **when: Any) -> Tensor:
        figures, size = self.figures(batch), len(batch["input_ids"])
        for name, value in figures.items():
            shown = name in ("loss", "accuracy")
            self.log(f"{stage}_{name}", value, prog_bar=shown, batch_size=size, **when)
        return figures["loss"]


def _of_margins(margins: Tensor) -> dict[str, Tensor]:
    accuracy = (margins > 0).float().mean()
    return {"margin": margins.detach().mean(), "accuracy": accuracy}


class OddsRatioModule(PairModule):
    r"""Odds ratio preference optimization (arXiv 2403.07691), which needs no reference.

    With $p(y)$ the geometric mean of an answer's token probabilities (the score is its logarithm),
    and $\mathrm{odds}(y) = p(y) / (1 - p(y))$, the loss of a pair, in nats, is equation 6:

    $$ -\log p(y_w) - \lambda \log \sigma\bigl(\log \mathrm{odds}(y_w) - \log
    \mathrm{odds}(y_l)\bigr). $$

    Args:
        source: The architecture and where its weights come from.
        weight: Of the second term: $\lambda$, above 0.
        options: The other arguments of `TransformersModule`.
    """

    def __init__(self, source: ModelSource, *, weight: float = 0.1, **options: Any) -> None:
        super().__init__(source, **options)
        if weight <= 0:
            raise ConfigurationError(f"module.weight={weight} must be above 0.")
        self.weight = weight

    @override
    def forward(self, batch: PreferenceBatch) -> Tensor:
        lengths = (batch["labels"][..., 1:] != -100).sum(dim=-1)
        return log_likelihoods(self.built_model, batch) / lengths

    @override
    def loss(self, scores: Tensor) -> Tensor:
        # float32 rounds probabilities above 1 - 2**-25 to 1, whose odds are infinite and whose
        # gradient is NaN: such an answer has the odds of the middle of what is rounded.
        sure = scores.clamp(max=-(2.0**-26))
        odds = scores - torch.log(-torch.expm1(sure))
        return preference_loss(odds[:, 0] - odds[:, 1]) * self.weight - scores[:, 0].mean()


class RewardModule(PairModule):
    r"""A reward model: a score for every answer, learned from pairs (Bradley and Terry).

    The loss of a pair, in nats, is $-\log \sigma(r(y_w) - r(y_l))$, equation 1 of arXiv 2203.02155
    for two answers. The model is `AutoModelForSequenceClassification` with one output.
    """

    task = "SEQ_CLS"
    pad_token_id: int | None = None

    @override
    def setup(self, stage: str) -> None:
        """Take the padding of the data, which is made before the model."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        self.pad_token_id = getattr(data, "pad_token_id", None)

    @override
    def build_model(self, source: ModelSource) -> Any:
        changes = {
            **(source.config_changes or {}),
            "num_labels": 1,
            "pad_token_id": self.pad_token_id,
        }
        return super().build_model(
            replace(source, head=Head.SEQUENCE_CLASSIFICATION, config_changes=changes)
        )

    @override
    def forward(self, batch: PreferenceBatch) -> Tensor:
        logits: Tensor = self.built_model(
            input_ids=batch["input_ids"].flatten(0, 1),
            attention_mask=batch["attention_mask"].flatten(0, 1),
        ).logits
        return logits.float().reshape(-1, 2)


class DirectPreferenceModule(PairModule):
    r"""Direct preference optimization (arXiv 2305.18290) of a causal language model.

    With $\pi$ the model that is trained, $\pi_0$ the reference, $x$ a prompt, $y_w$ the chosen and
    $y_l$ the rejected answer, an answer's *reward* is $r(y) = \beta\,(\log \pi(y|x) - \log
    \pi_0(y|x))$, the *margin* is $m = r(y_w) - r(y_l)$, and the loss of a pair, in nats, is

    $$ -(1 - \epsilon) \log \sigma(m) - \epsilon \log \sigma(-m), $$

    equation 7 of the paper for $\epsilon = 0$. The scores are the rewards.

    The reference is the model as it was before training. With adapters it is the model without
    them, which costs no memory: it has the same parameters. Else it is a frozen copy, which the
    source builds a second time. It is in no checkpoint, since it can be made again.

    Args:
        source: The architecture and where its weights come from.
        beta: How expensive it is to move away from the reference: $\beta$, above 0.
        label_smoothing: Share of pairs that are taken to be the wrong way round: $\epsilon$, from 0
            to below one half.
        options: The other arguments of `TransformersModule`.
    """

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
        # registered first, as its blocks are called first
        self.reference = self.source.build().requires_grad_(requires_grad=False)
        if self.adapters is None:
            self.model = self.build_model(self.source)
        else:
            self.model = _with_adapters(self.reference, self.adapters)

    def on_train_start(self) -> None:
        assert self.reference is not None, "configure_model ran before"
        self.reference.eval()

    @override
    def forward(self, batch: PreferenceBatch) -> Tensor:
        model = self.built_model
        with torch.no_grad():
            before = log_likelihoods(self.reference, batch)
        return self.beta * (log_likelihoods(model, batch) - before)

    @override
    def loss(self, scores: Tensor) -> Tensor:
        margins = scores[:, 0] - scores[:, 1]
        return preference_loss(margins, label_smoothing=self.label_smoothing)

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


class KahnemanTverskyModule(DirectPreferenceModule):
    r"""Learning from single answers that are wanted or not (KTO, arXiv 2402.01306).

    With the reward $r(y)$ and the reference of `DirectPreferenceModule`, and $z_0$ the distance
    of the model to its reference, the loss of a sample is, as in the paper,

    $$ \lambda_D\,(1 - \sigma(r(y) - z_0)) \quad\text{or}\quad
    \lambda_U\,(1 - \sigma(z_0 - r(y))), $$

    for an answer that is wanted or not, and that of a batch their mean. $z_0$ is the mean reward of
    answers to other prompts in the batch (of this process), at least 0, through which no gradient
    passes. Logged beside the loss: `kl`, which is $z_0 / \beta$ in nats; the mean margin, which is
    what $\sigma$ is taken of; and the share of samples in which that is above 0.

    Args:
        source: The architecture and where its weights come from.
        desirable_weight: Of wanted answers: $\lambda_D$, above 0. Raise it where they are the
            rarer ones: weight times number should be about that of the others.
        undesirable_weight: Of the others: $\lambda_U$, above 0.
        options: The other arguments of `DirectPreferenceModule`.
    """

    averages_samples = False
    whole_batches = True  # z_0 is

    def __init__(
        self,
        source: ModelSource,
        *,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(source, **options)
        for name, weight in (("", desirable_weight), ("un", undesirable_weight)):
            if weight <= 0:
                raise ConfigurationError(f"module.{name}desirable_weight={weight} must be above 0.")
        self.desirable_weight = desirable_weight
        self.undesirable_weight = undesirable_weight

    @override
    def example_batch(self, sequences: int, seq_len: int) -> JudgedBatch:
        pairs = super().example_batch(sequences, seq_len)
        return {**pairs, "desirable": torch.ones(sequences, dtype=torch.bool)}

    @override
    def forward(self, batch: PreferenceBatch) -> Tensor:
        """Rewards, float32, shape (samples, 2), of the answer and of that to another prompt."""
        own, other = (
            PreferenceBatch(
                input_ids=batch["input_ids"][:, each],
                attention_mask=batch["attention_mask"][:, each],
                labels=batch["labels"][:, each],
            )
            for each in (slice(0, 1), slice(1, 2))
        )
        with torch.no_grad():
            before = log_likelihoods(self.reference, batch)
            elsewhere = log_likelihoods(self.built_model, other)
        after = torch.cat([log_likelihoods(self.built_model, own), elsewhere], dim=1)
        return self.beta * (after - before)

    @override
    def figures(self, batch: JudgedBatch) -> dict[str, Tensor]:
        loss, margins, distance = self.loss_of_rewards(self(batch), batch["desirable"])
        return {"loss": loss, **_of_margins(margins), "kl": distance / self.beta}

    def loss_of_rewards(self, rewards: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of a batch, a scalar; the margins, shape (samples,); and $z_0$, a scalar."""
        distance = rewards[:, 1].detach().mean().clamp(min=0)
        ahead = rewards[:, 0] - distance
        margins = torch.where(wanted, ahead, -ahead)
        weights = torch.where(wanted, self.desirable_weight, self.undesirable_weight)
        return (weights * torch.sigmoid(-margins)).mean(), margins, distance


def preference_loss(margins: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Mean over pairs of the loss that `DirectPreferenceModule` documents, a scalar in nats.

    Args:
        margins: Reward of the chosen answer less that of the rejected one, shape (pairs,).
        label_smoothing: Share of pairs that are taken to be the wrong way round.
    """
    right, wrong = -F.logsigmoid(margins), -F.logsigmoid(-margins)
    return ((1 - label_smoothing) * right + label_smoothing * wrong).mean()


def log_likelihoods(model: Any, batch: PreferenceBatch) -> Tensor:
    """Log-likelihoods of the answers under a model, in nats, float32, shape (pairs, answers).

    All answers go through the model in one call.
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
    return -losses.reshape(len(labels), -1).sum(dim=1).reshape(batch["labels"].shape[:-1])


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
