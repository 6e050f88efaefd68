"""Steps whose user code changes blocks between passes, and what is left of a step."""

from __future__ import annotations

import contextvars
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.driver import snapshot as snapshots
from roundpipe_lightning.engine.worker import replica as replicas
from tests.engine.driver.kit import Comparison, LanguageModel, Layer, batch_of

FACTOR = contextvars.ContextVar("FACTOR", default=1.0)


class SwitchedLayer(Layer):
    """Depends on its mode, an attribute and a context variable."""

    scale = 1.0

    def forward(self, hidden: Tensor) -> Tensor:
        change = super().forward(hidden) - hidden
        if self.training:
            change = change * 0.5
        return hidden + self.scale * FACTOR.get() * change


def switched_model() -> LanguageModel:
    return LanguageModel(layer=SwitchedLayer)


def teacher_in_evaluation(module: Any, step: int) -> Tensor:
    ids, _ = batch_of(step)
    module.eval()
    with torch.no_grad():
        target = module.hidden(ids.flip(1))
    module.train()
    return functional.mse_loss(module.hidden(ids), target)


def attribute_between_passes(module: Any, step: int) -> Tensor:
    total = torch.zeros(())
    for scale in (1.0, 0.25):
        for layer in module.layers:
            layer.scale = scale
        total = total + module.hidden(batch_of(step)[0]).pow(2).mean() * scale
    return total


def context_variable(module: Any, step: int) -> Tensor:
    token = FACTOR.set(3.0)
    try:
        loss: Tensor = module(*batch_of(step))
    finally:
        FACTOR.reset(token)
    return loss


@pytest.mark.parametrize(
    "loss_of", [teacher_in_evaluation, attribute_between_passes, context_variable]
)
def test_what_user_code_changes_between_passes(loss_of: Callable[[Any, int], Tensor]) -> None:
    with Comparison(switched_model) as comparison:
        comparison.run(loss_of, tolerance=1e-4)


class KeepingLayer(Layer):
    def forward(self, hidden: Tensor) -> Tensor:
        self.kept = super().forward(hidden)
        return self.kept * 1


def language_loss(module: Any, step: int) -> Tensor:
    loss: Tensor = module(*batch_of(step))
    return loss


@pytest.mark.parametrize(
    ("make", "loss_of"),
    [
        (switched_model, teacher_in_evaluation),
        (lambda: LanguageModel(layer=KeepingLayer), language_loss),
    ],
)
def test_snapshots_and_replicas_serve_later_steps(
    make: Callable[[], nn.Module],
    loss_of: Callable[[Any, int], Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []
    for kind in (snapshots.Snapshot, replicas.Replica):

        def noting(self: object, *args: Any, _init: Any = kind.__init__, **kwargs: Any) -> None:
            made.append(self)
            _init(self, *args, **kwargs)

        monkeypatch.setattr(kind, "__init__", noting)
    with Comparison(make) as comparison:
        comparison.run(loss_of, tolerance=1e-4)
        assert made
        made.clear()
        comparison.run(loss_of, tolerance=1e-4)
        assert not made


def test_a_tensor_left_in_an_attribute_is_one_after_the_step() -> None:
    with Comparison(lambda: LanguageModel(layer=KeepingLayer)) as comparison:
        comparison.run(language_loss, steps=1)
        plain, module = comparison.plain, comparison.module
        for ours in (module, copy.deepcopy(module)):
            pair: list[Any] = [plain.layers[1], ours.layers[1]]  # type: ignore[index]
            torch.testing.assert_close(pair[1].kept + 0, pair[0].kept + 0)
        layer: Any = module.layers[1]  # type: ignore[index]
        assert type(pickle.loads(pickle.dumps(layer.kept.detach()))) is Tensor


def test_nothing_of_a_step_is_alive_after_it() -> None:
    alive: list[weakref.ref[Any]] = []

    def loss_of(module: Any, step: int) -> Tensor:
        ids, labels = batch_of(step)
        hidden = module.hidden(ids)
        hidden.mean().item()
        alive.append(weakref.ref(hidden))
        logits = module.head(module.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    with Comparison(LanguageModel) as comparison:
        gc.collect()
        gc.disable()
        try:
            for step in range(3):
                comparison.step(loss_of, step)
                alive += map(weakref.ref, (comparison.last, *comparison.last.calls))
                del comparison.last
        finally:
            gc.enable()
        assert [ref() for ref in alive] == [None] * len(alive)


class FailingLayer(Layer):
    """Raises on workers, when it is told to."""

    fails_with_graph: bool | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        on_worker = threading.current_thread() is not threading.main_thread()
        if on_worker and FailingLayer.fails_with_graph is torch.is_grad_enabled():
            raise LookupError("a failing layer")
        return super().forward(hidden)


@pytest.mark.parametrize("with_graph", [False, True])
def test_an_error_of_a_worker(with_graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with Comparison(lambda: LanguageModel(layer=FailingLayer)) as comparison:
        comparison.run(language_loss, steps=1)
        with monkeypatch.context() as patched:
            patched.setattr(FailingLayer, "fails_with_graph", with_graph)
            with pytest.raises(LookupError, match="a failing layer") as raised:
                comparison.step(language_loss)
        assert "This happened in 'layers." in str(getattr(raised.value, "__notes__", None))
        assert raised.traceback[-1].name == "forward"
        comparison.module.zero_grad()
        comparison.run(language_loss, steps=1)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_an_error_of_user_code(error: type[BaseException]) -> None:
    def loss_of(module: Any, step: int) -> Tensor:
        module.hidden(batch_of(step)[0])
        raise error

    with Comparison(LanguageModel) as comparison:
        with pytest.raises(error):
            comparison.step(loss_of)
        comparison.run(language_loss, steps=1)


def test_a_step_without_a_backward_pass() -> None:
    with Comparison(LanguageModel) as comparison:
        for step in range(2):
            with comparison.driver.step(comparison.route, seed=step):
                language_loss(comparison.module, step)
        comparison.run(language_loss, steps=1)
