"""A profile as a table for people: layers of one part of a model on one line where there are many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from profiler.profile import LayerCost, Profile

_MOST_ROWS = 30
_WIDTH = 120  # of a file or a pipe, in characters


def print_table(profile: Profile) -> None:
    """Print the layers' costs on stdout: milliseconds, and millions of bytes."""
    table = Table("layer", box=None)
    for heading in ("layers", "forward ms", "backward ms", "sent MB", "kept MB", "weights MB"):
        table.add_column(heading, justify="right")
    for name, layers in group_layers(profile.layers):
        milliseconds = [sum(getattr(x, f"{way}_seconds") for x in layers) * 1e3 for way in ("forward", "backward")]
        megabytes = [
            layers[-1].activation_bytes / 1e6,  # what leaves the last of them
            sum(layer.stash_bytes for layer in layers) / 1e6,
            sum(layer.parameter_bytes for layer in layers) / 1e6,
        ]
        figures = [*(f"{x:.3f}" for x in milliseconds), *(f"{x:.2f}" for x in megabytes)]
        table.add_row(name, str(len(layers)), *figures)
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _WIDTH
    console.print(table)


def group_layers(layers: Sequence[LayerCost], most: int = _MOST_ROWS) -> list[tuple[str, list[LayerCost]]]:
    """Consecutive layers in at most ``most`` groups, each with a name.

    Layers whose paths begin alike are one group, at the longest beginning for which the groups are few enough;
    where not even the shortest is, groups are of one size.
    """
    paths = [layer.name.split("/") for layer in layers]
    for depth in range(max(map(len, paths)), 0, -1):
        runs = itertools.groupby(range(len(layers)), [path[:depth] for path in paths].__getitem__)
        groups = [("/".join(beginning), [layers[i] for i in run]) for beginning, run in runs]
        if len(groups) <= most:
            return groups
    size = -(-len(layers) // most)
    chunks = [list(layers[i : i + size]) for i in range(0, len(layers), size)]
    return [(f"{chunk[0].name} ..", chunk) for chunk in chunks]
