"""Batches in an order that depends on the seed and the epoch alone, and that can be resumed."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler


class Windows(Dataset[dict[str, Tensor]]):
    """Packed windows as items `{"input_ids", "labels"}`, int64, shape (seq_len,).

    Args:
        tokens: Token ids, any integer dtype, shape (windows, seq_len).
    """

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.tokens[index].to(torch.int64)
        return {"input_ids": ids, "labels": ids.clone()}


class SeededOrder(Sampler[int]):
    """A new permutation in every epoch, drawn from `(seed, epoch)` and no global generator.

    Args:
        length: Number of items.
        seed: Seed of all permutations.
    """

    def __init__(self, length: int, *, seed: int) -> None:
        self.length = length
        self.seed = seed
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation; Lightning calls this before every epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.length, generator=generator).tolist()
        start, self.start = self.start, 0
        return iter(order[start:])


class ResumableLoader(DataLoader[Any]):
    """A loader that goes on in the middle of an epoch with the batch that would have come next.

    Lightning saves `state_dict` in every checkpoint and hands it back before the first batch.

    Args:
        dataset: What to load.
        order: The order of the epoch; this loader owns it.
        batch_size: Samples in a batch; a smaller last one is dropped.
        num_workers: Processes that prepare batches; 0 prepares them in the Trainer's.
        collate: Makes a batch of samples; None stacks their tensors.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        order: SeededOrder,
        batch_size: int,
        num_workers: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__(
            dataset,
            sampler=order,
            batch_size=batch_size,
            num_workers=num_workers,
            collate_fn=collate,
            drop_last=True,
            persistent_workers=num_workers > 0,
        )
        self.order = order
        self.num_yielded = 0
        self._num_skipped = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.num_yielded, self._num_skipped = self._num_skipped, 0
        batch_size = self.batch_size
        assert batch_size is not None
        self.order.start = self.num_yielded * batch_size
        # made at once: a seed for processes is drawn here, before the random state is restored
        return self._counted(super().__iter__())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.num_yielded += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """How many batches of the current epoch were handed out."""
        return {"num_yielded": self.num_yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next epoch after the batches that `state` says were handed out."""
        self._num_skipped = int(state["num_yielded"]) % len(self)
