"""Cut a captured function into stages that only run forward: without gradients, stashes or an optimizer."""

from __future__ import annotations

from collections.abc import Sequence

from dapple_tf.exactness import Exactness
from dapple_tf.frontend.capture import Captured
from dapple_tf.frontend.deferred_statistics import trace_statistics
from dapple_tf.staged_model import StagedModel, merge_kinds, stage_graph
from graph_passes.analysis.layers import Layers
from graph_passes.analysis.variable_use import find_variables
from graph_passes.ir.graph import Function
from graph_passes.passes.backward import StageGradients, split_backward
from graph_passes.passes.once import build_once
from graph_passes.passes.partition import partition
from graph_passes.passes.tail_function import build_tail


def stage_forward(captured: Captured, layers: Layers, starts: Sequence[int]) -> StagedModel:
    """Cut the captured graph before the layers ``starts``; what forward writes it writes, and nothing is trained.

    Raises PartitionError where the graph cannot be cut there.
    """
    stages = partition(layers, starts)
    graph, none = stages.graph, StageGradients()
    functions: list[tuple[Function, ...]] = [
        (forward,) for forward, _ in split_backward(stages, graph, [none] * len(stages.stages))
    ]
    if tail := build_tail(stages, graph, none):
        functions[-1] = (*functions[-1], tail)
    dependence = captured.dependence
    called = stage_graph(captured, functions, build_once(stages, graph, functions))
    statistics = trace_statistics(captured, stages, {name: users[0] for name, users in find_variables(called).users})
    return StagedModel(
        graph=called.replace(functions=(*called.functions, *statistics.functions)),
        stages=len(stages.stages),
        signature=captured.signature,
        example=captured.example,
        serves=captured.serves,
        uncut=captured.uncut,
        merges=merge_kinds(captured),
        loss="mean" if dependence is None else dependence.loss,
        exactness=Exactness() if dependence is None else dependence.exactness,
        aux=captured.aux,
        updates=None,
        global_clipnorm=None,
        variables=captured.variables,
        model_variables=captured.variables,
        constants=dict(captured.constants) | dict(statistics.constants),
        library=dict(graph.library) | dict(statistics.library),
        trained=(),
        trained_objects=(),
        untrained=(),
        stateful=captured.stateful,
        shared=frozenset(map(str, stages.shared)),
        sparse=(),
        lookups=frozenset(),
        runs=((),) * len(stages.stages),
        frontier=stages.frontier,
        statistics=bool(statistics.functions),
        traces=(captured.func_graph, *statistics.traces),
    )
