"""Measure times on a noisy machine: interleaved rounds, medians, and their spread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LEAST_ROUNDS = 3
"""The least number of rounds, however long they last: with fewer, one disturbed round moves the median."""


@dataclass(frozen=True)
class Clock:
    """The wall clock and this process's CPU time, both in seconds; replaced in tests."""

    wall: Callable[[], float] = time.perf_counter
    work: Callable[[], float] = time.process_time


def measure_interleaved(
    probes: Sequence[Callable[[], Floats]],
    repeats: int,
    budget_seconds: float,
    after_round: Callable[[], None] = lambda: None,
    *,
    full_share: float | None = None,
    clock: Clock = Clock(),
) -> tuple[Floats, ...]:
    """Run every probe once per round, so that all see the same noise, and return the seconds of each.

    These are a float64 array [rounds, figures that the probe returns]. A first round warms up and is dropped. There are
    ``repeats`` rounds, or as many as fit into ``budget_seconds``, but at least ``LEAST_ROUNDS`` (or ``repeats``, if
    that is fewer). Time that other processes took is subtracted: where this process had a smaller share of the
    processor than undisturbed, its seconds are scaled by the ratio of the two. ``full_share``: the undisturbed share
    (CPU seconds per second: 1 on one core; 0 turns the correction off), or None for the share in each probe's best
    round.
    """
    for probe in probes:
        probe()
    begin = clock.wall()
    rounds: list[list[Floats]] = []
    shares: list[list[float]] = []
    while len(rounds) < repeats and (len(rounds) < LEAST_ROUNDS or clock.wall() - begin <= budget_seconds):
        timed = [_with_share(probe, clock) for probe in probes]
        rounds.append([seconds for seconds, _ in timed])
        shares.append([share for _, share in timed])
        after_round()
    own = np.array(shares)
    scale = np.minimum(own / np.maximum(own.max(axis=0) if full_share is None else full_share, 1e-9), 1.0)
    return tuple(
        np.array([one[i] for one in rounds], dtype=np.float64) * scale[:, i : i + 1] for i in range(len(probes))
    )


def _with_share(probe: Callable[[], Floats], clock: Clock) -> tuple[Floats, float]:
    """Return the seconds that a probe returns, and this process's CPU seconds per second while it ran."""
    wall, work = clock.wall(), clock.work()
    seconds = probe()
    return seconds, (clock.work() - work) / max(clock.wall() - wall, 1e-9)


def relative_spread(rounds: Floats) -> float:
    """Return the median absolute deviation of the rounds' sums over their median; 0 where the median is 0.

    Half of the rounds are closer to the median than that.
    """
    totals = rounds.sum(axis=1)
    middle = float(np.median(totals))
    return float(np.median(np.abs(totals - middle))) / middle if middle > 0 else 0.0


def split_by_weight(seconds: Floats, bounds: Sequence[int], weights: Floats) -> Floats:
    """Split the seconds of runs of layers among their layers, in proportion to ``weights``.

    Run k holds the layers ``bounds[k]`` to ``bounds[k + 1] - 1``. Where all weights of a run are 0, its layers get
    equal parts.
    """
    split = np.zeros(len(weights))
    for k, (first, end) in enumerate(itertools.pairwise(bounds)):
        within = weights[first:end]
        total = within.sum()
        split[first:end] = seconds[k] * (within / total if total > 0 else 1 / (end - first))
    return split


def choose_even_starts(weights: Floats, positions: Sequence[int], count: int) -> list[int]:
    """Return starts (ascending, without 0) that cut the layers into at most ``count`` runs of about equal weight.

    Start k is that one of ``positions`` before which the weight is nearest to k / ``count`` of the total weight. That
    takes linear time; ``graph_passes.passes.partition.balance``, which minimises the largest run, takes quadratic time.
    """
    before = np.concatenate([[0.0], np.cumsum(weights)])
    if not len(positions):
        return []
    places = np.asarray(positions)
    wanted = before[-1] * np.arange(1, count) / count
    return sorted({int(places[np.abs(before[places] - share).argmin()]) for share in wanted})
