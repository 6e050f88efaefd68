"""Whose loss is fused, of all causal language models, and by how much it then differs.

Builds the tiny random models of `benchmarks/architectures.py` and runs one step of each on three
CPU workers with four microbatches, with the model's own loss and with `loss="fused"`. Compared are
the losses and all gradients. Models that the engine refuses run in plain PyTorch, both ways.

    python benchmarks/fused_losses.py [--only llama,gpt2] [--output json]
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import architectures
import torch
import transformers
from torch import Tensor, nn

from roundpipe_lightning.engine.device.base import CpuDevice
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.errors import RoundPipeError
from roundpipe_lightning.models.blocks import find_stacks
from roundpipe_lightning.models.losses.lazy_logits import LossFusion
from tests.kit.plans import default_plan, profile_module

KIND = "causal"  # as benchmarks/architectures.py calls it
TOLERANCE = 1e-5
NEGLIGIBLE = 1e-4  # gradients of parameters that are so small beside all others say nothing
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Step:
    """Results of one step.

    Attributes:
        losses: One per microbatch.
        gradients: By parameter.
    """

    losses: list[float]
    gradients: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings on an architecture.

    Attributes:
        name: transformers' name of it.
        how: `engine`, or why it ran in plain PyTorch; `not built` where it cannot be.
        fused: How many of the microbatches' losses were fused.
        made: What logits were made for, all the same.
        loss_error: Largest relative difference of a loss.
        gradient_error: Relative difference of all gradients together.
        parameter_error: Largest relative difference of one parameter's, negligible ones left out.
    """

    name: str
    how: str
    fused: int = 0
    made: dict[str, int]
    loss_error: float = 0.0
    gradient_error: float = 0.0
    parameter_error: float = 0.0

    @property
    def is_equal(self) -> bool:
        """Whether the differences are those of rounding."""
        return max(self.loss_error, self.gradient_error) <= TOLERANCE


def plain_step(module: nn.Module, fusion: LossFusion | None) -> Step:
    """Run the microbatches in a loop."""
    losses = []
    for index, batch in enumerate(architectures.batches(0, KIND)):
        torch.manual_seed(index)
        if fusion is None:
            loss = module.training_step(batch, index)
        else:
            with fusion.active():
                loss = module.training_step(batch, index)
        (loss / architectures.NUM_MICROBATCHES).backward()
        losses.append(loss.item())
    gradients = {k: p.grad for k, p in module.named_parameters() if p.grad is not None}
    return Step(losses=losses, gradients=gradients)


def engine_step(module: nn.Module, fusion: LossFusion | None) -> Step:
    """Run the microbatches with the engine.

    Raises:
        RoundPipeError: The engine does not take the model.
    """
    stack = find_stacks(module, None)[0]
    count = architectures.NUM_MICROBATCHES
    plan = default_plan(
        profile_module(module, stack),
        num_workers=architectures.NUM_WORKERS,
        num_microbatches=count,
    )

    def call(view: Any, batch: Any, index: int) -> Any:
        loss = view.training_step(batch, index)
        return loss if fusion is None else fusion.materialized(loss)

    devices = [CpuDevice(index) for index in range(architectures.NUM_WORKERS)]
    torch.manual_seed(0)
    with Engine(
        module, stack=stack, devices=devices, plan=plan, timeout_seconds=TIMEOUT_SECONDS
    ) as engine:
        result = engine.begin_step(
            architectures.batches(0, KIND), call, loss_scales=[1 / count] * count, outside=fusion
        ).result()
    names = {parameter: name for name, parameter in module.named_parameters()}
    return Step(
        losses=[float(loss) for loss in result.losses if loss is not None],
        gradients={names[p]: gradient for p, gradient in result.gradients.items()},
    )


def relative(difference: float, size: float) -> float:
    """Return a relative difference; nothing differs from nothing by nothing."""
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def compared(name: str, how: str, own: Step, fused: Step, fusion: LossFusion) -> Report:
    """Compare two steps."""
    missing = own.gradients.keys() ^ fused.gradients.keys()
    differences = {
        key: float((own.gradients[key].double() - fused.gradients[key].double()).norm())
        for key in own.gradients
        if key not in missing
    }
    sizes = {key: float(own.gradients[key].double().norm()) for key in differences}
    total = sum(size**2 for size in sizes.values()) ** 0.5
    all_differences = sum(difference**2 for difference in differences.values()) ** 0.5
    considerable = [key for key in sizes if sizes[key] > NEGLIGIBLE * total]
    return Report(
        name=name,
        how=how,
        fused=fusion.report.num_fused,
        made=dict(fusion.report.made),
        loss_error=max(
            relative(abs(a - b), abs(a)) for a, b in zip(own.losses, fused.losses, strict=True)
        ),
        gradient_error=float("inf") if missing else relative(all_differences, total),
        parameter_error=max((differences[k] / sizes[k] for k in considerable), default=0.0),
    )


def examine(name: str) -> Report:
    """Run one architecture both ways."""
    try:
        module = architectures.build(name, KIND)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises is the reason
        return Report(name=name, how=f"not built: {type(error).__name__}", made={})
    other, fusion = copy.deepcopy(module), LossFusion("fused")
    try:
        own = engine_step(copy.deepcopy(module), None)
        return compared(name, "engine", own, engine_step(other, fusion), fusion)
    except RoundPipeError as error:
        fusion, how = LossFusion("fused"), f"plain: {type(error).__name__}"
    own = plain_step(copy.deepcopy(module), None)
    return compared(name, how, own, plain_step(copy.deepcopy(module), fusion), fusion)


def summary(reports: list[Report]) -> dict[str, Any]:
    """Return what `--output json` prints."""
    built = [report for report in reports if not report.how.startswith("not built")]
    fused = [r for r in built if r.fused == architectures.NUM_MICROBATCHES]
    return {
        "total": len(built),
        "fused": len(fused),
        "equal": sum(report.is_equal for report in built),
        "by_engine": sum(report.how == "engine" for report in built),
        "not_fused": {r.name: r.made for r in built if r not in fused},
        "different": {r.name: asdict(r) for r in built if not r.is_equal},
        "made_for": Counter(reason for report in built for reason in report.made),
        "largest_loss_error": max((r.loss_error for r in built), default=0.0),
        "largest_gradient_error": max((r.gradient_error for r in built), default=0.0),
        "largest_parameter_error": max((r.parameter_error for r in built), default=0.0),
        "plain": {r.name: r.how for r in built if r.how != "engine"},
        "not_built": {r.name: r.how for r in reports if r not in built},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    """Examine all architectures and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="names, separated by commas (default all)")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    reports = []
    for name in options.only.split(",") if options.only else architectures.architectures(KIND):
        report = examine(name)
        reports.append(report)
        if options.output == "text":
            print(
                f"{name:32} {report.how:24} fused {report.fused} loss {report.loss_error:.0e} "
                f"gradients {report.gradient_error:.0e} {report.made}",
                flush=True,
            )
    result = summary(reports)
    if options.output == "json":
        print(json.dumps(result, indent=1))
        return
    print(f"{result['fused']} of {result['total']} fused, {result['equal']} equal")


if __name__ == "__main__":
    main()
