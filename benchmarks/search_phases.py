"""Measure each phase of planner "best": the steps of its plans and the CPU seconds without that phase.

A phase is taken out by editing a copy of the package, in which the C++ is compiled again: the search has no options for
this. A phase without which no plan gets slower by more than 0.1% should go.
``python -m benchmarks search_phases --phases descent "joint search" --cases VGG`` measures some of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common import Row, run_for_json
from benchmarks.papers.published import BERT_LARGE, MODELS, PROFILES, find_missing_profiles, read_profile
from benchmarks.papers.transformer_profiles import GPT2_345M, transformer_profile
from dapple_tf.planner.api import plan
from dapple_tf.profiler.cluster import Cluster, config
from dapple_tf.profiler.profile import Profile

ROOT = Path(__file__).parents[1]
CASES = PROFILES.parent / "planner-cases"
_NATIVE = "simulator/native/"
_SEARCH, _MOVES, _STAGES, _MAIN = (_NATIVE + name for name in ("search.h", "moves.h", "stage_planner.h", "planner.cc"))
_BEST = "planner/best.py"
_VARIANTS = "{Variant{true, false, false}, {false, false, false}, {true, true, false}, {true, true, true}}"
# Of each phase the file of the package, the text that does it, and the text that takes its place.
PHASES = {
    "baselines": (_BEST, "candidates = leading_baselines(problem) or", "candidates = []\n    candidates +="),
    "starts: two stages": (_SEARCH, "if (p_.workers && p_.workers != 2) return runs;", "return runs;"),
    "starts: scattered devices": (
        _SEARCH,
        "for (const bool interleave : {false, true}) {",
        "for (const bool interleave : {false}) {",
    ),
    "starts: other warm-ups": (_SEARCH, "for (const int ahead : {1, -1, -2, -4}) {", "for (const int ahead : {2}) {"),
    "starts: with contention": (_MAIN, "search.rank(runs, true);", ""),
    "planned: servers in turn": (_SEARCH, "together > 1; together", "together < 0; together"),
    "planned: pools of kinds": (_SEARCH, "    found.emplace_back(p_.kinds);", "    return found;"),
    "planned: servers of a kind in turn": (
        _SEARCH,
        "return std::pair(-speed(a), local[a]) < std::pair(-speed(b), local[b]);",
        "return speed(a) > speed(b);",
    ),
    "planned: stages that re-compute": (_STAGES, "recompute = p_.may_recompute &&", "recompute = false &&"),
    "planned: devices in the order of servers": (_STAGES, "  std::sort(found.begin(), found.end());\n", ""),
    "moves: devices that change rows": (_MOVES, "if (kind == 3 || have == 0)", "if (true)"),
    "searches that begin with what was found": (_MAIN, "add(second, distinct(found, 16, 4));", "(void)found;"),
    "starts: planned": (_MAIN, "planned ? search.planned_starts() : search.even_starts()", "search.even_starts()"),
    "planned: without AllReduce": (_STAGES, _VARIANTS, _VARIANTS.replace(", {false, false, false}", "")),
    "planned: with AllReduce": (_STAGES, _VARIANTS, _VARIANTS.replace("{true, false, false}, {", "{")),
    "planned: with transfers": (_STAGES, _VARIANTS, _VARIANTS.replace(", {true, true, false}", "")),
    "planned: shorter later stages": (_STAGES, _VARIANTS, _VARIANTS.replace(", {true, true, true}", "")),
    "estimate: devices in order": (_MAIN, "in_order(Search::kInOrder, number + 1, 16);", "(void)number;"),
    "estimate: devices scattered": (_MAIN, "in_order(Search::kScattered, number + 2, 8);", "{}"),
    "estimate: any devices": (_MAIN, "in_order(Search::kFree, number + 3, 16);", "{}"),
    "annealing of 48": (
        _MAIN,
        "auto free = search.anneal(second, amount / 3, 0.05, 0.0005, model, Search::kFree, seed * 10 + 3);",
        "auto free = second;",
    ),
    "annealing of 14": (
        _MAIN,
        "kept = search.anneal(kept, amount / 3, 0.05, 0.0005, model, Search::kFree, seed * 10 + 4);",
        "",
    ),
    "annealing of 7": (
        _MAIN,
        "kept = search.anneal(kept, amount / 4, 0.03, 0.0005, model, Search::kFree, seed * 10 + 5);",
        "",
    ),
    "annealing of 3": (
        _MAIN,
        "last = search.anneal(last, amount * 3 / 20, 0.01, 0.0003, model, Search::kFree, seed * 10 + 6);",
        "",
    ),
    "starts: several of a shape": (
        _MAIN,
        "start_sets.push_back(distinct(runs, 48, 4));",
        "start_sets.push_back(distinct(runs, 24, 1));",
    ),
    "longer searches after a faster layout": (_MAIN, "(faster && done < most && !*stop)", "false"),
    "joint search": (_MAIN, "if (searches > 1) {", "if (false) {"),
    "descent": (_MAIN, "search.descend(last, all / 5, contention);", ""),
    "descent: more than three cuts together": (
        _SEARCH,
        "other < best.stages() && left > 0",
        "other < std::min(best.stages(), boundary + 3) && left > 0",
    ),
    "end: stages not re-computed": (_MAIN, "if (!run.layout.recompute[s]) continue;", "continue;"),
    "end: more in flight": (
        _MAIN,
        "for (int more = 1; more <= stages; more *= 2) {",
        "for (int more = 1; more < 0; ++more) {",
    ),
    "half of the searches": (
        _BEST,
        "_SEARCHES, _SEARCHES_ON_FEW, _MORE_SEARCHES = 4, 6, 12",
        "_SEARCHES, _SEARCHES_ON_FEW, _MORE_SEARCHES = 2, 3, 6",
    ),
    "half of the work": (
        _BEST,
        "_WORK, _WORK_OF_A_DEVICE = 14_000_000, 800_000",
        "_WORK, _WORK_OF_A_DEVICE = 7_000_000, 400_000",
    ),
}


def run() -> Iterator[Row]:
    """Yield a row for each phase, over all cases."""
    yield from measure_phases(tuple(PHASES), "")


def measure_phases(phases: Sequence[str], cases: str) -> Iterator[Row]:
    """Yield a row for each of these phases, over the cases whose names contain ``cases``."""
    if why := find_missing_profiles():
        yield Row("phases of planner best", "some plan more than 0.1% slower without it", why, True)
        return
    whole = measure_without("", cases)
    yield Row("all phases", "-", f"{sum(cpu for _, cpu in whole.values()):.1f} s of CPU, {len(whole)} cases", True)
    for phase in phases:
        found = measure_without(phase, cases)
        more = {name: found[name][0] / seconds - 1 for name, (seconds, _) in whole.items()}
        worst = max(more, key=lambda name: more[name])
        slower, faster = (sum(sign * part > 0.001 for part in more.values()) for sign in (1, -1))
        mean = math.exp(sum(math.log1p(part) for part in more.values()) / len(more)) - 1
        cpu = sum(cpu for _, cpu in found.values()) / sum(cpu for _, cpu in whole.values()) - 1
        steps = f"{slower} slower, {faster} faster, mean {mean:+.2%}, at most {more[worst]:+.1%} ({worst})"
        yield Row(f"without {phase}", "some plan more than 0.1% slower", f"{steps}; CPU {cpu:+.0%}", slower > 0)


def measure_without(phase: str, cases: str) -> dict[str, tuple[float, float]]:
    """Return, by case, the step (seconds) of the plan found without ``phase``, and the CPU seconds of planning."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "dapple_tf"
        shutil.copytree(ROOT / "dapple_tf", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        if phase:
            name, old, new = PHASES[phase]
            text = (package / name).read_text()
            if text.count(old) != 1:
                raise ValueError(f"phase {phase!r}: {name} has its text {text.count(old)} times; correct PHASES")
            (package / name).write_text(text.replace(old, new))
        variables = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "XDG_CACHE_HOME": folder}
        command = [sys.executable, "-m", "benchmarks.search_phases", cases]
        found: dict[str, tuple[float, float]] = run_for_json(
            command, folder=Path(folder), variables=variables, timeout=3600
        )
    return found


