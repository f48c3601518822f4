"""The traced update of an optimizer, cut into a function for each stage and shared functions."""

from __future__ import annotations

from dapple_tf.errors import PartitionError
from dapple_tf.graph_passes.ir.graph import Function, Value
from dapple_tf.graph_passes.ir.names import Site
from dapple_tf.graph_passes.ir.text import print_graph
from dapple_tf.graph_passes.passes.split_update import Updates, cut_updates
from tests.graph_passes.builders import functions_of, graph, refused

OWNER = {"w": Site(0), "v": Site(1)}

INPUTS = """
    %gw = arg() {port='w'} -> (float32[4])
    %gv = arg() {port='v'} -> (float32[4])
    %w = variable() -> (resource[])
    %v = variable() -> (resource[])
    %step = variable() -> (resource[])
    %slot = variable() -> (resource[])
    %one = Const() -> (int64[])
    %flag = Const() -> (bool[])
"""

UPDATES = """
    %uw = AssignSubVariableOp(%w:0, %gw:0) {writes=['w']} !write
    %uv = AssignSubVariableOp(%v:0, %gv:0) {writes=['v']} !write
"""


def cut(text: str) -> Updates:
    """The update ``text``, cut for w in stage 0 and v in stage 1."""
    return cut_updates(graph(INPUTS + text), OWNER)


def ops(function: Function | None) -> list[str]:
    """Names of the nodes that a function does not take as inputs."""
    return [] if function is None else [n.name for n in function.graph.nodes if n.name not in function.graph.inputs]


def assert_function(result: Function | None, text: str) -> None:
    """``result`` is the one function of ``text``."""
    assert result is not None
    expected = graph(text)
    assert print_graph(expected.replace(functions=(result,))) == print_graph(expected)
    assert functions_of(text) == (result,)


def test_each_variable_is_updated_by_the_stage_that_owns_it() -> None:
    updates = cut(UPDATES)
    assert (updates.before, updates.after) == (None, None)
    assert [site for site, _ in updates.stages] == [Site(0), Site(1)]
    assert_function(
        updates.stages[0][1],
        """
        function stage0/update
        takes gradient float32[4] 'w' as %gradient/1
        takes variable resource[] 'w' as %variable/0
          %uw = AssignSubVariableOp(%variable/0:0, %gradient/1:0) {writes=['w']} !write
          end
        """,
    )
    assert ops(updates.stages[1][1]) == ["uv"]


def test_a_counter_that_every_update_reads_steps_once_after_them() -> None:
    updates = cut(
        """
        %t = ReadVariableOp(%step:0) -> (int64[]) !read
        %dw = Scale(%gw:0, %t:0) -> (float32[4])
        %uw = AssignSubVariableOp(%w:0, %dw:0) {writes=['w']} !write
        %dv = Scale(%gv:0, %t:0) -> (float32[4])
        %uv = AssignSubVariableOp(%v:0, %dv:0) {writes=['v']} !write
        %tick = AssignAddVariableOp(%step:0, %one:0) {writes=['step']} !write
        """
    )
    assert updates.before is None
    assert [(stage, ops(function)) for stage, function in updates.stages] == [
        (Site(0), ["t", "dw", "uw"]),
        (Site(1), ["t", "dv", "uv"]),
    ]
    assert_function(
        updates.after,
        """
        function optimizer/after
        takes variable resource[] 'step' as %variable/0
          %one = Const() -> (int64[])
          %tick = AssignAddVariableOp(%variable/0:0, %one:0) {writes=['step']} !write
          end
        """,
    )


def test_a_counter_that_steps_before_the_updates_steps_once_before_them() -> None:
    updates = cut(
        """
        %tick = AssignAddVariableOp(%step:0, %one:0) {writes=['step']} !write
        %t = ReadVariableOp(%step:0) -> (int64[]) !read ^%tick 'auto'
        %dw = Scale(%gw:0, %t:0) -> (float32[4])
        %uw = AssignSubVariableOp(%w:0, %dw:0) {writes=['w']} !write
        %dv = Scale(%gv:0, %t:0) -> (float32[4])
        %uv = AssignSubVariableOp(%v:0, %dv:0) {writes=['v']} !write
        """
    )
    assert ops(updates.before) == ["one", "tick"]
    assert [(stage, ops(function)) for stage, function in updates.stages] == [
        (Site(0), ["t", "dw", "uw"]),
        (Site(1), ["t", "dv", "uv"]),
    ]
    assert updates.after is None
    read = updates.stages[0][1].graph.node("t")
    assert read.controls == ()  # the tick is no member: its whole function runs before


