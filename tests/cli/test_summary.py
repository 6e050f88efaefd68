from typing import Any

import pytest

from roundpipe_lightning import PipelineMonitor, PlanReport
from roundpipe_lightning.cli.summary import monitored_rows, summary_rows
from tests.kit.runs import SUMMARY_KEYS

WHOLE: dict[str, Any] = {
    "tokens_per_second": 12345.6,
    "loss_first": 5.5512,
    "loss_last": 2.0049,
    "val_loss": 2.1,
    "test_loss": 2.2,
    "metrics": {"test_accuracy": 0.51239},
    "bubble_predicted": 0.1,
    "bubble_measured": 0.156,
    "peak_device_bytes": 3 * 2**20,
    "peak_host_bytes": 5 * 2**29,
    "num_workers": 4,
    "num_microbatches": 8,
    "num_steps": 1,
}


def test_the_table_reads_well() -> None:
    assert summary_rows(WHOLE, unit=" nats per token") == [
        ("Training", "1 step of 8 microbatches on 4 workers"),
        ("Training loss", "from 5.55 to 2.00 nats per token"),
        ("Validation loss", "2.10 nats per token"),
        ("Test loss", "2.20 nats per token"),
        ("test_accuracy", "0.5124"),
        ("Speed", "12,346 tokens a second"),
        ("Workers waited", "16% of the time (10% expected)"),
        ("Most memory on a device", "3.0 MiB"),
        ("Most memory of the process", "2.50 GiB"),
    ]
    empty = {**dict.fromkeys(SUMMARY_KEYS), "peak_host_bytes": 5 * 2**29, "num_workers": 4}
    empty |= {"metrics": {}, "num_steps": 0, "num_microbatches": 1}
    assert summary_rows(empty, unit="") == [  # without what the run did not have
        ("Training", "0 steps of 1 microbatch on 4 workers"),
        ("Most memory of the process", "2.50 GiB"),
    ]


IDLE = {
    "idle_share": 0.4,
    "idle_fill_share": 0.05,
    "idle_drain_share": 0.004,
    "idle_upload_share": 0.0,
    "idle_boundary_share": 0.1,
    "idle_optimizer_share": 0.0,
    "idle_data_share": 0.236,
    "idle_other_share": 0.01,
}


@pytest.mark.parametrize(
    ("figures", "rows"),
    [
        (
            {"tflop_per_second": 12.345, "share_of_peak": 0.1234, **IDLE},
            [
                ("Arithmetic", "12.3 TFLOP/s, 12.3% of the devices' peak"),
                ("Idle altogether", "40% of the time: data 24%, boundary 10%, fill 5%, other 1%"),
            ],
        ),
        ({"tflop_per_second": 0.5}, [("Arithmetic", "0.5 TFLOP/s")]),
        ({}, []),
    ],
)
def test_rows_of_a_monitor(
    figures: dict[str, float],
    rows: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PipelineMonitor, "figures", property(lambda _: figures))
    assert monitored_rows([PlanReport(), PipelineMonitor()]) == rows
    assert monitored_rows([PlanReport()]) == []
