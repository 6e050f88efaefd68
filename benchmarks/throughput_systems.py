"""The systems that `train_throughput.py` compares: each trains the same model on the same batches.

A system is built in a process of its own and then asked for steps. Every step is one batch of
random tokens, `num_microbatches` times `sequences` of `seq_len`, one AdamW update. The loss is the
model's own: the mean over the predicted tokens of a microbatch, averaged over the microbatches.
"""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

MODELS = Path(__file__).parent.parent / "conf" / "model"
BLOCK_COUNT = "num_hidden_layers"
DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.float32, "bf16-true": torch.bfloat16}
"""Dtype in which trained parameters are stored, for every precision."""


def architecture_of(name: str) -> dict[str, Any]:
    """Read a shipped model's configuration and those it builds on, without Hydra."""
    path = MODELS / f"{name}.yaml"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    fields: dict[str, Any] = {}
    for base in content.get("defaults", ()):
        if base != "_self_":
            fields |= architecture_of(str((path.parent / base.split("@")[0]).relative_to(MODELS)))
    return fields | (content.get("architecture") or {})


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training: the model, the data and the machine.

    Attributes:
        model: A file in conf/model.
        num_blocks: Blocks to keep; None: all.
        width: Divides hidden and inner sizes, heads and vocabulary: for trials of the script.
        train: `full`, or `lora`.
        lora_rank: Rank of the adapters, on all linear layers.
        precision: Lightning's word for it.
        sequences: Per microbatch.
        seq_len: Tokens per sequence.
        num_microbatches: Per step.
        device: For example `cuda:0` or `cpu`.
        workers: Workers of ours that share the device.
        recompute: Ours: `auto`, `full`, `selective` or `none`.
        update: Ours: `exact` or `async`.
        upload_dtype: Ours, see `RoundPipeStrategy`; None: that of the parameters.
        gradient_dtype: The same.
        memory_cap_gib: What of the device's memory may be used; None: all.
    """

    model: str
    num_blocks: int | None = None
    width: int = 1
    train: str = "full"
    lora_rank: int = 32
    precision: str = "bf16-mixed"
    sequences: int = 1
    seq_len: int = 2048
    num_microbatches: int = 8
    device: str = "cuda:0"
    workers: int = 1
    recompute: str = "auto"
    update: str = "exact"
    upload_dtype: str | None = None
    gradient_dtype: str | None = None
    memory_cap_gib: float | None = None

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.num_microbatches * self.sequences * self.seq_len

    def config(self) -> dict[str, Any]:
        """Fields of the transformers configuration."""
        fields = architecture_of(self.model)
        if self.num_blocks is not None:
            fields[BLOCK_COUNT] = self.num_blocks
            fields.pop("layer_types", None)
        for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", "vocab_size"):
            if name in fields:
                fields[name] = max(64, fields[name] // self.width)
        for name in ("num_attention_heads", "num_key_value_heads", "num_experts"):
            if name in fields:
                fields[name] = max(2, fields[name] // self.width)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            fields.pop(name, None)
        return fields

    def build(self, device: str) -> Any:
        """Draw the model's weights on a device, with adapters where these are trained."""
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = self.config()
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        torch.manual_seed(0)
        dtype = torch.bfloat16 if self.train == "lora" else DTYPES[self.precision]
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = AutoModelForCausalLM.from_config(config)
        finally:
            torch.set_default_dtype(before)
        model.config.use_cache = False
        if self.train == "lora":
            from peft import LoraConfig, get_peft_model

            model.requires_grad_(requires_grad=False)
            model = get_peft_model(
                model, LoraConfig(r=self.lora_rank, target_modules="all-linear", lora_dropout=0.0)
            )
        return model.train()

    def batch(self, step: int) -> Tensor:
        """Return random tokens, int64, of shape (microbatches x sequences, seq_len)."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.num_microbatches * self.sequences, self.seq_len)
        return torch.randint(0, self.config()["vocab_size"], shape, generator=generator)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW over what is trained."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        return torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context of forward passes."""
        if self.precision != "bf16-mixed":
            return contextlib.nullcontext()
        return torch.autocast(torch.device(self.device).type, dtype=torch.bfloat16)


