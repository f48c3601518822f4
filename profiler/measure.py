"""Measuring on a noisy machine: repeats in turn, medians, a stated spread. Knows nothing of what is measured."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LEAST_ROUNDS = 3
"""Rounds that are taken however long they last: fewer have no median that noise cannot move."""


def measure_in_turn(
    probes: Sequence[Callable[[], Floats]],
    repeats: int,
    budget_seconds: float,
    after_round: Callable[[], None] = lambda: None,
) -> tuple[Floats, ...]:
    """Run all probes once a round, so that all see the same noise: the figures of each, [rounds, figures].

    A first round warms up and is dropped. Then there are ``repeats`` rounds, or as many as the seconds of
    the budget allow, but at least ``LEAST_ROUNDS`` (or ``repeats``, where that is fewer).
    """
    for probe in probes:
        probe()
    begin = time.perf_counter()
    rounds: list[list[Floats]] = []
    while len(rounds) < repeats:
        if len(rounds) >= LEAST_ROUNDS and time.perf_counter() - begin > budget_seconds:
            break
        rounds.append([probe() for probe in probes])
        after_round()
    return tuple(np.array([one[i] for one in rounds], dtype=np.float64) for i in range(len(probes)))


def relative_spread(rounds: Floats) -> float:
    """How far the rounds' sums lie from their median: their median absolute deviation over the median.

    Half of the rounds lie closer than that. 0 where the median is 0.
    """
    totals = rounds.sum(axis=1)
    middle = float(np.median(totals))
    return float(np.median(np.abs(totals - middle))) / middle if middle > 0 else 0.0


def share_out(seconds: Floats, bounds: Sequence[int], weights: Floats) -> Floats:
    """The seconds of each layer from those of runs of layers, shared in proportion to ``weights``.

    Run k holds the layers ``bounds[k]`` to ``bounds[k + 1] - 1``. Where all weights of a run are 0, its layers
    share alike.
    """
    shared = np.zeros(len(weights))
    for k, (first, end) in enumerate(itertools.pairwise(bounds)):
        within = weights[first:end]
        total = within.sum()
        shared[first:end] = seconds[k] * (within / total if total > 0 else 1 / (end - first))
    return shared


def choose_starts(weights: Floats, positions: Sequence[int], count: int) -> list[int]:
    """Starts (ascending, without 0) that cut the layers into at most ``count`` runs of about equal weight.

    A start is the one of ``positions`` whose layers before it weigh nearest to its share of the whole.
    """
    before = np.concatenate([[0.0], np.cumsum(weights)])
    if not len(positions):
        return []
    places = np.asarray(positions)
    wanted = before[-1] * np.arange(1, count) / count
    return sorted({int(places[np.abs(before[places] - share).argmin()]) for share in wanted})
