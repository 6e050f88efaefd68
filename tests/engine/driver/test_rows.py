"""Trials on a few rows: forms of calls, and blocks that mix rows."""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from roundpipe_lightning.engine.driver.forms import Rows, TensorForm
from roundpipe_lightning.engine.driver.rows import (
    FormTrial,
    LazyArgument,
    MixedRowsError,
    find_form,
    form_key,
)

WIDTH = 8
TIME = 5
ROWS = 6

Run = Callable[[Sequence[Any]], tuple[list[Any], Any]]


def flat_run(block: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Run, list[Any]]:
    leaves, structure = tree_flatten((args, kwargs))

    def run(arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        args, kwargs = tree_unflatten(list(arguments), structure)
        return tree_flatten(block(*args, **kwargs))

    return run, leaves


def form_of(block: Callable[..., Any], *args: Any, **options: Any) -> FormTrial:
    torch.manual_seed(0)
    run, leaves = flat_run(block, *args)
    buffers = list(block.buffers()) if isinstance(block, nn.Module) else ()
    return find_form(run, leaves, buffers=buffers, **options)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def refused(block: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(MixedRowsError) as error:
        form_of(block, *args, **options)
    return error.value.reason


MIXED = "what it gives for a row depends on the other rows"
NUMBER = "its code takes a number from the rows, and may go by it"
SIZES = "the sizes of what it gives depend on the rows"


# --- forms ----------------------------------------------------------------------------------------


def test_rows_of_arguments_and_results() -> None:
    def block(x: Tensor, mask: Tensor, scale: float) -> Any:
        hidden = x.flatten(0, 1) * scale
        return {"flat": hidden, "time": x.transpose(0, 1), "bias": torch.ones(TIME, 2), "n": 3}

    trial = form_of(block, numbers(ROWS, TIME, WIDTH), numbers(1, 1, TIME, TIME), 2.0)
    assert trial.num_rows == ROWS
    assert trial.form.arguments == (Rows(0), None, None)
    assert trial.form.results == (
        TensorForm(torch.Size([TIME, WIDTH]), torch.float32, Rows(0, TIME)),
        TensorForm(torch.Size([TIME, 1, WIDTH]), torch.float32, Rows(1)),
        TensorForm(torch.Size([TIME, 2]), torch.float32, None),
        3,
    )


def test_lazy_arguments_say_where_their_rows_are_and_give_few() -> None:
    slices: list[tuple[int, int]] = []

    def take(start: int, stop: int) -> Tensor:
        slices.append((start, stop))
        return numbers(ROWS * TIME, WIDTH)[start * TIME : stop * TIME]

    run, _ = flat_run(lambda x, y: x.view(-1, TIME, WIDTH) + y, 0, 0)
    form = TensorForm(torch.Size([TIME, WIDTH]), torch.float32, Rows(0, TIME))
    lazy = LazyArgument(form, take)
    shared_form = TensorForm(torch.Size([TIME, WIDTH]), torch.float32, None)
    shared = LazyArgument(shared_form, lambda start, stop: numbers(TIME, WIDTH))
    trial = find_form(run, [lazy, shared], num_rows=ROWS)
    assert trial.form.arguments == (Rows(0, TIME), None)
    assert trial.form.results == (TensorForm(torch.Size([1, TIME, WIDTH]), torch.float32, Rows(0)),)
    assert all(stop <= 4 for _, stop in slices)


def attend(x: Tensor, mask: Tensor) -> Tensor:
    return x + functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)


def test_a_mask_of_as_many_tokens_as_rows_is_shared() -> None:
    mask = torch.ones(TIME, TIME).tril().bool()
    assert form_of(attend, numbers(TIME, TIME, WIDTH), mask).form.arguments == (Rows(0), None)


def test_a_mask_of_rows_and_tokens_has_rows() -> None:
    def block(x: Tensor, mask: Tensor) -> Tensor:
        return x * mask[..., None]

    trial = form_of(block, numbers(TIME, TIME, WIDTH), numbers(TIME, TIME))
    assert trial.form.arguments == (Rows(0), Rows(0))


def test_rows_in_the_second_dimension() -> None:
    lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2)
    trial = form_of(lstm, numbers(TIME, ROWS, WIDTH))
    assert trial.num_rows == ROWS
    assert trial.form.arguments == (Rows(1),)
    assert [form.rows for form in trial.form.results] == [Rows(1)] * 3


def test_states_have_their_rows_elsewhere() -> None:
    lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, dropout=0.5)
    state = numbers(2, ROWS, WIDTH)
    trial = form_of(lstm, numbers(ROWS, TIME, WIDTH), (state, state))
    assert trial.form.arguments == (Rows(0), Rows(1), Rows(1))
    assert [form.rows for form in trial.form.results] == [Rows(0), Rows(1), Rows(1)]


