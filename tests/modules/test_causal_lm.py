import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import Callback, LightningDataModule, Trainer
from peft import LoraConfig
from torch import Tensor
from torch.utils.data import DataLoader

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.data.samples import Padding, Sample, as_row, packed_row
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules import (
    Adapters,
    CausalLanguageModule,
    ModelSource,
    SequenceClassificationModule,
)
from roundpipe_lightning.modules.language import as_one_row, check_documents_apart
from tests.kit.architectures import TINY
from tests.kit.training import make_trainer


def make_module(**options: Any) -> CausalLanguageModule:
    optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
    return CausalLanguageModule(ModelSource(architecture=TINY), optimizer=optimizer, **options)


def make_loader(num_batches: int = 4) -> DataLoader[Any]:
    ids = torch.arange(8 * num_batches * 2).reshape(-1, 8) % 7
    items = [{"input_ids": row, "labels": row} for row in ids]
    return DataLoader(items, batch_size=2)  # type: ignore[arg-type]


def test_the_loss_is_the_models_own(tmp_path: Path) -> None:
    module = make_module()
    module.configure_model()
    batch = next(iter(make_loader()))
    assert module.model is not None
    logits = module.model(input_ids=batch["input_ids"], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    )
    torch.testing.assert_close(module(batch).loss, expected)


def test_validation_is_the_mean_over_predicted_tokens(tmp_path: Path) -> None:
    """Batches with one target and with seven count as one and as seven."""
    ids = torch.arange(16).reshape(2, 8)
    labels = ids.clone()
    labels[0, :-1] = -100
    items = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]
    module, trainer = make_module(), make_trainer(tmp_path)
    loader: DataLoader[Any] = DataLoader(items, batch_size=1)  # type: ignore[arg-type]
    trainer.validate(module, loader, verbose=False)
    with torch.no_grad():
        losses = [float(module(batch).loss) for batch in loader]
    expected = (losses[0] + 7 * losses[1]) / 8
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(expected, rel=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-3


def test_test_and_predict(tmp_path: Path) -> None:
    module, trainer = make_module(), make_trainer(tmp_path)
    [metrics] = trainer.test(module, make_loader(), verbose=False)
    assert metrics["test_loss"] == pytest.approx(5.6, abs=0.3)
    predictions: Any = trainer.predict(module, make_loader(num_batches=1))
    assert predictions[0]["next_tokens"].shape == (2, 8)
    assert predictions[0]["loss"].ndim == 0


SCHEDULE: Any = transformers.get_cosine_with_min_lr_schedule_with_warmup_lr_rate
COSINE = functools.partial(
    SCHEDULE,
    num_warmup_steps=1,
    num_training_steps=None,
    min_lr_rate=0.5,
)


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("scheduler", "rates"),
    [
        (COSINE, [0.01, 0.0075, 0.005]),
        (functools.partial(COSINE, num_training_steps=2), [0.01, 0.005, 0.005]),
        (functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2), [0.01, 0.01, 0.001]),
        (None, [0.01, 0.01, 0.01]),
    ],
    ids=["length of the run", "held after its own length", "of torch", "none"],
)
def test_the_schedule_steps_with_the_optimizer(
    scheduler: Any, rates: list[float], tmp_path: Path
) -> None:
    recorder = Rates()
    trainer = make_trainer(tmp_path, max_steps=3, callbacks=[recorder])
    trainer.fit(make_module(scheduler=scheduler), make_loader(), make_loader())
    assert recorder.rates == pytest.approx(rates)


def test_a_run_without_an_end_needs_a_length(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=-1, max_epochs=-1)
    with pytest.raises(ConfigurationError, match=r"Set scheduler\.num_training_steps"):
        trainer.fit(make_module(scheduler=COSINE), make_loader(), make_loader())


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_warmup_steps", -1), ("num_training_steps", 0), ("min_lr_rate", 1.5)],
)
def test_figures_of_a_schedule_are_checked(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=f"scheduler.{name}={value} must be"):
        make_module(scheduler=functools.partial(COSINE, **{name: value}))


def test_only_unfrozen_parameters_are_trained(tmp_path: Path) -> None:
    module = make_module()
    module.configure_model()
    assert module.model is not None
    module.model.model.embed_tokens.weight.requires_grad_(requires_grad=False)
    make_trainer(tmp_path, max_steps=1).fit(module, make_loader(), make_loader())
    optimizer = module.optimizers()
    assert not isinstance(optimizer, list)
    trained = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    assert id(module.model.model.embed_tokens.weight) not in trained


