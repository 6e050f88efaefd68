"""Which language models the engine trains as plain PyTorch does, to the bit.

Builds a tiny random model of every architecture that `AutoModelForCausalLM` knows (or that for
encoders, or for encoder-decoders), trains two steps on three CPU workers with four microbatches,
and compares losses, gradients, parameters and buffers with a plain loop over the same microbatches.
The second step has a plan for the calls of blocks that the first one made. Every model has a
process of its own, forked from this one, and a time limit.

    python benchmarks/architectures.py [--kind causal] [--only llama,gpt2] [--output json]

Counted as identical is only what was pipelined: a model without a list of blocks, which the engine
runs as one stage, or whose second step makes calls that were not planned, is not.

`--mode auto` trains three steps through the Trainer instead, with `microbatching="auto"`, and
compares with Lightning's own strategy on one device, where the batch is not divided: losses,
parameters and buffers within 1e-6. It names the mode that was chosen, and why.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import logging
import platform
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import tiny_configs
import torch
import transformers
from forked import ForkError, answer_of
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers.models.auto import modeling_auto

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.engine.chain.chain import Chain
from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.errors import RoundPipeError
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.planning.schedule.plan import Plan
from tests.kit.plans import default_plan, profile_module

SIZES = tiny_configs.TinySizes()
NUM_WORKERS = 3
NUM_MICROBATCHES = 4
NUM_STEPS = 2
SEQUENCES, TOKENS = 8, 12
LEARNING_RATE = 0.1
TOLERANCE = 1e-6  # for models that differ from themselves


class Verdict(Enum):
    """Verdict on an architecture."""

    IDENTICAL = "identical"
    """Pipelined, and equal to the bit, or to the tolerance where the model differs from itself."""
    DIFFERENT = "different"
    """Computed something else: a bug, unless the model draws random numbers."""
    SENSITIVE = "sensitive"
    """Different by more than the tolerance, as is a plain loop over the microbatches."""
    REFUSED = "refused"
    """The engine raised one of its own errors."""
    BROKEN = "broken"
    """Something else was raised inside the engine."""
    NOT_PIPELINED = "not pipelined"
    """No blocks were found, or calls of the second step were not planned."""
    NOT_BUILT = "not built"
    """transformers itself does not build or run the tiny model. Not counted in the total."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings on an architecture.

    Attributes:
        name: transformers' name of it.
        verdict: How it fared.
        reason: Why, where it is not identical.
        stack: Name of the list of blocks.
        num_blocks: How many there are.
        block_share: Part of the parameters that is in the blocks.
        seconds: How long it took.
        mode: What `auto` has chosen, with `--mode auto`.
    """

    name: str
    verdict: Verdict
    reason: str = ""
    stack: str = ""
    num_blocks: int = 0
    block_share: float = 0.0
    seconds: float = 0.0
    mode: str = ""


class LanguageModel(LightningModule):
    """Any user's module around a causal language model."""

    def __init__(self, model: nn.Module, *, kind: str, own_loss: bool) -> None:
        super().__init__()
        self.model = model
        self.kind = kind
        self.own_loss = own_loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the loss; the model's own, where it computes one from labels."""
        del batch_idx
        ids = batch["input_ids"]
        if "decoder_input_ids" in batch:
            logits = self.model(**batch, use_cache=False).logits
            return functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        if self.own_loss:
            loss: Tensor = self.model(**batch, labels=ids, use_cache=False).loss
            return loss
        logits = self.model(**batch, use_cache=False).logits[:, -ids.shape[1] :]
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As in the plain loop."""
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


# --- building -------------------------------------------------------------------------------------


#: transformers' tables of names and classes, by the kind of model.
KINDS = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING", {}),
    "encoder": ("MODEL_FOR_MASKED_LM_MAPPING", {"is_decoder": False}),
    "encoder-decoder": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", {"is_decoder": False}),
}


def architectures(kind: str) -> list[str]:
    """All names that transformers knows of a kind."""
    return list(getattr(modeling_auto, f"{KINDS[kind][0]}_NAMES"))


def build(name: str, kind: str) -> LanguageModel:
    """Return a tiny random model that plain PyTorch can train, in the first way that works."""
    first_error: Exception | None = None
    for num_layers, fill_unset, own_loss in itertools.product(
        (SIZES.layers, 2 * SIZES.layers), (False, True), (True, False)
    ):
        sizes = replace(SIZES, layers=num_layers)
        module = _build_in_one_way(name, sizes, kind, fill_unset=fill_unset, own_loss=own_loss)
        if isinstance(module, LanguageModel):
            return module
        first_error = first_error or module
    assert first_error is not None, "there is at least one way"
    raise first_error


def _build_in_one_way(
    name: str, sizes: tiny_configs.TinySizes, kind: str, *, fill_unset: bool, own_loss: bool
) -> LanguageModel | Exception:
    try:
        model = _model(name, sizes, kind, fill_unset=fill_unset)
        module = LanguageModel(model, kind=kind, own_loss=own_loss)
        untried = copy.deepcopy(module)
        module.training_step(batches(0, kind)[0], 0).backward()
        module.zero_grad()
    except Exception as error:  # noqa: BLE001 - whatever transformers raises is the reason
        return error
    try:
        copy.deepcopy(module)
    except RuntimeError:  # it keeps tensors with a graph
        return untried
    return module  # what a first call changes in it, has changed


def _model(name: str, sizes: tiny_configs.TinySizes, kind: str, *, fill_unset: bool) -> nn.Module:
    mapping, settings = KINDS[kind]
    config = tiny_configs.tiny_config(name, sizes, fill_unset=fill_unset)
    made = getattr(modeling_auto, mapping)[type(config)]
    config = _config_for(made, config)
    for key, value in settings.items():
        if hasattr(config, key):
            setattr(config, key, value)
    torch.manual_seed(0)
    model: nn.Module = made._from_config(config).float().train()  # noqa: SLF001
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            # Weights that all begin at 0 or 1 would hide mistakes.
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def _config_for(kind: Any, config: Any) -> Any:
    """Return the part of a configuration that is the model's own: a decoder's, say."""
    if isinstance(config, kind.config_class):
        return config
    parts = (getattr(config, key) for key in config.sub_configs)
    return next((part for part in parts if isinstance(part, kind.config_class)), config)


def batches(step: int, kind: str, count: int = NUM_MICROBATCHES) -> list[dict[str, Tensor]]:
    """Return the microbatches of a step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, SIZES.vocabulary, (SEQUENCES, TOKENS), generator=generator)
    parts = ids.chunk(count)
    made = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in parts]
    if kind == "encoder-decoder":
        return [{**batch, "decoder_input_ids": batch["input_ids"].flip(1)} for batch in made]
    return made


