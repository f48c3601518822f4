"""Variables where each replica is a process: which are copied, where their values come from, how state is averaged."""

from __future__ import annotations

from dapple_tf.graph_passes.ir.graph import Function, Graph
from dapple_tf.graph_passes.ir.text import parse_type
from dapple_tf.graph_passes.ir.verify import verify
from dapple_tf.graph_passes.passes.rank_variables import RankVariables
from tests.graph_passes.builders import assert_graph, call_graph, function

TYPES = tuple((name, parse_type(kind)) for name, kind in (("n", "int64[]"), ("t", "float32[9]"), ("w", "float32[4]")))

TIED = (  # the table of stage 0 is used again in stage 1, which counts in n
    function("stage0/forward", "variable t, variable w"),
    function("stage0/backward", "variable t"),
    function("stage1/forward", "variable t, variable n", writes=["n"]),
    function("stage1/backward"),
)
PLAIN = (function("stage0/forward", "variable w"), function("stage0/backward"))


def on_ranks(text: str, *functions: Function, ranks: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3))) -> Graph:
    result = RankVariables(TYPES, ranks)(call_graph(text, *functions))
    verify(result)
    return result


def test_replicas_of_a_stage_have_no_copies_of_its_variables() -> None:
    assert_graph(
        on_ranks(
            """
            %stage0/replica0/mb0/forward = forward() {call}
            %stage0/replica1/refresh = refresh() {place, variables=['w']}
            %stage0/replica1/mb0/forward = forward() {call} ^%stage0/replica1/refresh 'refresh: copies'
            | ^%stage0/replica0/mb0/forward 'order: kept'
            """,
            *PLAIN,
        ),
        """
        %stage0/replica0/mb0/forward = forward() {call}
        %stage0/replica1/mb0/forward = forward() {call} ^%stage0/replica0/mb0/forward 'order: kept'
        """,
    )


def test_variables_of_another_stage_are_read_there_and_written_ones_are_copied() -> None:
    """Both replicas take the value of one read; received variables come first."""
    assert_graph(
        on_ranks(
            """
            %stage0/replica0/mb0/forward = forward() {call}
            %stage1/replica0/refresh = refresh() {place, variables=['n', 't']}
            %stage1/replica1/refresh = refresh() {place, variables=['n', 't']}
            """,
            *TIED,
        ),
        """
        %stage0/read_variable/t = read_variable() {place, variables=['t']} -> (float32[9])
        %stage0/replica0/mb0/forward = forward() {call}
        %stage1/replica0/refresh = refresh(%stage0/read_variable/t:0) {place, variables=['t', 'n']}
        %stage1/replica1/refresh = refresh(%stage0/read_variable/t:0) {place, variables=['t', 'n']}
        """,
    )


def test_a_variable_is_read_for_other_ranks_before_it_is_committed() -> None:
    assert_graph(
        on_ranks(
            """
            %stage0/replica0/mb0/forward = forward() {call}
            %stage1/replica0/refresh = refresh() {place, variables=['t']}
            %stage0/commit = commit() {replica=0, replicas=1, stage=0, variables=['t']}
            | ^%stage0/replica0/mb0/forward 'commit: written'
            """,
            *TIED,
        ),
        """
        %stage0/read_variable/t = read_variable() {place, variables=['t']} -> (float32[9])
        %stage0/replica0/mb0/forward = forward() {call}
        %stage1/replica0/refresh = refresh(%stage0/read_variable/t:0) {place, variables=['t']}
        %stage0/commit = commit() {replica=0, replicas=1, stage=0, variables=['t']}
        | ^%stage0/replica0/mb0/forward 'commit: written'
        | ^%stage0/read_variable/t "commit: other ranks get this step's values"
        """,
    )


def test_another_stage_of_the_same_ranks_has_no_copies_but_of_what_is_written() -> None:
    """Stage 1 uses the table t of stage 0, of which each rank has the trained value: nothing is sent."""
    assert_graph(
        on_ranks(
            """
            %stage0/replica0/mb0/forward = forward() {call}
            %stage1/replica0/refresh = refresh() {place, variables=['t', 'n']}
            %stage1/replica0/mb0/forward = forward() {call} ^%stage1/replica0/refresh 'refresh: copies'
            """,
            *TIED,
            ranks=((1,), (1,)),
        ),
        """
        %stage0/replica0/mb0/forward = forward() {call}
        %stage1/replica0/refresh = refresh() {place, variables=['n']}
        %stage1/replica0/mb0/forward = forward() {call} ^%stage1/replica0/refresh 'refresh: copies'
        """,
    )


