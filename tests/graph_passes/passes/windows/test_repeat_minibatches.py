"""The graph of a window from that of one minibatch: names, rows, replicas and outputs."""

from __future__ import annotations

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Node
from dapple_tf.graph_passes.passes.base import run_passes
from dapple_tf.graph_passes.passes.windows.repeat_minibatches import RepeatMinibatches
from dapple_tf.graph_passes.schedules.window import Window
from tests.graph_passes.builders import assert_graph, graph, refused
from tests.graph_passes.windows import WindowKind

INPUT = """
    inputs %x
    %x = input() -> (float32[?,4])
    %batch/size = batch_size(%x:0) -> (int64[])
"""
LAST = "outputs %loss:0\n"


def minibatch(m: int, of: int) -> str:
    return f"""
        %minibatch{m}/batch = minibatch(%batch/size:0, %x:0) {{minibatch={m}, minibatches={of}}} -> (float32[_,4])
        %minibatch{m}/batch/size = batch_size(%minibatch{m}/batch:0) -> (int64[])
    """


FORWARD = """
    %stage0/replica0/mb0/slice = slice(%batch/size:0, %x:0) {place, micro_batches=1, replicas=1}
    | -> (float64[], float32[?,4])
    %stage0/replica0/mb0/forward = forward(%stage0/replica0/mb0/slice:1) {place} -> (float32[])
    %loss = merge(%stage0/replica0/mb0/forward:0, %stage0/replica0/mb0/slice:0) {kind='mean'} -> (float32[])
"""


def test_two_replicas_take_two_minibatches_each_with_its_rows() -> None:
    def copy(m: int) -> str:
        at = f"%stage0/replica{m}/mb{m}"
        return f"""
            {minibatch(m, 2)}
            {at}/slice = slice(%minibatch{m}/batch/size:0, %minibatch{m}/batch:0)
            | {{micro_batch={m}, micro_batches=1, replica={m}, replicas=1, stage=0}} -> (float64[], float32[?,4])
            {at}/forward = forward({at}/slice:1) {{micro_batch={m}, replica={m}, stage=0}} -> (float32[])
            %minibatch{m}/loss = merge({at}/forward:0, {at}/slice:0) {{kind='mean'}} -> (float32[])
        """

    assert_graph(
        RepeatMinibatches(Window(2, (2,), (1,)))(graph(INPUT + FORWARD + LAST)),
        f"""
        {INPUT}
        {copy(0)}
        {copy(1)}
        %loss = merge_minibatches(%minibatch0/loss:0, %minibatch1/loss:0) {{kind='mean'}} -> (float32[])
        %losses = merge_minibatches(%minibatch0/loss:0, %minibatch1/loss:0) {{kind='stack'}} -> (float32[2])
        outputs %loss:0 %losses:0
        """,
    )


TWO_MICRO_BATCHES = """
    %stage0/replica0/mb0/forward = forward(%x:0) {place} -> (float32[])
    %stage0/replica0/mb1/forward = forward(%x:0) {place} -> (float32[])
    %loss = merge(%stage0/replica0/mb0/forward:0, %stage0/replica0/mb1/forward:0) {kind='mean'} -> (float32[])
    %stage0/replica0/mb0/accumulate = accumulate(%stage0/replica0/mb0/forward:0) {place, first=True, variables=['w']}
    %stage0/replica0/mb1/accumulate = accumulate(%stage0/replica0/mb1/forward:0) {place, first=False, variables=['w']}
    | ^%stage0/replica0/mb0/accumulate 'one by one'
    %stage0/replica0/gradients = gradients() {place, variables=['w']} -> (float32[])
    | ^%stage0/replica0/mb1/accumulate 'all are summed'
"""


def test_micro_batches_are_numbered_through_and_sums_begin_when_those_before_are_read() -> None:
    def copy(t: int, edge: str = "") -> str:
        first, second = (f"%stage0/replica0/mb{2 * t + i}" for i in (0, 1))
        return f"""
            {minibatch(t, 2)}
            {first}/forward = forward(%minibatch{t}/batch:0) {{micro_batch={2 * t}, replica=0, stage=0}} -> (float32[])
            {second}/forward = forward(%minibatch{t}/batch:0) {{micro_batch={2 * t + 1}, replica=0, stage=0}}
            | -> (float32[])
            %minibatch{t}/loss = merge({first}/forward:0, {second}/forward:0) {{kind='mean'}} -> (float32[])
            {first}/accumulate = accumulate({first}/forward:0)
            | {{first=True, micro_batch={2 * t}, replica=0, stage=0, variables=['w']}} {edge}
            {second}/accumulate = accumulate({second}/forward:0)
            | {{first=False, micro_batch={2 * t + 1}, replica=0, stage=0, variables=['w']}}
            | ^{first}/accumulate 'one by one'
            %minibatch{t}/stage0/replica0/gradients = gradients() {{replica=0, stage=0, variables=['w']}} -> (float32[])
            | ^{second}/accumulate 'all are summed'
        """

    read = "^%minibatch0/stage0/replica0/gradients 'accumulate: the sums of the minibatch before have been read'"
    assert_graph(
        RepeatMinibatches(Window(2, (1,), (1,), 2, in_turn=False))(graph(INPUT + TWO_MICRO_BATCHES + LAST)),
        f"""
        {INPUT}
        {copy(0)}
        {copy(1, read)}
        %loss = merge_minibatches(%minibatch0/loss:0, %minibatch1/loss:0) {{kind='mean'}} -> (float32[])
        %losses = merge_minibatches(%minibatch0/loss:0, %minibatch1/loss:0) {{kind='stack'}} -> (float32[2])
        outputs %loss:0 %losses:0
        """,
    )


