"""Random numbers that a recompute draws again, whatever thread or worker it runs on.

PyTorch's default generators are process-wide, but several microbatches run at once, so neither
"save the state, restore it later" nor "whoever comes first" can work. Instead every operation that
draws random numbers gets a seed of its own, for a generator of the engine's where the operation
takes one (`capture/randomness.py`), else for the default ones during the draw:

    seed = hash(step seed, microbatch, place, number of the draw within the place)

where the place is a block or a segment of user code. The forward pass of block 3 for microbatch 1
and its recompute therefore see the same dropout masks, on any number of workers. The strategy makes
the step seed of the seed of the run and the batch's number: `seed_everything` governs it.

The seeds follow the integer mixer SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
number generators, OOPSLA 2014).
"""

from __future__ import annotations

import functools
import pickle
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundpipe_lightning.engine.capture.torch_functions import is_called_from
from roundpipe_lightning.errors import RandomnessError

_IN_PLACE = frozenset(
    """
    bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_
    """.split()
)
"""Methods that fill a tensor, and take a generator."""

_RUNNER = "roundpipe_lightning.engine.chain.values"  # the engine's code around a block's

_OF_DROPOUT = ("input", "p", "training", "inplace")


@functools.cache
def _takes_generators(device: torch.device) -> bool:
    """Return whether operations on a device draw from a generator that they are given."""
    try:
        torch.empty(1, device=device).bernoulli_(0.5, generator=torch.Generator(device))
    except RuntimeError:  # the meta device has none; some backends hand theirs to the processor
        return False
    return True


_MASK = (1 << 64) - 1

#: Functions that draw from a default generator: what torch tags `nondeterministic_seeded`, by its
#: Python names, and the functions of torch.nn.functional around them. A test holds it complete.
RANDOM_FUNCTIONS = frozenset(
    """
    _fused_dropout _sample_dirichlet _standard_gamma alpha_dropout alpha_dropout_ bernoulli
    bernoulli_ binomial cauchy cauchy_ dropout dropout1d dropout2d dropout3d dropout_
    exponential exponential_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout
    feature_dropout_ fractional_max_pool2d fractional_max_pool2d_with_indices
    fractional_max_pool3d fractional_max_pool3d_with_indices geometric geometric_ gru
    gumbel_softmax kaiming_uniform_ lobpcg log_normal log_normal_ lstm miopen_rnn
    multi_head_attention_forward multinomial native_dropout normal normal_ normal_functional
    pca_lowrank poisson rand rand_like randint randint_like randn randn_like random random_
    randperm rnn_relu rnn_tanh rrelu rrelu_ rrelu_with_noise rrelu_with_noise_
    rrelu_with_noise_functional scaled_dot_product_attention svd_lowrank uniform uniform_
    """.split()
)

#: Where the probability stands in functions that draw only if it is positive: position, keyword.
_PROBABILITY = {
    "dropout": (1, "p"),
    "dropout1d": (1, "p"),
    "dropout2d": (1, "p"),
    "dropout3d": (1, "p"),
    "scaled_dot_product_attention": (4, "dropout_p"),
}


