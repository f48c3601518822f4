"""A profile as a table: where a model has many layers, those of one part are summed in one row."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Sequence

from dapple_tf.commands.output import print_result
from dapple_tf.drawing.table import format_table
from profiler.profile import LayerCost, Profile

_MAX_ROWS = 30
_WIDTH = 120  # characters, in a file or a pipe
_HEADER = ("layer", "layers", "forward ms", "backward ms", "output MB", "stash MB", "weights MB")


def print_table(profile: Profile) -> None:
    """Print the layers' costs on stdout: milliseconds, and millions of bytes."""
    rows = [_row(name, layers) for name, layers in group_layers(profile.layers)]
    width = shutil.get_terminal_size((_WIDTH, 0)).columns
    print_result("\n".join(format_table(_HEADER, rows, left=1, width=width)))


def _row(name: str, layers: Sequence[LayerCost]) -> list[str]:
    milliseconds = [
        sum(getattr(x, f"{direction}_seconds") for x in layers) * 1e3 for direction in ("forward", "backward")
    ]
    megabytes = [
        layers[-1].activation_bytes / 1e6,  # the output of the group is that of its last layer
        sum(layer.stash_bytes for layer in layers) / 1e6,
        sum(layer.parameter_bytes for layer in layers) / 1e6,
    ]
    return [name, str(len(layers)), *(f"{x:.3f}" for x in milliseconds), *(f"{x:.2f}" for x in megabytes)]


def group_layers(layers: Sequence[LayerCost], max_groups: int = _MAX_ROWS) -> list[tuple[str, list[LayerCost]]]:
    """Return consecutive layers in at most ``max_groups`` groups, each with a name.

    Layers whose paths have the same prefix form a group; the prefix is as long as the number of groups allows. If even
    prefixes of length 1 give too many groups, groups of equal size are formed.
    """
    paths = [layer.name.split("/") for layer in layers]
    for depth in range(max(map(len, paths)), 0, -1):
        runs = itertools.groupby(range(len(layers)), [path[:depth] for path in paths].__getitem__)
        groups = [("/".join(prefix), [layers[i] for i in run]) for prefix, run in runs]
        if len(groups) <= max_groups:
            return groups
    size = -(-len(layers) // max_groups)
    parts = [list(layers[i : i + size]) for i in range(0, len(layers), size)]
    return [(f"{part[0].name} ..", part) for part in parts]
