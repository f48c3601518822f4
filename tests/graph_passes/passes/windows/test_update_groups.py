"""Updates of a window: one after the other in a stage, each with its step counter, and without a barrier."""

from __future__ import annotations

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Function
from dapple_tf.graph_passes.ir.names import Site
from dapple_tf.graph_passes.passes.split_update import Updates
from dapple_tf.graph_passes.passes.windows.update_groups import UpdateGroups, check_updates, last_backwards, update_name
from dapple_tf.graph_passes.schedules.window import Window
from tests.graph_passes.builders import assert_graph, function, graph, refused

UPDATES = (
    function("stage0/update", "gradient w, variable w, variable t"),
    function("stage1/update", "slices e float32[_,4], indices e int64[_], gradient v, variable e, variable v"),
)


def updates(*stages: int) -> Updates:
    return Updates(
        None, tuple((Site(stage), UPDATES[stage]) for stage in stages), function("optimizer/after", "variable t")
    )


DENSE = """
    %minibatch{m}/stage0/reduced_gradients = reduced_gradients() {{replica=0, stage=0, variables=['w']}} -> (float32[4])
"""
BACKWARD = "%stage{s}/replica{r}/mb{m}/backward = backward() {{micro_batch={m}, replica={r}, stage={s}}}\n"
BEGIN = "%update/begin = set_updating() {updating=True}\n"
BEGIN_AFTER = (
    BEGIN.rstrip() + " ^%stage0/replica0/mb0/backward 'update: before the first backward no variable changes'\n"
)
END = """
    %update/count = count_update() {{offset={count}, variable='t'}} {after}
    %update/done = set_updating() {{updating=False}} ^%update/count 'the window ends after its steps are counted'
"""


def used(*calls: str) -> str:
    """The edges of an update from the backwards that use the weights."""
    return " ".join(f"^%{call}/backward 'update: all its backwards have used the weights'" for call in calls)


def test_each_minibatch_s_update_follows_the_one_before_and_counts_its_own_step() -> None:
    before = "".join(BACKWARD.format(s=0, r=0, m=m) + DENSE.format(m=m) for m in (0, 1))
    assert_graph(
        UpdateGroups(Window(2, (1,), (1,)), updates(0), "t")(graph(before)),
        f"""
        {before}
        {BEGIN_AFTER}
        %minibatch0/stage0/count_update = count_update() {{place, offset=0, variable='t'}}
        | ^%update/begin 'update: from here on a failure leaves the window half-applied'
        %minibatch0/stage0/update = update(%minibatch0/stage0/reduced_gradients:0) {{call}}
        | {used("stage0/replica0/mb0")}
        | ^%minibatch0/stage0/count_update 'update: the step counter is that of its minibatch'
        %minibatch1/stage0/count_update = count_update() {{place, offset=1, variable='t'}}
        | ^%minibatch0/stage0/update 'update: of stage 0, one after the other'
        %minibatch1/stage0/update = update(%minibatch1/stage0/reduced_gradients:0) {{call}}
        | {used("stage0/replica0/mb1")}
        | ^%minibatch1/stage0/count_update 'update: the step counter is that of its minibatch'
        {END.format(count=2, after="^%minibatch1/stage0/update 'the window ends after all updates'")}
        """,
    )


def test_the_update_of_a_group_of_replicas_has_the_step_of_its_last_minibatch() -> None:
    before = "".join(BACKWARD.format(s=0, r=m, m=m) for m in range(3)) + DENSE.format(m=2)
    calls = used("stage0/replica0/mb0", "stage0/replica1/mb1", "stage0/replica2/mb2")
    assert_graph(
        UpdateGroups(Window(3, (3,), (1,)), updates(0), "t")(graph(before)),
        f"""
        {before}
        {BEGIN_AFTER}
        %minibatch2/stage0/count_update = count_update() {{place, offset=2, variable='t'}}
        | ^%update/begin 'update: from here on a failure leaves the window half-applied'
        %minibatch2/stage0/update = update(%minibatch2/stage0/reduced_gradients:0) {{call}} {calls}
        | ^%minibatch2/stage0/count_update 'update: the step counter is that of its minibatch'
        {END.format(count=3, after="^%minibatch2/stage0/update 'the window ends after all updates'")}
        """,
    )


