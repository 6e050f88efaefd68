"""Small programs of many kinds, each in the spirit of a well-known public example.

A class whose name has no leading underscore is a program; its docstring says what is special about
it. Everything is drawn from the default generators, which the caller seeds.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torchmetrics
import transformers
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.utils.data import DataLoader

INPUTS, WIDTH, CLASSES, LENGTH, TOKENS, BLOCKS = 12, 16, 5, 7, 24, 4


class Program(LightningModule):
    """A classifier of vectors; programs override what makes them special."""

    named: ClassVar[dict[str, type[Program]]] = {}
    num_epochs = 1
    num_batches = 3
    rows = 8
    rate = 0.1
    flags: ClassVar[dict[str, Any]] = {}
    options: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not cls.__name__.startswith("_"):
            cls.named[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = cls

    @classmethod
    def about(cls) -> str:
        return (cls.__doc__ or "").split("\n")[0]

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def block(self) -> nn.Module:
        return Block()

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(self.embed(x)))

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = self.loss(self(x), y)
        self.log("loss", loss)
        return loss

    def batch(self, rows: int) -> Any:
        return torch.randn(rows, INPUTS), torch.randint(CLASSES, (rows,))

    def sizes(self) -> list[int]:
        return [self.rows] * self.num_batches

    def loader(self) -> Any:
        return DataLoader([self.batch(rows) for rows in self.sizes()], batch_size=None)

    @classmethod
    def made(cls) -> tuple[LightningModule, Any]:
        module = cls()
        return module, module.loader()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.rate)


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class AttentionBlock(nn.Module):
    """Self-attention of two heads with a mask, and optionally cross-attention."""

    def __init__(self, *, crossed: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.after = Block()
        self.cross = nn.Linear(WIDTH, 2 * WIDTH) if crossed else None

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, -1))
        x = x + joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        if self.cross is not None and memory is not None:
            k, v = (heads(part) for part in self.cross(memory).chunk(2, -1))
            x = x + joined(F.scaled_dot_product_attention(heads(x), k, v, attn_mask=memory_mask))
        return self.after(x)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class ConvBlock(nn.Module):
    """A residual convolution, with or without batch normalisation."""

    def __init__(self, *, normalised: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH) if normalised else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


# --- losses ---------------------------------------------------------------------------------------


class Classifier(Program):
    """Mean cross-entropy."""


class ClassWeights(Program):
    """Cross-entropy with class weights."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted, y, weight=torch.linspace(0.1, 3, CLASSES))


class IgnoredLabels(Program):
    """Cross-entropy that ignores a class and smooths labels."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted, y, ignore_index=1, label_smoothing=0.1)


class SummedLoss(Program):
    """A sum over the batch."""

    rate = 0.01

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted, y, reduction="sum")


class Focal(Program):
    """Focal loss over the number of positives."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        target = F.one_hot(y, CLASSES)[:, 1:].float()
        chance = predicted[:, 1:].sigmoid()
        missed = torch.where(target > 0, 1 - chance, chance)
        return -(missed**2 * (1 - missed).log()).sum() / target.sum().clamp_min(1)


class LogOfMean(Program):
    """The logarithm of a mean; logs exp(loss)."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("perplexity", loss.exp(), prog_bar=True)
        return loss.log1p()


class Cox(Program):
    """Cox partial likelihood: risk sets across the batch."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        risk = predicted[:, 0][torch.argsort(predicted[:, 1].detach(), descending=True)]
        seen = (y > 0).float()
        return -((risk - risk.logcumsumexp(0)) * seen).sum() / seen.sum().clamp_min(1)


class Uncertainty(Program):
    """Two tasks with learned weights outside of the blocks."""

    def build(self) -> None:
        super().build()
        self.log_variance = nn.Parameter(torch.zeros(2))

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        losses = torch.stack([F.cross_entropy(predicted, y), predicted.square().sum() / 50])
        return (losses * (-self.log_variance).exp() + self.log_variance).sum()


# --- across samples -------------------------------------------------------------------------------


class Clip(Program):
    """CLIP: two towers, in-batch negatives, a learned temperature."""

    def build(self) -> None:
        super().build()
        self.words = nn.Embedding(TOKENS, WIDTH)
        self.text = nn.ModuleList(AttentionBlock() for _ in range(BLOCKS))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, text = batch["images"], self.words(batch["text"])
        for block in self.text:
            text = block(text)
        image = F.normalize(self(images), dim=-1)
        logits = self.temperature.exp() * image @ F.normalize(self.head(text.mean(1)), dim=-1).T
        targets = torch.arange(len(logits), device=self.device)
        loss = (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2
        self.log_dict({"loss": loss, "temperature": self.temperature.detach()})
        return loss

    def batch(self, rows: int) -> Any:
        text = torch.randint(TOKENS, (rows, LENGTH))
        return {"images": torch.randn(rows, INPUTS), "text": text}


class SimClr(Program):
    """SimCLR: two views joined along the batch, NT-Xent."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        z = F.normalize(self(torch.cat([x, x + 0.1 * torch.randn_like(x)])), dim=-1)
        alike = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -9e9)
        loss = F.cross_entropy(alike, torch.arange(len(z)).roll(len(x)))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class MultipleNegatives(Program):
    """Anchors and positives as a list of two batches, in-batch negatives."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        a, b = (F.normalize(self(part), dim=-1) for part in batch)
        return F.cross_entropy(20 * a @ b.T, torch.arange(len(a)))

    def batch(self, rows: int) -> Any:
        return [torch.randn(rows, INPUTS), torch.randn(rows, INPUTS)]


class HardTriplets(Program):
    """Triplets with the hardest positive and negative of the batch."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        far = torch.cdist(predicted, predicted)
        same = y[:, None] == y[None]
        hard = far.masked_fill(~same, 0).amax(1) - far.masked_fill(same, 99.0).amin(1)
        return F.relu(1 + hard).mean()


class BarlowTwins(Program):
    """Cross-correlation of features over the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        a, b = (self(view) for view in (x, x + 0.1 * torch.randn_like(x)))
        a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (a, b))
        return (a.T @ b / len(x) - torch.eye(CLASSES)).square().sum() / 10


