"""A profile: the cost of each layer of a model, in seconds of forward and backward and in bytes.

File format ``dapple-profile/1`` (JSON).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dapple_tf.errors import ProfileError
from dapple_tf.profiler.cluster import Cluster
from dapple_tf.profiler.files import describe_reason, write_atomically
from dapple_tf.profiler.read_files import naming_file, read_json
from dapple_tf.profiler.records import Count, Figure, Name, read_record, write_record
from dapple_tf.profiler.topology import check_edges
from dapple_tf.wording import format_count

FORMAT = "dapple-profile/1"

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class KindSeconds:
    """Seconds of one layer for the profile's batch on devices of one kind."""

    forward_seconds: Figure
    backward_seconds: Figure


@dataclass(frozen=True)
class LayerCost:
    """Costs of one layer for the profile's batch.

    ``activation_bytes``: outputs that later layers read, each counted once. ``stash_bytes``: tensors that are kept from
    forward for backward. ``parameter_bytes``: weights; these do not grow with the batch. ``weights_seconds``: the part
    of backward that computes gradients of weights, where it was measured. ``kinds``: the seconds on devices of other
    kinds, by the kind's name in a cluster, where they were measured.
    """

    name: Name
    forward_seconds: Figure
    backward_seconds: Figure
    activation_bytes: Figure
    stash_bytes: Figure
    parameter_bytes: Figure
    weights_seconds: Figure | None = None
    kinds: Mapping[str, KindSeconds] = dataclasses.field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Timing:
    """Seconds of every layer at a batch size other than the profile's."""

    batch_size: Count
    forward_seconds: tuple[Figure, ...]
    backward_seconds: tuple[Figure, ...]


@dataclass(frozen=True)
class WholeModel:
    """The whole model's measured seconds for the profile's batch; the sum of the layers should be close to it."""

    forward_seconds: Figure
    backward_seconds: Figure


