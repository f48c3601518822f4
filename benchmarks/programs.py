"""Whole programs in the manner of public ones, with the documented lines, beside plain Keras.

``python -m benchmarks programs [--only NAME ...] [--family NAME] [--json] [--one-process | --ranks]``
"""

from __future__ import annotations

import argparse
import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence

import tensorflow as tf

from benchmarks.common import Row
from benchmarks.exactness import check_each, is_chosen, print_results, shortened
from benchmarks.exactness_cases.case import Expected
from benchmarks.exactness_check import Found, Outcome, is_expected
from benchmarks.needs import find_missing_for_ranks
from benchmarks.program_cases import PROGRAMS
from benchmarks.program_cases.program import Program
from benchmarks.programs_check import CONFIGURATIONS, ProgramChecker
from benchmarks.programs_ranks import check_on_ranks

PROGRAMS_OF_A_JOB = 8


def run() -> Iterator[Row]:
    """Yield a row for every program."""
    for program, found in check_programs(list(PROGRAMS.values())):
        yield to_row(program, found)


def check_programs(
    programs: Sequence[Program], one_process: bool = True, ranks: bool = True
) -> Iterator[tuple[Program, list[Found]]]:
    """Yield each program with its outcomes: one for each number of micro-batches, then that of two ranks.

    A program that needs a package which is not installed has none.
    """
    ranks = ranks and find_missing_for_ranks() is None
    for first in range(0, len(programs), PROGRAMS_OF_A_JOB):
        chosen = programs[first : first + PROGRAMS_OF_A_JOB]
        can_run = [program for program in chosen if find_missing(program) is None]
        of_job = [program for program in can_run if program.ranks] if ranks else []
        on_ranks = {program.name: found for program, found in check_on_ranks(of_job)}
        wanted = [CONFIGURATIONS if one_process and program in can_run else () for program in chosen]
        for program, found in check_each(chosen, wanted, lambda program: ProgramChecker(program).check):
            yield program, [*found, *on_ranks.get(program.name, [])]


def find_missing(program: Program) -> str | None:
    """Return the package without which a program cannot run, if it is not installed."""
    return program.needs if program.needs is not None and importlib.util.find_spec(program.needs) is None else None


def to_row(program: Program, found: Sequence[Found]) -> Row:
    """Return the row of a program: how it came out with which micro-batches and ranks, and why."""
    places = [f"M = {configuration.micro_batches}" for configuration in CONFIGURATIONS]
    if len(found) == len(CONFIGURATIONS) + 1:
        places.append("two ranks")
    elif len(found) == 1:
        places = ["two ranks"]
    by_outcome: dict[str, list[str]] = {}
    for place, f in zip(places, found, strict=False):
        by_outcome.setdefault(f.outcome.value, []).append(place)
    notes = [f"{', '.join(where)}: {outcome}" for outcome, where in by_outcome.items()]
    if not found:
        notes.append(f"left out: it needs {program.needs}" if find_missing(program) else "not run")
    notes += [f"{name}={value!r}" for name, value in program.options.items()]
    if program.reason:
        notes.append(program.reason)
    bad = next((f for f in found if not is_expected(program, f)), None)
    if bad is not None:
        notes.append(shortened(bad.detail, 400))
    return Row(f"{program.family}: {program.name}", program.expected.value, "; ".join(notes), bad is None)


def summarise(results: Sequence[tuple[Program, Sequence[Found]]]) -> str:
    """Return a line that counts the programs by their worst outcomes."""
    order = [Outcome.EQUAL, Outcome.DOCUMENTED, Outcome.REFUSED, Outcome.CRASHED, Outcome.WRONG]
    worst = Counter(max((f.outcome for f in found), key=order.index) for _, found in results if found)
    by_nature = sum(program.expected is Expected.REFUSED for program, found in results if found)
    return (
        f"{len(results)} programs: {worst[Outcome.EQUAL]} equal, {worst[Outcome.DOCUMENTED]} differ as documented, "
        f"{worst[Outcome.REFUSED]} refused ({by_nature} by nature), {worst[Outcome.CRASHED]} raw errors, "
        f"{worst[Outcome.WRONG]} wrong, {sum(not found for _, found in results)} not run"
    )


def main(arguments: Sequence[str]) -> int:
    """Run the chosen programs, and print a row or (``--json``) a line of JSON for each; return 1 unless all are ok."""
    options = _parse(arguments)
    tf.get_logger().setLevel("ERROR")  # it warns of one trace for each program
    programs = [program for program in PROGRAMS.values() if is_chosen(program, options)]
    if not programs:
        print("no program has such a name; there are " + ", ".join(PROGRAMS))
        return 2
    results = []

    def checked() -> Iterator[tuple[Program, list[Found]]]:
        for result in check_programs(programs, not options.ranks, not options.one_process):
            results.append(result)
            yield result

    failed = print_results(checked(), to_row, "program", as_json=options.json)
    if not options.json:
        print(f"\n{summarise(results)}")
    return 1 if failed else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks programs", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="programs of these names; `NAME*` for all that begin so"
    )
    parser.add_argument("--family", help="programs of this theme")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each program")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--one-process", action="store_true", help="without the jobs of two processes")
    where.add_argument("--ranks", action="store_true", help="only as jobs of two processes under mpirun")
    return parser.parse_args(arguments)