def test_a_tensor_of_several_entries_for_each_row() -> None:
    def block(x: Tensor, flat: Tensor) -> Tensor:
        return x + flat.view(x.shape)

    trial = form_of(block, numbers(ROWS, TIME, WIDTH), numbers(ROWS * TIME, WIDTH))
    assert trial.form.arguments == (Rows(0), Rows(0, TIME))


def test_parameters_never_have_rows() -> None:
    weight = nn.Parameter(numbers(ROWS, WIDTH))
    trial = form_of(lambda x, w: x @ w.T, numbers(ROWS, WIDTH), weight)
    assert trial.form.arguments == (Rows(0), None)


def test_a_batch_of_one_row_has_the_form_of_any() -> None:
    trial = form_of(nn.Linear(WIDTH, 3), numbers(1, TIME, WIDTH))
    assert trial.form.results == (TensorForm(torch.Size([1, TIME, 3]), torch.float32, Rows(0)),)
    assert refused(lambda x: x - x.mean(0), numbers(1, TIME, WIDTH), num_rows=1) == MIXED


def test_token_ids() -> None:
    ids = torch.arange(ROWS * TIME).view(ROWS, TIME)
    trial = form_of(nn.Embedding(64, WIDTH), ids)
    assert trial.form.arguments == (Rows(0),)


def test_trusted_rows_are_run_twice() -> None:
    num_rows: list[int] = []

    def block(x: Tensor) -> Tensor:
        num_rows.append(len(x))
        return x - x.mean(0)

    trial = form_of(block, numbers(ROWS, WIDTH), trusts_rows=True)
    assert trial.form.results == (TensorForm(torch.Size([1, WIDTH]), torch.float32, Rows(0)),)
    assert num_rows == [1, 2]


# --- blocks that keep rows apart ------------------------------------------------------------------


class DropPath(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        shape = (len(x), 1, 1)
        if self.kind == "bernoulli_":
            mask = x.new_empty(shape).bernoulli_(0.5)
        elif self.kind == "rand":
            mask = (0.8 + torch.rand(shape, dtype=x.dtype)).floor_()
        else:
            mask = (torch.rand_like(x[:, :1, :1]) < 0.8).to(x.dtype)
        result: Tensor = x + self.linear(x) * mask / 0.8
        return result


class Experts(nn.Module):
    """Sends tokens to experts by their indices."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        result = torch.zeros_like(tokens)
        if self.kind == "lists":
            order = chosen.argsort()
            parts = tokens[order].split(torch.bincount(chosen, minlength=3).tolist())
            outputs = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
            result[order] = torch.cat(outputs)
        else:
            for index in functional.one_hot(chosen, 3).sum(0).nonzero()[:, 0]:
                if index == 3:
                    continue
                places = torch.where(chosen == index)[0]
                result.index_add_(0, places, self.experts[int(index)](tokens[places]))
        mixture: Tensor = (result * weights[:, None]).view(x.shape)
        return x + mixture


APART: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
    "layer in bfloat16": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
    "drop path by bernoulli_": lambda: DropPath("bernoulli_"),
    "drop path by rand": lambda: DropPath("rand"),
    "drop path by rand_like": lambda: DropPath("rand_like"),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH), nn.AlphaDropout()),
    "experts by indices": lambda: Experts("indices"),
    "experts by lists": lambda: Experts("lists"),
}


def test_weights_of_eight_bits() -> None:
    weight = nn.Parameter(numbers(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
    form_of(lambda x: x @ weight.to(x.dtype), numbers(ROWS, TIME, WIDTH))


@pytest.mark.parametrize("name", APART)
def test_blocks_that_keep_rows_apart(name: str) -> None:
    dtype = torch.bfloat16 if "bfloat16" in name else torch.float32
    block = APART[name]().to(dtype)
    assert form_of(block, numbers(ROWS, TIME, WIDTH, dtype=dtype)).form.arguments == (Rows(0),)


def test_zeros_in_the_first_rows() -> None:
    form_of(APART["layer"](), torch.zeros(ROWS, TIME, WIDTH))
    assert refused(lambda x: x - x.mean(0), torch.zeros(ROWS, WIDTH)) == MIXED


def test_autocast_keeps_no_cast_of_a_trial() -> None:
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.constant_(linear.weight, 1e-6)
    x = numbers(ROWS, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected = functional.linear(x, linear.weight.detach().clone())
        trial = form_of(linear, x)
        assert torch.equal(linear(x), expected)
    assert trial.form.results[0].dtype == torch.bfloat16


def test_random_generators_are_left_as_they_are() -> None:
    def block(x: Tensor) -> Tensor:
        return x * random.random() + torch.rand(1)

    random.seed(1)
    states = torch.get_rng_state(), random.getstate()
    run, leaves = flat_run(block, numbers(ROWS, WIDTH))
    find_form(run, leaves)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


# --- blocks that mix them -------------------------------------------------------------------------


class AddsMean(nn.Module):
    """Adds the mean over rows times a weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), weight))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * x.mean(0)