# --- training -------------------------------------------------------------------------------------

Trace = dict[str, Tensor]
"""Everything that two runs must agree on, by name."""


def train_plainly(module: LanguageModel, num_steps: int = NUM_STEPS) -> Trace:
    """Steps in a loop over the microbatches."""
    trace: Trace = {}
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    for step in range(num_steps):
        optimizer.zero_grad()
        for index, batch in enumerate(batches(step, module.kind)):
            loss = module.training_step(batch, index)
            (loss / NUM_MICROBATCHES).backward()
            trace[f"loss of step {step}, microbatch {index}"] = loss.detach()
        trace.update(_gradients(module, step))
        optimizer.step()
    return trace | _state(module)


def train_pipelined(module: LanguageModel, engine: Engine) -> tuple[Trace, str]:
    """Two steps with the engine, and why the second was not a pipeline."""
    trace: Trace = {}
    reason = ""
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    for step in range(NUM_STEPS):
        result = engine.begin_step(
            batches(step, module.kind),
            lambda view, batch, index: view.training_step(batch, index),
            loss_scales=[1 / NUM_MICROBATCHES] * NUM_MICROBATCHES,
        ).result()
        for index, loss in enumerate(result.losses):
            assert loss is not None, "every microbatch has a loss"
            trace[f"loss of step {step}, microbatch {index}"] = loss
        for parameter in module.parameters():
            parameter.grad = result.gradients.get(parameter)
        trace.update(_gradients(module, step))
        optimizer.step()
        if not result.chain.links:
            reason = "no block was called"
        elif step and result.num_streamed:
            reason = f"{result.num_streamed} calls of step {step} were not planned"
        if not result.chain.same_calls(engine.chain) and result.chain.links:
            engine.plan_for(result.chain, _plan(module, result.chain))
    return trace | _state(module), reason


class _Losses(Callback):
    def __init__(self) -> None:
        self.trace: Trace = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        del trainer, pl_module, batch
        self.trace[f"loss of step {batch_idx}"] = outputs["loss"].detach()


