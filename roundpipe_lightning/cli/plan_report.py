"""The answer of `roundpipe-plan`: one object for programs, a page for people."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from roundpipe_lightning.cli.plan_changes import VerifiedChange
from roundpipe_lightning.cli.plan_settings import PlanSettings
from roundpipe_lightning.planning.fit import FitAnswer
from roundpipe_lightning.planning.memory import MemoryNeed
from roundpipe_lightning.planning.moves import stage_bytes
from roundpipe_lightning.planning.recompute import RecomputePolicy
from roundpipe_lightning.planning.stages import StageKind

_GIB = 2**30
_MOVED = ("weights", "gradients", "boundaries_up", "boundaries_down")


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """Everything that `roundpipe-plan` says.

    Attributes:
        settings: What was asked.
        answer: The plan, or what is missing.
        gains: By what share twice as much of a resource shortens the step; the bottleneck first.
        changes: What makes it fit, where it does not.
        longest_seq_len: The longest sequence that fits, where it was asked for.
        files: What was written, by name.
    """

    settings: PlanSettings
    answer: FitAnswer
    gains: dict[str, float] = field(default_factory=dict)
    changes: list[VerifiedChange] = field(default_factory=list)
    longest_seq_len: int | None = None
    files: dict[str, str] = field(default_factory=dict)

    # --- for programs -----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values; bytes, seconds and shares from 0 to 1."""
        answer, settings = self.answer, self.settings
        work, job = answer.job.work, answer.job
        memory = answer.memory
        return {
            "fits": answer.fits,
            "model": {
                "num_blocks": len(work.blocks),
                "num_parameters": work.num_parameters,
                "num_trainable": work.num_trainable,
                "fingerprint": work.fingerprint,
            },
            "machine": {
                "name": settings.hardware.name,
                "num_devices": settings.hardware.num_devices,
                "device_bytes": settings.hardware.device_bytes,
                "host_bytes": settings.hardware.host_bytes,
            },
            "job": {
                "seq_len": job.shape.seq_len,
                "batch_size": settings.batch_size,
                "num_batches": settings.num_batches,
                "num_microbatches": job.num_microbatches,
                "sequences_per_microbatch": job.shape.sequences,
                "precision": settings.precision.name,
            },
            "plan": self._plan(),
            "memory": {"device": _need(memory.device), "host": _need(memory.host)},
            "moved": self._moved(),
            "predicted": self._predicted(),
            "bottleneck": {"resource": next(iter(self.gains), None), "gains": self.gains},
            "missing": self.missing or None,
            "changes": [_change(change) for change in self.changes],
            "longest_seq_len": self.longest_seq_len,
            "files": self.files,
        }

    def _plan(self) -> dict[str, Any] | None:
        layout = self.answer.layout
        if self.answer.planned is None:
            return None
        return {
            "forward_partition": list(layout.partition.forward),
            "backward_partition": list(layout.partition.backward),
            "num_stages": layout.partition.num_stages,
            "team_size": layout.team_size,
            "round_size": layout.round_size,
            "num_rounds": layout.num_rounds,
            "num_batches": self.answer.job.num_batches,
            "weight_slots": layout.weight_slots,
            "recompute": self.answer.planned.plan.recompute.value,
            "resident": [list(blocks) for blocks in layout.resident],
            "resident_bytes": self._resident_bytes(),
        }

    def _resident_bytes(self) -> list[int]:
        """Bytes that stay on each device."""
        job = self.answer.job
        blocks = job.memory.footprint(job.shape).profile.blocks
        return [
            sum(blocks[index].parameter_bytes for index in resident)
            for resident in self.answer.layout.resident
        ]

    def _predicted(self) -> dict[str, float] | None:
        prediction, planned = self.answer.prediction, self.answer.planned
        if prediction is None or planned is None:
            return None
        return {
            "step_seconds": prediction.step_seconds,
            "one_by_one_seconds": self.answer.one_by_one_seconds,
            "pipeline_seconds": prediction.pipeline_seconds,
            "optimizer_seconds": prediction.optimizer_seconds,
            "tokens_per_second": self.answer.tokens_per_second,
            "idle_share": max(0.0, prediction.idle_share),
            "pipeline_idle_share": max(0.0, planned.timeline.idle_share),
        }

    def _moved(self) -> dict[str, float] | None:
        """Bytes of a step, all devices together."""
        answer, job = self.answer, self.answer.job
        prediction = answer.prediction
        if prediction is None:
            return None
        if job.hardware.shares_host_memory:
            return dict.fromkeys((*_MOVED, "weights_saved"), 0.0)
        layout = answer.layout
        profile = job.memory.footprint(job.shape).profile
        moved = [
            stage_bytes(
                profile, stage=stage, partition=layout.partition, recompute=layout.recompute
            )
            for stage in layout.partition.stages()
        ]
        count = job.step_microbatches
        sizes = (
            prediction.uploaded_bytes,
            prediction.downloaded_bytes,
            float(count * sum(each.input_bytes for each in moved)),
            float(count * sum(each.output_bytes for each in moved)),
        )
        without = job.predict(replace(layout, resident=())) if layout.resident else prediction
        saved = without.uploaded_bytes - prediction.uploaded_bytes
        return {**dict(zip(_MOVED, sizes, strict=True)), "weights_saved": saved}

    @property
    def missing(self) -> str:
        """What is missing; empty where it fits."""
        memory = self.answer.memory
        lacks = " ".join(
            f"{_size(need.missing_bytes)} of {need.place} memory are missing."
            for need in (memory.device, memory.host)
            if need.missing_bytes
        )
        return lacks if self.answer.planned is not None else f"{self._too_large()} {lacks}".strip()

    def _too_large(self) -> str:
        """Name what no device can hold."""
        need, work = self.answer.memory.device, self.answer.job.work
        machine = self.settings.hardware.name
        hints = self.answer.job.hints
        if hints.recompute is not None or hints.resident is not None:
            return self.answer.refusal
        if self.answer.job.hints.cuts:
            return (
                f"{machine} cannot hold the stages that are asked for, {need.stage} least of all."
            )
        if need.stage.startswith(StageKind.FUSED.value):
            part, what = work.tail, "the tail segment,"
        else:
            part = max(work.blocks, key=lambda b: b.parameter_bytes, default=work.tail)
            what = f"even one block: the largest, {part.name},"
        return (
            f"{machine} cannot hold {what}{' which' * (part is work.tail)} has "
            f"{_size(part.parameter_bytes)} of weights and needs {_size(need.total_bytes)} of a "
            f"device, of {_size(need.available_bytes)}."
        )

    # --- for people -------------------------------------------------------------------------------

    def to_text(self) -> str:
        """One page."""
        lines = [*self._job_lines(), *self._plan_lines()]
        memory = self.answer.memory
        lines += ["", "Memory", *_need_lines("device", memory.device)]
        lines += _need_lines("host", memory.host)
        lines += self._step_lines()
        if self.longest_seq_len is not None:
            lines += ["", *self._longest_lines()]
        if self.answer.fits:
            lines += ["", "It fits."]
        else:
            lines += ["", f"It does not fit. {self.missing}", *self._change_lines()]
        if self.files:
            lines += ["", *(f"{name}: {path}" for name, path in self.files.items())]
        return "\n".join(lines) + "\n"

    def _job_lines(self) -> list[str]:
        settings, job = self.settings, self.answer.job
        hardware, work = settings.hardware, job.work
        trained = work.num_trainable / max(work.num_parameters, 1)
        batches = f" x {job.num_batches} batches" if job.num_batches > 1 else ""
        return [
            (
                f"{hardware.name}: {hardware.num_devices} x {hardware.device_name}, "
                f"{_size(hardware.device_bytes)} each, {_size(hardware.host_bytes)} of host memory"
            ),
            (
                f"Model: {work.num_parameters:,} parameters in {len(work.blocks)} blocks, "
                f"{trained:.3%} of them trained, {settings.precision.name}"
            ),
            (
                f"Step: {settings.batch_size} sequences of {job.shape.seq_len:,} tokens{batches}, "
                f"in {job.num_microbatches} microbatches of {job.shape.sequences}"
            ),
        ]

    def _plan_lines(self) -> list[str]:
        layout = self.answer.layout
        if self.answer.planned is None:
            return []
        partition = layout.partition
        kinds = ", ".join(
            f"{count} {kind.name.lower()}"
            for kind in StageKind
            if (count := sum(stage.kind is kind for stage in partition.stages()))
        )
        rounds = layout.num_rounds
        return [
            "",
            f"Stages: {kinds}",
            f"  forward  {_runs(partition.forward)}",
            f"  backward {_runs(partition.backward)} (the fused stage first)",
            (
                f"Teams of {layout.team_size}, {rounds} round{'s' * (rounds > 1)} of "
                f"{layout.round_size} microbatches"
            ),
            *self._memory_choice_lines(),
        ]

    def _memory_choice_lines(self) -> list[str]:
        """What is held on the devices, and what is computed twice instead."""
        layout, planned, moved = self.answer.layout, self.answer.planned, self._moved()
        assert planned is not None
        policy = planned.plan.recompute
        lines = [f"Recompute: {policy.value} ({_POLICIES[policy]})"]
        if self.answer.job.hardware.shares_host_memory:
            return lines
        ahead = "the next stage's weights come while one computes"
        alone = "the next stage's weights come when one has ended: two do not fit"
        slots = ("2", ahead) if layout.weight_slots == 2 else ("1", alone)
        lines.append(f"Slots for weights: {slots[0]} ({slots[1]})")
        if layout.resident and moved is not None:
            counts = sorted({len(blocks) for blocks in layout.resident})
            number = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
            most = max(self._resident_bytes())
            lines.append(
                f"Resident: {number} blocks on each device, up to {_size(most)}; "
                f"{_size(moved['weights_saved'])} less to upload in a step"
            )
        return lines

    def _step_lines(self) -> list[str]:
        prediction, moved, predicted = self.answer.prediction, self._moved(), self._predicted()
        if prediction is None or moved is None or predicted is None:
            return []
        names = ("weights up", "gradients down", "boundaries up", "boundaries down")
        sizes = ", ".join(
            f"{_size(moved[key])} of {name}" for key, name in zip(_MOVED, names, strict=True)
        )
        lines = [
            "",
            f"Moved per step: {sizes}",
            (
                f"Predicted step: {prediction.step_seconds:.4g} s, of which the optimizer "
                f"{prediction.optimizer_seconds:.3g} s; "
                f"{self.answer.tokens_per_second:,.0f} tokens/s"
            ),
            (
                f"Devices wait {predicted['idle_share']:.1%} of the step, "
                f"{predicted['pipeline_idle_share']:.1%} of the pipeline's part"
            ),
        ]
        if self.answer.job.num_batches > 1:
            lines.append(
                f"  with {self.answer.job.num_batches} batches in one stream; one after the other, "
                f"each as plan.json has it, {self.answer.one_by_one_seconds:.4g} s"
            )
        if self.gains:
            shares = ", ".join(f"{name} {gain:.0%}" for name, gain in self.gains.items())
            lines.append(f"Bottleneck: {next(iter(self.gains))}")
            lines.append(f"  shorter steps if twice as fast: {shares}")
        return lines

    def _longest_lines(self) -> list[str]:
        longest = self.longest_seq_len
        if not longest:
            return ["No sequence fits, however short."]
        lines = [f"Longest sequence that fits: {longest:,} tokens"]
        limit = self.settings.longest_position
        if limit is not None and longest > limit:
            lines.append(f"  but the model knows {limit:,} positions")
        return lines

    def _change_lines(self) -> list[str]:
        if not self.changes:
            return ["No change that was tried makes it fit."]
        lines = ["What makes it fit, the cheapest first:"]
        for change in self.changes:
            speed = f"{change.answer.tokens_per_second:,.0f} tokens/s"
            lines.append(f"  {' '.join(change.change.overrides)}  ({speed})")
        return lines


