"""LoRA on conversations: from a JSONL file to an adapter that loads elsewhere.

`python examples/chat_lora.py` makes a small base model, trains an adapter on `data/chat.jsonl`,
saves it, and lets peft load it again. `--base FOLDER_OR_HUB_NAME` takes another base.
"""

import argparse
from pathlib import Path

import lightning
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import roundpipe_lightning  # noqa: F401  registers the strategy "roundpipe"
from roundpipe_lightning.data import ChatDataModule
from roundpipe_lightning.modules import TokenizerSource, byte_level_tokenizer

DATA = Path(__file__).resolve().parent / "data"


class ChatLora(lightning.LightningModule):
    """Ordinary Lightning code: a transformers model with an adapter of peft."""

    def __init__(self, base: str, *, whole: list[str] | None, lr: float) -> None:
        super().__init__()
        config = LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules="all-linear",
            modules_to_save=whole,
            task_type="CAUSAL_LM",
        )
        model = AutoModelForCausalLM.from_pretrained(base).train()  # transformers loads to evaluate
        self.model = get_peft_model(model, config)
        self.lr = lr
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The model's own loss over what the assistant says."""
        loss: torch.Tensor = self.model(**batch, use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
        """The same loss over conversations that are kept apart."""
        self.log("val_loss", self.model(**batch, use_cache=False).loss, prog_bar=True)

    def on_train_batch_end(self, *_: object) -> None:
        """Keep the loss of the whole batch."""
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the adapter."""
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr)


def make_base(folder: Path) -> str:
    """A base of random weights, in a folder as `save_pretrained` leaves it."""
    texts = (DATA / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = byte_level_tokenizer(texts, num_tokens=400)
    config = Qwen3Config(
        vocab_size=400,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def answer(base: str, adapter: Path, question: str) -> str:
    """Return the model's answer with the adapter, without Lightning and without this package."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    tokenizer = TokenizerSource(name=base).load()
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
    )
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    return str(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :]))


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, save, load; returns the losses of all steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", help="folder or hub name; default: made here")
    parser.add_argument("--files", nargs="+", default=[str(DATA / "chat.jsonl")])
    parser.add_argument("--output", type=Path, default=Path("chat_lora"))
    parser.add_argument("--devices", type=int, default=2, help="workers")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args(arguments)

    lightning.seed_everything(0, verbose=False)
    base = options.base or make_base(options.output / "base")
    data = ChatDataModule(
        files=options.files, tokenizer=TokenizerSource(name=base), seq_len=192, batch_size=4
    )
    # a base that has learned nothing yet needs its embedding and its head trained whole as well
    module = ChatLora(
        base, whole=None if options.base else ["embed_tokens", "lm_head"], lr=options.lr
    )
    trainer = lightning.Trainer(
        strategy="roundpipe",
        accelerator=options.accelerator,
        devices=options.devices,
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, datamodule=data)
    adapter = options.output / "adapter"
    module.model.save_pretrained(adapter)
    print(f"loss: {module.losses[0]:.2f} -> {module.losses[-1]:.2f}")
    print(f"with the adapter in {adapter}: {answer(base, adapter, 'What comes after 41?')!r}")
    return module.losses


if __name__ == "__main__":
    main()
