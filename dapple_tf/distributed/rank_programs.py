"""A rank's programs: its share of the pipelined graph, agreed with the other ranks before any runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tensorflow as tf

from dapple_tf.backend.bindings import Buffers
from dapple_tf.backend.program import Program, build_rank_program
from dapple_tf.compiler import StagedModel, StepVariant, rank_graphs
from dapple_tf.distributed.collectives import Collectives
from dapple_tf.distributed.digest import digest_constants, digest_graphs
from dapple_tf.distributed.exit_reporting import report_failure
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.progress import Progress, progress
from dapple_tf.distributed.variable_locations import Needs
from dapple_tf.distributed.variable_placement import find_needs, settle
from dapple_tf.errors import BatchError, StepError, UsageError
from dapple_tf.plan import Plan
from graph_passes.passes.base import run_passes
from graph_passes.passes.place import PlaceRank
from graph_passes.passes.verify_ranks import collectives_of

T = TypeVar("T")

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
        what = f"run step {self.progress.step + 1} with {samples} samples (program {self.number})"
        self.progress.begin(what, f" of {self.batch_types}")
        settle(self.job, self.needs)
        with self.progress.running():
            try:
                return super().run(batch)
            except StepError as error:
                report_failure(error)
                raise


class RankTarget:
    """Builds programs for one rank of ``job``; the first program gives all ranks equal variables.

    ``device``: the rank's own; ``home``: the device of the batch, the loss and everything else that belongs to no
    stage.
    """

    def __init__(self, job: Job, device: str, home: str) -> None:
        self._job = job
        self._device = device
        self._home = home
        self._buffers = Buffers(home)
        self._equal = False

    def announce(self, what: str, batch_size: int, signature: Sequence[tf.TensorSpec]) -> None:
        """Tell the other ranks that this rank begins ``what`` for a batch of ``batch_size`` samples; all must do so."""
        progress().begin(what, f" for {batch_size} samples of {_describe_types(signature)}")

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns on this rank, once it has succeeded on every rank; see ``Job.together``."""
        return self._job.run_on_all(work)

    def check_plan(self, plan: Plan, fitted: Plan, batch_size: int) -> None:
        """Raise BatchError where a batch of ``batch_size`` samples leaves a rank of a stage without samples."""
        if fitted.replicas != plan.replicas:
            raise BatchError(
                f"the batch has {batch_size} samples, too few for the {max(plan.replicas)} ranks of a stage: leave it "
                "out, or join it to another"
            )

    def build(self, model: StagedModel, plan: Plan, variant: StepVariant) -> Program:
        """Return the program of this rank for ``plan``; every rank must build the same, in the same order.

        Raises JobError where ranks differ in TensorFlow, code, plan, model or batch, saying which.
        """
        if variant is StepVariant.WITH_GRADIENTS:
            raise UsageError("a step of several processes gives no gradients yet: leave them out")
        self._job.compare(
            {
                "TensorFlow version": tf.__version__,
                "plan": plan,
                "shapes and dtypes of the batch": model.signature,
                "variables": [(name, v.dtype.name, tuple(v.shape)) for name, v in model.variables.items()],
            }
        )
        graphs = self._job.run_on_all(lambda: rank_graphs(model, plan, self._job.size, variant=variant))
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
        graph = run_passes(graphs[self._job.rank], [PlaceRank(self._device, self._home)], ())
        own = progress()
        own.stage = next(i for i, stage in enumerate(plan.stages) if self._job.rank in stage.devices)
        collectives = Collectives(self._job.rank, sets, own)
        program = build_rank_program(graph, model, self._buffers, collectives, self._device)
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
            batch_types=_describe_types(model.signature),
        )


def _describe_types(signature: Sequence[tf.TensorSpec]) -> str:
    """A sample of a batch in a few words: float32[96], int32[]."""
    types = ", ".join(f"{spec.dtype.name}{list(spec.shape[1:])}" for spec in signature)
    return types if len(types) <= _LONGEST_TYPES else types[:_LONGEST_TYPES] + " ..."
