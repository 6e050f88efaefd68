import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.data.samples import Padding, Sample, as_row, packed_row, packed_rows


def sample(length: int, start: int = 0) -> Sample:
    return Sample.of(range(start, start + length))


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
