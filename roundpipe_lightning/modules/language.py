"""Modules of a model of transformers: what all have, the next token, and a class for every text."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypedDict, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel
from typing_extensions import NotRequired, override

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.models.source import Head, ModelSource
from roundpipe_lightning.modules.adapters import Adapters

"""Makes the optimizer from the parameters, e.g. `functools.partial(torch.optim.AdamW, lr=1e-3)`."""

SchedulerFactory = Callable[..., Any]
"""Makes the learning rate's schedule from the optimizer: a partial of one of torch or transformers.

Where it takes `num_training_steps` and has none, it is given the optimizer steps of the run.
"""


class TransformersModule(LightningModule):
    """Training of a model of transformers: ordinary Lightning code, which knows no pipelines.

    Args:
        source: The architecture and where its weights come from. The model is built in
            `configure_model`, that is in the place and dtype the Trainer's strategy asks for.
        optimizer: Makes the optimizer from the parameters that are trained.
        scheduler: Makes the schedule of the learning rate; None keeps the optimizer's.
        adapters: Puts adapters into the model; None trains every parameter.

    Attributes:
        model: The model; None before `configure_model`.
    """

    task: ClassVar[str] = "CAUSAL_LM"
    """Task of the model, as peft spells it."""

    whole_batches: ClassVar[bool] = False
    """Whether the loss is of a whole batch, or its tensors have no rows in common to split by."""

    def __init__(
        self,
        source: ModelSource,
        *,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: SchedulerFactory | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__()
        if scheduler is not None:
            _check_schedule(scheduler)
        self.source = source
        self.optimizer_factory = optimizer
        self.scheduler = scheduler
        self.adapters = adapters
        self.model: PreTrainedModel | None = None

    @property
    def built_model(self) -> Any:
        """The model; ConfigurationError: `configure_model` was not called."""
        if self.model is None:
            raise ConfigurationError(
                "The model is not built yet. A Trainer builds it; without one, call "
                "configure_model() first."
            )
        return self.model

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self.build_model(self.source)

    def build_model(self, source: ModelSource) -> Any:
        model = source.build()
        return model if self.adapters is None else self.adapters.apply(model, task=self.task)

    def example_batch(self, sequences: int, seq_len: int) -> Any:
        """A batch as the data gives it, for plans that are made before there is data."""
        raise ConfigurationError(
            f"{type(self).__name__} cannot be planned before it has data: define "
            f"example_batch(sequences={sequences}, seq_len={seq_len}), which returns a batch as "
            "training_step takes it."
        )

    @abstractmethod
    def logged(self, stage: str, batch: Any, **when: Any) -> Tensor:
        """The loss of a batch, logged as `<stage>_loss` beside what else there is to know."""

    def training_step(self, batch: Any) -> Tensor:
        """The loss of a batch, logged as `train_loss`."""
        return self.logged("train", batch, on_step=True, on_epoch=False)

    def validation_step(self, batch: Any) -> None:
        """Log `val_loss` and others, averaged over the epoch."""
        self.logged("val", batch, on_step=False, on_epoch=True)

    def test_step(self, batch: Any) -> None:
        """Log `test_loss` and others, averaged over the epoch."""
        self.logged("test", batch, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The optimizer over the parameters that are trained, and its schedule, per step.

        Raises:
            ConfigurationError: No parameter requires a gradient, or the schedule has no end.
        """
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if not trained:
            raise ConfigurationError(
                "No parameter of the model is trained: every one has requires_grad=False. "
                "Unfreeze some, or validate and test instead (train=false)."
            )
        optimizer = self.optimizer_factory(trained)
        if self.scheduler is None:
            return optimizer
        options: dict[str, Any] = {}
        length = _default_of(self.scheduler, "num_training_steps")
        warmup = _default_of(self.scheduler, "num_warmup_steps")
        is_share = isinstance(warmup, float) and 0 < warmup < 1
        if is_share and length == -1:  # a schedule without an end, whose beginning is a share
            length = None
        if length in (None, inspect.Parameter.empty):
            num_steps = self.trainer.estimated_stepping_batches
            if math.isinf(num_steps):
                raise ConfigurationError(
                    "The run has no end (max_steps=-1 and max_epochs=-1), so the length of the "
                    "schedule is unknown. Set scheduler.num_training_steps, trainer.max_steps or "
                    "trainer.max_epochs."
                )
            length = int(num_steps)
            if _default_of(self.scheduler, "num_training_steps") != -1:
                options["num_training_steps"] = length
        if is_share:
            options["num_warmup_steps"] = math.ceil(warmup * length)
        schedule = self.scheduler(optimizer, **options)
        if length > 0 and isinstance(schedule, LambdaLR):
            schedule.lr_lambdas = [_held_after(rate, length) for rate in schedule.lr_lambdas]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _default_of(function: Callable[..., Any], name: str) -> Any:
    parameter = inspect.signature(function).parameters.get(name)
    return -1 if parameter is None else parameter.default


def _held_after(rate: Callable[[int], float], length: int) -> Callable[[int], float]:
    """A rate by step that never rises after its end, as the cosines of transformers do."""
    end = min(rate(length - 1), rate(length))  # some schedules end one step before the others
    return lambda step: rate(step) if step < length else min(end, rate(step))


