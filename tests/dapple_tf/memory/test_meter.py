"""The meter against allocations of known size, with each of TensorFlow's two allocators for CPUs."""

from __future__ import annotations

import json
import os
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


_PRODUCTS = """
import json
import tensorflow as tf
import dapple_tf as dapple

dapple.init(1)
from dapple_tf.graph_passes.ir.graph import Graph, Node, Value, tensor
from dapple_tf.memory.liveness import peak_bytes
from dapple_tf.memory.meter import MemoryMeter, packs_operands

found = {"packs": packs_operands()}
for m, k, n in ((2048, 512, 2048), (1024, 4096, 1024)):
    left, right = tf.random.normal([m, k]), tf.random.normal([k, n])
    product = tf.function(tf.matmul)
    product(left, right)
    with MemoryMeter(["CPU:0"]) as meter:
        for _ in range(5):
            product(left, right)
    inputs = [Node("a", "arg", (), (tensor("float32", m, k),)), Node("b", "arg", (), (tensor("float32", k, n),))]
    nodes = (*inputs, Node("c", "MatMul", (Value("a"), Value("b")), (tensor("float32", m, n),)))
    graph = Graph("f", nodes, ("a", "b"), (Value("c"),))
    predicted = peak_bytes(graph, lambda value: graph.type_of(value).bytes(), packs=found["packs"])
    found[k] = [meter.measured[0].above_start, predicted, m * n * 4]
print(json.dumps(found))
"""


def products(onednn: str) -> dict[str, Any]:
    done = run_python("-c", _PRODUCTS, variables={"TF_ENABLE_ONEDNN_OPTS": onednn})
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="on one thread Eigen packs small blocks")
def test_without_onednn_a_matrix_product_takes_its_result_and_packed_copies_of_its_operands() -> None:
    """Of 512 summed entries all are packed at once, of 4096 a part."""
    found = products("0")
    assert found["packs"]
    for k in ("512", "4096"):
        measured, predicted, result = found[k]
        assert predicted > 1.4 * result
        assert predicted == pytest.approx(measured, rel=0.15)


def test_with_onednn_the_copies_of_operands_are_not_predicted() -> None:
    found = products("1")
    if found["packs"]:
        pytest.skip("this TensorFlow is built without oneDNN")
    assert [found[k][1] for k in ("512", "4096")] == [found[k][2] for k in ("512", "4096")]
