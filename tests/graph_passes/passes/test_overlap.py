"""AllReduce in buckets, while the last backward still runs: DAPPLE, section VI.C."""

from __future__ import annotations

import dataclasses

import pytest

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.graph import Function, Port
from dapple_tf.graph_passes.ir.text import parse_type
from dapple_tf.graph_passes.passes.allreduce import AllReduce
from dapple_tf.graph_passes.passes.overlap import READS, Overlap, cut_buckets, order_gradients
from tests.graph_passes.builders import assert_graph, call_graph, function, graph, ports, refused

FORWARD = function("stage0/forward", "arg x, variable u, variable v, variable w", "loss loss")
# 16 bytes each; forward uses u first and w last.
BACKWARD = function("stage0/backward", "seed loss", "variable u, variable v, variable w")


def calls_of(m: int, replica: int, function: str = "stage0/backward", inline: str = "") -> str:
    place = f"micro_batch={m}, replica={replica}, stage=0"
    return f"""
    %stage0/replica{replica}/mb{m}/forward = forward() {{{place}}}
    %stage0/replica{replica}/mb{m}/backward = backward() {{function='{function}', {inline}{place}}}
    | -> (float32[4], float32[4], float32[4])
    {f"| ^%stage0/replica{replica}/mb{m}/forward {READS!r}" if inline else ""}
    """


def sum_of(m: int, replica: int) -> str:
    back = f"%stage0/replica{replica}/mb{m}/backward"
    after = f"| ^%stage0/replica{replica}/mb{m - 1}/accumulate 'accumulate: micro-batch {m} after {m - 1}'"
    return f"""
    %stage0/replica{replica}/mb{m}/accumulate = accumulate({back}:0, {back}:1, {back}:2)
    | {{first={m == 0}, micro_batch={m}, replica={replica}, stage=0, variables=['u', 'v', 'w']}}
    {after if m else ""}
    """


def sums(replica: int) -> str:
    return f"""
    %stage0/replica{replica}/gradients = gradients() {{replica={replica}, stage=0, variables=['u', 'v', 'w']}}
    | -> (float32[4], float32[4], float32[4])
    | ^%stage0/replica{replica}/mb1/accumulate 'accumulate: all micro-batches are summed'
    """


def bucket_sums(replica: int) -> str:
    here, back = f"%stage0/replica{replica}", f"%stage0/replica{replica}/mb1/backward"
    after = f"| ^{here}/mb0/accumulate 'accumulate: micro-batch 1 after 0'"
    return f"""
    {here}/mb1/accumulate/bucket0 = accumulate({back}:2, {back}:1)
    | {{bucket=0, first=False, micro_batch=1, replica={replica}, stage=0, variables=['w', 'v']}}
    {after}
    {here}/mb1/accumulate/bucket1 = accumulate({back}:0)
    | {{bucket=1, first=False, micro_batch=1, replica={replica}, stage=0, variables=['u']}}
    {after}
    {here}/gradients/bucket0 = gradients() {{bucket=0, replica={replica}, stage=0, variables=['w', 'v']}}
    | -> (float32[4], float32[4])
    | ^{here}/mb1/accumulate/bucket0 'accumulate: all micro-batches are summed'
    {here}/gradients/bucket1 = gradients() {{bucket=1, replica={replica}, stage=0, variables=['u']}}
    | -> (float32[4])
    | ^{here}/mb1/accumulate/bucket1 'accumulate: all micro-batches are summed'
    """