# --- teachers and queues --------------------------------------------------------------------------


class _Momentum(Program):
    def build(self) -> None:
        super().build()
        self.teacher = nn.ModuleList(self.block() for _ in range(BLOCKS))
        self.teacher.load_state_dict(self.blocks.state_dict())
        self.teacher.requires_grad_(False)

    @torch.no_grad()
    def taught(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.teacher:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def move(self, momentum: float = 0.7) -> None:
        for slow, fast in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
            slow.mul_(momentum).add_(fast, alpha=1 - momentum)


class Byol(_Momentum):
    """A momentum teacher, updated at the end of training_step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        loss = -F.cosine_similarity(self(x), self.taught(x + 0.1), dim=-1).mean()
        self.move()
        self.log("loss", loss)
        return loss


class MoCo(_Momentum):
    """A momentum teacher, updated first, and a queue of negatives in a buffer."""

    def build(self) -> None:
        super().build()
        self.register_buffer("queue", F.normalize(torch.randn(24, CLASSES), dim=-1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        self.move()
        q, k = F.normalize(self(x), dim=-1), F.normalize(self.taught(x + 0.1), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
        place = int(self.place)
        self.queue[place : place + len(k)] = k
        self.place[...] = (place + len(k)) % len(self.queue)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


class Dino(_Momentum):
    """A teacher whose outputs are centred by a running mean over batches."""

    def build(self) -> None:
        super().build()
        self.register_buffer("center", torch.zeros(1, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        wanted = self.taught(x)
        loss = F.cross_entropy(self(x + 0.1), ((wanted - self.center) / 0.3).softmax(-1))
        self.center = 0.9 * self.center + 0.1 * wanted.mean(0, keepdim=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.move()


class Distillation(_Momentum):
    """A frozen teacher in blocks of its own."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        student, teacher = self(x).log_softmax(-1), self.taught(x).softmax(-1)
        loss = F.kl_div(student, teacher, reduction="batchmean") + F.nll_loss(student, y)
        self.log("agreement", (student.argmax(-1) == teacher.argmax(-1)).float().mean())
        return loss


class PseudoLabels(Program):
    """FixMatch: labels from a pass in eval mode without gradients, masked by confidence."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.eval()
        with torch.no_grad():
            sure, label = self(x).softmax(-1).max(-1)
        self.train()
        mask = (sure > sure.median()).float()
        unlabelled = F.cross_entropy(self(x + 0.1 * torch.randn_like(x)), label, reduction="none")
        return F.cross_entropy(self(x), y) + (unlabelled * mask).sum() / mask.sum().clamp_min(1)


# --- sequences ------------------------------------------------------------------------------------


class _Tokens(Program):
    def build(self) -> None:
        super().build()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def block(self) -> nn.Module:
        return AttentionBlock()

    def batch(self, rows: int) -> Any:
        ids = torch.randint(1, TOKENS, (rows, LENGTH))
        used = torch.randint(2, LENGTH + 1, (rows, 1))
        ids[torch.arange(LENGTH) >= used] = 0
        return ids[:, :-1], ids[:, 1:]


class LmFromTuple(_Tokens):
    """A language model from (x, y), padding ignored."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted.flatten(0, 1), y.flatten(), ignore_index=0)


class LmMeanOverSequences(_Tokens):
    """A mean of every sequence's mean."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        losses = F.cross_entropy(predicted.mT, y, reduction="none")
        mask = (y != 0).float()
        return ((losses * mask).sum(1) / mask.sum(1)).mean()


class LmOverTokens(_Tokens):
    """A sum over the batch's count of tokens, z-loss besides; logs both."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        losses = F.cross_entropy(logits.mT, y, reduction="none") * (y != 0)
        z = logits.logsumexp(-1).square().mean()
        self.log("tokens", (y != 0).sum().float(), reduce_fx="sum")
        return {
            "loss": losses.sum() / (y != 0).sum() + 1e-2 * z,
            "z": z.detach(),
            "n": losses[:, 0],
        }


class MaskedLm(_Tokens):
    """BERT: tokens are masked at random in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, _ = batch
        hidden = torch.rand(ids.shape) < 0.4
        labels = ids.masked_fill(~hidden, -100)
        return F.cross_entropy(self(ids.masked_fill(hidden, 3)).mT, labels)


class CausalMask(_Tokens):
    """A mask and positions of the step's own, shared by all rows, passed to every block."""

    def build(self) -> None:
        super().build()
        self.register_buffer("positions", torch.randn(1, LENGTH, WIDTH), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, y = batch
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        padded = mask & (ids != 0)[:, None, None]
        x = self.embed(ids) + self.positions[:, : ids.shape[1]]
        for index, block in enumerate(self.blocks):
            x = block(x, mask=mask if index % 2 else padded)
        return F.cross_entropy(self.head(x).mT, y)


class EncoderDecoder(_Tokens):
    """An encoder and a decoder with cross-attention; padded labels."""

    def build(self) -> None:
        super().build()
        self.decoder = nn.ModuleList(AttentionBlock(crossed=True) for _ in range(BLOCKS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        source, target = batch
        memory = self.trunk(self.embed(source))
        x = self.embed(target[:, :-1])
        for block in self.decoder:
            x = block(x, None, memory, memory_mask=(source != 0)[:, None, None])
        logits = self.head(x)
        loss = F.cross_entropy(logits.mT, target[:, 1:], ignore_index=0)
        right = (logits.argmax(-1) == target[:, 1:])[target[:, 1:] != 0]
        self.log("accuracy", right.float().mean())
        return loss


class TimeMajor(_Tokens):
    """(time, batch) tensors."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted.flatten(0, 1), y.flatten(), ignore_index=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(self.embed(x).transpose(0, 1)).transpose(0, 1))

    def batch(self, rows: int) -> Any:
        return tuple(part.T.contiguous() for part in super().batch(rows))


class Recurrent(nn.Module):
    """A recurrent layer, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, state = self.cell(x, state)
        return x + y, state


class StatefulRnn(_Tokens):
    """Truncated backpropagation: hidden states stay in `self`, (time, batch) layout."""

    num_batches = 4

    def build(self) -> None:
        super().build()
        self.hidden: list[Tensor | None] = [None] * BLOCKS

    def block(self) -> nn.Module:
        return Recurrent()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (part.T for part in batch)
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x, state = block(x, self.hidden[index])
            self.hidden[index] = state.detach()
        return F.cross_entropy(self.head(x).permute(1, 2, 0), y.T)


class Memory(_Tokens):
    """Transformer-XL: the blocks' last inputs are the next batch's memory."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(AttentionBlock(crossed=True) for _ in range(BLOCKS))
        self.memories: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, y = batch
        x, kept = self.embed(ids), []
        for index, block in enumerate(self.blocks):
            kept.append(x.detach())
            x = block(x, memory=self.memories[index] if self.memories else None)
        self.memories = kept
        return F.cross_entropy(self.head(x).mT, y)


class Ctc(Program):
    """CTC: (time, batch, class) outputs, lengths, targets in one line."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths, targets, target_lengths = batch
        log = self(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log, targets, lengths, target_lengths, zero_infinity=True)

    def batch(self, rows: int) -> Any:
        lengths = torch.randint(LENGTH, 2 * LENGTH + 1, (rows,))
        target_lengths = torch.randint(1, 4, (rows,))
        targets = torch.randint(1, CLASSES, (int(target_lengths.sum()),))
        return torch.randn(rows, 2 * LENGTH, INPUTS), lengths, targets, target_lengths


class Packed(Program):
    """Sequences packed into one row of tokens; attention within each of them."""

    def block(self) -> nn.Module:
        return AttentionBlock()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["x"], batch["y"]
        part = torch.bucketize(torch.arange(len(x)), batch["ends"], right=True)
        hidden = self.embed(x)[None]
        for block in self.blocks:
            hidden = block(hidden, part[:, None] == part[None])
        return F.cross_entropy(self.head(hidden[0]), y)

    def batch(self, rows: int) -> Any:
        ends = torch.randint(2, 6, (rows,)).cumsum(0)
        total = int(ends[-1])
        y = torch.randint(CLASSES, (total,))
        return {"x": torch.randn(total, INPUTS), "y": y, "ends": ends}


class MultipleChoice(_Tokens):
    """Choices flattened into the batch and back."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, label = batch
        scores = self(ids.flatten(0, 1)).mean((1, 2)).view(-1, 3)
        return F.cross_entropy(scores, label)

    def batch(self, rows: int) -> Any:
        return torch.randint(TOKENS, (rows, 3, LENGTH)), torch.randint(3, (rows,))


# --- images ---------------------------------------------------------------------------------------


class _Images(Program):
    def build(self) -> None:
        super().build()
        self.embed = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.head = nn.Conv2d(WIDTH, CLASSES, 1)

    def block(self) -> nn.Module:
        return ConvBlock()

    def batch(self, rows: int) -> Any:
        return torch.rand(rows, 3, 6, 6), torch.randint(CLASSES, (rows, 6, 6))


class Segmentation(_Images):
    """Cross-entropy of pixels, some ignored."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted, y, ignore_index=0)


class Mixup(_Images):
    """Mixup: a permutation and a Beta draw in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share = float(torch.distributions.Beta(0.4, 0.4).sample())
        order = torch.randperm(len(x))
        out = self(share * x + (1 - share) * x[order])
        self.log("share", share)
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])


class RandomCrop(_Images):
    """Python's random numbers in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        top, flip = random.randrange(3), random.random() < 0.5
        if flip:
            x, y = x.flip(-1), y.flip(-1)
        return F.cross_entropy(self(x[:, :, top : top + 4]), y[:, top : top + 4])


class BatchNorm(_Images):
    """Batch normalisation in the blocks."""

    def block(self) -> nn.Module:
        return ConvBlock(normalised=True)


class BatchNormHead(Program):
    """Batch normalisation outside of the blocks."""

    def build(self) -> None:
        super().build()
        self.head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))


class Detection(Program):
    """A list of images of several sizes and a list of dicts: tuple(zip(*batch))."""

    def build(self) -> None:
        super().build()
        self.embed = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.head = nn.Linear(WIDTH, 4 + CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, targets = batch
        pad = [F.pad(i, (0, 8 - i.shape[2], 0, 8 - i.shape[1])) for i in images]
        pixels = self.trunk(self.embed(torch.stack(pad)).flatten(2).mT)
        losses = []
        for out, target in zip(self.head(pixels), targets, strict=True):
            found = out[: len(target["labels"])]
            losses.append(F.smooth_l1_loss(found[:, :4], target["boxes"], reduction="sum"))
            losses.append(F.cross_entropy(found[:, 4:], target["labels"], reduction="sum"))
        loss = torch.stack(losses).sum() / sum(len(t["labels"]) for t in targets)
        self.log("loss", loss, batch_size=len(images))
        return loss

    def batch(self, rows: int) -> Any:
        counts = [1 + row % 3 for row in range(rows)]
        images = [torch.rand(3, 5 + c, 9 - c) for c in counts]
        targets = [
            {"boxes": torch.rand(c, 4), "labels": torch.randint(CLASSES, (c,))} for c in counts
        ]
        return tuple(zip(*zip(images, targets, strict=True), strict=True))


class SkipConnections(_Images):
    """U-Net: outputs of the first blocks join the last ones'."""

    def trunk(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x = block(x + skips.pop() if index > 2 else x)
            skips.append(x)
        return x + torch.stack(skips).mean(0)


class MaskedAutoencoder(Program):
    """MAE: patches are shuffled and dropped, the loss counts those that were."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        patches = x.view(len(x), 6, 2).repeat(1, 1, 6)
        noise = torch.rand(len(x), 6)
        order = noise.argsort(1)
        kept = patches.gather(1, order[:, :3, None].expand(-1, -1, INPUTS))
        guess = self(kept).mean(1, keepdim=True)
        error = (guess[..., :1] - patches).square().mean(-1)
        mask = (noise.argsort(1).argsort(1) >= 3).float()
        return (error * mask).sum() / mask.sum()


# --- generative -----------------------------------------------------------------------------------


class Vae(Program):
    """A VAE: summed reconstruction and KL, noise drawn in the step."""

    rate = 0.005

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(WIDTH, INPUTS)
        self.code = nn.Linear(INPUTS, 8)
        self.embed = nn.Linear(4, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].sigmoid()
        mean, log = self.code(x).chunk(2, -1)
        out = self(mean + torch.randn_like(mean) * (log / 2).exp())
        reconstruction = F.binary_cross_entropy_with_logits(out, x, reduction="sum")
        kl = -0.5 * (1 + log - mean.square() - log.exp()).sum()
        self.log_dict({"reconstruction": reconstruction, "kl": kl})
        return reconstruction + kl


class Diffusion(Program):
    """Times and noise drawn in the step."""

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(WIDTH, INPUTS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        t = torch.randint(1, 10, (len(x), 1)) / 10
        noise = torch.randn_like(x)
        loss = F.mse_loss(self((1 - t).sqrt() * x + t.sqrt() * noise), noise)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


class Gan(Program):
    """A GAN with two optimizers, manual optimization."""

    def build(self) -> None:
        super().build()
        self.head = nn.Linear(WIDTH, INPUTS)
        self.judge = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        x, _ = batch
        made = self(torch.randn_like(x))
        self.toggle_optimizer(first)
        loss = F.softplus(-self.judge(made)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        doubt = F.softplus(-self.judge(x)).mean() + F.softplus(self.judge(made.detach())).mean()
        second.zero_grad()
        self.manual_backward(doubt + self.penalty(x, made.detach()))
        second.step()
        self.log_dict({"generator": loss, "judge": doubt})

    def penalty(self, x: Tensor, made: Tensor) -> Tensor:
        return torch.zeros(())

    def configure_optimizers(self) -> Any:
        judge = set(self.judge.parameters())
        rest = [p for p in self.parameters() if p not in judge]
        return [torch.optim.SGD(group, lr=0.05) for group in (rest, judge)]


class WassersteinGan(Gan):
    """A GAN with a gradient penalty: double backward through the judge."""

    def penalty(self, x: Tensor, made: Tensor) -> Tensor:
        between = torch.lerp(x, made, torch.rand(len(x), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(between).sum(), between, create_graph=True)
        return (slope.norm(dim=-1) - 1).square().mean()


class VectorQuantizer(nn.Module):
    """Nearest codes; the codebook follows its vectors (a buffer, read and updated)."""

    def __init__(self) -> None:
        super().__init__()
        self.before = Block()
        self.register_buffer("codes", torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        nearest = torch.cdist(x, self.codes).argmin(-1)
        code = self.codes[nearest]
        with torch.no_grad():
            chosen = F.one_hot(nearest, 6).float()
            mean = chosen.T @ x / chosen.sum(0).clamp_min(1)[:, None]
            self.codes.lerp_(mean, 0.3 * (chosen.sum(0) > 0)[:, None])
        return x * (1 + code.mean(-1, keepdim=True)) + (code - x).detach() * 0.1


class VqVae(Program):
    """Vector quantisation in the blocks, codebooks moved by averages."""

    def block(self) -> nn.Module:
        return VectorQuantizer()


# --- derivatives ----------------------------------------------------------------------------------


class Pinn(Program):
    """A physics-informed network: derivatives of outputs by inputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].requires_grad_()
        u = self(x)[:, 0]
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        loss = (slope[:, 0] - u).square().mean() + slope.square().mean()
        self.log("residual", loss)
        return loss


class GradientPenalty(Program):
    """A penalty on the gradient of the loss by the embedding."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.embed(x)
        loss = F.cross_entropy(self.head(self.trunk(x)), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.norm()


class Adversarial(Program):
    """FGSM: the gradient by the inputs makes the inputs of a second pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(self(x), y), x)
        return F.cross_entropy(self((x + 0.1 * slope.sign()).detach()), y)


class RetainGrad(Program):
    """Retain_grad on a block's output, read after backward."""

    def build(self) -> None:
        super().build()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.kept = self.trunk(self.embed(x))
        self.kept.retain_grad()
        return F.cross_entropy(self.head(self.kept), y)

    def on_after_backward(self) -> None:
        self.norms.append(float(self.kept.grad.norm()))
        del self.kept


class Sam(Program):
    """Sharpness-aware minimisation: two passes, manual optimization."""

    def build(self) -> None:
        super().build()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        self.manual_backward(F.cross_entropy(self(x), y))
        moves = [p.grad * 0.05 for p in self.parameters()]
        with torch.no_grad():
            for p, move in zip(self.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        with torch.no_grad():
            for p, move in zip(self.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


# --- what a step keeps ----------------------------------------------------------------------------


class Lists(Program):
    """Outputs appended to a list, joined at the end of the epoch."""

    num_epochs = 2

    def build(self) -> None:
        super().build()
        self.outputs: list[Tensor] = []
        self.labels: list[int] = []
        self.joined: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        loss = F.cross_entropy(out, y)
        self.outputs.append(out.detach())
        self.labels.extend(y.tolist())
        return loss

    def on_train_epoch_end(self) -> None:
        self.joined.append(torch.cat(self.outputs).mean(0))
        self.log("norm", self.joined[-1].norm())
        self.outputs.clear()


class Counters(Program):
    """Numbers and a running mean in `self`; a loss scaled by a warm-up of steps."""

    def build(self) -> None:
        super().build()
        self.steps, self.samples, self.average = 0, 0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps += 1
        self.samples += len(x)
        loss = F.cross_entropy(self(x), y)
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss * min(1.0, self.steps / 5)


class Metrics(Program):
    """Torchmetrics, updated in the step and logged."""

    num_epochs = 2

    def build(self) -> None:
        super().build()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES, average="macro")
        self.auc = torchmetrics.AUROC("multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        self.log("step accuracy", self.accuracy(out, y))
        self.auc.update(out.softmax(-1), y)
        self.log("auc", self.auc, on_step=False, on_epoch=True)
        return F.cross_entropy(out, y)


class MetricsComputed(Program):
    """A metric computed and reset in the step, one in a plain dict."""

    def build(self) -> None:
        super().build()
        self.plain = {"f1": torchmetrics.F1Score("multiclass", num_classes=CLASSES)}
        self.scores: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self(x)
        metric = self.plain["f1"]
        metric.update(out, y)
        self.scores.append(float(metric.compute()))
        metric.reset()
        return F.cross_entropy(out, y)


class ReplayBuffer(Program):
    """DQN: a replay buffer in `self`, a target network copied every other step."""

    def build(self) -> None:
        super().build()
        self.buffer: deque[Tensor] = deque(maxlen=20)
        self.target = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
        self.target.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.buffer.extend(batch[0])
        x = torch.stack(random.sample(list(self.buffer), 8))
        with torch.no_grad():
            wanted = x[:, 0] + 0.9 * self.target(x.roll(1, 1)).amax(-1)
            if batch_idx % 2:
                self.target[2].weight.copy_(self.head.weight)
        return F.smooth_l1_loss(self(x).amax(-1), wanted)


class KeptFeatures(Program):
    """A block's output kept on `self`, used by the loss and after the step."""

    def trunk(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                self.features = x
        return x

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted, y) + self.features.square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("features", self.features.norm())
        self.features = self.features.detach()


class Hooks(Program):
    """Forward hooks that keep what blocks gave, counted."""

    def build(self) -> None:
        super().build()
        self.calls = 0
        self.means: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(self.hook(index))

    def hook(self, index: int) -> Any:
        def keep(module: nn.Module, arguments: Any, output: Tensor) -> None:
            self.calls += 1
            self.means[index] = output.detach().mean(0)

        return keep


class ChangingHook(Program):
    """A forward hook that changes a block's output, one that changes its gradient."""

    def build(self) -> None:
        super().build()
        self.blocks[1].register_forward_hook(lambda module, arguments, output: output * 1.5)
        self.blocks[2].register_full_backward_hook(
            lambda module, ours, theirs: tuple(g * 0.5 for g in ours)
        )


class GradientHook(Program):
    """A tensor hook on a block's output reverses the gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.trunk(self.embed(x))
        domain = hidden * 1
        domain.register_hook(lambda gradient: -0.3 * gradient)
        return F.cross_entropy(self.head(hidden), y) + domain.square().mean()


class Outputs(Program):
    """A dict of outputs, read in on_train_batch_end."""

    def build(self) -> None:
        super().build()
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        out = self(x)
        return {"loss": F.cross_entropy(out, y), "out": out.detach(), "names": [str(len(x))]}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs["out"].argmax(-1))


# --- blocks that are special ----------------------------------------------------------------------


class SpectralNorm(Program):
    """Spectral normalisation in the blocks: power iteration in buffers."""

    def block(self) -> nn.Module:
        block = Block()
        block.inner = nn.utils.parametrizations.spectral_norm(block.inner)
        block.outer = nn.utils.spectral_norm(block.outer)
        return block


class RunningScale(nn.Module):
    """A block that divides by a running scale, which it updates first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5).add_(0.5 * x.abs().mean())
        return self.inner(x / self.scale)


class RunningScales(Program):
    """Blocks that read and update a running scale."""

    def block(self) -> nn.Module:
        return RunningScale()


class Experts(nn.Module):
    """Two experts, the best by row; returns the load-balancing loss or keeps it."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Block() for _ in range(2))
        self.keeps = keeps

    def forward(self, x: Tensor) -> Any:
        chances = self.router(x).softmax(-1)
        weight, best = chances.max(-1, keepdim=True)
        out = torch.where(best == 0, self.experts[0](x), self.experts[1](x)) * weight
        balance = (chances.mean(0) * F.one_hot(best[:, 0], 2).float().mean(0)).sum()
        if self.keeps:
            self.balance = balance
            return x + out
        return x + out, balance


class MixtureOfExperts(Program):
    """Every block returns a balance of the batch besides."""

    def block(self) -> nn.Module:
        return Experts(keeps=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x, balance = self.embed(x), 0
        for block in self.blocks:
            x, more = block(x)
            balance = balance + more
        self.log("balance", balance)
        return F.cross_entropy(self.head(x), y) + balance


class KeptBalance(Program):
    """Every block keeps its balance as an attribute."""

    def block(self) -> nn.Module:
        return Experts(keeps=True)

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted, y) + sum(b.balance for b in self.blocks)

    def on_train_batch_end(self, *_: Any) -> None:
        for block in self.blocks:
            block.balance = block.balance.detach()


class Capacity(Program):
    """Experts that have no room for all rows."""

    class Experts(Experts):
        """Drops what its experts have no room for."""

        def __init__(self) -> None:
            super().__init__(keeps=False)

        def forward(self, x: Tensor) -> Tensor:
            best = F.one_hot(self.router(x).argmax(-1), 2)
            place = (best.cumsum(0) * best).sum(-1, keepdim=True)
            out, _ = super().forward(x)
            return torch.where(place <= max(1, len(x) // 2), out, x)

    def block(self) -> nn.Module:
        return self.Experts()


_STRENGTH: ContextVar[float] = ContextVar("strength", default=1.0)


class PastArguments(Program):
    """Blocks that take a context variable, and an attribute with the batch's rows."""

    class Reading(Block):
        """Takes more than its arguments."""

        gate: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = x if self.gate is None else x * self.gate
            return super().forward(x) * _STRENGTH.get()

    def block(self) -> nn.Module:
        return self.Reading()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        _STRENGTH.set(0.8)
        self.blocks[2].gate = x[:, :1].sigmoid()
        return F.cross_entropy(self(x), y)


class SharedBlocks(Program):
    """ALBERT: the blocks are called twice."""

    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(super().trunk(x))


class EarlyExit(Program):
    """A loss after every block."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x, losses = self.embed(x), []
        for block in self.blocks:
            x = block(x)
            losses.append(F.cross_entropy(self.head(x), y))
        return torch.stack(losses).mean()


class LayerDrop(Program):
    """Blocks are skipped at random, but for the first."""

    def trunk(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            if index == 0 or torch.rand(()) > 0.4:
                x = block(x)
        return x


class Conditioned(Program):
    """FiLM: blocks are called with keywords, a scalar and a number."""

    class Film(nn.Module):
        """A block with a condition."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()
            self.film = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, *, by: Tensor, gain: Tensor, shift: float) -> Tensor:
            return self.inner(x) * (1 + gain * self.film(by)) + shift

    def block(self) -> nn.Module:
        return self.Film()

    def build(self) -> None:
        super().build()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def trunk(self, x: Tensor) -> Tensor:
        by = x.mean(0, keepdim=True)
        for block in self.blocks:
            x = block(x, by=by, gain=self.gain, shift=0.1)
        return x


class Graphs(Program):
    """Graphs in one batch: messages along edges in the blocks, a mean of each graph."""

    class Messages(nn.Module):
        """A graph convolution."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            return x + torch.zeros_like(x).index_add(0, edges[1], self.inner(x)[edges[0]])

    def block(self) -> nn.Module:
        return self.Messages()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch.x)
        for block in self.blocks:
            x = block(x, batch.edges)
        graphs = torch.zeros(len(batch.y), WIDTH).index_add(0, batch.graph, x)
        loss = F.cross_entropy(self.head(graphs / batch.graph.bincount()[:, None]), batch.y)
        self.log("loss", loss, batch_size=len(batch.y))
        return loss

    def batch(self, rows: int) -> Any:
        graph = torch.arange(rows).repeat_interleave(torch.randint(2, 5, (rows,)))
        edges = torch.randint(len(graph), (2, 3 * len(graph)))
        edges = edges[:, graph[edges[0]] == graph[edges[1]]]
        y = torch.randint(CLASSES, (rows,))
        return SimpleNamespace(x=torch.randn(len(graph), INPUTS), edges=edges, graph=graph, y=y)


# --- reinforcement learning and ranking -----------------------------------------------------------


class Reinforce(Program):
    """Advantages, normalised over the batch."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        reward = y.float() - 1
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        policy = torch.distributions.Categorical(logits=predicted)
        action = policy.sample()
        return -(advantage * policy.log_prob(action)).mean() - 0.01 * policy.entropy().mean()


class Ppo(Program):
    """Discounted returns along the batch, a clipped ratio, several heads."""

    def build(self) -> None:
        super().build()
        self.value = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, action = batch
        hidden = self.trunk(self.embed(x))
        value = self.value(hidden)[:, 0]
        returns = x[:, 0].flip(0).cumsum(0).flip(0)
        advantage = (returns - value).detach()
        advantage = (advantage - advantage.mean()) / advantage.std()
        log = self.head(hidden).log_softmax(-1).gather(1, action[:, None])[:, 0]
        ratio = (log - log.detach() + 0.1).exp()
        loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.1) * advantage).mean()
        self.log_dict({"policy": loss, "best": advantage.max()})
        return loss + 0.1 * F.mse_loss(value, returns)


