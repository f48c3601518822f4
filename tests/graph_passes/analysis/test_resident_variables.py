"""Which variables are resident on a rank: its own, not those of which it has copies."""

from __future__ import annotations

import pytest

from dapple_tf.graph_passes.analysis.variable_use import resident_variables
from tests.graph_passes.builders import call_graph, function

STAGE = (
    function("stage1/forward", "variable t, variable w, variable n", writes=["n"]),
    function("stage1/backward", "variable t, variable w"),
    function("stage1/update", "variable w, variable m"),
    function("optimizer/after", "variable steps"),
    function("stage1/run_once", "variable t, variable k", writes=["k"]),
)


REFRESH = (
    "%got = exchange() {ranks=[0, 1]} -> (float32[9])\n%stage1/replica0/refresh = refresh(%got:0) {place, variables="
)
RUN_ONCE = "%o = run_once() {function='stage1/run_once', replica=0, stage=1}"
CALLS = {
    "calls and updates of a stage": (
        """
        %f = forward() {function='stage1/forward', micro_batch=0, replica=0, stage=1}
        %u = update() {function='stage1/update', stage=1}
        """,
        {"t", "w", "n", "m"},
    ),
    "the step counter, if updates are counted": (
        "%c = count_update() {offset=2, replica=0, stage=1, variable='steps'}",
        {"steps"},
    ),
    "the copy of a variable of another stage is not the variable": (
        # One value is received, another is copied from this rank's own.
        f"""
        {REFRESH}['t', 'n']}}
        %f = forward() {{function='stage1/forward', micro_batch=0, replica=0, stage=1}}
        %b = backward() {{function='stage1/backward', micro_batch=0, replica=0, stage=1}}
        """,
        {"w", "n"},
    ),
    "weight gradients use copies where there are some": (
        f"""
        {REFRESH}['t']}}
        %g = weights() {{function='stage1/backward', micro_batch=0, replica=0, stage=1}}
        """,
        {"w"},
    ),
    "updates, reads and commits use the variables themselves": (
        """
        %stage1/replica0/refresh = refresh() {place, variables=['w']}
        %u = update() {function='stage1/update', stage=1}
        %a = update() {function='optimizer/after'}
        %r = read_variable() {replica=0, stage=1, variables=['t']} -> (float32[9])
        %s = read_state() {replica=0, stage=1, variables=['w', 'n']} -> (float32[4], int64[])
        %c = commit() {replica=0, replicas=1, stage=1, variables=['k']}
        """,
        {"w", "m", "steps", "t", "n", "k"},
    ),
    "what runs once uses variables": (RUN_ONCE, {"t", "k"}),
    "what runs once uses copies": (f"{REFRESH}['t', 'k']}}\n{RUN_ONCE}", {"k"}),  # of k this rank's own was read
    "stored versions are of the variables themselves": (
        "%v = store_version() {replica=0, stage=1, variables=['w'], version=0}",
        {"w"},
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_variables_that_are_resident(case: str) -> None:
    text, resident = CALLS[case]
    assert resident_variables(call_graph(text, *STAGE)) == resident
