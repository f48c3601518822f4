#!/usr/bin/env python3
"""Measure coverage: run tests, and print the share of lines and branches that ran in each folder as a Markdown table.

    python scripts/coverage_by_folder.py TREE DATA [ARGUMENT OF PYTEST ...]

TREE is a checkout of this project. DATA is a folder for the measured data of all processes, also of those that tests
start. Without arguments for pytest no test runs, and the table shows the data that are in DATA. coverage.py must be
installed for this Python: ``.venv/bin/pip install coverage==7.*``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

SOURCE = ("dapple_tf", "graph_passes", "profiler")


def main() -> int:
    """Run the tests if there are arguments for pytest, and print the table; return pytest's exit code."""
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    tree, data = (Path(word).resolve() for word in sys.argv[1:3])
    data.mkdir(parents=True, exist_ok=True)
    settings = data / "settings.ini"
    sources = "".join(f"    {tree / folder}\n" for folder in SOURCE)
    settings.write_text(
        f"[run]\nbranch = True\nparallel = True\nsigterm = True\ndata_file = {data / 'run'}\nsource =\n{sources}"
        "disable_warnings = no-data-collected,module-not-measured,module-not-imported,couldnt-parse\n"
    )
    code = 0
    if sys.argv[3:]:
        environment = {**os.environ, "PYTHONPATH": str(tree), "COVERAGE_PROCESS_START": str(settings)}
        tests = [sys.executable, "-m", "pytest", "-q", *sys.argv[3:]]
        code = subprocess.run(tests, cwd=tree, env=environment, check=False).returncode
    for name, lines, branches in rows_of(tree, data, settings):
        print(f"| {name} | {lines} | {branches} |")
    return code


def rows_of(tree: Path, data: Path, settings: Path) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table: a folder, the share of its lines that ran, and that of its branches."""
    files = [str(path) for path in data.glob("run.*")]
    with tempfile.TemporaryDirectory() as folder:
        combined, report = f"{folder}/all", f"{folder}/report.json"
        run = [sys.executable, "-m", "coverage"]
        options = [f"--rcfile={settings}", f"--data-file={combined}"]
        subprocess.run([*run, "combine", "--quiet", "--keep", *options, *files], cwd=tree, check=True)
        subprocess.run([*run, "json", "--quiet", "--ignore-errors", *options, "-o", report], cwd=tree, check=True)
        measured = json.loads(Path(report).read_text("utf-8"))["files"]
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for path, found in measured.items():
        parts = (tree / path).resolve().relative_to(tree).parts
        for name in ("all", "/".join(parts[: 2 if parts[0] != "profiler" and len(parts) > 2 else 1])):
            keys = ("covered_lines", "num_statements", "covered_branches", "num_branches")
            counts[name] = [a + found["summary"][key] for a, key in zip(counts[name], keys, strict=True)]
    yield from [("folder", "lines", "branches"), ("---", "---", "---")]
    for name, (lines, of_lines, branches, of_branches) in sorted(counts.items()):
        yield name, _share(lines, of_lines), _share(branches, of_branches)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}% of {whole:,}" if whole else "-"


if __name__ == "__main__":
    sys.exit(main())
