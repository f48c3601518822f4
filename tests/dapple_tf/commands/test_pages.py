"""Web pages of comparisons, timelines and runs fit a window of 1100 pixels."""

from __future__ import annotations

from pathlib import Path

import dapple_tf as dapple
from dapple_tf.commands.run_file import read_run
from dapple_tf.commands.run_page import make_run_page
from tests.browser import find_cut_pages, needs_chromium
from tests.dapple_tf.commands.command_line import TINY_MODEL, Run
from tests.dapple_tf.planner.builders import make_cluster, make_profile


@needs_chromium
def test_comparisons_timelines_and_reports_fit_the_window(tmp_path: Path, run_here: Run) -> None:
    profile, cluster = make_profile(*[(1, 2, 1, 1, 20)] * 16), make_cluster(8)
    sixteen = make_cluster(*[1] * 16)
    pages = [tmp_path / name for name in ("compare.html", "long schedules.html", "step.html", "run.html")]
    dapple.compare(profile, cluster, global_batch_size=64).save(pages[0])
    names = ["best", "spp", "autopipe"]  # with K of all stages, and sliced micro-batches
    dapple.compare(profile, sixteen, global_batch_size=64, planners=names).save(pages[1])
    plan = dapple.plan(profile, cluster, global_batch_size=8, planner="gpipe")
    dapple.simulate(plan, profile, cluster).save(pages[2])
    run_here("train", TINY_MODEL, "--stages", 2, "--steps", 3, "--record", tmp_path / "run.jsonl")
    pages[3].write_text(make_run_page(read_run(tmp_path / "run.jsonl")))
    assert find_cut_pages(pages, [1100], tmp_path) == []
