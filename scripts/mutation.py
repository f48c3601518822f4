"""Mutation testing: make random changes in a folder's code one at a time, and report for how many the tests fail.

    python scripts/mutation.py FOLDER TESTS

Uses cosmic-ray, which needs an environment of its own: ``python3 -m venv out/mutation && out/mutation/bin/pip install
cosmic-ray==8.*``. It changes a git worktree of the last commit in a temporary folder, not the working tree. Type
annotations such as ``str | None`` are not changed, since no test can notice that.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Print each mutation with which all tests pass (it survives), and the share of those with which a test fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="whose modules are mutated, such as graph_passes/passes")
    parser.add_argument("tests", nargs="+", help="tests that must fail")
    parser.add_argument("--mutants", type=int, default=40, help="mutations to try; default 40")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--cosmic-ray", type=Path, default=ROOT / "out" / "mutation" / "bin" / "cosmic-ray")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tree, session = Path(name) / "tree", Path(name) / "session.sqlite"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--quiet", "--detach", tree], check=True)
        try:
            tests = " ".join(options.tests)
            command = f"{sys.executable} -m pytest -x -q -m 'not slow' -p no:cacheprovider {tests}"
            config = Path(name) / "config.toml"
            config.write_text(
                f"[cosmic-ray]\nmodule-path = {json.dumps(options.folder)}\ntimeout = 600.0\nexcluded-modules = []\n"
                f"test-command = {json.dumps(command)}\n[cosmic-ray.distributor]\nname = 'local'\n"
            )
            environment = {**os.environ, "PYTHONPATH": str(tree), "HYPOTHESIS_PROFILE": "ci"}

            def run(*words: str | Path) -> None:
                subprocess.run([options.cosmic_ray, *words], cwd=tree, env=environment, check=True)

            run("baseline", config)  # fails unless the tests pass without a mutation
            run("init", config, session)
            keep_sample(session, tree, options.mutants, options.seed)
            run("exec", config, session)
            return report(session)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


def keep_sample(session: Path, tree: Path, count: int, seed: int) -> None:
    """Draw ``count`` of the session's mutations at random, and delete the others. ``tree`` has the files."""
    with sqlite3.connect(session) as database:
        rows = database.execute(
            "select job_id, module_path, operator_name, start_pos_row, start_pos_col from mutation_specs "
            "order by module_path, start_pos_row, start_pos_col, operator_name, occurrence"
        ).fetchall()
        annotated = {path: find_annotations((tree / path).read_text()) for _, path, *_ in rows}
        jobs = [job for job, path, _, line, column in rows if not annotated[path](line, column)]
        kept = set(random.Random(seed).sample(jobs, min(count, len(jobs))))
        for job in {row[0] for row in rows} - kept:
            database.execute("delete from mutation_specs where job_id = ?", (job,))
            database.execute("delete from work_items where job_id = ?", (job,))


def find_annotations(source: str) -> Callable[[int, int], bool]:
    """Return a function that takes a line and a column, and returns whether an annotation of the module is there."""
    nodes = list(ast.walk(ast.parse(source)))
    found = [getattr(node, field, None) for node in nodes for field in ("annotation", "returns")]
    spans = [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)) for node in found if node
    ]
    return lambda line, column: any(begin <= (line, column) <= end for begin, end in spans)


def report(session: Path) -> int:
    """Print the mutations that survive, and the share of those that tests kill; return 0."""
    with sqlite3.connect(session) as database:
        rows = database.execute(
            "select module_path, start_pos_row, operator_name, test_outcome, diff from mutation_specs "
            "join work_results using (job_id) order by module_path, start_pos_row"
        ).fetchall()
    survived = [row for row in rows if "SURVIVED" in str(row[3]).upper()]
    for path, line, operator, _, diff in survived:
        changed = [text for text in str(diff).splitlines() if text[:1] in "+-" and text[:3] not in ("+++", "---")]
        print(f"{path}:{line}: {operator} survives\n  " + "\n  ".join(changed))
    killed = len(rows) - len(survived)
    print(f"{killed} of {len(rows)} mutations are killed ({100 * killed / max(1, len(rows)):.0f}%)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
