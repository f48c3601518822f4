"""A cluster: servers, devices, and the links between them.

File format ``dapple-cluster/1`` (YAML or JSON).
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from profiler.detect import host_memory, local_devices, processes_per_server
from profiler.errors import ClusterError
from profiler.fields import Fields
from profiler.files import write_atomically
from profiler.quote import quote
from profiler.read_files import naming_file, read_json, read_text, read_yaml
from profiler.units import BYTES, BYTES_A_SECOND, SECONDS, format_quantity, parse_quantity

FORMAT = "dapple-cluster/1"

_MOST_DEVICES = 100_000  # of a cluster in a file


@dataclass(frozen=True)
class Server:
    """A machine and its number of devices."""

    name: str
    devices: int


@dataclass(frozen=True)
class Link:
    """A link: ``bandwidth`` in bytes per second, ``latency`` in seconds."""

    bandwidth: float
    latency: float


# Between devices of one process, which share its memory: a tensor is not copied.
IN_PROCESS = Link(bandwidth=1e12, latency=0.0)
# Assumed between the GPUs of a server until it is measured: PCI Express 3.0 x16, at the speed it reaches in practice.
_PCI_EXPRESS = Link(bandwidth=12e9, latency=10e-6)
# Assumed between processes of a host without GPUs: Horovod's alltoall, measured on a small machine.
_BETWEEN_PROCESSES = Link(bandwidth=2.5e9, latency=0.5e-3)


@dataclass(frozen=True)
class Cluster:
    """Servers and their links. Devices are numbered from 0, server by server.

    ``device_memory``: bytes of each device. ``intra_server``: the link between devices of one server.
    ``inter_server``: the network interface of each server. ``links``: pairs of server names that have a link of their
    own, in either order; a pair of one name twice is the link inside that server. Raises ClusterError naming the field
    that is wrong.
    """

    servers: tuple[Server, ...]
    device_memory: float
    intra_server: Link
    inter_server: Link
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_servers(self.servers)
        _check_above_zero("device_memory", self.device_memory)
        _check_link("intra_server", self.intra_server)
        _check_link("inter_server", self.inter_server)
        names = {server.name: None for server in self.servers}
        for (a, b), link in self.links.items():
            for name in (a, b):
                if name not in names:
                    raise ClusterError(f"links: {a!r} to {b!r} names {name!r}; the servers are {quote(list(names))}")
            if a != b and (b, a) in self.links:
                raise ClusterError(f"links: {a!r} to {b!r} is given twice: a link has no direction")
            _check_link(f"links: {a!r} to {b!r}", link)

    @cached_property
    def homes(self) -> tuple[int, ...]:
        """The index of each device's server."""
        return tuple(
            itertools.chain.from_iterable([index] * server.devices for index, server in enumerate(self.servers))
        )

    @property
    def devices(self) -> int:
        """The number of devices."""
        return len(self.homes)

    def link(self, a: int, b: int) -> Link:
        """Return the link between two servers (by index), or inside one."""
        names = self.servers[a].name, self.servers[b].name
        own = self.links.get(names) or self.links.get(names[::-1])
        return own or (self.intra_server if a == b else self.inter_server)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster to ``path``, as JSON if it ends in .json, else as YAML; a failure leaves the old file.

        Raises ClusterError where the file cannot be written.
        """
        data = _to_data(self)
        as_json = Path(path).suffix.lower() == ".json"
        text = json.dumps(data, indent=2) + "\n" if as_json else yaml.safe_dump(data, sort_keys=False)
        try:
            write_atomically(Path(path), text)
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ClusterError(f"{path}: the cluster cannot be written: {why}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster from a JSON or YAML file; ClusterError names the file and the field that is wrong.

        ``inter_server`` may be missing if there is one server, and ``intra_server`` if every server has one device.
        """
        with naming_file(path, ClusterError):
            return _from_data(_read(path))

    @staticmethod
    def detect(
        devices: int | None = None,
        *,
        intra_server: Link | None = None,
        inter_server: Link | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> Cluster:
        """Return the cluster that this process runs on.

        In a job its servers are those that the launcher's ``environment`` names, with one device per process. Without
        a job it is this machine, with ``devices`` devices if given, else TensorFlow's GPUs, else the logical CPU
        devices that ``dapple.init`` made. A device's memory is the GPU's, or its share of the host's. Where
        ``intra_server`` is not given it is shared memory (CPU devices of one process), 2.5 GB/s and 0.5 ms (processes
        on CPUs), or 12 GB/s and 10 us (GPUs).

        Raises ClusterError where the environment contradicts itself or ``devices``, and for several servers without
        ``inter_server``.
        """
        if devices is not None and devices < 1:
            raise ClusterError(f"devices={devices}: a cluster needs at least one device")
        counts = processes_per_server(environment)
        if sum(counts) > 1:
            if devices not in (None, sum(counts)):
                raise ClusterError(
                    f"devices={devices}, but the launcher started {sum(counts)} processes, a device each"
                )
            if len(counts) > 1 and inter_server is None:
                raise ClusterError(
                    f"the job runs on {len(counts)} servers, and the link between them is unknown: measure it "
                    "(profiler.links.probe), or give inter_server"
                )
        found, gpu_memory = local_devices(devices)
        if sum(counts) <= 1:
            counts, assumed = (found,), IN_PROCESS if gpu_memory is None else _PCI_EXPRESS
        else:
            assumed = _BETWEEN_PROCESSES if gpu_memory is None else _PCI_EXPRESS
        inside = intra_server or assumed
        return Cluster(
            servers=tuple(Server(f"server{index}", count) for index, count in enumerate(counts)),
            device_memory=host_memory() / max(counts) if gpu_memory is None else gpu_memory,
            intra_server=inside,
            inter_server=inter_server or inside,
        )


def _check_servers(servers: tuple[Server, ...]) -> None:
    if not servers:
        raise ClusterError("servers is empty: a cluster needs at least one server")
    first: dict[str, int] = {}
    for index, server in enumerate(servers):
        if not server.name:
            raise ClusterError(f"servers[{index}].name is empty: every server needs a name of its own")
        if first.setdefault(server.name, index) != index:
            raise ClusterError(
                f"servers[{index}].name is {server.name!r}, as is that of servers[{first[server.name]}]: every server "
                "needs a name of its own"
            )
        if server.devices < 1:
            raise ClusterError(f"servers[{index}].devices is {server.devices}; it must be at least 1")


def _check_above_zero(where: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ClusterError(f"{where} is {value}, not a finite number above 0")


def _check_link(where: str, link: Link) -> None:
    _check_above_zero(f"{where}.bandwidth", link.bandwidth)
    if not (math.isfinite(link.latency) and link.latency >= 0):
        raise ClusterError(f"{where}.latency is {link.latency}, not a finite number of at least 0")


def _to_data(cluster: Cluster) -> dict[str, Any]:
    data: dict[str, Any] = {
        "format": FORMAT,
        "device_memory": format_quantity(cluster.device_memory, BYTES),
        "servers": [{"name": server.name, "devices": server.devices} for server in cluster.servers],
        "intra_server": _link_to_data(cluster.intra_server),
        "inter_server": _link_to_data(cluster.inter_server),
    }
    if cluster.links:
        data["links"] = [{"between": list(pair), **_link_to_data(link)} for pair, link in cluster.links.items()]
    return data


def _link_to_data(link: Link) -> dict[str, str]:
    return {
        "bandwidth": format_quantity(link.bandwidth, BYTES_A_SECOND),
        "latency": format_quantity(link.latency, SECONDS),
    }


def _read(path: str | os.PathLike[str]) -> Any:
    """Return the file's data: as JSON or YAML by its suffix, or by its first character if the suffix is another."""
    suffix = Path(path).suffix.lower()
    text = "" if suffix in (".json", ".yaml", ".yml") else read_text(path, ClusterError)
    if suffix == ".json" or text.lstrip().startswith("{"):
        return read_json(path, ClusterError)
    return read_yaml(path, ClusterError)


def _from_data(data: Any) -> Cluster:
    known = ("device_memory", "servers", "intra_server", "inter_server", "links")
    top = Fields.of(data, ClusterError, known=known, file_format=FORMAT)
    servers = tuple(
        Server(server.text("name"), server.integer("devices"))
        for server in top.each("servers", known=("name", "devices"))
    )
    if sum(server.devices for server in servers) > _MOST_DEVICES:
        raise ClusterError(f"servers have more than {_MOST_DEVICES} devices together, which is more than is plausible")
    intra, inter = (_link_of(top, key) for key in ("intra_server", "inter_server"))
    if inter is None and len(servers) > 1:
        raise ClusterError(f"inter_server is missing, but there are {len(servers)} servers")
    if intra is None and any(server.devices > 1 for server in servers):
        raise ClusterError("intra_server is missing, but a server has several devices")
    links: dict[tuple[str, str], Link] = {}
    for item in top.each("links", known=("between", "bandwidth", "latency")) if top.has("links") else ():
        pair = item.texts("between")
        if len(pair) != 2:
            raise ClusterError(f"{item.where}between is {list(pair)}, not two names of servers")
        if pair in links or pair[::-1] in links:
            raise ClusterError(f"{item.where}between: the link of {pair[0]!r} and {pair[1]!r} is given twice")
        links[pair[0], pair[1]] = _parse_link(item)
    return Cluster(
        servers=servers,
        device_memory=_parse(top, "device_memory", BYTES),
        intra_server=intra or inter or IN_PROCESS,
        inter_server=inter or intra or IN_PROCESS,
        links=links,
    )


def _link_of(top: Fields, key: str) -> Link | None:
    return _parse_link(top.inner(key, known=("bandwidth", "latency"))) if top.has(key) else None


def _parse_link(item: Fields) -> Link:
    return Link(_parse(item, "bandwidth", BYTES_A_SECOND), _parse(item, "latency", SECONDS))


def _parse(item: Fields, key: str, units: Mapping[str, Any]) -> float:
    with naming_file(item.where + key, ClusterError):
        return parse_quantity(item.scalar(key), units)