@dataclass(frozen=True)
class Profile:
    """Costs of the layers of ``model``, in an order in which they can run, measured on ``device``.

    ``edges``: pairs (from, to) of layers, by index, where the second reads an output of the first; None is a chain.
    ``timings``: further batch sizes, ascending. ``uncuttable``: positions where no stage may start (position p is
    before layer p). ``unsplittable``: positions where stages with different replicas cannot meet. ``error``: the
    relative spread of the measured times. Raises ProfileError for values that are impossible.
    """

    model: Name
    batch_size: Count
    device: Name
    layers: tuple[LayerCost, ...]
    edges: tuple[tuple[Count, Count], ...] | None = None
    timings: tuple[Timing, ...] = ()
    uncuttable: tuple[Count, ...] = ()
    unsplittable: tuple[Count, ...] = ()
    whole: WholeModel | None = None
    error: Figure | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ProfileError(f"batch_size is {self.batch_size}; it must be at least 1")
        if not self.layers:
            raise ProfileError("layers is empty: a profile needs at least one layer")
        _check_layers(self.layers)
        if self.edges is not None:
            check_edges([layer.name for layer in self.layers], self.edges)
        _check_timings(self.timings, self.batch_size, len(self.layers))
        for field in ("uncuttable", "unsplittable"):
            _check_positions(field, getattr(self, field), len(self.layers))
        if self.whole is not None:
            _check_figure("whole.forward_seconds", self.whole.forward_seconds)
            _check_figure("whole.backward_seconds", self.whole.backward_seconds)
        if self.error is not None:
            _check_figure("error", self.error)

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
        """The edges, also where ``edges`` is None (a chain)."""
        return tuple(itertools.pairwise(range(len(self.layers)))) if self.edges is None else self.edges

    def forward_seconds(self, samples: float) -> Floats:
        """Return the forward seconds of every layer for ``samples`` samples.

        With one measured batch size, time is proportional to the samples. With several, it is the measured time at each
        of them (or the largest so far, where noise made a larger batch faster) and linear between them. Above them, it
        follows the line through the two largest. Below them, it follows the line through the two smallest, or a line
        through the origin where that one would be negative at 0 samples. So time never falls as samples grow. Raises
        ProfileError for negative or non-finite samples.
        """
        return _interpolate(self.measured_sizes, self._tables["forward_seconds"], samples)

    def backward_seconds(self, samples: float) -> Floats:
        """Return the backward seconds of every layer for ``samples`` samples; see ``forward_seconds``."""
        return _interpolate(self.measured_sizes, self._tables["backward_seconds"], samples)

    def model_seconds(self, samples: float) -> float:
        """Return the forward and backward seconds of all layers for ``samples`` samples; see ``forward_seconds``."""
        return float(self.forward_seconds(samples).sum() + self.backward_seconds(samples).sum())

    def weights_seconds(self, samples: float) -> Floats:
        """Return the part of ``backward_seconds`` that computes gradients of weights; the rest is for inputs.

        Its share is that of the profile's batch. Where it was not measured, it is one half for a layer with parameters
        (the two gradients of a matrix product are equal work), and 0 for others. Raises ProfileError as
        ``forward_seconds`` does.
        """
        return self.backward_seconds(samples) * self._weights_share

    def of_kind(self, kind: str | None, speed: float | None = 1.0) -> Profile:
        """Return the profile of the same model on devices of ``kind``, which are ``speed`` times as fast.

        A layer that has seconds of this kind takes these; at other batch sizes they keep their ratio to the profile's
        own. Any other layer takes its seconds / ``speed``. None is the kind of the device of the profile. Raises
        ProfileError, naming the layer, where a layer has no seconds of this kind and there is no speed.
        """
        if (kind, speed) not in self._of_kinds:
            self._of_kinds[kind, speed] = _on_kind(self, kind, speed)
        return self._of_kinds[kind, speed]

    def crossing_bytes(self) -> Floats:
        """Return the bytes that cross each cut, for the profile's batch; entry p - 1 is the cut before layer p.

        A layer's output counts once at every cut between the layer and its last reader.
        """
        return self._crossing

    def working_bytes(self) -> Floats:
        """Return the bytes of gradients live while each layer's backward runs, for the profile's batch.

        These are the gradients of its output and its inputs. Free layers have none: the gradient of a view is a view.
        """
        return self._working

    @cached_property
    def parameter_bytes(self) -> Floats:
        """Bytes of every layer's weights."""
        return _shared(layer.parameter_bytes for layer in self.layers)

    @cached_property
    def stash_bytes(self) -> Floats:
        """Bytes that every layer keeps for backward, for the profile's batch."""
        return _shared(layer.stash_bytes for layer in self.layers)

    @cached_property
    def free_layers(self) -> tuple[bool, ...]:
        """Whether each layer is free: no seconds at any batch size, no weights and no stash (a view, an input)."""
        seconds = np.zeros(len(self.layers))
        for size in self.measured_sizes:
            seconds += self.forward_seconds(size) + self.backward_seconds(size)
        return tuple((seconds + self.parameter_bytes + self.stash_bytes == 0).tolist())

    def positions(self) -> tuple[int, ...]:
        """Return the layers at which a stage may start, without the first."""
        return tuple(sorted(set(range(1, len(self.layers))) - set(self.uncuttable)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to ``path`` as JSON; a failure leaves the old file.

        Raises ProfileError where the file cannot be written.
        """
        try:
            write_atomically(Path(path), json.dumps(_to_json(self), indent=2, allow_nan=False) + "\n")
        except (OSError, ValueError) as error:
            raise ProfileError(f"{path}: the profile cannot be written: {describe_reason(error)}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a profile; ProfileError names the file and the field that is wrong."""
        with naming_file(path, ProfileError):
            return read_record(read_json(path, ProfileError), Profile, ProfileError, file_format=FORMAT)

    @cached_property
    def _of_kinds(self) -> dict[tuple[str | None, float | None], Profile]:
        return {}

    @cached_property
    def _weights_share(self) -> Floats:
        return _shared(
            (0.5 if layer.parameter_bytes else 0.0)
            if layer.weights_seconds is None
            else (layer.weights_seconds / layer.backward_seconds if layer.weights_seconds else 0.0)
            for layer in self.layers
        )

    @cached_property
    def _crossing(self) -> Floats:
        crossing = np.zeros(len(self.layers) - 1)
        last = dict(sorted(self.links))  # of equal sources the later wins: the last reader
        for source, reader in last.items():
            crossing[source:reader] += self.layers[source].activation_bytes
        return _shared(crossing)

    @cached_property
    def _working(self) -> Floats:
        working = np.array([layer.activation_bytes for layer in self.layers], dtype=np.float64)
        for source, reader in self.links:
            working[reader] += self.layers[source].activation_bytes
        working[np.array(self.free_layers)] = 0
        return _shared(working)

    @cached_property
    def measured_sizes(self) -> tuple[int, ...]:
        """The batch sizes (samples) that the profile has times for, ascending."""
        return tuple(sorted([self.batch_size, *(timing.batch_size for timing in self.timings)]))

    @cached_property
    def _tables(self) -> dict[str, Floats]:
        """For each direction, a row of seconds for each of ``measured_sizes``; made monotonic in the size."""
        return {field: self._table(field) for field in _SECONDS}

    def _table(self, field: str) -> Floats:
        rows = {timing.batch_size: getattr(timing, field) for timing in self.timings}
        rows[self.batch_size] = tuple(getattr(layer, field) for layer in self.layers)
        return np.maximum.accumulate(np.array([rows[size] for size in self.measured_sizes], dtype=np.float64))


def _shared(figures: Iterable[float]) -> Floats:
    """Return a read-only array: all callers get the same one."""
    array = np.fromiter(figures, np.float64)
    array.flags.writeable = False
    return array


def _interpolate(sizes: Sequence[int], times: Floats, samples: float) -> Floats:
    """Return a row of seconds for ``samples``, from a row for each size; see ``Profile.forward_seconds``."""
    if not (math.isfinite(samples) and samples >= 0):
        raise ProfileError(f"samples is {samples}, not a finite number of at least 0")
    through_origin: Floats = times[0] * (samples / sizes[0])
    if len(sizes) == 1:
        return through_origin
    above = int(np.searchsorted(sizes, samples))
    if above < len(sizes) and sizes[above] == samples:
        measured: Floats = times[above].copy()
        return measured
    low = min(max(above - 1, 0), len(sizes) - 2)
    slope = (times[low + 1] - times[low]) / (sizes[low + 1] - sizes[low])
    # Computed from the measured size below (above, if there is none), so that rounding cannot make time fall.
    line: Floats
    if above == 0:
        line = np.where(slope * sizes[0] <= times[0], times[0] - slope * (sizes[0] - samples), through_origin)
    elif above == len(sizes):
        line = times[-1] + slope * (samples - sizes[-1])
    else:
        line = np.minimum(times[low] + slope * (samples - sizes[low]), times[low + 1])
    return line


_SECONDS = ("forward_seconds", "backward_seconds")
_COSTS = (*_SECONDS, "activation_bytes", "stash_bytes", "parameter_bytes")  # of every layer
_LARGEST = 1e18  # sums and products of such values are still finite


def _check_figure(where: str, value: float) -> None:
    if not math.isfinite(value) or value < 0:
        raise ProfileError(f"{where} is {value}, not a finite number of at least 0")
    if value > _LARGEST:
        raise ProfileError(f"{where} is {value:g}, larger than is plausible ({_LARGEST:g})")


def _check_layers(layers: Sequence[LayerCost]) -> None:
    first: dict[str, int] = {}
    for index, layer in enumerate(layers):
        if not layer.name:
            raise ProfileError(f"layers[{index}].name is empty: every layer needs a name of its own")
        if first.setdefault(layer.name, index) != index:
            raise ProfileError(
                f"layers[{index}].name is {layer.name!r}, which is the name of layers[{first[layer.name]}]: every "
                "layer needs a name of its own"
            )
        for field in _COSTS:
            _check_figure(f"layers[{index}].{field} ({layer.name})", getattr(layer, field))
        for kind, seconds in layer.kinds.items():
            for name in _SECONDS:
                _check_figure(f"layers[{index}].kinds.{kind}.{name} ({layer.name})", getattr(seconds, name))
        if layer.weights_seconds is not None:
            where = f"layers[{index}].weights_seconds ({layer.name})"
            _check_figure(where, layer.weights_seconds)
            if layer.weights_seconds > layer.backward_seconds:
                raise ProfileError(
                    f"{where} is {layer.weights_seconds:g}, more than its backward_seconds "
                    f"{layer.backward_seconds:g}, which includes it"
                )


def _on_kind(profile: Profile, kind: str | None, speed: float | None) -> Profile:
    """Return ``profile.of_kind(kind, speed)``; the profile itself where nothing differs."""
    if speed is not None and not (math.isfinite(speed) and speed > 0):
        raise ProfileError(f"the speed of {kind!r} is {speed}, not a finite number above 0")
    if kind is None or (speed == 1.0 and not any(kind in layer.kinds for layer in profile.layers)):
        return profile
    layers = []
    for index, layer in enumerate(profile.layers):
        own = layer.kinds.get(kind)
        if own is None and speed is None:
            raise ProfileError(
                f"layers[{index}].kinds ({layer.name}) has no seconds of {kind!r}, and the cluster gives that kind no "
                f"speed: add kinds.{kind}.speed to the cluster, or the layer's seconds on such a device to the profile"
            )
        own = own or KindSeconds(layer.forward_seconds / (speed or 1.0), layer.backward_seconds / (speed or 1.0))
        weights = layer.weights_seconds
        if weights:  # keeps its share of backward
            weights = min(own.backward_seconds, weights / layer.backward_seconds * own.backward_seconds)
        layers.append(replace(layer, **asdict(own), weights_seconds=weights, kinds={}))
    timings = tuple(
        Timing(timing.batch_size, *(_on_kind_at(profile, layers, timing, seconds) for seconds in _SECONDS))
        for timing in profile.timings
    )
    return replace(profile, device=kind, layers=tuple(layers), timings=timings, whole=None, error=None)


def _on_kind_at(profile: Profile, on_kind: Sequence[LayerCost], timing: Timing, seconds: str) -> tuple[float, ...]:
    """Return the seconds of every layer on devices of a kind at another batch size; ``on_kind``: at the profile's."""
    found = []
    for layer, own, value in zip(profile.layers, on_kind, getattr(timing, seconds), strict=True):
        before, after = getattr(layer, seconds), getattr(own, seconds)
        found.append(value * (after / before) if before else after * timing.batch_size / profile.batch_size)
    return tuple(found)


def _check_timings(timings: Sequence[Timing], batch_size: int, layers: int) -> None:
    before = 0
    for index, timing in enumerate(timings):
        where = f"timings[{index}]"
        if timing.batch_size <= before or timing.batch_size == batch_size:
            raise ProfileError(
                f"{where}.batch_size is {timing.batch_size}; timings must be at ascending sizes from 1, each once and "
                f"none the profile's own {batch_size}"
            )
        before = timing.batch_size
        for field in _SECONDS:
            seconds = getattr(timing, field)
            if len(seconds) != layers:
                raise ProfileError(
                    f"{where}.{field} has {format_count(len(seconds), 'value')}, but there are "
                    f"{format_count(layers, 'layer')}"
                )
            for layer, value in enumerate(seconds):
                _check_figure(f"{where}.{field}[{layer}]", value)


def _check_positions(field: str, positions: Sequence[int], layers: int) -> None:
    for index, position in enumerate(positions):
        if not 1 <= position < layers:
            raise ProfileError(
                f"{field}[{index}] is {position}, but the positions between two layers are 1 to {layers - 1}"
            )


def _to_json(profile: Profile) -> dict[str, Any]:
    """Return the file's fields; empty optional ones are left out, but for ``edges``: without it a file is a chain."""
    return {
        "format": FORMAT,
        **write_record(profile, empty=False),
        **({} if profile.edges is None else {"edges": profile.edges}),
    }


# --- The profile of a model on each device of a cluster, by the device's kind


def profile_on(profile: Profile, cluster: Cluster, device: int) -> Profile:
    """Return the profile with the seconds of one device; see ``Profile.of_kind``.

    Raises ProfileError, naming the layer and the kind, where the profile has no seconds of the kind, and the cluster
    gives the kind no speed.
    """
    kind = cluster.kind_of(device)
    return profile.of_kind(kind, cluster.kind_speed(kind))


def profiles_on(profile: Profile, cluster: Cluster) -> tuple[Profile, ...]:
    """Return the profile on each kind of device of the cluster, each kind once, in the order of the devices.

    Raises what ``profile_on`` raises.
    """
    return tuple(profile.of_kind(kind, cluster.kind_speed(kind)) for kind in dict.fromkeys(cluster.device_kinds))
