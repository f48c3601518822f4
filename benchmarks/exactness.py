"""Losses and models that people train, in float64: equal to plain Keras after three steps, or refused.

``python -m benchmarks exactness [--only NAME ...] [--family NAME] [--representative] [--configurations two|four|all]
[--json] [--ranks]``
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.common import Row, print_table
from benchmarks.exactness_cases import CASES
from benchmarks.exactness_cases.case import Case, Described
from benchmarks.exactness_check import (
    CONFIGURATIONS,
    QUICK,
    Checker,
    Configuration,
    Found,
    four_configurations,
    is_expected,
)
from benchmarks.exactness_ranks import check_on_ranks
from benchmarks.exactness_table import REPRESENTATIVE

D = TypeVar("D", bound=Described)


def run() -> Iterator[Row]:
    """Yield a row for every case under two configurations: all of them take hours."""
    for case, found in check_cases(list(CASES.values()), "two"):
        yield to_row(case, found)


def choose_configurations(choice: str, number: int) -> tuple[Configuration, ...]:
    """Return the configurations of the case of this number: the quick "two", "four" (two others in turn), or "all"."""
    if choice == "all":
        return CONFIGURATIONS
    return QUICK if choice == "two" else four_configurations(number)


def check_cases(cases: Sequence[Case], choice: str) -> Iterator[tuple[Case, list[Found]]]:
    """Yield each case with its outcomes; progress is shown on stderr."""
    chosen = [choose_configurations(choice, number) for number in range(len(cases))]
    yield from check_each(cases, chosen, lambda case: Checker(case).check)


def check_each(
    cases: Sequence[D],
    chosen: Sequence[Sequence[Configuration]],
    make_check: Callable[[D], Callable[[Configuration], Found]],
) -> Iterator[tuple[D, list[Found]]]:
    """Yield each case with its outcomes under the configurations chosen for it; progress is shown on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=sum(map(len, chosen)))
        for case, configurations in zip(cases, chosen, strict=True):
            check, found = make_check(case), []
            for configuration in configurations:
                progress.update(task, description=f"{case.name}: {configuration}")
                found.append(check(configuration))
                progress.advance(task)
            yield case, found


def to_row(case: Described, found: Sequence[Found]) -> Row:
    """Return the row of a case: how often it came out how, and the first outcome that is not expected."""
    counts = Counter(f.outcome.value for f in found)
    measured = ", ".join(f"{name} {count}" for name, count in counts.items())
    bad = next((f for f in found if not is_expected(case, f)), None)
    if bad is not None:
        measured += f"; {bad.configuration}: {bad.outcome.value}, {shortened(bad.detail)}"
    return Row(f"{case.family}: {case.name}", case.expected.value, measured, bad is None)


def to_json(case: Described, found: Sequence[Found]) -> dict[str, Any]:
    """Return everything that is known of a case."""
    return {
        "case": case.name,
        "family": case.family,
        "expected": case.expected.value,
        "ok": all(is_expected(case, f) for f in found),
        "outcomes": [
            {
                "configuration": str(f.configuration),
                "outcome": f.outcome.value,
                "detail": f.detail,
                "warnings": list(f.warnings),
            }
            for f in found
        ],
    }


def shortened(text: str, length: int = 160) -> str:
    line = " ".join(text.split()).replace("|", "/")
    return line if len(line) <= length else f"{line[: length - 3]}..."


def print_results(
    results: Iterable[tuple[Any, list[Found]]], row_of: Callable[[Any, list[Found]], Row], of: str, *, as_json: bool
) -> int:
    """Print a row or a line of JSON for each case or program as soon as it is checked; return how many are not ok."""
    if not as_json:
        return print_table((row_of(case, found) for case, found in results), of)
    failed = 0
    for case, found in results:
        print(json.dumps(to_json(case, found)), flush=True)
        failed += not row_of(case, found).ok
    return failed


def main(arguments: Sequence[str]) -> int:
    """Check the chosen cases, and print a row or (``--json``) a line of JSON for each; return 1 unless all are ok."""
    options = _parse(arguments)
    tf.get_logger().setLevel("ERROR")  # it warns of one trace for each case
    cases = [case for case in CASES.values() if is_chosen(case, options)]
    if options.representative:
        cases = [case for case in cases if case.name in REPRESENTATIVE]
    if not cases:
        print("no case has such a name; there are " + ", ".join(CASES))
        return 2
    results = check_on_ranks(cases) if options.ranks else check_cases(cases, options.configurations)
    failed = print_results(results, to_row, "case", as_json=options.json)
    if not options.json:
        print(f"\n{len(cases) - failed} of {len(cases)} cases came out as they must")
    return 1 if failed else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks exactness", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases of these names; `NAME*` for all that begin so")
    parser.add_argument("--family", help="cases of this family")
    parser.add_argument(
        "--representative", action="store_true", help=f"{len(REPRESENTATIVE)} of {len(CASES)} cases, of every family"
    )
    parser.add_argument(
        "--configurations",
        choices=("two", "four", "all"),
        default="all",
        help=f"four: two for every case, and two others in turn; all: {len(CONFIGURATIONS)}",
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each case")
    parser.add_argument("--ranks", action="store_true", help="as jobs of two processes under mpirun")
    return parser.parse_args(arguments)


def is_chosen(case: Described, options: argparse.Namespace) -> bool:
    """Return whether the options ``--family`` and ``--only`` name a case."""
    if options.family is not None and case.family != options.family:
        return False
    return options.only is None or any(
        case.name.startswith(name[:-1]) if name.endswith("*") else case.name == name for name in options.only
    )
