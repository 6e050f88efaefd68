import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from roundpipe_lightning import RoundPipeStrategy
from roundpipe_lightning.errors import RoundPipeError
from tests.kit.accelerators import NUM, device, for_trainer, needs_cuda, needs_one, needs_two
from tests.kit.training import make_trainer, parameter_error, same_bits

pytestmark = needs_one

WIDTH, HEADS, BLOCKS, STEPS = 64, 4, 6, 8


@pytest.fixture(autouse=True, scope="module")
def empty_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The machine is measured once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


class Decoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(WIDTH)
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        # Not the fused operation, which PyTorch's toy backend does not compute.
        attended = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        result: Tensor = x + self.outer(functional.gelu(self.inner(x)))
        return result


class Model(LightningModule):
    """Layers, and a loss that grows with the output."""

    def __init__(self, *, blow_up_at: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Decoder(dropout) for _ in range(BLOCKS))
        self.blow_up_at = blow_up_at

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
        loss = x.float().square().mean()
        if batch_idx == self.blow_up_at:
            loss = loss * float("inf")
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def data(*, length: int = 32, num_samples: int = 8 * STEPS) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(num_samples, length, WIDTH, generator=generator)
    return DataLoader(TensorDataset(samples), batch_size=8)


def trained(folder: Path, module: Model | None = None, **settings: Any) -> Model:
    module = Model() if module is None else module
    precision = settings.pop("precision", "32-true")
    flags = {flag: settings.pop(flag) for flag in _FLAGS & settings.keys()}
    loader = settings.pop("loader", None) or data()
    strategy: Any = RoundPipeStrategy(**settings) if settings else "auto"
    trainer = make_trainer(
        folder,
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        **{"accelerator": for_trainer(), **flags},
    )
    trainer.fit(module, loader)
    return module.cpu()


_FLAGS = {"accelerator", "devices", "accumulate_grad_batches"}


@pytest.mark.parametrize("num_devices", range(1, min(NUM, 2) + 1))
@pytest.mark.parametrize("per_device", [1, 2, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"update": "async"},
        {"recompute": "selective"},
        {"dropout": 0.2},
        {"accumulate_grad_batches": 2},
        {"microbatching": "blocks"},
    ],
    ids=str,
)
def test_training_is_that_of_cpu_workers(
    tmp_path: Path, settings: dict[str, Any], per_device: int, num_devices: int
) -> None:
    dropout = 0.0
    if "dropout" in settings:  # drawn by the accelerator's own generators where it has some
        dropout = 0.0 if _draws_its_own_numbers() else settings["dropout"]
    settings = {"microbatching": "step", **settings, "num_microbatches": 4}
    settings.pop("dropout", None)
    here = trained(
        tmp_path / "here",
        Model(dropout=dropout),
        devices=num_devices,
        workers_per_device=per_device,
        **settings,
    )
    host = trained(tmp_path / "host", Model(dropout=dropout), accelerator="cpu", **settings)
    assert parameter_error(here, host) < (1e-4 if torch.cuda.is_available() else 1e-6)


@needs_two
def test_devices_that_are_not_given_are_not_touched(tmp_path: Path) -> None:
    before, is_touched = torch.accelerator.memory_allocated(device(0)), _has_context_on_first()
    here = trained(tmp_path / "here", devices=[1], num_microbatches=4)
    host = trained(tmp_path / "host", accelerator="cpu", num_microbatches=4)
    assert parameter_error(here, host) < 1e-4
    assert torch.accelerator.memory_allocated(device(0)) <= before  # less where garbage was freed
    assert _has_context_on_first() == is_touched


def _has_context_on_first() -> bool:
    return torch.cuda.is_available() and bool(torch._C._cuda_hasPrimaryContext(0))  # type: ignore[attr-defined]


class _ReadsParameters(Dataset[Tensor]):
    """Rows that a forked worker makes from the parameters of the module that is trained."""

    def __init__(self, module: Model) -> None:
        self.module = module

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        weights = [parameter.flatten()[0] for parameter in self.module.parameters()]
        generator = torch.Generator().manual_seed(index)
        finite = torch.stack(weights).isfinite().all()
        return torch.randn(4, WIDTH, generator=generator) * finite


def test_forked_workers_read_page_locked_parameters(tmp_path: Path) -> None:
    module = Model()
    context = multiprocessing.get_context("fork")
    loader = DataLoader(
        _ReadsParameters(module),
        batch_size=8,
        num_workers=2,
        multiprocessing_context=context,
        collate_fn=_as_list,
    )
    here = trained(tmp_path / "here", module, loader=loader, num_microbatches=4)
    plain = DataLoader(_ReadsParameters(Model()), batch_size=8, collate_fn=_as_list)
    host = trained(tmp_path / "host", loader=plain, accelerator="cpu", num_microbatches=4)
    assert parameter_error(here, host) < 1e-4


def _as_list(rows: list[Tensor]) -> list[Tensor]:
    return [torch.stack(rows)]


