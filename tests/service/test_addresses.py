"""What is this machine, and what only looks like it."""

from __future__ import annotations

import pytest

from engine.service.addresses import is_local_name, is_loopback, network_of


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"])
def test_addresses_of_this_machine_alone(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "::ffff:10.0.0.1", "fe80::1%eth0", "", "localhost.evil"])
def test_addresses_that_others_have_or_reach(host: str) -> None:
    assert not is_loopback(host)


def test_a_name_that_a_page_cannot_have_is_local() -> None:
    for host in ("", "localhost", "LOCALHOST:1", "a.localhost", "127.0.0.1:8000", "[::1]:8000", "192.0.2.1"):
        assert is_local_name(host), host
    for host in ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[::1].evil", "a:b", "localhost:"):
        assert not is_local_name(host), host


def test_a_host_is_an_address_or_a_network_of_ipv6() -> None:
    assert network_of("192.0.2.1") == "192.0.2.1" == network_of("::ffff:192.0.2.1")
    assert network_of("2001:db8::1") == network_of("2001:db8::2") == "2001:db8::/64"
    assert network_of("a socket") == "a socket"
