"""The op table: complete, consistent, and printed for the documentation."""

from __future__ import annotations

import re

import pytest

from dapple_tf.graph_passes.ir.graph import ROLES
from dapple_tf.graph_passes.ir.ops import INPUT_OPS, OPS, Attribute, AttributeType, OpName, ops_table_markdown
from dapple_tf.graph_passes.schedules.schedule import CALL_OF_KIND
from tests.paths import ROOT


def test_the_table_has_each_op_name_once() -> None:
    assert list(OPS) == [name.value for name in OpName]
    assert all(OPS[name].name is name for name in OpName)


@pytest.mark.parametrize("name", OpName)
def test_an_entry_says_what_the_op_means_and_what_its_operands_are(name: OpName) -> None:
    op = OPS[name]
    assert op.meaning.endswith(".")
    assert op.inputs.meaning
    assert op.outputs.meaning
    names = [attribute.name for attribute in op.attributes]
    assert len(set(names)) == len(names)
    for operands in (op.inputs, op.outputs):
        if isinstance(operands.count, str):
            counted = op.attribute(operands.count)
            assert counted.required
            assert counted.type.startswith("tuple")
        elif operands.count is not None:
            assert len(operands.dtypes) <= operands.count


def test_an_op_has_a_place_on_a_replica_a_place_in_a_micro_batch_or_none() -> None:
    places = {tuple(a.name for a in op.place if a.required) for op in OPS.values()}
    assert places == {(), ("stage", "replica"), ("stage", "replica", "micro_batch")}
    assert [a.required for a in OPS["update"].place] == [False, False]  # the optimizer's shared steps have no place


def test_the_calls_of_a_schedule_s_actions_are_ops() -> None:
    assert set(CALL_OF_KIND.values()) <= OPS.keys()


def test_the_inputs_of_stage_functions_are_no_call_level_ops() -> None:
    assert set(ROLES) - {"loss", "aux"} | {"capture"} == INPUT_OPS
    assert not INPUT_OPS & OPS.keys()


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("bool", True, 1),
        ("int", 1, True),
        ("int", 0, 0.0),
        ("float", 1.0, 1),
        ("str", "a", b"a"),
        ("tuple[int, ...]", (1, 2), (1, "2")),
        ("tuple[int, ...]", (), (True,)),
        ("tuple[str, ...]", ("a",), "a"),
        ("tuple[str, ...]", (), (1,)),
    ],
)
def test_an_attribute_accepts_values_of_its_type_only(kind: AttributeType, good: object, bad: object) -> None:
    attribute = Attribute("key", kind)
    assert attribute.accepts(good)
    assert not attribute.accepts(bad)


def test_an_op_name_prints_as_the_op() -> None:
    assert f"{OpName.FORWARD}" == str(OpName.FORWARD) == "forward"
    assert f"{OpName.FORWARD!r}" == "'forward'"
    assert OpName("forward") is OpName.FORWARD


def test_the_table_prints_as_markdown() -> None:
    lines = ops_table_markdown().splitlines()
    assert lines[:2] == [
        "| Op | Meaning | Inputs | Outputs | Attributes | Place |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    assert len(lines) == 2 + len(OPS)
    assert {line.count(" | ") for line in lines} == {5}
    rows = {line.split("`")[1]: line for line in lines[2:]}
    assert rows.keys() == OPS.keys()
    assert rows["barrier"].endswith("| none | none; on a rank, a token | [`ranks`: tuple[int, ...]] |  |")
    assert rows["clip"] == (
        "| `clip` | Scale a stage's gradients so that the global norm is at most `limit`; the last `slices` of them "
        "are sparse. | the global norm, the dense gradients, then slices and their indices (the first: float64) | the "
        "scaled gradients, all as dense tensors | `limit`: float, [`slices`: int] | stage, replica |"
    )
    assert rows["timestamp"].endswith("| the time (float64) |  | [stage], [replica], [micro_batch] |")


def test_no_pass_or_analysis_spells_the_name_of_an_op() -> None:
    """Op names come from ``OpName``; the pass's own name, and ``kind`` and ``direction`` of others, are no op names."""
    spelled = re.compile(r"nodes_of\([^)]*\"|\.op (?:==|!=|in) \(?\"(?:" + "|".join(OPS) + r")\"|Node\([^,]+, \"")
    folders = ("passes", "analysis", "ir")
    files = [path for folder in folders for path in (ROOT / "graph_passes" / folder).glob("*.py")]
    found = [f"{path.name}: {line}" for path in files for line in path.read_text().splitlines() if spelled.search(line)]
    assert [line for line in found if '"Identity' not in line] == []
