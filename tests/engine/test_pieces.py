import copy
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from roundpipe_lightning.engine.chain.pieces import WholeBatchWarning
from roundpipe_lightning.engine.device.base import CpuDevice, Device
from roundpipe_lightning.engine.engine import Engine
from roundpipe_lightning.engine.steps import StepResult
from roundpipe_lightning.engine.worker.turns import Turns
from roundpipe_lightning.engine.worker.worker import Worker
from roundpipe_lightning.errors import CaptureError, ConfigurationError
from roundpipe_lightning.planning.schedule.schedule import Action
from roundpipe_lightning.planning.schedule.stages import Partition, Stage
from tests.kit.engine import (
    WIDTH,
    Block,
    Regressor,
    cpu_workers,
    emulated_workers,
    engine_for,
    mean_step,
)

ROWS = 7
JOINED: dict[str, Any] = {"joined": True, "step_seed": 0}


def batch_of(num_rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, WIDTH, generator=generator)
    return x, torch.randn(num_rows, generator=generator)


def check(
    module: Any,
    *,
    devices: Sequence[Device] | None = None,
    num_rows: int = ROWS,
    steps: int = 1,
    **plan: Any,
) -> StepResult:
    plan = {"num_workers": 2, "num_microbatches": 3, **plan}
    with engine_for(module, devices=devices, **plan) as engine:
        return compare(module, engine, num_rows=num_rows, steps=steps)


def compare(module: Any, engine: Engine, *, num_rows: int = ROWS, steps: int = 1) -> StepResult:
    batch = batch_of(num_rows)
    torch.manual_seed(3)
    twin = copy.deepcopy(module)  # blocks may write into buffers
    loss = twin.training_step(batch, 0)
    loss.backward()
    wanted = {name: p.grad for name, p in twin.named_parameters()}
    for _ in range(steps):
        torch.manual_seed(3)
        result = mean_step(engine, [batch], **JOINED)
    assert result.losses[0] is not None
    torch.testing.assert_close(result.losses[0], loss.detach())
    for name, parameter in module.named_parameters():
        got = result.gradients.get(parameter)
        assert (got is None) == (wanted[name] is None), name
        if got is not None:
            torch.testing.assert_close(got, wanted[name], atol=2e-5, rtol=1e-5, msg=name)
    torch.testing.assert_close(dict(module.named_buffers()), dict(twin.named_buffers()))
    return result


