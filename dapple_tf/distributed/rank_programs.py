"""Build and run the programs of one rank: its part of the pipelined graph, on which all ranks agree before it runs."""

from __future__ import annotations

import contextlib
import socket
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import tensorflow as tf

from dapple_tf import internals, variable_values
from dapple_tf.backend.bindings import Buffers
from dapple_tf.backend.build_times import BuildTimes
from dapple_tf.backend.handler import Bindings, ChooseCompiled, Compiled
from dapple_tf.backend.program import Program, build_rank_program, follow
from dapple_tf.compiler import PlannedModel, StepVariant, job_graphs
from dapple_tf.distributed.collectives import Collectives
from dapple_tf.distributed.digest import digest_graphs, digest_tensors
from dapple_tf.distributed.exit_reporting import report_failure
from dapple_tf.distributed.membership import Job
from dapple_tf.distributed.native_collectives import NativeCollectives, exchanging_pairs, is_native
from dapple_tf.distributed.variable_locations import Ranks, VariableNeeds
from dapple_tf.distributed.variable_transfer import Transfer, send_values
from dapple_tf.drawing.table import format_ranges
from dapple_tf.errors import BatchError, PlanError, StepError
from dapple_tf.graph_passes.analysis.input_needs import find_inputs
from dapple_tf.graph_passes.analysis.layers import written_variables
from dapple_tf.graph_passes.analysis.variable_use import resident_variables, variable_uses, written_by
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.ir.names import BATCH_SIZE_NAME, of_phase
from dapple_tf.graph_passes.passes.verify_ranks import collectives_of
from dapple_tf.memory.room import check_room, find_need, predict_rank_step
from dapple_tf.plans import Plan
from dapple_tf.profiler.units import format_samples
from dapple_tf.staged_model import StagedModel

T = TypeVar("T")

_LONGEST_TYPES = 300  # characters of the description of a batch's types in an error


@dataclass(frozen=True, eq=False)
class RankProgram(Program):
    """A rank's program: it counts the steps of its ``job``, and reports a step that fails to the other ranks.

    ``needs``: the variables that the program needs on each rank; a step first places them. ``writers``: for each part
    the ranks that write a variable, by the identity of the variable. ``settings``: the optimizer's. ``number``: counts
    the programs of this process from 1. ``trains``: its runs are steps, else runs forward. ``batch_types``: dtypes and
    shapes of a batch, for error messages.
    """

    job: Job = field(kw_only=True)
    needs: VariableNeeds = field(kw_only=True)
    writers: Sequence[Mapping[int, Ranks]] = field(kw_only=True)
    settings: _OptimizerSettings = field(kw_only=True)
    number: int = field(kw_only=True)
    trains: bool = field(kw_only=True)
    batch_types: str = field(kw_only=True)

    def run_parts(self, batch: Sequence[Any]) -> list[list[Any]]:
        """Run one step on ``batch``, and return the outputs of each graph; see ``Program.run_parts``."""
        is_local = BATCH_SIZE_NAME in self.graph.inputs
        progress, samples = self.job.progress, int(batch[-1]) if is_local else int(batch[0].shape[0])
        what = f"run {self._next} with {format_samples(samples)} (program {self.number})"
        what += "".join(f", {name} set to {value}" for name, value in self.settings.changes().items())
        progress.announce_call(what, f" of {self.batch_types}")
        _place_variables(self.job, self.needs)
        with progress.step_running(self.number, trains=self.trains):
            try:
                return super().run_parts(batch)
            except StepError as error:
                report_failure(error)
                raise

    @property
    def _next(self) -> str:
        """The next run of the program, in words."""
        step = self.job.progress.step
        return f"step {step + 1}" if self.trains else f"forward after step {step}"

    @contextlib.contextmanager
    def rehearsal(self, variables: Iterable[tf.Variable]) -> Iterator[None]:
        """See ``Program.rehearsal``; only variables that this rank holds count, and the steps are not counted.

        Every rank must enter it.
        """
        progress, locations = self.job.progress, self.job.variable_locations
        step = progress.step
        progress.announce_call(f"rehearse {self._next} (program {self.number})", f" of {self.batch_types}")
        _place_variables(self.job, self.needs)
        held = [variable for variable in variables if self.job.rank in (locations.ranks_of(variable) or ())]
        with super().rehearsal(held):
            yield
        progress.step = step


