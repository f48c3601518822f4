"""The order of a planner's candidates: the fastest is chosen, and the others are runners-up."""

from __future__ import annotations

from collections.abc import Iterable

from dapple_tf.planner.planning_problem import Candidate, PlannerResult


def rank_candidates(candidates: Iterable[Candidate], unsearched: float = 0.0) -> PlannerResult | None:
    """Return the fastest candidate, and the fastest with other stages of each origin as runners-up; None without any.

    Of equally fast candidates the one with fewest stages, then fewest devices, is chosen. ``unsearched``: the least
    bound (seconds) of the plans that are not among the candidates; 0 where there is none.
    """
    ranked = sorted(candidates, key=lambda c: (c.seconds, len(c.stages), c.device_count))
    if not ranked:
        return None
    by_origin: dict[str, Candidate] = {}
    for candidate in ranked[1:]:
        if candidate.stages != ranked[0].stages:
            by_origin.setdefault(candidate.origin, candidate)
    proven = 0 < unsearched >= ranked[0].seconds * (1 - 1e-9)
    return PlannerResult(ranked[0], tuple(by_origin.values()), proven_optimal=proven)
