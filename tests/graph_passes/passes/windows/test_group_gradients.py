"""The gradients of each update: over the micro-batches and the replicas of its group."""

from __future__ import annotations

from dapple_tf.graph_passes.passes.gather_slices import SparsePart
from dapple_tf.graph_passes.passes.windows.group_gradients import GroupGradients
from dapple_tf.graph_passes.schedules.window import Window
from tests.graph_passes.builders import assert_graph, call_graph, function, graph


def gradients(minibatch: int, replica: int) -> str:
    return f"""
        %minibatch{minibatch}/stage0/replica{replica}/gradients = gradients()
        | {{replica={replica}, stage=0, variables=['w', 'v']}} -> (float32[4], float32[])
    """


PLACE = "replica=0, stage=0, variables=['w', 'v']"
TYPES = "-> (float32[4], float32[])"


def test_a_stage_of_one_replica_has_an_update_for_each_minibatch() -> None:
    before = gradients(0, 0) + gradients(1, 0)
    assert_graph(
        GroupGradients(Window(2, (1,), (1,)))(graph(before)),
        f"""
        {before}
        %minibatch0/stage0/reduced_gradients = reduced_gradients(%minibatch0/stage0/replica0/gradients:0,
        |  %minibatch0/stage0/replica0/gradients:1) {{{PLACE}}} {TYPES}
        %minibatch1/stage0/reduced_gradients = reduced_gradients(%minibatch1/stage0/replica0/gradients:0,
        |  %minibatch1/stage0/replica0/gradients:1) {{{PLACE}}} {TYPES}
        """.replace(",\n        |  %", ", %"),
    )


def test_replicas_in_turn_average_the_gradients_of_their_minibatches() -> None:
    """The update is named after the last minibatch of the group."""
    before = "".join(gradients(m, m % 2) for m in range(4))

    def reduce(first: int) -> str:
        even, odd = f"%minibatch{first}/stage0/replica0/gradients", f"%minibatch{first + 1}/stage0/replica1/gradients"
        name = f"%minibatch{first + 1}/stage0"
        return f"""
            {name}/allreduce = allreduce({even}:0, {even}:1, {odd}:0, {odd}:1)
            | {{average=True, replica=0, replicas=2, stage=0, variables=['w', 'v']}} {TYPES}
            {name}/reduced_gradients = reduced_gradients({name}/allreduce:0, {name}/allreduce:1) {{{PLACE}}} {TYPES}
        """

    assert_graph(GroupGradients(Window(4, (2,), (1,)))(graph(before)), before + reduce(0) + reduce(2))


def test_replicas_that_share_micro_batches_add_their_parts_of_the_gradients() -> None:
    before = gradients(0, 0) + gradients(0, 1)
    first, second = (f"%minibatch0/stage0/replica{r}/gradients" for r in (0, 1))
    name = "%minibatch0/stage0"
    assert_graph(
        GroupGradients(Window(1, (2,), (1,), 3, in_turn=False))(graph(before)),
        f"""
        {before}
        {name}/allreduce = allreduce({first}:0, {first}:1, {second}:0, {second}:1)
        | {{replica=0, replicas=2, stage=0, variables=['w', 'v']}} {TYPES}
        {name}/reduced_gradients = reduced_gradients({name}/allreduce:0, {name}/allreduce:1) {{{PLACE}}} {TYPES}
        """,
    )


def test_a_stage_without_trained_variables_has_no_update() -> None:
    before = "%stage0/replica0/mb0/backward = backward() {micro_batch=0, replica=0, stage=0} -> (float32[?,4])"
    assert_graph(GroupGradients(Window(1, (1,), (1,)))(graph(before)), before)


ROWS = "slices table float32[_,4], indices table int64[_]"
LOOKS_UP = (
    function("stage0/forward", "arg x, variable table"),
    function("stage0/backward", "gradient h", ROWS),
)


def backward(m: int, replica: int) -> str:
    return f"""
        %stage0/replica{replica}/mb{m}/backward = backward() {{micro_batch={m}, replica={replica}, stage=0}}
        | -> (float32[_,4], int64[_])
    """


def test_slices_of_replicas_in_turn_are_those_of_each_minibatch_one_after_the_other() -> None:
    """Each minibatch adds up its own rows of equal index before; a group keeps them apart, and is averaged."""
    before = backward(0, 0) + backward(1, 1)
    part = SparsePart("table", 9, 0, stage=0, pair=0, combine="merge")
    first, second = (f"%stage0/replica{m}/mb{m}/backward" for m in (0, 1))
    assert_graph(
        GroupGradients(Window(2, (2,), (1,)), (part,))(call_graph(before, *LOOKS_UP)),
        f"""
        {before}
        %minibatch1/stage0/gather_slices/table = gather_slices({first}:0, {first}:1, {second}:0, {second}:1)
        | {{place, averaged=2, pieces=[2], rows=9, uses=['concat'], variable='table'}} -> (float32[_,4], int64[_])
        """,
    )


def test_slices_of_shared_micro_batches_are_combined_as_in_a_synchronous_step() -> None:
    before = "".join(backward(m, r) for m in (0, 1) for r in (0, 1))
    part = SparsePart("table", 9, 0, stage=0, pair=0, combine="merge")
    pieces = ", ".join(f"%stage0/replica{r}/mb{m}/backward:{i}" for m in (0, 1) for r in (0, 1) for i in (0, 1))
    assert_graph(
        GroupGradients(Window(1, (2,), (1,), 2, in_turn=False), (part,))(call_graph(before, *LOOKS_UP)),
        f"""
        {before}
        %minibatch0/stage0/gather_slices/table = gather_slices({pieces})
        | {{place, pieces=[4], rows=9, uses=['merge'], variable='table'}} -> (float32[_,4], int64[_])
        """,
    )


def test_the_uses_of_a_table_in_one_stage_are_gathered_together() -> None:
    functions = (LOOKS_UP[0], function("stage0/backward", "gradient h", f"{ROWS}, {ROWS}"))
    before = """
        %stage0/replica0/mb0/backward = backward() {place} -> (float32[_,4], int64[_], float32[_,4], int64[_])
    """
    parts = tuple(SparsePart("table", 9, 1 - pair, stage=0, pair=pair, combine="concat") for pair in (0, 1))
    node = GroupGradients(Window(1, (1,), (1,)), parts)(call_graph(before, *functions)).node(
        "minibatch0/stage0/gather_slices/table"
    )
    assert [value.index for value in node.inputs] == [2, 3, 0, 1]  # in the order of their positions
    assert node.strings("uses") == ("concat", "concat")
