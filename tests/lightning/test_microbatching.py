from __future__ import annotations

import itertools
import os
import random
import re
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.emulation import tagged_tensor
from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.strategy import microbatching
from roundpipe_lightning.testing import EmulatedStrategy
from tests.kit import training
from tests.kit.moments import ObservedBlock
from tests.kit.training import (
    WIDTH,
    ByHand,
    LanguageModel,
    PaddedSequences,
    Regressor,
    make_trainer,
    regression_data,
    train_alike,
    train_with,
)

BATCH_IDX = "TEST_BATCH_IDX"
"""An environment variable: a step that decides by it changes, and no proof sees it."""

noted = SimpleNamespace(calls=0, late=False)


GENERATOR = random.Random(0)


class Annealed:
    """A weight that falls with every call."""

    total = 0

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said of the choice."""
    lines: list[str] = []
    monkeypatch.setattr(microbatching, "rank_zero_info", lines.append)
    return lines


def note() -> None:
    noted.calls += 1


class Counts(Regressor):
    """Counts its steps somewhere."""

    num_calls: ClassVar[list[int]] = []

    def __init__(self, count: Callable[[Counts], Any]) -> None:
        super().__init__()
        self.count = count
        self._outputs: dict[str, list[int]] = {"train": []}
        self.state = SimpleNamespace(calls=0)
        self.numbers = random.Random(0)
        self.recent = deque([0.0] * 2000, maxlen=2000)
        self.anneal = Annealed()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count(self)
        return super().training_step(batch, batch_idx)


def add(module: Counts) -> None:
    module.state.calls += 1


@pytest.mark.parametrize(
    ("count", "mode"),
    [
        (lambda module: None, "step"),
        (lambda module: training.VOCABULARY, "step"),
        (lambda module: module._outputs["train"].append(0), "blocks"),
        (lambda module: module.num_calls.append(0), "blocks"),
        (add, "blocks"),
        (lambda module: module.anneal(), "blocks"),
        (lambda module: module.numbers.random(), "blocks"),
        (lambda module: module.recent.append(1.0), "blocks"),
        (lambda module: note(), "blocks"),
        (lambda module: GENERATOR.random(), "blocks"),
        (lambda module: module.current_epoch > 5, "blocks"),
        (lambda module: module.trainer.global_step / 2, "blocks"),
        (lambda module: setattr(module.head.bias, "data", module.head.bias.data / 2), "blocks"),
    ],
    ids=[
        *(
            "nothing",
            "a file",
            "a list in a dict",
            "a list of the class",
            "an object",
            "a callable",
        ),
        *("a generator", "a full list", "an object of the file", "a generator of the file"),
        *("an epoch", "a step", "a parameter's memory"),
    ],
)
def test_chosen_mode(said: list[str], count: Callable[[Counts], Any], mode: str) -> None:
    strategy = RoundPipeStrategy(num_microbatches=2)
    trainer = make_trainer(strategy=strategy, devices=2, max_steps=2)
    trainer.fit(Counts(count), regression_data())
    assert [text.split("'")[1] for text in said] == [mode], said


class CentredTokens(nn.Linear):
    """Mixes the batch's rows, and leaves tokens apart."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x - 0.5 * x.mean(0, keepdim=True)


@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.filterwarnings("ignore:Block .* runs on the whole batch")
@pytest.mark.filterwarnings("ignore:The whole batch is one microbatch")
def test_blocks_divided_along_tokens_prove_nothing_of_rows(recompute: Any) -> None:
    class OfTokens(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(CentredTokens(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, None] * torch.arange(1, 4)[:, None]).mean(1)

    strategy = RoundPipeStrategy(num_microbatches=2, recompute=recompute)
    train_alike(OfTokens, strategy, max_steps=3)


def count_in_block() -> None:
    TABLE["calls"] += 1


TABLE = {"calls": 0}
NUMBERS = itertools.count()


class Taking(Regressor):
    """Takes a number in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(next(NUMBERS))
        return super().training_step(batch, batch_idx)


class Marking(Taking):
    """Writes into the environment."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        os.environ[BATCH_IDX] += "I"
        self.seen.append(len(os.environ[BATCH_IDX]) - 1)
        return Regressor.training_step(self, batch, batch_idx)


@pytest.mark.parametrize("kind", [Taking, Marking])
def test_a_run_without_values_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: type[Taking]
) -> None:
    monkeypatch.setenv(BATCH_IDX, "")
    module, first = kind(), next(NUMBERS) + 1 if kind is Taking else 0
    trainer = make_trainer(strategy=RoundPipeStrategy(num_microbatches=2), max_steps=3)
    trainer.fit(module, regression_data())
    assert module.seen == [first, first + 1, first + 2]


class Counted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        count_in_block()
        return super().forward(x)