# --- batches --------------------------------------------------------------------------------------


class OddLast(Program):
    """A last batch of odd size."""

    num_epochs = 2

    def sizes(self) -> list[int]:
        return [8, 8, 5]


class BatchOfOne(Program):
    """Batches of one sample, then of three."""

    def sizes(self) -> list[int]:
        return [1, 3, 1]


class DifferentLengths(_Tokens):
    """Every batch has sequences of another length."""

    def loader(self) -> Any:
        made = [self.batch(rows) for rows in self.sizes()]
        cut = [tuple(p[:, : 3 + i] for p in parts) for i, parts in enumerate(made)]
        return DataLoader(cut, batch_size=None)

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted.mT, y)


class DataloaderIter(Program):
    """Training_step takes the iterator."""

    def training_step(self, dataloader_iter: Iterable[Any]) -> Tensor:  # type: ignore[override]
        (x, y), batch_idx, _ = next(dataloader_iter)
        return F.cross_entropy(self(x), y) / (1 + batch_idx)


class BatchMutation(Program):
    """A batch with text, numbers and nested parts, from which the step takes some out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        names, scale = batch.pop("names"), batch.pop("scale")
        x, (y, weight) = batch.pop("inputs"), batch["targets"]
        loss = F.cross_entropy(self(x), y, reduction="none") * weight * scale
        self.log("names", float(len(names)))
        return loss.mean()

    def batch(self, rows: int) -> Any:
        x, y = super().batch(rows)
        names = [f"sample {row}" for row in range(rows)]
        return {"inputs": x, "targets": (y, torch.rand(rows)), "names": names, "scale": 0.5}


@dataclass
class Sample:
    """A batch as an object with a tensor that all rows share."""

    x: Tensor
    y: Tensor
    prior: Tensor


class SharedTensor(Program):
    """A batch as a dataclass; one of its tensors has no row per sample, but as many."""

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        out = self(batch.x) + batch.prior[:CLASSES]
        return F.cross_entropy(out, batch.y) + (batch.prior.sum() - out.mean()).square()

    def batch(self, rows: int) -> Any:
        return Sample(*super().batch(rows), prior=torch.rand(rows))


class TwoLoaders(Program):
    """Two loaders with batches of other sizes: labelled and not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch["labelled"]
        more, _ = batch["rest"]
        out = self(torch.cat([x, more]))
        rest = out[len(x) :].softmax(-1)
        entropy = -(rest * rest.log()).sum(-1).mean()
        return F.cross_entropy(out[: len(x)], y) + 0.1 * entropy

    def loader(self) -> Any:
        few, many = ([self.batch(rows) for _ in range(3)] for rows in (4, 12))
        loaders = {"labelled": DataLoader(few, batch_size=None)}
        return CombinedLoader(loaders | {"rest": DataLoader(many, batch_size=None)}, "min_size")