def test_refuses_a_model_that_is_wholly_frozen() -> None:
    module = make_module()
    module.configure_model()
    module.requires_grad_(requires_grad=False)
    with pytest.raises(ConfigurationError, match="requires_grad=False"):
        module.configure_optimizers()


def test_says_that_the_model_is_not_built() -> None:
    with pytest.raises(ConfigurationError, match="configure_model"):
        make_module()(next(iter(make_loader())))


DEEP = {**TINY, "num_hidden_layers": 4, "initializer_range": 0.1}
ENCODER = {
    "model_type": "bert",
    "vocab_size": 264,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


class Texts(LightningDataModule):
    """Texts of different lengths; the class is whether the first token is small."""

    pad_token_id = 0

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        items = []
        for index in range(16):
            ids = torch.randint(1, 264, (8,), generator=generator)
            ids[5 + index % 4 :] = 0
            label = (ids[0] < 132).long()
            mask = (ids != 0).long()
            items.append({"input_ids": ids, "attention_mask": mask, "labels": label})
        return DataLoader(items, batch_size=8)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


def make(
    architecture: dict[str, Any] = DEEP, adapters: Adapters | None = None, **options: Any
) -> SequenceClassificationModule:
    return SequenceClassificationModule(
        ModelSource(architecture=architecture),
        classes=["large", "small"],
        optimizer=functools.partial(torch.optim.AdamW, lr=0.01),
        adapters=adapters,
        **options,
    )


@pytest.mark.parametrize("architecture", [DEEP, ENCODER], ids=["decoder", "encoder"])
def test_it_learns_the_same_on_any_number_of_workers(
    architecture: dict[str, Any], tmp_path: Path
) -> None:
    def run(folder: str, **options: Any) -> tuple[dict[str, Tensor], Trainer, Any]:
        module = make(architecture)
        used = make_trainer(tmp_path / folder, max_epochs=6, **options)
        used.fit(module, datamodule=Texts())
        return dict(used.callback_metrics), used, module

    expected, plain, module = run("plain", devices=1)
    strategy = RoundPipeStrategy(num_microbatches=3)
    found, _, _ = run("piped", devices=2, strategy=strategy)
    assert set(found) == {"train_loss", "train_accuracy", "val_loss", "val_accuracy"}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-3, atol=1e-4)
    assert expected["val_accuracy"] > 0.85
    [tested] = plain.test(module, datamodule=Texts(), verbose=False)
    assert tested["test_accuracy"] == pytest.approx(float(expected["val_accuracy"]))


def test_the_last_token_before_the_padding_decides(tmp_path: Path) -> None:
    module, used = make(), make_trainer(tmp_path)
    probabilities: Any = used.predict(module, datamodule=Texts())
    assert probabilities[0].shape == (8, 2)
    torch.testing.assert_close(probabilities[0].sum(dim=1), torch.ones(8))
    assert module.model is not None
    assert module.model.config.pad_token_id == 0
    batch = next(iter(Texts().train_dataloader()))
    ids = batch["input_ids"][0]
    alone = module.model(input_ids=ids[ids != 0][None]).logits.softmax(dim=-1)
    torch.testing.assert_close(probabilities[0][:1], alone.detach(), rtol=1e-4, atol=1e-6)


def test_classes_are_in_the_models_configuration() -> None:
    module = make(pad_token_id=7)
    module.configure_model()
    assert module.model is not None
    assert module.model.config.id2label == {0: "large", 1: "small"}
    assert module.model.config.pad_token_id == 7


def test_adapters_train_the_new_head_as_well() -> None:
    lora = Adapters(config=LoraConfig(r=2, target_modules=["q_proj"]))
    module = make(adapters=lora, pad_token_id=0)
    module.configure_model()
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert any("score" in name for name in trained)
    assert all("lora" in name or "score" in name for name in trained)


def test_classes_are_checked() -> None:
    for wrong in (["one"], ["one", "one"]):
        with pytest.raises(ConfigurationError, match=r"at least two classes, no name twice"):
            SequenceClassificationModule(
                ModelSource(architecture=TINY), classes=wrong, optimizer=torch.optim.AdamW
            )


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
    with pytest.raises(ConfigurationError, match=r"does not keep the documents.*packing=false"):
        fit(MAMBA, tmp_path, devices=2, strategy=strategy)
