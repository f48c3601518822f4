"""Launches of ``compare_ranks``, each of several cases, for a process takes seconds to start."""

from __future__ import annotations

import functools
import json
from typing import Any

from tests.dapple_tf.distributed.programs.cases import CASES
from tests.processes import MPIRUN, Launcher, run_ranks


@functools.cache
def launch(names: tuple[str, ...], launcher: Launcher = MPIRUN) -> dict[str, list[dict[str, Any]]]:
    """By case, what each rank found."""
    arguments = ["-m", "tests.dapple_tf.distributed.programs.compare_ranks", *names]
    ranks = run_ranks(arguments, CASES[names[0]].ranks, timeout_seconds=250, launcher=launcher)
    lines = [[json.loads(line) for line in rank.stdout.splitlines() if line.startswith("{")] for rank in ranks]
    return {name: [found[i] for found in lines] for i, name in enumerate(names)}


def check_equal(name: str, ranks: list[dict[str, Any]]) -> None:
    """Assert that what the ranks found in a case is what one device computes."""
    case = CASES[name]
    assert len(ranks) == case.ranks
    compared: set[str] = set()
    for rank, outcome in enumerate(ranks):
        assert outcome["case"] == name
        errors = {what: e for what, e in outcome["errors"].items() if not any(word in what for word in case.apart)}
        worst = max(errors, key=lambda what: errors[what])
        assert errors[worst] <= case.tolerance, f"{worst} on rank {rank} differs by {errors[worst]:.1e}"
        compared |= {what.removeprefix("value of ") for what in outcome["errors"]}
    assert set(ranks[0]["wanted"]) <= compared  # every variable has a rank that trains it
    assert len({str(outcome["losses"]) for outcome in ranks}) == 1
