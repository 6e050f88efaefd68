import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.models.work.step_proof import LossKind, Unproven, prove_step

LINEAR, SCORE, EMBED = (
    nn.Linear(8, 5, device="meta"),
    nn.Linear(8, 1, device="meta"),
    nn.Embedding(11, 8, device="meta"),
)
WEIGHT = torch.ones(5, device="meta")
SCALE = nn.Parameter(torch.ones(8, device="meta"))


class Batch:
    """Six rows: features, two labels, targets and tokens."""

    def __init__(self, given: dict[str, Tensor]) -> None:
        self.x, self.y, self.other, self.r, self.ids = given.values()

    def __len__(self) -> int:
        return len(self.x)

    @property
    def scores(self) -> Tensor:
        scores: Tensor = SCORE(self.x).squeeze(-1)
        return scores

    def entropy(self, **how: Any) -> Tensor:
        return functional.cross_entropy(LINEAR(self.x), self.y, **how)


def prove(step: Callable[[Batch], Tensor]) -> LossKind:
    batch = {
        "x": torch.zeros(6, 8),
        "y": torch.zeros(6, dtype=torch.long),
        "other": torch.zeros(6, dtype=torch.long),
        "r": torch.zeros(6),
        "ids": torch.zeros(6, 9, dtype=torch.long),
    }
    return prove_step(batch=batch, run=lambda given, _: (step(Batch(given)), []), sizes=(6, 2))


def tokens(b: Batch) -> Tensor:
    logits = EMBED(b.ids)[:, :-1] @ LINEAR.weight.T
    return functional.cross_entropy(logits.reshape(-1, 5), b.ids[:, 1:].reshape(-1))


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        (lambda b: b.entropy(), LossKind.TARGETS),
        (lambda b: b.entropy(weight=WEIGHT) * 0.5 + SCALE.norm(), LossKind.TARGETS),
        (lambda b: b.entropy() + 2 * b.entropy(), LossKind.TARGETS),
        (tokens, LossKind.TARGETS),
        (lambda b: functional.mse_loss(b.scores, b.r), LossKind.ROWS),
        (lambda b: (b.scores - b.r).square().mean() * torch.tensor(2.0), LossKind.ROWS),
        (lambda b: functional.binary_cross_entropy_with_logits(b.scores, b.r), LossKind.ROWS),
        (lambda b: LINEAR(b.x).gather(1, b.ids[:, :1]).mean(), LossKind.ROWS),
        (lambda b: b.x[:].square().sum(-1).mean(), LossKind.ROWS),
        (lambda b: (b.x // 2).mean(), LossKind.ROWS),
    ],
)
def test_proven(step: Callable[[Batch], Tensor], kind: LossKind) -> None:
    assert prove(step) is kind


def written(b: Batch, source: Callable[[Batch], Tensor], *, rows: Any = slice(None)) -> Tensor:
    """Write into a view of what the loss takes."""
    taken = torch.zeros_like(b.x)
    taken[rows] = source(b)
    return (taken * b.x).mean()


def written_constant(b: Batch) -> Tensor:
    base = torch.zeros(8, device="meta")
    view = base[:4]
    base.add_(b.x.sum(0))
    return (view * b.x[:, :4]).mean()


def written_number(b: Batch) -> Tensor:
    base = torch.zeros(8, device="meta")
    view = base[:4]
    base.fill_(len(b))
    return (view * b.x[:, :4]).mean()


def written_list(b: Batch) -> Tensor:
    sums = [torch.zeros(8, device="meta")]
    torch._foreach_add_(sums, [b.x.sum(0)])
    return (sums[0] * b.x).mean()


def average(b: Batch) -> Tensor:
    with torch.no_grad():
        SCALE.data.mul_(0.9)
    return (b.x * SCALE).mean()


