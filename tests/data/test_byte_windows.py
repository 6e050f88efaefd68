"""The data module."""

from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_lightning.data import ByteDataModule, TextFolder
from roundpipe_lightning.errors import ConfigurationError


def make_data(**options: Any) -> ByteDataModule:
    text = TextFolder(train_bytes=2_000, validation_bytes=500)
    return ByteDataModule(**{"seq_len": 16, "batch_size": 4, "text": text, **options})


def test_batches_of_the_standard_library() -> None:
    data = make_data()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 16)
    assert int(batch["input_ids"].max()) < data.num_tokens
    assert len(data.val_dataloader()) == len(data.test_dataloader()) > 0
    assert len(data.predict_dataloader()) == len(data.val_dataloader())


def test_reads_nothing_before_setup_and_once_in_it(tmp_path: Path) -> None:
    data = make_data(text=TextFolder(folder=str(tmp_path), train_bytes=70, validation_bytes=70))
    for number in range(4):
        (tmp_path / f"{number}.py").write_bytes(b"x" * 70)
    data.setup("fit")
    for path in tmp_path.iterdir():
        path.unlink()
    data.setup("test")


def test_the_seed_orders_training_and_leaves_validation() -> None:
    one, two = make_data(seed=1), make_data(seed=2)
    one.setup()
    two.setup()
    first, second = next(iter(one.train_dataloader())), next(iter(two.train_dataloader()))
    assert not torch.equal(first["input_ids"], second["input_ids"])
    first, second = next(iter(one.val_dataloader())), next(iter(two.val_dataloader()))
    assert torch.equal(first["input_ids"], second["input_ids"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 1}, "data.seq_len=1"),
        ({"batch_size": 0}, "data.batch_size=0"),
        ({"num_workers": -1}, "data.num_workers=-1"),
    ],
)
def test_refuses_figures_that_are_too_small(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_data(**options)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_refuses_too_little_text_for_one_batch(part: str) -> None:
    budgets = {"train_bytes": 2_000, "validation_bytes": 500, f"{part}_bytes": 20}
    data = make_data(text=TextFolder(**budgets))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=f"Raise data.text.{part}_bytes"):
        data.setup()
