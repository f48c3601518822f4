"""What is proved of a finished pipelined graph: each check refuses a graph that was damaged."""

from __future__ import annotations

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.passes.verify_pipeline import VerifyPipeline, verify_commits
from dapple_tf.graph_passes.schedules.spec import ScheduleSpec
from tests.graph_passes.builders import call_graph, function, refused

FUNCTIONS = (function("stage0/forward", "", "stash a"), function("stage0/backward", "stash a", "variable w"))

GOOD = """
    %stage0/replica0/mb0/forward = forward() {place} -> (float32[?,4]) @'a'
    %stage0/replica1/mb0/forward = forward() {place} -> (float32[?,4]) @'b'
    %stage0/replica0/mb0/backward = backward(%stage0/replica0/mb0/forward:0) {call} -> (float32[4]) @'a'
    %stage0/replica1/mb0/backward = backward() {call} -> (float32[4]) @'b'
    | ^%stage0/replica1/mb0/forward 'order: 0B0 after 0F0'
    %stage0/replica0/gradients = gradients(%stage0/replica0/mb0/backward:0) {place} -> (float32[4]) @'a'
    %stage0/replica1/gradients = gradients(%stage0/replica1/mb0/backward:0) {place} -> (float32[4]) @'b'
    %stage0/allreduce = allreduce(%stage0/replica0/gradients:0, %stage0/replica1/gradients:0) {place}
    | -> (float32[4]) @'a'
    %stage0/update = update(%stage0/allreduce:0) {place} @'a'
"""


def verify(text: str) -> None:
    """Verify the graph for one stage and one micro-batch."""
    VerifyPipeline(ScheduleSpec.parse("dapple-a").build(1, 1))(call_graph(text, *FUNCTIONS))


def test_a_schedule_of_other_stages_is_refused() -> None:
    with refused(GraphError, "the schedule has 2 stages, the graph 1"):
        VerifyPipeline(ScheduleSpec.parse("dapple-a").build(2, 1))(call_graph(GOOD, *FUNCTIONS))


def test_a_finished_pipeline_passes_unchanged() -> None:
    before = call_graph(GOOD, *FUNCTIONS)
    assert VerifyPipeline(ScheduleSpec.parse("dapple-a").build(1, 1))(before) == before


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "forward() {place} -> (float32[?,4]) @'a'",
            "forward() {place} -> (float32[?,4]) @'a' ^%stage0/update 'late'",
            "the graph has a cycle: ",
        ),
        (
            "backward(%stage0/replica0/mb0/forward:0)",
            "backward()",
            "no edge makes 'stage0/replica0/mb0/backward' run after 'stage0/replica0/mb0/forward', as the",
        ),
        (
            "| ^%stage0/replica1/mb0/forward 'order: 0B0 after 0F0'",
            "",
            "no edge makes 'stage0/replica1/mb0/backward' run after 'stage0/replica1/mb0/forward', as the",
        ),
        (
            "%stage0/update =",
            "%stage0/replica1/mb1/forward = forward() {micro_batch=1, replica=1, stage=0} @'b'\n%stage0/update =",
            "'stage0/replica1/mb1/forward' is not in the schedule",
        ),
        (
            "gradients(%stage0/replica1/mb0/backward:0)",
            "gradients()",
            "the gradient of 'w' from 'stage0/replica1/mb0/backward' reaches no update",
        ),
        (
            ":0, %stage0/replica1/gradients:0)",
            ":0)",
            "the gradient of 'w' from 'stage0/replica1/mb0/backward' reaches no update",
        ),
        (
            "allreduce(%stage0/replica0/gradients:0, %stage0/replica1/gradients:0)",
            "tied_sum(%stage0/replica0/gradients:0, %stage0/replica1/gradients:0)",
            "'stage0/replica0/gradients' is not all-reduced over the 2 replicas of its stage",
        ),
        (
            "update(%stage0/allreduce:0) {place} @'a'",
            "update(%stage0/allreduce:0)",
            "'stage0/update' has no device",
        ),
    ],
)
def test_a_damaged_pipeline_is_refused(old: str, new: str, said: str) -> None:
    assert old in GOOD
    with refused(GraphError, said):
        verify(GOOD.replace(old, new))