_POLICIES = {
    RecomputePolicy.FULL: "backward stages run their blocks again",
    RecomputePolicy.SELECTIVE: "backward stages run their blocks again, but for attention",
    RecomputePolicy.NONE: "every block runs forward once",
}


def _need(need: MemoryNeed) -> dict[str, Any]:
    return {
        "stage": need.stage or None,
        "by_kind": {kind.value: size for kind, size in need.num_bytes},
        "total_bytes": need.total_bytes,
        "available_bytes": need.available_bytes,
        "missing_bytes": need.missing_bytes,
    }


def _need_lines(name: str, need: MemoryNeed) -> list[str]:
    at = f" at stage {need.stage}" if need.stage else ""
    lines = [f"  {name}{at}: {_size(need.total_bytes)} of {_size(need.available_bytes)}"]
    lines += [f"    {kind.value:16} {_size(size):>12}" for kind, size in need.num_bytes]
    return lines


def _change(change: VerifiedChange) -> dict[str, Any]:
    answer = change.answer
    assert answer.prediction is not None
    return {
        "overrides": list(change.change.overrides),
        "price": change.change.price.name.lower(),
        "step_seconds": answer.prediction.step_seconds,
        "tokens_per_second": answer.tokens_per_second,
        "device_bytes": answer.memory.device.total_bytes,
        "host_bytes": answer.memory.host.total_bytes,
    }


def _runs(counts: tuple[int, ...]) -> str:
    """Stage sizes, equal neighbours together: `3 x 2, 1`."""
    if not counts:
        return "none"
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][1] == count:
            runs[-1][0] += 1
        else:
            runs.append([1, count])
    return ", ".join(f"{times} x {count}" if times > 1 else str(count) for times, count in runs)


def _size(num_bytes: float) -> str:
    if num_bytes >= _GIB / 10 or not num_bytes:
        return f"{num_bytes / _GIB:,.2f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"
