"""Add a pass: a frozen dataclass that maps a valid pipelined graph to a valid pipelined graph.

Run it with ``python examples/extending/add_a_pass.py``. It prints the control edges that the pass adds, with their
reasons, and that the graph is still valid after all passes.

The pass makes the AllReduces of the stages run one after the other, so that no two of them share a network interface.
The last stage comes first: it computes its last backward first.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import keras
import numpy as np
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.compiler import StepVariant, passes
from dapple_tf.graph_passes.ir.graph import Graph, Node
from dapple_tf.graph_passes.ir.names import nodes_of
from dapple_tf.graph_passes.ir.ops import OpName
from dapple_tf.graph_passes.passes.base import Contract, run_passes


# --8<-- [start:pass]
@dataclass(frozen=True)
class StaggerAllReduces:
    """Run the AllReduces of the stages one after the other, the last stage first."""

    name: str = "stagger_allreduces"
    contract: ClassVar[Contract] = Contract(
        requires=frozenset({OpName.REDUCED_GRADIENTS})
    )  # the pass allreduce has run

    def __call__(self, graph: Graph) -> Graph:
        """Return the graph with a control edge to each stage's AllReduce from that of the next replicated stage."""
        nodes = sorted(nodes_of(graph, OpName.ALLREDUCE), key=lambda node: node.integer("stage"))
        following = {node.name: after for node, after in itertools.pairwise(nodes)}

        def chain(node: Node) -> Node:
            after = following.get(node.name)
            if after is None:
                return node
            reason = f"stagger: AllReduce of stage {node.integer('stage')} after that of stage {after.integer('stage')}"
            return node.after(after.name, reason)

        return graph.replace(nodes=tuple(map(chain, graph.nodes))).sorted()


# --8<-- [end:pass]


def main() -> None:
    """Compile a small model with the pass put behind ``allreduce``."""
    dapple.init()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([8]), *(keras.layers.Dense(8, "tanh", name=f"dense_{i}") for i in range(4))])

    def loss_fn(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.square(model(x, training=True) - y))

    batch = (np.zeros((16, 8), "float32"), np.zeros((16, 8), "float32"))
    step = dapple.pipeline(
        loss_fn, optimizer=keras.optimizers.SGD(0.1), stages=["dense_2"], replicas=[2, 2], example_batch=batch
    )
    # --8<-- [start:run]
    staged = step.model(batch)  # the stages, before micro-batches
    order = list(passes(staged, step.plan, ["a", "b", "c", "d"], "host", StepVariant.PLAIN))
    position = [each.name for each in order].index("allreduce")
    order.insert(position + 1, StaggerAllReduces())
    graph = run_passes(staged.graph, order)  # verifies the graph after every pass
    # --8<-- [end:run]
    for node in nodes_of(graph, OpName.ALLREDUCE):
        for control in node.controls:
            print(f"{node.name} runs after {control.source}: {control.reason}")
    print(f"{len(order)} passes left a valid graph of {len(graph.nodes)} nodes")


if __name__ == "__main__":
    main()
