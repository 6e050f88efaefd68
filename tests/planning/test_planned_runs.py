import torch.nn.functional as F  # noqa: N812
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from roundpipe_lightning.planning.model.hardware import RESERVED_BYTES
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.stages import RecomputePolicy
from roundpipe_lightning.planning.search.partition import Effort
from roundpipe_lightning.planning.search.planner import plan_training
from roundpipe_lightning.planning.search.request import PartitionHints, PlanningRequest
from tests.kit.engine import (
    WIDTH,
    Regressor,
    differences,
    emulated_workers,
    engine_step,
    layers_of,
    plain_step,
    regression_batches,
)
from tests.kit.profiles import machine

NUM_BLOCKS = 6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(1, len(x), 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + y.transpose(1, 2).reshape(x.shape)


_seconds = st.floats(min_value=0.01, max_value=5.0, allow_nan=False)


@settings(max_examples=24)
@given(
    st.lists(st.tuples(_seconds, _seconds), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([1e30, 30.0]),
    st.sampled_from([500, 5000]),
    st.sampled_from([None, *((policy,) for policy in RecomputePolicy)]),
    st.booleans(),
)
def test_the_engine_runs_random_plans_with_unchanged_results(
    durations: list[tuple[float, float]],
    num_workers: int,
    num_microbatches: int,
    num_batches: int,
    link: float,
    room: int,
    recompute: tuple[RecomputePolicy, ...] | None,
    emulated: bool,
) -> None:
    """One or two slots for weights, blocks that stay, teams, rounds, and every recompute."""
    module = Regressor(NUM_BLOCKS, make_block=Attention)
    stack = layers_of(module)
    blocks = tuple(
        BlockProfile(
            name=name,
            forward_seconds=forward,
            backward_seconds=backward,
            parameter_bytes=100,
            trainable_bytes=100,
            activation_bytes=60,
            attention_seconds=forward / 2,
            attention_bytes=10,
        )
        for name, (forward, backward) in zip(stack.names, durations, strict=True)
    )
    planned = plan_training(
        ModelProfile(blocks=blocks, fingerprint="tiny"),
        hardware=machine(
            num_workers,
            link=link,
            device_bytes=RESERVED_BYTES + (5000 if recompute == (RecomputePolicy.NONE,) else room),
        ),
        request=PlanningRequest(
            num_microbatches=num_microbatches,
            num_batches=num_batches,
            hints=PartitionHints(recompute=recompute),
            effort=Effort(num_actions=20_000),
        ),
    )
    batches = regression_batches(num_microbatches * num_batches)
    plain = plain_step(module, batches)
    devices = emulated_workers(num_workers) if emulated else None
    result = engine_step(module, stack, planned.plan, batches, devices=devices)
    # Devices add up a round's gradients before they go home, those of a team each its own.
    tolerance = 1e-6 if emulated and (num_batches > 1 or planned.plan.team_size > 1) else 0.0
    assert not differences(module, result, plain, tolerance=tolerance)