def _check_schedule(scheduler: SchedulerFactory) -> None:
    """Refuse unknown arguments, and figures that transformers' schedules take without a word."""
    given = getattr(scheduler, "keywords", {})
    taken = inspect.signature(getattr(scheduler, "func", scheduler)).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    for name in () if takes_any else given:
        if name not in taken:
            raise ConfigurationError(
                f"scheduler.{name} is not an argument of the schedule, which takes "
                f"{', '.join(taken)}."
            )
    for name, least, most in (
        ("num_warmup_steps", 0, math.inf),
        ("num_training_steps", 1, math.inf),
        ("min_lr_rate", 0.0, 1.0),
    ):
        value = given.get(name)
        if value is not None and not (isinstance(value, (int, float)) and least <= value <= most):
            limits = f"at least {least}" if math.isinf(most) else f"between {least} and {most}"
            raise ConfigurationError(f"scheduler.{name}={value} must be {limits}.")


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
        """The model's own output for a batch: its `loss` (a scalar) and its `logits`."""
        model = self.built_model
        if "position_ids" in batch and runs_flash_attention(model):
            return model(**as_one_row(cast(Mapping[str, Tensor], batch)), use_cache=False)
        return model(**batch, use_cache=False)

    @override
    def logged(self, stage: str, batch: TokenBatch, **when: Any) -> Tensor:
        """Log the loss in nats per token; its mean over an epoch is that over predicted tokens."""
        loss: Tensor = self(batch).loss
        size = None if when["on_step"] else int((batch["labels"][:, 1:] != -100).sum())
        if size != 0:
            self.log(f"{stage}_loss", loss, prog_bar=True, batch_size=size, **when)
        return loss

    def predict_step(self, batch: TokenBatch) -> dict[str, Tensor]:
        """The loss of a batch and the likeliest next token at every position.

        Returns:
            `loss`: scalar, nats per token. `next_tokens`: int64, the shape of `input_ids`.
        """
        output = self(batch)
        next_tokens = torch.argmax(output.logits, dim=-1)
        length = batch["input_ids"].shape[1]  # prompt tuning has positions before these
        return {"loss": output.loss, "next_tokens": next_tokens[:, -length:]}


class VisionLanguageModule(CausalLanguageModule):
    """Next-token training of a model that reads text and images: `AutoModelForImageTextToText`."""

    whole_batches = True  # a row has any number of images

    @override
    def build_model(self, source: ModelSource) -> Any:
        return super().build_model(replace(source, head=Head.IMAGE_TEXT_TO_TEXT))


def runs_flash_attention(model: Any) -> bool:
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


class ClassBatch(TypedDict):
    """One batch of texts; all tensors are int64.

    Attributes:
        input_ids: Token ids, shape (texts, tokens).
        attention_mask: 1 for tokens, 0 for padding, shape (texts, tokens).
        labels: Numbers of the classes, shape (texts,).
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor


class SequenceClassificationModule(TransformersModule):
    """Training of `AutoModelForSequenceClassification`: one class for a whole text.

    The loss is the model's own (cross-entropy in nats per text); the accuracy is logged beside it.

    Args:
        source: It may be a causal language model's, whose head is left out.
        classes: Names of the classes, in the order of their numbers.
        pad_token_id: Token that fills texts up: decoder models look for the last token before it.
            None takes that of the Trainer's data module, if it has one, else the model's.
        options: The other arguments of `TransformersModule`.

    Raises:
        ConfigurationError: There are fewer than two classes, or two of one name.
    """

    task = "SEQ_CLS"

    def __init__(
        self,
        source: ModelSource,
        *,
        classes: Sequence[Any],
        pad_token_id: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(source, **options)
        if len(classes) < 2 or len(set(classes)) < len(classes):
            raise ConfigurationError(
                f"classes={list(classes)}: name at least two classes, no name twice."
            )
        self.classes = tuple(map(str, classes))
        self.pad_token_id = pad_token_id

    @override
    def setup(self, stage: str) -> None:
        """Take the padding of the data, which is made before the model."""
        if self.pad_token_id is None:
            data = self.trainer.datamodule  # type: ignore[attr-defined]
            self.pad_token_id = getattr(data, "pad_token_id", None)

    @override
    def build_model(self, source: ModelSource) -> Any:
        changes: dict[str, Any] = {
            **(source.config_changes or {}),
            "id2label": dict(enumerate(self.classes)),
            "label2id": {name: number for number, name in enumerate(self.classes)},
        }
        if self.pad_token_id is not None:
            changes["pad_token_id"] = self.pad_token_id
        return super().build_model(
            replace(source, head=Head.SEQUENCE_CLASSIFICATION, config_changes=changes)
        )

    @override
    def example_batch(self, sequences: int, seq_len: int) -> ClassBatch:
        tokens = torch.zeros((sequences, seq_len), dtype=torch.long)
        labels = torch.zeros(sequences, dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}

    def forward(self, batch: ClassBatch) -> Any:
        """The model's own output for a batch: its `loss` (a scalar) and its `logits`.

        Args:
            batch: Texts and their classes, on one device. `logits` have the shape (texts, classes).
        """
        return self.built_model(**batch)

    @override
    def logged(self, stage: str, batch: ClassBatch, **when: Any) -> Tensor:
        """Log the loss in nats per text and the share of texts whose likeliest class is right."""
        output, size = self(batch), len(batch["labels"])
        loss: Tensor = output.loss
        right = (output.logits.argmax(dim=-1) == batch["labels"]).float().mean()
        self.log(f"{stage}_loss", loss, prog_bar=True, batch_size=size, **when)
        self.log(f"{stage}_accuracy", right, prog_bar=not when["on_step"], batch_size=size, **when)
        return loss

    def predict_step(self, batch: ClassBatch) -> Tensor:
        """Probabilities of the classes, float, shape (texts, classes)."""
        return torch.softmax(self(batch).logits.float(), dim=-1)
