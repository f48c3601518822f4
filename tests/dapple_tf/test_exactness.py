"""The table of reasons for which a step differs from one device's."""

from __future__ import annotations

from dapple_tf.exactness import Exactness, Inexactness

NORM = Inexactness("net/norm", "normalises by its micro-batch", "documented", documented=True)
PAIRS = Inexactness("net/pairs", "multiplies samples with each other", "pass batch_loss=True")


def test_no_reasons_are_exact() -> None:
    assert Exactness().exact
    assert str(Exactness()) == "exact: loss, gradients, variables and state equal those of one device"
    assert Exactness().undocumented == ()


def test_windows_are_exact_minibatch_by_minibatch() -> None:
    text = str(Exactness(windows=True))
    assert text.startswith("exact, each minibatch by itself")
    assert "updates old" in text


def test_documented_reasons_are_inexact_but_no_errors() -> None:
    assert not Exactness((NORM,)).exact
    assert Exactness((NORM,)).undocumented == ()
    assert Exactness((NORM, PAIRS)).undocumented == (PAIRS,)


def test_batch_norm_is_no_reason_where_one_micro_batch_is_the_whole_batch() -> None:
    draw = Inexactness("net/draw", "draws a number in each stage", "give a seed", documented=True, uncut=True)
    assert [Exactness((reason,)).exact_uncut for reason in (NORM, PAIRS, draw)] == [True, False, False]


def test_a_reason_as_a_sentence() -> None:
    assert str(PAIRS) == "net/pairs: multiplies samples with each other. pass batch_loss=True"


def test_the_table_has_a_line_for_each_reason() -> None:
    lines = str(Exactness((NORM, PAIRS))).splitlines()
    assert all(title in lines[0] for title in ("layer", "why the step differs", "remedy"))
    (pairs,) = (line for line in lines if "net/pairs" in line)
    assert "multiplies samples with each other" in pairs
    assert "batch_loss=True" in pairs
    assert any("net/norm" in line and "documented" in line for line in lines)


def test_long_reasons_are_wrapped() -> None:
    table = str(Exactness((Inexactness("net/long", "why " * 60, "do this " * 30),)))
    assert max(map(len, table.splitlines())) <= 120
    assert table.count("why") >= 60
