"""A phase of a step waits for those nodes of earlier phases on which it depends, and for no others (FollowPhases)."""

from __future__ import annotations

from dataclasses import replace

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Effect, Function, Graph, Node
from dapple_tf.graph_passes.passes.base import run_passes
from dapple_tf.graph_passes.passes.follow_phases import FollowPhases, PhaseGraph
from tests.graph_passes.builders import assert_graph, call_graph, function, refused

VARIABLES = {"v": 1, "w": 2}

CRITIC = """
    %stage0/replica0/mb0/forward = forward() {call} -> (float32[?,4]) @'a'
    %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/forward:0) {call} -> (float32[]) @'b'
    %stage1/replica0/mb0/backward = backward() {call} -> (float32[4]) @'b'
    | ^%stage1/replica0/mb0/forward 'order: 1B0 after 1F0'
    %stage1/accumulate = accumulate(%stage1/replica0/mb0/backward:0)
    | {place, first=True, micro_batch=0, variables=['v']} @'b'
    %update/barrier = barrier() @'home' ^%stage1/accumulate 'barrier: no weight changes before'
    %update/begin = set_updating() {updating=True} @'home' ^%update/barrier 'barrier: from here on'
    %stage1/update = update() {call} @'b' ^%update/begin 'barrier: nothing'
"""
DONE = """
    %update/done = set_updating() {updating=False} @'home' ^%stage1/update 'the optimizer steps once'
"""

OF_CRITIC = (
    function("stage0/forward", "variable w", "boundary h"),
    function("stage1/forward", "boundary h, variable v", "loss loss"),
    function("stage1/backward", "", "variable v"),
    function("stage1/update", "variable v", "", ["v"]),
)

GENERATOR = """
    %stage0/replica0/mb0/forward = forward() {call} -> (float32[?,4]) @'a'
    %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/forward:0) {call} -> (float32[]) @'b'
"""
LATER = """
    %stage0/replica0/mb0/backward = backward() {call} -> (float32[4]) @'a'
    | ^%stage0/replica0/mb0/forward 'order: 0B0 after 0F0'
"""
END = """
    %update/begin = set_updating() {updating=True} @'home' ^%update/barrier 'barrier: from here on'
    %stage0/update = update() {call} @'a' ^%update/begin 'barrier: nothing'
"""
BARRIER = "%update/barrier = barrier() @'home' ^%stage0/replica0/mb0/backward 'barrier: no weight changes before'"
OF_GENERATOR = (
    function("stage0/forward", "variable w", "boundary h"),
    function("stage1/forward", "boundary h, variable v", "loss loss"),
    function("stage0/backward", "", "variable w"),
    function("stage0/update", "variable w", "", ["w"]),
)
WAITS = "'phases: it depends on what earlier ones do'"


def critic() -> PhaseGraph:
    """The finished graph of a phase that trains v, on stage 1."""
    return PhaseGraph(call_graph(CRITIC + DONE, *OF_CRITIC), VARIABLES)


def follow(graph: Graph, *earlier: PhaseGraph, last: bool = True) -> Graph:
    return run_passes(graph, [FollowPhases(earlier, VARIABLES, last)])


def test_a_phase_that_others_follow_does_not_end_the_step() -> None:
    tokens = "%token = barrier() -> (int64[])\n%tokens = collect_tokens(%token:0) {}-> (int64[])\n"
    before = call_graph(CRITIC + DONE + tokens.replace("{}", ""), *OF_CRITIC)
    assert_graph(follow(before, last=False), CRITIC + tokens.replace("{}", "{guarded=False} "))
    assert follow(before) == before


def test_a_phase_waits_for_the_calls_of_each_device_and_for_what_writes_its_variables() -> None:
    """Stage 0 begins as soon as it has nothing more to do before: it reads w, which the critic's update leaves."""
    first = PhaseGraph(follow(critic().graph, last=False), VARIABLES)
    after = follow(
        call_graph(GENERATOR + LATER + BARRIER + END + DONE.replace("stage1", "stage0"), *OF_GENERATOR), first
    )
    forward, second = GENERATOR.strip().split("\n    %stage1")
    assert_graph(
        after,
        f"""
        %follow/0 = follow() {{after=['phase1/stage0/replica0/mb0/forward']}} @'a'
        {forward} ^%follow/0 {WAITS}
        %follow/1 = follow() {{after=['phase1/stage1/accumulate', 'phase1/stage1/update']}} @'b'
        %stage1{second} ^%follow/1 {WAITS}
        {LATER}
        %follow/2 = follow() {{after=['phase1/stage1/update']}} @'home'
        {BARRIER} ^%follow/2 {WAITS}
        {END}
        {DONE.replace("stage1", "stage0")}
        """,
    )


def test_no_call_of_a_phase_is_inlined() -> None:
    """An edge to an inlined call does not order its reads of variables."""
    inlined = LATER.replace("backward() {call", "backward() {call, inline=True")
    before = call_graph(GENERATOR + inlined, *OF_GENERATOR)
    assert before.node("stage0/replica0/mb0/backward").has("inline")
    assert_graph(follow(before, last=False), GENERATOR + LATER)


def acting(name: str, effect: Effect) -> Function:
    """A function with an effect other than on variables."""
    plain = function(name, "boundary h, variable v", "loss loss")
    return replace(plain, graph=plain.graph.replace(nodes=(*plain.graph.nodes, Node("act", "Act", effect=effect))))


def test_a_call_that_prints_or_draws_waits_for_all_that_earlier_phases_do() -> None:
    first = PhaseGraph(follow(critic().graph, last=False), {"v": 3, "w": 4})  # other variables than those of the second
    for effect, waits in (
        (Effect.SIDE, "phase1/stage1/update"),
        (Effect.RANDOM, "phase1/stage1/update"),
        (Effect.PURE, "phase1/stage1/accumulate"),
    ):
        functions = [acting("stage1/forward", effect) if f.name == "stage1/forward" else f for f in OF_GENERATOR]
        after = follow(call_graph(GENERATOR, *functions), first)
        assert waits in after.node("follow/1").strings("after")
        assert ("phase1/stage1/update" in after.node("follow/1").strings("after")) == (effect is not Effect.PURE)


def test_a_phase_waits_for_the_last_phase_that_writes_a_variable() -> None:
    """The third phase waits for stage 0's update of the second, and for stage 1's of the first."""
    first = PhaseGraph(follow(critic().graph, last=False), VARIABLES)
    middle = call_graph(GENERATOR + LATER + BARRIER + END, *OF_GENERATOR)
    second = PhaseGraph(follow(middle, first, last=False), VARIABLES)
    after = follow(call_graph(GENERATOR, *OF_GENERATOR), first, second)
    assert after.node("follow/0").strings("after") == (
        "phase2/stage0/replica0/mb0/backward",
        "phase2/stage0/update",
    )
    assert after.node("follow/1").strings("after") == (
        "phase1/stage1/update",
        "phase2/stage1/replica0/mb0/forward",
    )


def test_a_phase_that_waits_already_is_refused() -> None:
    with refused(GraphError, "'follow_phases'", "forbids 'follow' nodes"):
        follow(follow(call_graph(GENERATOR, *OF_GENERATOR), critic()), critic())
