from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoModelForTokenClassification,
)

VOCABULARY = 64
_TOKENS = 6


class Wrapped(nn.Module):
    """A user's module around a model of transformers, which computes its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of model.

    Attributes:
        build: Makes one.
        batch: Makes a microbatch from a generator.
        stacks: Names of the stacks that are to be found.
        blocks: Names of blocks, where they are to be named.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Tensor]]
    stacks: tuple[str, ...]
    blocks: tuple[str, ...] | None = None


def _kind(
    auto: Any,
    name: str,
    batch: Callable[[torch.Generator], dict[str, Tensor]],
    stacks: tuple[str, ...],
    *,
    blocks: tuple[str, ...] | None = None,
    **config: Any,
) -> Kind:
    """A kind of transformers' models, without dropout, of a small configuration."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        # Fused attention picks another kernel, which rounds differently, where a bias needs no
        # gradient, as in a FORWARD stage.
        full = AutoConfig.for_model(name, attn_implementation="eager", **config)
        made = auto.from_config(full).float().train()
        for module in made.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return Wrapped(made)

    return Kind(build=build, batch=batch, stacks=stacks, blocks=blocks)


def _ids(generator: torch.Generator) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, _TOKENS), generator=generator)


def _causal(generator: torch.Generator) -> dict[str, Any]:
    ids = _ids(generator)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _pairs(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": _ids(generator), "labels": _ids(generator)}


def _images(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
        "labels": torch.tensor([0, 1]),
    }


def _sound(generator: torch.Generator) -> dict[str, Any]:
    features = torch.randn(2, 8, 16, generator=generator)
    return {"input_features": features, "labels": _ids(generator), "use_cache": False}


def _seen(generator: torch.Generator) -> dict[str, Any]:
    ids = _ids(generator)
    ids[:, 1:5] = 2  # a place for every patch
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(2, 3, 16, 16, generator=generator),
        "labels": ids,
        "use_cache": False,
    }


def _seen_in_patches(generator: torch.Generator) -> dict[str, Any]:
    ids = torch.randint(3, 50, (2, 10), generator=generator)
    ids[:, 2], ids[:, 3:7], ids[:, 7] = 62, 60, 63  # start, a place for every merged patch, end
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == 60).long(),
        "pixel_values": torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "labels": ids,
        "use_cache": False,
    }


_WIDTH: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
_TEXT: dict[str, Any] = {**_WIDTH, "vocab_size": VOCABULARY, "num_hidden_layers": 3}
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip

KINDS: dict[str, Kind] = {
    "encoder, masked tokens": _kind(
        AutoModelForMaskedLM, "bert", _pairs, ("model.bert.encoder.layer",), **_TEXT,
    ),
    "encoder, classes of tokens": _kind(
        AutoModelForTokenClassification, "distilbert", _pairs,
        ("model.distilbert.transformer.layer",),
        vocab_size=VOCABULARY, dim=16, n_layers=3, n_heads=2, hidden_dim=24, num_labels=VOCABULARY,
    ),
    "one block many times": _kind(
        AutoModelForMaskedLM, "albert", _pairs, ("model.albert.encoder.albert_layer_groups",),
        embedding_size=8, **_TEXT, blocks=("model.albert.encoder.albert_layer_groups.0",),
    ),
    "encoder-decoder with biases from the first block": _kind(
        AutoModelForSeq2SeqLM, "t5", _pairs, ("model.encoder.block", "model.decoder.block"),
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24,
        num_layers=3, num_heads=2, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    ),
    "encoder-decoder": _kind(
        AutoModelForSeq2SeqLM, "bart", _pairs,
        ("model.model.encoder.layers", "model.model.decoder.layers"),
        **_BART, use_cache=False,
    ),
    "speech": _kind(
        AutoModelForSpeechSeq2Seq, "whisper", _sound,
        ("model.model.encoder.layers", "model.model.decoder.layers"),
        **_BART, num_mel_bins=8,
        max_source_positions=8, max_target_positions=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    ),
    "vision transformer": _kind(
        AutoModelForImageClassification, "vit", _images, ("model.vit.layers",),
        **_WIDTH, num_hidden_layers=3, image_size=32, patch_size=16,
    ),
    "convolutions in stages": _kind(
        AutoModelForImageClassification, "convnext", _images,
        tuple(f"model.convnext.encoder.stages.{i}.layers" for i in range(4)),
        hidden_sizes=[8, 16, 24, 32], depths=[2, 2, 3, 2],
    ),
    "residual network with running statistics": _kind(
        AutoModelForImageClassification, "resnet", _images,
        tuple(f"model.resnet.encoder.stages.{i}.layers" for i in range(2)),
        embedding_size=8, depths=[2, 2], hidden_sizes=[8, 16], layer_type="basic",
    ),
    "windows in stages": _kind(
        AutoModelForImageClassification, "swin", _images,
        tuple(f"model.swin.encoder.layers.{i}.blocks" for i in range(2)),
        embed_dim=8, depths=[2, 2], num_heads=[2, 2],
        image_size=32, patch_size=4, window_size=4, drop_path_rate=0.0,
    ),
    "vision and language": _kind(
        AutoModelForImageTextToText, "llava", _seen,
        ("model.model.vision_tower.encoder.layers", "model.model.language_model.layers"),
        image_token_id=2, image_token_index=2,
        vision_config={
            "model_type": "clip_vision_model", **_WIDTH, "num_hidden_layers": 3,
            "image_size": 16, "patch_size": 8, "projection_dim": 16,
        },
        text_config={"model_type": "llama", **_TEXT, "num_key_value_heads": 2},
    ),
    "vision and language, the tower's features in several layers": _kind(
        AutoModelForImageTextToText, "qwen3_vl", _seen_in_patches,
        (
            "model.model.visual.blocks", "model.model.visual.deepstack_merger_list",
            "model.model.language_model.layers",
        ),
        image_token_id=60, video_token_id=61,
        vision_start_token_id=62, vision_end_token_id=63,
        vision_config={
            "depth": 3, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 24,
            "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
            "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16,
        },
        text_config={
            **_TEXT, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1,
            "eos_token_id": 2, "rope_parameters": {
                "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4,
            },
        },
    ),
    "state spaces": _kind(
        AutoModelForCausalLM, "mamba", _causal, ("model.backbone.layers",),
        vocab_size=VOCABULARY, hidden_size=16, state_size=4,
        num_hidden_layers=3, use_mambapy=False,
    ),
    "state spaces, attention and experts": _kind(
        AutoModelForCausalLM, "jamba", _causal, ("model.model.layers",),
        **{**_TEXT, "num_hidden_layers": 4},
        num_key_value_heads=1, num_experts=2, num_experts_per_tok=1, attn_layer_period=2,
        attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4,
        mamba_dt_rank=4, use_mamba_kernels=False, output_router_logits=True,
    ),
}  # fmt: skip


