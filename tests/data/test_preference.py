import json
from pathlib import Path
from typing import Any

import pytest
import torch

from roundpipe_lightning.data import JudgedDataModule, PreferenceDataModule
from roundpipe_lightning.errors import ConfigurationError, DataError
from roundpipe_lightning.modules import TokenizerSource


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


GOOD = {"prompt": "?", "chosen": "yes", "rejected": "no"}


def make(
    folder: Path,
    *records: Any,
    kind: type[PreferenceDataModule] = PreferenceDataModule,
    **options: Any,
) -> PreferenceDataModule:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    settings = {"seq_len": 96, "batch_size": 1, "pad_to_multiple_of": 4, **options}
    return kind(files=[str(path)], tokenizer=TokenizerSource(), **settings)


def scored(data: PreferenceDataModule) -> list[str]:
    batch = next(iter(data.val_dataloader()))
    return [data.tokenizer.decode(row[row != -100]) for row in batch["labels"][0]]


@pytest.mark.parametrize(
    "record",
    [
        GOOD,
        {"prompt": [user("?")], "chosen": [assistant("yes")], "rejected": [assistant("no")]},
        {
            "chosen": [user("1"), assistant("2"), user("?"), assistant("yes")],
            "rejected": [user("1"), assistant("2"), user("?"), assistant("no")],
        },
    ],
    ids=["texts", "messages", "conversations"],
)
def test_the_last_answer_of_each_is_scored(tmp_path: Path, record: Any) -> None:
    data = make(tmp_path, record, record)
    data.setup()
    assert scored(data) == ["yes<|im_end|>", "no<|im_end|>"]


def test_both_texts_of_a_pair_are_in_one_row(tmp_path: Path) -> None:
    long = {"prompt": "?", "chosen": "y" * 20, "rejected": "n"}
    data = make(tmp_path, *[GOOD] * 3, *[long] * 3, batch_size=4)
    data.setup()
    batch = next(iter(data.train_dataloader()))
    assert {values.shape[:2] for values in batch.values()} == {torch.Size([4, 2])}
    assert batch["input_ids"].shape[2] % 4 == 0
    lengths = batch["attention_mask"].sum(dim=2)
    assert (lengths[:, 0] >= lengths[:, 1]).all()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"prompt": "?", "chosen": "yes"},
            r"The nearest is preference pairs.*data\.fields={rejected",
        ),
        ({**GOOD, "rejected": "yes"}, r"chosen and the rejected answer are the same"),
        ({**GOOD, "chosen": ""}, r"the field 'chosen' is empty"),
        ({**GOOD, "chosen": [user("x")]}, r"'chosen' does not end with an answer"),
        ({"chosen": "yes", "rejected": "no"}, r"'chosen' does not end with an answer.*prompt"),
        ({**GOOD, "prompt": [{"from": "us", "value": "?"}]}, r"turn 1 is from 'us'"),
        ({**GOOD, "chosen": "y" * 200}, r"tokens, more than data\.seq_len=96"),
    ],
)
def test_a_pair_that_is_none_is_named(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"pairs\.jsonl, line 2: .*{message}"):
        make(tmp_path, GOOD, record).setup()


def test_pairs_that_are_too_long_can_be_dropped_or_cut(tmp_path: Path) -> None:
    long = {"prompt": "?" * 90, "chosen": "yes", "rejected": "no"}
    dropped = make(tmp_path, GOOD, GOOD, long, too_long="drop")
    dropped.setup()
    assert sum(dropped.skipped.values()) == 1
    cut = make(tmp_path, long, long, too_long="cut_start")
    cut.setup()
    assert scored(cut) == ["yes<|im_end|>", "no<|im_end|>"]
    with pytest.raises(DataError, match=r"nothing is left of the chosen answer.*cut_start"):
        make(tmp_path, long, long, too_long="cut_end").setup()


def test_judged_answers_stand_beside_answers_to_other_prompts(tmp_path: Path) -> None:
    records = [
        {"prompt": "a?", "completion": "yes", "label": True},
        {"prompt": "a?", "completion": "no", "label": False},
        {"prompt": "b?", "chosen": "good", "rejected": "bad"},
    ]
    (tmp_path / "judged.jsonl").write_text("\n".join(map(json.dumps, records[:2])))
    (tmp_path / "pairs.jsonl").write_text(json.dumps(records[2]))
    data = JudgedDataModule(
        files=[str(tmp_path / "judged.jsonl"), str(tmp_path / "pairs.jsonl")],
        validation_files=[str(tmp_path / "judged.jsonl"), str(tmp_path / "pairs.jsonl")],
        tokenizer=TokenizerSource(),
        seq_len=96,
        batch_size=4,
    )
    data.setup()
    [batch] = data.val_dataloader()
    answers = [[data.tokenizer.decode(a[a != -100]) for a in row] for row in batch["labels"]]
    ended = [["yes", "good"], ["no", "good"], ["good", "yes"], ["bad", "yes"]]
    assert answers == [[f"{text}<|im_end|>" for text in row] for row in ended]
    assert batch["desirable"].tolist() == [True, False, True, False]
    prompts = [[data.tokenizer.decode(ids)[17:19] for ids in row] for row in batch["input_ids"]]
    assert prompts == [["a?", "a?"]] * 2 + [["b?", "b?"]] * 2
    with pytest.raises(ConfigurationError, match=r"All \d answers .* to the same prompt"):
        make(tmp_path, *records[:2] * 2, kind=JudgedDataModule).setup()
