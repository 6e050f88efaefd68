"""Hunts for races: random models, schedules and delays on an emulated server.

    python -m tests.soak.race_hunt [--cases 1000] [--seed 0] [--small] [--fault NAME]

Each case trains a random tiny model for two steps with a random plan, on devices whose copies and
computations take random times; a step accumulates one batch or more, which are in flight together,
or its blocks are updated while its backward pass runs, or the next step begins before its update
with parameters of one update ago. Weights go up as they are, or rounded. The model runs once per
microbatch, or once, its blocks on pieces.
Losses, gradients and parameters must be those of a plain loop to the bit, and the checker must find
every access ordered by an event. Targets of copies hold not-a-numbers until they are filled.

With `--fault` one kind of wait is left out, on purpose: the share of the cases in which that was
found says what the hunt can find. Faults: see `FAULTS`.
"""

from __future__ import annotations

import argparse
import random
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from roundpipe_lightning.emulation.race_checker import ProtocolChecker, ProtocolError
from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.timing import EmulatedTiming
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.steps import Step, StepResult
from roundpipe_lightning.engine.update.updater import Updater
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.stages import Partition, call_lengths
from tests.kit.engine import units_of
from tests.soak.race_faults import FAULTS, Fault, ForgetfulServer
from tests.soak.race_models import ModelSpec, PlainModel, RaceModel, make_batches, make_model

