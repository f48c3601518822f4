"""Sum tensors of many shapes and dtypes over all ranks of a job by the native ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf import internals
from dapple_tf.distributed.membership import current
from dapple_tf.distributed.native_collectives import NativeCollectives, exchanging_pairs
from dapple_tf.graph_passes.ir.graph import Graph, Node, attributes, tensor

SHAPES: tuple[tuple[int, ...], ...] = ((), (1,), (0, 5), (7, 11), (129,), (2,), (64, 3), (100_003,))
DTYPES = ("float32", "float64", "half", "bfloat16", "complex64", "complex128", "int32", "bool")
STEPS, PROGRAM = 3, 1_000_000  # no step of this job has this number


def draw(rank: int, step: int) -> list[Any]:
    """Return the values that a rank sums in a step, as float64 or complex128: fractions whose sums round."""
    random = np.random.default_rng([rank, step])
    found: list[Any] = []
    for dtype in DTYPES:
        for shape in SHAPES:
            real, imaginary = random.normal(size=(2, *shape)) * 3
            is_complex = dtype.startswith("complex")
            found.append(real > 4 if dtype == "bool" else real + 1j * imaginary if is_complex else real)
    return found


def run() -> dict[str, Any]:
    """Return for each dtype the sums of each step, all shapes one after the other; and a sum of nothing."""
    job = current()
    assert not job.is_alone
    assert job.exchange_network is not None
    ranks = tuple(range(job.size))
    kinds = [tensor(dtype, *shape) for dtype in DTYPES for shape in SHAPES]
    nodes = {
        name: Node(name, "allreduce", (), (*of, tensor("int64")), attributes({"ranks": ranks}))
        for name, of in (("every", kinds), ("empty", [tensor("float32", 0, 3)]), ("same", [tensor("float32", 1000)]))
    }
    job.exchange_network.connect(exchanging_pairs([Graph("rank", tuple(nodes.values()))] * job.size))
    ring = NativeCollectives(job.exchange_network.library, PROGRAM, job.rank)
    built = {name: build(ring, node) for name, node in nodes.items()}
    found: dict[str, list[Any]] = {dtype: [] for dtype in DTYPES}
    for step in range(STEPS):
        values = [tf.cast(tf.constant(v), k.dtype.name) for v, k in zip(draw(job.rank, step), kinds, strict=True)]
        sums = built["every"](*values)[:-1]
        for i, dtype in enumerate(DTYPES):
            own = sums[i * len(SHAPES) : (i + 1) * len(SHAPES)]
            assert [tuple(value.shape) for value in own] == list(SHAPES)
            assert {value.dtype.name for value in own} == {tf.as_dtype(dtype).name}
            found[dtype].append([number for value in own for number in to_numbers(value.numpy())])
    (nothing, _) = built["empty"](tf.zeros([0, 3]))
    tokens = [int(built["same"](tf.ones([1000]))[-1]) for _ in range(2)]
    return {"sums": found, "nothing": list(nothing.shape), "bytes": tokens}


def build(ring: NativeCollectives, node: Node) -> Any:
    """Return the function that sums the tensors of ``node`` and returns the token last, as a step's graph does."""

    def total(*values: Any) -> Any:
        sums, token = ring.all_reduce(node, values)
        return [*sums, token]

    specs = [tf.TensorSpec(kind.shape.dims, kind.dtype.name) for kind in node.outputs[:-1]]
    attrs = {internals.NO_AUTOMATIC_CONTROL: True}
    return tf.function(
        total, autograph=False, input_signature=specs, experimental_attributes=attrs
    ).get_concrete_function()


def to_numbers(values: Any) -> list[float]:
    """Return the elements of an array, the parts of complex ones one after the other: JSON has no complex numbers.

    The last of the shapes is too large to print: of it every 997th element, and the last.
    """
    array = np.reshape(values, -1)
    if len(array) > 10_000:
        array = np.concatenate([array[::997], array[-1:]])
    if np.iscomplexobj(array):
        array = np.stack([array.real, array.imag], 1).reshape(-1)
    return [float(number) for number in array]
