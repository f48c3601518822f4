"""``dapple.compare``: rows, their order and reasons, and the files that they are saved in."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import dapple_tf as dapple
from dapple_tf.errors import OutputError, PlanError
from dapple_tf.planner.compare import Comparison
from dapple_tf.planner.registry import PLANNERS
from dapple_tf.plans import Plan
from tests.dapple_tf.planner.builders import AMPLE, make_cluster, make_profile
from tests.graph_passes.builders import refused

LAYERS = [(1, 2, 1, 1, 20)] * 4


def compare(*servers: int, memory: float = AMPLE, **options: Any) -> Comparison:
    cluster = make_cluster(*servers, memory=memory)
    return dapple.compare(make_profile(*LAYERS), cluster, global_batch_size=8, **options)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    """All planners; "alpa-inter" cannot use servers of different sizes."""
    return compare(2, 1)


def test_every_planner_has_a_row_the_fastest_first(comparison: Comparison) -> None:
    assert {row.planner for row in comparison.rows} == set(PLANNERS)
    seconds = [row.step_seconds for row in comparison.rows]
    assert seconds == pytest.approx(sorted(seconds), rel=1e-8, abs=0)
    assert comparison.fastest == comparison.rows[0]
    assert comparison.rows[0].reason == "fastest"
    assert all(row.planner_seconds > 0 for row in comparison.rows)


def test_of_plans_equal_but_for_rounding_bests_is_first() -> None:
    comparison = compare(1)
    assert len({f"{row.step_seconds:.9g}" for row in comparison.rows}) == 1, "one device has one plan"
    assert comparison.rows[0].planner == "best"


def test_a_row_has_the_plan_that_the_planner_makes(comparison: Comparison) -> None:
    (row,) = [row for row in comparison.rows if row.planner == "dp"]
    plan = dapple.plan(make_profile(*LAYERS), make_cluster(2, 1), global_batch_size=8, planner="dp")
    assert row.plan == plan
    assert (row.step_seconds, row.bubble) == (plan.predicted["step_seconds"], plan.predicted["bubble"])
    assert row.peak_memory_bytes == max(plan.predicted["peak_memory_bytes"])
    assert (row.notation, row.acr) == ("DP", 0.0)
    assert sum(row.parts.values()) == pytest.approx(row.step_seconds)
    # 12 s for 4 samples; one of three devices has 3 of 8. 80 bytes through a ring with a link of 1 byte/s.
    assert row.parts["compute"] == pytest.approx(24 * 3 / 8)
    assert row.parts["allreduce"] == pytest.approx(2 * 2 / 3 * 80)
    assert "times as long: AllReduce after the last backward takes 1" in row.reason


def test_plans_may_be_compared_without_contention() -> None:
    profile, cluster = make_profile(*[(1, 2, 4, 1, 20)] * 6), make_cluster(2, 2, 2)
    found = dapple.compare(profile, cluster, global_batch_size=8, planners=["gpipe", "dapple"], contention=False)
    with_contention = []
    for row in found.rows:
        assert row.plan is not None
        assert dapple.simulate(row.plan, profile, cluster, contention=False).step_seconds == row.step_seconds
        with_contention.append(dapple.simulate(row.plan, profile, cluster).step_seconds)
    assert any(seconds > row.step_seconds for seconds, row in zip(with_contention, found.rows, strict=True))


def test_a_planner_that_refuses_the_input_says_why_behind_the_others(comparison: Comparison) -> None:
    last = comparison.rows[-1]
    assert (last.planner, last.plan, last.bubble, last.peak_memory_bytes) == ("alpa-inter", None, None, None)
    assert last.step_seconds == float("inf")
    assert "1, 2 devices" in last.reason


def test_a_planner_without_a_plan_that_fits_says_so() -> None:
    found = compare(1, 1, memory=200, planners=["dp", "piper"])
    assert [row.planner for row in found.rows] == ["piper", "dp"]
    assert "fits the devices' memory" in found.rows[1].reason


def test_where_nothing_fits_there_is_no_fastest() -> None:
    found = compare(1, memory=20, planners=["dp", "gpipe"])
    assert found.fastest is None
    assert found.to_json()["fastest"] is None
    assert "dp: no plan" in str(found)


def test_a_comparison_cannot_be_changed(comparison: Comparison) -> None:
    with pytest.raises(FrozenInstanceError):
        comparison.rows = ()  # type: ignore[misc]  # the assignment that must fail


def test_as_text_it_is_a_table_and_the_reasons(comparison: Comparison) -> None:
    lines = str(comparison).splitlines()
    assert lines[0] == "net on 3 devices, a batch of 8 samples"
    assert " ".join(lines[1].split()) == "planner plan micro-batches schedule step bubble ACR memory planned in"
    assert [line.split()[0] for line in lines[2 : 2 + len(PLANNERS)]] == [row.planner for row in comparison.rows]
    assert lines[-1] == f"alpa-inter: {comparison.rows[-1].reason}"


def test_saved_as_json(comparison: Comparison, tmp_path: Path) -> None:
    comparison.save(tmp_path / "c.json")
    data = json.loads((tmp_path / "c.json").read_text())
    assert data == json.loads(json.dumps(comparison.to_json()))
    assert data["format"] == "dapple-comparison/1"
    assert data["rows"][-1]["step_seconds"] is None
    (tmp_path / "plan.json").write_text(json.dumps(data["rows"][0]["plan"]))
    assert Plan.load(tmp_path / "plan.json") == comparison.rows[0].plan


class Page(HTMLParser):
    """The text of a page's cells, row by row; ``open`` are the elements that are not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.rows and self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_saved_as_a_page(comparison: Comparison, tmp_path: Path) -> None:
    comparison.save(tmp_path / "c.html")
    page = Page()
    page.feed((tmp_path / "c.html").read_text())
    assert not page.open
    assert [row[0] for row in page.rows] == ["planner", *(row.planner for row in comparison.rows)]
    assert {len(row) for row in page.rows} == {len(page.rows[0])}
    assert [row[-1] for row in page.rows[1:]] == [row.reason for row in comparison.rows]