def list_cases() -> Iterator[tuple[str, Profile, Cluster, int]]:
    """Yield name, profile, cluster and batch of the published profiles, a GPT-2, and ../shared/planner-cases."""
    for model in (*MODELS, BERT_LARGE):
        for letter in "abc":
            yield f"{model.title} on {letter.upper()}", read_profile(model), config(letter), model.global_batch
    for letter, devices in (("a", 8), ("c", 8), ("a", 16)):
        name = f"{GPT2_345M.title} on {letter.upper()}:{devices}"
        yield name, transformer_profile(GPT2_345M, 1), config(letter, devices), 64
    for folder in sorted(CASES.iterdir()) if CASES.is_dir() else ():
        if (folder / "profile.json").is_file():
            other = next(path for path in sorted(folder.glob("*.json")) if path.stem not in ("profile", "cluster"))
            batch = json.loads(other.read_text())["global_batch_size"]
            yield folder.name, Profile.load(folder / "profile.json"), Cluster.load(folder / "cluster.json"), batch


def measure_cases(cases: str) -> dict[str, tuple[float, float]]:
    """Return the step of each case's plan and the CPU seconds of planning, of this process's package."""
    found, warm = dict[str, tuple[float, float]](), False
    for name, profile, cluster, batch in list_cases():
        if cases not in name:
            continue
        if not warm:
            plan(replace(profile), config("a", 2), global_batch_size=batch)  # compiles the library
            warm = True
        begin = time.process_time()
        made = plan(profile, cluster, global_batch_size=batch)
        assert made.predicted is not None, "plans of a planner have it"
        found[name] = made.predicted["step_seconds"], time.process_time() - begin
    return found


def main(arguments: Sequence[str]) -> int:
    """Print the rows of these phases and cases; return 1 if a phase is worth nothing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks search_phases")
    parser.add_argument("--phases", nargs="+", choices=list(PHASES), default=list(PHASES))
    parser.add_argument("--cases", default="", help="only those whose names contain this text")
    options = parser.parse_args(arguments)
    missed = 0
    for row in measure_phases(options.phases, options.cases):
        print(f"| {row.figure} | {row.wanted} | {row.measured} | {'ok' if row.ok else 'MISSED'} |", flush=True)
        missed += not row.ok
    return 1 if missed else 0


if __name__ == "__main__":
    print(json.dumps(measure_cases(sys.argv[1])))
