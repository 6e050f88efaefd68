import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from roundpipe_lightning.errors import CaptureError
from roundpipe_lightning.models.losses.lazy_logits import LazyLogits, LossFusion
from roundpipe_lightning.models.work.meter import Meter

WIDTH, VOCABULARY = 6, 13
SEQUENCES, TOKENS = 3, 8

Use = Callable[[Tensor, Tensor], Tensor]
"""From logits (sequences, tokens, vocabulary) and labels to a loss."""


class Head(nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.projection = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.projection(hidden)
        return logits


def given() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(SEQUENCES, TOKENS, WIDTH, generator=generator).requires_grad_()
    labels = torch.randint(VOCABULARY, (SEQUENCES, TOKENS), generator=generator)
    labels[0, :3] = labels[2, 5] = -100
    return hidden, labels


def run(use: Use, fusion: LossFusion | None, *, bias: bool = True) -> list[Tensor]:
    head, (hidden, labels) = Head(bias=bias), given()
    if fusion is None:
        loss = use(head(hidden), labels)
    else:
        with fusion.active():
            loss = use(head(hidden), labels)
    loss.backward()
    inputs = [hidden, *head.parameters()]
    return [loss.detach(), *(x.grad for x in inputs if x.grad is not None)]


def shifted(labels: Tensor) -> Tensor:
    padded: Tensor = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return padded


def flat(logits: Tensor) -> Tensor:
    return logits.float().view(-1, VOCABULARY)


def _as_transformers(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(flat(logits), shifted(labels).view(-1).to(logits.device))


def _sliced(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits[..., :-1, :].contiguous()
    rows = logits.view(-1, logits.size(-1))
    loss: Tensor = nn.CrossEntropyLoss()(rows, labels[..., 1:].reshape(-1))
    return loss


def _gathered(logits: Tensor, labels: Tensor) -> Tensor:
    chosen = labels.clamp(min=0).unsqueeze(-1)
    likelihood = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    total: Tensor = (likelihood * (labels >= 0)).sum(-1)
    return -total.mean()


def _indexed(logits: Tensor, labels: Tensor) -> Tensor:
    rows = torch.tensor([2, 0])
    labels = labels.clamp(min=0)
    picked = logits[rows, 1:, : logits.shape[-1]][..., :VOCABULARY].transpose(0, 1).squeeze(0)
    return functional.cross_entropy(
        picked.reshape(-1, VOCABULARY), labels[rows, 1:].T.reshape(-1), ignore_index=4
    ) + 0 * functional.cross_entropy(logits[0, 5], labels[0, 5])


FUSED: dict[str, Use] = {
    "as transformers": _as_transformers,
    "a sum over items": lambda x, y: (
        functional.cross_entropy(flat(x), shifted(y).view(-1), reduction="sum") / 17
    ),
    "sliced": _sliced,
    "capped": lambda x, y: functional.cross_entropy(
        (torch.tanh(x / 2.5) * 2.5).flatten(0, 1), y.flatten()
    ),
    "capped and scaled": lambda x, y: functional.cross_entropy(
        (0.5 * (3.0 * (x.mul(0.7) / 2).tanh()).to(torch.float32)).reshape(-1, VOCABULARY),
        y.flatten(),
    ),
    "scaled": lambda x, y: functional.cross_entropy(
        input=(x * 0.0625).div(0.5)[:, -5:].flatten(0, -2),
        target=y[:, -5:].flatten(),
        label_smoothing=0.1,
    ),
    "classes second": lambda x, y: functional.cross_entropy(x.transpose(1, 2), y),
    "permuted": lambda x, y: (
        functional.cross_entropy(x.permute(0, 2, 1), y, reduction="none") * torch.arange(TOKENS)
    ).mean(),
    "log-likelihood": lambda x, y: functional.nll_loss(
        torch.log_softmax(x, dim=-1).view(SEQUENCES * TOKENS, -1), y.view(-1)
    ),
    "gathered": _gathered,
    "masked": lambda x, y: functional.cross_entropy(x[y != -100], y[y != -100]),
    "indexed": _indexed,
}


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("use", FUSED)
def test_losses_are_computed_without_the_logits(use: str, bias: bool) -> None:
    fusion = LossFusion("fused")
    got, want = run(FUSED[use], fusion, bias=bias), run(FUSED[use], None, bias=bias)
    assert fusion.report.made == {}
    assert fusion.report.num_fused == (2 if use == "indexed" else 1)
    for mine, plain in zip(got, want, strict=True):
        assert mine.dtype == plain.dtype
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use", FUSED)
def test_autocast_rounds_as_it_rounds_the_plain_loss(use: str) -> None:
    fusion, exact = LossFusion("fused"), run(FUSED[use], None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, want = run(FUSED[use], fusion), run(FUSED[use], None)
    assert fusion.report.num_fused > 0
    for mine, plain, true in zip(got, want, exact, strict=True):
        assert mine.dtype == plain.dtype
        torch.testing.assert_close(mine, plain, rtol=0.03, atol=0.02)
        assert (mine - true).norm() <= 1.3 * (plain - true).norm() + 2e-3


# --- everything else ------------------------------------------------------------------------------


class _Squares(torch.autograd.Function):
    """Takes its argument past PyTorch's functions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def _written_into(logits: Tensor, labels: Tensor) -> Tensor:
    before = logits.float() * 2
    logits[..., 3] = -5.0
    logits /= 2
    return functional.cross_entropy((logits + before).flatten(0, 1), labels.flatten())


def _kept_gradient(logits: Tensor, labels: Tensor) -> Tensor:
    logits.retain_grad()
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert gradient.shape == logits.shape
    return loss * gradient.abs().sum().detach()


OTHER: dict[str, Use] = {
    "softmax": lambda x, y: x.softmax(-1).gather(-1, y.clamp(min=0)[..., None]).sum(),
    "argmax": lambda x, y: x.sum() * x.argmax(-1).float().mean(),
    "a class": lambda x, y: x[..., 3].sum(),
    "some classes": lambda x, y: x[:, :, 2:].square().mean(),
    "a class of a token": lambda x, y: x[0, 1, 2] * 2,
    "class weights": lambda x, y: functional.cross_entropy(
        x.flatten(0, 1), y.flatten(), weight=torch.arange(1.0, VOCABULARY + 1)
    ),
    "probabilities": lambda x, y: functional.cross_entropy(x, torch.ones_like(x).softmax(1)),
    "a mistaken dimension": lambda x, y: x.log_softmax(1).square().mean(),
    "a tensor as factor": lambda x, y: (x * torch.tensor(2.0)).mean(),
    "twice": lambda x, y: (x * x).mean(),
    "another view": lambda x, y: x.reshape(-1, 2).tanh().mean(),
    "a narrower type": lambda x, y: x.bfloat16().float().square().mean(),
    "a list": lambda x, y: torch.stack([x, x]).std(),
    "a custom function": lambda x, y: _Squares.apply(x).mean(),  # type: ignore[no-untyped-call]
    "a custom function of a part": lambda x, y: _Squares.apply(x[:, 1:]).mean(),  # type: ignore[no-untyped-call]
    "two losses": lambda x, y: (
        functional.cross_entropy(x.flatten(0, 1), y.flatten()) + x.logsumexp(-1).square().mean()
    ),
    "writing": _written_into,
    "a kept gradient": _kept_gradient,
    "detached": lambda x, y: x.mean() * x.detach().std(),
    "deep copies": lambda x, y: x.mean() + copy.deepcopy(x.detach()).sum(),
    "text": lambda x, y: x.mean() * len(repr(x)) * len(f"{x.detach()}"),
    "numbers": lambda x, y: x.mean() * float(x.detach().numpy().max()) * x[0, 0, 0].item(),
}


@pytest.mark.parametrize("use", OTHER)
def test_all_else_gets_the_plain_logits_to_the_bit(use: str) -> None:
    fusion = LossFusion("fused")
    got, want = run(OTHER[use], fusion), run(OTHER[use], None)
    if use != "two losses":
        assert fusion.report.num_fused == 0
    if "custom" not in use:
        assert sum(fusion.report.made.values()) >= 1
    for mine, plain in zip(got, want, strict=True):
        if use == "two losses":
            torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(mine, plain)


def test_logits_are_made_once_and_then_used() -> None:
    head, (hidden, labels) = Head(), given()
    fusion = LossFusion("fused")
    with fusion.active(), Meter() as meter:
        logits = head(hidden)
        assert isinstance(logits, LazyLogits)
        assert logits.shape == (SEQUENCES, TOKENS, VOCABULARY)
        assert (logits.dtype, logits.device, logits.dim()) == (torch.float32, hidden.device, 3)
        assert logits.requires_grad
        assert logits.grad_fn is not None
        assert (logits.size(-1), len(logits)) == (VOCABULARY, SEQUENCES)
        assert logits.numel() == SEQUENCES * TOKENS * VOCABULARY
        assert meter.count.matrix_operations == 0  # for all these questions
        assert fusion.report.made == {}
        largest = logits.amax()
        loss = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    assert meter.count.matrix_operations == 2 * hidden.numel() * VOCABULARY
    assert fusion.report.num_fused == 0
    assert fusion.report.made == {"amax": 1}
    assert torch.equal(largest, functional.linear(hidden, head.projection.weight).amax())
    assert loss.requires_grad


def test_what_code_holds_in_the_end_is_made() -> None:
    head, (hidden, labels) = Head(), given()
    fusion, kept = LossFusion("fused"), []
    with fusion.active():
        kept.append(head(hidden))
        head(hidden)
    assert fusion.report.made == {"kept": 1}
    with fusion.active():
        logits = head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        output = fusion.materialized({"loss": loss, "logits": logits})
    assert type(output["logits"]) is Tensor
    assert output["loss"] is loss
    assert fusion.report.num_fused == 1
    with torch.no_grad():
        expected = head(hidden)
        head.projection.weight.zero_()
    assert torch.equal(kept[0], expected)
    assert torch.equal(output["logits"], expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    head, (hidden, labels) = Head(), given()
    fusion = LossFusion("fused")
    with mode(), fusion.active():
        logits = head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert not logits.requires_grad
        likeliest = logits.argmax(-1)
        plain = functional.linear(hidden.clone(), head.projection.weight)
        assert plain.is_inference() == logits.is_inference()
    assert not loss.requires_grad
    assert fusion.report.num_fused == 1
    assert torch.equal(likeliest, head(hidden).argmax(-1))


def test_logits_are_made_as_where_they_were_asked_for() -> None:
    """Autocast and the gradient mode of the projection count, not those of the first look."""
    head, (hidden, _) = Head(), given()
    fusion = LossFusion("fused")
    with fusion.active():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = head(hidden)
        with torch.no_grad():
            assert logits.dtype == torch.bfloat16
            assert logits.sum().dtype == torch.bfloat16
        assert (logits * torch.ones(())).requires_grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_projection(reentrant: bool) -> None:
    """Reentrant checkpointing runs it without a graph and gives the stand-in one of its own."""
    results = []
    for fusion in (None, LossFusion("fused")):
        head, (hidden, labels) = Head(), given()
        with nullcontext() if fusion is None else fusion.active():
            logits = checkpoint(lambda x, head=head: head(2 * x), hidden, use_reentrant=reentrant)
            loss = _as_transformers(logits, labels)
        loss.backward()
        results.append([loss.detach(), hidden.grad, head.projection.weight.grad])
    for mine, plain in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-6)


def test_changed_sources_are_refused() -> None:
    head, (hidden, _) = Head(), given()
    with LossFusion("fused").active():
        logits = head(hidden * 1)
        with torch.no_grad():
            head.projection.weight.mul_(2)
        with pytest.raises(CaptureError, match=r"written into after .*loss='eager'"):
            logits.sum()
        with pytest.raises(CaptureError, match=r"written into after .*loss='eager'"):
            functional.cross_entropy(logits[0], torch.zeros(TOKENS).long())
        logits = None


# --- which projections ----------------------------------------------------------------------------


def test_256_mib_are_large_under_auto() -> None:
    """With the vocabulary of Qwen3, 441 tokens: nothing is computed to find out."""
    weight, fusion = torch.ones(1, WIDTH).expand(151_936, WIDTH), LossFusion("auto")
    for tokens, is_large in ((441, False), (442, True)):
        hidden = torch.ones(1, WIDTH).expand(tokens, WIDTH)
        answer = fusion(functional.linear, (hidden, weight), {})
        assert (answer is not NotImplemented) == is_large


class _Quantised(Tensor):
    """A tensor whose operations are its own."""


@pytest.mark.parametrize(
    ("hidden", "weight"),
    [
        (torch.ones(2, 3, WIDTH), torch.ones(WIDTH - 1, WIDTH)),
        (torch.ones(WIDTH), torch.ones(VOCABULARY, WIDTH)),
        (torch.ones(0, WIDTH), torch.ones(VOCABULARY, WIDTH)),
        (torch.ones(2, WIDTH).long(), torch.ones(VOCABULARY, WIDTH).long()),
        (torch.ones(2, WIDTH), torch.ones(VOCABULARY, WIDTH).as_subclass(_Quantised)),
    ],
    ids=["onto fewer", "a vector", "no tokens", "whole numbers", "quantised"],
)
def test_other_products_are_left_alone(hidden: Tensor, weight: Tensor) -> None:
    with LossFusion("fused").active():
        assert not isinstance(functional.linear(hidden, weight), LazyLogits)


def test_a_projection_that_cannot_work_fails_as_ever() -> None:
    with LossFusion("fused").active(), pytest.raises(RuntimeError, match="mat1 and mat2"):
        functional.linear(torch.ones(2, WIDTH), torch.ones(VOCABULARY, WIDTH + 1))
    with LossFusion("fused").active(), pytest.raises(RuntimeError, match="dtype"):
        functional.linear(torch.ones(2, WIDTH), torch.ones(VOCABULARY, WIDTH).half())
