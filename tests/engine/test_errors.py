"""What goes wrong leaves the engine once, says where it was, and leaves the engine usable."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.engine import UnusedStackWarning
from roundpipe_lightning.engine.stack import BlockStack
from roundpipe_lightning.errors import (
    BatchError,
    CaptureError,
    ConfigurationError,
    GlueError,
    PlanError,
    WatchdogError,
)
from tests.engine.tiny import (
    WIDTH,
    Block,
    Regressor,
    differences,
    emulated_workers,
    engine_of,
    engine_step,
    layers_of,
    mean_step,
    plain_step,
    plan_of,
    regression_batches,
    stack_of,
    training_step,
)

NUM_MICROBATCHES = 4
SERVERS = {"processor": None, "emulated": lambda: emulated_workers(2)}


class PlannedError(Exception):
    """What the tests raise in user code."""


class Trap:
    """Raises one given exception, at one given moment, once."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def spring(self) -> None:
        """Raise if armed."""
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.trap.spring()
        return gradient, None


class Trapped(nn.Module):
    """A block that may fail in its forward or in its backward pass.

    The microbatch's number is an argument of it.
    """

    def __init__(self, forward_trap: Trap, backward_trap: Trap) -> None:
        super().__init__()
        self.inner = Block()
        self.forward_trap = forward_trap
        self.backward_trap = backward_trap

    def forward(self, x: Tensor, microbatch: int) -> Tensor:
        if microbatch == 2:
            self.forward_trap.spring()
            x = _RaisesInBackward.apply(x, self.backward_trap)  # type: ignore[no-untyped-call]
        hidden: Tensor = self.inner(x)
        return hidden


class Failing(Regressor):
    """Can be made to fail everywhere, for its third microbatch."""

    def __init__(self) -> None:
        self.traps = {name: Trap() for name in ("step", "tail", "forward", "backward")}
        super().__init__(make_block=Block)
        silent = Trap()
        for index in range(4):
            traps = (self.traps["forward"], self.traps["backward"]) if index == 1 else (silent,) * 2
            self.layers[index] = Trapped(*traps)

    def run(self, batch: Any, microbatch: int) -> Tensor:
        x, y = batch
        if microbatch == 2:
            self.traps["step"].spring()
        hidden = self.head(x)
        for layer in self.layers:
            hidden = layer(hidden, microbatch)
        if microbatch == 2:
            self.traps["tail"].spring()
        loss: Tensor = functional.mse_loss(self.tail(hidden).squeeze(-1), y)
        return loss


def _run(view: Any, batch: Any, index: int) -> Any:
    return view.run(batch, index)


PLACES = {
    "step": ("FORWARD stage 0", "the head segment"),
    "tail": ("FUSED stage 0", "the tail segment"),
    "forward": ("FORWARD stage 1", "layers.1"),
    "backward": ("BACKWARD stage 3", "layers.1"),
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    "make_error",
    [lambda: PlannedError("planned"), lambda: SystemExit(3), lambda: GeneratorExit("planned")],
    ids=["exception", "exit", "generator exit"],
)
def test_an_exception_of_the_third_microbatch_in_the_second_step(
    where: str, server: str, make_error: Callable[[], BaseException]
) -> None:
    module = Failing()
    stack = layers_of(module)
    batches = regression_batches(NUM_MICROBATCHES)
    plain = plain_step(module, batches, call=_run)
    plan = plan_of(stack, num_workers=2, num_microbatches=NUM_MICROBATCHES)
    devices = emulated_workers(2) if server == "emulated" else None
    with engine_of(module, stack, plan, devices=devices) as engine:
        assert not differences(module, mean_step(engine, batches, call=_run), plain)
        planned = make_error()
        module.traps[where].error = planned
        with pytest.raises(type(planned)) as caught:
            mean_step(engine, batches, call=_run)
        assert caught.value is planned
        text = "".join(getattr(planned, "__notes__", ["".join(PLACES[where])]))
        for words in (*PLACES[where], "microbatch 2", "worker "):
            assert words in text
        del caught, planned
        for _ in range(2):
            assert not differences(module, mean_step(engine, batches, call=_run), plain)


def test_the_traceback_reaches_into_user_code() -> None:
    module = Failing()
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=3)
    module.traps["forward"].error = PlannedError("planned")
    with pytest.raises(PlannedError) as caught:
        engine_step(module, stack, plan, regression_batches(3), call=_run)
    assert caught.traceback[-1].name == "spring"
    assert any(entry.name == "run" for entry in caught.traceback)