def test_the_page_has_the_cluster_and_each_different_plan_once(comparison: Comparison, tmp_path: Path) -> None:
    comparison.save(tmp_path / "c.html")
    text = (tmp_path / "c.html").read_text()
    plans = {row.plan.stages for row in comparison.rows if row.plan is not None}
    assert text.count('<svg class="plan"') == 1 + len(plans)
    assert "<h2>The cluster</h2>" in text
    headings = [line for line in text.splitlines() if line.startswith("<h2>")][1:]
    named = [name for line in headings for name in line.removeprefix("<h2>").partition(":")[0].split(", ")]
    assert sorted(named) == sorted(row.planner for row in comparison.rows if row.plan is not None)


def test_names_in_a_page_are_escaped(tmp_path: Path) -> None:
    profile = make_profile(*LAYERS, model="<script>")
    found = dapple.compare(profile, make_cluster(1), global_batch_size=8, planners=["dp"])
    found.save(tmp_path / "c.html")
    assert "<script>" not in (tmp_path / "c.html").read_text()


def test_saved_as_a_picture(comparison: Comparison, tmp_path: Path) -> None:
    comparison.save(tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_another_suffix_is_refused(comparison: Comparison, tmp_path: Path) -> None:
    with refused(OutputError, "c.txt: a comparison is saved as .png, .html or .json"):
        comparison.save(tmp_path / "c.txt")


def test_planners_that_do_not_exist_and_none_are_refused() -> None:
    with refused(PlanError, "'megatron'", "piper"):
        compare(1, planners=["megatron"])
    with refused(PlanError, "planners is empty"):
        compare(1, planners=[])


def test_planners_given_as_a_text_are_told() -> None:
    with pytest.raises(
        PlanError, match=r"planners is the string 'dp': give a list of names, such as \['best', 'dapple'\]"
    ):
        compare(2, planners="dp")
    with pytest.raises(PlanError, match=r"no planner is called 'bets' \(did you mean 'best'\?\)"):
        compare(2, planners=["bets"])