class Normalised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-6 * (x - x.mean(0)) / (x.std(0, correction=0) + 1e-3)


class AcrossRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(1)[:, None, :WIDTH]
        added: Tensor = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return x + added


def capacity(x: Tensor, mask: Tensor | None = None, *, room: int) -> Tensor:
    """Let no more tokens pass to each of two experts than there is room for."""
    tokens = x.flatten(0, 1)
    chosen = functional.one_hot((tokens[:, 0] > 0).long(), 2)
    if mask is not None:
        chosen = chosen * (mask[:, -1].flatten() == 0)[:, None]
    has_room = (chosen.cumsum(0) * chosen).amax(1) <= room
    return x + (tokens * has_room[:, None]).view(x.shape)


def with_first(x: Tensor) -> Tensor:
    return x + x[:1]


def with_last(x: Tensor) -> Tensor:
    return x + x[-1:]


def largest_is_doubled(x: Tensor) -> Tensor:
    sizes = x.flatten(1).norm(dim=1)
    factors: Tensor = 1 + (sizes == sizes.max()).float()
    return x * factors[:, None, None]


MIXING: dict[str, tuple[Callable[..., Any], str]] = {
    "mean": (AddsMean(1.0), MIXED),
    "mean times a small weight": (AddsMean(1e-6), MIXED),
    "mean times zero": (AddsMean(0.0), MIXED),
    "statistics": (Normalised(), MIXED),
    "across rows": (AcrossRows(), MIXED),
    "first row": (with_first, MIXED),
    "last row": (with_last, MIXED),
    "row before": (lambda x: x + x.roll(1, 0), MIXED),
    "largest row": (largest_is_doubled, MIXED),
    "many rows": (lambda x: x if len(x) < ROWS else x - x.mean(0), MIXED),
    "number of rows": (lambda x: x / len(x), MIXED),
    "capacity": (partial(capacity, room=2), MIXED),
    "capacity for several rows": (partial(capacity, room=3 * TIME), MIXED),
    "shuffled": (lambda x: x + x[torch.randperm(len(x))], MIXED),
    "loss": (lambda x: (x, x.square().mean()), "it computes a tensor from all rows together"),
    "loss that is zero": (
        lambda x: (x, 0 * x.sum()),
        "it computes a tensor from all rows together",
    ),
    "pairs": (
        lambda x: x.flatten(1) @ x.flatten(1).T,
        "what it gives has the batch's rows in no one dimension",
    ),
    "a row more": (lambda x: torch.cat([x, x[:1] * 0]), SIZES),
    "selection": (lambda x: x.flatten(0, 1)[x.flatten(0, 1)[:, 0] > 0], SIZES),
    "batch norm": (nn.BatchNorm1d(TIME), "it writes into buffers"),
    "length": (
        lambda x: (x, len(x)),
        "it gives other values for another number of rows",
    ),
    "item": (lambda x: x * 0.5 if x.max().item() > 1e6 else x, NUMBER),
    "bool": (lambda x: x * 0.5 if (x > 1e6).any() else x, NUMBER),
    "float": (lambda x: x * 0.5 if float(x.max()) > 1e6 else x, NUMBER),
    "equal": (lambda x: x * 0.5 if torch.equal(x, x.abs()) else x, NUMBER),
    "close": (lambda x: x * 0.5 if torch.allclose(other=x, input=x.abs()) else x, NUMBER),
    "contains": (lambda x: x * 0.5 if 7.0 in x else x, NUMBER),
    "list": (lambda x: x * max(*x[:, 0, 0].tolist(), 99.0), NUMBER),
    "is nonzero": (lambda x: x * 0.5 if torch.is_nonzero(x.sum()) else x, NUMBER),
    "condition": (
        lambda x: torch.cond(x.sum() > 1e6, lambda x: x * 0.5, lambda x: x + 0, (x,)),
        NUMBER,
    ),
    "sparse": (lambda x: x.flatten(1).to_sparse(), "it gives a tensor that is not dense"),
    "range": (lambda x: x + torch.arange((x > 1e6).sum() + 1).sum(), NUMBER),
}


def test_capacity_beside_a_mask() -> None:
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((ROWS, TIME, TIME), lowest).triu(1)
    assert refused(partial(capacity, room=3 * TIME), numbers(ROWS, TIME, WIDTH), mask) == MIXED


@pytest.mark.parametrize("name", MIXING)
def test_blocks_that_mix_rows(name: str) -> None:
    block, reason = MIXING[name]
    torch.manual_seed(0)
    assert refused(block, numbers(ROWS, TIME, WIDTH), num_rows=ROWS) == reason


