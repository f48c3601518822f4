"""``dapple profile``: the cost of each layer of a model, measured here or computed for another device."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import click
import cloup

from dapple_tf.commands.command import FILE, command, result_options
from dapple_tf.commands.model_loading import check_model_exists, load_model
from dapple_tf.commands.options import DEVICES_OPTION, MODEL_ARGUMENT, MODEL_OPTIONS
from dapple_tf.commands.output import check_output_path, print_result
from dapple_tf.commands.startup import start_tensorflow
from dapple_tf.drawing.table import format_table
from dapple_tf.profiler.peaks import PEAKS
from dapple_tf.profiler.profile import LayerCost, Profile
from dapple_tf.profiler.units import format_samples, format_seconds
from dapple_tf.wording import format_count


@command(short_help="Find the cost of each layer.")
@MODEL_ARGUMENT
@MODEL_OPTIONS
@cloup.option_group(
    "Measuring",
    cloup.option("--batch-sizes", help="Further batch sizes to measure, such as 2,4,16."),
    cloup.option(
        "--repeats", default=9, show_default=True, type=click.IntRange(1), help="Rounds to measure; the median counts."
    ),
    DEVICES_OPTION,
    cloup.option(
        "--device",
        type=click.Choice([peak.name for peak in PEAKS], case_sensitive=False),
        help="Measure nothing: compute the profile of this kind of device from its data sheet.",
    ),
)
@result_options(
    cloup.option("-o", "--output", required=True, type=FILE, help="Write the profile to this file (dapple-profile/1).")
)
def profile(
    output: str, batch_sizes: str | None, repeats: int, devices: int | None, device: str | None, **options: Any
) -> None:
    """Profile MODEL (path.py:callable or package.module:callable) at the size of its first batch."""
    sizes = _parse_sizes(batch_sizes)
    if sizes and device:
        raise click.UsageError(
            "--batch-sizes asks for measured times, but --device computes those of many sizes: leave one out"
        )
    check_output_path("--output", output)
    check_model_exists(options["model"])
    start_tensorflow(devices)
    found, disagreement = _find_profile(options, sizes, repeats, device)
    print_result("\n".join(_format_layers(found)))
    print_result(_describe(found, disagreement))
    found.save(output)
    print_result(f"profile: {output}")
    if options["as_json"]:
        print_result(json.dumps({"profile": output, "disagreement": disagreement, **_totals(found)}))


def _find_profile(
    options: Mapping[str, Any], sizes: list[int], repeats: int, device: str | None
) -> tuple[Profile, float | None]:
    """Return the measured profile, and how far the sum of its layers is from the whole model.

    Or return the profile computed from the data sheet of ``device``, and None.
    """
    from dapple_tf.commands.training_loop import repeat_batches
    from dapple_tf.profiling.analytic import analytic_profile
    from dapple_tf.profiling.measured import disagreement
    from dapple_tf.profiling.measured import profile as measure

    name, workload = options["model"].rpartition(":")[2], load_model(**options)
    batch = next(repeat_batches(workload.dataset))
    if device is not None:
        return analytic_profile(workload.loss_fn, batch, device, model=name), None
    found = measure(workload.loss_fn, batch, batch_sizes=sizes, repeats=repeats, model=name)
    return found, disagreement(found)


def _parse_sizes(text: str | None) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if not all(part.isdecimal() and int(part) for part in parts):
        raise click.UsageError(f"--batch-sizes {text}: give numbers of samples, such as 2,4,16")
    return [int(part) for part in parts]


def _totals(found: Profile) -> dict[str, Any]:
    return {
        "model": found.model,
        "batch_size": found.batch_size,
        "device": found.device,
        "layers": len(found.layers),
        "forward_seconds": sum(layer.forward_seconds for layer in found.layers),
        "backward_seconds": sum(layer.backward_seconds for layer in found.layers),
        "parameter_bytes": sum(layer.parameter_bytes for layer in found.layers),
        "error": found.error,
    }


def _describe(found: Profile, disagreement: float | None) -> str:
    totals = _totals(found)
    forward, backward = (format_seconds(totals[f"{direction}_seconds"]) for direction in ("forward", "backward"))
    text = (
        f"{found.model} on {found.device}, {format_samples(found.batch_size)}: "
        f"{format_count(len(found.layers), 'layer')}, forward {forward}, backward {backward}"
    )
    if found.whole is not None and disagreement is not None and found.error is not None:
        whole = format_seconds(found.whole.forward_seconds + found.whole.backward_seconds)
        text += f"\nthe whole model takes {whole}, the layers' sum is {disagreement:+.1%} from it"
        text += f"; half of the rounds are within {found.error:.1%} of the median"
    return text


# --- A profile as a table: where a model has many layers, those of one part are summed in one row


_MAX_ROWS = 30
_WIDTH = 120  # characters, in a file or a pipe
_HEADER = ("layer", "layers", "forward ms", "backward ms", "output MB", "stash MB", "weights MB")


def _format_layers(profile: Profile) -> list[str]:
    """Return the layers' costs in lines: milliseconds, and millions of bytes."""
    rows = [_row(name, layers) for name, layers in group_layers(profile.layers)]
    return format_table(_HEADER, rows, left=1, width=shutil.get_terminal_size((_WIDTH, 0)).columns)


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
