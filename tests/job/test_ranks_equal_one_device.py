"""Ranks under mpirun train as one device does: any layout, and whatever crosses between ranks.

The cases of a number of ranks share one launch, for a process takes seconds to start.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.job.cases import CASES
from tests.processes import needs_horovod, run_ranks

pytestmark = needs_horovod

# Cases beyond these are left to `make test-all`.
QUICK = {
    2: [
        *("1:1 float64", "DP 2 float64", "1:1 float32", "momentum, scheduled", "a last batch of one", "tied", "aux"),
        *("integers and booleans", "bfloat16 crosses", "two unknown axes", "batch norm"),
    ],
    3: [
        *("2:1 float64", "1:2 float64", "1:1:1 float64", "a short last batch", "tied, user replicated", "skips"),
        *("integers and booleans, split", "aux, replicated", "dropout, replicated"),
    ],
    4: [
        *("2:2 float64", "3:1 float64", "1:2:1 float64", "straight 4 float64", "DP 4 float64"),
        *("skips over two stages", "batch norm, replicated"),
    ],
}
GPT = "gpt, 50 steps"
SLOW = {
    ranks: [n for n, case in CASES.items() if case.ranks == ranks and n not in quick and n != GPT]
    for ranks, quick in QUICK.items()
}


@functools.cache
def launch(names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """By case, what each rank found."""
    ranks = run_ranks(["-m", "tests.job.compare_ranks", *names], CASES[names[0]].ranks, timeout_seconds=250)
    lines = [[json.loads(line) for line in rank.stdout.splitlines() if line.startswith("{")] for rank in ranks]
    return {name: [found[i] for found in lines] for i, name in enumerate(names)}


def found(name: str) -> list[dict[str, Any]]:
    """What each rank found in a case; runs all cases of its launch at the first call."""
    ranks = CASES[name].ranks
    names = next((names for names in (QUICK[ranks], SLOW[ranks]) if name in names), [name])
    return launch(tuple(names))[name]


def marked(names: dict[int, list[str]], *marks: Any) -> Sequence[Any]:
    return [pytest.param(name, marks=marks) for group in names.values() for name in group]


@pytest.mark.parametrize(
    "name", [*marked(QUICK), *marked(SLOW, pytest.mark.slow), *marked({4: [GPT]}, pytest.mark.slow)]
)
def test_ranks_equal_one_device(name: str) -> None:
    case, ranks = CASES[name], found(name)
    assert len(ranks) == case.ranks
    if not case.equal:
        return check_that_it_trains(ranks)
    compared: set[str] = set()
    for rank, outcome in enumerate(ranks):
        assert outcome["case"] == name
        errors = {what: e for what, e in outcome["errors"].items() if not any(word in what for word in case.apart)}
        worst = max(errors, key=lambda what: errors[what])
        assert errors[worst] <= case.tolerance, f"{worst} on rank {rank} differs by {errors[worst]:.1e}"
        compared |= {what.removeprefix("value of ") for what in outcome["errors"]}
    assert set(ranks[0]["wanted"]) <= compared  # every variable has a rank that trains it
    assert len({str(outcome["losses"]) for outcome in ranks}) == 1
    return None


def check_that_it_trains(ranks: list[dict[str, Any]]) -> None:
    losses = [outcome["losses"] for outcome in ranks]
    assert losses == [losses[0]] * len(ranks)
    assert np.isfinite(losses[0]).all()
    assert len(set(losses[0])) == len(losses[0])


@pytest.mark.parametrize("name", ["DP 2 float64", "2:2 float64", "DP 4 float64", "dropout, replicated"])
def test_replicas_end_with_the_same_values(name: str) -> None:
    outcomes = found(name)
    for devices in outcomes[0]["plan"]:
        values = [outcomes[rank]["values"] for rank in devices]
        assert values[0]
        assert values == [values[0]] * len(devices)


@pytest.mark.parametrize("name", ["1:1:1 float64", "1:2:1 float64", "straight 4 float64", "DP 4 float64"])
def test_a_rank_holds_its_stage_and_nothing_else(name: str) -> None:
    outcomes = found(name)
    plan = outcomes[0]["plan"]
    shared = {"slot iteration", "slot learning_rate"}
    seen: set[str] = set()
    for stage, devices in enumerate(plan):
        for rank in devices:
            functions = set(outcomes[rank]["functions"]) - {"optimizer/after", "optimizer/before"}
            assert functions == {f"stage{stage}/{what}" for what in ("forward", "backward", "update")}
        held = [set(outcomes[rank]["held"]) - shared for rank in devices]
        assert held == [held[0]] * len(devices)
        assert held[0]
        assert not held[0] & seen
        seen |= held[0]
    assert seen == set(outcomes[0]["wanted"]) - shared


def test_batch_norm_state_is_the_mean_of_the_replicas() -> None:
    """Replica r holds half r of each micro-batch of four: samples 0-1 and 4-5, 2-3 and 6-7."""
    name = "batch norm, replicated"
    values = found(name)[0]["values"]
    means = [np.zeros(4), np.zeros(4)]
    for x, _ in CASES[name].batches():
        means = [means[0] / 2 + means[1] / 2] * 2
        for replica in (0, 1):
            for begin in (2 * replica, 2 * replica + 4):
                means[replica] = 0.5 * means[replica] + 0.5 * x.numpy()[begin : begin + 2].mean(axis=0)
    wanted = (means[0] + means[1]) / 2
    moving = next(value for key, value in values.items() if "first" in key and "moving_mean" in key)
    np.testing.assert_allclose(moving, wanted, rtol=1e-12)
