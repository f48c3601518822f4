"""Columns of pictures whose spans are narrower than pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from dapple_tf.drawing.chart import COLOURS, Chart, Row, Span
from dapple_tf.drawing.png import measure_coverage, mix_colours
from dapple_tf.drawing.save import save_chart

spans = st.lists(st.tuples(st.integers(0, 64), st.integers(0, 64), st.integers(0, 2)), max_size=12)


@given(spans)
def test_coverage_is_the_part_of_each_column_that_spans_overlap(drawn: list[tuple[int, int, int]]) -> None:
    """Eighths of columns, and a sum over all pairs of columns and spans."""
    pairs = [(min(a, b) / 8, max(a, b) / 8, row) for a, b, row in drawn]
    left, right = (np.array([pair[i] for pair in pairs], np.float64) for i in (0, 1))
    found = measure_coverage(left, right, np.array([row for *_, row in pairs], np.int64), 3, 8)
    wanted = [
        [sum(max(0.0, min(b, x + 1) - max(a, x)) for a, b, own in pairs if own == row) for x in range(8)]
        for row in range(3)
    ]
    assert found == pytest.approx(np.array(wanted), abs=1e-12)


def test_colours_are_mixed_by_coverage_and_what_is_not_covered_is_transparent() -> None:
    covered = np.array([[[1.0, 0.25, 0.0]], [[0.0, 0.25, 0.0]]])
    mixed = mix_colours(covered, np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]))
    assert mixed.tolist() == [[[1.0, 0.0, 0.0, 1.0], [0.5, 0.0, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0]]]


def test_a_picture_of_very_many_spans_shows_both_kinds_idle_time_and_the_critical_path(tmp_path: Path) -> None:
    count = 20_000
    alternating = [
        Span(0, f"{m}", "forward" if m < count // 2 else "backward", float(m), m + 0.9, m, critical=m < count // 4)
        for m in range(count)
    ]
    rows = Row("stage 0", until=2.0 * count), Row("0 to 1", network=True), Row("stage 1", until=2.0 * count)
    save_chart(Chart("many", 2.0 * count, rows, tuple(alternating)), tmp_path / "many.png")
    picture = imread(tmp_path / "many.png")[..., :3]
    for kind in ("forward", "backward"):
        colour = 0.9 * np.array(to_rgb(COLOURS[kind])) + 0.1 * np.array(to_rgb("#e9e9ee"))
        near = np.abs(picture - colour).max(axis=2) < 0.04
        assert near.sum() > 10_000, kind