class RankTarget:
    """Builds programs for one rank of ``job``; the first program gives all ranks the variables of rank 0.

    ``device``: the device of the rank's stages. ``home``: the device of the batch, the loss and everything else that
    belongs to no stage.
    """

    def __init__(self, job: Job, device: str, home: str) -> None:
        self._job = job
        self._device = device
        self._home = home
        self._buffers = Buffers(home)
        self._synchronized = False
        self._settings = _OptimizerSettings()

    def announce(self, what: str, batch_size: int, signature: Sequence[tf.TensorSpec]) -> None:
        """Announce a call that every rank must make, for a batch of this size; ``what``: the call, an imperative."""
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
        planned: PlannedModel,
        variant: StepVariant,
        times: BuildTimes,
        choose: ChooseCompiled | None = None,
        earlier: Program | None = None,
    ) -> Program:
        """Return the program of this rank for ``planned``; every rank must build the same programs in the same order.

        Where ``planned`` is local, the program takes only the rows that this rank needs, and the batch size after the
        tensors. ``choose`` returns the functions of this rank that XLA compiles. ``earlier``: the program of the phase
        before.

        On each rank, a step that returns gradients returns the gradients of this rank's stages. Raises JobError if the
        ranks differ in TensorFlow's version, code, plan, model or batch; the message names the difference.
        """
        model, plan, agree = planned.model, planned.plan, self._job.agree
        agree("TensorFlow version", tf.__version__)
        agree("plan", plan.to_json())
        agree("shapes and dtypes of the batch", model.interface.signature)
        agree("variables", [(name, v.dtype.name, tuple(v.shape)) for name, v in model.variables.items()])
        with times.phase("passes"):
            place = self._job.size, self._job.rank, self._device, self._home
            graphs, own = self._job.run_on_all(
                lambda: job_graphs(model, plan, *place, variant=variant, local=planned.local)
            )
        agree("graph of the model, or code", digest_graphs(graphs, model.library))
        agree("tensors that the model closes over", digest_tensors(model.constants))
        needs = _find_variable_needs(model, graphs)
        writers = [_find_writers(model, graphs)]
        if earlier is not None:
            assert isinstance(earlier, RankProgram), "all phases run on ranks"
            needs, writers = earlier.needs.joined(needs), [*earlier.writers, *writers]
            check_writers(needs, writers)
        self._settings.add(self._job, model)
        self._check_room(planned, own, needs)
        # When the processes made the model, each drew its own initial values.
        _place_variables(self._job, needs, synchronize=not self._synchronized)
        self._synchronized = True
        phase = model.interface.phase
        collectives = self._make_collectives(graphs, "" if phase is None else of_phase(phase.number, ""))
        graph = follow(own, model, earlier)
        progress = self._job.progress
        progress.stages = tuple(i for i, stage in enumerate(plan.stages) if self._job.rank in stage.devices)
        inputs = tuple(find_inputs(g) for g in graphs)
        with times.phase("emit"):
            every = {f.name: f for g in graphs for f in g.functions}

            def compiled(bindings: Bindings) -> Compiled:
                return {} if choose is None else choose(graph, bindings, tuple(every.values()))

            program = build_rank_program(
                graph, model, self._buffers, collectives, self._device, inputs, compiled, earlier
            )
        progress.programs += 1
        return RankProgram(
            program.parts,
            program.signature,
            inputs,
            loops=program.loops,
            replayable=False,
            job=self._job,
            needs=needs,
            writers=writers,
            settings=self._settings,
            number=progress.programs,
            trains=model.trains,
            batch_types=_describe_types(model.interface.signature),
        )

    def _check_room(self, planned: PlannedModel, graph: Graph, needs: VariableNeeds) -> None:
        """Raise NoFitError on every rank where what a rank has yet to allocate does not fit its process, or its host.

        Every rank must call this.
        """
        rank, variables = self._job.rank, planned.model.variables
        held = {id(variable) for variable, ranks in needs.ranks if rank in ranks}
        names = [name for name, variable in variables.items() if id(variable) in held]
        stages = [i for i, stage in enumerate(planned.plan.stages) if rank in stage.devices]
        where = f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages)) or '-'})"
        predict = partial(predict_rank_step, planned, stages)
        need = self._job.run_on_all(lambda: find_need(graph, variables, names, where, predict, self._job.local_size))
        found = self._job.gather((socket.gethostname(), need))
        own_host = found[rank][0]
        others = [other for i, (host, other) in enumerate(found) if host == own_host and i != rank]
        self._job.run_on_all(lambda: check_room(need, others))

    def _make_collectives(self, graphs: Sequence[Graph], scope: str) -> Collectives:
        """Return the builder of this rank's collectives; connect the ranks as the ``graphs`` of all ranks need it.

        ``scope``: see ``Collectives``.
        """
        progress, network = self._job.progress, self._job.exchange_network
        native = None
        if network is not None:
            network.connect(exchanging_pairs(graphs))
            native = NativeCollectives(network.library, progress.programs + 1, self._job.rank)
        nodes = [node for graph in graphs for node in collectives_of(graph)]
        by_horovod = [node for node in nodes if network is None or not is_native(node)]
        sets = self._job.make_process_sets(node.integers("ranks") for node in by_horovod)
        return Collectives(self._job.rank, sets, progress, native, scope)


