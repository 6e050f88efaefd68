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
    device_names,
    hardware_from_mapping,
    hardware_to_mapping,
    load_hardware,
)


def figures(**changes: Any) -> dict[str, Any]:
    return {**hardware_to_mapping(load_hardware("rtx4090x8")), **changes}


def test_the_cards_that_people_own_are_there() -> None:
    wanted = {
        *("rtx3080", "rtx3090", "rtx4080", "rtx4090", "rtx5080", "rtx5090", "t4", "v100", "a10"),
        *("rtxa6000", "rtx6000ada", "rtxpro6000", "l4", "l40s", "a100", "a800", "h100", "h200"),
        *("w7800", "mi300x"),
    }
    assert set(device_names()) == wanted


@pytest.mark.parametrize("device", device_names())
def test_every_device_says_where_its_figures_are_from(device: str) -> None:
    text = (config_folder() / "hardware" / f"{device}.yaml").read_text("utf-8")
    header = text[: text.index("defaults:")]
    sources = header.split("# Sources:")[1]
    assert re.search(r"https?://\S+\.\S+/\S+|data sheet|whitepaper", sources)
    nominal = {"3.0": 15.75e9, "4.0": 31.5e9, "5.0": 63e9}
    generation = re.search(r"# Link: 80 % of the .* PCIe (\d\.0) x16", header)
    assert generation
    spec = load_hardware(f"{device}x1")
    assert spec.upload_bytes_per_second == pytest.approx(0.8 * nominal[generation[1]])


@pytest.mark.parametrize("name", ["cpu", "rtx4090x1", "t4x3", "mi300xx8", "a100x16"])
def test_a_machine_is_a_number_of_devices(name: str) -> None:
    spec = load_hardware(name)
    assert spec.name == name
    assert spec.num_devices == (4 if name == "cpu" else int(name.rpartition("x")[2]))
    assert spec.shares_host_memory == (name == "cpu")
    assert len(spec.workers) == spec.num_devices
    assert hardware_from_mapping(hardware_to_mapping(spec)) == spec
    assert hash(spec) == hash(load_hardware(name))


def test_the_host_of_eight_cards_is_what_predictions_were_fitted_with() -> None:
    spec = load_hardware("rtx4090x8")
    assert spec.host_bytes == 2**40
    assert spec.host_bytes_per_second == 200e9
    assert (spec.devices_per_root, spec.root_upload_bytes_per_second) == (4, 100.8e9)
    assert spec.efficiency == Efficiency(matrix=0.9, attention=0.7, memory=0.85, host=0.55)


def test_a_machine_may_have_unequal_devices(tmp_path: Path) -> None:
    spec = load_hardware("rtx4090x1+rtx3090x2")
    fast, slow = load_hardware("rtx4090x1"), load_hardware("rtx3090x1")
    assert [one.device_name for one in spec.workers] == [
        fast.device_name,
        slow.device_name,
        slow.device_name,
    ]
    assert spec.workers[1].matrix_rates == slow.matrix_rates
    assert (spec.num_devices, spec.devices_per_root) == (3, 3)
    assert spec.device_bytes == min(fast.device_bytes, slow.device_bytes)
    assert hardware_from_mapping(hardware_to_mapping(spec)) == spec
    mine = tmp_path / "mine.yaml"
    mine.write_text("devices: {rtx4090: 1, rtx3090: 2}\nhost_bytes: 68719476736\n")
    assert load_hardware(mine) == replace(spec, name="mine", host_bytes=2**36)
    with pytest.raises(HardwareError, match="there are figures of 3"):
        replace(spec, num_devices=4)


def test_a_geforce_doubles_its_rate_with_float16_sums() -> None:
    rates = load_hardware("rtx4090x8").matrix_rates
    assert rates.of("float16_accumulate_float16") == pytest.approx(
        2 * rates.of("float16"), rel=1e-3
    )


def test_a_file_of_ones_own_may_name_a_device(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: rtx4090\ndevices: 3\nefficiency: {host: 0.3}\nhost_bytes: 24e9\n")
    spec = load_hardware("rtx4090x3")
    assert load_hardware(mine) == replace(
        spec,
        name="mine",
        efficiency=replace(spec.efficiency, host=0.3),
        host_bytes=24 * 10**9,
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtx409x8", "'rtx409x8' is not known. The nearest are .*rtx4090.*rtx4090x8"),
        ("rtx4090x0", "not known"),
        ("rtx4090x1+rtx309x2", "not known. The nearest are .*rtx3090"),
        ("auto", "not known"),
        ("mixed", "not known"),
    ],
)
def test_an_unknown_name_says_which_are_near(name: str, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        load_hardware(name)


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
        ({"devices": 3}, "devices=3 and num_devices=8: drop one"),
        ({"devices": {"rtx409": 1}}, "'rtx409' is not known. The nearest are .*rtx4090"),
        ({"devices": {"rtx4090": 0}}, "devices.rtx4090=0"),
        ({"devices": {}}, "devices names none"),
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


@pytest.mark.parametrize(
    "content", [b"- 1\n", b"a: [\n", b"num_devices: 1\n", b"\xff\xfe{", b"defaults: [bad]\n"]
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
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
