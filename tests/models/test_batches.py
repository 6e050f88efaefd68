import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from roundpipe_lightning.errors import BatchError
from roundpipe_lightning.models.batches import (
    BatchCounts,
    batch_size_of,
    count_batch,
    length_of,
    shortened,
    split_batch,
)


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    scale: float


def rows(size: int = 5) -> Tensor:
    return torch.arange(size * 2).view(size, 2)


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        (rows(), [rows()[:2], rows()[2:4], rows()[4:]]),
        ({"x": rows(), "name": "a"}, [{"x": part, "name": "a"} for part in rows().split(2)]),
        (Pair(rows(), [rows()]), [Pair(part, [part]) for part in rows().split(2)]),
        (Sample(rows(), 0.5), [Sample(part, 0.5) for part in rows().split(2)]),
    ],
)
def test_batches_are_split_by_rows(batch: Any, wanted: list[Any]) -> None:
    assert batch_size_of(batch) == 5
    parts = split_batch(batch, 3)
    assert str(parts) == str(wanted)
    assert type(parts[0]) is type(batch)


def test_one_microbatch_is_the_batch_whatever_it_is() -> None:
    batch = object()
    assert split_batch(batch, 1) == [batch]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((rows(5), rows(4)), r"first dimensions of \[4, 5\]"),
        ({"name": "a"}, "no tensors"),
        (torch.tensor(1.0), "Tensor without dimensions"),
        (pack_sequence([torch.zeros(3), torch.zeros(2)]), "microbatching='blocks'"),
        ({"x": rows(), "y": object()}, "holds a object"),
    ],
)
def test_other_batches_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        split_batch(batch, 3)


IDS = torch.tensor([[5, 6, 7, 0], [5, 6, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
LABELS = torch.tensor([[5, -100, 7, -100], [5, 6, -100, -100]])


@pytest.mark.parametrize(
    ("batch", "samples", "tokens", "targets"),
    [
        pytest.param({"input_ids": IDS}, 2, 8, None, id="no mask: every position"),
        pytest.param({"input_ids": IDS, "attention_mask": MASK}, 2, 5, None, id="padding"),
        pytest.param({"input_ids": IDS, "attention_mask": MASK.bool()}, 2, 5, None, id="bools"),
        pytest.param(
            {"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}, 2, 5, 2, id="shifted"
        ),
        pytest.param(
            {"input_ids": IDS, "labels": torch.full_like(IDS, 9)}, 2, 8, 8, id="other labels"
        ),
        pytest.param(
            {"input_ids": IDS, "labels": torch.tensor([1, 0])}, 2, 8, None, id="a class per text"
        ),
        pytest.param(
            {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)}, 2, 8, None, id="4d mask"
        ),
        pytest.param(
            {
                "chosen_input_ids": IDS,
                "chosen_attention_mask": MASK,
                "rejected_input_ids": IDS[:, :3],
            },
            2,
            5 + 6,
            None,
            id="pairs",
        ),
        pytest.param((torch.zeros(3, 5), torch.zeros(3)), 3, None, None, id="no tokens"),
        pytest.param({"pixels": torch.zeros(3, 5)}, 3, None, None, id="no ids"),
        pytest.param({"input_ids": [1, 2]}, None, None, None, id="a list"),
        pytest.param(7, None, None, None, id="no batch"),
    ],
)
def test_counts(batch: Any, samples: int | None, tokens: int | None, targets: int | None) -> None:
    assert count_batch(batch) == BatchCounts(samples=samples, tokens=tokens, targets=targets)


def test_a_function_counts_tokens() -> None:
    found = count_batch((torch.zeros(3, 5), torch.zeros(3)), tokens=lambda batch: batch[0].numel())
    assert found == BatchCounts(samples=3, tokens=15, targets=None)


# --- lengths --------------------------------------------------------------------------------------

POSITIONS = torch.arange(12).view(2, 6)
SQUARE_MASK = torch.ones(2, 1, 6, 6, dtype=torch.bool)
FEATURES = torch.randn(2, 6, 3)


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        ({"input_ids": POSITIONS, "labels": POSITIONS, "mask": SQUARE_MASK}, 6),
        ((POSITIONS, torch.zeros(2)), 6),
        ({"inputs": FEATURES, "labels": torch.zeros(2)}, 6),
        ({"input_ids": POSITIONS, "choices": POSITIONS[:, :4]}, None),  # two lengths
        ((torch.randn(2, 8), torch.randn(2, 1)), None),  # features, of no sequence
        ({"images": torch.randn(2, 3, 8, 8), "labels": torch.zeros(2)}, None),
        ("text", None),
    ],
)
def test_the_length_is_what_positions_share(batch: Any, length: int | None) -> None:
    assert length_of(batch) == length


def test_a_shorter_batch_has_its_first_positions() -> None:
    batch: dict[str, Any] = {
        "input_ids": POSITIONS,
        "nested": [SQUARE_MASK, FEATURES],
        "weight": torch.ones(2),
        "name": "x",
    }
    short = shortened(batch, 4)
    assert torch.equal(short["input_ids"], POSITIONS[:, :4])
    assert short["nested"][0].shape == (2, 1, 4, 4)
    assert torch.equal(short["nested"][1], FEATURES[:, :4])
    assert torch.equal(short["weight"], batch["weight"])
    assert short["name"] == "x"
    assert length_of(short) == 4
