import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from roundpipe_lightning.data import ChatDataModule, TextDataModule
from roundpipe_lightning.data.samples import StreamLoader
from roundpipe_lightning.errors import CheckpointError, ConfigurationError, DataError
from roundpipe_lightning.modules import TokenizerSource
from tests.kit.training import make_trainer


def write(folder: Path, num_files: int = 3, num_texts: int = 20) -> list[str]:
    paths = []
    for file in range(num_files):
        path = folder / f"{file}.jsonl"
        texts = [f"{file}{text:02}" * (1 + text % 5) for text in range(num_texts)]
        if file == 0:
            texts[-1] = "abcdefgh" * 20  # makes several batches
        path.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
        paths.append(str(path))
    return paths


def make(folder: Path, *, chat: bool = False, **options: Any) -> Any:
    paths = write(folder)
    settings = {"seq_len": 8, "batch_size": 2, "run_records": 7, **options}
    kind = ChatDataModule if chat else TextDataModule
    return kind(
        files=paths,
        validation_files=paths[:1],
        tokenizer=TokenizerSource(),
        streaming=True,
        **settings,
    )


def loader(folder: Path, *, num_ahead: int = 0, **options: Any) -> StreamLoader:
    stream = make(folder, **options).train_dataloader().stream
    return StreamLoader(stream, num_workers=options.get("num_workers", 0), num_ahead=num_ahead)


def rows(batches: Any) -> list[Any]:
    return [{name: values.tolist() for name, values in batch.items()} for batch in batches]


def test_every_text_is_read_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    used = loader(tmp_path)
    first, second = rows(used), rows(used)
    tokens = [token for batch in first for row in batch["input_ids"] for token in row]
    whole = TokenizerSource().load().decode(tokens).split("<|im_end|>")
    lines = [line for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    written = [json.loads(line)["text"] for line in lines]
    assert len(set(whole)) == len(whole) >= len(written) - 5  # the last batch is not full
    assert set(whole[:-1]) <= set(written)
    assert whole[:7] != sorted(whole[:7])
    assert first != second
    assert rows(loader(tmp_path)) == first
    assert rows(loader(tmp_path, seed=1)) != first


@pytest.mark.parametrize("num_used", [1, 4, 11, 20])
@pytest.mark.parametrize(
    "options",
    [
        {"keep_apart": True},
        {"keep_apart": False},
        {"chat": True, "seq_len": 16},
        {"chat": True, "packing": False, "seq_len": 16},
    ],
    ids=str,
)
def test_a_loop_goes_on_with_the_next_batch(
    num_used: int, options: dict[str, Any], tmp_path: Path
) -> None:
    whole = loader(tmp_path, **options)
    expected = [*rows(whole), *rows(whole)]
    first = loader(tmp_path, **options)
    list(islice(first, num_used))
    state = json.loads(json.dumps(first.state_dict()))  # whole numbers and lists alone
    second = loader(tmp_path, **options)
    second.load_state_dict(state)
    assert [*rows(second), *rows(second)] == expected[num_used:]


def test_processes_go_on_in_their_turn(tmp_path: Path) -> None:
    expected = rows(loader(tmp_path, num_workers=2))
    assert sorted(map(str, expected)) != sorted(map(str, rows(loader(tmp_path))))
    first = loader(tmp_path, num_workers=2)
    batches = iter(first)
    list(islice(batches, 3))
    state = first.state_dict()
    list(batches)  # so that the processes end
    second = loader(tmp_path, num_workers=2)
    second.load_state_dict(state)
    assert rows(second) == expected[3:]
    with pytest.raises(CheckpointError, match=r"saved with 2 processes .*now there are 1"):
        loader(tmp_path).load_state_dict(state)


class Recorder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []

    def training_step(self, batch: Any) -> Any:
        self.seen.append(batch["input_ids"].tolist())
        return self.weight * 1.0

    def validation_step(self, batch: Any) -> None:
        assert batch["input_ids"].shape[1] == 8

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trainer_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def run(folder: Path, steps: int, checkpoint: Path | None = None) -> list[Any]:
        module = Recorder()
        trainer = make_trainer(
            tmp_path,
            max_steps=steps,
            max_epochs=-1,
            check_val_every_n_epoch=None,
            val_check_interval=4,
        )
        trainer.fit(module, datamodule=make(tmp_path), ckpt_path=checkpoint)
        trainer.save_checkpoint(folder)
        return module.seen

    num_batches = len(rows(loader(tmp_path)))
    steps = num_batches + 5  # into the second epoch
    expected = run(tmp_path / "whole.ckpt", steps)
    for stop in (3, num_batches + 2):
        first = run(tmp_path / "part.ckpt", stop)
        rest = run(tmp_path / "rest.ckpt", steps, tmp_path / "part.ckpt")
        assert [*first, *rest] == expected


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.run_records=0 must be at least 1"):
        make(tmp_path, run_records=0)
    with pytest.raises(
        ConfigurationError, match=r"data\.streaming=true .* name data\.validation_f"
    ):
        TextDataModule(
            files="a", tokenizer=TokenizerSource(), seq_len=8, batch_size=1, streaming=True
        )
    data = make(tmp_path)
    data.setup()
    with (tmp_path / "1.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n{broken")
    with pytest.raises(DataError, match=r"1\.jsonl, line 21: this is not JSON"):
        list(data.train_dataloader())
