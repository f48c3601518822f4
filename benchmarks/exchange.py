"""Hand-overs of a tensor between two processes with a core each: the native ops beside Horovod's alltoall, in turn.

One way: a tensor goes to and fro, so a hand-over begins when the one before has ended. Both ways: each process sends
and receives at the same time. The hand-overs of a call are in one TensorFlow function, as in a step.
"""

from __future__ import annotations

from benchmarks.own_core import run_on_own_core

if __name__ == "__main__":  # before any library counts the cores
    run_on_own_core("OMPI_COMM_WORLD_LOCAL_RANK")

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.common import Row, median, print_on_rank_0, run_ranks, time_interleaved

SIZES = {"4 KB": 2**12, "64 KB": 2**16, "256 KB": 2**18, "1 MB": 2**20, "4 MB": 2**22, "16 MB": 2**24, "64 MB": 2**26}
WAYS = ("native", "horovod")
DIRECTIONS = ("one way", "both ways")
_CALL_BYTES = 2**26  # handed over in one call, by at least 2 and at most 16 hand-overs
_ROUNDS = 15


def run() -> Iterator[Row]:
    """Yield a row for each size and direction: medians of a hand-over's time, and bytes a second in one direction."""
    for direction, size, native, horovod in run_ranks("benchmarks.exchange", 2, timeout=900):
        texts = [f"{seconds * 1e6:,.0f} us, {SIZES[size] / seconds / 1e9:.2f} GB/s" for seconds in (native, horovod)]
        figure = f"{size}, {direction}: native; Horovod"
        measured = f"{texts[0]}; {texts[1]} ({native / horovod:.2f})"
        yield Row(figure, "native takes no longer", measured, native <= horovod)


def measure() -> list[tuple[str, str, float, float]]:
    """Return direction, size, and the median seconds of a native hand-over and of one by Horovod; all ranks call it."""
    from dapple_tf.distributed.collectives import AlltoallExchange
    from dapple_tf.distributed.membership import current
    from dapple_tf.distributed.native_collectives import NativeCollectives

    job = current()
    assert not job.is_alone, "start it with mpirun"
    assert job.exchange_network is not None, "the native exchange is not built: make horovod"
    job.exchange_network.connect([(0, 1)])
    import tensorflow as tf

    found = []
    zero = tf.Variable(0, dtype=tf.int32, trainable=False)
    sets = job.make_process_sets([(0, 1)])
    for direction in DIRECTIONS:
        for number, (size, size_bytes) in enumerate(SIZES.items()):
            count = min(16, max(2, _CALL_BYTES // size_bytes))
            native = NativeCollectives(job.exchange_network.library, number + 1, job.rank)
            exchanges = (native, AlltoallExchange(sets, zero))
            calls = {
                way: _chain(exchange, job.rank, size_bytes, count, both=direction == "both ways", name=direction)
                for way, exchange in zip(WAYS, exchanges, strict=True)
            }
            time_interleaved(calls, 3)
            taken = time_interleaved(calls, _ROUNDS)
            found.append((direction, size, *(median(taken[way]) / count for way in WAYS)))
    return found


def _chain(exchange: Any, rank: int, size_bytes: int, count: int, *, both: bool, name: str) -> Callable[[], Any]:
    """Return a function that hands a tensor over ``count`` times, each time as it was received before."""
    import tensorflow as tf

    from dapple_tf import internals
    from dapple_tf.graph_passes.ir.graph import Node, attributes, tensor

    kind = tensor("float32", size_bytes // 4)

    def node(i: int) -> Node:
        sends, receives = both or i % 2 == rank, both or i % 2 != rank
        attrs = {"dtypes": ("float32",), "header": False, "ranks": (0, 1)}
        attrs |= {"to": (1 - rank,) * sends, "source": (1 - rank,) * receives}
        scope = f"{name.replace(' ', '_')}/{size_bytes}/{i}"
        return Node(scope, "exchange", (), (kind,) * receives + (tensor("int64"),), attributes(attrs))

    def hand_over(value: Any) -> Any:
        tokens = []
        for i in range(count):
            made = node(i)
            with tf.name_scope(made.name + "/"):
                outputs, token = exchange.exchange(made, [value] * len(made.integers("to")))
            tokens.append(token)
            value = outputs[0] if outputs else value
        return tf.add_n(tokens)

    attributes_of_function = {internals.NO_AUTOMATIC_CONTROL: True}
    traced = tf.function(hand_over, autograph=False, experimental_attributes=attributes_of_function)
    value = tf.zeros([size_bytes // 4])
    concrete = traced.get_concrete_function(tf.TensorSpec(value.shape))
    return lambda: int(concrete(value))


if __name__ == "__main__":
    import dapple_tf as dapple

    dapple.init()
    print_on_rank_0(measure())
