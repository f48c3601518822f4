"""The order of a planner's candidates: the fastest is chosen, and the others are runners-up."""

from __future__ import annotations

from collections.abc import Iterable

from dapple_tf.planner.planning_problem import Candidate, PlannerResult


def rank_candidates(candidates: Iterable[Candidate], least_seconds: float = 0.0) -> PlannerResult | None:
    """Return the fastest candidate, and the fastest with other stages of each origin as runners-up; None without any.

    Of equally fast candidates the one with fewest stages, then fewest devices, is chosen. ``least_seconds``: as in
    ``PlannerResult``.
    """
    ranked = sorted(candidates, key=lambda c: (c.seconds, len(c.stages), c.device_count))
    if not ranked:
        return None
    by_origin: dict[str, Candidate] = {}
    for candidate in ranked[1:]:
        if candidate.stages != ranked[0].stages:
            by_origin.setdefault(candidate.origin, candidate)
    return PlannerResult(ranked[0], tuple(by_origin.values()), least_seconds=least_seconds)