def test_a_slot_belongs_to_the_stage_whose_update_reads_it() -> None:
    updates = cut(
        """
        %put = AssignVariableOp(%slot:0, %gv:0) {writes=['slot']} !write
        %m = ReadVariableOp(%slot:0) -> (float32[4]) !read ^%put 'auto'
        %uw = AssignSubVariableOp(%w:0, %gw:0) {writes=['w']} !write
        %uv = AssignSubVariableOp(%v:0, %m:0) {writes=['v']} !write
        """
    )
    assert (updates.before, updates.after) == (None, None)
    assert [(stage, ops(function)) for stage, function in updates.stages] == [
        (Site(0), ["uw"]),
        (Site(1), ["put", "m", "uv"]),
    ]


def test_a_side_effect_runs_in_the_stage_whose_variable_it_reads() -> None:
    updates = cut(UPDATES + "%seen = ReadVariableOp(%v:0) -> (float32[4]) !read\n%print = Print(%seen:0) !side")
    assert [(stage, ops(function)) for stage, function in updates.stages] == [
        (Site(0), ["uw"]),
        (Site(1), ["uv", "seen", "print"]),
    ]


def test_nodes_that_wait_for_updates_by_control_edges_do_not_repeat_them() -> None:
    updates = cut(
        UPDATES + "%tick = AssignAddVariableOp(%step:0, %one:0) {writes=['step']} !write ^%uw 'auto' ^%uv 'auto'"
    )
    assert [(stage, ops(function)) for stage, function in updates.stages] == [(Site(0), ["uw"]), (Site(1), ["uv"])]
    assert ops(updates.after) == ["one", "tick"]


def test_an_update_that_waits_for_another_stage_s_does_not_repeat_it() -> None:
    updates = cut(UPDATES.replace("{writes=['v']} !write", "{writes=['v']} !write ^%uw 'auto'"))
    assert [(stage, ops(function)) for stage, function in updates.stages] == [(Site(0), ["uw"]), (Site(1), ["uv"])]


def test_an_op_that_updates_the_variables_of_two_stages_is_refused() -> None:
    with refused(
        PartitionError,
        "the optimizer's op 'both' (FusedUpdate) updates variables of stage 0 and stage 1 at once, so it cannot",
    ):
        cut("%both = FusedUpdate(%w:0, %v:0, %gw:0, %gv:0) {writes=['w', 'v']} !write")


def test_the_error_of_a_condition_says_how_it_can_be_cut() -> None:
    with refused(PartitionError, "let no op use what this tf.cond returns"):
        cut("%both = If(%w:0, %v:0, %gw:0, %gv:0) {writes=['w', 'v']} !write")


def test_an_identity_n_of_all_gradients_does_not_connect_the_stages() -> None:
    """Keras passes all gradients through one."""
    updates = cut(
        """
        %all = IdentityN(%gw:0, %gv:0) -> (float32[4], float32[4])
        %uw = AssignSubVariableOp(%w:0, %all:0) {writes=['w']} !write
        %uv = AssignSubVariableOp(%v:0, %all:1) {writes=['v']} !write
        """
    )
    assert updates == cut(UPDATES)


TICK = """
    %tick = CountUpTo(%step:0) {writes=['step']} -> (float32[4]) !write
    %uw = AssignSubVariableOp(%w:0, %tick:0) {writes=['w']} !write
    %uv = AssignSubVariableOp(%v:0, %tick:0) {writes=['v']} !write
    """


def ports(function: Function | None, *, outputs: bool = False) -> list[tuple[str, str]]:
    """Roles and names of what a function takes, or gives."""
    if function is None:
        return []
    return [(port.role, port.name) for port in (function.outputs if outputs else function.inputs)]


