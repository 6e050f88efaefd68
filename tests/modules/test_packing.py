from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.data.samples import Padding, Sample, as_row, packed_row
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules import CausalLanguageModule, ModelSource
from roundpipe_lightning.modules.causal_lm import as_one_row, check_documents_apart
from tests.kit.architectures import TINY
from tests.kit.training import make_trainer

SLIDING = {
    **TINY,
    "use_sliding_window": True,
    "sliding_window": 3,
    "layer_types": ["sliding_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "vocab_size": 264,
    "hidden_size": 16,
    "state_size": 4,
    "num_hidden_layers": 2,
}


def build(architecture: dict[str, Any], attention: str | None = None) -> Any:
    return ModelSource(architecture=architecture, attention=attention).build()


def documents() -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    draw = (torch.randint(1, 264, (length,), generator=generator) for length in (5, 3, 6, 4))
    return [Sample.of(ids.tolist()) for ids in draw]


def gradients(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), found


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", [TINY, SLIDING], ids=["full", "sliding"])
def test_packed_logits_and_gradients_are_those_of_single_documents(
    architecture: dict[str, Any], attention: str
) -> None:
    model, samples = build(architecture, attention), documents()
    padding = Padding(pad_token=0)
    packed = padding([packed_row(samples[:2]), packed_row(samples[2:])])  # of 8 and 10 tokens
    logits, found = gradients(model, packed)
    single, expected = gradients(model, padding([as_row(sample) for sample in samples]))
    for row, start, document in ((0, 0, 0), (0, 5, 1), (1, 0, 2), (1, 6, 3)):
        length = len(samples[document])
        torch.testing.assert_close(
            logits[row, start : start + length], single[document, :length], rtol=0, atol=1e-6
        )
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def test_one_row_has_the_loss_of_several() -> None:
    model, samples = build(TINY, "sdpa"), documents()
    batch = Padding(pad_token=0)([packed_row(samples[:2]), packed_row(samples[2:])])
    _, expected = gradients(model, batch)
    flat = as_one_row(batch)
    assert flat["input_ids"].shape == (1, 20)
    _, found = gradients(model, flat)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("architecture", [TINY, SLIDING], ids=["full", "sliding"])
def test_a_model_that_keeps_documents_apart_is_taken(architecture: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = build(architecture).to(dtype)
        check_documents_apart(model)
        assert model.training


def test_a_model_whose_state_runs_through_the_row_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"does not keep the documents.*packing=false"):
        check_documents_apart(build(MAMBA))


class Packed(LightningDataModule):
    """Two packed rows."""

    packs_documents = True

    def train_dataloader(self) -> DataLoader[Any]:
        samples = documents()
        batch = Padding(pad_token=0)([packed_row(samples[:2]), packed_row(samples[2:])])
        rows = [{name: values[row] for name, values in batch.items()} for row in range(2)]
        return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def fit(architecture: dict[str, Any], folder: Path, **options: Any) -> Trainer:
    module = CausalLanguageModule(
        ModelSource(architecture=architecture), optimizer=partial(torch.optim.SGD, lr=0.1)
    )
    trainer = make_trainer(folder, max_steps=1, **options)
    trainer.fit(module, datamodule=Packed())
    return trainer


def test_packed_rows_have_the_same_loss_on_round_robin_workers(tmp_path: Path) -> None:
    plain = fit(TINY, tmp_path, devices=1).callback_metrics
    strategy = RoundPipeStrategy(num_microbatches=2)
    piped = fit(TINY, tmp_path, devices=2, strategy=strategy).callback_metrics
    for name in ("train_loss", "val_loss"):
        torch.testing.assert_close(piped[name], plain[name], rtol=1e-5, atol=1e-6)


def test_training_does_not_begin_where_documents_would_mix(tmp_path: Path) -> None:
    strategy = RoundPipeStrategy(num_microbatches=2)
    with pytest.raises(ConfigurationError, match=r"does not keep the documents"):
        fit(MAMBA, tmp_path, devices=2, strategy=strategy)