class System(ABC):
    """One way to train a task."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self._step = 0

    def run(self, num_steps: int) -> dict[str, Any]:
        """Run steps and say how long each took and what memory it took at most."""
        on_device = self.task.device != "cpu"
        if on_device:
            torch.accelerator.reset_peak_memory_stats(torch.device(self.task.device))
        seconds = []
        for _ in range(num_steps):
            start = time.perf_counter()
            loss = self.step(self.task.batch(self._step))
            if on_device:
                torch.accelerator.synchronize(torch.device(self.task.device))
            seconds.append(time.perf_counter() - start)
            self._step += 1
        answer: dict[str, Any] = {"seconds": seconds, "loss": loss, **self.details()}
        if on_device:
            device = torch.device(self.task.device)
            answer["peak_gib"] = torch.accelerator.max_memory_allocated(device) / 2**30
            answer["reserved_gib"] = torch.accelerator.max_memory_reserved(device) / 2**30
        return answer

    def details(self) -> dict[str, Any]:
        """Further figures of the last steps."""
        return {}

    @abstractmethod
    def step(self, tokens: Tensor) -> float:
        """Train on one batch and return its loss."""

    def close(self) -> None:
        """End what runs beside."""


class Resident(System):
    """Plain PyTorch: everything on the device.

    Args:
        task: What is trained.
        checkpointed: Whether every block is computed again in the backward pass.
    """

    def __init__(self, task: Task, *, checkpointed: bool = False) -> None:
        super().__init__(task)
        self.model = task.build(task.device)
        if checkpointed:
            _checkpoint(self.model)
        self.optimizer = task.optimizer(self.model)

    def step(self, tokens: Tensor) -> float:
        """Train on one batch and return its loss."""
        task, losses = self.task, []
        for part in tokens.split(task.sequences):
            ids = part.to(task.device)
            with task.autocast():
                loss = self.model(input_ids=ids, labels=ids).loss / task.num_microbatches
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum())


class FullyShardedOffload(Resident):
    """FSDP2 in one process, with parameters and optimizer in host memory and full checkpointing."""

    def __init__(self, task: Task) -> None:
        from torch import distributed
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            fully_shard,
        )

        System.__init__(self, task)
        self._folder = tempfile.TemporaryDirectory()
        device = torch.device(task.device)
        backend = "gloo"
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index or 0)
            backend = f"cpu:gloo,{device.type}:nccl"
        distributed.init_process_group(
            backend,
            store=distributed.FileStore(str(Path(self._folder.name) / "store"), 1),
            rank=0,
            world_size=1,
        )
        self.model = task.build("cpu")
        _checkpoint(self.model)
        half = task.precision != "32-true"
        options: dict[str, Any] = {
            "mesh": distributed.device_mesh.init_device_mesh(device.type, (1,)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None),
        }
        if device.type != "cpu":
            options["offload_policy"] = CPUOffloadPolicy()
        for block in _blocks(self.model):
            fully_shard(block, **options)
        fully_shard(self.model, **options)
        self.optimizer = task.optimizer(self.model)


class DeepSpeedOffload(System):
    """DeepSpeed ZeRO-3 in one process, with parameters and optimizer in host memory."""

    def __init__(self, task: Task) -> None:
        import deepspeed

        super().__init__(task)
        model = task.build("cpu")
        _checkpoint(model)
        offload = {"device": "cpu", "pin_memory": True}
        self._engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            config={
                "train_micro_batch_size_per_gpu": task.sequences,
                "gradient_accumulation_steps": task.num_microbatches,
                "bf16": {"enabled": task.precision != "32-true"},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
                "zero_optimization": {
                    "stage": 3,
                    "offload_param": offload,
                    "offload_optimizer": offload,
                },
            },
        )

    def step(self, tokens: Tensor) -> float:
        """Train on one batch and return its loss."""
        losses = []
        for part in tokens.split(self.task.sequences):
            ids = part.to(self.task.device)
            loss = self._engine(input_ids=ids, labels=ids).loss
            self._engine.backward(loss)
            self._engine.step()
            losses.append(float(loss))
        return sum(losses) / len(losses)


class PublishedLibrary(System):
    """The paper's own library (PyPI `roundpipe`), used as its manual says."""

    def __init__(self, task: Task) -> None:
        import roundpipe
        import roundpipe.optim

        super().__init__(task)
        trained = torch.float32 if task.precision == "bf16-mixed" else DTYPES[task.precision]
        self.model = roundpipe.wrap_model_to_roundpipe(
            task.build("cpu").to(torch.bfloat16),
            use_sequential_preset=True,
            model_run_config=roundpipe.RoundPipeRunConfig(num_microbatch=task.num_microbatches),
            optim_dtype=trained,
        )
        with roundpipe.OptimizerCtx():
            self.optimizer = roundpipe.optim.Adam(
                [p for p in self.model.parameters() if p.requires_grad],
                lr=1e-5,
                weight_decay=0.01,
                decoupled_weight_decay=True,
            )

    def step(self, tokens: Tensor) -> float:
        """Train on one batch and return its loss."""
        loss = self.model.forward_backward(
            input_kwargs={"input_ids": tokens}, label=tokens, loss_fn=self._loss
        )
        self.model.step(self._update, is_async=self.task.update == "async")
        return float(sum(loss) if isinstance(loss, list) else loss)

    def _loss(self, outputs: Any, labels: Tensor) -> Tensor:
        logits = getattr(outputs, "logits", outputs)[:, :-1].flatten(0, 1).float()
        mean = nn.functional.cross_entropy(logits, labels[:, 1:].flatten().to(logits.device))
        return mean / self.task.num_microbatches

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class Ours(System):
    """This project, through the Trainer: a fit that takes its batches one by one, when asked."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._batches: queue.Queue[Tensor | None] = queue.Queue()
        self._losses: queue.Queue[float | BaseException] = queue.Queue()
        self._trainer: Any = None
        self._planned_gib = 0.0
        self._thread: threading.Thread | None = None

    def step(self, tokens: Tensor) -> float:
        """Train on one batch and return its loss."""
        self._batches.put(tokens)
        if self._thread is None:
            self._thread = threading.Thread(target=self._fit, daemon=True)
            self._thread.start()
        answer = self._losses.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def details(self) -> dict[str, Any]:
        """Figures that the strategy has of the last step."""
        strategy = self._trainer.strategy
        return {
            "plan": {
                "partition": str(strategy.last_step.plan.partition),
                "recompute": str(strategy.last_step.plan.recompute.value),
                "weight_slots": strategy.last_step.plan.weight_slots,
                "num_resident": sum(map(len, strategy.last_step.plan.resident)),
            },
            "idle_share": strategy.last_step.timeline.bubble_fraction,
            "planned_gib": self._planned_gib,
        }

    def close(self) -> None:
        """Let the fit come to its end."""
        self._batches.put(None)
        if self._thread is not None:
            self._thread.join()

    def _fit(self) -> None:
        try:
            self._trainer = self._make_trainer()
            self._trainer.fit(self._module(), train_dataloaders=self._loader())
        except BaseException as error:  # noqa: BLE001 - handed to the asking thread
            self._losses.put(error)

    def _make_trainer(self) -> Any:
        from lightning.pytorch import Callback, Trainer

        from roundpipe_lightning import RoundPipeStrategy

        losses = self._losses

        class Answer(Callback):
            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
                del trainer, module
                losses.put(float(outputs["loss"]))

        task, device = self.task, torch.device(self.task.device)
        strategy = RoundPipeStrategy(
            num_microbatches=task.num_microbatches,
            recompute=task.recompute,
            update=task.update,
            upload_dtype=task.upload_dtype,
            gradient_dtype=task.gradient_dtype,
            workers_per_device=task.workers,
        )
        strategy.plan_listeners.append(self._note_plan)
        return Trainer(
            strategy=strategy,
            accelerator="cpu" if device.type == "cpu" else "gpu",
            devices=1 if device.type == "cpu" else [device.index or 0],
            precision=task.precision,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Answer()],
        )

    def _note_plan(self, plan: Any) -> None:
        self._planned_gib = plan.description.memory.device.total_bytes / 2**30

    def _module(self) -> Any:
        from lightning.pytorch import LightningModule

        task = self.task

        class Module(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = task.build("cpu")

            def training_step(self, ids: Tensor) -> Tensor:
                loss: Tensor = self.model(input_ids=ids, labels=ids).loss
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return task.optimizer(self)

        return Module()

    def _loader(self) -> Any:
        batches = self._batches

        class Asked:
            def __iter__(self) -> Iterator[Tensor]:
                yield from iter(batches.get, None)

            def __len__(self) -> int:  # without one, Lightning asks for a batch ahead
                return 10**6

        return Asked()


SYSTEMS: dict[str, Callable[[Task], System]] = {
    "ours": Ours,
    "plain": Resident,
    "checkpointed": lambda task: Resident(task, checkpointed=True),
    "fsdp": FullyShardedOffload,
    "deepspeed": DeepSpeedOffload,
    "roundpipe": PublishedLibrary,
}


def _checkpoint(model: Any) -> None:
    """Let every block be computed again in the backward pass, by transformers' own switch."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.20 and later
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The longest module list: the decoder's layers."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=len))