def test_an_exception_in_an_evaluation() -> None:
    module = Failing()
    stack = layers_of(module)
    (batch,) = regression_batches(1)
    plan = plan_of(stack, num_workers=2, num_microbatches=1)
    with engine_of(module, stack, plan) as engine, torch.no_grad():
        for where in ("step", "forward", "tail"):
            module.traps[where].error = PlannedError("planned")
            with pytest.raises(PlannedError):
                engine.evaluate(lambda view, b: view.run(b, 2), batch)
        got = engine.evaluate(lambda view, b: view.run(b, 2), batch)
        assert torch.equal(got, module.run(batch, 2))


def test_several_microbatches_fail_and_one_error_comes() -> None:
    module = Regressor()
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=4, num_microbatches=4, team_size=4)
    barrier = threading.Barrier(4, timeout=20)

    def call(view: Any, batch: Any, index: int) -> Any:
        barrier.wait()
        raise PlannedError(str(index))

    with engine_of(module, stack, plan) as engine:
        with pytest.raises(PlannedError):
            mean_step(engine, regression_batches(4), call=call)
        mean_step(engine, regression_batches(4))


def test_user_code_that_swallows_exceptions_does_not_stop_an_abort() -> None:
    module = Regressor()
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=3)

    def call(view: Any, batch: Any, index: int) -> Any:
        if index == 1:
            raise PlannedError
        try:
            return view.training_step(batch, 0)
        except Exception:  # noqa: BLE001 - what careless user code does
            return torch.zeros((), requires_grad=True)

    with engine_of(module, stack, plan) as engine:
        with pytest.raises(PlannedError):
            mean_step(engine, regression_batches(3), call=call)
        mean_step(engine, regression_batches(3))


# ------------------------------------------------------------------------------------------ Ctrl-C


@pytest.mark.parametrize("where", ["head", "stack", "tail"])
def test_ctrl_c_while_the_engine_waits(where: str) -> None:
    module = Regressor()
    stack = layers_of(module)
    batches = regression_batches(3)
    plain = plain_step(module, batches)
    plan = plan_of(stack, num_workers=2, num_microbatches=3)
    interrupted = threading.Event()

    def interrupt(index: int) -> None:
        if index == 1 and not interrupted.is_set():
            interrupted.set()
            _thread.interrupt_main()
            time.sleep(0.3)

    def call(view: Any, batch: Any, index: int) -> Any:
        if where == "head":
            interrupt(index)
        hidden = view.run_blocks(view.head(batch[0]))
        if where == "tail":
            interrupt(index)
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    if where == "stack":
        module.layers[2].register_forward_pre_hook(lambda *_: interrupt(1))
    with engine_of(module, stack, plan) as engine:
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            mean_step(engine, batches, call=call)
        assert time.monotonic() - started < 10
        assert not differences(module, mean_step(engine, batches, call=call), plain)


