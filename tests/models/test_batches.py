"""Batches of every shape are split by samples, and outputs are joined again."""

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from roundpipe_lightning.errors import BatchError
from roundpipe_lightning.models.batches import batch_size_of, merge_outputs, split_batch


class Pair(NamedTuple):
    x: Tensor
    y: Any


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    scale: float
    twice: Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", self.x * 2)


def _rows(size: int = 5) -> Tensor:
    return torch.arange(size * 2).view(size, 2)


# --- splitting ------------------------------------------------------------------------------------


@given(size=st.integers(2, 40), num=st.integers(2, 12))
def test_sizes_are_those_of_tensor_split(size: int, num: int) -> None:
    rows = _rows(size)
    if size < num:
        with pytest.raises(BatchError):
            split_batch(rows, num)
        return
    for part, expected in zip(split_batch(rows, num), rows.tensor_split(num), strict=True):
        assert torch.equal(part, expected)


def test_slices_are_views() -> None:
    rows = _rows()
    assert split_batch(rows, 2)[0].data_ptr() == rows.data_ptr()


def test_dicts_lists_and_what_belongs_to_all() -> None:
    batch = {
        "x": _rows(),
        "inner": ({"y": torch.arange(5)}, [torch.ones(5, 1), None]),
        "names": list("abcde"),
        "classes": ["cat", "dog"],
        "numbers": [1, 2, 3, 4, 5],
        "name": "batch",
        "step": 3,
        "temperature": torch.tensor(0.5),
        "nothing": None,
        "array": np.arange(5),
    }
    first, second = split_batch(batch, 2)
    assert torch.equal(first["x"], _rows()[:3])
    assert torch.equal(second["inner"][0]["y"], torch.tensor([3, 4]))
    assert second["inner"][1][0].shape == (2, 1)
    assert second["inner"][1][1] is None
    assert (first["names"], second["names"]) == (["a", "b", "c"], ["d", "e"])
    assert second["classes"] == ["cat", "dog"]
    assert second["numbers"] == [4, 5]
    assert (second["name"], second["step"], second["nothing"]) == ("batch", 3, None)
    assert second["temperature"] is batch["temperature"]
    assert second["array"].tolist() == [3, 4]
    assert batch_size_of(batch) == 5


@pytest.mark.parametrize("kind", [list, tuple])
def test_the_lists_and_tuples_of_a_loader(kind: type) -> None:
    first, second = split_batch(kind([_rows(2), torch.arange(2)]), 2)
    assert type(first) is kind
    assert second[0].tolist() == [[2, 3]]
    assert second[1].tolist() == [1]


def test_types_are_kept() -> None:
    pair = split_batch(Pair(_rows(), {"z": _rows()}), 2)[1]
    assert isinstance(pair, Pair)
    assert pair.y["z"].shape == (2, 2)
    sample = split_batch(Sample(_rows(), 0.5), 2)[1]
    assert isinstance(sample, Sample)
    assert sample.scale == 0.5
    assert torch.equal(sample.twice, sample.x * 2)
    ordered = split_batch(OrderedDict(x=_rows()), 2)[0]
    assert isinstance(ordered, OrderedDict)
    proxy = split_batch(MappingProxyType({"x": _rows()}), 2)[0]
    assert isinstance(proxy, MappingProxyType)
    old = namedtuple("old", "a b")
    assert split_batch(old(_rows(), 1), 2)[1].a.shape == (2, 2)


def test_mappings_with_attributes_keep_them() -> None:
    from transformers import BatchEncoding

    batch: UserDict[str, Tensor] = BatchEncoding({"input_ids": _rows()}, n_sequences=1)
    first, second = split_batch(batch, 2)
    assert type(second) is BatchEncoding
    assert second.n_sequences == 1
    assert torch.equal(second["input_ids"], _rows()[3:])
    assert torch.equal(first.input_ids, _rows()[:3])
    assert torch.equal(batch["input_ids"], _rows())


def test_texts_alone() -> None:
    assert split_batch(["a", "b", "c"], 2) == [["a", "b"], ["c"]]
    assert split_batch({"prompt": ["a", "b", "c"]}, 3)[2] == {"prompt": ["c"]}


def test_one_element_per_sample() -> None:
    images = torch.zeros(3, 1)
    boxes = [{"boxes": torch.zeros(n, 4)} for n in (2, 2, 5)]
    first, second = split_batch([images, boxes], 2)
    assert [b["boxes"].shape[0] for b in first[1]] == [2, 2]
    assert second[1] == [boxes[2]]
    equal = [torch.zeros(7), torch.ones(7), torch.ones(7)]
    assert len(split_batch({"x": images, "audio": equal}, 2)[0]["audio"]) == 2


