"""Which variables are resident on a rank: its own, not those of which it has copies."""

from __future__ import annotations

from dapple_tf.graph_passes.analysis.variable_use import resident_variables
from tests.graph_passes.builders import calls, function

STAGE = (
    function("stage1/forward", "variable t, variable w, variable n", writes=["n"]),
    function("stage1/backward", "variable t, variable w"),
    function("stage1/update", "variable w, variable m"),
    function("optimizer/after", "variable steps"),
)


def test_variables_of_a_stage_s_calls_and_updates_are_resident() -> None:
    graph = calls(
        """
        %f = forward() {function='stage1/forward', micro_batch=0, replica=0, stage=1}
        %u = update() {function='stage1/update', stage=1}
        """,
        *STAGE,
    )
    assert resident_variables(graph) == {"t", "w", "n", "m"}


def test_the_step_counter_of_a_stage_is_resident_if_its_updates_are_counted() -> None:
    graph = calls("%c = count_update() {offset=2, replica=0, stage=1, variable='steps'}", *STAGE)
    assert resident_variables(graph) == {"steps"}


def test_only_the_copy_of_a_variable_of_another_stage_is_resident() -> None:
    """One value is received, another is copied from this rank's own: copies are not the variables."""
    graph = calls(
        """
        %got = exchange() {ranks=[0, 1]} -> (float32[9])
        %stage1/replica0/refresh = refresh(%got:0) {place, variables=['t', 'n']}
        %f = forward() {function='stage1/forward', micro_batch=0, replica=0, stage=1}
        %b = backward() {function='stage1/backward', micro_batch=0, replica=0, stage=1}
        """,
        *STAGE,
    )
    assert resident_variables(graph) == {"w", "n"}


def test_weight_gradients_use_copies_where_there_are_some() -> None:
    graph = calls(
        """
        %got = exchange() {ranks=[0, 1]} -> (float32[9])
        %stage1/replica0/refresh = refresh(%got:0) {place, variables=['t']}
        %g = weights() {function='stage1/backward', micro_batch=0, replica=0, stage=1}
        """,
        *STAGE,
    )
    assert resident_variables(graph) == {"w"}


def test_updates_reads_and_commits_use_the_variables_themselves() -> None:
    graph = calls(
        """
        %stage1/replica0/refresh = refresh() {place, variables=['w']}
        %u = update() {function='stage1/update', stage=1}
        %a = update() {function='optimizer/after'}
        %r = read_variable() {replica=0, stage=1, variables=['t']} -> (float32[9])
        %s = read_state() {replica=0, stage=1, variables=['w', 'n']} -> (float32[4], int64[])
        %c = commit() {replica=0, replicas=1, stage=1, variables=['k']}
        """,
        *STAGE,
    )
    assert resident_variables(graph) == {"w", "m", "steps", "t", "n", "k"}


def test_what_runs_once_uses_variables_or_their_copies() -> None:
    once = function("stage1/run_once", "variable t, variable k", writes=["k"])
    call = "%o = run_once() {function='stage1/run_once', replica=0, stage=1}"
    assert resident_variables(calls(call, *STAGE, once)) == {"t", "k"}
    refresh = "%got = exchange() {ranks=[0, 1]} -> (float32[9])\n%r = refresh(%got:0) {replica=0, stage=1, "
    copied = calls(f"{refresh}variables=['t', 'k']}}\n{call}", *STAGE, once)
    assert resident_variables(copied) == {"k"}  # the copy of its own variable was read here


def test_the_step_counter_of_windows_and_stored_versions_are_of_the_variables_themselves() -> None:
    graph = calls(
        """
        %v = store_version() {replica=0, stage=1, variables=['w'], version=0}
        %c = count_update() {offset=2, replica=0, stage=1, variable='steps'}
        """
    )
    assert resident_variables(graph) == {"w", "steps"}