def test_the_stages_take_the_result_of_a_shared_write_from_the_update_before_them() -> None:
    updates = cut(TICK)
    assert ops(updates.before) == ["tick"]
    assert ports(updates.before, outputs=True) == [("combined", "%tick:0")]
    assert [ports(function) for _, function in updates.stages] == [
        [("variable", "w"), ("combined", "%tick:0")],
        [("variable", "v"), ("combined", "%tick:0")],
    ]


def test_a_result_of_a_write_in_a_condition_is_refused() -> None:
    guard = "guard=['if', 'then_branch']"
    with refused(
        PartitionError,
        "the optimizer's stage0/update needs %tick:0, the result of an update that belongs to another function",
    ):
        cut(
            f"""
            %if = If(%flag:0) {{open=True}}
            %tick = CountUpTo(%step:0) {{{guard}, writes=['step']}} -> (float32[4]) !write ^%if 'condition'
            %uw = AssignSubVariableOp(%w:0, %tick:0) {{{guard}, writes=['w']}} !write ^%if 'condition'
            %uv = AssignSubVariableOp(%v:0, %tick:0) {{{guard}, writes=['v']}} !write ^%if 'condition'
            """
        )


def test_terms_that_take_the_result_of_a_write_belong_to_the_next_round() -> None:
    updates = cut(
        TICK
        + """
        %nw = Norm(%gw:0, %tick:0) -> (float32[])
        %nv = Norm(%gv:0, %tick:0) -> (float32[])
        %all = Add(%nw:0, %nv:0) -> (float32[])
        %us = AssignVariableOp(%slot:0, %all:0) {writes=['slot']} !write
        """
    )
    assert ports(updates.before, outputs=True) == [("combined", "%tick:0")]
    assert [(s, roles(f), ops(f)) for s, f in updates.later.terms] == [
        (Site(0), [("gradient", "w"), ("combined", "%tick:0")], ["nw"]),
        (Site(1), [("gradient", "v"), ("combined", "%tick:0")], ["nv"]),
    ]
    assert (ops(updates.later.combine), ops(updates.later.after)) == (["all"], ["us"])


RETURNED = """
    %nw = Norm(%gw:0) -> (float32[])
    %nv = Norm(%gv:0) -> (float32[])
    %all = Add(%nw:0, %nv:0) -> (float32[])
    %uw = AssignSubVariableOp(%w:0, %gw:0) {writes=['w']} !write
    %uv = AssignSubVariableOp(%v:0, %gv:0) {writes=['v']} !write
    %us = AssignAddVariableOp(%step:0, %one:0) {writes=['step']} !write
    %rs = ReadVariableOp(%step:0) -> (int64[]) !read ^%us 'auto'
    %rw = ReadVariableOp(%w:0) -> (float32[4]) !read ^%uw 'auto'
    %rv = ReadVariableOp(%v:0) -> (float32[4]) !read ^%uv 'auto'
"""


def test_what_a_step_returns_is_given_by_the_part_that_computes_it() -> None:
    update = graph(INPUTS + RETURNED)
    outputs = tuple(Value(name) for name in ("all", "nw", "rs", "rw"))
    updates = cut_updates(update.replace(outputs=outputs), OWNER)
    assert updates.returned == (
        ("combined", "%all:0"),
        ("combined", "%nw:0"),
        ("combined", "%rs:0"),
        ("partial", "%rw:0"),
    )
    assert ports(updates.combine, outputs=True) == [("combined", "%all:0"), ("combined", "%nw:0")]
    assert ports(updates.after, outputs=True) == [("combined", "%rs:0")]
    assert ports(updates.stages[0][1], outputs=True) == [("partial", "%rw:0")]


def test_a_result_of_the_updated_variables_of_several_stages_is_computed_after_them() -> None:
    update = graph(INPUTS + RETURNED + "%both = Add(%rw:0, %rv:0) -> (float32[4])")
    updates = cut_updates(update.replace(outputs=(Value("both"), Value("nw"))), OWNER)
    assert updates.returned == (("combined", "%both:0"), ("combined", "%nw:0"))
    assert [ops(f) for _, f in updates.stages] == [["uw"], ["uv"]]
    assert [f.name for f in updates.later.functions] == [
        "round1/stage0/update_terms",
        "round1/stage1/update_terms",
        "round1/optimizer/combine",
    ]
    assert [ops(f) for f in updates.later.functions] == [["rw"], ["rv"], ["both"]]


