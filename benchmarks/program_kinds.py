"""Small programs of many kinds, each in the spirit of a well-known public example.

A class whose name has no leading underscore is a program, and so is every function of a `Variants`;
the docstring says what is special about it. Everything is drawn from the default generators, which
the caller seeds.
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torchmetrics
import transformers
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

INPUTS, WIDTH, CLASSES, LENGTH, TOKENS, BLOCKS = 12, 16, 5, 7, 24, 4
OF_CLASSES = {"task": "multiclass", "num_classes": CLASSES}


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

    normalised = False

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH) if self.normalised else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.conv(x)))


def stack(block: Callable[[], nn.Module]) -> nn.ModuleList:
    return nn.ModuleList(block() for _ in range(BLOCKS))


# --- blocks that are special ----------------------------------------------------------------------


class Normalised(ConvBlock):
    """With batch normalisation."""

    normalised = True


class Spectral(Block):
    """Both layers normalised by power iteration, in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(self.inner)
        self.outer = nn.utils.spectral_norm(self.outer)


class Scaled(Block):
    """Divides by a running scale, which it updates first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.mul_(0.5).add_(0.5 * x.abs().mean())
        return super().forward(x / self.scale)


class Recurrent(nn.Module):
    """A recurrent layer, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, state = self.cell(x, state)
        return x + y, state


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


class Experts(nn.Module):
    """Two experts, the best by row; returns the load-balancing loss or keeps it."""

    def __init__(self, *, keeps: bool = False) -> None:
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


