import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.errors import ConfigurationError
from tests.kit.architectures import build_model, token_batches
from tests.kit.engine import (
    Regressor,
    cpu_workers,
    differences,
    emulated_workers,
    engine_for,
    engine_of,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
    stack_of,
)

Q_V: dict[str, Any] = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
SOFT: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
KINDS_OF_WORKERS = (cpu_workers, emulated_workers)


class Adapted(nn.Module):
    """The user's module around a model of peft."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def outputs(self, batch: dict[str, Tensor]) -> Any:
        return self.model(**batch, labels=batch["input_ids"], use_cache=False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.outputs(batch).loss
        return loss


def base(architecture: str = "qwen3", **options: Any) -> Any:
    return build_model(architecture, **options)


def adapted(model: Any, *configs: Any) -> Adapted:
    """Put one adapter or several into a model, with values that are not the first ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        found = get_peft_model(model, configs[0])
        for number, config in enumerate(configs[1:]):
            found.add_adapter(f"other{number}", config)
        with torch.no_grad():
            for name, parameter in found.named_parameters():
                if parameter.requires_grad or "lora_" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return Adapted(found)


def decoder(module: Adapted) -> BlockStack:
    core = module.model.get_base_model()
    core = getattr(core, "transformer", None) or core.model
    return stack_of(tuple(core.h if hasattr(core, "h") else core.layers))