def as_weights(text: str, *micro_batches: int) -> str:
    """The same where these micro-batches are split: the variables' gradients come from calls of their own."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if any(f"/mb{m}/" in line for m in micro_batches):
            lines[i] = line.replace("/backward", "/weights").replace("= backward(", "= weights(")
            lines[i] = lines[i].replace("/last_backward", "/last_weights")
    return "\n".join(lines)


INPUTS = function("stage0/inputs", "seed loss", "gradient h, carry c")
WEIGHTS = dataclasses.replace(BACKWARD, name="stage0/weights")


def before_and_after(*split: int) -> tuple[str, str]:
    """The calls and sums of two micro-batches on two replicas, of which some are split, before and after the pass."""
    before = "".join(calls_of(0, r) + sum_of(0, r) + calls_of(1, r) + sum_of(1, r) + sums(r) for r in (0, 1))
    after = "".join(
        calls_of(0, r) + sum_of(0, r) + calls_of(1, r, "stage0/last_backward", "inline=True, ") + bucket_sums(r)
        for r in (0, 1)
    )
    return as_weights(before, *split), as_weights(after, *split)


def test_where_backward_is_split_the_last_weight_gradients_are_in_buckets() -> None:
    before, after = before_and_after(0, 1)
    result = Overlap(32)(call_graph(before, FORWARD, INPUTS, WEIGHTS))
    assert_graph(result, after)
    assert [f.name for f in result.functions][1:] == ["stage0/inputs", "stage0/weights", "stage0/last_weights"]


@pytest.mark.parametrize(("split", "copied"), [(0, "backward"), (1, "weights")])
def test_the_last_micro_batch_s_kind_of_backward_says_which_function_is_copied(split: int, copied: str) -> None:
    before, after = before_and_after(split)
    result = Overlap(32)(call_graph(before, FORWARD, BACKWARD, INPUTS, WEIGHTS))
    assert_graph(result, after)
    names = ["stage0/backward", "stage0/inputs", "stage0/weights", f"stage0/last_{copied}"]
    assert [f.name for f in result.functions][1:] == names


def test_the_part_for_gradients_of_inputs_is_not_inlined() -> None:
    before, _ = before_and_after(1)
    inputs = """
        %stage0/replica0/mb1/inputs = inputs() {call} -> (float32[?,4], float32[?,4])
    """
    result = Overlap(32)(call_graph(before + inputs, FORWARD, BACKWARD, INPUTS, WEIGHTS))
    assert not result.node("stage0/replica0/mb1/inputs").has("inline")
    assert result.node("stage0/replica0/mb1/weights").has("inline")


def test_each_stage_s_last_micro_batch_is_looked_at_alone() -> None:
    """That of stage 0 is whole, and that of stage 1 split."""
    first, first_after = before_and_after(0)
    second, second_after = (
        text.replace("stage0", "stage1").replace("stage=0", "stage=1") for text in before_and_after(1)
    )
    functions = [
        dataclasses.replace(function, name=function.name.replace("stage0", f"stage{stage}"))
        for stage in (0, 1)
        for function in (FORWARD, BACKWARD, INPUTS, WEIGHTS)
    ]
    result = Overlap(32)(call_graph(first + second, *functions))
    assert_graph(result, first_after + second_after)
    assert [f.name for f in result.functions if "last" in f.name] == ["stage0/last_backward", "stage1/last_weights"]


def test_the_last_micro_batch_is_summed_in_buckets_and_each_is_reduced_alone() -> None:
    before, after = before_and_after()
    result = Overlap(32)(call_graph(before, FORWARD, BACKWARD))
    assert_graph(result, after)
    copy = result.function("stage0/last_backward")
    assert (copy.inputs, copy.outputs, copy.graph.nodes) == (BACKWARD.inputs, BACKWARD.outputs, BACKWARD.graph.nodes)
    assert_graph(
        AllReduce()(result),
        after
        + """
        %stage0/allreduce/bucket0 = allreduce(%stage0/replica0/gradients/bucket0:0,
        | %stage0/replica0/gradients/bucket0:1, %stage0/replica1/gradients/bucket0:0,
        | %stage0/replica1/gradients/bucket0:1) {place, bucket=0, replicas=2, variables=['w', 'v']}
        | -> (float32[4], float32[4])
        %stage0/allreduce/bucket1 = allreduce(%stage0/replica0/gradients/bucket1:0,
        | %stage0/replica1/gradients/bucket1:0) {place, bucket=1, replicas=2, variables=['u']} -> (float32[4])
        %stage0/reduced_gradients = reduced_gradients(%stage0/allreduce/bucket1:0, %stage0/allreduce/bucket0:1,
        | %stage0/allreduce/bucket0:0) {place, variables=['u', 'v', 'w']} -> (float32[4], float32[4], float32[4])
        """,
    )


def test_a_single_micro_batch_is_passed_on_in_buckets_and_needs_no_function_of_its_own() -> None:
    given = """
        %stage0/replica{r}/gradients = gradients(%stage0/replica{r}/mb0/backward:0, %stage0/replica{r}/mb0/backward:1,
        | %stage0/replica{r}/mb0/backward:2) {{replica={r}, stage=0, variables=['u', 'v', 'w']}}
        | -> (float32[4], float32[4], float32[4])
    """
    cut = """
        %stage0/replica{r}/gradients/bucket0 = gradients(%stage0/replica{r}/mb0/backward:2)
        | {{bucket=0, replica={r}, stage=0, variables=['w']}} -> (float32[4])
        %stage0/replica{r}/gradients/bucket1 = gradients(%stage0/replica{r}/mb0/backward:1)
        | {{bucket=1, replica={r}, stage=0, variables=['v']}} -> (float32[4])
        %stage0/replica{r}/gradients/bucket2 = gradients(%stage0/replica{r}/mb0/backward:0)
        | {{bucket=2, replica={r}, stage=0, variables=['u']}} -> (float32[4])
    """
    before = "".join(calls_of(0, r) + given.format(r=r) for r in (0, 1))
    result = Overlap(1)(call_graph(before, FORWARD, BACKWARD))
    assert_graph(result, "".join(calls_of(0, r, inline="inline=True, ") + cut.format(r=r) for r in (0, 1)))
    assert [f.name for f in result.functions] == ["stage0/forward", "stage0/backward"]


def test_a_stage_of_one_replica_has_nothing_to_reduce_and_stays_as_it_is() -> None:
    before = calls_of(0, 0) + sum_of(0, 0) + calls_of(1, 0) + sum_of(1, 0) + sums(0)
    unchanged = Overlap(1)(call_graph(before, FORWARD, BACKWARD))
    assert_graph(unchanged, before)
    assert len(unchanged.functions) == 2


def test_a_replicated_stage_without_gradients_stays_as_it_is() -> None:
    text = "".join(calls_of(0, r).replace(" -> (float32[4], float32[4], float32[4])", "") for r in (0, 1))
    before = call_graph(text, FORWARD, function("stage0/backward", "seed loss"))
    assert Overlap()(before) == before


# --- in which order backward makes gradients


def test_gradients_that_are_in_buckets_already_are_refused() -> None:
    before = call_graph(
        "".join(calls_of(0, r) + sum_of(0, r) + calls_of(1, r) + sum_of(1, r) + sums(r) for r in (0, 1))
    )
    once = Overlap(32)(before.replace(functions=(FORWARD, BACKWARD)))
    with refused(GraphError, "the gradients are in buckets already: run the overlap pass once"):
        Overlap(32)(once)


def test_gradients_are_ordered_by_the_longest_chain_before_them() -> None:
    """Backward computes v's gradient first, then w's; u is tied, and its gradient is a sum that is there last."""
    body = graph(
        """
        inputs %seed
        %seed = Placeholder() -> (float32[])
        %dv = MatMul(%seed:0) -> (float32[4])
        %h = Tanh(%seed:0) -> (float32[4])
        %dw = MatMul(%h:0) -> (float32[4])
        %more = Tanh(%h:0) -> (float32[4])
        %du = Add(%dv:0, %more:0) -> (float32[4])
        outputs %more:0 %du:0 %dv:0 %dw:0
        """
    )
    gives = ports("gradient h, variable u, variable v, variable w", gives=True)
    backward = Function("stage0/backward", body, ports("seed loss"), gives)
    assert [(i, port.name) for i, port in order_gradients(backward)] == [(1, "v"), (2, "w"), (0, "u")]


def test_gradients_after_equal_chains_come_in_reverse_order_of_use() -> None:
    assert [(i, port.name) for i, port in order_gradients(BACKWARD)] == [(2, "w"), (1, "v"), (0, "u")]


# --- how much goes into a bucket


@pytest.mark.parametrize(
    ("sizes", "limit", "wanted"),
    [
        ([1, 1, 1], 8, [[0, 1], [2]]),  # 4 bytes each: full at 8
        ([1, 1], 8, [[0, 1]]),
        ([9, 1, 1], 8, [[0], [1, 2]]),
        ([1, 9, 1], 8, [[0, 1], [2]]),
        ([], 8, []),
    ],
)
def test_a_bucket_is_closed_when_it_is_full(sizes: list[int], limit: int, wanted: list[list[int]]) -> None:
    gradients = [(i, Port("variable", f"v{i}", parse_type(f"float32[{n}]"))) for i, n in enumerate(sizes)]
    assert [[i for i, _ in bucket] for bucket in cut_buckets(gradients, limit)] == wanted
