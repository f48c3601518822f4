"""Report which tables of benchmarks/README.md are older than the code that they measure.

    python scripts/stale_tables.py

Each table names the commit that it was measured on: "Measured on commit `1a2b3c4`." A table is old if a file that its
benchmark imports, directly or indirectly, has changed since that commit. The clone must have the whole history. The
exit code is 1 if a table names no commit, or one that is not in the history.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGES = ("dapple_tf", "benchmarks")
_SECTION = re.compile(r"^### (\w+)$", re.MULTILINE)
_COMMIT = re.compile(r"Measured on commit `([0-9a-f]{7,40})`")


def find_sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the benchmark's name and the text of each section that has a table."""
    parts = _SECTION.split(text)
    for name, section in zip(parts[1::2], parts[2::2], strict=True):
        if re.search(r"^\|", section, re.MULTILINE):
            yield name, section


def list_changes(commit: str, modules: set[str]) -> list[str] | None:
    """Return the files of these modules that have changed since ``commit``; None if there is no such commit."""
    command = ["git", "diff", "--name-only", commit, "HEAD", "--", "*.py", "*.cc", "*.h"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        return None
    changed = {
        Path(re.sub("^models/", "dapple_tf/examples/", re.sub("^(?=(graph_passes|profiler)/)", "dapple_tf/", name)))
        for name in found.stdout.splitlines()  # inside the package, these folders are symbolic links
    }
    imported = {Path(*module.split(".")) for module in modules}
    native = {path.parent for path in imported if path.name == "library"}  # C++ beside the module that loads it
    return sorted(
        str(path)
        for path in changed
        if path.with_suffix("") in imported
        or path.parent in native
        or (path.name == "__init__.py" and path.parent in imported)
    )


def main() -> int:
    """Print for each table whether it is older than the code; return the exit code."""
    graph = grimp.build_graph(PACKAGES[0], *PACKAGES[1:])
    missing = 0
    for name, section in find_sections((ROOT / "benchmarks" / "README.md").read_text()):
        module = next(name for name in (f"benchmarks.{name}", f"benchmarks.papers.{name}") if name in graph.modules)
        given = _COMMIT.search(section)
        changes = list_changes(given[1], {module, *graph.find_upstream_modules(module)}) if given else None
        if given is None or changes is None:
            missing += 1
            print(f"{name}: {'no commit is named' if given is None else f'commit {given[1]} is unknown'}")
        elif changes:
            print(f"{name}: older than {len(changes)} files that it measures, such as {changes[0]} ({given[1]})")
        else:
            print(f"{name}: as new as the code ({given[1]})")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
