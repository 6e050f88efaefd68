"""A plan: the stages and the schedule of one step, as an immutable value that can be saved.

The schedule is round-robin (RoundPipe, arXiv 2604.27085).
The stages of a round run on worker 0, 1, 2, .., N-1, 0, 1, ..; each runs there for all the round's
microbatches in turn, so that its weights are uploaded once. The next round goes on where the last
one stopped, at the worker that is free first. A round of a plain step is a batch. Two workers, two
batches of two microbatches, three stages:

```
worker 0:  F0.0 F0.1           B1.0 B1.1       B0.2 B0.3
worker 1:            B0.0 B0.1 F0.2 F0.3                 B1.2 B1.3
```

Unequal workers: stages of one worker each are as large as its speed asks for; within a team each
member gets microbatches by its speed.

Where the last FORWARD stage keeps its graphs, the first BACKWARD stage runs on the same workers.

With teams of T, the workers 0..T-1 take the place of worker 0, T..2T-1 that of worker 1, and so on;
microbatch j of a round goes to the team's member j mod T, where they are equal.

A batch of a stream begins with the worker after the one that ended the batch before
(docs/engine.md, batches in flight). A plan has the schedule of the first batch; the others run it
with the workers' numbers moved on. What stays on a worker stays there.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.files import write_text
from roundpipe_lightning.planning.schedule.schedule import (
    Action,
    ActionKey,
    Schedule,
    dependencies,
    validate_schedule,
)
from roundpipe_lightning.planning.schedule.stages import (
    Partition,
    RecomputePolicy,
    Stage,
    StageKind,
    check_partition,
)

FORMAT_VERSION = 3
"""Version of the saved form; a file of another version is refused."""

_ROUND_THE_WORKERS = Schedule(workers=())

_COUNTS = ("num_workers", "num_microbatches", "team_size", "round_size")
_CHOICES = ("joined", "shares_backward", "like_teams")

_BACKWARD_WORK = 3  # times that of a forward pass: a recompute, and twice the work of one


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Order of the microbatches of a step, whatever the stages are.

    Attributes:
        num_microbatches: Microbatches of all `num_batches` together.
        round_size: Microbatches that travel together.
        team_size: Workers that run the same stage at the same time on different microbatches.
        weight_slots: Stages whose weights a worker holds at once: 2, the next one's are uploaded
            while this one computes; or 1, which needs less memory.
        recompute: What BACKWARD stages start from; NONE: there are none.
        num_batches: Accumulated batches in one stream.
        speeds: How fast every worker is, relative to each other; empty: they are equal.
        joined: Whether the microbatches of a round are pieces of one batch, whose tail segment runs
            once (`microbatching="blocks"`).
        plain: Whether all microbatches of a round, which is a batch, go forward before the first
            one goes backward; of a layout, as its partition says.
        shares_backward: Whether all workers run each BACKWARD stage of a plain step, as if they
            were one team. Their weights are uploaded to every worker, and no worker waits for
            another one behind the barrier.
        like_teams: Whether the members of a team are as fast as each other, rather than the workers
            of a pipeline, so that pipelines get as many microbatches and stages follow speed.
    """

    num_microbatches: int
    round_size: int
    team_size: int = 1
    weight_slots: int = 2
    recompute: RecomputePolicy = RecomputePolicy.FULL
    num_batches: int = 1
    speeds: tuple[float, ...] = ()
    joined: bool = False
    plain: bool = False
    shares_backward: bool = False
    like_teams: bool = False

    @property
    def batch_microbatches(self) -> int:
        return self.num_microbatches // self.num_batches

    @property
    def goes_on(self) -> bool:
        """Whether another round follows the first one."""
        return self.num_microbatches > self.round_size

    @property
    def num_rounds(self) -> int:
        return -(-self.num_microbatches // self.round_size)

    def teams(self, num_workers: int) -> tuple[tuple[int, ...], ...]:
        """Return the workers of every team; members of one number make up a pipeline."""
        count, size = max(num_workers // self.team_size, 1), self.team_size
        workers: Sequence[int] = range(num_workers)
        if self.speeds and size > 1:
            workers = sorted(workers, key=lambda worker: -self.speeds[worker])
            if not self.like_teams:
                return tuple(tuple(workers[t::count]) for t in range(count))
        return tuple(tuple(workers[t * size : (t + 1) * size]) for t in range(count))

    def most_of(self, team: Sequence[int], round_size: int) -> list[int]:
        """Return how many microbatches of a round each worker of a team runs, at most.

        It is the share of the round that its speed is of the team's, rounded up.
        """
        speeds = [self.speeds[worker] for worker in team] if self.speeds else [1.0] * len(team)
        return [math.ceil(round(round_size * speed / sum(speeds), 9)) for speed in speeds]

    def most_members(self, num_workers: int) -> int:
        teams = self.teams(num_workers)
        return max(most for team in teams for most in self.most_of(team, self.round_size))

    def with_stages(
        self, partition: Partition, *, resident: tuple[tuple[int, ...], ...] = ()
    ) -> PipelineLayout:
        values = {field.name: getattr(self, field.name) for field in fields(PipelineConfig)}
        return PipelineLayout(partition=partition, resident=resident, **values)


@dataclass(frozen=True, kw_only=True)
class PipelineLayout(PipelineConfig):
    """Stages of a step, and the order of its microbatches through them.

    Attributes:
        resident: For every worker the blocks whose weights stay on it between stage runs. Frozen
            blocks stay for good, trainable ones within the step. Empty: none stay.
    """

    partition: Partition
    resident: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        joined = self.round_size if self.joined else 0
        if joined != self.partition.joined:
            object.__setattr__(self, "partition", replace(self.partition, joined=joined))
        object.__setattr__(self, "plain", self.partition.plain)

    def dependencies(self, key: ActionKey) -> tuple[ActionKey, ...]:
        """Return the actions that an action waits for."""
        return dependencies(key, self.partition, round_size=self.round_size)


@dataclass(frozen=True, kw_only=True)
class Plan(PipelineLayout):
    """A layout with the schedule that follows from it, for one model and a number of workers.

    A plan of accumulated batches may have the microbatches of all of them or, as it is saved, of
    one; `num_batches` says in either case for how many it was chosen.

    Attributes:
        model: Fingerprint of the model that the plan is for, see `planning.profile.fingerprint`.
        schedule: Empty: the stages are laid round the workers.

    Raises:
        PlanError: If the parts do not fit together or the schedule cannot run.
    """

    model: str
    num_workers: int
    schedule: Schedule = _ROUND_THE_WORKERS
    block_names: tuple[str, ...]

    @property
    def layout(self) -> PipelineLayout:
        """The plan's microbatches as those of one batch."""
        layout = self.with_stages(self.partition, resident=self.resident)
        return replace(layout, num_batches=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*_COUNTS, "num_batches"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} must be 1 or more.")
        if self.num_workers % self.team_size:
            sizes = [n for n in range(1, self.num_workers + 1) if self.num_workers % n == 0]
            raise PlanError(
                f"team_size={self.team_size} does not divide num_workers={self.num_workers}; "
                f"choose one of {sizes}."
            )
        if self.round_size > self.num_microbatches:
            raise PlanError(
                f"round_size={self.round_size} is more than "
                f"num_microbatches={self.num_microbatches}."
            )
        if (self.joined or self.plain) and self.num_microbatches % self.round_size:
            raise PlanError(
                f"num_microbatches={self.num_microbatches} are no rounds of "
                f"round_size={self.round_size}, but a round of '{self.partition}' is a batch: set "
                "round_size to the number of microbatches of a batch."
            )
        if self.speeds and (len(self.speeds) != self.num_workers or min(self.speeds) <= 0):
            raise PlanError(f"speeds={self.speeds}: give one above 0 for each worker, or none.")
        if not self.schedule.workers:
            object.__setattr__(self, "schedule", schedule_of(self, num_workers=self.num_workers))
        if self.schedule.num_workers != self.num_workers:
            raise PlanError(
                f"The schedule has {self.schedule.num_workers} workers, but "
                f"num_workers={self.num_workers}."
            )
        if len(self.block_names) != self.partition.num_blocks:
            raise PlanError(
                f"{len(self.block_names)} block names for a partition of "
                f"{self.partition.num_blocks} blocks."
            )
        self._check_memory_choices()
        validate_schedule(
            self.schedule,
            partition=self.partition,
            num_microbatches=self.num_microbatches,
            round_size=self.round_size,
        )

    def _check_memory_choices(self) -> None:
        """Refuse slots, policies and resident blocks that there cannot be."""
        if self.weight_slots not in (1, 2):
            raise PlanError(f"weight_slots={self.weight_slots} must be 1 or 2.")
        if self.recompute is RecomputePolicy.NONE and self.partition.recomputes:
            raise PlanError(
                f"recompute=none, but '{self.partition}' has {self.partition.num_backward} "
                "BACKWARD stages: the fused stage must have all blocks, or the only FORWARD stage "
                "keep its graphs."
            )
        if self.shares_backward and (not self.plain or self.partition.keeps_graphs):
            raise PlanError(
                f"shares_backward, but '{self.partition}' turns round on the workers of a team: "
                "leave it out, or give a plain partition that keeps no graphs."
            )
        if not any(self.resident):
            object.__setattr__(self, "resident", ())
        if self.resident and len(self.resident) != self.num_workers:
            raise PlanError(
                f"resident has blocks for {len(self.resident)} workers, but "
                f"num_workers={self.num_workers}."
            )
        for worker, blocks in enumerate(self.resident):
            if sorted(set(blocks)) != list(blocks) or any(
                not 0 <= block < self.partition.num_blocks for block in blocks
            ):
                raise PlanError(
                    f"resident blocks {list(blocks)} of worker {worker}: give ascending numbers "
                    f"from 0 to {self.partition.num_blocks - 1}."
                )

    def check_model(
        self, fingerprint: str, *, block_names: tuple[str, ...], cuts: tuple[int, ...] = ()
    ) -> None:
        """Refuse to run another model than the one this plan was made for.

        Raises:
            PlanError: If a name or the fingerprint differs, or a stage spans a cut.
        """
        remedy = "Make a new plan (plan='auto'), or load the plan that belongs to this model."
        if len(block_names) != self.partition.num_blocks:
            raise PlanError(
                f"The plan is for {self.partition.num_blocks} blocks, the model has "
                f"{len(block_names)}. {remedy}"
            )
        for planned, actual in zip(self.block_names, block_names, strict=True):
            if planned != actual:
                raise PlanError(
                    f"The plan's block {planned!r} is {actual!r} in the model. {remedy}"
                )
        if fingerprint != self.model:
            raise PlanError(
                f"The plan is for the model {self.model!r}, not for {fingerprint!r}: its blocks "
                f"have the same names but other shapes. {remedy}"
            )
        check_partition(self.partition, cuts=cuts, block_names=block_names, what="The plan")

    def to_json(self) -> str:
        counts = {name: getattr(self, name) for name in (*_COUNTS, "num_batches", "weight_slots")}
        values = {
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "partition": str(self.partition),
            **counts,
            "recompute": self.recompute.value,
            "resident": [" ".join(map(str, blocks)) for blocks in self.resident],
            **({"speeds": " ".join(map(repr, self.speeds))} if self.speeds else {}),
            **{name: "true" for name in _CHOICES if getattr(self, name)},
            "block_names": list(self.block_names),
            "schedule": self.schedule.to_text().splitlines(),
        }
        return json.dumps(values, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the JSON form; PlanError: it is none of this version, or of a plan that can run."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"Not a plan: {error}.") from error
        version = values.pop("format_version", None) if isinstance(values, dict) else None
        if version != FORMAT_VERSION:
            raise PlanError(
                f"format_version={version!r}, but this version reads {FORMAT_VERSION}: make a new "
                "plan."
            )
        try:
            names = (*_COUNTS, "num_batches", "weight_slots")
            counts: dict[str, Any] = {name: int(values[name]) for name in names}
            counts |= {name: values.get(name) == "true" for name in _CHOICES}
            return cls(
                model=str(values["model"]),
                partition=Partition.parse(values["partition"]),
                block_names=tuple(map(str, values["block_names"])),
                schedule=Schedule.from_text("\n".join(values["schedule"])),
                recompute=RecomputePolicy(values["recompute"]),
                resident=tuple(tuple(map(int, blocks.split())) for blocks in values["resident"]),
                speeds=tuple(map(float, values.get("speeds", "").split())),
                **counts,
            )
        except PlanError:
            raise
        except KeyError as error:
            raise PlanError(f"The plan has no {error}: make a new plan.") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise PlanError(f"The plan is malformed: {error}.") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON form; a file that exists is replaced whole or not at all."""
        write_text(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a saved plan; PlanError: there is none, or as for `from_json`."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise PlanError(
                f"plan={str(path)!r} does not exist. Runs and roundpipe-plan leave a plan.json in "
                "their folder: partition.plan=FOLDER/plan.json, or RoundPipeStrategy(plan=...)."
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"plan={str(path)!r} cannot be read: {error}.") from error
        try:
            return cls.from_json(text)
        except PlanError as error:
            raise PlanError(f"plan={str(path)!r}: {error}") from error

    def __str__(self) -> str:
        values = json.loads(self.to_json())
        rows, values["block_names"] = values.pop("schedule"), " ".join(values["block_names"])
        head = [f"{name}: {value}" for name, value in values.items()]
        return "\n".join([*head, "schedule:", *rows]) + "\n"


def schedule_of(layout: PipelineLayout, *, num_workers: int) -> Schedule:
    """Lay a layout's stages round the workers."""
    teams = layout.teams(num_workers)
    rows: list[list[Action]] = [[] for _ in range(num_workers)]
    work = [0.0] * num_workers  # of each worker so far
    sizes = split_rounds(layout.num_microbatches, round_size=layout.round_size)
    for index, stage, turn in stage_turns(layout, num_rounds=len(sizes)):
        team = range(num_workers) if turn is None else teams[turn % len(teams)]
        workers = _deal(layout, stage, round_size=sizes[index], team=team, work=work)
        for microbatch, worker in enumerate(workers, start=index * layout.round_size):
            action = Action(
                kind=stage.kind, stage=stage.index, microbatch=microbatch, worker=worker
            )
            rows[worker].append(action)
    return Schedule(workers=tuple(map(tuple, rows)))


def stage_turns(
    layout: PipelineLayout, *, num_rounds: int
) -> Iterator[tuple[int, Stage, int | None]]:
    """Yield each round's number and stages, with the turn of the team that runs them.

    Turns go round the teams; None: all workers run the stage.
    """
    turn = 0
    for index in range(num_rounds):
        for stage in layout.partition.stages():
            is_backward = stage.kind is StageKind.BACKWARD
            if is_backward and layout.shares_backward:
                yield index, stage, None
                continue
            turn -= is_backward and stage.keeps_graph
            yield index, stage, turn
            turn += 1


def _deal(
    layout: PipelineLayout, stage: Stage, *, round_size: int, team: Sequence[int], work: list[float]
) -> Iterator[int]:
    """Yield which worker of a team runs each microbatch of a round; add that to its work.

    Equal ones take turns. Of unequal ones whoever then ends first with all that it was given, so
    that what a share is rounded by is made up for in later stages.
    """
    if not layout.speeds:
        yield from (team[place % len(team)] for place in range(round_size))
        return
    size = len(stage.blocks) * (1 if stage.kind is StageKind.FORWARD else _BACKWARD_WORK) or 1
    each = {worker: size / layout.speeds[worker] for worker in team}
    left = dict(zip(team, layout.most_of(team, round_size), strict=True))
    for _ in range(round_size):
        worker = min(filter(left.get, team), key=lambda worker: work[worker] + each[worker])
        left[worker] -= 1
        work[worker] += each[worker]
        yield worker


def split_rounds(num_microbatches: int, *, round_size: int) -> tuple[int, ...]:
    full, rest = divmod(num_microbatches, round_size)
    return (round_size,) * full + ((rest,) if rest else ())


def turns_of_batch(plan: Plan) -> int:
    """Return by how many workers the next batch of a stream begins after this one, from 0 on.

    0 where a plan is not laid round the workers, and where blocks stay on some workers that others
    do not have and that were not chosen for a stream of batches.
    """
    stays = plan.speeds or (len(set(plan.resident)) > 1 and plan.num_batches == 1)
    if stays or plan.schedule != schedule_of(plan, num_workers=plan.num_workers):
        return 0
    *_, last = (
        turn for *_, turn in stage_turns(plan, num_rounds=plan.num_rounds) if turn is not None
    )
    return (last + 1) * plan.team_size % plan.num_workers


def rotated(plan: Plan, num_workers: int) -> Plan:
    num, rows = plan.num_workers, plan.schedule.workers
    if not num_workers % num:
        return plan
    moved = []
    for worker in range(num):
        actions = rows[(worker - num_workers) % num]
        moved.append(tuple(replace(action, worker=worker) for action in actions))
    return replace(plan, schedule=Schedule(workers=tuple(moved)))
