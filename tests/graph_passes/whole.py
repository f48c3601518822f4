"""Whole pipelined graphs, of any number of stages, replicas and micro-batches, to be projected to ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from dapple_tf.graph_passes.ir.graph import Function, Graph
from dapple_tf.graph_passes.ir.names import Site
from dapple_tf.graph_passes.ir.text import parse_type
from dapple_tf.graph_passes.passes.accumulate import Accumulate
from dapple_tf.graph_passes.passes.allreduce import AllReduce
from dapple_tf.graph_passes.passes.apply import Apply
from dapple_tf.graph_passes.passes.base import Pass, run_passes
from dapple_tf.graph_passes.passes.copy_variables import CopyVariables
from dapple_tf.graph_passes.passes.gather_slices import GatherSlices, SparsePart
from dapple_tf.graph_passes.passes.join_replicas import JoinReplicas
from dapple_tf.graph_passes.passes.microbatch import Microbatch
from dapple_tf.graph_passes.passes.order import Order
from dapple_tf.graph_passes.passes.overlap import Overlap
from dapple_tf.graph_passes.passes.project import Project
from dapple_tf.graph_passes.passes.rank_variables import RankVariables
from dapple_tf.graph_passes.passes.send_together import SendTogether
from dapple_tf.graph_passes.passes.split_concat import SplitConcat
from dapple_tf.graph_passes.passes.split_update import Updates
from dapple_tf.graph_passes.passes.write_statistics import WriteStatistics
from dapple_tf.graph_passes.schedules.schedule import Action, Schedule, dependencies
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, parse_schedule
from dapple_tf.graph_passes.schedules.worker_map import WorkerMap
from tests.graph_passes.builders import call_graph, function, with_join
from tests.graph_passes.schedules.marked import marked
from tests.graph_passes.schedules.mixed import mixed

X = "inputs %x\n%x = input() -> (float32[?,4])\n"


@dataclass(frozen=True)
class Kind:
    """A pipeline: ``tied`` between its first and last stage, with a ``skip`` from first to last, counting ``state``.

    ``replicas``: of each stage. The ``schedule`` says which stages share a worker, and so have the same ranks.
    ``term``: a number that all replicas have alike goes from first to last. ``statistics``: forward gives one in each
    stage, and the last stage writes from those of the first, too. ``joins``: forward and backward of each stage join
    something over its replicas.
    """

    replicas: tuple[int, ...]
    micro_batches: int
    schedule: str = "dapple-a"
    tied: bool = False
    skip: bool = False
    state: bool = False
    clip: bool = False
    overlap: bool = False
    term: bool = False
    sparse: bool = False
    statistics: bool = False
    joins: bool = False

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Stage by stage, the ranks: worker by worker they are in order, and the stages of a worker have the same."""
        workers = ScheduleSpec.parse(self.schedule).worker_map(len(self.replicas))
        counts = [self.replicas[stages[0]] for stages in workers.stages_of]
        ends = itertools.accumulate(counts)
        own = [tuple(range(end - r, end)) for end, r in zip(ends, counts, strict=True)]
        return tuple(own[worker] for worker in workers.worker_of)

    @property
    def size(self) -> int:
        return len({rank for ranks in self.ranks for rank in ranks})

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank runs."""
        return [stage for stage, ranks in enumerate(self.ranks) if rank in ranks]

    def build_schedule(self) -> Schedule:
        return ScheduleSpec.parse(self.schedule).build(len(self.replicas), self.micro_batches)


FLAGS = ("tied", "skip", "state", "clip", "overlap", "term", "sparse", "statistics", "joins")


@st.composite
def orders(draw: st.DrawFn, workers: WorkerMap, micro_batches: int) -> str:
    """The text of a schedule: actions one by one, each any that could run then, micro-batch by micro-batch."""
    stages = range(workers.stages)
    waiting = {(stage, kind): iter(range(micro_batches)) for stage in stages for kind in ("F", "B")}
    heads = {place: Action(*place, next(left)) for place, left in waiting.items()}
    rows: list[list[Action]] = [[] for _ in workers.stages_of]
    ran: set[Action] = set()
    while heads:
        ready = [place for place, action in heads.items() if ran.issuperset(_needed(action, workers.stages))]
        place = draw(st.sampled_from(ready))
        action = heads.pop(place)
        rows[workers.worker_of[action.stage]].append(action)
        ran.add(action)
        following = next(waiting[place], None)
        if following is not None:
            heads[place] = Action(*place, following)
    return str(Schedule(tuple(map(tuple, rows))))


def _needed(action: Action, stages: int) -> set[Action]:
    """Return the actions that an action waits for, where all backwards are whole."""
    return {needed for needed in dependencies(action, stages) if needed.kind != "I"}


@st.composite
def kinds(draw: st.DrawFn, *, shared: bool = False) -> Kind:
    """A pipeline of one stage per worker, or with ``shared`` of any number of stages on each."""
    flags = {name: draw(st.booleans()) for name in FLAGS}
    micro_batches = draw(st.integers(1, 3 if shared else 4))
    counts = draw(st.lists(st.integers(1, 2 if shared else 3), min_size=1, max_size=3 if shared else 4))
    if not shared:
        schedule = draw(st.sampled_from(["dapple-a", "dapple-b", "gpipe", "zb-h1"]))
        if draw(st.booleans()):
            schedule = str(draw(mixed(ScheduleSpec.parse(schedule).build(len(counts), micro_batches))))
        if draw(st.booleans()):
            schedule = str(draw(marked(ScheduleSpec.parse(schedule).build(len(counts), micro_batches))))
        return Kind(tuple(counts), micro_batches, schedule, **flags)
    more = draw(st.lists(st.integers(0, len(counts) - 1), min_size=1, max_size=2))
    workers = WorkerMap.of(draw(st.permutations([*range(len(counts)), *more])))
    replicas = tuple(counts[worker] for worker in workers.worker_of)
    schedule = draw(orders(workers, micro_batches))
    if draw(st.booleans()):
        schedule = str(draw(mixed(parse_schedule(schedule))))
    if draw(st.booleans()):
        schedule = str(draw(marked(parse_schedule(schedule))))
    return Kind(replicas, micro_batches, schedule, **flags)


def passes_of(kind: Kind) -> list[Pass]:
    """The passes that build such a pipeline, in the order of the compiler."""
    stages = len(kind.replicas)
    updates = Updates(None, tuple((Site(s), _update(s, kind)) for s in range(stages)), function("step", "variable t"))
    schedule = kind.build_schedule()
    return [
        Microbatch(stages, kind.micro_batches, split=schedule.split),
        SplitConcat(kind.replicas, frozenset({"term"})),
        *([SendTogether(schedule)] if schedule.together else []),
        CopyVariables(),
        Accumulate(),
        *([Overlap(1)] if kind.overlap else []),
        AllReduce(),
        *([GatherSlices(parts_of(kind))] if kind.sparse else []),
        *([WriteStatistics()] if kind.statistics else []),
        Order(schedule),
        Apply(updates, 0.5 if kind.clip else None),
    ]


def parts_of(kind: Kind) -> tuple[SparsePart, ...]:
    """The sparse uses of such a pipeline: the first and the last stage look up rows of ``e``, the last one first."""
    stages = sorted({0, len(kind.replicas) - 1}, reverse=True)
    return tuple(SparsePart("e", 9, position, stage, 0, "concat") for position, stage in enumerate(stages))


def input_graph(kind: Kind) -> Graph:
    """The stage functions of such a pipeline, before they are called."""
    stages = len(kind.replicas)
    functions = (f for s in range(stages) for f in stage_functions(s, stages, kind))
    return call_graph(X, *(with_join(f) if kind.joins else f for f in functions))


def whole_graph(kind: Kind) -> Graph:
    """The graph of such a pipeline before ``rank_variables``."""
    return run_passes(input_graph(kind), [*passes_of(kind), *([JoinReplicas()] if kind.joins else [])])


def stage_functions(stage: int, stages: int, kind: Kind) -> tuple[Function, ...]:
    first, last = stage == 0, stage == stages - 1
    before = ["h"] + ["k"] * kind.skip + ["term float32[]"] * kind.term
    enters = [] if first else [f"boundary {name}{stage - 1 if name == 'h' else ''}" for name in before]
    leaves = [] if last else [f"{name}{stage if name == 'h' else ''}" for name in before]
    looks_up = kind.sparse and (first or last)
    variables = _trained(stage, stages, kind) + [f"n{stage}"] * kind.state + ["e"] * looks_up
    takes = ["arg x"] * (first or last) + enters + [f"variable {name}" for name in variables]
    gives = ["loss loss"] if last else [f"boundary {name}" for name in leaves]
    forward = function(
        f"stage{stage}/forward",
        ", ".join(takes),
        ", ".join([*gives, *[f"statistic s{stage} float64[3,4]"] * kind.statistics, "stash a"]),
        [f"n{stage}"] * kind.state,
    )
    seeds = ["seed loss"] if last else [f"gradient {name}" for name in leaves]
    back = [name.replace("boundary", "gradient") for name in enters]
    graded = [f"variable {name}" for name in _trained(stage, stages, kind)]
    graded += ["slices e float32[_,4], indices e int64[_]"] * looks_up
    backward = function(f"stage{stage}/backward", ", ".join([*seeds, "stash a"]), ", ".join([*back, *graded]))
    inputs = function(f"stage{stage}/inputs", ", ".join([*seeds, "stash a"]), ", ".join([*back, "carry c"]))
    weights = function(f"stage{stage}/weights", ", ".join([*enters, "stash a, carry c"]), ", ".join(graded))
    split = sum(other == stage for other, _ in kind.build_schedule().split)
    whole, halves = [backward] * (split < kind.micro_batches), [inputs, weights] * (split > 0)
    return (forward, *whole, *halves, *_statistics(stage, last, kind))


def _statistics(stage: int, last: bool, kind: Kind) -> tuple[Function, ...]:
    if not kind.statistics:
        return ()
    taken = dict.fromkeys((stage, 0) if last else (stage,))
    sums = [f"statistic s{number} float64[3,4]" for number in taken]
    return (function(f"stage{stage}/write_statistics", ", ".join([f"variable m{stage}", *sums]), "", [f"m{stage}"]),)


def _trained(stage: int, stages: int, kind: Kind) -> list[str]:
    return [f"w{stage}"] + ["tied"] * (kind.tied and stage in (0, stages - 1))


def _update(stage: int, kind: Kind) -> Function:
    names = [f"w{stage}"] + ["tied"] * (kind.tied and stage == 0)
    ports = [f"gradient {name}" for name in names] + [f"variable {name}" for name in (*names, "t")]
    if kind.sparse and stage == 0:
        ports += ["gradient e float32[9,4]"] if kind.clip else ["slices e float32[_,4], indices e int64[_]"]
        ports.append("variable e")
    return function(f"stage{stage}/update", ", ".join(ports))


def graph_for_ranks(kind: Kind) -> Graph:
    """The whole graph as it is projected to ranks."""
    graph = whole_graph(kind)
    names = {port.name for f in graph.functions for _, port in f.input_ports("variable")}
    return RankVariables(tuple((name, parse_type("float32[4]")) for name in names), kind.ranks)(graph)


def ranks_of(kind: Kind, ranks: Sequence[Sequence[int]] | None = None) -> tuple[Graph, ...]:
    """The graphs of all ranks."""
    whole = graph_for_ranks(kind)
    return tuple(Project(tuple(map(tuple, ranks or kind.ranks)), rank)(whole) for rank in range(kind.size))
