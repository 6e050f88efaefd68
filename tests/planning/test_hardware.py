"""Machines: by name, from files, and refused where a figure cannot be."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roundpipe_lightning.errors import HardwareError
from roundpipe_lightning.planning.model.hardware import (
    Efficiency,
    HardwareSpec,
    MatrixRates,
    config_folder,
    hardware_from_mapping,
    hardware_names,
    hardware_to_mapping,
    load_hardware,
)

DEVICES = ("rtx3090", "rtx4090", "rtx5090", "a100", "a800", "h100", "h200", "w7800")


def figures(**changes: Any) -> dict[str, Any]:
    return {**hardware_to_mapping(load_hardware("rtx4090x8")), **changes}


def test_every_device_is_there_once_twice_four_and_eight_times() -> None:
    expected = {f"{device}x{count}" for device in DEVICES for count in (1, 2, 4, 8)}
    assert set(hardware_names()) == expected | {"cpu"}


@pytest.mark.parametrize("name", hardware_names())
def test_every_name_is_a_valid_machine(name: str) -> None:
    spec = load_hardware(name)
    assert spec.name == name
    assert spec.shares_host_memory == (name == "cpu")
    if name != "cpu":
        assert name.endswith(f"x{spec.num_devices}")
    assert hardware_from_mapping(hardware_to_mapping(spec)) == spec
    assert hash(spec) == hash(load_hardware(name))


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_says_where_its_figures_are_from(device: str) -> None:
    text = (config_folder() / "hardware" / "device" / f"{device}.yaml").read_text("utf-8")
    header = text[: text.index("device_name:")].splitlines()
    said = header.index("# Sources:") + 1
    sources = [line for line in header[said:] if line.startswith("#   ")]
    assert len(re.findall(r"https?://\S+\.\S+/\S+", " ".join(sources))) >= 2
    assert any(line.startswith("# Link: 80 % of the") for line in header)
    assert any(line.startswith("# Efficiency: fitted") for line in header)


@pytest.mark.parametrize("name", hardware_names())
def test_every_machine_says_what_is_assumed(name: str) -> None:
    text = (config_folder() / "hardware" / f"{name}.yaml").read_text("utf-8")
    assert "assumed" in text[: text.index("accelerator:")].lower()


def test_the_nominal_links_are_those_of_their_generation() -> None:
    lanes = {4: 16e9 * 16 / 8 * 128 / 130, 5: 32e9 * 16 / 8 * 128 / 130}
    generation = dict.fromkeys(DEVICES, 4) | dict.fromkeys(("rtx5090", "h100", "h200"), 5)
    for device in DEVICES:
        spec = load_hardware(f"{device}x1")
        assert spec.upload_bytes_per_second == pytest.approx(
            0.8 * lanes[generation[device]], rel=0.01
        )


def test_a_geforce_doubles_its_rate_with_float16_sums() -> None:
    rates = load_hardware("rtx4090x8").matrix_rates
    assert rates.of("float16_accumulate_float16") == pytest.approx(
        2 * rates.of("float16"), rel=1e-3
    )


def test_a_file_of_ones_own_may_name_a_device_or_have_its_figures(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    text = (config_folder() / "hardware" / "rtx4090x2.yaml").read_text()
    device = (config_folder() / "hardware" / "device" / "rtx4090.yaml").read_text()
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "rtx4090.yaml").write_text(device)
    mine.write_text(text.replace("num_devices: 2", "num_devices: 3"))
    assert load_hardware(mine) == replace(load_hardware("rtx4090x2"), name="mine", num_devices=3)


def test_an_unknown_name_says_which_are_near() -> None:
    with pytest.raises(HardwareError, match=r"'rtx4090x9' is not known.*rtx4090x8"):
        load_hardware("rtx4090x9")
    with pytest.raises(HardwareError, match="not known"):
        load_hardware("auto")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_bytes": -1}, "device_bytes=-1"),
        ({"num_devices": 0}, "num_devices=0"),
        ({"num_devices": True}, "num_devices=True"),
        ({"upload_bytes_per_second": 0}, "upload_bytes_per_second=0"),
        ({"upload_bytes_per_second": float("nan")}, "upload_bytes_per_second=nan"),
        ({"host_bytes_per_second": "fast"}, "host_bytes_per_second='fast'"),
        ({"matrix_rates": {"float32": -3.0}}, "matrix_rates.float32=-3.0"),
        ({"matrix_rates": {"float16": 3.0}}, "missing figures: matrix_rates.float32"),
        ({"matrix_rates": 3}, "matrix_rates must have names"),
        ({"efficiency": {"matrix": 1.2}}, "efficiency.matrix=1.2"),
        ({"efficiency": {"matrx": 0.5}}, "efficiency.matrx is no figure.*matrix"),
        ({"divice_bytes": 1}, "divice_bytes is no figure.*device_bytes"),
        ({"shares_host_memory": 1}, "shares_host_memory=1"),
        ({"defaults": ["other"]}, "defaults has 'other'"),
    ],
)
def test_figures_that_cannot_be_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        hardware_from_mapping(figures(**change))


def test_missing_figures_are_named() -> None:
    some = figures()
    del some["host_bytes"], some["device_name"]
    with pytest.raises(HardwareError, match="missing figures: device_name, host_bytes"):
        hardware_from_mapping(some)


@pytest.mark.parametrize("text", ["- 1\n", "a: [\n", "num_devices: 1\n"])
def test_a_bad_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(HardwareError, match=r"bad\.yaml"):
        load_hardware(path)
    with pytest.raises(HardwareError, match=r"absent\.yaml cannot be read"):
        load_hardware(tmp_path / "absent.yaml")


def test_a_dtype_without_a_rate_is_refused() -> None:
    with pytest.raises(HardwareError, match=r"'tfloat32'.*float32, float16"):
        MatrixRates(float32=1.0, float16=2.0).of("tfloat32")


def test_seconds_follow_from_rates() -> None:
    spec = HardwareSpec(
        name="m",
        device_name="d",
        num_devices=4,
        device_bytes=1,
        matrix_rates=MatrixRates(float32=10.0),
        memory_bytes_per_second=100.0,
        upload_bytes_per_second=8.0,
        download_bytes_per_second=4.0,
        devices_per_root=2,
        root_upload_bytes_per_second=12.0,
        root_download_bytes_per_second=8.0,
        host_bytes=1,
        host_bytes_per_second=20.0,
        efficiency=Efficiency(matrix=0.5, attention=0.25, memory=0.5, host=0.1),
    )
    assert spec.num_roots == 2
    assert spec.matrix_seconds(10, dtype="float32") == 2
    assert spec.attention_seconds(10, dtype="float32") == 4
    assert spec.memory_seconds(100) == 2
    assert spec.host_seconds(20) == 10
    assert spec.upload_seconds(24) == 3  # alone: the device's own link
    assert spec.upload_seconds(24, num_devices=2) == 3  # one for each root
    assert spec.upload_seconds(20, num_devices=4) == 4  # the host's memory for all four
    assert spec.download_seconds(24, num_devices=4) == 6
    assert replace(spec, shares_host_memory=True).upload_seconds(24) == 0
