"""Config A, B and C of the paper (Table III)."""

from __future__ import annotations

import pytest

from dapple_tf.errors import ClusterError
from dapple_tf.profiler.cluster import Cluster, config, load_preset


def test_config_a_has_servers_of_eight_with_nvlink() -> None:
    cluster = config("a")
    assert [server.devices for server in cluster.servers] == [8, 8]
    assert (cluster.intra_server.bandwidth, cluster.intra_server.latency) == (130e9, 5e-6)
    assert (cluster.inter_server.bandwidth, cluster.inter_server.latency) == (3_125_000_000, 20e-6)
    assert cluster.device_memory == 16e9


@pytest.mark.parametrize(("letter", "bandwidth"), [("b", 3_125_000_000), ("C", 1_250_000_000)])
def test_configs_b_and_c_have_servers_of_one(letter: str, bandwidth: float) -> None:
    cluster = config(letter, 5)
    assert [server.devices for server in cluster.servers] == [1] * 5
    assert cluster.inter_server.bandwidth == bandwidth


def test_the_last_server_of_config_a_may_be_smaller() -> None:
    assert [server.devices for server in config("a", 20).servers] == [8, 8, 4]
    assert [server.devices for server in config("a", 2).servers] == [2]


def test_presets_are_loaded_by_name() -> None:
    assert load_preset("config-a") == config("a", 16)
    assert load_preset("Config-C:32") == config("c", 32)
    assert Cluster.load("config-b:3") == config("b", 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("config-d", "there is no config-d; there are config-a, config-b and config-c"),
        ("config-a:0", "devices=0: a cluster needs at least one device"),
        ("config-a:x", "no cluster is called 'config-a:x'; there are config-a"),
        ("config-a:" + "9" * 5000, "no cluster is called 'config-a:99"),
        ("cluster.yaml", "no cluster is called 'cluster.yaml'"),
    ],
)
def test_an_unknown_name_is_refused(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        load_preset(text)
