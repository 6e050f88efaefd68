import argparse
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from benchmarks.loss_memory import chunked_loss_bytes, plain_loss_bytes
from roundpipe_lightning import linear_cross_entropy
from roundpipe_lightning.emulation import tagged_tensor
from roundpipe_lightning.emulation.server import EmulatedServer, ServedDevice
from roundpipe_lightning.emulation.tagged_tensor import tag, untag
from roundpipe_lightning.emulation.timing import EmulatedEvent
from roundpipe_lightning.errors import CaptureError, ConfigurationError, DataError
from roundpipe_lightning.models.losses import linear_cross_entropy as module_of_loss
from roundpipe_lightning.models.losses.linear_cross_entropy import chunk_tokens
from roundpipe_lightning.models.work.meter import Meter

WIDTH, VOCABULARY = 5, 11
IGNORED = -100


def plain_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = IGNORED,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: float = 1.0,
    num_items: float | None = None,
) -> Tensor:
    """The loss as its formula reads, on whole logits."""
    logits = functional.linear(hidden, weight, bias) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    flat, targets = logits.flatten(0, -2), labels.flatten()
    losses = functional.cross_entropy(
        flat,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    losses = losses + z_loss * flat.logsumexp(-1).square() * (targets != ignore_index)
    if reduction == "none":
        return losses.view(labels.shape)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / ((targets != ignore_index).sum() if num_items is None else num_items)


def operands(
    *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden, weight, labels and bias; a third of the labels is ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, WIDTH, generator=generator, dtype=dtype)
    weight = torch.randn(vocabulary, WIDTH, generator=generator, dtype=dtype)
    bias = torch.randn(vocabulary, generator=generator, dtype=dtype)
    labels = torch.randint(vocabulary, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), labels, bias.requires_grad_()


def check_same(got: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    """Compare values, and gradients from an arbitrary gradient of the loss."""
    upstream = torch.linspace(0.5, 2.0, want.numel(), dtype=want.dtype).view(want.shape)
    gradients = torch.autograd.grad(got, inputs, upstream)
    wanted = torch.autograd.grad(want, inputs, upstream)
    torch.testing.assert_close(got, want)
    for gradient, other in zip(gradients, wanted, strict=True):
        assert gradient.dtype == other.dtype
        torch.testing.assert_close(gradient, other)


@settings(max_examples=150)
@given(
    shape=st.sampled_from([(1,), (9,), (2, 7), (2, 2, 3)]),
    seed=st.integers(0, 5),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    label_smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    z_loss=st.sampled_from([0.0, 0.01]),
    softcap=st.sampled_from([None, 3.0]),
    scale=st.sampled_from([1.0, 0.25]),
    has_bias=st.booleans(),
    ignore_index=st.sampled_from([IGNORED, 4]),
    chunk_bytes=st.sampled_from([1, 8 * 3, 8 * 2 * VOCABULARY, 8 * 4 * VOCABULARY + 8, 10**6]),
)
def test_every_combination_of_options_equals_the_plain_loss(
    shape: tuple[int, ...],
    seed: int,
    has_bias: bool,
    ignore_index: int,
    chunk_bytes: int,
    **options: Any,
) -> None:
    hidden, weight, labels, bias = operands(*shape, seed=seed)
    if not (labels != IGNORED).any():
        labels.flatten()[0] = 3
    labels[labels == IGNORED] = ignore_index
    options |= {"bias": bias if has_bias else None, "ignore_index": ignore_index}
    if not (labels != ignore_index).any():
        options["reduction"] = "sum"
    got = linear_cross_entropy(hidden, weight, labels, chunk_bytes=chunk_bytes, **options)
    check_same(
        got,
        plain_loss(hidden, weight, labels, **options),
        [hidden, weight, bias] if has_bias else [hidden, weight],
    )


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_without_targets_the_mean_is_no_number_and_gradients_are_zero(
    num_tokens: int, label_smoothing: float
) -> None:
    hidden, weight, labels, _ = operands(num_tokens)
    labels[:] = IGNORED
    for reduction in ("mean", "sum"):
        loss = linear_cross_entropy(
            hidden, weight, labels, reduction=reduction, label_smoothing=label_smoothing
        )
        plain = functional.cross_entropy(
            functional.linear(hidden, weight),
            labels,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        torch.testing.assert_close(loss, plain, equal_nan=True)
        for gradient in torch.autograd.grad(loss, (hidden, weight)):
            assert not gradient.any()
    losses = linear_cross_entropy(hidden, weight, labels, reduction="none")
    assert losses.shape == (num_tokens,)
    assert not losses.any()


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, labels, bias = operands(6)
    for frozen in ([hidden], [weight, bias], [bias]):
        inputs = [x for x in (hidden, weight, bias) if all(x is not y for y in frozen)]
        for tensor in frozen:
            tensor.requires_grad_(False)
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
        check_same(loss, plain_loss(hidden, weight, labels, bias=bias), inputs)
        for tensor in frozen:
            tensor.requires_grad_(True)
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, labels, bias=bias)
    assert not loss.requires_grad
    embedded = functional.embedding(torch.arange(6), weight).tanh()  # tied: both gradients
    got = linear_cross_entropy(embedded, weight, labels)
    want = plain_loss(functional.embedding(torch.arange(6), weight).tanh(), weight, labels)
    check_same(got, want, [weight])


def test_the_graph_can_be_run_again_where_it_is_kept() -> None:
    hidden, weight, labels, _ = operands(6)
    total = linear_cross_entropy(hidden, weight, labels, reduction="sum")
    for num_items in (17, torch.tensor(17)):
        loss = linear_cross_entropy(hidden, weight, labels, num_items=num_items)
        torch.testing.assert_close(loss, total / 17)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(2 * loss, (hidden, weight))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(2 * a, b)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_labels_that_were_written_into_are_refused(reduction: Any) -> None:
    hidden, weight, labels, _ = operands(6)
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum()
    labels.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction: Any) -> None:
    hidden, weight, labels, _ = operands(6)
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum()
    with pytest.raises(ConfigurationError, match="create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


# --- number formats -------------------------------------------------------------------------------


def test_autocast_gives_what_it_gives_the_plain_loss_to_its_rounding() -> None:
    hidden, weight, labels, bias = operands(40, dtype=torch.float32)
    inputs = [hidden, weight, bias]
    exact = torch.autograd.grad(plain_loss(hidden, weight, labels, bias=bias), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_bytes=300)
        want = plain_loss(hidden, weight, labels, bias=bias)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want.float(), rtol=1e-2, atol=1e-2)
    plain_gradients = torch.autograd.grad(want, inputs)
    for mine, plain, true in zip(
        torch.autograd.grad(got, inputs), plain_gradients, exact, strict=True
    ):
        assert mine.dtype == torch.float32
        assert (mine - true).norm() <= 1.2 * (plain - true).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_narrow_parameters_get_gradients_of_their_own_type(
    dtype: torch.dtype, softcap: float | None
) -> None:
    hidden, weight, labels, _ = operands(40, dtype=torch.float32)
    low = [x.detach().to(dtype).requires_grad_() for x in (hidden, weight)]
    wide = [x.detach().float().requires_grad_() for x in low]
    got = linear_cross_entropy(low[0], low[1], labels, chunk_bytes=300, softcap=softcap)
    want = plain_loss(wide[0], wide[1], labels, softcap=softcap)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    for mine, true in zip(
        torch.autograd.grad(got, low), torch.autograd.grad(want, wide), strict=True
    ):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.float(), true, rtol=3e-2, atol=1e-3)