def train_with_lightning(module: LanguageModel, strategy: RoundPipeStrategy | None) -> Trace:
    """One step more through the Trainer, on whole batches."""
    seed_everything(1, verbose=False)
    losses = _Losses()
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if strategy is None else NUM_WORKERS,
        strategy="auto" if strategy is None else strategy,
        max_epochs=1,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    whole = [batches(step, module.kind, 1)[0] for step in range(NUM_STEPS + 1)]
    trainer.fit(module, DataLoader(whole, batch_size=None))
    return losses.trace | _state(module)


def _plan(module: nn.Module, chain: Chain) -> Plan:
    return default_plan(
        profile_module(module, chain),
        num_workers=NUM_WORKERS,
        num_microbatches=NUM_MICROBATCHES,
    )


def _gradients(module: nn.Module, step: int) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            yield f"gradient {step} of {name}", parameter.grad.clone()


def _state(module: nn.Module) -> Trace:
    return {
        **{f"parameter {k}": p.detach().clone() for k, p in module.named_parameters()},
        **{f"buffer {k}": b.clone() for k, b in module.named_buffers()},
    }


def differences(want: Trace, got: Trace, *, tolerance: float = 0.0) -> list[str]:
    """Return the names in which two traces differ, with the largest absolute difference."""
    found = []
    for name in [*want, *(name for name in got if name not in want)]:
        a, b = want.get(name), got.get(name)
        if a is None or b is None or a.shape != b.shape:
            found.append(f"{name} ({'missing' if b is None else 'extra'})")
        elif not torch.equal(a, b) and not torch.equal(a.isnan(), b.isnan() | ~(a == b)):
            distance = (a.double() - b.double()).abs().nan_to_num(nan=float("inf")).max().item()
            if not distance <= tolerance:
                found.append(f"{name} ({distance:.1e})")
    return found


# --- one architecture -----------------------------------------------------------------------------


def examine(name: str, kind: str, mode: str) -> Report:
    """Train one architecture both ways and compare."""
    try:
        module = build(name, kind)
    except Exception as error:  # noqa: BLE001 - reported
        return Report(name=name, verdict=Verdict.NOT_BUILT, reason=_described(error))
    plain, again = copy.deepcopy(module), copy.deepcopy(module)
    stacks = find_stacks(module, None)
    if not stacks:
        return Report(name=name, verdict=Verdict.NOT_PIPELINED, reason="no list of blocks found")
    blocks = [block for stack in stacks for block in stack.blocks]
    details: dict[str, Any] = {
        "name": name,
        "stack": ", ".join(stack.name for stack in stacks),
        "num_blocks": len(blocks),
        "block_share": _num_elements(*blocks) / _num_elements(module),
    }
    if mode == "auto":
        return _examine_auto(module, details)
    random_state = torch.get_rng_state()
    want = train_plainly(plain)
    draws = not torch.equal(random_state, torch.get_rng_state())
    chain = Chain.from_stacks(stacks)
    devices = [CpuDevice(index) for index in range(NUM_WORKERS)]
    try:
        plan = _plan(module, chain)
        with Engine(module, stack=stacks, devices=devices, plan=plan, chain=chain) as engine:
            got, not_pipelined = train_pipelined(module, engine)
    except RoundPipeError as error:
        return Report(verdict=Verdict.REFUSED, reason=_described(error), **details)
    except Exception as error:  # noqa: BLE001 - reported
        return Report(verdict=Verdict.BROKEN, reason=_described(error), **details)
    if not_pipelined:
        return Report(verdict=Verdict.NOT_PIPELINED, reason=not_pipelined, **details)
    found = differences(want, got)
    if not found:
        return Report(verdict=Verdict.IDENTICAL, **details)
    if differences(want, train_plainly(again)):
        reason = "the model differs from itself"
        if not differences(want, got, tolerance=TOLERANCE):
            return Report(verdict=Verdict.IDENTICAL, reason=reason, **details)
        found = [f"{reason}{' (it draws random numbers)' if draws else ''}", *found]
    if _gradients_matter(plain):
        found = ["without gradients the model itself computes other bits", *found]
    reason = f"{len(found)} differ: {', '.join(found[:3])}"
    return Report(verdict=Verdict.DIFFERENT, reason=reason, **details)