def test_ctrl_c_with_user_code_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine waits a while, then goes on without the stuck thread, which ends by itself."""
    module = Regressor()
    stack = layers_of(module)
    batches = regression_batches(2)
    plan = plan_of(stack, num_workers=2, num_microbatches=2)
    release = threading.Event()

    def stuck(view: Any, batch: Any, index: int) -> Any:
        if index == 1:
            _thread.interrupt_main()
            release.wait(20)
        return view.training_step(batch, 0)

    plain = plain_step(module, batches)
    with engine_of(module, stack, plan, timeout_seconds=0.6) as engine:
        with pytest.raises(KeyboardInterrupt):
            mean_step(engine, batches, call=stuck)
        assert not differences(module, mean_step(engine, batches), plain)
        release.set()


# ---------------------------------------------------------------------------------------- watchdog


def test_watchdog_shows_the_schedule_and_where_everyone_stands() -> None:
    module = Regressor()
    stack = layers_of(module)
    batches = regression_batches(3)
    plan = plan_of(stack, num_workers=2, num_microbatches=3)
    plain = plain_step(module, batches)

    def slow(view: Any, batch: Any, index: int) -> Any:
        if index == 1:
            time.sleep(1.5)
        return view.training_step(batch, 0)

    with engine_of(module, stack, plan, timeout_seconds=0.5) as engine:
        with pytest.raises(WatchdogError, match=r"0\.5 s") as caught:
            mean_step(engine, batches, call=slow)
        text = str(caught.value)
        assert ">F0.1<" in text
        assert "worker 0" in text
        assert "worker 1" in text
        assert "FORWARD stage 0 (the head segment, blocks layers.0" in text
        assert "timeout_seconds" in text
        assert not differences(module, mean_step(engine, batches), plain)


def test_watchdog_lets_a_step_be_longer_than_its_timeout() -> None:
    module = Regressor()
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=1, num_microbatches=4)

    def slow(view: Any, batch: Any, index: int) -> Any:
        time.sleep(0.4)
        return view.training_step(batch, 0)

    with engine_of(module, stack, plan, timeout_seconds=1.0) as engine:
        mean_step(engine, regression_batches(4), call=slow)


# --------------------------------------------------------------------------------- glue and capture


def _blocks(step: Callable[[Any, Tensor], Any], num_blocks: int = 4) -> None:
    """Run a step whose stack is called by `step(layers, hidden)`."""
    module = Regressor(num_blocks)
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=2)

    def call(view: Any, batch: Any, index: int) -> Any:
        hidden = step(view.layers, view.head(batch[0]))
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    batches = regression_batches(2)
    plain = plain_step(module, batches)
    with engine_of(module, stack, plan) as engine:
        try:
            mean_step(engine, batches, call=call)
        finally:
            assert not differences(module, mean_step(engine, batches), plain)


def _chain(layers: Any, hidden: Tensor, between: Callable[[int, Tensor], Any]) -> Any:
    for index, layer in enumerate(layers):
        hidden = layer(hidden)
        if index + 1 < len(layers):
            hidden = between(index, hidden)
    return hidden


GLUE: dict[str, Callable[[int, Tensor], Any]] = {
    "addition": lambda index, h: h + 1 if index == 1 else h,
    "in place": lambda index, h: h.mul_(2) if index == 1 else h,
    "indexing": lambda index, h: h[:2] if index == 1 else h,
    "number": lambda index, h: (h, h.sum().item())[0] if index == 1 else h,
    "cast": lambda index, h: h.double() if index == 1 else h,
    "function": lambda index, h: functional.layer_norm(h, (WIDTH,)) if index == 1 else h,
    "clone": lambda index, h: torch.clone(h) if index == 1 else h,
    "branch": lambda index, h: (h, bool((h > 0).any()))[0] if index == 1 else h,
    "numpy": lambda index, h: (h, h.numpy())[0] if index == 1 else h,
}


@pytest.mark.parametrize("kind", GLUE)
def test_glue_between_blocks(kind: str) -> None:
    with pytest.raises(GlueError, match=r"layers\.1.*blocks="):
        _blocks(lambda layers, hidden: _chain(layers, hidden, GLUE[kind]))


ORDERS = {
    "skipped": ([0, 2, 3], r"'layers\.2' was called where block 'layers\.1' was due after"),
    "repeated": ([0, 1, 1, 2, 3], r"'layers\.1' was called where block 'layers\.2' was due after"),
    "backwards": ([3, 2, 1, 0], r"'layers\.3' was called where block 'layers\.0' was due"),
    "too few": ([0, 1], r"'layers\.0' to 'layers\.1' were called, but 'layers\.2'"),
}


@pytest.mark.parametrize("kind", ORDERS)
def test_blocks_out_of_order(kind: str) -> None:
    order, message = ORDERS[kind]

    def step(layers: Any, hidden: Tensor) -> Any:
        for index in order:
            hidden = layers[index](hidden)
        return hidden.sum(-1, keepdim=True) if kind != "too few" else torch.zeros(3, WIDTH)

    with pytest.raises(CaptureError, match=message):
        _blocks(step)


def test_a_block_called_for_one_microbatch_and_not_for_another() -> None:
    module = Regressor()
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=3)

    def call(view: Any, batch: Any, index: int) -> Any:
        hidden = view.head(batch[0])
        for number, layer in enumerate(view.layers):
            if (number, index) != (1, 2):
                hidden = layer(hidden)
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    with pytest.raises(CaptureError, match=r"layers\.2") as caught:
        engine_step(module, stack, plan, regression_batches(3), call=call)
    assert "microbatch 2" in "".join(getattr(caught.value, "__notes__", ["microbatch 2"]))


# ------------------------------------------------------------------------------- losses and batches


def _outputs(call: Callable[[Any, Any, int], Any], scales: list[float] | None = None) -> Any:
    module = Regressor()
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=3)
    with engine_of(module, stack, plan) as engine:
        result = engine.step(regression_batches(3), call, loss_scales=scales or [1.0] * 3)
        return module, result


def test_a_loss_without_gradient() -> None:
    with pytest.raises(ConfigurationError, match="does not require a gradient"):
        _outputs(lambda v, b, i: v.training_step(b, 0).detach())


@pytest.mark.parametrize("value", [{"prediction": torch.ones(1)}, {"loss": 1.0}, [1], "loss"])
def test_an_output_without_loss(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"a {type(value).__name__} without a tensor"):
        _outputs(lambda v, b, i: value)


def test_none_for_one_microbatch() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        loss = view.training_step(batch, 0)
        return None if index == 1 else loss

    module, result = _outputs(call)
    assert [loss is None for loss in result.losses] == [False, True, False]
    batches = regression_batches(3)
    plain = plain_step(module, [batches[0], batches[2]])
    for name, parameter in module.named_parameters():
        want = plain.gradients[name]
        assert want is not None
        torch.testing.assert_close(result.gradients[parameter], 2 * want)


@pytest.mark.parametrize("runs_the_stack", [True, False])
def test_none_for_all_microbatches(runs_the_stack: bool) -> None:
    def call(view: Any, batch: Any, index: int) -> None:
        if runs_the_stack:
            view(batch[0])

    _, result = _outputs(call)
    assert result.losses == result.outputs == (None,) * 3
    assert not result.gradients


def test_a_scale_of_zero_skips_even_what_is_not_a_number() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        loss = view.training_step(batch, 0)
        return loss * float("nan") if index == 2 else loss

    module, result = _outputs(call, [1.0, 1.0, 0.0])
    assert torch.isnan(result.losses[2])
    assert set(result.gradients) == set(module.parameters())
    assert all(gradient.isfinite().all() for gradient in result.gradients.values())


def test_a_loss_that_misses_the_stack() -> None:
    with pytest.warns(UnusedStackWarning, match="one chain"):
        module, result = _outputs(lambda v, b, i: v.tail(b[0]).mean())
    assert set(result.gradients) == set(module.tail.parameters())


def test_as_many_microbatches_and_scales_as_planned() -> None:
    module = Regressor()
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=3)
    with engine_of(module, stack, plan) as engine:
        for num, scales in ((2, [1.0] * 3), (3, [1.0] * 2), (4, [1.0] * 4)):
            with pytest.raises(BatchError, match="plan of 3 microbatches"):
                engine.step(regression_batches(num), training_step, loss_scales=scales)


def test_plans_for_other_numbers() -> None:
    module = Regressor()
    stack = layers_of(module)
    plan = plan_of(stack, num_workers=2, num_microbatches=3)
    shorter = BlockStack(name="layers", blocks=stack.blocks[:3], names=stack.names[:3])
    with pytest.raises(PlanError, match="3 blocks, the module has 4"):
        engine_of(module, stack, plan_of(shorter))
    with pytest.raises(PlanError, match="4 blocks, the module has 0"):
        engine_of(module, None, plan)
    with pytest.raises(PlanError, match=r"2 workers, there are 3.*devices"):
        engine_of(module, stack, plan, devices=emulated_workers(3))
    other = plan_of(stack, num_workers=3, num_microbatches=3)
    with engine_of(module, stack, plan) as engine, pytest.raises(PlanError, match="3 workers"):
        engine.step(regression_batches(3), training_step, loss_scales=[1.0] * 3, plan=other)


def test_another_plan_of_the_same_engine() -> None:
    module = Regressor()
    stack = layers_of(module)
    with engine_of(module, stack, plan_of(stack, num_microbatches=3)) as engine:
        for num in (3, 5, 1, 5, 3):
            batches = regression_batches(num)
            plan = plan_of(stack, num_microbatches=num)
            result = engine.step(batches, training_step, loss_scales=[1 / num] * num, plan=plan)
            assert not differences(module, result, plain_step(module, batches))


def test_a_stack_must_have_distinct_blocks() -> None:
    block = Block()
    with pytest.raises(ConfigurationError, match="occurs twice"):
        stack_of((block, block))
    with pytest.raises(ConfigurationError, match="at least one"):
        stack_of(())
