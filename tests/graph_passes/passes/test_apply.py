"""Weight update after a barrier that waits for all that may fail: DAPPLE, Fig. 10 (Apply)."""

from __future__ import annotations

from dapple_tf.errors import GraphError
from dapple_tf.graph_passes.ir.names import Site
from dapple_tf.graph_passes.passes.apply import Apply
from dapple_tf.graph_passes.passes.split_update import Updates
from tests.graph_passes.builders import assert_graph, call_graph, function, refused

GRADIENTS = """
    %loss = merge() -> (float32[])
    %stage0/reduced_gradients = reduced_gradients() {place, variables=['u', 'w']} -> (float32[4], float32[2])
    %stage1/reduced_gradients = reduced_gradients() {place, variables=['v']} -> (float32[4])
    outputs %loss:0
"""

STAGES = (
    (Site(0), function("stage0/update", "gradient w float32[2], gradient u, variable u, variable w")),
    (Site(1), function("stage1/update", "gradient v, variable v")),
)
SHARED = function("optimizer/before", "variable step"), function("optimizer/after", "variable step")

BARRIER = """
    %update/barrier = barrier()
    | ^%stage0/reduced_gradients 'barrier: no weight changes before every gradient is there'
    | ^%stage1/reduced_gradients 'barrier: no weight changes before every gradient is there'
    | ^%loss 'barrier: no weight changes before the loss is there'
"""
BEGIN = """
    %update/begin = set_updating() {updating=True}
    | ^%update/barrier 'barrier: from here on a failure leaves the step half-applied'
"""


def test_an_update_whose_gradient_is_missing_is_refused() -> None:
    stages = ((Site(0), function("stage0/update", "gradient lost, variable lost")),)
    with refused(GraphError, "'stage0/update' updates 'lost', but no backward gives its gradient"):
        Apply(Updates(None, stages, None))(call_graph(GRADIENTS))


def test_each_stage_updates_its_variables_after_the_barrier() -> None:
    result = Apply(Updates(None, STAGES, None))(call_graph(GRADIENTS))
    assert_graph(
        result,
        f"""
        {GRADIENTS}
        {BARRIER}
        {BEGIN}
        %stage0/update = update(%stage0/reduced_gradients:1, %stage0/reduced_gradients:0) {{call}}
        | ^%update/begin 'barrier: nothing is half-updated by a failure'
        %stage1/update = update(%stage1/reduced_gradients:0) {{call}}
        | ^%update/begin 'barrier: nothing is half-updated by a failure'
        %update/done = set_updating() {{updating=False}}
        | ^%stage0/update 'the optimizer steps once, after all updates'
        | ^%stage1/update 'the optimizer steps once, after all updates'
        """,
    )
    assert [f.name for f in result.functions] == ["stage0/update", "stage1/update"]


def test_shared_updates_run_once_before_and_once_after_those_of_the_stages() -> None:
    result = Apply(Updates(SHARED[0], STAGES, SHARED[1]))(call_graph(GRADIENTS))
    waits = {node.name: [control.source for control in node.controls] for node in result.nodes if "update" in node.name}
    assert waits == {
        "update/barrier": ["stage0/reduced_gradients", "stage1/reduced_gradients", "loss"],
        "update/begin": ["update/barrier"],
        "update/before": ["update/begin"],
        "stage0/update": ["update/before"],
        "stage1/update": ["update/before"],
        "update/after": ["update/before", "stage0/update", "stage1/update"],
        "update/done": ["update/after"],
    }
    assert result.node("update/before").attrs == (("function", "optimizer/before"),)
    assert result.node("update/after").attrs == (("function", "optimizer/after"),)
    assert [f.name for f in result.functions] == [
        "optimizer/before",
        "stage0/update",
        "stage1/update",
        "optimizer/after",
    ]


