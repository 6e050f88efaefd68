import json

import pytest

from benchmarks import host_optimizer


def test_gives_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--num-parameters 20000 --rounds 2 --formats bf16 8bit --threads 2 --output json"
    words += " --torch-operations"
    host_optimizer.main(words.split())
    found = json.loads(capsys.readouterr().out)
    assert found["num_parameters"] == 20000
    assert found["bytes_per_parameter"] == 28
    assert found["bandwidth_share"] > 0
    assert found["speedup_over_torch_fused"] > 0
    assert found["kernel"] == "native"
    names = {"host", "host_bf16", "host_8bit", "host_torch", "host_8bit_torch", "torch_fused"}
    assert names <= found["seconds"].keys()


def test_shapes_are_those_of_layers() -> None:
    shapes = host_optimizer.shapes_of(40_000_000)
    assert shapes == [(4096, 4096), (4096,)] * 3
    assert host_optimizer.shapes_of(1000) == [(1000,)]
