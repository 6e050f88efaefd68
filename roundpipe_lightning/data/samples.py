"""Samples as token ids: cut to length, packed into rows, padded into batches."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundpipe_lightning.errors import DataError

IGNORED = -100
"""Label of a position that is not to be predicted."""

Row = Mapping[str, Tensor]
"""Tensors of one sample by name; the last dimension of those that have one is the tokens."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One text as tokens.

    Attributes:
        input_ids: Token ids, int64, shape (tokens,).
        labels: The same ids, -100 where nothing is to be predicted; the first one always is.
    """

    input_ids: Tensor
    labels: Tensor

    @classmethod
    def of(cls, ids: Sequence[int], *, targets: Sequence[bool] | None = None) -> Sample:
        """A sample of token ids.

        Args:
            ids: The tokens.
            targets: Which of them are to be predicted; None: all but the first.
        """
        tokens = torch.tensor(ids, dtype=torch.int64)
        labels = tokens.clone()
        if targets is not None:
            labels[~torch.tensor(targets, dtype=torch.bool)] = IGNORED
        labels[:1] = IGNORED  # nothing comes before it
        return cls(input_ids=tokens, labels=labels)

    @property
    def num_targets(self) -> int:
        """Tokens that are to be predicted."""
        return int((self.labels != IGNORED).sum())

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, tokens: slice) -> Sample:
        labels = self.labels[tokens].clone()
        labels[:1] = IGNORED
        return Sample(input_ids=self.input_ids[tokens], labels=labels)


class TooLong(str, enum.Enum):
    """Treatment of a sample that is longer than the limit.

    It is an error that names the sample, is left out (how many were is logged), or is cut.
    """

    REFUSE = "refuse"
    DROP = "drop"
    CUT_END = "cut_end"
    CUT_START = "cut_start"

    def apply(self, sample: Sample, *, limit: int, place: str) -> Sample | None:
        """Bring a sample within the limit; None: it is to be left out.

        Args:
            sample: The sample.
            limit: Tokens it may have.
            place: Where it stands, for the message.

        Raises:
            DataError: It is too long and the policy is to refuse.
        """
        if len(sample) <= limit:
            return sample
        if self is TooLong.REFUSE:
            raise DataError(
                f"{place}: the sample has {len(sample)} tokens, more than data.seq_len={limit}. "
                "Raise data.seq_len up to what the model allows, or set data.too_long to drop "
                "(leave such samples out), cut_end or cut_start."
            )
        if self is TooLong.DROP:
            return None
        return sample[:limit] if self is TooLong.CUT_END else sample[len(sample) - limit :]


def as_row(sample: Sample) -> Row:
    """A sample as a row of its own."""
    return {
        "input_ids": sample.input_ids,
        "labels": sample.labels,
        "attention_mask": torch.ones_like(sample.input_ids),
    }


def packed_rows(samples: Iterable[Sample], *, seq_len: int) -> list[Row]:
    """Lay whole samples side by side in as few rows as a simple rule finds.

    The longest sample first, each into the row that it leaves the least room in (best fit
    decreasing, which needs at most 11/9 of the fewest rows possible and one more). Positions start
    anew with every sample: that is how transformers tells documents apart and keeps the attention
    of each to itself. There is no attention mask, which would switch this off.

    Args:
        samples: The samples, none longer than a row.
        seq_len: Tokens of a row at most.
    """
    bins: list[list[Sample]] = []
    room: list[tuple[int, int]] = []  # tokens that are free, and the row, ascending
    for sample in sorted(samples, key=len, reverse=True):
        place = bisect.bisect_left(room, (len(sample), -1))
        free, index = room.pop(place) if place < len(room) else (seq_len, len(bins))
        if index == len(bins):
            bins.append([])
        bins[index].append(sample)
        bisect.insort(room, (free - len(sample), index))
    return [packed_row(row) for row in bins]


def first_rows(
    samples: Sequence[Sample], *, num_rows: int, seq_len: int
) -> tuple[list[list[Sample]], list[Sample]]:
    """Fill rows with the first samples of a stream, each into the first row that has room.

    Args:
        samples: The samples in the order they are read.
        num_rows: Rows of a batch.
        seq_len: Tokens of a row at most; 0: one sample in each.

    Returns:
        The rows, once a sample fits into none of them, and the samples from that one on; before,
        no row and all samples.
    """
    rows: list[list[Sample]] = [[] for _ in range(num_rows)]
    free = [seq_len] * num_rows
    for index, sample in enumerate(samples):
        fitting = (n for n in range(num_rows) if not rows[n] or len(sample) <= free[n])
        place = next(fitting, None)
        if place is None:
            return rows, list(samples[index:])
        rows[place].append(sample)
        free[place] -= len(sample)
    return [], list(samples)


def packed_row(samples: Sequence[Sample]) -> Row:
    """Samples side by side in one row, each with positions of its own."""
    return {
        "input_ids": torch.cat([sample.input_ids for sample in samples]),
        "labels": torch.cat([sample.labels for sample in samples]),
        "position_ids": torch.cat([torch.arange(len(sample)) for sample in samples]),
    }


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Makes a batch of rows of different lengths: pads them at their end and stacks them.

    Attributes:
        pad_token: Token id that fills `input_ids`.
        multiple_of: The batch is as long as its longest row, rounded up to a multiple of this.

    Padding has the label -100 and the attention mask 0. In rows that have positions (packed ones)
    it is a document of its own, which counts from 0.
    """

    pad_token: int
    multiple_of: int = 1

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Stack rows into tensors of shape (rows, ..., tokens)."""
        longest = max(row["input_ids"].shape[-1] for row in rows)
        length = -(-longest // self.multiple_of) * self.multiple_of
        return {
            name: torch.stack([self._padded(name, row[name], length) for row in rows])
            for name in rows[0]
        }

    def _padded(self, name: str, values: Tensor, length: int) -> Tensor:
        if values.dim() == 0:  # one value for the whole sample, such as its class
            return values
        missing = length - values.shape[-1]
        if name == "position_ids":
            return torch.cat([values, torch.arange(missing)])
        fill = {"input_ids": self.pad_token, "labels": IGNORED}.get(name, 0)
        return torch.nn.functional.pad(values, (0, missing), value=fill)
