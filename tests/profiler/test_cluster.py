"""Clusters: validation, files, device numbers and links."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ClusterError
from dapple_tf.profiler.cluster import Cluster, DeviceKind, Link, Server
from tests.profiler.builders import make_cluster

VALID: dict[str, Any] = {
    "format": "dapple-cluster/1",
    "device_memory": "16GB",
    "servers": [{"name": "a", "devices": 8}, {"name": "b", "devices": 4}],
    "intra_server": {"bandwidth": "130GB/s", "latency": "5us"},
    "inter_server": {"bandwidth": "25Gbps", "latency": 2e-5},
    "links": [{"between": ["b", "a"], "bandwidth": 1e9, "latency": "1ms"}],
}
READ = Cluster(
    servers=(Server("a", 8), Server("b", 4)),
    device_memory=16e9,
    intra_server=Link(130e9, 5e-6),
    inter_server=Link(3.125e9, 2e-5),
    links={("b", "a"): Link(1e9, 1e-3)},
)


def written(folder: Path, data: Any, name: str = "cluster.yaml") -> Path:
    path = folder / name
    dump = json.dumps if "json" in name.lower() else yaml.safe_dump
    path.write_text(data if isinstance(data, str) else dump(data))
    return path


@pytest.mark.parametrize("name", ["c.yaml", "c.yml", "c.json", "c.JSON", "json-without-suffix", "yaml-without-suffix"])
def test_a_cluster_file_is_read_field_by_field(tmp_path: Path, name: str) -> None:
    assert Cluster.load(written(tmp_path, VALID, name)) == READ


def test_json_with_tabs_is_read_without_a_suffix(tmp_path: Path) -> None:
    assert Cluster.load(written(tmp_path, json.dumps(VALID, indent="\t"), "cluster")) == READ


@pytest.mark.parametrize("name", ["again.json", "again.yaml"])
def test_a_saved_cluster_is_readable(tmp_path: Path, name: str) -> None:
    READ.save(tmp_path / name)
    text = (tmp_path / name).read_text()
    data = json.loads(text) if "json" in name else yaml.safe_load(text)
    assert data == {
        **VALID,
        "inter_server": {"bandwidth": "25Gbps", "latency": "20us"},
        "links": [{"between": ["b", "a"], "bandwidth": "1GB/s", "latency": "1ms"}],
    }


FIGURE = st.floats(1e-9, 1e15)
LINK = st.builds(Link, FIGURE, st.just(0.0) | FIGURE)


@given(
    devices=st.lists(st.integers(1, 64), min_size=2, max_size=4),
    memory=FIGURE,
    links=st.lists(LINK, min_size=3, max_size=3),
    suffix=st.sampled_from(["json", "yaml"]),
)
def test_every_cluster_can_be_saved_and_loaded(
    tmp_path_factory: pytest.TempPathFactory, devices: list[int], memory: float, links: list[Link], suffix: str
) -> None:
    servers = tuple(Server(f"s{i}", count) for i, count in enumerate(devices))
    cluster = Cluster(servers, memory, links[0], links[1], {("s0", "s1"): links[2], ("s0", "s0"): links[0]})
    path = tmp_path_factory.mktemp("cluster") / f"c.{suffix}"
    cluster.save(path)
    assert Cluster.load(path) == cluster


def without(*fields: str) -> dict[str, Any]:
    return {key: value for key, value in VALID.items() if key not in fields}


LONE = {"servers": [{"name": "a", "devices": 8}], "links": []}
SINGLE = {"servers": [{"name": "a", "devices": 1}, {"name": "b", "devices": 1}]}


def test_one_server_needs_no_inter_server_link(tmp_path: Path) -> None:
    cluster = Cluster.load(written(tmp_path, {**without("inter_server"), **LONE}))
    assert cluster.inter_server == Link(130e9, 5e-6)


def test_servers_of_one_device_need_no_intra_server_link(tmp_path: Path) -> None:
    cluster = Cluster.load(written(tmp_path, {**without("intra_server"), **SINGLE}))
    assert cluster.intra_server == Link(3.125e9, 2e-5)


def test_one_device_needs_no_link_at_all(tmp_path: Path) -> None:
    data = {**without("intra_server", "inter_server", "links"), "servers": [{"name": "a", "devices": 1}]}
    assert Cluster.load(written(tmp_path, data)).devices == 1


LINK_DATA = {"bandwidth": "1GB/s", "latency": "1us"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"format": "dapple-cluster/2"}, "format is 'dapple-cluster/2', not 'dapple-cluster/1'"),
        ({"device_memoir": 1}, "device_memoir is not a field of this file; did you mean 'device_memory'?"),
        ({"device_memory": "0GB"}, "device_memory is 0.0, not a finite number above 0"),
        ({"device_memory": "16Gs"}, "device_memory: '16Gs' has the unknown unit 'Gs'"),
        ({"servers": []}, "servers is empty"),
        ({"servers": [{"name": "", "devices": 1}]}, r"servers\[0\].name is empty"),
        ({"servers": [{"name": "a", "devices": 0}]}, r"servers\[0\].devices is 0; it must be at least 1"),
        (
            {"servers": [{"name": "a", "devices": 1}] * 2},
            r"servers\[1\].name is 'a', which is the name of servers\[0\]",
        ),
        ({"intra_server": {"bandwidth": "1GB/s"}}, "intra_server.latency is missing"),
        ({"intra_server": {**LINK_DATA, "bandwidth": 0}}, "intra_server.bandwidth is 0.0, not a finite number above"),
        ({"inter_server": {**LINK_DATA, "latency": "-1us"}}, "inter_server.latency is -1e-06, not a finite number"),
        ({"inter_server": {**LINK_DATA, "latency": "1 hour"}}, "inter_server.latency: '1 hour' has the unknown unit"),
        ({"inter_server": "25Gbps"}, "inter_server is '25Gbps', not an object"),
        ({"inter_server": None, "links": []}, "inter_server is missing, but there are 2 servers"),
        ({"intra_server": None}, "intra_server is missing, but a server has several devices"),
        (
            {"links": [{"between": ["a", "x"], **LINK_DATA}]},
            r"links: 'a' to 'x' names 'x'; the servers are .'a', 'b'",
        ),
        ({"links": [{"between": ["a"], **LINK_DATA}]}, r"links\[0\].between is \['a'\], not two names of servers"),
        ({"links": [{"between": ["a", "b"], "latency": 0}]}, r"links\[0\].bandwidth is missing"),
        (
            {"links": [{"between": pair, **LINK_DATA} for pair in (["a", "b"], ["b", "a"])]},
            r"links\[1\].between: the link of 'b' and 'a' is given twice",
        ),
    ],
)
@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_a_wrong_field_is_named(tmp_path: Path, data: dict[str, Any], message: str, name: str) -> None:
    path = written(tmp_path, {**VALID, **data}, name)
    with pytest.raises(ClusterError, match=f"^{path}: .*{message}"):
        Cluster.load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a readable YAML file: it is empty"),
        ("# nothing yet\n", "not a readable YAML file: it is empty"),
        ("3", "it holds 3, not an object with the field format, 'dapple-cluster/1'"),
        ("a: [1", "not a readable YAML file: line 1: while parsing a flow sequence, [^\n]*$"),
        ("a: 1\nb: 'x\n", "not a readable YAML file: line 3: [^\n]*$"),
        ("a: 1\na: 2\n", "not a readable YAML file: line 2: the field 'a' is given twice"),
        ("{a: 1, a: 2}", "not a readable YAML file: line 1: the field 'a' is given twice"),
        ("--- 1\n--- 2\n", "not a readable YAML file: "),
        ("[" * 100_000, "not a readable YAML file: "),
        ("device_memory: .nan\n" + yaml.safe_dump(without("device_memory")), "device_memory is nan, not a finite"),
    ],
)
def test_a_file_that_is_not_yaml_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.load(written(tmp_path, text))


def test_code_in_a_file_is_not_executed(tmp_path: Path) -> None:
    text = f"!!python/object/apply:os.mkdir ['{tmp_path}/made']"
    with pytest.raises(ClusterError, match=r"line 1: the tag '.*python/object/apply:os.mkdir': tags are not read"):
        Cluster.load(written(tmp_path, text))
    assert not (tmp_path / "made").exists()


def test_a_path_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"absent/c.yaml: the cluster cannot be written: No such file"):
        READ.save(tmp_path / "absent" / "c.yaml")


def test_a_link_given_in_both_directions_is_refused() -> None:
    link = Link(1e9, 0.0)
    with pytest.raises(ClusterError, match="links: 'a' to 'b' is given twice"):
        make_cluster(links={("a", "b"): link, ("b", "a"): link})


def test_devices_are_numbered_server_by_server() -> None:
    assert READ.homes == (0,) * 8 + (1,) * 4
    assert READ.devices == 12


def test_the_own_link_of_a_pair_is_used_in_either_direction() -> None:
    cluster = make_cluster(links={("b", "a"): Link(1e9, 0.0), ("b", "b"): Link(2e9, 0.0)})
    assert cluster.link(0, 1) == cluster.link(1, 0) == Link(1e9, 0.0)
    assert cluster.link(1, 1) == Link(2e9, 0.0)
    assert cluster.link(0, 0) == cluster.intra_server
    assert make_cluster().link(0, 1) == make_cluster().inter_server


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"device_memory": "16GB"}, "device_memory is '16GB', not a finite number above 0"),
        ({"intra_server": Link("12GB/s", 0.0)}, "intra_server.bandwidth is '12GB/s', not a finite number above 0"),
        ({"intra_server": Link(1.0, None)}, "intra_server.latency is None, not a finite number of at least 0"),
        ({"inter_server": 1e9}, r"inter_server is 1000000000.0, not a Link: give Link\(bandwidth, latency\)"),
        ({"servers": (Server("a", "2"),)}, r"servers\[0\].devices is '2', not a whole number"),
        ({"servers": (Server("a", 2.5),)}, r"servers\[0\].devices is 2.5, not a whole number"),
        ({"servers": (("a", 2),)}, r"servers\[0\] is \('a', 2\), not a Server: give Server\(name, devices\)"),
        ({"links": {"ab": Link(1.0, 0.0)}}, "links has the key 'ab', not a pair of servers' names"),
        ({"links": {("a", "b", "c"): Link(1.0, 0.0)}}, r"links has the key \('a', 'b', 'c'\), not a pair"),
        ({"kinds": {"T4": 0.5}}, r"kinds.T4 is 0.5, not a DeviceKind: give DeviceKind\(memory, speed\)"),
        ({"kinds": {"T4": DeviceKind(1e9, "fast")}}, "kinds.T4.speed is 'fast', not a finite number above 0"),
    ],
)
def test_a_value_of_another_type_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        make_cluster(**fields)


def test_a_cluster_with_faster_links_and_one_with_another_device() -> None:
    servers = (Server("a", 1, ("x",)), Server("b", 2, ("x", "y")))
    kinds = {"x": DeviceKind(1e9, 1.0), "y": DeviceKind(2e9, 2.0)}
    cluster = Cluster(servers, None, Link(10, 1), Link(5, 2), {("a", "b"): Link(3, 4)}, kinds)
    faster = cluster.with_faster_links(2.0)
    assert (faster.intra_server, faster.inter_server, faster.link(0, 1)) == (Link(20, 1), Link(10, 2), Link(6, 4))
    larger, device = cluster.with_another_device()
    assert (device, larger.devices, larger.device_kinds) == (3, 4, ("x", "x", "y", "y"))


def test_the_cluster_of_some_hosts_has_their_servers_and_links() -> None:
    assert READ.on_hosts([("b", 2)]) == Cluster((Server("b", 2),), 16e9, READ.intra_server, READ.inter_server)
    assert READ.on_hosts([("b", 4), ("other", 8)]).servers == (Server("b", 4), Server("a", 8))
    assert READ.on_hosts([("x", 1), ("y", 1)]).links == READ.links
    with pytest.raises(ClusterError, match=r"the job runs on 3 hosts, but the cluster has 2 servers"):
        READ.on_hosts([("x", 1), ("y", 1), ("z", 1)])
    with pytest.raises(ClusterError, match=r"b runs 5 ranks, but b has 4 devices"):
        READ.on_hosts([("b", 5)])