class Contrastive(Regressor):
    def embed(self, x: Tensor) -> Tensor:
        return functional.normalize(self.run_blocks(self.head(x)), dim=-1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one, other = self.embed(batch[0]), self.embed(-batch[0])
        logits = 3 * one @ other.T
        return functional.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


class Between(Regressor):
    """Code between the blocks mixes rows, and outputs of blocks are kept."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden, kept = self.head(batch[0]), []
        for layer in self.layers:
            hidden = layer(hidden)
            kept.append(hidden)
            hidden = hidden - hidden.mean(0)
        loss = functional.mse_loss(self.tail(hidden).squeeze(-1), batch[1])
        return loss + sum((some**2).sum() for some in kept)


class Summed(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return (self(x + torch.randn(len(x), WIDTH).to(x.device)) - y).square().sum()


class Shared(Regressor):
    """Blocks get a tensor that all rows share, and that needs a gradient."""

    def __init__(self) -> None:
        super().__init__(make_block=WithBias)
        self.bias = nn.Linear(1, WIDTH)

    def run_blocks(self, hidden: Tensor) -> Tensor:
        bias = self.bias(hidden.new_ones(1, 1))
        for layer in self.layers:
            hidden = layer(hidden, bias)
        return hidden


class WithBias(Block):
    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * bias


class Cached(Regressor):
    """Blocks put entries into an object that later ones are given, and code runs between them."""

    calls: Sequence[int] = (0, 1, 2, 3)

    def __init__(self) -> None:
        super().__init__(make_block=WithCache)
        vars(self.layers[0])["keeps"] = False

    def run_blocks(self, hidden: Tensor) -> Tensor:
        cache = SimpleNamespace()
        for number in self.calls:
            hidden = self.layers[number](hidden - hidden.mean(0), cache)
        return hidden


class WithCache(Block):
    keeps = True

    def forward(self, x: Tensor, cache: Any) -> Tensor:  # type: ignore[override]
        entry = 2 * x
        if self.keeps:
            setattr(cache, f"entry_{len(vars(cache))}", entry)
        return super().forward(x)


class TimeMajor(Regressor):
    """(time, rows, width): rows are the second dimension, and time steps depend on each other."""

    def __init__(self) -> None:
        super().__init__(make_block=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.stack([batch[0], -batch[0], batch[0] ** 2])
        return self(x).square().mean()


@pytest.mark.suite(
    "Regressor-cpu_workers",
    "Contrastive-cpu_workers",
    "Contrastive-emulated_workers",
    "Between-emulated_workers",
    "Summed-cpu_workers",
    "Shared-cpu_workers",
    "Cached-emulated_workers",
    "TimeMajor-emulated_workers",
)
@pytest.mark.parametrize("make_devices", [cpu_workers, emulated_workers])
@pytest.mark.parametrize(
    "make", [Regressor, Contrastive, Between, Summed, Shared, Cached, TimeMajor]
)
def test_step_equals_one_device(
    make: Callable[[], Any], make_devices: Callable[[int], list[Device]]
) -> None:
    check(make(), devices=make_devices(2), steps=2)


@pytest.mark.parametrize(
    ("num_pieces", "num_workers", "team_size"), [(1, 1, 1), (2, 1, 1), (4, 3, 1), (8, 2, 2)]
)
@pytest.mark.parametrize("num_rows", [1, 2, ROWS])
@pytest.mark.filterwarnings("ignore:Block .* is given one row")
def test_any_number_of_rows_pieces_and_workers(
    num_pieces: int, num_workers: int, team_size: int, num_rows: int
) -> None:
    check(
        Between(),
        num_rows=num_rows,
        num_microbatches=num_pieces,
        num_workers=num_workers,
        team_size=team_size,
    )


def test_who_has_not_the_turn_leaves_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece without rows passes by turns that others have."""
    owners: dict[int, int] = {}
    begin, end_forward = Turns.begin, Worker.end_forward

    def begin_and_note(turns: Turns, action: Action) -> None:
        begin(turns, action)
        owners[action.worker] = threading.get_ident()

    def end_by_owner(worker: Worker, stage: Stage) -> bool:
        assert owners[worker.index] == threading.get_ident()
        return end_forward(worker, stage)

    monkeypatch.setattr(Turns, "begin", begin_and_note)
    monkeypatch.setattr(Worker, "end_forward", end_by_owner)
    check(Between(), num_rows=2, num_microbatches=4)


def test_stages_that_user_code_interrupts() -> None:
    result = check(Between(), partition=Partition(forward=(2, 2), backward=(0, 3, 1)))
    assert result.num_streamed  # until a plan knows where


class IntoView(Regressor):
    """Blocks' outputs are added up in a view that was made before them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.head(batch[0])
        sums = hidden * 2
        part = sums[:, 1:]
        for layer in self.layers:
            hidden = layer(hidden)
            part += hidden[:, 1:]
        return functional.mse_loss(self.tail(hidden).squeeze(-1), batch[1]) + sums.square().mean()


def test_gradients_that_come_through_a_later_segment_alone() -> None:
    check(IntoView(), partition=Partition.parse("forward 1 1 1 | backward 1 1 1 1"))


class KeepsScale(Block):
    """Updates a buffer with the mean of what it gets, and divides by it."""

    scale: Tensor

    def __init__(self, *, assigns: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.assigns, self.calls = assigns, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            if self.assigns:
                self.scale = 0.9 * self.scale + 0.1 * x.abs().mean()
            else:
                self.scale.mul_(0.9).add_(0.1 * x.abs().mean())
        return super().forward(self.calls * x / self.scale.clone())


class AddsMean(Block):
    """Adds the mean over rows times a weight that begins at zero."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(0)
        return super().forward(x) + (self.gate * mean if self.gate.dim() < 2 else self.gate @ mean)


class Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: None)


class Counted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH, scale_grad_by_freq=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table((x[..., 0] > 0).long()))


BUFFERS = "buffers.*GroupNorm"


