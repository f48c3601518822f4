"""Peak figures from the makers' data sheets, and the roofline."""

from __future__ import annotations

import pytest

from dapple_tf.errors import ProfileError
from dapple_tf.profiler.peaks import HOST_BYTES, Peak, find_peak


@pytest.mark.parametrize(
    ("name", "flops", "bandwidth", "memory"),
    [("V100", 15.7e12, 900e9, 16e9), ("a100", 156e12, 1555e9, 40e9), ("h100", 494.5e12, 3350e9, 80e9)],
)
def test_devices_are_found_in_upper_and_lower_case(name: str, flops: float, bandwidth: float, memory: float) -> None:
    peak = find_peak(name)
    assert (peak.flops_per_second, peak.bytes_per_second, peak.memory) == (flops, bandwidth, memory)


def test_the_error_for_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(ProfileError, match="no peak figures are known for device 'K80': use V100, A100, H100"):
        find_peak("K80")


def test_seconds_are_the_longer_of_arithmetic_and_memory() -> None:
    peak = Peak("p", 100.0, 10.0, 0.0, 0.5)
    assert peak.seconds(1000, 10) == 20  # 1000 / 100 at half the speed
    assert peak.seconds(10, 1000) == 200


def test_a_kind_of_op_may_have_a_fraction_of_its_own() -> None:
    peak = Peak("p", 100.0, 10.0, 0.0, 0.5, {"convolution": 2.0})
    assert peak.seconds(1000, 10, "convolution") == 5
    assert peak.seconds(1000, 10, "product") == peak.seconds(1000, 10) == 20


def test_a_kernel_takes_what_launching_it_takes_at_least() -> None:
    peak = Peak("p", 100.0, 10.0, 0.0, 0.5, {}, 30.0)
    assert peak.seconds(1000, 100) == 30
    assert peak.seconds(1000, 1000) == 200
    assert peak.seconds(1000, HOST_BYTES) == 20  # the host computes it