def test_an_update_takes_slices_and_gradients_in_the_order_of_its_ports_and_the_window_ends_after_commits() -> None:
    """Stage 0 is not trained: it has no update."""
    before = """
        %stage1/replica0/mb0/backward = backward() {place}
        %minibatch0/stage1/reduced_gradients = reduced_gradients() {place, variables=['v']} -> (float32[4])
        %minibatch0/stage1/gather_slices/e = gather_slices() {place, pieces=[], rows=9, uses=[], variable='e'}
        | -> (float32[_,4], int64[_])
        %stage1/commit = commit() {place, replicas=1, variables=['n']}
    """
    ends = "^%stage1/commit 'the window ends when all state is written'"
    begun = "^%update/begin 'update: a failure may leave it half-written'"
    result = UpdateGroups(Window(1, (1, 1), (2, 1)), updates(1), "t")(graph(before))
    assert_graph(
        result,
        f"""
        {before.replace("    %stage1/commit = commit() {place, replicas=1, variables=['n']}", "")}
        {BEGIN}
        %stage1/commit = commit() {{place, replicas=1, variables=['n']}} {begun}
        %minibatch0/stage1/count_update = count_update() {{place, offset=0, variable='t'}}
        | ^%update/begin 'update: from here on a failure leaves the window half-applied'
        %minibatch0/stage1/update = update(%minibatch0/stage1/gather_slices/e:0, %minibatch0/stage1/gather_slices/e:1,
        | %minibatch0/stage1/reduced_gradients:0) {{call}} {used("stage1/replica0/mb0")}
        | ^%minibatch0/stage1/count_update 'update: the step counter is that of its minibatch'
        {END.format(count=1, after="^%minibatch0/stage1/update 'the window ends after all updates' " + ends)}
        """,
    )


def test_the_pass_adds_the_functions_that_updates_call() -> None:
    before = BACKWARD.format(s=0, r=0, m=0) + DENSE.format(m=0)
    result = UpdateGroups(Window(1, (1,), (1,)), updates(0), "t")(graph(before))
    assert [function.name for function in result.functions] == ["stage0/update"]


def test_a_gradient_that_an_update_needs_must_be_there() -> None:
    said = "'stage0/update' updates 'w', but no backward gives its gradient"
    for minibatch, text in ((0, DENSE.format(m=0).replace("['w']", "['v']")), (1, DENSE.format(m=0))):
        with refused(GraphError, said):
            UpdateGroups(Window(minibatch + 1, (1,), (1,)), updates(0), "t")(graph(text))


def test_updates_are_called_after_the_last_minibatch_of_their_group() -> None:
    assert update_name(Window(6, (3,), (1,)), 0, 1) == "minibatch5/stage0/update"
    assert update_name(Window(3, (1, 2), (2, 1), 2, in_turn=False), 1, 1) == "minibatch1/stage1/update"


def test_an_update_waits_for_the_last_backward_of_each_replica() -> None:
    assert last_backwards(Window(4, (2,), (1,)), 0, 1) == [
        "stage0/replica0/mb2/backward",
        "stage0/replica1/mb3/backward",
    ]
    assert last_backwards(Window(2, (2,), (1,), 3, in_turn=False), 0, 1) == [
        "stage0/replica0/mb5/backward",
        "stage0/replica1/mb5/backward",
    ]


TERMS = ((Site(0), function("stage0/update_terms", "gradient w", "partial p")),)
COMBINE = function("optimizer/combine", "partial p", "combined c")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Updates(None, (), None, terms=TERMS), "decides by the gradients of all stages at once"),
        (Updates(None, (), None, combine=COMBINE), "decides by the gradients of all stages at once"),
        (
            Updates(None, (), function("optimizer/after", "variable t, variable z, variable y")),
            "keeps y, z for all variables together, but the stages update at different times",
        ),
        (
            Updates(function("optimizer/before", "variable scale"), (), None),
            "keeps scale for all variables together, but the stages update at different times",
        ),
    ],
)
def test_an_optimizer_that_needs_more_than_a_stage_s_own_gradients_is_refused(wrong: Updates, said: str) -> None:
    with refused(GraphError, said):
        check_updates(wrong, "t")
    with refused(GraphError, said):
        UpdateGroups(Window(1, (1,), (1,)), wrong, "t")(graph(DENSE.format(m=0)))


@pytest.mark.parametrize("after", [None, function("optimizer/after", "variable t")])
def test_stages_may_share_the_step_counter(after: Function | None) -> None:
    check_updates(Updates(None, (), after), "t")
