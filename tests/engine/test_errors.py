import threading
from collections.abc import Callable
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.chain.chain import BlockStack
from roundpipe_lightning.engine.chain.saved_outputs import ChangedRecomputeWarning
from roundpipe_lightning.errors import (
    BatchError,
    CaptureError,
    ConfigurationError,
    GlueError,
    PlanError,
)
from roundpipe_lightning.planning.schedule.stages import Partition
from tests.kit.engine import (
    Block,
    Regressor,
    Workers,
    check_parity,
    differences,
    emulated_workers,
    engine_for,
    engine_of,
    layers_of,
    mean_step,
    on_any_workers,
    plain_step,
    plan_of,
    regression_batches,
    stack_of,
)
from tests.kit.moments import call_in_backward

NUM_MICROBATCHES = 4
SERVERS = ("processor", "emulated")


class PlannedError(Exception):
    """Raised by the tests in user code."""


class Trap:
    def __init__(self) -> None:
        self.error: BaseException | None = None

    def spring(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


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
            x = call_in_backward(x, self.backward_trap.spring)
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


ERRORS = {"exception": PlannedError, "exit": SystemExit, "generator exit": GeneratorExit}


@pytest.mark.suite(
    "step-exception-emulated",
    "backward-exception-emulated",
    "tail-exception-processor",
    "forward-exception-processor",
    "step-exit-processor",
    "step-generator exit-processor",
    "backward-generator exit-emulated",
)
@pytest.mark.parametrize(
    ("where", "error", "server"),
    [
        *((where, "exception", server) for where in PLACES for server in SERVERS),
        *(("step", error, "processor") for error in ("exit", "generator exit")),
        *(("backward", error, "emulated") for error in ("exit", "generator exit")),
    ],
)
def test_an_exception_of_the_third_microbatch_in_the_second_step(
    where: str, error: str, server: str
) -> None:
    module = Failing()
    batches = regression_batches(NUM_MICROBATCHES)
    plain = plain_step(module, batches, call=_run)
    devices = emulated_workers(2) if server == "emulated" else None
    with engine_for(
        module, num_workers=2, num_microbatches=NUM_MICROBATCHES, devices=devices
    ) as engine:
        assert not differences(module, mean_step(engine, batches, call=_run), plain)
        planned = ERRORS[error]("planned")
        module.traps[where].error = planned
        with pytest.raises(type(planned)) as caught:
            mean_step(engine, batches, call=_run)
        assert caught.value is planned
        assert caught.traceback[-1].name == "spring"
        text = "".join(getattr(planned, "__notes__", ["".join(PLACES[where])]))
        for words in (*PLACES[where], "microbatch 2", "worker "):
            assert words in text
        del caught, planned
        assert not differences(module, mean_step(engine, batches, call=_run), plain)


def test_several_microbatches_fail_and_one_error_comes() -> None:
    module = Regressor()
    barrier = threading.Barrier(4, timeout=60)

    def call(view: Any, batch: Any, index: int) -> Any:
        barrier.wait()
        raise PlannedError(str(index))

    with engine_for(module, num_workers=4, num_microbatches=4, team_size=4) as engine:
        with pytest.raises(PlannedError):
            mean_step(engine, regression_batches(4), call=call)
        mean_step(engine, regression_batches(4))


@on_any_workers
def test_no_block_has_its_gradients_before_every_output_was_looked_at(workers: Workers) -> None:
    module, batches = Regressor(3), regression_batches(NUM_MICROBATCHES)
    plain, taken = plain_step(module, batches), list[nn.Parameter]()

    def look(index: int, output: Tensor) -> None:
        torch.testing.assert_close(output, plain.losses[index])
        if index == NUM_MICROBATCHES - 1:
            sleep(0.2)
            raise PlannedError

    def take(gradients: dict[nn.Parameter, Tensor], elsewhere: object) -> list[nn.Parameter]:
        taken.extend(gradients)
        return []

    with engine_for(module, num_microbatches=NUM_MICROBATCHES, devices=workers(2)) as engine:
        engine.store.take_gradients = take
        with pytest.raises(PlannedError):
            mean_step(engine, batches, verify=look)
        assert not taken
        assert not differences(module, mean_step(engine, batches), plain)
        assert taken


def test_user_code_that_swallows_exceptions_does_not_stop_an_abort() -> None:
    module = Regressor()

    def call(view: Any, batch: Any, index: int) -> Any:
        if index == 1:
            raise PlannedError
        try:
            return view.training_step(batch, 0)
        except Exception:  # noqa: BLE001 - what careless user code does
            return torch.zeros((), requires_grad=True)

    with engine_for(module, num_workers=2, num_microbatches=3) as engine:
        with pytest.raises(PlannedError):
            mean_step(engine, regression_batches(3), call=call)
        mean_step(engine, regression_batches(3))


# --------------------------------------------------------------------------------- glue and capture


def _refused(
    step: Callable[[Any, Tensor], Any],
    error: type[Exception],
    match: str,
    *,
    partition: Partition | None = None,
    **parts: Any,
) -> None:
    """Run a step that calls its blocks in `step(layers, hidden)` and is refused."""
    module = Regressor(4, **parts)

    def call(view: Any, batch: Any, index: int) -> Any:
        hidden = step(view.layers, view.head(batch[0]))
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    batches = regression_batches(2)
    with engine_for(module, num_workers=2, num_microbatches=2, partition=partition) as engine:
        with pytest.raises(error, match=match) as caught:
            mean_step(engine, batches, call=call)
        assert "microbatch" in "".join(getattr(caught.value, "__notes__", ["microbatch"]))
        if not parts:
            assert not differences(module, mean_step(engine, batches), plain_step(module, batches))


def _through(layers: Any, hidden: Tensor) -> Tensor:
    for layer in layers:
        hidden = layer(hidden)
    return hidden


@pytest.mark.parametrize(
    "bare",
    [Tensor.detach, lambda x: x.data, lambda x: x.detach().view(-1)],
    ids=["detached", "data", "view"],
)
def test_writing_into_an_output_past_its_graph(bare: Callable[[Tensor], Tensor]) -> None:
    def step(layers: Any, hidden: Tensor) -> Any:
        for layer in layers:
            hidden = layer(hidden)
            bare(hidden).mul_(2)
        return hidden

    _refused(step, GlueError, r"`mul_` writes into an output of block 'layers\.0' past its graph")


class Smuggling(Block):
    """Hands a tensor to the next block past its arguments."""

    kept: dict[str, Tensor]

    def __init__(self, kept: dict[str, Tensor], *, constant: bool = False) -> None:
        super().__init__()
        self.__dict__["kept"] = kept
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        key = "side" if self.constant else str(threading.get_ident())  # of the microbatch
        hidden = super().forward(x + self.kept[key].sum() if key in self.kept else x)
        if not self.constant:
            self.kept[key] = hidden * 2
        elif key not in self.kept:
            self.kept[key] = torch.ones(2).cumsum(0)
        return hidden


@pytest.mark.filterwarnings("ignore:Block .* gave other values in its recompute")
@pytest.mark.parametrize("forward", [(1, 1, 1, 1), (3,)])
def test_a_tensor_that_goes_from_block_to_block_past_the_arguments(forward: Any) -> None:
    kept: dict[str, Tensor] = {}
    fused = 4 - sum(forward)
    partition = Partition(forward=forward, backward=(fused, *[1] * (4 - fused)))
    match = r"Block 'layers\.\d' made a tensor that block 'layers\.\d' gets by another way"
    _refused(_through, CaptureError, match, partition=partition, make_block=lambda: Smuggling(kept))


def test_an_output_that_user_code_hands_to_a_block_past_the_arguments() -> None:
    kept: dict[int, Tensor] = {}

    def step(layers: Any, hidden: Tensor) -> Any:
        for layer in layers:
            hidden = layer(hidden)
            kept[threading.get_ident()] = hidden
        return hidden

    class Reading(Block):
        def forward(self, x: Tensor) -> Tensor:
            side = kept.get(threading.get_ident())
            return super().forward(x if side is None else x + side)

    match = r"'layers\.0' made a tensor that block 'layers\.1' gets by another way"
    _refused(step, CaptureError, match, make_block=Reading)


def test_an_output_that_another_microbatch_uses() -> None:
    kept: list[Tensor] = []

    def step(layers: Any, hidden: Tensor) -> Any:
        hidden = layers[0](hidden)
        kept.append(hidden)
        return _through(layers[1:], hidden) + kept[0]

    match = r"'layers\.0' (made a tensor that (another|block) .* gets|is used after its step)"
    _refused(step, CaptureError, match, make_block=Block)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_tensor_of_the_head_that_a_block_gets_past_its_arguments(by_keyword: bool) -> None:
    kept: dict[int, Tensor] = {}

    class Reading(Block):
        def forward(self, x: Tensor) -> Tensor:
            side, out = kept[threading.get_ident()], super().forward(x)
            return torch.add(out, other=side) if by_keyword else out + side

    def step(layers: Any, hidden: Tensor) -> Any:
        kept[threading.get_ident()] = torch.sigmoid(hidden)
        return _through(layers, hidden)

    match = r"Code outside the blocks made a tensor that block 'layers\.0' gets by another way"
    _refused(step, CaptureError, match, make_block=Reading)


def test_a_constant_that_blocks_share_past_their_arguments() -> None:
    kept: dict[str, Tensor] = {}
    module = Regressor(make_block=lambda: Smuggling(kept, constant=True))
    module.head.weight.data.mul_(2)
    batches = regression_batches(3)
    plain_step(module, batches)  # the first call of the first block does without
    plain = plain_step(module, batches)
    with engine_for(module, num_workers=2, num_microbatches=3) as engine:
        assert not differences(module, mean_step(engine, batches), plain)
        kept.clear()
        with pytest.warns(ChangedRecomputeWarning, match=r"'layers\.0' gave other values"):
            mean_step(engine, batches)
        assert not differences(module, mean_step(engine, batches), plain)


def test_an_argument_that_is_written_into_after_its_block() -> None:
    class Scaled(Block):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * scale

    def step(layers: Any, hidden: Tensor) -> Any:
        scale = torch.ones(())
        for layer in layers:
            hidden = layer(hidden, scale)
            scale += 1
        return hidden

    match = r"that block 'layers\.\d' was given has been written into since"
    _refused(step, CaptureError, match, make_block=Scaled)


def test_a_gradient_that_user_code_asks_for_across_the_blocks() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        hidden = view.head(batch[0])
        output = view.tail(view.run_blocks(hidden)).squeeze(-1)
        (gradient,) = torch.autograd.grad(
            output.sum(), hidden, create_graph=True, allow_unused=True
        )
        return output.mean() + gradient.square().mean()

    with pytest.raises(CaptureError, match=r"torch\.autograd\.grad.*through blocks"):
        _outputs(call)


def test_a_gradient_that_user_code_asks_for_after_the_blocks() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        hidden = view.run_blocks(view.head(batch[0])) * 1
        output = view.tail(hidden).squeeze(-1)
        (gradient,) = torch.autograd.grad(output.square().sum(), hidden, create_graph=True)
        return functional.mse_loss(output, batch[1]) + gradient.square().mean()

    module = Regressor()
    check_parity(module, call=call)


def test_parameters_replaced_while_the_engine_is_open() -> None:
    module = Regressor()
    batches = regression_batches(3)
    values = {name: value.clone() for name, value in module.state_dict().items()}
    with engine_for(module, num_workers=2, num_microbatches=3) as engine:
        module.load_state_dict(values)
        mean_step(engine, batches)
        module.load_state_dict(values, assign=True)
        for run in (
            lambda: mean_step(engine, batches),
            lambda: engine.evaluate(lambda view, b: view(b[0]), batches[0]),
        ):
            with pytest.raises(ConfigurationError, match=r"norm\.weight.*assign=True"):
                run()


# ------------------------------------------------------------------------------- losses and batches


def _outputs(call: Callable[[Any, Any, int], Any], scales: list[float] | None = None) -> Any:
    module = Regressor()
    with engine_for(module, num_workers=2, num_microbatches=3) as engine:
        scales = scales or [1.0] * 3
        return module, mean_step(engine, regression_batches(3), call=call, loss_scales=scales)


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


def test_as_many_microbatches_and_scales_as_planned() -> None:
    module = Regressor()
    with engine_for(module, num_workers=2, num_microbatches=3) as engine:
        for num, scales in ((2, [1.0] * 3), (3, [1.0] * 2), (4, [1.0] * 4)):
            with pytest.raises(BatchError, match="plan of 3 microbatches"):
                mean_step(engine, regression_batches(num), loss_scales=scales)


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
        mean_step(engine, regression_batches(3), plan=other)


def test_another_plan_of_the_same_engine() -> None:
    module = Regressor()
    stack = layers_of(module)
    with engine_for(module, num_microbatches=3) as engine:
        for num in (3, 5, 1, 5, 3):
            batches = regression_batches(num)
            result = mean_step(engine, batches, plan=plan_of(stack, num_microbatches=num))
            assert not differences(module, result, plain_step(module, batches))


def test_a_stack_must_have_distinct_blocks() -> None:
    block = Block()
    with pytest.raises(ConfigurationError, match="occurs twice"):
        stack_of((block, block))
    with pytest.raises(ConfigurationError, match="at least one"):
        stack_of(())


def test_an_engine_that_fails_to_open_gives_page_locked_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = Regressor()
    devices = emulated_workers(2)
    locked: set[int] = set()
    for device in devices:
        monkeypatch.setattr(device, "pin", lambda buffer: locked.add(buffer.data_ptr()))
        monkeypatch.setattr(device, "unpin", lambda buffer: locked.discard(buffer.data_ptr()))

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        assert locked
        raise PlannedError("no thread can be started")

    monkeypatch.setattr("roundpipe_lightning.engine.engine.Transfers.__init__", fail)
    with (
        pytest.raises(PlannedError),
        engine_for(module, num_microbatches=2, devices=devices),
    ):
        pass
    assert not locked