def _examine_auto(module: LanguageModel, details: dict[str, Any]) -> Report:
    """Compare what `auto` trains with one device."""
    plain, again, said = copy.deepcopy(module), copy.deepcopy(module), list[str]()
    listener = logging.Handler()
    listener.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch")
    logger.handlers, logger.propagate = [listener], False
    want = train_with_lightning(plain, None)
    strategy = RoundPipeStrategy(num_microbatches=NUM_MICROBATCHES, recompute="full")
    try:
        got = train_with_lightning(module, strategy)
    except RoundPipeError as error:
        return Report(verdict=Verdict.REFUSED, reason=_described(error), **details)
    except Exception as error:  # noqa: BLE001 - reported
        return Report(verdict=Verdict.BROKEN, reason=_described(error), **details)
    choices = [text for text in said if "microbatching=" in text]
    details["mode"] = "step" if any("proven to be a weighted" in c for c in choices) else "blocks"
    reason = "" if details["mode"] == "step" else " ".join(choices)
    found = differences(want, got, tolerance=TOLERANCE)
    if not found:
        return Report(verdict=Verdict.IDENTICAL, reason=reason, **details)
    looped = train_plainly(again, NUM_STEPS + 1)
    state = _state(plain)
    by_rounding = differences(state, {k: looped[k] for k in state}, tolerance=TOLERANCE)
    verdict = Verdict.SENSITIVE if by_rounding else Verdict.DIFFERENT
    reason = f"{', '.join(found[:2])}; in a plain loop {', '.join(by_rounding[:2])} {reason}"
    return Report(verdict=verdict, reason=reason, **details)


def _gradients_matter(module: LanguageModel) -> bool:
    """Return whether a model's logits are others, to the bit, when no graph is kept."""
    batch = batches(0, module.kind)[0]
    with torch.no_grad():
        without = module.model(**batch, use_cache=False).logits
    return not torch.equal(module.model(**batch, use_cache=False).logits, without)


def _num_elements(*modules: nn.Module) -> int:
    return sum(p.numel() for p in {p for m in modules for p in m.parameters()})


def _described(error: BaseException) -> str:
    """The error, with the place where it was raised; our own errors speak for themselves."""
    text = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    if isinstance(error, RoundPipeError):
        return text
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    places = " < ".join(f"{Path(f.filename).name}:{f.lineno} `{f.line}`" for f in reversed(frames))
    return f"{text} [{places}]"


def examine_quietly(name: str, kind: str, mode: str) -> Report:
    """Examine an architecture without warnings, and say how long it took."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    start = time.perf_counter()
    try:
        report = examine(name, kind, mode)
    except Exception as error:  # noqa: BLE001 - reported
        report = Report(name=name, verdict=Verdict.BROKEN, reason=_described(error))
    return replace(report, seconds=round(time.perf_counter() - start, 2))


# --- the whole ------------------------------------------------------------------------------------


def summary(reports: Sequence[Report]) -> dict[str, Any]:
    """Return what `--output json` prints."""
    counted = [r for r in reports if r.verdict is not Verdict.NOT_BUILT]
    identical = [r for r in counted if r.verdict is Verdict.IDENTICAL]
    return {
        "total": len(counted),
        "identical": len(identical),
        "failed": {r.name: f"{r.verdict.value}: {r.reason}" for r in counted if r not in identical},
        "not_built": {r.name: r.reason for r in reports if r not in counted},
        "to_tolerance": {r.name: r.reason for r in identical if r.reason},
        "by_mode": Counter(r.mode for r in counted if r.mode),
        "by_verdict": Counter(r.verdict.value for r in reports),
        "models": {
            r.name: {"stack": r.stack, "blocks": r.num_blocks, "share": round(r.block_share, 3)}
            for r in identical
        },
        "seconds": round(sum(r.seconds for r in reports), 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }


def main() -> None:
    """Examine all architectures and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kind", choices=KINDS, default="causal", help="default causal")
    parser.add_argument("--mode", choices=("step", "auto"), default="step", help="default step")
    parser.add_argument("--only", default="", help="names, separated by commas (default all)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds per model")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else architectures(options.kind)
    unknown = sorted(set(names) - set(architectures(options.kind)))
    if unknown:
        parser.error(f"transformers knows no {options.kind} {', '.join(unknown)}")
    torch.set_num_threads(1)
    reports = []
    for name in names:
        arguments = name, options.kind, options.mode
        try:
            report = answer_of(examine_quietly, *arguments, seconds=options.timeout)
        except ForkError as error:
            report = Report(name=name, verdict=Verdict.BROKEN, reason=str(error))
        reports.append(report)
        if options.output == "text":
            print(f"{name:32} {report.verdict.value:14} {report.mode:7}{report.reason}", flush=True)
    result = summary(reports)
    if options.output == "json":
        print(json.dumps(result, indent=1))
        return
    counts = [dict(result[key]) for key in ("by_verdict", "by_mode") if result[key]]
    print(f"{result['identical']} of {result['total']} identical; {', '.join(map(str, counts))}")


if __name__ == "__main__":
    main()
