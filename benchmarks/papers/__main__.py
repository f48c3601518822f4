"""Make the papers' tables and figures and write docs/papers.md: ``python -m benchmarks.papers [NAME ...]``.

Without names all those are made that take minutes. What is made is kept in benchmarks/papers/results, from where the
page takes the others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import dapple_tf as dapple
from benchmarks.papers import (
    analytic,
    autopipe_figures,
    bapipe_figures,
    dapple_figures,
    pipedream_figures,
    spp_figures,
    staleness,
)
from benchmarks.papers.figure import Exhibit, write_section, write_summary
from benchmarks.papers.published import find_missing_profiles

PAGE = Path(__file__).parents[2] / "docs" / "papers.md"

EXHIBITS: Mapping[str, Callable[[], Exhibit]] = {
    "analytic": analytic.exhibit,
    "dapple-table-2": analytic.table_2,
    "dapple-figure-3": dapple_figures.figure_3,
    "dapple-table-4": dapple_figures.table_4,
    "dapple-table-5": dapple_figures.table_5,
    "dapple-table-6": dapple_figures.table_6,
    "dapple-table-7": dapple_figures.table_7,
    "dapple-table-8": dapple_figures.table_8,
    "dapple-figure-12": dapple_figures.figure_12,
    "dapple-figure-14": dapple_figures.figure_14,
    "pipedream-table-1": pipedream_figures.table_1,
    "pipedream-figure-11": staleness.exhibit,
    "pipedream-figure-17": pipedream_figures.figure_17,
    "pipedream-figure-18": pipedream_figures.figure_18,
    "bapipe-tables-1-2": bapipe_figures.tables_1_and_2,
    "bapipe-table-3": bapipe_figures.table_3,
    "spp-table-3": spp_figures.table_3,
    "spp-figures-6-10": spp_figures.figures_6_to_10,
    "spp-figure-11": spp_figures.figure_11,
    "autopipe-table-2": autopipe_figures.table_2,
    "autopipe-figures-9-10": autopipe_figures.figures_9_and_10,
    "autopipe-figures-12-13": autopipe_figures.figures_12_and_13,
    "autopipe-figure-14": autopipe_figures.figure_14,
}
HOURS = frozenset({"pipedream-figure-11"})
"""The exhibits that are made only when they are named."""

_HEAD = """# The papers' tables and figures

Each number of a paper that can be made again, beside ours: {command}. Ours are simulated from the profiles that the
papers' authors published, unless the text says that they were measured. "What the paper says" counts in how many cases
it is so here. The order of a group agrees if any two numbers of it that differ in the paper differ in the same
direction here. OOM: out of memory. Where "ours" has a range, it is over what the paper leaves open.

"""


def main(names: list[str]) -> int:
    """Make the named exhibits and write the page; return 2 for an unknown name, 1 where the profiles are missing."""
    unknown = [name for name in names if name not in EXHIBITS]
    if unknown:
        print(f"no exhibit is called {unknown[0]!r}; there are {', '.join(EXHIBITS)}", file=sys.stderr)
        return 2
    if why := find_missing_profiles():
        print(why, file=sys.stderr)
        return 1
    for name in names or [name for name in EXHIBITS if name not in HOURS]:
        begin = time.process_time()
        EXHIBITS[name]().save(name)
        print(f"{name}: {time.process_time() - begin:.0f} s of CPU", flush=True)
    write_page()
    return 0


def write_page() -> None:
    """Write docs/papers.md from what is kept."""
    found = [exhibit for name in EXHIBITS if (exhibit := Exhibit.load(name)) is not None]
    head = _HEAD.format(command="`make papers`")
    PAGE.write_text(head + write_summary(found) + "\n" + "\n".join(map(write_section, found)))


if __name__ == "__main__":
    dapple.init(8)
    sys.exit(main(sys.argv[1:]))
