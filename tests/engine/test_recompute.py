"""A block's recompute finds what its forward found; its backward runs as PyTorch's own does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.kit.engine import (
    Block,
    Regressor,
    check_parity,
)

AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)


class LeavesAutocast(Block):
    """Computes outside autocast, whatever is around it."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        with torch.autocast("cpu", enabled=False):
            hidden: Tensor = self.outer(torch.tanh(self.inner(x.float())))
            return x + hidden


@pytest.mark.parametrize("make_block", [Block, LeavesAutocast])
def test_the_backward_pass_leaves_autocast(make_block: Callable[[], nn.Module]) -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        x, y = batch
        with AUTOCAST():
            hidden = view.run_blocks(view.head(x))
            with torch.autocast("cpu", enabled=False):
                return functional.mse_loss(view.tail(hidden.float()).squeeze(-1), y)

    module = Regressor(make_block=make_block)
    check_parity(module, call=call, num_microbatches=1, context=AUTOCAST)
