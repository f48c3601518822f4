"""Weight stashing: when versions are stored, in which slot, and which calls use and wait for them."""

from __future__ import annotations

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Graph
from dapple_tf.graph_passes.passes.base import run_passes
from dapple_tf.graph_passes.passes.order import call_name
from dapple_tf.graph_passes.passes.windows.use_versions import UseVersions, calls_of, version_name
from dapple_tf.graph_passes.schedules.schedule import Action
from dapple_tf.graph_passes.schedules.weight_versions import WeightPolicy, weight_versions
from dapple_tf.graph_passes.schedules.window import Window
from tests.graph_passes.builders import assert_graph, call_graph, function, graph, refused
from tests.graph_passes.windows import WindowKind

FUNCTIONS = (
    function("stage0/forward", "arg x, variable w, variable frozen", "loss loss"),
    function("stage0/backward", "seed loss", "variable w"),
)


def used(*versions: int) -> str:
    return " ".join(f"^%stage0/replica0/version{v} 'version: it uses version {v} of the weights'" for v in versions)


def test_two_minibatches_in_flight_use_two_slots_in_turn() -> None:
    """Four minibatches, K = 2: F0 F1 B0 F2 B1 F3 B2 B3 use versions 0 0 0 1 0 2 1 2."""
    place = "replica=0, stage=0"
    calls_before = "".join(
        f"%stage0/replica0/mb{m}/{op} = {op}() {{micro_batch={m}, {place}}}\n"
        for m in range(4)
        for op in ("forward", "backward")
    )
    updates_before = "".join(f"%minibatch{t}/stage0/update = update() {{function='u', {place}}}\n" for t in range(4))

    def call(m: int, op: str, version: int) -> str:
        attrs = f"{{micro_batch={m}, {place}, version={version % 2}}}"
        return f"%stage0/replica0/mb{m}/{op} = {op}() {attrs} {used(version)}\n"

    def store(version: int, *edges: str) -> str:
        attrs = f"{{{place}, variables=['w'], version={version % 2}}}"
        return f"%stage0/replica0/version{version} = store_version() {attrs} {' '.join(edges)}\n"

    def update(t: int) -> str:
        stored = f"^%stage0/replica0/version{t} 'version: {t} is stored before it changes'" if t < 3 else ""
        return f"%minibatch{t}/stage0/update = update() {{function='u', {place}}} {stored}\n"

    def made(version: int) -> str:
        return f"^%minibatch{version - 1}/stage0/update 'version: made by update {version - 1}'"

    wanted = call_graph(
        store(0)
        + call(0, "forward", 0)
        + call(0, "backward", 0)
        + call(1, "forward", 0)
        + call(1, "backward", 0)
        + update(0)
        + store(1, made(1))
        + call(2, "forward", 1)
        + call(2, "backward", 1)
        + update(1)
        # Version 0 is used for the last time by the backward of minibatch 1.
        + store(2, made(2), "^%stage0/replica0/mb1/backward 'version: 0 is used no more'")
        + call(3, "forward", 2)
        + call(3, "backward", 2)
        + update(2)
        + update(3),
        *FUNCTIONS,
    )
    before = call_graph(calls_before + updates_before, *FUNCTIONS)
    found = UseVersions(weight_versions(Window(4, (1,), (2,)), "stash"), frozenset({"w"}))(before)
    assert set(found.nodes) == set(wanted.nodes)


def test_a_stage_that_always_uses_its_newest_weights_stores_none() -> None:
    before = "%stage0/replica0/mb0/forward = forward() {micro_batch=0, replica=0, stage=0}"
    step = UseVersions(weight_versions(Window(1, (1,), (1,)), "stash"), frozenset({"w"}))
    assert_graph(step(call_graph(before, *FUNCTIONS)), before)


def test_a_stage_without_trained_variables_stores_none() -> None:
    before = call_graph("%stage0/replica0/mb0/forward = forward() {micro_batch=0, replica=0, stage=0}", *FUNCTIONS)
    step = UseVersions(weight_versions(Window(2, (2,), (1,)), "stash"), frozenset())
    assert step(before) == before


