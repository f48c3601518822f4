"""Whole pipelined graphs, of any number of stages, replicas and micro-batches, to be projected to ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from graph_passes.ir.graph import Function, Graph
from graph_passes.ir.text import parse_type
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.allreduce import AllReduce
from graph_passes.passes.apply import Apply
from graph_passes.passes.base import Pass, run_passes
from graph_passes.passes.copy_variables import CopyVariables
from graph_passes.passes.gather_slices import GatherSlices, SparsePart
from graph_passes.passes.join_replicas import JoinReplicas
from graph_passes.passes.microbatch import Microbatch
from graph_passes.passes.order import Order
from graph_passes.passes.overlap import Overlap
from graph_passes.passes.project import project
from graph_passes.passes.rank_variables import rank_variables
from graph_passes.passes.split_concat import SplitConcat
from graph_passes.passes.split_update import Updates
from graph_passes.passes.write_statistics import WriteStatistics
from graph_passes.schedules.policies import build_schedule
from tests.graph_passes.builders import calls, function, joining

X = "inputs %x\n%x = input() -> (float32[?,4])\n"


@dataclass(frozen=True)
class Kind:
    """A pipeline: ``tied`` between its first and last stage, with a ``skip`` from first to last, counting ``state``.

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
        """Stage by stage, the ranks in order."""
        ends = [sum(self.replicas[: s + 1]) for s in range(len(self.replicas))]
        return tuple(tuple(range(end - r, end)) for end, r in zip(ends, self.replicas, strict=True))

    @property
    def size(self) -> int:
        return sum(self.replicas)


FLAGS = ("tied", "skip", "state", "clip", "overlap", "term", "sparse", "statistics", "joins")


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    replicas = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    schedule = draw(st.sampled_from(["dapple-a", "dapple-b", "gpipe", "zb-h1"]))
    flags = {name: draw(st.booleans()) for name in FLAGS}
    return Kind(tuple(replicas), draw(st.integers(1, 4)), schedule, **flags)


def passes_of(kind: Kind) -> list[Pass]:
    """The passes that build such a pipeline, in the order of the compiler."""
    stages = len(kind.replicas)
    updates = Updates(None, tuple((s, _update(s, kind)) for s in range(stages)), function("step", "variable t"))
    schedule = build_schedule(kind.schedule, stages, kind.micro_batches)
    return [
        Microbatch(stages, kind.micro_batches),
        SplitConcat(kind.replicas, frozenset({"term"})),
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
    return calls(X, *(joining(f) if kind.joins else f for f in functions))


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
    if kind.schedule == "zb-h1":
        inputs = function(f"stage{stage}/backward", ", ".join([*seeds, "stash a"]), ", ".join([*back, "carry c"]))
        weights = function(f"stage{stage}/weights", ", ".join([*enters, "stash a, carry c"]), ", ".join(graded))
        return (forward, inputs, weights, *_statistics(stage, last, kind))
    backward = function(f"stage{stage}/backward", ", ".join([*seeds, "stash a"]), ", ".join([*back, *graded]))
    return (forward, backward, *_statistics(stage, last, kind))


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
    return rank_variables(graph, {name: parse_type("float32[4]") for name in names})


def ranks_of(kind: Kind, ranks: Sequence[Sequence[int]] | None = None) -> tuple[Graph, ...]:
    """The graphs of all ranks."""
    whole = graph_for_ranks(kind)
    return tuple(project(whole, ranks or kind.ranks, rank) for rank in range(kind.size))
