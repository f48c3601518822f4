"""Run a planner by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapple_tf.errors import PlanError
from dapple_tf.planner import best
from dapple_tf.planner.memory_fit import fits_memory
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.registration import REGISTERED
from dapple_tf.planner.search import dapple
from dapple_tf.planner.systems import (
    alpa,
    autopipe,
    bapipe,
    even,
    hetpipe,
    pipedream,
    piper,
    spp,
    straight,
)
from dapple_tf.profiler.quote import quote
from dapple_tf.simulator.interrupts import interruptible
from dapple_tf.simulator.native.library import load_library
from dapple_tf.wording import suggest

# Importing these modules registers their planners. In messages the usual planners come first, then the others by name.
_MODULES = (best, dapple, alpa, autopipe, bapipe, even, hetpipe, pipedream, piper, spp, straight)
_FIRST = ("best", "dapple", "dp", "gpipe", "pipedream")
PLANNERS: Mapping[str, Callable[..., PlannerResult | None]] = {
    name: REGISTERED[name].plan for name in (*_FIRST, *sorted(REGISTERED.keys() - _FIRST))
}


def check_planner(name: str) -> None:
    """Raise PlanError, with the names that there are, if no planner is called ``name``."""
    text = str(name)
    if text not in PLANNERS or text != name:
        raise PlanError(f"no planner is called {quote(name)}{suggest(text, PLANNERS)}; there are {', '.join(PLANNERS)}")


@interruptible
def find_result(problem: PlanningProblem, planner: str, **options: Any) -> PlannerResult | None:
    """Run ``planner`` and return its result; None if nothing that it may choose fits.

    Raises PlanError if there is no such planner; if it does not have one of the ``options``; if it is written in C++
    and there is no compiler; and if the problem has several stages on a device, or devices of different kinds, and the
    planner is not for these.
    """
    check_planner(planner)
    function = PLANNERS[planner]
    if REGISTERED[planner].native and load_library() is None:
        raise PlanError(
            f"planner {planner!r} is written in C++, and there is no C++ compiler: install g++ (or set CXX), or use "
            "planner 'best', which then chooses among the plans of other planners"
        )
    check_options(planner, function, options)
    if problem.shares_devices and not REGISTERED[planner].shares_devices:
        others = [name for name in PLANNERS if REGISTERED[name].shares_devices]
        raise PlanError(
            f"schedule {problem.spec.short!r} runs several stages on a device, and planner "
            f"{planner!r} makes plans of one stage per device: use planner {_list(others)}"
        )
    if not problem.cluster.is_uniform and not REGISTERED[planner].unequal:
        others = [name for name in PLANNERS if REGISTERED[name].unequal]
        kinds = ", ".join(str(kind or "no kind") for kind in dict.fromkeys(problem.cluster.device_kinds))
        raise PlanError(
            f"the cluster has devices of different kinds ({kinds}), and planner {planner!r} makes plans for equal "
            f"devices: use planner {_list(others)}"
        )
    return function(problem, **options) if may_fit(problem) else None


def may_fit(problem: PlanningProblem) -> bool:
    """Return False if it is easy to see that no plan fits the memory; a search would take long to find this out."""
    return problem.shares_devices or not problem.cluster.is_uniform or fits_memory(problem)


def _list(names: Sequence[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"


def check_sizes(**sizes: object) -> None:
    """Raise PlanError for a number of samples that is not a whole number."""
    for name, size in sizes.items():
        if not _is_whole(size):
            raise PlanError(f"{name} is {quote(size)}, not a whole number")


def check_flags(**flags: object) -> None:
    """Raise PlanError for a flag that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise PlanError(f"{name} is {quote(value)}, not True or False")


def check_options(planner: str, function: Callable[..., Any], options: Mapping[str, object]) -> None:
    """Raise PlanError for an option that the planner does not have, or whose value has the wrong type.

    ``planner``: its name. ``function``: what it runs, whose annotations give the types. Only whole numbers, lists of
    them and flags are checked.
    """
    known = dict(list(inspect.signature(function).parameters.items())[1:])
    for name, value in options.items():
        if name not in known:
            raise PlanError(f"planner {planner!r} has no option {name!r}; it has {', '.join(known) or 'none'}")
        match known[name].annotation:
            case "bool":
                check_flags(**{name: value})
            case "int | None" if not (value is None or _is_whole(value)):
                raise PlanError(f"{name} is {quote(value)}, not a whole number of at least 1")
            case "Sequence[int]" if not (isinstance(value, Sequence) and all(map(_is_whole, value))):
                raise PlanError(f"{name} is {quote(value)}, not a list of whole numbers")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
