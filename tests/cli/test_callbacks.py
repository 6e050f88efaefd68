"""Ctrl-C between steps, within a step, and a second time."""

import signal
from unittest.mock import Mock

import pytest

from roundpipe_lightning.cli.callbacks import GracefulInterrupt


def start_step(interrupt: GracefulInterrupt) -> None:
    interrupt.on_train_batch_start(Mock(), Mock(), None, 0)


def end_step(interrupt: GracefulInterrupt) -> None:
    interrupt.on_train_batch_end(Mock(), Mock(), None, None, 0)


def test_within_a_step_it_waits_for_the_end() -> None:
    with GracefulInterrupt() as interrupt:
        start_step(interrupt)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            end_step(interrupt)


def test_between_steps_it_interrupts_at_once() -> None:
    with GracefulInterrupt() as interrupt:
        start_step(interrupt)
        end_step(interrupt)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_second_one_interrupts_within_the_step() -> None:
    before = signal.getsignal(signal.SIGINT)
    with GracefulInterrupt() as interrupt:
        start_step(interrupt)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before
