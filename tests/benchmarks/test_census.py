"""Every op of the installed TensorFlow has a class, and the classes agree with what the analysis does."""

from __future__ import annotations

import re

import pytest
import tensorflow as tf

from benchmarks.census import GROUPS, OpClass, census, census_markdown, classify_op
from dapple_tf import internals


def test_every_op_of_the_installed_tensorflow_is_in_one_class() -> None:
    found = census()
    listed = [op for names in found.values() for op in names]
    assert sorted(listed) == sorted(internals.op_names())
    assert {op_class for op_class, _ in found} == set(OpClass)


def test_an_op_that_is_in_no_class_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.raw_ops, "AnOpOfTomorrow", object(), raising=False)
    monkeypatch.setattr(internals, "op_names", lambda: ["AddV2", "AnOpOfTomorrow"])
    with pytest.raises(KeyError, match="AnOpOfTomorrow is in no class"):
        census()


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("AddV2", OpClass.RULED),
        ("StatelessRandomNormalV2", OpClass.RULED),
        ("RandomStandardNormal", OpClass.RULED),
        ("AssignAddVariableOp", OpClass.RULED),
        ("Unique", OpClass.COUPLES),
        ("MapDataset", OpClass.MEANINGLESS),
        ("_FusedMatMul", OpClass.MEANINGLESS),
        ("ResourceApplyAdam", OpClass.MEANINGLESS),
        ("Cross", OpClass.EXPERIMENT),
    ],
)
def test_the_class_of_an_op(op: str, expected: OpClass) -> None:
    found = classify_op(op)
    assert found is not None
    assert found[0] is expected


def test_each_pattern_of_a_group_names_an_op_that_no_rule_and_no_earlier_group_has() -> None:
    names = [op for (op_class, _), ops in census().items() for op in ops]
    for group in GROUPS:
        own = [op for op in names if (found := classify_op(op)) is not None and found[1] == group.reason]
        for pattern in group.names.split():
            assert any(re.fullmatch(pattern, op) for op in own), (group.reason, pattern)


def test_the_table_counts_every_op() -> None:
    counts = [int(row.split("|")[3]) for row in census_markdown().splitlines()[2:]]
    assert sum(counts) == len(internals.op_names())