def test_gradients_are_clipped_by_their_norm_over_all_stages() -> None:
    assert_graph(
        Apply(Updates(None, STAGES, None), global_clipnorm=1.5)(call_graph(GRADIENTS)),
        f"""
        {GRADIENTS}
        {BARRIER}
        %stage0/square_norm = square_norm(%stage0/reduced_gradients:0, %stage0/reduced_gradients:1) {{place}}
        | -> (float64[])
        %stage1/square_norm = square_norm(%stage1/reduced_gradients:0) {{place}} -> (float64[])
        %update/global_norm = global_norm(%stage0/square_norm:0, %stage1/square_norm:0) -> (float64[])
        %stage0/clip = clip(%update/global_norm:0, %stage0/reduced_gradients:0, %stage0/reduced_gradients:1)
        | {{place, limit=real(1.5)}} -> (float32[4], float32[2])
        %stage1/clip = clip(%update/global_norm:0, %stage1/reduced_gradients:0) {{place, limit=real(1.5)}}
        | -> (float32[4])
        {BEGIN}
        %stage0/update = update(%stage0/clip:1, %stage0/clip:0) {{call}}
        | ^%update/begin 'barrier: nothing is half-updated by a failure'
        %stage1/update = update(%stage1/clip:0) {{call}} ^%update/begin 'barrier: nothing is half-updated by a failure'
        %update/done = set_updating() {{updating=False}}
        | ^%stage0/update 'the optimizer steps once, after all updates'
        | ^%stage1/update 'the optimizer steps once, after all updates'
        """,
    )


def test_state_is_committed_after_the_barrier_and_before_the_end() -> None:
    before = GRADIENTS.replace("outputs", "%stage0/commit = commit() {replica=0, stage=0, variables=['mean']}\noutputs")
    result = Apply(Updates(None, STAGES, None))(call_graph(before))
    assert [c.source for c in result.node("stage0/commit").controls] == ["update/begin"]
    assert [c.source for c in result.node("update/done").controls] == [
        "stage0/update",
        "stage1/update",
        "stage0/commit",
    ]


def test_only_an_update_that_takes_statistics_waits_until_they_are_written() -> None:
    before = GRADIENTS.replace(
        "outputs", "%written = write_statistics() {function='written', replica=0, stage=0}\noutputs"
    )
    writes = function("written", "variable w", "", ["w"])
    graph = call_graph(before, writes)
    result = Apply(Updates(None, STAGES, None))(graph)
    assert [c.source for c in result.node("written").controls] == ["update/begin"]
    assert [c.source for c in result.node("stage0/update").controls] == ["update/begin", "written"]
    assert [c.source for c in result.node("stage1/update").controls] == ["update/begin"]


def test_a_step_without_updates_still_ends() -> None:
    assert_graph(
        Apply(Updates(None, (), None))(call_graph("%loss = merge() -> (float32[])\noutputs %loss:0")),
        """
        %loss = merge() -> (float32[])
        %update/barrier = barrier() ^%loss 'barrier: no weight changes before the loss is there'
        %update/begin = set_updating() {updating=True}
        | ^%update/barrier 'barrier: from here on a failure leaves the step half-applied'
        %update/done = set_updating() {updating=False} ^%update/begin 'the step ends after its barrier'
        outputs %loss:0
        """,
    )


SLICES = """
    %stage1/gather_slices/table = gather_slices() {place, pieces=[1], rows=9, uses=['concat'], variable='table'}
    | -> (float32[_,4], int64[_])
"""
SPARSE = GRADIENTS.replace("    outputs", SLICES + "    outputs")
SPARSE_BARRIER = BARRIER.replace(
    "    | ^%loss",
    "    | ^%stage1/gather_slices/table 'barrier: no weight changes before every gradient is there'\n    | ^%loss",
)