def test_terms_that_read_what_forward_writes_are_computed_when_it_is_written() -> None:
    update = graph(
        INPUTS
        + UPDATES
        + """
        %rs = ReadVariableOp(%slot:0) -> (float32[4]) !read
        %rw = ReadVariableOp(%w:0) -> (float32[4]) !read ^%uw 'auto'
        %both = Add(%rs:0, %rw:0) -> (float32[4])
        """
    )
    updates = cut_updates(
        update.replace(outputs=(Value("rs"), Value("both"))), {**OWNER, "slot": Site(1)}, {}, {"slot"}
    )
    assert ops(updates.stages[1][1]) == ["rs", "uv"] or ops(updates.stages[1][1]) == ["uv", "rs"]
    assert [ops(f) for f in updates.later.functions] == [["rw"], ["rs"], ["both"]]


AVERAGE = """
    %uw = AssignSubVariableOp(%w:0, %gw:0) {writes=['w']} !write
    %rw = ReadVariableOp(%w:0) -> (float32[4]) !read ^%uw 'auto'
    %rv = ReadVariableOp(%v:0) -> (float32[4]) !read
    %sum = AddV2(%rw:0, %rv:0) -> (float32[4])
    %cv = AssignVariableOp(%v:0, %sum:0) {writes=['v']} !write ^%rv 'auto'
"""


def test_an_average_of_a_weight_of_another_stage_follows_it_in_the_next_round() -> None:
    updates = cut(AVERAGE)
    assert [(s, ops(f)) for s, f in updates.stages] == [(Site(0), ["uw"])]
    assert (updates.terms, updates.combine, updates.after) == ((), None, None)
    later = updates.later
    assert [(s, f.name, ops(f)) for s, f in later.terms] == [(Site(0), "round1/stage0/update_terms", ["rw"])]
    assert later.combine is None  # what only one stage needs goes there alone
    assert [(s, f.name, roles(f), ops(f)) for s, f in later.stages] == [
        (Site(1), "round1/stage1/update", [("variable", "v"), ("partial", "%rw:0")], ["rv", "sum", "cv"])
    ]


def test_an_old_value_that_a_later_round_needs_is_kept_where_it_is_read() -> None:
    updates = cut(
        """
        %old = ReadVariableOp(%w:0) -> (float32[4]) !read
        %uw = AssignSubVariableOp(%w:0, %gw:0) {writes=['w']} !write ^%old 'auto'
        %rw = ReadVariableOp(%w:0) -> (float32[4]) !read ^%uw 'auto'
        %moved = Sub(%rw:0, %old:0) -> (float32[4])
        %cv = AssignAddVariableOp(%v:0, %moved:0) {writes=['v']} !write
        """
    )
    assert ports(updates.stages[0][1], outputs=True) == [("partial", "%old:0")]
    assert [(roles(f), ops(f)) for _, f in updates.later.terms] == [
        ([("variable", "w"), ("partial", "%old:0")], ["rw", "moved"])
    ]


# The gradients are scaled by their norm, and those by theirs.
TWO_NORMS = """
    %nw = Norm(%gw:0) -> (float32[])
    %nv = Norm(%gv:0) -> (float32[])
    %norm = Add(%nw:0, %nv:0) -> (float32[])
    %cw = Mul(%gw:0, %norm:0) -> (float32[4])
    %cv = Mul(%gv:0, %norm:0) -> (float32[4])
    %n0 = Norm(%cw:0) -> (float32[])
    %n1 = Norm(%cv:0) -> (float32[])
    %again = Add(%n0:0, %n1:0) -> (float32[])
"""