def test_gradients_of_many_tokens_do_not_vanish_in_float16() -> None:
    """The mean's factor comes after the 16-bit products, as a loss scale comes before them."""
    hidden, weight, labels, _ = operands(64, dtype=torch.float32)
    low = [x.detach().half().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(low[0], low[1], labels, num_items=1e9) * 1e9
    true = plain_loss(hidden, weight, labels, reduction="sum")
    gradient = torch.autograd.grad(loss, low[0])[0].float()
    torch.testing.assert_close(gradient, torch.autograd.grad(true, hidden)[0], rtol=0.05, atol=0.01)


def test_16_bit_products_of_accelerators_are_added_up_slice_by_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, labels, _ = operands(40, dtype=torch.float32)
    low = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    wide = [x.detach().float().requires_grad_() for x in low]
    monkeypatch.setattr(module_of_loss, "multiplies_narrow", lambda hidden: True)
    monkeypatch.setattr(module_of_loss, "_SLICE_BYTES", 3 * 2 * WIDTH)
    got = linear_cross_entropy(low[0], low[1], labels, chunk_bytes=300)
    want = torch.autograd.grad(plain_loss(wide[0], wide[1], labels), wide[1])[0]
    gradient = torch.autograd.grad(got, low[1])[0]
    torch.testing.assert_close(gradient.float(), want, rtol=3e-2, atol=2e-3)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("trains_weight", [True, False])
@pytest.mark.parametrize("chunk_bytes", [2**18, 2**21])
def test_memory_is_the_planners_estimate(
    trains_weight: bool, softcap: float | None, chunk_bytes: int
) -> None:
    width, vocabulary, num_tokens = 64, 5000, 512
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).requires_grad_(trains_weight)
    labels = torch.randint(vocabulary, (num_tokens,), generator=generator)
    sizes = {"num_tokens": num_tokens, "hidden_size": width, "vocabulary": vocabulary}
    with Meter() as meter:
        loss = linear_cross_entropy(
            hidden, weight, labels, chunk_bytes=chunk_bytes, softcap=softcap
        )
        loss.backward()
    estimated = chunked_loss_bytes(
        **sizes,
        trains_weight=trains_weight,
        softcapped=softcap is not None,
        chunk_bytes=chunk_bytes,
    )
    assert 0.95 * estimated <= meter.peak_bytes <= 1.05 * estimated
    del loss
    hidden.grad = weight.grad = None
    with Meter() as meter:
        logits = functional.linear(hidden, weight)
        functional.cross_entropy(logits.float(), labels).backward()
    plain = plain_loss_bytes(**sizes, trains_weight=trains_weight)
    assert 0.9 * plain <= meter.peak_bytes <= 1.05 * plain
    labels[1:] = IGNORED  # ignored tokens cost nothing
    with torch.no_grad(), Meter() as meter:
        linear_cross_entropy(hidden, weight, labels)
    assert meter.count.matrix_operations == 2 * width * vocabulary


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_bytes", [1, 8 * 4 * VOCABULARY, 10**6])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_device_computes_while_the_host_waits_for_it_once(
    reduction: Any, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def note(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noted(first: Any, *rest: Any, **kwargs: Any) -> Any:
            calls.append(str(first) if owner is tagged_tensor else name)
            return original(first, *rest, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    given = operands(6)
    with EmulatedServer(1) as server, server.devices[0].thread_context():
        there = [tag(x, "emulated:0").requires_grad_(x.requires_grad) for x in given]
        note(ServedDevice, "mark_event")
        note(EmulatedEvent, "wait")
        note(tagged_tensor, "_execute")
        losses = linear_cross_entropy(*there[:3], reduction=reduction, chunk_bytes=chunk_bytes)
        losses.sum().backward()
        monkeypatch.undo()
        gradients = [untag(x.grad) for x in there[:2] if x.grad is not None]
    assert (calls.count("mark_event"), calls.count("wait")) == (1, 1)
    assert "aten.mm.default" in calls[calls.index("mark_event") : calls.index("wait")]
    want = plain_loss(*given[:3], reduction=reduction)
    torch.testing.assert_close(untag(losses.detach()), want)
    torch.testing.assert_close(gradients, [*torch.autograd.grad(want.sum(), given[:2])])


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "max"}, "reduction='max': set 'mean', 'sum' or 'none'"),
        ({"label_smoothing": 1.5}, "label_smoothing=1.5: give a share from 0 to 1"),
        ({"z_loss": -1.0}, "z_loss=-1.0: give a weight of 0 or more"),
        ({"softcap": 0.0}, "softcap=0.0: give the largest size of a logit"),
        ({"chunk_bytes": 0}, "chunk_bytes=0: give the bytes of a chunk"),
        ({"num_items": 3, "reduction": "sum"}, "num_items=3 with reduction='sum'"),
        ({"weight": torch.zeros(11, 4)}, r"hidden \(2, 3, 5\) and weight \(11, 4\) do not fit"),
        ({"labels": torch.zeros(6).long()}, r"labels \(6,\) do not fit hidden \(2, 3, 5\)"),
        ({"bias": torch.zeros(5)}, r"bias \(5,\) does not fit weight \(11, 5\)"),
        ({"labels": torch.zeros(2, 3)}, "labels of type torch.float32"),
        ({"hidden": torch.zeros(2, 3, 5).long()}, "hidden of type torch.int64"),
        ({"weight": torch.zeros(11, 5).half()}, "weight of type torch.float16: cast one of them"),
    ],
)
def test_bad_input_is_named(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "hidden": torch.zeros(2, 3, 5),
        "weight": torch.zeros(11, 5),
        "labels": torch.zeros(2, 3).long(),
    }
    with pytest.raises(ConfigurationError, match=message):
        linear_cross_entropy(**{**given, **change})