def packed(x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    result: Tensor = pad_packed_sequence(packed, batch_first=True)[0]
    return result


LENGTHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "trims": lambda x, n: torch.cat([x[:, : int(n.max())], x[:, int(n.max()) :] * 0], 1),
    "trims by a slice": lambda x, n: torch.cat([x[:, : n.max()], x[:, n.max() :] * 0], 1),
    "a path for long rows": lambda x, n: x * 0.5 if int(n.max()) > 99 else x,
    "all are short": lambda x, n: x if (n <= 99).all() else x * 0.5,
    "packed": packed,
}


@pytest.mark.parametrize("name", LENGTHS)
def test_integers_of_rows_decide(name: str) -> None:
    lengths = torch.full((ROWS,), TIME)
    assert refused(LENGTHS[name], numbers(ROWS, TIME, WIDTH), lengths) == NUMBER


def test_numbers_that_are_of_no_row() -> None:
    steps = torch.tensor(3)
    trial = form_of(lambda x: x * steps.item() if steps > 2 else x, numbers(ROWS, WIDTH))
    assert trial.form.arguments == (Rows(0),)


@pytest.mark.parametrize("check", [torch.isfinite, torch.isinf, torch.isnan])
def test_a_guard_against_an_overflow_takes_no_number(check: Callable[[Tensor], Tensor]) -> None:
    def block(x: Tensor) -> Tensor:
        return x.clamp(-9.0, 9.0) if check(x).sum() not in (0, x.numel()) else x

    assert form_of(block, numbers(ROWS, TIME, WIDTH)).form.arguments == (Rows(0),)


def test_functions_that_are_transformed() -> None:
    def loss(row: Tensor) -> Tensor:
        return torch.where(torch.isnan(row), 0, row).square().sum()

    block = torch.func.vmap(torch.func.grad(loss))
    assert form_of(block, numbers(ROWS, TIME, WIDTH)).form.arguments == (Rows(0),)


def test_buffers_keep_their_values() -> None:
    norm = nn.BatchNorm1d(TIME)
    saved = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    assert refused(norm, numbers(ROWS, TIME, WIDTH)) == "it writes into buffers"
    assert all(torch.equal(buffer, saved[name]) for name, buffer in norm.named_buffers())


def test_an_error_names_itself() -> None:
    def block(x: Tensor) -> Tensor:
        if len(x) < ROWS:
            raise ValueError("too few")
        return x

    reason = refused(block, numbers(ROWS, WIDTH))
    assert reason == "it does not run on 1 of the rows (ValueError: too few)"


def test_an_empty_batch_has_no_rows() -> None:
    assert "none of its arguments" in refused(nn.Linear(WIDTH, WIDTH), numbers(0, WIDTH))


def test_without_tensors_there_are_no_rows() -> None:
    assert refused(torch.ones, 3) == "none of its arguments has the batch's rows"


# --- keys -----------------------------------------------------------------------------------------


def key_of(block: nn.Module, *args: Any, num_rows: int = ROWS, context: str = "train") -> Any:
    modules = [(name, type(module), vars(module)) for name, module in block.named_modules()]
    key = form_key(modules, args, num_rows=num_rows, context=context)
    hash(key)
    return key


class Layer(DropPath):
    def __init__(self, layer_idx: int, *, rate: float = 0.0, window: int = 3) -> None:
        super().__init__("rand")
        self.layer_idx = layer_idx
        self.rate = rate
        self.window = window


def test_keys_of_equal_layers_and_of_batches_of_other_sizes() -> None:
    form = TensorForm(torch.Size([1, TIME, WIDTH]), torch.float32, Rows(0))
    lazy = LazyArgument(form, lambda start, stop: numbers(stop - start, TIME, WIDTH))
    x, mask = numbers(ROWS, WIDTH), numbers(1, TIME)
    key = key_of(Layer(0), lazy, x, mask, 2)
    assert key == key_of(Layer(7, rate=0.5), lazy, x, mask, 2)
    assert key == key_of(Layer(0), lazy, numbers(ROWS + 1, WIDTH), mask, 2, num_rows=ROWS + 1)
    other_keys = [
        key_of(Layer(0, window=4), lazy, x, mask, 2),
        key_of(DropPath("rand"), lazy, x, mask, 2),
        key_of(Layer(0).eval(), lazy, x, mask, 2),
        key_of(Layer(0).double(), lazy, x, mask, 2),
        key_of(Layer(0), lazy, x.double(), mask, 2),
        key_of(Layer(0), x, x, mask, 2),
        key_of(Layer(0), lazy, nn.Parameter(x), mask, 2),
        key_of(Layer(0), lazy, x, mask, 3),
        key_of(Layer(0), lazy, x, mask, 2, context="eval"),
    ]
    assert key not in other_keys
