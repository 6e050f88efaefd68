import contextlib
import json
import socket
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch import nn

from roundpipe_lightning.engine.exchange.watch import Watch
from roundpipe_lightning.engine.store.host_store import HostStore
from roundpipe_lightning.engine.update import hosts_update
from roundpipe_lightning.engine.update.hosts_update import JointStep, NormClip
from roundpipe_lightning.engine.update.partial_step import CapturedStep
from roundpipe_lightning.engine.update.updater import Updater


def test_gradients_that_are_being_taken_count_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever submits the step meanwhile would give, and announce, them once more."""
    looked: list[bool] = []

    class Looking(Future[Any]):
        def set_result(self, result: Any) -> None:
            looked.extend([joint.is_given(0)] if is_taking else [])
            super().set_result(result)

    is_taking = False
    monkeypatch.setattr(hosts_update, "Future", Looking)
    parameter = nn.Parameter(torch.ones(2))
    step = CapturedStep(torch.optim.SGD([parameter], lr=1.0), gradients={})
    joint = JointStep(step, {"weight": [parameter]}, begins_early=True, waits=False)
    joint.give(0, {parameter: torch.ones(2)})
    is_taking = True
    assert torch.equal(joint.take(0).gradients[parameter], torch.ones(2))
    assert looked
    assert all(looked)
    assert joint.is_given(0)


@pytest.mark.parametrize("value", [0.0, 0.1, 3.0, float("inf"), float("nan")])
def test_the_norm_clips_as_torch_does(value: float) -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.tensor([value, 1.0, 2.0])
    mine = weight.grad.clone()
    clip = NormClip(1.0)
    clip.set_norm(float(nn.utils.clip_grad_norm_([weight], 1.0)))
    torch.testing.assert_close(clip(mine), weight.grad, equal_nan=True)


def test_parameters_that_the_module_has_not_come_in_the_optimizers_order() -> None:
    """Sets have another order on every host."""
    model = nn.Linear(2, 2)
    others = [nn.Parameter(torch.ones(size)) for size in range(1, 40)]
    store = HostStore(model, [])
    with Updater(store, []) as updater:
        unit = updater._in_order(reversed(others))[-1]
    store.close()
    assert [p.numel() for p in unit.parameters] == list(range(39, 0, -1))


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.0\r\n", b"5\n", b'{"why": "it ended", "peer": 1}\n']
)
def test_a_stranger_who_comes_ends_nothing(said: bytes) -> None:
    watch = Watch(0, main=("127.0.0.1", 1))
    watch.begin([watch.address, ("127.0.0.1", 1, "")])
    with socket.create_connection(watch.address[:2]) as host, host.makefile() as heard:
        host.sendall(json.dumps({"rank": 1, "secret": watch.address[2]}).encode() + b"\n")
        with socket.create_connection(watch.address[:2]) as stranger:
            stranger.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""  # it has been heard
        watch.close("is done")
        assert "is done" in heard.readlines()[-1]