def _describe_types(signature: Sequence[tf.TensorSpec]) -> str:
    """Return dtypes and shapes of one sample: float32[96], int32[]."""
    types = ", ".join(f"{spec.dtype.name}{list(spec.shape[1:])}" for spec in signature)
    return types if len(types) <= _LONGEST_TYPES else types[:_LONGEST_TYPES] + " ..."


# --- Place variables: a rank holds the variables of its stages, and frees the memory of all others
# When a program has been built, and before each step, every rank receives the variables that its part needs and drops
# the others. Reading a dropped variable fails with an error that says what to do; it never returns an outdated value.


_ADVICE = "other ranks of the job hold and train it; call step.gather() on every rank before this"


def _find_variable_needs(model: StagedModel, graphs: Sequence[Graph]) -> VariableNeeds:
    """Return the variables of ``model`` with the ranks that need them; ``graphs[i]`` is rank i's part.

    All ranks need the settings of the optimizer.
    """
    settings = _find_settings(model)
    held = [resident_variables(graph) | settings.keys() for graph in graphs]
    return VariableNeeds(
        tuple(
            (variable, frozenset(rank for rank, names in enumerate(held) if name in names))
            for name, variable in model.variables.items()
        )
    )


def _find_writers(model: StagedModel, graphs: Sequence[Graph]) -> Mapping[int, Ranks]:
    """Return the ranks that write each variable of ``model``, by its identity; ``graphs[i]`` is rank i's part."""
    found = defaultdict[int, set[int]](set)
    for rank, graph in enumerate(graphs):
        for node, names in variable_uses(graph):
            for name in written_by(graph, node, names):
                found[id(model.variables[name])].add(rank)
    return {key: frozenset(ranks) for key, ranks in found.items()}


def check_writers(needs: VariableNeeds, writers: Sequence[Mapping[int, Ranks]]) -> None:
    """Raise PlanError where a phase writes a variable on some ranks only, and others need it in the same step.

    ``needs``: of all phases; ``writers``: of each phase (see ``RankProgram``).
    """
    for variable, ranks in needs.ranks:
        for number, own in enumerate(writers):
            written = own.get(id(variable), ranks)
            if not ranks <= written:
                raise PlanError(
                    f"{internals.variable_name(variable)!r}: phase {number + 1} of the step writes it on "
                    f"{_print_ranks(written)} and {_print_ranks(ranks - written)} needs it in another phase: compute "
                    "what it holds where it is used, or give stages=1"
                )