TWO = """
    %stage0/replica0/mb0/forward = forward() {place} -> (float32[?,4]) @'a'
    %stage0/replica0/mb0/backward = backward(%stage0/replica0/mb0/forward:0) {call} -> (float32[4]) @'a'
    %stage0/replica0/mb0/accumulate = accumulate(%stage0/replica0/mb0/backward:0) {place, variables=['w']} @'a'
    %stage0/replica0/mb1/forward = forward() {place} -> (float32[?,4]) @'a'
    | ^%stage0/replica0/mb0/backward 'order: 0F1 after 0B0'
    %stage0/replica0/mb1/backward = backward(%stage0/replica0/mb1/forward:0) {call} -> (float32[4]) @'a'
    %stage0/replica0/mb1/accumulate = accumulate(%stage0/replica0/mb1/backward:0) {place, variables=['w']} @'a'
    | ^%stage0/replica0/mb0/accumulate 'accumulate: micro-batch 1 after 0'
    %stage0/replica0/gradients = gradients() {place, variables=['w']} -> (float32[4]) @'a'
    | ^%stage0/replica0/mb1/accumulate 'accumulate: all micro-batches are summed'
    %stage0/update = update(%stage0/replica0/gradients:0) {place} @'a'
"""


def test_gradients_reach_the_update_through_accumulation() -> None:
    before = call_graph(TWO, *FUNCTIONS)
    assert VerifyPipeline(ScheduleSpec.parse("dapple-a").build(1, 2))(before) == before


def test_a_micro_batch_that_is_missing_from_the_sum_is_refused() -> None:
    lost = TWO.replace("| ^%stage0/replica0/mb0/accumulate 'accumulate: micro-batch 1 after 0'", "")
    with refused(GraphError, "the gradient of 'w' from 'stage0/replica0/mb0/backward' reaches no update"):
        VerifyPipeline(ScheduleSpec.parse("dapple-a").build(1, 2))(call_graph(lost, *FUNCTIONS))


TWO_BUCKETS = """
    %stage0/replica0/mb0/forward = forward() {place} -> (float32[?,4]) @'a'
    %stage0/replica0/mb0/backward = backward(%stage0/replica0/mb0/forward:0) {call} -> (float32[4], float32[4]) @'a'
    %stage0/replica0/mb0/accumulate = accumulate(%stage0/replica0/mb0/backward:0, %stage0/replica0/mb0/backward:1)
    | {place, variables=['w', 'v']} @'a'
    %stage0/replica0/mb1/forward = forward() {place} -> (float32[?,4]) @'a'
    | ^%stage0/replica0/mb0/backward 'order: 0F1 after 0B0'
    %stage0/replica0/mb1/backward = backward(%stage0/replica0/mb1/forward:0) {call} -> (float32[4], float32[4]) @'a'
    %stage0/replica0/mb1/accumulate/bucket0 = accumulate(%stage0/replica0/mb1/backward:0)
    | {place, variables=['w']} @'a' ^%stage0/replica0/mb0/accumulate 'first'
    %stage0/replica0/mb1/accumulate/bucket1 = accumulate(%stage0/replica0/mb1/backward:1)
    | {place, variables=['v']} @'a' ^%stage0/replica0/mb0/accumulate 'second'
    %stage0/replica0/gradients/bucket0 = gradients() {place, variables=['w']} -> (float32[4]) @'a'
    | ^%stage0/replica0/mb1/accumulate/bucket0 'whole'
    %stage0/replica0/gradients/bucket1 = gradients() {place, variables=['v']} -> (float32[4]) @'a'
    | ^%stage0/replica0/mb1/accumulate/bucket1 'whole'
    %stage0/update = update(%stage0/replica0/gradients/bucket0:0, %stage0/replica0/gradients/bucket1:0) {place} @'a'
    | ^%stage0/replica0/mb1/accumulate/bucket1 'so that only the order of the sums is at fault'
"""


