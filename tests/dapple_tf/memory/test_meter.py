"""The meter against allocations of known size, with each of TensorFlow's two allocators for CPUs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import run_python

_KNOWN = """
import json
import time
import tensorflow as tf
import dapple_tf as dapple

dapple.init(2)
from dapple_tf.memory.meter import MemoryMeter

def fill(size, count):
    with tf.device("CPU:1"):
        return [tf.zeros([size // 4]) + 1.0 for _ in range(count)]

reserve = fill(1 << 20, 64)  # later large blocks fit into what this allocates
large, small = fill(1 << 20, 1), fill(100_000, 1)
del reserve
found = {}
for name, size, count in (("large", 1 << 20, 32), ("small", 100_000, 200)):
    with MemoryMeter(["CPU:0", "CPU:1"]) as meter:
        tensors = fill(size, count)
        time.sleep(0.05)  # the heap is sampled
        del tensors
    (measured,) = meter.measured
    found[name] = [measured.device, measured.source, measured.above_start / (size * count)]
before = fill(1 << 20, 16)
with MemoryMeter(["CPU:0"]) as meter:
    del before
found["freed"] = meter.measured[0].above_start
weights = tf.Variable(tf.zeros([8 << 20]))
with MemoryMeter(["CPU:0"]) as meter:
    pass
found["start"] = meter.measured[0].start_bytes / (32 << 20)
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=["1", "0"], ids=["oneDNN", "without oneDNN"])
def found(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    done = run_python("-c", _KNOWN, variables={"TF_ENABLE_ONEDNN_OPTS": request.param})
    return request.param, json.loads(done.stdout.splitlines()[-1])


def test_large_and_small_tensors_are_measured(found: tuple[str, dict[str, Any]]) -> None:
    for name in ("large", "small"):
        device, _, ratio = found[1][name]
        assert device == "CPU"
        assert ratio == pytest.approx(1, abs=0.05)


def test_the_source_names_the_statistics_used(found: tuple[str, dict[str, Any]]) -> None:
    onednn, measured = found
    assert measured["large"][1] == ("heap" if onednn == "0" else measured["large"][1])
    assert measured["large"][1] in ("heap", "allocator and heap")


def test_freeing_memory_is_no_new_peak(found: tuple[str, dict[str, Any]]) -> None:
    assert 0 <= found[1]["freed"] < 1 << 20


def test_variables_count_in_the_start(found: tuple[str, dict[str, Any]]) -> None:
    assert found[1]["start"] >= 1
