"""A rank's programs: its share of the pipelined graph, agreed with the other ranks before any runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from dapple_tf.backend.bindings import Buffers
from dapple_tf.backend.program import Program, build_rank_program
from dapple_tf.compiler import StagedModel, rank_graphs
from dapple_tf.devices import home_device, list_devices
from dapple_tf.distributed.collectives import Collectives
from dapple_tf.distributed.digest import digest_constants, digest_graphs
from dapple_tf.distributed.exit_reporting import report_failure
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.progress import Progress, progress
from dapple_tf.distributed.variable_locations import Needs
from dapple_tf.distributed.variable_placement import find_needs, settle
from dapple_tf.errors import StepError
from dapple_tf.frontend.capture import Captured
from dapple_tf.plan import Plan
from graph_passes.passes.base import run_passes
from graph_passes.passes.place import PlaceRank
from graph_passes.passes.verify_ranks import collectives_of

_LONGEST_TYPES = 300  # characters of what an error says of a batch


@dataclass(frozen=True)
class RankProgram(Program):
    """A rank's program, which keeps count of its steps and tells the other ranks when one fails.

    ``needs`` says which variables it wants on which ranks of ``job``; each step begins with that.
    """

    job: Job = field(kw_only=True)
    needs: Needs = field(kw_only=True)
    progress: Progress = field(kw_only=True)
    number: int = field(kw_only=True)
    batch_types: str = field(kw_only=True)

    def run(self, batch: Sequence[Any]) -> list[Any]:
        """See ``Program.run``."""
        samples = int(batch[0].shape[0])
        self.progress.begin(
            f"step {self.progress.step + 1} with {samples} samples (program {self.number})", f" of {self.batch_types}"
        )
        settle(self.job, self.needs)
        with self.progress.running():
            try:
                return super().run(batch)
            except StepError as error:
                report_failure(error)
                raise


class RankPrograms:
    """Builds programs for one rank of ``job``; the first one gives all ranks equal variables."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._equal = False

    def begin(self, what: str, samples: int, signature: Sequence[tf.TensorSpec]) -> None:
        """Tell the other ranks that this one begins ``what`` for a batch of so many samples; they must do the same."""
        progress().begin(what, f" for {samples} samples of {_describe_types(signature)}")

    def build(self, model: StagedModel, captured: Captured, plan: Plan, buffers: Buffers, extra: str = "") -> Program:
        """The program of this rank for ``plan``; every rank must build the same, in the same order.

        Raises JobError where ranks differ in TensorFlow, code, plan, model or batch, saying which.
        """
        self._job.compare(
            {
                "TensorFlow version": tf.__version__,
                "plan": plan,
                "shapes and dtypes of the batch": captured.signature,
                "variables": [(name, v.dtype.name, tuple(v.shape)) for name, v in model.variables.items()],
            }
        )
        graphs = self._job.together(lambda: rank_graphs(model, captured, plan, self._job.size, extra=extra))
        self._job.compare(
            {
                "graph of the model, or code": digest_graphs(graphs, model.library),
                "tensors that the model closes over": digest_constants(model.constants),
            }
        )
        needs = find_needs(model, graphs)
        # At first rank 0's values go to all: processes draw their own when a model is made.
        settle(self._job, needs, anew=not self._equal)
        self._equal = True
        sets = self._job.make_process_sets(node.integers("ranks") for g in graphs for node in collectives_of(g))
        device = list_devices()[0]
        graph = run_passes(graphs[self._job.rank], [PlaceRank(device, home_device())], ())
        own = progress()
        own.stage = next(i for i, stage in enumerate(plan.stages) if self._job.rank in stage.devices)
        collectives = Collectives(self._job.rank, sets, own)
        program = build_rank_program(graph, model, captured.signature, buffers, collectives, device)
        own.programs += 1
        return RankProgram(
            program.graph,
            program.function,
            program.operations,
            alone=False,
            job=self._job,
            needs=needs,
            progress=own,
            number=own.programs,
            batch_types=_describe_types(captured.signature),
        )


def _describe_types(signature: Sequence[tf.TensorSpec]) -> str:
    """A sample of a batch in a few words: float32[96], int32[]."""
    types = ", ".join(f"{spec.dtype.name}{list(spec.shape[1:])}" for spec in signature)
    return types if len(types) <= _LONGEST_TYPES else types[:_LONGEST_TYPES] + " ..."
