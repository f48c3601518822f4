"""Measuring links: the fit and the pairing on hand-worked numbers, and measurements between real ranks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapple_tf.errors import ClusterError
from dapple_tf.profiler import links
from dapple_tf.profiler.cluster import Cluster, Link, Server
from dapple_tf.profiler.links import SIZES, Host, describe_cluster, find_hosts, find_rounds, fit_link, probe
from tests.processes import RanksError, needs_horovod, run_python, run_ranks

MS, MB, GB = 1e-3, 10**6, 1e9


def approx(bandwidth: float, latency: float) -> Link:
    return Link(pytest.approx(bandwidth), pytest.approx(latency, abs=1e-12))  # type: ignore[arg-type]


def test_times_on_a_line_give_that_line() -> None:
    assert fit_link([MB, 4 * MB, 16 * MB], [2 * MS, 5 * MS, 17 * MS]) == approx(GB, MS)


def test_one_disturbed_size_does_not_change_the_line() -> None:
    assert fit_link([MB, 2 * MB, 4 * MB, 16 * MB], [2 * MS, 40 * MS, 5 * MS, 17 * MS]) == approx(GB, MS)


@pytest.mark.parametrize(
    "milliseconds",
    [[8.3, 3.38, 4.0, 13.74, 80.59, 168.09, 349.21], [7.66, 7.88, 8.3, 30.49, 80.96, 169.42, 347.1]],
)
def test_a_burst_allowance_does_not_set_the_bandwidth(milliseconds: list[float]) -> None:
    """Measured on an interface shaped to 400 Mbps (50 MB/s) that lets the first 512 KB pass at once."""
    assert fit_link(SIZES, [time * MS for time in milliseconds]).bandwidth == pytest.approx(50e6, rel=0.1)


def test_links_are_rounded_to_three_digits() -> None:
    pair = {("a", "a"): Link(905748848.399, 2.48571e-3)}
    assert describe_cluster([Server("a", 2)], GB, pair).intra_server == Link(906e6, 2.49e-3)


def test_a_line_that_would_start_below_zero_starts_at_zero() -> None:
    """Through (1 MB, 1 ms), (2, 3), (4, 7) goes a line with latency -1 ms.

    Of those through the origin: 1 ms/MB is off by 1/√3 + 3/√7, 1.5 ms/MB by 0.5 + 1/√7 (least), 1.75 by 0.75 + 0.5/√3.
    """
    assert fit_link([MB, 2 * MB, 4 * MB], [1 * MS, 3 * MS, 7 * MS]) == approx(1 / 1.5 * GB, 0)


def test_times_that_do_not_grow_give_a_hundredfold_bandwidth() -> None:
    assert fit_link([MB, 4 * MB, 16 * MB], [2 * MS, 2 * MS, 2 * MS]) == approx(100 * 8 * GB, 2 * MS)


@given(
    latency=st.floats(1e-6, 1),
    share=st.floats(1, 1e3),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_the_fitted_line_is_no_worse_than_the_one_that_made_the_times(
    latency: float, share: float, noise: list[float]
) -> None:
    """``share``: what sending the largest size takes, in latencies."""
    slope = share * latency / max(SIZES)
    times = [(latency + slope * size) * (1 + error) for size, error in zip(SIZES, noise, strict=True)]

    def error(line_latency: float, line_slope: float) -> float:
        predicted = [line_latency + line_slope * size for size in SIZES]
        return sum(abs(p - t) / t**0.5 for p, t in zip(predicted, times, strict=True))

    link = fit_link(SIZES, times)
    assert error(link.latency, 1 / link.bandwidth) <= error(latency, slope) * (1 + 1e-9) + 1e-12


@given(st.lists(st.floats(1e-9, 1e3), min_size=len(SIZES), max_size=len(SIZES)))
def test_any_times_give_a_usable_link(times: list[float]) -> None:
    link = fit_link(SIZES, times)
    assert link.latency >= 0
    assert 0 < link.bandwidth < float("inf")


@pytest.mark.parametrize(
    ("sizes", "seconds", "message"),
    [
        ([MB], [MS], "two or more sizes"),
        ([MB, MB], [MS, MS], "two or more sizes"),
        ([MB, 2 * MB], [MS], "two or more sizes"),
        ([MB, 2 * MB], [MS, 0.0], "positive and finite"),
        ([MB, 2 * MB], [MS, float("nan")], "positive and finite"),
        ([0, 2 * MB], [MS, MS], "positive and finite"),
    ],
)
def test_measurements_that_cannot_be_fitted_are_refused(sizes: list[int], seconds: list[float], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        fit_link(sizes, seconds)


def test_the_common_links_are_medians_and_only_outliers_are_listed() -> None:
    servers = [Server("a", 2), Server("b", 2), Server("c", 1)]
    inside = {("a", "a"): Link(10 * GB, 1 * MS), ("b", "b"): Link(14 * GB, 1 * MS)}  # 17% off their mean: usual
    between = {
        ("a", "b"): Link(2 * GB, 2 * MS),
        ("a", "c"): Link(2.4 * GB, 2 * MS),  # 20% more than the median: usual
        ("b", "c"): Link(1.4 * GB, 2 * MS),  # 30% less: not
    }
    cluster = describe_cluster(servers, 8 * GB, inside | between)
    assert cluster.servers == tuple(servers)
    assert cluster.device_memory == 8 * GB
    assert (cluster.intra_server, cluster.inter_server) == (Link(12 * GB, 1 * MS), Link(2 * GB, 2 * MS))
    assert dict(cluster.links) == {("b", "c"): Link(1.4 * GB, 2 * MS)}


def test_a_link_with_another_latency_or_inside_a_server_is_listed() -> None:
    inside = {(name, name): Link(10 * GB, 1 * MS) for name in "ab"} | {("c", "c"): Link(1 * GB, 1 * MS)}
    between = {("a", "b"): Link(GB, 1 * MS), ("a", "c"): Link(GB, 1 * MS), ("b", "c"): Link(GB, 3 * MS)}
    cluster = describe_cluster([Server(name, 2) for name in "abc"], GB, inside | between)
    assert dict(cluster.links) == {("c", "c"): Link(1 * GB, 1 * MS), ("b", "c"): Link(GB, 3 * MS)}


def test_where_one_kind_of_link_was_not_measured_the_other_is_used() -> None:
    only = Link(GB, MS)
    one_server = describe_cluster([Server("a", 2)], GB, {("a", "a"): only})
    one_each = describe_cluster([Server("a", 1), Server("b", 1)], GB, {("a", "b"): only})
    assert one_server.inter_server == one_each.intra_server == only
    assert not one_server.links
    assert not one_each.links


def test_without_measurements_there_is_an_error() -> None:
    with pytest.raises(ClusterError, match="no link was measured"):
        describe_cluster([Server("a", 1)], GB, {})


def test_hosts_are_in_the_order_of_their_ranks() -> None:
    assert find_hosts(["b", "b", "a"]) == (Host("b", (0, 1)), Host("a", (2,)))


def test_ranks_distributed_round_robin_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"server b are 0, 2.*--map-by slot"):
        find_hosts(["b", "a", "b"])


@given(st.lists(st.integers(1, 3), min_size=1, max_size=9))
def test_every_two_servers_are_paired_once_and_no_rank_is_in_two_pairs_at_once(counts: list[int]) -> None:
    starts = [sum(counts[:index]) for index in range(len(counts))]
    hosts = [
        Host(str(index), tuple(range(start, start + count)))
        for index, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    rounds = list(find_rounds(hosts))
    home = {rank: host.name for host in hosts for rank in host.ranks}
    assert all(a < b for pairs in rounds for a, b in pairs)
    for pairs in rounds:
        assert pairs
        assert max(Counter(rank for pair in pairs for rank in pair).values()) == 1
    met = Counter(tuple(sorted((home[a], home[b]))) for pairs in rounds for a, b in pairs)
    wanted = [(a.name, b.name) for i, a in enumerate(hosts) for b in hosts[i + 1 :]]
    assert met == Counter(wanted + [(host.name, host.name) for host in hosts if len(host.ranks) > 1])
    assert len(rounds) <= len(hosts) + 1  # pairs at once: not one round for every two servers


def test_four_servers_of_one_device_take_three_rounds() -> None:
    hosts = [Host(name, (rank,)) for rank, name in enumerate("abcd")]
    assert [sorted(pairs) for pairs in find_rounds(hosts)] == [
        [(0, 3), (1, 2)],
        [(0, 2), (1, 3)],
        [(0, 1), (2, 3)],
    ]


def test_without_horovod_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)  # what Python itself leaves for a module that may not be imported
    with pytest.raises(ClusterError, match="make horovod"):
        probe()


def test_importing_the_module_starts_neither_tensorflow_nor_horovod() -> None:
    program = "import sys, dapple_tf.profiler.links; sys.exit(bool({'tensorflow', 'horovod'} & set(sys.modules)))"
    run_python("-c", program)


@pytest.fixture
def main_on_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Path], int]:
    """Run the command as one rank of a job that has measured its links."""

    def run(rank: int, output: Path) -> int:
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(rank))
        monkeypatch.setattr(links, "probe", lambda: Cluster((Server("a", 2),), GB, Link(GB, MS), Link(GB, MS)))
        monkeypatch.setattr(links, "_import_horovod", lambda: (SimpleNamespace(rank=lambda: rank), None))
        monkeypatch.setattr(links, "_wait_for_all", lambda hvd, tf: None)
        return links.main(["-o", str(output)])

    return run


def test_rank_0_writes_the_cluster(main_on_rank: Callable[[int, Path], int], tmp_path: Path) -> None:
    assert [main_on_rank(rank, tmp_path / f"{rank}.yaml") for rank in (0, 1)] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["0.yaml"]
    assert Cluster.load(tmp_path / "0.yaml").devices == 2


def test_a_failure_to_write_is_one_line_on_rank_0(
    main_on_rank: Callable[[int, Path], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_on_rank(0, tmp_path / "nowhere" / "cluster.yaml") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "nowhere" in line
    assert not list(tmp_path.iterdir())


PROBE = """
import horovod.tensorflow as hvd
from dapple_tf.profiler.links import probe
hvd.init()
cluster = probe(server=f"server{min(hvd.rank(), 1)}", sizes=(4096, 1 << 20, 4 << 20), repeats=4, device_memory=5e9)
assert len(hvd.allgather_object(repr(cluster))) == hvd.size()  # Horovod still works, and no rank leaves early
print(repr(cluster))
"""


def read_cluster(text: str) -> Cluster:
    return eval(text, {"Cluster": Cluster, "Link": Link, "Server": Server})  # what our own program has printed


def assert_plausible(link: Link) -> None:
    """Check the order of magnitude: a wrong unit (milliseconds, bits) or a wrong size would be outside.

    Loopback reaches 0.4 to 4 GB/s here, and Horovod negotiates for about a millisecond; a busy machine takes longer.
    """
    assert 1e7 < link.bandwidth < 1e12
    assert 1e-6 < link.latency + 4096 / link.bandwidth < 1


@needs_horovod
def test_two_ranks_on_two_servers() -> None:
    first, second = run_ranks(["-c", PROBE], 2)
    assert first.stdout == second.stdout
    cluster = read_cluster(first.stdout)
    assert cluster.servers == (Server("server0", 1), Server("server1", 1))
    assert cluster.device_memory == 5e9
    assert_plausible(cluster.inter_server)
    assert not cluster.links


@needs_horovod
def test_three_ranks_on_two_servers() -> None:
    outputs = run_ranks(["-c", PROBE], 3)
    assert len({output.stdout for output in outputs}) == 1
    cluster = read_cluster(outputs[0].stdout)
    assert cluster.servers == (Server("server0", 1), Server("server1", 2))
    assert_plausible(cluster.inter_server)
    assert_plausible(cluster.intra_server)
    assert cluster.inter_server != cluster.intra_server  # each measured by itself
    assert not cluster.links


@needs_horovod
def test_the_command_writes_the_cluster(tmp_path: Path) -> None:
    outputs = run_ranks(["-m", "dapple_tf.profiler.links", "-o", str(tmp_path / "cluster.yaml")], 2)
    assert [output.stdout for output in outputs] == ["", ""]
    cluster = Cluster.load(tmp_path / "cluster.yaml")
    assert [server.devices for server in cluster.servers] == [2]
    assert_plausible(cluster.intra_server)
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yaml"]


@needs_horovod
def test_one_rank_has_no_link(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(["-m", "dapple_tf.profiler.links", "-o", str(tmp_path / "cluster.yaml")], 1)
    assert caught.value.exit_code == 1
    assert caught.value.ranks[0].stderr.splitlines()[-1].startswith("error: there is only one rank")
    assert "Traceback" not in caught.value.ranks[0].stderr
    assert not list(tmp_path.iterdir())


@needs_horovod
def test_a_file_that_cannot_be_written_is_reported_once(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(["-m", "dapple_tf.profiler.links", "-o", str(tmp_path / "nowhere" / "cluster.yaml")], 2)
    assert caught.value.exit_code == 1
    stderr = "".join(output.stderr for output in caught.value.ranks)
    assert stderr.count("error: ") == 1
    assert "nowhere" in stderr
    assert "Traceback" not in stderr
    assert not list(tmp_path.iterdir())
