"""Build and run the programs of one rank: its part of the pipelined graph, compared with the other ranks before use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tensorflow as tf

from dapple_tf.backend.bindings import Buffers
from dapple_tf.backend.build_times import BuildTimes
from dapple_tf.backend.handler import Bindings, ChooseCompiled, Compiled
from dapple_tf.backend.program import Program, build_rank_program
from dapple_tf.compiler import StepVariant, rank_graphs
from dapple_tf.distributed.collectives import Collectives
from dapple_tf.distributed.digest import digest_graphs, digest_tensors
from dapple_tf.distributed.exchange_network import exchanging_pairs
from dapple_tf.distributed.exit_reporting import report_failure
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.native_exchange import NativeExchange
from dapple_tf.distributed.optimizer_settings import OptimizerSettings
from dapple_tf.distributed.ring_all_reduce import RingAllReduce, has_known_shapes
from dapple_tf.distributed.variable_locations import VariableNeeds
from dapple_tf.distributed.variable_placement import find_variable_needs, place_variables
from dapple_tf.errors import BatchError, StepError
from dapple_tf.plan import Plan
from dapple_tf.staged_model import StagedModel
from graph_passes.analysis.input_needs import find_inputs
from graph_passes.ir.graph import Graph, Node
from graph_passes.ir.names import BATCH_SIZE_NAME
from graph_passes.ir.ops import OpName
from graph_passes.passes.base import run_passes
from graph_passes.passes.place import PlaceRank
from graph_passes.passes.verify_ranks import collectives_of
from profiler.units import format_samples

T = TypeVar("T")

_LONGEST_TYPES = 300  # characters of the types of a batch that an error quotes


@dataclass(frozen=True)
class RankProgram(Program):
    """A rank's program: it counts the steps of its ``job``, and reports a step that fails to the other ranks.

    ``needs``: the variables that the program needs on each rank; a step first places them. ``settings``: of the
    optimizer. ``number``: of the program in this process, from 1. ``batch_types``: dtypes and shapes of a batch, for
    error messages.
    """

    job: Job = field(kw_only=True)
    needs: VariableNeeds = field(kw_only=True)
    settings: OptimizerSettings = field(kw_only=True)
    number: int = field(kw_only=True)
    batch_types: str = field(kw_only=True)

    def run(self, batch: Sequence[Any]) -> list[Any]:
        """Run one step on ``batch``, and return the outputs of the function; see ``Program.run``."""
        is_local = BATCH_SIZE_NAME in self.graph.inputs
        progress, samples = self.job.progress, int(batch[-1]) if is_local else int(batch[0].shape[0])
        what = f"run step {progress.step + 1} with {samples} samples (program {self.number})"
        what += "".join(f", {name} set to {value}" for name, value in self.settings.changes().items())
        progress.announce_call(what, f" of {self.batch_types}")
        place_variables(self.job, self.needs)
        with progress.step_running(self.number):
            try:
                return super().run(batch)
            except StepError as error:
                report_failure(error)
                raise

    @contextlib.contextmanager
    def rehearsal(self, variables: Iterable[tf.Variable]) -> Iterator[None]:
        """See ``Program.rehearsal``; of ``variables`` those that this rank holds. The steps are not counted.

        Every rank must enter it.
        """
        progress, locations = self.job.progress, self.job.variable_locations
        step = progress.step
        progress.announce_call(f"rehearse step {step + 1} (program {self.number})", f" of {self.batch_types}")
        place_variables(self.job, self.needs)
        held = [variable for variable in variables if self.job.rank in (locations.ranks_of(variable) or ())]
        with super().rehearsal(held):
            yield
        progress.step = step


class RankTarget:
    """Builds programs for one rank of ``job``; the first program gives all ranks the variables of rank 0.

    ``device``: of the rank's stages. ``home``: the device of the batch, the loss and everything else that belongs to no
    stage.
    """

    def __init__(self, job: Job, device: str, home: str) -> None:
        self._job = job
        self._device = device
        self._home = home
        self._buffers = Buffers(home)
        self._synchronized = False
        self._settings = OptimizerSettings()

    def announce(self, what: str, batch_size: int, signature: Sequence[tf.TensorSpec]) -> None:
        """Announce a call that every rank must make, for a batch of ``batch_size`` samples; ``what``: an imperative."""
        self._job.progress.announce_call(what, f" for {batch_size} samples of {_describe_types(signature)}")

    def run_on_all(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns on this rank, once it has succeeded on every rank; see ``Job.run_on_all``."""
        return self._job.run_on_all(work)

    def check_plan(self, plan: Plan, fitted: Plan, batch_size: int) -> None:
        """Raise BatchError if a batch of ``batch_size`` samples leaves a rank of a stage without samples."""
        if fitted.shares != plan.shares:
            raise BatchError(
                f"the batch has {format_samples(batch_size)}, too few for the shares of the ranks of a stage, which "
                f"need {plan.least_samples}: leave it out, or join it to another"
            )
        if fitted.replicas != plan.replicas:
            raise BatchError(
                f"the batch has {format_samples(batch_size)}, too few for the {max(plan.replicas)} ranks of a stage: "
                "leave it out, or join it to another"
            )

    def build(
        self,
        model: StagedModel,
        plan: Plan,
        variant: StepVariant,
        times: BuildTimes,
        *,
        local: bool = False,
        choose: ChooseCompiled | None = None,
    ) -> Program:
        """Return the program of this rank for ``plan``; every rank must build the same programs in the same order.

        ``local``: the program takes only the rows that this rank needs, and the batch size after the tensors.
        ``choose`` returns the functions of this rank that XLA compiles.

        A step that returns gradients returns on each rank those of its stages. Raises JobError if the ranks differ in
        TensorFlow, code, plan, model or batch, naming the difference.
        """
        self._job.compare(
            {
                "TensorFlow version": tf.__version__,
                "plan": plan,
                "shapes and dtypes of the batch": model.signature,
                "variables": [(name, v.dtype.name, tuple(v.shape)) for name, v in model.variables.items()],
            }
        )
        with times.phase("passes"):
            graphs = self._job.run_on_all(
                lambda: rank_graphs(model, plan, self._job.size, variant=variant, local=local)
            )
        self._job.compare(
            {
                "graph of the model, or code": digest_graphs(graphs, model.library),
                "tensors that the model closes over": digest_tensors(model.constants),
            }
        )
        needs = find_variable_needs(model, graphs)
        self._settings.add(self._job, model)
        # Each process has drawn initial values of its own when it made the model.
        place_variables(self._job, needs, synchronize=not self._synchronized)
        self._synchronized = True
        collectives = self._make_collectives(graphs)
        graph = run_passes(graphs[self._job.rank], [PlaceRank(self._device, self._home)], ())
        progress = self._job.progress
        progress.stages = tuple(i for i, stage in enumerate(plan.stages) if self._job.rank in stage.devices)
        inputs = tuple(find_inputs(g) for g in graphs)
        with times.phase("emit"):
            every = {f.name: f for g in graphs for f in g.functions}

            def compiled(bindings: Bindings) -> Compiled:
                return {} if choose is None else choose(graph, bindings, tuple(every.values()))

            program = build_rank_program(graph, model, self._buffers, collectives, self._device, inputs, compiled)
        progress.programs += 1
        return RankProgram(
            program.graph,
            program.function,
            program.operations,
            inputs,
            replayable=False,
            job=self._job,
            needs=needs,
            settings=self._settings,
            number=progress.programs,
            batch_types=_describe_types(model.signature),
        )

    def _make_collectives(self, graphs: Sequence[Graph]) -> Collectives:
        """Return what builds this rank's communication, once the ranks are connected as the ``graphs`` of all need."""
        progress, network = self._job.progress, self._job.exchange_network
        native, ring = None, None
        if network is not None:
            network.connect(exchanging_pairs(graphs))
            native = NativeExchange(network.library, progress.programs + 1)
            ring = RingAllReduce(network.library, progress.programs + 1, self._job.rank)
        nodes = [node for graph in graphs for node in collectives_of(graph)]
        by_horovod = [node for node in nodes if network is None or not _is_native(node)]
        sets = self._job.make_process_sets(node.integers("ranks") for node in by_horovod)
        return Collectives(self._job.rank, sets, progress, native, ring)


def _is_native(node: Node) -> bool:
    """Return whether the native ops do what ``node`` says, where there are any; else it needs a process set."""
    is_ring = node.op == OpName.ALLREDUCE and has_known_shapes(node)
    return is_ring or node.op in (OpName.EXCHANGE, OpName.BARRIER)


def _describe_types(signature: Sequence[tf.TensorSpec]) -> str:
    """Return dtypes and shapes of one sample: float32[96], int32[]."""
    types = ", ".join(f"{spec.dtype.name}{list(spec.shape[1:])}" for spec in signature)
    return types if len(types) <= _LONGEST_TYPES else types[:_LONGEST_TYPES] + " ..."
