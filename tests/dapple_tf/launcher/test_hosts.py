"""The hosts of a job: lists and scripts that name them, and which of them answer."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from dapple_tf.distributed.startup_watch import ProcessState, state_of
from dapple_tf.errors import ClusterError
from dapple_tf.launcher.hosts import Host, find_answering, read_hosts


def write(path: Path, text: str, *, executable: bool = False) -> Path:
    path.write_text(text)
    path.chmod(0o755 if executable else 0o644)
    return path


def test_a_list_of_hosts_is_read_in_its_order(tmp_path: Path) -> None:
    text = "# two forms\nnode1 slots=8\n\nnode2.example.org:4  # of Horovod\n10.0.0.3\nnode4 slots = 0\n"
    hosts = read_hosts(write(tmp_path / "hosts", text))
    assert hosts == (Host("node1", 8), Host("node2.example.org", 4), Host("10.0.0.3", 1))


def test_a_script_prints_the_hosts(tmp_path: Path) -> None:
    script = write(tmp_path / "discover.sh", "#!/bin/sh\necho node1:2\necho node2:3\n", executable=True)
    assert read_hosts(script) == (Host("node1", 2), Host("node2", 3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 slots=two\n", r"hosts, line 1: 'node1 slots=two' names no host: write name slots=n, or name:n"),
        ("node1\nnode1:2\n", r"line 2: host node1 is named twice: add up its slots in one line"),
        ("# nobody\n", r"hosts names no host with a slot: write name slots=n"),
        ("node1 slots=0\n", r"names no host with a slot"),
        ("-oProxyCommand=x:1\n", r"line 1: .* names no host"),
        ("-x slots=1\n", r"line 1: .* names no host"),  # ssh would take it as an option
    ],
)
def test_a_list_that_is_wrong_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        read_hosts(write(tmp_path / "hosts", text))


def test_a_list_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"nowhere cannot be read: No such file"):
        read_hosts(tmp_path / "nowhere")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match=r"binary cannot be read: it is not UTF-8 text"):
        read_hosts(tmp_path / "binary")
    with pytest.raises(ClusterError, match=r"the file of hosts n+ cannot be read: File name too long"):
        read_hosts("n" * 300)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ClusterError, match=r"pipe is no regular file: the hosts are read from it again at each start"):
        read_hosts(tmp_path / "pipe")


def test_a_script_may_leave_something_in_the_background(tmp_path: Path) -> None:
    script = write(tmp_path / "discover", "#!/bin/sh\nsleep 30 &\necho node1:2\n", executable=True)
    assert read_hosts(script, seconds=20) == (Host("node1", 2),)


def test_all_processes_of_a_script_that_hangs_are_ended(tmp_path: Path) -> None:
    text = f"#!/bin/sh\nsleep 30 &\necho $! > {tmp_path}/number\nwait\n"
    with pytest.raises(ClusterError, match="has not named the hosts after 3 s"):
        read_hosts(write(tmp_path / "discover", text, executable=True), seconds=3)
    number = int((tmp_path / "number").read_text())
    end = time.monotonic() + 10  # the signal is sent; the kernel may take its time
    while state_of([number]) != ProcessState.ENDED:
        assert time.monotonic() < end
        time.sleep(0.05)  # it is no child of this process, which could wait for it


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#!/bin/sh\necho 'no such queue' >&2\nexit 3\n", r"discover failed with exit code 3: 'no such queue'"),
        ("#!/bin/sh\necho '<html>'\n", r"the output of .*discover, line 1: '<html>' names no host"),
        ("#!/bin/sh\nyes\n", r"discover prints more than 1 MiB: it must print the hosts and end"),
        ("#!/bin/sh\nsleep 30\n", r"discover has not named the hosts after 0.5 s: it must print them and end"),
        ("node1:2\n", r"discover is executable but cannot be run \(Exec format error\): begin a script with #!"),
    ],
)
def test_a_script_that_fails_is_refused(tmp_path: Path, script: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        read_hosts(write(tmp_path / "discover", script, executable=True), seconds=0.5 if "sleep" in script else 30)


def test_a_host_answers_if_a_command_runs_there(tmp_path: Path) -> None:
    agent = write(tmp_path / "agent", '#!/bin/sh\n[ "$1" = up ] && shift && "$@"\n', executable=True)
    silent = write(tmp_path / "silent", "#!/bin/sh\nsleep 30\n", executable=True)
    hosts = (Host("down", 1), Host("up", 2), Host("localhost", 3), Host(socket.gethostname(), 4))
    answering = find_answering(hosts, {"OMPI_MCA_plm_rsh_agent": str(agent)})
    assert [host.slots for host in answering] == [2, 3, 4]
    assert find_answering(hosts[:2], {"OMPI_MCA_plm_rsh_agent": str(silent)}, seconds=0.3) == ()


def test_the_agent_is_chosen_as_mpirun_chooses_it(tmp_path: Path) -> None:
    agent = write(tmp_path / "agent", '#!/bin/sh\n[ "$1" = up ] && shift && "$@"\n', executable=True)
    hosts = (Host("up", 2),)
    assert find_answering(hosts, {"OMPI_MCA_plm_rsh_agent": f"{tmp_path}/nowhere : {agent}"}) == hosts
    with pytest.raises(ClusterError, match=r"OMPI_MCA_plm_rsh_agent=.ssh -o 'A.: No closing quotation"):
        find_answering(hosts, {"OMPI_MCA_plm_rsh_agent": "ssh -o 'A"})


def test_an_agent_of_no_words_is_that_of_a_user_who_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "ssh", '#!/bin/sh\n[ "$5" = up ]\n', executable=True)
    write(tmp_path / "up", "#!/bin/sh\n", executable=True)  # must not be run in place of the agent
    write(tmp_path / "down", "#!/bin/sh\n", executable=True)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = (Host("up", 1), Host("down", 1))
    assert find_answering(hosts, {"OMPI_MCA_plm_rsh_agent": " : "}) == hosts[:1]
