import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from roundpipe_lightning.data import (
    ByteDataModule,
    ChatDataModule,
    ClassificationDataModule,
    TextDataModule,
    TextFolder,
)
from roundpipe_lightning.data.samples import Padding, Sample, as_row, packed_row, packed_rows
from roundpipe_lightning.data.text import find_files
from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.modules import TokenizerSource, byte_level_tokenizer

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


@pytest.mark.parametrize("chat", [False, True])
def test_texts_begin_and_end_as_the_tokenizer_writes_them(tmp_path: Path, chat: bool) -> None:
    made = byte_level_tokenizer()
    made.add_special_tokens({"bos_token": "<bos>"})
    begin, end = ("<bos>", made.bos_token_id), ("<|im_end|>", made.eos_token_id)
    for number, single in enumerate(["<bos> $A", "<bos> $A <|im_end|>"]):
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=[begin, end]
        )
        made.save_pretrained(tmp_path / f"{number}")
        source = TokenizerSource(name=str(tmp_path / f"{number}"))
        (tmp_path / "a.txt").write_text("ab")
        options: Any = {"files": [str(tmp_path / "a.txt")], "tokenizer": source, "batch_size": 1}
        options |= {"seq_len": 4, "validation_share": 0}
        data = ChatDataModule(**options, packing=False) if chat else TextDataModule(**options)
        data.setup()
        assert made.decode(data.train_rows[0]["input_ids"]) == "<bos>ab<|im_end|>"


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
        ({"text": "x", "label": 0.5}, r"'label' is 0\.5, which is neither"),
        ({"text": "x", "label": None}, r"'label' is None, which is neither"),
        ({"text": "cut \ud83d", "label": "bad"}, r"half of a character.*'cut \\ud83d'\. Mend"),
        ({"text": "x"}, r"there is no field 'label'.*'text'"),
        ({"label": "bad"}, r"there is no field 'text'"),
        ({"text": "", "label": "bad"}, r"the field 'text' is empty"),
        ({"text": "x" * 20, "label": "bad"}, r"20 tokens, more than data\.seq_len=16"),
    ],
)
def test_a_text_that_cannot_be_used_is_named(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"texts\.jsonl, line 11: .*{message}"):
        make_classes(write(tmp_path, *TEXTS, record)).setup()


@pytest.mark.parametrize(
    ("classes", "labels", "numbers"),
    [
        (["bad", "good"], ["good", 1, "1", 1.0, True, "True", 0, False], [1] * 6 + [0, 0]),
        ([0, 1], ["1", 1, 1.0, "0", 0], [1, 1, 1, 0, 0]),
        ([1, 2], ["1", 2, 1], [0, 1, 0]),  # names that are numbers are names
        ([True, False], ["true", False, "False"], [0, 1, 1]),
        (["a", "b", "c"], ["2", 0, "b"], [2, 0, 1]),
    ],
)
def test_a_class_is_a_name_or_a_number(
    tmp_path: Path, classes: list[Any], labels: list[Any], numbers: list[int]
) -> None:
    path = write(tmp_path, *({"text": "x", "label": label} for label in labels))
    table = tmp_path / "texts.csv"
    table.write_text("text,label\n" + "".join(f"x,{label}\n" for label in labels))
    for each in (path, table):
        data = make_classes(each, classes=classes, validation_share=0, batch_size=1)
        data.setup()
        assert [int(row["labels"]) for row in data.train_rows] == numbers
    for wrong in (0, "0"):
        if "1" in map(str, classes) and "0" not in map(str, classes):
            with pytest.raises(DataError, match=r"which is neither one of data\.classes \(1, 2\)"):
                make_classes(write(tmp_path, {"text": "x", "label": wrong}), classes=[1, 2]).setup()


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


# Bytes --------------------------------------------------------------------------------------------


def make_data(**options: Any) -> ByteDataModule:
    text = TextFolder(train_bytes=2_000, validation_bytes=500)
    given = {"seq_len": 16, "batch_size": 4, "text": text, "tokenizer": TokenizerSource()}
    return ByteDataModule(**{**given, **options})


