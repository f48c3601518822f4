"""Hosts on one machine: network namespaces joined by a bridge, their links shaped. Needs root and iproute2."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_NETWORK = "10.77.0"
_BRIDGE = "dapplebr"


@dataclass(frozen=True)
class Hosts:
    """Started hosts: their addresses, and the script that mpirun enters one with in place of ssh."""

    addresses: tuple[str, ...]
    agent: Path

    def mpirun(self, arguments: Sequence[str], timeout: float) -> str:
        """Run ``python arguments`` as one rank a host; what rank 0 printed.

        Raises RuntimeError with the end of the errors where it fails.
        """
        network = f"{_NETWORK}.0/24"
        command = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "-np", str(len(self.addresses))]
        command += ["-H", ",".join(f"{address}:1" for address in self.addresses)]
        command += ["--mca", "plm_rsh_agent", str(self.agent), "--mca", "btl", "tcp,self"]
        command += ["--mca", "btl_tcp_if_include", network, "--mca", "oob_tcp_if_include", network]
        command += ["-x", "PYTHONPATH", "-x", "TF_CPP_MIN_LOG_LEVEL", "-wdir", str(Path.cwd())]
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "TF_CPP_MIN_LOG_LEVEL": "3"}
        inside = ["ip", "netns", "exec", _namespace(0), *command, sys.executable, *arguments]
        done = subprocess.run(inside, capture_output=True, text=True, timeout=timeout, env=environment, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)} failed on the emulated hosts:\n{done.stderr[-3000:]}")
        return done.stdout


@contextlib.contextmanager
def emulated_hosts(count: int, rate: str) -> Iterator[Hosts]:
    """``count`` hosts whose interfaces pass ``rate`` (as tc writes it: ``1gbit``) each way; gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _run("ip", "link", "add", _BRIDGE, "type", "bridge")
            _run("ip", "link", "set", _BRIDGE, "up")
            for host in range(count):
                _add_host(host, rate)
            yield Hosts(tuple(_address(host) for host in range(count)), _write_agent(Path(folder)))
        finally:
            for host in range(count):
                subprocess.run(["ip", "netns", "del", _namespace(host)], check=False, capture_output=True)
            subprocess.run(["ip", "link", "del", _BRIDGE], check=False, capture_output=True)


def _namespace(host: int) -> str:
    return f"dapple{host}"


def _address(host: int) -> str:
    return f"{_NETWORK}.{host + 1}"


def _add_host(host: int, rate: str) -> None:
    name, outside = _namespace(host), f"dapple{host}o"
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
    _run("ip", "link", "set", outside, "master", _BRIDGE, "up")
    inside = ("ip", "netns", "exec", name)
    _run(*inside, "ip", "addr", "add", f"{_address(host)}/24", "dev", "eth0")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    _run(*inside, "ip", "link", "set", "lo", "up")
    shape = ("root", "tbf", "rate", rate, "burst", "512kb", "latency", "100ms")
    _run(*inside, "tc", "qdisc", "replace", "dev", "eth0", *shape)  # what leaves the host
    _run("tc", "qdisc", "replace", "dev", outside, *shape)  # what enters it


def _write_agent(folder: Path) -> Path:
    """A script with ssh's arguments (options, host, command) that enters the host's namespace, under its own name."""
    agent = folder / "agent"
    agent.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        "host=dapple$(( ${1##*.} - 1 )); shift\n"
        'exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"\n'
    )
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    return agent


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()} (emulated hosts need root and iproute2)")
