"""What some benchmarks need that a machine may lack; without it they are left out, and say why."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping

from benchmarks.emulated_hosts import find_hindrance


def lack_of_ranks() -> str | None:
    """Why no job of several processes can run here; None where one can."""
    if importlib.util.find_spec("horovod") is None or shutil.which("mpirun") is None:
        return "it needs Horovod and Open MPI: make horovod"
    return None


def lack_of_hosts() -> str | None:
    """Why no job can run on several emulated hosts here; None where one can."""
    return lack_of_ranks() or find_hindrance()


# By name of the benchmark.
NEEDS: Mapping[str, Callable[[], str | None]] = {
    "ranks": lack_of_ranks,
    "startup": lack_of_ranks,
    "hosts": lack_of_hosts,
    "table4": lack_of_hosts,
}
