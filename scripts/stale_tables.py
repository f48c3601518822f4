"""Report which tables of benchmarks/README.md are older than the code that they measure.

Each table names the commit that it was measured on: "Measured on commit `1a2b3c4`." A table is old where a file that
its benchmark imports, directly or not, has changed since. Run it in a clone with the whole history:
``python scripts/stale_tables.py``. Exit code 1: a table names no commit, or one that the history does not have.
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
    """Yield the name and the text of each section that has a table."""
    parts = _SECTION.split(text)
    for name, section in zip(parts[1::2], parts[2::2], strict=True):
        if re.search(r"^\|", section, re.MULTILINE):
            yield name, section


def list_changes(commit: str, modules: set[str]) -> list[str] | None:
    """Return those of the modules whose files have changed since ``commit``; None for an unknown commit."""
    command = ["git", "diff", "--name-only", commit, "HEAD", "--", "*.py", "*.cc", "*.h"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        return None
    changed = {
        Path(re.sub("^models/", "dapple_tf/examples/", re.sub("^(?=(graph_passes|profiler)/)", "dapple_tf/", name)))
        for name in found.stdout.splitlines()  # the package has links to these folders
    }
    own = {Path(*module.split(".")) for module in modules}
    native = {path.parent for path in own if path.name == "library"}  # C++ beside the module that loads it
    return sorted(
        str(path)
        for path in changed
        if path.with_suffix("") in own or path.parent in native or (path.name == "__init__.py" and path.parent in own)
    )


def main() -> int:
    """Print a line for each table."""
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
