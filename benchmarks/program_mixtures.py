"""Programs that are put together at random: `programs.py --mixtures 0 400` judges 400 of them.

People who write programs to try something write what they think of. Here a program is text, with
lines drawn from tables: what a block computes and keeps, what is around the blocks, the loss, what
is logged and counted, hooks, callbacks, evaluation, what is frozen or shared, the optimizers, the
Trainer's flags, the forms and sizes of batches. A number gives the same program every time; its
text is kept in a folder of the temporary directory.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from program_kinds import Program

_IN_BLOCK = {
    "attribute": "self.calls += 1; x = x * (1 + 0.1 / self.calls)",
    "batch_norm": "x = x + self.batch_norm(x.flatten(0, -2)).view_as(x)",
    "branch": "x = x + self.one(x) if float(x.detach().sum()) > 0 else x - self.one(x)",
    "branch_by_row": "x = torch.stack([r + self.one(r) if r.sum() > 0 else -r for r in x])",
    "buffer": "self.count += 1; x = x * (1 + 0.01 * self.count)",
    "centre": "x = x - 0.1 * x.mean(0, keepdim=True)",
    "chain": "for i in range(3): x = x + checkpoint(lambda y: self.one(y).tanh() / (1 + i), x, use_reentrant=False)",
    "checkpoint": "x = x + checkpoint(self.one, x, use_reentrant=False)",
    "count": "COUNTS['blocks'] += 1; x = x + self.one(x)",
    "cumsum": "x = x + 0.1 * x.cumsum(0)",
    "dropout": "x = F.dropout(x, 0.0, self.training)",
    "entries": "x = torch.stack([r * (1 + i % 2) for i, r in enumerate(x)])",
    "function": "x = x + Swish.apply(self.one(x))",
    "gate": "x = x + self.gate * self.one(x.flip(0))",
    "gram": "f = x.flatten(1); x = x + 0.05 * ((f @ f.T).softmax(-1) @ f).view_as(x)",
    "halves": "n = len(x) // 2; x = torch.cat([x[:n] + 0.1, x[n:] - 0.1])",
    "group_norm": "x = x + F.group_norm(x.flatten(0, -2), 4).view_as(x)",
    "hook": "x = x + self.one(x); x.requires_grad and x.register_hook(lambda g: 0.9 * g)",
    "hook_mixes": "x.requires_grad and x.register_hook(lambda g: g / (1e-3 + g.norm()))",
    "item": "x = x * (1 + 0.01 * x.detach().mean().item())",
    "largest": "x = x / (1 + 0.1 * x.detach().abs().max())",
    "leaves": "self.left = x.square().flatten(1).mean(1); x = x + self.one(x)",
    "leaves_mean": "self.left = x.square().mean(); x = x + self.one(x)",
    "length": "x = x + self.one(x) / len(x)",
    "limit": "x = x + self.one(x) * (1.0 if len(x) > 3 else 0.5)",
    "list": "self.means.append(float(x.detach().mean())); x = x + self.one(x)",
    "mlp": "x = x + self.two(F.gelu(self.one(self.norm(x))))",
    "no_grad": "with torch.no_grad(): size = x.norm(dim=-1, keepdim=True)\n        x = x / (1 + size)",
    "numpy": "x = x + torch.from_numpy(x.detach().cpu().numpy().mean(-1, keepdims=True)).to(x)",
    "owner": "x = x * (1 + 0.1 * self.owner[0].rate)",
    "places": "x = x + 0.01 * torch.arange(len(x)).to(x).view(-1, *[1] * (x.dim() - 1))",
    "quantized": "x = x + (torch.round(x * 8) / 8 - x).detach()",
    "quantized_by_all": "s = x.detach().abs().amax(); x = x + (torch.round(x / s * 99) * s / 99 - x).detach()",
    "rotated": "x = x + 0.1 * torch.cat([x[1:], x[:1]])",
    "running": "self.mean.lerp_(x.detach().flatten(0, -2).mean(0), 0.1); x = x - 0.1 * self.mean",
    "sorted": "x = x + 0.1 * x.sort(dim=0).values",
    "spectrum": "x = x + torch.fft.irfft(torch.fft.rfft(x) * 0.5, n=WIDTH)",
    "spread": "x = x / (1 + x.std())",
    "threshold": "s = x.flatten(1).norm(dim=1); k = s >= s.topk(max(1, len(x) // 2)).values[-1]\n"
    "        x = x + x * k.float().view(-1, *[1] * (x.dim() - 1))",
    "tokens": "x = torch.where(x > x.mean(-1, keepdim=True), x, 0.5 * x)",
    "weight_norm": "x = x + F.linear(x, self.one.weight / self.one.weight.norm())",
}
_HEAD = {
    "class_token": "h = torch.cat([self.start.expand(len(x), 1, -1), self.embed(x)[:, None]], 1)",
    "centred": "h = self.embed(x - x.mean(0))",
    "first_half": "h = self.embed(x[: max(1, len(x) // 2)])",
    "flat": "h = (self.embed(x)[:, None] + self.places).flatten(0, 1)",
    "mask": "h = self.embed(x) * (torch.rand(len(x), 1) > 0.2).to(x)",
    "mixup": "p = torch.randperm(len(x)); w = random.random(); h = self.embed(w * x + (1 - w) * x[p])",
    "noise": "h = self.embed(x + 0.1 * torch.randn_like(x))",
    "permuted": "p = torch.randperm(len(x)); h = self.embed(x[p]); y = y[p]",
    "plain": "h = self.embed(x)",
    "sequence": "h = self.embed(x)[:, None] + self.places",
    "state": "self.seen = 0.9 * self.seen + float(x.mean()); h = self.embed(x) + 0.01 * self.seen",
    "time_first": "h = (self.embed(x)[:, None] + self.places).transpose(0, 1)",
    "two_views": "h = torch.cat([self.embed(x), self.embed(x.flip(-1))])",
}
_BETWEEN = {
    "centre": "for block in self.blocks: h = block(h) - 0.1 * h.mean(0, keepdim=True)",
    "cross": "m = h\n        for block in self.blocks: m = block(m)\n"
    "        for block in self.more: h = block(h + 0.1 * m)",
    "detached": "for i, block in enumerate(self.blocks): h = block(h.detach() if i == 2 else h)",
    "kept": "hs = []\n        for block in self.blocks: h = block(h); hs.append(h)\n        h = sum(hs) / 4",
    "loop": "for block in self.blocks: h = block(h)",
    "no_grad_too": "with torch.no_grad():\n            t = h\n            for block in self.blocks: t = block(t)\n"
    "        for block in self.blocks: h = block(h)\n        h = h + 0.1 * t",
    "random_depth": "for block in self.blocks:\n            if random.random() < 0.7: h = block(h)",
    "reversed": "for block in reversed(self.blocks): h = block(h)",
    "scaled": "for i, block in enumerate(self.blocks): h = block(h) * (1 - 0.1 * i)",
    "sequential": "h = nn.Sequential(*self.blocks)(h)",
    "skip": "s = h\n        for i, block in enumerate(self.blocks): h = block(h) + 0.1 * s * (i % 2)",
    "three_passes": "for _ in range(3):\n            for block in self.more: h = block(h)\n            h = h.tanh()",
    "turns": "for one, other in zip(self.blocks, self.more): h = other(one(h))",
    "twice": "for block in [*self.blocks, *self.blocks]: h = block(h)",
}
_LOSS = {
    "advantage": "a = z.detach().amax(-1); a = (a - a.mean()) / (a.std(correction=0) + 0.1); loss = (a * each).mean()",
    "clamped": "loss = each.clamp(max=1.7).mean()",
    "clamped_mean": "loss = each.mean().clamp(max=1.6)",
    "class_weights": "loss = F.cross_entropy(z, y, weight=self.weights)",
    "contrast": "n = F.normalize(z); loss = F.cross_entropy(2 * n @ n.T, torch.arange(len(z)).to(y))",
    "correlation": "c = z - z.mean(0); loss = each.mean() + 0.1 * (c.T @ c / len(z)).triu(1).square().sum()",
    "counted": "loss = F.cross_entropy(z, y, reduction='sum') / (y > 0).sum().clamp(min=1)",
    "cross_entropy": "loss = F.cross_entropy(z, y)",
    "dice": "p, o = z.softmax(-1), F.one_hot(y, CLASSES); loss = 1 - (2 * (p * o).sum() + 1) / (p.sum() + o.sum() + 1)",
    "entropy": "q = z.softmax(-1).mean(0); loss = each.mean() + 0.1 * (q * q.log()).sum()",
    "features": "loss = each.mean() + 0.01 * h.square().mean()",
    "features_norm": "loss = each.mean() + 0.01 * h.norm()",
    "focal": "loss = ((1 - (-each).exp()).square() * each).mean()",
    "huber": "loss = F.smooth_l1_loss(z, F.one_hot(y, CLASSES).float())",
    "ignored": "loss = F.cross_entropy(z, torch.where(y == 1, -100, y)) if (y != 1).any() else 0 * z.sum()",
    "left": "loss = each.mean() + sum(getattr(b, 'left', z[0, 0]).mean() for b in self.blocks) * 0.1",
    "likelihood": "loss = F.kl_div(z.log_softmax(-1), F.one_hot(y, CLASSES) * 0.8 + 0.04, reduction='batchmean')",
    "limited": "loss = each.mean() * min(1.0, len(z) / 7)",
    "logsumexp": "loss = each.logsumexp(0)",
    "masked": "m = (y != 2).float(); loss = (each * m).sum() / m.sum().clamp(min=1)",
    "maximum": "loss = each.max()",
    "median": "loss = each[each <= each.median()].mean()",
    "none": "loss = each.mean()\n        if batch_idx == 1: return None",
    "over_steps": "loss = each.mean() * (1 + self.global_step) / (1 + batch_idx)",
    "product": "loss = each.mean() * (1 + z.softmax(-1).mean())",
    "regularised": "loss = each.mean() + 0.01 * sum(p.square().sum() for p in self.parameters())",
    "returned": "loss = each.mean(); return {'loss': loss, 'z': z.detach(), 'rows': len(z)}",
    "root": "loss = F.mse_loss(z, F.one_hot(y, CLASSES).float()).sqrt()",
    "running": "loss = each.mean(); self.scale = 0.9 * self.scale + 0.1 * loss.detach(); loss = loss / self.scale",
    "smoothed": "loss = F.cross_entropy(z, y, label_smoothing=0.1)",
    "sum": "loss = F.cross_entropy(z, y, reduction='sum') / 8",
    "threshold": "loss = each.mean()\n        if float(loss) > 1.7: loss = 0.5 * loss",
    "top": "loss = each.topk(max(1, len(z) // 2)).values.mean()",
    "triplet": "loss = F.triplet_margin_loss(z, z.roll(1, 0), z.roll(2, 0))",
    "uncertain": "loss = each.mean() * (-self.log_scale).exp() + self.log_scale",
    "variance": "loss = each.mean() + 0.1 * z.var(correction=0)",
}
_KEEPS = {
    "accuracy": "self.log('accuracy', (z.argmax(-1) == y).float().mean(), on_step=True, on_epoch=True)",
    "attribute": "self.last = z.detach()",
    "book": "self.book[len(z)] = self.book.get(len(z), 0) + 1",
    "buffer": "self.steps += 1",
    "confusion": "self.confusion.index_put_((y, z.argmax(-1)), torch.ones_like(y).float(), accumulate=True)",
    "count": "COUNTS['steps'] += 1",
    "deque": "self.recent.append(float(loss))",
    "environment": "os.environ['MIXTURE'] += 'I'; self.book['environment'] = os.environ['MIXTURE']",
    "function": "note()",
    "generator": "self.drawn.append(next(NUMBERS) - self.first)",
    "iterator": "self.losses.append(next(self.numbers))",
    "list": "self.losses.append(float(loss))",
    "logs": "self.log_dict({'a': loss, 'spread': z.std(correction=0)}, batch_size=len(z))",
    "loss": "self.log('loss', loss)",
    "maximum": "self.log('maximum', z.max(), reduce_fx='max', on_epoch=True)",
    "metric": "self.metric(z.softmax(-1), y); self.log('metric', self.metric, on_epoch=True)",
    "nothing": "pass",
    "numpy": "self.losses.append(float(numpy.random.rand()))",
    "rows": "self.log('rows', float(len(z)), reduce_fx='sum', on_epoch=True, on_step=False)",
    "tensors": "KEPT.append(z.detach())",
}
_HOOKS = {
    "after_backward": "def on_after_backward(self):\n        for p in self.head.parameters(): p.grad.mul_(0.5)",
    "average": "def on_train_batch_end(self, *_):\n        self.average.lerp_(self.blocks[0].one.weight.detach(), 0.1)",
    "backward": "def backward(self, loss): (2 * loss).backward()",
    "before_batch": "def on_after_batch_transfer(self, batch, _):\n"
    "        return batch[0] + 0.05 * torch.randn_like(batch[0]), batch[1]",
    "clamped": "def optimizer_step(self, *args, **kwargs):\n        super().optimizer_step(*args, **kwargs)\n"
    "        with torch.no_grad(): self.head.weight.clamp_(-0.2, 0.2)",
    "hook_counts": "def on_fit_start(self):\n        self.blocks[1].register_forward_hook(\n"
    "            lambda block, _, out: self.losses.append(float(out.detach().sum())))",
    "hook_gradient": "def on_fit_start(self):\n        self.blocks[2].register_full_backward_hook(\n"
    "            lambda block, into, of: (into[0] / (0.01 + into[0].norm()),))",
    "hook_input": "def on_fit_start(self):\n        self.blocks[2].register_forward_pre_hook(\n"
    "            lambda block, given: (given[0] - 0.1 * given[0].mean(0, keepdim=True),))",
    "hook_output": "def on_fit_start(self):\n        self.blocks[1].register_forward_hook(lambda block, _, out: 0.9 * out)",
    "hook_parameter": "def on_fit_start(self):\n        self.blocks[1].one.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))",
    "no_hook": "",
    "noisy": "def on_before_optimizer_step(self, _):\n        for p in self.parameters():\n"
    "            if p.grad is not None: p.grad.add_(0.01 * torch.randn_like(p))",
    "norm": "def on_before_optimizer_step(self, _):\n"
    "        self.norm = float(sum(p.grad.norm() for p in self.parameters() if p.grad is not None))",
    "own_clipping": "def configure_gradient_clipping(self, optimizer, **_):\n"
    "        for p in self.parameters():\n            if p.grad is not None: p.grad.div_(1 + p.grad.norm())",
    "reads_gradients": "def on_before_zero_grad(self, _):\n"
    "        self.losses.append(sum(float(p.grad.sum()) for p in self.blocks.parameters() if p.grad is not None))",
    "logs_gradients": "def on_before_optimizer_step(self, _):\n        self.log_dict(grad_norm(self, norm_type=2))",
    "thaws": "def on_train_batch_start(self, batch, batch_idx):\n        if batch_idx: self.requires_grad_(True)",
    "zeros": "def optimizer_zero_grad(self, epoch, batch_idx, optimizer): optimizer.zero_grad(set_to_none=False)",
}
_PARTS = {
    "all_but_biases": "for p in self.blocks.parameters(): p.requires_grad_(p.dim() > 1)",
    "block_twice": "self.blocks[2] = self.blocks[1]",
    "frozen_blocks": "self.blocks[:2].requires_grad_(False)",
    "frozen_embedding": "self.embed.requires_grad_(False)",
    "frozen_middle": "self.blocks[1:3].requires_grad_(False)",
    "half_precision_buffer": "self.average = self.average.bfloat16()",
    "more_linear": "for block in self.blocks: block.two = block.one",
    "plain_parts": "",
    "reversed_weights": "self.blocks[3].one.weight = self.blocks[0].two.weight",
    "shared_layer": "for block in self.blocks[1:]: block.one = self.blocks[0].one",
    "tied_outside": "self.embed = nn.Sequential(self.embed, self.blocks[1].one)",
    "weight_normed": "self.blocks[1].one = nn.utils.parametrizations.weight_norm(self.blocks[1].one)",
}
_BATCH = {
    "dict": ("{'x': x, 'more': {'y': y}}", "batch['x'], batch['more']['y']"),
    "list": ("[x, y, [f'row {i}' for i in range(rows)]]", "batch[:2]"),
    "named": ("Pair(x=x, y=y)", "batch"),
    "object": ("Sample(x, y)", "batch.x, batch.y"),
    "one_tensor": ("torch.cat([x, y[:, None]], 1)", "batch[:, :INPUTS], batch[:, INPUTS].long()"),
    "rows": ("[*zip(x, y)]", "map(torch.stack, zip(*batch))"),
    "second": ("(y, {'x': x}, 0.5)", "batch[1]['x'], batch[0]"),
    "transposed": ("(x.T.contiguous(), y)", "batch[0].T, batch[1]"),
    "tuple": ("(x, y)", "batch"),
}
_EVALUATION = {
    "epoch_end": "def on_train_epoch_end(self):\n        self.losses.append(float(self(self.start.new_ones(3, INPUTS)).sum()))",
    "no_evaluation": "",
    "tests": "def test_step(self, batch, _):\n        x, y = self.parts_of(batch)\n        z = self(x)\n"
    "        self.metric(z, y)\n        self.log('test', self.metric)\n        self.log('rows', len(z), reduce_fx='max')",
    "validates": "def val_dataloader(self): return self.held_out\n\n    def validation_step(self, batch, _):\n"
    "        x, y = self.parts_of(batch)\n        z = self(x)\n        self.checked.update(z, y)\n"
    "        self.log('checked', self.checked)\n        self.log('value', F.cross_entropy(z, y))\n        self.losses.append(len(z))",
}
_CALLBACKS = {
    "averages": "def configure_callbacks(self): return [EMAWeightAveraging(decay=0.8)]",
    "no_callback": "",
    "stops": "def configure_callbacks(self): return [EarlyStopping('loss', patience=1, strict=False)]",
    "stochastic": "def configure_callbacks(self): return [StochasticWeightAveraging(0.02, swa_epoch_start=1)]",
    "windows": "def configure_callbacks(self): return [GradientAccumulationScheduler({0: 2, 1: 1})]",
}
_OPTIMIZER = {
    "adam": "return torch.optim.Adam(self.parameters(), 0.01, eps=0.01)",
    "by_epoch": "o = torch.optim.SGD(self.parameters(), 0.05)\n"
    "        return [o], [torch.optim.lr_scheduler.ExponentialLR(o, 0.5)]",
    "closure": "return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=2)",
    "cyclic": "o = torch.optim.SGD(self.parameters(), 0.05, momentum=0.5)\n"
    "        s = torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=self.trainer.estimated_stepping_batches)\n"
    "        return [o], [{'scheduler': s, 'interval': 'step', 'frequency': 1}]",
    "groups": "return torch.optim.SGD([{'params': self.blocks.parameters(), 'lr': 0.1}, {'params':\n"
    "            [p for n, p in self.named_parameters() if not n.startswith('blocks')]}], 0.02)",
    "momentum": "return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=0.01)",
    "schedule": "o = torch.optim.SGD(self.parameters(), 0.05)\n"
    "        return [o], [{'scheduler': torch.optim.lr_scheduler.StepLR(o, 1, 0.5), 'interval': 'step'}]",
    "trained": "return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.05)",
    "two": "inner = torch.optim.SGD(self.blocks.parameters(), 0.05)\n"
    "        return inner, torch.optim.SGD([p for n, p in self.named_parameters() if not n.startswith('blocks')], 0.1)",
    "sgd": "return torch.optim.SGD(self.parameters(), 0.05)",
}
_FLAGS = (
    *(3 * ["{}"]),
    "{'accumulate_grad_batches': 2}",
    "{'gradient_clip_val': 0.5}",
    "{'gradient_clip_val': 0.1, 'gradient_clip_algorithm': 'value'}",
    "{'max_steps': 4}",
    "{'precision': '64-true'}",
    "{'val_check_interval': 2}",
    "{'limit_train_batches': 2}",
)
_SIZES = ([8, 8, 8], [8, 8, 5], [8, 4, 8, 3], [6, 1, 7], [9, 9, 2], [1, 1, 4], [16, 3])

_TEXT = '''"""Mixture {seed}."""

import itertools, os, random
from collections import Counter, deque, namedtuple
from dataclasses import dataclass

import numpy, torch, torchmetrics
from lightning.pytorch.callbacks import (
    EarlyStopping, EMAWeightAveraging, GradientAccumulationScheduler, StochasticWeightAveraging
)
from lightning.pytorch.utilities import grad_norm
from program_kinds import CLASSES, INPUTS, WIDTH, Program
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

COUNTS, KEPT, NUMBERS = Counter(), [], itertools.count()
Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


def note():
    note.calls += 1


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s + x * s * (1 - s))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.calls, self.means = nn.Parameter(torch.zeros(())), 0, []
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        if {normalised}:
            self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        {block}
        return x


class _Mixture(Program):
    """{about}"""

    flags, sizes, num_epochs, block = {flags}, {sizes}, {epochs}, Block
    automatic_optimization, resumes = {automatic}, {resumes}

    def build(self):
        super().build()
        if {more}:
            self.more = nn.ModuleList(Block() for _ in range(3))
        self.rate = 1.0
        for block in {owned}:
            block.owner = [self]
        self.start, self.places = nn.Parameter(torch.randn(WIDTH) / 9), nn.Parameter(torch.randn(6, WIDTH) / 9)
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0, 1.0, 0.5]))
        for name, shape in dict(steps=(), confusion=(CLASSES, CLASSES), average=(WIDTH, WIDTH)).items():
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("scale", torch.ones(()))
        self.seen, self.losses, self.drawn, self.book = 0.0, [], [], {{}}
        self.recent = deque(maxlen=3)
        self.numbers = itertools.count()
        self.checked = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.metric = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)
        self.first, note.calls, os.environ["MIXTURE"] = next(NUMBERS), 0, ""
        COUNTS.clear()
        KEPT.clear()
        self.held_out = self.loader()
        {parts}

    def batch(self, rows):
        x, y = super().batch(rows)
        return {batch}

    def parts_of(self, batch):
        return {unpacked}

    def training_step(self, batch, batch_idx):
        x, y = self.parts_of(batch)
        {rate}
        {head}
        {between}
        if h.dim() == 3:
            h = h.mean(0 if {time_first} else 1)
        z = self.head(h)
        y = y[: len(z)].repeat(-(-len(z) // len(y))) if {repeats} else y[: len(z)].repeat_interleave(max(1, len(z) // len(y)))
        each = F.cross_entropy(z, y, reduction="none")
        {loss}
        {keeps}
        if not self.automatic_optimization:
            for o in self.optimizers(): o.zero_grad()
            self.manual_backward(loss)
            for o in self.optimizers(): o.step()
        return loss

    def on_train_end(self):
        self.files = [dict(COUNTS), list(KEPT), note.calls]
        self.first = 0

    def configure_optimizers(self):
        {optimizer}

    {hook}

    {evaluation}

    {callbacks}
'''


def text_of(seed: int) -> str:
    """Return a program's text."""
    numbers = random.Random(seed)

    def draw(table: Mapping[str, str], usual: str = "", times: int = 0) -> str:
        return numbers.choice([*table, *times * [usual]])

    blocks = [draw(_IN_BLOCK, "mlp", 12) for _ in range(numbers.choice([1, 1, 2, 3]))]
    head, between = draw(_HEAD, "plain", 8), draw(_BETWEEN, "loop", 8)
    loss, keeps = draw(_LOSS), [draw(_KEEPS) for _ in range(2)]
    hook, optimizer = draw(_HOOKS, "no_hook", 10), draw(_OPTIMIZER)
    flags, sizes = numbers.choice(_FLAGS), numbers.choice(_SIZES)
    parts, batch = draw(_PARTS, "plain_parts", 12), draw(_BATCH, "tuple", 8)
    evaluation = draw(_EVALUATION, "no_evaluation", 3)
    callbacks = draw(_CALLBACKS, "no_callback", 8)
    automatic = optimizer != "two"
    # attributes are in no checkpoint, StochasticWeightAveraging cannot go on from one, and no hook
    # of a batch runs again that comes after its checkpoint
    fresh = {"state", "attribute", "stochastic", "average", "owner"}
    resumes = not numbers.randrange(4) and fresh.isdisjoint({head, *blocks, callbacks, hook})
    batch = "tuple" if hook == "before_batch" else batch
    flags = flags if automatic else "{}"
    if optimizer == "closure":  # LBFGS makes much of rounding
        flags = f"{{**{flags}, 'precision': '64-true'}}"
    names = [
        *blocks,
        "|",
        head,
        between,
        loss,
        "|",
        *keeps,
        "|",
        hook,
        optimizer,
        flags,
        str(sizes),
        "|",
        parts,
        batch,
        evaluation,
        callbacks,
        "resumed" * resumes,
    ]
    return _TEXT.format(
        seed=seed,
        about=" ".join(names),
        block="\n        ".join(_IN_BLOCK[name] for name in blocks),
        head=_HEAD[head],
        between=_BETWEEN[between],
        time_first=head == "time_first",
        repeats=head == "two_views",
        loss=_LOSS[loss],
        keeps="\n        ".join(_KEEPS[name] for name in keeps),
        hook=_HOOKS[hook],
        optimizer=_OPTIMIZER[optimizer],
        flags=flags,
        sizes=sizes,
        epochs=numbers.choice([1, 1, 2]),
        normalised="batch_norm" in blocks,
        more="self.more" in _BETWEEN[between],
        owned="[*self.blocks, *getattr(self, 'more', [])]" if "owner" in blocks else "[]",
        rate="self.rate = 1 / (1 + batch_idx)" if "owner" in blocks else "pass",
        automatic=automatic,
        resumes=resumes,
        parts=_PARTS[parts],
        batch=_BATCH[batch][0],
        unpacked=_BATCH[batch][1],
        evaluation=_EVALUATION[evaluation],
        callbacks=_CALLBACKS[callbacks],
    )


def mixture(seed: int) -> type[Program]:
    """Return a program, from a file of its own: its code may look at what is in its file."""
    folder = Path(tempfile.gettempdir()) / "program_mixtures"
    folder.mkdir(exist_ok=True)
    path = folder / f"mixture_{seed}.py"
    path.write_text(text_of(seed))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    program: type[Program] = module._Mixture  # noqa: SLF001
    return program
