"""Measuring on a noisy machine: repeats in turn, medians, a stated spread. Knows nothing of what is measured."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
LEAST_ROUNDS = 3
"""Rounds that are taken however long they last: fewer have no median that noise cannot move."""


@dataclass(frozen=True)
class Clock:
    """Seconds now, by the wall and of this process's work; to be replaced in tests."""

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
    """Run all probes once a round, so that all see the same noise: the seconds that each gives, [rounds, figures].

    A first round warms up and is dropped. There are ``repeats`` rounds, or as many as the seconds of the budget allow,
    but at least ``LEAST_ROUNDS`` (or ``repeats``, where that is fewer). What others took of the processor is taken
    off: where this process worked only a part of the time that it works undisturbed, its seconds are shortened by as
    much. ``full_share``: that undisturbed share (seconds of work a second: 1 on one core; 0 takes nothing off),
    or None, for that of each probe's best round.
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
    """What a probe gives, and the seconds that this process worked meanwhile, a second."""
    wall, work = clock.wall(), clock.work()
    seconds = probe()
    return seconds, (clock.work() - work) / max(clock.wall() - wall, 1e-9)


def relative_spread(rounds: Floats) -> float:
    """How far the rounds' sums lie from their median: their median absolute deviation over the median.

    Half of the rounds lie closer than that. 0 where the median is 0.
    """
    totals = rounds.sum(axis=1)
    middle = float(np.median(totals))
    return float(np.median(np.abs(totals - middle))) / middle if middle > 0 else 0.0


def split_by_weight(seconds: Floats, bounds: Sequence[int], weights: Floats) -> Floats:
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


def choose_even_starts(weights: Floats, positions: Sequence[int], count: int) -> list[int]:
    """Starts (ascending, without 0) that cut the layers into at most ``count`` runs of about equal weight.

    A start is the one of ``positions`` whose layers before it weigh nearest to its share of the whole.
    """
    before = np.concatenate([[0.0], np.cumsum(weights)])
    if not len(positions):
        return []
    places = np.asarray(positions)
    wanted = before[-1] * np.arange(1, count) / count
    return sorted({int(places[np.abs(before[places] - share).argmin()]) for share in wanted})
