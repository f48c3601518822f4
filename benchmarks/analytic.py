"""Analytic V100 profiles of ``dapple_tf.examples`` beside the profiles that DAPPLE published."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

import dapple_tf as dapple
from benchmarks import published
from benchmarks.common import Row
from dapple_tf import examples
from dapple_tf.profiler.importers import read_graph_file
from dapple_tf.profiler.profile import LayerCost, Profile


@dataclass(frozen=True)
class Pair:
    """A published profile and the example that it is compared with.

    ``units``: a pattern for the names of the example's layers that correspond, in order, to the published ``units``.
    ``options``: those of the example that give the published sizes.
    """

    model: published.Model
    build: Callable[..., dapple.Workload]
    units: str
    options: Mapping[str, Any]


PAIRS = (
    Pair(published.VGG, examples.vgg, r"block\d_conv\d|fc\d|predictions", {"scale": "19"}),
    Pair(published.GNMT, examples.gnmt, r"(encoder|decoder)_\d", {}),
    # The published outputs are those of 384 tokens.
    Pair(published.BERT, examples.bert, r"block_\d", {"context": 384}),
    Pair(published.XLNET, examples.xlnet, r"block_\d", {}),
    Pair(published.AMOEBA, examples.amoebanet, r"(reduction_)?cell_\d", {}),
)


def run() -> Iterator[Row]:
    """Yield totals, parameters, outputs and the order of the layers' times, of each model."""
    for pair in PAIRS:
        if not published.PROFILES.is_dir():
            yield Row(pair.model.title, "-", "skipped: ../shared/profiles is not here", True)
            continue
        theirs = read_graph_file(published.PROFILES / f"{pair.model.file}.txt", size_scale=pair.model.size_scale)
        with dapple.scope():
            workload = pair.build(batch_size=theirs.batch_size, **pair.options)
        batch = next(iter(workload.dataset))
        yield from compare_profiles(pair, theirs, dapple.analytic_profile(workload.loss_fn, batch, "V100"))


def compare_profiles(pair: Pair, theirs: Profile, ours: Profile) -> Iterator[Row]:
    """Yield the rows of one model."""
    title = pair.model.title
    for direction in ("forward", "backward"):
        mine, wanted = (
            sum(getattr(layer, f"{direction}_seconds") for layer in profile.layers) for profile in (ours, theirs)
        )
        yield _row(f"{title}: {direction}", wanted * 1e3, mine * 1e3, "ms", within=2.0)
    mine, wanted = (sum(layer.parameter_bytes for layer in profile.layers) / 4e6 for profile in (ours, theirs))
    yield _row(f"{title}: parameters", wanted, mine, "million", within=1.05)

    my_units = find_units(ours, pair.units)
    their_units = [[layer] for layer in theirs.layers if re.match(pair.model.units, layer.name)]
    if len(my_units) != len(their_units):
        counts = f"{len(my_units)} layers correspond to {len(their_units)}"
        yield Row(f"{title}: layers", "as many as published", counts, False)
        return
    outputs = [median(unit[-1].activation_bytes for unit in units) / 1e6 for units in (my_units, their_units)]
    yield _row(f"{title}: median output of a layer", outputs[1], outputs[0], "MB", within=2.0)
    times = [
        [sum(layer.forward_seconds + layer.backward_seconds for layer in unit) for unit in units]
        for units in (my_units, their_units)
    ]
    if len(set(times[1])) > 1:
        correlation = rank_correlation(*times)
        yield Row(f"{title}: rank correlation of {len(my_units)} layers", "reported", f"{correlation:.2f}", True)


def find_units(profile: Profile, pattern: str) -> Sequence[Sequence[LayerCost]]:
    """Return the layers of each part of the model whose name matches, in the order of the model.

    A layer's name is a path, such as bert/block_3/attention/qkv; parts are the names behind the model's.
    """
    units: dict[str, list[LayerCost]] = {}
    for layer in profile.layers:
        path = layer.name.split("/")
        if len(path) > 1 and re.match(pattern, path[1]):
            units.setdefault(path[1], []).append(layer)
    return list(units.values())


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's coefficient: the correlation of the ranks, where equal values share their mean rank."""
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[numbers]


def _row(figure: str, wanted: float, mine: float, unit: str, within: float) -> Row:
    ratio = mine / wanted
    ok = 1 / within <= ratio <= within
    return Row(figure, f"{wanted:.4g} {unit}, within {within:g}x", f"{mine:.4g} {unit} ({ratio:.2f}x)", ok)
