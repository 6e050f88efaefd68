import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundpipe_lightning.data import ClassificationDataModule, TextDataModule
from roundpipe_lightning.data.samples import Padding, Sample, as_row, packed_row, packed_rows
from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.modules import TokenizerSource

LINES = [f"{number:02}" * 5 for number in range(20)]  # 10 bytes each, 11 tokens with the end


def make(folder: Path, texts: list[str] = LINES, **options: Any) -> TextDataModule:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    settings = {"seq_len": 16, "batch_size": 2, "validation_share": 0.25, **options}
    return TextDataModule(files=[str(path)], tokenizer=TokenizerSource(), **settings)


def test_windows_have_every_token_once_and_in_order(tmp_path: Path) -> None:
    data = make(tmp_path)
    data.setup()
    windows = [row for batch in data.val_dataloader() for row in batch["input_ids"]]
    text = data.tokenizer.decode(torch.cat(windows))
    assert len(windows) == 5 * 11 // 16
    pieces = text.split("<|im_end|>")
    assert all(piece in LINES for piece in pieces[:-1])
    assert any(line.startswith(pieces[-1]) for line in LINES)


def test_texts_in_a_window_are_kept_apart(tmp_path: Path) -> None:
    data = make(tmp_path)
    data.setup()
    batch = next(iter(data.val_dataloader()))
    assert data.packs_documents
    assert batch["position_ids"][0].tolist() == [*range(11), *range(5)]
    assert batch["position_ids"][1].tolist() == [*range(6), *range(10)]
    starts = batch["position_ids"] == 0
    assert (batch["labels"][starts] == -100).all()
    assert torch.equal(batch["labels"][~starts], batch["input_ids"][~starts])


def test_texts_may_see_each_other(tmp_path: Path) -> None:
    data = make(tmp_path, keep_apart=False)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert not data.packs_documents
    assert set(batch) == {"input_ids", "labels"}
    assert torch.equal(batch["input_ids"], batch["labels"])


def test_a_long_text_makes_several_windows(tmp_path: Path) -> None:
    data = make(tmp_path, ["x" * 100, "y" * 100], validation_share=0.5, batch_size=1)
    data.setup()
    assert len(data.train_dataloader()) == 101 // 16


def test_plain_text_files_are_documents(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name * 40, encoding="utf-8")
    data = TextDataModule(
        files=[str(tmp_path)], tokenizer=TokenizerSource(), seq_len=8, batch_size=1
    )
    data.setup()
    assert len(data.train_dataloader()) == 3 * 41 // 8


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"texts\.jsonl, line 3: the field 'text' is empty"):
        make(tmp_path, ["a", "b", "  "]).setup()


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    data = make(tmp_path)
    data.tokenizer.eos_token = None
    with pytest.raises(ConfigurationError, match=r"'bytes' has no end-of-text token.*eos_token"):
        data.setup()


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


TEXTS = [{"text": "fine", "label": "good"}, {"text": "oh no", "label": "bad"}] * 5


def make_classes(path: Path, **options: Any) -> ClassificationDataModule:
    settings = {"classes": ["bad", "good"], "seq_len": 16, "batch_size": 4, **options}
    return ClassificationDataModule(files=[str(path)], tokenizer=TokenizerSource(), **settings)


def write(folder: Path, *records: Any) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def test_a_batch_has_one_class_for_every_text(tmp_path: Path) -> None:
    data = make_classes(write(tmp_path, *TEXTS, {"text": "good", "label": 1}))
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert batch["labels"].shape == (4,)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, 8)
    texts = [data.tokenizer.decode(row[row != 0]) for row in batch["input_ids"]]
    classes = ["bad" if text == "oh no" else "good" for text in texts]
    assert [data.classes[label] for label in batch["labels"]] == classes


def test_a_csv_file_will_do(tmp_path: Path) -> None:
    path = tmp_path / "texts.csv"
    path.write_text("review,mark\n" + 'fine,good\n"oh, no",bad\n' * 5, encoding="utf-8")
    data = make_classes(path, field="review", label_field="mark")
    data.setup()
    batch = next(iter(data.val_dataloader()))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x", "label": "meh"}, r"'label' is 'meh', which is neither .*\(bad, good\)"),
        ({"text": "x", "label": 2}, r"'label' is 2, which is neither"),
        ({"text": "x", "label": True}, r"'label' is True, which is neither"),
        ({"text": "x"}, r"there is no field 'label'"),
        ({"label": "bad"}, r"there is no field 'text'"),
        ({"text": "", "label": "bad"}, r"the field 'text' is empty"),
        ({"text": "x" * 20, "label": "bad"}, r"20 tokens, more than data\.seq_len=16"),
    ],
)
def test_a_text_that_cannot_be_used_is_named(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"texts\.jsonl, line 11: .*{message}"):
        make_classes(write(tmp_path, *TEXTS, record)).setup()


def test_long_texts_can_be_dropped_or_cut(tmp_path: Path) -> None:
    path = write(tmp_path, *TEXTS, {"text": "x" * 20, "label": "bad"})
    dropped = make_classes(path, too_long="drop")
    dropped.setup()
    assert sum(dropped.skipped.values()) == 1
    make_classes(path, too_long="cut_end").setup()


def test_classes_are_checked(tmp_path: Path) -> None:
    for wrong in (["one"], ["one", "one"]):
        with pytest.raises(ConfigurationError, match=r"at least two classes, no name twice"):
            make_classes(tmp_path, classes=wrong)
