"""Plans against a machine when only parameters are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.memory import RESERVED_BYTES
from roundpipe_lightning.planning.parameter_fit import (
    check_plan_holds_parameters,
    plan_that_holds_parameters,
)
from roundpipe_lightning.planning.plan import Plan
from roundpipe_lightning.planning.profile import ModelProfile
from roundpipe_lightning.planning.roundrobin import round_robin_schedule
from roundpipe_lightning.planning.stages import Partition
from tests.planning.machines import machine
from tests.planning.profiles import uniform_profile

BLOCK_BYTES = 1000


def model() -> ModelProfile:
    profile = uniform_profile(8)
    blocks = tuple(
        replace(block, parameter_bytes=BLOCK_BYTES, trainable_bytes=BLOCK_BYTES)
        for block in profile.blocks
    )
    return replace(profile, blocks=blocks)


def plan(*, round_size: int = 2) -> Plan:
    partition = Partition(forward=(4,), backward=(4, 4))
    return Plan(
        model=model().fingerprint,
        partition=partition,
        num_workers=2,
        num_microbatches=4,
        round_size=round_size,
        schedule=round_robin_schedule(
            partition, num_workers=2, num_microbatches=4, round_size=round_size, team_size=1
        ),
        block_names=model().block_names,
    )


def test_a_plan_that_fits_is_kept() -> None:
    large = machine(2)
    assert plan_that_holds_parameters(plan(), profile=model(), hardware=large) == plan()
    check_plan_holds_parameters(plan(), profile=model(), hardware=large)


@pytest.mark.parametrize("round_size", [2, 4])
def test_stages_become_small_enough_and_rounds_stay(round_size: int) -> None:
    small = machine(2, device_bytes=RESERVED_BYTES + 5 * BLOCK_BYTES)
    wanted = plan(round_size=round_size)
    with pytest.raises(PlanError, match="does not fit testx2, even without activations"):
        check_plan_holds_parameters(wanted, profile=model(), hardware=small)
    fitting = plan_that_holds_parameters(wanted, profile=model(), hardware=small)
    check_plan_holds_parameters(fitting, profile=model(), hardware=small)
    assert max(fitting.partition.backward) <= 2
    assert fitting.round_size == round_size
    fitting.check_model(model().fingerprint, block_names=model().block_names)


def test_what_cannot_fit_is_refused() -> None:
    tiny = machine(2, device_bytes=RESERVED_BYTES + 2 * BLOCK_BYTES)
    with pytest.raises(PlanError, match="GiB of device memory are missing"):
        plan_that_holds_parameters(plan(), profile=model(), hardware=tiny)
    little = replace(machine(2), host_bytes=8 * BLOCK_BYTES)
    with pytest.raises(PlanError, match="GiB of host memory are missing"):
        plan_that_holds_parameters(plan(), profile=model(), hardware=little)
