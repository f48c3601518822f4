"""Which variables a rank holds: its own, not those it has copies of."""

from __future__ import annotations

from graph_passes.analysis.resident_variables import resident_variables
from tests.graph_passes.builders import calls, function

STAGE = (
    function("stage1/forward", "variable t, variable w, variable n", writes=["n"]),
    function("stage1/backward", "variable t, variable w"),
    function("stage1/update", "variable w, variable m"),
    function("optimizer/after", "variable steps"),
)


def test_a_stage_holds_what_its_calls_use_and_its_updates() -> None:
    graph = calls(
        """
        %f = forward() {function='stage1/forward', micro_batch=0, replica=0, stage=1}
        %u = update() {function='stage1/update', stage=1}
        """,
        *STAGE,
    )
    assert resident_variables(graph) == {"t", "w", "n", "m"}


def test_of_what_another_stage_owns_it_holds_a_copy_only() -> None:
    """One comes as a value, another is copied from this rank's own: the copies are not the variables."""
    graph = calls(
        """
        %got = exchange() {ranks=[0, 1]} -> (float32[9])
        %stage1/replica0/refresh = refresh(%got:0) {replica=0, stage=1, variables=['t', 'n']}
        %f = forward() {function='stage1/forward', micro_batch=0, replica=0, stage=1}
        %b = backward() {function='stage1/backward', micro_batch=0, replica=0, stage=1}
        """,
        *STAGE,
    )
    assert resident_variables(graph) == {"w", "n"}


def test_gradients_of_weights_are_made_of_copies_where_there_are_some() -> None:
    graph = calls(
        """
        %got = exchange() {ranks=[0, 1]} -> (float32[9])
        %stage1/replica0/refresh = refresh(%got:0) {replica=0, stage=1, variables=['t']}
        %g = weights() {function='stage1/backward', micro_batch=0, replica=0, stage=1}
        """,
        *STAGE,
    )
    assert resident_variables(graph) == {"w"}


def test_updates_reads_and_commits_are_on_the_variables_themselves() -> None:
    graph = calls(
        """
        %stage1/replica0/refresh = refresh() {replica=0, stage=1, variables=['w']}
        %u = update() {function='stage1/update', stage=1}
        %a = update() {function='optimizer/after'}
        %r = read_variable() {replica=0, stage=1, variables=['t']} -> (float32[9])
        %s = read_state() {replica=0, stage=1, variables=['w', 'n']} -> (float32[4], int64[])
        %c = commit() {replica=0, replicas=1, stage=1, variables=['k']}
        """,
        *STAGE,
    )
    assert resident_variables(graph) == {"w", "m", "steps", "t", "n", "k"}
