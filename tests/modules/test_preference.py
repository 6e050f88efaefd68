import functools
import math
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from torch.utils.data import DataLoader

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.modules import (
    Adapters,
    DirectPreferenceModule,
    KahnemanTverskyModule,
    ModelSource,
    OddsRatioModule,
    PairModule,
    RewardModule,
)
from roundpipe_lightning.modules.preference import log_likelihoods, preference_loss
from tests.kit.architectures import TINY
from tests.kit.training import make_trainer

DEEP = {**TINY, "num_hidden_layers": 4, "initializer_range": 0.1}
SGD = functools.partial(torch.optim.SGD, lr=0.5)
LORA = Adapters(config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), seed=1)


def make(adapters: Adapters | None = None, **options: Any) -> DirectPreferenceModule:
    return DirectPreferenceModule(
        ModelSource(architecture=DEEP, seed=3),
        optimizer=SGD,
        adapters=adapters,
        **options,
    )


def pairs(count: int = 4, length: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(1, 264, (count, 2, length), generator=generator)
    ids[:, 1, :2] = ids[:, 0, :2]
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :, :2] = -100
    mask[::2, 1, -2:] = 0
    labels[mask == 0] = -100
    return [
        {"input_ids": i, "attention_mask": m, "labels": lab}
        for i, m, lab in zip(ids, mask, labels, strict=True)
    ]


def judged() -> list[dict[str, Tensor]]:
    return [{**pair, "desirable": torch.tensor(n % 2 == 0)} for n, pair in enumerate(pairs())]


def loader(count: int = 4, *, kind: type[PairModule] = PairModule) -> DataLoader[Any]:
    samples: Any = judged() if kind is KahnemanTverskyModule else pairs(count)
    return DataLoader(samples, batch_size=4)


def batch() -> Any:
    return next(iter(loader()))


class Watch(lightning.Callback):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients = {
            name: parameter.grad.clone()
            for name, parameter in pl_module.named_parameters()
            if parameter.grad is not None
        }


def test_the_loss_is_equation_7() -> None:
    margins = torch.tensor([0.5, -2.0])
    sigmoid = [1 / (1 + math.exp(-m)) for m in (0.5, -2.0)]
    expected = -(math.log(sigmoid[0]) + math.log(sigmoid[1])) / 2
    assert preference_loss(margins).item() == pytest.approx(expected, rel=1e-6)
    smooth = -sum(0.9 * math.log(s) + 0.1 * math.log(1 - s) for s in sigmoid) / 2
    found = preference_loss(margins, label_smoothing=0.1).item()
    assert found == pytest.approx(smooth, rel=1e-6)


def test_likelihoods_are_sums_over_the_answers_tokens() -> None:
    module = make()
    module.configure_model()
    given = batch()
    found = log_likelihoods(module.model, given)
    assert found.shape == (4, 2)
    assert module.model is not None
    for pair, text in ((0, 0), (0, 1), (1, 1)):
        length = int(given["attention_mask"][pair, text].sum())
        ids = given["input_ids"][pair, text, :length]
        logits = module.model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        expected = sum(logits[place - 1, ids[place]] for place in range(2, length))
        torch.testing.assert_close(found[pair, text], expected)


@pytest.mark.parametrize("adapters", [None, LORA], ids=["copy", "adapters"])
def test_training_starts_at_the_reference_and_leaves_it(
    adapters: Adapters | None, tmp_path: Path
) -> None:
    module = make(adapters, beta=0.5)
    module.configure_model()
    torch.testing.assert_close(module(batch()), torch.zeros(4, 2), atol=1e-6, rtol=0)
    assert module.reference is not None
    before = {name: value.clone() for name, value in module.reference.state_dict().items()}
    single = make_trainer(tmp_path, max_epochs=-1, max_steps=8)
    single.fit(module, loader(), loader())
    metrics = single.callback_metrics
    assert metrics["train_loss"] < 0.95 * math.log(2)
    assert metrics["train_margin"] > 0
    assert metrics["val_accuracy"] == 1
    assert not any(module_.training for module_ in module.reference.modules())
    assert all(torch.equal(before[name], v) for name, v in module.reference.state_dict().items())


def test_with_adapters_the_reference_costs_no_memory() -> None:
    module = make(LORA)
    module.configure_model()
    assert module.reference is not None
    assert module.model is not None
    own = {id(parameter) for parameter in module.model.parameters()}
    assert all(id(parameter) in own for parameter in module.reference.parameters())
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trained) == 16
    assert all("lora" in name for name in trained)