class SkippedSteps(Program):
    """None for some batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return None if batch_idx == 1 else loss


class Accumulation(Program):
    """Accumulation, clipping and a scheduler."""

    num_batches = 5
    flags: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class HeadDropout(Program):
    """Dropout outside of the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.trunk(self.embed(x)), 0.3, training=self.training))


class GradientsLogged(Program):
    """A callback reads gradients and writes parameters (weight clipping)."""

    class Clipper(Callback):
        """Logs the norm of the gradient, clips weights."""

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            norms = [p.grad.norm() for p in pl_module.parameters()]
            pl_module.log("gradient", torch.stack(norms).norm())

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            for parameter in pl_module.parameters():
                parameter.data.clamp_(-0.2, 0.2)

    def configure_callbacks(self) -> list[Callback]:
        return [self.Clipper()]


class Ema(Program):
    """EMA of the weights in on_before_zero_grad, its distance in the loss."""

    def build(self) -> None:
        super().build()
        self.slow = [p.detach().clone() for p in self.parameters()]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for slow, fast in zip(self.slow, self.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.2)

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        far = sum((s - p).square().sum() for s, p in zip(self.slow, self.parameters(), strict=True))
        return F.cross_entropy(predicted, y) + far


class WeightDecay(Program):
    """An L2 term over all parameters in the step."""

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        norm = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(predicted, y) + 0.01 * norm