class Filed(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with Path("calls").open("a") as file:
            file.write("I")
        return super().forward(x)


@pytest.mark.parametrize("strategy", [RoundPipeStrategy, EmulatedStrategy])
@pytest.mark.parametrize("kind", [Counted, Filed])
def test_a_block_that_counts_in_its_file_is_told(
    kind: type[nn.Linear], strategy: type[RoundPipeStrategy]
) -> None:
    module = Regressor() if strategy is RoundPipeStrategy else ByHand()
    module.layers = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(4))
    trainer = make_trainer(strategy=strategy(num_microbatches=2), max_steps=2)
    with pytest.warns(UserWarning, match=r"'layers\.[03]' writes into a list, a dict or another"):
        trainer.fit(module, regression_data())


NUM_STEPS = ContextVar("NUM_STEPS", default=0)
RATE = ContextVar("RATE", default=1.0)


class OfItsClass:
    """An object of the user's, that counts calls of `add`."""

    total = 0

    def add(self) -> None:
        OfItsClass.total += 1

    @property
    def calls(self) -> int:
        return self.total


class InATable(OfItsClass):
    table: ClassVar[dict[str, int]] = {"calls": 0}

    def add(self) -> None:
        self.table["calls"] += 1

    @property
    def calls(self) -> int:
        return self.table["calls"]


class ByAFunction(OfItsClass):
    def add(self) -> None:
        note()

    @property
    def calls(self) -> int:
        return int(noted.calls)


class ByDefault(OfItsClass):
    def add(self, calls: list[int] = []) -> None:  # noqa: B006 - as users do
        calls.append(0)

    @property
    def calls(self) -> int:
        return len(self.add.__func__.__defaults__[0])  # type: ignore[attr-defined]


class ByName(OfItsClass):
    def add(self) -> None:
        globals()["NUM_CALLS"] = self.calls + 1

    @property
    def calls(self) -> int:
        return int(globals()["NUM_CALLS"])


class OfAnObject(OfItsClass):
    state: ClassVar[Any] = Annealed()

    def add(self) -> None:
        self.state()

    @property
    def calls(self) -> int:
        return int(self.state.calls)


class InAContext(OfItsClass):
    def add(self) -> None:
        NUM_STEPS.set(NUM_STEPS.get() + 1)

    @property
    def calls(self) -> int:
        return NUM_STEPS.get()


class Nested(OfItsClass):
    """Keeps its number in the last of many objects."""

    def __init__(self, depth: int = 9) -> None:
        self.inner: Any = Nested(depth - 1) if depth else Annealed()

    def add(self) -> None:
        self.inner.add() if isinstance(self.inner, Nested) else self.inner()

    @property
    def calls(self) -> int:
        return int(self.inner.calls)


class OfMany(OfItsClass):
    def __init__(self) -> None:
        self.lists: list[list[int]] = [[] for _ in range(3000)]

    def add(self) -> None:
        self.lists[7].append(0)

    @property
    def calls(self) -> int:
        return len(self.lists[7])


class InAnArray(OfItsClass):
    def __init__(self) -> None:
        self.numbers = np.zeros(200_000)

    def add(self) -> None:
        self.numbers[7] += 1

    @property
    def calls(self) -> int:
        return int(self.numbers[7])


class InAFile(OfItsClass):
    path = Path("calls")

    def add(self) -> None:
        with self.path.open("a") as file:
            file.write("I")

    @property
    def calls(self) -> int:
        return len(self.path.read_text())


class Printed(OfItsClass):
    def add(self) -> None:
        print("I")


class InFiles(OfItsClass):
    """A new file with every call."""

    @property
    def calls(self) -> int:
        return len(list(Path().glob("*.pt")))

    def add(self) -> None:
        torch.save(torch.zeros(1), f"{self.calls}.pt")


class Adding(Regressor):
    def __init__(self, kind: type[OfItsClass]) -> None:
        super().__init__()
        self.tracker = kind()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tracker.add()
        return super().training_step(batch, batch_idx)


TRACKERS = [
    OfItsClass,
    InAContext,
    InATable,
    ByAFunction,
    ByDefault,
    ByName,
    OfAnObject,
    Nested,
    OfMany,
    InAnArray,
    InAFile,
    InFiles,
    Printed,
]


@pytest.mark.parametrize("mode", ["auto", "blocks", "step"])
@pytest.mark.parametrize("kind", TRACKERS)
def test_what_an_object_of_the_user_s_counts(
    said: list[str], capsys: pytest.CaptureFixture[str], kind: type[OfItsClass], mode: Any
) -> None:
    """Once per batch, planning and proofs left out, or it is said."""
    OfItsClass.total = noted.calls = InATable.table["calls"] = OfAnObject.state.calls = 0
    globals()["NUM_CALLS"] = 0
    NUM_STEPS.set(0)
    ByDefault.add.__defaults__[0].clear()  # type: ignore[index]
    module = Adding(kind)
    strategy = RoundPipeStrategy(num_microbatches=2, microbatching=mode)
    trainer = make_trainer(strategy=strategy, devices=2, max_steps=3)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(module, regression_data())
    texts = [*said, *(str(one.message) for one in warned)]
    calls = capsys.readouterr().out.count("I\n") if kind is Printed else module.tracker.calls
    told = r"The step, or another thread, writes .* Set microbatching='blocks'|'step' is not proven"
    assert any(re.search(told, text) for text in texts) == (mode == "step")
    is_repeated = mode == "step" and kind is not InAContext  # of which every part has its own
    assert calls == (6 if is_repeated else 3), texts