_NUM_STEPS = 2
_NUM_STALE_STEPS = 4
_LEARNING_RATE = 0.25
_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case.

    Attributes:
        model: The model.
        planned_passes: Passes of the first stack that the plan has; others run unplanned.
        num_microbatches: Microbatches of a batch.
        num_batches: Batches of a step.
        num_workers: Workers.
        team_size: Workers per stage.
        round_size: Microbatches that travel together.
        weight_slots: Stages whose weights a worker holds.
        resident: Blocks that stay on each worker.
        partition: The stages.
        is_checked: Whether tensors have tags and the checker runs; else only numbers show a race.
        max_delay_seconds: Of copies and computations.
        bytes_per_second: Of the links.
        is_direct: Whether devices reach each other.
        is_early: Whether blocks are updated as soon as their gradients are there.
        is_stale: Whether steps compute with parameters of one update ago.
        is_joined: Whether the model runs once per batch, its blocks on pieces.
        seed: Of all else.
    """

    model: ModelSpec
    planned_passes: int
    num_microbatches: int
    num_batches: int
    num_workers: int
    team_size: int
    round_size: int
    weight_slots: int
    resident: tuple[tuple[int, ...], ...]
    partition: Partition
    is_checked: bool
    max_delay_seconds: float
    bytes_per_second: float
    is_direct: bool
    is_early: bool
    is_stale: bool
    is_joined: bool
    seed: int

    @classmethod
    def drawn(cls, seed: int, *, is_small: bool = False) -> Case:
        """Draw the case of a seed, with few blocks and microbatches if it is to be small."""
        numbers = random.Random(seed)
        spec = ModelSpec.drawn(numbers, most_blocks=2 if is_small else 4)
        is_joined = random.Random(f"joined {seed}").random() < 0.3
        planned = numbers.randint(1, spec.num_passes)
        if is_joined:  # blocks without a plan would run on the whole batch, with other bits
            planned = spec.num_passes
        num_workers = numbers.randint(1, 8)
        teams = [size for size in range(1, num_workers + 1) if num_workers % size == 0]
        num_microbatches = numbers.randint(1, 3 if is_small else 4)
        lengths = [spec.num_first] * planned + [spec.num_second] * bool(spec.num_second)
        num_blocks = sum(lengths)
        stays = numbers.random() < 0.4
        others = random.Random(f"others {seed}")
        num_batches = others.choice((1, 1, 1, 2) if is_small else (1, 1, 2, 3))
        rounds, is_direct = others.random() < 0.3, others.random() < 0.4
        is_early = num_batches == 1 and others.random() < 0.5
        is_stale = num_batches == 1 and not is_early and others.random() < 0.8
        # Several microbatches that write into buffers are refused, and a block that runs twice.
        counts = spec.num_passes == 1 and others.random() < 0.3
        if counts:
            num_microbatches = 1
        team_size, round_size = numbers.choice(teams), numbers.randint(1, num_microbatches)
        return cls(
            model=replace(spec, rounds=rounds, counts=counts),
            planned_passes=planned,
            num_microbatches=num_microbatches,
            num_batches=num_batches,
            num_workers=num_workers,
            team_size=team_size,
            round_size=num_microbatches if is_joined else round_size,
            weight_slots=numbers.choice((1, 2, 2)),
            resident=tuple(
                tuple(block for block in range(num_blocks) if stays and numbers.random() < 0.4)
                for _ in range(num_workers)
            ),
            partition=_partition(lengths, numbers, fuses=not is_joined),
            is_checked=numbers.random() < (0.2 if is_small else 0.4),
            max_delay_seconds=numbers.choice((0.0002, 0.001) if is_small else (0.001, 0.003)),
            bytes_per_second=numbers.choice((1e6, 1e9) if is_small else (2e5, 1e6, 1e9)),
            is_direct=is_direct,
            is_early=is_early,
            is_stale=is_stale,
            is_joined=is_joined,
            seed=seed,
        )

    def plan(self, names: Sequence[str]) -> Plan:
        return Plan(
            model="race",
            partition=self.partition,
            num_workers=self.num_workers,
            num_microbatches=self.num_microbatches,
            round_size=self.round_size,
            team_size=self.team_size,
            weight_slots=self.weight_slots,
            resident=self.resident,
            block_names=tuple(names),
        )


def _partition(lengths: Sequence[int], numbers: random.Random, *, fuses: bool) -> Partition:
    """Draw stages that span no place between two calls of stacks."""
    fused = numbers.randint(0, lengths[-1]) * fuses
    total = sum(lengths)
    cuts = [sum(lengths[:index]) for index in range(1, len(lengths))]

    def counts(num_blocks: int) -> list[int]:
        found: list[int] = []
        for length in call_lengths(num_blocks, cuts):
            left = length
            while left:
                found.append(numbers.randint(1, left))
                left -= found[-1]
        return found

    forward, backward = counts(total - fused), counts(total - fused)
    return Partition(forward=tuple(forward), backward=(fused, *reversed(backward)))


def run_case(case: Case, *, fault: Fault | None = None) -> list[str]:
    """Return what is wrong with a case, in which a wait may be left out."""
    with warnings.catch_warnings():  # of a weight's own values, which stale steps lack
        warnings.simplefilter("ignore")
        return _run_case(case, fault)


def _run_case(case: Case, fault: Fault | None) -> list[str]:
    model = make_model(case.model)
    plain = PlainModel(model)
    chain = model.chain(num_passes=case.planned_passes)
    timing = EmulatedTiming(
        upload_bytes_per_second=case.bytes_per_second,
        download_bytes_per_second=case.bytes_per_second,
        direct_bytes_per_second=case.bytes_per_second / 2 if case.is_direct else None,
        max_delay_seconds=case.max_delay_seconds,
        seed=case.seed,
    )
    given: dict[str, Any] = {"timing": timing, "poison": True, "tags": case.is_checked}
    if case.is_checked:
        given["checker"] = ProtocolChecker()
    server = (
        EmulatedServer(case.num_workers, **given)
        if fault is None
        else ForgetfulServer(case.num_workers, fault=fault, **given)
    )
    try:
        with (
            server,
            Engine(
                model,
                stack=model.stacks(),
                devices=server.devices,
                plan=case.plan(chain.names),
                chain=chain,
                timeout_seconds=_TIMEOUT_SECONDS,
                upload_dtype=torch.bfloat16 if case.model.rounds else None,
                trust_rows=True,  # a sum of rounded gradients is another than the rounded sum
            ) as engine,
        ):
            train = _train_stale if case.is_stale else _train_early if case.is_early else _train
            wrong = train(case, engine, model, plain)
        names = [f"buffer {name}" for name, _ in model.named_buffers()]
        return wrong or _differences(names, list(model.buffers()), plain.buffers)
    except ProtocolError as error:
        return [f"checker: {error}"]


def _train(case: Case, engine: Engine, model: RaceModel, plain: PlainModel) -> list[str]:
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    for number in range(_NUM_STEPS):
        seeds = [case.seed + number + 100 * batch for batch in range(case.num_batches)]
        for seed, result in zip(seeds, _run_step(case, engine, seeds), strict=True):
            losses, wanted = _plain_step(case, plain, seed)
            gradients = [result.gradients.get(parameter) for parameter in parameters]
            wrong = [
                *_differences([f"loss {i}" for i in range(len(losses))], result.losses, losses),
                *_differences([f"gradient of {name}" for name in names], gradients, wanted),
            ]
            if wrong:
                return [f"step {number}: {line}" for line in wrong]
        with torch.no_grad():
            for ours, its, gradient in zip(parameters, plain.parameters, gradients, strict=True):
                if gradient is not None:
                    ours.sub_(_LEARNING_RATE * gradient)
                    its.sub_(_LEARNING_RATE * gradient)
    return []


def _train_early(case: Case, engine: Engine, model: RaceModel, plain: PlainModel) -> list[str]:
    """Train as `_train`, with blocks that are updated while steps run."""
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
    with _updater(engine, model) as updater:
        for number in range(_NUM_STEPS):
            seed = case.seed + number
            updater.begin(optimizer)
            [result] = _run_step(case, engine, [seed])
            updater.join()
            for parameter in model.parameters():
                parameter.grad = result.gradients.get(parameter)
            updater.submit(optimizer)
            losses, wanted = _plain_step(case, plain, seed)
            wrong = _differences([f"loss {i}" for i in range(len(losses))], result.losses, losses)
            if wrong:
                return [f"step {number}: {line}" for line in wrong]
            with torch.no_grad():
                for its, gradient in zip(plain.parameters, wanted, strict=True):
                    if gradient is not None:
                        its.sub_(_LEARNING_RATE * gradient)
        updater.join()
    return _differences(names, list(model.parameters()), plain.parameters)


def _updater(engine: Engine, model: RaceModel, **options: Any) -> Updater:
    return Updater(engine.store, units_of(engine, model), **options)


def _train_stale(case: Case, engine: Engine, model: RaceModel, plain: PlainModel) -> list[str]:
    """Train with parameters of one update ago; steps begin while the one before is in flight."""
    parameters = list(model.parameters())
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(parameters, lr=_LEARNING_RATE)
    results: list[StepResult] = []
    in_flight: Step | None = None

    def update(step: Step, *, is_read: bool) -> None:
        results.append(step.result())
        for parameter in parameters:
            parameter.grad = results[-1].gradients.get(parameter)
        updater.keep([optimizer], is_read=is_read)
        updater.submit(optimizer)

    with _updater(engine, model, stale=True) as updater:
        for number in range(_NUM_STALE_STEPS):
            can_defer = updater.can_defer(optimizer)
            step = _begun(case, engine, case.seed + number)
            if in_flight is not None:
                update(in_flight, is_read=True)
                in_flight = None
            step.outputs()
            updater.join()
            if step.is_over or not can_defer:
                update(step, is_read=False)
            else:
                updater.defer(optimizer)
                in_flight = step
        if in_flight is not None:
            update(in_flight, is_read=False)
        updater.join()
    older = present = [its.detach().clone() for its in plain.parameters]
    for number, result in enumerate(results):
        with torch.no_grad():
            for its, values in zip(plain.parameters, older, strict=True):
                its.copy_(values)
        losses, gradients = _plain_step(case, plain, case.seed + number)
        wrong = _differences([f"loss {i}" for i in range(len(losses))], result.losses, losses)
        if wrong:
            return [f"step {number}: {line}" for line in wrong]
        pairs = zip(present, gradients, strict=True)
        older, present = present, [p if g is None else p - _LEARNING_RATE * g for p, g in pairs]
    return _differences(names, parameters, present)


def _plain_step(
    case: Case, plain: PlainModel, seed: int
) -> tuple[list[Tensor], list[Tensor | None]]:
    torch.manual_seed(seed)
    step_seed = int(torch.randint(0, 2**62, (), device="cpu"))
    num_pieces = case.num_microbatches if case.is_joined else 1
    return plain.step(_batches(case, seed), step_seed=step_seed, num_pieces=num_pieces)


def _batches(case: Case, seed: int) -> list[tuple[Tensor, Tensor]]:
    batches = make_batches(case.num_microbatches, seed=seed)
    if not case.is_joined:
        return batches
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return [(x, y)]


def _run_step(case: Case, engine: Engine, seeds: Sequence[int]) -> list[StepResult]:
    pending = []
    for seed in seeds:
        step = _begun(case, engine, seed)
        step.outputs()
        pending.append(step)
    return [step.result() for step in pending]


def _begun(case: Case, engine: Engine, seed: int) -> Step:
    batches = _batches(case, seed)
    torch.manual_seed(seed)
    return engine.begin_step(
        batches,
        lambda view, batch, index: view.training_step(batch, index),
        loss_scales=[1 / len(batches)] * len(batches),
        joined=case.is_joined,
    )


def _differences(
    names: Sequence[str], found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]
) -> list[str]:
    wrong = []
    for name, ours, its in zip(names, found, wanted, strict=True):
        if ours is None or its is None:
            if ours is not its and (ours if its is None else its).any():  # type: ignore[union-attr]
                wrong.append(f"{name}: only one has it")
        elif not torch.equal(ours, its):
            error = (ours - its).abs().max().item()
            wrong.append(f"{name}: off by {error:.3g}")
    return wrong


def _run_seed(number: int, *, fault: str | None, is_small: bool) -> list[str]:
    case = Case.drawn(number, is_small=is_small)
    try:
        return run_case(case, fault=None if fault is None else FAULTS[fault])
    except Exception as error:
        if fault is None:
            raise RuntimeError(f"case {number} failed: {case}") from error
        return [f"{type(error).__name__}: {error}"]


def hunt(
    cases: int, *, seed: int, fault: str | None = None, is_small: bool = False
) -> tuple[dict[int, list[str]], Counter[str]]:
    """Run cases, and return what was wrong with which, and how many there were of each kind.

    Args:
        cases: How many.
        seed: Of the first; the next has the next number.
        fault: The wait that is left out.
        is_small: Draw small cases.
    """
    wrong: dict[int, list[str]] = {}
    kinds: Counter[str] = Counter()
    for number in range(seed, seed + cases):
        case = Case.drawn(number, is_small=is_small)
        kinds["checked"] += case.is_checked
        kinds["in flight"] += case.num_batches > 1
        kinds["early updates"] += case.is_early
        kinds["stale updates"] += case.is_stale
        kinds["blocks"] += case.is_joined
        if found := _run_seed(number, fault=fault, is_small=is_small):
            wrong[number] = found[:3]
    return wrong, kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first (default 0)")
    parser.add_argument("--small", action="store_true", help="few blocks and microbatches")
    parser.add_argument("--fault", choices=sorted(FAULTS), help="leave a kind of wait out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wrong, kinds = hunt(
        options.cases, seed=options.seed, fault=options.fault, is_small=options.small
    )
    by_checker = sum(lines[0].startswith("checker") for lines in wrong.values())
    print(f"{options.cases} cases from seed {options.seed}, {dict(kinds)}: {len(wrong)} wrong,")
    print(f"{by_checker} of them found by the checker")
    for number, lines in list(wrong.items())[:5]:
        print(f"case {number}:", *lines, sep="\n  ")
    if wrong and options.fault is None:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
