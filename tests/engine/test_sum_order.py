import pytest
import torch

from roundpipe_lightning.emulation.server import EmulatedServer
from roundpipe_lightning.emulation.timing import EmulatedTiming
from tests.kit.engine import Regressor, engine_step, layers_of, plan_of, regression_batches


@pytest.mark.parametrize(("round_size", "team_size"), [(4, 2), (2, 2), (4, 4)])
def test_copies_of_a_team(round_size: int, team_size: int) -> None:
    module = Regressor()
    batches = regression_batches(4)
    stack = layers_of(module)
    plan = plan_of(
        stack, num_workers=4, num_microbatches=4, round_size=round_size, team_size=team_size
    )
    results = []
    for seed in range(3):
        timing = EmulatedTiming(max_delay_seconds=0.003, seed=seed)
        with EmulatedServer(4, timing=timing) as server:
            step = engine_step(module, stack, plan, batches, devices=server.devices)
        results.append(step.gradients)
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        assert all(torch.equal(other[p], gradient) for p, gradient in results[0].items())
