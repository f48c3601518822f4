"""Types of the arguments of ``dapple.plan`` and ``dapple.compare``, and of the planners' own options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapple_tf.errors import PlanError
from dapple_tf.profiler.quote import quote


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