@needs_cuda
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # of the compiler
@pytest.mark.parametrize("settings", [{"compile": True}, {"hints": {"resident": 0}}], ids=str)
@pytest.mark.parametrize("num_devices", range(1, min(NUM, 2) + 1))
@pytest.mark.parametrize("peers", [True, False])
def test_compiled_blocks_and_peer_copies(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    num_devices: int,
    peers: bool,
) -> None:
    if not peers:
        monkeypatch.setenv("ROUNDPIPE_NO_PEER_COPIES", "1")
    # Threads and processes that compile would stay.
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    settings = {**settings, "num_microbatches": 4}
    here = trained(tmp_path / "here", devices=num_devices, workers_per_device=2, **settings)
    host = trained(tmp_path / "host", accelerator="cpu", num_microbatches=4)
    assert parameter_error(here, host) < 1e-4


@needs_cuda
def test_quantised_blocks_of_bitsandbytes(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    module = Model()
    for layer in module.layers:
        inner: Any = layer.inner
        quantised = bitsandbytes.nn.Linear4bit(WIDTH, 4 * WIDTH, quant_type="nf4")
        quantised.load_state_dict(inner.state_dict())
        layer.inner = quantised.requires_grad_(False)
    here = trained(tmp_path, module, num_microbatches=4)
    assert all(torch.isfinite(p).all() for p in here.parameters() if p.is_floating_point())


def _draws_its_own_numbers() -> bool:
    """Whether a seed gives other numbers here than on the host."""
    drawn = []
    for place in (device(), torch.device("cpu")):
        torch.manual_seed(1)
        drawn.append(torch.rand(64, device=place).cpu())
    return not torch.equal(*drawn)


@needs_cuda  # others Lightning does not train on by itself
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [("32-true", 1e-4), ("bf16-mixed", 2e-2), ("bf16-true", 5e-2), ("16-mixed", 1e-2)],
)
@pytest.mark.parametrize("workers", [1, 4])
def test_training_is_that_of_one_device(
    tmp_path: Path, precision: str, tolerance: float, workers: int
) -> None:
    plain = trained(tmp_path / "plain", precision=precision)
    ours = trained(
        tmp_path / "ours", precision=precision, num_microbatches=4, workers_per_device=workers
    )
    assert parameter_error(ours, plain) < tolerance


@pytest.mark.parametrize("recompute", ["selective", "none"])
def test_what_is_recomputed_changes_nothing_but_rounding(tmp_path: Path, recompute: str) -> None:
    settings: dict[str, Any] = {"num_microbatches": 4, "microbatching": "step"}
    full = trained(tmp_path / "full", recompute="full", **settings)
    other = trained(tmp_path / recompute, recompute=recompute, **settings)
    assert parameter_error(other, full) < 1e-5


@pytest.mark.filterwarnings("ignore:.*use_deterministic_algorithms")  # matrix products, as a rule
def test_the_number_of_workers_changes_no_bit(tmp_path: Path) -> None:
    """Attention's backward adds in no order unless it is set to."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        runs = [
            trained(
                tmp_path / str(n),
                num_microbatches=4,
                workers_per_device=n,
                hints={"team_size": 1, "round_size": 4},  # gradients are summed per team and round
            )
            for n in (1, 2, 4)
        ]
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert same_bits(runs[1], runs[0])
    assert same_bits(runs[2], runs[0])


def test_streams_under_load_change_no_bit(tmp_path: Path) -> None:
    """Another stream keeps the device busy, so that copies and kernels end late and out of step."""
    quiet = trained(tmp_path / "quiet", num_microbatches=4, workers_per_device=2)
    ended = threading.Event()

    def load() -> None:
        with torch.Stream(device()) as stream:
            a = torch.randn(2048, 2048, device=device())
            while not ended.is_set():
                a = (a @ a).clamp(-1, 1)
                stream.synchronize()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        busy = trained(tmp_path / "busy", num_microbatches=4, workers_per_device=2)
    finally:
        ended.set()
        thread.join()
    assert parameter_error(busy, quiet) < 1e-5


@needs_cuda
def test_an_overflow_in_half_precision_skips_the_step(tmp_path: Path) -> None:
    plain = trained(tmp_path / "plain", Model(blow_up_at=3), precision="16-mixed")
    ours = trained(tmp_path / "ours", Model(blow_up_at=3), precision="16-mixed", num_microbatches=4)
    assert all(torch.isfinite(p).all() for p in ours.parameters())
    assert parameter_error(ours, plain) < 1e-2


@needs_cuda
def test_training_goes_on_after_a_device_was_out_of_memory(tmp_path: Path) -> None:
    module = Model()  # planned for memory that is not there
    strategy = RoundPipeStrategy(num_microbatches=4, dry_run=False, hardware="rtx4090x1")
    trainer = make_trainer(tmp_path, strategy=strategy, accelerator="gpu", devices=1, max_epochs=1)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, 256 * 2**20 / total))
    try:
        with pytest.raises((RuntimeError, RoundPipeError), match=r"(?i)memory"):
            trainer.fit(module, data(length=16384, num_samples=8))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    again = make_trainer(
        tmp_path / "again", strategy=RoundPipeStrategy(), accelerator="gpu", devices=1, max_epochs=1
    )
    again.fit(module, data())
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_nothing_is_left_on_the_device_after_a_training(tmp_path: Path) -> None:
    trained(tmp_path / "first", num_microbatches=4)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    for number in range(3):
        trained(tmp_path / str(number), num_microbatches=4)
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() <= before