@pytest.mark.parametrize("mode", ["auto", "blocks", "step"])
def test_objects_may_lie_deeper_than_python_s_stack(mode: Any) -> None:
    module: Any = Adding(Nested)
    module.link = None
    for _ in range(2 * sys.getrecursionlimit()):
        link = Nested(0)
        link.inner, module.link = module.link, link
    strategy = RoundPipeStrategy(num_microbatches=2, microbatching=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(strategy=strategy, devices=2, max_steps=2).fit(module, regression_data())


@pytest.mark.parametrize("mode", ["auto", "blocks", "step"])
def test_context_variables_of_hooks_are_seen_in_steps(mode: Any) -> None:
    class Rated(Regressor):
        averages_samples = True

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            RATE.set(1.0 + batch_idx)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * RATE.get()

    strategy = RoundPipeStrategy(num_microbatches=2, microbatching=mode)
    train_alike(Rated, strategy, max_steps=3)


OF_THREADS = threading.local()


class _Rated(training.Block):
    """Multiplies by a number of its thread."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(OF_THREADS, "rate", 1.0)


class OfThreads(Regressor):
    """Steps that read, and write, `threading.local` values that hooks set."""

    averages_samples = True

    def __init__(self, *, writes: bool, changes: bool) -> None:
        super().__init__()
        self.layers[1] = _Rated()
        self.writes, self.changes = writes, changes
        self.seen: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        OF_THREADS.rate = 0.5 + self.changes * batch_idx

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx) * OF_THREADS.rate
        if self.writes:
            OF_THREADS.rate = 7.0
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(OF_THREADS.rate)
        del OF_THREADS.rate


@pytest.mark.filterwarnings("ignore:The step, or another thread, writes")
@pytest.mark.parametrize("mode", ["auto", "blocks", "step"])
@pytest.mark.parametrize(("writes", "changes"), [(False, False), (False, True), (True, False)])
def test_values_of_hooks_that_are_a_thread_s_own(mode: Any, *, writes: bool, changes: bool) -> None:
    strategy = RoundPipeStrategy(num_microbatches=4, microbatching=mode)
    make = partial(OfThreads, writes=writes, changes=changes)
    one, module = train_alike(make, strategy, max_steps=4)
    assert module.seen == one.seen


class Referring(Regressor):
    """Reads what objects that it holds, and functions that it calls, have for each thread."""

    def __init__(self) -> None:
        super().__init__()
        enclosed = threading.local()

        def rate() -> float:
            return float(enclosed.rate * self.holders[0].inner.rate)

        self.rate = rate
        self.enclosed = [enclosed]
        self.holders = [Nested(0)]
        self.holders[0].inner = threading.local()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.enclosed[0].rate = 2.0 + batch_idx
        self.holders[0].inner.rate = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.rate()


@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
def test_thread_s_own_values_of_objects_and_closures(kind: Any) -> None:
    train_alike(Referring, kind(num_microbatches=4), max_steps=3)


@pytest.mark.parametrize("mode", ["auto", "blocks"])
def test_a_run_without_values_leaves_what_files_and_classes_hold(mode: Any) -> None:
    class Drawing(Regressor):
        seen: ClassVar[dict[str, list[int]]] = {"rows": []}
        num_steps = 0

        def on_fit_start(self) -> None:
            GENERATOR.seed(0)
            noted.calls = Annealed.total = type(self).num_steps = 0
            self.seen["rows"].clear()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            note()
            Annealed.total += 1
            type(self).num_steps += 1
            self.seen["rows"].append(len(batch[0]))
            return super().training_step(batch, batch_idx) * GENERATOR.random()

        def on_train_end(self) -> None:
            self.drawn = GENERATOR.random(), noted.calls, Annealed.total, self.num_steps
            self.rows = list(self.seen["rows"])

    strategy = RoundPipeStrategy(num_microbatches=2, microbatching=mode)
    one, module = train_alike(Drawing, strategy, max_steps=3)
    assert module.drawn == one.drawn
    assert module.rows == one.rows == [8, 8, 8]


def test_stages_that_fuse_the_loss_take_the_whole_batch_and_say_so() -> None:
    # "step" from the second batch on
    train_alike(Regressor, RoundPipeStrategy(recompute="none"), max_epochs=1)
    strategy = RoundPipeStrategy(recompute="none", microbatching="blocks")
    with pytest.warns(UserWarning, match="whole batch is one microbatch: recompute='none'"):
        make_trainer(strategy=strategy, max_epochs=1).fit(Regressor(), regression_data())
    assert strategy.plan is not None
    assert strategy.plan.num_microbatches == 1


class Changing(LanguageModel):
    """Its last batches are no longer what the first two were."""

    def __init__(self, change: Callable[[LanguageModel, Tensor, Tensor], Tensor]) -> None:
        super().__init__("adamw")
        self.change = change

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        os.environ[BATCH_IDX] = str(batch_idx)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits, labels = self(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        if int(os.environ[BATCH_IDX]) >= 2:
            return self.change(self, logits, labels)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _some_targets(module: LanguageModel, logits: Tensor, labels: Tensor) -> Tensor:
    odd = labels.masked_fill(labels % 2 == 0, -100)
    return functional.cross_entropy(logits.flatten(0, 1), odd.flatten())


def _logs_a_sum(module: LanguageModel, logits: Tensor, labels: Tensor) -> Tensor:
    module.log("rows", float(len(labels)), reduce_fx="sum", on_epoch=True)
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _rows(module: LanguageModel, logits: Tensor, labels: Tensor) -> Tensor:
    each = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return each.mean(1).mean()


CHANGES = {
    "other targets": (_some_targets, "the loss counts other targets than the batch's labels"),
    "a sum is logged": (_logs_a_sum, "'rows' is logged with reduce_fx='sum'"),
    "no targets": (_rows, "it is not seen which targets the loss counts"),
}


@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
@pytest.mark.parametrize("name", CHANGES)
def test_a_later_batch_that_is_not_as_proven(said: list[str], kind: Any, name: str) -> None:
    """It is run again as a whole: no block was stepped with it before."""
    change, reason = CHANGES[name]
    data = DataLoader(PaddedSequences(20), batch_size=4)
    train_alike(lambda: Changing(change), kind(num_microbatches=2), data=data, max_epochs=1)
    assert ["'step'" in text for text in said] == [True, False], said
    assert f"'blocks' from this batch on: {reason}. Nothing was updated" in said[1]
    strategy = kind(num_microbatches=2, microbatching="step")
    with pytest.raises(ConfigurationError, match=f"{reason}.*Set microbatching='blocks'"):
        make_trainer(strategy=strategy).fit(Changing(change), data)


def _centred(*given: Any) -> Tensor:
    """Of a block's output, or of a hook's."""
    x: Tensor = given[-1]
    return x - x.mean(0)


class _Centring(training.Block):
    is_on = False
    shares: Sequence[float] = (0.0,)
    share: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        share = self.shares[0] + self.share
        return _centred(x) if self.is_on else share * _centred(x) + (1 - share) * x


def _set_entry(module: Any) -> None:
    module.layers[1].shares = (0.5,)


LATER_CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda module: vars(module.layers[1]).update(is_on=True),
    "an entry": _set_entry,
    "a buffer": lambda module: module.layers[1].share.fill_(0.5),
    "a hook": lambda module: module.layers[1].inner.register_forward_hook(_centred),
    "a hook outside": lambda module: module.head.register_forward_hook(_centred),
    "a module": lambda module: vars(module.layers[1].norm).update(forward=_centred),
}


@pytest.mark.filterwarnings("ignore::roundpipe_lightning.engine.chain.pieces.WholeBatchWarning")
@pytest.mark.parametrize("mode", ["auto", "blocks"])
@pytest.mark.parametrize("change", LATER_CHANGES.values(), ids=LATER_CHANGES)
def test_rows_that_depend_on_each_other_from_a_later_batch_on(change: Any, mode: Any) -> None:
    class Changed(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1] = _Centring()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                change(self)

    train_alike(Changed, RoundPipeStrategy(num_microbatches=4, microbatching=mode), max_epochs=1)


class _Packed(training.Block):
    """Takes the means over sequences that lie one behind the other."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:  # type: ignore[override]
        rows = super().forward(x).view(-1, WIDTH)
        number = (torch.arange(len(rows))[:, None] >= ends).sum(1)
        same = (number[:, None] == number).to(rows)
        return (rows - 0.5 * same @ rows / same.sum(1, keepdim=True)).view(x.shape)


class Packed(Regressor):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Packed() for _ in range(3))
        self.shape = shape

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0].view(*self.shape, WIDTH)
        for layer in self.layers:
            x = layer(x, batch[1])
        return functional.mse_loss(self.head(x), x[..., :1])