class Limited(Experts):
    """Drops what its experts have no room for."""

    def forward(self, x: Tensor) -> Tensor:
        best = F.one_hot(self.router(x).argmax(-1), 2)
        place = (best.cumsum(0) * best).sum(-1, keepdim=True)
        out, _ = super().forward(x)
        return torch.where(place <= max(1, len(x) // 2), out, x)


_STRENGTH: ContextVar[float] = ContextVar("strength", default=1.0)


class Gated(Block):
    """Takes more than its arguments: a context variable, and an attribute."""

    gate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.gate is None else x * self.gate
        return super().forward(x) * _STRENGTH.get()


class Film(Block):
    """A block with a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.film = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, by: Tensor, gain: Tensor, shift: float) -> Tensor:
        return super().forward(x) * (1 + gain * self.film(by)) + shift


class Messages(Block):
    """A graph convolution."""

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return x + torch.zeros_like(x).index_add(0, edges[1], super().forward(x)[edges[0]])


class Program(LightningModule):
    """A classifier of vectors; programs override what makes them special.

    Attributes:
        block: Makes a block.
        parts: Makes what else the module has, or has in another form, by its name.
        resumes: Whether it is trained once more, from a checkpoint after its second batch.
    """

    named: ClassVar[dict[str, type[Program]]] = {}
    num_epochs = 1
    resumes = False
    sizes: ClassVar[list[int]] = [8, 8, 8]
    rate = 0.1
    num_inputs, num_outputs = INPUTS, CLASSES
    block: ClassVar[Callable[[], nn.Module]] = Block
    parts: ClassVar[dict[str, Callable[[], Any]]] = {}
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
        self.embed = nn.Linear(self.num_inputs, WIDTH)
        self.blocks = stack(type(self).block)
        self.head = nn.Linear(WIDTH, self.num_outputs)
        for name, make in self.parts.items():
            part = make()
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(self.embed(x)))

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted, y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(*batch)

    def step(self, x: Tensor, y: Tensor) -> Any:
        loss = self.loss(self(x), y)
        self.log("loss", loss)
        return loss

    def batch(self, rows: int) -> Any:
        return torch.randn(rows, INPUTS), torch.randint(CLASSES, (rows,))

    def loader(self) -> Any:
        return DataLoader([self.batch(rows) for rows in self.sizes], batch_size=None)

    @classmethod
    def made(cls) -> tuple[LightningModule, Any]:
        module = cls()
        return module, module.loader()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.rate)


class Variants:
    """Programs that differ from a base in one method: each function of a subclass is one."""

    def __init_subclass__(cls, base: type[Program] = Program, method: str = "step") -> None:
        for name, function in vars(cls).items():
            if isinstance(function, FunctionType):
                about = {"__doc__": function.__doc__, "__module__": __name__}
                members = {method: function, **about, **vars(function)}
                type(name, (members.pop("base", base),), members)


def having(**members: Any) -> Callable[[FunctionType], FunctionType]:
    """Give the program of a function more than its one method."""

    def give(function: FunctionType) -> FunctionType:
        vars(function).update(members)
        return function

    return give


class _Tokens(Program):
    num_outputs = TOKENS
    block = AttentionBlock

    def build(self) -> None:
        super().build()
        self.embed = nn.Embedding(TOKENS, WIDTH)

    def batch(self, rows: int) -> Any:
        ids = torch.randint(1, TOKENS, (rows, LENGTH))
        used = torch.randint(2, LENGTH + 1, (rows, 1))
        ids[torch.arange(LENGTH) >= used] = 0
        return ids[:, :-1], ids[:, 1:]


class _Images(Program):
    block = ConvBlock

    def build(self) -> None:
        super().build()
        self.embed = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.head = nn.Conv2d(WIDTH, CLASSES, 1)

    def batch(self, rows: int) -> Any:
        return torch.rand(rows, 3, 6, 6), torch.randint(CLASSES, (rows, 6, 6))


class _Momentum(Program):
    def build(self) -> None:
        super().build()
        self.teacher = stack(Block)
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


# --- batches --------------------------------------------------------------------------------------


def spectrograms(program: Program, rows: int) -> Any:
    lengths = torch.randint(LENGTH, 2 * LENGTH + 1, (rows,))
    target_lengths = torch.randint(1, 4, (rows,))
    targets = torch.randint(1, CLASSES, (int(target_lengths.sum()),))
    return torch.randn(rows, 2 * LENGTH, INPUTS), lengths, targets, target_lengths


def packed(program: Program, rows: int) -> Any:
    ends = torch.randint(2, 6, (rows,)).cumsum(0)
    total = int(ends[-1])
    y = torch.randint(CLASSES, (total,))
    return {"x": torch.randn(total, INPUTS), "y": y, "ends": ends}


def edges(program: Program, rows: int) -> Any:
    graph = torch.arange(rows).repeat_interleave(torch.randint(2, 5, (rows,)))
    edges = torch.randint(len(graph), (2, 3 * len(graph)))
    edges = edges[:, graph[edges[0]] == graph[edges[1]]]
    y = torch.randint(CLASSES, (rows,))
    return SimpleNamespace(x=torch.randn(len(graph), INPUTS), edges=edges, graph=graph, y=y)


def choices(program: Program, rows: int) -> Any:
    return torch.randint(TOKENS, (rows, 3, LENGTH)), torch.randint(3, (rows,))


def nested(program: Program, rows: int) -> Any:
    x, y = Program.batch(program, rows)
    names = [f"sample {row}" for row in range(rows)]
    return {"inputs": x, "targets": (y, torch.rand(rows)), "names": names, "scale": 0.5}


def by_time(program: Program, rows: int) -> Any:
    return tuple(part.T.contiguous() for part in _Tokens.batch(program, rows))


def trunk_by_time(program: Program, x: Tensor) -> Tensor:
    return Program.trunk(program, x.transpose(0, 1)).transpose(0, 1)


def longer_and_longer(program: Program) -> Any:
    made = [program.batch(rows) for rows in program.sizes]
    cut = [tuple(p[:, : 3 + i] for p in parts) for i, parts in enumerate(made)]
    return DataLoader(cut, batch_size=None)


def see_outputs(program: Program, outputs: Any, *_: Any) -> None:
    program.seen.append(outputs["out"].argmax(-1))


@dataclass
class Sample:
    """A batch as an object with a tensor that all rows share."""

    x: Tensor
    y: Tensor
    prior: Tensor


# --- losses ---------------------------------------------------------------------------------------


class Losses(Variants, method="loss"):
    """Functions of what was predicted and the labels."""

    def class_weights(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy with class weights."""
        return F.cross_entropy(predicted, y, weight=torch.linspace(0.1, 3, CLASSES))

    def ignored_labels(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy that ignores a class and smooths labels."""
        return F.cross_entropy(predicted, y, ignore_index=1, label_smoothing=0.1)

    @having(base=_Images)
    def segmentation(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Cross-entropy of pixels, some ignored."""
        return F.cross_entropy(predicted, y, ignore_index=0)

    @having(rate=0.01)
    def summed_loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        """A sum over the batch."""
        return F.cross_entropy(predicted, y, reduction="sum")

    def focal(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Focal loss over the number of positives."""
        target = F.one_hot(y, CLASSES)[:, 1:].float()
        chance = predicted[:, 1:].sigmoid()
        missed = torch.where(target > 0, 1 - chance, chance)
        return -(missed**2 * (1 - missed).log()).sum() / target.sum().clamp_min(1)

    def cox(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Cox partial likelihood: risk sets across the batch."""
        risk = predicted[:, 0][torch.argsort(predicted[:, 1].detach(), descending=True)]
        seen = (y > 0).float()
        return -((risk - risk.logcumsumexp(0)) * seen).sum() / seen.sum().clamp_min(1)

    @having(parts={"log_variance": lambda: nn.Parameter(torch.zeros(2))})
    def uncertainty(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Two tasks with learned weights outside of the blocks."""
        losses = torch.stack([F.cross_entropy(predicted, y), predicted.square().sum() / 50])
        return (losses * (-self.log_variance).exp() + self.log_variance).sum()

    def hard_triplets(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Triplets with the hardest positive and negative of the batch."""
        far = torch.cdist(predicted, predicted)
        same = y[:, None] == y[None]
        hard = far.masked_fill(~same, 0).amax(1) - far.masked_fill(same, 99.0).amin(1)
        return F.relu(1 + hard).mean()

    def weight_decay(self, predicted: Tensor, y: Tensor) -> Tensor:
        """An L2 term over all parameters in the step."""
        norm = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(predicted, y) + 0.01 * norm

    def reinforce(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Advantages, normalised over the batch."""
        reward = y.float() - 1
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        policy = torch.distributions.Categorical(logits=predicted)
        action = policy.sample()
        return -(advantage * policy.log_prob(action)).mean() - 0.01 * policy.entropy().mean()


class Steps(Variants):
    """Steps of a batch (x, y)."""

    def log_of_mean(self, x: Tensor, y: Tensor) -> Tensor:
        """The logarithm of a mean; logs exp(loss)."""
        loss = F.cross_entropy(self(x), y)
        self.log("perplexity", loss.exp(), prog_bar=True)
        return loss.log1p()

    def sim_clr(self, x: Tensor, y: Tensor) -> Tensor:
        """SimCLR: two views joined along the batch, NT-Xent."""
        z = F.normalize(self(torch.cat([x, x + 0.1 * torch.randn_like(x)])), dim=-1)
        alike = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -9e9)
        loss = F.cross_entropy(alike, torch.arange(len(z)).roll(len(x)))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def barlow_twins(self, x: Tensor, y: Tensor) -> Tensor:
        """Cross-correlation of features over the batch."""
        a, b = (self(view) for view in (x, x + 0.1 * torch.randn_like(x)))
        a, b = ((z - z.mean(0)) / (z.std(0) + 1e-3) for z in (a, b))
        return (a.T @ b / len(x) - torch.eye(CLASSES)).square().sum() / 10

    @having(batch=lambda self, rows: [torch.randn(rows, INPUTS), torch.randn(rows, INPUTS)])
    def multiple_negatives(self, x: Tensor, y: Tensor) -> Tensor:
        """Anchors and positives as a list of two batches, in-batch negatives."""
        a, b = (F.normalize(self(part), dim=-1) for part in (x, y))
        return F.cross_entropy(20 * a @ b.T, torch.arange(len(a)))

    def pseudo_labels(self, x: Tensor, y: Tensor) -> Tensor:
        """FixMatch: labels from a pass in eval mode without gradients, masked by confidence."""
        self.eval()
        with torch.no_grad():
            sure, label = self(x).softmax(-1).max(-1)
        self.train()
        mask = (sure > sure.median()).float()
        unlabelled = F.cross_entropy(self(x + 0.1 * torch.randn_like(x)), label, reduction="none")
        return F.cross_entropy(self(x), y) + (unlabelled * mask).sum() / mask.sum().clamp_min(1)

    def masked_autoencoder(self, x: Tensor, y: Tensor) -> Tensor:
        """MAE: patches are shuffled and dropped, the loss counts those that were."""
        patches = x.view(len(x), 6, 2).repeat(1, 1, 6)
        noise = torch.rand(len(x), 6)
        order = noise.argsort(1)
        kept = patches.gather(1, order[:, :3, None].expand(-1, -1, INPUTS))
        guess = self(kept).mean(1, keepdim=True)
        error = (guess[..., :1] - patches).square().mean(-1)
        mask = (noise.argsort(1).argsort(1) >= 3).float()
        return (error * mask).sum() / mask.sum()

    @having(num_outputs=INPUTS)
    def diffusion(self, x: Tensor, y: Tensor) -> Tensor:
        """Times and noise drawn in the step."""
        t = torch.randint(1, 10, (len(x), 1)) / 10
        noise = torch.randn_like(x)
        loss = F.mse_loss(self((1 - t).sqrt() * x + t.sqrt() * noise), noise)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def pinn(self, x: Tensor, y: Tensor) -> Tensor:
        """A physics-informed network: derivatives of outputs by inputs."""
        x = x.requires_grad_()
        u = self(x)[:, 0]
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        loss = (slope[:, 0] - u).square().mean() + slope.square().mean()
        self.log("residual", loss)
        return loss

    def gradient_penalty(self, x: Tensor, y: Tensor) -> Tensor:
        """A penalty on the gradient of the loss by the embedding."""
        x = self.embed(x)
        loss = F.cross_entropy(self.head(self.trunk(x)), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.norm()

    def adversarial(self, x: Tensor, y: Tensor) -> Tensor:
        """FGSM: the gradient by the inputs makes the inputs of a second pass."""
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(self(x), y), x)
        return F.cross_entropy(self((x + 0.1 * slope.sign()).detach()), y)

    def gradient_hook(self, x: Tensor, y: Tensor) -> Tensor:
        """A tensor hook on a block's output reverses the gradient."""
        hidden = self.trunk(self.embed(x))
        domain = hidden * 1
        domain.register_hook(lambda gradient: -0.3 * gradient)
        return F.cross_entropy(self.head(hidden), y) + domain.square().mean()

    def early_exit(self, x: Tensor, y: Tensor) -> Tensor:
        """A loss after every block."""
        x, losses = self.embed(x), []
        for block in self.blocks:
            x = block(x)
            losses.append(F.cross_entropy(self.head(x), y))
        return torch.stack(losses).mean()

    @having(parts={"target": lambda: nn.Linear(WIDTH, CLASSES)})
    def target_network(self, x: Tensor, y: Tensor) -> Tensor:
        """DQN: a target gets the weights after the forward pass, before the backward pass."""
        x = self.trunk(self.embed(x))
        value = self.head(x).gather(1, y[:, None])[:, 0]
        with torch.no_grad():
            wanted = y + 0.9 * self.target(x).max(1).values
        self.target.load_state_dict(self.head.state_dict())
        return F.mse_loss(value, wanted)

    @having(parts={"value": lambda: nn.Linear(WIDTH, 1)})
    def ppo(self, x: Tensor, action: Tensor) -> Tensor:
        """Discounted returns along the batch, a clipped ratio, several heads."""
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

    @having(
        num_epochs=2,
        parts={
            "accuracy": lambda: torchmetrics.Accuracy(**OF_CLASSES, average="macro"),
            "auc": lambda: torchmetrics.AUROC(**OF_CLASSES),
        },
    )
    def metrics(self, x: Tensor, y: Tensor) -> Tensor:
        """Torchmetrics, updated in the step and logged."""
        out = self(x)
        self.log("step accuracy", self.accuracy(out, y))
        self.auc.update(out.softmax(-1), y)
        self.log("auc", self.auc, on_step=False, on_epoch=True)
        return F.cross_entropy(out, y)

    @having(parts={"plain": lambda: {"f1": torchmetrics.F1Score(**OF_CLASSES)}, "scores": list})
    def metrics_computed(self, x: Tensor, y: Tensor) -> Tensor:
        """A metric computed and reset in the step, one in a plain dict."""
        out = self(x)
        metric = self.plain["f1"]
        metric.update(out, y)
        self.scores.append(float(metric.compute()))
        metric.reset()
        return F.cross_entropy(out, y)

    @having(parts={"seen": list}, on_train_batch_end=see_outputs)
    def outputs(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        """A dict of outputs, read in on_train_batch_end."""
        out = self(x)
        return {"loss": F.cross_entropy(out, y), "out": out.detach(), "names": [str(len(x))]}

    @having(
        rate=0.005, num_inputs=4, num_outputs=INPUTS, parts={"code": lambda: nn.Linear(INPUTS, 8)}
    )
    def vae(self, x: Tensor, y: Tensor) -> Tensor:
        """A VAE: summed reconstruction and KL, noise drawn in the step."""
        x = x.sigmoid()
        mean, log = self.code(x).chunk(2, -1)
        out = self(mean + torch.randn_like(mean) * (log / 2).exp())
        reconstruction = F.binary_cross_entropy_with_logits(out, x, reduction="sum")
        kl = -0.5 * (1 + log - mean.square() - log.exp()).sum()
        self.log_dict({"reconstruction": reconstruction, "kl": kl})
        return reconstruction + kl

    @having(block=Gated)
    def past_arguments(self, x: Tensor, y: Tensor) -> Tensor:
        """Blocks that take a context variable, and an attribute with the batch's rows."""
        _STRENGTH.set(0.8)
        self.blocks[2].gate = x[:, :1].sigmoid()
        return F.cross_entropy(self(x), y)

    @having(block=Experts)
    def mixture_of_experts(self, x: Tensor, y: Tensor) -> Tensor:
        """Every block returns a balance of the batch besides."""
        x, balance = self.embed(x), 0
        for block in self.blocks:
            x, more = block(x)
            balance = balance + more
        self.log("balance", balance)
        return F.cross_entropy(self.head(x), y) + balance

    @having(parts={"automatic_optimization": bool})
    def sam(self, x: Tensor, y: Tensor) -> None:
        """Sharpness-aware minimisation: two passes, manual optimization."""
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

    @having(batch=spectrograms)
    def ctc(self, x: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
        """CTC: (time, batch, class) outputs, lengths, targets in one line."""
        log = self(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log, targets, lengths, target_lengths, zero_infinity=True)

    @having(parts={"steps": int, "samples": int, "average": float})
    def counters(self, x: Tensor, y: Tensor) -> Tensor:
        """Numbers and a running mean in `self`; a loss scaled by a warm-up of steps."""
        self.steps += 1
        self.samples += len(x)
        loss = F.cross_entropy(self(x), y)
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss * min(1.0, self.steps / 5)


class WholeSteps(Variants, method="training_step"):
    """Steps of other batches than (x, y), and such that ask for their number."""

    def dataloader_iter(self, dataloader_iter: Iterable[Any]) -> Tensor:
        """Training_step takes the iterator."""
        (x, y), batch_idx, _ = next(dataloader_iter)
        return F.cross_entropy(self(x), y) / (1 + batch_idx)

    def skipped_steps(self, batch: Any, batch_idx: int) -> Tensor | None:
        """None for some batches."""
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return None if batch_idx == 1 else loss

    @having(
        parts={
            "buffer": lambda: deque[Tensor](maxlen=20),
            "target": lambda: nn.Sequential(
                nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)
            ).requires_grad_(False),
        }
    )
    def replay_buffer(self, batch: Any, batch_idx: int) -> Tensor:
        """DQN: a replay buffer in `self`, a target network copied every other step."""
        self.buffer.extend(batch[0])
        x = torch.stack(random.sample(list(self.buffer), 8))
        with torch.no_grad():
            wanted = x[:, 0] + 0.9 * self.target(x.roll(1, 1)).amax(-1)
            if batch_idx % 2:
                self.target[2].weight.copy_(self.head.weight)
        return F.smooth_l1_loss(self(x).amax(-1), wanted)

    @having(batch=nested)
    def batch_mutation(self, batch: Any, batch_idx: int) -> Tensor:
        """A batch with text, numbers and nested parts, from which the step takes some out."""
        names, scale = batch.pop("names"), batch.pop("scale")
        x, (y, weight) = batch.pop("inputs"), batch["targets"]
        loss = F.cross_entropy(self(x), y, reduction="none") * weight * scale
        self.log("names", float(len(names)))
        return loss.mean()

    @having(batch=lambda self, rows: Sample(*Program.batch(self, rows), prior=torch.rand(rows)))
    def shared_tensor(self, batch: Sample, batch_idx: int) -> Tensor:
        """A batch as a dataclass; one of its tensors has no row per sample, but as many."""
        out = self(batch.x) + batch.prior[:CLASSES]
        return F.cross_entropy(out, batch.y) + (batch.prior.sum() - out.mean()).square()

    @having(block=AttentionBlock, batch=packed)
    def packed(self, batch: Any, batch_idx: int) -> Tensor:
        """Sequences packed into one row of tokens; attention within each of them."""
        x, y = batch["x"], batch["y"]
        part = torch.bucketize(torch.arange(len(x)), batch["ends"], right=True)
        hidden = self.embed(x)[None]
        for block in self.blocks:
            hidden = block(hidden, part[:, None] == part[None])
        return F.cross_entropy(self.head(hidden[0]), y)

    @having(block=Messages, batch=edges)
    def graphs(self, batch: Any, batch_idx: int) -> Tensor:
        """Graphs in one batch: messages along edges in the blocks, a mean of each graph."""
        x = self.embed(batch.x)
        for block in self.blocks:
            x = block(x, batch.edges)
        graphs = torch.zeros(len(batch.y), WIDTH).index_add(0, batch.graph, x)
        loss = F.cross_entropy(self.head(graphs / batch.graph.bincount()[:, None]), batch.y)
        self.log("loss", loss, batch_size=len(batch.y))
        return loss


class Reversed(torch.autograd.Function):
    """Gradient reversal, as domain adaptation has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Trunks(Variants, method="trunk"):
    """Orders in which blocks are called."""

    def shared_blocks(self, x: Tensor) -> Tensor:
        """ALBERT: the blocks are called twice."""
        return Program.trunk(self, Program.trunk(self, x))

    def layer_drop(self, x: Tensor) -> Tensor:
        """Blocks are skipped at random, but for the first."""
        for index, block in enumerate(self.blocks):
            if index == 0 or torch.rand(()) > 0.4:
                x = block(x)
        return x

    def checkpointed(self, x: Tensor) -> Tensor:
        """Activation checkpointing by the user, as torchvision and timm do it."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def checkpointed_with_code(self, x: Tensor) -> Tensor:
        """Activation checkpointing of blocks and what lies between."""
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: 2 * block(x).tanh(), x, use_reentrant=False)
        return x

    @having(base=_Images)
    def skip_connections(self, x: Tensor) -> Tensor:
        """U-Net: outputs of the first blocks join the last ones'."""
        skips: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x = block(x + skips.pop() if index > 2 else x)
            skips.append(x)
        return x + torch.stack(skips).mean(0)

    def written_outputs(self, x: Tensor) -> Tensor:
        """Code between the blocks writes into what they gave, adds up in place, turns gradients."""
        total = torch.zeros_like(x)
        for block in self.blocks:
            x = block(x)
            x[:, :2] *= 0.5
            x.view(-1).mul_(0.9)
            total += Reversed.apply(x)  # type: ignore[no-untyped-call]
        return x + 0.1 * total

    @having(block=Film, parts={"gain": lambda: nn.Parameter(torch.tensor(0.5))})
    def conditioned(self, x: Tensor) -> Tensor:
        """FiLM: blocks are called with keywords, a scalar and a number."""
        by = x.mean(0, keepdim=True)
        for block in self.blocks:
            x = block(x, by=by, gain=self.gain, shift=0.1)
        return x


class Clip(Program):
    """CLIP: two towers, in-batch negatives, a learned temperature."""

    parts: ClassVar = {
        "words": lambda: nn.Embedding(TOKENS, WIDTH),
        "text": lambda: stack(AttentionBlock),
        "temperature": lambda: nn.Parameter(torch.tensor(1.0)),
    }

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


# --- teachers and queues --------------------------------------------------------------------------


class Taught(Variants, base=_Momentum):
    """Steps with a teacher in blocks of its own."""

    def byol(self, x: Tensor, y: Tensor) -> Tensor:
        """A momentum teacher, updated at the end of training_step."""
        loss = -F.cosine_similarity(self(x), self.taught(x + 0.1), dim=-1).mean()
        self.move()
        self.log("loss", loss)
        return loss

    @having(
        parts={
            "queue": lambda: F.normalize(torch.randn(24, CLASSES), dim=-1),
            "place": lambda: torch.zeros((), dtype=torch.long),
        }
    )
    def mo_co(self, x: Tensor, y: Tensor) -> Tensor:
        """A momentum teacher, updated first, and a queue of negatives in a buffer."""
        self.move()
        q, k = F.normalize(self(x), dim=-1), F.normalize(self.taught(x + 0.1), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
        place = int(self.place)
        self.queue[place : place + len(k)] = k
        self.place[...] = (place + len(k)) % len(self.queue)
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))

    @having(
        parts={"center": lambda: torch.zeros(1, CLASSES)},
        on_train_batch_end=lambda self, *_: self.move(),
    )
    def dino(self, x: Tensor, y: Tensor) -> Tensor:
        """A teacher whose outputs are centred by a running mean over batches."""
        wanted = self.taught(x)
        loss = F.cross_entropy(self(x + 0.1), ((wanted - self.center) / 0.3).softmax(-1))
        self.center = 0.9 * self.center + 0.1 * wanted.mean(0, keepdim=True)
        return loss

    def distillation(self, x: Tensor, y: Tensor) -> Tensor:
        """A frozen teacher in blocks of its own."""
        student, teacher = self(x).log_softmax(-1), self.taught(x).softmax(-1)
        loss = F.kl_div(student, teacher, reduction="batchmean") + F.nll_loss(student, y)
        self.log("agreement", (student.argmax(-1) == teacher.argmax(-1)).float().mean())
        return loss


# --- sequences ------------------------------------------------------------------------------------


class TokenLosses(Variants, base=_Tokens, method="loss"):
    """Language models from (x, y)."""

    def lm_from_tuple(self, predicted: Tensor, y: Tensor) -> Tensor:
        """A language model from (x, y), padding ignored."""
        return F.cross_entropy(predicted.flatten(0, 1), y.flatten(), ignore_index=0)

    def lm_mean_over_sequences(self, predicted: Tensor, y: Tensor) -> Tensor:
        """A mean of every sequence's mean."""
        losses = F.cross_entropy(predicted.mT, y, reduction="none")
        mask = (y != 0).float()
        return ((losses * mask).sum(1) / mask.sum(1)).mean()

    @having(loader=longer_and_longer)
    def different_lengths(self, predicted: Tensor, y: Tensor) -> Tensor:
        """Every batch has sequences of another length."""
        return F.cross_entropy(predicted.mT, y)

    @having(batch=by_time, trunk=trunk_by_time)
    def time_major(self, predicted: Tensor, y: Tensor) -> Tensor:
        """(time, batch) tensors."""
        return F.cross_entropy(predicted.flatten(0, 1), y.flatten(), ignore_index=0)


class TokenSteps(Variants, base=_Tokens):
    """Steps on tokens."""

    def lm_over_tokens(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """A sum over the batch's count of tokens, z-loss besides; logs both."""
        logits = self(x)
        losses = F.cross_entropy(logits.mT, y, reduction="none") * (y != 0)
        z = logits.logsumexp(-1).square().mean()
        self.log("tokens", (y != 0).sum().float(), reduce_fx="sum")
        loss = losses.sum() / (y != 0).sum() + 1e-2 * z
        return {"loss": loss, "z": z.detach(), "n": losses[:, 0]}

    def masked_lm(self, ids: Tensor, y: Tensor) -> Tensor:
        """BERT: tokens are masked at random in the step."""
        hidden = torch.rand(ids.shape) < 0.4
        labels = ids.masked_fill(~hidden, -100)
        return F.cross_entropy(self(ids.masked_fill(hidden, 3)).mT, labels)

    @having(parts={"positions": lambda: torch.randn(1, LENGTH, WIDTH)})
    def causal_mask(self, ids: Tensor, y: Tensor) -> Tensor:
        """A mask and positions of the step's own, shared by all rows, passed to every block."""
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        padded = mask & (ids != 0)[:, None, None]
        x = self.embed(ids) + self.positions[:, : ids.shape[1]]
        for index, block in enumerate(self.blocks):
            x = block(x, mask=mask if index % 2 else padded)
        return F.cross_entropy(self.head(x).mT, y)

    @having(parts={"decoder": lambda: stack(lambda: AttentionBlock(crossed=True))})
    def encoder_decoder(self, source: Tensor, target: Tensor) -> Tensor:
        """An encoder and a decoder with cross-attention; padded labels."""
        memory = self.trunk(self.embed(source))
        x = self.embed(target[:, :-1])
        for block in self.decoder:
            x = block(x, None, memory, memory_mask=(source != 0)[:, None, None])
        logits = self.head(x)
        loss = F.cross_entropy(logits.mT, target[:, 1:], ignore_index=0)
        right = (logits.argmax(-1) == target[:, 1:])[target[:, 1:] != 0]
        self.log("accuracy", right.float().mean())
        return loss

    @having(batch=choices)
    def multiple_choice(self, ids: Tensor, label: Tensor) -> Tensor:
        """Choices flattened into the batch and back."""
        scores = self(ids.flatten(0, 1)).mean((1, 2)).view(-1, 3)
        return F.cross_entropy(scores, label)

    @having(sizes=[8] * 4, block=Recurrent, parts={"hidden": lambda: [None] * BLOCKS})
    def stateful_rnn(self, x: Tensor, y: Tensor) -> Tensor:
        """Truncated backpropagation: hidden states stay in `self`, (time, batch) layout."""
        x, y = self.embed(x.T), y.T
        for index, block in enumerate(self.blocks):
            x, state = block(x, self.hidden[index])
            self.hidden[index] = state.detach()
        return F.cross_entropy(self.head(x).permute(1, 2, 0), y.T)

    @having(block=lambda: AttentionBlock(crossed=True), parts={"memories": list})
    def memory(self, ids: Tensor, y: Tensor) -> Tensor:
        """Transformer-XL: the blocks' last inputs are the next batch's memory."""
        x, kept = self.embed(ids), []
        for index, block in enumerate(self.blocks):
            kept.append(x.detach())
            x = block(x, memory=self.memories[index] if self.memories else None)
        self.memories = kept
        return F.cross_entropy(self.head(x).mT, y)


# --- images ---------------------------------------------------------------------------------------


class ImageSteps(Variants, base=_Images):
    """Steps on images."""

    def mixup(self, x: Tensor, y: Tensor) -> Tensor:
        """Mixup: a permutation and a Beta draw in the step."""
        share = float(torch.distributions.Beta(0.4, 0.4).sample())
        order = torch.randperm(len(x))
        out = self(share * x + (1 - share) * x[order])
        self.log("share", share)
        return share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])

    def random_crop(self, x: Tensor, y: Tensor) -> Tensor:
        """Python's random numbers in the step."""
        top, flip = random.randrange(3), random.random() < 0.5
        if flip:
            x, y = x.flip(-1), y.flip(-1)
        return F.cross_entropy(self(x[:, :, top : top + 4]), y[:, top : top + 4])


class Detection(Program):
    """A list of images of several sizes and a list of dicts: tuple(zip(*batch))."""

    num_outputs = 4 + CLASSES
    parts: ClassVar = {"embed": lambda: nn.Conv2d(3, WIDTH, 3, padding=1)}

    def step(self, images: Any, targets: Any) -> Tensor:
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


# --- generative -----------------------------------------------------------------------------------


class Gan(Program):
    """A GAN with two optimizers, manual optimization."""

    num_outputs = INPUTS
    parts: ClassVar = {
        "judge": lambda: nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)),
        "automatic_optimization": bool,
    }

    def step(self, x: Tensor, y: Tensor) -> None:
        first, second = self.optimizers()
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


# --- what a step keeps ----------------------------------------------------------------------------


class RetainGrad(Program):
    """Retain_grad on a block's output, read after backward."""

    parts: ClassVar = {"norms": list}

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.kept = self.trunk(self.embed(x))
        self.kept.retain_grad()
        return F.cross_entropy(self.head(self.kept), y)

    def on_after_backward(self) -> None:
        self.norms.append(float(self.kept.grad.norm()))
        del self.kept


class Lists(Program):
    """Outputs appended to a list, joined at the end of the epoch."""

    num_epochs = 2
    parts: ClassVar = {"outputs": list, "labels": list, "joined": list}

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        out = self(x)
        loss = F.cross_entropy(out, y)
        self.outputs.append(out.detach())
        self.labels.extend(y.tolist())
        return loss

    def on_train_epoch_end(self) -> None:
        self.joined.append(torch.cat(self.outputs).mean(0))
        self.log("norm", self.joined[-1].norm())
        self.outputs.clear()


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

    parts: ClassVar = {"calls": int, "means": dict}

    def build(self) -> None:
        super().build()
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


# --- blocks that are special ----------------------------------------------------------------------


class KeptBalance(Program):
    """Every block keeps its balance as an attribute."""

    block = lambda: Experts(keeps=True)  # noqa: E731

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predicted, y) + sum(b.balance for b in self.blocks)

    def on_train_batch_end(self, *_: Any) -> None:
        for block in self.blocks:
            block.balance = block.balance.detach()


# --- batches --------------------------------------------------------------------------------------


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


class Accumulation(Program):
    """Accumulation, clipping and a scheduler."""

    sizes: ClassVar = [8] * 5
    flags: ClassVar = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


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


# --- no code of their own -------------------------------------------------------------------------


def program(name: str, base: type[Program], about: str, **members: Any) -> None:
    type(name, (base,), {"__doc__": about, "__module__": __name__, **members})


def normalised_head() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.3), nn.Linear(WIDTH, CLASSES))


