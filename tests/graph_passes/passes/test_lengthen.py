"""The graphs of many micro-batches that are made of those of a few are the ones that the passes make."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple_tf.graph_passes.ir.graph import Graph, Value
from dapple_tf.graph_passes.ir.names import MICRO_BATCH
from dapple_tf.graph_passes.passes.lengthen import Lengthening, Shortened, find_received, shorten
from dapple_tf.graph_passes.passes.microbatch import Microbatch
from dapple_tf.graph_passes.schedules.schedule import Schedule, check
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec, parse_schedule
from tests.graph_passes.whole import FLAGS, Kind, input_graph, ranks_of, whole_graph

FEWEST = 3


def schedule_of(text: str, stages: int, micro_batches: int) -> Schedule:
    return ScheduleSpec.parse(text).build(stages, micro_batches)


def shortened(schedule: Schedule, fewest: int = FEWEST) -> Shortened:
    short = shorten(schedule, fewest)
    assert short is not None
    return short


def with_schedule(kind: Kind, schedule: Schedule) -> Kind:
    return dataclasses.replace(kind, micro_batches=schedule.micro_batches, schedule=str(schedule))


def lengthened(
    first: Sequence[Graph], second: Sequence[Graph], short: Shortened, sizes: tuple[int, ...] = ()
) -> list[Graph]:
    """Return the graphs of all rounds, of which the first and the second lack some."""
    found = []
    for rank, (one, two) in enumerate(zip(first, second, strict=True)):
        lengthening = Lengthening.find(one, two, short, sizes, find_received(first, one, rank))
        found.append(lengthening.whole())
    return found


def check_equal(found: Graph, built: Graph) -> None:
    """Check that two graphs have the same nodes, in some topological order, and nothing else that differs."""
    assert found.by_name == built.by_name
    assert found.replace(nodes=()) == built.replace(nodes=())
    seen: set[str] = set()
    for node in found.nodes:
        assert seen.issuperset(node.predecessors())
        seen.add(node.name)


@st.composite
def long_kinds(draw: st.DrawFn) -> Kind:
    """A pipeline with enough micro-batches to leave out rounds of its schedule."""
    flags = {name: draw(st.booleans()) for name in FLAGS}
    if draw(st.booleans()):
        stages, micro_batches = draw(st.sampled_from([(4, 18), (4, 20), (6, 30)]))
        return Kind((draw(st.integers(1, 2)),) * stages, micro_batches, "interleaved-1f1b:v=2", **flags)
    replicas = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=3)))
    warm_up = ",".join(str(2 * len(replicas) - stage) for stage in range(len(replicas)))
    schedule = draw(st.sampled_from(["dapple-a", "dapple-b", "zb-h1", f"K={warm_up}"]))
    return Kind(replicas, draw(st.integers(17, 18)), schedule, **flags)


@given(kind=long_kinds())
@settings(max_examples=12)
def test_the_graph_of_one_process(kind: Kind) -> None:
    short = shortened(kind.build_schedule())
    first, second = (whole_graph(with_schedule(kind, each)) for each in (short.first, short.second))
    (found,) = lengthened([first], [second], short)
    check_equal(found, whole_graph(kind))


@given(kind=long_kinds())
@settings(max_examples=12)
def test_the_graphs_of_ranks(kind: Kind) -> None:
    short = shortened(kind.build_schedule())
    first, second = (ranks_of(with_schedule(kind, each)) for each in (short.first, short.second))
    for found, built in zip(lengthened(first, second, short), ranks_of(kind), strict=True):
        check_equal(found, built)


@pytest.mark.parametrize("text", ["dapple-a", "dapple-b", "zb-h1", "K=9,2,1"])
def test_a_short_schedule_has_the_same_rounds_for_any_number_of_micro_batches(text: str) -> None:
    short = [shortened(schedule_of(text, 3, m), 2) for m in (24, 90)]
    assert short[0].first == short[1].first
    assert short[0].second == short[1].second
    assert short[0].stride == short[1].stride == 1
    assert short[1].rounds == short[0].rounds + 66
    check(short[0].first)
    assert short[0].first.warm_up == schedule_of(text, 3, 90).warm_up


def test_the_rounds_of_devices_that_run_several_stages_in_turn() -> None:
    schedule = schedule_of("interleaved-1f1b:v=2", 8, 64)
    short = shortened(schedule)
    assert short.stride == 4
    assert short.first.micro_batches + 4 * short.rounds == 64
    assert short.second.micro_batches == short.first.micro_batches + 4
    check(short.second)


@pytest.mark.parametrize(
    "schedule",
    [
        schedule_of("gpipe", 2, 40),
        schedule_of("dapple-a", 2, 9),
        parse_schedule(str(schedule_of("dapple-a", 2, 40)).replace("0B9 0F11", "0F11 0B9")),
        parse_schedule(str(schedule_of("dapple-a", 2, 40)).replace("1F20 1B20 1F21 1B21", "1F20 1F21 1B20 1B21")),
    ],
    ids=["all forwards first", "few micro-batches", "one round differs early", "one round differs in the middle"],
)
def test_a_schedule_without_many_equal_rounds_is_not_shortened(schedule: Schedule) -> None:
    assert shorten(schedule, 30) is None


def test_micro_batches_in_descending_order_have_no_rounds() -> None:
    assert shorten(ScheduleSpec.parse("0F1 0F0 0B1 0B0; 1F1 1B1 1F0 1B0").build(2, 2), fewest=1) is None


def test_results_that_travel_together_in_each_round() -> None:
    """Stage 0 sends the activations of two micro-batches at a time, so a round has two."""
    first, second = "0F0+ 0F1", "1F0 1B0 1F1 1B1"
    for m in range(2, 40, 2):
        first += f" 0F{m}+ 0F{m + 1} 0B{m - 2} 0B{m - 1}"
        second += f" 1F{m} 1B{m} 1F{m + 1} 1B{m + 1}"
    schedule = parse_schedule(f"{first} 0B38 0B39\n{second}")
    kind = Kind((1, 2), 40, str(schedule))
    short = shortened(schedule)
    assert short.stride == 2
    one, two = (whole_graph(with_schedule(kind, each)) for each in (short.first, short.second))
    (found,) = lengthened([one], [two], short)
    check_equal(found, whole_graph(kind))
    # An exchange of several micro-batches has the number of none.
    ranks = [ranks_of(with_schedule(kind, each)) for each in (short.first, short.second)]
    assert Lengthening.find(ranks[0][0], ranks[1][0], short, (), find_received(ranks[0], ranks[0][0], 0)) is None


def test_given_sizes_of_micro_batches() -> None:
    sizes = tuple(1 + m % 3 for m in range(16))
    kind = Kind((1, 1), 16)
    short = shortened(kind.build_schedule())

    def build(count: int) -> Graph:
        return Microbatch(2, count, sizes=sizes[:count])(input_graph(kind)).sorted()

    (found,) = lengthened([build(short.first.micro_batches)], [build(short.second.micro_batches)], short, sizes)
    check_equal(found, build(16))
    assert found.node("stage1/replica0/mb9/slice").attr("sizes") == sizes


# --- Two graphs that differ by something else than a round are not lengthened


KIND = Kind((1, 1), 16, sparse=True)
SHORT = shortened(KIND.build_schedule())
FIRST, SECOND = (whole_graph(with_schedule(KIND, each)) for each in (SHORT.first, SHORT.second))


def changed(graph: Graph, name: str, **changes: object) -> Graph:
    nodes = (dataclasses.replace(node, **changes) if node.name == name else node for node in graph.nodes)
    return graph.replace(nodes=tuple(nodes))


def call(number: int) -> str:
    """Return the name of a call of the second graph."""
    return f"stage1/replica0/mb{number}/forward"


LAST = SHORT.second.micro_batches - 1


@pytest.mark.parametrize(
    "second",
    [
        changed(SECOND, call(0), device="gpu"),
        changed(SECOND, call(SHORT.begin + SHORT.stride), device="gpu"),
        changed(SECOND, call(LAST), inputs=SECOND.node(call(LAST)).inputs[:-1]),
        changed(SECOND, call(LAST), inputs=(Value("x"), *SECOND.node(call(LAST)).inputs[1:])),
        changed(SECOND, call(LAST), controls=SECOND.node(call(LAST - 1)).controls),
        changed(SECOND, call(LAST), attrs=SECOND.node(call(LAST)).with_attrs(micro_batch=LAST + 1).attrs),
        changed(SECOND, "loss", inputs=SECOND.node("loss").inputs[2:]),
        changed(SECOND, "loss", attrs=(("kind", "sum"),)),
        changed(SECOND, "loss", attrs=()),
        SECOND.replace(nodes=tuple(node for node in SECOND.nodes if node.name != "loss")),
        SECOND.replace(nodes=tuple(node for node in SECOND.nodes if not node.has(MICRO_BATCH))),
        SECOND.replace(outputs=()),
        SECOND.replace(functions=SECOND.functions[1:]),
        FIRST,
    ],
)
def test_graphs_that_differ_by_more_than_a_round(second: Graph) -> None:
    assert Lengthening.find(FIRST, SECOND, SHORT) is not None
    assert Lengthening.find(FIRST, second, SHORT) is None