@pytest.mark.parametrize("mode", ["auto", "blocks"])
@pytest.mark.parametrize(
    ("shape", "told"),
    [
        ((24,), r"Block 'layers\.0' runs on the whole batch.*trust_rows=True"),
        ((1, 24), r"Block 'layers\.0' is given one row.*num_microbatches=1"),
    ],
)
def test_packed_sequences_are_one_microbatch(shape: Any, told: str, mode: Any) -> None:
    (x, _) = next(iter(regression_data(24, batch_size=24)))
    batches: Any = [(x, torch.tensor([5, 12, 20]))] * 3
    data: Any = DataLoader(batches, batch_size=None)
    strategy = RoundPipeStrategy(num_microbatches=4, microbatching=mode)
    with pytest.warns(UserWarning, match=told) as warned:
        one, module = train_alike(lambda: Packed(*shape), strategy, data=data, max_epochs=1)
    assert training.same_bits(module, one)
    assert sum("Block 'layers" in str(one.message) for one in warned) == 1


@pytest.mark.parametrize("mode", ["auto", "blocks"])
def test_a_block_that_needs_whole_batches_makes_them_one_microbatch(
    said: list[str], mode: Any
) -> None:
    class Normalised(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1] = nn.Sequential(training.Block(), nn.BatchNorm1d(WIDTH))

    strategy = RoundPipeStrategy(num_microbatches=4, microbatching=mode)
    with pytest.warns(UserWarning, match=r"'layers\.1' runs on the whole batch.*GroupNorm"):
        train_alike(Normalised, strategy, max_steps=3)
    assert strategy.last_step is not None
    assert strategy.last_step.plan.num_microbatches == 1
    assert all("block 'layers.1' runs on the whole batch" in text for text in said)
    assert len(said) == (mode == "auto")


