"""Values that an optimizer computes from the gradients of several stages, cut into terms and their combination."""

from __future__ import annotations

from dapple_tf.graph_passes.analysis.update_terms import UpdateTerms, find_terms
from dapple_tf.graph_passes.ir.graph import Value
from dapple_tf.graph_passes.ir.names import Site
from tests.graph_passes.builders import graph

OWNER = {"w": Site(0), "u": Site(0), "v": Site(1)}

INPUTS = """
    %gw = arg() {port='w'} -> (float32[4])
    %gu = arg() {port='u'} -> (float32[4])
    %gv = arg() {port='v'} -> (float32[4])
    %w = variable() -> (resource[])
    %v = variable() -> (resource[])
    %slot = variable() -> (resource[])
    %scale = variable() -> (resource[])
"""
NORM = """
    %nw = Norm(%gw:0) -> (float32[])
    %nu = Norm(%gu:0) -> (float32[])
    %nv = Norm(%gv:0) -> (float32[])
    %of0 = Add(%nw:0, %nu:0) -> (float32[])
    %all = Pack(%of0:0, %nv:0) -> (float32[2])
    %norm = Sum(%all:0) -> (float32[])
    %cw = Mul(%gw:0, %norm:0) -> (float32[4])
    %cv = Mul(%gv:0, %norm:0) -> (float32[4])
    %uw = AssignSubVariableOp(%w:0, %cw:0) {writes=['w']} !write
    %uv = AssignSubVariableOp(%v:0, %cv:0) {writes=['v']} !write
"""


def find(text: str) -> UpdateTerms:
    return find_terms(graph(INPUTS + text), OWNER)


def test_a_norm_is_cut_where_values_of_two_stages_meet() -> None:
    terms = find(NORM)
    assert terms.combining == {"all", "norm"}
    assert terms.partial == ((Value("of0"), Site(0)), (Value("nv"), Site(1)))
    assert terms.combined == (Value("norm"),)


def test_an_update_of_each_stage_by_itself_has_no_terms() -> None:
    terms = find("%uw = AssignSubVariableOp(%w:0, %gw:0) {writes=['w']} !write")
    assert (terms.combining, terms.partial, terms.combined) == (frozenset(), (), ())
    assert terms.needs == {"uw": {"uw", "w", "gw"}}


def test_values_of_no_stage_are_computed_where_they_are_needed() -> None:
    scaled = NORM.replace("Sum(%all:0)", "Div(%all:0, %s:0)")
    terms = find("%s = ReadVariableOp(%scale:0) -> (float32[]) !read" + scaled)
    assert terms.combining == {"all", "norm"}
    assert terms.partial == ((Value("of0"), Site(0)), (Value("nv"), Site(1)))


def test_a_slot_is_of_the_stage_whose_update_reads_it() -> None:
    """Stage 0 sums its gradients in a slot, and the norm is that of the slot."""
    slot = NORM.replace("Norm(%gw:0)", "Norm(%sum:0)").replace("Mul(%gw:0, %norm:0)", "Mul(%sum:0, %norm:0)")
    terms = find("%sum = ReadVariableOp(%slot:0) -> (float32[4]) !read" + slot)
    assert terms.slots["slot"] == {Site(0)}
    assert terms.partial == ((Value("of0"), Site(0)), (Value("nv"), Site(1)))


def test_what_a_predicate_needs_is_needed_by_all_that_it_guards() -> None:
    terms = find(
        """
        %s = ReadVariableOp(%scale:0) -> (bool[]) !read
        %if = If(%s:0) {open=True}
        %uw = AssignSubVariableOp(%w:0, %gw:0) {guard=['if', 'then_branch'], writes=['w']} !write ^%if 'condition'
        """
    )
    assert terms.needs == {"uw": {"uw", "w", "gw", "if", "s", "scale"}}
    assert terms.slots == {"scale": {Site(0)}}