class DiffusionBlock(nn.Module):
    """As in diffusion transformers: two streams, a time embedding and rotary tables."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.image, self.text = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        shift, scale = self.modulation(functional.silu(temb)).unsqueeze(1).chunk(2, dim=-1)
        mixed = torch.cat([encoder_hidden_states, self.norm(hidden_states) * (1 + scale)], dim=1)
        if image_rotary_emb is not None:
            mixed = mixed * image_rotary_emb[0] + mixed.flip(-1) * image_rotary_emb[1]
        mixed = torch.softmax(mixed @ mixed.mT, dim=-1) @ mixed
        num = encoder_hidden_states.shape[1]
        text = encoder_hidden_states + self.text(mixed[:, :num])
        return text, hidden_states + self.image(mixed[:, num:] + shift)


class SingleBlock(nn.Module):
    """The second stack's: one stream."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden_states: Tensor, temb: Tensor) -> Tensor:
        inner = functional.gelu(self.inner(hidden_states))
        return hidden_states + temb.unsqueeze(1) * self.outer(inner)  # type: ignore[no-any-return]


class Diffusion(nn.Module):
    """A diffusion transformer: double blocks, then single blocks on both streams together."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image_in, self.text_in = nn.Linear(4, width), nn.Linear(5, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.transformer_blocks = nn.ModuleList(DiffusionBlock(width) for _ in range(3))
        self.single_transformer_blocks = nn.ModuleList(SingleBlock(width) for _ in range(2))
        self.out = nn.Linear(width, 4)

    def forward(self, image: Tensor, text: Tensor, time: Tensor) -> Tensor:
        hidden, states = self.image_in(image), self.text_in(text)
        frequencies = torch.arange(8, device=time.device) / 8
        temb = self.time(torch.cos(time[:, None] * frequencies))
        angles = torch.arange(text.shape[1] + image.shape[1], device=time.device)[:, None] * 0.1
        rotary = (angles.cos(), angles.sin())
        for block in self.transformer_blocks:
            states, hidden = block(
                hidden_states=hidden,
                encoder_hidden_states=states,
                temb=temb,
                image_rotary_emb=rotary,
                joint_attention_kwargs={},
            )
        hidden = torch.cat([states, hidden], dim=1)
        for block in self.single_transformer_blocks:
            hidden = block(hidden, temb)
        return self.out(hidden[:, text.shape[1] :])  # type: ignore[no-any-return]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        image, noise, time = batch["image"], batch["noise"], batch["time"]
        noisy = image * (1 - time[:, None, None]) + noise * time[:, None, None]
        return functional.mse_loss(self(noisy, batch["text"], time), noise)


def _diffused(generator: torch.Generator) -> dict[str, Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "image": draw(2, 6, 4),
        "noise": draw(2, 6, 4),
        "text": draw(2, 3, 5),
        "time": torch.rand(2, generator=generator),
    }


class Sequence(nn.Module):
    """A plain nn.Sequential of different layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return functional.mse_loss(self.layers(batch["image"]), batch["noise"])


KINDS["diffusion transformer"] = Kind(
    build=Diffusion,
    batch=_diffused,
    stacks=("transformer_blocks", "single_transformer_blocks"),
)
KINDS["sequential"] = Kind(build=Sequence, batch=_diffused, stacks=("layers",))


def batches_of(kind: Kind, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [kind.batch(generator) for _ in range(count)]