class _Steered(training.Block):
    """Would scale rows by a number that is taken of all of them."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return 2 * x if float(x.detach().mean()) > 1e6 else x


class _Mixing(_Centring):
    is_on = True


@pytest.mark.parametrize("kind", [_Steered, _Mixing])
@pytest.mark.parametrize("trusts", [True, False])
def test_trusted_rows_are_divided(kind: type[nn.Module], *, trusts: bool) -> None:
    module = Regressor()
    module.layers[1] = kind()
    strategy = RoundPipeStrategy(
        num_microbatches=4, microbatching="blocks", trust_rows=trusts, recompute="full"
    )
    trainer = make_trainer(strategy=strategy, max_steps=2)
    with nullcontext() if trusts else pytest.warns(UserWarning, match="trust_rows=True"):
        trainer.fit(module, regression_data())
    assert strategy.last_step is not None
    assert strategy.last_step.plan.num_microbatches == (4 if trusts else 1)


class _Flat(training.Block):
    """Cannot be run on no rows: a size of -1 would be any."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(len(x), -1))


def test_blocks_that_are_given_fewer_rows_than_there_are_pieces() -> None:
    class OfTwoRows(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(_Flat() for _ in range(3))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch[0][:2], batch[1][:2]), batch_idx)

    train_alike(OfTwoRows, RoundPipeStrategy(num_microbatches=4), max_steps=3)


def test_the_choice_is_made_where_batches_stay_in_flight(said: list[str]) -> None:
    """The first of a form is waited for: what its blocks have done is not known before."""

    class Slow(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0] = first = ObservedBlock()
            first.on_backward = lambda: time.sleep(0.05)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            pair = tuple(batch.values()) if isinstance(batch, dict) else batch
            return super().training_step(pair, batch_idx)

    batches: Any = [*regression_data()]
    batches[2] = dict(enumerate(batches[2]))
    data: Any = DataLoader(batches, batch_size=None)
    strategy = EmulatedStrategy(num_microbatches=2)
    train_alike(Slow, strategy, data=data, accumulate_grad_batches=4, max_epochs=1)
    assert len(said) == 2


class _Asking(training.Block):
    """Mixes rows when what it refers to says so."""

    late = False

    def __init__(self, asks: Callable[[Any], bool], schedule: SimpleNamespace) -> None:
        super().__init__()
        self.asks, self.schedule, self.owners = asks, schedule, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return _centred(x) if self.asks(self) else x


QUESTIONS: dict[str, Callable[[Any], bool]] = {
    "an object": lambda block: block.schedule.late,
    "the whole module": lambda block: block.owners[0].late,
    "the step": lambda block: block.owners[0].global_step >= 2,
    "the Trainer": lambda block: block.owners[1].global_step >= 2,
    "the file": lambda block: any(noted.late for _ in range(1)),
    "the class": lambda block: type(block).late,
}


@pytest.mark.filterwarnings("ignore::roundpipe_lightning.engine.chain.pieces.WholeBatchWarning")
@pytest.mark.parametrize("mode", ["auto", "blocks"])
@pytest.mark.parametrize("asks", QUESTIONS.values(), ids=QUESTIONS)
def test_rows_that_depend_on_each_other_by_what_a_block_refers_to(asks: Any, mode: Any) -> None:
    class Changed(Regressor):
        late = False

        def __init__(self) -> None:
            super().__init__()
            self.schedule = SimpleNamespace(late=False)
            self.layers[1] = asking = _Asking(asks, self.schedule)
            self.owners = asking.owners

        def on_fit_start(self) -> None:
            self.owners[:] = [self, self.trainer]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.late = self.schedule.late = noted.late = _Asking.late = batch_idx >= 2

        def on_fit_end(self) -> None:
            self.owners.clear()

    train_alike(Changed, RoundPipeStrategy(num_microbatches=4, microbatching=mode), max_epochs=1)


