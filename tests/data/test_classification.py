import json
from pathlib import Path
from typing import Any

import pytest

from roundpipe_lightning.data import ClassificationDataModule
from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.modules import TokenizerSource

TEXTS = [{"text": "fine", "label": "good"}, {"text": "oh no", "label": "bad"}] * 5


def make(path: Path, **options: Any) -> ClassificationDataModule:
    settings = {"classes": ["bad", "good"], "seq_len": 16, "batch_size": 4, **options}
    return ClassificationDataModule(files=[str(path)], tokenizer=TokenizerSource(), **settings)


def write(folder: Path, *records: Any) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return path


def test_a_batch_has_one_class_for_every_text(tmp_path: Path) -> None:
    data = make(write(tmp_path, *TEXTS, {"text": "good", "label": 1}))
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
    data = make(path, field="review", label_field="mark")
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
        make(write(tmp_path, *TEXTS, record)).setup()


def test_long_texts_can_be_dropped_or_cut(tmp_path: Path) -> None:
    path = write(tmp_path, *TEXTS, {"text": "x" * 20, "label": "bad"})
    dropped = make(path, too_long="drop")
    dropped.setup()
    assert sum(dropped.skipped.values()) == 1
    make(path, too_long="cut_end").setup()


def test_classes_are_checked(tmp_path: Path) -> None:
    for wrong in (["one"], ["one", "one"]):
        with pytest.raises(ConfigurationError, match=r"at least two classes, no name twice"):
            make(tmp_path, classes=wrong)