def test_values_that_are_handed_over_twice_stay_apart() -> None:
    updates = cut(
        TWO_NORMS
        + """
        %old = ReadVariableOp(%w:0) -> (float32[4]) !read
        %dw = Mul(%cw:0, %again:0) -> (float32[4])
        %uw = AssignSubVariableOp(%w:0, %dw:0) {writes=['w']} !write ^%old 'auto'
        %rw = ReadVariableOp(%w:0) -> (float32[4]) !read ^%uw 'auto'
        %moved = Sub(%rw:0, %old:0, %norm:0) -> (float32[4])
        %cs = AssignAddVariableOp(%v:0, %moved:0) {writes=['v']} !write
        """
    )
    assert len(updates.rounds) == 3
    assert [(sorted(roles(f)), ops(f)) for _, f in updates.rounds[2].terms] == [
        ([("combined", "%norm:0"), ("partial", "%old:0"), ("variable", "w")], ["rw", "moved"])
    ]


def test_an_old_value_of_a_condition_cannot_be_kept() -> None:
    guard = "guard=['if', 'then_branch']"
    with refused(PartitionError, "the optimizer computes %old:0 in a condition, and needs it after it has updated"):
        cut(
            f"""
            %if = If(%flag:0) {{open=True}}
            %old = ReadVariableOp(%w:0) {{{guard}}} -> (float32[4]) !read ^%if 'condition'
            %uw = AssignSubVariableOp(%w:0, %gw:0) {{{guard}, writes=['w']}} !write ^%if 'condition' ^%old 'auto'
            %rw = ReadVariableOp(%w:0) {{{guard}}} -> (float32[4]) !read ^%if 'condition' ^%uw 'auto'
            %moved = Sub(%rw:0, %old:0) {{{guard}}} -> (float32[4])
            %cv = AssignAddVariableOp(%v:0, %moved:0) {{{guard}, writes=['v']}} !write ^%if 'condition'
            """
        )


def test_a_norm_of_what_a_norm_has_clipped_takes_another_round() -> None:
    updates = cut(
        TWO_NORMS
        + """
        %dw = Mul(%cw:0, %again:0) -> (float32[4])
        %dv = Mul(%cv:0, %again:0) -> (float32[4])
        %uw = AssignSubVariableOp(%w:0, %dw:0) {writes=['w']} !write
        %uv = AssignSubVariableOp(%v:0, %dv:0) {writes=['v']} !write
        """
    )
    assert [(f.name, ops(f)) for f in updates.functions] == [
        ("stage0/update_terms", ["nw"]),
        ("stage1/update_terms", ["nv"]),
        ("optimizer/combine", ["norm"]),
        ("round1/stage0/update_terms", ["cw", "n0"]),
        ("round1/stage1/update_terms", ["cv", "n1"]),
        ("round1/optimizer/combine", ["again"]),
        ("round1/stage0/update", ["cw", "dw", "uw"]),
        ("round1/stage1/update", ["cv", "dv", "uv"]),
    ]


def test_each_new_dependence_of_one_stage_on_another_is_a_round() -> None:
    updates = cut(
        AVERAGE
        + """
        %nv = ReadVariableOp(%v:0) -> (float32[4]) !read ^%cv 'auto'
        %aw = AssignVariableOp(%w:0, %nv:0) {writes=['w']} !write ^%rw 'auto' ^%uw 'auto'
        """
    )
    assert [(f.name, ops(f)) for f in updates.functions] == [
        ("stage0/update", ["uw"]),
        ("round1/stage0/update_terms", ["rw"]),
        ("round1/stage1/update", ["rv", "sum", "cv"]),
        ("round2/stage1/update_terms", ["nv"]),
        ("round2/stage0/update", ["aw"]),
    ]


def test_a_variable_that_the_model_reads_is_written_where_it_is_read() -> None:
    updates = cut_updates(
        graph(INPUTS + UPDATES + "%us = AssignVariableOp(%slot:0, %gw:0) {writes=['slot']} !write"),
        OWNER,
        {"slot": Site(1)},
    )
    assert ("variable", "slot") in ports(updates.stages[1][1])
    updates = cut_updates(
        graph(INPUTS + UPDATES + "%us = AssignVariableOp(%slot:0, %one:0) {writes=['slot']} !write"),
        OWNER,
        {"slot": Site(1)},
    )
    assert ops(updates.after) == ["us", "one"] or ops(updates.after) == ["one", "us"]


