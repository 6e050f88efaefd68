from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundpipe_lightning.engine.chain.chain import BlockStack, Chain
from roundpipe_lightning.engine.steps import StepResult
from roundpipe_lightning.errors import PlanError
from roundpipe_lightning.planning.model.profile import BlockProfile, ModelProfile
from roundpipe_lightning.planning.schedule.plan import Plan
from tests.kit.engine import (
    WIDTH,
    Block,
    Plain,
    Regressor,
    Step,
    differences,
    emulated_workers,
    engine_for,
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
from tests.kit.plans import default_plan


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.cross = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        return self.block(x) + torch.tanh(self.cross(states))  # type: ignore[no-any-return]


class EncoderDecoder(nn.Module):
    """The encoder's states reach every block of the decoder; one embedding serves three times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.ModuleList(Pair() for _ in range(4))
        self.tail = nn.Linear(WIDTH, 1)

    @property
    def stacks(self) -> tuple[BlockStack, ...]:
        return (
            stack_of(tuple(self.encoder), name="encoder"),
            stack_of(tuple(self.decoder), name="decoder"),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.embed(x)
        for block in self.encoder:
            hidden = block(hidden)
        states = self.norm(hidden)
        hidden = self.embed(x.flip(0))
        for block in self.decoder:
            hidden = block(hidden, states)
        hidden = functional.linear(hidden, self.embed.weight)
        return functional.mse_loss(self.tail(hidden).squeeze(-1), y)


def plan_for(chain: Chain, *, num_workers: int, num_microbatches: int) -> Plan:
    blocks = tuple(
        BlockProfile(name=link.name, forward_seconds=1, backward_seconds=2 * link.backward)
        for link in chain.links
    )
    profile = ModelProfile(blocks=blocks, fingerprint="tiny", cuts=chain.cuts)
    return default_plan(profile, num_workers=num_workers, num_microbatches=num_microbatches)


def check(
    make: Callable[[], tuple[nn.Module, Sequence[BlockStack]]],
    *,
    names: Sequence[str],
    call: Step = training_step,
    tolerance: float = 0.0,
    emulated_tolerance: float = 1e-6,
    main: int = 0,
    cuts: Sequence[int] | None = None,
) -> None:
    """Compare with a plain loop: unplanned, then planned, on several numbers of workers.

    Args:
        make: Makes the module and its stacks.
        names: What the chain is to consist of.
        call: The user's step.
        tolerance: 0 for equality to the bit.
        emulated_tolerance: The same on emulated devices, where rounds are summed first.
        main: The stack that the first step has a plan for.
        cuts: Where the chain is to be cut.
    """
    for num_workers, num_microbatches in ((1, 1), (2, 2), (3, 4)):
        for emulated in (False, True):
            if emulated and num_microbatches < 4:
                continue
            module, stacks = make()
            batches = regression_batches(num_microbatches)
            plain = plain_step(module, batches, call=call)
            first = Chain.from_stacks([stacks[main]])
            counts: Any = {"num_workers": num_workers, "num_microbatches": num_microbatches}
            devices = emulated_workers(num_workers) if emulated else None
            plan = plan_for(first, **counts)
            with engine_of(module, stacks, plan, devices=devices, chain=first) as engine:
                limit = max(tolerance, emulated_tolerance) if emulated else tolerance
                result = mean_step(engine, batches, call=call)
                assert not differences(module, result, plain, tolerance=limit)
                assert list(result.chain.names) == list(names)
                if cuts is not None:
                    assert list(result.chain.cuts) == list(cuts)
                for make_plan in (plan_for, plan_of)[emulated:]:
                    planned = result.chain
                    engine.plan_for(planned, make_plan(planned, **counts))
                    second = mean_step(engine, batches, call=call)
                    assert not differences(module, second, plain, tolerance=limit)
                    assert not second.num_streamed
                    assert second.chain == planned


def encoder_decoder() -> tuple[nn.Module, Sequence[BlockStack]]:
    module = EncoderDecoder()
    return module, module.stacks


ENCODER = [f"encoder.{i}" for i in range(3)]
DECODER = [f"decoder.{i}" for i in range(4)]


@pytest.mark.suite("1")
@pytest.mark.parametrize("main", [0, 1])
def test_an_encoder_and_a_decoder(main: int) -> None:
    check(encoder_decoder, names=ENCODER + DECODER, main=main, cuts=[3])


def regressor() -> tuple[Any, Sequence[BlockStack]]:
    module = Regressor(3)
    return module, [layers_of(module)]


LAYERS = [f"layers.{i}" for i in range(3)]


def again(names: Sequence[str], number: int = 2) -> list[str]:
    return [f"{name}#{number}" for name in names]


def test_a_stack_that_runs_twice_with_gradients() -> None:
    """Contrastive pairs: both branches train the same weights."""

    def call(view: Any, batch: Any, index: int) -> Any:
        x, y = batch
        first, second = view(x), view(x * 0.5 + 1)
        return functional.mse_loss(first, y) + (first * second.sin()).mean()

    check(regressor, names=LAYERS + again(LAYERS), call=call, cuts=[3])


def test_the_second_run_takes_the_first_ones_output() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        x, y = batch
        hidden = view.run_blocks(view.head(x))
        hidden = view.run_blocks(torch.tanh(hidden) + view.head(x))
        return functional.mse_loss(view.tail(hidden).squeeze(-1), y)

    check(regressor, names=LAYERS + again(LAYERS), call=call, cuts=[3])


@pytest.mark.suite("reference first")
@pytest.mark.parametrize("order", ["reference first", "reference last"])
def test_a_reference_without_gradients(order: str) -> None:
    """DPO with the same weights as reference."""

    def call(view: Any, batch: Any, index: int) -> Any:
        x, y = batch
        if order == "reference first":
            with torch.no_grad():
                reference = view(x)
            policy = view(x)
        else:
            policy = view(x)
            with torch.no_grad():
                reference = view(x)
        return functional.mse_loss(policy, y) + (policy - reference * 0.9).sigmoid().mean()

    check(regressor, names=LAYERS + again(LAYERS), call=call)


class Distilled(nn.Module):
    def __init__(self, *, teacher_first: bool) -> None:
        super().__init__()
        self.teacher, self.student = Regressor(2), Regressor(3)
        self.teacher.requires_grad_(False)
        self.teacher.head.weight.data.add_(0.1)
        self.teacher_first = teacher_first

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.teacher_first:
            wanted, found = self.teacher(x), self.student(x)
        else:
            found, wanted = self.student(x), self.teacher(x)
        return functional.mse_loss(found, y) + functional.mse_loss(found, wanted)


@pytest.mark.parametrize("teacher_first", [True, False])
def test_a_frozen_teacher(teacher_first: bool) -> None:
    """Gradients are enabled for it, but nothing in it needs one."""

    def make() -> tuple[nn.Module, Sequence[BlockStack]]:
        module = Distilled(teacher_first=teacher_first)
        return module, [
            stack_of(tuple(module.student.layers), name="student"),
            stack_of(tuple(module.teacher.layers), name="teacher"),
        ]

    teacher, student = ["teacher.0", "teacher.1"], [f"student.{i}" for i in range(3)]
    check(make, names=teacher + student if teacher_first else student + teacher)


def test_glue_between_blocks_is_a_cut() -> None:
    class Scaled(Regressor):
        def __init__(self) -> None:
            super().__init__(4)
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

        def run_blocks(self, hidden: Tensor) -> Tensor:
            kept = hidden
            for index, layer in enumerate(self.layers):
                hidden = layer(hidden)
                if index in (1, 2):
                    kept = kept + hidden  # of the segment before, beside what begins the next
                    hidden = hidden * self.scale + kept
            return hidden

    def make() -> tuple[nn.Module, Sequence[BlockStack]]:
        module = Scaled()
        return module, [layers_of(module)]

    check(make, names=[f"layers.{i}" for i in range(4)], cuts=[2, 3])


GLUE: dict[str, Callable[[Tensor], Any]] = {
    "addition": lambda h: h + 1,
    "indexing": lambda h: h[:2],
    "number": lambda h: (h, h.sum().item())[0],
    "function": lambda h: functional.layer_norm(h, (WIDTH,)),
    "clone": torch.clone,
    "branch": lambda h: h if bool((h > 100).any()) else h * 2,
    "detached": lambda h: h.detach(),
    "mixed": lambda h: h + h.detach().mean() + h.norm().item(),
}


@pytest.mark.suite("mixed", "detached", "branch", "indexing")
@pytest.mark.parametrize("kind", GLUE)
def test_kinds_of_glue(kind: str) -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        hidden, kept = view.head(batch[0]), []
        for number, layer in enumerate(view.layers):
            hidden = layer(hidden)
            kept.append(hidden)
            if number == 1:
                hidden = GLUE[kind](hidden)
        output = view.tail(hidden).squeeze(-1)
        loss: Tensor = (output - batch[1][: len(output)]).square().mean()
        return loss + kept[0].square().mean() + kept[1].sin().mean()

    check(regressor, names=LAYERS, call=call)


def test_blocks_out_of_order_and_repeated() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        hidden = view.head(batch[0])
        for number in (2, 0, 0, 1, 2):
            hidden = view.layers[number](hidden)
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    names = ["layers.2", "layers.0", "layers.0#2", "layers.1", "layers.2#2"]
    check(regressor, names=names, call=call)


def _steps(call: Step, num_microbatches: int = 3) -> tuple[StepResult, Any, Plain]:
    module, stacks = regressor()
    batches = regression_batches(num_microbatches)
    plain = plain_step(module, batches, call=call)
    chain = Chain.from_stacks(stacks)
    plan = plan_of(chain, num_workers=2, num_microbatches=num_microbatches)
    return engine_step(module, stacks, plan, batches, call=call), module, plain


def test_a_block_that_some_microbatches_skip_or_repeat() -> None:
    orders = [[0, 1, 2], [0, 2], [0, 1, 1, 2], [1], []]

    def call(view: Any, batch: Any, index: int) -> Any:
        hidden = view.head(batch[0])
        for number in orders[index]:
            hidden = view.layers[number](hidden)
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    result, module, plain = _steps(call, num_microbatches=5)
    assert not differences(module, result, plain, tolerance=1e-6)
    assert result.num_streamed == 1  # the repeated one


def test_a_first_stack_that_is_not_called() -> None:
    """A tower, in a batch without images: its turns pass, and the next plan is without it."""

    def call(view: Any, batch: Any, index: int) -> Any:
        hidden = view.embed(batch[0])
        for block in view.decoder:
            hidden = block(hidden, batch[0])
        return functional.mse_loss(view.tail(hidden).squeeze(-1), batch[1])

    module, batches = EncoderDecoder(), regression_batches(2)
    plain = plain_step(module, batches, call=call)
    chain = Chain.from_stacks(module.stacks)
    counts: dict[str, Any] = {"num_workers": 2, "num_microbatches": 2}
    plan = plan_for(chain, **counts)
    with engine_of(module, module.stacks, plan, chain=chain) as engine:
        for _ in range(2):
            result = mean_step(engine, batches, call=call)
            assert not differences(module, result, plain)
            assert not result.num_streamed
            assert (result.chain.names, result.chain.cuts) == (tuple(DECODER), ())
            assert set(result.chain.others) == set(module.encoder)
            engine.plan_for(result.chain, plan_for(result.chain, **counts))


def test_a_reference_that_one_microbatch_needs() -> None:
    def call(view: Any, batch: Any, index: int) -> Any:
        loss: Tensor = functional.mse_loss(view(batch[0]), batch[1])
        return loss + view(batch[0] + 1).square().mean() if index == 1 else loss

    result, module, plain = _steps(call)
    assert not differences(module, result, plain, tolerance=1e-6)
    assert result.num_streamed == 3


class Switched(Block):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return hidden + self.adapter(x) if self.enabled else hidden


@pytest.mark.suite("gradients")
@pytest.mark.parametrize("mode", ["no gradients", "gradients"])
def test_a_switch_that_holds_for_one_call(mode: str) -> None:
    """Each microbatch turns it off and on while others run, and recomputes with what it was."""

    def make() -> tuple[nn.Module, Sequence[BlockStack]]:
        module = Regressor(3, make_block=Switched)
        return module, [layers_of(module)]

    def call(view: Any, batch: Any, index: int) -> Any:
        x, y = batch
        for layer in view.layers:
            layer.enabled = False
        with torch.set_grad_enabled(mode == "gradients"):
            reference = view(x)
        for layer in view.layers:
            layer.enabled = True
        return functional.mse_loss(view(x), y) + (view(x + 1) * reference).mean()

    check(make, names=LAYERS + again(LAYERS) + again(LAYERS, 3), call=call)


def test_what_a_switch_is_left_at_reaches_the_module() -> None:
    module = Regressor(3, make_block=Switched)
    seen: list[bool] = []

    def call(view: Any, batch: Any, index: int) -> Any:
        seen.append(view.layers[0].enabled)
        view.layers[0].enabled = False
        view.layers[1].enabled = False
        view.layers[1].enabled = True
        return training_step(view, batch, index)

    with engine_for(module) as engine:
        mean_step(engine, regression_batches(3), call=call)
    assert [layer.enabled for layer in module.layers] == [False, True, True]


def test_a_worker_never_holds_more_than_its_stage_and_a_streamed_block() -> None:
    module = EncoderDecoder()
    block = {b: sum(p.nbytes for p in b.parameters()) for s in module.stacks for b in s.blocks}
    first = Chain.from_stacks([module.stacks[1]])
    segments = (module.embed, module.norm, module.tail)
    outside = sum(p.nbytes for m in segments for p in m.parameters())
    values = 4096  # boundaries of a few samples
    largest = max(block.values())
    batches = regression_batches(2)
    plan = plan_of(first, num_workers=3, num_microbatches=2)
    devices = emulated_workers(3)
    with engine_of(module, module.stacks, plan, devices=devices, chain=first) as engine:
        for _ in range(2):
            result = mean_step(engine, batches)
            with torch.no_grad():
                engine.evaluate(lambda view, b: view.training_step(b, 0), batches[0])
            for worker in engine.workers:
                # Two slots, gradients that are downloaded, and what is streamed.
                assert 0 < worker.peak_bytes() <= 4 * largest + outside + values
                assert worker.peak_bytes() < sum(block.values())
            planned = plan_of(result.chain, num_workers=3, num_microbatches=2)
            engine.plan_for(result.chain, planned)


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def test_buffers_of_a_block_that_runs_twice() -> None:
    module = Regressor(2, make_block=Counting)
    stack, batches = layers_of(module), regression_batches(1)

    def call(view: Any, batch: Any, index: int) -> Any:
        x, y = batch
        return functional.mse_loss(view(x) * view(x + 1), y)

    chain = Chain.recorded([*Chain.from_stacks([stack]).links] * 2)
    plan = plan_of(chain, num_workers=2, num_microbatches=1)
    with engine_of(module, stack, plan, chain=chain) as engine:
        mean_step(engine, batches, call=call)
    assert module.layers[0].calls == 2


def test_a_chain_from_the_names_in_a_plan() -> None:
    stacks = EncoderDecoder().stacks
    names = [*ENCODER, *DECODER, *again(ENCODER)]
    chain = Chain.named(names, stacks)
    assert list(chain.names) == names
    assert chain.cuts == (3, 7)
    assert chain.links[0].block is chain.links[7].block
    with pytest.raises(PlanError, match=r"'other\.0'.*encoder, decoder"):
        Chain.named(["other.0"], stacks)