program("Classifier", Program, "Mean cross-entropy.")
program("OddLast", Program, "A last batch of odd size.", sizes=[8, 8, 5], num_epochs=2)
program("BatchOfOne", Program, "Batches of one sample, then of three.", sizes=[1, 3, 1])
program("HeadDropout", Program, "Dropout outside of the blocks.", parts={"head": with_dropout})
program("BatchNorm", _Images, "Batch normalisation in the blocks.", block=Normalised)
program("BatchNormHead", Program, "Normalisation after them.", parts={"head": normalised_head})
program("VqVae", Program, "Codes in the blocks, moved by averages.", block=VectorQuantizer)
program("SpectralNorm", Program, "Spectral normalisation in the blocks.", block=Spectral)
program("RunningScales", Program, "Blocks that read and update a running scale.", block=Scaled)
program("Capacity", Program, "Experts that have no room for all rows.", block=Limited)


# --- transformers ---------------------------------------------------------------------------------


class _Pretrained(Program):
    """A model of transformers, by the name of its class and its configuration."""

    rate = 0.05
    network: ClassVar[str]
    settings: ClassVar[dict[str, Any]] = {}

    def build(self) -> None:
        kind = type(self).__name__.lower()
        self.model = getattr(transformers, self.network)(small(kind, **self.settings)).train()

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
        mask = (ids > 0).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": self.ids(rows, -100)}