def check(
    module: nn.Module,
    stack: BlockStack,
    batches: list[Any],
    *,
    reset: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Compare losses and gradients on two workers of both kinds.

    Args:
        module: What is trained.
        stack: Its blocks.
        batches: The microbatches.
        reset: Puts the module back into the state from which a step begins.
        options: The user's step, if it is not the module's.
    """
    reset()
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    plain = plain_step(module, batches, **options)
    plan = plan_of(stack, num_workers=2, num_microbatches=len(batches))
    for make_workers in KINDS_OF_WORKERS:
        reset()
        with engine_of(module, stack, plan, devices=make_workers(2)) as engine:
            result = mean_step(engine, batches, **options)
        reset()
        # backward passes of emulated devices have threads of their own, with other products' cuts
        tolerance = 0.0 if make_workers is cpu_workers else 1e-6
        assert not differences(module, result, plain, tolerance=tolerance), make_workers
        names = {name for name, p in module.named_parameters() if p in result.gradients}
        assert names
        assert names <= trained


def check_model(module: Adapted, *, num_microbatches: int = 3, **options: Any) -> None:
    check(module, decoder(module), token_batches(num_microbatches), **options)


def _untied() -> Any:
    return base(tied=False)


KINDS: dict[str, tuple[Callable[[], Any], Any]] = {
    "lora": (base, LoraConfig(**Q_V)),
    "lora on all linear layers": (base, LoraConfig(r=2, target_modules="all-linear")),
    "dora": (base, LoraConfig(**Q_V, use_dora=True)),
    "lora in float32 on a base in bfloat16": (lambda: base().bfloat16(), LoraConfig(**Q_V)),
    "lora on blocks with common weights": (
        lambda: base("llama"),
        LoraConfig(**Q_V, layer_replication=[(0, 2), (1, 3)]),
    ),
    "lora on the upper blocks": (base, LoraConfig(**Q_V, layers_to_transform=[2, 3])),
    "lora on embedding and head": (
        _untied,
        LoraConfig(r=2, target_modules=["embed_tokens", "lm_head", "q_proj"]),
    ),
    "lora on a tied embedding": (
        base,
        LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True),
    ),
    "lora and some tokens": (base, LoraConfig(**Q_V, trainable_token_indices=[3, 4, 5])),
    "lora and the head": (_untied, LoraConfig(**Q_V, modules_to_save=["lm_head"])),
    "lora and norms": (base, LoraConfig(**Q_V, modules_to_save=["norm", "input_layernorm"])),
    "lora and biases": (
        lambda: base(attention_bias=True),
        LoraConfig(**Q_V, bias="lora_only"),
    ),
    "lora on Conv1D": (
        lambda: base("gpt2"),
        LoraConfig(r=2, target_modules=["c_attn", "c_fc"], bias="all", fan_in_fan_out=True),
    ),
    "lora on experts": (
        lambda: base("qwen3_moe"),
        LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS),
    ),
    "lora on experts with biases": (
        lambda: base("gpt_oss"),
        LoraConfig(r=2, target_modules=["q_proj"], target_parameters=EXPERTS[:1]),
    ),
    "ia3": (
        base,
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ),
    "prompt tuning": (base, PromptTuningConfig(**SOFT)),
    "p-tuning": (base, PromptEncoderConfig(**SOFT, encoder_hidden_size=8)),
    "prefix tuning": (base, PrefixTuningConfig(**SOFT)),
    "prefix tuning with a projection": (
        base,
        PrefixTuningConfig(**SOFT, prefix_projection=True, encoder_hidden_size=8),
    ),
    "prefix tuning of sliding windows": (lambda: base("gemma2"), PrefixTuningConfig(**SOFT)),
    "adalora": (
        base,
        AdaLoraConfig(init_r=3, target_r=2, target_modules=["q_proj"], total_step=10),
    ),
    "loha": (base, LoHaConfig(r=2, target_modules=["q_proj"])),
    "oft": (base, OFTConfig(oft_block_size=4, target_modules=["q_proj"])),
    "vera": (base, VeraConfig(r=4, target_modules=["q_proj"])),
}


@pytest.mark.suite(
    "lora on all linear layers",
    "dora",
    "lora on a tied embedding",
    "lora and the head",
    "lora on experts",
    "ia3",
    "prompt tuning",
    "prefix tuning",
    "oft",
)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_pytorch(kind: str) -> None:
    make, config = KINDS[kind]
    check_model(adapted(make(), config), num_microbatches=2)


def test_lora_with_dropout_draws_what_one_worker_draws() -> None:
    module = adapted(base(), LoraConfig(**Q_V, lora_dropout=0.5))
    stack, batches = decoder(module), token_batches(3)
    found = []
    for num_workers in (1, 2):
        torch.manual_seed(8)
        with engine_for(module, stack, num_workers=num_workers) as engine:
            found.append(mean_step(engine, batches).gradients)
    assert found[0]
    for parameter, gradient in found[0].items():
        assert torch.equal(gradient, found[1][parameter])


class Attending(nn.Module):
    """A block around torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.outer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        row = x[None]
        attended: Tensor = self.attention(row, row, row, need_weights=False)[0]
        return x + torch.tanh(self.outer(attended[0]))


class InModule(nn.Module):
    """A model of peft around a module of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        inner = Regressor(make_block=Attending)
        config = LoraConfig(r=2, target_modules=["attention", "outer", "tail"])
        self.model: Any = adapted(inner, config).model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return functional.mse_loss(self.model(batch[0]), batch[1])


def test_lora_on_torchs_own_attention_is_refused() -> None:
    """There peft makes new parameters of the module's whenever it is looked at."""
    module = InModule()
    stack = layers_of(module.model.base_model.model)
    with (
        engine_for(module, stack) as engine,
        pytest.raises(ConfigurationError, match=r"in_proj_weight.*Adapt other layers, linear"),
    ):
        mean_step(engine, regression_batches(3))


# --- adapters off and on, several adapters ----------------------------------------------------


def two_adapters() -> Adapted:
    second = LoraConfig(r=3, target_modules=["q_proj", "o_proj"])
    return adapted(base(), LoraConfig(**Q_V), second)


def reference(view: Any, batch: Any, *, wait_seconds: float) -> Tensor:
    """Return the base's output, as a policy's reference; other threads get time meanwhile."""
    with torch.no_grad(), view.model.disable_adapter():
        time.sleep(wait_seconds)
        logits: Tensor = view.outputs(batch).logits
    return logits


@pytest.mark.suite("reference")
@pytest.mark.parametrize("first", ["reference", "policy"])
def test_a_reference_pass_with_the_adapters_off(first: str) -> None:
    """Adapters that a microbatch switches off are off for its own blocks, and only while off."""

    def call(view: Any, batch: Any, index: int) -> Any:
        wait_seconds = 0.01 * index
        if first == "reference":
            wanted = reference(view, batch, wait_seconds=wait_seconds)
            logits = view.outputs(batch).logits
        else:
            logits = view.outputs(batch).logits
            wanted = reference(view, batch, wait_seconds=wait_seconds)
        return (logits - wanted).pow(2).mean() + logits.mean()

    check_model(adapted(base(), LoraConfig(**Q_V)), call=call)


def test_the_adapters_are_on_again_after_a_step() -> None:
    module = adapted(base(), LoraConfig(**Q_V))

    def call(view: Any, batch: Any, index: int) -> Any:
        wanted = reference(view, batch, wait_seconds=0.0)
        return (view.outputs(batch).logits - wanted).pow(2).mean()

    with engine_for(module, decoder(module), num_microbatches=2) as engine:
        mean_step(engine, token_batches(2), call=call)
    adapter = module.model.base_model.model.model.layers[0].self_attn.q_proj
    assert not adapter.disable_adapters
    assert adapter.active_adapters == ["default"]
    assert all(p.requires_grad == ("lora_" in n) for n, p in module.named_parameters())


def test_the_active_adapter_alone_is_trained() -> None:
    module = two_adapters()
    module.model.set_adapter("other0")
    check_model(module)
    with engine_for(module, decoder(module)) as engine:
        gradients = mean_step(engine, token_batches(3)).gradients
    names = {name for name, p in module.named_parameters() if p in gradients}
    assert all(".other0." in name for name in names)
    module.model.base_model.set_adapter(["default", "other0"])  # several at once
    check_model(module)


def all_trainable(module: Adapted) -> None:
    module.model.set_adapter("default")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_" in name)


def one_of_two(view: Any, batch: Any, index: int) -> Any:
    view.model.set_adapter("other0" if index % 2 else "default")
    time.sleep(0.01 * index)
    return view.outputs(batch).loss


def both_in_turn(view: Any, batch: Any, index: int) -> Any:
    losses = []
    for name in ("other0", "default"):
        view.model.set_adapter(name)
        losses.append(view.outputs(batch).loss)
    for name, parameter in view.named_parameters():
        parameter.requires_grad_("lora_" in name)  # else plain PyTorch drops one's gradients
    return losses[0] + 2 * losses[1]


@pytest.mark.parametrize("call", [one_of_two, both_in_turn])
def test_every_microbatch_chooses_its_adapters(call: Any) -> None:
    module = two_adapters()
    check_model(module, call=call, reset=lambda: all_trainable(module))


def test_an_adapter_that_a_step_makes_trainable_is_refused() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        view.model.set_adapter("other0")
        return view.outputs(batch).loss

    module = two_adapters()
    with (
        engine_for(module, decoder(module)) as engine,
        pytest.raises(ConfigurationError, match=r"lora_A\.other0\.weight' trainable.*before it"),
    ):
        mean_step(engine, token_batches(3), call=call)


def test_dropout_off_for_one_of_two_passes() -> None:
    """`eval()` for a while is the microbatch's own, too, and its recompute's."""

    def call(view: Any, batch: Any, index: int) -> Any:
        view.model.eval()
        time.sleep(0.01 * index)
        loss = view.outputs(batch).loss
        view.model.train()
        return loss

    module = adapted(base(), LoraConfig(**Q_V, lora_dropout=0.5))
    check_model(module, call=call)
