"""A number of a paper beside ours, and the table or figure of the paper that such numbers make up."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[2] / "docs" / "figures" / "papers"

OOM = math.nan
"""Stands for a number that there is none of, since the memory does not suffice."""

CLOSE, NEAR = 0.10, 0.25
CASES = "cases"
"""The unit of what a paper says of several cases."""


@dataclass(frozen=True)
class Figure:
    """A number of a paper beside ours.

    ``group``: what the number is of, such as a model; whether paper and we order numbers alike is asked within a group.
    ``name``: which number of the group it is. ``span``: the least and the largest value of ours, where the paper leaves
    open what it depends on. ``why``: one line on why the two differ, which is shown if they do by more than 10%; of
    what a paper says of several cases it is shown always.
    """

    group: str
    name: str
    paper: float
    ours: float
    unit: str
    why: str = ""
    span: tuple[float, float] | None = None

    @property
    def off(self) -> float:
        """Ours over the paper's, less 1; 0 where both are equal or out of memory, infinity where one of them is."""
        if math.isnan(self.paper) or math.isnan(self.ours):
            return 0.0 if math.isnan(self.paper) and math.isnan(self.ours) else math.inf
        if self.paper == self.ours:
            return 0.0
        return self.ours / self.paper - 1 if self.paper else math.inf

    @property
    def verdict(self) -> str:
        """The class of the difference: "within 10%", "within 25%" or "further"."""
        off = abs(self.off)
        return "within 10%" if off <= CLOSE else "within 25%" if off <= NEAR else "further"


@dataclass(frozen=True)
class Exhibit:
    """A table or figure of a paper. ``about``: what is compared, and what is assumed where the paper does not say.

    ``pictures``: file names in docs/figures/papers. ``command``: what makes it again.
    """

    title: str
    about: str
    figures: tuple[Figure, ...]
    command: str
    pictures: tuple[str, ...] = ()

    @property
    def groups(self) -> dict[str, list[Figure]]:
        """The figures by group and unit, in order, without claims; only groups in which the paper's numbers differ."""
        found: dict[tuple[str, str], list[Figure]] = {}
        for figure in self.figures:
            if figure.unit == CASES:
                continue
            found.setdefault((figure.group, figure.unit), []).append(figure)
        return {
            f"{group}, {unit}": each
            for (group, unit), each in found.items()
            if len({figure.paper for figure in each if not math.isnan(figure.paper)}) > 1
        }

    def save(self, name: str) -> None:
        """Keep the exhibit as ``results/NAME.json``."""
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(name: str) -> Exhibit | None:
        """Return the kept exhibit of this name; None where it was never made."""
        path = RESULTS / f"{name}.json"
        if not path.is_file():
            return None
        data = json.loads(path.read_text())
        figures = tuple(Figure(**{**each, "span": each["span"] and tuple(each["span"])}) for each in data["figures"])
        return Exhibit(**{**data, "figures": figures, "pictures": tuple(data["pictures"])})


def same_order(figures: Sequence[Figure]) -> bool:
    """Return whether any two numbers that differ in the paper differ in the same direction here."""
    known = [f for f in figures if not (math.isnan(f.paper) or math.isnan(f.ours))]
    return all(
        (a.paper - b.paper) * (a.ours - b.ours) > 0 for a, b in itertools.combinations(known, 2) if a.paper != b.paper
    )


def claim(text: str, cases: Iterable[bool], why: str = "") -> Figure:
    """Return what a paper says of all cases, as the number of cases in which it is so here."""
    found = [bool(case) for case in cases]
    return Figure("what the paper says", text, len(found), sum(found), CASES, why)


def draw(name: str, panels: Mapping[str, tuple[Sequence[float], Mapping[str, Sequence[float]]]], **axes: Any) -> str:
    """Draw simulated curves (see ``line_figure``) as docs/figures/papers/NAME, and return the name."""
    from benchmarks.figures import line_figure

    return line_figure(name, panels, "simulated", folder=PICTURES, **axes).name


# --- Markdown


def write_number(value: float, unit: str = "") -> str:
    """Return a number with three digits, or "OOM"."""
    if math.isnan(value):
        return "OOM"
    text = f"{value:.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def write_section(exhibit: Exhibit) -> str:
    """Return the section of an exhibit."""
    lines = [f"## {exhibit.title}", "", exhibit.about, "", f"`{exhibit.command}`", ""]
    for picture in exhibit.pictures:
        lines += [f"![{exhibit.title}, simulated](figures/papers/{picture})", ""]
    lines += ["| of | figure | paper | ours | off | why |", "|---|---|---|---|---|---|"]
    for figure in exhibit.figures:
        ours = write_number(figure.ours)
        if figure.span is not None:
            ours += f" ({write_number(figure.span[0])} to {write_number(figure.span[1])})"
        off = "" if figure.off == 0 else "-" if math.isinf(figure.off) else f"{figure.off:+.0%}"
        name = f"{figure.name}, {figure.unit}" if figure.unit not in ("", CASES) else figure.name
        why = figure.why if figure.unit == CASES or abs(figure.off) > CLOSE else ""
        lines.append(f"| {figure.group} | {name} | {write_number(figure.paper)} | {ours} | {off} | {why} |")
    return "\n".join(lines) + "\n"


def write_summary(exhibits: Sequence[Exhibit]) -> str:
    """Return a table of how many figures of each exhibit agree, and of all."""
    lines = [
        "| exhibit | figures | within 10% | within 25% | further | groups in the same order |",
        "|---|---|---|---|---|---|",
    ]
    totals = [0] * 6
    for exhibit in exhibits:
        verdicts = [figure.verdict for figure in exhibit.figures]
        orders = [same_order(group) for group in exhibit.groups.values()]
        close, near = verdicts.count("within 10%"), verdicts.count("within 25%")
        row = [len(verdicts), close, close + near, len(verdicts) - close - near, sum(orders), len(orders)]
        totals = [a + b for a, b in zip(totals, row, strict=True)]
        lines.append(_summary_row(f"[{exhibit.title}](#{_anchor(exhibit.title)})", row))
    lines.append(_summary_row("all", totals))
    return "\n".join(lines) + "\n"


def _summary_row(title: str, row: Sequence[int]) -> str:
    *counts, agreeing, groups = row
    return f"| {title} | {' | '.join(map(str, counts))} | {f'{agreeing} of {groups}' if groups else '-'} |"


def _anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.strip().replace(" ", "-")
