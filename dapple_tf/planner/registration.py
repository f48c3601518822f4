"""The decorator by which a planner gets its name, and the table of planners that it fills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dapple_tf.planner.planning_problem import PlannerResult

_Function = TypeVar("_Function", bound=Callable[..., PlannerResult | None])


@dataclass(frozen=True)
class Planner:
    """A planner. ``plan`` takes a problem and the planner's own options, and returns None if nothing fits.

    ``unequal``: it plans for devices of different kinds too. ``shares_devices``: it plans for schedules with several
    stages on a device too. ``candidate``: planner "best" considers its plan where the search of "best" cannot be
    compiled. ``native``: it needs the C++ library.
    """

    name: str
    plan: Callable[..., PlannerResult | None]
    unequal: bool
    shares_devices: bool
    candidate: bool
    native: bool


REGISTERED: dict[str, Planner] = {}
"""The planners whose modules have been imported, by name; ``registry`` imports all."""


def planner(
    name: str, *, unequal: bool = False, shares_devices: bool = False, candidate: bool = False, native: bool = False
) -> Callable[[_Function], _Function]:
    """Return the decorator that registers a function as planner ``name``; see ``Planner`` for the arguments."""

    def register(function: _Function) -> _Function:
        REGISTERED[name] = Planner(name, function, unequal, shares_devices, candidate, native)
        return function

    return register
