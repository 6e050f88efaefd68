import logging
import sys
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundpipe_lightning.errors import ConfigurationError
from roundpipe_lightning.optim import HostAdamW, kernel, native
from roundpipe_lightning.optim.native import KernelForm, noise_keys
from roundpipe_lightning.optim.rounding import round_stochastically
from roundpipe_lightning.optim.state import FlatParameter, MomentFormat, Settings

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 7, 8, 31, 256, 1000, 5003)  # all loops, with and without what is left over


def stepped(
    *,
    choice: str,
    values: torch.dtype,
    gradient: torch.dtype,
    copy: torch.dtype | None,
    offset: int,
    **options: Any,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    mine = [nn.Parameter(torch.randn(size, generator=generator).to(values)) for size in SIZES]
    places = [torch.zeros(size + offset + 5, dtype=copy or torch.float32) for size in SIZES]
    copies = [place[offset : offset + p.numel()] for place, p in zip(places, mine, strict=True)]
    with closing(HostAdamW(mine, kernel=choice, num_threads=1, lr=0.01, **options)) as optimizer:
        if copy is not None:
            optimizer.write_copies(dict(zip(mine, copies, strict=True)))
        for _ in range(3):
            for parameter in mine:
                drawn = torch.randn(parameter.shape, generator=generator) * 0.01
                parameter.grad_dtype = gradient
                parameter.grad = drawn.to(gradient)
            optimizer.step()
        states = [optimizer.state[parameter] for parameter in mine]
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [*mine, *places, *kept]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


F32, BF16, F16 = FLOATS


@pytest.mark.parametrize(
    ("moments", "values", "gradient", "copy", "offset"),
    [
        ("fp32", F32, F32, None, 0),
        ("fp32", F32, BF16, BF16, 3),
        ("fp32", BF16, BF16, BF16, 0),
        ("fp32", F16, F16, F16, 32),
        ("bf16", F32, BF16, BF16, 0),
        ("bf16", BF16, F32, None, 0),
        ("8bit", F32, BF16, BF16, 3),
        ("8bit", BF16, F16, None, 0),
    ],
)
def test_bits_are_those_of_torchs_operations(
    moments: str, values: torch.dtype, gradient: torch.dtype, copy: torch.dtype | None, offset: int
) -> None:
    mine, theirs = (
        stepped(
            choice=choice,
            values=values,
            gradient=gradient,
            copy=copy,
            offset=offset,
            moments=moments,
        )
        for choice in ("native", "torch")
    )
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(mine, theirs, strict=True))


PLAIN = Settings(lr=0.1, beta1=0.0, beta2=0.5, eps=1e-8, weight_decay=0.0, maximize=False)
UNMOVED = Settings(lr=0.0, beta1=0.5, beta2=0.5, eps=1.0, weight_decay=0.0, maximize=False)


def once(
    values: Tensor,
    gradient: Tensor,
    *,
    copy: Tensor | None = None,
    settings: Settings = PLAIN,
) -> FlatParameter:
    parameter = FlatParameter(
        values=values,
        gradient=gradient,
        state={name: torch.full(values.shape, 0.25) for name in ("exp_avg", "exp_avg_sq")},
        step=torch.ones(()),
        copy=copy,
        seed=12345678901234567890,
        settings=settings,
    )
    step = native.prepare(parameter, moments=MomentFormat.FP32, stochastic_rounding=True)
    assert step is not None
    step(0, values.numel())
    return parameter