ONCE = """
    %stage0/replica0/row_bounds = row_bounds(%batch/size:0) {place} -> (int64[3])
    %stage0/replica0/run_once = run_once(%x:0, %stage0/replica0/row_bounds:0) {place} -> (float32[])
    %stage0/replica0/mb0/forward = forward(%stage0/replica0/run_once:0) {place} -> (float32[])
    | ^%stage0/replica0/run_once 'once'
    %stage1/replica0/mb0/forward = forward(%stage0/replica0/mb0/forward:0) {place} -> (float32[])
    %loss = merge(%stage1/replica0/mb0/forward:0) {kind='mean'} -> (float32[])
"""


def test_what_runs_once_a_minibatch_runs_on_all_replicas_and_forward_takes_that_of_its_own() -> None:
    def copy(m: int) -> str:
        once = f"%minibatch{m}/stage0/replica"
        calls = "".join(
            f"""
            {once}{r}/row_bounds = row_bounds(%minibatch{m}/batch/size:0) {{replica={r}, stage=0}} -> (int64[3])
            """
            for r in (0, 1)
        ) + "".join(
            f"""
            {once}{r}/run_once = run_once(%minibatch{m}/batch:0, {once}{r}/row_bounds:0) {{replica={r}, stage=0}}
            | -> (float32[])
            """
            for r in (0, 1)
        )
        return f"""
            {minibatch(m, 2)}
            {calls}
            %stage0/replica{m}/mb{m}/forward = forward({once}{m}/run_once:0) {{micro_batch={m}, replica={m}, stage=0}}
            | -> (float32[]) ^{once}{m}/run_once 'once'
            %stage1/replica0/mb{m}/forward = forward(%stage0/replica{m}/mb{m}/forward:0)
            | {{micro_batch={m}, replica=0, stage=1}} -> (float32[])
            %minibatch{m}/loss = merge(%stage1/replica0/mb{m}/forward:0) {{kind='mean'}} -> (float32[])
        """

    assert_graph(
        RepeatMinibatches(Window(2, (2, 1), (2, 1)))(graph(INPUT + ONCE + LAST)),
        f"""
        {INPUT}
        {copy(0)}
        {copy(1)}
        %loss = merge_minibatches(%minibatch0/loss:0, %minibatch1/loss:0) {{kind='mean'}} -> (float32[])
        %losses = merge_minibatches(%minibatch0/loss:0, %minibatch1/loss:0) {{kind='stack'}} -> (float32[2])
        outputs %loss:0 %losses:0
        """,
    )


def test_outputs_are_merged_over_minibatches_as_their_kinds_say() -> None:
    """The merge of a window: the mean loss, each aux output, and the losses one by one after them."""
    before = graph(
        INPUT
        + FORWARD
        + """
        %aux/0 = merge(%stage0/replica0/mb0/forward:0) {kind='concat'} -> (float32[?,4])
        %aux/1 = merge(%stage0/replica0/mb0/forward:0) {kind='sum'} -> (int32[])
        outputs %loss:0 %aux/0:0 %aux/1:0
        """
    )
    after = RepeatMinibatches(Window(3, (1,), (1,)), ("concat", "sum"))(before)
    assert [str(value) for value in after.outputs] == ["%loss:0", "%aux/0:0", "%aux/1:0", "%losses:0"]

    def merged(node: Node) -> tuple[str, list[str]]:
        assert node.op == "merge_minibatches"
        return node.string("kind"), [str(value) for value in node.inputs]

    for name, kind, source in (
        ("loss", "mean", "loss"),
        ("aux/0", "concat", "aux/0"),
        ("aux/1", "sum", "aux/1"),
        ("losses", "stack", "loss"),
    ):
        assert merged(after.node(name)) == (kind, [f"%minibatch{t}/{source}:0" for t in range(3)])
        assert name == "losses" or after.node(name).outputs == before.node(name).outputs


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (Window(2, (1, 1), (2, 1)), "((1, 1), 1)"),
        (Window(2, (1,), (1,), 2, in_turn=False), "((1,), 2)"),
        (Window(2, (2,), (1,), 1, in_turn=False), "((2,), 1)"),
    ],
)
def test_a_minibatch_has_the_stages_replicas_and_micro_batches_of_the_window(window: Window, wanted: str) -> None:
    said = f"a minibatch of the window has (replicas, micro-batches) {wanted}, the graph ((1,), 1)"
    with refused(GraphError, said):
        RepeatMinibatches(window)(graph(INPUT + FORWARD + LAST))


def test_a_window_is_not_repeated_again() -> None:
    kind = WindowKind((1,), 2)
    passes = kind.passes()
    with refused(
        GraphError, "pass 'repeat_minibatches' (after 'repeat_minibatches') forbids 'merge_minibatches' nodes"
    ):
        run_passes(kind.input_graph(), [*passes[:3], passes[2]])
