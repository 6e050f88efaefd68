"""Forms: where the tensors of a call have the rows of the batch.

```
argument   mask [1, 1, T, T]      no rows: every microbatch gets all of it
argument   hidden [B, T, C]       Rows(dim=0): a microbatch gets its rows
output     flat [B*T, C]          Rows(dim=0, repeat=T): T entries for each row
```

A form does not depend on the number of rows: it serves batches of any size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec


@dataclass(frozen=True, slots=True)
class Rows:
    """The place of the batch's rows in a tensor.

    Attributes:
        dim: Dimension along which they lie, from 0 on.
        repeat: Entries along it for each row.
    """

    dim: int
    repeat: int = 1


@dataclass(frozen=True, slots=True)
class TensorForm:
    """Form of a tensor that a call returns.

    Attributes:
        shape: Its shape for one row. Without rows: its shape.
        rows: Where it has the rows; None: it is the same for every microbatch.
    """

    shape: torch.Size
    dtype: torch.dtype
    rows: Rows | None

    @classmethod
    def of_batch(cls, shape: Sequence[int], dtype: torch.dtype, rows: Rows | None) -> TensorForm:
        """Return the form of a tensor, given its shape for a whole batch."""
        sizes = list(shape)
        if rows is not None:
            sizes[rows.dim] = rows.repeat
        return cls(torch.Size(sizes), dtype, rows)

    def shape_for(self, num_rows: int) -> torch.Size:
        if self.rows is None:
            return self.shape
        sizes = list(self.shape)
        sizes[self.rows.dim] *= num_rows
        return torch.Size(sizes)


@dataclass(frozen=True, slots=True)
class CallForm:
    """Form of a call.

    Attributes:
        arguments: For each leaf of the flattened `(args, kwargs)` where it has the rows; None: it
            has none, or is no tensor.
        results: The leaves of what the call returns: a `TensorForm` in place of each tensor.
        structure: What the leaves of the results are put into.
    """

    arguments: tuple[Rows | None, ...]
    results: tuple[Any, ...]
    structure: TreeSpec