def test_one_microbatch_takes_anything() -> None:
    for batch in (None, 3, "text", object(), {"x": _rows(2), "y": _rows(3)}):
        assert split_batch(batch, 1) == [batch]


# --- refusals -------------------------------------------------------------------------------------


def test_too_few_samples_names_both_numbers_and_the_ways_out() -> None:
    with pytest.raises(BatchError) as caught:
        split_batch({"x": _rows(3)}, 4)
    message = str(caught.value)
    assert "3 samples" in message
    assert "4 microbatches" in message
    assert "drop_last=True" in message
    assert "num_microbatches to 3 or less" in message
    assert "'auto'" in message


def test_leaves_that_disagree_are_named_with_their_lengths() -> None:
    with pytest.raises(BatchError) as caught:
        split_batch({"x": _rows(4), "inner": (_rows(2), 1)}, 2)
    assert "batch['x']: 4, batch['inner'][0]: 2" in str(caught.value)


@pytest.mark.parametrize("batch", [{}, [], None, 3, "text", torch.tensor(1), {"x": None}, [1, 2]])
def test_nothing_to_count_by(batch: Any) -> None:
    with pytest.raises(BatchError, match="no tensor with a batch dimension"):
        split_batch(batch, 2)


def test_lists_that_can_be_read_either_way() -> None:
    states = [_rows(2), _rows(2)]
    with pytest.raises(BatchError, match="tuple"):
        split_batch({"x": _rows(2), "states": states}, 2)
    assert split_batch({"x": _rows(2), "states": tuple(states)}, 2)[0]["states"][1].shape == (1, 2)


def test_lists_that_fit_in_no_way() -> None:
    with pytest.raises(BatchError, match="4 samples, but also a list of 2 elements"):
        split_batch({"x": _rows(4), "states": [_rows(3), _rows(5)]}, 2)


def test_packed_sequences() -> None:
    with pytest.raises(BatchError, match=r"batch\['x'\] is a PackedSequence"):
        split_batch({"x": pack_sequence([torch.ones(3), torch.ones(2)])}, 2)


# --- joining --------------------------------------------------------------------------------------

SIZES, WEIGHTS = (2, 1), (0.75, 0.25)


def test_tensors_per_sample_are_concatenated() -> None:
    rows = _rows(3)
    assert torch.equal(merge_outputs([rows[:2], rows[2:]], SIZES, WEIGHTS), rows)


def test_means() -> None:
    loss = merge_outputs([torch.tensor(1.0), torch.tensor(2.0)], SIZES, WEIGHTS)
    assert loss.item() == 1.25
    assert merge_outputs([1.0, 2.0], SIZES, WEIGHTS) == 1.25


def test_dicts_are_joined_key_by_key() -> None:
    outputs = [
        {"loss": torch.tensor(1.0), "logits": torch.zeros(2, 3), "count": 4, "extra": None},
        {"loss": torch.tensor(2.0), "logits": torch.ones(1, 3), "count": 2, "extra": None},
    ]
    merged = merge_outputs(outputs, SIZES, WEIGHTS)
    assert merged["loss"].item() == 1.25
    assert merged["logits"].shape == (3, 3)
    assert merged["count"] == [4, 2]
    assert merged["extra"] is None


@pytest.mark.parametrize(
    "outputs",
    [
        [torch.zeros(2, 3), torch.zeros(1, 4)],
        [torch.zeros(3), torch.zeros(3)],
        [torch.tensor(1), torch.tensor(2)],
        [torch.tensor(1.0), None],
        [{"a": 1}, {"b": 1}],
        [["a", "b"], ["c"]],
        [True, False],
    ],
)
def test_all_else_is_a_list(outputs: list[Any]) -> None:
    merged = merge_outputs(outputs, SIZES, WEIGHTS)
    assert type(merged) is list
    assert all(a is b for a, b in zip(merged, outputs, strict=True))


def test_none_and_one() -> None:
    assert merge_outputs([None, None], SIZES, WEIGHTS) is None
    output = object()
    assert merge_outputs([output], (3,), (1.0,)) is output


def test_a_mean_leaves_out_what_has_no_weight() -> None:
    outputs = [torch.tensor(float("nan")), torch.tensor(3.0)]
    assert merge_outputs(outputs, sizes=[1, 1], weights=[0.0, 1.0]) == 3.0
