"""Which of two copies a step reads, while the optimizer waits to write into one of them."""

from __future__ import annotations

import threading
from dataclasses import replace

from roundpipe_lightning.engine.serving import Serving
from tests.engine.test_under_way import begin, module_and_plan, opened


def test_who_switches_waits_for_those_who_read_the_parameters() -> None:
    serving = Serving(previous=False)
    assert not serving.begin_reading()
    thread = threading.Thread(target=serving.switch)
    thread.start()
    while not serving.previous:
        pass
    with serving.reading() as previous:
        assert previous  # begun later: nobody waits for it
        assert thread.is_alive()
        serving.end_reading(previous=False)
        thread.join(60)
        assert not thread.is_alive()


def test_a_step_with_other_values_waits_where_trained_blocks_stay() -> None:
    for resident in ((), ((0,), (), ())):
        module, plan = module_and_plan()
        with opened(module, replace(plan, resident=resident)) as engine:
            wanted = begin(engine, 0).result()
            first = begin(engine, 1)
            first.outputs()
            engine.store.serving = Serving(previous=False)
            second = begin(engine, 0)
            if resident:
                assert first.is_over
            found = second.result()
            assert found.losses == wanted.losses