# --- transformers ---------------------------------------------------------------------------------


class _Pretrained(Program):
    rate = 0.05

    def build(self) -> None:
        self.model = self.network().train()

    def network(self) -> nn.Module:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(**batch)
        self.log("loss", out.loss)
        return out.loss

    def ids(self, rows: int, padding: int) -> Tensor:
        ids = torch.randint(3, TOKENS, (rows, LENGTH))
        ids[torch.arange(LENGTH) >= torch.randint(2, LENGTH + 1, (rows, 1))] = padding
        return ids

    def batch(self, rows: int) -> Any:
        ids = self.ids(rows, 0)
        return {
            "input_ids": ids,
            "attention_mask": (ids > 0).long(),
            "labels": self.ids(rows, -100),
        }


def small(kind: str, **settings: Any) -> Any:
    """A tiny configuration without dropout."""
    sizes = {"vocab_size": TOKENS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **settings})
    for name, value in vars(config).items():
        if ("dropout" in name or "layerdrop" in name or name.endswith("pdrop")) and value:
            setattr(config, name, 0.0)
    return config


class T5(_Pretrained):
    """T5 with padded labels."""

    def network(self) -> nn.Module:
        config = small("t5", d_model=WIDTH, d_kv=8, d_ff=32, num_layers=4, num_heads=2)
        config.decoder_start_token_id = 0
        return transformers.T5ForConditionalGeneration(config)


