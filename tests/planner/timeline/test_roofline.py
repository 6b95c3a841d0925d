"""The catalogue and the roofline: arithmetic by hand, TF32 settings, names and files of devices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkflow.core.errors import CheckflowError
from checkflow.core.graph import Operator, TrainingGraph
from checkflow.core.machine.device import CATALOGUE, Device, find_device, read_device
from checkflow.planner.timeline.roofline import WINOGRAD_GAIN, Float32Precision, current_precision, durations_seconds

DEVICE = Device(
    name="round numbers",
    memory_bytes=1,
    memory_bandwidth_bytes_per_second=1e9,
    link_bandwidth_bytes_per_second=1e9,
    plain_flops_per_second={"float32": 1e9, "float64": 1e8, "float16": 2e9},
    matrix_flops_per_second={"tf32": 10e9, "float16": 20e9},
    compute_efficiency=0.5,
    memory_efficiency=0.8,
    launch_seconds=0.001,
    source="made up",
)
PRECISION = Float32Precision(convolutions_tf32=True, products_tf32=False)


def _operator(target: str = "aten.mm.default", flops: int = 0, bytes_: int = 0, dtype: str = "float32") -> Operator:
    return Operator("op", target, "forward", "", dtype, flops, bytes_ // 2, bytes_ - bytes_ // 2, (), ())


def _copy(waited: int, bytes_: int) -> Operator:
    return replace(_operator("aten._to_copy.default", 0, bytes_), link_bytes=bytes_, waited_bytes=waited)


def _graph(*operators: Operator) -> TrainingGraph:
    return TrainingGraph("model", (), 1, (), "", operators, (), (), ())


def _seconds(operator: Operator, device: Device = DEVICE, precision: Float32Precision = PRECISION) -> float:
    (duration,) = durations_seconds(_graph(operator), device, precision)
    return duration


# --- copies over the link


def test_a_copy_that_training_waits_for_lasts_as_long_as_the_link_takes() -> None:
    slow = replace(DEVICE, link_bandwidth_bytes_per_second=1e8)
    assert _seconds(_copy(waited=50_000_000, bytes_=50_000_000), slow) == pytest.approx(0.501)
    assert _seconds(_copy(waited=50_000_000, bytes_=50_000_000), DEVICE) == pytest.approx(0.0635)  # by its memory


def test_a_copy_that_training_does_not_wait_for_uses_the_device_s_memory_only() -> None:
    slow = replace(DEVICE, link_bandwidth_bytes_per_second=1e8)
    assert _seconds(_copy(waited=0, bytes_=80_000_000), slow) == pytest.approx(0.101)


# --- the roofline


@pytest.mark.parametrize(
    ("target", "dtype", "flops", "bytes_", "seconds"),
    [
        ("aten.relu.default", "float32", 0, 0, 0.001),
        ("aten.relu.default", "float32", 0, 800_000_000, 1.001),
        ("aten.mm.default", "float32", 500_000_000, 0, 1.001),
        ("aten.mm.default", "float32", 500_000_000, 1_600_000_000, 2.001),  # memory bound
        ("aten.mm.default", "float32", 1_500_000_000, 1_600_000_000, 3.001),  # compute bound
        ("aten.convolution.default", "float32", 5_000_000_000, 0, 1.001),  # TF32
        ("aten.convolution_backward.default", "float32", 5_000_000_000, 0, 1.001),
        ("aten.mm.default", "float16", 10_000_000_000, 0, 1.001),  # matrix units
        ("aten.mm.default", "float64", 50_000_000, 0, 1.001),  # general units
        ("aten.mm.default", "bfloat16", 500_000_000, 0, 1.001),  # no units of its own: as float32
    ],
)
def test_by_hand(target: str, dtype: str, flops: int, bytes_: int, seconds: float) -> None:
    assert _seconds(_operator(target, flops, bytes_, dtype)) == pytest.approx(seconds)


def test_tf32_settings() -> None:
    convolution, product = _operator("aten.convolution.default", 10**9), _operator("aten.mm.default", 10**9)
    for conv_tf32 in (False, True):
        for mm_tf32 in (False, True):
            precision = Float32Precision(conv_tf32, mm_tf32)
            assert _seconds(convolution, precision=precision) == pytest.approx((0.2 if conv_tf32 else 2) + 0.001)
            assert _seconds(product, precision=precision) == pytest.approx((0.2 if mm_tf32 else 2) + 0.001)
    half = replace(product, dtype="float16")
    assert _seconds(half, precision=Float32Precision(False, False)) == pytest.approx(0.101)


def test_matrix_units_have_their_own_efficiency() -> None:
    device = replace(DEVICE, matrix_efficiency=0.25)
    assert _seconds(_operator("aten.convolution.default", 5 * 10**9), device) == pytest.approx(2.001)
    assert _seconds(_operator("aten.mm.default", 5 * 10**8), device) == pytest.approx(1.001)


def test_tf32_needs_units_for_it() -> None:
    old = replace(DEVICE, matrix_flops_per_second={})
    assert _seconds(_operator("aten.convolution.default", 5 * 10**8), old) == pytest.approx(1.001)


def test_float32_runs_on_the_faster_units_that_it_may_use() -> None:
    slow = replace(DEVICE, matrix_flops_per_second={"tf32": 0.5e9})
    assert _seconds(_operator("aten.convolution.default", 5 * 10**8), slow) == pytest.approx(1.001)
    assert _seconds(_operator("aten.mm.default", 5 * 10**8, dtype="float16"), slow) == pytest.approx(0.501)


def test_winograd_s_algorithm_saves_flops_on_a_gpu_s_general_units() -> None:
    plain = _operator("aten.convolution.default", 8 * 10**8)
    fast = replace(plain, winograd=True)
    without = Float32Precision(convolutions_tf32=False)
    assert _seconds(plain, precision=without) == pytest.approx(1.601)
    assert _seconds(fast, precision=without) == pytest.approx(1.6 / WINOGRAD_GAIN + 0.001)
    assert _seconds(fast, replace(DEVICE, kind="cpu"), without) == pytest.approx(1.601)
    assert _seconds(fast) == pytest.approx(0.161)  # TF32 on the matrix units
    assert _seconds(replace(fast, dtype="float16")) == pytest.approx(0.081)


def test_matrix_units_wait_for_images_to_be_turned() -> None:
    turned = replace(_operator("aten.convolution.default", 10**9), relaid_bytes=80_000_000)
    assert _seconds(turned) == pytest.approx(0.2 + 0.2 + 0.001)  # by its flops, then twice 80 MB at 0.8 GB/s
    assert _seconds(turned, precision=Float32Precision(convolutions_tf32=False)) == pytest.approx(2.001)
    # Where turning costs more than the matrix units save, float32 stays on the general units; halves do not.
    much = replace(turned, relaid_bytes=1_600_000_000)
    assert _seconds(much) == pytest.approx(2.001)
    assert _seconds(replace(much, dtype="float16")) == pytest.approx(0.1 + 4 + 0.001)


def test_dropout_s_random_factors_take_no_time_on_a_gpu() -> None:
    bernoulli = replace(_operator("aten.bernoulli_.float", bytes_=800_000_000), writes=(1,))
    scale = replace(_operator("aten.div_.Scalar", bytes_=800_000_000), reads=(1,), writes=(1,))
    apply = replace(_operator("aten.mul.Tensor", bytes_=800_000_000), reads=(0, 1), writes=(2,))
    graph = _graph(bernoulli, scale, apply)
    assert durations_seconds(graph, DEVICE, PRECISION) == pytest.approx([0, 0, 1.001])
    assert durations_seconds(graph, replace(DEVICE, kind="cpu"), PRECISION) == pytest.approx([1.001] * 3)
    elsewhere = replace(scale, reads=(3,), writes=(3,))  # what is drawn is not what is divided
    assert durations_seconds(_graph(bernoulli, elsewhere), DEVICE, PRECISION) == pytest.approx([1.001] * 2)


def test_one_duration_an_operator_in_order() -> None:
    durations = durations_seconds(_graph(_operator(bytes_=800), _operator(), _operator(flops=500)), DEVICE, PRECISION)
    assert durations == pytest.approx([0.001001, 0.001, 0.001001])
    assert durations_seconds(_graph(), DEVICE, PRECISION) == []


@given(
    flops=st.integers(0, 10**15),
    bytes_=st.integers(0, 10**12),
    more=st.integers(0, 10**12),
    device=st.sampled_from(sorted(CATALOGUE)),
    dtype=st.sampled_from(["float32", "float16", "bfloat16", "float64", "int64", "complex64"]),
    target=st.sampled_from(["aten.mm.default", "aten.convolution.default"]),
)
def test_more_work_never_takes_less_time(
    flops: int, bytes_: int, more: int, device: str, dtype: str, target: str
) -> None:
    card = CATALOGUE[device]
    base = _seconds(_operator(target, flops, bytes_, dtype), card)
    assert base >= card.launch_seconds > 0
    assert _seconds(_operator(target, flops + more, bytes_, dtype), card) >= base
    assert _seconds(_operator(target, flops, bytes_ + more, dtype), card) >= base


# --- torch's settings


@pytest.fixture
def _settings_restored() -> Iterator[None]:
    convolution, product = torch.backends.cudnn.conv, torch.backends.cuda.matmul
    before = convolution.fp32_precision, product.fp32_precision
    yield
    convolution.fp32_precision, product.fp32_precision = before


def test_defaults_are_torchs() -> None:
    assert current_precision() == Float32Precision()


@pytest.mark.usefixtures("_settings_restored")
def test_settings_are_followed() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert current_precision() == Float32Precision(convolutions_tf32=False, products_tf32=True)
    convolution, product = _operator("aten.convolution.default", 10**9), _operator("aten.mm.default", 10**9)
    assert durations_seconds(_graph(convolution, product), DEVICE) == pytest.approx([2.001, 0.201])


@pytest.mark.usefixtures("_settings_restored")
def test_the_older_interface_is_followed_too() -> None:
    torch.set_float32_matmul_precision("high")
    assert current_precision().products_tf32
    torch.set_float32_matmul_precision("highest")
    assert not current_precision().products_tf32


# --- the catalogue


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("rtx3090", "RTX 3090"),
        ("RTX 3090", "RTX 3090"),
        ("3090", "RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "RTX 3090"),
        ("gtx-1080-ti", "GTX 1080 Ti"),
        ("1080Ti", "GTX 1080 Ti"),
        ("v100", "V100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("a100-40gb", "A100 40GB"),
        ("A100 80", "A100 80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h200", "H200"),
        ("NVIDIA H200", "H200"),
        ("CPU", "cpu"),
    ],
)
def test_names(written: str, name: str) -> None:
    assert find_device(written).name == name


@pytest.mark.parametrize("name", ["", "rtx3080", "a100", "H100 PCIe", "gpu", "RTX 3090 Ti"])
def test_unknown_device_lists_the_known_ones(name: str) -> None:
    with pytest.raises(CheckflowError) as caught:
        find_device(name)
    message = str(caught.value)
    assert repr(name) in message
    assert all(known in message for known in CATALOGUE)
    assert "\n" not in message


@pytest.mark.parametrize("device", CATALOGUE.values(), ids=CATALOGUE)
def test_every_device_is_complete(device: Device) -> None:
    assert find_device(device.name) is device
    assert device.source
    assert 0 < device.compute_efficiency <= 1
    assert 0 < device.memory_efficiency <= 1
    assert device.matrix_efficiency is None or 0 < device.matrix_efficiency <= 1
    assert device.plain_flops_per_second["float32"] > 0
    # The order of things in any such machine: a link slower than memory, matrix units faster than general ones.
    assert device.memory_bandwidth_bytes_per_second > device.link_bandwidth_bytes_per_second
    for dtype, peak in device.matrix_flops_per_second.items():
        assert peak >= device.plain_flops_per_second.get(dtype, 0)


@pytest.mark.parametrize("device", CATALOGUE.values(), ids=CATALOGUE)
def test_devices_survive_a_file(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps(asdict(device)))
    assert read_device(path) == device


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"memory_bytes": "24GB"}, "memory_bytes"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"memory_efficiency": 1.5}, "memory_efficiency"),
        ({"link_bandwidth_bytes_per_second": -1.0}, "link_bandwidth_bytes_per_second"),
        ({"plain_flops_per_second": {"float16": 1e12}}, "float32"),
        ({"plain_flops_per_second": {"float32": 0.0}}, "float32"),
        ({"colour": "green"}, "colour"),
    ],
)
def test_damaged_device_files(change: dict[str, object], reason: str, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text(json.dumps(asdict(DEVICE) | change))
    with pytest.raises(CheckflowError, match=reason) as caught:
        read_device(path)
    assert "\n" not in str(caught.value)


def test_unreadable_device_files(tmp_path: Path) -> None:
    with pytest.raises(CheckflowError, match="No such file"):
        read_device(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("not JSON")
    with pytest.raises(CheckflowError, match="not a device"):
        read_device(tmp_path / "text.json")