def _print_ranks(ranks: Ranks) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(sorted(ranks))}"


def _place_variables(job: Job, needs: VariableNeeds, *, synchronize: bool = False) -> None:
    """Send every rank the variables that it needs and lacks, and drop the variables that only other ranks need.

    ``synchronize``: send all values that a rank needs, so that all ranks have rank 0's. A variable that no rank needs
    stays where it is. Every rank must call this, with equal needs.
    """
    locations = job.variable_locations
    if locations.placed_for is needs and not synchronize:
        if locations.release is None:
            others = [v for v, _ in needs.ranks if job.rank not in (locations.ranks_of(v) or ())]
            locations.release = variable_values.make_releaser(others)
        locations.release()
        return
    of_ranks = job.gather([variable_values.is_deferred(variable) for variable, _ in needs.ranks])
    transfers, dropped = [], []
    for (variable, ranks), deferred in zip(needs.ranks, zip(*of_ranks, strict=True), strict=True):
        holders, source = locations.ranks_of(variable), locations.source(variable)
        wanted = ranks or frozenset({source})
        is_deferred = all(deferred)  # where a rank has a value, rank 0's is sent, as of all variables
        if is_deferred:
            source = min(wanted)  # the first rank that needs it makes it
        made_here_only = is_deferred and len(wanted) == 1
        if (synchronize or holders is None or wanted - holders) and not made_here_only:
            transfers.append(Transfer(variable, source, wanted))
        if holders != wanted:
            locations.set_ranks(variable, wanted)
            if job.rank not in wanted:
                dropped.append(variable)
    send_values(job, transfers)
    variable_values.release_variables(dropped, _ADVICE)
    locations.placed_for, locations.release = needs, None


# --- Detect settings of an optimizer, such as its learning rate, that a user changes between steps
# They must be changed on every rank. Every rank holds these variables, whatever its stages are, so that callbacks can
# read and set them; a step uses the value of one rank.


def _find_settings(model: StagedModel) -> dict[str, tf.Variable]:
    """Return the scalar variables that the optimizer reads and does not write, by the name of their node."""
    functions = () if model.updates is None else model.updates.functions
    written = {name for function in functions for name in written_variables(function.graph)}
    if model.interface.phase is not None:
        changed = model.interface.phase.written
        written |= {name for name, variable in model.variables.items() if id(variable) in changed}
    return {
        name: variable
        for name, variable in model.variables.items()
        if variable.shape.rank == 0 and name not in model.model_variables and name not in written
    }


@dataclass
class _OptimizerSettings:
    """The settings of the optimizer of a step, by name, with the values that all ranks know."""

    _variables: dict[str, tf.Variable] = field(default_factory=dict)
    _known: dict[str, Any] = field(default_factory=dict)

    def add(self, job: Job, model: StagedModel) -> None:
        """Add the settings of ``model``, before its variables are placed; every rank must call this.

        Raises JobError on every rank if the ranks have different values; the message names the values.
        """
        settings = {internals.variable_name(v).rpartition("/")[2]: v for v in _find_settings(model).values()}
        added = {name: variable for name, variable in settings.items() if name not in self._variables}
        values = {name: variable.numpy() for name, variable in added.items()}
        for name, value in values.items():
            job.agree(f"{name} of the optimizer (set it on every rank)", value)
        self._variables |= added
        self._known |= values

    def changes(self) -> dict[str, Any]:
        """Return the settings that have changed on this rank since the last call, by name."""
        values = {name: variable.numpy() for name, variable in self._variables.items()}
        found = {name: value for name, value in values.items() if value != self._known[name]}
        self._known |= found
        return found
