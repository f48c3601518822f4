"""Run the benchmarks and print their tables: ``python -m benchmarks [NAME ...]``.

``build_time``, ``challenger``, ``elastic``, ``exactness``, ``fuzz``, ``gpu``, ``kills``, ``op_census``, ``peers``,
``programs``, ``random_programs`` and ``search_phases`` take options: give ``--help`` after the name.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence

import dapple_tf as dapple
from benchmarks import (
    all_reduce,
    asynchronous,
    build_time,
    challenger,
    compare,
    contention,
    elastic,
    exactness,
    exchange,
    first_step,
    fit,
    fuzz,
    gpu,
    hosts,
    kills,
    large,
    memory,
    models,
    op_census,
    peers,
    pipelining,
    planner_speed,
    prediction,
    profile,
    programs,
    random_programs,
    ranks,
    recompute,
    remainders,
    schedules,
    search_phases,
    simulator_speed,
    sparse_gradients,
    startup,
    timeline,
    train_step,
    unequal,
)
from benchmarks.common import print_table
from benchmarks.needs import NEEDS
from benchmarks.papers import (
    slicer,
    staleness,
    table4,
    table5,
    table6,
    table7,
    window_memory,
)

BENCHMARKS = {
    "pipelining": pipelining,
    "profile": profile,
    "table4": table4,
    "table5": table5,
    "table7": table7,
    "compare": compare,
    "challenger": challenger,
    "search_phases": search_phases,
    "planner_speed": planner_speed,
    "simulator_speed": simulator_speed,
    "prediction": prediction,
    "ranks": ranks,
    "recompute": recompute,
    "remainders": remainders,
    "startup": startup,
    "timeline": timeline,
    "schedules": schedules,
    "slicer": slicer,
    "asynchronous": asynchronous,
    "staleness": staleness,
    "window_memory": window_memory,
    "unequal": unequal,
    "hosts": hosts,
    "contention": contention,
    "memory": memory,
    "models": models,
    "large": large,
    "sparse_gradients": sparse_gradients,
    "table6": table6,
    "exactness": exactness,
    "programs": programs,
    "fuzz": fuzz,
    "op_census": op_census,
    "kills": kills,
    "elastic": elastic,
    "exchange": exchange,
    "all_reduce": all_reduce,
    "fit": fit,
    "first_step": first_step,
    "train_step": train_step,
    "build_time": build_time,
    "random_programs": random_programs,
    "gpu": gpu,
    "peers": peers,
}

# Those with options of their own.
OPTIONS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "build_time": build_time.main,
    "challenger": challenger.main,
    "elastic": elastic.main,
    "exactness": exactness.main,
    "fuzz": fuzz.main,
    "gpu": gpu.main,
    "kills": kills.main,
    "op_census": op_census.main,
    "peers": peers.main,
    "programs": programs.main,
    "random_programs": random_programs.main,
    "search_phases": search_phases.main,
}


def main() -> int:
    """Print a Markdown table for each benchmark; return 1 if a figure misses its target, 2 for an unknown name.

    A benchmark whose requirements this machine lacks is left out, and the reason printed.
    """
    if len(sys.argv) > 2 and sys.argv[1] in OPTIONS and sys.argv[2].startswith("-"):
        _start_devices(sys.argv[1:2])
        return OPTIONS[sys.argv[1]](sys.argv[2:])
    names = sys.argv[1:] or list(BENCHMARKS)
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    _start_devices(names)
    print(f"Machine: {len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}\n")
    missed = 0
    for name in names:
        print(f"### {name}\n\n`python -m benchmarks {name}`\n", flush=True)
        missing = NEEDS[name]() if name in NEEDS else None
        if missing is not None:
            print(f"left out: {missing}\n", flush=True)
            continue
        missed += print_table(BENCHMARKS[name].run())
        print(flush=True)
    return 1 if missed else 0


def _start_devices(names: Sequence[str]) -> None:
    """Make eight logical devices; the processes of ``gpu`` make devices of their own, GPUs where there are any."""
    if list(names) != ["gpu"]:
        dapple.init(8)


if __name__ == "__main__":
    sys.exit(main())
