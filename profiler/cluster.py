"""A cluster: servers, devices, and the links between them.

File format ``dapple-cluster/1`` (YAML or JSON).
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from dapple_tf.errors import ClusterError
from dapple_tf.profiler.detect import host_memory, local_devices, processes_per_server
from dapple_tf.profiler.files import describe_reason, write_atomically
from dapple_tf.profiler.quote import quote
from dapple_tf.profiler.read_files import naming_file, read_json, read_text, read_yaml
from dapple_tf.profiler.records import Name, read_record
from dapple_tf.profiler.servers import (
    DeviceKind,
    KindRecord,
    Quantity,
    Server,
    ServerRecord,
    check_above_zero,
    check_kinds,
    check_servers,
    check_type,
    devices_to_data,
    is_finite,
    kind_to_data,
    make_kinds,
    make_servers,
    parse_field,
)
from dapple_tf.profiler.units import BYTES, BYTES_A_SECOND, SECONDS, format_quantity
from dapple_tf.wording import format_count

# --- A link between devices or servers


@dataclass(frozen=True)
class Link:
    """A link: ``bandwidth`` in bytes per second, ``latency`` in seconds."""

    bandwidth: float
    latency: float


# --- A cluster: servers, devices, and the links between them


__all__ = ["EXECUTIONS", "FORMAT", "IN_PROCESS", "Cluster", "DeviceKind", "Link", "Server"]

FORMAT = "dapple-cluster/1"

EXECUTIONS = ("sync", "async")


# Between devices of one process, which share its memory: a tensor is not copied.
IN_PROCESS = Link(bandwidth=1e12, latency=0.0)
# Assumed between the GPUs of a server until it is measured: PCI Express 3.0 x16, at the speed it reaches in practice.
_PCI_EXPRESS = Link(bandwidth=12e9, latency=10e-6)
# Assumed between processes of a host without GPUs: Horovod's alltoall, measured on a small machine.
_BETWEEN_PROCESSES = Link(bandwidth=2.5e9, latency=0.5e-3)


@dataclass(frozen=True)
class Cluster:
    """Servers and their links. Devices are numbered from 0, server by server.

    ``device_memory``: bytes of each device whose kind gives none; None where every kind gives its own.
    ``intra_server``: the link between devices of one server. ``inter_server``: the network interface of each server.
    ``links``: pairs of server names that have a link of their own, in either order; a pair of one name twice is the
    link inside that server. ``kinds``: the kinds of devices, by the names that servers use. ``execution``: "async"
    where the devices can compute while they communicate (BaPipe, section 3.2), else "sync". Raises ClusterError that
    names the field that is wrong.
    """

    servers: tuple[Server, ...]
    device_memory: float | None
    intra_server: Link
    inter_server: Link
    links: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    kinds: Mapping[str, DeviceKind] = field(default_factory=dict)
    execution: str = "sync"

    def __post_init__(self) -> None:
        check_servers(self.servers)
        if self.device_memory is not None:
            check_above_zero("device_memory", self.device_memory)
        if self.execution not in EXECUTIONS:
            raise ClusterError(f"execution is {quote(self.execution)}, not {' or '.join(map(repr, EXECUTIONS))}")
        check_kinds(self.servers, self.kinds, self.device_memory)
        _check_link("intra_server", self.intra_server)
        _check_link("inter_server", self.inter_server)
        _check_names(self.links, [server.name for server in self.servers])
        for (a, b), link in self.links.items():
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

    @cached_property
    def device_kinds(self) -> tuple[str | None, ...]:
        """The kind of each device; None for one without a kind."""
        return tuple(itertools.chain.from_iterable(server.kinds or [None] * server.devices for server in self.servers))

    @cached_property
    def memories(self) -> tuple[float, ...]:
        """The bytes of each device."""
        of_kind = {kind: self._memory_of_kind(kind) for kind in set(self.device_kinds)}
        return tuple(of_kind[kind] for kind in self.device_kinds)

    @cached_property
    def least_memory(self) -> float:
        """The bytes of the device that has fewest."""
        return min(self.memories)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all devices are of one kind, or none has a kind."""
        return len(set(self.device_kinds)) == 1

    def kind_of(self, device: int) -> str | None:
        """Return the name of a device's kind; None for one without a kind."""
        return self.device_kinds[device]

    def memory_of(self, device: int) -> float:
        """Return the bytes of a device's memory."""
        return self.memories[device]

    def speed_of(self, device: int) -> float | None:
        """Return a device's speed (see ``DeviceKind``): 1 for one without a kind, None where its kind gives none."""
        return self.kind_speed(self.device_kinds[device])

    def kind_speed(self, kind: str | None) -> float | None:
        """Return the speed of the devices of ``kind``; see ``speed_of``."""
        return 1.0 if kind is None else self.kinds[kind].speed

    def only_kind(self, kind: str | None) -> tuple[Cluster, tuple[int, ...]]:
        """Return the cluster of the devices of one kind, and which of this cluster's devices they are, in their order.

        The devices of the new cluster have no kind; their memory is its ``device_memory``.
        """
        devices = tuple(device for device, own in enumerate(self.device_kinds) if own == kind)
        counts = collections.Counter(self.homes[device] for device in devices)
        servers = tuple(Server(self.servers[home].name, count) for home, count in counts.items())
        names = {server.name for server in servers}
        links = {pair: link for pair, link in self.links.items() if names.issuperset(pair)}
        memory = self._memory_of_kind(kind)
        return replace(self, servers=servers, device_memory=memory, links=links, kinds={}), devices

    def on_hosts(self, hosts: Sequence[tuple[str, int]]) -> Cluster:
        """Return the cluster of some ``hosts``, each with its number of devices, in their order.

        A host with the name of a server has that server's links. Each other host takes the next server whose name none
        of the hosts has. Raises ClusterError for more hosts than servers, and for a host with more devices than its
        server.
        """
        named = {server.name: server for server in self.servers}
        others = [server for server in self.servers if server.name not in dict(hosts)]
        if len([name for name, _ in hosts if name not in named]) > len(others):
            raise ClusterError(
                f"the job runs on {format_count(len(hosts), 'host')}, but the cluster has "
                f"{format_count(len(self.servers), 'server')}"
            )
        chosen = []
        for name, count in hosts:
            server = named[name] if name in named else others.pop(0)
            if count > server.devices:
                raise ClusterError(
                    f"{name} runs {format_count(count, 'rank')}, but {server.name} has "
                    f"{format_count(server.devices, 'device')}"
                )
            chosen.append(server.first_devices(count))
        names = {server.name for server in chosen}
        links = {pair: link for pair, link in self.links.items() if names.issuperset(pair)}
        return replace(self, servers=tuple(chosen), links=links)

    def with_faster_links(self, times: float) -> Cluster:
        """Return this cluster with links of ``times`` the bandwidth, and the same latency."""

        def faster(link: Link) -> Link:
            return replace(link, bandwidth=link.bandwidth * times)

        links = {pair: faster(link) for pair, link in self.links.items()}
        inside, between = faster(self.intra_server), faster(self.inter_server)
        return replace(self, intra_server=inside, inter_server=between, links=links)

    def with_another_device(self) -> tuple[Cluster, int]:
        """Return this cluster with one more device, of the kind of the last device and beside it, and its number."""
        last = self.servers[-1]
        grown = replace(last, devices=last.devices + 1, kinds=last.kinds and (*last.kinds, last.kinds[-1]))
        return replace(self, servers=(*self.servers[:-1], grown)), self.devices

    def _memory_of_kind(self, kind: str | None) -> float:
        own = None if kind is None else self.kinds[kind].memory
        memory = self.device_memory if own is None else own
        assert memory is not None, "checked when the cluster was made"
        return memory

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
        except (OSError, ValueError) as error:
            raise ClusterError(f"{path}: the cluster cannot be written: {describe_reason(error)}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Cluster:
        """Read a cluster from a JSON or YAML file, or make the preset ``config-a:8`` where there is no such file.

        ClusterError names the file and the field that is wrong.

        ``inter_server`` may be missing if there is one server, or if ``links`` and ``switches`` connect all servers: a
        pair without a link of its own then uses the best way over several (see ``route``). ``intra_server`` may be
        missing if every server has one device. A switch joins every two of its servers by the same link.
        """
        name = os.fspath(path)
        if name.startswith("config-") and not Path(name).exists():
            return load_preset(name)
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
        devices of this process: those that ``dapple.init`` made (8 by default), and one where it was not called.
        Logical devices share the machine's cores, which are not counted: for a cluster of one device per core give
        their number. A device's memory is the GPU's, or its share of the host's. Where
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
                    "(dapple_tf.profiler.links.probe), or give inter_server"
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


def _check_link(where: str, link: Link) -> None:
    check_type(where, link, Link)
    check_above_zero(f"{where}.bandwidth", link.bandwidth)
    if not (is_finite(link.latency) and link.latency >= 0):
        raise ClusterError(f"{where}.latency is {quote(link.latency)}, not a finite number of at least 0")


def _to_data(cluster: Cluster) -> dict[str, Any]:
    data: dict[str, Any] = {"format": FORMAT}
    if cluster.device_memory is not None:
        data["device_memory"] = format_quantity(cluster.device_memory, BYTES)
    data |= {
        "servers": [{"name": server.name, "devices": devices_to_data(server)} for server in cluster.servers],
        "intra_server": _link_to_data(cluster.intra_server),
        "inter_server": _link_to_data(cluster.inter_server),
    }
    if cluster.links:
        data["links"] = [{"between": list(pair), **_link_to_data(link)} for pair, link in cluster.links.items()]
    if cluster.kinds:
        data["kinds"] = {name: kind_to_data(kind) for name, kind in cluster.kinds.items()}
    if cluster.execution != "sync":
        data["execution"] = cluster.execution
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


@dataclass(frozen=True)
class _LinkRecord:
    """A link in a file."""

    bandwidth: Quantity
    latency: Quantity

    def parse(self, where: str) -> Link:
        """Return the link; ``where``: its path in the file."""
        bandwidth = parse_field(f"{where}.bandwidth", self.bandwidth, BYTES_A_SECOND)
        return Link(bandwidth, parse_field(f"{where}.latency", self.latency, SECONDS))


@dataclass(frozen=True)
class _PairRecord(_LinkRecord):
    """The link of a pair of servers."""

    between: tuple[Name, ...]


@dataclass(frozen=True)
class _SwitchRecord(_LinkRecord):
    """A switch, which joins every two of its servers by the same link."""

    name: Name
    servers: tuple[Name, ...]


@dataclass(frozen=True)
class _ClusterRecord:
    """The fields of a file."""

    servers: tuple[ServerRecord, ...]
    device_memory: Quantity | None = None
    intra_server: _LinkRecord | None = None
    inter_server: _LinkRecord | None = None
    links: tuple[_PairRecord, ...] = ()
    switches: tuple[_SwitchRecord, ...] = ()
    kinds: Mapping[str, KindRecord] = field(default_factory=dict)
    execution: Name = "sync"


def _from_data(data: Any) -> Cluster:
    top = read_record(data, _ClusterRecord, ClusterError, file_format=FORMAT)
    servers = make_servers(top.servers)
    intra = None if top.intra_server is None else top.intra_server.parse("intra_server")
    inter = None if top.inter_server is None else top.inter_server.parse("inter_server")
    if intra is None and any(server.devices > 1 for server in servers):
        raise ClusterError("intra_server is missing, but a server has several devices")
    names = [server.name for server in servers]
    links = _read_links(top, names)
    if inter is None and len(servers) > 1:
        if not any(a != b for a, b in links):
            raise ClusterError(
                f"inter_server is missing, but there are {len(servers)} servers: give it, or links or switches that "
                "connect all of them"
            )
        _check_names(links, names)
        links = route(names, links)
        # Every pair has a link now, so no pair uses this one.
        inter = min((link for (a, b), link in links.items() if a != b), key=lambda link: link.bandwidth)
    kinds = make_kinds(top.kinds)
    memory = None if top.device_memory is None else parse_field("device_memory", top.device_memory, BYTES)
    return Cluster(
        servers=servers,
        device_memory=memory,
        intra_server=intra or inter or IN_PROCESS,
        inter_server=inter or intra or IN_PROCESS,
        links=links,
        kinds=kinds,
        execution=top.execution,
    )


def _read_links(top: _ClusterRecord, names: Sequence[str]) -> Links:
    """Return the links of pairs of servers: those that the file gives, then those of its switches.

    ``names``: the names of the servers.
    """
    links: Links = {}
    for index, item in enumerate(top.links):
        where, pair = f"links[{index}]", item.between
        if len(pair) != 2:
            raise ClusterError(f"{where}.between is {list(pair)}, not two names of servers")
        if pair in links or pair[::-1] in links:
            raise ClusterError(f"{where}.between: the link of {pair[0]!r} and {pair[1]!r} is given twice")
        links[pair[0], pair[1]] = item.parse(where)
    switch_of: dict[frozenset[str], str] = {}
    switches: set[str] = set()
    for index, switch in enumerate(top.switches):
        where, name, servers = f"switches[{index}]", switch.name, switch.servers
        if len(servers) < 2 or len(set(servers)) < len(servers):
            raise ClusterError(f"{where}.servers is {quote(list(servers))}: name two or more servers, each once")
        if unknown := [server for server in servers if server not in names]:
            raise ClusterError(f"{where}.servers names {unknown[0]!r}; the servers are {quote(list(names))}")
        if name in switches:
            raise ClusterError(f"{where}.name is {name!r}, which is the name of another switch: give each its own")
        switches.add(name)
        for pair in itertools.combinations(servers, 2):
            if (other := switch_of.setdefault(frozenset(pair), name)) != name:
                raise ClusterError(
                    f"{where}.servers: {pair[0]!r} and {pair[1]!r} are both on switch {name!r} and on {other!r}: "
                    "leave them out of one, or give their link in links"
                )
        links = _join_by_switch(links, servers, switch.parse(where))
    return links


def _check_names(links: Mapping[tuple[str, str], Link], names: Sequence[str]) -> None:
    """Raise ClusterError for a link of a server that does not exist."""
    known = set(names)
    keys: list[object] = list(links)
    for key in keys:
        if not isinstance(key, tuple) or len(key) != 2:
            raise ClusterError(f"links has the key {quote(key)}, not a pair of servers' names")
    for a, b in links:
        for name in (a, b):
            if name not in known:
                raise ClusterError(f"links: {a!r} to {b!r} names {name!r}; the servers are {quote(list(names))}")


# --- Links between servers that a file does not give pair by pair: through a switch, or over several links in turn


Links = dict[tuple[str, str], Link]


def _join_by_switch(links: Mapping[tuple[str, str], Link], servers: Sequence[str], link: Link) -> Links:
    """Return ``links`` with ``link`` between every two of ``servers``, except where a pair has a link already."""
    joined = dict(links)
    for pair in itertools.combinations(servers, 2):
        if pair not in links and pair[::-1] not in links:
            joined[pair] = link
    return joined


def route(servers: Sequence[str], links: Mapping[tuple[str, str], Link]) -> Links:
    """Return ``links`` and, for every pair of ``servers`` without one, the best way over several links as one link.

    Its bandwidth is that of the slowest link on the way, its latency the sum. Of all ways the one with the largest
    bandwidth is taken, and of those with equal bandwidth that with the least latency. Raises ClusterError if the links
    do not connect all servers.
    """
    import networkx as nx  # takes 0.15 s, which only clusters with links of their own need

    graph: nx.Graph[str] = nx.Graph()
    graph.add_nodes_from(servers)
    found = dict(links)
    by_bandwidth = sorted(links.items(), key=lambda item: -item[1].bandwidth)
    for bandwidth, group in itertools.groupby(by_bandwidth, key=lambda item: item[1].bandwidth):
        graph.add_weighted_edges_from((a, b, link.latency) for (a, b), link in group if a != b)
        for a, reached in nx.all_pairs_dijkstra_path_length(graph):
            for b, latency in reached.items():
                if a != b and (a, b) not in found and (b, a) not in found:
                    found[a, b] = Link(bandwidth, latency)
    parts = [sorted(part) for part in nx.connected_components(graph)]
    if len(parts) > 1:
        part = min(parts, key=lambda part: (len(part), part))
        raise ClusterError(
            f"links do not connect {quote(part)} to the other servers, and inter_server is missing: add a link, or "
            "give inter_server, the link of pairs that have none of their own"
        )
    return found


# --- The clusters of the DAPPLE paper (Table III): Config A, B and C


_NVLINK = Link(bandwidth=130e9, latency=5e-6)
_ETHERNET_25 = Link(bandwidth=25e9 / 8, latency=20e-6)
_ETHERNET_10 = Link(bandwidth=10e9 / 8, latency=20e-6)
_V100_MEMORY = 16e9
# By letter the devices of a server, and the link between servers.
_CONFIGS = {"a": (8, _ETHERNET_25), "b": (1, _ETHERNET_25), "c": (1, _ETHERNET_10)}

_NAME = re.compile(r"config-([a-z]+)(?::([0-9]{1,5}))?")


def config(letter: str, devices: int = 16) -> Cluster:
    """Return config ``letter`` of DAPPLE (Table III) with ``devices`` V100s of 16 GB.

    A: servers of 8 devices (the last one may have fewer) with NVLink at 130 GB/s inside and Ethernet at 25 Gbps
    between. B: servers of 1 device and 25 Gbps. C: servers of 1 device and 10 Gbps. Raises ClusterError for others.
    """
    if devices < 1:
        raise ClusterError(f"devices={devices}: a cluster needs at least one device")
    if letter.lower() not in _CONFIGS:
        raise ClusterError(f"there is no config-{letter}; there are config-a, config-b and config-c")
    size, between = _CONFIGS[letter.lower()]
    counts = [min(size, devices - first) for first in range(0, devices, size)]
    servers = tuple(Server(f"server{index}", count) for index, count in enumerate(counts))
    return Cluster(servers, _V100_MEMORY, intra_server=_NVLINK if size > 1 else between, inter_server=between)


def load_preset(text: str) -> Cluster:
    """Return the preset ``config-a``, or ``config-a:32`` (devices). Raises ClusterError for any other name."""
    match = _NAME.fullmatch(text.lower())
    if not match:
        raise ClusterError(
            f"no cluster is called {text!r}; there are config-a, config-b and config-c, of 16 devices, and config-a:32 "
            "of 32 (at most 99999)"
        )
    letter, devices = match.groups()
    return config(letter) if devices is None else config(letter, int(devices))
