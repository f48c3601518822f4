"""Emulate hosts on one machine: network namespaces on a bridge, with shaped links. Needs root and iproute2.

Names of namespaces and interfaces contain this process's id, so that several processes can emulate hosts at the same
time. All use the same addresses, which are not visible outside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_NETWORK = "10.77.0"
# Every kernel has Reno, and it fits the short queues of the shaped links. BBR, the default of some systems, fills them
# until they drop packets: MPI's sums of 8 MB at 100 Mbps sent 11% of their packets twice, with Reno 0.2%.
_CONGESTION_CONTROL = "reno"
# The longest queue of a link. Reason: the last packets of a message wait for those of other flows in it, and the cost
# model has no queueing delay. Real links queue for less than a millisecond; ``tbf`` would then drop packets at these
# rates. See the section contention of benchmarks/README.md for steps with 10 ms.
_LONGEST_QUEUE = "4ms"


@dataclass(frozen=True)
class Hosts:
    """Running hosts: their addresses, and the script with which mpirun starts processes there in place of ssh.

    ``slots``: ranks of a job on each host.
    """

    addresses: tuple[str, ...]
    agent: Path
    slots: int = 1

    def command(self) -> list[str]:
        """Return the command that, followed by a program, starts it as ``slots`` ranks per host."""
        network = f"{_NETWORK}.0/24"
        words = ["ip", "netns", "exec", _namespace(0)]
        words += ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-np", str(self.slots * len(self.addresses))]
        words += ["-H", ",".join(f"{address}:{self.slots}" for address in self.addresses)]
        words += ["--mca", "plm_rsh_agent", str(self.agent), "--mca", "btl", "tcp,self"]
        words += ["--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network]
        return [*words, "-x", "PYTHONPATH", "-x", "TF_CPP_MIN_LOG_LEVEL", "-wdir", str(Path.cwd())]

    def cut_off(self, host: int) -> None:
        """Disconnect the host from the network, as if its cable were pulled."""
        _run("ip", "link", "set", _outside(host), "down")

    def mpirun(self, arguments: Sequence[str], timeout: float, variables: Mapping[str, str] | None = None) -> str:
        """Run ``python arguments`` as ``slots`` ranks per host; return what rank 0 printed.

        ``variables``: of the environment, to set on every rank. Raises RuntimeError with the end of the errors where a
        rank fails.
        """
        further = dict(variables or {})
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "TF_CPP_MIN_LOG_LEVEL": "3", **further}
        options = [word for name in further for word in ("-x", name)]
        inside = [*self.command(), *options, sys.executable, *arguments]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed on the emulated hosts:\n{done.stderr[-3000:]}")
        return done.stdout


def find_missing_requirement() -> str | None:
    """Return why hosts cannot be emulated here, or None if they can."""
    missing = [program for program in ("ip", "tc", "mpirun") if shutil.which(program) is None]
    if missing:
        return f"hosts on one machine need {' and '.join(missing)} (iproute2, Open MPI)"
    try:
        _run("ip", "netns", "add", _namespace(0))
        _run("ip", "netns", "del", _namespace(0))
    except RuntimeError as error:
        return str(error)
    return None


@contextlib.contextmanager
def emulated_hosts(
    count: int, rate: str, *, burst: float = 0.005, retransmissions: int | None = None, slots: int = 1
) -> Iterator[Hosts]:
    """Emulate ``count`` hosts with interfaces of ``rate`` (in tc's syntax: ``1gbit``) in each direction, in the block.

    ``burst``: the seconds' worth of bytes that pass at once after a pause; choose it below the transfers to be timed.
    ``retransmissions``: how often TCP retries before it closes a connection. The system's default of 15 takes a quarter
    of an hour, and so long mpirun takes to notice that a host is gone; 4 take 6 s. ``slots``: see ``Hosts``.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            _run("ip", "link", "add", _bridge(), "type", "bridge")
            _run("ip", "link", "set", _bridge(), "up")
            for host in range(count):
                _add_host(host, rate, burst)
                _set_tcp(host, "tcp_congestion_control", _CONGESTION_CONTROL)
                # Reason: pipelines pause between messages, and after a pause of 200 ms a connection would start slowly.
                _set_tcp(host, "tcp_slow_start_after_idle", "0")
                if retransmissions is not None:
                    _set_tcp(host, "tcp_retries2", str(retransmissions))
            yield Hosts(tuple(_address(host) for host in range(count)), _write_agent(Path(folder)), slots)
        finally:
            for host in range(count):
                subprocess.run(["ip", "netns", "del", _namespace(host)], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", _bridge()], check=False, capture_output=True)


def _bridge() -> str:
    return f"dp{os.getpid()}br"


def _namespace(host: int) -> str:
    return f"dp{os.getpid()}n{host}"


def _outside(host: int) -> str:
    """Return the name of the bridge's end of the host's link."""
    return f"dp{os.getpid()}o{host}"


def _address(host: int) -> str:
    return f"{_NETWORK}.{host + 1}"


def _add_host(host: int, rate: str, burst: float) -> None:
    name, outside = _namespace(host), _outside(host)
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
    _run("ip", "link", "set", outside, "master", _bridge(), "up")
    inside = ("ip", "netns", "exec", name)
    _run(*inside, "ip", "addr", "add", f"{_address(host)}/24", "dev", "eth0")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    _run(*inside, "ip", "link", "set", "lo", "up")
    shape = ("root", "tbf", "rate", rate, "burst", _burst(rate, burst), "latency", _LONGEST_QUEUE)
    _run(*inside, "tc", "qdisc", "replace", "dev", "eth0", *shape)  # outgoing
    _run("tc", "qdisc", "replace", "dev", outside, *shape)  # incoming


def _set_tcp(host: int, setting: str, value: str) -> None:
    _run("ip", "netns", "exec", _namespace(host), "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}")


def _burst(rate: str, seconds: float) -> str:
    """Return the bytes that ``rate`` passes in ``seconds``.

    Short queues need short bursts: with queues of 100 ms, MPI's sums of large tensors reached 127 of 200 Mbps; with
    queues of 10 ms, as they were before, and bursts of 5 ms, 190.
    """
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    number, unit = rate[:-4], rate[-4:]
    return f"{int(float(number) * units[unit] * seconds / 8)}"


def _write_agent(folder: Path) -> Path:
    """Write a script with ssh's arguments (options, host, command) that runs the command in the host's namespace."""
    agent = folder / "agent"
    agent.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        f"host={_namespace(0)[:-1]}$(( ${{1##*.}} - 1 )); shift\n"
        'exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"\n'
    )
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    return agent


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()} (emulated hosts need root and iproute2)")