class Bart(_Pretrained):
    """BART with padded labels."""

    def network(self) -> nn.Module:
        sides = {
            f"{side}_{what}": n
            for side in ("encoder", "decoder")
            for what, n in (("layers", 4), ("attention_heads", 2), ("ffn_dim", 32))
        }
        config = small("bart", d_model=WIDTH, max_position_embeddings=16, **sides)
        config.decoder_start_token_id = 2
        return transformers.BartForConditionalGeneration(config)


class Whisper(_Pretrained):
    """Whisper: spectrograms and padded labels."""

    def network(self) -> nn.Module:
        sides = {
            f"{side}_{what}": n
            for side in ("encoder", "decoder")
            for what, n in (("layers", 4), ("attention_heads", 2), ("ffn_dim", 32))
        }
        config = small(
            "whisper",
            d_model=WIDTH,
            num_mel_bins=6,
            max_source_positions=8,
            max_target_positions=16,
            decoder_start_token_id=1,
            **sides,
        )
        return transformers.WhisperForConditionalGeneration(config)

    def batch(self, rows: int) -> Any:
        return {"input_features": torch.randn(rows, 6, 16), "labels": self.ids(rows, -100)}


class Gpt2(_Pretrained):
    """GPT-2 with padded labels."""

    def network(self) -> nn.Module:
        return transformers.GPT2LMHeadModel(
            small("gpt2", n_embd=WIDTH, n_layer=4, n_head=2, n_positions=16)
        )


_DECODER = {
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


class Llama(_Pretrained):
    """Llama with padded labels, the loss in the step over shifted logits."""

    def network(self) -> nn.Module:
        return transformers.LlamaForCausalLM(small("llama", **_DECODER))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        logits = self.model(**batch).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Mixtral(_Pretrained):
    """Mixtral with the router's loss over the batch."""

    def network(self) -> nn.Module:
        config = small("mixtral", **_DECODER, num_local_experts=3)
        config.output_router_logits = True
        return transformers.MixtralForCausalLM(config)


class Bert(_Pretrained):
    """BERT, masked language model."""

    def network(self) -> nn.Module:
        sizes = {k: v for k, v in _DECODER.items() if k != "num_key_value_heads"}
        return transformers.BertForMaskedLM(small("bert", **sizes))