@pytest.mark.parametrize(
    ("make_block", "reason"),
    [
        (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)), BUFFERS),
        (AddsMean, "other rows.*trust_rows=True"),
        (partial(AddsMean, WIDTH, WIDTH), "other rows"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Centred()), "other rows"),
        (KeepsScale, "buffers"),
        (partial(KeepsScale, assigns=True), "buffers"),
        (lambda: KeepsMean(None), "other rows"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Capacity()), "other rows"),
        (lambda: Branches(one_is_large), "other rows"),
        (lambda: Branches(lambda x: x.sum() > 200), "other rows"),
        (lambda: Branches(lambda x: x.sum() < -200), "other rows"),
        (lambda: Branches(mean_of_signs_is_large), "takes a number"),
        (lambda: Branches(lambda x: len(x) > ROWS - 2), "other rows"),
        (Counted, "how often it is used"),
        (Hooked, "hook.*microbatching='step'"),
    ],
)
def test_blocks_that_mix_rows_run_on_the_whole_batch(
    make_block: Callable[[], nn.Module], reason: str
) -> None:
    with pytest.warns(WholeBatchWarning, match=f"'layers.0' runs on the whole batch.*{reason}"):
        check(Regressor(make_block=make_block))


def first_row(x: Tensor) -> Tensor:
    return torch.cat([2 * x[:1], x[1:]])


def last_row(x: Tensor) -> Tensor:
    return torch.cat([x[:-1], 2 * x[-1:]])


def row_before(x: Tensor) -> Tensor:
    return x + x.roll(1, 0)


def with_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x + gate * x.mean(0)


class Odd(Block):
    """Treats rows in an odd way in one layer, and apart from each other in those before it."""

    gate: Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.num_rows: list[int] = []
        self.register_buffer("gate", torch.full((), float(kind != "no gate")))

    def forward(self, x: Tensor) -> Tensor:
        self.num_rows.append(len(x))
        kinds = {"first row": first_row, "last row": last_row, "row before": row_before}
        x = super().forward(x)
        x = with_gate(x, self.gate) if self.kind in ("gate", "no gate") else self.gate * x
        if self.kind in ("capacity", "room for all"):
            place = (x.sum(1, keepdim=True) > 0).cumsum(0)
            x = x * (place <= (2 if self.kind == "capacity" else 100))
        if self.kind in ("gradients", "gradients of its own"):
            x = (Normalised if self.kind == "gradients" else Straight).apply(x)  # type: ignore[no-untyped-call]
        if self.kind == "mean":
            self.mean = x.mean()
        if self.kind == "batch norm":
            x = functional.batch_norm(x, None, None, training=True)
        return kinds.get(self.kind, nn.Identity())(x)


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        ("first row", "other rows"),
        ("last row", "other rows"),
        ("row before", "other rows"),
        ("capacity, room for all", "other rows"),
        ("gate, no gate", "other rows"),
        ("batch norm", "other rows"),
        ("mean", "other rows"),
        ("gradients, gradients of its own", "gradients that it makes itself"),
    ],
)
def test_one_layer_that_mixes_rows_is_found_among_others(kinds: str, reason: str) -> None:
    odd, *others = kinds.split(", ")
    layers = iter([*(others or [""]) * 3, odd])
    module = Regressor(make_block=lambda: Odd(next(layers)))
    with pytest.warns(WholeBatchWarning, match=f"'layers.3' runs on the whole batch.*{reason}"):
        check(module)


def test_layers_like_one_that_was_compared_run_on_fewer_rows() -> None:
    module = Regressor(make_block=lambda: Odd(""))
    check(module)
    layers: Any = module.layers
    tried = [layer.num_rows[:4] for layer in layers]
    assert tried == [[5, 3, 2, 5]] + 3 * [[5, 3, 3, 2]]  # then come passes of pieces


def test_a_block_that_puts_tensors_into_a_list_is_refused() -> None:
    kept: list[Tensor] = []
    message = r"'layers\.0' puts tensors of the batch into a list.*num_microbatches=1"
    with pytest.raises(CaptureError, match=message):
        check(Regressor(make_block=lambda: KeepsMean(kept)))


def test_what_a_device_still_works_on_is_not_taken_for_kept() -> None:
    kept: list[Tensor] = []

    class Works(CpuDevice):
        def synchronize(self) -> None:
            kept.clear()

    check(Regressor(make_block=lambda: KeepsMean(kept)), devices=[Works(0), Works(1)])


class Leaves(Block):
    """Leaves what it computes with in an attribute, as layers leave attention weights."""

    def forward(self, x: Tensor) -> Tensor:
        self.weights = torch.softmax(2 * x, dim=-1)
        return super().forward(x * self.weights)


