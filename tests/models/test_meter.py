from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from roundpipe_lightning.models.work.meter import Count, Meter

ROWS, COLUMNS = 256, 128
NUMBERS = ROWS * COLUMNS


def count(work: Callable[[Tensor], object]) -> Count:
    matrix = torch.empty((ROWS, COLUMNS), dtype=torch.bfloat16, device="meta")
    meter = Meter()
    with meter:
        work(matrix)
    return meter.count


def every_other(matrix: Tensor) -> Tensor:
    return matrix[:, ::2].neg()


def every_hundredth(matrix: Tensor) -> Tensor:
    return matrix.flatten()[::100].neg()


@pytest.mark.parametrize(
    ("work", "moved"),
    [
        (torch.neg, 2 * (NUMBERS + NUMBERS)),
        (lambda matrix: matrix.t().neg(), 2 * (NUMBERS + NUMBERS)),
        (lambda matrix: matrix[:1].expand(ROWS, -1).neg(), 2 * (COLUMNS + NUMBERS)),
        (lambda matrix: matrix.view(-1), 0),
        (torch.empty_like, 0),
        (every_other, 2 * (NUMBERS + NUMBERS // 2)),
        (every_hundredth, (32 + 2) * -(-NUMBERS // 100)),
    ],
)
def test_bytes_are_those_that_memory_moves(work: Callable[[Tensor], object], moved: int) -> None:
    counted = count(work)
    assert counted.memory_bytes == moved
    assert counted.matrix_operations == counted.matrix_bytes == 0


def test_the_gradient_of_a_part_is_written_into_zeros() -> None:
    sizes = (ROWS, COLUMNS)

    def of_slice(matrix: Tensor) -> object:
        return torch.ops.aten.slice_backward(matrix[:, ::2].contiguous(), sizes, 1, 0, COLUMNS, 2)

    def of_row(matrix: Tensor) -> object:
        return torch.ops.aten.select_backward(matrix[0], sizes, 0, 3)

    copied = 2 * (NUMBERS + NUMBERS // 2)  # contiguous
    assert count(of_slice).memory_bytes == copied + 2 * (NUMBERS // 2 + NUMBERS + NUMBERS)
    assert count(of_row).memory_bytes == 2 * (COLUMNS + NUMBERS + COLUMNS)
