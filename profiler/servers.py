"""Servers and the kinds of their devices: validation, and their fields in a cluster's file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from dapple_tf.errors import ClusterError
from dapple_tf.profiler.quote import quote
from dapple_tf.profiler.read_files import naming_file
from dapple_tf.profiler.records import Count, Figure, Name
from dapple_tf.profiler.units import BYTES, format_quantity, parse_quantity
from dapple_tf.wording import format_count

_MOST_DEVICES = 100_000  # of a cluster in a file


@dataclass(frozen=True)
class DeviceKind:
    """A kind of devices: the memory and the speed of each.

    ``memory``: bytes of each; None is the cluster's ``device_memory``. ``speed``: how many times as fast as the device
    on which a profile was measured; None where only profiles with seconds of this kind are used.
    """

    memory: float | None = None
    speed: float | None = None


@dataclass(frozen=True)
class Server:
    """A machine and its number of devices.

    ``kinds``: the kind of each device, in their order; empty where they have none.
    """

    name: str
    devices: int
    kinds: tuple[str, ...] = ()

    @staticmethod
    def of_kinds(name: str, groups: Sequence[tuple[str, int]]) -> Server:
        """Return a server with the devices of ``groups``: pairs of a kind and its number of devices, in this order."""
        kinds = tuple(itertools.chain.from_iterable([kind] * count for kind, count in groups))
        return Server(name, len(kinds), kinds)

    def first_devices(self, count: int) -> Server:
        """Return this server with only its first ``count`` devices, or all if it has fewer."""
        return Server(self.name, min(count, self.devices), self.kinds[:count])


def check_servers(servers: tuple[Server, ...]) -> None:
    """Raise ClusterError unless there are servers, each with a name of its own and devices."""
    if not servers:
        raise ClusterError("servers is empty: a cluster needs at least one server")
    first: dict[str, int] = {}
    for index, server in enumerate(servers):
        check_type(f"servers[{index}]", server, Server)
        if not server.name:
            raise ClusterError(f"servers[{index}].name is empty: every server needs a name of its own")
        if first.setdefault(server.name, index) != index:
            raise ClusterError(
                f"servers[{index}].name is {server.name!r}, which is the name of servers[{first[server.name]}]: every "
                "server needs a name of its own"
            )
        check_whole(f"servers[{index}].devices", server.devices)
        if server.devices < 1:
            raise ClusterError(f"servers[{index}].devices is {server.devices}; it must be at least 1")
        if server.kinds and len(server.kinds) != server.devices:
            raise ClusterError(
                f"servers[{index}] has {format_count(server.devices, 'device')}, but kinds for {len(server.kinds)}: "
                "give one for each"
            )


def check_kinds(servers: Sequence[Server], kinds: Mapping[str, DeviceKind], device_memory: float | None) -> None:
    """Raise ClusterError for a kind that is not defined or impossible, and for a device without a memory."""
    for name, kind in kinds.items():
        if not name:
            raise ClusterError("kinds has an entry with an empty name: every kind needs a name")
        check_type(f"kinds.{name}", kind, DeviceKind)
        if kind.memory is not None:
            check_above_zero(f"kinds.{name}.memory", kind.memory)
        if kind.speed is not None:
            check_above_zero(f"kinds.{name}.speed", kind.speed)
    for index, server in enumerate(servers):
        for name in dict.fromkeys(server.kinds):
            if name not in kinds:
                known = f"it has {quote(list(kinds))}" if kinds else "it is empty or missing"
                raise ClusterError(
                    f"servers[{index}].devices names the kind {name!r}, which kinds does not define: {known}; "
                    "add the kind's memory and speed there"
                )
            if kinds[name].memory is None and device_memory is None:
                raise ClusterError(
                    f"kinds.{name}.memory is missing, and so is device_memory, which would stand in for it: give one"
                )
        if not server.kinds and device_memory is None:
            raise ClusterError(
                f"device_memory is missing, but the devices of servers[{index}] ({server.name!r}) have no kind that "
                "gives theirs"
            )


_LEAST, _LARGEST = 1e-100, 1e100  # products of two such values, and of their inverses, are finite and above 0


def check_above_zero(where: str, value: float) -> None:
    """Raise ClusterError, naming the field ``where``, unless ``value`` is a plausible number above 0."""
    if not (is_finite(value) and value > 0):
        raise ClusterError(f"{where} is {quote(value)}, not a finite number above 0")
    if not _LEAST <= value <= _LARGEST:
        raise ClusterError(f"{where} is {value:g}: it must be from {_LEAST:g} to {_LARGEST:g} to be plausible")


def is_finite(value: object) -> bool:
    """Return whether ``value`` is a finite number; a text such as "16GB" is none."""
    return isinstance(value, Real) and math.isfinite(value)


def check_type(where: str, value: object, kind: type[Any]) -> None:
    """Raise ClusterError, naming the field ``where``, unless ``value`` is an object of the dataclass ``kind``."""
    if not isinstance(value, kind):
        names = ", ".join(field.name for field in fields(kind)[:2])
        raise ClusterError(f"{where} is {quote(value)}, not a {kind.__name__}: give {kind.__name__}({names})")


def check_whole(where: str, value: object) -> None:
    """Raise ClusterError, naming the field ``where``, unless ``value`` is a whole number."""
    if not isinstance(value, Integral):
        raise ClusterError(f"{where} is {quote(value)}, not a whole number")


def devices_to_data(server: Server) -> int | list[dict[str, Any]]:
    """Return a server's devices as its file holds them: a count, or a list of kinds and counts."""
    if not server.kinds:
        return server.devices
    return [{"kind": kind, "count": len(list(group))} for kind, group in itertools.groupby(server.kinds)]