def test_a_sum_that_is_read_or_added_to_too_early_is_refused() -> None:
    """Edges of another bucket order the first micro-batch, but none of this bucket does."""
    functions = (FUNCTIONS[0], function("stage0/backward", "stash a", "variable w, variable v"))
    schedule = ScheduleSpec.parse("dapple-a").build(1, 2)
    overlapped = TWO_BUCKETS
    VerifyPipeline(schedule)(call_graph(overlapped, *functions))
    for edge, said in [
        (
            " ^%stage0/replica0/mb0/accumulate 'second'",
            "'stage0/replica0/mb1/accumulate/bucket1' run after 'stage0/replica0/mb0/accumulate', and both use the sum "
            "of the gradients of 'v'",
        ),
        (
            "| ^%stage0/replica0/mb1/accumulate/bucket1 'whole'",
            "'stage0/replica0/gradients/bucket1' run after 'stage0/replica0/mb1/accumulate/bucket1', and both use",
        ),
    ]:
        assert overlapped.count(edge) == 1
        with refused(GraphError, f"no edge makes {said}"):
            VerifyPipeline(schedule)(call_graph(overlapped.replace(edge, ""), *functions))


def test_an_inlined_backward_whose_reads_may_run_before_forward_is_refused() -> None:
    call = "%stage0/replica1/mb0/backward = backward() {call"
    assert GOOD.count(call) == 1
    inlined = GOOD.replace(call, call + ", inline=True")
    verify(inlined)
    data = inlined.replace("| ^%stage0/replica1/mb0/forward 'order: 0B0 after 0F0'", "").replace(
        "replica1/mb0/backward = backward()", "replica1/mb0/backward = backward(%stage0/replica1/mb0/forward:0)"
    )
    said = "no control edge makes it wait for 'stage0/replica1/mb0/forward'"
    with refused(GraphError, "'stage0/replica1/mb0/backward' is inlined", said):
        verify(data)


SPLIT = (
    function("stage0/forward", "", "stash a"),
    function("stage0/inputs", "stash a", "gradient h, carry c"),
    function("stage0/weights", "carry c", "variable w"),
)
SPLIT_GOOD = """
    %stage0/replica0/mb0/forward = forward() {place} -> (float32[?,4]) @'a'
    %stage0/replica0/mb0/inputs = inputs(%stage0/replica0/mb0/forward:0) {call} -> (float32[?,4], float32[?,4]) @'a'
    %stage0/replica0/mb0/weights = weights(%stage0/replica0/mb0/inputs:1) {call} -> (float32[4]) @'a'
    %stage0/replica0/gradients = gradients(%stage0/replica0/mb0/weights:0) {place} -> (float32[4]) @'a'
    %stage0/update = update(%stage0/replica0/gradients:0, %stage0/replica0/mb0/inputs:0) {place} @'a'
"""


def verify_split(text: str) -> None:
    VerifyPipeline(ScheduleSpec.parse("zb-h1").build(1, 1))(call_graph(text, *SPLIT))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "weights(%stage0/replica0/mb0/inputs:1)",
            "weights()",
            "no edge makes 'stage0/replica0/mb0/weights' run after 'stage0/replica0/mb0/inputs', as the schedule",
        ),
        (
            "gradients(%stage0/replica0/mb0/weights:0)",
            "gradients()",
            "the gradient of 'w' from 'stage0/replica0/mb0/weights' reaches no update",
        ),
        (
            "%stage0/update =",
            "%stage0/replica0/mb1/weights = weights() {place} @'a'\n%stage0/update =",
            "'stage0/replica0/mb1/weights' is not in the schedule",
        ),
        (
            "weights(%stage0/replica0/mb0/inputs:1) {call",
            "weights(%stage0/replica0/mb0/inputs:1) {call, inline=True",
            "'stage0/replica0/mb0/weights' is inlined, and no control edge makes it wait for",
        ),
    ],
)
def test_a_damaged_pipeline_whose_backward_is_split_is_refused(old: str, new: str, said: str) -> None:
    verify_split(SPLIT_GOOD)
    assert SPLIT_GOOD.count(old) == 1
    with refused(GraphError, said):
        verify_split(SPLIT_GOOD.replace(old, new))


def test_slices_that_reach_no_update_are_refused() -> None:
    backward = function("stage0/backward", "stash a", "slices w float32[_,4], indices w int64[_]")
    text = """
        %stage0/replica0/mb0/forward = forward() {place} -> (float32[?,4]) @'a'
        %stage0/replica0/mb0/backward = backward(%stage0/replica0/mb0/forward:0) {call} -> (float32[_,4], int64[_]) @'a'
        %stage0/gather_slices/w = gather_slices(%stage0/replica0/mb0/backward:0, %stage0/replica0/mb0/backward:1)
        | {place} -> (float32[_,4], int64[_]) @'a'
        %stage0/update = update(%stage0/gather_slices/w:0, %stage0/gather_slices/w:1) {place} @'a'
    """
    check = VerifyPipeline(ScheduleSpec.parse("dapple-a").build(1, 1))
    check(call_graph(text, FUNCTIONS[0], backward))
    with refused(GraphError, "the gradient of 'w' from 'stage0/replica0/mb0/backward' reaches no update"):
        check(call_graph(text.replace(", %stage0/replica0/mb0/backward:1", ""), FUNCTIONS[0], backward))


