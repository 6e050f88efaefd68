from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_lightning.data import ByteDataModule, TextFolder
from roundpipe_lightning.data.text import find_files
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules import TokenizerSource


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
