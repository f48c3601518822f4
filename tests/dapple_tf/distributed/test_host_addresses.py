"""The addresses at which rank 0 listens."""

from __future__ import annotations

import ipaddress

from dapple_tf.distributed.places import choose_addresses, own_addresses

HOST = ("10.0.0.1", "127.0.0.1", "::1", "fd00::1")


def test_ranks_of_one_host_meet_at_its_loopback() -> None:
    assert choose_addresses(HOST, [HOST, HOST]) == ("127.0.0.1",)


def test_ranks_of_other_hosts_are_met_where_the_system_sends_to_them() -> None:
    """This machine sends to any address from one of its own; a network that both hosts have a bridge for is no way."""
    own = own_addresses()
    found = choose_addresses(own, [(*own, "192.0.2.77")])
    assert set(found) <= set(own)
    assert not any(ipaddress.ip_address(address).is_loopback for address in found)
    outside = [address for address in own if not ipaddress.ip_address(address).is_loopback]
    assert len(found) <= max(1, len(outside))


def test_where_the_system_knows_no_way_all_addresses_but_the_loopback_are_tried() -> None:
    assert choose_addresses(HOST, [("300.0.0.1",)]) == ("10.0.0.1", "fd00::1")


def test_the_addresses_are_those_of_this_host() -> None:
    assert "127.0.0.1" in own_addresses()