def small(kind: str, **settings: Any) -> Any:
    """A tiny configuration without dropout."""
    sizes = {"vocab_size": TOKENS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **settings})
    for name, value in vars(config).items():
        if ("dropout" in name or "layerdrop" in name or name.endswith("pdrop")) and value:
            setattr(config, name, 0.0)
    return config


def pretrained(network: str, about: str, **settings: Any) -> None:
    name = re.sub("(For|LMHead).*", "", network)
    program(name.capitalize(), _Pretrained, about, network=network, settings=settings)


GPT2 = {"n_embd": WIDTH, "n_layer": 4, "n_head": 2, "n_positions": 16}
_SIDES = {"d_model": WIDTH, "encoder_layers": 4, "decoder_layers": 4}
_SIDES |= {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
_SIDES |= {f"{side}_ffn_dim": 32 for side in ("encoder", "decoder")}
_DECODER = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 4}
_DECODER |= {"num_attention_heads": 2, "max_position_embeddings": 16}

pretrained("GPT2LMHeadModel", "GPT-2 with padded labels.", **GPT2)
pretrained("BertForMaskedLM", "BERT, masked language model.", **_DECODER)
pretrained(
    "T5ForConditionalGeneration",
    "T5 with padded labels.",
    d_model=WIDTH,
    d_kv=8,
    d_ff=32,
    num_layers=4,
    num_heads=2,
    decoder_start_token_id=0,
)
pretrained(
    "BartForConditionalGeneration",
    "BART with padded labels.",
    **_SIDES,
    max_position_embeddings=16,
    decoder_start_token_id=2,
)
pretrained(
    "MixtralForCausalLM",
    "Mixtral with the router's loss over the batch.",
    **_DECODER,
    num_key_value_heads=1,
    num_local_experts=3,
    output_router_logits=True,
)


class Whisper(_Pretrained):
    """Whisper: spectrograms and padded labels."""

    network = "WhisperForConditionalGeneration"
    settings = _SIDES | {"num_mel_bins": 6, "max_source_positions": 8, "max_target_positions": 16}
    settings |= {"decoder_start_token_id": 1}

    def batch(self, rows: int) -> Any:
        return {"input_features": torch.randn(rows, 6, 16), "labels": self.ids(rows, -100)}


class Llama(_Pretrained):
    """Llama with padded labels, the loss in the step over shifted logits."""

    network = "LlamaForCausalLM"
    settings = _DECODER | {"num_key_value_heads": 1}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch.pop("labels")
        logits = self.model(**batch).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
