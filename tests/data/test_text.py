import json
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_lightning.data import TextDataModule
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
