"""Contracts of the real passes: a pass that comes too early or too late is refused, or changes nothing by that."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from dapple_tf.errors import GraphError, PartitionError
from dapple_tf.graph_passes.ir.graph import Graph, Node
from dapple_tf.graph_passes.ir.text import parse_type
from dapple_tf.graph_passes.passes.base import Pass, run_passes
from dapple_tf.graph_passes.passes.check_numerics import CheckNumerics
from dapple_tf.graph_passes.passes.expose_gradients import ExposeGradients
from dapple_tf.graph_passes.passes.instrument import Instrument
from dapple_tf.graph_passes.passes.local_input import LocalInput
from dapple_tf.graph_passes.passes.look_up_rows import LookUpRows
from dapple_tf.graph_passes.passes.overlap import Overlap
from dapple_tf.graph_passes.passes.place import Place, PlaceRank
from dapple_tf.graph_passes.passes.project import Project
from dapple_tf.graph_passes.passes.rank_variables import RankVariables
from dapple_tf.graph_passes.passes.recompute import Recompute
from dapple_tf.graph_passes.passes.split_weights import SplitWeights
from dapple_tf.graph_passes.passes.verify_pipeline import VerifyPipeline
from tests.graph_passes.builders import refused
from tests.graph_passes.whole import Kind, input_graph, passes_of, whole_graph

KINDS = [
    Kind((2, 1), 2, tied=True, state=True, clip=True, overlap=True),
    Kind((1, 2), 1, skip=True, term=True),
    Kind((2, 2), 2, schedule="zb-h1", state=True),
    Kind((2, 2), 2, schedule="0F0 0F1 0B0 0I1 0W1; 1F0 1I0 1F1 1W0 1B1", overlap=True, sparse=True),
    Kind((2, 1), 2, clip=True, overlap=True, sparse=True),
    Kind((2, 1), 2, schedule="0F0+ 0F1 0B0 0B1; 1F0 1F1 1B0+ 1B1", skip=True),
    Kind((1, 2), 2, statistics=True),
]


def all_passes(kind: Kind) -> list[Pass]:
    devices = tuple(tuple(map(str, stage)) for stage in kind.ranks)
    check = VerifyPipeline(kind.build_schedule())
    last = [CheckNumerics(), ExposeGradients(), Instrument(), Place(devices, "home"), check]
    return [*passes_of(kind), *last]


def contents(graph: Graph) -> frozenset[Node]:
    """The nodes in no order, each with its control edges sorted."""
    return frozenset(
        Node(n.name, n.op, n.inputs, n.outputs, n.attrs, tuple(sorted(n.controls, key=str)), n.effect, n.device)
        for n in graph.nodes
    )


def moved(passes: Sequence[Pass], position: int, to: int) -> list[Pass]:
    others = [*passes[:position], *passes[position + 1 :]]
    return [*others[:to], passes[position], *others[to:]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_is_moved_is_refused_or_gives_the_same_graph(kind: Kind) -> None:
    before, passes = input_graph(kind), all_passes(kind)
    expected = contents(run_passes(before, passes))
    same: set[tuple[str, str]] = set()
    for to, position in itertools.combinations(range(len(passes)), 2):
        order = moved(passes, position, to)
        try:
            result = run_passes(before, order)
        except GraphError:
            continue
        assert contents(result) == expected, f"{passes[position].name} before {passes[to].name}"
        same.add((passes[position].name, passes[to].name))
    assert same <= {
        ("accumulate", "copy_variables"),
        ("copy_variables", "send_together"),
        ("accumulate", "send_together"),
        ("gather_slices", "copy_variables"),
        ("gather_slices", "accumulate"),
        ("gather_slices", "overlap"),
        ("gather_slices", "allreduce"),
        ("order", "overlap"),
        ("order", "allreduce"),
        ("order", "gather_slices"),
        ("order", "write_statistics"),
        ("check_numerics", "write_statistics"),
        ("expose_gradients", "write_statistics"),
        ("apply", "order"),
        ("check_numerics", "order"),
        ("check_numerics", "apply"),
        ("expose_gradients", "order"),
        ("expose_gradients", "apply"),
        ("expose_gradients", "check_numerics"),
        ("instrument", "check_numerics"),
        ("instrument", "expose_gradients"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_no_pass_that_adds_nodes_runs_twice(kind: Kind) -> None:
    before, passes = input_graph(kind), all_passes(kind)
    for i, step in enumerate(passes):
        if step.contract.produces | step.contract.may_produce or isinstance(step, Overlap):
            with pytest.raises((GraphError, PartitionError)):
                run_passes(before, [*passes[: i + 1], step])


@pytest.mark.parametrize("step", [Recompute(((), ())), LookUpRows(frozenset()), SplitWeights(frozenset(), 2)])
def test_stage_functions_are_rewritten_before_they_are_called(step: Pass) -> None:
    kind = Kind((1, 1), 2)
    run_passes(input_graph(kind), [step])
    with refused(GraphError, f"pass {step.name!r} (after 'microbatch') forbids 'backward' nodes"):
        run_passes(input_graph(kind), [passes_of(kind)[0], step])


def test_the_passes_of_a_rank_come_in_their_order() -> None:
    kind = Kind((2, 1), 2, tied=True, state=True)
    names = {port.name for f in whole_graph(kind).functions for _, port in f.input_ports("variable")}
    variables = RankVariables(tuple((name, parse_type("float32[4]")) for name in sorted(names)), kind.ranks)
    project, place = Project(kind.ranks, 0), PlaceRank("gpu", "home")
    run_passes(whole_graph(kind), [variables, project, LocalInput(), Instrument(), place])
    with refused(GraphError, "pass 'rank_variables' (after 'project') forbids 'exchange' nodes"):
        run_passes(whole_graph(kind), [project, variables])
    with refused(GraphError, "pass 'project' (after 'instrument') forbids 'timestamp' nodes"):
        run_passes(whole_graph(kind), [variables, Instrument(), project])
    with refused(GraphError, "pass 'place_rank' (after the input) requires 'forward' nodes"):
        run_passes(input_graph(kind), [place])