MIXED = (SPLIT[0], function("stage0/backward", "stash a", "gradient h, variable w"), *SPLIT[1:])
MIXED_GOOD = """
    %stage0/replica0/mb0/forward = forward() {place} -> (float32[?,4]) @'a'
    %stage0/replica0/mb1/forward = forward() {place} -> (float32[?,4]) @'a'
    | ^%stage0/replica0/mb0/forward 'order: 0F1 after 0F0'
    %stage0/replica0/mb0/inputs = inputs(%stage0/replica0/mb0/forward:0) {call} -> (float32[?,4], float32[?,4]) @'a'
    | ^%stage0/replica0/mb1/forward 'order: 0I0 after 0F1'
    %stage0/replica0/mb1/backward = backward(%stage0/replica0/mb1/forward:0) {call} -> (float32[?,4], float32[4]) @'a'
    | ^%stage0/replica0/mb0/inputs 'order: 0B1 after 0I0'
    %stage0/replica0/mb0/weights = weights(%stage0/replica0/mb0/inputs:1) {call} -> (float32[4]) @'a'
    | ^%stage0/replica0/mb1/backward 'order: 0W0 after 0B1'
    %stage0/replica0/mb0/accumulate = accumulate(%stage0/replica0/mb0/weights:0) {place, variables=['w']} @'a'
    %stage0/replica0/mb1/accumulate = accumulate(%stage0/replica0/mb1/backward:1) {place, variables=['w']} @'a'
    | ^%stage0/replica0/mb0/accumulate 'accumulate: micro-batch 1 after 0'
    %stage0/replica0/gradients = gradients() {place, variables=['w']} -> (float32[4]) @'a'
    | ^%stage0/replica0/mb1/accumulate 'accumulate: all micro-batches are summed'
    %stage0/update = update(%stage0/replica0/gradients:0, %stage0/replica0/mb0/inputs:0,
    | %stage0/replica0/mb1/backward:0) {place} @'a'
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "| ^%stage0/replica0/mb0/inputs 'order: 0B1 after 0I0'",
            "",
            "no edge makes 'stage0/replica0/mb1/backward' run after 'stage0/replica0/mb0/inputs', as the schedule",
        ),
        (
            "| ^%stage0/replica0/mb1/backward 'order: 0W0 after 0B1'",
            "",
            "no edge makes 'stage0/replica0/mb0/weights' run after 'stage0/replica0/mb1/backward', as the schedule",
        ),
        (
            "accumulate(%stage0/replica0/mb1/backward:1)",
            "accumulate()",
            "the gradient of 'w' from 'stage0/replica0/mb1/backward' reaches no update",
        ),
        (
            "accumulate(%stage0/replica0/mb0/weights:0)",
            "accumulate()",
            "the gradient of 'w' from 'stage0/replica0/mb0/weights' reaches no update",
        ),
        (
            "%stage0/replica0/gradients:0, %stage0/replica0/mb0/inputs:0,",
            "%stage0/replica0/gradients:0,",
            "the gradient of 'h' from 'stage0/replica0/mb0/inputs' reaches no update",
        ),
        (
            "| ^%stage0/replica0/mb0/accumulate 'accumulate: micro-batch 1 after 0'",
            "",
            "'stage0/replica0/mb0/weights' reaches no update",
        ),
        (
            "%stage0/update =",
            "%stage0/replica0/mb0/backward = backward() {place} @'a'\n%stage0/update =",
            "'stage0/replica0/mb0/backward' is not in the schedule",
        ),
        (
            "backward(%stage0/replica0/mb1/forward:0) {call",
            "backward(%stage0/replica0/mb1/forward:0) {call, inline=True",
            "'stage0/replica0/mb1/backward' is inlined, and no control edge makes it wait for",
        ),
    ],
)
def test_a_damaged_pipeline_whose_backwards_are_split_and_whole_is_refused(old: str, new: str, said: str) -> None:
    check = VerifyPipeline(ScheduleSpec.parse("0F0 0F1 0I0 0B1 0W0").build(1, 2))
    good = call_graph(MIXED_GOOD, *MIXED)
    assert check(good) == good
    assert MIXED_GOOD.count(old) == 1
    with refused(GraphError, said):
        check(call_graph(MIXED_GOOD.replace(old, new), *MIXED))


def test_a_graph_without_updates_passes() -> None:
    text = GOOD[: GOOD.index("%stage0/update")]
    before = call_graph(text, *FUNCTIONS)
    assert VerifyPipeline(ScheduleSpec.parse("dapple-a").build(1, 1))(before) == before


def test_an_update_that_does_not_wait_for_its_stages_state_is_refused() -> None:
    commit = "    %stage0/commit = commit() {place} @'a'\n"
    with refused(GraphError, "no path orders 'stage0/update' after 'stage0/commit'"):
        verify(GOOD + commit)
    ordered = GOOD.replace("    %stage0/update", commit + "    %stage0/update").rstrip()
    verify(ordered + "\n    | ^%stage0/commit 'update: the optimizer steps from what forward wrote'\n")


COPYING = (function("stage0/forward", "variable n", "stash a", ["n"]), *FUNCTIONS[1:])
REFRESH = "%stage0/replicaR/refresh = refresh() {replica=R, stage=0, variables=['n']} @'a'\n"


def refreshed(*replicas: int, calls_wait: bool = True) -> str:
    text = GOOD
    for replica in replicas:
        waits = f" ^%stage0/replica{replica}/refresh 'refresh: copies'" if calls_wait else ""
        text = REFRESH.replace("R/", f"{replica}/").replace("=R", f"={replica}") + text
        device = "ab"[replica]
        for call in (f"{{place}} -> (float32[?,4]) @'{device}'", f"{{call}} -> (float32[4]) @'{device}'"):
            assert text.count(call) == 1
            text = text.replace(call, call + waits)
    return text


def test_a_replica_without_a_refresh_of_the_copies_that_it_uses_is_refused() -> None:
    schedule = ScheduleSpec.parse("dapple-a").build(1, 1)
    VerifyPipeline(schedule)(call_graph(refreshed(0, 1), *COPYING))
    with refused(GraphError, "no refresh gives stage 0, replica 1 its copy of 'n'"):
        VerifyPipeline(schedule)(call_graph(refreshed(0), *COPYING))


def test_a_call_that_does_not_wait_for_the_refresh_of_its_copies_is_refused() -> None:
    text = refreshed(0, 1, calls_wait=False)
    with refused(GraphError, "no control edge makes 'stage0/replica0/mb0/forward' wait for 'stage0/replica0/refresh'"):
        VerifyPipeline(ScheduleSpec.parse("dapple-a").build(1, 1))(call_graph(text, *COPYING))


def test_a_commit_that_does_not_wait_for_a_refresh_of_its_variable_is_refused() -> None:
    text = """
        %stage1/replica0/refresh = refresh() {place, variables=['m', 'n']}
        %stage0/commit = commit() {replica=0, replicas=1, stage=0, variables=['n']}EDGE
    """
    verify_commits(call_graph(text.replace("EDGE", " ^%stage1/replica0/refresh 'commit: copies'"), *COPYING))
    with refused(GraphError, "no path orders 'stage0/commit' after 'stage1/replica0/refresh', which reads 'n'"):
        verify_commits(call_graph(text.replace("EDGE", ""), *COPYING))


def test_a_commit_that_does_not_wait_for_a_read_for_other_ranks_is_refused() -> None:
    text = """
        %stage0/read_variable/n = read_variable() {place, variables=['n']} -> (float32[])
        %stage0/commit = commit() {replica=0, replicas=1, stage=0, variables=['n']}EDGE
    """
    verify_commits(call_graph(text.replace("EDGE", " ^%stage0/read_variable/n 'commit: read'"), *COPYING))
    with refused(GraphError, "no path orders 'stage0/commit' after 'stage0/read_variable/n', which reads 'n'"):
        verify_commits(call_graph(text.replace("EDGE", ""), *COPYING))


COUNTED = (
    function("stage0/run_once", "variable n", "once c:0 float32[]", writes=["n"]),
    function("stage0/forward", "once c:0 float32[]", "stash a"),
    FUNCTIONS[1],
)
WITH_ONCE = """
    %stage0/replica0/refresh = refresh() {place, variables=['n']} @'a'
    %stage0/replica0/run_once = run_once() {call} -> (float32[]) @'a' ^%stage0/replica0/refresh 'refresh: copies'
    %stage0/replica0/mb0/forward = forward(%stage0/replica0/run_once:0) {place} -> (float32[?,4]) @'a'
    | ^%stage0/replica0/refresh 'refresh: copies'
    %stage0/replica0/mb0/backward = backward(%stage0/replica0/mb0/forward:0) {call} -> (float32[4]) @'a'
    | ^%stage0/replica0/refresh 'refresh: copies'
