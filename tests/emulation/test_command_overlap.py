import importlib
from pathlib import Path

import pytest

from tests.kit.training import QUIET

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Of a block. What the bare engine does not do (logging) takes the host a time of its own, which is
# a smaller share of longer steps. A lost overlap idles 10 points longer, whatever a step takes.
MILLISECONDS = (4.0, 8.0, 16.0, 32.0)


@pytest.mark.soak
@pytest.mark.filterwarnings(QUIET[0])
def test_the_command_is_idle_no_longer_than_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost overlap warns, which is an error here, and idles 10 points longer."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    benchmark = importlib.import_module("command_overlap")
    more: dict[str, float] = {}
    for milliseconds in MILLISECONDS:
        found = benchmark.measure(seconds=milliseconds / 1e3, num_steps=4)
        more = {u: s["trainer_idle_share"] - s["engine_idle_share"] for u, s in found.items()}
        if max(more.values()) < 0.02:
            return
    pytest.fail(f"more idle than the engine, as a share of the workers' time: {more}")
