"""Tables as plain text: alignment, wrapping, and no control characters."""

from __future__ import annotations

import pytest

from dapple_tf.drawing.table import format_table


def test_first_columns_are_aligned_left_and_the_others_right() -> None:
    assert format_table(("layer", "ms", "MB"), [("a", "1.5", "2"), ("long name", "12.5", "300")], left=1) == [
        "layer        ms   MB",
        "a           1.5    2",
        "long name  12.5  300",
    ]


def test_a_table_without_rows_has_its_header() -> None:
    assert format_table(("a", "b"), []) == ["a  b"]


def test_cells_are_wrapped_only_where_a_width_is_given() -> None:
    rows = [("x" * 300, "1")]
    assert format_table(("name", "n"), rows, left=1)[1] == "x" * 300 + "  1"
    lines = format_table(("name", "n"), rows, left=1, width=80)
    assert max(map(len, lines)) <= 80
    assert "".join(line.split()[0] for line in lines[1:]) == "x" * 300


def test_text_is_taken_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert format_table(("[red]a", ":smile:"), [("[b]1[/b]", "2")]) == ["  [red]a  :smile:", "[b]1[/b]        2"]
