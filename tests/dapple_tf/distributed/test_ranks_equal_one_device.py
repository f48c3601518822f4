"""Ranks under mpirun train as one device does: any layout, and whatever crosses between ranks.

The cases of a number of ranks share one launch, for a process takes seconds to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.dapple_tf.distributed.launches import check_equal, launch
from tests.dapple_tf.distributed.programs.cases import CASES
from tests.processes import needs_horovod

pytestmark = needs_horovod

# Cases beyond these are left to `make test-all`.
QUICK = {
    2: [
        *("1:1 float64", "DP 2 float64", "1:1 float32", "momentum, scheduled", "a last batch of one", "tied", "aux"),
        "regularized",
        *("integers and booleans", "bfloat16 crosses", "two unknown axes", "batch norm", "a GRU"),
        *("bfloat16 weights, 2", "complex64 weights, 2"),
        *("DP 2, overlap, M = 1", "DP 2, overlap, M = 4"),
        "dropout, recompute",
    ],
    3: [
        *("2:1 float64", "1:2 float64", "1:1:1 float64", "a short last batch", "tied, user replicated", "skips"),
        *("integers and booleans, split", "dropout, replicated"),
        *("2:1, overlap", "tied, overlap", "regularized, 2:1", "1:1:1, zb-h1", "2:1, overlap, zb-h1"),
        "2:1, overlap, recompute",
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
    ranks = found(name)
    if CASES[name].equal:
        check_equal(name, ranks)
    else:
        check_that_it_trains(ranks)


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


@pytest.mark.parametrize(
    "name", ["regularized, 2:1", "1:1:1 float64", "1:2:1 float64", "straight 4 float64", "DP 4 float64"]
)
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


# Of each stage: a layer multiplies once in forward and twice in backward, but the first needs no gradient of its input.
MULTIPLICATIONS = {"straight 4 float64": (2, 3, 3, 3), "1:2:1 float64": (2, 6, 3), "DP 4 float64": (11,)}


@pytest.mark.parametrize("name", MULTIPLICATIONS)
def test_a_ranks_graph_is_its_own_part_and_nothing_else(name: str) -> None:
    outcomes = found(name)
    for stage, devices in enumerate(outcomes[0]["plan"]):
        for replica, rank in enumerate(devices):
            names = [node.split("/") for node in outcomes[rank]["nodes"]]
            assert {parts[0] for parts in names if parts[0].startswith("stage")} == {f"stage{stage}"}
            calls = {tuple(parts[1:3]) for parts in names if parts[0].startswith("stage") and len(parts) == 4}
            assert calls == {(f"replica{replica}", f"mb{i}") for i in range(2)}
            library = outcomes[rank]["library"]
            # Forward, backward, and a sum for each micro-batch; the stage's update, and the optimizer's own after it.
            assert len(library) <= 6
            assert sum(function.count("MatMul") for function in library) == MULTIPLICATIONS[name][stage]


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