class Normalised(torch.autograd.Function):
    """Its gradient depends on all rows."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient / gradient.norm()


def normalised(b: Batch) -> Tensor:
    apply: Any = Normalised.apply
    mean: Tensor = apply(b.x * SCALE).mean()
    return mean


def hooked(b: Batch) -> Tensor:
    taken = b.x * SCALE
    taken.register_hook(lambda gradient: gradient / gradient.norm())
    return taken.mean()


def hooked_module(b: Batch) -> Tensor:
    handle = SCORE.register_full_backward_hook(lambda *_: None)
    try:
        mean: Tensor = SCORE(b.x * SCALE).mean()
        return mean
    finally:
        handle.remove()


def hooked_saving(b: Batch) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t - t.mean(0), lambda t: t):
        return (b.x * SCALE).mean()


def tried(b: Batch) -> Tensor:
    with contextlib.suppress(Exception):
        return b.scores.mean() / float(b.r.max())
    return b.scores.mean()


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        # The number of rows is in it.
        (lambda b: b.scores.mean() * len(b), "number of rows"),
        (lambda b: b.scores.mean() * torch.tensor(float(len(b)), device="meta"), "number of rows"),
        (lambda b: b.scores.mean() * b.x.new_full((), len(b)), "number of rows"),
        (lambda b: (b.scores ** (1 / len(b))).mean(), "number of rows"),
        (lambda b: b.scores.mean() + SCALE.norm() / len(b), "number of rows"),
        (lambda b: b.scores.mean() if len(b) > 5 else b.scores.sum(), "another number of rows"),
        (lambda b: b.scores.mean() * min(1.0, len(b) / 9), "another number of rows"),
        (lambda b: b.scores[:128].mean(), "slice"),
        (lambda b: functional.embedding(b.y, SCORE.weight.T, None, None, 2, True).mean(), "freq"),
        # Rows are compared, or moved.
        (lambda b: torch.ops.aten.mse_loss(SCORE(b.x), b.r), "compared"),
        (lambda b: functional.soft_margin_loss(SCORE(b.x), b.r), "compared"),
        (lambda b: functional.cross_entropy(b.x @ b.x.T, b.y), "compared"),
        (lambda b: (b.x * b.x.cumsum(0)).mean(), "cumsum"),
        (lambda b: (b.x * functional.pad(b.x, (0, 0, 1, -1))).mean(), "constant_pad_nd"),
        (lambda b: (b.x - b.x.mean(0)).square().mean(), "sub"),
        (lambda b: torch.where(b.r > b.r.mean(), b.r, 0.0).mean(), "gt"),
        (lambda b: torch.zeros(200, 5, device="meta").gather(1, b.ids[:, :3]).mean(), "gather"),
        (lambda b: (b.scores * torch.arange(len(b), device="meta")).mean(), "mul"),
        (lambda b: (b.r * b.r[torch.arange(len(b) - 1, -1, -1, device="meta")]).mean(), "number"),
        (lambda b: (b.r * b.x.flatten()[torch.arange(len(b), device="meta")]).mean(), "index"),
        # What is written into shows in what shares its memory.
        (lambda b: written(b, lambda b: b.x[0], rows=1), "select"),
        (lambda b: written(b, lambda b: b.x[:-1], rows=slice(1, None)), "left out"),
        (lambda b: written(b, lambda b: b.x.mean(0)), "expand"),
        (written_constant, "sums"),
        (written_number, "number of rows"),
        (written_list, "_foreach_add_"),
        (average, "parameter or a buffer"),
        (lambda b: b.x.mul_(2).mean(), "into the batch"),
        # Nobody knows what becomes of gradients, or of values.
        (normalised, r"gradients of its own \(Normalised\)"),
        (hooked, "hook sees the gradient of a tensor"),
        (hooked_module, "hook sees the gradients of a module"),
        (hooked_saving, "hooks see the tensors that are saved"),
        (tried, "reads the value of a tensor"),
        # No mean, or several.
        (lambda b: b.entropy() + functional.cross_entropy(LINEAR(b.x), b.other), "add"),
        (lambda b: b.entropy() + b.entropy(ignore_index=0), "add"),
        (lambda b: b.entropy() + b.entropy(weight=WEIGHT), "add"),
        (lambda b: b.entropy(label_smoothing=0.1), "sums"),
        (lambda b: b.entropy() + b.scores.mean(), "add"),
        (lambda b: (b.scores * b.r).sum() / b.r.sum(), "sums"),
        (lambda b: torch.div(b.scores.mean(), 2, rounding_mode="floor"), "div"),
        (lambda b: b.scores.exp().mean().log(), "log"),
        (lambda b: b.scores.std(), "std"),
        (lambda b: b.scores.sum(), "sums"),
        (lambda b: b.entropy(reduction="sum") / 6, "sums"),
    ],
)
def test_not_proven(step: Callable[[Batch], Tensor], reason: str) -> None:
    with pytest.raises(Unproven, match=reason):
        prove(step)


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        (lambda x, total: x.square().sum(), "beside its output"),
        (
            lambda x, total: (x * SCALE).register_hook(print) and x.sum(),
            "the gradient of a tensor in a block",
        ),
        (lambda x, total: x.cumsum(1).cumsum(-1).cumsum(0), r"counts along the rows \(cumsum\)"),
        (lambda x, total: total.add_(x.square().sum()), r"stay apart \(block\)"),
    ],
)
def test_what_blocks_leave_and_what_they_count_is_not_known(leave: Any, reason: str) -> None:
    left: list[Tensor] = []

    def block(x: Tensor, total: Tensor) -> Tensor:
        left.append(leave(x, total))
        return x

    def run(given: dict[str, Tensor], around: Callable[..., Any]) -> Any:
        total = torch.zeros((), device="meta")
        return around(block)(given["x"], total).mean() + left[-1] + total, []

    with pytest.raises(Unproven, match=reason):
        prove_step(batch={"x": torch.zeros(6, 8)}, run=run)


def test_a_block_that_is_given_the_number_of_rows_ends_a_proof() -> None:
    def run(given: dict[str, Tensor], around: Callable[..., Any]) -> Any:
        x = given["x"]
        return around(lambda x, num_rows: x * num_rows)(x, len(x)).mean(), []

    with pytest.raises(Unproven, match="number of rows"):
        prove_step(batch={"x": torch.zeros(6, 8)}, run=run)


def test_blocks_may_multiply_by_groups_in_any_dtype() -> None:
    weights = torch.zeros(2, 8, 8, device="meta")
    ends = torch.zeros(2, dtype=torch.int32, device="meta")

    def run(given: dict[str, Tensor], around: Callable[..., Any]) -> Any:
        product = around(lambda x: functional.grouped_mm(x, weights, offs=ends))
        return product(given["x"]).mean(), []

    assert prove_step(batch={"x": torch.zeros(6, 8)}, run=run) is LossKind.ROWS


def test_gradients_of_a_block_s_own_end_a_proof() -> None:
    apply: Any = Normalised.apply

    def run(given: dict[str, Tensor], around: Callable[..., Any]) -> Any:
        return around(apply)(given["x"] * SCALE).mean(), []

    with pytest.raises(Unproven, match=r"own \(Normalised\) in a block"):
        prove_step(batch={"x": torch.zeros(6, 8)}, run=run)