def test_targets_are_counted_without_waiting_for_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A microbatch that reads a number stops launching until its device has nothing left to do."""
    read: list[str] = []
    execute = tagged_tensor._execute

    def noted(func: Any, *given: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            read.append(threading.current_thread().name)
        return execute(func, *given)

    monkeypatch.setattr(tagged_tensor, "_execute", noted)
    strategy = EmulatedStrategy(num_microbatches=4, microbatching="step")
    data = DataLoader(PaddedSequences(16), batch_size=8)
    make_trainer(strategy=strategy, max_epochs=1).fit(LanguageModel("adamw"), data)
    assert [name for name in read if "microbatch" in name] == []


class Counting(Regressor):
    """Its later batches write, into what is asked for: what refused microbatches wrote is gone."""

    seen: Tensor

    def __init__(self, into: str) -> None:
        super().__init__()
        self.into = into
        self.number = 0
        self.state = SimpleNamespace(calls=0)
        self.register_buffer("seen", torch.zeros(()))
        self.layers.insert(1, nn.BatchNorm1d(WIDTH, affine=False))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        writes = int(os.environ[BATCH_IDX]) >= 2
        if writes and self.into == "a buffer":
            self.seen += 1
        if writes and self.into == "a buffer, anew":
            self.seen = self.seen + batch[0].shape[0]
        if writes and self.into == "a new flag":  # as transformers does once
            self.is_ready = True
        if writes and self.into == "an attribute":
            self.number += batch[0].shape[0]
        if batch_idx == 7 and self.into == "an object, later":
            self.state.calls += 1
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        os.environ[BATCH_IDX] = str(batch_idx)
        self.layers[1].train(batch_idx >= 2 and self.into == "a block's buffers")


@pytest.mark.filterwarnings("ignore::roundpipe_lightning.engine.chain.pieces.WholeBatchWarning")
@pytest.mark.parametrize("kind", [RoundPipeStrategy, EmulatedStrategy])
@pytest.mark.parametrize(
    "into", ["a buffer", "a buffer, anew", "a block's buffers", "an attribute"]
)
def test_what_a_later_batch_writes_is_written_once(kind: Any, into: str) -> None:
    one, module = train_alike(lambda: Counting(into), kind(num_microbatches=2), max_steps=4)
    assert module.number == one.number
    for mine, others in zip(module.buffers(), one.buffers(), strict=True):
        torch.testing.assert_close(mine, others)


def _of_pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    pairs = outputs @ targets.T
    return functional.cross_entropy(pairs, torch.arange(len(pairs), device=pairs.device))


class OfPairs(nn.Module):
    forward = staticmethod(_of_pairs)


class Alternating(Regressor):
    """Its fourth batch has another loss, over pairs of samples."""

    is_late = is_late_class = False

    def __init__(self, asks: Callable[[Alternating, int], bool]) -> None:
        super().__init__()
        self.asks = asks
        self.settings = {"late": False}
        self.state = SimpleNamespace(late=False)
        self.loss: Callable[..., Tensor] = functional.mse_loss
        self.criterion: nn.Module = nn.MSELoss()

    def mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.is_late = batch_idx == 3
        self.settings["late"] = self.state.late = noted.late = batch_idx == 3
        type(self).is_late_class = self.trainer.is_late = batch_idx == 3  # type: ignore[attr-defined]
        self.head.train(batch_idx != 3)
        if batch_idx == 3:
            self.new = True
            self.mean, self.criterion = _of_pairs, OfPairs()  # type: ignore[method-assign]
        self.loss = _of_pairs if batch_idx == 3 else functional.mse_loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        self.log("batch", batch_idx)
        return (_of_pairs if self.asks(self, batch_idx) else functional.mse_loss)(outputs, batch[1])


DECISIONS: dict[str, Callable[[Alternating, int], bool]] = {
    "a number": lambda module, batch_idx: batch_idx == 3,
    "a remainder": lambda module, batch_idx: (batch_idx + 1) % 4 == 0,
    "a place": lambda module, batch_idx: [False, False, False, True][batch_idx],
    "a set": lambda module, batch_idx: batch_idx in {3, 5},
    "a step": lambda module, batch_idx: (module.global_step + 1) / 4 >= 1,
    "the last batch": lambda module, batch_idx: module.trainer.is_last_batch,
    "is_late": lambda module, batch_idx: module.is_late,
    "settings": lambda module, batch_idx: module.settings["late"],
    "state": lambda module, batch_idx: module.state.late,
    "loss": lambda module, batch_idx: module.loss is _of_pairs,
    "noted": lambda module, batch_idx: noted.late,
    "is_late_class": lambda module, batch_idx: type(module).is_late_class,
    "criterion": lambda module, batch_idx: isinstance(module.criterion, OfPairs),
    "mean": lambda module, batch_idx: module.mean is _of_pairs,
    "new": lambda module, batch_idx: getattr(module, "new", False),
    "head.training": lambda module, batch_idx: not module.head.training,
    "a Trainer": lambda module, batch_idx: module.trainer.is_late,  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("by", DECISIONS)
def test_a_later_batch_with_another_loss(said: list[str], by: str) -> None:
    strategy = RoundPipeStrategy(num_microbatches=2)
    train_alike(lambda: Alternating(DECISIONS[by]), strategy, max_epochs=1)
    reasons = ["is proven", f"the step reads {by}, which has changed"]
    by_number = ["it decides by batch_idx or by the Trainer's epoch"]
    expected = by_number if by.startswith(("a ", "the ")) else reasons
    assert len(said) == len(expected)
    assert all(reason in text for reason, text in zip(expected, said, strict=True))


class BySize(LanguageModel):
    """Its loss has another form for short sequences, or for few rows."""

    def __init__(self, dim: int, least: int) -> None:
        super().__init__()
        self.dim, self.least = dim, least

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch.values() if isinstance(batch, dict) else batch
        loss = functional.cross_entropy(self(ids).flatten(0, 1), ids.flatten())
        is_odd = ids.shape[self.dim] < self.least and not isinstance(batch, dict)
        return loss.square() if is_odd else loss


@pytest.mark.parametrize(
    ("sizes", "dim", "least", "reason"),
    [
        ((8, 5), 1, 6, "computes with a mean over rows (pow)"),
        ((4, 12), 0, 3, "computes something else for another number of rows"),
    ],
    ids=["length", "rows"],
)
def test_a_later_batch_of_another_size(
    said: list[str], *, sizes: tuple[int, int], dim: int, least: int, reason: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 12), (8, 12), (8, 9), sizes, sizes]
    batches: Any = [
        (torch.randint(1, training.VOCABULARY, shape, generator=generator),) for shape in shapes
    ]
    batches[3] = {"ids": batches[3][0]}  # another form, with another loss
    data: Any = DataLoader(batches, batch_size=None)
    strategy = RoundPipeStrategy(num_microbatches=2)
    train_alike(lambda: BySize(dim, least), strategy, data=data, max_epochs=1)
    assert ["'step'" in text for text in said] == [True, True, False], said
    assert reason in said[2]


class PastAttributes(Regressor):
    """Its fourth batch has another loss, which it learns from the `__dict__` of a module."""

    def __init__(self, asks: Callable[[Any], Any]) -> None:
        super().__init__()
        self.asks = asks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            vars(self.head)["late"] = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.mse_loss(self(batch[0]), batch[1])
        return loss.log1p() if self.asks(self.head) else loss


@pytest.mark.parametrize("mode", ["auto", "blocks"])
@pytest.mark.parametrize(
    "asks",
    [
        lambda head: vars(head).get("late", False),
        lambda head: "late" in head.__dict__,
        lambda head: dict(vars(head)).get("late"),
        lambda head: [name for name, _ in vars(head).items() if name == "late"],
        lambda head: "late" in vars(head) and head.__dict__["late"],
    ],
)
def test_reads_past_attributes(asks: Callable[[Any], Any], mode: Any) -> None:
    strategy = RoundPipeStrategy(num_microbatches=2, microbatching=mode)
    train_alike(lambda: PastAttributes(asks), strategy, max_epochs=1)


def test_what_a_step_keeps_past_attributes() -> None:
    class Keeping(Regressor):
        @cached_property
        def scale(self) -> Tensor:
            return 1 + torch.rand(())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert "passing" not in self.__dict__
            self.__dict__["steps"] = self.__dict__.get("steps", 0) + 1
            self.__dict__["passing"] = self.briefly = True
            loss = super().training_step(batch, batch_idx) * self.scale * self.__dict__["steps"]
            del self.__dict__["passing"], self.briefly
            own = vars(self)
            own.update(before=own.setdefault("last", 1))
            own |= {"last": own.pop("before") + 1}
            assert len(own) == len(own.copy()) == len(own | {})
            return loss

        def on_train_end(self) -> None:
            self.drawn = torch.rand(())

    one, module = train_alike(Keeping, RoundPipeStrategy(num_microbatches=2), max_steps=3)
    assert (module.steps, module.scale, module.drawn) == (3, one.scale, one.drawn)
    assert module.last == 4
    assert not hasattr(module, "before")


def test_pinned_steps_say_what_they_write() -> None:
    strategy = RoundPipeStrategy(num_microbatches=2, microbatching="step")
    trainer = make_trainer(strategy=strategy, max_steps=3)
    with pytest.warns(UserWarning, match=r"writes Counting\.number: .* Set microbatching='blocks'"):
        trainer.fit(Counting("an attribute"), regression_data())
    strategy = RoundPipeStrategy(num_microbatches=2, microbatching="step")
    trainer = make_trainer(strategy=strategy, max_steps=3)
    trainer.fit(Counting("a new flag"), regression_data())
    strategy = RoundPipeStrategy(num_microbatches=2, microbatching="step")
    trainer = make_trainer(strategy=strategy, max_steps=8)
    with pytest.warns(UserWarning, match=r"The step, or another thread, writes state: "):
        trainer.fit(Counting("an object, later"), regression_data(64))


def test_a_mean_over_rows_is_weighed_by_rows() -> None:
    """Whatever labels there are: in `auto` the proof says what the loss averages over."""

    class OfRows(LanguageModel):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            mean: Tensor = self(batch["input_ids"]).square().mean(2).mean()
            return mean

    data = DataLoader(PaddedSequences(20), batch_size=4)
    train_alike(OfRows, RoundPipeStrategy(num_microbatches=2), data=data, max_epochs=1)


def test_what_is_proven_to_be_such_a_mean_is_logged_with_the_weights_of_the_loss() -> None:
    """A `batch_size` weighs batches in an epoch, and not microbatches of other targets."""

    class Logging(LanguageModel):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log(
                "twice", 2 * loss, on_step=True, on_epoch=True, batch_size=len(batch["labels"])
            )
            return loss

    data = DataLoader(PaddedSequences(20), batch_size=4)
    strategies = ["auto", RoundPipeStrategy(num_microbatches=2)]
    (_, one), (_, several) = train_with(strategies, Logging, data, max_epochs=1)
    assert isinstance(several.strategy, RoundPipeStrategy)
    assert several.strategy.last_step is not None
    assert not several.strategy.last_step.plan.joined
    torch.testing.assert_close(
        several.callback_metrics["twice_epoch"], one.callback_metrics["twice_epoch"]
    )


def test_pinned_steps_say_why_they_are_not_proven(said: list[str]) -> None:
    class OfAMean(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return functional.mse_loss(self(batch[0]), batch[1]).log1p()

    class Known(OfAMean):
        averages_samples = True

    for kind in (Regressor, Known, OfAMean):
        strategy = RoundPipeStrategy(num_microbatches=2, microbatching="step")
        make_trainer(strategy=strategy, max_steps=3).fit(kind(), regression_data())
    (text,) = said
    assert "not proven" in text
    assert "it computes with a mean over rows (log1p)" in text
    assert "microbatching='blocks' is exact" in text


class Closing(nn.Linear):
    """Closes what it holds when it goes."""

    closed: ClassVar[list[str]] = []

    def __del__(self) -> None:
        self.closed.append("closed")


def test_what_stands_for_a_module_does_not_end_as_the_module() -> None:
    module = Regressor()
    module.layers[1], module.head = Closing(WIDTH, WIDTH), Closing(WIDTH, 1)
    make_trainer(strategy=RoundPipeStrategy(num_microbatches=2), max_steps=2).fit(
        module, regression_data()
    )
    assert not Closing.closed


class Rows(dict[str, Tensor]):
    """A batch as a tensordict is one: iterating over it gives rows, not keys."""

    def __iter__(self) -> Any:
        return iter(range(len(self["x"])))


def test_a_batch_whose_rows_are_iterated_over() -> None:
    class OfRows(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    def rows(samples: list[Any]) -> Rows:
        x, y = torch.utils.data.default_collate(samples)
        return Rows(x=x, y=y)

    data = DataLoader(regression_data().dataset, batch_size=8, collate_fn=rows)
    strategy = RoundPipeStrategy(num_microbatches=2)
    train_alike(OfRows, strategy, data=data, max_steps=2, tolerance=1e-6)


@pytest.mark.parametrize(("count", "joined"), [(lambda module: None, False), (add, True)])
def test_a_resumed_training_keeps_the_choice(
    tmp_path: Path, said: list[str], count: Callable[[Counts], Any], joined: bool
) -> None:

    def fit(
        max_steps: int, ckpt_path: Path | None = None, count: Callable[[Counts], Any] = count
    ) -> Any:
        strategy = RoundPipeStrategy(num_microbatches=2)
        trainer = make_trainer(strategy=strategy, max_steps=max_steps)
        trainer.fit(Counts(count), regression_data(), ckpt_path=ckpt_path)
        return trainer

    fit(1).save_checkpoint(tmp_path / "first.ckpt")
    (text,) = said
    for part in ("because" if joined else "proven", "costs" if not joined else "wait", "settles"):
        assert part in text
    plan = fit(2, tmp_path / "first.ckpt").strategy.last_step.plan
    assert (len(said), plan.joined) == (1, joined)
    # The code has changed: it is proven anew.
    plan = fit(2, tmp_path / "first.ckpt", lambda module: module.current_epoch > 5)
    assert plan.strategy.last_step.plan.joined
    assert len(said) == (1 if joined else 2)
