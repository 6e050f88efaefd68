"""Cutting, packing and padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.data.samples import (
    Padding,
    Sample,
    TooLong,
    as_row,
    packed_row,
    packed_rows,
)
from roundpipe_lightning.errors import DataError


def sample(length: int, start: int = 0) -> Sample:
    return Sample.of(range(start, start + length))


def test_the_first_token_is_never_predicted() -> None:
    assert sample(3).labels.tolist() == [-100, 1, 2]
    assert Sample.of([5, 6, 7], targets=[True, False, True]).labels.tolist() == [-100, -100, 7]
    cut = sample(5)[2:]
    assert (cut.input_ids.tolist(), cut.labels.tolist()) == ([2, 3, 4], [-100, 3, 4])
    assert cut.num_targets == 2


def test_what_is_too_long_is_cut_dropped_or_refused() -> None:
    long = sample(5)

    def apply(policy: TooLong, limit: int = 3) -> Sample | None:
        return policy.apply(long, limit=limit, place="a.jsonl, line 4")

    assert apply(TooLong.REFUSE, limit=5) is long
    assert apply(TooLong.DROP) is None
    ends = [apply(policy) for policy in (TooLong.CUT_END, TooLong.CUT_START)]
    assert [end.input_ids.tolist() for end in ends if end] == [[0, 1, 2], [2, 3, 4]]
    with pytest.raises(DataError, match=r"line 4: .*5 tokens, more than data\.seq_len=3"):
        apply(TooLong.REFUSE)


@given(st.lists(st.integers(1, 10), min_size=1, max_size=30))
def test_packing_keeps_every_sample_whole(lengths: list[int]) -> None:
    samples = [sample(length, start=100 * index) for index, length in enumerate(lengths)]
    rows = packed_rows(samples, seq_len=10)
    found = []
    for row in rows:
        assert len(row["input_ids"]) <= 10
        starts = torch.nonzero(row["position_ids"] == 0).flatten().tolist()
        assert (row["labels"][starts] == -100).all()
        for start, stop in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
            found.append(row["input_ids"][start:stop].tolist())
            assert row["position_ids"][start:stop].tolist() == list(range(stop - start))
    assert sorted(found) == sorted(one.input_ids.tolist() for one in samples)
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // 10) * 2  # far from one row for each


def test_packing_fills_the_row_that_is_fullest() -> None:
    rows = packed_rows([sample(n) for n in (6, 5, 4, 3, 2)], seq_len=10)
    assert [len(row["input_ids"]) for row in rows] == [10, 10]


def test_padding_is_ignored_and_masked() -> None:
    batch = Padding(pad_token=9, multiple_of=4)([as_row(sample(5)), as_row(sample(2, start=7))])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4, 9, 9, 9], [7, 8, 9, 9, 9, 9, 9, 9]]
    assert batch["attention_mask"].sum(dim=1).tolist() == [5, 2]
    assert batch["labels"][1].tolist() == [-100, 8, -100, -100, -100, -100, -100, -100]


def test_padding_of_a_packed_row_is_a_document_of_its_own() -> None:
    rows = [packed_row([sample(2), sample(3)]), packed_row([sample(2)])]
    batch = Padding(pad_token=9)(rows)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2], [0, 1, 0, 1, 2]]
    assert "attention_mask" not in batch
    assert batch["labels"][1].tolist() == [-100, 1, -100, -100, -100]


def test_padding_takes_pairs_and_values_of_a_sample() -> None:
    rows = [
        {"input_ids": torch.ones(2, length, dtype=torch.int64), "labels": torch.tensor(length)}
        for length in (3, 1)
    ]
    batch = Padding(pad_token=0)(rows)
    assert batch["input_ids"].shape == (2, 2, 3)
    assert batch["labels"].tolist() == [3, 1]