def serve(connection: Any, name: str, task: Task) -> None:
    """Build a system and run the steps that are asked for, until None is: a process's work.

    Args:
        connection: A pipe's end: takes numbers of steps, gives answers with `error` if any.
        name: Which system.
        task: What it trains.
    """
    system: System | None = None
    try:
        if task.memory_cap_gib is not None:
            _cap_memory(task)
        system = SYSTEMS[name](task)
        while (num_steps := connection.recv()) is not None:
            connection.send(system.run(num_steps))
            if task.device != "cpu":
                torch.accelerator.empty_cache()
    except ImportError as error:
        connection.send({"error": f"not installed: {error}"})
    except Exception as error:  # noqa: BLE001 - one system's failure is an answer
        last = traceback.format_exception(error)[-3:]
        connection.send({"error": f"{type(error).__name__}: {error}", "where": "".join(last)})
    finally:
        if system is not None:
            with contextlib.suppress(Exception):
                system.close()


def _cap_memory(task: Task) -> None:
    device = torch.device(task.device)
    if device.type != "cuda":
        raise ValueError(f"--memory-cap-gib needs a CUDA device, not {task.device}.")
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(
        min(1.0, task.memory_cap_gib * 2**30 / total) if task.memory_cap_gib else 1.0, device
    )
