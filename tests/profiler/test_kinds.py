"""Clusters of unequal devices: kinds, their memory and speed, in objects and in files."""

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

LINK_DATA = {"bandwidth": "1GB/s", "latency": "1us"}
VALID: dict[str, Any] = {
    "format": "dapple-cluster/1",
    "servers": [
        {"name": "a", "devices": [{"kind": "V100", "count": 2}, {"kind": "T4", "count": 1}]},
        {"name": "b", "devices": [{"kind": "T4", "count": 2}]},
    ],
    "intra_server": LINK_DATA,
    "inter_server": LINK_DATA,
    "kinds": {"V100": {"memory": "16GB", "speed": 1.0}, "T4": {"memory": "8GB", "speed": 0.5}},
    "execution": "async",
}
V100, T4 = DeviceKind(16e9, 1.0), DeviceKind(8e9, 0.5)
READ = Cluster(
    servers=(Server("a", 3, ("V100", "V100", "T4")), Server("b", 2, ("T4", "T4"))),
    device_memory=None,
    intra_server=Link(1e9, 1e-6),
    inter_server=Link(1e9, 1e-6),
    kinds={"V100": V100, "T4": T4},
    execution="async",
)


def written(folder: Path, data: Any) -> Path:
    path = folder / "cluster.json"
    path.write_text(json.dumps(data))
    return path


def test_kinds_are_read_from_a_file(tmp_path: Path) -> None:
    assert Cluster.load(written(tmp_path, VALID)) == READ


def test_kinds_are_saved_as_they_were_read(tmp_path: Path) -> None:
    READ.save(tmp_path / "c.yaml")
    assert yaml.safe_load((tmp_path / "c.yaml").read_text()) == VALID


def test_every_device_has_a_kind_a_memory_and_a_speed() -> None:
    assert [READ.kind_of(device) for device in range(5)] == ["V100", "V100", "T4", "T4", "T4"]
    assert READ.memories == (16e9, 16e9, 8e9, 8e9, 8e9)
    assert [READ.memory_of(device) for device in (1, 2)] == [16e9, 8e9]
    assert [READ.speed_of(device) for device in (1, 2)] == [1.0, 0.5]
    assert READ.least_memory == 8e9
    assert not READ.is_uniform


def test_devices_without_kinds_have_the_memory_of_the_cluster_and_speed_1() -> None:
    cluster = make_cluster()
    assert (cluster.kind_of(0), cluster.memory_of(3), cluster.speed_of(3)) == (None, 16e9, 1.0)
    assert cluster.is_uniform


def test_devices_with_and_without_kinds_may_be_together() -> None:
    cluster = make_cluster(servers=(Server.of_kinds("a", [("T4", 1)]), Server("b", 1)), kinds={"T4": DeviceKind()})
    assert cluster.memories == (16e9, 16e9)
    assert (cluster.speed_of(0), cluster.speed_of(1)) == (None, 1.0)
    assert not cluster.is_uniform


def test_devices_of_one_kind_are_equal() -> None:
    assert make_cluster(servers=(Server.of_kinds("a", [("T4", 2)]),), kinds={"T4": T4}).is_uniform


def test_the_first_devices_of_a_server_keep_their_kinds() -> None:
    server = READ.servers[0]
    assert server.first_devices(2) == Server("a", 2, ("V100", "V100"))
    assert server.first_devices(9) == server


@given(
    groups=st.lists(
        st.lists(st.tuples(st.sampled_from(["x", "y"]), st.integers(1, 9)), min_size=1, max_size=4) | st.integers(1, 9),
        min_size=1,
        max_size=3,
    ),
    kinds=st.lists(
        st.builds(DeviceKind, st.none() | st.floats(1e-9, 1e15), st.none() | st.floats(1e-9, 1e9)),
        min_size=2,
        max_size=2,
    ),
    suffix=st.sampled_from(["json", "yaml"]),
)
def test_every_cluster_with_kinds_can_be_saved_and_loaded(
    tmp_path_factory: pytest.TempPathFactory,
    groups: list[list[tuple[str, int]] | int],
    kinds: list[DeviceKind],
    suffix: str,
) -> None:
    servers = tuple(
        Server(f"s{i}", group) if isinstance(group, int) else Server.of_kinds(f"s{i}", group)
        for i, group in enumerate(groups)
    )
    cluster = make_cluster(servers=servers, kinds=dict(zip("xy", kinds, strict=True)))
    path = tmp_path_factory.mktemp("cluster") / f"c.{suffix}"
    cluster.save(path)
    assert Cluster.load(path) == cluster


def test_a_kind_whose_name_yaml_reads_as_a_number_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump({**VALID, "kinds": {**VALID["kinds"], 1080: {"speed": 0.5}}}))
    with pytest.raises(
        ClusterError, match=r"c\.yaml: kinds has the name 1080, which is not a string: write it in quotes"
    ):
        Cluster.load(path)


def of_kind(**fields: Any) -> dict[str, Any]:
    return {"kinds": {**VALID["kinds"], "T4": fields}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kinds": None}, r"servers\[0\].devices names the kind 'V100', which kinds does not define: it is empty or"),
        (
            {"kinds": {"V100": {"memory": "16GB"}}},
            r"servers\[0\].devices names the kind 'T4', which kinds does not define: it has \['V100'\]; add the kind",
        ),
        (of_kind(memory="8GB", speed=0), "kinds.T4.speed is 0.0, not a finite number above 0"),
        (of_kind(memory="0GB", speed=1), "kinds.T4.memory is 0.0, not a finite number above 0"),
        (
            of_kind(memory="8GB", speed=1e308),
            r"kinds.T4.speed is 1e\+308: it must be from 1e-100 to 1e\+100 to be plausible",
        ),
        (of_kind(memory="8GB", speed=5e-324), r"kinds.T4.speed is 4.94066e-324: it must be from 1e-100 to 1e\+100"),
        (of_kind(memory="8Gs", speed=1), "kinds.T4.memory: '8Gs' has the unknown unit 'Gs'"),
        (of_kind(speed=1), "kinds.T4.memory is missing, and so is device_memory, which would stand in for it"),
        ({"kinds": {**VALID["kinds"], "": {}}}, "kinds has an entry with an empty name"),
        (
            {"servers": [{"name": "a", "devices": 1}]},
            r"device_memory is missing, but the devices of servers\[0\] \('a'\) have no kind",
        ),
        (
            {"servers": [{"name": "a", "devices": [{"kind": "T4", "count": 0}]}]},
            r"servers\[0\].devices\[0\].count is 0; it must be at least 1",
        ),
        ({"servers": [{"name": "a", "devices": []}]}, r"servers\[0\].devices is 0; it must be at least 1"),
        (
            {"servers": [{"name": "a", "devices": [{"kind": "T4", "count": 10**6}]}]},
            "more than 100000 devices together",
        ),
        ({"execution": "later"}, "execution is 'later', not 'sync' or 'async'"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    path = written(tmp_path, {**VALID, **data})
    with pytest.raises(ClusterError, match=f"^{path}: .*{message}"):
        Cluster.load(path)


def test_a_server_has_as_many_kinds_as_devices() -> None:
    with pytest.raises(ClusterError, match=r"servers\[0\] has 2 devices, but kinds for 1: give one for each"):
        make_cluster(servers=(Server("a", 2, ("T4",)),), kinds={"T4": T4})