def test_an_update_takes_slices_and_their_indices() -> None:
    ports = "gradient v, slices table float32[_,4], indices table int64[_], variable v, variable table"
    stages = ((Site(1), function("stage1/update", ports)),)
    assert_graph(
        Apply(Updates(None, stages, None))(call_graph(SPARSE)),
        f"""
        {SPARSE}
        {SPARSE_BARRIER}
        {BEGIN}
        %stage1/update = update(%stage1/reduced_gradients:0, %stage1/gather_slices/table:0,
        | %stage1/gather_slices/table:1) {{call}} ^%update/begin 'barrier: nothing is half-updated by a failure'
        %update/done = set_updating() {{updating=False}}
        | ^%stage1/update 'the optimizer steps once, after all updates'
        """,
    )


def test_the_global_norm_is_that_of_slices_as_they_are_and_what_is_clipped_is_dense() -> None:
    stages = (
        (Site(1), function("stage1/update", "gradient v, gradient table float32[9,4], variable v, variable table")),
    )
    assert_graph(
        Apply(Updates(None, stages, None), global_clipnorm=1.5)(call_graph(SPARSE)),
        f"""
        {SPARSE}
        {SPARSE_BARRIER}
        %stage0/square_norm = square_norm(%stage0/reduced_gradients:0, %stage0/reduced_gradients:1) {{place}}
        | -> (float64[])
        %stage1/square_norm = square_norm(%stage1/reduced_gradients:0, %stage1/gather_slices/table:0) {{place}}
        | -> (float64[])
        %update/global_norm = global_norm(%stage0/square_norm:0, %stage1/square_norm:0) -> (float64[])
        %stage0/clip = clip(%update/global_norm:0, %stage0/reduced_gradients:0, %stage0/reduced_gradients:1)
        | {{place, limit=real(1.5)}} -> (float32[4], float32[2])
        %stage1/clip = clip(%update/global_norm:0, %stage1/reduced_gradients:0, %stage1/gather_slices/table:0,
        | %stage1/gather_slices/table:1) {{place, limit=real(1.5), slices=1}} -> (float32[4], float32[9,4])
        {BEGIN}
        %stage1/update = update(%stage1/clip:0, %stage1/clip:1) {{call}}
        | ^%update/begin 'barrier: nothing is half-updated by a failure'
        %update/done = set_updating() {{updating=False}}
        | ^%stage1/update 'the optimizer steps once, after all updates'
        """,
    )


def test_an_update_that_takes_slices_of_a_dense_gradient_is_refused() -> None:
    stages = ((Site(1), function("stage1/update", "slices v float32[_,4], indices v int64[_], variable v")),)
    with refused(GraphError, "'stage1/update' updates 'v', but no backward gives its slices (its gradient is dense)"):
        Apply(Updates(None, stages, None))(call_graph(GRADIENTS))


def test_terms_of_the_stages_are_combined_before_the_barrier_and_taken_by_the_updates() -> None:
    terms = (
        (Site(0), function("stage0/update_terms", "gradient w float32[2]", "partial a bool[]")),
        (Site(1), function("stage1/update_terms", "gradient v", "partial b bool[]")),
    )
    combine = function("optimizer/combine", "partial a bool[], partial b bool[]", "combined c bool[]")
    stages = (
        (Site(0), function("stage0/update", "gradient w float32[2], gradient u, combined c bool[]")),
        (Site(1), function("stage1/update", "gradient v, combined c bool[]")),
    )
    result = Apply(Updates(None, stages, None, terms, combine))(call_graph(GRADIENTS))
    assert [str(value) for value in result.node("update/combine").inputs] == [
        "%stage0/update_terms:0",
        "%stage1/update_terms:0",
    ]
    assert [str(value) for value in result.node("stage1/update").inputs] == [
        "%stage1/reduced_gradients:0",
        "%update/combine:0",
    ]
    assert "update/combine" in {control.source for control in result.node("update/barrier").controls}
    assert result.node("stage1/update_terms").attrs == (
        ("function", "stage1/update_terms"),
        ("replica", 0),
        ("stage", 1),
    )