def kind_to_data(kind: DeviceKind) -> dict[str, Any]:
    """Return a kind as the cluster's file holds it."""
    memory = {} if kind.memory is None else {"memory": format_quantity(kind.memory, BYTES)}
    return memory if kind.speed is None else {**memory, "speed": kind.speed}


# --- Servers and kinds as a cluster's file holds them

Quantity = Name | Figure
"""A text such as ``16GB``, or a number in base units."""


@dataclass(frozen=True)
class DeviceGroup:
    """Consecutive devices of one kind in a server."""

    kind: Name
    count: Count


@dataclass(frozen=True)
class ServerRecord:
    """A server: the number of its devices, or their kinds."""

    name: Name
    devices: Count | tuple[DeviceGroup, ...]

    @property
    def device_count(self) -> int:
        """The number of devices."""
        return self.devices if isinstance(self.devices, int) else sum(group.count for group in self.devices)


@dataclass(frozen=True)
class KindRecord:
    """A kind of devices."""

    memory: Quantity | None = None
    speed: Figure | None = None


def make_servers(records: Sequence[ServerRecord]) -> tuple[Server, ...]:
    """Return the servers of a cluster's file; ClusterError names the field that is wrong."""
    for index, record in enumerate(records):
        for place, group in enumerate(() if isinstance(record.devices, int) else record.devices):
            if not group.count:
                raise ClusterError(f"servers[{index}].devices[{place}].count is 0; it must be at least 1")
    if sum(record.device_count for record in records) > _MOST_DEVICES:
        raise ClusterError(f"servers have more than {_MOST_DEVICES} devices together, which is more than is plausible")
    return tuple(
        Server(record.name, record.devices)
        if isinstance(record.devices, int)
        else Server.of_kinds(record.name, [(group.kind, group.count) for group in record.devices])
        for record in records
    )


def make_kinds(records: Mapping[str, KindRecord]) -> dict[str, DeviceKind]:
    """Return the kinds of devices of a cluster's file; ClusterError names the field that is wrong."""
    return {
        name: DeviceKind(
            None if record.memory is None else parse_field(f"kinds.{name}.memory", record.memory, BYTES), record.speed
        )
        for name, record in records.items()
    }


def parse_field(where: str, value: Quantity, units: Mapping[str, Any]) -> float:
    """Return a quantity such as ``16GB`` in base units; ClusterError names the field ``where``."""
    with naming_file(where, ClusterError):
        return parse_quantity(value, units)
