"""Give this process the processor share that one device of a pipeline has."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from dapple_tf.devices import list_devices
from profiler.cores import count_cores, limit_to_cores
from profiler.peaks import CPU_CORE, PEAKS, Peak


def cores_per_device() -> int:
    """Return how many of this process's cores each logical CPU device has to itself, at least 1."""
    return max(1, count_cores() // len(list_devices()))


@contextlib.contextmanager
def limit_to_one_device() -> Iterator[float | None]:
    """Limit the process to one device's cores in the block, which gets ``full_share`` for ``measure_interleaved``."""
    if tf.config.list_logical_devices("GPU"):
        yield 0.0  # the processor only waits for the GPU
        return
    cores = cores_per_device()
    with limit_to_cores(cores):
        yield 1.0 if cores == 1 else None


def roofline_of_device() -> Peak:
    """Return figures that are no lower than those of the device: of the fastest known GPU, or of the device's cores."""
    if tf.config.list_logical_devices("GPU"):
        return max(PEAKS, key=lambda peak: peak.flops_per_second)
    cores = cores_per_device()
    return dataclasses.replace(
        CPU_CORE,
        flops_per_second=cores * CPU_CORE.flops_per_second,
        bytes_per_second=cores * CPU_CORE.bytes_per_second,
    )


def describe_device() -> str:
    """Return the name of the device that a profile is measured on, for people."""
    for physical in tf.config.list_physical_devices("GPU"):
        return str(tf.config.experimental.get_device_details(physical).get("device_name", "GPU"))
    cores = cores_per_device()
    return f"CPU, {cores} core{'s' * (cores > 1)}"
