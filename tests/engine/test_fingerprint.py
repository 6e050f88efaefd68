import pytest
import torch

from roundpipe_lightning.engine.update import fingerprint as fingerprint_module
from roundpipe_lightning.engine.update.fingerprint import fingerprint


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (40, 30)])
def test_the_same_values_have_the_same_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.rand(shape).mul(100).to(dtype)
    assert 0 <= fingerprint(values) < 2**64
    assert fingerprint(values) == fingerprint(values.clone())
    assert fingerprint(values) == fingerprint(torch.cat([values.reshape(-1)] * 2)[values.numel() :])


def test_every_write_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint_module, "_CHUNK_BYTES", 64)
    values = torch.randn(101)
    known = {fingerprint(values)}
    for index in range(101):
        changed = values.clone()
        changed.data[index] += 1
        known.add(fingerprint(changed))
    known.add(fingerprint(values.flip(0)))
    known.add(fingerprint(torch.cat([values[16:32], values[:16], values[32:]])))
    assert len(known) == 1 + 101 + 2


def test_strides_do_not_matter() -> None:
    values = torch.randn(6, 5)
    assert fingerprint(values.T.contiguous().T) == fingerprint(values)
