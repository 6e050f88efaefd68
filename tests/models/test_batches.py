import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from roundpipe_lightning.errors import BatchError
from roundpipe_lightning.models.batches import batch_size_of, split_batch


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
        (rows(2), "2 rows cannot be split into 3.*drop_last"),
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