def test_rounding_at_random_goes_on_behind_four_billion_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = (3 << 32) + 1024
    once(torch.ones(1024).bfloat16(), torch.ones(1024))  # compiled and compared with torch
    keys = noise_keys
    monkeypatch.setattr(native, "noise_keys", lambda seed, first: keys(seed, start + first))
    gradient = torch.linspace(-2, 2, 1024)
    wide, narrow = (torch.linspace(-1, 1, 1024).bfloat16().to(d) for d in FLOATS[:2])
    once(wide, gradient)
    once(narrow, gradient)
    expected = torch.empty_like(narrow)
    round_stochastically(wide, out=expected, seed=12345678901234567890, offset=start)
    assert torch.equal(bits(narrow), bits(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_read_as_it_is(dtype: torch.dtype) -> None:
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    gradient = patterns.view(dtype)
    finite = gradient.float().isfinite()
    whole = gradient[finite].clone()
    # with beta1=0 the first moment becomes the gradient
    found = once(torch.zeros(whole.numel()), whole).state["exp_avg"]
    assert torch.equal(found, whole.float())
    rest = gradient[~finite].clone()
    slow = replace(PLAIN, beta1=0.75)
    found = once(torch.zeros(rest.numel()), rest, settings=slow).state["exp_avg"]
    torch.testing.assert_close(found, rest.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_to_the_nearest_like_torch_does(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(1 << 16, dtype=torch.int32) << 16  # every sign and exponent
    ties = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001])
    drawn = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=generator)
    numbers = torch.cat([(exponents[:, None] + ties).reshape(-1), drawn]).to(torch.int32)
    values = numbers.view(torch.float32)
    copy = torch.zeros(values.numel(), dtype=dtype)
    once(values.clone(), torch.zeros(values.numel()), copy=copy, settings=UNMOVED)
    expected = values.to(dtype)
    known = ~values.isnan()
    assert torch.equal(bits(copy[known]), bits(expected[known]))
    assert bool(copy[~known].isnan().all())


def test_what_is_no_number_goes_where_torch_lets_it_go() -> None:
    gradient = torch.ones(40)
    gradient[[3, 20, 39]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    results = []
    for choice in ("native", "torch"):
        mine = nn.Parameter(torch.ones(40))
        mine.grad = gradient.clone()
        with closing(HostAdamW([mine], kernel=choice)) as optimizer:
            optimizer.step()
        results += [mine.detach(), optimizer.state[mine]["exp_avg_sq"]]
    for one, other in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert results[0].isnan().nonzero().flatten().tolist() == [3, 20, 39]


# ------------------------------------------------------------------------ where it cannot be made


@pytest.fixture
def parameter() -> nn.Parameter:
    made = nn.Parameter(torch.ones(5))
    made.grad = torch.ones(5)
    return made


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what was found about this machine."""
    for function in (kernel._reason_not_native, kernel._warn):
        monkeypatch.setattr(kernel, function.__name__, function.__wrapped__)
    monkeypatch.setattr(native, "checked", native.checked.__wrapped__)


def check_that_torch_steps(
    parameter: nn.Parameter, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), closing(HostAdamW([parameter])) as optimizer:
        optimizer.step()
    assert "HostAdamW steps with torch's operations" in caplog.text
    assert problem in caplog.text
    assert bool((parameter < 1).all())
    with (
        pytest.raises(ConfigurationError, match=f"kernel='native' is not possible.*{problem}"),
        closing(HostAdamW([parameter], kernel="native")) as optimizer,
    ):
        optimizer.step()
    HostAdamW([parameter], kernel="torch")


@pytest.mark.usefixtures("unknown")
def test_a_torch_that_computes_otherwise_is_noticed(
    parameter: nn.Parameter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "_WIDTHS", (7,))
    check_that_torch_steps(parameter, "computes AdamW in an order that is not known", caplog)


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize(
    ("machine", "features", "message"),
    [
        ("x86_64", {"avx2": False, "fma": False, "f16c": True}, "has no avx2 and no fma"),
        ("AMD64", {"avx2": True, "fma": False, "f16c": True}, "has no fma"),
    ],
)
def test_a_processor_that_lacks_instructions(
    machine: str,
    features: dict[str, bool],
    message: str,
    parameter: nn.Parameter,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: features)
    check_that_torch_steps(parameter, message, caplog)


@pytest.mark.usefixtures("unknown")
def test_a_system_on_which_nothing_can_be_compiled(
    parameter: nn.Parameter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(form: KernelForm) -> None:
        raise RuntimeError("cannot allocate executable memory")

    monkeypatch.setattr(native, "checked", refuse)
    check_that_torch_steps(parameter, "cannot allocate executable memory", caplog)


@pytest.mark.usefixtures("unknown")
def test_without_numba_torch_steps_and_the_log_says_so(
    parameter: nn.Parameter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    check_that_torch_steps(parameter, "numba cannot be imported", caplog)
