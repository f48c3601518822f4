"""Jobs of several ranks, each launched once in a test session: many tests examine the results of one launch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.dapple_tf.distributed.programs.cases import CASES
from tests.processes import HOROVODRUN, MPIRUN, Launcher, Rank, RanksError, run_ranks


@dataclass(frozen=True)
class JobLaunch:
    """A launch of ``ranks`` processes that run ``programs`` (of the folder of that name) one after the other.

    ``programs``: names and arguments; in an argument ``{folder}`` is the folder of the launch.
    """

    ranks: int
    programs: Sequence[tuple[str, Sequence[Any]]]
    launcher: Launcher = MPIRUN
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def cases(self) -> Sequence[str]:
        """The names of its training cases."""
        return next((names for program, names in self.programs if program == "training_cases"), ())


# The cases that `make test` runs, by the number of ranks: together they have every kind of value that crosses between
# ranks, every kind of sum over ranks, and every effect of replicas. `make test-all` runs all cases.
QUICK_CASES: Mapping[int, Sequence[str]] = {
    2: (
        *("DP 2 float64", "embedding, zb-h1", "sums written by replicas", "batch norm, sync, DP", "loss scaling"),
        *("interleaved", "weights of odd sizes, DP 2", "sharded, DP 2, global norm", "many, dropout"),
    ),
    3: (
        *("1:1:1 float64", "tied, user replicated", "integers and booleans, split", "2:1, overlap, zb-h1", "sliced"),
        "many, 2:1, recompute",
    ),
}
# Those that exchange by Horovod's alltoall too: lengths known and unknown, and dtypes that it does not send itself.
HOROVOD_CASES = {2: ("two unknown axes", "embedding, zb-h1", "interleaved"), 3: QUICK_CASES[3]}
# What ranks verify: a model that equals one device, one that has sparse gradients, and one that differs.
QUICK_VERIFIED = ("two stages", "an embedding", "noise")
OTHER_VERIFIED = (
    *("four stages", "two stages on each of two replicas"),
    *("two replicas", "a compiled loss", "batch norm", "batch norm, two replicas", "deferred batch norm"),
    *("deferred batch norm, two replicas", "batch norm over two replicas", "NaN", "training"),
)
LONG_CASES = ("gpt, 50 steps",)  # each in a launch of its own


_CASES_PER_LAUNCH = 12


def _slow_cases() -> dict[str, tuple[str, ...]]:
    """Return the cases that `make test` leaves out, by the name of their launch."""
    found: dict[str, tuple[str, ...]] = {name: (name,) for name in LONG_CASES}
    for ranks in (2, 3, 4):
        names = [name for name, case in CASES.items() if case.ranks == ranks and not is_quick(name)]
        names = [name for name in names if name not in LONG_CASES]
        for i in range(0, len(names), _CASES_PER_LAUNCH):
            found[f"slow cases on {ranks} ranks, from {i}"] = tuple(names[i : i + _CASES_PER_LAUNCH])
    return found


def is_quick(name: str) -> bool:
    """Return whether `make test` runs a training case."""
    return any(name in names for names in QUICK_CASES.values())


LAUNCHES: Mapping[str, JobLaunch] = {
    "two ranks": JobLaunch(
        2,
        [
            ("memory_report", []),
            ("overlapped_allreduce", []),
            ("ring_sums", []),
            ("automatic_plan", [0]),
            ("mismatched_ranks", []),
            ("shared_devices", []),
            ("training_cases", QUICK_CASES[2]),
            ("verified", QUICK_VERIFIED),
            ("asynchronous", ["1:1, 2bw", "dropout"]),
            ("window_members", []),
            ("deferred", []),
        ],
    ),
    "two ranks that save a scaled loss": JobLaunch(2, [("scaled_checkpoint", ["{folder}/saved"])]),
    "two ranks that release": JobLaunch(2, [("released", [])]),
    "two ranks with statistics": JobLaunch(2, [("part_statistics", [])]),
    "two ranks that verify other models": JobLaunch(2, [("verified", OTHER_VERIFIED)]),
    # Profiling takes longer than the time after which a silent rank is given up.
    "slow planning": JobLaunch(2, [("automatic_plan", [1.5])], environment={"DAPPLE_TIMEOUT_SECONDS": "2"}),
    # TensorFlow's oneDNN kernels come with an allocator that keeps freed memory for the next tensors: without them the
    # resident set follows what is held.
    "held variables": JobLaunch(
        2,
        [("held_variables", ["{folder}"])],
        environment={
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "MALLOC_MMAP_THRESHOLD_": "1000000",
            "MALLOC_TRIM_THRESHOLD_": "1000000",
        },
    ),
    "three ranks": JobLaunch(
        3,
        [
            ("ring_sums", []),
            ("training_cases", QUICK_CASES[3]),
            ("gathered_variables", ["{folder}"]),
            ("exposed_gradients", []),
            ("record_ranks", ["{folder}/t.png"]),
            ("asynchronous", ["2:1"]),
            ("local_rows", ["1:1:1", "1:2, sizes", "other calls"]),
        ],
        launcher=HOROVODRUN,
    ),
    "three ranks by mpirun": JobLaunch(3, [("training_cases", QUICK_CASES[3]), ("gathered_variables", ["{folder}"])]),
    "2 ranks by Horovod": JobLaunch(
        2,
        [("overlapped_allreduce", ["{folder}/horovod.json"]), ("training_cases", HOROVOD_CASES[2])],
        environment={"DAPPLE_EXCHANGE": "horovod", "HOROVOD_TIMELINE": "DYNAMIC"},  # the program says when to record
    ),
    "3 ranks by Horovod": JobLaunch(
        3, [("training_cases", HOROVOD_CASES[3])], environment={"DAPPLE_EXCHANGE": "horovod"}
    ),
    "two ranks in other windows": JobLaunch(2, [("asynchronous", ["1:1", "1:1, average", "vertical sync"])]),
    "three ranks in other windows": JobLaunch(
        3, [("asynchronous", ["2:1, dropout", "2:1, embedding", "2:1, average", "1:1:1, latest", "2:1, 2bw"])]
    ),
    "three ranks with local rows": JobLaunch(
        3, [("local_rows", ["1:2", "1:2, largest", "1:2, shares", "whole batches", "lengths"])]
    ),
    **{
        launch: JobLaunch(CASES[names[0]].ranks, [("training_cases", names)]) for launch, names in _slow_cases().items()
    },
}


class Launches:
    """Runs each of ``LAUNCHES`` at its first use, and keeps its results or its error; ``folder`` is for its files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[str, list[list[Any]] | RanksError] = {}

    def results(self, launch: str, program: str) -> list[Any]:
        """Return the results of a program of a launch, by rank."""
        if launch not in self._results:
            self.folder(launch).mkdir()
            try:
                self._results[launch] = self._run(launch)
            except RanksError as error:
                self._results[launch] = error
        found = self._results[launch]
        if isinstance(found, RanksError):
            raise found
        names = [name for name, _ in LAUNCHES[launch].programs]
        return found[names.index(program)]

    def case_results(self, name: str, launch: str = "") -> list[Any]:
        """Return the results of a training case by rank, from ``launch`` or the first launch that has the case."""
        launch = launch or next(key for key, made in LAUNCHES.items() if name in made.cases)
        return [result[name] for result in self.results(launch, "training_cases")]

    def folder(self, launch: str) -> Path:
        """Return the folder for the files of a launch."""
        return self._folder / launch.replace(" ", "-")

    def _run(self, name: str) -> list[list[Any]]:
        launch = LAUNCHES[name]
        folder = str(self.folder(name))
        programs = [
            (program, [a.replace("{folder}", folder) if isinstance(a, str) else a for a in arguments])
            for program, arguments in launch.programs
        ]
        ranks = run_ranks(
            ["-m", "tests.dapple_tf.distributed.programs.several", json.dumps(programs)],
            launch.ranks,
            timeout_seconds=280,
            launcher=launch.launcher,
            environment=launch.environment,
        )
        return [[_result(rank, number) for rank in ranks] for number in range(len(programs))]


def _result(rank: Rank, number: int) -> Any:
    """Return what a rank printed as the result of its program of this number."""
    lines = [json.loads(line) for line in rank.stdout.splitlines() if line.startswith('{"program": ')]
    return next(line["result"] for line in lines if line["program"] == number)