"""


def test_what_runs_once_must_wait_for_its_copies() -> None:
    schedule = VerifyPipeline(ScheduleSpec.parse("dapple-a").build(1, 1))
    good = call_graph(WITH_ONCE, *COUNTED)
    assert schedule(good) == good
    edge = "-> (float32[]) @'a' ^%stage0/replica0/refresh 'refresh: copies'"
    assert edge in WITH_ONCE
    with refused(GraphError, "no control edge makes 'stage0/replica0/run_once' wait for 'stage0/replica0/refresh'"):
        schedule(call_graph(WITH_ONCE.replace(edge, "-> (float32[]) @'a'"), *COUNTED))


def test_what_runs_once_must_have_copies_of_what_it_writes() -> None:
    with refused(GraphError, "no refresh gives stage 0, replica 0 its copy of 'n'"):
        VerifyPipeline(ScheduleSpec.parse("dapple-a").build(1, 1))(
            call_graph(WITH_ONCE.replace("variables=['n']", "variables=[]"), *COUNTED)
        )


NORMALISED = (
    function("stage0/forward", "", "statistic s float64[3,4], stash a"),
    function("stage0/backward", "stash a", "variable w"),
    function("stage0/write_statistics", "variable m, statistic s float64[3,4]", "", ["m"]),
)
DEFERRED = """
    %stage0/replica0/mb0/forward = forward() {call} -> (float64[3,4], float32[?,4]) @'a'
    %stage0/replica1/mb0/forward = forward() {call} -> (float64[3,4], float32[?,4]) @'b'
    %stage0/replica0/mb0/backward = backward(%stage0/replica0/mb0/forward:1) {call} -> (float32[4]) @'a'
    %stage0/replica1/mb0/backward = backward(%stage0/replica1/mb0/forward:1) {call} -> (float32[4]) @'b'
    %stage0/replica0/sum_statistics = sum_statistics(%stage0/replica0/mb0/forward:0) {place, variables=['s']}
    | -> (float64[3,4]) @'a'
    %stage0/replica1/sum_statistics = sum_statistics(%stage0/replica1/mb0/forward:0) {place, variables=['s']}
    | -> (float64[3,4]) @'b'
    %stage0/allreduce_statistics = allreduce(%stage0/replica0/sum_statistics:0, %stage0/replica1/sum_statistics:0)
    | {place, replicas=2, variables=['s']} -> (float64[3,4]) @'a'
    %stage0/write_statistics = write_statistics(%stage0/allreduce_statistics:0) {call} @'a'
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("", "", ""),
        (
            "sum_statistics(%stage0/replica1/mb0/forward:0)",
            "sum_statistics()",
            "the statistic 's' of 'stage0/replica1/mb0/forward' is in no sum",
        ),
        (
            "0/sum_statistics:0, %stage0/replica1/sum_statistics:0)",
            "0/sum_statistics:0)",
            "'stage0/replica1/sum_statistics' is not all-reduced over the 2 replicas of its stage",
        ),
        (
            "write_statistics(%stage0/allreduce_statistics:0)",
            "write_statistics()",
            "no moving statistics are written from 'stage0/replica0/sum_statistics'",
        ),
    ],
)
def test_statistics_reach_the_variables_that_are_written_from_them(old: str, new: str, said: str) -> None:
    damaged = call_graph(DEFERRED.replace(old, new), *NORMALISED)
    check = VerifyPipeline(ScheduleSpec.parse("dapple-a").build(1, 1))
    if not said:
        assert check(damaged) == damaged
        return
    with refused(GraphError, said):
        check(damaged)