class UsesWhatIsLeft(Regressor):
    """Adds what blocks leave to the loss: through the next block, of all rows, and at the end."""

    def __init__(self) -> None:
        super().__init__(make_block=Leaves)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        kept: Any = [layer.weights for layer in self.layers]
        spread = sum((some - some.mean(0)).square().sum() for some in kept[1:])
        self.last = kept[-1].detach().cpu()
        return loss + spread


@pytest.mark.parametrize("make_devices", [cpu_workers, emulated_workers])
@pytest.mark.filterwarnings("error")
def test_tensors_that_blocks_leave_in_attributes_are_joined(make_devices: Any) -> None:
    module = UsesWhatIsLeft()
    check(module, devices=make_devices(2), steps=2)
    twin = copy.deepcopy(module)
    twin.training_step(batch_of(), 0)
    torch.testing.assert_close(module.last, twin.last)
    for one, other in zip(module.layers, twin.layers, strict=True):
        weights: Any = other.weights
        torch.testing.assert_close(one.weights, weights.detach())


class SharesMask(Regressor):
    """Its blocks attend with a mask of as many tokens as there are rows."""

    def __init__(self) -> None:
        super().__init__(
            make_block=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = torch.stack([batch[0] * k for k in range(1, 1 + len(batch[0]))], 1)
        hidden = self.head(x)
        mask = nn.Transformer.generate_square_subsequent_mask(len(batch[0])).to(x.device)
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return self.tail(hidden).square().mean()


@pytest.mark.filterwarnings("error::roundpipe_lightning.engine.chain.pieces.WholeBatchWarning")
def test_a_mask_of_as_many_tokens_as_rows_is_shared() -> None:
    check(SharesMask())


class Loudest(Block):
    """Doubles the row that is largest: of one row its tokens could be taken for rows."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.flatten(1).norm(dim=1)
        factors: Tensor = 1 + (size == size.max()).to(x)
        return super().forward(x) * factors[:, None, None]


class OfTwoTokens(Regressor):
    """The largest row is so by either token."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0] * torch.arange(1, 1 + len(batch[0])).to(batch[0])[:, None] ** 2
        return self(torch.stack([x, -x], 1)).square().mean()


@pytest.mark.parametrize(
    ("limit", "first", "then"), [(ROWS - 2, 3, ROWS), (1, ROWS, 3)], ids=["larger", "smaller"]
)
def test_a_batch_of_other_size_is_compared_once_more(limit: int, first: int, then: int) -> None:
    module = Regressor(make_block=lambda: Branches(lambda x: len(x) > limit))
    with engine_for(module, num_workers=2, num_microbatches=3) as engine:
        compare(module, engine, num_rows=first)
        with pytest.warns(WholeBatchWarning, match="other rows"):
            compare(module, engine, num_rows=then)


@pytest.mark.filterwarnings("ignore:Block .* is given one row")
def test_a_batch_of_one_row_says_nothing_of_larger_ones() -> None:
    module = OfTwoTokens(make_block=Loudest)
    with engine_for(module, num_workers=2, num_microbatches=4) as engine:
        compare(module, engine, num_rows=1)
        with pytest.warns(WholeBatchWarning, match="other rows"):
            compare(module, engine, num_rows=4)


class Doubles(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(2 * len(x), WIDTH)


class Folded(Regressor):
    def run_blocks(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden).unflatten(0, (len(hidden), 2)).sum(1)
        return hidden


def test_a_block_that_gives_several_rows_for_each_runs_on_the_whole_batch() -> None:
    with pytest.warns(WholeBatchWarning, match="another number of rows"):
        check(Folded(make_block=lambda: Doubles(WIDTH, 2 * WIDTH)))


class Normalised(torch.autograd.Function):
    """Its gradient depends on all rows."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient / gradient.norm()


class Straight(torch.autograd.Function):
    """Its gradient is a row's own."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round(decimals=1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class OwnGradients(Block):
    """Gradients of rows, or of a weight, are made by code of the user's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = (Straight if self.kind == "rows alone" else Normalised).apply
        if self.kind == "hooks on what is saved":
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t - t.mean(0), lambda t: t):
                return super().forward(x * self.scale)
        x = super().forward(x) * (apply(self.scale) if self.kind == "a weight" else self.scale)
        if self.kind == "a hook" and x.requires_grad:
            x.register_hook(lambda gradient: gradient / gradient.norm())
        return apply(x) if self.kind in ("rows", "rows alone") else x


@pytest.mark.parametrize("kind", ["rows", "a weight", "a hook", "hooks on what is saved"])
def test_blocks_whose_gradients_mix_rows_run_on_the_whole_batch(kind: str) -> None:
    with pytest.warns(WholeBatchWarning, match=r"gradients that it makes itself .*trust_rows"):
        check(Regressor(make_block=lambda: OwnGradients(kind)))


def test_gradients_of_a_block_s_own_may_keep_rows_apart() -> None:
    check(Regressor(make_block=lambda: OwnGradients("rows alone")))


class Pseudo(Regressor):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.inference_mode():
            wanted = self(batch[0])
        return functional.mse_loss(self(batch[0] + 0.1), wanted.clone() + batch[1])


def test_a_pass_in_inference_mode() -> None:
    check(Pseudo())


class Copies(Regressor):
    """Copies modules, and calls the copies in ways that do not pass through blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.head(batch[0])
        block, tail = copy.deepcopy(self.layers[0]), copy.deepcopy(self.tail)
        weights = {name: 0.9 * p for name, p in self.layers[0].named_parameters()}
        hidden = torch.func.functional_call(block, weights, (hidden,))

        def square(row: Tensor) -> Any:
            return self.tail(tail(block(row)).expand(WIDTH)).square().sum()

        slopes = torch.func.vmap(torch.func.grad(square))(hidden)
        output = self.tail(self.run_blocks(hidden)).squeeze(-1)
        return functional.mse_loss(output, batch[1]) + slopes.square().mean()


@pytest.mark.parametrize("make_devices", [emulated_workers, cpu_workers])
def test_copies_of_blocks_run_outside_of_them(make_devices: Any) -> None:
    check(Copies(), devices=make_devices(2))


def _functional(module: Any, x: Tensor) -> Any:
    weights = {name: 0.9 * p for name, p in module.layers.named_parameters(prefix="layers")}
    return torch.func.functional_call(module, weights, (x,))


def _swapped(module: Any, x: Tensor) -> Any:
    module.layers[1].norm = nn.Identity()
    return module(x)


def _per_row(module: Any, x: Tensor) -> Any:
    return torch.func.vmap(torch.func.grad(lambda row: module(row).sum()))(x).sum(1)


def _forward_gradient(module: Any, x: Tensor) -> Any:
    return sum(torch.func.jvp(module, (x,), (x,)))


def _dual(module: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(x, x))).primal


def _without_head(module: Any, x: Tensor) -> Any:
    module.tail = nn.Linear(WIDTH, 1)
    return module(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_functional, r"'layers\.0' is called with other parameters.*copy\.deepcopy"),
        (_swapped, r"'layers\.1' is called with other parameters"),
        (_per_row, r"'layers\.0' is called inside a transform.*copy\.deepcopy"),
        (_forward_gradient, "inside a transform"),
        (_dual, "inside a transform"),
        (_without_head, "replaced a module or a parameter of Regressor.*in a hook"),
    ],
)
def test_what_does_not_reach_into_blocks_is_refused(call: Any, message: str) -> None:
    module = Regressor()

    def step(view: Any, batch: Any, index: int) -> Any:
        return functional.mse_loss(call(view, batch[0]), batch[1])

    # Transforms do not know of emulated tensors, nor do graphs.
    with (
        engine_for(module, devices=[CpuDevice(0), CpuDevice(1)], num_microbatches=3) as engine,
        pytest.raises((CaptureError, ConfigurationError), match=message),
    ):
        mean_step(engine, [batch_of()], call=step, **JOINED)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_tracing_a_step_says_what_to_do() -> None:
    class Conditional(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return torch.cond(loss > 0, torch.sin, torch.cos, (loss,))

    with pytest.raises(Exception, match=r"torch\.cond as an `if`"):
        check(Conditional(), devices=[CpuDevice(0), CpuDevice(1)])


def test_hooks_on_saved_tensors_around_blocks() -> None:
    class Saves(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match="see none of the blocks'.*in a block's forward"):
        check(Saves())


class Skips(Regressor):
    """Does not call all of its blocks at first; None stands for code that mixes rows."""

    calls: Sequence[int | None] = ()

    def run_blocks(self, hidden: Tensor) -> Tensor:
        for number in self.calls:
            hidden = hidden - hidden.mean(0) if number is None else self.layers[number](hidden)
        return hidden


@pytest.mark.parametrize(
    ("make_devices", "mixer"),
    [(cpu_workers, None), (emulated_workers, None), (emulated_workers, 2)],
)
@pytest.mark.parametrize(
    "steps",
    [
        [(0,), (0, 1, 2), (0, 1, 2, 3)],
        [(0, 1), (0, 1, 2, 3)],  # in the middle of a BACKWARD stage
        [(2, 2, 1, 3), (3, None), (0, 1, 3)],
        [(0, None, 1, None, 2, 3), (0, 1, 2, 3, None)],
        [(1, None, 2, None, 3)],  # streamed ones between two of a stage
    ],
)
@pytest.mark.filterwarnings("ignore::roundpipe_lightning.engine.chain.pieces.WholeBatchWarning")
def test_calls_that_a_later_step_makes_first(
    steps: Sequence[Sequence[int | None]], make_devices: Any, mixer: int | None
) -> None:
    module, stages = Skips(), Partition(forward=(2, 2), backward=(0, 3, 1))
    if mixer is not None:
        module.layers[mixer] = nn.Sequential(nn.Linear(WIDTH, WIDTH), Centred())
    plan: dict[str, Any] = {"num_workers": 2, "num_microbatches": 3, "partition": stages}
    with engine_for(module, devices=make_devices(2), **plan) as engine:
        for module.calls in steps:
            compare(module, engine)


def test_blocks_in_another_order_are_given_an_object_with_entries() -> None:
    module, stages = Cached(), Partition(forward=(2, 2), backward=(0, 3, 1))
    with engine_for(module, num_workers=2, num_microbatches=3, partition=stages) as engine:
        for module.calls in ((0, 2, 1, 3), (0, 2, 1, 3), (0, 1, 2, 3)):
            compare(module, engine)


class WritesMask(Shared):
    """Writes into what a block was given, before other pieces have seen it."""

    writes = True

    def run_blocks(self, hidden: Tensor) -> Tensor:
        bias = torch.ones_like(hidden)
        for layer in self.layers:
            hidden = layer(hidden, bias)
            if self.writes:
                bias.mul_(2)
        return hidden


@pytest.mark.parametrize("backward", [False, True])
def test_what_a_block_was_given_is_not_written_into_before_pieces_read_it(backward: bool) -> None:
    module, stages = WritesMask(), Partition(forward=(2, 2), backward=(0, 3, 1))
    step = {**JOINED, "backward": backward}
    # A piece that runs meanwhile sees it as its own block's doing.
    refused = r"'layers\.0' (was given has been written into|writes into a tensor)"
    with engine_for(module, num_workers=2, num_microbatches=3, partition=stages) as engine:
        with pytest.raises(CaptureError, match=refused):
            mean_step(engine, [batch_of()], **step)
        module.writes = False  # the engine goes on after a step that has failed
        assert mean_step(engine, [batch_of()], **step).losses[0] is not None


class KeepsMean(Block):
    """Keeps a mean of the batch, the same for any rows at first."""

    def __init__(self, kept: list[Tensor] | None) -> None:
        super().__init__()
        self.kept, self.mean = kept, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        mean = (0 * x).mean()
        if self.kept is None:
            self.mean = mean
        else:
            self.kept.append(mean)
        return super().forward(x)


class Capacity(nn.Module):
    """Drops rows of one sign beyond the half of all, which a few rows need not reach."""

    def forward(self, x: Tensor) -> Tensor:
        sign = x.sum(1, keepdim=True) > 0
        place = torch.where(sign, sign.cumsum(0), (~sign).cumsum(0))
        return (x * (place <= max(2, len(x) // 2))).view(len(x), -1)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Branches(Block):
    """Doubles all rows where something holds for them: for none here."""

    def __init__(self, holds: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.holds = holds

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return 2 * x if self.holds(x.detach()) else x


def one_is_large(x: Tensor) -> Tensor:
    return x.abs().max() > 50


def mean_of_signs_is_large(x: Tensor) -> bool:
    return float(x.sign().mean()) > 1


def test_a_hook_sees_the_gradient_of_a_block_that_hands_back_what_it_got() -> None:
    def halve(module: Any, into: Any, of: Any) -> Any:
        return (0.5 * into[0],)

    module = Regressor()
    module.layers[2] = nn.Identity()
    module.layers[2].register_full_backward_hook(halve)
    with pytest.warns(WholeBatchWarning, match="a hook looks at it"):
        check(module)