def test_the_state_of_replicas_is_averaged_before_it_is_committed() -> None:
    assert_graph(
        on_ranks(
            """
            %stage1/replica0/mb0/forward = forward() {call}
            %stage1/replica1/mb0/forward = forward() {call}
            %stage1/replica0/mb1/forward = forward() {call}
            %begin = set_updating() {updating=True}
            %stage1/commit = commit() {place, replicas=2, variables=['n', 'w']}
            | ^%stage1/replica0/mb0/forward 'commit: written' ^%stage1/replica1/mb0/forward 'commit: written'
            | ^%stage1/replica0/mb1/forward 'commit: written' ^%begin 'barrier: begun'
            """,
            *TIED,
        ),
        """
        %stage1/replica0/mb0/forward = forward() {call}
        %stage1/replica1/mb0/forward = forward() {call}
        %stage1/replica0/mb1/forward = forward() {call}
        %begin = set_updating() {updating=True}
        %stage1/replica0/read_state = read_state() {place, variables=['n', 'w']} -> (int64[], float32[4])
        | ^%stage1/replica0/mb0/forward 'state: every forward has written its copy'
        | ^%stage1/replica0/mb1/forward 'state: every forward has written its copy'
        %stage1/replica1/read_state = read_state() {place, variables=['n', 'w']} -> (int64[], float32[4])
        | ^%stage1/replica1/mb0/forward 'state: every forward has written its copy'
        %stage1/merge_state = merge_state(%stage1/replica0/read_state:0, %stage1/replica0/read_state:1,
        | %stage1/replica1/read_state:0, %stage1/replica1/read_state:1) {place, replicas=2, variables=['n', 'w']}
        | -> (int64[], float32[4])
        %stage1/commit = commit(%stage1/merge_state:0, %stage1/merge_state:1)
        | {place, replicas=2, variables=['n', 'w']} ^%begin 'barrier: begun'
        """,
    )


def test_the_barrier_waits_until_the_state_of_replicas_is_averaged() -> None:
    """If a sum fails, no variable may have changed; a stage of one replica has nothing to average."""
    before = """
        %stage0/commit = commit() {place, replicas=1, variables=['m']}
        %stage1/commit = commit() {place, replicas=2, variables=['n']}
        %update/barrier = barrier()
    """
    barrier = on_ranks(before, *TIED).node("update/barrier")
    assert [(control.source, control.reason) for control in barrier.controls] == [
        ("stage1/merge_state", "barrier: no variable changes before all state is merged")
    ]


def test_the_state_of_a_single_replica_is_not_averaged() -> None:
    before = """
        %stage1/replica0/mb0/forward = forward() {call}
        %stage1/commit = commit() {place, replicas=1, variables=['n']} ^%stage1/replica0/mb0/forward 'commit: written'
    """
    assert_graph(on_ranks(before, *TIED), before)


def test_state_written_once_a_step_is_read_after_it_and_committed_by_each_rank() -> None:
    """Ranks write equal values, so nothing is averaged: the commit keeps its edge from what runs once."""
    functions = (
        function("stage0/run_once", "variable n", writes=["n"]),
        function("stage0/forward", "variable w"),
        function("stage0/backward"),
    )
    before = """
        %stage0/replica0/refresh = refresh() {place, variables=['n']}
        %stage0/replica0/run_once = run_once() {call} ^%stage0/replica0/refresh 'refresh: copies'
        %stage0/commit_once = commit() {place, replicas=1, variables=['n']} ^%stage0/replica0/run_once 'commit: written'
    """
    assert_graph(on_ranks(before, *functions), before)


def test_averaged_state_waits_for_what_runs_once_too() -> None:
    functions = (
        function("stage0/run_once", "variable n", writes=["n"]),
        function("stage0/forward", "variable n", writes=["n"]),
        function("stage0/backward"),
    )
    text = "".join(
        f"%stage0/replica{i}/run_once = run_once() {{function='stage0/run_once', replica={i}, stage=0}}\n"
        f"%stage0/replica{i}/mb0/forward = forward() "
        f"{{function='stage0/forward', micro_batch=0, replica={i}, stage=0}}\n"
        for i in (0, 1)
    )
    commit = "%stage0/commit = commit() {replica=0, replicas=2, stage=0, variables=['n']}"
    result = on_ranks(text + commit, *functions)
    for i in (0, 1):
        sources = {control.source for control in result.node(f"stage0/replica{i}/read_state").controls}
        assert sources == {f"stage0/replica{i}/run_once", f"stage0/replica{i}/mb0/forward"}