def test_a_sparse_gradient_is_taken_as_slices_and_indices() -> None:
    updates = cut(
        """
        %sw = arg() {port='w', role='slices'} -> (float32[?,4])
        %iw = arg() {port='w', role='indices'} -> (int64[?])
        %uw = ResourceScatterSub(%w:0, %iw:0, %sw:0) {writes=['w']} !write
        """
    )
    assert [(port.role, port.name) for port in updates.stages[0][1].inputs] == [
        ("variable", "w"),
        ("slices", "w"),
        ("indices", "w"),
    ]


SKIPPED = """
    %fw = Finite(%gw:0) -> (bool[])
    %fv = Finite(%gv:0) -> (bool[])
    %all = And(%fw:0, %fv:0) -> (bool[])
    %if = If(%all:0) {open=True}
    %s = ReadVariableOp(%slot:0) {guard=['if', 'then_branch']} -> (float32[]) !read ^%if 'condition'
    %dw = Div(%gw:0, %s:0) {guard=['if', 'then_branch']} -> (float32[4])
    %uw = AssignSubVariableOp(%w:0, %dw:0) {guard=['if', 'then_branch'], writes=['w']} !write ^%if 'condition'
    %dv = Div(%gv:0, %s:0) {guard=['if', 'then_branch']} -> (float32[4])
    %uv = AssignSubVariableOp(%v:0, %dv:0) {guard=['if', 'then_branch'], writes=['v']} !write ^%if 'condition'
    %tick = AssignAddVariableOp(%step:0, %one:0) {guard=['if', 'then_branch'], writes=['step']} !write ^%if 'condition'
    %half = AssignVariableOp(%slot:0, %one:0) {guard=['if', 'else_branch'], writes=['slot']} !write
    | ^%if 'condition' ^%s 'effect'
"""


def roles(function: Function | None) -> list[tuple[str, str]]:
    return [] if function is None else [(port.role, port.name) for port in function.inputs]


def test_a_condition_over_all_gradients_is_cut_behind_a_shared_predicate() -> None:
    updates = cut(SKIPPED)
    assert updates.before is None
    terms = [(s, roles(f), ops(f), [p.name for p in f.outputs]) for s, f in updates.terms]
    assert terms == [
        (Site(0), [("gradient", "w")], ["fw"], ["%fw:0"]),
        (Site(1), [("gradient", "v")], ["fv"], ["%fv:0"]),
    ]
    assert roles(updates.combine) == [("partial", "%fw:0"), ("partial", "%fv:0")]
    assert ops(updates.combine) == ["all"]
    assert [(s, roles(f), ops(f)) for s, f in updates.stages] == [
        (
            Site(0),
            [("gradient", "w"), ("variable", "slot"), ("variable", "w"), ("combined", "%all:0")],
            ["if", "s", "dw", "uw"],
        ),
        (
            Site(1),
            [("gradient", "v"), ("variable", "slot"), ("variable", "v"), ("combined", "%all:0")],
            ["if", "s", "dv", "uv"],
        ),
    ]
    assert [port for port in roles(updates.after) if port[0] != "variable"] == [("combined", "%all:0")]
    assert set(ops(updates.after)) == {"one", "if", "s", "tick", "half"}
    names = ["stage0/update_terms", "stage1/update_terms", "optimizer/combine", "stage0/update", "stage1/update"]
    assert [function.name for function in updates.functions] == [*names, "optimizer/after"]


def test_the_predicate_of_one_stage_is_sent_to_the_others() -> None:
    updates = cut(SKIPPED.replace("And(%fw:0, %fv:0)", "And(%fw:0)"))
    assert [(s, roles(f), ops(f)) for s, f in updates.terms] == [(Site(0), [("gradient", "w")], ["fw", "all"])]
    assert updates.combine is None
    assert all(("partial", "%all:0") in roles(f) for f in (*(f for _, f in updates.stages), updates.after))


READS_TWICE = """
    %t = ReadVariableOp(%step:0) {GUARD} -> (float32[4]) !read
    %tick = AssignAddVariableOp(%step:0, %one:0) {writes=['step']} !write ^%t 'auto'
    %n = ReadVariableOp(%step:0) -> (float32[4]) !read ^%tick 'auto'
    %uw = AssignSubVariableOp(%w:0, %t:0) {writes=['w']} !write
    %uv = AssignSubVariableOp(%v:0, %n:0) {writes=['v']} !write
    """