def stores(graph: Graph) -> dict[str, tuple[int, list[str]]]:
    """The slot of each store, and the nodes for which it waits."""
    nodes = (node for node in graph.nodes if node.op == "store_version")
    return {node.name: (node.integer("version"), [c.source for c in node.controls]) for node in nodes}


def test_each_replica_stores_the_versions_of_its_own_calls() -> None:
    """Two replicas of stage 0, each of them F0 F2 B0 B2: only the last backward comes after an update."""
    found = WindowKind((2, 1), 4, "latest").graph()
    assert stores(found) == {
        "stage0/replica0/version0": (0, []),
        "stage0/replica1/version0": (0, []),
        "stage0/replica0/version1": (0, ["minibatch1/stage0/update", "stage0/replica0/mb0/backward"]),
        "stage0/replica1/version1": (0, ["minibatch1/stage0/update", "stage0/replica1/mb1/backward"]),
    }
    first = found.node("minibatch1/stage0/update")
    assert {"stage0/replica0/version0", "stage0/replica1/version0"} <= {control.source for control in first.controls}


@pytest.mark.parametrize(
    ("policy", "versions"),
    [("stash", [0, 0, 1, 2]), ("vertical-sync", [0, 0, 1, 2]), ("latest", [])],
)
def test_what_runs_once_a_minibatch_uses_the_version_of_its_forward(policy: WeightPolicy, versions: list[int]) -> None:
    found = WindowKind((1, 1), 4, policy, once=True).graph()
    for m, version in enumerate(versions):
        call = found.node(f"minibatch{m}/stage0/replica0/run_once")
        assert call.integer("version") == version % 2
        assert f"stage0/replica0/version{version}" in {control.source for control in call.controls}
    assert versions or not found.node("minibatch0/stage0/replica0/run_once").has("version")


def test_replicas_in_turn_run_the_whole_group_once_with_one_version() -> None:
    kind = WindowKind((2, 1), 4, once=True)
    found = kind.graph()
    for replica in (0, 1):
        for m in range(4):
            call = found.node(f"minibatch{m}/stage0/replica{replica}/run_once")
            store = version_name(0, replica, 0)  # K = 2: the second group enters before the update of the first
            assert store in {control.source for control in call.controls}


ONCE = "".join(
    f"%minibatch{t}/stage0/replica{r}/run_once = run_once() {{replica={r}, stage=0}}\n"
    for t in range(4)
    for r in (0, 1)
)


def test_the_calls_of_a_forward_begin_with_those_that_run_once_for_its_group() -> None:
    window = Window(4, (2,), (1,))
    assert call_name(Action(0, "F", 3), 1) == "stage0/replica1/mb3/forward"
    assert calls_of(graph(ONCE), window, Action(0, "F", 3), 1) == (
        "minibatch2/stage0/replica1/run_once",
        "minibatch3/stage0/replica1/run_once",
        "stage0/replica1/mb3/forward",
    )
    assert calls_of(graph(ONCE), window, Action(0, "B", 3), 1) == ("stage0/replica1/mb3/backward",)


def test_the_first_micro_batch_of_a_minibatch_comes_after_what_runs_once_for_it() -> None:
    window = Window(2, (2,), (1,), 2, in_turn=False)
    assert calls_of(graph(ONCE), window, Action(0, "F", 2), 0) == (
        "minibatch1/stage0/replica0/run_once",
        "stage0/replica0/mb2/forward",
    )
    assert calls_of(graph(ONCE), window, Action(0, "F", 3), 0) == ("stage0/replica0/mb3/forward",)


def test_versions_are_stored_once() -> None:
    kind = WindowKind((1, 1), 3)
    with refused(GraphError, "pass 'use_versions' (after the input) forbids 'store_version' nodes"):
        run_passes(kind.graph(), [UseVersions(kind.versions, kind.trained)])
