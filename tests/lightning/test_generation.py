import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from roundpipe_lightning.emulation.tagged_tensor import tag_of
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy
from roundpipe_lightning.testing import EmulatedStrategy
from tests.engine.test_peft import EXPERTS, Q_V, SOFT, adapted, base
from tests.kit.architectures import build_model, token_data
from tests.kit.comparison import compare
from tests.kit.training import make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter")

NUM_TOKENS = 5
"""New tokens: more than the window of those that have one."""

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 2},
    "static": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
}


class Generating(LightningModule):
    """Generates from prompts in every evaluation step.

    Args:
        model: A model of transformers or peft.
        ways: Names of `WAYS`.
    """

    def __init__(self, model: Any, ways: list[str]) -> None:
        super().__init__()
        self.model = model
        self.ways = ways
        self.seen: list[Tensor] = []

    def generate(self, prompts: Tensor) -> dict[str, Tensor]:
        found = {}
        for way in self.ways:
            torch.manual_seed(11)
            found[way] = self.model.generate(
                input_ids=prompts,
                attention_mask=(prompts != 0).long(),
                max_new_tokens=NUM_TOKENS,
                **WAYS[way],
            )
        return found

    def predict_step(self, batch: Tensor) -> dict[str, Tensor]:
        return self.generate(batch)

    def validation_step(self, batch: Tensor) -> None:
        tokens = self.generate(batch)[self.ways[0]]
        self.seen.append(tokens)
        self.log("mean_token", tokens.float().mean())

    def test_step(self, batch: Tensor) -> None:
        self.validation_step(batch)


def prompts() -> DataLoader[Any]:
    """Two prompts, the first padded on the left."""
    ids = torch.randint(3, 64, (2, 5), generator=torch.Generator().manual_seed(2))
    ids[0, :2] = 0
    rows: Any = list(ids)
    return DataLoader(rows, batch_size=2)


SPECIAL: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 4},
    "mamba": {"state_size": 4},
}


CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
ADAPTERS: dict[str, Any] = {
    "lora": LoraConfig(r=2, target_modules="all-linear", **CAUSAL),
    "lora of no task": LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True),
    "prompt": PromptTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "prefix": PrefixTuningConfig(num_virtual_tokens=3, **CAUSAL),
}


@functools.cache
def model_of(name: str, *, adapters: str | None = None) -> Any:
    """A tiny model in evaluation mode, with weights large enough for lively text."""
    if name == "t5":
        torch.manual_seed(0)
        t5 = AutoConfig.for_model(
            "t5", vocab_size=64, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2
        )
        model: Any = AutoModelForSeq2SeqLM.from_config(t5)
        model.generation_config.decoder_start_token_id = 0
    else:
        model = build_model(name, **SPECIAL.get(name, {}))
    if adapters is not None:
        model = get_peft_model(model, ADAPTERS[adapters])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.generation_config.eos_token_id = None
    return model.eval()


def strategies() -> list[tuple[Any, int]]:
    """Return cases to compare with one device: a strategy and its number of workers."""
    return [
        (RoundPipeStrategy(), 1),
        (RoundPipeStrategy(), 3),
        (EmulatedStrategy(num_microbatches=2), 3),
    ]


CASES = [
    ("qwen3", None, list(WAYS)),
    ("qwen3", "lora", ["greedy", "sampling"]),
    ("qwen3", "prompt", ["greedy"]),
    ("qwen3", "prefix", ["greedy", "beams"]),
    ("llama", None, ["greedy", "beams"]),
    ("gpt2", None, ["greedy", "sampling"]),
    ("gpt2", "lora of no task", ["greedy"]),
    ("gemma2", None, ["greedy", "beams", "static"]),
    ("mamba", None, ["greedy", "sampling"]),
    ("t5", None, ["sampling", "greedy", "beams"]),
]


@pytest.mark.long("qwen3-prompt-ways2", "llama-None-ways4", "gpt2-None-ways5", "gemma2-None-ways7")
@pytest.mark.parametrize(("name", "adapters", "ways"), CASES)
def test_tokens_are_those_of_plain_pytorch(
    name: str, adapters: str | None, ways: list[str]
) -> None:
    module = Generating(model_of(name, adapters=adapters), ways)
    with torch.inference_mode():
        expected = module.generate(next(iter(prompts())))
    assert len(expected[ways[0]][:, -NUM_TOKENS:].unique()) > 3, "a text that is worth comparing"
    for strategy, devices in strategies():
        trainer = make_trainer(strategy=strategy, devices=devices)
        found: Any = trainer.predict(module, prompts())
        for way in ways:
            assert torch.equal(found[0][way], expected[way]), (way, strategy, devices)
        assert strategy.plan.partition.num_blocks >= 2


def test_generation_within_validation_and_test() -> None:
    module = Generating(model_of("qwen3"), ["greedy"])
    with torch.inference_mode():
        expected = module.generate(next(iter(prompts())))["greedy"]
    for strategy, devices in strategies()[1:]:
        trainer = make_trainer(strategy=strategy, devices=devices)
        for evaluate in (trainer.validate, trainer.test):
            module.seen.clear()
            metrics: Any = evaluate(module, prompts(), verbose=False)
            assert metrics[0]["mean_token"] == pytest.approx(float(expected.float().mean()))
            (tokens,) = module.seen
            raw = tokens if tag_of(tokens) is None else torch.tensor(tokens.tolist())
            assert torch.equal(raw, expected)


class Tuned(LightningModule):
    """Trains what peft has added, in plain Lightning."""

    def __init__(self, model: Any, *, prefers: bool = False) -> None:
        super().__init__()
        self.model = model
        self.prefers = prefers

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch, labels=batch["input_ids"])
        loss: Tensor = output.loss
        if self.prefers:
            with torch.no_grad(), self.model.disable_adapter():
                wanted = self.model(**batch).logits
            loss = loss - functional.logsigmoid(output.logits - wanted).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        policy = self.model(**batch).logits
        with self.model.disable_adapter():
            reference = self.model(**batch).logits
        self.log("drift", (policy - reference).abs().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


KINDS: dict[str, tuple[Callable[[], Any], Any]] = {
    "lora": (base, LoraConfig(**Q_V)),
    "experts": (
        lambda: base("qwen3_moe"),
        LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS),
    ),
    "prompt": (base, PromptTuningConfig(**SOFT)),
    "prefix": (base, PrefixTuningConfig(**SOFT)),
}


def check(tmp_path: Path, make: Callable[[], Any], config: Any, **options: Any) -> None:
    def fit(trainer: Trainer, module: Any) -> None:
        trainer.fit(module, token_data(), token_data() if options else None)
        states = trainer.optimizers[0].state
        assert set(states) == {p for p in module.parameters() if p.requires_grad}

    compare(
        lambda: Tuned(adapted(make(), config).model, **options),
        fit,
        kinds=(RoundPipeStrategy, EmulatedStrategy),
        num_microbatches=2,
        tolerance=1e-4,
    )


@pytest.mark.suite("lora", "prefix")
@pytest.mark.parametrize("kind", KINDS)
def test_trains_as_on_one_device(tmp_path: Path, kind: str) -> None:
    make, config = KINDS[kind]
    check(tmp_path, make, config)


def test_adapters_off_in_training_and_in_validation(tmp_path: Path) -> None:
    check(tmp_path, base, LoraConfig(**Q_V), prefers=True)