@pytest.mark.filterwarnings("ignore:The `.*` argument in the `init_lora_weights`")
@pytest.mark.parametrize(
    "settings", [{"init_lora_weights": "pissa"}, {"bias": "all", "target_modules": ["c_attn"]}]
)
def test_adapters_that_change_the_base_are_refused(settings: dict[str, Any]) -> None:
    module = make()
    if "bias" in settings:
        gpt2 = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 2, "n_head": 2}
        module.source = ModelSource(architecture=gpt2)
        settings["fan_in_fan_out"] = True
    module.adapters = Adapters(
        config=LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **settings})
    )
    with pytest.raises(ConfigurationError, match=r"is no reference\. Use peft\.bias=none"):
        module.configure_model()


def odds(answer: Tensor) -> Tensor:
    probability = answer.exp()
    return probability / (1 - probability)


def test_orpo_is_equation_6_of_its_paper() -> None:
    module = OddsRatioModule(ModelSource(architecture=DEEP), optimizer=SGD, weight=0.3)
    module.configure_model()
    given = batch()
    totals = log_likelihoods(module.model, given)
    losses = []
    for pair in range(4):
        lengths = (given["labels"][pair] != -100).sum(dim=1)
        chosen, rejected = totals[pair] / lengths
        ratio = torch.log(odds(chosen) / odds(rejected))
        losses.append(-chosen - 0.3 * torch.log(1 / (1 + torch.exp(-ratio))))
    torch.testing.assert_close(module.loss(module(given)), torch.stack(losses).mean())


@pytest.mark.parametrize(
    ("chosen", "rejected", "expected"),
    [(5.0, 0.0, 0.046759), (20.0, 0.0, 0.0), (20.0, 20.0, 0.069315), (0.0, 20.0, 4.08)],
)
def test_orpo_is_finite_where_the_model_is_sure(
    chosen: float, rejected: float, expected: float
) -> None:
    """Expected is the loss in 50 digits: float32 has 0 for the log-likelihood of a sure answer."""
    module = OddsRatioModule(ModelSource(architecture=DEEP), optimizer=SGD, weight=0.1)
    logits = torch.zeros(1, 2, 3, 8)
    logits[0, 0, :, 3], logits[0, 1, :, 3] = chosen, rejected
    logits.requires_grad_()
    target = torch.full((6,), 3)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 2), target, reduction="none")
    loss = module.loss(-losses.reshape(1, 2, 3).mean(-1))
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=5e-3)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[0, 0, :, 3] <= 0).all()  # the chosen answer is not made less likely


@pytest.mark.parametrize("score", [-1e4, -100.0, 0.0, 100.0, 1e4])
def test_other_losses_are_finite_at_extreme_scores(score: float) -> None:
    """As TRL's sigmoid loss of DPO and its KTO loss: -log s(m) is -m, 0; 1 - s(m) is 1, 0."""
    margins = torch.tensor([score], requires_grad=True)
    loss = preference_loss(margins)
    loss.backward()
    assert loss.item() == pytest.approx(max(-score, 0.0) or (0.0 if score else 0.693147), abs=1e-5)
    assert margins.grad is not None
    assert -1 <= margins.grad.item() <= 0
    module = KahnemanTverskyModule(ModelSource(architecture=DEEP), optimizer=SGD, beta=0.1)
    rewards = torch.tensor([[score, 0.0]], requires_grad=True)
    loss, _, _ = module.loss_of_rewards(rewards, torch.tensor([True]))
    loss.backward()
    assert loss.item() == pytest.approx(0.5 if not score else float(score < 0), abs=1e-5)
    assert rewards.grad is not None
    assert rewards.grad.isfinite().all()


def test_kto_is_the_loss_of_its_paper() -> None:
    """As in TRL's `kto_loss`, whose ratios of likelihoods are these rewards / beta.

    beta = 0.1, log ratios of the answers 2, -1 and 0.5, of those to other prompts 0.3, 0.6, -0.3:
    z0 = 0.1 * 0.2; losses 1 - s(0.18), 1.5 * (1 - s(0.12)), 1 - s(0.03); in all three thirds.
    """
    module = KahnemanTverskyModule(
        ModelSource(architecture=DEEP), optimizer=SGD, beta=0.1, undesirable_weight=1.5
    )
    rewards = 0.1 * torch.tensor([[2.0, 0.3], [-1.0, 0.6], [0.5, -0.3]])
    wanted = torch.tensor([True, False, True])
    loss, margins, distance = module.loss_of_rewards(rewards, wanted)
    assert loss.item() == pytest.approx(0.5508919, abs=1e-6)
    assert margins.tolist() == pytest.approx([0.18, 0.12, 0.03])
    assert distance.item() == pytest.approx(0.02)
    behind = module.loss_of_rewards(-rewards, ~wanted)  # a distance below 0 counts as 0
    assert behind[2].item() == 0
    assert behind[1].tolist() == pytest.approx([0.2, 0.1, 0.05])


