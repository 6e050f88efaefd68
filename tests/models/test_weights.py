"""Weights are shares of what the loss averages over."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.errors import BatchError, ConfigurationError
from roundpipe_lightning.models.batches import split_batch
from roundpipe_lightning.models.weights import MicrobatchWeight, microbatch_weights


def _batch(lengths: list[int], *, width: int = 8) -> dict[str, Tensor]:
    """Padded sequences: labels are the inputs, -100 on the padding."""
    ids = torch.arange(len(lengths) * width).view(len(lengths), width) + 1
    padding = torch.arange(width)[None] >= torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "labels": ids.masked_fill(padding, -100)}


def _weights(batch: Any, num: int, mode: MicrobatchWeight = "auto") -> tuple[float, ...]:
    return microbatch_weights(split_batch(batch, num), mode)


def test_samples() -> None:
    assert _weights(torch.zeros(5, 2), 2) == (3 / 5, 2 / 5)
    assert _weights({"x": torch.zeros(4)}, 4, "samples") == (0.25,) * 4


def test_a_shifting_model_has_no_target_in_the_first_column() -> None:
    batch = _batch([8, 2, 3, 1])
    assert _weights(batch, 4) == (7 / 10, 1 / 10, 2 / 10, 0.0)
    assert _weights(batch, 4, "tokens") == _weights(batch, 4)


def test_labels_that_are_not_the_inputs_count_in_full() -> None:
    batch = _batch([8, 2, 3, 1])
    batch["input_ids"] = batch["input_ids"] + 1  # shifted by the data, say
    assert _weights(batch, 4) == (8 / 14, 2 / 14, 3 / 14, 1 / 14)


def test_the_decision_is_the_whole_batch_s() -> None:
    batch = _batch([8, 4])
    batch["input_ids"][1, 1] = 0
    assert _weights(batch, 2) == (8 / 12, 4 / 12)


def test_prompts_that_are_ignored() -> None:
    batch = _batch([8, 8])
    batch["labels"][0, :6] = -100
    assert _weights(batch, 2) == (2 / 9, 7 / 9)


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.ones(4, 8).long(), "labels": torch.tensor([1, 0, -100, -100])},
        {"input_ids": torch.ones(4, 8).long(), "labels": torch.full((4, 8), 0.5)},
        {"labels": torch.full((4, 8), -100)},
        {"pixels": torch.ones(4, 8), "labels": torch.full((4,), -100)},
    ],
)
def test_auto_counts_samples_of_all_else(batch: dict[str, Tensor]) -> None:
    assert _weights(batch, 2) == (0.5, 0.5)


def test_tokens_of_one_label_per_sample() -> None:
    batch = {"x": torch.ones(4, 8), "labels": torch.tensor([1, 0, 1, -100])}
    assert _weights(batch, 2, "tokens") == (2 / 3, 1 / 3)


def test_a_function() -> None:
    batch = {"x": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    assert _weights(batch, 2, lambda m: m["x"].sum()) == (0.3, 0.7)


def test_one_microbatch_weighs_all() -> None:
    assert microbatch_weights([object()], "auto") == (1.0,)


def test_the_mean_over_the_batch_is_the_weighted_sum() -> None:
    batch = _batch([8, 2, 3, 1, 5, 7], width=8)
    logits = torch.randn(6, 8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(rows: dict[str, Tensor]) -> Tensor:
        predicted = rows["logits"][:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(predicted, rows["labels"][:, 1:].flatten())

    batch["logits"] = logits
    parts = split_batch(batch, 4)
    weights = microbatch_weights(parts, "auto")
    assert sum(weights) == pytest.approx(1)
    total = sum(loss(part) * weight for part, weight in zip(parts, weights, strict=True))
    assert torch.allclose(torch.as_tensor(total), loss(batch), rtol=1e-12)


# --- refusals -------------------------------------------------------------------------------------


def test_nothing_to_count() -> None:
    batch = _batch([8, 8])
    batch["labels"][:, 1:] = -100
    with pytest.raises(BatchError, match="No label of the batch is a target"):
        _weights(batch, 2)
    with pytest.raises(BatchError, match="returned 0 for every microbatch"):
        _weights(batch, 2, lambda _: 0)


def test_no_labels() -> None:
    for batch in (torch.zeros(4, 2), {"x": torch.zeros(4)}, [torch.zeros(4), torch.zeros(4)]):
        with pytest.raises(BatchError, match="key 'labels'"):
            _weights(batch, 2, "tokens")


@pytest.mark.parametrize("count", [-1.0, float("nan"), float("inf")])
def test_functions_that_count_wrongly(count: float) -> None:
    with pytest.raises(BatchError, match="finite number"):
        _weights(torch.zeros(4), 2, lambda _: count)


def test_unknown_mode() -> None:
    with pytest.raises(ConfigurationError, match="microbatch_weight='words'"):
        _weights(torch.zeros(4), 2, "words")  # type: ignore[arg-type]
