import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from roundpipe_lightning import RoundPipeStrategy
from tests.emulation.test_benchmark import BENCHMARKS
from tests.kit.training import Regressor, make_trainer, regression_data

PROGRAMS = """
    clip summed_loss vae byol stateful_rnn detection encoder_decoder metrics graphs running_scales
    kept_balance mixtral past_arguments target_network
""".split()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    programs: Any = importlib.import_module("programs")
    options = {"recompute": "full", "microbatching": "blocks"}
    (run,) = programs.judge(name, options, counts=[4])
    assert (run.verdict, run.differences, run.message) == ("same", (), "")


class Repeated(Regressor):
    """The same batch again and again, with dropout, and the gradients of each step."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3, dropout=0.3)
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.gradients.append(torch.cat([grad.flatten() for grad in grads]).clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_gradients_with_dropout_have_the_same_mean_and_spread(tmp_path: Path) -> None:
    num_steps = 50
    batches: Any = [next(iter(regression_data(8)))] * num_steps
    means, spreads = [], []
    split = [
        RoundPipeStrategy(num_microbatches=4, recompute="full", microbatching=mode)
        for mode in ("step", "blocks")
    ]
    for strategy in ("auto", *split):
        torch.manual_seed(3)
        module = Repeated()
        trainer = make_trainer(tmp_path, strategy=strategy, max_epochs=1)
        trainer.fit(module, DataLoader(batches, batch_size=None))
        gradients = torch.stack(module.gradients).double()
        means.append(gradients.mean(0))
        spreads.append(gradients.var(0))
    for mean, spread in zip(means[1:], spreads[1:], strict=True):
        # Squares of what is normal with deviation 1, if the means are the same.
        distances = (mean - means[0]).square() / ((spread + spreads[0]) / num_steps)
        assert 0.4 < distances.mean() < 2.5
        assert 0.7 < spread.sum() / spreads[0].sum() < 1.4  # every row has dropped its own