def fill(folder: Path) -> None:
    for number in range(20):
        path = folder / f"package{number % 3}" / f"module{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([65 + number]) * 10)
    (folder / "notes.txt").write_text("not Python")
    for skipped in ("test", "site-packages"):
        (folder / skipped).mkdir()
        (folder / skipped / "module.py").write_text("skipped")


def test_batches_of_the_standard_library() -> None:
    data = make_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 16)
    assert int(batch["input_ids"].max()) < data.num_tokens
    loaders = (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader())
    assert len({len(loader) for loader in loaders}) == 1


def test_reads_nothing_before_setup_and_once_in_it(tmp_path: Path) -> None:
    data = make_data(text=TextFolder(folder=str(tmp_path), train_bytes=70, validation_bytes=70))
    for number in range(4):
        (tmp_path / f"{number}.py").write_bytes(b"x" * 70)
    data.setup("fit")
    for path in tmp_path.iterdir():
        path.unlink()
    data.setup("test")


def epoch(number: int, *, part: str = "train", **options: Any) -> list[list[int]]:
    data = make_data(**options)
    data.setup()
    loader: Any = getattr(data, f"{part}_dataloader")()
    if part == "train":
        loader.sampler.set_epoch(number)
    torch.manual_seed(number)
    return [row for batch in loader for row in batch["input_ids"].tolist()]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first = epoch(0, seed=1)
    assert epoch(0, seed=1, num_workers=1) == first  # prepared by another process
    for other in (epoch(0, seed=7), epoch(1, seed=1)):
        assert other != first
        assert len(other) == len(first)
    assert epoch(0, part="val", seed=1) == epoch(1, part="val", seed=7)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_len", 1),
        ("batch_size", 0),
        ("num_workers", -1),
        ("text.train_bytes", 0),
        ("text.validation_bytes", -1),
    ],
)
def test_refuses_figures_that_are_too_small(name: str, value: int) -> None:
    make: Any = TextFolder if name.startswith("text.") else make_data
    with pytest.raises(ConfigurationError, match=f"data.{name}={value} must be"):
        make(**{name.removeprefix("text."): value})


@pytest.mark.parametrize(
    ("part", "message"),
    [("train", "make 0 rows, less than one batch"), ("validation", "shorter than one window")],
)
def test_refuses_too_little_text(part: str, message: str) -> None:
    budgets: Any = {"train_bytes": 2_000, "validation_bytes": 500, f"{part}_bytes": 10}
    with pytest.raises(ConfigurationError, match=message):
        make_data(text=TextFolder(**budgets)).setup()


def test_the_order_depends_on_the_paths_alone(tmp_path: Path) -> None:
    fill(tmp_path)
    files = find_files(tmp_path, pattern="*.py")
    assert len(files) == 20
    assert files != sorted(files)
    moved = tmp_path / "moved"
    moved.mkdir()
    fill(moved)
    names = [path.relative_to(tmp_path) for path in files]
    assert [path.relative_to(moved) for path in find_files(moved, pattern="*.py")] == names


@pytest.mark.parametrize(("budget", "num_trained"), [(43, 43), (10_000, 170)])
def test_budgets_hold_exactly_and_no_file_is_in_both_parts(
    tmp_path: Path, budget: int, num_trained: int
) -> None:
    fill(tmp_path)
    text = TextFolder(folder=str(tmp_path), train_bytes=budget, validation_bytes=25)
    train, validation = (
        [record.text("text") for part in each.parts() for record in each.read(part)]
        for each in (text, replace(text, is_validation=True))
    )
    assert sum(map(len, validation)) == 25
    assert sum(map(len, train)) == num_trained
    assert not {text[:1] for text in train} & {text[:1] for text in validation}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": "nowhere"}, "nowhere"),
        ({"pattern": "*.rs"}, r"data.text.pattern='\*.rs'"),
        ({"validation_bytes": 200}, r"Lower data\.text\.validation_bytes"),
    ],
)
def test_text_that_is_not_there_is_named(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    fill(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        TextFolder(**{"folder": str(tmp_path), **options}).parts()
