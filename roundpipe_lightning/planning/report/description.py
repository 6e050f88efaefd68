"""A plan in words and figures: what it does, what memory it needs, how long a step should take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from roundpipe_lightning.planning.cost.device_memory import size_text
from roundpipe_lightning.planning.cost.memory import MemoryReport
from roundpipe_lightning.planning.cost.predict import StepPrediction
from roundpipe_lightning.planning.model.hardware import HardwareSpec
from roundpipe_lightning.planning.model.work import WorkProfile
from roundpipe_lightning.planning.schedule.plan import PipelineLayout, Plan
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy, StageKind
from roundpipe_lightning.planning.search.fit import TrainingJob

MOVED = ("weights", "gradients", "boundaries_up", "boundaries_down", "boundaries_direct")
"""Keys of `PlanDescription.moved`, in the order of the text."""

_MOVED_NAMES = (
    "weights up",
    "gradients down",
    "boundaries up",
    "boundaries down",
    "boundaries from device to device",
)
_POLICIES = {
    RecomputePolicy.FULL: "backward stages run their blocks again",
    RecomputePolicy.SELECTIVE: "backward stages run their blocks again, but for attention",
    RecomputePolicy.NONE: "every block runs forward once",
}
_TIGHT_SHARE = 0.95
_MUCH_IDLE_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class PlanDescription:
    """A plan, what it is for, and what it needs."""

    job: TrainingJob
    plan: Plan
    prediction: StepPrediction

    @property
    def layout(self) -> PipelineLayout:
        return self.plan.layout

    @cached_property
    def memory(self) -> MemoryReport:
        return self.job.report(self.layout)

    @property
    def resident_bytes(self) -> list[int]:
        """Bytes of weights that stay on each device."""
        blocks = self.job.footprint.profile.blocks
        return [
            sum(blocks[index].parameter_bytes for index in resident)
            for resident in self.plan.resident
        ]

    @property
    def moved(self) -> dict[str, float]:
        """Bytes that a step moves, all devices together, and what residents save of them."""
        job, layout = self.job, self.layout
        if job.hardware.shares_host_memory:
            return dict.fromkeys((*MOVED, "weights_saved"), 0.0)
        count = job.num_microbatches * job.num_batches / layout.num_microbatches
        sizes = (
            self.prediction.uploaded_bytes,
            self.prediction.downloaded_bytes,
            *(count * size for size in self.prediction.boundary_bytes),
        )
        without = job.predict(replace(layout, resident=())) if layout.resident else self.prediction
        saved = without.uploaded_bytes - self.prediction.uploaded_bytes
        return {**dict(zip(MOVED, sizes, strict=True)), "weights_saved": saved}

    def plan_lines(self) -> list[str]:
        """Stages, teams, rounds, and what is kept or computed twice."""
        partition, layout = self.plan.partition, self.layout
        kinds = ", ".join(
            f"{count} {kind.name.lower()}"
            for kind in StageKind
            if (count := sum(stage.kind is kind for stage in partition.stages()))
        )
        rounds = layout.num_rounds
        policy = self.plan.recompute
        first = "the fused stage first"
        if partition.plain:
            first = "on kept graphs first" if partition.keeps_graphs else "the last blocks first"
        shared = " forward, all workers backward" if layout.shares_backward else ""
        return [
            f"Stages: {kinds}",
            f"  forward  {_runs(partition.forward)}",
            f"  backward {_runs(partition.backward)} ({first})",
            (
                f"Teams of {layout.team_size}{shared}, {count_text(rounds, 'round')} of "
                f"{count_text(layout.round_size, 'microbatch')}"
            ),
            f"Recompute: {policy.value} ({_POLICIES[policy]})",
            *self._slot_lines(),
        ]

    def _slot_lines(self) -> Iterator[str]:
        if self.job.hardware.shares_host_memory:
            return
        slots = self.plan.weight_slots
        when = "while one computes" if slots == 2 else "when one has ended"
        yield f"Slots for weights: {slots} (the next stage's weights come {when})"
        if self.plan.resident:
            counts = sorted({len(blocks) for blocks in self.plan.resident})
            number = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
            yield (
                f"Resident: {number} blocks on each device, up to "
                f"{size_text(max(self.resident_bytes))}; "
                f"{size_text(self.moved['weights_saved'])} less to upload in a step"
            )

    def moved_line(self) -> str:
        moved = self.moved
        sizes = ", ".join(
            f"{size_text(moved[key])} of {name}"
            for key, name in zip(MOVED, _MOVED_NAMES, strict=True)
            if moved[key] or key != "boundaries_direct"
        )
        return f"Moved per step: {sizes}"

    def warnings(self) -> list[str]:
        """Sentences on what may need attention although the plan can run."""
        found = [
            (
                f"{need.place.capitalize()} memory is tight: the plan needs "
                f"{need.total_bytes / need.available_bytes:.0%} of what there is."
            )
            for need in (self.memory.device, self.memory.host)
            if need.total_bytes > _TIGHT_SHARE * need.available_bytes
        ]
        idle = self.prediction.bubble_fraction
        if idle > _MUCH_IDLE_SHARE:
            found.append(
                f"Workers wait {idle:.0%} of the step. More microbatches, larger batches or fewer "
                "devices shorten that; roundpipe-plan names the bottleneck."
            )
        return found


def machine_line(hardware: HardwareSpec) -> str:
    kinds = Counter((one.device_name, size_text(one.device_bytes)) for one in hardware.workers)
    devices = (f"{number} x {name}, {size} each" for (name, size), number in kinds.items())
    host = size_text(hardware.host_bytes)
    return f"{hardware.name}: {', '.join(devices)}, {host} of host memory"


def model_line(work: WorkProfile, *, precision: str) -> str:
    """A model, and how much of it is trained."""
    trained = work.num_trainable / max(work.num_parameters, 1)
    return (
        f"Model: {work.num_parameters:,} parameters in {len(work.blocks)} blocks, "
        f"{trained:.3%} of them trained, {precision}"
    )


def memory_lines(memory: MemoryReport) -> list[str]:
    lines = []
    for need in (memory.device, memory.host):
        at = f" at stage {need.stage}" if need.stage else ""
        sizes = f"{size_text(need.total_bytes)} of {size_text(need.available_bytes)}"
        lines.append(f"  {need.place}{at}: {sizes}")
        lines += [f"    {kind.value:16} {size_text(size):>12}" for kind, size in need.num_bytes]
    return lines


def count_text(number: int, noun: str) -> str:
    """A number of things for messages, e.g. `2 batches`."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def _runs(counts: tuple[int, ...]) -> str:
    """Stage sizes, equal neighbours together: `3 x 2, 1`."""
    runs = ((len(list(same)), count) for count, same in groupby(counts))
    texts = (f"{times} x {count}" if times > 1 else str(count) for times, count in runs)
    return ", ".join(texts) or "none"
