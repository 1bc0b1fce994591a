"""Which address a rank advertises."""

from __future__ import annotations

import pytest

from mdas import network
from mdas.errors import ConfigurationError
from mdas.network import Interface, choose

HOST = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.0.0.5"),
    Interface("ib0", "10.1.0.5"),
    Interface("ib1", "10.1.1.5"),
    Interface("docker0", "172.17.0.1"),
    Interface("lo", "::1"),
    Interface("ib0", "fd00::5"),
]


@pytest.mark.parametrize(
    ("spec", "routed", "chosen"),
    [
        (None, "10.0.0.5", "10.0.0.5"),
        ("", "10.0.0.5", "10.0.0.5"),
        ("ib", "10.0.0.5", "10.1.0.5"),
        ("ib", "10.1.1.5", "10.1.1.5"),
        ("ib1", "10.1.0.5", "10.1.1.5"),
        ("=ib", "10.0.0.5", None),
        ("=ib0", "10.0.0.5", "10.1.0.5"),
        ("ens3, eth", "10.1.0.5", "10.0.0.5"),
        ("eth,ib", "10.1.0.5", "10.0.0.5"),
        ("lo", "10.0.0.5", "127.0.0.1"),
        ("^docker,eth", "10.1.1.5", "10.1.1.5"),
        ("^docker,eth", "10.0.0.5", "10.1.0.5"),
        ("^eth,ib,docker", "10.0.0.5", "127.0.0.1"),
        ("^nothing", "127.0.0.1", "127.0.0.1"),
        ("ib", "::1", "fd00::5"),
        ("eth", "::1", None),
        ("^lo,eth,ib,docker", "10.0.0.5", None),
    ],
)
def test_choice_of_an_interface(spec: str | None, routed: str, chosen: str | None) -> None:
    if chosen is not None:
        assert choose(HOST, spec, routed) == chosen
        return
    with pytest.raises(ConfigurationError) as caught:
        choose(HOST, spec, routed)
    assert str(caught.value).startswith(f"MDAS_SOCKET_IFNAME={spec}: ")
    for interface in HOST:
        assert f"{interface.name} ({interface.address})" in str(caught.value)


def test_this_hosts_interfaces_have_loopback() -> None:
    assert Interface("lo", "127.0.0.1") in network.interfaces()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_meeting_on_loopback_means_that_all_are_here(host: str) -> None:
    assert network.advertised_address(host, 29500, None, all_on_this_host=False) in ("127.0.0.1", "::1")


def test_a_name_that_does_not_resolve_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=r"no-such-host\.invalid.*MASTER_ADDR"):
        network.routed_address("no-such-host.invalid", 29500)
