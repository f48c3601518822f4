"""The frame of the papers' figures by hand, and what the papers claim, as statements on the published profiles.

Other claims have their tests elsewhere: that planner "best" is never slower than data parallelism and straight plans
(``test_published_profiles``), that policy B gains with the ACR on measured links (``test_policies``), that the Slicer
halves the start-up (``test_slicer``), Lemmas 1 and 2 and Theorem 1 of SPP on random models (``test_spp``), BaPipe's
Tables 1 and 2 (``simulator/test_bapipe``), and that weight stashing converges (``test_convergence``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers import __main__ as page
from benchmarks.papers import figure as frame
from benchmarks.papers.analytic import KINDS, Kernels, Rates, Work, fit, totals
from benchmarks.papers.figure import OOM, Exhibit, Figure, claim, same_order, write_section, write_summary
from benchmarks.papers.published import BERT, GNMT, MODELS, Model, find_missing_profiles, read_calibrated
from dapple_tf.planner.api import make_problem, run_planner
from dapple_tf.planner.baselines import data_parallel, even_pipeline
from dapple_tf.planner.planning_problem import PlanningProblem
from dapple_tf.planner.search.dapple import formula_latency
from dapple_tf.plans import StagePlan
from dapple_tf.profiler.cluster import config
from dapple_tf.profiler.profile import LayerCost, Profile

needs_profiles = pytest.mark.skipif(bool(find_missing_profiles()), reason=find_missing_profiles())


def number(paper: float, ours: float, group: str = "g", name: str = "n", unit: str = "s") -> Figure:
    return Figure(group, name, paper, ours, unit)


# --- The frame


@pytest.mark.parametrize(
    ("paper", "ours", "verdict"),
    [
        (10, 10.9, "within 10%"),
        (10, 9.1, "within 10%"),
        (10, 12.4, "within 25%"),
        (10, 12.6, "further"),
        (0, 0, "within 10%"),
        (0, 1, "further"),
        (OOM, OOM, "within 10%"),
        (OOM, 1, "further"),
        (1, OOM, "further"),
    ],
)
def test_how_close_a_number_is(paper: float, ours: float, verdict: str) -> None:
    assert number(paper, ours).verdict == verdict


def test_the_order_of_a_group() -> None:
    assert same_order([number(1, 5), number(2, 6), number(3, 70)])
    assert not same_order([number(1, 5), number(2, 4)])
    assert same_order([number(1, 5), number(1, 4)])  # equal in the paper: any order will do
    assert not same_order([number(1, 5), number(2, 5)])
    assert same_order([number(1, 5), number(OOM, 1), number(2, 6)])


def test_a_claim_counts_cases() -> None:
    found = claim("it rises", [True, False, True])
    assert (found.paper, found.ours, found.unit) == (3, 2, "cases")


EXHIBIT = Exhibit(
    "Paper, Table 1",
    "What is compared.",
    (
        number(1, 1.05, "model", "one"),
        replace(number(2, 3, "model", "two"), why="reason", span=(2, 4)),
        number(OOM, OOM, "other", "three"),
        claim("it rises", [True]),
    ),
    "the command",
    ("picture.png",),
)


def test_the_section_of_an_exhibit() -> None:
    lines = write_section(EXHIBIT).splitlines()
    assert lines[:5] == ["## Paper, Table 1", "", "What is compared.", "", "`the command`"]
    assert lines[-4:] == [
        "| model | one, s | 1 | 1.05 | +5% |  |",
        "| model | two, s | 2 | 3 (2 to 4) | +50% | reason |",
        "| other | three, s | OOM | OOM |  |  |",
        "| what the paper says | it rises | 1 | 1 |  |  |",
    ]


def test_the_summary_counts_figures_and_groups() -> None:
    *_, first, everything = write_summary([EXHIBIT]).splitlines()
    assert first == "| [Paper, Table 1](#paper-table-1) | 4 | 3 | 3 | 1 | 1 of 1 |"
    assert everything == "| all | 4 | 3 | 3 | 1 | 1 of 1 |"


def test_an_exhibit_is_kept_and_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(frame, "RESULTS", tmp_path / "results")
    assert Exhibit.load("table-1") is None
    EXHIBIT.save("table-1")
    found = Exhibit.load("table-1")
    assert found is not None
    assert write_section(found) == write_section(EXHIBIT)


def test_every_exhibit_is_kept_and_on_the_page() -> None:
    text = page.PAGE.read_text()
    for name in page.EXHIBITS:
        found = Exhibit.load(name)
        assert found is not None, name
        assert write_section(found) in text
        assert found.command == f"python -m benchmarks.papers {name}"
        assert all((frame.PICTURES / picture).is_file() for picture in found.pictures)


def test_an_unknown_exhibit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert page.main(["dapple-table-9"]) == 2
    assert "no exhibit is called 'dapple-table-9'; there are analytic, dapple-table-2, " in capsys.readouterr().err


def test_fitted_rates_are_those_that_made_the_totals() -> None:
    """Two models of kernels that differ in size, and of single numbers, which the host computes."""
    rates = Rates({"product": 0.5, "convolution": 2.0, "other": 0.8}, 1e-5)
    numbers = np.random.default_rng(0)
    profile = Profile("m", 1, "V100", tuple(LayerCost(name, 0.0, 0.0, 0.0, 0.0, 0.0) for name in "ab"))
    works = []
    for _ in range(4):
        parts = [
            Kernels(
                numbers.integers(len(KINDS), size=60),
                numbers.integers(2, size=60),
                np.ones(60),
                10 ** numbers.uniform(-7, -3, size=60),
                numbers.random(60) < 0.9,
            )
            for _ in range(2)
        ]
        work = Work(profile, parts[0], parts[1], 0.0, 0.0)
        works.append((work, totals(work.at(rates))))
    found = fit(works)
    assert found.efficiency == pytest.approx(rates.efficiency, rel=0.02)
    assert found.launch_seconds == pytest.approx(1e-5, rel=0.05)
    seconds = works[0][0].at(rates).layers
    assert sum(layer.forward_seconds for layer in seconds) == pytest.approx(works[0][1][0])


# --- What the papers claim


@needs_profiles
def test_dapples_memory_does_not_grow_with_the_micro_batches_and_gpipes_does() -> None:
    """DAPPLE, III.B: "the peak memory requirement is independent of M due to early backward scheduling"."""
    peaks: dict[str, list[float]] = {"dapple-a": [], "dapple-b": [], "gpipe": []}
    for name, found in peaks.items():
        for m in (8, 16, 32):
            problem = make_problem(
                read_calibrated(BERT), config("a", 4), global_batch_size=2 * m, micro_batch_size=2, contention=False
            )
            timeline = problem.simulate(problem.make_plan(even_pipeline(problem, 4), 2, name, "even"))
            found.append(max(timeline.peak_memory_bytes))
    assert len(set(peaks["dapple-a"])) == len(set(peaks["dapple-b"])) == 1
    assert peaks["gpipe"][2] - peaks["gpipe"][1] == pytest.approx(2 * (peaks["gpipe"][1] - peaks["gpipe"][0]))
    assert peaks["gpipe"][0] > peaks["dapple-b"][0] > peaks["dapple-a"][0]


@needs_profiles
@pytest.mark.parametrize("model", [BERT, GNMT], ids=lambda model: model.title)
def test_policy_b_gains_with_the_ratio_of_communication(model: Model) -> None:
    """DAPPLE, VI.D: where the ACR is high, there is a notable difference between the policies; where it is small, none.

    Two equal stages of one device each; the link between them gets slower.
    """
    gains, ratios = [], []
    for slower in (1, 2, 4, 8):
        cluster = config("b", 2).with_faster_links(1 / slower)
        profile = read_calibrated(model)
        size = profile.batch_size
        problem = make_problem(profile, cluster, global_batch_size=16 * size, micro_batch_size=size, contention=False)
        stages = even_pipeline(problem, 2)
        a, b = (
            problem.simulate(problem.make_plan(stages, size, policy, "even")) for policy in ("dapple-a", "dapple-b")
        )
        gains.append(a.step_seconds / b.step_seconds)
        ratios.append(a.acr)
    assert all(before < after for before, after in itertools.pairwise(ratios))
    assert all(before <= after for before, after in itertools.pairwise(gains))
    assert gains[0] >= 1
    assert gains[-1] > 1.05


@needs_profiles
@pytest.mark.parametrize("letter", ["a", "c"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.title)
def test_dapples_planner_is_never_slower_than_dp_and_straight_by_its_formulas(model: Model, letter: str) -> None:
    """DAPPLE, VI.B: "we treat DP and straight as special cases of general DAPPLE plans", so its choice is no slower."""
    problem = make_problem(
        read_calibrated(model),
        config(letter, 4),
        global_batch_size=model.global_batch,
        optimizer_slots=model.slots,
        contention=False,
    )
    result = run_planner(problem, "dapple")
    assert result.formula_seconds is not None
    fractions = replace(problem, whole_rows=False)
    others = [
        latency
        for stages in (data_parallel(problem), even_pipeline(problem, 4))
        for latency in latencies(problem, fractions, stages)
    ]
    assert others or model.title == "AmoebaNet-36"
    assert result.formula_seconds <= min(others, default=math.inf) * (1 + 1e-9)


def latencies(problem: PlanningProblem, fractions: PlanningProblem, stages: Sequence[StagePlan]) -> list[float]:
    """Return the latencies by formulas 1 to 3 at all sizes at which the stages hold the warm-up of policy A."""
    found = [c for c in problem.evaluate_all_sizes(stages, "known") if ":D=" not in c.schedule]
    return [formula_latency(fractions, c.stages, c.micro_batch_size) for c in found]