def mix(*parts: int) -> int:
    """Hash integers to one of 63 bits: SplitMix64 over a running sum."""
    state = 0
    for part in parts:
        state = (state + 0x9E3779B97F4A7C15 + (part & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


@contextmanager
def seeded(generators: Sequence[torch.Generator], seed: int) -> Iterator[None]:
    """Seed generators until the end of the context, then put them back."""
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def may_draw(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name not in RANDOM_FUNCTIONS:
        return False
    if name in _PROBABILITY:
        position, keyword = _PROBABILITY[name]
        default = 0.0 if name == "scaled_dot_product_attention" else 0.5
        probability = args[position] if len(args) > position else kwargs.get(keyword, default)
        return bool(probability != 0)
    return True


def _without_dropout(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    name = getattr(func, "__name__", "")
    if "dropout" in name and isinstance(args[0] if args else kwargs.get("input"), Tensor):
        return torch.Tensor.clone, (args[0] if args else kwargs["input"],), {}
    if name == "scaled_dot_product_attention":
        return (
            func,
            args[:4],
            {k: v for k, v in kwargs.items() if k != "dropout_p"}
            | dict(zip(("is_causal",), args[5:6], strict=False)),
        )
    if name == "multi_head_attention_forward":
        kwargs = {**kwargs, "training": False}
    return func, args, kwargs


class UnrepeatableDrawWarning(UserWarning):
    """Random numbers are drawn where they depend on which thread comes first."""


_IN_BACKWARD = (
    "A backward pass (a torch.autograd.Function, a hook), or code beside it that the engine does "
    "not see, draws random numbers: who gets which is not the same every time. Draw them in the "
    "forward pass and save them for the backward pass."
)
_IN_BLOCK = (
    "A block, or code beside it, seeds the process's random generators (torch.manual_seed, "
    "random.seed) or draws from them where the engine does not see it: recomputes and microbatches "
    "get other numbers than one device does. Draw from a torch.Generator that the block makes and "
    "seeds, or draw before the blocks and give them the numbers."
)


class StepDraws:
    """The draws of one step from the process-wide generators.

    The lock guards the generators: one draw at a time, their states put back after it. All steps of
    an engine share it. It warns once of draws that it does not see, if it `looks_for_others`.
    """

    def __init__(self, lock: threading.Lock, *, looks_for_others: bool = False) -> None:
        self.num_draws = 0  # how often the step has drawn from generators that others may draw from
        self.lock = lock
        self._looks_for_others = looks_for_others

    def states(self, generators: Sequence[torch.Generator]) -> bytes | None:
        """Return what `check` compares; None where nothing is looked for."""
        if not self._looks_for_others:
            return None
        with self.lock:
            of_torch = [generator.get_state().numpy().tobytes() for generator in generators]
        of_numpy = np.random.get_state()  # noqa: NPY002 - what users' code draws from
        return pickle.dumps((of_torch, random.getstate(), of_numpy))

    def check(
        self, before: bytes | None, generators: Sequence[torch.Generator], message: str
    ) -> None:
        """Warn if generators have moved since `before`."""
        if before is None or self.states(generators) == before:
            return
        with self.lock:
            is_first, self._looks_for_others = self._looks_for_others, False
        if is_first:
            warnings.warn(message, category=UnrepeatableDrawWarning, stacklevel=2)

    def draw(
        self, seed: int, generators: Sequence[torch.Generator], call: Callable[[], Any]
    ) -> Any:
        self.num_draws += 1
        with self.lock, seeded(generators, seed):
            return call()


@dataclass(eq=False)
class RandomStream:
    """The random numbers of one microbatch, for blocks and user code alike."""

    step_draws: StepDraws
    _: KW_ONLY
    step_seed: int
    microbatch: int
    generators: Callable[[], Sequence[torch.Generator]]
    # whether code outside the blocks draws from the default generators
    is_free_outside: bool = False
    watches_blocks: bool = True  # no code outside runs beside them that may draw

    def __post_init__(self) -> None:
        self.drops_out = True
        self._seed = mix(self.step_seed, self.microbatch)
        self._place = mix(self._seed, 0)
        self.num_draws = 0
        self._block: int | None = None
        self._outside = self._place, 0  # place and draws of the code outside while a block runs
        self._before: bytes | None = None  # the generators, before a block
        self._given_states: dict[tuple[int, int], bytes] = {}
        self._made: dict[torch.device, torch.Generator] = {}  # this thread's

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a torch function; RandomnessError if it draws where a recompute cannot repeat it."""
        if not self.drops_out:
            func, args, kwargs = _without_dropout(func, args, kwargs)
        if not may_draw(func, args, kwargs):
            return func(*args, **kwargs)
        if self.is_free_outside and self._block is None:
            with self.step_draws.lock:
                return func(*args, **kwargs)
        if is_called_from("torch.utils.checkpoint", within=_RUNNER):
            raise RandomnessError(
                f"{func.__name__} draws random numbers under activation checkpointing, whose own "
                "recompute would see others. Turn it off (for transformers models "
                "`gradient_checkpointing_disable()`): the engine recomputes blocks already."
            )
        self._check_block()  # the block may put back what it has seeded
        self.num_draws += 1
        given = kwargs.get("generator")
        if given is not None:
            self.step_draws.num_draws += 1
            self._check_given(given)
            return func(*args, **kwargs)
        seed = mix(self._place, self.num_draws)
        result = self._call_seeded(func, args, kwargs, seed)
        if result is NotImplemented:
            result = self.step_draws.draw(seed, self.generators(), lambda: func(*args, **kwargs))
        return result

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a backward pass, which should not draw, until the end of the context."""
        before = self.step_draws.states(self.generators())
        yield
        self.step_draws.check(before, self.generators(), _IN_BACKWARD)

    def draw_all(self, call: Callable[[], Any]) -> Any:
        self.num_draws += 1
        seed = mix(self._place, self.num_draws)
        return self.step_draws.draw(seed, self.generators(), call)

    def _check_given(self, generator: torch.Generator) -> None:
        """Let a block draw from a generator of its own only if the recompute finds it as it was."""
        if self._block is None:
            return
        state = generator.get_state().numpy().tobytes()
        if self._given_states.setdefault((self._block, self.num_draws), state) != state:
            raise RandomnessError(
                "A block draws from a torch.Generator that its forward pass has moved on, so the "
                "recompute would see other numbers. Draw without `generator=` (the engine then "
                "repeats the numbers), or seed the generator in the block before it draws."
            )

    def begin_block(self, index: int) -> None:
        """Draw as block `index` until `end_block`, always the same numbers."""
        self._outside = self._place, self.num_draws
        self._place, self.num_draws, self._block = mix(self._seed, 1, index), 0, index
        self._before = self.step_draws.states(self.generators()) if self.watches_blocks else None

    def end_block(self) -> None:
        self._check_block()
        self._before = None
        (self._place, self.num_draws), self._block = self._outside, None

    def _check_block(self) -> None:
        if self._before is not None:
            self.step_draws.check(self._before, self.generators(), _IN_BLOCK)

    def _call_seeded(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
    ) -> Any:
        """Call a torch function that draws as if the default generators had this seed.

        `NotImplemented` if it can only draw from a default generator.
        """
        name = getattr(func, "__name__", "")
        if not isinstance(args[0] if args else kwargs.get("input"), Tensor):
            return NotImplemented
        if name in _IN_PLACE and _takes_generators(args[0].device):
            generator = self._seeded(args[0].device, seed)
            return func(*args, **{**kwargs, "generator": generator})
        if name == "dropout":
            return self._dropout(func, args, kwargs, seed)
        return NotImplemented

    def _seeded(self, device: torch.device, seed: int) -> torch.Generator:
        if device not in self._made:
            self._made[device] = torch.Generator(device)
        return self._made[device].manual_seed(seed)

    def _dropout(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], seed: int
    ) -> Any:
        """Drop out, with the bits of PyTorch's own, forward and backward."""
        given = dict(zip(_OF_DROPOUT, args, strict=False)) | dict(kwargs)
        x, p, in_place = given["input"], given.get("p", 0.5), given.get("inplace", False)
        trains = given.get("training", given.get("train", True))
        if not trains or not 0 < p < 1 or not x.numel():
            return func(*args, **kwargs)  # draws nothing
        if x.layout is not torch.strided or not _takes_generators(x.device):
            return NotImplemented
        generator = self._seeded(x.device, seed)
        if x.device.type == "cuda" and not in_place:
            return torch._fused_dropout(x, 1 - p, generator=generator)[0]  # noqa: SLF001
        factors = torch.empty_like(x).bernoulli_(1 - p, generator=generator).div_(1 - p)
        return x.mul_(factors) if in_place else x * factors
