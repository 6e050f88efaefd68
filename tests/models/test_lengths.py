"""The length of a batch's sequences, and the batch with shorter ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from roundpipe_lightning.models.lengths import length_of, shortened

IDS = torch.arange(12).view(2, 6)
MASK = torch.ones(2, 1, 6, 6, dtype=torch.bool)
FEATURES = torch.randn(2, 6, 3)


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        ({"input_ids": IDS, "labels": IDS, "mask": MASK}, 6),
        ((IDS, torch.zeros(2)), 6),
        ({"inputs": FEATURES, "labels": torch.zeros(2)}, 6),
        ({"input_ids": IDS, "choices": IDS[:, :4]}, None),  # two lengths
        ((torch.randn(2, 8), torch.randn(2, 1)), None),  # features, of no sequence
        ({"images": torch.randn(2, 3, 8, 8), "labels": torch.zeros(2)}, None),
        ("text", None),
    ],
)
def test_the_length_is_what_positions_share(batch: Any, length: int | None) -> None:
    assert length_of(batch) == length


def test_a_shorter_batch_has_its_first_positions() -> None:
    batch: dict[str, Any] = {
        "input_ids": IDS,
        "nested": [MASK, FEATURES],
        "weight": torch.ones(2),
        "name": "x",
    }
    short = shortened(batch, 4)
    assert torch.equal(short["input_ids"], IDS[:, :4])
    assert short["nested"][0].shape == (2, 1, 4, 4)
    assert torch.equal(short["nested"][1], FEATURES[:, :4])
    assert torch.equal(short["weight"], batch["weight"])
    assert short["name"] == "x"
    assert length_of(short) == 4
