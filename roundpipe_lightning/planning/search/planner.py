"""From a model and a machine to the plan with the shortest step.

1. Every way for the microbatches to travel is a case, with the stages that fit the devices.
2. `Evaluator` estimates the even partitions of every case. In the most promising ones
   `PartitionSearch` looks for better ones, and the best of these are simulated.
3. Every even partition of every case that might still be better, by a bound on its step, is
   simulated too. So the plan is no worse than any of them.
4. Partitions near the best one are simulated as long as they are better.
5. Where attention takes enough of a step, all of this is done once more with its outputs kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from roundpipe_lightning.errors import FitError, PlanError
from roundpipe_lightning.planning.cost.costs import UpdateTiming
from roundpipe_lightning.planning.cost.predict import StepModel, StepPrediction
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.profile import ModelProfile
from roundpipe_lightning.planning.model.work import ParameterStorage
from roundpipe_lightning.planning.schedule.plan import PipelineLayout, Plan
from roundpipe_lightning.planning.schedule.schedule import Schedule, Timeline
from roundpipe_lightning.planning.schedule.stages import Partition, RecomputePolicy
from roundpipe_lightning.planning.search.cases import Admits, Case, Steps, find_cases
from roundpipe_lightning.planning.search.request import PlanningRequest

_CONFIRMED = 3  # partitions per case that are simulated with their transfers
_RESULTS = 12  # partitions that a search returns, of which some may not fit
_CONFIRMED_ACTIONS = 40_000  # actions of these simulations together; one is simulated in any case
_HOPELESS = 1.01  # factor on the best step: no more of a kind is confirmed after a step beyond it
_PROMISING = 1.04  # factor on the best estimate with even stages: a case beyond it is not searched
_CASES_SEARCHED = 3  # cases that are searched, at most
_REFINED = 8  # neighbours of the best partition that are simulated at a time
_REFINED_IN_VAIN = 3  # times that none of them is better, after which the search ends

_LEAST_SAVED = 0.02
"""Share of a step that has to be saved for attention's outputs to be kept: that every operation of
a block is looked at for it is not in the costs."""

_BATCHES_SEARCHED = 3
"""Accumulated batches that the search looks at, so that those between fill and drain count most."""


@dataclass(frozen=True, kw_only=True)
class PlannedTraining:
    """A plan, whose microbatches are those of all accumulated batches, and its prediction."""

    plan: Plan
    prediction: StepPrediction

    @property
    def timeline(self) -> Timeline:
        return self.prediction.timeline

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds


def plan_training(
    profile: ModelProfile | Callable[[int], ModelProfile],
    *,
    hardware: HardwareSpec,
    request: PlanningRequest,
    admits: Admits | None = None,
    storage: ParameterStorage | None = None,
    num_trainable: int = 0,
    timing: UpdateTiming = UpdateTiming.AFTER_STEP,
) -> PlannedTraining:
    """Choose the plan with the shortest predicted step.

    Args:
        profile: The model for one microbatch; where there are several numbers of microbatches to
            choose from, a function that returns it for each. Sizes that are 0 cost no time and no
            memory.
        admits: Whether a layout keeps what the planner does not know, such as the host's memory;
            where none does, it is not asked.
        storage: What is kept for each parameter, parameters of the profile having 16 bits; None:
            the host takes no time.

    Raises:
        FitError: If a device cannot hold a block, or what is asked for.
        PlanError: If the request contradicts the model or the machine.
    """
    counts = request.microbatch_choices
    if isinstance(profile, ModelProfile) and len(counts) > 1:
        raise PlanError(
            f"num_microbatches={request.num_microbatches} leaves a choice, but a microbatch of "
            "each number has sizes of its own: give a function from the number to the profile."
        )
    models = {
        count: StepModel(
            profile=profile if isinstance(profile, ModelProfile) else profile(count),
            hardware=hardware,
            num_trainable=num_trainable,
            storage=storage,
            timing=timing,
            recompute_start=request.recompute_start,
            hop=request.hop_seconds,
        )
        for count in counts
    }
    steps = models.__getitem__
    simpler = request.without_selective()
    best = _planned(steps, request=simpler, admits=admits)
    if simpler == request or not any(_may_save(model.profile) for model in models.values()):
        return best
    selective = request.with_recompute(RecomputePolicy.SELECTIVE)
    try:
        kept = _planned(steps, request=selective, admits=admits)
    except FitError:
        return best
    is_held = admits is None or admits(kept.plan)
    return kept if kept.seconds <= (1 - _LEAST_SAVED) * best.seconds and is_held else best


def _may_save(profile: ModelProfile) -> bool:
    """Return whether attention takes a share of a step that is worth keeping its outputs."""
    full = profile.seconds_to_recompute()
    saved = full - profile.seconds_to_recompute(RecomputePolicy.SELECTIVE)
    return saved > 0 and saved >= _LEAST_SAVED * (profile.busy_seconds + full)


def _planned(steps: Steps, *, request: PlanningRequest, admits: Admits | None) -> PlannedTraining:
    looked_at = min(request.num_batches, _BATCHES_SEARCHED)
    hardware = steps(request.microbatch_choices[0]).hardware
    cases = find_cases(steps, hardware=hardware, request=request, num_batches=looked_at)
    case, found = _Choice(cases, request=request, admits=admits).best()
    if request.num_batches != looked_at:
        count, num_batches = case.config.batch_microbatches, request.num_batches
        layout = replace(
            found.layout, num_microbatches=count * num_batches, num_batches=num_batches
        )
        found = case.step.predict(layout)
    return PlannedTraining(plan=_plan(case, found.layout), prediction=found)


def _plan(case: Case, layout: PipelineLayout) -> Plan:
    if not layout.partition.recomputes and layout.partition.num_blocks:
        layout = replace(layout, recompute=RecomputePolicy.NONE)
    return Plan(
        model=case.profile.fingerprint,
        num_workers=case.hardware.num_devices,
        block_names=case.profile.block_names,
        **vars(layout),
    )


def plan_of_one_batch(plan: Plan) -> Plan:
    """Return the plan of one of the accumulated batches that a plan was made for.

    It has the same stages, teams and rounds, and says how many batches they were chosen for.
    """
    return replace(plan, num_microbatches=plan.batch_microbatches, schedule=Schedule(workers=()))


class _Choice:
    """Looks for the best partition over all cases."""

    def __init__(
        self, cases: Sequence[Case], *, request: PlanningRequest, admits: Admits | None
    ) -> None:
        self._request = request
        self._admits = admits
        even = {case: case.beginnings(admits) for case in cases}
        if not any(even.values()):
            self._admits = None
            even = {case: case.beginnings(None) for case in cases}
        self._even = {case: partitions for case, partitions in even.items() if partitions}
        if not self._even:
            raise FitError(_describe_misfit(cases, request))
        self._best: tuple[Case, StepPrediction] | None = None
        self._lack: FitError | None = None

    def best(self) -> tuple[Case, StepPrediction]:
        estimates = {case: case.estimates(even).tolist() for case, even in self._even.items()}
        ranked = sorted(self._even, key=lambda case: min(estimates[case]))
        limit = _PROMISING * min(estimates[ranked[0]])
        chosen = [case for case in ranked if min(estimates[case]) <= limit][:_CASES_SEARCHED]
        # even stages say little of pipelines whose workers are not alike
        likely = {case.config.team_size: case for case in ranked[::-1] if case.config.like_teams}
        chosen += [case for case in likely.values() if case not in chosen]
        for case in chosen:
            self._search(case)
        self._verify(estimates)
        if self._best is None:
            assert self._lack is not None
            raise self._lack
        if self._best[0] not in chosen:
            self._search(self._best[0])
        self._refine(*self._best)
        return self._best

    def _consider(self, case: Case, partition: Partition) -> float:
        try:
            found = case.predict(partition)
        except FitError as error:  # no room for the blocks that must stay
            self._lack = error
            return math.inf
        if self._best is None or found.step_seconds < self._best[1].step_seconds:
            self._best = case, found
        return found.step_seconds

    def _search(self, case: Case) -> None:
        if case.asked:
            for partition in self._even[case]:
                self._consider(case, partition)
            return
        for partition in self._found(case):
            seconds = self._consider(case, partition)
            if self._best is not None and seconds > _HOPELESS * self._best[1].step_seconds:
                break

    def _found(self, case: Case) -> list[Partition]:
        """Return promising partitions, the best first."""
        effort = self._request.effort
        if case.config.team_size == case.hardware.num_devices:
            # One worker never waits for another: only the fused stage matters, and even stages do.
            effort = replace(effort, num_actions=0)
        found = case.search(effort).best(self._even[case], count=_RESULTS)
        admits = self._admits
        held = [each for each in found if admits is None or admits(case.config.with_stages(each))]
        if not held:
            return []
        return held[:_CONFIRMED][: max(1, _CONFIRMED_ACTIONS // case.num_actions(held[0]))]

    def _verify(self, estimates: Mapping[Case, Sequence[float]]) -> None:
        """Simulate even partitions that might be better than the best, the likeliest first."""
        likely = [
            (seconds, bound, case, partition)
            for case, even in self._even.items()
            for seconds, bound, partition in zip(
                estimates[case], case.bounds(even), even, strict=True
            )
        ]
        actions = 0
        for _, bound, case, partition in sorted(likely, key=itemgetter(0)):
            if self._best is not None:
                if bound >= self._best[1].step_seconds:
                    continue
                actions += case.num_actions(partition)
                if actions > self._request.effort.num_verified_actions:
                    return
            self._consider(case, partition)

    def _refine(self, case: Case, best: StepPrediction) -> None:
        """Simulate partitions near the best one, as long as that helps: estimates err by percents.

        Nothing is looked for where the partitions were asked for, or one worker never waits.
        """
        effort = self._request.effort
        is_one = case.hardware.num_devices < 2 or not case.profile.num_blocks
        if case.asked or effort.num_generations == 0 or is_one:
            return
        seen, actions, idle = {best.layout.partition}, 0, 0
        search = case.search(effort)
        while True:
            assert self._best is not None
            partition, seconds = self._best[1].layout.partition, self._best[1].step_seconds
            near = search.near(partition)
            new = [each for each in near if each not in seen][:_REFINED]
            for each in new:
                if self._admits is None or self._admits(case.config.with_stages(each)):
                    actions += case.num_actions(each)
                    self._consider(case, each)
                if actions > effort.num_verified_actions:
                    return
            seen.update(new)
            idle = 0 if self._best[1].step_seconds < seconds else idle + 1
            if idle == _REFINED_IN_VAIN or not new:
                return


def _describe_misfit(cases: Sequence[Case], request: PlanningRequest) -> str:
    case = cases[0]
    device = f"a device of {case.hardware.name} has {case.hardware.device_bytes / 2**30:.2f} GiB"
    if case.asked:
        if not any(request.allows(partition) for partition in case.asked):
            policies = ", ".join(policy.value for policy in request.recompute)
            return f"None of the partitions goes with recompute={policies}: change either."
        need = min(
            each.footprint.most_bytes(each.config.with_stages(partition))
            for each in cases
            for partition in case.asked
            if request.allows(partition)
        )
        return (
            f"The stages that are asked for need at least {need / 2**30:.2f} GiB of a device, but "
            f"{device}. Ask for smaller stages, smaller microbatches or a smaller round."
        )
    if request.recompute == (RecomputePolicy.NONE,):
        num_blocks = case.profile.num_blocks
        whole = Partition.whole(num_blocks, plain=request.plain)
        need = min(each.footprint.most_bytes(each.config.with_stages(whole)) for each in cases)
        return (
            f"recompute=none needs all {num_blocks} blocks on one device at once, with their "
            f"activations {need / 2**30:.2f} GiB, but {device}: allow recompute=full, use smaller "
            "microbatches, or devices with more memory."
        )
    return (
        f"No stages within the limits go with recompute="
        f"{', '.join(policy.value for policy in request.recompute)}; {device}."
    )
