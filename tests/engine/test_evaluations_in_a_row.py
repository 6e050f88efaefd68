"""An evaluation's uploads wait for what the one before has launched."""

from __future__ import annotations

from typing import Any

import torch

from tests.engine.test_under_way import module_and_plan, opened
from tests.kit.engine import regression_batches


def test_slots_are_overwritten_when_they_were_read() -> None:
    module, plan = module_and_plan()

    def call(view: Any, batch: Any) -> None:
        view.training_step(batch, 0)  # nothing comes home that the host would wait for

    with opened(module, plan) as engine, torch.no_grad():
        for batch in regression_batches(4):
            engine.evaluate(call, batch)