@pytest.mark.parametrize("label", [11, -1])
def test_a_label_outside_the_vocabulary_is_named(label: int) -> None:
    labels = torch.tensor([3, IGNORED, label])
    message = (
        rf"Label {label} \(number 2 of those that are not ignored\) is outside the vocabulary of 11"
    )
    with pytest.raises(DataError, match=message):
        linear_cross_entropy(torch.zeros(3, 5), torch.zeros(11, 5), labels)


# Its benchmarks -----------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]


def _benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module(name)


def test_memory_of_both_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _benchmark("linear_cross_entropy", monkeypatch)
    settings = argparse.Namespace(
        vocabulary=3000, hidden=16, tokens=200, parts=[2, 1], dtype="float32", device="cpu"
    )
    result = module.report(settings)
    assert result["tokens"] == [100, 200]
    for plain, chunked in zip(result["plain"], result["chunked"], strict=True):
        assert chunked["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert plain["peak_bytes"] == pytest.approx(4 * 4 * 3000 * plain["tokens"], rel=0.02)
    assert result["lines"]["plain"]["token_bytes"] == pytest.approx(4 * 4 * 3000, rel=0.02)
    planned = result["planned_bytes"]
    assert result["plain"][-1]["peak_bytes"] == pytest.approx(planned["plain"], rel=0.02)
    assert result["chunked"][-1]["peak_bytes"] == pytest.approx(planned["chunked"], rel=0.05)
    module.print_report(result)
    line = module.fit(
        [
            module.Measurement(tokens=n, peak_bytes=50 + 3 * n, seconds=0.0, loss=0.0)
            for n in (10, 20, 40)
        ]
    )
    assert (line.at(0), line.at(1000)) == (pytest.approx(50), pytest.approx(3050))


def test_architectures_are_fused_with_and_without_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = _benchmark("fused_losses", monkeypatch)

    def refuse(*_: Any) -> None:
        raise CaptureError("not this one")

    state = torch.get_rng_state()
    try:
        reports = [module.examine("gpt2")]
        monkeypatch.setattr(module, "engine_step", refuse)
        reports.append(module.examine("gpt2"))
    finally:
        torch.set_rng_state(state)
    assert [report.how for report in reports] == ["engine", "plain: CaptureError"]
    assert [report.made for report in reports] == [{}, {}]
    result = module.summary(reports)
    assert (result["total"], result["fused"], result["equal"]) == (2, 2, 2)
    assert 0 < result["largest_gradient_error"] < 1e-5


def test_differences_are_not_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    module = _benchmark("fused_losses", monkeypatch)
    fusion = module.LossFusion("fused")
    own = module.Step(losses=[2.0], gradients={"a": torch.ones(3), "b": torch.ones(1)})
    other = module.Step(losses=[2.0], gradients={"a": torch.ones(3), "b": torch.full((1,), 1.01)})
    missing = module.Step(losses=[2.0], gradients={"a": torch.ones(3)})
    assert module.compared("x", "engine", own, own, fusion).is_equal
    assert not module.compared("x", "engine", own, other, fusion).is_equal
    assert not module.compared("x", "engine", own, missing, fusion).is_equal


QWEN_VOCABULARY = 151_936


@given(
    num_tokens=st.integers(1, 40_000),
    vocabulary=st.integers(1, 300_000),
    bytes_per_logit=st.sampled_from([4, 6, 8, 10]),
    chunk_bytes=st.integers(1, 2**28),
)
def test_chunks_keep_to_the_budget_and_cover_everything(
    num_tokens: int, vocabulary: int, bytes_per_logit: int, chunk_bytes: int
) -> None:
    tokens = chunk_tokens(
        num_tokens=num_tokens,
        vocabulary=vocabulary,
        bytes_per_logit=bytes_per_logit,
        chunk_bytes=chunk_bytes,
    )
    assert 1 <= tokens <= num_tokens
    assert tokens * vocabulary * bytes_per_logit <= max(chunk_bytes, vocabulary * bytes_per_logit)


def test_32_thousand_tokens_take_a_twentieth_of_the_plain_loss() -> None:
    for hidden_size in (1024, 2048, 4096):
        for compute_bytes in (2, 4):
            sizes: dict[str, Any] = {
                "num_tokens": 32_768,
                "hidden_size": hidden_size,
                "vocabulary": QWEN_VOCABULARY,
                "compute_bytes": compute_bytes,
            }
            assert chunked_loss_bytes(**sizes) <= 0.05 * plain_loss_bytes(**sizes)
            frozen = chunked_loss_bytes(**sizes, trains_weight=False)
            assert chunked_loss_bytes(**sizes) - frozen == 4 * hidden_size * QWEN_VOCABULARY
