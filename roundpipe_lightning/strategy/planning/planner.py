"""The plans of a training: one per shape of its batches, made when the shape is first step.

```
set-up        parameters, gradients, optimizer state against the machine   a first plan
first batch   the step's work, activations and all, against the machine    the plan, then the engine
later         another shape, or measured times that pay                    another plan
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, TypeAlias

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.device.accelerator import AcceleratorDevice
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.engine.store.flat_buffers import is_mapped
from roundpipe_lightning.errors import BatchError, FitError, PlanError
from roundpipe_lightning.models.batches import batch_size_of, length_of, shortened, split_batch
from roundpipe_lightning.models.work.work_profile import parameter_work
from roundpipe_lightning.planning.cost.costs import UpdateTiming
from roundpipe_lightning.planning.cost.memory import longest_that_fits
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.model.work import MicrobatchShape, ParameterStorage, WorkProfile
from roundpipe_lightning.planning.report.description import count_text
from roundpipe_lightning.planning.schedule.plan import Plan
from roundpipe_lightning.planning.schedule.schedule import Timeline
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy
from roundpipe_lightning.planning.search.fit import (
    FitAnswer,
    TrainingJob,
    fit_training,
    improved_plan,
    memory_shortage,
)
from roundpipe_lightning.planning.search.partition import QUICK, Effort
from roundpipe_lightning.planning.search.remedies import Alternatives, remedies, upload_cost
from roundpipe_lightning.planning.search.request import PartitionHints
from roundpipe_lightning.precision import RoundPipePrecision
from roundpipe_lightning.strategy.checks import takes_iterator
from roundpipe_lightning.strategy.options import Options, upload_dtype_of
from roundpipe_lightning.strategy.planning.dry_run import DryRunError, dry_run
from roundpipe_lightning.strategy.planning.inputs import (
    PlanEvent,
    Planned,
    StepWork,
    TransferSizes,
    find_machine,
    first_chain,
    num_values,
    rate_name,
    storage_of,
    widest_dtype,
)

_EFFORT = Effort(num_actions=2_000_000, num_generations=30)
"""A fraction of a second: the first step waits for it."""

_SMALLEST_SHARE = 0.6  # smallest share of a microbatch of the size that the plan was made for

_SHAPE = MicrobatchShape(sequences=1, seq_len=1)
"""All amounts of a measured step are fixed: its shape is the one it was measured with."""


Shortage: TypeAlias = Callable[[TrainingJob], float]
"""Function that returns the share of memory a job lacks: 0 or less where it fits."""


class StepPlanner:
    """Plans the steps of one `PipelineRuntime`.

    Args:
        optimizers: The optimizers of the training; none for an evaluation.
        num_nodes: Hosts; None: as the machine says.
        accumulates, clips, plain: As of `TrainingJob`.
        parameter_work: The function, or one that remembers what it has returned.

    Attributes:
        chain: The calls that are planned for: each stack once, then what a step has called.
        first_job: What is planned before there is a batch: parameters, not activations.
        num_microbatches: Microbatches of a full batch.

    Raises:
        PlanError: The given plan is for another model or another number of workers.
    """

    def __init__(  # noqa: PLR0913 - all but one keyword-only
        self,
        module: LightningModule,
        *,
        stacks: Sequence[BlockStack],
        devices: Sequence[Device],
        computes_on_host: bool,
        precision: RoundPipePrecision,
        options: Options,
        optimizers: Sequence[Optimizer] = (),
        num_nodes: int | None = None,
        accumulates: bool = False,
        clips: bool = False,
        plain: bool = False,
        parameter_work: Callable[[nn.Module, Chain], WorkProfile] = parameter_work,
    ) -> None:
        self._module = module
        self._stack = stacks[0] if stacks else None
        self._num_workers = len(devices)
        self._options = options
        self._given_plan = given_plan = options.given_plan  # never changed
        self._autocast_dtype = precision.autocast_dtype
        self._precision = str(precision.precision)
        self.machine = find_machine(
            options.hardware,
            num_workers=len(devices),
            workers_per_device=options.workers_per_device,
            computes_on_host=computes_on_host,
            accelerators=tuple(
                dict.fromkeys(d.torch_device for d in devices if isinstance(d, AcceleratorDevice))
            ),
        )
        self.machine = replace(self.machine, num_nodes=num_nodes or self.machine.num_nodes)
        if self.machine.num_nodes > 1 and options.memory_share != "auto":
            self.machine = replace(self.machine, memory_share=options.memory_share)
        self._accumulates, self._clips, self._plain = accumulates, clips, plain
        rounds = precision.stochastic_rounding
        moves = optimizers and module.automatic_optimization and not computes_on_host

        def stored(upload_dtype: torch.dtype | None) -> tuple[TransferSizes, ParameterStorage]:
            sizes = TransferSizes(module, stacks, upload_dtype)
            return sizes, storage_of(
                optimizers,
                steps_in_float32=rounds,
                keeps_previous=options.update == "async",
                masters=sizes.narrow,
                mapped=any(map(is_mapped, module.parameters())),
            )

        self._stored = stored
        upload_dtype = upload_dtype_of(options, precision) if moves else None
        self._sizes, self._storage = stored(upload_dtype)
        has_others = moves and precision.autocast_dtype is not None
        self._rounds_uploads = upload_dtype is not None if has_others else None
        self._trains = bool(optimizers)
        behind = options.update == "async"
        self._timing = UpdateTiming.BEHIND_NEXT_STEP if behind else UpdateTiming.AFTER_STEP
        self._first_chain = self.chain = first_chain(stacks, given_plan)
        self._work_of = parameter_work
        self._parameter_work = parameter_work(module, self.chain)
        self._planned: list[Planned] = []
        # A dry run would take batches.
        self._is_blind = not options.dry_run or takes_iterator(module, "training_step")
        if given_plan is not None:
            self._check_given(given_plan)
            self.num_microbatches = given_plan.num_microbatches
        elif options.num_microbatches == "auto":
            self.num_microbatches = 2 * len(devices)
        else:
            self.num_microbatches = options.num_microbatches
        # team and round size of the first plan, by its number of microbatches
        self._rounds: dict[int, tuple[int, int]] = {}
        self._restored: list[Mapping[str, Any]] = []
        self.first_job: TrainingJob = self._first_job()
        self.profile: ModelProfile = self.first_job.profile

    def first_plan(self) -> Plan:
        """Plan with what is known without a batch: parameters, not activations."""
        what = "parameters, gradients and optimizer state" if self._trains else "model"
        step, count = self._first_step(), self.num_microbatches
        return self._plan_job(step, count, what=what, effort=QUICK).plan

    def _first_job(self) -> TrainingJob:
        return self.job(self._first_step(), self.num_microbatches, effort=QUICK)

    def _first_step(self) -> StepWork:
        step = self._from_parameters()
        if self._trains:
            return step
        frozen = step.work.each(lambda part: replace(part, num_trainable=0, trainable_bytes=0))
        return replace(step, work=frozen)

    def _check_given(self, plan: Plan) -> None:
        if plan.num_workers != self._num_workers:
            raise PlanError(
                f"The plan is for {plan.num_workers} workers, but the Trainer's devices and "
                f"workers_per_device give {self._num_workers}. Change one of them, or set "
                "plan='auto'."
            )
        work = self._parameter_work
        plan.check_model(work.fingerprint, block_names=work.block_names, cuts=work.cuts)

    def take_chain(self, chain: Chain) -> bool:
        """Plan for what a step has called, from the next batch on; return whether it is new."""
        if not chain.links or chain.same_calls(self.chain):
            return False
        if self._given_plan is not None:
            if (chain.names, chain.cuts) == (self.chain.names, self.chain.cuts):
                self.chain = chain  # it knows, too, which of the calls are without gradients
            return False
        self.chain = chain
        self._parameter_work = self._work_of(self._module, chain)
        self.first_job = self._first_job()
        self.profile = self.first_job.profile
        self._planned.clear()
        return True

    def planned(
        self, given: Any, arguments: Sequence[Any], *, count: int, joined: bool = False
    ) -> Planned:
        """Return the plan for a batch, made once for batches of about its shape; FitError: no plan.

        Args:
            given: What `training_step` is called with: its largest microbatch or, if `joined`, all.
            count: Microbatches of the batch.
            joined: Whether the microbatches are pieces, inside the calls of blocks.
        """
        size = num_values(given)
        near = [  # shapes that are no smaller, and not much larger
            planned
            for planned in self._planned
            if planned.plan.num_microbatches == count
            and planned.job.joined == (joined and count > 1 and not self._plain)
            and _SMALLEST_SHARE * planned.size <= size <= planned.size
        ]
        if near:
            return min(near, key=lambda planned: planned.size)
        began = perf_counter()
        found = self._plan_job(
            self._step_work(given, arguments, count=count, joined=joined),
            count,
            what="training step",
            alternatives=lambda: self._alternatives(given, arguments, count, joined=joined),
            longest=lambda shortage: self._longest(
                given, arguments, shortage, count=count, joined=joined
            ),
        )
        found.size = size
        found.planning_seconds = perf_counter() - began
        key = found.plan.num_microbatches, found.size
        for state in self._restored:
            is_this = (state["num_microbatches"], state["size"]) == key
            if is_this and found.measured.load_state_dict(state):
                found.next_look = found.measured.num_steps + 1
        self._planned.append(found)
        if not joined:
            sizes = (found.plan.team_size, found.plan.round_size)
            self._rounds.setdefault(found.plan.num_microbatches, sizes)
        if len(self._planned) == 1 or count == self.num_microbatches:
            self.profile = found.job.profile
        rank_zero_info(
            f"roundpipe: planned {count_text(count, 'microbatch')} on {self.machine.name} in "
            f"{found.planning_seconds:.2f} s: {found.plan.partition}, teams of "
            f"{found.plan.team_size}, rounds of {found.plan.round_size}."
        )
        return found

    def _step_work(
        self, given: Any, arguments: Sequence[Any], *, count: int, joined: bool
    ) -> StepWork:
        """Run the step without values; where that fails, once, use the parameters from then on.

        Only calls of one stack, once, are measured so.
        """
        plain = self.chain is self._first_chain and not self.chain.cuts
        if plain and not self._is_blind:
            try:
                step = self._dry_run(given, arguments)
                return step.pieces(count) if joined else step
            except DryRunError as error:
                self._is_blind = True
                rank_zero_info(
                    "roundpipe: plans follow from the parameters alone, because training_step "
                    f"cannot be run without values ({error})"
                )
        return replace(self._from_parameters(), is_joined=joined)

    def _dry_run(self, microbatch: Any, arguments: Sequence[Any]) -> StepWork:
        """Run the step without values; DryRunError: it cannot be run so."""
        work = dry_run(
            self._module,
            self._stack,
            microbatch=microbatch,
            arguments=arguments,
            compute_dtype=self._autocast_dtype,
            loss=self._options.loss,
        )
        return StepWork(work=work, knows_activations=True)

    def _from_parameters(self) -> StepWork:
        return StepWork(work=self._parameter_work, knows_activations=False)

    def event_of(self, planned: Planned, *, assumed_rates: bool) -> PlanEvent | None:
        """Return the listeners' event for a plan about to be run; None if they have it."""
        replaced, planned.announced = planned.announced, planned.plan
        if replaced is planned.plan:
            return None
        return PlanEvent(planned=planned, replaced=replaced, assumed_rates=assumed_rates)

    def learn(self, planned: Planned, timeline: Timeline, *, remaining_steps: int | None) -> None:
        """Take in how long a step took; now and then look for a better plan than one of ours."""
        if planned.plan is self._given_plan or not self._options.replan:
            return
        plan = planned.plan
        planned.measured.observe(timeline, partition=plan.partition, speeds=plan.speeds)
        if not self._is_due(planned):
            return
        planned.next_look = 2 * planned.measured.num_steps
        began = perf_counter()
        better = improved_plan(
            planned.plan,
            profile=planned.measured.profile(),
            job=planned.job,
            planning_seconds=planned.planning_seconds,
            remaining_steps=remaining_steps,
        )
        if better is None:
            return
        before, after = better
        planned.plan = after.plan
        rank_zero_info(
            f"roundpipe: other stages after {planned.measured.num_steps} measured steps: "
            f"{after.plan.partition}. Predicted step {after.seconds:.3g} s instead of "
            f"{before.seconds:.3g} s ({1 - after.seconds / before.seconds:.0%} less); planned in "
            f"{perf_counter() - began:.2f} s."
        )

    def _is_due(self, planned: Planned) -> bool:
        return planned.measured.num_steps >= planned.next_look and planned.measured.is_ready

    def state_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine.name,
            "num_workers": self._num_workers,
            "rounds": [[count, *sizes] for count, sizes in self._rounds.items()],
            "averages": [
                {
                    "num_microbatches": planned.plan.num_microbatches,
                    "size": planned.size,
                    **planned.measured.state_dict(),
                }
                for planned in self._planned
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state_dict` returned, if it was on a machine like this one."""
        if (state["machine"], state["num_workers"]) == (self.machine.name, self._num_workers):
            self._rounds = {count: (team, size) for count, team, size in state["rounds"]}
            self._restored = list(state["averages"])

    def job(
        self,
        step: StepWork,
        count: int,
        *,
        effort: Effort = _EFFORT,
        shape: MicrobatchShape = _SHAPE,
        num_batches: int = 1,
        batch_sequences: int | None = None,
        is_full: bool = False,
    ) -> TrainingJob:
        """Return what is to be planned; all but the work follows from the settings.

        Args:
            shape: A microbatch, where the work is not that of one alone.
            is_full: Whether the batch is none of those that are smaller than others.
        """
        hints = self._options.partition_hints
        if count < self.num_microbatches and not is_full:  # as far as they can be kept
            team = hints.team_size if hints.team_size and hints.team_size <= count else None
            size = None if hints.round_size is None else min(hints.round_size, count)
            hints = replace(hints, team_size=team, round_size=size)
        return TrainingJob(
            work=self._sizes.resized(step.work, self.chain),
            hardware=self.machine,
            dtype=rate_name(self.machine, self._autocast_dtype or widest_dtype(self._module)),
            storage=self._storage,
            shape=shape,
            num_microbatches=count,
            num_batches=num_batches,
            batch_sequences=batch_sequences,
            timing=self._timing,
            hints=self._completed(hints, step, count, shape),
            effort=effort,
            joined=step.is_joined and count > 1 and not self._plain,
            plain=self._plain,
            accumulates=self._accumulates,
            clips=self._clips,
        )

    def _completed(
        self, hints: PartitionHints, step: StepWork, count: int, shape: MicrobatchShape
    ) -> PartitionHints:
        """Return hints with what else has to be kept; PlanError: a hint contradicts that.

        Accelerators sum gradients up per round and team: those stay as they are, so that
        results do not depend on which shapes came first. A stage has no more than a part of the
        blocks on CPU workers, unless one runs one microbatch whose activations are smaller than
        the weights, and wherever nothing is known about activations; no block stays there,
        because what room they leave is not known.
        """
        shares_memory = self.machine.shares_host_memory
        if self._plain:
            hints = replace(hints, round_size=count)
        elif step.is_joined and count > 1:  # all pieces go forward before the loss is computed
            wanted = hints.recompute or RecomputePolicy
            policies = tuple(p for p in wanted if p is not RecomputePolicy.NONE)
            hints = replace(hints, recompute=policies, most_fused=0, round_size=count)
        elif count in self._rounds and not shares_memory:
            team_size, round_size = self._rounds[count]
            hints = replace(hints, team_size=team_size, round_size=round_size)
        if self._options.compile and hints.recompute is None:  # it has no operations to keep
            hints = replace(hints, recompute=(RecomputePolicy.FULL, RecomputePolicy.NONE))
        if hints.resident is None and not step.knows_activations:
            hints = replace(hints, resident=0)
        blocks = step.work.blocks
        needs_no_stages = count == self.machine.num_devices == 1 and (
            sum(one.kept_bytes.of(shape) - one.parameter_bytes for one in blocks) < 0
        )
        if step.knows_activations and (needs_no_stages or not shares_memory):
            return hints
        if hints.recompute == (RecomputePolicy.NONE,) or hints.backward is not None:
            return hints
        most = max(1, -(-len(blocks) // max(self.machine.num_devices, 4)))
        return replace(
            hints,
            most_backward=hints.most_backward or most,
            most_fused=most if hints.most_fused is None else hints.most_fused,
        )

    def _plan_job(
        self,
        step: StepWork,
        count: int,
        *,
        what: str,
        effort: Effort = _EFFORT,
        alternatives: Callable[[], Alternatives] = Alternatives,
        longest: Callable[[Shortage], str] = lambda _: "",
    ) -> Planned:
        """Take the user's plan if it is for so many microbatches, else find the best one."""
        job = self.job(step, count, effort=effort)
        given = self._given_plan
        if given is not None and given.num_microbatches == count:
            layout = given.layout
            memory = job.report(layout)
            if not memory.fits:
                shorter = longest(lambda job: job.report(layout).missing_share)
                raise FitError(
                    f"The given plan does not fit {self.machine.name}: {memory.reason} {shorter}"
                    "Set plan='auto', or see with roundpipe-plan what would fit."
                )
            return Planned(plan=given, job=job, knows_activations=step.knows_activations)
        answer = fit_training(job)
        if answer.planned is None or not answer.fits:
            free = self._completed(PartitionHints(), step, count, _SHAPE)
            others = replace(alternatives(), other_uploads=self._other_uploads(job, step))
            found = remedies(job, others, free_hints=free)
            shorter = longest(memory_shortage) if step.knows_activations else ""
            raise self._fit_error(answer, found, what=what, shorter=shorter)
        plan = answer.planned.plan
        return Planned(plan=plan, job=job, knows_activations=step.knows_activations)

    def _other_uploads(self, job: TrainingJob, step: StepWork) -> tuple[str, TrainingJob] | None:
        """The setting `upload_dtype` that is not the user's, and the job with it, if it can be."""
        if self._rounds_uploads is None:
            return None
        sizes, storage = self._stored(None if self._rounds_uploads else self._autocast_dtype)
        work = sizes.resized(step.work, self.chain)
        text = f"upload_dtype={None if self._rounds_uploads else 'auto'!r}"
        cost = upload_cost(rounded=not self._rounds_uploads)
        return f"set {text} ({cost})", replace(job, work=work, storage=storage)

    def _fit_error(
        self, answer: FitAnswer, remedies: Sequence[str], *, what: str, shorter: str
    ) -> FitError:
        """Return the error for what does not fit; `shorter` says how long sequences may be."""
        job, alone = answer.job, ""
        if answer.planned is None:
            stage = answer.memory.device.stage
            names = job.work.block_names[stage.blocks.start : stage.blocks.stop] if stage else ()
            smallest = f"a stage of {', '.join(names)}" if names else "the tail segment"
            alone = f"Not even {smallest} alone fits. "
        listed = "; ".join(f"({number}) {text}" for number, text in enumerate(remedies, start=1))
        none = "Nothing else" if shorter else "No single change"
        remedy = f"What makes it fit: {listed}." if remedies else f"{none} makes it fit."
        so_far = "The step has not begun" if self._planned else "No training step has run"
        return FitError(
            f"The {what} does not fit {job.hardware.name}: {answer.memory.reason} {alone}"
            f"{shorter}{remedy} {so_far}; roundpipe-plan tries more changes."
        )

    def _longest(
        self, given: Any, arguments: Sequence[Any], shortage: Shortage, *, count: int, joined: bool
    ) -> str:
        """Return the longest sequences of such a batch as text; empty where they are not known."""
        length = length_of(given)
        if length is None:
            return ""

        def lacks(seq_len: int) -> float:
            step = self._dry_run(shortened(given, seq_len), arguments)
            return shortage(self.job(step.pieces(count) if joined else step, count))

        try:
            most = longest_that_fits(lacks, too_long=length)
        except DryRunError:  # it is no length, or the step needs this one
            return ""
        if most < 1:
            return ""
        return f"Sequences of {length:,} are too long: those of up to {most:,} fit. "

    def _alternatives(
        self, given: Any, arguments: Sequence[Any], count: int, *, joined: bool
    ) -> Alternatives:
        def smaller(num_microbatches: int) -> TrainingJob | None:
            try:
                part = given if joined else split_batch(given, -(-num_microbatches // count))[0]
            except BatchError:
                return None
            step = self._step_work(part, arguments, count=num_microbatches, joined=joined)
            return self.job(step, num_microbatches)

        try:
            most = batch_size_of(given) * (1 if joined else count)
        except BatchError:
            most = 1
        wide = widest_dtype(self._module) is torch.float32 and self._precision == "32-true"
        return Alternatives(
            most_microbatches=most,
            with_microbatches=smaller,
            narrower_precision="bf16-true" if wide else None,
        )
