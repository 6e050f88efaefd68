"""Helpers for tests of your own modules: emulated devices under the Trainer, and a comparison.

```python
from roundpipe_lightning.testing import EmulatedStrategy, assert_trains_as_one_device

def test_my_module_trains_on_three_devices():
    assert_trains_as_one_device(MyModule, my_data, devices=3)
```

Nothing here needs an accelerator, and no training imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from roundpipe_lightning.emulation.server import EmulatedDevice
from roundpipe_lightning.engine.device.base import Device
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy.strategy import RoundPipeStrategy

__all__ = ["EmulatedStrategy", "assert_trains_as_one_device"]


class EmulatedStrategy(RoundPipeStrategy):
    """The strategy on emulated devices, in place of the Trainer's CPU workers.

    Emulated devices compute on the CPU, to the CPU's bits. Their tensors refuse to meet those of
    other devices and of the host in one operation, as tensors of several GPUs do.

    Args:
        devices: The workers' devices, for instance those of an `EmulatedServer`, whose copies take
            time. As many as `Trainer(devices=...)` says. None: emulated ones that take no time.
        **options: Those of `RoundPipeStrategy`.

    Raises:
        ConfigurationError: The Trainer has another number of workers than there are devices.
    """

    def __init__(self, *, devices: Sequence[Device] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._given_devices = devices

    def _devices(self) -> list[Device]:
        if self._given_devices is None:
            return [EmulatedDevice(index) for index in range(self.num_workers)]
        if len(self._given_devices) != self.num_workers:
            raise ConfigurationError(
                f"EmulatedStrategy has {len(self._given_devices)} devices and the Trainer "
                f"{self.num_workers} workers: give Trainer(devices={len(self._given_devices)})."
            )
        return list(self._given_devices)


def assert_trains_as_one_device(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], Iterable[Any]],
    *,
    devices: int = 2,
    strategy: RoundPipeStrategy | None = None,
    tolerance: float = 1e-4,
    **trainer_options: Any,
) -> None:
    """Train a module twice, on one CPU and on emulated devices, and compare.

    Compared are parameters, buffers and `trainer.callback_metrics`. Without dropout they differ by
    rounding only.

    Args:
        make_module: Makes the module; called with the same random state each time.
        make_data: Makes the training batches.
        devices: Number of emulated devices.
        strategy: The strategy to test; None: `EmulatedStrategy()`.
        tolerance: Largest relative and absolute difference of a value.
        **trainer_options: Of both Trainers; two epochs without logger and checkpoints by default.

    Raises:
        AssertionError: Something differs; the message names it.
    """
    options: dict[str, Any] = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **trainer_options,
    }
    results = []
    for kind, num in (("auto", 1), (EmulatedStrategy() if strategy is None else strategy, devices)):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = make_module()
            trainer = Trainer(accelerator="cpu", strategy=kind, devices=num, **options)
            trainer.fit(module, make_data())
        results.append({**module.state_dict(), **trainer.callback_metrics})
    expected, values = results
    torch.testing.assert_close(values, expected, rtol=tolerance, atol=tolerance)
