from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from roundpipe_lightning import finetune
from roundpipe_lightning.cli.train import train
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules import ModelSource, byte_level_tokenizer
from tests.kit.architectures import TINY
from tests.kit.runs import summary

QUICK = ["hardware=cpu", "trainer.devices=2", "trainer.max_steps=3", "scheduler.num_warmup_steps=0"]
RECORDS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "Yes."}]}
    for n in range(20)
]


def test_a_model_and_records_become_a_folder_as_on_the_command_line(tmp_path: Path) -> None:
    model: Any = ModelSource(architecture=TINY, seed=1).build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = finetune(
        model,
        RECORDS,
        method="full",
        tokenizer=byte_level_tokenizer(),
        seq_len=64,
        batch_size=4,
        learning_rate=0.01,
        epochs=9,
        folder=tmp_path / "run",
        overrides=QUICK,
    )
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert result.figures["num_steps"] == 3
    assert result.figures["loss_last"] < result.figures["loss_first"]
    assert result.plan is not None
    assert result.plan.num_workers == 2
    page = result._repr_html_()
    for part in ("<svg", "Training loss", "The plan of this training", str(result.model_folder)):
        assert part in page
    trained = AutoModelForCausalLM.from_pretrained(result.model_folder)
    weight = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(trained.state_dict()[weight], before[weight])

    config: Any = OmegaConf.load(result.folder / "config.yaml")
    config.paths.output_dir = str(tmp_path / "again")
    config.callbacks.pretrained_export = None
    train(config)
    assert summary(tmp_path / "again")["loss_last"] == result.figures["loss_last"]


_MODE = "trainer.strategy.microbatching"
PAIRS = [{"prompt": f"{n}?", "chosen": "Yes.", "rejected": "No."} for n in range(20)]


@pytest.mark.parametrize(
    ("method", "objective", "records"),
    [
        ("lora", "kto", [{"prompt": p["prompt"], "completion": "No", "label": 0} for p in PAIRS]),
        pytest.param("qlora", "sft", RECORDS, marks=pytest.mark.soak),
        pytest.param("lora", "dpo", PAIRS, marks=pytest.mark.soak),
        pytest.param("full", "orpo", PAIRS, marks=pytest.mark.soak),
        pytest.param("lora", "reward", PAIRS, marks=pytest.mark.soak),
    ],
)
def test_an_objective_is_trained_with_a_method(
    method: str, objective: str, records: Any, tmp_path: Path
) -> None:
    given: Any = {"method": method, "objective": objective, "folder": tmp_path / "run", "epochs": 9}
    result = finetune("tiny", records, **given, seq_len=64, batch_size=4, overrides=QUICK)
    assert result.figures["num_steps"] == 3
    files = {path.name for path in result.model_folder.iterdir()}
    assert ("model.safetensors" if method == "full" else "adapter_model.safetensors") in files
    mode = OmegaConf.select(OmegaConf.load(tmp_path / "run/config.yaml"), _MODE)
    assert mode == ("blocks" if objective == "kto" else "step")
    columns = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"sft": "val_loss", "kto": "val_kl"}.get(objective, "val_margin") in columns


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objective": "sfx"}, r"objective='sfx' is not one of sft, text, dpo"),
        ({"method": "lorra"}, r"peft=lorra does not exist\. Did you mean peft=lora\?"),
        ({"overrides": ["data.seqlen=3"]}, r"no setting data\.seqlen\. Did you mean data\.seq_len"),
        ({"objective": "kto", "overrides": [*QUICK, f"{_MODE}=step"]}, r"splits batches, and what"),
        ({"data": [1, 2]}, r"data: give a file, several files, or records such as"),
        ({"data": "no/such.jsonl"}, r"nothing is found at 'no/such\.jsonl'"),
        (
            {"model": torch.nn.Linear(1, 1)},
            r"any other module with Trainer\(strategy=",
        ),
    ],
)
def test_what_cannot_work_is_explained(given: Any, message: str, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "data": RECORDS, "overrides": QUICK, **given}
    with pytest.raises(ConfigurationError, match=message):
        finetune(**arguments, folder=tmp_path)
