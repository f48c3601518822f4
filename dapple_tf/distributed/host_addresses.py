"""Find the addresses of this host over which the ranks of a job reach it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

_ANY_PORT = 9  # nothing is sent to it


def own_addresses() -> tuple[str, ...]:
    """Return this host's addresses without link-local ones, sorted."""
    import psutil  # a dependency of Horovod, which is installed when this is called

    return tuple(
        sorted(
            entry.address
            for entries in psutil.net_if_addrs().values()
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith("fe80:")
        )
    )


def choose_addresses(own: Sequence[str], others: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return the addresses among a host's ``own`` at which to listen for ranks whose hosts have the ``others``.

    The loopback address if all are on this host; else those from which the system sends to the other hosts' addresses,
    IPv4 first; all but the loopback where it knows no way.
    """
    if all(set(addresses) == set(own) for addresses in others):
        return tuple(filter(is_loopback, own))[:1] or tuple(own)
    remote = {address for addresses in others for address in addresses} - set(own)
    found = {_address_towards(address) for address in remote} & set(own)
    usable = [address for address in found if not is_loopback(address)]
    return tuple(
        sorted(usable or (a for a in own if not is_loopback(a)), key=lambda address: (":" in address, address))
    )


def is_loopback(address: str) -> bool:
    """Return whether an address leads to the own host only."""
    return address.startswith("127.") or address == "::1"


def _address_towards(address: str) -> str:
    """Return the own address from which the system would send to ``address``; "" where there is no way."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, _ANY_PORT))  # sends nothing: it is UDP
            return str(probe.getsockname()[0])
    except OSError:
        return ""
