"""Links of switches, and ways over several links where ``inter_server`` is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dapple_tf.errors import ClusterError
from dapple_tf.profiler.cluster import Cluster, Link, route


def link(*between: str, bandwidth: float = 8.0, latency: float = 1.0) -> dict[str, Any]:
    return {"between": list(between), "bandwidth": bandwidth, "latency": latency}


def switch(name: str, *servers: str, bandwidth: float = 8.0, latency: float = 1.0) -> dict[str, Any]:
    return {"name": name, "servers": list(servers), "bandwidth": bandwidth, "latency": latency}


def load(folder: Path, names: str, **fields: Any) -> Cluster:
    path = folder / "cluster.json"
    servers = [{"name": name, "devices": 1} for name in names]
    path.write_text(json.dumps({"format": "dapple-cluster/1", "device_memory": 1, "servers": servers, **fields}))
    return Cluster.load(path)


SLOW = {"bandwidth": 1.0, "latency": 9.0}


def test_a_switch_joins_every_two_of_its_servers(tmp_path: Path) -> None:
    switches = [switch("left", "a", "b", "c"), switch("right", "d", "e", bandwidth=4.0)]
    cluster = load(tmp_path, "abcde", inter_server=SLOW, switches=switches)
    assert cluster.link(0, 1) == cluster.link(0, 2) == cluster.link(2, 1) == Link(8, 1)
    assert cluster.link(3, 4) == Link(4, 1)
    assert cluster.link(2, 3) == Link(1, 9)


def test_a_link_of_its_own_comes_before_a_switch(tmp_path: Path) -> None:
    cluster = load(tmp_path, "abc", inter_server=SLOW, switches=[switch("s", "a", "b", "c")], links=[link("c", "a")])
    own = load(tmp_path, "abc", links=[link("c", "a", bandwidth=2.0)], switches=[switch("s", "a", "b", "c")])
    assert cluster.link(0, 2) == Link(8, 1)
    assert own.link(0, 2) == Link(2, 1)


def test_a_ring_of_servers_needs_no_other_links(tmp_path: Path) -> None:
    cluster = load(tmp_path, "abcd", links=[link("a", "b"), link("b", "c"), link("c", "d"), link("d", "a")])
    assert cluster.link(3, 0) == Link(8, 1)
    assert cluster.link(0, 2) == cluster.link(1, 3) == Link(8, 2)
    cluster.save(tmp_path / "again.yaml")
    assert Cluster.load(tmp_path / "again.yaml") == cluster


def test_the_widest_way_is_taken_and_of_equal_ones_the_shortest() -> None:
    links = {
        ("a", "b"): Link(8, 1),
        ("b", "c"): Link(8, 1),
        ("c", "d"): Link(8, 1),
        ("a", "d"): Link(1, 0),  # a link of its own is used, even where a way around it is wider
        ("d", "e"): Link(2, 5),
        ("b", "e"): Link(2, 9),
    }
    found = route("abcde", links)
    assert found["a", "c"] == Link(8, 2)
    assert found["a", "d"] == Link(1, 0)
    assert found["a", "e"] == Link(2, 8)  # over b, c and d, whose latencies are 3, and not over b to e
    assert found["c", "e"] == Link(2, 6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"links": [link("a", "b"), link("c", "d")]},
            r"links do not connect \['a', 'b'\] to the other servers, and inter_server is missing: add a link, or give",
        ),
        ({"links": [link("a", "b")]}, r"links do not connect \['c'\] to"),
        ({"links": [link("a", "x")]}, "links: 'a' to 'x' names 'x'"),
        ({"links": [link("a", "a")]}, "inter_server is missing, but there are 4 servers: give it, or links or"),
        ({"switches": [switch("s", "a")]}, r"switches\[0\].servers is \['a'\]: name two or more servers, each once"),
        ({"switches": [switch("s", "a", "a")]}, r"switches\[0\].servers is \['a', 'a'\]: name two or more"),
        (
            {"switches": [switch("s", "a", "x")]},
            r"switches\[0\].servers names 'x'; the servers are \['a', 'b', 'c', 'd'\]",
        ),
        (
            {"switches": [switch("s", "a", "b"), switch("s", "a", "b", "c", bandwidth=2.0)]},
            r"switches\[1\].name is 's', which is the name of another switch: give each its own",
        ),
        ({"switches": [{"name": "s", "servers": ["a", "b"], "latency": 1}]}, r"switches\[0\].bandwidth is missing"),
        (
            {"switches": [switch("s", "a", "b"), switch("t", "b", "a")]},
            r"switches\[1\].servers: 'b' and 'a' are both on switch 't' and on 's': leave them out of one",
        ),
        ({"switches": [{**switch("s", "a", "b"), "port": 1}]}, r"switches\[0\].port is not a field of this file"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=f"cluster.json: {message}"):
        load(tmp_path, "abcd", **fields)
