"""The search for a plan has tests of its own; here the same job is planned once."""

from __future__ import annotations

import functools

import pytest

from roundpipe_lightning.planning.search.fit import fit_training
from roundpipe_lightning.strategy import planner as planning

_fit_training = functools.cache(fit_training)


@pytest.fixture(autouse=True)
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look up the plan of a job that came before: the search depends on the job alone."""
    monkeypatch.setattr(planning, "fit_training", _fit_training)
