"""Hosts on one machine: network namespaces joined by a bridge, their links shaped. Needs root and iproute2.

Names of namespaces and interfaces begin with this process's number, so that several processes may have hosts at the
same time; all have the same addresses, which nobody else sees.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NETWORK = "10.77.0"


@dataclass(frozen=True)
class Hosts:
    """Started hosts: their addresses, and the script that mpirun enters one with in place of ssh."""

    addresses: tuple[str, ...]
    agent: Path

    def command(self) -> list[str]:
        """The words before the program's own that start it as one rank a host."""
        network = f"{_NETWORK}.0/24"
        words = ["ip", "netns", "exec", _namespace(0)]
        words += ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-np", str(len(self.addresses))]
        words += ["-H", ",".join(f"{address}:1" for address in self.addresses)]
        words += ["--mca", "plm_rsh_agent", str(self.agent), "--mca", "btl", "tcp,self"]
        words += ["--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network]
        return [*words, "-x", "PYTHONPATH", "-x", "TF_CPP_MIN_LOG_LEVEL", "-wdir", str(Path.cwd())]

    def cut_off(self, host: int) -> None:
        """Take the host off the network, as if its cable were pulled."""
        _run("ip", "link", "set", _outside(host), "down")

    def mpirun(self, arguments: Sequence[str], timeout: float) -> str:
        """Run ``python arguments`` as one rank a host; what rank 0 printed.

        Raises RuntimeError with the end of the errors where it fails.
        """
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "TF_CPP_MIN_LOG_LEVEL": "3"}
        inside = [*self.command(), sys.executable, *arguments]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed on the emulated hosts:\n{done.stderr[-3000:]}")
        return done.stdout


def find_hindrance() -> str | None:
    """Why no hosts can be made here; None where they can."""
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
    count: int, rate: str, *, burst: float = 0.005, retransmissions: int | None = None
) -> Iterator[Hosts]:
    """``count`` hosts whose interfaces pass ``rate`` (as tc writes it: ``1gbit``) each way; gone afterwards.

    ``burst``: after a pause, so many seconds' worth of bytes pass at once; less than the transfers that are timed.
    ``retransmissions``: so often TCP tries before it gives a connection up. The system's 15 take a quarter of an hour,
    and so does mpirun to notice that a host has gone; 4 take 6 s.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            _run("ip", "link", "add", _bridge(), "type", "bridge")
            _run("ip", "link", "set", _bridge(), "up")
            for host in range(count):
                _add_host(host, rate, burst)
                if retransmissions is not None:
                    setting = f"echo {retransmissions} > /proc/sys/net/ipv4/tcp_retries2"
                    _run("ip", "netns", "exec", _namespace(host), "sh", "-c", setting)
            yield Hosts(tuple(_address(host) for host in range(count)), _write_agent(Path(folder)))
        finally:
            for host in range(count):
                subprocess.run(["ip", "netns", "del", _namespace(host)], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", _bridge()], check=False, capture_output=True)


def _bridge() -> str:
    return f"dp{os.getpid()}br"


def _namespace(host: int) -> str:
    return f"dp{os.getpid()}n{host}"


def _outside(host: int) -> str:
    """The end of the host's link that is plugged into the bridge."""
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
    shape = ("root", "tbf", "rate", rate, "burst", _burst(rate, burst), "latency", "10ms")
    _run(*inside, "tc", "qdisc", "replace", "dev", "eth0", *shape)  # what leaves the host
    _run("tc", "qdisc", "replace", "dev", outside, *shape)  # what enters it


def _burst(rate: str, seconds: float) -> str:
    """What so many seconds pass, in bytes.

    In queues of 100 ms, MPI's sums of large tensors reached 127 of 200 Mbps, in those of 10 ms and bursts of 5 ms 190.
    """
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
    number, unit = rate[:-4], rate[-4:]
    return f"{int(float(number) * units[unit] * seconds / 8)}"


def _write_agent(folder: Path) -> Path:
    """A script with ssh's arguments (options, host, command) that enters the host's namespace, under its own name."""
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
