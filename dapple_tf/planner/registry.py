"""Run a planner by its name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dapple_tf.errors import PlanError
from dapple_tf.planner.alpa_inter import plan_alpa_inter
from dapple_tf.planner.arguments import check_options
from dapple_tf.planner.autopipe import plan_autopipe
from dapple_tf.planner.bapipe import plan_bapipe
from dapple_tf.planner.best import plan_best
from dapple_tf.planner.dapple import plan_dapple
from dapple_tf.planner.dp import plan_dp
from dapple_tf.planner.even import plan_even
from dapple_tf.planner.gpipe import plan_gpipe
from dapple_tf.planner.hetpipe import plan_hetpipe
from dapple_tf.planner.memory_fit import fits_memory
from dapple_tf.planner.pipedream import plan_pipedream
from dapple_tf.planner.piper import plan_piper
from dapple_tf.planner.planning_problem import PlannerResult, PlanningProblem
from dapple_tf.planner.spp import plan_spp
from dapple_tf.planner.torchgpipe import plan_torchgpipe
from dapple_tf.simulator.interrupts import interruptible
from profiler.quote import quote

# A planner takes a problem and options of its own; it returns None if nothing that it may choose fits the memory.
PLANNERS: Mapping[str, Callable[..., PlannerResult | None]] = {
    "best": plan_best,
    "dapple": plan_dapple,
    "dp": plan_dp,
    "gpipe": plan_gpipe,
    "pipedream": plan_pipedream,
    "spp": plan_spp,
    "autopipe": plan_autopipe,
    "bapipe": plan_bapipe,
    "even": plan_even,
    "torchgpipe": plan_torchgpipe,
    "alpa-inter": plan_alpa_inter,
    "piper": plan_piper,
    "hetpipe": plan_hetpipe,
}
# Planners for devices of different kinds, and planners for schedules with several stages per device.
_OF_UNEQUAL_DEVICES = ("best", "dapple", "dp", "gpipe", "bapipe", "even", "torchgpipe", "hetpipe")
_OF_SHARED_DEVICES = ("best", "even", "gpipe")


def check_planner(name: str) -> None:
    """Raise PlanError, with the names that there are, if no planner is called ``name``."""
    text = str(name)
    if text not in PLANNERS or text != name:
        near = difflib.get_close_matches(text, PLANNERS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise PlanError(f"no planner is called {quote(name)}{hint}; there are {', '.join(PLANNERS)}")


@interruptible
def find_result(problem: PlanningProblem, planner: str, **options: Any) -> PlannerResult | None:
    """Run ``planner`` and return its result; None if nothing that it may choose fits.

    Raises PlanError if there is no such planner, if it does not have one of the ``options``, and if it does not know
    several stages on a device, or devices of different kinds, where the problem has them.
    """
    check_planner(planner)
    function = PLANNERS[planner]
    check_options(planner, function, options)
    if problem.shares_devices and planner not in _OF_SHARED_DEVICES:
        raise PlanError(
            f"schedule {problem.spec.short!r} runs several stages on a device, and planner "
            f"{planner!r} makes plans of one stage per device: use planner {_list(_OF_SHARED_DEVICES)}"
        )
    if not problem.cluster.is_uniform and planner not in _OF_UNEQUAL_DEVICES:
        kinds = ", ".join(str(kind or "no kind") for kind in dict.fromkeys(problem.cluster.device_kinds))
        raise PlanError(
            f"the cluster has devices of different kinds ({kinds}), and planner {planner!r} makes plans for equal "
            f"devices: use planner {_list(_OF_UNEQUAL_DEVICES)}"
        )
    return function(problem, **options) if may_fit(problem) else None


def may_fit(problem: PlanningProblem) -> bool:
    """Return False where it is known at once that no plan fits the memory, which a search takes long to find out."""
    return problem.shares_devices or not problem.cluster.is_uniform or fits_memory(problem)


def _list(names: Sequence[str]) -> str:
    *others, last = map(repr, names)
    return f"{', '.join(others)} or {last}"