def test_kto_compares_an_answer_and_one_to_another_prompt_with_the_reference() -> None:
    module = KahnemanTverskyModule(ModelSource(architecture=DEEP), optimizer=SGD, beta=0.5)
    module.configure_model()
    given: Any = next(iter(loader(kind=KahnemanTverskyModule)))
    before = log_likelihoods(module.model, given).detach()
    with torch.no_grad():
        for parameter in module.built_model.parameters():
            parameter.mul_(1.1)
    rewards = module(given)
    expected = 0.5 * (log_likelihoods(module.model, given) - before)
    torch.testing.assert_close(rewards, expected, rtol=1e-5, atol=1e-5)
    [gradient] = torch.autograd.grad(rewards[:, 1].sum(), [module.built_model.lm_head.weight])
    assert not gradient.any()


MODES = ("step", "blocks")


def test_a_reward_model_scores_the_last_token_of_an_answer() -> None:
    module = RewardModule(ModelSource(architecture=DEEP), optimizer=SGD)
    module.pad_token_id = 0
    module.configure_model()
    given = batch()
    given["input_ids"][given["attention_mask"] == 0] = 0
    scores = module(given)
    length = int(given["attention_mask"][0, 1].sum())
    states = module.built_model.model(given["input_ids"][0, 1:, :length]).last_hidden_state
    expected = states[0, -1] @ module.built_model.score.weight[0]
    torch.testing.assert_close(scores[0, 1], expected)
    sigmoid = 1 / (1 + torch.exp(scores[:, 1] - scores[:, 0]))
    torch.testing.assert_close(module.loss(scores), -torch.log(sigmoid).mean())


@pytest.mark.suite(
    "DirectPreferenceModule-None-step",
    "DirectPreferenceModule-adapters3-blocks",
    "OddsRatioModule-None-step",
    "RewardModule-None-blocks",
    "KahnemanTverskyModule-None-auto",
)
@pytest.mark.parametrize(
    ("kind", "adapters", "mode"),
    [
        *((DirectPreferenceModule, each, mode) for each in (None, LORA) for mode in MODES),
        *((kind, None, mode) for kind in (OddsRatioModule, RewardModule) for mode in MODES),
        *((KahnemanTverskyModule, each, "auto") for each in (None, LORA)),
    ],
)
def test_microbatches_give_the_gradients_of_the_whole_batch(
    kind: type[PairModule], adapters: Adapters | None, mode: Any, tmp_path: Path
) -> None:
    def run(folder: str, **options: Any) -> tuple[Watch, dict[str, Tensor]]:
        module, watch = (
            kind(ModelSource(architecture=DEEP, seed=3), optimizer=SGD, adapters=adapters),
            Watch(),
        )
        if isinstance(module, RewardModule):
            module.setup = lambda stage: None  # type: ignore[method-assign]
            module.pad_token_id = 0
        used = make_trainer(tmp_path / folder, max_steps=2, callbacks=[watch], **options)
        used.fit(module, loader(kind=kind), loader(kind=kind))
        return watch, used.callback_metrics

    plain, expected = run("plain")
    strategy = RoundPipeStrategy(num_microbatches=3, microbatching=mode)
    piped, found = run("piped", strategy=strategy, devices=3)
    for name in ("train_loss", "train_margin", "train_accuracy", "val_loss"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-7)
    assert piped.gradients.keys() == plain.gradients.keys()
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(piped.gradients[name], gradient, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("adapters", [None, LORA], ids=["copy", "adapters"])
def test_checkpoints_have_no_reference_and_can_be_loaded(
    adapters: Adapters | None, tmp_path: Path
) -> None:
    module, first = make(adapters), make_trainer(tmp_path, max_epochs=-1, max_steps=2)
    first.fit(module, loader(), loader())
    first.save_checkpoint(tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    assert not any(name.startswith("reference") for name in saved)
    other = make(adapters)
    second = make_trainer(tmp_path, max_epochs=-1, max_steps=4)
    second.fit(other, loader(), loader(), ckpt_path=tmp_path / "a.ckpt")
    straight = make(adapters)
    make_trainer(tmp_path, max_epochs=-1, max_steps=4).fit(straight, loader(), loader())
    for name, value in straight.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, r"module\.beta=0\.0 must be above 0"),
        ({"label_smoothing": 0.5}, r"module\.label_smoothing=0\.5 must be 0 or more and below"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


def test_says_that_the_model_is_not_built() -> None:
    with pytest.raises(ConfigurationError, match=r"call configure_model\(\) first"):
        make()(batch())
