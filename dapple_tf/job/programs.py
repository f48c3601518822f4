"""A rank's programs: its share of the pipelined graph, agreed with the other ranks before any runs."""

from __future__ import annotations

import hashlib
from typing import Any

import tensorflow as tf

from dapple_tf.capture import Captured
from dapple_tf.compiler import StagedModel, rank_graphs
from dapple_tf.devices import home_device, list_devices
from dapple_tf.errors import JobError
from dapple_tf.job.collectives import Collectives
from dapple_tf.job.membership import Job
from dapple_tf.planner.plan import Plan
from dapple_tf.runtime.bindings import Buffers
from dapple_tf.runtime.program import Program, build_rank_program
from graph_passes.base import run_passes
from graph_passes.place import PlaceRank
from graph_passes.text import print_graph
from graph_passes.verify_ranks import collectives_of


class RankPrograms:
    """Builds programs for one rank of ``job``; the first one gives all ranks equal variables."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._equal = False

    def build(self, model: StagedModel, captured: Captured, plan: Plan, buffers: Buffers) -> Program:
        """The program of this rank for ``plan``; every rank must build the same, in the same order.

        Raises JobError where ranks differ in TensorFlow, code, plan, model or batch, saying which.
        """
        graphs = rank_graphs(model, captured, plan, self._job.size)
        self._agree(model, captured, plan, "\n".join(map(print_graph, graphs)))
        if not self._equal:
            self._make_equal(model)
            self._equal = True
        sets = self._job.make_process_sets(node.integers("ranks") for g in graphs for node in collectives_of(g))
        device = list_devices()[0]
        graph = run_passes(graphs[self._job.rank], [PlaceRank(device, home_device())], ())
        collectives = Collectives(self._job.rank, sets)
        return build_rank_program(graph, model, captured.signature, buffers, collectives, device)

    def _agree(self, model: StagedModel, captured: Captured, plan: Plan, text: str) -> None:
        mine = {
            "TensorFlow version": tf.__version__,
            "plan": str(plan),
            "shapes and dtypes of the batch": str(captured.signature),
            "variables": str([(name, v.dtype.name, tuple(v.shape)) for name, v in model.variables.items()]),
            "graph of the model, or code": hashlib.sha256(text.encode()).hexdigest(),
        }
        every = self._job.gather(mine)
        for what in mine:
            values = [facts[what] for facts in every]
            if len(set(values)) > 1:
                raise JobError(_describe_difference(what, values))

    def _make_equal(self, model: StagedModel) -> None:
        """Rank 0's values in all ranks' variables: processes draw their own when a model is made."""
        import horovod.tensorflow as hvd

        hvd.broadcast_variables(list(model.variables.values()), root_rank=0)


def _describe_difference(what: str, values: list[Any]) -> str:
    first = values[0]
    other = next(rank for rank, value in enumerate(values) if value != first)
    same = [rank for rank, value in enumerate(values) if value == first]
    return (
        f"the ranks differ in their {what}: ranks {same} have {str(first)[:300]}, rank {other} has "
        f"{str(values[other])[:300]}. Start the same script with the same packages and data shapes everywhere."
    )