def test_what_a_shared_write_overwrites_is_read_before_it_for_the_stages() -> None:
    updates = cut(READS_TWICE.replace(" {GUARD}", ""))
    assert ports(updates.before, outputs=True) == [("combined", "%t:0")]
    assert ports(updates.stages[0][1]) == [("variable", "w"), ("combined", "%t:0")]
    assert ports(updates.stages[1][1]) == [("variable", "step"), ("variable", "v")]


def test_a_read_in_a_condition_of_what_a_shared_write_before_it_overwrites_is_refused() -> None:
    with refused(
        PartitionError, "the part of the optimizer of stage 0 reads 'step' ('t') before the optimizer writes it"
    ):
        cut("%if = If(%flag:0) {open=True}\n" + READS_TWICE.replace("GUARD", "guard=['if', 'then_branch']"))


def test_a_value_of_a_variable_is_sent_to_the_stages_that_write_it_elsewhere() -> None:
    updates = cut(
        """
        %rv = ReadVariableOp(%v:0) -> (float32[4]) !read
        %cw = AssignVariableOp(%w:0, %rv:0) {writes=['w']} !write
        %uv = AssignSubVariableOp(%v:0, %gv:0) {writes=['v']} !write ^%rv 'auto'
        """
    )
    assert [(s, ops(f)) for s, f in updates.terms] == [(Site(1), ["rv"])]
    assert [(roles(f), ops(f)) for _, f in updates.stages] == [
        ([("variable", "w"), ("partial", "%rv:0")], ["cw"]),
        ([("gradient", "v"), ("variable", "v")], ["rv", "uv"]),
    ]
    shared = cut(
        """
        %rw = ReadVariableOp(%w:0) -> (float32[4]) !read
        %cs = AssignVariableOp(%slot:0, %rw:0) {writes=['slot']} !write
        %rs = ReadVariableOp(%slot:0) -> (float32[4]) !read ^%cs 'auto'
        %uw = AssignSubVariableOp(%w:0, %rs:0) {writes=['w']} !write
        %uv = AssignSubVariableOp(%v:0, %rs:0) {writes=['v']} !write
        """
    )
    assert [(s, ops(f)) for s, f in shared.terms] == [(Site(0), ["rw"])]
    assert (roles(shared.before), ops(shared.before)) == ([("variable", "slot"), ("partial", "%rw:0")], ["cs"])


def test_an_op_that_reads_a_variable_of_another_stage_itself_is_refused() -> None:
    with refused(PartitionError, "uses the variable 'v', which stage 1 holds, in an update of stage 0"):
        cut("%call = StatefulPartitionedCall(%w:0, %v:0) {writes=['w']} !write")


def test_what_all_stages_write_of_the_old_value_of_one_is_sent_before_it_is_overwritten() -> None:
    updates = cut(
        """
        %rs = ReadVariableOp(%slot:0) -> (float32[4]) !read
        %uw = AssignSubVariableOp(%w:0, %rs:0) {writes=['w']} !write
        %us = AssignVariableOp(%slot:0, %gw:0) {writes=['slot']} !write ^%rs 'auto'
        %at = AssignVariableOp(%step:0, %rs:0) {writes=['step']} !write
        """
    )
    assert [(s, ops(f)) for s, f in updates.terms] == [(Site(0), ["rs"])]
    assert (roles(updates.after), ops(updates.after)) == ([("variable", "step"), ("partial", "%rs:0")], ["at"])


def test_a_variable_that_two_stages_give_values_to_is_written_by_all() -> None:
    updates = cut(
        UPDATES
        + """
        %rw = ReadVariableOp(%w:0) -> (float32[4]) !read ^%uw 'auto'
        %a = AssignAddVariableOp(%slot:0, %rw:0) {writes=['slot']} !write
        %rv = ReadVariableOp(%v:0) -> (float32[4]) !read ^%uv 'auto'
        %b = AssignAddVariableOp(%slot:0, %rv:0) {writes=['slot']} !write ^%a 'auto'
        """
    )
    assert [(s, ops(f)) for s, f in updates.later.terms] == [(Site(0), ["rw"]), (Site(1), ["rv"])]
    assert ops(updates.later.after) == ["a", "b"]
